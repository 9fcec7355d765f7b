"""Compares training with packed rows and with one pair per row: speed, and held-out masked-LM loss by tokens seen.

    python tests/benchmarks/packing_curve.py --corpus runs/corpus --init_from runs/bert --workdir runs/packing

Both runs train on the same pairs and on equally many tokens per step, so batches with one pair per row have more rows.
For each seed, the two runs are trained one after the other; interrupted runs resume. Held-out rows are never packed.
The speed is the median over the log lines of a run, and speeds are compared between the two runs of a seed.
"""

import argparse
import statistics
import subprocess
from pathlib import Path

import numpy as np
from measuring import BERTJAX, parser_of
from packing import lengths_of

from bertjax.data.corpus.store import open_corpus
from bertjax.data.pretraining.config import MAX_PAIRS_PER_ROW
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.training.metrics import read_lines

EVALUATIONS = 6


def tokens_per_row(corpus: str, seq_len: int, pairs_per_row: int) -> float:
    index = open_pair_index(open_corpus(corpus), "train", seq_len, 0, 1, pairs_per_row)
    return int(lengths_of(index, seq_len).sum()) / int(index.pass_ends[-1])


def train(args: argparse.Namespace, workdir: Path, seed: int, packing: bool, rows: int, steps: int) -> None:
    every = steps // EVALUATIONS
    fields = {
        **{"seed": seed, "steps": steps, "log_every": 10, "eval_every": every, "checkpoint_every": every},
        **{"data.packing": packing, "data.batch_size": rows, "data.eval_rows": args.eval_rows, "data.dupe_factor": 1},
        **{"optimizer.learning_rate": args.learning_rate, "optimizer.warmup_steps": steps // 10, "optimizer.b2": 0.98},
        **{"model.dtype": "float32", "model.scan_layers": "false"},
        **dict.fromkeys(("model.hidden_dropout_prob", "model.attention_probs_dropout_prob"), 0.0),
    }
    config = f"--config=pretrain:size={args.size},seq_len={args.seq_len},corpus={args.corpus}"
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    flags += [f"--init_from={args.init_from}"] if args.init_from else []
    subprocess.run([*BERTJAX, "train", f"--workdir={workdir}", config, *flags], check=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--init_from", default="")
    parser.add_argument("--size", default="L2_H128")
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8, help="rows per packed batch (default: 8)")
    parser.add_argument("--tokens", type=float, default=6e6, help="tokens per run, without padding (default: 6e6)")
    parser.add_argument("--eval_rows", type=int, default=512)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    filled = {
        packing: tokens_per_row(args.corpus, args.seq_len, MAX_PAIRS_PER_ROW if packing else 1) for packing in (0, 1)
    }
    rows = {1: args.rows, 0: round(args.rows * filled[1] / filled[0])}
    steps = int(args.tokens / (args.rows * filled[1])) // EVALUATIONS * EVALUATIONS
    curves: dict[int, list[np.ndarray]] = {0: [], 1: []}
    speeds: dict[int, list[float]] = {0: [], 1: []}
    for seed in range(args.seeds):
        for packing in (0, 1):
            workdir = args.workdir / f"{'packed' if packing else 'alone'}-{seed}"
            train(args, workdir, seed, bool(packing), rows[packing], steps)
            held_out = [line for line in read_lines(workdir / "metrics.jsonl") if "eval_mlm_loss" in line]
            curves[packing].append(np.array([[line["tokens"], line["eval_mlm_loss"]] for line in held_out]))
            timed = [line["tokens_per_second"] for line in read_lines(workdir / "timing.jsonl")[1:]]
            speeds[packing].append(statistics.median(timed))
    marks = min((curve[:, 0] for both in curves.values() for curve in both), key=lambda tokens: tokens[-1])
    # Interpolate the losses at equal numbers of tokens, since batches differ by a few tokens.
    losses = {packing: np.array([np.interp(marks, *curve.T) for curve in found]) for packing, found in curves.items()}
    print(f"batches of {rows[0]} rows with one pair, {100 * filled[0] / args.seq_len:.1f} % tokens; ", end="")
    print(f"batches of {rows[1]} packed rows, {100 * filled[1] / args.seq_len:.1f} % tokens; {args.seeds} seeds each")
    print("| million tokens | one pair per row | packed | difference |\n|---|---|---|---|")
    for index, mark in enumerate(marks):
        alone, packed = losses[0][:, index], losses[1][:, index]
        difference = packed - alone
        shown = [f"{values.mean():.3f} ±{values.std(ddof=1):.3f}" for values in (alone, packed, difference)]
        print(f"| {mark / 1e6:.2f} | " + " | ".join(shown) + " |")
    ratios = [packed / alone for alone, packed in zip(speeds[0], speeds[1], strict=True)]
    print(f"tokens/s without padding, one pair per row: {', '.join(f'{speed:,.0f}' for speed in speeds[0])}")
    print(f"tokens/s without padding, packed: {', '.join(f'{speed:,.0f}' for speed in speeds[1])}")
    print(f"packed rows are {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
