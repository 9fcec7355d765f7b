"""Times mean-pooled text embeddings in bertjax and in transformers with PyTorch, including compilation.

    pip install -e '.[parity,published]'
    python tests/benchmarks/encode.py --texts sentences.txt --rounds 3

Both encode the same texts with the published all-MiniLM-L6-v2. transformers gets batches of 32 texts, sorted by length
and padded to the longest. Each measurement runs in a separate process, and excludes imports and loading. With
`--systems`, also times bertjax in bfloat16, and sentence-transformers in both dtypes with its default batches of 32.
"""

import functools
import time

import numpy as np
from measuring import in_new_process, parser_of
from published import published_checkpoint


def bertjax_seconds(texts: list[str], dtype: str = "float32") -> float:
    import bertjax

    bert = bertjax.load(published_checkpoint(), dtype=dtype)
    start = time.perf_counter()
    bert.encode(texts, pooling="mean")
    return time.perf_counter() - start


def transformers_seconds(texts: list[str]) -> float:
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
    return time.perf_counter() - start


def sentence_transformers_seconds(texts: list[str], dtype: str = "float32") -> float:
    import sentence_transformers

    options = {"dtype": dtype}
    model = sentence_transformers.SentenceTransformer(published_checkpoint(), device="cpu", model_kwargs=options)
    start = time.perf_counter()
    model.encode(texts)
    return time.perf_counter() - start


# Printed name, and function that returns the seconds to encode texts.
SYSTEMS = {
    "bertjax": ("bertjax float32", bertjax_seconds),
    "transformers": ("transformers", transformers_seconds),
    "bfloat16": ("bertjax bfloat16", functools.partial(bertjax_seconds, dtype="bfloat16")),
    "sentence_transformers": ("sentence-transformers float32", sentence_transformers_seconds),
    "sentence_transformers_bfloat16": (
        "sentence-transformers bfloat16",
        functools.partial(sentence_transformers_seconds, dtype="bfloat16"),
    ),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--texts", required=True, help="file with one text per line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["bertjax", "transformers"])
    args = parser.parse_args()
    with open(args.texts, encoding="utf-8") as file:
        texts = [line.rstrip("\n") for line in file]
    for _ in range(args.rounds):
        for name, seconds_of in (SYSTEMS[system] for system in args.systems):
            print(f"{name} {in_new_process(seconds_of, texts):.2f} s", flush=True)


if __name__ == "__main__":
    main()
