"""A pre-training step beside Hugging Face's PyTorch BERT on the CPUs of this machine, in turns.

    python tests/benchmarks/pytorch_step.py --size base --rows 8 --seq_len 128 --rounds 3

Both compute in float32 on all cores, with dropout of 0.1: forward and backward pass of masked LM and next-sentence
prediction, gradients clipped at a norm of 1, an update of AdamW. Hugging Face's `BertForPreTraining` computes the
logits of every token, as its users do, with the attention that transformers takes by itself (printed); bertjax those of
the masked tokens. Each turn is a process of its own, and of its steps the median counts. Needs the extra `parity`.
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
    """Prints the median tokens/s of some steps after the first two."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    shape = size_fields(size)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_hidden_layers"],
        num_attention_heads=shape["num_attention_heads"],
        intermediate_size=shape["intermediate_size"],
    )
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
        begin = time.perf_counter()
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    attention = f"transformers' attention {config._attn_implementation}, {torch.get_num_threads()} threads"
    print(json.dumps({"tokens_per_second": rows * seq_len / statistics.median(seconds[2:]), "with": attention}))


def bertjax(size: str, rows: int, seq_len: int, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "bertjax", "bench", "step", "--config", f"pretrain:size={size},seq_len={seq_len}"),
        *(f"--config.data.batch_size={rows}", "--config.model.dtype=float32", "--config.model.scan_layers=false"),
        *(f"--config.model.vocab_size={VOCAB_SIZE}", "--steps", str(steps)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pytorch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    asked = (args.size, args.rows, args.seq_len, args.steps)
    if args.pytorch:
        pytorch(*asked)
        return
    ratios = []
    for _ in range(args.rounds):
        found = []
        for command in (bertjax(*asked), [sys.executable, __file__, *sys.argv[1:], "--pytorch"]):
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append(json.loads(out.splitlines()[-1]))
            print(json.dumps(found[-1]))
        ratios.append(found[0]["tokens_per_second"] / found[1]["tokens_per_second"])
    print(f"bertjax / PyTorch: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
