"""Helpers that create random two-layer checkpoints, in memory or as google-research/bert files, and edit JSON files."""

import json

import numpy as np
import tensorflow as tf

from bertjax.convert.bert import BERT
from bertjax.convert.family import OUTPUT_KINDS
from bertjax.convert.portable import PortableCheckpoint
from bertjax.data.corpus.vocabulary import load_vocabulary
from helpers.tiny_config import SIZES, tiny_config

LAYERS, WIDTH = SIZES["num_hidden_layers"], SIZES["hidden_size"]
GOOGLE_CONFIG = {**SIZES, "type_vocab_size": 2, "hidden_act": "gelu", "attention_probs_dropout_prob": 0.2}


def google_variables(num_tokens):
    """Returns names and shapes of google-research/bert's pre-training variables, without using bertjax."""
    width, mlp_width = WIDTH, 32
    shapes = {
        "bert/embeddings/word_embeddings": (num_tokens, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        "bert/embeddings/position_embeddings": (40, width),
        "bert/pooler/dense/kernel": (width, width),
        "bert/pooler/dense/bias": (width,),
        "cls/predictions/transform/dense/kernel": (width, width),
        "cls/predictions/transform/dense/bias": (width,),
        "cls/predictions/output_bias": (num_tokens,),
        "cls/seq_relationship/output_weights": (2, width),
        "cls/seq_relationship/output_bias": (2,),
    }
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for layer in range(LAYERS):
        scope = f"bert/encoder/layer_{layer}"
        for name in ("query", "key", "value"):
            shapes[f"{scope}/attention/self/{name}/kernel"] = (width, width)
            shapes[f"{scope}/attention/self/{name}/bias"] = (width,)
        for name, shape in (
            ("attention/output/dense", (width, width)),
            ("intermediate/dense", (width, mlp_width)),
            ("output/dense", (mlp_width, width)),
        ):
            shapes[f"{scope}/{name}/kernel"], shapes[f"{scope}/{name}/bias"] = shape, shape[1:]
        norms += [f"{scope}/attention/output/LayerNorm", f"{scope}/output/LayerNorm"]
    return shapes | {f"{norm}/{name}": (width,) for norm in norms for name in ("gamma", "beta")}


def google_checkpoint(letters, folder, change=lambda variables: variables, **config):
    """Saves a checkpoint with TensorFlow's own saver, like the released checkpoints, and returns its variables."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    num_tokens = len(letters.read_text().splitlines())
    shapes = google_variables(num_tokens)
    variables = change({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = [tf.compat.v1.get_variable(name, initializer=value) for name, value in variables.items()]
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(graph)
        saver.save(session, str(folder / "bert_model.ckpt"), write_meta_graph=False)
    (folder / "bert_config.json").write_text(json.dumps({"vocab_size": num_tokens, **GOOGLE_CONFIG, **config}))
    (folder / "vocab.txt").write_bytes(letters.read_bytes())
    return variables


def random_checkpoint(letters, output_kind="", labels=(), **fields):
    """Returns a random checkpoint with the pre-training heads or with an output layer."""
    vocabulary = load_vocabulary(letters)
    config = tiny_config(vocabulary.size, **fields)
    num_outputs = (OUTPUT_KINDS[output_kind].num_outputs or len(labels) or 1) if output_kind else 0
    class_name = BERT.class_name(output_kind, {"masked_lm", "next_sentence"})
    modules = ("encoder", *BERT.classes[class_name].modules)
    rng = np.random.default_rng(1)
    params = {}
    for parameter in BERT.parameters(config, output_kind, num_outputs):
        if parameter.module in modules:
            params[parameter.path] = rng.normal(size=parameter.stacked_shape).astype(np.float32)
            if parameter.unpadded_rows:
                params[parameter.path][parameter.unpadded_rows :] = 0
    return PortableCheckpoint(config, params, vocabulary, output_kind, tuple(labels))


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def edit_json(file, **fields):
    """Sets fields of a JSON file, which is created if it does not exist."""
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def without(*fragments):
    """Returns a function for `google_checkpoint(change=...)` that removes variables whose names contain a fragment."""
    return lambda variables: {
        name: value for name, value in variables.items() if not any(fragment in name for fragment in fragments)
    }
