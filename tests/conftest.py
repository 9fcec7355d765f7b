"""Settings for all tests, applied before JAX is imported: fake CPU devices, fast compilation and a quiet TensorFlow.

Compilation for one device takes two thirds of the time of compilation for eight. `make test` and `make ci` therefore
run the tests without the mark `devices` on one device; `make test-all` runs all tests on eight devices.
"""

import gc
import importlib.metadata
import logging
import os
import signal
from pathlib import Path

import pytest
from helpers.made_up_text import make_corpus, write_letters

_JAX_VERSION = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={os.environ.get('BERTJAX_TEST_DEVICES', '8')}",
        # Tests of tiny models spend most of their time in compilation. XLA's older loop emitters shorten it by 40 %.
        # JAX 0.11 removes them.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        *(["--xla_cpu_use_fusion_emitters=false"] if _JAX_VERSION < (0, 11) else []),
        # Parallel code generation makes compilation 20 % slower.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# All tests, workers and later runs share one compilation cache, which `pytest --cache-clear` removes.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache/d/jax"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
# Collect garbage less often, because tracing creates many objects.
gc.set_threshold(100_000, 20, 100)
# Restore the default handlers: background shells and `nohup` ignore these signals, and child processes inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    # Start with the longest file, so that the other workers do not wait for it at the end.
    items.sort(key=lambda item: item.path.name != "test_train.py")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    """Returns an uncased vocabulary of single characters that can spell any ASCII text."""
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    write_letters(path, ("the", "##ing"))
    return path


@pytest.fixture(scope="session")
def pretrained(letters, tmp_path_factory) -> Path:
    """Returns a Hugging Face folder with a random checkpoint with pre-training heads; tests must not change it."""
    from helpers.checkpoints import random_checkpoint

    from bertjax.convert import huggingface

    folder = tmp_path_factory.mktemp("pretrained")
    huggingface.write(random_checkpoint(letters), folder)
    return folder


@pytest.fixture
def log_lines():
    """Yields the list of messages that the package logs during the test."""
    lines: list[str] = []
    logger, handler = logging.getLogger("bertjax"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def jax_events():
    """Yields the list of the names of the events that JAX times during the test, such as compilations."""
    import jax

    names = []

    def record(name, seconds, **_):
        names.append(name)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield names
    jax.monitoring.unregister_event_duration_listener(record)
