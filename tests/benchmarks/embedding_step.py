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
import tempfile
from pathlib import Path

from measuring import BERTJAX, in_new_process, parser_of, pytorch_step_seconds, run
from published import published_checkpoint

DTYPES = ("bfloat16", "float32")


def sentence_transformers_seconds(args: argparse.Namespace, pairs: Path, dtype: str) -> float:
    """Returns the median seconds of a step."""
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
    columns = zip(*(line.split("\t") for line in pairs.read_text().splitlines()[1:]), strict=True)
    features = []
    for texts, length in zip(columns, (args.query_len, args.seq_len), strict=True):
        model.max_seq_length = length
        features.append(batch_to_device(model.preprocess([*texts]), device))
    labels = torch.zeros(args.batch, device=device)

    def step_loss() -> torch.Tensor:
        return loss_of([dict(column) for column in features], labels)

    return pytorch_step_seconds(step_loss, model.parameters(), args.steps, dtype, lr=2e-5, eps=1e-6)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", required=True, help=".tsv file with the columns anchor and positive")
    parser.add_argument("--batch", type=int, default=32, help="pairs per batch (default: 32)")
    parser.add_argument("--chunk", type=int, default=0, help="texts to encode at once (default: 0, all)")
    parser.add_argument("--query_len", type=int, default=32, help="maximum tokens of an anchor (default: 32)")
    parser.add_argument("--seq_len", type=int, default=96, help="maximum tokens of a positive (default: 96)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per turn (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program and dtype (default: 3)")
    args = parser.parse_args()
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
        for _ in range(args.rounds):
            for dtype in DTYPES:
                output = run(*step, f"--config.model.dtype={dtype}")[0]
                print(f"bertjax {dtype} {json.loads(output.splitlines()[-1])['seconds_per_step']:.3f} s", flush=True)
            for dtype in DTYPES:
                seconds = in_new_process(sentence_transformers_seconds, args, file, dtype)
                print(f"sentence-transformers {dtype} {seconds:.3f} s", flush=True)


if __name__ == "__main__":
    main()
