"""Set before JAX is imported anywhere: eight fake devices on the CPU, quick compilation, and a quiet TensorFlow."""

import os
import random
import tempfile
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Tiny models compile longer than they run.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
# Many tests start a run of their own with the same shapes: all but the first find it compiled.
_compiled = tempfile.TemporaryDirectory(prefix="bertjax-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared corpus of 60 short documents, each with words of its own kind, and a vocabulary trained on them."""
    from bertjax.corpus.prepare import prepare

    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    all_words = [f"{a}{b}" for a in ("ba", "ke", "lo", "mi") for b in ("na", "ro", "su", "te", "vi")]
    documents = []
    for _ in range(60):
        words = rng.sample(all_words, 6)
        sentences = [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(rng.randint(4, 12))]
        documents.append("\n".join(sentences))
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    prepare(
        [f"text:{folder}/text.txt"],
        folder / "corpus",
        vocabulary_size=70,
        heldout_share=0.1,
        workers=1,
        progress=False,
    )
    return folder / "corpus"


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    """A lower-casing vocabulary of single letters, digits and punctuation, which spells any ASCII text."""
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{char}" for char in characters)]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    path.write_text("\n".join([*pieces, "the", "##ing"]) + "\n")
    return path
