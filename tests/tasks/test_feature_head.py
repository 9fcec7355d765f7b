"""Tests of the feature head: a BiLSTM, and cached features of a frozen encoder."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from finetuning_data import conll_files, glue_files, squad_files, swag_files
from running import EXPERIMENTS, overrides, predict, refused, train

from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.parameters import load_params_on_host
from bertjax.utils.io import CACHE_DIR_VARIABLE, temporary_name

FROZEN = [
    "--config.optimizer.freeze=encoder",
    "--config.feature_head.lstm_layers=2",
    "--config.feature_head.lstm_size=12",
]
QUICK = ["--config.optimizer.learning_rate=0.01", "--config.optimizer.warmup_steps=0"]
FEATURES = ["embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"]


@pytest.fixture(scope="module")
def ner(tmp_path_factory, letters):
    """Returns CoNLL files and the checkpoint of a tagger trained on them for one step."""
    folder = tmp_path_factory.mktemp("ner")
    files = conll_files(folder / "conll")
    train(f"ner.py:path={files}", folder / "start", letters, steps=1, eval_every=1)
    return files, folder / "start"


@pytest.fixture(autouse=True)
def staging(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "staging"))
    return tmp_path / "staging"


def params_of(workdir):
    return load_params_on_host(find_checkpoint(workdir))


@pytest.mark.parametrize(
    "features",
    ["sum_last_four", *(pytest.param(name, marks=pytest.mark.slow) for name in FEATURES if name != "sum_last_four")],
)
def test_training_on_cached_features_equals_training_with_a_frozen_encoder(ner, features, tmp_path, staging, capfd):
    files, start = ner
    flags = [f"--init_from={start}", *FROZEN, *QUICK, f"--config.feature_head.features={features}"]
    sizes = {"steps": 12, "eval_every": 12, "checkpoint_every": 12}
    cached = train(f"ner.py:path={files}", tmp_path / "cached", None, *flags, **sizes)
    assert [path.suffix for path in sorted(staging.glob("features-*"))] == [".bin", ".json"] * 2
    uncached_workdir = tmp_path / "uncached"
    with pytest.MonkeyPatch.context() as patch:
        # Runs of several processes compute the encoder in each step.
        patch.setattr(FinetuningTask, "with_cached_features", lambda self, *_: self)
        uncached = train(f"ner.py:path={files}", uncached_workdir, None, *flags, **sizes)
    assert cached["f1"] == uncached["f1"]
    before, after, other = (params_of(path) for path in (start, tmp_path / "cached", uncached_workdir))
    for name, array in before.items():
        if name.startswith("encoder/"):
            np.testing.assert_array_equal(after[name], array)
    new = {name for name in after if not name.startswith("encoder/")}
    assert {name.split("/")[0] for name in new} == {
        "classifier",
        *(f"lstm_{layer}_{side}" for layer in range(2) for side in ("left", "right")),
        *(["mix"] if features.startswith("sum") else []),
    }
    for name in new:
        np.testing.assert_allclose(after[name], other[name], rtol=1e-3, atol=1e-5)
    saved = json.loads((find_checkpoint(tmp_path / "cached").parents[1] / "config.json").read_text())
    assert saved["feature_head"] == {"features": features, "lstm_layers": 2, "lstm_size": 12}
    # A resumed run needs features of the same initial checkpoint.
    flags[0] = f"--init_from={uncached_workdir}"
    fields = overrides(None, **sizes)
    config = f"--config={EXPERIMENTS}/ner.py:path={files},size=L1_H16,quick=true"
    error = refused(capfd, "train", config, f"--workdir={tmp_path / 'cached'}", *fields, *flags)
    assert "started from other parameters than --init_from, so its features differ" in error


@pytest.mark.slow
@pytest.mark.parametrize("task", ["swag", "squad", "glue"])
def test_every_task_trains_on_cached_features(ner, task, tmp_path, capfd):
    _, start = ner
    made = {"swag": (swag_files, ""), "squad": (squad_files, ""), "glue": (glue_files, "task=cola,")}
    files, more = made[task]
    given = [*FROZEN, *QUICK, "--config.feature_head.features=concat_last_four", f"--init_from={start}"]
    path = files(tmp_path / "data")
    train(f"{task}.py:{more}path={path}", tmp_path / "run", None, *given, steps=2, eval_every=2)
    # Prediction computes the features of new rows.
    assert predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    assert (
        "feature_head.features=concat_last_four and feature_head.lstm_layers=2, which cannot be converted"
        in refused(capfd, "convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--format=huggingface")
    )


@pytest.mark.slow
def test_cached_features_use_the_dtype_of_the_run(ner, tmp_path, staging):
    files, start = ner
    given = [f"--init_from={start}", *FROZEN, "--config.feature_head.features=last", "--config.model.dtype=bfloat16"]
    train(f"ner.py:path={files}", tmp_path / "run", None, *given, steps=1)
    for path in staging.glob("*.bin"):
        states = np.fromfile(path, np.float32)
        np.testing.assert_array_equal(states, states.astype(jnp.bfloat16).astype(np.float32))


def test_damaged_cached_features_are_recomputed(ner, tmp_path, staging, capfd):
    files, start = ner
    run = [
        f"ner.py:path={files}",
        tmp_path / "run",
        None,
        f"--init_from={start}",
        *FROZEN,
        "--config.feature_head.features=last",
    ]
    train(*run, steps=1, eval_every=1)
    first, other = sorted(staging.glob("*.bin"))
    before, content = first.stat().st_mtime_ns, bytearray(other.read_bytes())
    content[100] ^= 1
    other.write_bytes(bytes(content))
    content[100] ^= 1
    # As a killed run leaves one.
    abandoned = staging / temporary_name(other.name)
    abandoned.write_bytes(b"half")
    train(run[0], tmp_path / "again", *run[2:], steps=1, eval_every=1)
    assert other.read_bytes() == bytes(content) and first.stat().st_mtime_ns == before
    assert not abandoned.exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["--config.feature_head.features=last"],
            "config.feature_head.features=last needs a frozen encoder; add --config.optimizer.freeze=encoder",
        ),
        (
            ["--config.feature_head.features=first"],
            "feature_head.features is 'first'; known: embeddings, second_to_last",
        ),
        (["--config.feature_head.lstm_layers=-1"], "feature_head.lstm_layers is -1"),
    ],
)
def test_invalid_feature_settings_are_an_error(ner, given, says, tmp_path, capfd):
    files, start = ner
    config = f"--config={EXPERIMENTS}/ner.py:path={files}"
    assert says in refused(capfd, "train", config, f"--workdir={tmp_path / 'run'}", f"--init_from={start}", *given)
