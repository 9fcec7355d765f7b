"""The door for Python: what is public, what it gives, the examples, and an installed program far from its source."""

import ast
import dataclasses
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
from checkpoints import portable
from jax.sharding import Mesh

import bertjax
from bertjax import api as door
from bertjax.config.mesh import MeshConfig
from bertjax.convert import huggingface, workdir
from bertjax.convert import tensorflow1 as tensorflow
from bertjax.tasks.finetuning.output_layer import CLASSES
from bertjax.training.sharding import make_mesh

ROOT = Path(__file__).parents[1]
FORMATS = {"bertjax": workdir.write, "huggingface": huggingface.write, "tensorflow": tensorflow.write}
TEXTS = ["a film", ("who is it", "it is a man with a very long name"), "", "a b c d e f g h"]


@pytest.fixture(scope="module")
def folders(letters, tmp_path_factory):
    """One checkpoint in each format, and one that was fine-tuned."""
    found = {}
    for name, write in FORMATS.items():
        found[name] = tmp_path_factory.mktemp(name)
        write(portable(letters), found[name])
    found["classifier"] = tmp_path_factory.mktemp("classifier")
    workdir.write(portable(letters, CLASSES, ("bad", "good")), found["classifier"])
    return found


def test_the_examples_in_the_docstrings_are_true(folders):
    names = {"CHECKPOINT": folders["huggingface"], "CLASSIFIER": folders["classifier"], "bertjax": bertjax}
    result = doctest.testmod(door, extraglobs=names)
    assert result.attempted >= 15 and not result.failed


def test_what_is_public_is_there_and_nothing_is_imported_for_it():
    assert all(getattr(bertjax, name) is not None for name in bertjax.__all__)
    assert {*bertjax.__all__} <= {*dir(bertjax)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bertjax.nothing
    # The command line, too, has to answer at once.
    code = "import sys, bertjax, bertjax.cli.main; print(*({'jax', 'flax', 'tensorflow', 'numpy', 'etils'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "\n"


@pytest.mark.devices
def test_all_formats_and_meshes_give_the_same(folders):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    found = [bertjax.load(folders[name]).encode(TEXTS) for name in FORMATS]
    spread = bertjax.load(folders["bertjax"], mesh)
    assert spread.params["encoder"]["layers"]["mlp_in"]["kernel"].sharding.spec[-1] == "tensor"
    for encoded in (*found[1:], spread.encode(TEXTS)):
        np.testing.assert_allclose(encoded.last_hidden_state, found[0].last_hidden_state, atol=3e-5)
        np.testing.assert_allclose(encoded.pooled, found[0].pooled, atol=3e-5)
        np.testing.assert_array_equal(encoded.attention_mask, found[0].attention_mask)


def test_nothing_is_said_that_is_as_it_should_be(folders):
    code = f"import bertjax; print(bertjax.load({str(folders['bertjax'])!r}).architecture.num_hidden_layers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_batch_is_what_the_modules_take(folders):
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_tokenizer_comes_alone(folders, letters, name):
    tokenizer = bertjax.load_tokenizer(folders[name])
    ids = tokenizer.encode("A film, 2 books!")
    assert tokenizer.decode(ids) == "a film , 2 books !"
    assert bertjax.load_tokenizer(letters).encode("A film, 2 books!") == ids


def test_errors_are_for_people(tmp_path, folders):
    with pytest.raises(bertjax.UsageError, match="there is nothing at"):
        bertjax.load(tmp_path / "nothing")
    with pytest.raises(bertjax.UsageError, match="has no output layer to predict with"):
        bertjax.load(folders["bertjax"]).predict(["a"])
    classifier = bertjax.load(folders["classifier"])
    with pytest.raises(bertjax.UsageError, match="has no masked_lm"):
        classifier.fill_mask("a [MASK]")
    for texts in ("a film", {"a film": 1}, [1], [None], [("a", 1)], [()]):
        for asked in (classifier.batch, classifier.encode, classifier.predict):
            with pytest.raises(bertjax.UsageError, match="give a list of texts|is no text, nor a tuple"):
                asked(texts)
    with pytest.raises(bertjax.UsageError, match="nor a tuple of at most 2 texts"):
        classifier.encode([("a", "b", "c")])
    with pytest.raises(bertjax.UsageError, match="fill_mask takes a text and a whole number"):
        classifier.fill_mask(["a [MASK]"])
    with pytest.raises(bertjax.UsageError, match="the path of the checkpoint is empty"):
        bertjax.load("")
    for seq_len in (0, 7, 10**6, "64", 64.0, True):
        with pytest.raises(bertjax.UsageError, match="seq_len is .*; it must be a number from 8 to the model's"):
            classifier.batch(["a"], seq_len)
    for mesh in ("x", Mesh(np.array(jax.devices()), ("data",))):
        with pytest.raises(bertjax.UsageError, match="mesh has the axes .*; give a jax.sharding.Mesh with"):
            bertjax.load(folders["bertjax"], mesh)


def test_a_pair_may_be_a_tuple(folders):
    classifier = bertjax.load(folders["classifier"])
    assert classifier.predict([("a", "b c")]) == classifier.predict(["a ||| b c"])
    with pytest.raises(bertjax.UsageError, match="nor a tuple of at most 2 texts"):
        classifier.predict([("a", "b", "c")])
    with pytest.raises(bertjax.UsageError, match=r"has ' \|\|\| ' in a text"):
        classifier.predict([("a ||| b", "c")])


@pytest.mark.devices
def test_a_mesh_with_explicit_axes_is_taken_as_one_without(folders):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    found, expected = (bertjax.load(folders["bertjax"], each).fill_mask("a [MASK] c", top=3) for each in (mesh, None))
    assert [piece for piece, _ in found[0]] == [piece for piece, _ in expected[0]]


@pytest.mark.devices
def test_masks_are_filled_by_what_sees_one_side_on_any_mesh(letters, tmp_path):
    whole = portable(letters)
    workdir.write(
        dataclasses.replace(whole, model=dataclasses.replace(whole.model, attention_direction="left")), tmp_path
    )
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    found = [
        dict(bertjax.load(tmp_path, each).fill_mask("a [MASK] c", top=4)[0]) for each in (make_mesh(MeshConfig()), mesh)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_what_is_asked_again_is_not_compiled_again(folders):
    bert, classifier = bertjax.load(folders["bertjax"]), bertjax.load(folders["classifier"])
    bert.fill_mask("a [MASK] c"), classifier.predict(["a film"])
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **_: compiled.append(name))
    bert.fill_mask("a longer text [MASK]"), classifier.predict(["another"])
    assert not [name for name in compiled if "compil" in name or "trace" in name]
    bert.fill_mask("a [MASK] and a [MASK]")
    assert [name for name in compiled if "compil" in name]


@pytest.mark.parametrize("name", [pytest.param("own_head", marks=pytest.mark.slow), "from_flax_bert"])
def test_an_example_is_short_and_runs(name, folders, capsys):
    file = ROOT / "examples" / f"{name}.py"
    source = file.read_text()
    assert len(source.splitlines()) <= 60 and "python examples/" in ast.get_docstring(ast.parse(source))
    main = runpy.run_path(str(file))["main"]
    checkpoint = str(folders["huggingface"])
    if name == "own_head":
        # It learns what it is shown.
        main(checkpoint, 0)
        before = float(capsys.readouterr().out.split()[1])
        main(checkpoint, 150)
        assert float(capsys.readouterr().out.split()[1]) < before / 2
    else:
        assert np.isfinite(main(checkpoint)).all() and capsys.readouterr().out


def test_no_example_is_untried():
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == {"own_head", "from_flax_bert"}


def test_a_wheel_has_everything_and_finds_its_experiments_anywhere(tmp_path):
    # A copy: a build leaves folders, and takes what an earlier one has left.
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
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for command, exit_code in (
        (["describe", "--config", "pretrain:size=tiny,quick=true"], 0),
        (["table", "5", "--results", "nothing"], 0),
        (["describe", "--config", "nosuch"], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "bertjax", *command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == exit_code, done.stderr
    assert "one of the experiments demo, glue, ner, pretrain" in done.stderr
