"""`bertjax plan` with the TPU compiler, on a machine without TPUs."""

import json
import re

import pytest
from helpers.commanding import printed, refused

from bertjax.estimate.plan import describe_plan
from bertjax.estimate.topology import CHIPS

CONFIG = ["--config", "pretrain:size=L2_H128,seq_len=64", "--config.data.batch_size=16"]


def planned(capfd, *arguments) -> dict:
    return json.loads(printed(capfd, "plan", *arguments, "--json"))


@pytest.mark.ci
def test_plan_has_memory_communication_time_and_cost(tmp_path, capfd):
    file = tmp_path / "plan.json"
    options = ["--topology=v5e:2x2", "--mfu=0.25", "--price_per_chip_hour=2", "--config.steps=1000", f"--output={file}"]
    text = printed(capfd, "plan", *CONFIG, *options)
    plan = json.loads(file.read_text())
    assert text.rstrip() == describe_plan(plan)
    assert (plan["chips"], plan["fits"], plan["steps"]) == (4, True, 1000)
    assert plan["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    (phase,) = plan["phases"]
    assert phase["memory"]["optimizer"] == pytest.approx(2 * phase["memory"]["parameters"], rel=0.01)
    assert plan["peak_memory_bytes"] < 0.01 * plan["memory_bytes_per_chip"]
    # Gradients are bfloat16, except those of the token table (30,592 x 128).
    (gradients,) = phase["communication"]
    gradient_bytes = (phase["memory"]["parameters"] + 4 * 30592 * 128) / 2
    assert gradients["collective"] == "all-reduce" and not gradients["crosses_slices"]
    assert gradients["sent_bytes"] == pytest.approx(2 * 3 / 4 * gradient_bytes)
    chip = CHIPS["v5e"]
    assert phase["bounds"] == pytest.approx(
        {
            "model_flops": phase["model_flops"] / (4 * chip.flops_per_second * 0.25),
            "ici": gradients["sent_bytes"] / chip.ici_bytes_per_second,
            "dcn": 0,
        }
    )
    assert phase["seconds_per_step"] == max(phase["bounds"].values())
    assert plan["seconds"] == pytest.approx(1000 * phase["seconds_per_step"])
    assert plan["cost"] == pytest.approx(2 * plan["chip_hours"]) == pytest.approx(8 * plan["seconds"] / 3600)
    # A cost below 1 is not rounded to 0.
    assert 0 < plan["cost"] < 10
    assert re.search(rf"^cost +{plan['cost']:.3g}  at the given price$", text, re.MULTILINE)


@pytest.mark.slow
def test_steps_and_times_are_unknown_without_data(capfd):
    arguments = ["--config", "text:size=L2_H128", "--topology", "v5e:2x2", "--price_per_chip_hour", "2"]
    plan = planned(capfd, *arguments)
    assert plan["fits"] and [plan[name] for name in ("steps", "seconds", "chip_hours", "cost")] == [None] * 4
    assert describe_plan(plan).splitlines()[-1].split(maxsplit=1) == ["steps", "unknown without data"]


@pytest.mark.slow
def test_plan_shows_the_memory_of_a_step_that_does_not_fit(capfd):
    large = ["--config", "pretrain:size=large,seq_len=512", "--config.data.batch_size=512", "--topology", "v5e:2x2"]
    plan = planned(capfd, *large)
    assert not plan["fits"] and plan["seconds"] is None
    assert plan["peak_memory_bytes"] > plan["memory_bytes_per_chip"]
    text = describe_plan(plan)
    assert "DOES NOT FIT" in text and "grad_accum_steps" in text


@pytest.mark.slow
def test_two_slices_exchange_gradients_over_the_slower_network(capfd):
    plan = planned(capfd, *CONFIG, "--topology", "v5e:2x2", "--slices", 2)
    (phase,) = plan["phases"]
    assert any(each["crosses_slices"] for each in phase["communication"])
    assert phase["bounds"].pop("dcn") > 0
    # Plans for chips whose bandwidth between slices is not published, such as v4, have no `dcn` bound.
    assert "and an unknown time between slices" in describe_plan(plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:2x2"], "invalid --topology 'v9:2x2'; use GENERATION:SIZE, such as v5e:16x16"),
        (["--topology", "v5e:4x4x4"], "use v5e:4x4"),
        (["--topology", "v5e:2x2", "--mfu", "1.5"], "--mfu: 1.5 is out of range"),
        (["--topology", "v5e:2x2", "--price_per_chip_hour", "nan"], "--price_per_chip_hour: nan is out of range"),
        (["--topology", "v5e:2x2", "--output", "no/plan.json"], "no folder for --output: "),
        ([], "required: --topology"),
    ],
)
def test_wrong_arguments_are_rejected(capfd, arguments, message):
    assert message in refused(capfd, "plan", *CONFIG, *arguments)
