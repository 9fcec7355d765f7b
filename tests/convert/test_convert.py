"""Conversions between formats keep every bit of the parameters and every setting."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers.checkpoints import (
    LAYERS,
    WIDTH,
    assert_equal,
    edit_json,
    google_checkpoint,
    google_variables,
    random_checkpoint,
    without,
)
from helpers.command_runs import refused
from helpers.commanding import printed
from safetensors.numpy import load_file, save_file

from bertjax.api import load
from bertjax.cli import main as cli
from bertjax.convert import huggingface
from bertjax.convert.bert import BERT
from bertjax.convert.convert import (
    BERTJAX,
    HUGGINGFACE,
    WRITERS,
    bertjax_checkpoint,
    convert,
    detect_format,
    read_checkpoint,
    read_vocabulary,
)
from bertjax.convert.family import OUTPUT_KINDS
from bertjax.convert.portable import read_workdir, write_workdir
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.errors import UsageError
from bertjax.inference.predict import PREDICTORS
from bertjax.model.config import ARCHITECTURE_FIELDS, Architecture
from bertjax.tasks.finetuning.output_layer import CLASSES, KINDS, MULTILABEL, SPANS, TAGS
from bertjax.utils.io import temporary_name


def test_variables_of_the_training_run_are_ignored(letters, google, tmp_path):
    slots = ("{}/adam_m", "ema/{}", "training/SGD/{}/momentum", "{}/AdamWeightDecayOptimizer/v")

    def change(variables):
        extra = {slot.format(name): 2 * value for name, value in variables.items() for slot in slots}
        return variables | extra | {"loss_scale/value": np.float32(1)}

    google_checkpoint(letters, tmp_path / "trained", change)
    trained = read_checkpoint(tmp_path / "trained")
    assert_equal(read_checkpoint(google).params, trained.params)
    (note,) = [note for note in trained.notes if "variables of the training run" in note]
    assert note.endswith("adam_m, ema/..., momentum, v, value")


@pytest.mark.parametrize(
    "variables, kind, num_outputs",
    [
        ({"output_weights": (3, WIDTH), "output_bias": (3,)}, CLASSES, 3),
        ({"output_weights": (1, WIDTH), "output_bias": (1,)}, CLASSES, 0),
        ({"cls/squad/output_weights": (2, WIDTH), "cls/squad/output_bias": (2,)}, SPANS, 0),
    ],
)
def test_fine_tuned_google_checkpoint_has_an_output_layer(variables, kind, num_outputs, letters, tmp_path):
    def change(pretrained):
        layer = {name: np.random.default_rng(1).normal(size=shape) for name, shape in variables.items()}
        return without("cls/")(pretrained) | {name: value.astype(np.float32) for name, value in layer.items()}

    written = google_checkpoint(letters, tmp_path / "google", change)
    read = read_checkpoint(tmp_path / "google")
    assert (read.output_kind, read.labels) == (kind, tuple(f"LABEL_{index}" for index in range(num_outputs)))
    weights, bias = (written[name] for name in variables)
    np.testing.assert_array_equal(read.params["classifier/kernel"], weights.T)
    np.testing.assert_array_equal(read.params["classifier/bias"], bias)


@pytest.mark.ci
@pytest.mark.parametrize("num_rows", [150, 1000])
def test_embeddings_without_tokens_are_padding(num_rows, letters, tmp_path):
    rng = np.random.default_rng(0)
    shapes = google_variables(num_rows)
    change = lambda _: {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}  # noqa: E731
    google_checkpoint(letters, tmp_path / "source", change, vocab_size=num_rows)
    convert(str(tmp_path / "source"), str(tmp_path / "own"), BERTJAX, False)
    convert(str(tmp_path / "own"), str(tmp_path / "back"), HUGGINGFACE, False)
    read, again = (read_checkpoint(tmp_path / name) for name in ("source", "back"))
    size = read.config.vocab_size
    assert size == read.vocabulary.size < read.num_rows == num_rows
    for checkpoint in (read, again):
        assert any(f"{num_rows - size:,} are padding and never used" in note for note in checkpoint.notes)
    (predictions,) = load(tmp_path / "own").fill_mask("a [MASK] b", top=size)
    assert sum(probability for _, probability in predictions) == pytest.approx(1, abs=1e-5)
    assert_equal(read.params, again.params)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == again.num_rows == num_rows


def test_blank_lines_at_the_end_of_vocab_txt_are_not_tokens(google, tmp_path):
    shutil.copytree(google, tmp_path / "google")
    with open(tmp_path / "google" / "vocab.txt", "ab") as file:
        file.write(b"\n \n")
    convert(str(tmp_path / "google"), str(tmp_path / "own"), BERTJAX, False)
    assert read_workdir(tmp_path / "own").vocabulary.pieces == read_checkpoint(google).vocabulary.pieces


@pytest.mark.ci
def test_encoder_with_untied_embeddings_needs_no_decoder(letters, tmp_path):
    checkpoint = random_checkpoint(letters)
    params = {path: array for path, array in checkpoint.params.items() if path.startswith(("encoder", "pooler"))}
    huggingface.write(dataclasses.replace(checkpoint, params=params), tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    assert read_checkpoint(tmp_path).modules == {"encoder", "pooler"}


def test_tied_arrays_may_be_stored_under_the_name_of_the_decoder(letters, tmp_path):
    huggingface.write(random_checkpoint(letters), tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    for name, copy in (
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ):
        arrays[copy] = arrays.pop(name)
    save_file(arrays, tmp_path / "model.safetensors")
    assert_equal(read_checkpoint(tmp_path).params, random_checkpoint(letters).params)


def test_maximum_word_length_survives_conversions(tmp_path, folder):
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    own, back = tmp_path / "own", tmp_path / "back"
    convert(str(folder), str(own), BERTJAX, False)
    convert(str(own), str(back), HUGGINGFACE, False)
    for path in (folder, own, back):
        vocabulary = read_vocabulary(path)
        assert vocabulary.max_word_chars == 100 and Tokenizer(vocabulary).encode("a" * 101) == [vocabulary.unk_id]
    assert json.loads((back / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"


def test_case_options_set_lower_case_but_are_rejected_for_a_workdir(google, tmp_path, capfd):
    for option, lower_case in (("--cased", False), ("--uncased", True)):
        cli.main(["convert", str(google), str(tmp_path / option[2:]), option])
        assert read_workdir(tmp_path / option[2:]).vocabulary.lower_case == lower_case
        assert load(google, lower_case=lower_case).tokenizer.vocabulary.lower_case == lower_case
    message = refused(capfd, "convert", str(tmp_path / "cased"), str(tmp_path / "new"), "--uncased")
    assert "already sets lower_case" in message


def test_parameters_equal_google_variables(google):
    variables, params = tf.train.load_checkpoint(str(google / "bert_model.ckpt")), read_checkpoint(google).params
    query = variables.get_tensor("bert/encoder/layer_1/attention/self/query/kernel")  # [in, heads * head_size]
    np.testing.assert_array_equal(params["encoder/layers/attention/query/kernel"][1][:, 1, 3], query[:, 8 + 3])
    output = variables.get_tensor("bert/encoder/layer_0/attention/output/dense/kernel")
    np.testing.assert_array_equal(params["encoder/layers/attention/output/kernel"][0][1, 3], output[8 + 3])
    next_sentence = variables.get_tensor("cls/seq_relationship/output_weights").T
    np.testing.assert_array_equal(params["next_sentence/dense/kernel"], next_sentence)
    scale = variables.get_tensor("bert/encoder/layer_1/output/LayerNorm/gamma")
    np.testing.assert_array_equal(params["encoder/layers/mlp_norm/scale"][1], scale)


@pytest.mark.parametrize("fmt", [BERTJAX, HUGGINGFACE])
@pytest.mark.parametrize(
    "output_kind, labels, fields",
    [
        ("", (), {"hidden_act": "gelu_erf", "layer_norm_eps": 1e-6, "type_vocab_size": 3, "initializer_range": 0.2}),
        (CLASSES, ("yes", "no", "perhaps"), {}),
        (CLASSES, (), {"hidden_act": "relu"}),
        (MULTILABEL, ("new", "loud", "red"), {}),
        (MULTILABEL, ("loud",), {}),
        (SPANS, (), {}),
        (TAGS, ("O", "7"), {}),
    ],
)
def test_format_keeps_parameters_and_settings(fmt, output_kind, labels, fields, letters, tmp_path):
    source = random_checkpoint(letters, output_kind, labels, **fields)
    params = dict(source.params)
    WRITERS[fmt](source, tmp_path)
    if (fmt, output_kind) == (HUGGINGFACE, TAGS):  # Labels may be integers.
        edit_json(tmp_path / "config.json", id2label={"0": "O", "1": 7})
    converted = read_checkpoint(tmp_path)
    assert detect_format(tmp_path) == fmt
    assert_equal(params, converted.params)
    assert (converted.config, converted.output_kind, converted.labels) == (source.config, output_kind, labels)
    assert (converted.vocabulary.pieces, converted.vocabulary.lower_case) == (source.vocabulary.pieces, True)


def test_each_output_kind_is_in_every_registry():
    assert OUTPUT_KINDS.keys() == PREDICTORS.keys() == {*KINDS}
    assert {kind for each in BERT.classes.values() for kind in each.output_kinds} == {"", *KINDS}


def test_gelu_is_the_tanh_form_for_google_and_exact_for_hugging_face(google, tmp_path):
    assert read_checkpoint(google).config.hidden_act == "gelu_tanh"
    convert(str(google), str(tmp_path / "out"), HUGGINGFACE, False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_act"] == "gelu_new" and config["attention_probs_dropout_prob"] == 0.2
    edit_json(tmp_path / "out" / "config.json", hidden_act="gelu")
    assert read_checkpoint(tmp_path / "out").config.hidden_act == "gelu_erf"


def test_error_names_each_architecture_field_that_a_format_cannot_express(letters, tmp_path):
    for name in {*ARCHITECTURE_FIELDS} - {*BERT.fields, "pad_vocab_to_multiple_of", "pair_segments"}:
        checkpoint = random_checkpoint(letters)
        # Set any value other than the default. The model need not support it.
        object.__setattr__(checkpoint.config, name, f"not {getattr(Architecture(), name)}")
        with pytest.raises(UsageError, match=f"model.{name}="):
            huggingface.write(checkpoint, tmp_path)
    (tmp_path / "own").mkdir()
    write_workdir(random_checkpoint(letters, attention_direction="left"), tmp_path / "own")
    with pytest.raises(UsageError, match="model.attention_direction=left"):
        convert(str(tmp_path / "own"), str(tmp_path / "foreign"), HUGGINGFACE, False)
    assert not (tmp_path / "foreign").exists()


def test_parameters_that_bert_lacks_are_rejected(letters, tmp_path):
    checkpoint = random_checkpoint(letters)
    checkpoint.params["encoder/layers/mlp_gate/kernel"] = np.zeros((LAYERS, 16, 32), np.float32)
    with pytest.raises(UsageError, match="cannot store the parameters encoder/layers/mlp_gate/kernel"):
        huggingface.write(checkpoint, tmp_path)


def test_output_folder_of_trainer_is_rejected_with_its_newest_checkpoint_as_advice(tmp_path):
    for step, seconds in ((500, 1), (1000, 2)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (seconds, seconds))
    with pytest.raises(UsageError, match="is a folder of checkpoints .*; use one of them, such as checkpoint-1000"):
        read_checkpoint(tmp_path)


def test_wrong_usage_is_rejected_and_leaves_no_files(google, tmp_path, capfd):
    (tmp_path / "link").symlink_to(google)
    files, own = sorted(google.iterdir()), tmp_path / "own"
    assert printed(capfd, "convert", google, own).strip() == str(own)
    for code, message, *arguments in (
        (2, "exists; use --overwrite", "convert", google, own),
        (2, "overlap", "convert", google, f"{google.parent}/other/../google", "--overwrite"),
        (2, "overlap", "convert", google, tmp_path / "link" / "inside"),
        (2, "use one of bertjax, huggingface", "convert", google, tmp_path / "new", "--format=onnx"),
        (2, "or hf:ORG/NAME", "convert", "bert-base-uncased", tmp_path / "other"),
        (2, "no checkpoint at", "convert", tmp_path, tmp_path.parent / "other"),
        (1, "cannot write the checkpoint /sys/own", "convert", google, "/sys/own"),
        (1, "/proc/a: ", "features", f"--checkpoint={google}", "a", "--output=/proc/a"),
    ):
        assert message in refused(capfd, *arguments, code=code)
    assert sorted(google.iterdir()) == files and {*tmp_path.iterdir()} == {own, tmp_path / "link"}


@pytest.mark.parametrize("fmt", [BERTJAX, HUGGINGFACE])
def test_earlier_conversion_is_overwritten_unless_the_folder_has_other_files(fmt, google, tmp_path):
    folder, link, file = tmp_path / "folder", tmp_path / "link", tmp_path / "folder" / "thesis.tex"
    folder.mkdir()
    link.symlink_to(folder)
    for _ in range(2):
        convert(str(google), str(link), fmt, True)
        assert link.is_symlink() and detect_format(folder) == fmt
    file.write_text("mine")
    with pytest.raises(UsageError, match="is not a checkpoint, or contains other files"):
        convert(str(google), str(folder), fmt, True)
    assert file.exists()


def test_cached_conversion_is_updated_if_the_source_changes(letters, google, tmp_path, log_lines):
    source, cache_dir = tmp_path / "google", tmp_path / "init_from"
    shutil.copytree(google, source)

    def conversions():
        with bertjax_checkpoint(str(source), cache_dir) as path:
            assert path == str(cache_dir)
        return sum(line.endswith("heads: masked_lm, next_sentence, pooler") for line in log_lines)

    assert conversions() == 1
    # A run that was killed after the conversion leaves a temporary folder.
    (tmp_path / temporary_name("init_from")).mkdir()
    assert conversions() == 1 and {*tmp_path.iterdir()} == {source, cache_dir}
    shutil.rmtree(source)
    google_checkpoint(letters, source, lambda variables: {k: v + 1 for k, v in variables.items()})
    assert conversions() == 2
    assert_equal(read_checkpoint(cache_dir).params, read_checkpoint(source).params)
    shutil.rmtree(source)
    assert conversions() == 2 and log_lines[-1].startswith(f"using {cache_dir}, converted from ")


def test_hugging_face_folder_keeps_parameters_that_the_model_class_ignores(letters, tmp_path):
    checkpoint = random_checkpoint(letters, SPANS)
    pooler = {name: array for name, array in random_checkpoint(letters).params.items() if "pooler" in name}
    params = checkpoint.params | pooler
    notes = huggingface.write(dataclasses.replace(checkpoint, params=dict(params)), tmp_path)
    assert notes == ["BertForQuestionAnswering ignores pooler, which the folder contains"]
    assert_equal(read_checkpoint(tmp_path).params, params)
    encoder = {name: array for name, array in params.items() if name.startswith("encoder/")}
    encoder_only = dataclasses.replace(checkpoint, params=dict(encoder), output_kind="")
    assert huggingface.write(encoder_only, tmp_path) == ["BertModel will initialize pooler randomly"]
    assert_equal(read_checkpoint(tmp_path).params, encoder)


@pytest.mark.ci
def test_fine_tuned_google_checkpoint_has_equal_metrics_after_export(google, tmp_path, capfd):
    (tmp_path / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    data = f"--config=experiments/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,quick=true"
    mesh = ["--config.mesh.data=1", "--config.mesh.fsdp=-1"]
    command = ["train", data, f"--workdir={tmp_path / 'run'}", f"--init_from={google}", *mesh]
    # Wrong settings are found before the conversion.
    error = refused(capfd, *command, "--config.epochs=0", "--config.steps=0")
    assert "config.epochs=0 is out of range" in error and not (tmp_path / "run").exists()
    # Wrong data is found after the conversion, which then leaves no files.
    error = refused(capfd, *command, f"--config.data.train_file={tmp_path}/none.tsv", logs=True)
    assert "none.tsv" in error and not (tmp_path / "run").exists()
    cli.main([*command, "--config.steps=1"])
    log = capfd.readouterr().err
    assert f"restored from {google}: encoder (" in log and "initialized randomly: classifier/" in log
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["hidden_size"] == WIDTH and config["model"]["attention_probs_dropout_prob"] == 0.1
    # Brackets are allowed in the path of a checkpoint of another format.
    cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "out[1]"), "--format=huggingface"])
    own, converted = (
        json.loads(printed(capfd, "evaluate", f"--checkpoint={tmp_path / name}", data, *mesh))
        for name in ("run", "out[1]")
    )
    assert own == converted
    assert "set --config" in refused(capfd, "evaluate", f"--checkpoint={tmp_path / 'out[1]'}")
    hf_config = json.loads((tmp_path / "out[1]" / "config.json").read_text())
    assert hf_config["architectures"] == ["BertForSequenceClassification"]
    assert hf_config["id2label"] == {"0": "x", "1": "y"}
