"""Compares a pre-training step with Hugging Face's PyTorch BERT on this machine's GPU or, without one, its CPUs.

    python tests/benchmarks/pytorch_step.py --size base --rows 8 --seq_len 128 --rounds 3

A step is a forward and backward pass of masked LM and next-sentence prediction with dropout 0.1, clipping of gradients
to norm 1, and an AdamW update. Both compute the masked-LM logits of the same number of positions per row. With
`--all_positions`, PyTorch computes the logits of every token, as the original `BertForPreTraining` does. The FLOPs of
both are printed.

PyTorch uses the default attention of transformers (printed), no mask, and its fastest setting for the machine. On CPU,
float32 and autocast to bfloat16 are both measured, and the faster one counts. On GPU, it uses `torch.compile`, autocast
and fused AdamW. bertjax uses its defaults. The programs run in turns, each in its own process. Speed is that of the
median step. Needs the extra `parity`.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from measuring import BERTJAX, in_new_process, parser_of, pytorch_step_seconds, run

from bertjax.model.config import ModelConfig, size_fields
from bertjax.model.flops import flops_per_position
from bertjax.training.checkpoint_config import experiment_config

SIZES = ("tiny", "mini", "small", "medium", "base", "large")
VOCAB_SIZE = 30_522


def pytorch(size: str, rows: int, seq_len: int, steps: int, num_masked: int, dtype: str) -> dict[str, Any]:
    """Returns the median tokens/s of Hugging Face's model, and a description of the setup.

    `num_masked` is the number of positions per row whose logits are computed (0: all).
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import BertConfig, BertForPreTraining

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    config = BertConfig(vocab_size=VOCAB_SIZE, **size_fields(size))
    model = BertForPreTraining(config).train().to(device)
    ids = torch.randint(1000, VOCAB_SIZE, (rows, seq_len), device=device)
    segments = (torch.arange(seq_len, device=device) >= seq_len // 2) * ids.sign()
    next_sentence = torch.randint(0, 2, (rows,), device=device)
    positions = torch.rand(rows, seq_len, device=device).argsort(dim=1)[:, : num_masked or seq_len, None]
    labels = ids.gather(1, positions[..., 0])

    def loss_of() -> torch.Tensor:
        hidden, pooled = model.bert(ids, token_type_ids=segments, return_dict=False)
        masked = hidden.gather(1, positions.expand(-1, -1, hidden.shape[-1])) if num_masked else hidden
        logits, next_logits = model.cls(masked, pooled)
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + cross_entropy(
            next_logits.float(), next_sentence
        )

    forward = torch.compile(loss_of) if on_gpu else loss_of
    seconds = pytorch_step_seconds(forward, model.parameters(), steps, dtype, lr=1e-4, fused=on_gpu)
    setup = f"{dtype}, attention {config._attn_implementation}, {torch.get_num_threads()} threads"
    if on_gpu:
        memory = torch.cuda.max_memory_allocated() / 2**30
        setup = f"{dtype}, attention {config._attn_implementation}, torch.compile, {memory:.1f} GiB"
    return {"tokens_per_second": rows * seq_len / seconds, "setup": setup}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="base", choices=SIZES, help="default: base")
    parser.add_argument("--rows", type=int, default=8, help="batch size (default: 8)")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens per row (default: 128)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per turn (default: 6)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each framework (default: 3)")
    parser.add_argument("--all_positions", action="store_true", help="PyTorch computes the logits of every token")
    args = parser.parse_args()
    num_masked = experiment_config(f"pretrain:seq_len={args.seq_len}", []).resolved_phases[0].max_predictions
    num_pytorch = 0 if args.all_positions else num_masked
    model = ModelConfig(vocab_size=VOCAB_SIZE, **size_fields(args.size))
    for name, number in (("bertjax", num_masked), ("PyTorch", num_pytorch or args.seq_len)):
        flops = args.rows * args.seq_len * flops_per_position(model, args.seq_len, number)
        print(f"{name}: {flops:.3e} FLOPs per step, {number} logits per row")
    dtypes = ("bfloat16",) if Path("/dev/nvidiactl").exists() else ("float32", "bfloat16")
    step = (*BERTJAX, "bench", "step", "--json", f"--steps={args.steps}", f"--config.data.batch_size={args.rows}")
    config = (f"--config=pretrain:size={args.size},seq_len={args.seq_len}", f"--config.model.vocab_size={VOCAB_SIZE}")
    ratios = []
    for _ in range(args.rounds):
        results = [json.loads(run(*step, *config)[0].splitlines()[-1])]
        print(json.dumps(results[0]), flush=True)
        for dtype in dtypes:
            sizes = (args.size, args.rows, args.seq_len, args.steps, num_pytorch)
            results.append(in_new_process(pytorch, *sizes, dtype))
            print(json.dumps(results[-1]), flush=True)
        speeds = [result["tokens_per_second"] for result in results]
        ratios.append(speeds[0] / max(speeds[1:]))
    print(f"bertjax / PyTorch: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
