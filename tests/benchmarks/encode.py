"""Times mean-pooled text embeddings in bertjax and in transformers with PyTorch, including compilation.

    pip install -e '.[parity,published]'
    python tests/benchmarks/encode.py --texts sentences.txt --rounds 3

Both encode the same texts with the published all-MiniLM-L6-v2. transformers gets batches of 32 texts, sorted by length
and padded to the longest. Each measurement runs in a separate process, and excludes imports and loading. With
`--systems`, also times bertjax in bfloat16, and sentence-transformers in both dtypes with its default batches of 32.
"""

import argparse
import functools
import sys
import time

import numpy as np
from measuring import parser_of, run
from published import published_checkpoint


def encode_bertjax(texts: list[str], dtype: str = "float32") -> np.ndarray:
    """Returns the embeddings of bertjax [N, D], and prints the seconds."""
    import bertjax

    bert = bertjax.load(published_checkpoint(), dtype=dtype)
    start = time.perf_counter()
    vectors = bert.encode(texts, pooling="mean").pooled
    print(f"bertjax {dtype} {time.perf_counter() - start:.2f} s")
    return vectors


def encode_transformers(texts: list[str]) -> np.ndarray:
    """Returns the embeddings of transformers [N, D], and prints the seconds."""
    import torch
    import transformers

    folder = published_checkpoint()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    start = time.perf_counter()
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    with torch.inference_mode():
        for first in range(0, len(texts), 32):
            indices = order[first : first + 32]
            batch = tokenizer([texts[i] for i in indices], padding=True, truncation=True, return_tensors="pt")
            mask = batch["attention_mask"][..., None].float()
            vectors[indices] = ((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)).numpy()
    print(f"transformers {time.perf_counter() - start:.2f} s")
    return vectors


def encode_sentence_transformers(texts: list[str], dtype: str = "float32") -> np.ndarray:
    """Returns the normalized embeddings of sentence-transformers [N, D], and prints the seconds."""
    import sentence_transformers

    options = {"dtype": dtype}
    model = sentence_transformers.SentenceTransformer(published_checkpoint(), device="cpu", model_kwargs=options)
    start = time.perf_counter()
    vectors = model.encode(texts)
    print(f"sentence-transformers {dtype} {time.perf_counter() - start:.2f} s")
    return vectors


SYSTEMS = {
    "bertjax": encode_bertjax,
    "transformers": encode_transformers,
    "bfloat16": functools.partial(encode_bertjax, dtype="bfloat16"),
    "sentence_transformers": encode_sentence_transformers,
    "sentence_transformers_bfloat16": functools.partial(encode_sentence_transformers, dtype="bfloat16"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--texts", required=True, help="file with one text per line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["bertjax", "transformers"])
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system:
        with open(args.texts, encoding="utf-8") as file:
            SYSTEMS[args.system]([line.rstrip("\n") for line in file])
        return
    for _ in range(args.rounds):
        for system in args.systems:
            print(run(sys.executable, __file__, "--texts", args.texts, "--system", system)[0], end="", flush=True)


if __name__ == "__main__":
    main()
