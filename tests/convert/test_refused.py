"""What is no BERT, is damaged or is not what it says is refused by name."""

import json
import os
import shlex
import shutil

import numpy as np
import pytest
from checkpoints import WIDTH, google_checkpoint, portable, without
from safetensors.numpy import load_file, save_file

from bertjax.convert import huggingface, workdir
from bertjax.convert.convert import read
from bertjax.errors import BertjaxError, UsageError


def test_what_lacks_is_too_much_or_misshapen_is_listed(letters, tmp_path):
    def spoil(values):
        values = without("layer_1/output/dense/bias", "predictions/output_bias")(values)
        values["bert/pooler/dense/kernel"] = np.zeros((WIDTH, 3), np.float32)
        return values | {"bert/encoder/layer_7/adapter/kernel": np.zeros(3, np.float32)}

    google_checkpoint(letters, tmp_path / "google", spoil)
    with pytest.raises(UsageError) as error:
        read(tmp_path / "google")
    text = str(error.value)
    for part in (
        "lacks bert/encoder/layer_1/output/dense/bias, cls/predictions/output_bias",
        "has what no BERT has: bert/encoder/layer_7/adapter/kernel",
        "bert/pooler/dense/kernel (16, 3) for (16, 16)",
    ):
        assert part in text


@pytest.mark.parametrize(
    "change, says",
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"model_type": "roberta"}, "a model of type 'roberta'"),
        ({"hidden_act": "silu"}, "hidden_act 'silu'"),
        ({"architectures": ["BertLMHeadModel"]}, "'BertLMHeadModel' is none of BertForPreTraining"),
        ({"vocab_size": 7}, "the model 7"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0"),
        ({"hidden_act": ["gelu"]}, "hidden_act is"),
        ({"num_attention_heads": 3}, "config.json: model.hidden_size 16 is not a multiple"),
        ({"num_hidden_layers": 4000}, "its config tells 4,000 layers"),
        ({"num_hidden_layers": 10**9}, "model.num_hidden_layers is 1,000,000,000; it must be at most 4,096"),
        ({"quantization_config": {"bits": 8}}, "a quantization_config"),
        ({"tie_word_embeddings": False}, "untied embeddings"),
        ({"architectures": ["BertForQuestionAnswering"]}, "lacks qa_outputs.weight, qa_outputs.bias"),
        ({"architectures": ["BertForTokenClassification"], "id2label": {"1": "O"}}, "a name of its own for each"),
        ({"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "O"}}, "a name of its own"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_what_bertjax_has_not_is_refused_by_name(change, says, letters, tmp_path):
    huggingface.write(portable(letters), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=says):
        read(tmp_path)


def change_weights(folder, change):
    arrays = load_file(folder / "model.safetensors")
    save_file(change(arrays), folder / "model.safetensors")


BIAS = "bert.pooler.dense.bias"


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda arrays: arrays | {BIAS: arrays[BIAS].astype(np.int8)}, f"{BIAS} is of int8, weights are of float32"),
        (lambda arrays: arrays | {BIAS: np.full(WIDTH, 1e300)}, f"{BIAS} has numbers that are not finite"),
        (lambda arrays: arrays | {BIAS: np.full(WIDTH, np.nan, np.float32)}, f"{BIAS} has numbers that are not finite"),
        (
            lambda arrays: arrays | {"bert.embeddings.LayerNorm.gamma": arrays["bert.embeddings.LayerNorm.weight"]},
            "twice, under an old and a new name",
        ),
    ],
)
def test_weights_that_are_no_numbers_of_a_model_are_refused(change, says, letters, tmp_path):
    huggingface.write(portable(letters), tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(UsageError, match=says):
        read(tmp_path)


def test_halves_are_taken_over_and_told(letters, tmp_path):
    huggingface.write(portable(letters), tmp_path)
    change_weights(tmp_path, lambda arrays: arrays | {BIAS: arrays[BIAS].astype(np.float16)})
    found = read(tmp_path)
    assert found.params["pooler/dense/bias"].dtype == np.float32
    assert found.notes == ("weights of float16, float32 are taken over as float32",)


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read .*config.json"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot read .*config.json"),
        (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no such thing"), "copy it anew"),
        (lambda folder: os.truncate(folder / "model.safetensors", 9999), "copy it anew"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "cannot read .*tokenizer_config.json"),
        (lambda folder: (folder / "vocab.txt").write_text("[PAD]\n"), "has no "),
    ],
)
def test_damaged_files_are_named(spoil, says, letters, tmp_path):
    huggingface.write(portable(letters), tmp_path)
    spoil(tmp_path)
    with pytest.raises(BertjaxError, match=says):
        read(tmp_path)


@pytest.mark.parametrize(
    "names, says",
    [
        ({"a": "../weights.safetensors"}, "are no files of that folder"),
        ({"a": "/weights.safetensors"}, "are no files of that folder"),
        ({"a": "missing.safetensors"}, "names missing.safetensors, which"),
        ({"a": 7}, "cannot read"),
        ([], "cannot read"),
    ],
)
def test_an_index_of_shards_names_files_beside_it(names, says, letters, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    huggingface.write(portable(letters), folder)
    (folder / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UsageError, match=says):
        read(folder)


def test_a_pickle_is_refused_with_the_command_that_makes_safetensors_of_it(letters, tmp_path):
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    huggingface.write(portable(letters), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match="a pickle may run any code") as error:
        read(folder)
    _, _, command = str(error.value).partition("trust it: ")
    words = shlex.split(command.partition(", and copy")[0])
    assert words[:2] == ["python", "-c"] and words[3:] == [str(folder), f"{folder}-safetensors"]
    assert "import BertForPreTraining as M" in words[2]


@pytest.mark.parametrize(
    "field, value",
    [("num_hidden_layers", 1), ("num_attention_heads", 4), ("intermediate_size", 16), ("max_position_embeddings", 9)],
)
def test_a_config_of_ours_that_is_not_the_checkpoint_s_is_refused(field, value, letters, tmp_path):
    workdir.write(portable(letters), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BertjaxError, match=f"config.json has been changed since .*{field}: "):
        read(tmp_path)


def test_of_several_checkpoints_of_tensorflow_the_newest_is_read_or_one_must_be_named(letters, tmp_path):
    google_checkpoint(letters, tmp_path / "google")
    for step in (1000, 999):
        for file in list((tmp_path / "google").glob("bert_model.ckpt.*")):
            shutil.copy(file, file.with_name(file.name.replace("bert_model.ckpt", f"model.ckpt-{step}")))
    for file in (tmp_path / "google").glob("bert_model.ckpt.*"):
        file.unlink()
    state = tmp_path / "google" / "checkpoint"
    state.write_text('model_checkpoint_path: "/gone/model.ckpt-1000"\nall_model_checkpoint_paths: "model.ckpt-999"\n')
    assert read(tmp_path / "google").notes == ("read: model.ckpt-1000",)
    state.unlink()
    with pytest.raises(UsageError, match="has 2 checkpoints, model.ckpt-1000, model.ckpt-999; give one"):
        read(tmp_path / "google")
    assert read(tmp_path / "google" / "model.ckpt-999").notes == ("read: model.ckpt-999",)
