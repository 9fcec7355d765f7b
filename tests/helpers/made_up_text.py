"""Small synthetic corpus whose documents use different words, and a vocabulary of characters."""

import random
from pathlib import Path


def write_text(file: Path) -> None:
    """Writes 60 short documents, each with a random choice of words."""
    rng = random.Random(0)
    all_words = [f"{a}{b}" for a in ("ba", "ke", "lo", "mi") for b in ("na", "ro", "su", "te", "vi")]
    documents = []
    for _ in range(60):
        words = rng.sample(all_words, 6)
        sentences = [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(rng.randint(4, 12))]
        documents.append("\n".join(sentences))
    file.write_text("\n\n".join(documents) + "\n")


def write_letters(file: Path, words: tuple[str, ...] = ()) -> None:
    """Writes an uncased vocabulary that contains `words` and single characters, which can spell any ASCII text."""
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{char}" for char in characters)]
    file.write_text("\n".join([*pieces, *words]) + "\n")


def make_corpus(folder: Path) -> Path:
    """Prepares a corpus from the text of `write_text`, with a vocabulary trained on it."""
    from bertjax.data.corpus.prepare import prepare

    write_text(folder / "text.txt")
    prepare([f"text:{folder}/text.txt"], folder / "corpus", vocabulary_size=70, heldout_fraction=0.1, workers=1)
    return folder / "corpus"
