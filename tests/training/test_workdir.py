"""Workdirs: their files, when they are refused, and which settings may change on resume."""

import functools
import json
import os
import shutil
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from etils import epath
from helpers.command_runs import read_metrics
from helpers.small_run import load_final_params, make, with_attributes, with_changed_batch

from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import BertjaxError, UsageError
from bertjax.training import train as loop
from bertjax.training import workdir
from bertjax.training.checkpoint import find_checkpoint
from bertjax.utils.io import temporary_name


def test_lock_removes_leftovers_of_a_killed_run_and_excludes_another_run(corpus, tmp_path):
    leftover = tmp_path / temporary_name("config.json")
    leftover.write_text("half of it")
    with workdir.acquire_lock(epath.Path(tmp_path)):
        assert not leftover.exists()
        with pytest.raises(UsageError, match="another run is using"):
            loop.train(make(corpus), str(tmp_path))


def test_finished_workdir_contains_the_documented_files(corpus, trained):
    names = {child.name for child in trained.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "curves.png", "vocab.txt", "results.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert sorted(child.name for child in (trained / "checkpoints").iterdir()) == ["12", "14", "8"]
    lines = read_metrics(trained)
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 9, 12, 14]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 7, 14]
    assert lines[-1]["eval_mlm_loss"] < lines[0]["eval_mlm_loss"]
    last = next(line for line in reversed(lines) if "loss" in line)
    assert last["loss"] == pytest.approx(last["mlm_loss"] + last["nsp_loss"], rel=1e-5)
    assert last["positions"] == 14 * 8 * 16
    # `tokens` does not count padding. It is exact at every logged step.
    tokens = [0, *np.cumsum([batch["input_mask"].sum() for batch in make(corpus).train_batches(0, SINGLE_SHARD)])]
    assert tokens[-1] < 14 * 8 * 16
    assert [line["tokens"] for line in lines] == [tokens[line["step"]] for line in lines]
    assert last["token_fraction"] == pytest.approx((tokens[14] - tokens[12]) / (2 * 8 * 16), rel=1e-6)
    timing = [json.loads(line) for line in (trained / "timing.jsonl").read_text().splitlines()]
    assert timing[-1]["tokens_per_second"] == pytest.approx(
        last["token_fraction"] * timing[-1]["positions_per_second"], rel=1e-4
    )
    assert json.loads((trained / "results.json").read_text())["step"] == 14


def test_resume_with_another_config_or_on_other_data_is_rejected(corpus, trained, tmp_path):
    with pytest.raises(UsageError, match=r"optimizer\.learning_rate: 0\.01 -> 0\.005"):
        loop.train(make(corpus, optimizer__learning_rate=5e-3), str(trained))
    with pytest.raises(UsageError, match="belongs to a run on other data"):
        loop.train(with_attributes(make(corpus), data_hash="of another corpus"), str(trained))
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "data.json").unlink()
    with pytest.raises(BertjaxError, match="data.json is missing"):
        loop.train(make(corpus), str(run))


@pytest.mark.parametrize("file, content", [("results.json", '{"last_step": 14}'), ("config.json", "{")])
def test_damaged_json_file_is_an_error_that_names_it(corpus, trained, tmp_path, file, content):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / file).write_text(content)
    with pytest.raises(BertjaxError, match=file):
        loop.train(make(corpus), str(run))


@pytest.mark.ci
def test_workdir_without_checkpoints_accepts_another_config_and_may_be_relative(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    task = make(corpus, optimizer__learning_rate=5e-3)
    with pytest.raises(RuntimeError, match="early"):
        loop.train(with_changed_batch(task, 0, Mock(side_effect=RuntimeError("early"))), "run")
    assert json.loads((run / "config.json").read_text())["optimizer"]["learning_rate"] == 5e-3
    loop.train(make(corpus, steps=4), "run")
    assert json.loads((run / "config.json").read_text())["optimizer"]["learning_rate"] == 1e-2
    assert json.loads((run / "results.json").read_text())["step"] == 4
    assert find_checkpoint("run") == epath.Path(run / "checkpoints" / "4")


def test_folders_with_unrelated_files_are_rejected(corpus, tmp_path):
    task = make(corpus)
    for name in ("foreign/config.json", "own/novel.txt", "own/job.log", "lost/checkpoints/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"model_type": "bert"}')
    for path, message in (
        ("foreign", "config.json is not the config of a run"),
        ("lost", "lost contains unrelated files: checkpoints"),
        ("own", "own contains unrelated files: novel.txt; "),
    ):
        before = os.listdir(tmp_path / path)
        with pytest.raises(UsageError, match=message):
            loop.train(task, str(tmp_path / path))
        assert os.listdir(tmp_path / path) == before


@pytest.mark.ci
def test_resume_accepts_other_settings_of_logs_checkpoints_and_compilation(corpus, trained, interrupted):
    changes = {"log_every": 5, "keep_checkpoints": 1, "model__scan_layers": "false", "model__remat": "full"}
    loop.train(make(corpus, **changes), str(interrupted))
    assert [line["step"] for line in read_metrics(interrupted) if "loss" in line] == [3, 6, 10, 14]
    assert [path.name for path in (interrupted / "checkpoints").iterdir()] == ["14"]
    assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(assert_close, load_final_params(interrupted), load_final_params(trained))


@pytest.mark.ci
def test_finished_run_continues_with_more_steps(corpus, trained, tmp_path, log_lines):
    run = shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(UsageError, match=r"another config .seed"):
        loop.train(make(corpus, steps=16, seed=3), str(run))
    message = "continuing the finished run with steps increased from 14 to 16"
    assert not any(message in line for line in log_lines)
    assert loop.train(make(corpus, steps=16), str(run))["step"] == 16
    assert any(message in line for line in log_lines)


def test_only_finished_runs_of_a_single_phase_accept_more_steps(trained, tmp_path):
    run = epath.Path(shutil.copytree(trained, tmp_path / "run"))
    config, data, results = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "data", "results"))

    def check(steps, config):
        (run / "config.json").write_text(json.dumps(config))
        workdir.check_config(run, config | {"steps": steps}, data["sha256"])

    interrupted_attempt = config | {"steps": 400}
    for steps in (14, 20):
        check(steps, interrupted_attempt)
    with pytest.raises(UsageError, match="steps: 14 -> 10"):
        check(10, interrupted_attempt)
    with pytest.raises(UsageError, match="steps: 14 -> 20"):
        check(20, config | {"phases": [{"share": 1}, {"share": 1, "seq_len": 32}]})
    (run / "checkpoints" / "16").mkdir()
    check(20, config | {"steps": 20})
    with pytest.raises(UsageError, match="steps: 20 -> 30"):
        check(30, config | {"steps": 20})
    # With `steps=0`, the number of epochs determines the number of steps.
    by_epochs = config | {"steps": 0, "epochs": 1}
    (run / "results.json").write_text(json.dumps(results | {"last_step": 16, "config": by_epochs}))
    with pytest.raises(UsageError, match="steps: 0 -> 20"):
        check(20, by_epochs)


def test_too_little_disk_space_raises_before_the_first_step(corpus, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BertjaxError, match="not enough disk space for two checkpoints: .* choose another --workdir$"):
        loop.train(make(corpus), str(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()
