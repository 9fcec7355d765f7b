"""How full rows are with sentence pairs one a row and packed, and how long making their plan takes.

    python tests/benchmarks/packing.py --corpus runs/corpus --seq_len 128 512 --seed 7

A plan that is there already is only read: take another seed for each time.
"""

import argparse
import json
import time

from bertjax.corpus.store import open_corpus
from bertjax.data.pretraining.plan import PairPlan, pair_plan
from bertjax.data.pretraining.settings import PAIRS_A_ROW, SPECIAL_TOKENS_OF_PAIR


def tokens_of(plan: PairPlan, seq_len: int) -> int:
    """Real tokens of all rows."""
    lengths = plan.records["a_length"].astype(int) + plan.records["b_length"] + SPECIAL_TOKENS_OF_PAIR
    return int(lengths.clip(max=seq_len).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--seq_len", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    corpus = open_corpus(args.corpus)
    for seq_len in args.seq_len:
        for pairs_a_row in (1, PAIRS_A_ROW):
            begin = time.perf_counter()
            plan = pair_plan(corpus, "train", seq_len, args.seed, args.passes, pairs_a_row)
            seconds = time.perf_counter() - begin
            rows = int(plan.pass_ends[-1])
            fill = tokens_of(plan, seq_len) / (rows * seq_len)
            told = {"seq_len": seq_len, "pairs_a_row": pairs_a_row, "pairs": len(plan.records), "rows": rows}
            print(json.dumps({**told, "fill": round(fill, 4), "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
