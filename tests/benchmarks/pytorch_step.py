"""Compares a pre-training step with Hugging Face's PyTorch BERT on this machine's GPU or, without one, its CPUs.

    python tests/benchmarks/pytorch_step.py --size base --rows 8 --seq_len 128 --rounds 3

Both have a dropout rate of 0.1: forward and backward pass of masked LM and next-sentence prediction, gradients clipped
to norm 1, an AdamW update. On CPU, both compute in float32 on all cores. On GPU, both compute in bfloat16 with float32
parameters, and PyTorch uses `torch.compile`, autocast and fused AdamW. `BertForPreTraining` computes logits of every
token, with the default attention of transformers (printed) and no mask; bertjax computes logits of the masked tokens
only. The two run in turns, each in its own process; speed is that of the median step. Needs the extra `parity`.
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

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    config = BertConfig(vocab_size=VOCAB_SIZE, **size_fields(size))
    model = BertForPreTraining(config).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=on_gpu)
    forward = torch.compile(model) if on_gpu else model
    ids = torch.randint(1000, VOCAB_SIZE, (rows, seq_len), device=device)
    labels = torch.where(torch.rand(rows, seq_len, device=device) < 0.15, ids, -100)
    batch = {
        "input_ids": ids,
        "token_type_ids": (torch.arange(seq_len, device=device) >= seq_len // 2) * ids.sign(),
        "labels": labels,
        "next_sentence_label": torch.randint(0, 2, (rows,), device=device),
    }
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    setup = f"attention {config._attn_implementation}, {torch.get_num_threads()} threads"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated() / 2**30
        setup = f"attention {config._attn_implementation}, torch.compile, {memory:.1f} GiB, {loss.dtype} loss"
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
