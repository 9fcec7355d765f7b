"""Tests of continued training: from a pre-training or fine-tuning checkpoint, with more steps, and on resume."""

import json
import shutil

import numpy as np
import pytest
from helpers.checkpoints import random_checkpoint
from helpers.command_runs import EXPERIMENTS, refused, train, train_command
from helpers.commanding import failure
from helpers.small_run import load_final_params

from bertjax.cli import main as cli
from bertjax.convert import huggingface
from bertjax.data.corpus.store import open_corpus
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_metadata import saved_architecture

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Returns a folder with two tables of the same texts and different labels."""
    folder = tmp_path_factory.mktemp("tables")
    for name, labels in (("topic", ("good", "bad")), ("other", ("yes", "no"))):
        rows = "".join(f"{'zu ba' if index % 2 else 'pa ke'}\t{labels[index % 2]}\n" for index in range(16))
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + rows)
    return folder


@pytest.fixture(scope="module")
def topic(tables, letters, tmp_path_factory):
    """Returns the workdir of a finished classifier run; tests must not change it."""
    run = tmp_path_factory.mktemp("topic") / "run"
    table = tables / "topic.tsv"
    train(f"text.py:train={table},dev={table}", run, letters, steps=0, epochs=1)
    return run


def metrics_of(run) -> dict:
    results = json.loads((run / "results.json").read_text())
    return {name: value for name, value in results.items() if name != "config"}


def command(table, run, *arguments, **fields) -> list[str]:
    """Returns the arguments of `bertjax train` on a table, without a model size."""
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]
    config = f"--config={EXPERIMENTS}/text.py:train={table},dev={table},quick=true"
    return ["train", config, f"--workdir={run}", "--config.mesh.data=1", "--config.mesh.fsdp=-1", *arguments, *flags]


def test_pretraining_takes_the_architecture_of_a_checkpoint(corpus, tmp_path, capfd):
    (tmp_path / "released").mkdir()
    checkpoint = random_checkpoint(
        open_corpus(corpus).vocabulary_path, hidden_act="gelu_erf", max_position_embeddings=128
    )
    huggingface.write(checkpoint, tmp_path / "released")

    def arguments(size=""):
        config = f"--config={EXPERIMENTS}/pretrain.py:corpus={corpus},quick=true,seq_len=32{size}"
        fields = ["steps=2", "eval_every=2", "checkpoint_every=2", "data.batch_size=8", "optimizer.warmup_steps=1"]
        flags = [f"--config.{field}" for field in fields]
        return ["train", config, f"--init_from={tmp_path}/released", f"--workdir={tmp_path}/run{size[-2:]}", *flags]

    cli.main(arguments())
    assert saved_architecture(find_checkpoint(tmp_path / "run")) == checkpoint.config.architecture
    adapt = ["train", f"--config={EXPERIMENTS}/adapt.py:corpus={corpus}", *arguments()[2:]]
    for wrong in (arguments(",size=base"), [*adapt, "--config.model.hidden_size=768"]):
        assert "config.model.hidden_size=768 differs from hidden_size=16 of" in refused(capfd, *wrong)


def test_output_layer_is_kept_if_the_labels_are_the_same(topic, tables, tmp_path):
    for table, is_kept in (("topic", True), ("other", False)):
        # With this learning rate, parameters do not change.
        fields = {"steps": 1, "optimizer__learning_rate": 1e-30}
        cli.main(command(tables / f"{table}.tsv", tmp_path / table, f"--init_from={topic}", **fields))
        trained, start = (load_final_params(run)["classifier/kernel"] for run in (tmp_path / table, topic))
        assert np.allclose(trained, start, atol=1e-6) == is_kept


@pytest.fixture(scope="module")
def tuned(topic, tables, tmp_path_factory):
    """Returns the workdir of a run of two steps that started from `topic`; tests must not change it."""
    run = tmp_path_factory.mktemp("tuned") / "run"
    cli.main(command(tables / "topic.tsv", run, f"--init_from={topic}", steps=2))
    return run


def test_finished_run_continues_with_more_steps(topic, tuned, tables, tmp_path, capfd):
    run = shutil.copytree(tuned, tmp_path / "run")
    start = [tables / "topic.tsv", run, f"--init_from={topic}"]
    cli.main(command(*start, steps=4))
    assert "continuing the finished run with steps increased from 2 to 4" in capfd.readouterr().err
    assert json.loads((run / "results.json").read_text())["last_step"] == 4
    _, log = failure(capfd, *command(*start, steps=5, seed=3))
    assert "another config (seed" in log and "continuing" not in log
    assert "another config (steps" in refused(capfd, *command(*start, steps=3))
    # An interrupted run cannot change its number of steps.
    (run / "results.json").unlink()
    assert "another config (steps" in refused(capfd, *command(*start, steps=6))


def test_run_of_epochs_does_not_continue_with_steps(topic, tables, letters, capfd):
    experiment = f"text.py:train={tables}/topic.tsv,dev={tables}/topic.tsv"
    command = train_command(experiment, topic, letters, steps=4, epochs=1)
    assert "another config (steps: 0 -> 4" in refused(capfd, *command)


def test_run_resumes_without_its_initial_checkpoint(tuned, tables, tmp_path, capfd):
    table, run = tables / "topic.tsv", shutil.copytree(tuned, tmp_path / "run")
    (run / "results.json").unlink()
    cli.main(command(table, run, steps=2))
    assert f"resumed {run} at step 2\n" in capfd.readouterr().err
    assert metrics_of(run) == metrics_of(tuned)
    assert "no initial checkpoint; use --init_from" in refused(capfd, *command(table, tmp_path / "new", steps=2))
