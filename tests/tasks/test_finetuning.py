"""Behavior shared by all fine-tuning tasks: training, checkpoints, data and errors."""

import contextlib
import json
import shutil

import pytest
from helpers.checkpoints import edit_json, random_checkpoint
from helpers.command_runs import (
    EXPERIMENTS,
    load_task,
    overrides,
    read_metrics,
    refused,
    train,
    train_command,
)
from helpers.commanding import printed
from helpers.finetuning_data import glue_files
from helpers.small_run import with_signal

from bertjax.cli import main as cli
from bertjax.convert.portable import write_workdir
from bertjax.errors import BertjaxError
from bertjax.training import results as run_results
from bertjax.training import train as loop
from bertjax.training.checkpoint import find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_config import checkpoint_model, experiment_config


def test_final_predictions_send_heartbeats_to_the_watchdog(glue, letters, tmp_path, monkeypatch):
    beats, counts, evaluate_batches = [], [], run_results.evaluate_batches

    def count_beats(*arguments):
        before = len(beats)
        means, outputs = evaluate_batches(*arguments)
        counts.append((len(beats) - before, len(outputs)))
        return means, outputs

    monkeypatch.setattr(loop, "watchdog", lambda _: contextlib.nullcontext(lambda *_: beats.append(None)))
    monkeypatch.setattr(run_results, "evaluate_batches", count_beats)
    train(f"glue.py:task=cola,path={glue}", tmp_path / "run", letters, data__eval_batch_size=8)
    assert counts == [(counts[0][1],) * 2] and counts[0][1] > 1


def test_evaluation_batches_are_not_divided_into_micro_batches(glue, letters, tmp_path):
    sizes = {"data__batch_size": 6, "grad_accum_steps": 3, "data__eval_batch_size": 8}
    assert train(f"glue.py:task=cola,path={glue}", tmp_path / "run", letters, steps=1, **sizes)["step"] == 1


def test_checkpoint_that_does_not_fit_the_task_is_an_error(cola, glue, letters, tmp_path, capfd):
    pretrained, damaged = tmp_path / "pretrained", shutil.copytree(cola, tmp_path / "damaged")
    pretrained.mkdir()
    write_workdir(random_checkpoint(letters), pretrained)
    (damaged / "output_layer.json").write_text('{"output": "glue/cola"}')
    rte = (f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true", "--config.data.seq_len=16")
    for checkpoint, flags, message in (
        (pretrained, rte, "contains a model of kind 'pretraining', but the task needs 'sequence'"),
        (cola, (*rte, *overrides(None)), "was trained with output 'glue/cola'"),
        (damaged, (), "output_layer.json"),
    ):
        for command in ("evaluate", "predict"):
            output = ["--output", tmp_path / "out"] if command == "predict" else []
            assert message in refused(capfd, command, f"--checkpoint={checkpoint}", *flags, *output)
    assert not (tmp_path / "out").exists()


def test_loaded_model_has_the_compute_dtype_of_the_run_and_attention_for_rows_of_any_length(cola, tmp_path):
    run = shutil.copytree(cola, tmp_path / "run")
    model = json.loads((run / "config.json").read_text())["model"]
    for dtype in ("float32", "bfloat16"):
        edit_json(run / "config.json", model=model | {"dtype": dtype, "attention": "splash"})
        config = checkpoint_model(find_checkpoint(run))
        assert (config.dtype, config.attention) == (dtype, "auto")


@pytest.mark.ci
def test_saved_step_is_not_evaluated_later_because_it_could_not_become_the_best_checkpoint(glue, letters, tmp_path):
    def task_of(eval_every):
        fields = {"steps": 6, "checkpoint_every": 6, "eval_every": eval_every}
        return load_task(f"glue.py:task=cola,path={glue}", letters, **fields)

    step = loop.train(with_signal(task_of(eval_every=6), at=3), str(tmp_path))["step"]
    loop.train(task_of(eval_every=1), str(tmp_path))
    evaluated = [line["step"] for line in read_metrics(tmp_path) if "eval_matthews" in line]
    assert evaluated == [*range(step + 1, 7)]


@pytest.mark.ci
def test_missing_metrics_or_checkpoint_of_the_best_step_are_reported(glue, letters, tmp_path, log_lines, monkeypatch):
    # The first step has the best score.
    monkeypatch.setattr(loop, "evaluate", lambda task, mesh, params, heartbeat, step: ({"matthews": 1 / step}, []))
    fields = {"steps": 4, "checkpoint_every": 1, "eval_every": 1, "keep_checkpoints": 4}
    task = load_task(f"glue.py:task=cola,path={glue}", letters, **fields)
    assert loop.train(with_signal(task, at=2), str(tmp_path))["stopped"]
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    with pytest.raises(BertjaxError, match="checkpoint 3, or has other lines, so the best checkpoint is unknown"):
        loop.train(task, str(tmp_path))
    file.write_text("".join(lines))
    missing, damaged = (shutil.copytree(tmp_path, tmp_path.with_name(name)) for name in ("missing", "damaged"))
    shutil.rmtree(missing / "checkpoints" / "1")
    for array in (damaged / "checkpoints" / "1" / "params").glob("**/d/*"):
        array.write_bytes(array.read_bytes()[:-100])
    for workdir in (tmp_path, missing, damaged):
        log_lines.clear()
        assert loop.train(task, str(workdir))["checkpoint"].endswith("1" if workdir == tmp_path else "2")
        warnings = [line for line in log_lines if "the checkpoint with the best score is missing" in line]
        assert bool(warnings) == (workdir != tmp_path)
    assert (damaged / "damaged_checkpoints" / "1").is_dir()


def test_train_prints_the_best_metrics_and_writes_results_last(cola):
    results = json.loads((cola / "results.json").read_text())
    report = json.loads((cola.parent / "stdout").read_text())
    assert report["matthews"] == results["matthews"] and report["checkpoint"].endswith(results["checkpoint"])
    # A run with `results.json` counts as finished.
    *earlier, last = ((cola / name).stat().st_mtime_ns for name in ("curves.png", "confusion.png", "results.json"))
    assert max(earlier) <= last


def test_saved_config_names_the_vocabulary_in_the_workdir(cola):
    assert json.loads((cola / "config.json").read_text())["data"]["vocabulary"] == str(cola / "vocabulary.json")


def test_warm_up_is_a_tenth_of_the_steps_by_default(glue, letters):
    task = load_task(f"glue.py:task=cola,path={glue}", letters, steps=57)
    assert (task.total_steps, task.warmup_steps) == (57, 5)
    task = load_task(f"glue.py:task=cola,path={glue}", letters, steps=57, optimizer__warmup_steps=3)
    assert task.warmup_steps == 3


def test_padded_size_of_the_token_embeddings_comes_from_the_checkpoint(cola, glue):
    experiment = f"{EXPERIMENTS}/glue.py:task=cola,path={glue},quick=true"
    config = experiment_config(experiment, ["--config.model.pad_vocab_to_multiple_of=64"], find_checkpoint(cola))
    assert config.model.pad_vocab_to_multiple_of == 128


@pytest.mark.ci
def test_init_from_restores_and_reports_all_but_the_output_layer(cola, glue, letters, tmp_path, capfd):
    config = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true"
    command = ["train", config, f"--workdir={tmp_path / 'run'}", *overrides(None)]
    capfd.readouterr()
    cli.main([*command, f"--init_from={cola}"])
    # The output layers of CoLA and RTE have equal shapes but different labels, so the layer is not restored.
    error = capfd.readouterr().err
    assert "encoder (" in error and "pooler (2 arrays)" in error
    assert "initialized randomly: classifier/bias, classifier/kernel" in error
    # The workdir has the vocabulary of the checkpoint.
    assert (tmp_path / "run" / "vocab.txt").read_text() == letters.read_text()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["started_from"] == saved_fingerprint(find_checkpoint(cola))
    for checkpoint, is_other in ((cola, False), (tmp_path / "run", True)):
        capfd.readouterr()
        cli.main([*command, f"--init_from={checkpoint}"])
        error = capfd.readouterr().err
        assert "at step 4; the parameters of --init_from are not loaded" in error
        assert ("and the run started from different parameters" in error) == is_other


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: path.write_text(path.read_text().replace("not_entailment", "no", 1)), "line 3: label is 'no'"),
        (lambda path: path.write_text("index\tsentence1\tsentence2\tlabel\n"), "no usable rows"),
        (lambda path: path.unlink(), "no file "),
    ],
)
def test_malformed_or_missing_data_files_give_one_line_errors(damage, message, letters, tmp_path, capfd):
    files = glue_files(tmp_path / "glue")
    damage(files / "RTE" / "dev.tsv")
    assert message in refused(capfd, *train_command(f"glue.py:task=rte,path={files}", tmp_path / "run", letters))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--config.data.path=", "set --config.data.path to GLUE's folder"),
        ("--config.data.task=ax", "ax has no training set"),
    ],
)
def test_missing_data_is_an_error(argument, message, glue, letters, tmp_path, capfd):
    command = train_command(f"glue.py:task=rte,path={glue}", tmp_path / "run", letters, argument)
    assert message in refused(capfd, *command)


@pytest.mark.parametrize(
    "experiment", ["glue", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ner", "squad", "swag", "text"))]
)
def test_describe_and_bench_work_without_data(experiment, capfd):
    config = f"--config={EXPERIMENTS}/{experiment}.py:size=L1_H16,quick=true"
    text = printed(capfd, "describe", config)
    assert "classifier/" in text and "schedule: 4 steps" in text and "unknown without data" in text
    report = printed(capfd, "bench", "step", config, "--steps=1", "--json", *overrides(None))
    assert json.loads(report)["tokens_per_second"] > 0
    assert "needs a pre-training config" in refused(capfd, "bench", "input", config)
