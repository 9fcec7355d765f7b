"""The Python API: text embeddings, and saving of models with changed parameters."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.checkpoints import edit_json
from safetensors.numpy import save_file

import bertjax
from bertjax.convert.convert import convert, read_checkpoint
from bertjax.errors import UsageError
from bertjax.inference.encode import pack_batches
from bertjax.tasks.embedding import sentence_transformers
from bertjax.tasks.finetuning.output_layer import CLASSES

TEXTS = ["a film", ("who is it", "it is a man"), "", "a b c d e f g h", *("ab " * index for index in range(12))]


@pytest.fixture(scope="module")
def bert(pretrained):
    return bertjax.load(pretrained)


def test_packed_rows_contain_each_text_once():
    lengths = np.random.default_rng(0).integers(2, 70, 500)
    batches = list(pack_batches(lengths, 512))
    # One batch shape per row length.
    assert {(indices.shape[0], row_len) for indices, row_len in batches} == {(32, 64), (16, 128)}
    rows = [(row[row >= 0], row_len) for indices, row_len in batches for row in indices]
    assert sorted(np.concatenate([row for row, _ in rows]).tolist()) == list(range(500))
    assert all(lengths[row].sum() <= row_len for row, row_len in rows)
    assert lengths.sum() > 0.9 * sum(row_len for _, row_len in rows)
    # A long text does not lengthen the rows of short ones.
    batches = list(pack_batches(np.append(lengths[lengths <= 64], 500), 512))
    assert [indices.shape[0] for indices, row_len in batches if row_len > 64] == [1]
    # A text longer than the model's maximum length fills one row. One short text needs only one row.
    assert [(indices.tolist(), length) for indices, length in pack_batches(np.array([900]), 512)] == [([[0]], 512)]
    assert [indices.shape[0] for indices, _ in pack_batches(np.array([5]), 512)] == [1]


def test_encode_returns_the_cls_state_or_the_mean_of_the_states(bert):
    full = bert.encode(TEXTS)
    cls, mean = (bert.encode(TEXTS, pooling=pooling) for pooling in ("cls", "mean"))
    assert cls.last_hidden_state is None and mean.last_hidden_state is None
    np.testing.assert_allclose(cls.pooled, full.last_hidden_state[:, 0], atol=1e-5)
    expected = full.last_hidden_state.sum(axis=1) / full.attention_mask.sum(axis=1)[:, None]
    np.testing.assert_allclose(mean.pooled, expected, atol=1e-5)


def write_json(file, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def sentence_transformer(pretrained, folder, *modules, **limits):
    """Makes a folder of sentence-transformers. Each module has a name, a config and arrays."""
    shutil.copytree(pretrained, folder)
    entries = []
    for index, (name, config, arrays) in enumerate([("Transformer", {}, {}), *modules]):
        path = f"{index}_{name}" if index else ""
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"})
        if index:
            write_json(folder / path / "config.json", config)
        if arrays:
            save_file(arrays, folder / path / "model.safetensors")
    write_json(folder / "modules.json", entries)
    write_json(folder / "sentence_bert_config.json", limits)
    return folder


PROMPTS = "config_sentence_transformers.json"
MEAN = ("Pooling", {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}, {})


def dense_layer(out_features=8, **config):
    weight = np.random.default_rng(0).normal(size=(out_features, 16)).astype(np.float32)
    arrays = {"linear.weight": weight, "linear.bias": np.linspace(-1, 1, out_features, dtype=np.float32)}
    sizes = {"in_features": 16, "out_features": out_features, "bias": True}
    return "Dense", {**sizes, "activation_function": "torch.nn.modules.activation.Tanh", **config}, arrays


@pytest.mark.ci
def test_encode_follows_the_modules_of_a_sentence_transformers_folder(pretrained, tmp_path):
    folder = sentence_transformer(pretrained, tmp_path / "model", MEAN, dense_layer(), ("Normalize", {}, {}))
    mean = bertjax.load(pretrained).encode(TEXTS, pooling="mean").pooled
    arrays = dense_layer()[2]
    expected = np.tanh(mean @ arrays["linear.weight"].T + arrays["linear.bias"])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    workdir, converted = tmp_path / "workdir", tmp_path / "converted"
    convert(str(folder), str(workdir), "bertjax", overwrite=False)
    convert(str(workdir), str(converted), "huggingface", overwrite=False)
    for path in (folder, workdir, converted):
        encoded = bertjax.load(path).encode(TEXTS)
        np.testing.assert_allclose(encoded.pooled, expected, atol=1e-5)
        assert encoded.last_hidden_state is None and encoded.attention_mask is None


def test_embedder_lower_cases_the_text_for_a_cased_tokenizer(pretrained, tmp_path):
    folder = sentence_transformer(pretrained, tmp_path / "model", MEAN, do_lower_case=True)
    # The vocabulary has no capitals.
    write_json(folder / "tokenizer_config.json", {"do_lower_case": False, "tokenizer_class": "BertTokenizer"})
    convert(str(folder), str(tmp_path / "workdir"), "bertjax", overwrite=False)
    for path in (folder, tmp_path / "workdir"):
        bert = bertjax.load(path)
        np.testing.assert_array_equal(bert.encode(["A B"]).pooled, bert.encode(["a b"]).pooled)


@pytest.mark.ci
def test_prompt_is_the_default_a_named_or_any_other_prompt(pretrained, tmp_path):
    folder = sentence_transformer(pretrained, tmp_path / "model", MEAN)
    prompts = {"prompts": {"query": "he "}, "default_prompt_name": "query"}
    write_json(folder / PROMPTS, prompts)
    bert = bertjax.load(folder)
    expected = bert.encode(["he a b"], prompt="").pooled
    for options in ({}, {"prompt": "he "}, {"prompt_name": "query"}, {"pooling": "mean", "prompt_name": "query"}):
        np.testing.assert_allclose(bert.encode(["a b"], **options).pooled, expected, atol=1e-6)
    convert(str(folder), str(tmp_path / "workdir"), "bertjax", overwrite=False)
    np.testing.assert_allclose(bertjax.load(tmp_path / "workdir").encode(["a b"]).pooled, expected, atol=1e-6)
    without_prompt = bert.encode(["a b"], pooling="mean").pooled
    np.testing.assert_allclose(bert.encode(["a b"], prompt="").pooled, without_prompt, atol=1e-6)
    with pytest.raises(bertjax.UsageError, match="prompt_name='title' is unknown; .* has the prompts: 'query'"):
        bert.encode(["a b"], prompt_name="title")


@pytest.mark.parametrize(
    ("limits", "config", "expected"),
    [
        ({"max_seq_length": 9}, {"model_max_length": 8}, 9),
        ({"max_seq_length": None}, {"model_max_length": 8}, 8),
        ({}, {"max_len": 8}, 8),
        ({}, {"model_max_length": None}, 40),
        ({}, {}, 40),
    ],
)
def test_max_seq_len_comes_from_the_module_the_tokenizer_or_the_position_table(
    limits, config, expected, pretrained, tmp_path
):
    folder = sentence_transformer(pretrained, tmp_path / "model", MEAN, **limits)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **config})
    checkpoint = read_checkpoint(folder)
    assert checkpoint.embedder.max_seq_len == expected
    # The positions of RoBERTa start at row 2 of the table.
    roberta = dataclasses.replace(checkpoint.config, position_offset=2)
    assert sentence_transformers.read(folder, roberta).max_seq_len == min(expected, 38)


@pytest.mark.parametrize(
    ("module", "files", "message"),
    [
        (("WordWeights", {}, {}), {}, "2_WordWeights is a module WordWeights"),
        (dense_layer(activation_function="torch.nn.Softmax"), {}, "2_Dense/config.json has activation_function"),
        ((*dense_layer()[:2], {}), {}, "2_Dense has no model.safetensors; .* pickles"),
        ((*dense_layer()[:2], {"linear.weight": np.ones((8, 16), np.int8)}), {}, "KeyError: 'I8'"),
        (
            dense_layer(module_output_name="token_embeddings"),
            {},
            "2_Dense/config.json maps sentence_embedding",
        ),
        (("Pooling", {}, {}), {}, "2_Pooling/config.json has an unknown pooling_mode"),
        (("Pooling", {"pooling_mode": "median"}, {}), {}, "unknown pooling_mode: median"),
        (MEAN, {"tokenizer_config.json": {"padding_side": "left"}}, "pads on the left"),
        (MEAN, {PROMPTS: {"default_prompt_name": "title"}}, "has the default_prompt_name"),
        (MEAN, {PROMPTS: {"prompts": {"query": 3}}}, "has the prompt 3"),
        (
            MEAN,
            {"modules.json": [{"name": "0", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]},
            "modules.json starts with the module Pooling; bertjax supports only Transformer",
        ),
    ],
)
def test_encode_rejects_modules_and_files_that_it_does_not_follow(module, files, message, pretrained, tmp_path):
    folder = sentence_transformer(pretrained, tmp_path / "model", MEAN, module)
    for name, content in files.items():
        write_json(folder / name, content)
    convert(str(folder), str(tmp_path / "workdir"), "bertjax", overwrite=False)
    mean = bertjax.load(pretrained).encode(TEXTS, pooling="mean").pooled
    for path in (folder, tmp_path / "workdir"):
        bert = bertjax.load(path)
        with pytest.raises(bertjax.UsageError, match=f"{message}.*; to encode without its"):
            bert.encode(TEXTS)
        np.testing.assert_allclose(bert.encode(TEXTS, pooling="mean").pooled, mean, atol=1e-6)


def test_weights_of_a_module_may_be_bfloat16(pretrained, tmp_path):
    name, config, arrays = dense_layer()
    rounded = {key: array.astype(jnp.bfloat16) for key, array in arrays.items()}
    folder = sentence_transformer(pretrained, tmp_path / "model", MEAN, (name, config, rounded))
    _, dense = read_checkpoint(folder).embedder.modules
    for key, array in rounded.items():
        np.testing.assert_array_equal(dense.arrays[key], array.astype(np.float32))


def test_workdir_with_only_a_pooling_folder_keeps_its_pooling(pretrained, tmp_path):
    convert(str(pretrained), str(tmp_path / "workdir"), "bertjax", overwrite=False)
    write_json(tmp_path / "workdir" / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    bert = bertjax.load(tmp_path / "workdir")
    np.testing.assert_array_equal(bert.encode(TEXTS).pooled, bert.encode(TEXTS, pooling="cls").pooled)


def test_vectors_equal_those_of_sentence_transformers(pretrained, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs bertjax[parity]")
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    pooling = ("Pooling", {"embedding_dimension": 16, "pooling_mode": modes, "include_prompt": False}, {})
    tokens = {"module_input_name": "token_embeddings"}
    dense = dense_layer(16, **tokens, activation_function="torch.nn.modules.linear.Identity")
    folder = sentence_transformer(pretrained, tmp_path / "model", dense, pooling, max_seq_length=16, do_lower_case=True)
    # An added token, which is found before the text is lower-cased.
    edit_json(folder / "tokenizer_config.json", entity_token="b")
    # Both texts of the last pair are truncated, to an odd number of tokens in total.
    texts = [*TEXTS, "abc", "aBc", ("a " * 10, "b " * 30), ("a b " * 10, "b a " * 10)]
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts, prompt="it is ")
    bert = bertjax.load(folder)
    np.testing.assert_allclose(bert.encode(texts, prompt="it is ").pooled, expected, atol=1e-5)
    bert.save(tmp_path / "saved", format="huggingface")
    saved = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(saved.encode(texts, prompt="it is "), expected, atol=1e-6)


def test_a_model_without_modules_is_saved_with_mean_pooling(bert, tmp_path, log_lines):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs bertjax[parity]")
    bert.save(tmp_path / "saved", format="sentence_transformers")
    assert any("no sentence-transformers modules; wrote mean pooling" in line for line in log_lines)
    texts = [text for text in TEXTS if text]
    saved = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    np.testing.assert_allclose(saved, bert.encode(texts, pooling="mean").pooled, atol=1e-5)
    np.testing.assert_allclose(bertjax.load(tmp_path / "saved").encode(texts).pooled, saved, atol=1e-5)


def test_a_classifier_is_not_saved_as_a_sentence_transformer(bert, tmp_path):
    width = bert.architecture.hidden_size
    layer = {"kernel": np.zeros((width, 2)), "bias": np.zeros(2)}
    params = {**{name: bert.params[name] for name in ("encoder", "pooler")}, "classifier": layer}
    classifier = bert.replace(params, CLASSES, ["no", "yes"])
    with pytest.raises(UsageError, match="has an output layer; use the format huggingface"):
        classifier.save(tmp_path / "saved", format="sentence_transformers")


def test_encode_logs_the_number_of_truncated_texts(bert, log_lines):
    bert.encode(["a " * 100, "b", ("a " * 30, "b " * 30)])
    bert.encode(["b"])
    assert log_lines == ["2 of 3 texts were truncated to 40 tokens"]


@pytest.mark.parametrize("format", ["bertjax", "huggingface"])
def test_saved_model_is_loaded_with_its_parameters(format, bert, tmp_path):
    doubled = jax.tree.map(lambda array: 2 * array, bert.params)
    bert.replace(doubled).save(tmp_path / "saved", format)
    loaded = bertjax.load(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, doubled)
    assert loaded.architecture == bert.architecture
    with pytest.raises(bertjax.UsageError, match="exists"):
        bert.save(tmp_path / "saved", format)
    bert.save(tmp_path / "saved", format, overwrite=True)
    np.testing.assert_array_equal(bertjax.load(tmp_path / "saved").encode(["a"]).pooled, bert.encode(["a"]).pooled)


def test_user_defined_output_layer_is_saved_and_loaded(bert, tmp_path):
    head = {"kernel": np.ones((16, 2), np.float32), "bias": np.array([0.0, 9.0], np.float32)}
    params = {"encoder": bert.params["encoder"], "pooler": bert.params["pooler"], "classifier": head}
    classifier = bert.replace(params, output_kind=CLASSES, labels=np.array(["no", "yes"]))
    classifier.save(tmp_path / "run")
    for model in (classifier, bertjax.load(tmp_path / "run")):
        assert model.predict(["a"])[0]["prediction"] == "yes" and model.labels == ("no", "yes")


def test_replace_rejects_parameters_that_do_not_fit_the_model(bert):
    params, kernel = dict(bert.params), np.ones((16, 16))
    two_outputs = {**params, "classifier": {"kernel": np.ones((16, 2)), "bias": np.ones(2)}}
    without_pooler = {name: module for name, module in two_outputs.items() if name != "pooler"}
    for changed, options, message in (
        ({**params, "classifier": {"bias": np.ones(2)}}, {}, "model: classifier/bias; .* set output_kind"),
        ({**params, "extra": {"kernel": np.ones(2)}}, {}, "not part of the model: extra/kernel"),
        ({**params, "pooler": {"dense": {"kernel": kernel}}}, {}, "missing: pooler/dense/bias"),
        ({**params, "pooler": {"dense": {"kernel": kernel[:8], "bias": np.ones(16)}}}, {}, r"kernel \(8, 16\) instead"),
        (params, {"output_kind": CLASSES}, "params lacks 'classifier', the output layer for output_kind='classes'"),
        (params, {"output_kind": "sorting"}, "unknown output kind 'sorting'; use one of classes"),
        (without_pooler, {"output_kind": CLASSES}, "missing: pooler/dense/kernel, pooler/dense/bias"),
        (two_outputs, {"output_kind": CLASSES, "labels": ["a"]}, "pass 2 different names"),
    ):
        with pytest.raises(bertjax.UsageError, match=message):
            bert.replace(changed, **options)
