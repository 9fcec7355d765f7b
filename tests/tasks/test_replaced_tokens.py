"""Replaced-token detection: loss, gradients and samples, and its checkpoints in other tasks and in transformers."""

import dataclasses
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.command_runs import EXPERIMENTS, evaluate, load_task, overrides, read_metrics, train, train_command
from helpers.commanding import printed
from helpers.finetuning_data import glue_files
from helpers.tiny_config import tiny_config

import bertjax
from bertjax.cli import main as cli
from bertjax.convert import huggingface
from bertjax.convert.convert import convert
from bertjax.convert.portable import PortableCheckpoint
from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.estimate.describe import parameter_counts
from bertjax.model.dropout import gumbel_noise
from bertjax.tasks.objectives.replaced_tokens import ReplacedTokens
from bertjax.tasks.pretraining.config import PretrainingData

pytestmark = pytest.mark.ci

ELECTRA = {"model_type": "electra", "hidden_act": "gelu_erf", "head_act": "gelu_erf", "pooler_act": "gelu_erf"}
CONFIG = tiny_config(60, num_attention_heads=4, initializer_range=0.5, embedding_size=12, **ELECTRA)
DATA = PretrainingData(objective="rtd", generator_size=0.5, discriminator_weight=20.0)
OBJECTIVE = ReplacedTokens.for_model(CONFIG, DATA)
GENERATOR = OBJECTIVE.model.generator_config
PHASE = Phase(seq_len=16, batch_size=6, max_predictions=5, start_step=0, stop_step=10)


@pytest.fixture(scope="module")
def params():
    return nn.unbox(jax.jit(OBJECTIVE.init_params)(jax.random.key(3)))


@pytest.fixture(scope="module")
def batch():
    """Returns padded rows with zero to five predictions at different positions, all [MASK] (id 4)."""
    batch = synthetic_batch(OBJECTIVE.schema, OBJECTIVE.synthetic_sizes(PHASE))
    lengths = np.array([16, 16, 16, 12, 9, 16])
    batch["input_mask"] = (np.arange(16) < lengths[:, None]).astype(np.int32)
    batch["masked_lm_positions"] = np.arange(1, 6, dtype=np.int32) + np.zeros((6, 1), np.int32)
    weights = (np.arange(5) < np.array([5, 4, 3, 2, 1, 0])[:, None]).astype(np.float32)
    batch["masked_lm_weights"] = weights
    for name in ("masked_lm_positions", "masked_lm_ids"):
        batch[name] = np.where(weights > 0, batch[name], 0)
    rows, columns = np.nonzero(weights)
    batch["input_ids"][rows, batch["masked_lm_positions"][rows, columns]] = 4
    return batch


def sample(params, batch):
    """Returns the generator's logits and the ids that the discriminator reads in an evaluation."""
    generator_logits, _, _ = OBJECTIVE.apply(params, batch, None)
    logits = np.asarray(generator_logits)
    samples = np.argmax(logits + gumbel_noise(jax.random.key(0), logits.shape), axis=-1)
    ids, original = batch["input_ids"].copy(), batch["input_ids"].copy()
    rows, columns = np.nonzero(batch["masked_lm_weights"])
    positions = batch["masked_lm_positions"][rows, columns]
    ids[rows, positions], original[rows, positions] = samples[rows, columns], batch["masked_lm_ids"][rows, columns]
    return logits, ids, original


def test_only_predicted_tokens_are_replaced_and_samples_equal_to_originals_do_not_count(params, batch):
    logits, ids, original = sample(params, batch)
    _, _, replaced = OBJECTIVE.apply(params, batch, None)
    np.testing.assert_array_equal(replaced, ids != original)
    assert not np.asarray(replaced)[-1].any() and np.asarray(replaced)[:5].any()
    assert ids.max() < CONFIG.vocab_size < logits.shape[-1]
    # Predictions that equal the original tokens leave nothing to detect.
    equal = {**batch, "masked_lm_ids": np.where(batch["masked_lm_weights"] > 0, ids[:, 1:6], 0)}
    sums, _ = OBJECTIVE.compute(params, equal, None)
    assert sums["discriminator_recall"][1] == 0


def test_samples_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    samples = np.argmax(logits + gumbel_noise(jax.random.key(1), (40, 500, 4)), axis=-1)
    np.testing.assert_allclose(np.bincount(samples.ravel()) / samples.size, np.exp(logits), atol=0.01)
    # Neighbors in a row and in a column are independent.
    for first, second in ((samples[:, 1:], samples[:, :-1]), (samples[1:], samples[:-1])):
        assert np.mean(first == second) == pytest.approx(np.sum(np.exp(2 * logits)), abs=0.015)


def test_losses_and_metrics_equal_those_of_electra_in_transformers(params, batch, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    arrays = {name: np.asarray(array) for name, array in flatten_dict(params, sep="/").items()}
    discriminator = {name: array for name, array in arrays.items() if not name.startswith("generator")}
    generator = {name: array for name, array in arrays.items() if name.startswith("encoder/embeddings/")}
    generator |= {
        name.replace("generator_lm/", "masked_lm/").replace("generator/", "encoder/"): array
        for name, array in arrays.items()
        if name.startswith("generator")
    }
    models = []
    for config, part, name in ((GENERATOR, generator, "MaskedLM"), (CONFIG, discriminator, "PreTraining")):
        (tmp_path / name).mkdir()
        huggingface.write(PortableCheckpoint(config, dict(part), None), tmp_path / name)
        models.append(getattr(transformers, f"ElectraFor{name}").from_pretrained(tmp_path / name).eval())
    _, ids, original = sample(params, batch)
    tensors = {name: torch.tensor(array, dtype=torch.long) for name, array in batch.items()}
    rows, columns = np.nonzero(batch["masked_lm_weights"])
    labels = np.full_like(ids, -100)
    labels[rows, batch["masked_lm_positions"][rows, columns]] = batch["masked_lm_ids"][rows, columns]
    inputs = {"attention_mask": tensors["input_mask"], "token_type_ids": tensors["segment_ids"]}
    with torch.no_grad():
        masked_lm = models[0](tensors["input_ids"], labels=torch.tensor(labels, dtype=torch.long), **inputs).loss
        detection = models[1](torch.tensor(ids), labels=torch.tensor(ids != original).long(), **inputs)
    sums, _ = OBJECTIVE.compute(params, batch, None)
    means = {name: float(total / weight) for name, (total, weight) in sums.items()}
    assert means["generator_loss"] == pytest.approx(float(masked_lm), rel=1e-5)
    assert means["discriminator_loss"] == pytest.approx(float(detection.loss), rel=1e-5)
    detected, is_token = detection.logits.numpy() > 0, batch["input_mask"] > 0
    hits = detected & (ids != original) & is_token
    assert means["discriminator_accuracy"] == pytest.approx(np.mean((detected == (ids != original))[is_token]))
    assert means["discriminator_precision"] == pytest.approx(hits.sum() / (detected & is_token).sum())
    assert means["discriminator_recall"] == pytest.approx(hits.sum() / ((ids != original) & is_token).sum())
    assert means["replaced_fraction"] == pytest.approx(np.mean((ids != original)[is_token]))
    assert OBJECTIVE.loss_weights == {"generator_loss": 1.0, "discriminator_loss": 20.0}
    # The embeddings and their norm are shared, but not the projections.
    shared = sum(array.size for name, array in arrays.items() if "embeddings" in name and "projection" not in name)
    unpadded = dataclasses.replace(CONFIG, pad_vocab_to_multiple_of=1)
    objective = ReplacedTokens.for_model(unpadded, DATA)
    counted = parameter_counts(nn.unbox(jax.eval_shape(objective.init_params, jax.random.key(0))), True)
    padding = (CONFIG.padded_vocab_size - CONFIG.vocab_size) * CONFIG.embedding_size
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert sum(counted.values()) == sum(sizes) - (shared - padding)


def test_each_loss_trains_its_own_layers_and_the_shared_embeddings(params, batch):
    gradients = {
        loss: flatten_dict(jax.grad(lambda params: OBJECTIVE.compute(params, batch, None)[0][loss][0])(params), sep="/")  # noqa: B023
        for loss in ("generator_loss", "discriminator_loss")
    }
    for name in gradients["generator_loss"]:
        owners = {loss for loss, values in gradients.items() if np.asarray(values[name]).any()}
        if name.startswith("encoder/embeddings/") and "projection" not in name:
            assert owners == {*gradients}, name
        elif not name.endswith("key/bias"):  # Its gradient is 0, up to rounding.
            expected = "generator_loss" if name.startswith("generator") else "discriminator_loss"
            assert owners == {expected}, name


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_first": True, "position_embedding_type": "rotary", "gated_mlp": True, "first_attention_norm": False},
        {"num_key_value_heads": 2, "tie_word_embeddings": False, "lm_head": "linear", "type_vocab_size": 0},
    ],
)
def test_generator_has_the_layers_of_the_architecture(fields, batch):
    objective = ReplacedTokens.for_model(tiny_config(60, num_attention_heads=4, **fields), DATA)
    params = flatten_dict(nn.unbox(jax.eval_shape(objective.init_params, jax.random.key(0))), sep="/")
    layers = {name.removeprefix("encoder/") for name in params if name.startswith("encoder/layers")}
    assert layers == {name.removeprefix("generator/") for name in params if name.startswith("generator/layers")}
    assert params["generator/layers/attention/query/kernel"].shape == (2, 8, 2, 4)
    assert "generator_lm/decoder" not in params
    key = jax.random.key(1)
    sums, _ = jax.jit(lambda params: objective.compute(params, batch, key))(nn.unbox(objective.init_params(key)))
    assert np.isfinite([np.asarray(total) for total in sums.values()]).all()


@pytest.mark.parametrize(("heads", "size", "expected"), [(12, 0.25, 3), (2, 0.25, 1), (12, 1 / 3, 4), (4, 1.0, 4)])
def test_generator_keeps_the_head_size(heads, size, expected):
    config = tiny_config(hidden_size=8 * heads, num_attention_heads=heads, intermediate_size=16 * heads)
    generator = ReplacedTokens.for_model(config, dataclasses.replace(DATA, generator_size=size)).model.generator_config
    assert (generator.num_attention_heads, generator.head_size) == (expected, 8)
    assert (generator.hidden_size, generator.intermediate_size) == (8 * expected, 16 * expected)


def test_flops_include_both_encoders_and_both_heads():
    # 2 layers; hidden sizes 16 and 8, with projections from the embeddings; the generator predicts 5 of 16 tokens.
    discriminator = 2 * 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 12 * 16 + 2 * 2 * (2 * 16 * 16) + 2 * 16 * 17
    generator = 2 * 2 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 12 * 8 + 2 * 2 * (2 * 16 * 8)
    decoder = 5 / 16 * 2 * (8 * 12 + 12 * 60)
    assert OBJECTIVE.flops_per_position(PHASE) == pytest.approx(3 * (discriminator + generator + decoder))
    attention = 2 * 2 * (2 * 16 * 16) + 2 * 2 * (2 * 16 * 8)
    assert OBJECTIVE.step_cost(PHASE, 2).attention_flops == 2 * 6 * 16 * 3 * attention


def experiment_of(corpus, objective="rtd"):
    return f"pretrain.py:seq_len=16,objective={objective},corpus={corpus}"


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("rtd")
    train(experiment_of(corpus), workdir, None, steps=4, checkpoint_every=2)
    return workdir


def test_resumed_run_and_evaluation_repeat_the_samples(pretrained, corpus, tmp_path, capfd):
    resumed = tmp_path / "resumed"
    shutil.copytree(pretrained, resumed)
    shutil.rmtree(resumed / "checkpoints" / "4")
    (resumed / "results.json").unlink()
    results = train(experiment_of(corpus), resumed, None, steps=4, checkpoint_every=2)
    assert read_metrics(resumed) == read_metrics(pretrained)
    assert results["loss"] == pytest.approx(results["generator_loss"] + 50 * results["discriminator_loss"], rel=1e-5)
    capfd.readouterr()
    metrics = evaluate(capfd, pretrained)
    assert metrics["discriminator_loss"] == pytest.approx(results["discriminator_loss"], rel=1e-5)


def test_discriminator_is_fine_tuned_and_exported_without_the_generator(pretrained, corpus, tmp_path, capfd):
    config = f"--config={EXPERIMENTS}/glue.py:task=cola,path={glue_files(tmp_path / 'glue')},quick=true"
    command = ["train", config, f"--init_from={pretrained}", f"--workdir={tmp_path / 'cola'}"]
    cli.main([*command, *overrides(None, steps=1)])
    log = capfd.readouterr().err
    assert "initialized randomly: classifier/bias, classifier/kernel, pooler/dense/bias" in log
    assert "ignored parameters" in log and "generator_lm/bias" in log and "discriminator/dense/bias" in log
    assert "accuracy" in evaluate(capfd, tmp_path / "cola")
    model = bertjax.load(pretrained)
    model.save(tmp_path / "saved", "huggingface")
    convert(str(pretrained), str(tmp_path / "copy"), "bertjax", overwrite=False)
    convert(str(tmp_path / "copy"), str(tmp_path / "exported"), "huggingface", overwrite=False)
    for folder in ("saved", "exported"):
        fields = json.loads((tmp_path / folder / "config.json").read_text())
        assert fields["architectures"] == ["ElectraForPreTraining"]
        assert huggingface.read(tmp_path / folder).modules == {"encoder", "discriminator"}
    # A run continues from the export, with a new generator.
    cli.main(train_command(experiment_of(corpus), tmp_path / "next", None, f"--init_from={tmp_path}/saved", steps=1))
    log = capfd.readouterr().err
    assert "restored from" in log and "discriminator (4 arrays)" in log
    assert "initialized randomly: generator/layers/" in log and "generator_lm/norm/scale" in log


def test_other_families_are_exported_without_a_discriminator(corpus, tmp_path):
    workdir = tmp_path / "bert"
    train(experiment_of(corpus, "none"), workdir, None, "--config.data.objective=rtd", steps=1)
    convert(str(workdir), str(tmp_path / "hf"), "huggingface", overwrite=False)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["BertModel"]
    assert huggingface.read(tmp_path / "hf").modules == {"encoder"}


def test_bench_and_costs_include_the_objective(corpus, capfd):
    config = f"--config={EXPERIMENTS}/{experiment_of(corpus)},size=L1_H16,quick=true"
    packed = printed(capfd, "bench", "step", config, "--config.data.packing=true", "--steps=1", "--json")
    assert json.loads(packed)["losses"]["discriminator_loss"] < 1
    task = load_task(experiment_of(corpus), None, "--config.optimizer.freeze_layers=1")
    assert jnp.isfinite(task.unfrozen_cost_before(2).flops)
