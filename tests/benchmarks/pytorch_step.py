"""Compares a pre-training step with Hugging Face's PyTorch BERT on the CPUs of this machine.

    python tests/benchmarks/pytorch_step.py --size base --rows 8 --seq_len 128 --rounds 3

Both compute in float32 on all cores with a dropout rate of 0.1: forward and backward pass of masked LM and
next-sentence prediction, gradients clipped to norm 1, an AdamW update. `BertForPreTraining` computes logits of every
token, with the default attention of transformers (printed); bertjax computes logits of the masked tokens only. The two
run in turns, each in its own process; speed is that of the median step. Needs the extra `parity`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from bertjax.model.config import size_fields

VOCAB_SIZE = 30_522


def pytorch(size: str, rows: int, seq_len: int, steps: int) -> None:
    """Prints the median tokens/s of Hugging Face's model as JSON; two warm-up steps do not count."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(vocab_size=VOCAB_SIZE, **size_fields(size))
    model = BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    ids = torch.randint(1000, VOCAB_SIZE, (rows, seq_len))
    labels = torch.where(torch.rand(rows, seq_len) < 0.15, ids, -100)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(seq_len) >= seq_len // 2) * ids.sign(),
        "labels": labels,
        "next_sentence_label": torch.randint(0, 2, (rows,)),
    }
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    setup = f"attention {config._attn_implementation}, {torch.get_num_threads()} threads"
    print(json.dumps({"tokens_per_second": rows * seq_len / statistics.median(seconds[2:]), "setup": setup}))


def bertjax_command(size: str, rows: int, seq_len: int, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "bertjax", "bench", "step", "--config", f"pretrain:size={size},seq_len={seq_len}"),
        *(f"--config.data.batch_size={rows}",),
        *(f"--config.model.vocab_size={VOCAB_SIZE}", "--steps", str(steps), "--json"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", help="named size (default: base)")
    parser.add_argument("--rows", type=int, default=8, help="batch size (default: 8)")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens per row (default: 128)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per turn (default: 6)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each framework (default: 3)")
    parser.add_argument("--pytorch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = (args.size, args.rows, args.seq_len, args.steps)
    if args.pytorch:
        pytorch(*settings)
        return
    ratios = []
    for _ in range(args.rounds):
        results = []
        for command in (bertjax_command(*settings), [sys.executable, __file__, *sys.argv[1:], "--pytorch"]):
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(out.splitlines()[-1]))
            print(json.dumps(results[-1]))
        ratios.append(results[0]["tokens_per_second"] / results[1]["tokens_per_second"])
    print(f"bertjax / PyTorch: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
