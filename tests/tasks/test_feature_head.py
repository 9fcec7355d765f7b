"""The feature head: a BiLSTM, and cached features of a frozen encoder."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.command_runs import EXPERIMENTS, overrides, predict, refused, train
from helpers.finetuning_data import conll_files, glue_files, squad_files, swag_files

import bertjax
from bertjax.tasks.build import build_task
from bertjax.training import train as loop
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.cost import cost_before
from bertjax.training.parameters import load_params_on_host
from bertjax.utils.io import CACHE_DIR_VARIABLE, temporary_name

FROZEN = [
    "--config.optimizer.freeze=encoder",
    "--config.feature_head.lstm_layers=2",
    "--config.feature_head.lstm_size=12",
]
FAST = ["--config.optimizer.learning_rate=0.01", "--config.optimizer.warmup_steps=0"]
FEATURES = ["embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"]


@pytest.fixture(scope="module")
def ner(tmp_path_factory, letters):
    """Returns CoNLL files and the checkpoint of a tagger trained on them for one step."""
    folder = tmp_path_factory.mktemp("ner")
    files = conll_files(folder / "conll")
    train(f"ner.py:path={files}", folder / "start", letters, steps=1, eval_every=1)
    return files, folder / "start"


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.ci
@pytest.mark.parametrize(
    "features",
    ["sum_last_four", *(pytest.param(name, marks=pytest.mark.slow) for name in FEATURES if name != "sum_last_four")],
)
def test_training_on_cached_features_equals_training_with_a_frozen_encoder(ner, features, tmp_path, cache_dir, capfd):
    files, start = ner
    flags = [*FROZEN, *FAST, f"--config.feature_head.features={features}"]
    schedule = {"steps": 12, "eval_every": 12, "checkpoint_every": 12}
    cached, uncached = tmp_path / "cached", tmp_path / "uncached"
    results = train(f"ner.py:path={files}", cached, None, f"--init_from={start}", *flags, **schedule)
    assert [path.suffix for path in cache_dir.glob("features-*")] == [".bin"] * 2
    # Without the cache, each step runs the encoder, as in runs of several processes.
    experiment = f"{EXPERIMENTS}/ner.py:path={files},size=L1_H16,quick=true"
    all_flags = [*overrides(None, **schedule), *flags]
    init_from = find_checkpoint(start)
    config = experiment_config(experiment, all_flags, init_from)
    task = build_task(config, train=True)
    assert loop.train(task, str(uncached), init_from)["f1"] == results["f1"]
    assert cost_before(task, 12) == task.unfrozen_cost_before(12)  # The full cost excludes the frozen encoder.
    initial, trained, other = (load_params_on_host(find_checkpoint(path)) for path in (start, cached, uncached))
    for name, array in initial.items():
        if name.startswith("encoder/"):
            np.testing.assert_array_equal(trained[name], array)
    head = {name for name in trained if not name.startswith("encoder/")}
    assert {name.split("/")[0] for name in head} == {
        "classifier",
        *(f"lstm_{layer}_{side}" for layer in range(2) for side in ("left", "right")),
        *(["mix"] if features.startswith("sum") else []),
    }
    for name in head:
        np.testing.assert_allclose(trained[name], other[name], rtol=1e-3, atol=1e-5)
    # Resuming with another --init_from would mix features of two encoders.
    command = ["train", f"--config={experiment}", f"--workdir={cached}", f"--init_from={uncached}"]
    error = refused(capfd, *command, *all_flags)
    assert "started from different parameters than --init_from, so cached features would differ" in error


@pytest.mark.ci
def test_model_with_feature_head_is_neither_saved_nor_replaced(ner, tmp_path):
    files, start = ner
    flags = [f"--init_from={start}", "--config.optimizer.freeze=encoder", "--config.feature_head.features=embeddings"]
    train(f"ner.py:path={files}", tmp_path / "run", None, *flags, steps=1)
    model = bertjax.load(tmp_path / "run")
    message = "feature_head.features=embeddings and feature_head.lstm_layers=0, which other formats do not support"
    for export in (lambda: model.save(tmp_path / "saved"), lambda: model.replace(model.params)):
        with pytest.raises(bertjax.UsageError, match=message):
            export()
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "write_files"),
    [("swag.py:", swag_files), ("squad.py:", squad_files), ("glue.py:task=cola,", glue_files)],
)
def test_every_task_trains_on_cached_features(ner, experiment, write_files, tmp_path, capfd):
    flags = [*FROZEN, *FAST, "--config.feature_head.features=concat_last_four", f"--init_from={ner[1]}"]
    path = write_files(tmp_path / "data")
    train(f"{experiment}path={path}", tmp_path / "run", None, *flags, steps=2, eval_every=2)
    # Prediction computes the features and does not use the cache.
    assert predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    error = refused(capfd, "convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--format=huggingface")
    assert "feature_head.features=concat_last_four and feature_head.lstm_layers=2" in error


@pytest.mark.slow
def test_cached_features_use_the_dtype_of_the_run(ner, tmp_path, cache_dir):
    files, start = ner
    flags = [f"--init_from={start}", *FROZEN, "--config.feature_head.features=last", "--config.model.dtype=bfloat16"]
    train(f"ner.py:path={files}", tmp_path / "run", None, *flags, steps=1)
    for path in cache_dir.glob("*.bin"):
        states = np.frombuffer(path.read_bytes()[:-32], np.float32)  # without the SHA-256
        np.testing.assert_array_equal(states, states.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.ci
def test_incomplete_files_of_cached_features_are_recomputed(ner, tmp_path, cache_dir, capfd):
    files, start = ner
    arguments = [None, f"--init_from={start}", *FROZEN, "--config.feature_head.features=sum_last_four"]
    train(f"ner.py:path={files}", tmp_path / "first", *arguments, steps=1, eval_every=1)
    complete, interrupted = sorted(cache_dir.glob("*.bin"))
    modified_at, content = complete.stat().st_mtime_ns, interrupted.read_bytes()
    # A killed run leaves only a temporary file.
    abandoned = cache_dir / temporary_name(interrupted.name)
    interrupted.rename(abandoned)
    abandoned.write_bytes(content[:100])
    train(f"ner.py:path={files}", tmp_path / "second", *arguments, steps=1, eval_every=1)
    assert interrupted.read_bytes() == content and complete.stat().st_mtime_ns == modified_at
    assert not abandoned.exists()
    interrupted.write_bytes(content[:-1] + b"?")
    train(f"ner.py:path={files}", tmp_path / "third", *arguments, steps=1, eval_every=1)
    assert interrupted.read_bytes() == content and complete.stat().st_mtime_ns == modified_at
