"""Measures the speed of `bertjax prepare` with the local runner and with Beam, and of Hugging Face's `encode_batch`.

    python tests/benchmarks/prepare.py --input 'wiki:wikipedia/AA/wiki_[0-4]*' --vocab vocab.txt --rounds 3

Each round runs all cases one after the other, so that other load slows all cases equally; the median of each case is
printed. A run of `bertjax prepare` is measured from the start of Python to the last checksum. The "bare encode" only
calls `encode_batch` of Hugging Face's BertWordPieceTokenizer, on all cores, for paragraphs in memory. It excludes
reading, splitting into sentences, the held-out split and writing. Beam is skipped if it is not installed.
"""

import importlib.util
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

from measuring import BERTJAX, parser_of, run

_BATCH = 4096


def bare_encode_seconds(specs: list[str], vocabulary: str) -> tuple[float, int]:
    """Returns the seconds to encode all paragraphs of the inputs, and the number of tokens."""
    from tokenizers import BertWordPieceTokenizer

    from bertjax.data.corpus import readers

    tokenizer = BertWordPieceTokenizer(vocabulary)
    sources = readers.find_sources(specs)[0]
    texts = (text.text for source in sources for text in readers.read(source, Counter(), lambda _: None))
    paragraphs = [line for text in texts for line in text.split("\n") if line]
    begin = time.perf_counter()
    tokens = 0
    for start in range(0, len(paragraphs), _BATCH):
        encoded = tokenizer.encode_batch(paragraphs[start : start + _BATCH], add_special_tokens=False)
        tokens += sum(len(encoding) for encoding in encoded)
    return time.perf_counter() - begin, tokens


def prepare_seconds(specs: list[str], vocabulary: str, folder: Path, *options: str) -> tuple[float, int, int]:
    """Returns the seconds of a run of `prepare`, and the numbers of tokens and bytes of text."""
    output = folder / "corpus"
    command = (*BERTJAX, "prepare", "--input", *specs, "--vocab", vocabulary, *options)
    seconds = run(*command, f"--output={output}", "--overwrite")[1]
    splits = json.loads((output / "manifest.json").read_text())["splits"].values()
    return seconds, sum(split["tokens"] for split in splits), sum(split["text_bytes"] for split in splits)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--input", nargs="+", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    runs = {f"--workers {workers}": [f"--workers={workers}"] for workers in (1, 2)}
    if importlib.util.find_spec("apache_beam"):
        runs |= {f"--runner beam {name}": ["--runner=beam", *options] for name, options in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("tokenizers encode_batch", *runs)}
    tokens: dict[str, int] = {}
    text_bytes = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            spent, tokens["tokenizers encode_batch"] = bare_encode_seconds(args.input, args.vocab)
            seconds["tokenizers encode_batch"].append(spent)
            for name, options in runs.items():
                spent, tokens[name], text_bytes = prepare_seconds(args.input, args.vocab, Path(folder), *options)
                seconds[name].append(spent)
    bare = statistics.median(seconds["tokenizers encode_batch"])
    print(f"{text_bytes / 1e6:.1f} MB of text, median of {args.rounds}")
    for name, each in seconds.items():
        median = statistics.median(each)
        rates = f"{text_bytes / 1e6 / median:5.2f} MB/s  {tokens[name] / median / 1e6:5.2f} M tokens/s"
        print(f"{name:26} {median:6.1f} s  {rates}  {bare / median:4.2f} x bare encode")


if __name__ == "__main__":
    main()
