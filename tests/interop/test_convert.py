"""Checkpoints keep every bit through every format, and what is not theirs is refused by name."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from bertjax import cli
from bertjax.corpus.tokenizer import load_vocabulary
from bertjax.errors import UsageError
from bertjax.interop import names
from bertjax.interop.convert import FORMATS, HUGGINGFACE, TENSORFLOW, convert, detect, read
from bertjax.interop.portable import CLASSES, SPANS, TAGS, Portable
from bertjax.model.config import ModelConfig

LAYERS, WIDTH = 2, 16
SIZES = {"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": 2, "mlp_size": 32, "max_positions": 40}
THEIR_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "initializer_range": 0.02,
}


def variables(pieces):
    """Name and shape of each variable of google-research/bert's pre-training graph, `modeling.py` as its author."""
    width, mlp = WIDTH, 32
    found = {
        "bert/embeddings/word_embeddings": (pieces, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        "bert/embeddings/position_embeddings": (40, width),
        "bert/pooler/dense/kernel": (width, width),
        "bert/pooler/dense/bias": (width,),
        "cls/predictions/transform/dense/kernel": (width, width),
        "cls/predictions/transform/dense/bias": (width,),
        "cls/predictions/output_bias": (pieces,),
        "cls/seq_relationship/output_weights": (2, width),
        "cls/seq_relationship/output_bias": (2,),
    }
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for layer in range(LAYERS):
        scope = f"bert/encoder/layer_{layer}"
        for name in ("query", "key", "value"):
            found[f"{scope}/attention/self/{name}/kernel"] = (width, width)
            found[f"{scope}/attention/self/{name}/bias"] = (width,)
        for name, shape in (
            ("attention/output/dense", (width, width)),
            ("intermediate/dense", (width, mlp)),
            ("output/dense", (mlp, width)),
        ):
            found[f"{scope}/{name}/kernel"], found[f"{scope}/{name}/bias"] = shape, shape[1:]
        norms += [f"{scope}/attention/output/LayerNorm", f"{scope}/output/LayerNorm"]
    return found | {f"{norm}/{name}": (width,) for norm in norms for name in ("gamma", "beta")}


def google_checkpoint(letters, folder, change=lambda values: values, slots=False, **config):
    """A checkpoint written by TensorFlow's own saver, as the releases were."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pieces = len(letters.read_text().splitlines())
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in variables(pieces).items()}
    if slots:
        values |= {f"{name}/adam_{m}": np.ones_like(value) for name, value in list(values.items()) for m in "mv"}
    values = change(values)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = [tf.compat.v1.get_variable(name, initializer=value) for name, value in values.items()]
        if slots:
            graph.append(tf.compat.v1.train.create_global_step())
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(graph).save(session, str(folder / "bert_model.ckpt"), write_meta_graph=slots)
    (folder / "bert_config.json").write_text(json.dumps({"vocab_size": pieces, **THEIR_SIZES, **config}))
    (folder / "vocab.txt").write_bytes(letters.read_bytes())
    return values


def portable(letters, output="", labels=(), **fields):
    vocabulary = load_vocabulary(letters)
    model = ModelConfig(vocab_size=vocabulary.size, dtype="float32", **{**SIZES, **fields})
    outputs = {CLASSES: len(labels) or 1, TAGS: len(labels), SPANS: 2}.get(output, 0)
    classifier = (outputs, {HUGGINGFACE: "classifier.weight"}) if output else None
    parts = {"": ("encoder", "pooler", "masked_lm", "next_sentence"), CLASSES: ("encoder", "pooler", "classifier")}
    rng = np.random.default_rng(1)
    params = {}
    for parameter in names.parameters(model, classifier):
        if parameter.part in parts.get(output, ("encoder", "classifier")):
            shape = (LAYERS, *parameter.shape) if parameter.is_layered else parameter.shape
            params[parameter.ours] = rng.normal(size=shape).astype(np.float32)
            if parameter.rows:
                params[parameter.ours][parameter.rows :] = 0
    return Portable(model, params, vocabulary, output, tuple(labels))


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def quiet(_line):
    pass


@pytest.mark.parametrize("slots", [False, True])
def test_a_release_of_google_comes_in_and_goes_out_under_the_same_names(slots, letters, tmp_path):
    values = google_checkpoint(letters, tmp_path / "google", slots=slots)
    said = []
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), "bertjax", False, said.append)
    assert any("Adam's moments" in line for line in said) == slots
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), TENSORFLOW, False, quiet)
    reader = tf.train.load_checkpoint(str(tmp_path / "back" / "bert_model.ckpt"))
    wanted = {name: value for name, value in values.items() if "/adam_" not in name}
    assert reader.get_variable_to_shape_map() == {name: list(value.shape) for name, value in wanted.items()}
    for name, value in wanted.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)
    assert not list((tmp_path / "back").glob("*part*"))


def test_a_parameter_is_what_the_name_says(letters, tmp_path):
    values = google_checkpoint(letters, tmp_path / "google")
    params = read(tmp_path / "google").params
    query = values["bert/encoder/layer_1/attention/self/query/kernel"]  # [in, heads * head]
    np.testing.assert_array_equal(params["encoder/layers/attention/query/kernel"][1][:, 1, 3], query[:, 8 + 3])
    output = values["bert/encoder/layer_0/attention/output/dense/kernel"]
    np.testing.assert_array_equal(params["encoder/layers/attention/output/kernel"][0][1, 3], output[8 + 3])
    np.testing.assert_array_equal(params["next_sentence/dense/kernel"], values["cls/seq_relationship/output_weights"].T)
    norm = values["bert/encoder/layer_1/output/LayerNorm/gamma"]
    np.testing.assert_array_equal(params["encoder/layers/mlp_norm/scale"][1], norm)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "output, labels, fields",
    [
        ("", (), {"activation": "gelu_erf", "layer_norm_eps": 1e-6, "num_segments": 3, "attention_dropout": 0.2}),
        (CLASSES, ("yes", "no", "perhaps"), {}),
        (CLASSES, (), {"activation": "relu"}),
        (SPANS, (), {}),
        (TAGS, ("O", "B-PER"), {}),
    ],
)
def test_every_bit_and_every_setting_survives_a_format(form, output, labels, fields, letters, tmp_path):
    given = portable(letters, output, labels, **fields)
    before = dict(given.params)
    writer = {"bertjax": "workdir"}.get(form, form)
    module = __import__(f"bertjax.interop.{writer}", fromlist=["write"])
    if form == TENSORFLOW and output == TAGS:
        with pytest.raises(UsageError, match="no output layer for tags"):
            module.write(given, tmp_path)
        return
    module.write(given, tmp_path)
    back = read(tmp_path)
    assert detect(tmp_path) == form
    assert_equal(before, back.params)
    assert back.model == given.model and back.output == output
    assert back.labels == (labels if form != TENSORFLOW else tuple(f"LABEL_{i}" for i in range(len(labels))))
    assert (back.vocabulary.pieces, back.vocabulary.lower_case) == (given.vocabulary.pieces, True)


def test_google_s_gelu_is_the_tanh_form_and_hugging_face_s_the_exact_one(letters, tmp_path):
    google_checkpoint(letters, tmp_path / "google")
    assert read(tmp_path / "google").model.activation == "gelu_tanh"
    for form in ("bertjax", HUGGINGFACE):
        convert(str(tmp_path / "google"), str(tmp_path / form), form, False, quiet)
    config = json.loads((tmp_path / HUGGINGFACE / "config.json").read_text())
    assert config["hidden_act"] == "gelu_new" and config["attention_probs_dropout_prob"] == 0.2
    config["hidden_act"] = "gelu"
    (tmp_path / HUGGINGFACE / "config.json").write_text(json.dumps(config))
    assert read(tmp_path / HUGGINGFACE).model.activation == "gelu_erf"


def without(*fragments):
    return lambda values: {k: v for k, v in values.items() if not any(part in k for part in fragments)}


def test_a_checkpoint_without_heads_says_what_is_new(letters, tmp_path):
    google_checkpoint(letters, tmp_path / "google", without("cls/"))
    said = []
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), "bertjax", False, said.append)
    assert "with pooler; new where they are needed: masked-LM head, next-sentence head" in said[0]
    assert read(tmp_path / "ours").parts == {"encoder", "pooler"}


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
        ({"problem_type": "multi_label_classification"}, "multi_label_classification"),
        ({"hidden_size": "wide"}, "a size that is no number"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_what_bertjax_has_not_is_refused_by_name(change, says, letters, tmp_path):
    from bertjax.interop import huggingface

    huggingface.write(portable(letters), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=says):
        read(tmp_path)


def test_a_destination_is_kept_unless_told_otherwise_and_nothing_is_left_of_a_failure(letters, tmp_path, capfd):
    google_checkpoint(letters, tmp_path / "google")
    command = ["convert", str(tmp_path / "google"), str(tmp_path / "ours")]
    cli.main(command)
    assert capfd.readouterr().out.strip() == str(tmp_path / "ours")
    for arguments, says in (
        (command, "already; give --overwrite"),
        ([*command[:2], str(tmp_path / "google" / "inside")], "lie in each other"),
        ([*command, "--format=onnx"], "known: bertjax, huggingface, tensorflow"),
        (["convert", "bert-base-uncased", str(tmp_path / "other")], "names of a hub are not downloaded"),
        (["convert", str(tmp_path), str(tmp_path.parent / "other")], "no checkpoint at"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2 and says in capfd.readouterr().err
    # The workdir of a run is never replaced, nor a folder that only looks like something.
    for name in ("run/checkpoints", "folder"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "folder" / "some.index").write_text("")
    for name in ("run", "folder"):
        with pytest.raises(SystemExit):
            cli.main([*command[:2], str(tmp_path / name), "--overwrite"])
        assert "is no checkpoint to replace" in capfd.readouterr().err
        shutil.rmtree(tmp_path / name)
    cli.main([*command, "--overwrite", "--format=huggingface"])
    assert detect(tmp_path / "ours") == HUGGINGFACE
    for arguments, code, says in (
        (["convert", command[1], "/proc/ours"], 1, "cannot write the checkpoint /proc/ours"),
        (["features", f"--checkpoint={command[1]}", "a", "--output=/proc/a.npz"], 1, "cannot write /proc/a.npz"),
        (["features", f"--checkpoint={command[1]}", "--input=/dev/null"], 2, "/dev/null has no text"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == code and says in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["google", "ours"]


def test_a_foreign_checkpoint_fills_gives_features_and_starts_a_run(letters, tmp_path, capfd):
    google_checkpoint(letters, tmp_path / "google")
    convert(str(tmp_path / "google"), str(tmp_path / "theirs"), HUGGINGFACE, False, quiet)
    shown = []
    for name in ("google", "theirs"):
        capfd.readouterr()
        cli.main(["fill", f"--checkpoint={tmp_path / name}", "a [MASK]", "--top=3"])
        cli.main(["features", f"--checkpoint={tmp_path / name}", "a b ||| c", f"--output={tmp_path / name}.npz"])
        shown.append(capfd.readouterr().out.replace(name, ""))
    assert shown[0] == shown[1] and shown[0].count("%") == 3
    found = np.load(tmp_path / "google.npz")
    assert found["hidden_states"].shape == (1, 1, 6, WIDTH)
    assert found["segment_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]
    (tmp_path / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    experiment = f"experiments/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,quick=true"
    command = ["train", f"--config={experiment}", f"--workdir={tmp_path / 'run'}", f"--init_from={tmp_path / 'google'}"]
    command += ["--config.steps=1", "--config.mesh.data=1", "--config.mesh.fsdp=8"]
    cli.main(command)
    said = capfd.readouterr().err
    assert "from " in said and "encoder (" in said and "new, with random values: classifier/" in said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["hidden_size"] == WIDTH and config["model"]["attention_dropout"] == 0.1
    cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--format=huggingface"])
    # Back again it is known by its labels alone, which are those of the same file.
    capfd.readouterr()
    data = f"--config=experiments/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,quick=true"
    for checkpoint in (tmp_path / "run", tmp_path / "out"):
        cli.main(["evaluate", f"--checkpoint={checkpoint}", data, "--config.mesh.data=1", "--config.mesh.fsdp=8"])
    before, after = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert before == after
    with pytest.raises(SystemExit):
        cli.main(["evaluate", f"--checkpoint={tmp_path / 'out'}"])
    assert "give --config" in capfd.readouterr().err
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert out["architectures"] == ["BertForSequenceClassification"] and out["id2label"] == {"0": "x", "1": "y"}
