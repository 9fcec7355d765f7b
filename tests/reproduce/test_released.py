"""Tests of tables that are fine-tuned from released checkpoints."""

import json
import re

import pytest
from helpers import hub_server
from helpers.checkpoints import random_checkpoint
from helpers.commanding import printed, refused

from bertjax.convert import huggingface
from bertjax.reproduce import runs
from bertjax.training.checkpoint import find_checkpoint, saved_fingerprint


@pytest.fixture
def inputs(letters, tmp_path, monkeypatch):
    """Returns a folder with two Hugging Face checkpoints and CoLA files."""
    monkeypatch.setenv("BERTJAX_STAGING", str(tmp_path / "cache"))
    runs.load_released.cache_clear()
    for name, layers in (("base", 1), ("large", 2)):
        (tmp_path / name).mkdir()
        huggingface.write(
            random_checkpoint(letters, num_hidden_layers=layers, max_position_embeddings=128), tmp_path / name
        )
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    for split in ("train", "dev"):
        rows = "".join(f"x\t{index % 2}\t\t{'zu ba' if index % 2 else 'pa'}\n" for index in range(16))
        (tmp_path / "glue" / "CoLA" / f"{split}.tsv").write_text(rows)
    return tmp_path


@pytest.mark.slow
def test_reproduce_fills_a_table_from_released_checkpoints(inputs, capfd):
    arguments = f"base={inputs}/base,large={inputs}/large,glue={inputs}/glue"
    config, results = f"--config=tables/table1:scale=small,{arguments}", f"--results={inputs}/results"
    plan = ("reproduce", config, results, "--plan", "--topology=v5e:2x2")
    out = printed(capfd, *plan, "--mfu=1e-7", "--price_per_chip_hour=1.2")
    assert "pretrain" not in out and f"--init_from {inputs}/base --workdir" in out
    pattern = r"on v5e:2x2: time (\d+):(\d+):(\d+), ([\d.]+) chip-hours, cost ([\d.]+), "
    hours, minutes, seconds, chip_hours, cost = map(float, re.match(pattern, out.splitlines()[-1]).groups())
    assert chip_hours == pytest.approx(4 * (hours + minutes / 60 + seconds / 3600), rel=0.01) and chip_hours > 1
    assert cost == pytest.approx(1.2 * chip_hours, rel=0.01)
    done = json.loads(printed(capfd, "reproduce", config, results).splitlines()[-1])["done"]
    base, large = (runs.load_released(str(inputs / name)).fingerprint for name in ("base", "large"))
    assert base != large and sorted(done) == sorted([f"cola/base-{base[:8]}", f"cola/large-{large[:8]}"])
    trials = sorted((inputs / "results" / f"cola/base-{base[:8]}").glob("trials/*/results.json"))
    assert [json.loads(trial.read_text())["started_from"] for trial in trials] == [base] * 3
    # `table` rejects results of runs that started from other parameters.
    for trial in trials:
        trial.write_text(trial.read_text().replace(base, large))
    assert "did not start from the parameters of" in refused(capfd, "table", "1", results, code=1, logs=True)
    for trial in trials:
        trial.write_text(trial.read_text().replace(large, base))
    text = printed(capfd, "table", "1", results)
    assert f"BASE is {inputs}/base: 1 layers, hidden size 16, fingerprint {base[:8]}" in text
    assert f"LARGE is {inputs}/large: 2 layers" in text
    assert "BASE has 2 layers" not in text
    assert printed(capfd, "reproduce", config, results, "--plan").count(" about ") == 1


def test_runs_of_different_checkpoints_have_different_names(inputs, letters, capfd):
    def plan(checkpoint):
        config = f"--config=tables/table1:scale=small,base={checkpoint},glue={inputs}/glue"
        return printed(capfd, "reproduce", config, f"--results={inputs}/results", "--plan")

    first = plan(inputs / "base")
    huggingface.write(random_checkpoint(letters, num_hidden_layers=1, intermediate_size=64), inputs / "base")
    runs.load_released.cache_clear()
    second = plan(inputs / "base")
    names = [[line.split()[1] for line in text.splitlines() if " cola/base-" in line] for text in (first, second)]
    assert len(names[0]) == len(names[1]) == 1 and names[0] != names[1]
    # The default scale of released checkpoints is the paper's.
    config = f"--config=tables/table1:base={inputs}/base,glue={inputs}/glue"
    out = printed(capfd, "reproduce", config, f"--results={inputs}/results", "--plan")
    assert "glue:task=cola,grid=glue,path=" in out and "--seeds 5" in out
    # Without a checkpoint, LARGE needs pre-training.
    assert "needs a corpus from `bertjax prepare`, set with corpus=, or a checkpoint, set with large=" in first


def test_commit_of_a_hugging_face_checkpoint_is_recorded_in_the_config(inputs, tmp_path, monkeypatch):
    files = {path.name: path.read_bytes() for path in (inputs / "base").iterdir()}
    with hub_server.serve(monkeypatch, tmp_path / "hub") as server:
        commit = server.push("org/bert", files)
        config = runs.with_commits("tables/table1:base=hf:org/bert,glue=DIR")
        assert config == f"tables/table1:base=hf:org/bert@{commit},glue=DIR"
        assert runs.with_commits(config) == config
        loaded = runs.load_released(f"hf:org/bert@{commit}")
        assert loaded.fingerprint == runs.load_released(str(inputs / "base")).fingerprint
        assert saved_fingerprint(find_checkpoint(loaded.path)) == loaded.fingerprint
