"""What single commands print and write, on a small corpus and a model of one layer."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commanding import ends, printed, refused

from bertjax.cli import main as cli
from bertjax.config.load import load_config
from bertjax.data.corpus.tokenizer import load_vocabulary
from bertjax.data.shard import SINGLE_SHARD
from bertjax.tasks import pretraining
from bertjax.tasks.build import parse_config

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "pretrain.py"
TINY = f"{EXPERIMENT}:size=L1_H16,quick=true"
# The last of two equal flags holds; a program for eight takes longer to compile.
ONE_DEVICE = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
BATCH_KEYS = {
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "masked_lm_weights",
    "next_sentence_labels",
}


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory) -> Path:
    """A run of four steps, evaluated and saved at 0, 2 and 4; tests must not change it."""
    path = tmp_path_factory.mktemp("cli") / "run"
    every = [f"--config.{name}={value}" for name, value in (("steps", 4), ("eval_every", 2), ("checkpoint_every", 2))]
    rate = ["--config.optimizer.warmup_steps=0", "--config.optimizer.learning_rate=1e-2"]
    cli.main(["train", f"--config={TINY},corpus={corpus},seq_len=16", f"--workdir={path}", *every, *rate])
    return path


def test_a_damaged_checkpoint_is_a_failure_and_not_wrong_use(capfd, workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    error = ends(capfd, "evaluate", "--checkpoint", tmp_path / "run")
    assert error[0] == 1
    assert "checkpoints/4 is damaged" in error[1].splitlines()[-1]
    assert "Traceback" not in error[1]


def damaged(workdir: Path, folder: Path) -> Path:
    """A copy of a run whose parameters' files are not what was saved; libraries find that in threads of their own."""
    shutil.copytree(workdir, folder)
    for file in (folder / "checkpoints" / "4" / "params").rglob("d/*"):
        file.write_bytes(bytes(byte ^ (index % 64 == 0) for index, byte in enumerate(file.read_bytes())))
    return folder


def test_what_libraries_say_of_a_damaged_checkpoint_is_held_back_but_with_debug(workdir, tmp_path):
    path = damaged(workdir, tmp_path / "run")
    command = [sys.executable, "-m", "bertjax", "fill_mask", "--checkpoint", path, "a [MASK]"]
    plain, debug = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=120) for more in ([], ["--debug"])
    )
    assert plain.returncode == debug.returncode == 1
    assert re.fullmatch(rf"bertjax: checkpoint {path}/checkpoints/4 is damaged \([^\n]+\); [^\n]+\n", plain.stderr)
    assert "Traceback" in debug.stderr and "BertjaxError" in debug.stderr


@pytest.mark.parametrize(("size", "count"), [("base", "109,482,240"), ("large", "335,141,888")])
def test_describe_prints_the_papers_count(capfd, size, count):
    text = printed(capfd, "describe", "--config", f"{EXPERIMENT}:size={size}")
    assert re.search(rf"encoder and pooler +{count}$", text, re.MULTILINE)


@pytest.mark.slow
def test_bench_step_needs_no_tensorflow_and_ends_with_json():
    code = (
        "import sys; from bertjax.cli.main import main; main(sys.argv[1:]); sys.exit(3 * ('tensorflow' in sys.modules))"
    )
    arguments = ["bench", "step", f"--config={TINY},seq_len=16", "--steps=2"]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ONE_DEVICE)
    assert run.returncode == 0, f"exit code {run.returncode} (3: TensorFlow was imported)\n{run.stderr}"
    figures = json.loads(run.stdout.splitlines()[-1])
    for key in ("tokens_per_second", "mfu", "seconds_to_first_step", "peak_memory_bytes"):
        assert figures[key] > 0
    assert (figures["batch_size"], figures["seq_len"]) == (8, 16)


@pytest.mark.slow
def test_tensorflow_comes_without_keras(corpus):
    code = "import sys; from bertjax.cli.main import main; main(sys.argv[1:]); print(*{'tensorflow', 'keras'} & {*sys.modules})"
    arguments = ["inspect", "--config", f"{TINY},corpus={corpus},seq_len=16", "--rows=1"]
    env = {name: value for name, value in ONE_DEVICE.items() if name != "TF_USE_LEGACY_KERAS"}
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert run.stdout.splitlines()[-1:] == ["tensorflow"], run.stderr


def test_inspect_shows_rows_and_writes_the_batches_of_the_first_steps(capfd, corpus, tmp_path):
    config = f"{TINY},corpus={corpus},seq_len=16"
    text = printed(capfd, "inspect", "--config", config, "--steps", 3, "--rows", 2, "--npz", tmp_path / "batches.npz")
    rows = re.findall(r"^step (\d), row (\d)$", text, re.MULTILINE)
    assert rows == [(str(step), str(row)) for step in range(3) for row in range(2)]
    assert text.count("A: [CLS]") == 6
    written = np.load(tmp_path / "batches.npz")
    assert set(written) == BATCH_KEYS
    assert written["input_ids"].shape == (3, 8, 16)
    task = pretraining.Task(parse_config(load_config(config, [])))
    for step in range(3):
        batch = next(task.train_batches(step, SINGLE_SHARD))
        for name in BATCH_KEYS:
            np.testing.assert_array_equal(written[name][step], batch[name])


def test_inspect_refuses_steps_beyond_the_run(capfd, corpus):
    assert "--steps is 21" in refused(capfd, "inspect", "--config", f"{TINY},corpus={corpus}", "--steps", 21)


def test_evaluate_prints_what_training_measured_at_that_step(capfd, workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    measured = {
        line["step"]: {key.removeprefix("eval_"): value for key, value in line.items() if key.startswith("eval_")}
        for line in lines
        if "eval_loss" in line
    }
    assert measured[2] != measured[4]
    for step, path in ((2, workdir / "checkpoints" / "2"), (4, workdir)):
        found = json.loads(printed(capfd, "evaluate", "--checkpoint", path))
        assert found == pytest.approx(measured[step], rel=1e-5)


def test_fill_prints_the_best_pieces_of_each_mask(capfd, workdir):
    text = "bana [MASK] kero [MASK]"
    lines = printed(capfd, "fill_mask", "--checkpoint", workdir, "--top", 4, text).splitlines()
    assert lines[0] == text
    pieces = load_vocabulary(workdir / "vocab.txt").pieces
    assert len(lines) == 3
    for line in lines[1:]:
        found = [item.split(" ") for item in line.strip().split("   ")]
        assert len(found) == 4
        assert all(piece in pieces and percent == "%" for piece, _, percent in found)
        probabilities = [float(probability) for _, probability, _ in found]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 100


def test_fill_refuses_more_pieces_than_there_are(capfd, workdir):
    error = refused(capfd, "fill_mask", "--checkpoint", workdir, "--top", 100_000, "a [MASK]")
    assert "--top is 100000; the vocabulary has" in error


def test_a_checkpoint_of_another_vocabulary_is_refused(capfd, corpus, workdir, tmp_path):
    pieces = (corpus / "vocab.txt").read_text().split("\n")[:-1]
    (tmp_path / "vocab.txt").write_text("\n".join([*pieces[:5], *reversed(pieces[5:])]) + "\n")
    other = tmp_path / "corpus"
    given = ["--input", f"text:{corpus.parent}/text.txt", "--vocab", tmp_path / "vocab.txt", "--heldout", 0.1]
    printed(capfd, "prepare", *given, "--output", other)
    config = ["--config", f"{TINY},corpus={other},seq_len=16"]
    assert "another vocabulary" in refused(capfd, "evaluate", "--checkpoint", workdir, *config)
    started = ["train", *config, "--workdir", tmp_path / "run", "--init_from", workdir]
    assert "another vocabulary" in refused(capfd, *started)


def test_sigterm_saves_and_exits_with_42_and_the_same_command_goes_on(corpus, tmp_path):
    config = [f"--config={TINY},corpus={corpus},seq_len=16", "--config.steps=2000", "--config.eval_every=2000"]
    command = [sys.executable, "-m", "bertjax", "train", *config, f"--workdir={tmp_path}"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_DEVICE)
    said = []
    for line in run.stderr:
        said.append(line)
        if line.startswith("step 5/"):
            run.send_signal(signal.SIGTERM)
            break
    out, rest = run.communicate(timeout=120)
    assert run.returncode == 42, "".join(said) + rest
    assert "asked to stop" in rest and "stopped by a signal at step" in rest and "saved" in rest
    result = json.loads(out)
    assert result["stopped"] and (tmp_path / "checkpoints" / str(result["step"])).is_dir()


def test_fill_needs_a_mask_and_a_checkpoint(capfd, workdir, tmp_path):
    assert "no [MASK] in 'nothing to fill'" in refused(capfd, "fill_mask", "--checkpoint", workdir, "nothing to fill")
    assert f"no checkpoint at {tmp_path}" in refused(capfd, "fill_mask", "--checkpoint", tmp_path, "a [MASK]")
    assert "--top is 0" in refused(capfd, "fill_mask", "--checkpoint", workdir, "--top", 0, "a [MASK]")
