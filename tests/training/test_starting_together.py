"""Several processes that start from a checkpoint which they did not make, as one does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from several import WORKER, started

from bertjax.cli import main as cli
from bertjax.convert.convert import convert
from bertjax.training.sweep import SWEEP

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory) -> Path:
    """A workdir of one process, with output layers that fine-tuning leaves out."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    config = f"--config={EXPERIMENTS}/pretrain.py:size=L1_H16,corpus={corpus},quick=true"
    cli.main(["train", config, "--config.steps=2", "--config.data.seq_len=16", f"--workdir={folder}"])
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> str:
    """Arguments of a fine-tuning on texts of two classes."""
    folder = tmp_path_factory.mktemp("labelled")
    for name, count in (("train", 32), ("dev", 16)):
        rows = [f"a b c d{' e' * (index % 5)}\t{index % 2}\n" for index in range(count)]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    return f"--config={EXPERIMENTS}/text.py:train={folder}/train.tsv,dev={folder}/dev.tsv"


def command(kind: str, labelled: str, start: Path, workdir: Path, *more: str) -> list[str]:
    fields = (
        "--config.steps=4",
        "--config.data.batch_size=8",
        "--config.data.seq_len=16",
        "--config.model.dtype=float32",
    )
    return [kind, labelled, *fields, f"--init_from={start}", f"--workdir={workdir}", *more]


def in_two_processes(*commands: list[str]) -> str:
    said = ""
    for process in started([sys.executable, "-c", WORKER, json.dumps(commands)], processes=2, devices=1):
        _, err = process.communicate(timeout=120)
        said += err.decode()
        assert process.returncode == 0, said[-3000:]
    return said


def metrics(workdir: Path) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in sorted(line)]


@pytest.mark.slow
def test_two_fine_tune_what_one_pre_trained_or_another_system_wrote(pretrained, labelled, tmp_path):
    convert(str(pretrained), str(tmp_path / "foreign"), "huggingface", False, print)
    starts = {"ours": pretrained, "foreign": tmp_path / "foreign"}
    cli.main(command("train", labelled, pretrained, tmp_path / "alone"))
    in_two_processes(*(command("train", labelled, start, tmp_path / f"two-{name}") for name, start in starts.items()))
    alone = metrics(tmp_path / "alone")
    for name in starts:
        np.testing.assert_allclose(metrics(tmp_path / f"two-{name}"), alone, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_sweep_of_two_goes_on_after_a_trial_that_fails_in_both(pretrained, labelled, tmp_path):
    # A rate at which the loss is no number any more.
    grid = ("--grid", "optimizer.learning_rate=1e30,1e-4")
    said = in_two_processes(command("sweep", labelled, pretrained, tmp_path / "sweep", *grid))
    assert said.count("trial failed: ") >= 1
    trials = json.loads((tmp_path / "sweep" / SWEEP).read_text())["trials"]
    assert ["error" in trial for trial in trials] == [True, False]


@pytest.mark.slow
def test_a_sweep_of_two_ends_where_a_trial_fails_in_one(pretrained, labelled, tmp_path):
    fails_alone = (
        "import jax\n"
        "from bertjax.cli import main as cli\n"
        "from bertjax.inference import cached_features\n"
        "from bertjax.training import agreement\n"
        "agreement._FAIL_SECONDS = 5\n"
        "train = cached_features.build_training_task\n"
        "def build_training_task(*args):\n"
        "    if jax.process_index():\n"
        "        raise OSError('no such disk')\n"
        "    return train(*args)\n"
        "cached_features.build_training_task = build_training_task\n"
        "cli.main()\n"
    )
    arguments = command("sweep", labelled, pretrained, tmp_path / "sweep", "--distributed")
    processes = started([sys.executable, "-c", fails_alone, *arguments], processes=2, devices=1)
    said = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [43, 1], said
    last = said[1].splitlines()[-1]
    assert last.startswith(f"bertjax: {tmp_path}/sweep/trials/")
    assert last.endswith(" failed, and not alike in all processes: OSError: no such disk")
