"""Errors for checkpoints that are not BERT, are damaged, or do not match their config."""

import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import WIDTH, assert_equal, edit_json, google_checkpoint, without
from safetensors.numpy import load_file, save_file

from bertjax.convert import huggingface
from bertjax.convert.convert import BERTJAX, convert, read_checkpoint, read_vocabulary
from bertjax.convert.eurobert import EUROBERT
from bertjax.convert.family import REQUIRED
from bertjax.convert.modernbert import MODERNBERT
from bertjax.errors import BertjaxError, UsageError
from bertjax.inference.load import load_model
from bertjax.model.feature_head import FeatureHead
from bertjax.model.models import EncoderModel, SequenceModel
from bertjax.tasks.finetuning.output_layer import CLASSES, SPANS

BIAS = "bert.pooler.dense.bias"
NORM, DECODER = "bert.embeddings.LayerNorm.weight", "cls.predictions.decoder.weight"
EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
ELECTRA = {"model_type": "electra", "architectures": ["ElectraForMultipleChoice"]}
SEQUENCE, TOKEN = ["BertForSequenceClassification"], ["BertForTokenClassification"]
SIZES = dict.fromkeys(REQUIRED, 8) | {"num_attention_heads": 2}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
OLD_SCALED = {"type": "linear", "factor": 2.0, "rope_theta": 1e4}


def test_missing_unknown_and_misshapen_arrays_are_listed(letters, tmp_path):
    def damage(variables):
        variables = without("layer_1/output/dense/bias", "predictions/output_bias")(variables)
        variables["bert/pooler/dense/kernel"] = np.zeros((WIDTH, 3), np.float32)
        return variables | {"bert/encoder/layer_7/adapter/kernel": np.zeros(3, np.float32)}

    google_checkpoint(letters, tmp_path / "google", damage)
    with pytest.raises(UsageError) as error:
        read_checkpoint(tmp_path / "google")
    for part in (
        "missing: bert/encoder/layer_1/output/dense/bias, cls/predictions/output_bias",
        "not part of the model: bert/encoder/layer_7/adapter/kernel",
        "bert/pooler/dense/kernel (16, 3) instead of (16, 16)",
    ):
        assert part in str(error.value)


def config(fields):
    """Returns a function that changes the config of a folder."""
    return lambda folder: edit_json(folder / "config.json", **fields)


def edit_weights(folder, **arrays):
    save_file(load_file(folder / "model.safetensors") | arrays, folder / "model.safetensors")


def weights(name, change, new_name=""):
    """Returns a function that changes an array of a folder, or adds the changed array under a new name."""
    return lambda folder: edit_weights(
        folder, **{new_name or name: change(load_file(folder / "model.safetensors")[name])}
    )


def use_float8(folder):
    edit_weights(folder, **{BIAS: np.zeros(WIDTH, np.uint8)})
    content = (folder / "model.safetensors").read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    changed = header.replace(b'"dtype":"U8"', b'"dtype":"F8_E4M3"')
    content = len(changed).to_bytes(8, "little") + changed + content[8 + len(header) :]
    (folder / "model.safetensors").write_bytes(content)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def use_index(weight_map):
    def damage(folder):
        (folder / "model.safetensors").rename(folder.parent / "weights.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def only_adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").unlink()


def static_embedding(folder):
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    (folder / "modules.json").write_text('[{"name": "0", "path": "", "type": "sentence_transformers.StaticEmbedding"}]')


def remove_pooler(folder):
    arrays = load_file(folder / "model.safetensors")
    save_file({name: array for name, array in arrays.items() if "pooler" not in name}, folder / "model.safetensors")
    edit_json(folder / "config.json", architectures=SEQUENCE)


def wrap(folder):
    arrays = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": array for name, array in arrays.items()}, folder / "model.safetensors")


def add_columns(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    lines = (folder / "vocab.txt").read_text().splitlines()
    (folder / "vocab.txt").write_text("".join(f"{line}\t{index}\n" for index, line in enumerate(lines)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (config({"position_embedding_type": "relative_key"}), "position_embedding_type='relative_key'"),
        (config({**ELECTRA, "summary_use_proj": False}), "summary_use_proj=False, which bertjax does not support"),
        (config({"is_decoder": True}), "is_decoder"),
        (config({"is_causal": True}), "is_causal"),
        (config({"model_type": "gpt2"}), "model_type='gpt2'"),
        (config({"hidden_act": "mish"}), "config.json has hidden_act='mish'; use one of gelu, "),
        (config({"tie_word_embeddings": False}), "missing: cls.predictions.decoder.weight"),
        (config({"architectures": "BertLMHeadModel"}), "'BertLMHeadModel'; use one of BertForPreTraining"),
        (config({"architectures": [{"a": 1}]}), "cannot read .*config.json: TypeError.*; correct its values"),
        (config({"architectures": SEQUENCE, "problem_type": "regression"}), "several outputs"),
        (config({"architectures": TOKEN, "id2label": {"1": "O"}}), "config.json: id2label .* unique"),
        (config({"architectures": TOKEN, "id2label": {"0": "O", "1": "O"}}), "to unique names"),
        (wrap, "remove the prefix 'module.' from the names"),
        (weights(BIAS, lambda bias: bias, "crf.bias"), "not part of the model: crf.bias; set `architectures` in"),
        (remove_pooler, "missing: bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight"),
        (config({"vocab_size": 7}), "vocab_size is 7; use the vocabulary that the model was trained with"),
        (config({"vocab_size": 5000}), r"word_embeddings.weight \(\d+, 16\) instead of \(5000, 16\)"),
        (config({"hidden_size": "wide"}), "config.json: model.hidden_size is 'wide'; it must be an integer"),
        (config({"num_attention_heads": 3}), "config.json: .*hidden_size=16 is not divisible"),
        (config({"num_hidden_layers": 10**9}), "model.num_hidden_layers is 1,000,000,000; it must be at most 4,096"),
        (config({"num_hidden_layers": None}), "lacks num_hidden_layers"),
        (weights(BIAS, lambda bias: bias.astype(np.int8)), f"{BIAS} has dtype int8; weights must be float32"),
        (weights(BIAS, lambda bias: np.full(WIDTH, 1e300)), f"{BIAS} contains values that are not finite"),
        (weights(NORM, lambda scale: scale, "bert.embeddings.LayerNorm.gamma"), "under an old and a new name"),
        (only_adapter, "has an adapter .adapter_config.json., which bertjax does not apply; merge it"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read .*config.json"),
        (lambda folder: os.truncate(folder / "model.safetensors", 9999), "copy it again"),
        (lambda folder: (folder / "model.safetensors").write_text(LFS_POINTER), "is only a Git LFS pointer; run"),
        (lambda folder: edit_json(folder / "tokenizer_config.json", model_max_length="9"), "tokenizer_config.json: T"),
        (static_embedding, "modules.json lists no Transformer with a config.json"),
        (add_columns, r"several columns, such as '\[PAD\]\\t0'"),
        (use_float8, "cannot read .*model.safetensors: .*float8_e4m3fn.*; weights must be float32"),
        (use_index({"a": "../weights.safetensors"}), "its folder lacks: ../weights.safetensors"),
        (use_index({"a": "missing.safetensors"}), "its folder lacks: missing.safetensors"),
        (use_index({"a": 7}), "cannot read"),
    ],
)
def test_unsupported_or_damaged_folder_is_rejected(damage, message, folder):
    damage(folder)
    with pytest.raises(BertjaxError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            MODERNBERT,
            {"rope_parameters": {"full_attention": SCALED}},
            "unsupported rope_parameters .* only rope_type=default",
        ),
        (MODERNBERT, {"rope_parameters": SCALED}, "rope_parameters has factor, rope_theta, rope_type; use only"),
        (EUROBERT, {"rope_scaling": OLD_SCALED}, "unsupported rope_parameters .* only rope_type=default"),
        (EUROBERT, {"head_dim": 16}, "head_dim=16 is not supported"),
    ],
)
def test_unsupported_config_of_a_family_is_rejected(family, fields, message):
    with pytest.raises(UsageError, match=f"^a/config.json: {message}"):
        family.model_config(SIZES | fields, Path("a/config.json"))


@pytest.mark.parametrize(("family", "fields"), [(MODERNBERT, {}), (EUROBERT, {"num_key_value_heads": 2})])
def test_config_with_default_fields_can_be_exported(family, fields):
    assert huggingface.export_problem(EncoderModel(family.model_config(SIZES | fields, Path("a")))) == ""


def test_models_that_cannot_be_exported_are_named_before_training():
    config = EUROBERT.model_config(SIZES, Path("config.json"))
    assert "no class with this output layer for spans" in huggingface.export_problem(EncoderModel(config), SPANS)
    model = SequenceModel(config, 2, feature_head=FeatureHead(features="last"))
    assert "feature_head.features=last" in huggingface.export_problem(model, CLASSES)
    assert huggingface.export_problem(SequenceModel(config, 2), CLASSES) == ""


def test_folder_without_a_tokenizer_is_rejected(folder, tmp_path):
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for use in (read_vocabulary, load_model, lambda path: convert(str(path), str(tmp_path / "run"), BERTJAX, False)):
        with pytest.raises(UsageError, match=f"{folder} has no tokenizer"):
            use(folder)


def test_older_and_float16_arrays_are_accepted(folder):
    expected = read_checkpoint(folder).params
    arrays = load_file(folder / "model.safetensors")
    half = arrays[BIAS].astype(np.float16)
    copies = {"decoder.weight": EMBEDDINGS, "decoder.bias": "cls.predictions.bias"}
    copies = {f"cls.predictions.{name}": arrays[original] for name, original in copies.items()}
    edit_weights(folder, **copies, **{BIAS: half, "bert.embeddings.position_ids": np.arange(40)[None]})
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    arrays = load_file(folder / "model.safetensors")
    for old, new in names.items():
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    save_file(arrays, folder / "model.safetensors")
    checkpoint = read_checkpoint(folder)
    assert_equal(checkpoint.params, expected | {"pooler/dense/bias": half.astype(np.float32)})
    assert checkpoint.notes == ("converted weights from float16, float32 to float32",)


def test_ignored_dropout_and_similarity_are_noted(folder):
    edit_json(folder / "config.json", classifier_dropout=0.3, attention_dropout=None, pooler_dropout=0.1)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    edit_json(pooling, word_embedding_dimension=WIDTH)
    modules = {"Transformer": "", "Pooling": "1_Pooling"}
    entries = [{"name": name, "path": path, "type": f"sentence_transformers.{name}"} for name, path in modules.items()]
    (folder / "modules.json").write_text(json.dumps(entries))
    edit_json(folder / "config_sentence_transformers.json", similarity_fn_name="dot")
    (folder / "model_head.pkl").touch()
    assert read_checkpoint(folder).notes == (
        "ignored SetFit's classifier model_head.pkl, which is a pickle: only its embedder is read",
        "ignored similarity_fn_name=dot: evaluate and mine compare vectors by cosine",
        "ignored classifier_dropout=0.3: training uses the dropout rate 0.1 instead",
    )


def test_error_for_pickled_weights_has_a_command_that_writes_safetensors(folder, tmp_path):
    folder = folder.rename(tmp_path / "it's $HOME")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match="pickles such as .*, which can run code") as error:
        read_checkpoint(folder)
    _, _, command = str(error.value).partition("trust the file, run: ")
    words = shlex.split(command.partition(", and copy")[0])
    assert words[:2] == ["python", "-c"] and words[3:] == [str(folder), f"{folder}-safetensors"]
    assert compile(words[2], "command", "exec") and "save_pretrained" in words[2]
    (folder / "pytorch_model.bin").rename(folder / "model.onnx")
    with pytest.raises(
        UsageError, match="contains neither model.safetensors nor .* save the model with save_pretrained"
    ):
        read_checkpoint(folder)


def test_latest_of_several_tensorflow_checkpoints_is_read(google, tmp_path):
    folder = shutil.copytree(google, tmp_path / "google")
    for file in list(folder.glob("bert_model.ckpt.*")):
        for step in (1000, 999):
            shutil.copy(file, file.with_name(file.name.replace("bert_model.ckpt", f"model.ckpt-{step}")))
        file.unlink()
    state = folder / "checkpoint"
    state.write_text('model_checkpoint_path: "/gone/model.ckpt-1000"\nall_model_checkpoint_paths: "model.ckpt-999"\n')
    assert read_checkpoint(folder).notes == ("read model.ckpt-1000",)
    state.write_bytes(b"\xac\xff")
    for _ in ("damaged", "missing"):
        with pytest.raises(UsageError, match="contains 2 checkpoints: model.ckpt-1000, model.ckpt-999; use"):
            read_checkpoint(folder)
        state.unlink(missing_ok=True)
    assert read_checkpoint(folder / "model.ckpt-999").notes == ("read model.ckpt-999",)
