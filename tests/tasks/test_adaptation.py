"""Tests of continued pre-training: replay and evaluation of a general corpus, and bits per byte."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers.checkpoints import random_checkpoint
from helpers.command_runs import EXPERIMENTS, evaluate, load_task, read_metrics, train
from helpers.commanding import printed, refused

import bertjax
from bertjax.convert import huggingface
from bertjax.convert.convert import convert, read_checkpoint
from bertjax.data.corpus.prepare import prepare
from bertjax.data.corpus.store import open_corpus
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.pretraining.baseline import mean_piece_bytes
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError
from bertjax.training.bench import bench_step
from bertjax.training.cost import cost_before

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def general(corpus, tmp_path_factory) -> Path:
    """Returns a corpus of other text with the vocabulary of `corpus`."""
    folder = tmp_path_factory.mktemp("general")
    sentences = "".join(f"lona mite {'kesu ' * (line % 7)}bavi\n" + "\n" * (line % 6 == 5) for line in range(240))
    (folder / "text.txt").write_text(sentences)
    prepare(
        [f"text:{folder}/text.txt"],
        folder / "corpus",
        vocabulary=open_corpus(corpus).vocabulary().path,
        heldout_fraction=0.1,
        workers=1,
    )
    return folder / "corpus"


@pytest.fixture(scope="module")
def spelled(corpus, letters, tmp_path_factory) -> Path:
    """Returns the text of `corpus`, prepared with a vocabulary of letters."""
    folder = tmp_path_factory.mktemp("spelled") / "corpus"
    prepare([f"text:{corpus.parent}/text.txt"], folder, vocabulary=letters, heldout_fraction=0.1, workers=1)
    return folder


def experiment_of(corpus: Path, arguments: str = "") -> str:
    return f"adapt.py:corpus={corpus},seq_len=16{arguments}"


def task_of(corpus: Path, arguments: str = "", **fields):
    return load_task(experiment_of(corpus, arguments), None, **fields)


def batches(task, start_step: int = 0) -> list[dict]:
    return list(task.train_batches(start_step, SINGLE_SHARD))


def test_every_window_of_steps_contains_the_configured_share_of_replay_batches(corpus, general):
    fields = {"steps": 40, "phases": ({"share": 3}, {"seq_len": 32})}
    domain, other = batches(task_of(corpus, **fields)), batches(task_of(general, **fields))
    mixed = batches(task_of(corpus, f",replay={general}:0.3", **fields))
    assert [len(batch["input_ids"][0]) for batch in mixed] == [16] * 30 + [32] * 10

    # In the first phase, each mixed batch is the next unused batch of one of the corpora.
    replayed = []
    for step, batch in enumerate(mixed[:30]):
        seen = sum(replayed)
        replayed.append(np.array_equal(batch["input_ids"], other[seen]["input_ids"]))
        if not replayed[-1]:
            np.testing.assert_array_equal(batch["input_ids"], domain[step - seen]["input_ids"])
    for window in range(1, 31):
        counts = np.convolve(replayed, np.ones(window, int), "valid")
        assert np.all(np.abs(counts - 0.3 * window) < 1 + 1e-9)
    for step in (17, 33):
        np.testing.assert_equal(batches(task_of(corpus, f",replay={general}:0.3", **fields), step), mixed[step:])


def test_batches_are_unchanged_without_replay(corpus, general):
    expected = batches(task_of(corpus))
    np.testing.assert_equal(batches(task_of(corpus, f",replay={general}:0")), expected)
    pretraining = load_task(f"pretrain.py:corpus={corpus},seq_len=16,objective=none", None, steps=10)
    np.testing.assert_equal(batches(pretraining), expected)


def test_data_hash_covers_both_corpora(corpus, general):
    hashes = {
        task_of(first, arguments).data_hash
        for first, arguments in ((corpus, ""), (corpus, f",replay={general}:0.5"), (general, f",replay={corpus}:0.5"))
    }
    assert len(hashes) == 3
    assert task_of(corpus).data_hash == open_corpus(corpus).fingerprint


def test_replay_with_another_vocabulary_is_rejected(corpus, spelled):
    with pytest.raises(UsageError, match="have different vocabularies; prepare .* with --vocab .*vocab.txt"):
        task_of(corpus, f",replay={spelled}:0.5")


def test_mean_piece_bytes_includes_the_space_before_a_word(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "##é", "##c", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    # The bytes of "ab" and "é" include the space before them. [UNK] counts as one byte, for the space.
    tokens = np.array([5, 6, 8, 7, 1], np.uint16)
    assert mean_piece_bytes(load_vocabulary(tmp_path / "vocab.txt"), tokens) == (3 + 2 + 3 + 1 + 1) / 5


def test_byte_fallback_piece_counts_as_one_byte():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = {piece: index for index, piece in enumerate([*special, "\u2581a", "<0xC3>", "b"])}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], unk_token="[UNK]", byte_fallback=True))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    engine.add_special_tokens(special)
    vocabulary = load_vocabulary("tokenizer.json", content=engine.to_str().encode())
    assert mean_piece_bytes(vocabulary, np.array([5, 6, 7], np.uint16)) == (2 + 1 + 1) / 3


@pytest.fixture(scope="module")
def adapted(corpus, general, tmp_path_factory) -> Path:
    """Returns the workdir of a run with replay; tests must not change it."""
    workdir = tmp_path_factory.mktemp("adapted") / "run"
    train(experiment_of(corpus, f",replay={general}:0.5"), workdir, None, steps=2)
    return workdir


def test_adaptation_also_evaluates_the_general_corpus(adapted, general, capfd):
    results = json.loads((adapted / "results.json").read_text())
    opened = open_corpus(general)
    bits = results["general_mlm_loss"] / np.log(2) / mean_piece_bytes(opened.vocabulary(), opened.heldout.tokens)
    assert results["general_bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    # The loss is that of masked LM, without next-sentence prediction.
    lines = read_metrics(adapted)
    assert results["loss"] == results["mlm_loss"] > 0
    assert not [name for line in [*lines, results, results["baseline"]] for name in line if "nsp" in name]
    assert lines[0]["step"] == 0 and {"eval_bits_per_byte", "eval_general_bits_per_byte"} <= lines[0].keys()
    metrics = evaluate(capfd, adapted)
    assert metrics["general_bits_per_byte"] == pytest.approx(results["general_bits_per_byte"], rel=1e-4)
    # Evaluation on the general corpus alone gives the same loss.
    general_metrics = evaluate(capfd, adapted, f"--config.data.corpus={general}")
    assert general_metrics["mlm_loss"] == metrics["general_mlm_loss"]


def test_export_leaves_out_the_next_sentence_head_that_adaptation_does_not_train(adapted, tmp_path):
    convert(str(adapted), str(tmp_path / "converted"), "huggingface", overwrite=False)
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    bertjax.load(adapted).save(tmp_path / "saved", "huggingface")
    # A copy in bertjax's format is complete, but conversions of the copy leave the untrained head out.
    convert(str(adapted), str(tmp_path / "copy"), "bertjax", overwrite=False)
    assert "next_sentence" in read_checkpoint(tmp_path / "copy").modules
    convert(str(tmp_path / "copy"), str(tmp_path / "exported"), "huggingface", overwrite=False)
    for folder in ("converted", "saved", "exported"):
        assert read_checkpoint(tmp_path / folder).modules == {"encoder", "masked_lm", "pooler"}


@pytest.mark.parametrize(
    ("seq_len", "has_checkpoint", "message"),
    [
        (48, True, "exceed the 40 tokens of config.model.max_position_embeddings=40; reduce seq_len"),
        (16, True, "the vocabulary of {pretrained} differs .* with --vocab {pretrained}"),
        (16, False, "no initial checkpoint; use --init_from CKPT or .* .unset fields of config.model: encoder"),
    ],
)
def test_unusable_or_missing_initial_checkpoint_is_rejected(
    seq_len, has_checkpoint, message, corpus, pretrained, tmp_path, capfd
):
    config = f"--config={EXPERIMENTS}/adapt.py:corpus={corpus},steps=1,seq_len={seq_len}"
    start = [f"--init_from={pretrained}"] if has_checkpoint else []
    error = refused(capfd, "train", config, *start, f"--workdir={tmp_path}/run", logs=True)
    assert re.search(message.format(pretrained=pretrained), error)
    assert not (tmp_path / "run").exists()


def test_only_a_new_head_is_trained_first_with_a_frozen_encoder(spelled, letters, tmp_path, capfd):
    config = f"--config={EXPERIMENTS}/adapt.py:corpus={spelled},seq_len=16,steps=6"
    steps = "steps 0 to 2 train only the parameters outside the encoder, at learning rate 0.001"
    for name, checkpoint, has_new_head in (
        ("classifier", random_checkpoint(letters, "classes", ("a", "b")), True),
        ("complete", random_checkpoint(letters), False),
    ):
        (tmp_path / name).mkdir()
        huggingface.write(checkpoint, tmp_path / name)
        described = printed(capfd, "describe", config, f"--init_from={tmp_path / name}")
        assert (steps in described) == ("0 of them warm-up from step 2, then" in described) == has_new_head


@pytest.mark.parametrize(
    ("fields", "steps", "expected", "expected_attention"),
    [
        ({"head_steps": 3}, 3, 1 / 3, 1 / 3),
        ({"head_steps": 3}, 10, 8 / 10, 8 / 10),
        ({"freeze": ("encoder",)}, 10, 1 / 3, 1 / 3),
        ({"freeze_layers": 1, "freeze": ("encoder/embeddings",)}, 10, 2 / 3, 2 / 3),
        ({"freeze_layers": 1, "freeze": ("encoder/embeddings",), "head_steps": 5}, 10, 1 / 2, 1 / 2),
        # Frozen layers above trained embeddings lack only the gradients of their weights.
        ({"freeze_layers": 1}, 10, None, 1),
    ],
)
def test_backward_passes_of_frozen_parts_are_not_counted(corpus, fields, steps, expected, expected_attention):
    options = {f"optimizer__{name}": value for name, value in {"head_steps": 0, **fields}.items()}
    cost, full = (cost_before(task_of(corpus, model__num_hidden_layers=2, **each), steps) for each in (options, {}))
    if expected is None:
        expected = 1 - (full.flops - full.attention_flops) / 6 / full.flops
    assert cost.flops / full.flops == pytest.approx(expected)
    assert cost.attention_flops / full.attention_flops == pytest.approx(expected_attention)
    assert cost.positions == full.positions


def test_bench_does_not_count_the_backward_pass_of_frozen_parts(corpus):
    task = task_of(corpus, optimizer__freeze=("encoder",), optimizer__head_steps=0)
    result = bench_step(task, 1)
    flops = result["mfu"] * result["seconds_per_step"] * result["peak_flops_per_second"]
    assert flops == pytest.approx(cost_before(task, 1).flops)
