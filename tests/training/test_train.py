"""Runs of the training loop in one process: stopping, resuming, and errors that end a run."""

import contextlib
import errno
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from helpers.command_runs import read_metrics, refused
from helpers.processes import environment_of
from helpers.small_run import (
    config_arguments,
    load_final_params,
    make,
    with_attributes,
    with_changed_batch,
    with_signal,
)

from bertjax.data.corpus.store import open_corpus
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.data.pretraining import batches
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError, UsageError
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.tasks.objectives.step_cost import ATTENTION_FRACTION, TOKEN_FRACTION
from bertjax.training import progress, workdir
from bertjax.training import train as loop
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.evaluation import evaluate_batches
from bertjax.training.metrics import read_lines
from bertjax.training.parameters import load_params_on_host
from bertjax.training.sharding import make_mesh

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    # The run logs at steps 3, 6, 9, 12 and 14.
    ("waits", "last_step"),
    [([False], 0), pytest.param([False] * 5 + [True], 14, marks=pytest.mark.slow)],
)
def test_damaged_data_ends_the_run_at_a_logged_step_or_at_the_last_step(corpus, tmp_path, waits, last_step):
    calls = []

    def check_data_files(wait):
        calls.append(wait)
        if calls == waits:
            raise BertjaxError("block 7 is damaged; prepare it again")

    with pytest.raises(BertjaxError, match="^block 7 is damaged; prepare it again; checkpoints may be affected"):
        loop.train(with_attributes(make(corpus), check_data_files=check_data_files), str(tmp_path / "run"))
    assert calls == waits and read_metrics(tmp_path / "run")[-1]["step"] == last_step
    assert not (tmp_path / "run" / "results.json").exists()


def test_pretraining_detects_a_damaged_corpus(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus", ignore=shutil.ignore_patterns("pair_index"))
    file = tmp_path / "corpus" / "train.tokens.bin"
    file.write_bytes(file.read_bytes()[:-2] + bytes(2))
    task = make(tmp_path / "corpus")
    task.check_data_files(wait=False)
    for verify in (lambda: task.check_data_files(wait=True), task.baseline):
        with pytest.raises(BertjaxError, match=r"train\.tokens\.bin is damaged"):
            verify()


def test_packing_applies_to_training_rows_only(corpus, trained, tmp_path):
    task = make(corpus, data__packing=True, steps=3, eval_every=3)
    assert task.phases[0].max_sequences_per_row > 1
    loop.train(task, str(tmp_path))
    packed, unpacked = read_metrics(tmp_path), read_metrics(trained)
    num_tokens = sum((batch["sequence_ids"] > 0).sum() for batch in task.train_batches(0, SINGLE_SHARD))
    assert packed[-1]["tokens"] == num_tokens
    assert packed[0]["eval_mlm_loss"] == unpacked[0]["eval_mlm_loss"]


def test_training_on_packed_documents_resumes_and_evaluates_packed_rows(corpus, tmp_path):
    task = make(corpus, data__objective="none", data__packing=True, steps=8)
    heldout = [batch["sequence_ids"] for batch in task.eval_batches(SINGLE_SHARD)]
    assert max(ids.max() for ids in heldout) > 1
    rows = open_pair_index(open_corpus(corpus), "heldout", 16, 0, 1, 8, "").pass_ends[-1]
    assert sum((ids > 0).any(axis=1).sum() for ids in heldout) == rows
    loop.train(task, str(tmp_path / "single"))
    for run in (with_signal(task, 5), task):
        loop.train(run, str(tmp_path / "parts"))
    jax.tree.map(np.testing.assert_array_equal, *(load_final_params(tmp_path / name) for name in ("single", "parts")))


def test_evaluations_share_one_dataset_of_known_length(corpus, monkeypatch):
    eval_dataset = Mock(wraps=batches.eval_dataset)
    monkeypatch.setattr(batches, "eval_dataset", eval_dataset)
    task = make(corpus)
    first, second = ([*task.eval_batches(SINGLE_SHARD)] for _ in range(2))
    assert eval_dataset.call_count == 1 and len(first) == task.num_eval_batches > 1
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(("seconds", "lines_drawn"), [(0, [2, 3]), (3600, [])])
def test_evaluations_redraw_curves_at_most_once_per_interval(corpus, tmp_path, monkeypatch, seconds, lines_drawn):
    num_lines = []
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_DRAWINGS", seconds)
    monkeypatch.setattr(progress, "plot_curves", lambda task, lines, *_: num_lines.append(len(lines)))
    sums = {"token_fraction": np.array([1.0, 1.0])}
    with contextlib.closing(progress.Progress(make(corpus), epath.Path(tmp_path), 0, [])) as run:
        for step in (0, 5, 10):
            run.log_evaluation(step, {"loss": 1.0, "mlm_loss": 1.0}, seconds=0.1, train_sums=sums)
    assert num_lines == lines_drawn


def test_progress_warns_of_a_long_warm_up_and_keeps_the_first_loss(corpus, tmp_path, log_lines):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    for warmup_steps in (1, 2):
        task = make(corpus, steps=2, optimizer__warmup_steps=warmup_steps)
        with contextlib.closing(progress.Progress(task, epath.Path(tmp_path), 2, lines)) as run:
            values = {"loss": 1.0, TOKEN_FRACTION: 1.0, ATTENTION_FRACTION: 1.0}
            run.log_step(3, values)
            assert run.first_loss == 3.0
        warning = "warm-up takes 2 of 2 steps, so the learning rate does not reach 0.01"
        assert any(warning in line for line in log_lines) == (warmup_steps == 2)


def test_speed_excludes_steps_that_compile(corpus, tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with contextlib.closing(progress.Progress(make(corpus), epath.Path(tmp_path), 0, [])) as run:
        # Step 3 has another batch shape, which is compiled.
        for step, now in enumerate((30.0, 31.0, 91.0, 93.0), 1):  # noqa: B007
            if step == 3:
                jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 50.0)
            run.step_done(step, Mock(step=np.int32(step)))
        run.log_step(4, {"loss": 1.0, TOKEN_FRACTION: 1.0, ATTENTION_FRACTION: 1.0})
    (timing,) = read_lines(epath.Path(tmp_path / "timing.jsonl"))
    assert timing["rows_per_second"] == 8 / 2


def test_run_makes_no_implicit_transfers_follows_its_config_and_saves_nan_as_a_string(
    corpus, tmp_path, monkeypatch, log_lines
):
    make_train_step, watchdog, arguments = loop.make_train_step, loop.watchdog, []

    def make_guarded_step(objective, optimizer, mesh, grad_accum_steps, head_only):
        arguments.append(grad_accum_steps)
        step = make_train_step(objective, optimizer, mesh, grad_accum_steps, head_only)
        return lambda *inputs: jax.transfer_guard("disallow")(step)(*inputs)

    monkeypatch.setattr(loop, "make_train_step", make_guarded_step)
    monkeypatch.setattr(loop, "watchdog", lambda seconds: arguments.append(seconds) or watchdog(seconds))
    task = make(corpus, steps=3, grad_accum_steps=2, hang_seconds=123)
    task = with_attributes(task, final_metrics=lambda means, outputs: {**means, "ratio": np.nan})
    returned = loop.train(task, str(tmp_path / "run"))
    assert (returned["step"], returned["ratio"], {*arguments}) == (3, "nan", {2, 123})
    assert json.loads((tmp_path / "run" / "results.json").read_text())["ratio"] == "nan"
    assert [line.split() for line in log_lines if line.startswith("ratio")] == [["ratio", "nan", "nan"]]


def test_resumed_run_equals_an_uninterrupted_run(corpus, trained, tmp_path, log_lines):
    task = make(corpus)
    for at, number in ((2, signal.SIGTERM), (9, signal.SIGHUP)):
        loop.train(with_signal(task, at, number), str(tmp_path))
        assert log_lines[-1] == f"stopped by a signal; saved step {at + 1}; run the same command to resume"
        assert find_checkpoint(tmp_path).name == str(at + 1)
    loop.train(task, str(tmp_path))
    assert {f"resumed {tmp_path} at step 3", f"resumed {tmp_path} at step 10"} <= {*log_lines}
    assert (tmp_path / "metrics.jsonl").read_text() == (trained / "metrics.jsonl").read_text()
    # A checkpoint saved at a stop does not displace a periodic one.
    saved, expected = ({path.name for path in (run / "checkpoints").iterdir()} for run in (tmp_path, trained))
    assert saved == expected
    jax.tree.map(np.testing.assert_array_equal, load_final_params(tmp_path), load_final_params(trained))


def test_run_that_ends_before_or_during_an_evaluation_loses_no_step_and_no_evaluation(corpus, trained, tmp_path):
    # The run evaluates at steps 0, 7 and 14, and saves at steps 4, 8 and 12.
    task = make(corpus)
    loop.train(with_signal(task, 6), str(tmp_path))
    assert find_checkpoint(tmp_path).name == "7"
    assert [line["step"] for line in read_metrics(tmp_path) if "eval_mlm_loss" in line] == [0]
    batches = [task.eval_batches(SINGLE_SHARD), BertjaxError("preempted")]
    with pytest.raises(BertjaxError, match="preempted"):
        loop.train(with_attributes(task, eval_batches=Mock(side_effect=batches)), str(tmp_path))
    assert find_checkpoint(tmp_path).name == "14"
    for _ in range(2):  # The second call does not evaluate step 14 again.
        loop.train(task, str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_text() == (trained / "metrics.jsonl").read_text()
    jax.tree.map(np.testing.assert_array_equal, load_final_params(tmp_path), load_final_params(trained))


def test_resume_replaces_metric_lines_after_the_checkpoint_and_keeps_files_of_the_user(corpus, trained, interrupted):
    # Write a line that is nested too deeply for the JSON parser, and a truncated line.
    with open(interrupted / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000 + '\n{"step": 14, "lo')
    (interrupted / "notes.txt").write_text("mine")
    loop.train(make(corpus), str(interrupted))
    assert (interrupted / "metrics.jsonl").read_text() == (trained / "metrics.jsonl").read_text()
    assert json.loads((interrupted / "results.json").read_text())["step"] == 14
    assert (interrupted / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("is_changed", [False, True])
def test_resumed_run_warns_if_earlier_lines_of_metrics_are_missing(corpus, trained, tmp_path, is_changed, log_lines):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "14")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[is_changed:]))
    loop.train(make(corpus), str(run))
    assert any(
        "metrics.jsonl lacks lines that the run had logged before checkpoint 12" in line for line in log_lines
    ) == (is_changed)


def with_infinite_weights(batch):
    return {**batch, "masked_lm_weights": np.full_like(batch["masked_lm_weights"], np.inf)}


def with_infinite_second_evaluation(task):
    evaluations = iter([task.eval_batches, lambda shard: map(with_infinite_weights, task.eval_batches(shard))])
    return with_attributes(task, eval_batches=lambda shard: next(evaluations)(shard))


@pytest.mark.parametrize(("loss", "diverges"), [(0.29, False), (0.31, True)])
def test_small_losses_near_0_do_not_diverge(corpus, loss, diverges):
    task, state = make(corpus), Mock(bad_step=np.array(-1), sums={"mlm_loss": np.array([loss, 1.0], np.float32)})
    context = pytest.raises(BertjaxError, match="diverged") if diverges else contextlib.nullcontext()
    with context:
        loop._log_and_reset(task, state, 4, Mock(first_loss=0.005))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Step 6 is not finite either. The run logs it, and the error names the first such step.
        (lambda task: with_changed_batch(task, 4, with_infinite_weights), "step 5 is not finite; .*/checkpoints/4;"),
        (with_infinite_second_evaluation, "evaluation loss at step 7 is not finite; .*/checkpoints/4;"),
        (lambda task: make(task.config.data.corpus, divergence_factor=0.9), "diverged at step 3.*no checkpoint"),
    ],
)
def test_loss_that_is_not_finite_or_diverges_ends_the_run(corpus, tmp_path, change, message):
    with pytest.raises(BertjaxError, match=message):
        loop.train(change(make(corpus)), str(tmp_path))


def test_full_disk_error_is_one_line_with_the_last_good_checkpoint(corpus, tmp_path, monkeypatch, capfd, caplog):
    experiment, *flags = config_arguments(corpus, keep_checkpoints=1)
    serialize = ocp.type_handlers.ArrayHandler.serialize
    failed_write = Mock(result=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))

    async def serialize_until_full(self, *args, **kwargs):
        futures = await serialize(self, *args, **kwargs)
        return [failed_write] if (tmp_path / "checkpoints" / "4").exists() else futures

    # The write of step 8 fails in the background, when step 4 is no longer in Orbax's list, but still on disk.
    monkeypatch.setattr(ocp.type_handlers.ArrayHandler, "serialize", serialize_until_full)
    error = refused(capfd, "train", f"--config={experiment}", *flags, f"--workdir={tmp_path}", code=1)
    assert re.search(r"No space left on device.*the last good checkpoint is .*/checkpoints/4\b", error)
    # Orbax would log tracebacks of the same error.
    assert not [record for record in caplog.records if record.name == "absl"]


def test_optimizer_starts_again_with_the_encoder_after_the_head_steps(corpus, tmp_path):
    fields = {"steps": 4, "eval_every": 4, "checkpoint_every": 1, "keep_checkpoints": 4, "data__eval_rows": 8}
    optimizer = {"name": "adamw", "weight_decay": 0.0, "head_steps": 2, "warmup_steps": 0}
    fields |= {f"optimizer__{name}": value for name, value in optimizer.items()}
    loop.train(make(corpus, **fields), str(tmp_path))
    name = "encoder/embeddings/token"
    before, after = (load_params_on_host(epath.Path(tmp_path / "checkpoints" / step))[name] for step in "23")
    # The first bias-corrected update of a parameter is as large as the learning rate, unless its gradient is tiny.
    assert np.abs(after - before).max() == pytest.approx(1e-2, rel=1e-3)


def test_watchdog_is_suspended_while_a_finished_run_reads_the_corpus(corpus, tmp_path, monkeypatch):
    beats, beats_before = [], {}
    task = make(corpus, steps=1)

    def check_data_files(wait):
        if wait:
            beats_before["check"] = beats[-1]

    def baseline():
        beats_before["baseline"] = beats[-1]
        return {}

    monkeypatch.setattr(loop, "watchdog", lambda _: contextlib.nullcontext(lambda *seconds: beats.append(seconds)))
    task = with_attributes(task, check_data_files=check_data_files, baseline=baseline)
    loop.train(task, str(tmp_path / "run"))
    assert beats_before == {"check": (math.inf,), "baseline": (math.inf,)} and () in beats


def test_evaluation_outputs_do_not_accumulate_on_devices(corpus):
    task = make(corpus, data__batch_size=8)
    mesh = make_mesh(task.config.mesh)
    num_arrays = []

    def eval_batches(shard):
        for batch in [*task.eval_batches(shard)] * 4:
            num_arrays.append(len(jax.live_arrays()))
            yield batch

    class LogitsOnly(MaskedLm):
        metrics = ()

        def compute(self, params, batch, key):
            return {}, {"logits": batch["input_ids"] + 0.5}

    objective = LogitsOnly(task.objective.model)
    changed = with_attributes(task, objective=objective, eval_batches=eval_batches)
    _, outputs = evaluate_batches(changed, mesh, {})
    assert len(outputs) == len(num_arrays) > 5 and all(isinstance(output["logits"], np.ndarray) for output in outputs)
    assert num_arrays[3:] == [num_arrays[3]] * (len(num_arrays) - 3)


def test_hosts_compare_their_configs_data_hashes_and_workdir_files(corpus, tmp_path, monkeypatch):
    task = make(corpus)
    labels, compared = {"kind": "classes", "labels": ["b", "a"]}, {}
    task.workdir_files[OUTPUT_LAYER] = json.dumps(labels).encode()

    def record(values):
        compared.update(values)
        raise UsageError("end of test")

    monkeypatch.setattr(workdir, "assert_same_run", record)
    with pytest.raises(UsageError, match="end of test"):
        loop.train(task, str(tmp_path / "run"))
    # Contents are compared, since paths may differ between hosts.
    assert compared["files"][OUTPUT_LAYER] == labels and ENTRY in compared["files"]
    assert compared["config"]["seed"] == task.config.seed and compared["data"] == task.data_hash
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_run_killed_twenty_times_equals_an_uninterrupted_run():
    # Eight fake devices would be slow on a machine with few cores.
    command = [sys.executable, Path(__file__).parents[1] / "kill_and_resume.py", "--kills", "20"]
    run = subprocess.run(command, env=environment_of(2), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
