"""Plans: of a step that is compiled here, held to a count by hand; of a TPU that is not here, by its own compiler."""

import dataclasses
import json
import signal
import subprocess

import jax
import jax.numpy as jnp
import pytest
from commanding import printed, refused

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.data.pretraining.config import Phase
from bertjax.estimate.chips import CHIPS
from bertjax.estimate.collectives import Collective
from bertjax.estimate.cost import StepCost, work_of
from bertjax.estimate.program import Array, read_program
from bertjax.estimate.roofline import roofline
from bertjax.estimate.showing import compare_plans, describe_plan
from bertjax.model.config import ModelConfig
from bertjax.model.flops import flops_per_token
from bertjax.tasks.objectives import masked_lm
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.sharding import make_mesh
from bertjax.training.step import abstract_state, make_train_step

MODEL = ModelConfig(
    **{
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 64,
    },
    **{
        "dtype": "float32",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_vocab_to_multiple_of": 1,
    },
)
PHASE = Phase(seq_len=64, batch_size=8, max_predictions=8, start_step=0, stop_step=10)


def work(scan_layers: str) -> list[StepCost]:
    """Of a train step on one device."""
    objective = masked_lm.MaskedLm.for_model(dataclasses.replace(MODEL, scan_layers=scan_layers))
    optimizer, mesh = make_optimizer(OptimizerConfig()), make_mesh(MeshConfig(1), jax.devices()[:1])
    batch = masked_lm.MaskedLm.for_model(MODEL).synthetic_batch(PHASE)
    step = make_train_step(objective, optimizer, mesh, grad_accum_steps=1)
    state, rate = abstract_state(objective, optimizer, mesh), jnp.float32(1)
    compiled = step.lower(state, batch, jax.random.key(0), bert_schedule(rate, rate, rate)).compile()
    return work_of(read_program(compiled.as_text()))


@pytest.mark.slow
def test_a_scanned_step_counts_what_an_unrolled_one_does_and_what_the_formula_says():
    scanned, unrolled = work(scan_layers="true"), work(scan_layers="false")
    flops = sum(one.flops for one in scanned)
    assert flops == sum(one.flops for one in unrolled)
    tokens = PHASE.batch_size * PHASE.seq_len
    # Besides: the segments' one-hot product, the bias of the output layer and the next-sentence head.
    assert flops == pytest.approx(tokens * flops_per_token(MODEL, PHASE.seq_len, PHASE.max_predictions), rel=0.02)
    in_loop = [one for one in scanned if one.times == MODEL.num_hidden_layers]
    assert sum(one.flops for one in in_loop) > 0.5 * flops


def test_each_bound_of_a_step_is_that_of_the_chip():
    chip = CHIPS["v5e"]
    # As much in matrix units as in memory, in two operations that are each bound by one of them.
    both = [StepCost(chip.flops_per_second, 0, 1, ""), StepCost(0, chip.hbm_bytes_per_second, 1, "")]
    groups = jnp.arange(4).reshape(2, 2)
    sent = Array("f32", (int(chip.ici_bytes_per_second) // 4,))
    bound = roofline(both, [Collective("all-reduce", (sent,), groups, False, 3, "")], chip)
    assert (bound.compute, bound.memory, bound.device) == (1, 1, 2)
    assert (bound.ici, bound.dcn) == (3, 0)
    assert (bound.overlapped, bound.in_turn) == (3, 5)
    across = roofline(both, [Collective("all-reduce", (sent,), groups, True, 3, "")], chip)
    assert across.ici == 0
    assert across.dcn == pytest.approx(3 * chip.ici_bytes_per_second / chip.dcn_bytes_per_second)


def test_a_core_has_its_part_of_a_chip():
    whole, core = dataclasses.replace(CHIPS["v3"], cores=1), CHIPS["v3"]
    some = [StepCost(1e12, 1e9, 1, "")]
    assert roofline(some, [], core).device == pytest.approx(2 * roofline(some, [], whole).device)


CONFIG = ["--config", "pretrain:size=L2_H128,seq_len=64", "--config.data.batch_size=16"]


def test_a_plan_of_a_tpu_that_is_not_here(tmp_path, capfd):
    kept = tmp_path / "plan.json"
    given = ["--topology", "v5e:2x2", "--price_per_chip_hour", "2", "--config.steps=1000", "--output", kept]
    *lines, last = printed(capfd, "plan", *CONFIG, *given).splitlines()
    plan = json.loads(last)
    assert json.loads(kept.read_text()) == plan
    assert (plan["chips"], plan["fits"], plan["steps"], plan["mesh"]) == (
        4,
        True,
        1000,
        {"data": 4, "fsdp": 1, "tensor": 1},
    )
    (phase,) = plan["phases"]
    assert phase["flops"] == pytest.approx(phase["model_flops"], rel=0.1)
    assert phase["memory"]["optimizer"] == pytest.approx(2 * phase["memory"]["parameters"], rel=0.01)
    assert plan["peak_memory_bytes"] < 0.01 * plan["memory_bytes_a_chip"]
    # All gradients, once.
    (sums,) = [one for one in phase["collectives"] if one["kind"] == "all-reduce"]
    parameters = phase["memory"]["parameters"]
    assert 0.5 * parameters < sums["bytes"] < 2 * parameters and not sums["crosses_slices"]
    assert plan["seconds"] == pytest.approx(1000 * plan["seconds_per_step"])
    assert plan["cost"] == pytest.approx(2 * plan["chip_hours"]) == pytest.approx(8 * plan["seconds"] / 3600)
    assert 0 < plan["mfu"] < 1
    assert describe_plan(plan).splitlines() == lines
    # A small job costs little, and not nothing.
    assert 0 < plan["cost"] < 10 and any(f", {plan['cost']:.3g} at the price given;" in line for line in lines)
    # What is started from here obeys, whatever libtpu has ignored.
    started = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True).stdout
    assert not int(started.split()[1], 16) & 1 << signal.SIGHUP - 1
    table = printed(capfd, "plan", "--compare", kept, kept)
    assert f"{plan['seconds_per_step']:,.4g} s" in table and "x 1.000" in table


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_it_would_need(capfd):
    large = ["--config", "pretrain:size=large,seq_len=512", "--config.data.batch_size=512", "--topology", "v5e:2x2"]
    *lines, last = printed(capfd, "plan", *large).splitlines()
    plan = json.loads(last)
    assert not plan["fits"] and plan["seconds"] is None
    assert plan["peak_memory_bytes"] > plan["memory_bytes_a_chip"]
    assert any("DOES NOT FIT" in line for line in lines) and any("--search" in line for line in lines)


@pytest.mark.slow
def test_two_slices_exchange_over_the_slower_network(capfd):
    *_, last = printed(capfd, "plan", *CONFIG, "--topology", "v5e:2x2", "--slices", 2).splitlines()
    (phase,) = json.loads(last)["phases"]
    assert any(one["crosses_slices"] for one in phase["collectives"])
    assert phase["roofline_seconds"]["dcn"] > 0


@pytest.mark.slow
def test_search_finds_a_batch_that_fits_and_the_plan_is_of_it(capfd):
    base = ["--config", "pretrain:size=base,seq_len=512", "--topology", "v5e:2x2", "--search"]
    *lines, last = printed(capfd, "plan", *base).splitlines()
    plan = json.loads(last)
    assert plan["fits"] and plan["peak_memory_bytes"] > 0.5 * plan["memory_bytes_a_chip"]
    assert lines[0].endswith(" ".join(plan["overrides"]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--topology", "v9:2x2"], "--topology is 'v9:2x2'; write GENERATION:SIZE such as v5e:16x16, of v2, v3"),
        (["--topology", "v5e:4"], "--topology is 'v5e:4'"),
        (["--topology", "v5e:4x4x4"], "a topology of v5e has 2 sizes"),
        (["--topology", "v5e:2x2", "--slices", "0"], "--slices is 0; it must be at least 1"),
        (["--topology", "v5e:2x2", "--price_per_chip_hour", "nan"], "--price_per_chip_hour is nan"),
        (["--topology", "v5e:2x2", "--output", "no/plan.json"], "cannot write no/plan.json (No such file"),
        ([], "needs --topology"),
    ],
)
def test_wrong_use_is_one_line(capfd, arguments, named):
    assert named in refused(capfd, "plan", *CONFIG, *arguments)


def test_a_comparison_takes_two_kept_plans_and_nothing_else(capfd):
    assert "no.json is no plan that --output wrote (" in refused(capfd, "plan", "--compare", "no.json", "no.json")
    more = ("--topology", "v4:2x2x1", "--search", "--config.steps=2")
    error = refused(capfd, "plan", "--compare", "no.json", "no.json", *CONFIG, *more)
    assert "leave out --config, --topology, --search, --config." in error


def test_plans_of_which_one_does_not_fit_are_compared_in_what_both_have():
    plan = dict.fromkeys(("flops", "bytes", "seconds_per_step", "mfu", "seconds", "chip_hours", "cost"))
    some = plan | {"chips": 4, "fits": False, "peak_memory_bytes": 2**30}
    lines = compare_plans(("a", "b"), (some, some | {"peak_memory_bytes": 2**31})).splitlines()
    assert any("1 GiB" in line and "2 GiB" in line and "x 2.000" in line for line in lines)
    assert any(line.split() == ["step", "-", "-"] for line in lines)
