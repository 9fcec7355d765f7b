"""Tests of the train step: equal results on all meshes and with micro-batches, few all-gathers, one compilation."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_config import tiny_config
from hlo_program import read_program
from jax.sharding import Mesh

from bertjax.config.mesh import MeshConfig
from bertjax.config.optimizer import OptimizerConfig
from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.objectives import language_model, masked_lm, replaced_tokens
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.sharding import make_mesh, put_batch, replicated
from bertjax.training.step import abstract_state, make_init_state, make_train_step

CONFIG = tiny_config(
    vocab_size=117, num_attention_heads=4, intermediate_size=40, max_position_embeddings=16, pad_vocab_to_multiple_of=8
)
PHASE = Phase(seq_len=16, batch_size=8, max_predictions=3, start_step=0, stop_step=10)
OPTIMIZER = make_optimizer(OptimizerConfig())
RATE = bert_schedule(1e-2, 2, 10)
OBJECTIVE = masked_lm.MaskedLm.for_model(CONFIG)
ONE_DEVICE = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])

LANGUAGE_MODELS = [dataclasses.replace(CONFIG, attention_direction="left"), dataclasses.replace(CONFIG, encoder="lstm")]
REPLACED_TOKENS = dataclasses.replace(CONFIG, model_type="electra", embedding_size=8)
MESHES = [*(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((8, 1, 1), (1, 8, 1))), (2, 2, 2), (1, 2, 4)]


def uneven_batch(seed: int) -> dict[str, np.ndarray]:
    """Returns rows with one to three predictions, so that micro-batches differ in weight; the last row is padding."""
    objective = masked_lm.MaskedLm.for_model(CONFIG)
    batch = synthetic_batch(objective.schema, objective.synthetic_sizes(PHASE), seed)
    batch["masked_lm_weights"] = (np.arange(3) < np.array([3, 1, 1, 1, 3, 3, 2, 0])[:, None]).astype(np.float32)
    batch["next_sentence_labels"][-1] = -1
    batch["input_mask"][-1] = 0
    return batch


def objective_of(config: ModelConfig):
    kind = language_model.LanguageModeling if config in LANGUAGE_MODELS else masked_lm.MaskedLm
    return (replaced_tokens.ReplacedTokens if config == REPLACED_TOKENS else kind).for_model(config)


@functools.cache
def compiled(
    mesh_sizes: tuple[int, int, int], grad_accum_steps: int, config: ModelConfig
) -> tuple[jax.stages.Compiled, Mesh]:
    """Returns the compiled train step and its mesh."""
    objective = objective_of(config)
    mesh = make_mesh(MeshConfig(*mesh_sizes), jax.devices()[: math.prod(mesh_sizes)])
    step = make_train_step(objective, OPTIMIZER, mesh, grad_accum_steps)
    batch = put_batch(uneven_batch(0), mesh)
    return step.lower(abstract_state(objective, OPTIMIZER, mesh), batch, jax.random.key(1), RATE).compile(), mesh


def run(mesh_sizes: tuple[int, int, int], grad_accum_steps: int, config: ModelConfig):
    """Returns the state after steps on three batches of `uneven_batch`."""
    step, mesh = compiled(mesh_sizes, grad_accum_steps, config)
    state = make_init_state(objective_of(config), OPTIMIZER, mesh)(jax.random.key(0))
    key, rate = jax.device_put((jax.random.key(1), jax.tree.map(jnp.asarray, RATE)), replicated(mesh))
    for seed in range(3):
        state = step(state, put_batch(uneven_batch(seed), mesh), key, rate)
    return state


@functools.cache
def single_device_state(config: ModelConfig):
    return jax.device_get(run((1, 1, 1), 1, config))


def assert_states_close(a, b):
    for (path, x), (_, y) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (a.params, jax.device_get(b).params)), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=2e-6, err_msg=str(path))
    for name, (total, weight) in a.sums.items():
        np.testing.assert_allclose(b.sums[name], [total, weight], rtol=1e-4, err_msg=name)


@pytest.mark.devices
@pytest.mark.parametrize("mesh_sizes", MESHES)
@pytest.mark.parametrize(
    "config",
    [CONFIG, REPLACED_TOKENS, *(pytest.param(config, marks=pytest.mark.slow) for config in LANGUAGE_MODELS)],
    ids=["bert", "electra", "left", "lstm"],
)
def test_training_with_dropout_is_equal_on_all_meshes(config, mesh_sizes):
    state = run(mesh_sizes, 1, config)
    assert_states_close(single_device_state(config), state)
    if mesh_sizes == (2, 2, 2) and config == CONFIG:
        kernel = state.params["encoder"]["layers"]["mlp_in"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 20)
        moment = state.opt_state[1].mu["encoder"]["layers"]["mlp_in"]["kernel"]
        assert moment.sharding == kernel.sharding


@pytest.mark.devices
@pytest.mark.parametrize("mesh_sizes", MESHES)
def test_train_step_all_gathers_kernels_twice_but_no_embeddings_or_states(mesh_sizes):
    data, _, tensor = mesh_sizes
    step, _ = compiled(mesh_sizes, 1, CONFIG)
    gathered = [
        (math.prod(array.shape), times)
        for _, instruction, times in read_program(step.as_text()).executed()
        for array in instruction.arrays
        if instruction.opcode == "all-gather" and array.dtype == "f32"
    ]
    largest = max((size for size, _ in gathered), default=0)
    assert largest < CONFIG.padded_vocab_size * CONFIG.hidden_size // tensor
    assert largest < PHASE.batch_size * PHASE.seq_len * CONFIG.hidden_size // data
    layer = CONFIG.hidden_size * CONFIG.intermediate_size // tensor
    # Two feed-forward kernels in each of two layers, in the forward and the backward pass.
    assert sum(times for size, times in gathered if size == layer) == (8 if mesh_sizes[1] > 1 else 0)


@pytest.mark.devices
def test_accumulated_gradient_equals_the_gradient_of_the_batch():
    # With micro-batches of equal weights, the test would also pass for a mean of micro-batch means.
    weights = uneven_batch(0)["masked_lm_weights"].sum(1)
    assert len({weights[start::4].sum() for start in range(4)}) > 1
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    assert_states_close(single_device_state(config), run((2, 1, 1), 4, config))


@pytest.mark.ci
def test_runs_with_different_schedules_share_one_compilation():
    optimizers = [make_optimizer(OptimizerConfig(learning_rate=rate, warmup_steps=3)) for rate in (1e-3, 1e-4)]
    step, other_step = (make_train_step(OBJECTIVE, optimizer, ONE_DEVICE, 1) for optimizer in optimizers)
    assert step is other_step
    before = step._cache_size()
    for peak in (1e-3, 1e-4):
        state = make_init_state(OBJECTIVE, optimizers[0], ONE_DEVICE)(jax.random.key(0))
        step(state, put_batch(uneven_batch(0), ONE_DEVICE), jax.random.key(1), bert_schedule(peak, 3, 10))
    assert step._cache_size() <= before + 1


def test_loss_that_depends_on_other_rows_cannot_use_micro_batches():
    class InBatchNegatives(masked_lm.MaskedLm):
        splits_into_micro_batches = False

    objective = InBatchNegatives.for_model(CONFIG)
    make_train_step(objective, OPTIMIZER, ONE_DEVICE, 1)
    with pytest.raises(UsageError, match="grad_accum_steps=2 is not supported.* depends on other rows"):
        make_train_step(objective, OPTIMIZER, ONE_DEVICE, 2)


def test_head_steps_need_parameters_outside_the_encoder():
    frozen = make_optimizer(OptimizerConfig(freeze=("masked_lm", "next_sentence", "pooler")))
    for optimizer in (OPTIMIZER, make_optimizer(OptimizerConfig(freeze=("masked_lm", "pooler")))):
        make_train_step(OBJECTIVE, optimizer, ONE_DEVICE, 1, head_only=True)
    with pytest.raises(UsageError, match="head_steps would train nothing"):
        make_train_step(OBJECTIVE, frozen, ONE_DEVICE, 1, head_only=True)
