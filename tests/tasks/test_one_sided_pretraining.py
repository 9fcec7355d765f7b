"""Left-to-right and LSTM language models and their checkpoints."""

import json

import numpy as np
import pytest
from helpers.command_runs import EXPERIMENTS, evaluate, load_task, overrides, read_metrics, refused, train
from helpers.commanding import printed
from helpers.finetuning_data import glue_files
from helpers.unpacking import unmasked_ids

import bertjax
from bertjax.cli import main as cli
from bertjax.data.shard import SINGLE_SHARD
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_metadata import saved_architecture

pytestmark = pytest.mark.ci

KINDS = {"left": "--config.model.attention_direction=left", "lstm": "--config.model.encoder=lstm"}


def experiment_of(corpus, objective="lm"):
    return f"pretrain.py:seq_len=16,objective={objective},corpus={corpus}"


@pytest.fixture(scope="module", params=["left", pytest.param("lstm", marks=pytest.mark.slow)])
def pretrained(request, corpus, tmp_path_factory):
    """Returns the kind of language model, and the workdir of its pre-training for two steps."""
    workdir = tmp_path_factory.mktemp(request.param)
    train(experiment_of(corpus), workdir, None, KINDS[request.param], steps=2)
    return request.param, workdir


def test_language_model_reports_loss_and_accuracy_of_each_direction(pretrained):
    kind, workdir = pretrained
    results = json.loads((workdir / "results.json").read_text())
    names = {"left": {"ltr"}, "lstm": {"ltr", "rtl"}}[kind]
    losses = [results[f"{name}_loss"] for name in names]
    assert results["loss"] == pytest.approx(sum(losses), abs=1e-5)
    assert results["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert {f"{name}_accuracy" for name in names} < results.keys()
    assert {*results["baseline"]} >= {f"{name}_{metric}" for name in names for metric in ("loss", "accuracy")}
    training_lines = [line for line in read_metrics(workdir) if "loss" in line]
    assert training_lines and not any("perplexity" in line for line in training_lines)


def test_fine_tuning_keeps_the_encoder_and_attention_direction_of_the_checkpoint(pretrained, letters, tmp_path, capfd):
    kind, workdir = pretrained
    architecture = saved_architecture(find_checkpoint(workdir))
    assert (architecture.encoder, architecture.attention_direction) == {
        "left": ("transformer", "left"),
        "lstm": ("lstm", "both"),
    }[kind]
    config = f"--config={EXPERIMENTS}/glue.py:task=cola,path={glue_files(tmp_path / 'glue')},quick=true"
    command = ["train", config, f"--init_from={workdir}", f"--workdir={tmp_path / 'cola'}", *overrides(None, steps=1)]
    wrong = {"left": "--config.model.attention_direction=both", "lstm": "--config.model.encoder=transformer"}[kind]
    assert "omit `size=` and" in refused(capfd, *command, wrong)
    # Fine-tuning uses the vocabulary of the checkpoint and adds a pooler, which a language model does not have.
    cli.main(command)
    assert "initialized randomly: classifier/bias, classifier/kernel, pooler/dense/bias" in capfd.readouterr().err
    tuned = saved_architecture(find_checkpoint(tmp_path / "cola"))
    assert (tuned.encoder, tuned.attention_direction) == (architecture.encoder, architecture.attention_direction)
    assert "accuracy" in evaluate(capfd, tmp_path / "cola")
    assert printed(capfd, "predict", f"--checkpoint={tmp_path / 'cola'}", "za be")


def test_export_of_a_language_model_is_rejected(pretrained, tmp_path, capfd):
    error = refused(capfd, "convert", pretrained[1], tmp_path / "out", "--format=huggingface")
    assert "has a model of kind 'language_model'" in error


def test_pooled_states_depend_on_the_whole_text_and_left_to_right_states_on_earlier_words(pretrained):
    kind, workdir = pretrained
    model = bertjax.load(workdir)
    texts = ["bana kero lote", "bana kero misu", "misu"]
    full = model.encode(texts)
    assert full.pooled is None  # no pooler
    states, ends = full.last_hidden_state, full.attention_mask.sum(axis=1) - 1
    first, last = states[:, 0], states[np.arange(3), ends]
    half = first.shape[1] // 2
    expected = last if kind == "left" else np.concatenate([last[:, :half], first[:, half:]], axis=1)
    np.testing.assert_allclose(model.encode(texts, pooling="cls").pooled, expected, atol=1e-5)
    # The first two texts start with [CLS] and two equal words.
    one, other = states[:2, :, : None if kind == "left" else half]
    np.testing.assert_allclose(one[:3], other[:3], atol=1e-6)
    assert np.abs(one[3:] - other[3:]).max() > 1e-3


def test_language_model_rows_equal_unmasked_mlm_rows(corpus):
    def read_batches(objective, *flags):
        batches = load_task(experiment_of(corpus, objective), None, *flags).train_batches(0, SINGLE_SHARD)
        return [next(batches) for _ in range(4)]

    for lm_batch, masked in zip(read_batches("lm", KINDS["left"]), read_batches("none"), strict=True):
        assert lm_batch.keys() == {"input_ids", "input_mask", "segment_ids"}
        np.testing.assert_array_equal(lm_batch["input_ids"], unmasked_ids(masked))
