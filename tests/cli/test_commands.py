"""Output of single commands with a small corpus and a one-layer model."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from helpers.command_runs import read_metrics, train, train_command
from helpers.commanding import printed, refused
from helpers.processes import environment_of

from bertjax.cli import main as cli
from bertjax.data.corpus.vocabulary import load_vocabulary

TINY = "pretrain:size=L1_H16,quick=true"
SCHEDULE = {"steps": 4, "eval_every": 2, "checkpoint_every": 2, "optimizer__warmup_steps": 0}


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory) -> Path:
    """Returns the workdir of a run with checkpoints of steps 0, 2 and 4; tests must not change it."""
    path = tmp_path_factory.mktemp("cli") / "run"
    train(f"pretrain.py:corpus={corpus},seq_len=16", path, None, **SCHEDULE)
    return path


@pytest.mark.ci
def test_damaged_parameters_are_reported_in_one_line(capfd, workdir, tmp_path):
    path = shutil.copytree(workdir, tmp_path / "run")
    files = [*(path / "checkpoints" / "4" / "params").rglob("d/*")]
    for file in files:
        file.write_bytes(bytes(byte ^ (index % 64 == 0) for index, byte in enumerate(file.read_bytes())))
    command = [sys.executable, "-m", "bertjax", "fill_mask", "--checkpoint", path, "a [MASK]"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    # Orbax detects and logs the damage in its own threads, and the command hides these logs.
    message = rf"bertjax: checkpoint {path}/checkpoints/4 is damaged \([^\n]+\); [^\n]+\n"
    assert re.fullmatch(message, result.stderr)
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "checkpoints/4 is damaged" in refused(capfd, "evaluate", "--checkpoint", path, code=1, logs=True)


@pytest.mark.ci
def test_describe_inspect_and_bench_read_the_config_of_a_run(capfd, workdir):
    text = printed(capfd, "describe", "--checkpoint", workdir)
    assert "hidden size 16" in text and "schedule: 4 steps, 0 of them warm-up" in text
    assert printed(capfd, "inspect", "--checkpoint", workdir, "--rows=1").count("A: [CLS]") == 1
    lines = printed(capfd, "bench", "step", "--checkpoint", workdir / "checkpoints/2", "--steps=1").splitlines()
    assert re.fullmatch(r"batch +8 x 16  rows x tokens", lines[1])
    assert re.fullmatch(r"speed +[\d,]+  tokens/s", lines[-1])


def test_describe_reads_architecture_and_vocabulary_from_the_init_from_checkpoint(capfd, workdir, corpus, tmp_path):
    pieces = load_vocabulary(corpus / "vocab.txt").size
    printed(capfd, "convert", workdir, tmp_path / "huggingface", "--format", "huggingface")
    for checkpoint in (workdir, tmp_path / "huggingface"):
        text = printed(capfd, "describe", "--config", "text", "--init_from", checkpoint)
        assert f"vocabulary: {pieces} tokens" in text and "hidden size 16" in text
        assert "schedule: 3 epochs, batches of 32; steps, warm-up and FLOPs are unknown without data" in text
        assert "run: " not in text
    converted = ["describe", "--checkpoint", tmp_path / "huggingface"]
    assert "has no run config" in refused(capfd, *converted)
    for option in (["--config", TINY], ["--init_from", workdir]):
        assert "--checkpoint already defines the run" in refused(capfd, "describe", "--checkpoint", workdir, *option)
    assert "or --checkpoint, such as runs/base" in refused(capfd, "inspect", "--init_from", workdir)


def test_describe_prints_fields_that_differ_from_bert_and_the_parameter_count_of_bert_base(capfd):
    text = printed(capfd, "describe", "--config=pretrain:size=base", "--config.model.hidden_act=relu")
    assert re.search("^model: .* hidden_act relu$", text, re.MULTILINE)
    assert re.search(r"encoder and pooler +109,482,240$", text, re.MULTILINE)
    lines = printed(capfd, "describe", "--config", TINY, "--fields").splitlines()
    assert any(line.split()[:1] == ["data.batch_size"] for line in lines)
    assert not any("FLOPs" in line for line in lines)


def imported_by(*arguments: str) -> tuple[set[str], str]:
    """Runs a command in a new process. Returns which of TensorFlow and Keras it imported, and its last line before."""
    code = "import sys; from bertjax.cli.main import main; main(sys.argv[1:]); "
    code += "print(*{'tensorflow', 'keras'} & {*sys.modules})"
    # A program for one device compiles faster.
    env = {name: value for name, value in environment_of(1).items() if name != "TF_USE_LEGACY_KERAS"}
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    *_, line, modules = run.stdout.splitlines()
    return {*modules.split()}, line


@pytest.mark.slow
def test_bench_step_needs_no_tensorflow_and_inspect_no_keras(corpus):
    modules, line = imported_by("bench", "step", f"--config={TINY},seq_len=16", "--steps=2", "--json")
    figures = json.loads(line)
    assert all(figures[key] > 0 for key in ("tokens_per_second", "mfu", "seconds_to_first_step", "peak_memory_bytes"))
    assert (figures["batch_size"], figures["seq_len"], modules) == (8, 16, set())
    assert imported_by("inspect", f"--config={TINY},corpus={corpus},seq_len=16", "--rows=1")[0] == {"tensorflow"}


@pytest.mark.ci
def test_train_profiles_steps_and_sends_metrics_to_an_installed_tracker(capfd, corpus, tmp_path, monkeypatch):
    tracker, traced = Mock(), []
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setattr(jax.profiler, "start_trace", traced.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("stopped"))
    overrides = ["--config.steps=2", "--config.log_every=1", "--config.optimizer.warmup_steps=1"]
    config = ["--config", f"{TINY},corpus={corpus},seq_len=16", *overrides]
    command = ["train", *config, "--workdir", tmp_path / "run"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = "--tracker wandb needs the package wandb; pip install 'bertjax[wandb]'"
    assert error in refused(capfd, *command, "--tracker=wandb") and not (tmp_path / "run").exists()
    printed(capfd, *command, "--tracker=trackio", "--profile=0:1")
    assert traced == [str(tmp_path / "run"), "stopped"]
    losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line}
    logged = [(call.kwargs["step"], call.args[0]) for call in tracker.log.call_args_list]
    sent = {step: values["train/loss"] for step, values in logged if "train/loss" in values}
    assert {1, 2} <= losses.keys() and sent == pytest.approx(losses)
    assert any("eval/mlm_loss" in values for step, values in logged if step == 2)


@pytest.mark.ci
def test_inspect_prints_rows_of_both_phases(capfd, corpus):
    config, fields = f"{TINY},corpus={corpus},seq_len=16", ["--config.steps=4", "--config.phases=({}, {'seq_len': 64})"]
    text = printed(capfd, "inspect", "--config", config, *fields, "--steps=4", "--rows=8")
    rows = [(str(step), str(row)) for step in range(4) for row in range(8 if step < 2 else 2)]
    assert re.findall(r"^step (\d), row (\d)$", text, re.MULTILINE) == rows
    assert text.count("A: [CLS]") == len(rows)


def test_inspect_logs_how_many_rows_of_a_file_are_used_and_rejects_steps_beyond_the_run(capfd, workdir, tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nun\ta\tz\nx\tb\n")
    config = ["--config", f"text:train={tmp_path}/train.tsv", "--init_from", workdir]
    assert "--steps=21 exceeds the 3 steps of the run" in refused(capfd, "inspect", *config, "--steps=21", logs=True)
    cli.main(["inspect", *map(str, config)])
    assert (
        "2 rows read, 2 used" in (log := capfd.readouterr().err) and "more fields than columns (first: line 2)" in log
    )


@pytest.mark.ci
def test_evaluate_prints_the_metrics_that_training_logged(capfd, workdir):
    lines = read_metrics(workdir)
    measured = {
        line["step"]: {key.removeprefix("eval_"): value for key, value in line.items() if key.startswith("eval_")}
        for line in lines
        if "eval_loss" in line
    }
    assert measured[2] != measured[4]
    for step, path in ((2, workdir / "checkpoints" / "2"), (4, workdir)):
        metrics = json.loads(printed(capfd, "evaluate", "--checkpoint", path))
        assert metrics == pytest.approx(measured[step], rel=1e-5)


def test_fill_mask_prints_the_most_probable_pieces(capfd, workdir):
    text = "bana [MASK] kero [MASK]"
    lines = printed(capfd, "fill_mask", "--checkpoint", workdir, "--top", 4, text).splitlines()
    assert lines[0] == text
    pieces = load_vocabulary(workdir / "vocab.txt").pieces
    assert len(lines) == 3
    for line in lines[1:]:
        items = [item.split(" ") for item in line.strip().split("   ")]
        assert len(items) == 4
        assert all(piece in pieces and percent == "%" for piece, _, percent in items)
        probabilities = [float(probability) for _, probability, _ in items]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 100


def test_fill_mask_rejects_invalid_arguments(capfd, workdir):
    for arguments, message in (
        (["a [MASK]", "--top=0"], "0 is out of range"),
        (["nothing to fill"], "no [MASK] in 'nothing to fill'"),
    ):
        assert message in refused(capfd, "fill_mask", "--checkpoint", workdir, *arguments)


def test_run_resumes_if_its_initial_checkpoint_was_removed(capfd, corpus, workdir, tmp_path):
    run, removed = shutil.copytree(workdir, tmp_path / "run"), f"--init_from={tmp_path}/removed"
    shutil.rmtree(run / "checkpoints" / "4")
    train(f"pretrain.py:corpus={corpus},seq_len=16", run, None, removed, **SCHEDULE)
    assert "does not need it" in (log := capfd.readouterr().err) and "at step 2" in log
    command = train_command(f"pretrain.py:corpus={corpus},seq_len=16", tmp_path / "new", None, removed, **SCHEDULE)
    assert "no checkpoint at" in refused(capfd, *command)


def test_sweep_rejects_the_workdir_of_a_run(capfd, workdir, tmp_path):
    config = f"--config=text:train={tmp_path}/t.tsv,dev={tmp_path}/t.tsv"
    error = refused(capfd, "sweep", config, "--init_from", workdir, "--workdir", workdir)
    assert "contains unrelated files: checkpoints, config.json, " in error and "choose another --workdir" in error
