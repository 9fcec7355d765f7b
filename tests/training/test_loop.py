"""Runs from start to end in one process: resuming, stopping, refusing, and what is left in the workdir."""

import dataclasses
import errno
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from bertjax.building import settings_of
from bertjax.config import load_config
from bertjax.corpus import blocks
from bertjax.corpus.prepare import prepare
from bertjax.corpus.store import open_corpus
from bertjax.data.pretraining.plan import pair_plan
from bertjax.data.share import WHOLE
from bertjax.errors import BertjaxError, UsageError
from bertjax.files import unfinished_name
from bertjax.tasks import pretraining
from bertjax.tasks.task import Task
from bertjax.training import loop, workdir
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.evaluation import abstract_params
from bertjax.training.parameters import load_params

# The loop itself, its shares of batches and its checkpoints, on several devices.
pytestmark = pytest.mark.devices
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"
# Logged every 3 steps and saved every 4: most checkpoints fall between two log lines.
SCHEDULE = {
    "steps": 14,
    "log_every": 3,
    "eval_every": 7,
    "checkpoint_every": 4,
    "model.num_layers": 1,
    "data.seq_len": 16,
    "data.eval_rows": 0,
    "optimizer.learning_rate": 1e-2,
}


def make(corpus: Path, **changes):
    fields = SCHEDULE | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    settings = settings_of(load_config(f"{EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true", overrides))
    return settings, pretraining.build(settings)


def spoiled(task: Task, at: int, spoil) -> Task:
    """The task with the batch of step `at` (counted from 0) passed through `spoil`."""

    def batches(start, share):
        for step, batch in enumerate(task.train_batches(start, share), start):
            yield spoil(batch) if step == at else batch

    return dataclasses.replace(task, train_batches=batches)


def stopped(task: Task, at: int, number: int = signal.SIGTERM) -> Task:
    """The task in a process that is asked to stop while step `at` is prepared."""

    def send(batch):
        os.kill(os.getpid(), number)
        return batch

    return spoiled(task, at, send)


@pytest.mark.parametrize("found", [3, pytest.param(14, marks=pytest.mark.slow)])
def test_damaged_data_ends_a_run_at_a_log_line_or_before_it_is_done(corpus, tmp_path, found):
    config, task = make(corpus)
    asked = []

    def check_data(steps):
        asked.append(steps)
        if (found == 3 and len(asked) == 1) or steps == found:
            raise BertjaxError("block 7 is damaged; prepare it again")

    with pytest.raises(BertjaxError, match="^block 7 is damaged; prepare it again; what this run .* a new --workdir$"):
        loop.train(config, dataclasses.replace(task, check_data=check_data), str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Lines are logged at 3, 6, 9, 12 and 14.
    assert asked == ([None] if found == 3 else [None] * 5 + [14])
    assert max(line["step"] for line in lines) == (0 if found == 3 else 14)
    assert not (tmp_path / "run" / "results.json").exists()


def test_a_task_checks_the_corpus_it_reads(corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns("plans"))
    monkeypatch.setattr(blocks, "WHOLE_BYTES", 0)
    # Nothing is verified when the corpus is opened, nor beside.
    monkeypatch.setattr(blocks.Verification, "verify_at_start", lambda self: None)
    monkeypatch.setattr(blocks.Verification, "start", lambda self: None)
    _, task = make(tmp_path / "corpus")
    file = tmp_path / "corpus" / "train.tokens.bin"
    file.write_bytes(file.read_bytes()[:-2] + bytes(2))
    next(iter(task.train_batches(0, WHOLE)))
    assert len(list(task.eval_batches(WHOLE))) > 0
    task.check_data(0)
    task.check_data(None)
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin, block 0 \(bytes 0 to "):
        task.check_data(1)
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin, block 0 "):
        task.baseline()


def test_links_planted_in_a_workdir_are_not_written_through(corpus, tmp_path):
    names = [
        ".write_probe",
        ".lock",
        *(f".{name}.partial" for name in ("config.json", "metrics.jsonl", "results.json")),
    ]
    (tmp_path / "run").mkdir()
    for name in (*names, ".curves.png.partial", "metrics.jsonl"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    config, task = make(corpus)
    (tmp_path / "precious").write_text("dear")
    with pytest.raises(BertjaxError, match=r"cannot open .*/run/\.lock: .*if it is a link, remove it"):
        loop.train(config, task, str(tmp_path / "run"))
    (tmp_path / "run" / ".lock").unlink()
    abandoned = tmp_path / "run" / unfinished_name("config.json")
    abandoned.write_text("half of it")
    loop.train(config, task, str(tmp_path / "run"))
    assert (tmp_path / "precious").read_text() == "dear"
    assert (tmp_path / "run" / ".write_probe").is_symlink() and not abandoned.exists()
    assert not (tmp_path / "run" / "metrics.jsonl").is_symlink()


def final_params(path: Path, config, task):
    return jax.device_get(load_params(path, abstract_params(task.objective), print))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """The workdir of a run that nothing disturbed; tests must not change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    config, task = make(corpus)
    loop.train(config, task, str(path))
    return path


def test_the_workdir_holds_all_that_is_promised(corpus, whole):
    names = {child.name for child in whole.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "curves.png", "vocab.txt", "results.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert sorted(child.name for child in (whole / "checkpoints").iterdir()) == ["12", "14", "8"]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12, 14]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 7, 14]
    assert lines[-1]["eval_mlm_loss"] < lines[0]["eval_mlm_loss"]
    last = next(line for line in reversed(lines) if "loss" in line)
    assert last["loss"] == pytest.approx(last["mlm_loss"] + last["nsp_loss"], rel=1e-5)
    assert last["positions"] == 14 * 8 * 16
    # Tokens are counted without padding, to the step, between two log lines too.
    real = [0, *np.cumsum([batch["input_mask"].sum() for batch in make(corpus)[1].train_batches(0, WHOLE)])]
    assert real[-1] < 14 * 8 * 16
    assert [line["tokens"] for line in lines] == [real[line["step"]] for line in lines]
    assert last["fill"] == pytest.approx((real[14] - real[12]) / (2 * 8 * 16), rel=1e-6)
    timing = [json.loads(line) for line in (whole / "timing.jsonl").read_text().splitlines()]
    assert timing[-1]["tokens_per_second"] == pytest.approx(last["fill"] * timing[-1]["positions_per_second"], rel=1e-4)
    assert json.loads((whole / "results.json").read_text())["step"] == 14


def test_packed_rows_are_trained_on_and_counted_and_held_out_rows_stay_alone(corpus, whole, tmp_path):
    config, task = make(corpus, data__packing=True, steps=3, eval_every=3)
    assert config.phases[0].spans_a_row > 1
    loop.train(config, task, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    real = sum((batch["sequence_ids"] > 0).sum() for batch in task.train_batches(0, WHOLE))
    assert lines[-1]["tokens"] == real
    (before, *_), (unpacked, *_) = lines, (json.loads(line) for line in (whole / "metrics.jsonl").open())
    assert before["eval_mlm_loss"] == unpacked["eval_mlm_loss"]


def test_evaluation_takes_each_held_out_row_once(corpus):
    rows = len(pair_plan(open_corpus(corpus), "heldout", 16, 0, 1).records)
    _, task = make(corpus, data__batch_size=rows - 3)
    labels = [batch["next_sentence_labels"] for batch in task.eval_batches(WHOLE)]
    assert len(labels) == 2
    assert (np.concatenate(labels) >= 0).sum() == rows


@pytest.mark.parametrize(
    ("at", "number"), [(2, signal.SIGTERM), (7, signal.SIGINT), pytest.param(9, signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_stopped_run_goes_on_to_the_same_bits(corpus, whole, tmp_path, at, number, capfd):
    config, task = make(corpus)
    loop.train(config, stopped(task, at, number), str(tmp_path))
    assert f"stopped by a signal at step {at + 1}; saved" in capfd.readouterr().err
    assert find_checkpoint(tmp_path).name == str(at + 1)
    loop.train(config, task, str(tmp_path))
    assert f"going on from step {at + 1}" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    jax.tree.map(np.testing.assert_array_equal, final_params(tmp_path, config, task), final_params(whole, config, task))


def test_lines_beyond_the_checkpoint_are_written_again_and_not_twice(corpus, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for step in ("12", "14"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 14, "lo')
    config, task = make(corpus)
    loop.train(config, task, str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_metric_lines_that_are_torn_or_missing_before_the_checkpoint_are_told(corpus, whole, tmp_path, capfd):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "14")
    metrics = tmp_path / "run" / "metrics.jsonl"
    config, task = make(corpus)
    lines = metrics.read_text().splitlines(keepends=True)
    before = sum(json.loads(line)["step"] <= 12 for line in lines)
    # One torn, one nested deeper than JSON is read.
    metrics.write_text("".join([lines[0], lines[1][:20] + "\n", "[" * 100_000 + "\n", *lines[3:]]))
    loop.train(config, task, str(tmp_path / "run"))
    said = capfd.readouterr().err
    assert f"metrics.jsonl has {before - 2} of the {before} lines that were written up to step 12; 2 are torn" in said
    # Told once: the next checkpoint knows.
    loop.train(config, task, str(tmp_path / "run"))
    assert "torn" not in capfd.readouterr().err


def test_another_config_is_refused_with_the_field_and_both_values(corpus, whole):
    config, task = make(corpus, optimizer__learning_rate=5e-3)
    with pytest.raises(UsageError, match=r"optimizer\.learning_rate: 0\.01 -> 0\.005"):
        loop.train(config, task, str(whole))


def test_a_corpus_prepared_anew_at_the_same_path_is_refused(corpus, whole, tmp_path):
    text, vocabulary = f"text:{corpus.parent}/text.txt", corpus / "vocab.txt"
    prepare([text], tmp_path / "corpus", vocabulary=vocabulary, heldout_share=0.2, workers=1)
    config, _ = make(corpus)
    _, other = make(tmp_path / "corpus")
    with pytest.raises(UsageError, match="belongs to a run on other data"):
        loop.train(config, other, str(whole))


def test_a_workdir_without_checkpoints_is_free_for_the_command_that_puts_it_right(corpus, tmp_path):
    config, task = make(corpus, optimizer__learning_rate=5e-3)
    with pytest.raises(RuntimeError, match="early"):
        loop.train(config, spoiled(task, 0, _fail_early), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["optimizer"]["learning_rate"] == 5e-3
    config, task = make(corpus, steps=4)
    loop.train(config, task, str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["optimizer"]["learning_rate"] == 1e-2
    assert json.loads((tmp_path / "results.json").read_text())["step"] == 4


def test_a_folder_of_something_else_and_the_root_are_no_workdirs(corpus, tmp_path):
    config, task = make(corpus)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UsageError, match="config.json is of something else than a run"):
        loop.train(config, task, str(tmp_path))
    assert (tmp_path / "config.json").read_text() == '{"model_type": "bert"}'
    with pytest.raises(UsageError, match="the root of the file system"):
        loop.train(config, task, "/")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "novel.txt").write_text("")
    (tmp_path / "own" / "job.log").write_text("")
    with pytest.raises(UsageError, match=r"own holds novel.txt, of no run"):
        loop.train(config, task, str(tmp_path / "own"))
    with pytest.raises(UsageError, match=r"holds heldout.documents.bin, .* and \d+ more, of no run"):
        loop.train(config, task, str(corpus))
    with pytest.raises(UsageError, match="novel.txt is a file"):
        loop.train(config, task, str(tmp_path / "own" / "novel.txt"))
    assert sorted(os.listdir(tmp_path / "own")) == ["job.log", "novel.txt"]


def _fail_early(batch):
    raise RuntimeError("early")


def test_how_often_to_log_may_change(corpus, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    config, task = make(corpus, log_every=5, keep_checkpoints=2)
    loop.train(config, task, str(tmp_path / "run"))


def test_layers_may_be_compiled_otherwise_when_a_run_goes_on(corpus, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for step in ("12", "14"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    config, task = make(corpus, model__scan_layers="false", model__remat="full")
    loop.train(config, task, str(tmp_path / "run"))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6),
        final_params(tmp_path / "run", config, task),
        final_params(whole, config, task),
    )


def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_last_good_checkpoint(corpus, tmp_path):
    config, task = make(corpus)

    def poison(batch):
        return {**batch, "masked_lm_weights": np.full_like(batch["masked_lm_weights"], np.inf)}

    with pytest.raises(BertjaxError, match=r"of step 6 is not finite; the last good checkpoint is .*/checkpoints/4\b"):
        loop.train(config, spoiled(task, 5, poison), str(tmp_path))
    assert find_checkpoint(tmp_path).name == "4"


def test_an_evaluation_that_is_not_finite_stops_the_run_with_step_and_last_good_checkpoint(corpus, tmp_path):
    config, task = make(corpus, eval_every=5)

    def poisoned(share):
        for batch in task.eval_batches(share):
            yield {**batch, "masked_lm_weights": np.full_like(batch["masked_lm_weights"], np.inf)}

    evaluations = iter([task.eval_batches, poisoned])
    spoiled_later = dataclasses.replace(task, eval_batches=lambda share: next(evaluations)(share))
    with pytest.raises(BertjaxError, match=r"held-out loss at step 5 is not finite; .* is .*/checkpoints/4\b"):
        loop.train(config, spoiled_later, str(tmp_path))


def test_a_diverging_loss_stops_the_run(corpus, tmp_path):
    config, task = make(corpus, divergence_factor=0.9)
    with pytest.raises(BertjaxError, match=r"diverged at step 3.*none was saved yet"):
        loop.train(config, task, str(tmp_path))


def test_init_from_takes_parameters_alone(corpus, whole, tmp_path, capfd):
    config, task = make(corpus, steps=1)
    # The first update of BERT's schedule has learning rate 0: what is saved after it is what was loaded.
    loop.train(config, task, str(tmp_path), init_from=str(whole))
    assert "starting at step 0 with the parameters of" in capfd.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, final_params(tmp_path, config, task), final_params(whole, config, task))


def test_a_run_of_its_own_comes_before_init_from(corpus, whole, tmp_path, capfd):
    config, task = make(corpus)
    loop.train(config, stopped(task, 4), str(tmp_path))
    loop.train(config, task, str(tmp_path), init_from=str(whole))
    assert "going on from step 5" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_a_workdir_that_cannot_be_written_is_an_error_before_any_step(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    config, task = make(corpus)
    with pytest.raises(BertjaxError, match="cannot write in the workdir"):
        loop.train(config, task, str(tmp_path / "file" / "run"))


def test_a_disk_too_small_is_an_error_before_any_step(corpus, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    config, task = make(corpus)
    with pytest.raises(BertjaxError, match="no room for two checkpoints: about .* choose another --workdir$"):
        loop.train(config, task, str(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_disk_that_fills_up_names_the_last_good_checkpoint(corpus, tmp_path, monkeypatch):
    config, task = make(corpus)
    save = ocp.CheckpointManager.save

    def full(self, step, **items):
        if step >= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, **items)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(BertjaxError, match=r"No space left on device.*the last good one is .*/checkpoints/4"):
        loop.train(config, task, str(tmp_path))


def test_two_runs_cannot_share_a_workdir(corpus, tmp_path):
    config, task = make(corpus)
    tmp_path.mkdir(exist_ok=True)
    with workdir.lock(epath.Path(tmp_path)), pytest.raises(UsageError, match="another run is using"):
        loop.train(config, task, str(tmp_path))


def test_a_relative_workdir_is_one_too(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, task = make(corpus, steps=4)
    loop.train(config, task, "run")
    assert find_checkpoint("run") == epath.Path(tmp_path / "run" / "checkpoints" / "4")


def test_two_phases_run_under_one_schedule(corpus, tmp_path):
    config, task = make(corpus, long_phase__share=0.5, long_phase__seq_len=32, data__batch_size=16)
    assert [(phase.seq_len, phase.batch_size, phase.stop_step) for phase in config.phases] == [
        (16, 16, 7),
        (32, 8, 14),
    ]
    loop.train(config, task, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    np.testing.assert_allclose(rates[2:], [1e-2 * (1 - step / 14) for step in (8, 11, 13)], rtol=1e-5)
    assert lines[-1]["positions"] == 14 * 256
