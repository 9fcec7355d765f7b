"""Set before JAX is imported anywhere: fake devices on the CPU, quick compilation, and a quiet TensorFlow.

Programs for one device compile in two thirds of the time that those for eight take; `make test` runs what is not marked
`devices` on one, `make test-all` all on eight.
"""

import gc
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
from made_up_text import make_corpus

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={os.environ.get('BERTJAX_TEST_DEVICES', '8')}",
        # Tiny models compile longer than they run: two fifths less with the older way to emit loops.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        # Split, as for several cores, they take a fifth longer.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# Many tests start a run of their own with the same shapes: all but the first find it compiled, whatever worker they
# run in.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="bertjax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
# JAX makes many objects when it traces a program, and the collector goes through all that there are every few of them.
gc.set_threshold(100_000, 20, 100)
# `nohup`, or a shell that starts tests in the background, has them ignored, by all that is started here too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    """A lower-casing vocabulary of single letters, digits and punctuation, which spells any ASCII text."""
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{char}" for char in characters)]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    path.write_text("\n".join([*pieces, "the", "##ing"]) + "\n")
    return path


class _ListHandler(logging.Handler):
    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def log_lines():
    """Messages that the package logs during the test, in order."""
    logger, lines = logging.getLogger("bertjax"), []
    handler, level = _ListHandler(lines), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
