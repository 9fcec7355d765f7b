"""`--keep_optimizer`: a run that continues with the optimizer state of another run."""

import re
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from helpers.command_runs import load_task, read_metrics, refused, train, train_command

from bertjax.training import checkpoint
from bertjax.training.optimizer import make_optimizer
from bertjax.training.parameters import load_params_on_host
from bertjax.training.sharding import make_mesh
from bertjax.training.step import abstract_state

pytestmark = pytest.mark.ci

STABLE = {"optimizer__schedule": "warmup_stable_decay", "optimizer__warmup_steps": 0, "optimizer__decay_steps": 0}
FIELDS = {**STABLE, "steps": 3, "data__seq_len": 16, "log_every": 1, "data__eval_rows": 8}
DECAY = {**FIELDS, "optimizer__decay_steps": 3, "checkpoint_every": 1, "keep_checkpoints": 5}


@pytest.fixture(scope="module", params=["adamw", "muon"])
def stable(request, corpus, tmp_path_factory):
    """Returns a run with a constant learning rate, and its optimizer."""
    workdir = tmp_path_factory.mktemp("stable") / "run"
    train(f"pretrain.py:corpus={corpus}", workdir, None, **FIELDS, optimizer__name=request.param)
    return workdir, request.param


def opt_state(corpus, workdir, step, name):
    task = load_task(f"pretrain.py:corpus={corpus}", None, **FIELDS, optimizer__name=name)
    shapes = abstract_state(task.objective, make_optimizer(task.config.optimizer), make_mesh(task.config.mesh))
    restored = checkpoint.restore_opt_state(epath.Path(workdir / "checkpoints" / str(step)), shapes, name)
    paths = jax.tree_util.tree_flatten_with_path(restored)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def test_moments_and_bias_correction_continue_and_the_schedule_starts_again(stable, corpus, tmp_path):
    name = stable[1]
    workdir = shutil.copytree(stable[0], tmp_path / "source")
    experiment, fields = f"pretrain.py:corpus={corpus}", {**DECAY, "optimizer__name": name}
    for folder, flags in (("kept", ["--keep_optimizer"]), ("new", [])):
        train(experiment, tmp_path / folder, None, f"--init_from={workdir}", *flags, **fields)
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "kept") if "learning_rate" in line]
    np.testing.assert_allclose(rates, [3e-3 * (1 - (step / 3) ** 0.5) for step in range(3)], rtol=1e-5)
    before, after = opt_state(corpus, workdir, 3, name), opt_state(corpus, tmp_path / "kept", 1, name)
    counts = {path for path in before if path.endswith(".count")}
    assert counts and all((before[path], after[path]) == (3, 4) for path in counts)
    params = [load_params_on_host(epath.Path(tmp_path / each / "checkpoints" / "1")) for each in ("kept", "new")]
    assert not all(np.array_equal(params[0][path], params[1][path]) for path in params[0])
    # A killed run resumes with its own optimizer state, even if the `--init_from` workdir is gone.
    shutil.rmtree(workdir)
    for step in (2, 3):
        epath.Path(tmp_path / "kept" / "checkpoints" / str(step)).rmtree()
    train(experiment, tmp_path / "kept", None, f"--init_from={workdir}", "--keep_optimizer", **fields)
    assert all(opt_state(corpus, tmp_path / "kept", 3, name)[path] == 6 for path in counts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--init_from={workdir} --config.optimizer.name=lamb", "optimizer.name: .* -> lamb"),
        ("--init_from={workdir} --config.optimizer.freeze_layers=1", "does not fit this run"),
        ("", "--keep_optimizer continues pre-training; use it with --init_from"),
        ("--init_from={workdir} --config.optimizer.head_steps=1", "a pre-training config without head_steps"),
    ],
)
def test_another_optimizer_or_random_parameters_are_rejected(stable, corpus, tmp_path, capfd, flags, message):
    workdir, name = stable
    flags = ["--keep_optimizer", *flags.format(workdir=workdir).split()]
    fields = {**DECAY, "optimizer__name": name}
    command = train_command(f"pretrain.py:corpus={corpus}", tmp_path / "run", None, **fields)
    assert re.search(message, refused(capfd, *command, *flags))
