"""Measures the token fraction of rows with one sentence pair and of packed rows, and the time to build the pair index.

    python tests/benchmarks/packing.py --corpus runs/corpus --seq_len 128 512 --seed 7
    python tests/benchmarks/packing.py --corpus runs/corpus --seq_len 128 512 1024 --seed 7 --documents

`fill_at_most` is an upper bound of the token fraction for any packing. An existing pair index is only read, so use a
new seed for each measurement of the time.
"""

import json
import time

import numpy as np
from measuring import parser_of

from bertjax.data.corpus.store import open_corpus
from bertjax.data.pretraining.config import PAIR_SPECIAL_TOKENS, TEXT_SPECIAL_TOKENS, Phase, RowFormat
from bertjax.data.pretraining.pair_index import PairIndex, open_pair_index
from bertjax.data.pretraining.pairs import NEXT_SENTENCE


def lengths_of(index: PairIndex, seq_len: int, paired: bool = True) -> np.ndarray:
    """Returns the number of tokens of each pair or piece of a document, int64 [pairs]."""
    lengths = index.records["a_length"].astype(np.int64) + index.records["b_length"]
    lengths += PAIR_SPECIAL_TOKENS if paired else TEXT_SPECIAL_TOKENS
    return lengths.clip(max=seq_len)


def fewest_rows(lengths: np.ndarray, seq_len: int) -> int:
    """Returns a lower bound of the number of rows for any packing of undivided pairs.

    This is the bound L2 of Martello and Toth (Lower bounds and reduction procedures for the bin packing problem, 1990).
    Each pair longer than half a row needs its own row. The other pairs with at least `short` tokens fill the rows that
    have at least `short` free positions, and further rows. The bound is the maximum over all values of `short`.
    """
    pairs = np.bincount(lengths, minlength=seq_len + 1)
    tokens = pairs * np.arange(seq_len + 1)
    half = seq_len // 2
    return max(
        int(pairs[half + 1 :].sum() + max(0, -(-(tokens[short : seq_len - short + 1].sum() - room) // seq_len)))
        for short in range(half + 1)
        for room in [seq_len * pairs[half + 1 : seq_len - short + 1].sum()]
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--seq_len", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--documents", action="store_true", help="packs documents instead of sentence pairs")
    args = parser.parse_args()
    corpus = open_corpus(args.corpus)
    for seq_len in args.seq_len:
        for packed in (False, True):
            pairing = "" if args.documents else NEXT_SENTENCE
            pairs_per_row = Phase(seq_len, 1, 1, 0, 1, RowFormat(pairing, packed)).max_sequences_per_row
            begin = time.perf_counter()
            index = open_pair_index(corpus, "train", seq_len, args.seed, args.passes, pairs_per_row, pairing)
            seconds = time.perf_counter() - begin
            rows = int(index.pass_ends[-1])
            lengths = lengths_of(index, seq_len, not args.documents)
            fewest = len(lengths) if pairs_per_row == 1 else fewest_rows(lengths, seq_len)
            figures = {"seq_len": seq_len, "pairs_per_row": pairs_per_row, "pairs": len(lengths), "rows": rows}
            full = lengths.sum() / seq_len  # Number of rows if there were no padding.
            fills = {"token_fraction": round(full / rows, 4), "fill_at_most": round(full / fewest, 4)}
            print(json.dumps({**figures, **fills, "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
