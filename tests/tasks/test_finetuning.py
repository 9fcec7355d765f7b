"""Behavior shared by all fine-tuning tasks: training, checkpoints, data and errors."""

import contextlib
import json
import re
import shutil

import pytest
from helpers.checkpoints import random_checkpoint
from helpers.command_runs import (
    EXPERIMENTS,
    evaluate,
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
from bertjax.training.checkpoint_metadata import read_metadata


def test_best_and_last_checkpoints_are_kept_and_the_best_is_used(cola, capfd):
    results = json.loads((cola / "results.json").read_text())
    steps = {int(child.name) for child in (cola / "checkpoints").iterdir()}
    assert steps == {results["step"], 80}
    best = find_checkpoint(cola)
    assert best == cola.resolve() / results["checkpoint"] and read_metadata(best).score == results["matthews"]
    assert evaluate(capfd, cola)["matthews"] == pytest.approx(results["matthews"])


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


def test_padding_does_not_change_metrics(cola, capfd):
    bucketed, padded = (
        evaluate(capfd, cola, f"--config.data.bucket={bucket}", "--config.data.eval_batch_size=8") for bucket in (32, 0)
    )
    assert bucketed == pytest.approx(padded, rel=1e-6)


def test_pretraining_checkpoint_without_output_layer_is_an_error(glue, letters, tmp_path, capfd):
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    write_workdir(random_checkpoint(letters), pretrained)
    config = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true"
    for command in (["evaluate"], ["predict", f"--output={tmp_path}"]):
        error = refused(capfd, *command, config, f"--checkpoint={pretrained}", "--config.data.seq_len=16")
        assert "contains a model of kind 'pretraining', but the task needs 'sequence'" in error


@pytest.mark.parametrize("content", ["null", "[1", '{"output": "glue/cola"}'])
def test_damaged_output_layer_is_an_error(cola, tmp_path, capfd, content):
    shutil.copytree(cola, tmp_path / "run")
    (tmp_path / "run" / "output_layer.json").write_text(content)
    for command in (["evaluate"], ["predict", f"--output={tmp_path}/out"]):
        assert "output_layer.json" in refused(capfd, *command, f"--checkpoint={tmp_path}/run")
    assert not (tmp_path / "out").exists()


def test_compute_dtype_of_a_loaded_model_is_that_of_the_run(cola, tmp_path):
    shutil.copytree(cola, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    for dtype in ("float32", "bfloat16"):
        config["model"]["dtype"] = dtype
        file.write_text(json.dumps(config))
        assert checkpoint_model(find_checkpoint(tmp_path / "run")).dtype == dtype


def test_checkpoint_of_another_task_is_an_error(cola, glue, letters, tmp_path, capfd):
    for command in (["evaluate"], ["predict", f"--output={tmp_path}"]):
        config = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true"
        error = refused(capfd, *command, f"--checkpoint={cola}", config, *overrides(None))
        assert "was trained with output 'glue/cola'" in error
    error = refused(capfd, "bench", "input", f"--config={EXPERIMENTS}/glue.py:size=L1_H16")
    assert "needs a pre-training config" in error


@pytest.mark.ci
def test_resumed_run_equals_an_uninterrupted_run(glue, letters, tmp_path):
    fields = {"steps": 6, "log_every": 2, "checkpoint_every": 4, "eval_every": 3, "model__hidden_dropout_prob": 0.1}
    task = load_task(f"glue.py:task=cola,path={glue}", letters, **fields)
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    loop.train(task, str(uninterrupted))
    assert loop.train(with_signal(task, at=3), str(resumed))["stopped"]
    assert not (resumed / "results.json").exists()
    loop.train(task, str(resumed))
    assert (uninterrupted / "metrics.jsonl").read_text() == (resumed / "metrics.jsonl").read_text()
    assert saved_fingerprint(find_checkpoint(uninterrupted)) == saved_fingerprint(find_checkpoint(resumed))


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
    other = json.dumps({**read_metrics(tmp_path)[-1], "eval_matthews": 0.123}) + "\n"
    for content in ([], lines[:-1], [*lines[:-1], other]):
        file.write_text("".join(content))
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


def test_model_config_that_differs_from_the_checkpoint_is_an_error(cola, glue, tmp_path, capfd):
    experiment = f"{EXPERIMENTS}/glue.py:task=cola,path={glue},quick=true"
    training = ["train", f"--config={experiment}", f"--workdir={tmp_path / 'run'}", f"--init_from={cola}"]
    for command in (["evaluate", f"--checkpoint={cola}"], [*training, *overrides(None)]):
        error = refused(capfd, *command, "--config.model.hidden_act=relu")
        assert "config.model.hidden_act=relu differs from hidden_act=gelu_tanh of" in error
    # The padded size of the token embeddings always comes from the checkpoint.
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
        (lambda path: path.write_text("index\tsentence1\n0\ta\n"), "no column 'sentence2'"),
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
        ("--config.data.vocabulary=", "no initial checkpoint"),
    ],
)
def test_missing_data_or_vocabulary_is_an_error(argument, message, glue, letters, tmp_path, capfd):
    command = train_command(f"glue.py:task=rte,path={glue}", tmp_path / "run", letters, argument)
    assert message in refused(capfd, *command)


@pytest.mark.parametrize("task, text", [("cola", "A: [CLS] "), ("rte", "B: ")])
def test_inspect_shows_word_pieces_and_describe_the_cost(task, text, glue, letters, capfd):
    config = f"--config={EXPERIMENTS}/glue.py:task={task},path={glue},size=L1_H16,quick=true"
    assert "32 rows" in printed(capfd, "describe", config, *overrides(letters))
    output = printed(capfd, "inspect", config, "--rows=2", *overrides(letters))
    assert output.count("step 0, row") == 2 and text in output and "padding" in output
    names = "0|1" if task == "cola" else "entailment|not_entailment"
    assert "[SEP]" in output and len(re.findall(f"^label: ({names})$", output, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    "experiment", ["glue", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ner", "squad", "swag", "text"))]
)
def test_describe_and_bench_work_without_data(experiment, capfd):
    config = f"--config={EXPERIMENTS}/{experiment}.py:size=L1_H16,quick=true"
    text = printed(capfd, "describe", config)
    assert "classifier/" in text and "schedule: 4 steps" in text and "unknown without data" in text
    report = printed(capfd, "bench", "step", config, "--steps=1", "--json", *overrides(None))
    assert json.loads(report)["tokens_per_second"] > 0


@pytest.mark.slow
def test_predict_accepts_short_texts_for_a_model_with_splash_attention(glue, letters, tmp_path, capfd):
    fields = {"steps": 1, "model__attention": "splash", "data__seq_len": 128, "data__bucket": 0}
    train(f"glue.py:task=cola,path={glue}", tmp_path / "run", letters, **fields, model__max_position_embeddings=128)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["attention"] == "splash"
    assert "ba ke" in printed(capfd, "predict", f"--checkpoint={tmp_path / 'run'}", "ba ke")
    evaluate(capfd, tmp_path / "run", "--config.data.bucket=32", "--config.model.attention=auto")
