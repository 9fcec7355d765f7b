"""Runs from start to end in one process: stopping, resuming, and what ends them early."""

import contextlib
import errno
import json
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from small_run import final_params, make, spoiled, stopped, with_attributes

from bertjax.data.corpus import blocks
from bertjax.data.corpus.store import open_corpus
from bertjax.data.corpus.vocabulary_files import ENTRY
from bertjax.data.pretraining import batches
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError, UsageError
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.training import progress
from bertjax.training import train as loop
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.evaluation import predict
from bertjax.training.optimizer import bert_schedule
from bertjax.training.sharding import make_mesh


@pytest.mark.parametrize("found", [3, pytest.param(14, marks=pytest.mark.slow)])
def test_damaged_data_ends_a_run_at_a_log_line_or_before_it_is_done(corpus, tmp_path, found):
    config, task = make(corpus)
    asked = []

    def check_data(steps):
        asked.append(steps)
        if (found == 3 and len(asked) == 1) or steps == found:
            raise BertjaxError("block 7 is damaged; prepare it again")

    with pytest.raises(
        BertjaxError, match="^block 7 is damaged; prepare it again; checkpoints of this run .* a new --workdir$"
    ):
        loop.train(with_attributes(task, check_data=check_data), str(tmp_path / "run"))
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
    next(iter(task.train_batches(0, SINGLE_SHARD)))
    assert len(list(task.eval_batches(SINGLE_SHARD))) > 0
    task.check_data(0)
    task.check_data(None)
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin, block 0 \(bytes 0 to "):
        task.check_data(1)
    with pytest.raises(BertjaxError, match=r"train\.tokens\.bin, block 0 "):
        task.baseline()


def test_packed_rows_are_trained_on_and_counted_and_held_out_rows_stay_alone(corpus, whole, tmp_path):
    config, task = make(corpus, data__packing=True, steps=3, eval_every=3)
    assert config.phases[0].spans_per_row > 1
    loop.train(task, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    real = sum((batch["sequence_ids"] > 0).sum() for batch in task.train_batches(0, SINGLE_SHARD))
    assert lines[-1]["tokens"] == real
    (before, *_), (unpacked, *_) = lines, (json.loads(line) for line in (whole / "metrics.jsonl").open())
    assert before["eval_mlm_loss"] == unpacked["eval_mlm_loss"]


def test_evaluation_takes_each_held_out_row_once(corpus):
    rows = len(open_pair_index(open_corpus(corpus), "heldout", 16, 0, 1).records)
    _, task = make(corpus, data__batch_size=rows - 3)
    labels = [batch["next_sentence_labels"] for batch in task.eval_batches(SINGLE_SHARD)]
    assert len(labels) == 2
    assert (np.concatenate(labels) >= 0).sum() == rows


def test_held_out_rows_are_traced_once_and_come_again(corpus, monkeypatch):
    traced, made = [], batches.eval_dataset
    monkeypatch.setattr(batches, "eval_dataset", lambda *args, **named: traced.append(1) or made(*args, **named))
    _, task = make(corpus)
    first, again = ([*task.eval_batches(SINGLE_SHARD)] for _ in range(2))
    assert len(traced) == 1 and len(first) > 1
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize(("seconds", "drawings"), [(0, [2, 3]), (3600, [])])
def test_curves_are_drawn_at_an_evaluation_where_they_are_old(corpus, tmp_path, monkeypatch, seconds, drawings):
    drawn = []
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_DRAWINGS", seconds)
    monkeypatch.setattr(progress, "draw_curves", lambda lines, path, score: drawn.append(len(lines)))
    schedule = bert_schedule(1e-2, 3, 14)
    with contextlib.closing(progress.Progress(make(corpus)[1], epath.Path(tmp_path), 0, schedule)) as run:
        for step in (0, 5, 10):
            run.log_evaluation(step, {"loss": 1.0, "mlm_loss": 1.0}, seconds=0.1, token_fraction=1.0)
    assert drawn == drawings


@pytest.mark.devices
@pytest.mark.parametrize(
    ("at", "number"), [(2, signal.SIGTERM), (7, signal.SIGINT), pytest.param(9, signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_stopped_run_goes_on_to_the_same_bits(corpus, whole, tmp_path, at, number, capfd):
    config, task = make(corpus)
    loop.train(stopped(task, at, number), str(tmp_path))
    assert f"stopped by a signal at step {at + 1}; saved" in capfd.readouterr().err
    assert find_checkpoint(tmp_path).name == str(at + 1)
    loop.train(task, str(tmp_path))
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
    loop.train(task, str(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_metric_lines_that_are_torn_or_missing_before_the_checkpoint_are_told(corpus, whole, tmp_path, log_lines):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "14")
    metrics = tmp_path / "run" / "metrics.jsonl"
    config, task = make(corpus)
    lines = metrics.read_text().splitlines(keepends=True)
    before = sum(json.loads(line)["step"] <= 12 for line in lines)
    # One torn, one nested deeper than JSON is read.
    metrics.write_text("".join([lines[0], lines[1][:20] + "\n", "[" * 100_000 + "\n", *lines[3:]]))
    loop.train(task, str(tmp_path / "run"))
    assert f"metrics.jsonl has {before - 2} of {before:,} lines up to step 12: 2 are torn" in "\n".join(log_lines)
    # Logged once: the next checkpoint counts the lines that are left.
    log_lines.clear()
    loop.train(task, str(tmp_path / "run"))
    assert "torn" not in "\n".join(log_lines)


def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_last_good_checkpoint(corpus, tmp_path):
    config, task = make(corpus)

    def poison(batch):
        return {**batch, "masked_lm_weights": np.full_like(batch["masked_lm_weights"], np.inf)}

    with pytest.raises(BertjaxError, match=r"of step 6 is not finite; the last good checkpoint is .*/checkpoints/4\b"):
        loop.train(spoiled(task, 5, poison), str(tmp_path))
    assert find_checkpoint(tmp_path).name == "4"


def test_an_evaluation_that_is_not_finite_stops_the_run_with_step_and_last_good_checkpoint(corpus, tmp_path):
    config, task = make(corpus, eval_every=5)

    def poisoned(share):
        for batch in task.eval_batches(share):
            yield {**batch, "masked_lm_weights": np.full_like(batch["masked_lm_weights"], np.inf)}

    evaluations = iter([task.eval_batches, poisoned])
    spoiled_later = with_attributes(task, eval_batches=lambda share: next(evaluations)(share))
    with pytest.raises(BertjaxError, match=r"evaluation loss at step 5 is not finite; .* is .*/checkpoints/4\b"):
        loop.train(spoiled_later, str(tmp_path))


def test_a_diverging_loss_stops_the_run(corpus, tmp_path):
    config, task = make(corpus, divergence_factor=0.9)
    with pytest.raises(BertjaxError, match=r"diverged at step 3.*no checkpoint was saved yet"):
        loop.train(task, str(tmp_path))


def test_init_from_takes_parameters_alone(corpus, whole, tmp_path, log_lines):
    config, task = make(corpus, steps=1)
    # The first update of BERT's schedule has learning rate 0: what is saved after it is what was loaded.
    loop.train(task, str(tmp_path), init_from=str(whole))
    assert any("starting at step 0 with the parameters of" in line for line in log_lines)
    jax.tree.map(np.testing.assert_array_equal, final_params(tmp_path, config, task), final_params(whole, config, task))


@pytest.mark.parametrize(("warmup_steps", "told"), [(1, False), (2, True)])
def test_a_learning_rate_that_is_never_reached_is_told(corpus, tmp_path, log_lines, warmup_steps, told):
    config, task = make(corpus, steps=2, optimizer__warmup_steps=warmup_steps)
    loop.train(task, str(tmp_path))
    warning = "warm-up takes 2 of 2 steps, so the learning rate does not reach 0.01"
    assert any(warning in line for line in log_lines) == told


def test_a_run_of_its_own_comes_before_init_from(corpus, whole, tmp_path, log_lines):
    config, task = make(corpus)
    loop.train(stopped(task, 4), str(tmp_path))
    loop.train(task, str(tmp_path), init_from=str(whole))
    assert any("at step 5; --init_from is ignored" in line for line in log_lines)
    assert (tmp_path / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_a_disk_that_fills_up_names_the_last_good_checkpoint(corpus, tmp_path, monkeypatch):
    config, task = make(corpus)
    save = ocp.CheckpointManager.save

    def full(self, step, **items):
        if step >= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, **items)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(BertjaxError, match=r"No space left on device.*the last good one is .*/checkpoints/4"):
        loop.train(task, str(tmp_path))


def test_two_phases_run_under_one_schedule(corpus, tmp_path):
    config, task = make(corpus, long_phase__share=0.5, long_phase__seq_len=32, data__batch_size=16)
    assert [(phase.seq_len, phase.batch_size, phase.stop_step) for phase in config.phases] == [
        (16, 16, 7),
        (32, 8, 14),
    ]
    loop.train(task, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    np.testing.assert_allclose(rates[2:], [1e-2 * (1 - step / 14) for step in (8, 11, 13)], rtol=1e-5)
    assert lines[-1]["positions"] == 14 * 256


def test_outputs_of_an_evaluation_do_not_pile_up_on_the_devices(corpus):
    config, task = make(corpus, data__batch_size=8)
    mesh = make_mesh(config.mesh)
    held = []

    def batches(share):
        for batch in [*task.eval_batches(share)] * 4:
            held.append(len(jax.live_arrays()))
            yield batch

    class LogitsOnly(MaskedLm):
        metrics = losses = ()

        def compute(self, params, batch, key):
            return {}, {"logits": batch["input_ids"] + 0.5}

    objective = LogitsOnly(task.objective.model)
    watched = with_attributes(task, objective=objective, eval_batches=batches)
    _, outputs = predict(watched, mesh, {})
    assert len(outputs) == len(held) > 5 and all(isinstance(output["logits"], np.ndarray) for output in outputs)
    assert held[3:] == [held[3]] * (len(held) - 3)


def test_processes_are_compared_by_what_they_learn_and_not_by_where_it_lies(corpus, tmp_path, monkeypatch):
    config, task = make(corpus)
    labels = json.dumps({"kind": "classes", "labels": ["b", "a"]}).encode()
    told = {}

    def take(given):
        told.update(given)
        raise UsageError("enough")

    monkeypatch.setattr(loop, "check_same_run", take)
    with pytest.raises(UsageError, match="enough"):
        loop.train(
            with_attributes(task, workdir_files={**task.workdir_files, OUTPUT_LAYER: labels}), str(tmp_path / "run")
        )
    # The paths of both files may be others on each machine.
    assert told["files"][OUTPUT_LAYER] == json.loads(labels) and ENTRY in told["files"]
    assert told["config"]["seed"] == config.seed and told["data"] == task.data_hash
    assert not (tmp_path / "run").exists()
