"""Training phases: row lengths, batches, masks, learning rates and rotary positions that differ between steps."""

import json
import re
import shutil

import numpy as np
import pytest
from helpers.command_runs import evaluate, load_task, read_metrics, train, train_command
from helpers.small_run import with_signal

from bertjax.cli.main import main
from bertjax.data.shard import SINGLE_SHARD
from bertjax.estimate.describe import describe_task
from bertjax.training import train as loop
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.checkpoint_metadata import read_metadata

pytestmark = pytest.mark.ci

ROTARY = {"model__position_embedding_type": "rotary", "model__hidden_size": 16, "model__num_attention_heads": 1}
PHASES = (
    {"share": 2, "batch_size": 4, "global_rope_theta": 100.0, "mask_rate": 0.4, "learning_rate": 2e-3},
    {"share": 4, "batch_size": 8, "global_rope_theta": 100.0},
    {"share": 2, "seq_len": 32},
)
FIELDS = {**ROTARY, "steps": 8, "phases": PHASES, "data__seq_len": 16, "data__eval_rows": 16, "log_every": 1}
FIELDS |= {"eval_every": 2, "checkpoint_every": 1, "keep_checkpoints": 9, "optimizer__warmup_steps": 1}


def experiment(corpus) -> str:
    return f"pretrain.py:corpus={corpus}"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Returns the workdir of a finished run of three phases."""
    workdir = tmp_path_factory.mktemp("phases") / "run"
    train(experiment(corpus), workdir, None, **FIELDS)
    return workdir


def test_unset_fields_of_a_phase_are_those_of_the_run(corpus):
    task = load_task(experiment(corpus), None, **FIELDS)
    assert [(phase.seq_len, phase.batch_size, phase.start_step, phase.stop_step) for phase in task.phases] == [
        (16, 4, 0, 2),
        (16, 8, 2, 6),
        (32, 4, 6, 8),  # as many tokens as in 8 rows of 16
    ]
    assert [phase.max_predictions for phase in task.phases] == [7, 3, 5]
    batches = list(task.train_batches(0, SINGLE_SHARD))
    np.testing.assert_equal(list(task.train_batches(3, SINGLE_SHARD)), batches[3:])
    masked = [batch["masked_lm_weights"].sum() / batch["input_mask"].sum() for batch in batches]
    assert min(masked[:2]) > 0.3 and max(masked[2:]) < 0.25
    text = describe_task(task)
    assert len(re.findall(r"^steps \d+ to \d+: ", text, re.MULTILINE)) == 3 and "40% masked" in text


def test_learning_rate_is_scaled_in_its_phase_only(run):
    lines = read_metrics(run)
    assert lines[-1]["positions"] == 2 * 4 * 16 + 4 * 8 * 16 + 2 * 4 * 32
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    relative = [0, *(1 - step / 8 for step in range(1, 8))]
    peaks = [2e-3] * 2 + [3e-3] * 6
    np.testing.assert_allclose(rates, np.multiply(peaks, relative), rtol=1e-6)


def test_checkpoints_have_the_rotary_positions_of_their_phase(run):
    thetas = {
        int(path.name): read_metadata(path).architecture["global_rope_theta"]
        for path in (run / "checkpoints").iterdir()
    }
    assert thetas == dict.fromkeys(range(1, 7), 100.0) | dict.fromkeys((7, 8), 160_000.0)


def test_evaluation_uses_the_rotary_positions_of_the_checkpoint(run, tmp_path, capfd):
    config = json.loads((run / "config.json").read_text())
    for section in (config["model"], *config["phases"]):
        section["global_rope_theta"] = 7.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    losses = {line["step"]: line["eval_mlm_loss"] for line in read_metrics(run) if "eval_mlm_loss" in line}
    for step in (2, 8):
        for flags in ([], [f"--config={tmp_path}/config.json"]):
            metrics = evaluate(capfd, run / "checkpoints" / str(step), *flags)
            assert metrics["mlm_loss"] == pytest.approx(losses[step], rel=1e-5)


@pytest.mark.parametrize("step", [1, 2, 7])
def test_run_resumes_in_every_phase(corpus, run, tmp_path, step):
    loop.train(with_signal(load_task(experiment(corpus), None, **FIELDS), at=step - 1), str(tmp_path / "run"))
    main(train_command(experiment(corpus), tmp_path / "run", None, **FIELDS))
    resumed, uninterrupted = (read_metadata(path / "checkpoints" / "8") for path in (tmp_path / "run", run))
    assert resumed.fingerprints == uninterrupted.fingerprints


def test_adaptation_changes_seq_len_and_rope_theta_and_resumes_without_init_from(run, corpus, tmp_path):
    phases = ({"share": 3}, {"seq_len": 32, "global_rope_theta": 1e6})
    fields = {"steps": 4, "phases": phases, "checkpoint_every": 3, "eval_every": 1, "data__seq_len": 16}
    first, checkpoints = experiment(corpus).replace("pretrain", "adapt"), tmp_path / "run" / "checkpoints"
    train(first, tmp_path / "run", None, f"--init_from={run}", **fields)
    # The first phase has the positions of the last phase of pre-training.
    for step, theta in ((3, 160_000.0), (4, 1e6)):
        assert read_metadata(checkpoints / str(step)).architecture["global_rope_theta"] == theta
    before = read_metadata(checkpoints / "4").fingerprints
    shutil.rmtree(checkpoints / "4")
    # Without a model size and a checkpoint, the architecture is that of the workdir.
    main([word.replace(",size=L1_H16", "") for word in train_command(first, tmp_path / "run", None, **fields)])
    assert read_metadata(checkpoints / "4").fingerprints == before
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["global_rope_theta"] == 160_000.0


def test_phases_of_a_batch_size_ramp_cover_all_steps(corpus):
    ramp = "({'share':1},{'share':1},{'share':1},{'share':7,'batch_size':16})"
    for steps in (1, 3, 7, 10, 1_000_003):
        flags = [f"--config.steps={steps}", f"--config.phases={ramp}"]
        phases = experiment_config("pretrain:size=tiny", flags).resolved_phases
        assert phases[0].start_step == 0 and phases[-1].stop_step == steps and phases[-1].batch_size == 16
        assert all(a.stop_step == b.start_step for a, b in zip(phases, phases[1:], strict=False))
