"""Compares a training step of an embedder with sentence-transformers on this machine's GPU or, without one, its CPUs.

    pip install -e '.[parity,published]'
    python tests/benchmarks/embedding_step.py --pairs pairs.tsv --batch 32 --rounds 3
    python tests/benchmarks/embedding_step.py --pairs pairs.tsv --batch 256 --chunk 64 --rounds 3

Both train the published all-MiniLM-L6-v2 with InfoNCE and dropout on the first pairs of a .tsv file with the columns
anchor and positive, without repeated positives. A step is a forward and backward pass, clipping of gradients to norm 1,
and an AdamW update. With `--chunk`, bertjax uses `embed.chunk`, and sentence-transformers uses its
`CachedMultipleNegativesRankingLoss`. sentence-transformers pads anchors and positives to their longest text; its
tokenization is not timed. bertjax packs texts into rows. Both are measured in float32 and in bfloat16 (PyTorch:
autocast). The programs run in turns, each in its own process. Each line has the seconds of the median step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measuring import BERTJAX, parser_of, run
from published import published_checkpoint

DTYPES = ("bfloat16", "float32")


def sentence_transformers_step(args: argparse.Namespace) -> None:
    """Prints the median seconds of a step; two warm-up steps do not count."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import batch_to_device

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(published_checkpoint(), device=device).train()
    if args.chunk:
        loss_of = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=args.chunk)
    else:
        loss_of = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, eps=1e-6)
    columns = zip(*(line.split("\t") for line in Path(args.pairs).read_text().splitlines()[1:]), strict=True)
    features = []
    for texts, length in zip(columns, (args.query_len, args.seq_len), strict=True):
        model.max_seq_length = length
        features.append(batch_to_device(model.preprocess([*texts]), device))
    labels = torch.zeros(args.batch, device=device)
    seconds = []
    for _ in range(args.steps + 2):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=args.sentence_transformers == "bfloat16"):
            loss = loss_of([dict(column) for column in features], labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # Wait for the device.
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds_per_step": statistics.median(seconds[2:])}))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", required=True, help=".tsv file with the columns anchor and positive")
    parser.add_argument("--batch", type=int, default=32, help="pairs per batch (default: 32)")
    parser.add_argument("--chunk", type=int, default=0, help="texts to encode at once (default: 0, all)")
    parser.add_argument("--query_len", type=int, default=32, help="maximum tokens of an anchor (default: 32)")
    parser.add_argument("--seq_len", type=int, default=96, help="maximum tokens of a positive (default: 96)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per turn (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program and dtype (default: 3)")
    parser.add_argument("--sentence_transformers", choices=DTYPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sentence_transformers:
        sentence_transformers_step(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pairs.tsv")
        header, *lines = Path(args.pairs).read_text().splitlines()
        lines = [*{line.partition("\t")[2]: line for line in lines}.values()][: args.batch]
        file.write_text("\n".join([header, *lines]) + "\n")
        fields = {
            "model.num_attention_heads": 12,
            "data.vocabulary": f"{published_checkpoint()}/vocab.txt",
            "data.batch_size": args.batch,
            "data.query_len": args.query_len,
            "data.seq_len": args.seq_len,
            "embed.chunk": args.chunk,
            "optimizer.name": "adamw",
        }
        flags = [f"--config.{name}={value}" for name, value in fields.items()]
        step = (*BERTJAX, "bench", "step", "--json", f"--steps={args.steps}")
        step += (f"--config=embed:train={file},size=L6_H384", *flags)
        own = (sys.executable, __file__, *sys.argv[1:], f"--pairs={file}")
        commands = {("bertjax", dtype): (*step, f"--config.model.dtype={dtype}") for dtype in DTYPES}
        for dtype in DTYPES:
            commands["sentence-transformers", dtype] = (*own, f"--sentence_transformers={dtype}")
        for _ in range(args.rounds):
            for (system, dtype), command in commands.items():
                seconds = json.loads(run(*command)[0].splitlines()[-1])["seconds_per_step"]
                print(f"{system} {dtype} {seconds:.3f} s", flush=True)


if __name__ == "__main__":
    main()
