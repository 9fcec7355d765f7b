"""Exported files compute what bertjax computes, even without bertjax."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import random_checkpoint

import bertjax
from bertjax.cli.main import main
from bertjax.convert import huggingface
from bertjax.convert.portable import write_workdir
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.errors import BertjaxError, UsageError
from bertjax.inference import export as module
from bertjax.inference.export import export
from bertjax.tasks.embedding.sentence_embedder import Layer, Pooling, SentenceEmbedder

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = ["a b", "it is a longer text", "c"]
# Kind of output layer, and its labels. `None` is a model with a masked-LM head.
KINDS = {None: (), "classes": ("no", "yes", "maybe"), "choices": (), "tags": ("O", "X"), "spans": ()}
PACKAGES = ("onnxscript", "onnxruntime", "torch", "transformers", "sentence_transformers")
needs_torch = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason="needs ONNX: pip install -e '.[onnx]'"
)
# Each export to ONNX takes five seconds.
SLOW = {kind: [pytest.mark.slow] for kind in KINDS if kind not in (None, "classes")}


def run_example(suffix, file, *texts):
    """Runs an example in a process that cannot import bertjax. Returns the arrays that it writes."""
    blocked = "import sys; sys.modules['bertjax'] = None; "
    blocked += "sys.modules['jax'] = None; " if suffix == "onnx" else ""
    script = EXAMPLES / f"run_{suffix}.py"
    code = f"{blocked}import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    env = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, script, file, *texts], cwd=file.parent, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: np.array(value) for name, value in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def embedder(letters, tmp_path_factory):
    """Returns a folder of sentence-transformers with three poolings, a dense layer and normalization."""
    rng = np.random.default_rng(0)
    pooling = {"embedding_dimension": 16, "pooling_mode": ["cls", "mean", "lasttoken"]}
    dense = {"in_features": 48, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    arrays = {"linear.weight": 0.1 * rng.normal(size=(8, 48)), "linear.bias": rng.normal(size=8)}
    modules = (
        Pooling(pooling, ("cls", "mean", "lasttoken")),
        Layer("Dense", {**dense, "bias": True}, {name: array.astype(np.float32) for name, array in arrays.items()}),
        Layer("Normalize", {}, {}),
    )
    embedder = SentenceEmbedder(modules, 8, max_seq_len=12, lower_case=True, truncate_dim=5)
    folder = tmp_path_factory.mktemp("embedder")
    # The tokenizer does not lower-case, and its vocabulary has no capitals, so the embedder must lower-case the text.
    vocabulary = load_vocabulary(letters, lower_case=False)
    huggingface.write(dataclasses.replace(random_checkpoint(letters), vocabulary=vocabulary, embedder=embedder), folder)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("suffix", ["stablehlo", pytest.param("onnx", marks=needs_torch)])
def test_vectors_of_an_exported_file_equal_those_of_encode(suffix, embedder, tmp_path, capfd):
    file = tmp_path / "out" / f"model.{suffix}"
    main(["export", str(embedder), str(file)])
    assert capfd.readouterr().out == f"{file}\n"
    assert {path.name for path in file.parent.iterdir()} == {file.name, "model.tokenizer.json"}
    texts = [*TEXTS, "IT is " * 20]
    vectors = run_example(suffix, file, *texts)["sentence_embedding"]
    np.testing.assert_allclose(vectors, bertjax.load(embedder).encode(texts).pooled, atol=1e-4)
    with pytest.raises(UsageError, match="exists; choose another file"):
        export(str(embedder), str(file))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *((kind, "stablehlo") for kind in KINDS),
        *(pytest.param(kind, "onnx", marks=[needs_torch, *SLOW.get(kind, [])]) for kind in KINDS),
    ],
)
def test_outputs_of_every_head_equal_those_of_the_model(kind, suffix, letters, tmp_path):
    workdir, file = tmp_path / "run", tmp_path / f"model.{suffix}"
    workdir.mkdir()
    write_workdir(random_checkpoint(letters, kind or "", KINDS[kind]), workdir)
    export(str(workdir), str(file))
    outputs = run_example(suffix, file, *TEXTS)
    bert = bertjax.load(workdir)
    batch = bert.batch(TEXTS)
    if kind is None:
        batch["masked_lm_positions"] = np.broadcast_to(np.arange(batch["input_ids"].shape[1]), batch["input_ids"].shape)
        logits, _ = bert.model.apply({"params": bert.params}, batch)
        expected = {"logits": logits[..., : bert.tokenizer.vocabulary.size]}
    else:
        logits = bert.model.apply({"params": bert.params}, batch)
        expected = {"logits": logits}
        if kind == "spans":
            expected = {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
        elif kind == "choices":
            expected = {"logits": logits.reshape(1, -1)}
    assert outputs.keys() == expected.keys()
    is_token = batch["input_mask"] > 0
    for name, array in outputs.items():
        own = np.asarray(expected[name])
        shown = (array[is_token], own[is_token]) if kind in (None, "tags", "spans") else (array, own)
        np.testing.assert_allclose(*shown, atol=1e-4, rtol=1e-4)


@pytest.mark.ci
def test_local_attention_and_long_rows_have_a_symbolic_length(letters, tmp_path):
    fields = {"local_attention": 4, "max_position_embeddings": 3000}
    write_workdir(random_checkpoint(letters, **fields), tmp_path)
    export(str(tmp_path), str(tmp_path / "model.stablehlo"))
    assert (tmp_path / "model.stablehlo").exists()


def test_an_export_that_differs_is_rejected_and_leaves_no_file(pretrained, tmp_path, monkeypatch):
    write = module._FORMATS[".stablehlo"]

    def wrong(*args):
        run = write(*args)
        return lambda inputs: {name: array + (array.shape[0] > 1) * 1e-3 for name, array in run(inputs).items()}

    monkeypatch.setitem(module._FORMATS, ".stablehlo", wrong)
    monkeypatch.setattr(module, "TOLERANCE", 1e-6)
    with pytest.raises(BertjaxError, match="would differ from bertjax by"):
        export(str(pretrained), str(tmp_path / "model.stablehlo"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("name", "message"), [("model.bin", "use a local FILE.onnx or"), ("", "cannot export to")])
def test_wrong_destinations_are_rejected(name, message, pretrained, tmp_path):
    with pytest.raises(UsageError, match=message):
        export(str(pretrained), str(tmp_path / name))


def test_tokenizer_of_another_model_is_not_replaced(pretrained, tmp_path):
    (tmp_path / "model.tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="model.tokenizer.json exists and differs"):
        export(str(pretrained), str(tmp_path / "model.stablehlo"))


def test_poolings_that_cannot_be_exported_are_rejected(embedder, tmp_path):
    folder = shutil.copytree(embedder, tmp_path / "model")
    config = {"embedding_dimension": 16, "pooling_mode": ["cls", "mean", "max"]}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="cannot export the pooling"):
        export(str(folder), str(tmp_path / "model.stablehlo"))


def test_a_package_that_is_missing_is_named(pretrained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"ONNX needs the package onnxruntime; pip install 'bertjax\[onnx\]'"):
        export(str(pretrained), str(tmp_path / "model.onnx"))
    assert not [*tmp_path.iterdir()]
