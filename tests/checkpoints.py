"""Checkpoints of other formats, written by what is theirs, and portable ones, all of a model of two layers."""

import json

import numpy as np
import tensorflow as tf

from bertjax.convert import names
from bertjax.convert.convert import HUGGINGFACE
from bertjax.convert.portable import Portable
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, MULTILABEL, SPANS, TAGS

LAYERS, WIDTH = 2, 16
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
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
    outputs = {CLASSES: len(labels) or 1, MULTILABEL: len(labels), TAGS: len(labels), SPANS: 2, CHOICES: 1}.get(
        output, 0
    )
    classifier = (outputs, {HUGGINGFACE: "classifier.weight"}) if output else None
    pooled = ("encoder", "pooler", "classifier")
    parts = {
        "": ("encoder", "pooler", "masked_lm", "next_sentence"),
        CLASSES: pooled,
        CHOICES: pooled,
        MULTILABEL: pooled,
    }
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


def without(*fragments):
    return lambda values: {k: v for k, v in values.items() if not any(part in k for part in fragments)}
