"""The Python API, the examples, and the package as installed from a wheel."""

import doctest
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.checkpoints import random_checkpoint
from jax.sharding import Mesh

import bertjax
from bertjax import api
from bertjax.config.mesh import MeshConfig
from bertjax.convert.convert import WRITERS
from bertjax.convert.portable import write_workdir
from bertjax.tasks.finetuning.output_layer import CLASSES
from bertjax.training.sharding import make_mesh

ROOT = Path(__file__).parents[1]
TEXTS = ["a film", ("who is it", "it is a man with a very long name"), "", "a b c d e f g h"]


@pytest.fixture(scope="module")
def folders(letters, tmp_path_factory):
    """Returns the folders of a checkpoint in each format and of a fine-tuned checkpoint."""
    folders = {name: tmp_path_factory.mktemp(name) for name in (*WRITERS, "classifier")}
    for name, write in WRITERS.items():
        write(random_checkpoint(letters), folders[name])
    write_workdir(random_checkpoint(letters, CLASSES, ("bad", "good")), folders["classifier"])
    return folders


@pytest.mark.ci
def test_docstring_examples_run(folders):
    names = {"CHECKPOINT": folders["huggingface"], "CLASSIFIER": folders["classifier"], "bertjax": bertjax}
    result = doctest.testmod(api, extraglobs=names)
    assert result.attempted >= 15 and not result.failed


def test_public_names_exist_and_import_lazily():
    assert all(getattr(bertjax, name) is not None for name in bertjax.__all__)
    assert {*bertjax.__all__} <= {*dir(bertjax)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bertjax.nothing
    # `bertjax --help` must be fast.
    slow = "{'jax', 'flax', 'tensorflow', 'numpy', 'etils'}"
    code = f"import sys, bertjax, bertjax.cli.main; print(*({slow} & {{*sys.modules}}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert process.stdout == "\n"


@pytest.mark.devices
def test_encode_is_equal_for_all_checkpoint_formats_and_on_a_mesh(folders):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    expected, *others = (bertjax.load(folders[name]).encode(TEXTS) for name in ("bertjax", "huggingface"))
    sharded = bertjax.load(folders["bertjax"], mesh)
    assert sharded.params["encoder"]["layers"]["mlp_in"]["kernel"].sharding.spec[-1] == "tensor"
    for encoded in (*others, sharded.encode(TEXTS)):
        np.testing.assert_allclose(encoded.last_hidden_state, expected.last_hidden_state, atol=3e-5)
        np.testing.assert_allclose(encoded.pooled, expected.pooled, atol=3e-5)
        np.testing.assert_array_equal(encoded.attention_mask, expected.attention_mask)


@pytest.mark.ci
def test_loading_prints_nothing(folders):
    code = f"import bertjax; print(bertjax.load({str(folders['bertjax'])!r}).architecture.num_hidden_layers)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (process.stdout, process.stderr) == ("2\n", "")


def test_repr_of_a_model_or_an_encoding_is_one_line(folders):
    classifier = bertjax.load(folders["classifier"])
    assert repr(classifier) == f"<bertjax.Pretrained SequenceModel L2_H16_A2 from {folders['classifier']}>"
    encoded = classifier.encode(["a", "b c"])
    shapes = "last_hidden_state (2, 4, 16), pooled (2, 16), attention_mask (2, 4)"
    assert repr(encoded) == f"<bertjax.Encoded {shapes}>"


def test_encoder_applied_to_batch_gives_the_states_of_encode(folders):
    bert = bertjax.load(folders["bertjax"])
    batch, encoded = bert.batch(TEXTS), bert.encode(TEXTS)
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(batch, encoded.attention_mask.shape)
    states, _ = bertjax.Encoder(bert.config).apply(
        {"params": jax.device_get(bert.params["encoder"])},
        *(batch[name] for name in ("input_ids", "segment_ids", "input_mask")),
    )
    inside = batch["input_mask"] > 0
    np.testing.assert_allclose(np.asarray(states)[inside], encoded.last_hidden_state[inside], atol=3e-5)
    assert not encoded.last_hidden_state[~inside].any()
    assert bert.batch(TEXTS, 8)["input_mask"].sum(axis=1).tolist() == [7, 8, 2, 8]


@pytest.mark.parametrize("name", WRITERS)
def test_load_tokenizer_accepts_every_checkpoint_format(folders, letters, name):
    tokenizer = bertjax.load_tokenizer(folders[name])
    ids = tokenizer.encode("A film, 2 books!")
    assert tokenizer.decode(ids) == "a film , 2 books !"
    assert bertjax.load_tokenizer(letters).encode("A film, 2 books!") == ids


def test_invalid_arguments_raise_a_usage_error(tmp_path, folders):
    bert, classifier = bertjax.load(folders["bertjax"]), bertjax.load(folders["classifier"])
    for call, message in (
        (lambda: bertjax.load(tmp_path / "nothing"), "no checkpoint at"),
        (lambda: bertjax.load(""), "path is empty"),
        (lambda: bertjax.load(folders["bertjax"], Mesh(np.array(jax.devices()), ("data",))), "wrong mesh axes"),
        (lambda: bert.predict(["a"]), "has no output layer"),
        (lambda: classifier.predict([("a", "b", "c")]), "is a pair"),
        (lambda: classifier.fill_mask("a [MASK]"), "lacks the parameters masked_lm"),
        *((lambda m=method: m("a film"), "texts must be a list") for method in (bert.batch, bert.encode, bert.predict)),
        (lambda: bert.batch(["a"], 7), "seq_len=7 is out of range; use 8 to 40"),
        (lambda: bert.encode(["a"], pooling="max"), "pooling='max' is unknown; use one of cls, mean, or None"),
        (lambda: bert.save("hf:me/model"), "cannot save to hf:me/model"),
    ):
        with pytest.raises(bertjax.UsageError, match=message):
            call()


def test_predict_takes_a_pair_of_texts_as_a_tuple(folders):
    classifier = bertjax.load(folders["classifier"])
    assert classifier.predict([("a", "b c")]) == classifier.predict([["a", "b c"]])
    # `|||` separates texts only on the command line.
    assert (
        classifier.predict(["a ||| b c"]) == classifier.predict(["a | | | b c"]) != classifier.predict([("a", "b c")])
    )


@pytest.mark.devices
@pytest.mark.parametrize("direction", ["both", "left"])
def test_fill_mask_is_equal_on_a_mesh_with_explicit_axes(letters, tmp_path, direction):
    write_workdir(random_checkpoint(letters, attention_direction=direction), tmp_path)
    explicit = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    sharded, replicated = (dict(bertjax.load(tmp_path, m).fill_mask("a [MASK] c", top=4)[0]) for m in (explicit, None))
    assert replicated == pytest.approx(sharded, abs=1e-5)


@pytest.mark.ci
def test_second_call_of_a_method_does_not_compile(folders, jax_events):
    bert, classifier = bertjax.load(folders["bertjax"]), bertjax.load(folders["classifier"])
    bert.fill_mask("a [MASK] c"), classifier.predict(["a film"]), bert.encode(TEXTS)
    jax_events.clear()
    bert.fill_mask("a longer text [MASK]"), classifier.predict(["another"])
    bert.encode(TEXTS), bert.encode(TEXTS, pooling="mean")
    assert not [name for name in jax_events if "compil" in name or "trace" in name]
    for call in (lambda: bert.fill_mask("a [MASK] and a [MASK]"), lambda: bert.encode(["a " * 30] * 100)):
        call()
        assert [name for name in jax_events if "compil" in name]
        jax_events.clear()


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param("custom_head", marks=pytest.mark.slow), "from_flax_bert"])
def test_example_runs(name, folders, capsys):
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    checkpoint = str(folders["huggingface"])
    if name == "custom_head":
        main(checkpoint, 0)
        before = float(capsys.readouterr().out.split()[1])
        main(checkpoint, 150)
        assert float(capsys.readouterr().out.split()[1]) < before / 2
    else:
        assert np.isfinite(main(checkpoint)).all() and capsys.readouterr().out


@pytest.mark.ci
def test_wheel_contains_the_package_and_its_experiments(tmp_path):
    # Builds leave folders in the source tree, so build a copy.
    for name in ("bertjax", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"--wheel-dir={tmp_path}", tmp_path / "source"], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        archive.extractall(tmp_path / "installed")
    source = {str(file.relative_to(ROOT)) for file in (ROOT / "bertjax").rglob("*.py")}
    experiments = {f"bertjax/{file.relative_to(ROOT)}" for file in (ROOT / "experiments").rglob("*.py")}
    assert source | experiments | {"bertjax/py.typed", "bertjax/reproduce/paper.json"} == {
        name for name in names if name.startswith("bertjax/")
    }
    command = [sys.executable, "-m", "bertjax", "describe", "--config=pretrain:size=tiny,quick=true"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
