"""Docstrings of installed libraries, as text and as paragraphs that are labeled with the name of the library.

    python demo/docstring_labels.py OUTPUT_DIRECTORY

Writes text.txt, with one paragraph per line and an empty line between modules. Writes train.tsv and dev.tsv with the
columns `text` and `label`, and the same number of rows per library. All paragraphs of a module are in the same table,
and no paragraph occurs twice.
"""

import argparse
import hashlib
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import docstrings

LIBRARIES = ("jax", "matplotlib", "numpy", "scipy", "tensorflow")
TRAIN_ROWS, DEV_ROWS = 800, 160  # Rows per library.
_WORDS = range(8, 40)


def library(module: str) -> str:
    """Returns the name of a module's folder in site-packages, such as `jax`. Returns "" for other modules."""
    parts = Path(module).parts
    return parts[parts.index("site-packages") + 1] if "site-packages" in parts else ""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def sort_key(module: str) -> str:
    """Returns a sort key of a module's path in site-packages, so that rows and splits are equal on every machine."""
    return digest(module[module.index("site-packages") :])


def document_of(module: str) -> str:
    return "\n".join(dict.fromkeys(docstrings.read_module(module)))


def main(output: Path) -> None:
    names = sorted((name for name in docstrings.modules() if library(name) in LIBRARIES), key=sort_key)
    rows: dict[str, dict[str, list[str]]] = {"train": {}, "dev": {}}
    seen: set[str] = set()
    with ProcessPoolExecutor() as pool:
        documents = list(pool.map(document_of, names, chunksize=32))
    for name, document in zip(names, documents, strict=True):
        split = "dev" if int(sort_key(name), 16) % 5 == 0 else "train"
        label = library(name)
        for paragraph in document.split("\n"):
            # Remove the names of the libraries, which would reveal the label.
            text = re.sub(r"(?i)\b(?:jax|jnp|matplotlib|mpl|numpy|np|scipy|tensorflow|tf)\b\.?", "", paragraph)
            text = " ".join(text.split())
            if len(text.split()) in _WORDS and text not in seen:
                seen.add(text)
                rows[split].setdefault(label, []).append(text)
    output.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(filter(None, documents))
    (output / "text.txt").write_text(text, encoding="utf-8", errors="replace")
    for split, wanted in (("train", TRAIN_ROWS), ("dev", DEV_ROWS)):
        found = rows[split]
        count = min([wanted, *(len(found.get(label, [])) for label in LIBRARIES)])
        lines = [f"{text}\t{label}\n" for label in LIBRARIES for text in sorted(found[label], key=digest)[:count]]
        (output / f"{split}.tsv").write_text("text\tlabel\n" + "".join(sorted(lines, key=digest)), encoding="utf-8")
        print(f"{output / split}.tsv: {count} paragraphs for each of {', '.join(LIBRARIES)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder of the three files")
    main(parser.parse_args().output)
