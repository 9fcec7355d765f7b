"""Checkpoints: saved states are restored on any mesh, and damaged checkpoints are reported and skipped."""

import contextlib
import dataclasses
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from test_step import CONFIG, OPTIMIZER

from bertjax.config.mesh import MeshConfig
from bertjax.errors import BertjaxError, LostError, UsageError
from bertjax.model.models import EncoderModel
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.training import checkpoint_metadata
from bertjax.training.checkpoint import (
    DAMAGED,
    Checkpoints,
    KeepBestAndPeriodic,
    find_checkpoint,
    resolve_checkpoint_path,
)
from bertjax.training.checkpoint_metadata import fingerprint, model_metadata, raise_unless_damage, read_metadata
from bertjax.training.parameters import load_params, load_params_on_host
from bertjax.training.sharding import make_mesh
from bertjax.training.step import TrainState, abstract_state, make_init_state

ONE_DEVICE = (1, 1, 1)
OBJECTIVE = MaskedLm.for_model(CONFIG)
MODEL = OBJECTIVE.model


def mesh_of(sizes):
    return make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])


def init_state(sizes=ONE_DEVICE):
    return make_init_state(OBJECTIVE, OPTIMIZER, mesh_of(sizes))(jax.random.key(0))


def opened(workdir, keep=3, model=MODEL):
    """Returns the checkpoints of a workdir, to use in a `with` block."""
    return contextlib.closing(Checkpoints(epath.Path(workdir), keep, lambda _: model_metadata(model)))


def save_states(workdir, sizes=ONE_DEVICE):
    """Saves checkpoints of steps 1, 2 and 3 with different parameters; returns the last state."""
    state = init_state(sizes)
    with opened(workdir) as checkpoints:
        for step in (1, 2, 3):
            state = state.replace(step=state.step * 0 + step, params=jax.tree.map(lambda x: x + 1, state.params))
            checkpoints.save(state)
    return state


def restore(workdir, sizes=ONE_DEVICE, model=MODEL, abstract=None):
    """Restores the latest state of a workdir on a mesh. `abstract` replaces the expected shapes of the state."""
    abstract = abstract or abstract_state(OBJECTIVE, OPTIMIZER, mesh_of(sizes))
    with opened(workdir, model=model) as checkpoints:
        return checkpoints.restore_latest(
            abstract, lambda: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), abstract)
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a workdir with checkpoints of steps 1, 2 and 3, and the last state; tests must not change them."""
    path = tmp_path_factory.mktemp("saved")
    return path, save_states(path)


@pytest.fixture
def state(saved):
    return saved[1]


@pytest.fixture
def workdir(saved, tmp_path):
    """Returns a copy of the workdir with checkpoints of steps 1, 2 and 3."""
    return shutil.copytree(saved[0], tmp_path / "run")


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.devices
def test_state_restores_bit_for_bit_on_another_mesh(tmp_path, log_lines):
    state = save_states(tmp_path, sizes=(2, 2, 2))
    for sizes in (ONE_DEVICE, (4, 2, 1)):
        restored = restore(tmp_path, sizes)
        assert log_lines == []
        assert_equal(state, restored)


@pytest.mark.parametrize(
    ("steps", "expected"),
    # The newest checkpoint is always kept, since a stopped run resumes from it.
    [((4, 8, 12, 13), [8, 12, 13]), ((4, 5, 6, 7), [4, 7])],
)
def test_policy_keeps_the_latest_checkpoint_and_recent_periodic_checkpoints(steps, expected):
    kept = []
    for step in steps:
        kept.append(SimpleNamespace(step=step))
        preserved = KeepBestAndPeriodic(3, 4, {}).should_preserve(kept, context=None)
        kept = [checkpoint for checkpoint, is_kept in zip(kept, preserved, strict=True) if is_kept]
    assert [checkpoint.step for checkpoint in kept] == expected


def change_files(folder, pattern, change):
    for file in filter(Path.is_file, folder.glob(pattern)):
        file.write_bytes(change(file.read_bytes()))


def flip_bits(content):
    """Flips a bit in every 256 bytes. A single flip may have no effect, since Orbax does not read all bytes."""
    array = np.frombuffer(content, np.uint8).copy()
    array[::256] ^= 1
    return array.tobytes()


def replace_params(folder):
    """Replaces the parameters with intact ones of another checkpoint, which only the fingerprint detects."""
    shutil.rmtree(folder / "params")
    shutil.copytree(folder.with_name("2") / "params", folder / "params")


DAMAGES = {
    "truncated": lambda folder: change_files(folder, "params/**/d/*", lambda content: content[: len(content) // 2]),
    "flipped bits": lambda folder: change_files(folder, "params/**/d/*", flip_bits),
    "flipped digit": lambda folder: change_files(folder, "meta/*", lambda content: content.replace(b"e-12", b"e-02")),
    "other parameters": replace_params,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_newest_checkpoint_is_reported_and_the_previous_one_restored(workdir, damage, log_lines):
    damage(workdir / "checkpoints" / "3")
    assert int(restore(workdir).step) == 2
    assert len(log_lines) == 1 and str(workdir / "checkpoints" / "3") in log_lines[0] and "damaged" in log_lines[0]
    assert (workdir / DAMAGED / "3").is_dir()


@pytest.mark.parametrize("restarts", [False, True])
def test_checkpoint_with_the_best_score_is_kept_also_after_restarts_and_without_files_of_orbax(tmp_path, restarts):
    state, scores = init_state(), [(1, 0.5), (2, 0.9), (3, 0.9), (4, 0.7), (5, None)]
    for part in [[score] for score in scores] if restarts else [scores]:
        with opened(tmp_path, keep=1) as checkpoints:
            for step, score in part:
                checkpoints.save(state.replace(step=state.step + step), score)
                checkpoints.wait()
                for folder in tmp_path.glob("checkpoints/*/metrics"):
                    shutil.rmtree(folder)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()} == {"3", "5"}


def test_older_checkpoint_without_metadata_is_moved_aside(workdir, log_lines):
    (workdir / "checkpoints" / "1" / "meta" / "metadata").unlink()
    assert int(restore(workdir).step) == 3
    assert (workdir / DAMAGED / "1").is_dir() and "1 is damaged" in log_lines[0]


def test_save_that_times_out_raises_a_lost_error(workdir, state, monkeypatch):
    with opened(workdir) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", Mock(side_effect=TimeoutError("timed out")))
        with pytest.raises(LostError, match="failed .timed out.; the last good checkpoint is .*3"):
            checkpoints.save(state.replace(step=state.step + 1))


@pytest.mark.parametrize("error", [MemoryError(), ValueError("RESOURCE_EXHAUSTED"), OSError(errno.EMFILE, "open")])
def test_errors_other_than_damage_are_reported_and_move_no_checkpoint(workdir, monkeypatch, error):
    monkeypatch.setattr(checkpoint_metadata, "fingerprint", Mock(side_effect=error))
    for read in (lambda: restore(workdir), lambda: load_params_on_host(find_checkpoint(workdir))):
        with pytest.raises(BertjaxError, match=r"checkpoints/3 cannot be read .* but is not damaged"):
            read()
    assert not (workdir / DAMAGED).exists() and len([*(workdir / "checkpoints").iterdir()]) == 3


def test_checkpoint_that_training_replaces_while_it_is_read_is_not_called_damaged(workdir, monkeypatch):
    checkpoint = find_checkpoint(workdir)

    def remove_and_fail(tree):
        shutil.rmtree(checkpoint)
        raise FileNotFoundError(str(checkpoint))

    monkeypatch.setattr(checkpoint_metadata, "fingerprint", remove_and_fail)
    for read in (load_params_on_host, read_metadata):
        with pytest.raises(BertjaxError, match="checkpoints/3 was removed while it was read; run the same command"):
            read(checkpoint)


def test_error_of_a_lost_process_is_not_reported_as_a_damaged_checkpoint(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="^Timed out while waiting for async_write barrier"):
        raise_unless_damage(ValueError("Timed out while waiting for async_write barrier."), epath.Path("3"))


def test_checkpoints_that_cannot_be_listed_raise_a_bertjax_error(workdir):
    (workdir / "checkpoints" / "1" / "_CHECKPOINT_METADATA").write_text("[" * 100_000)
    with pytest.raises(BertjaxError, match="cannot list the checkpoints in"):
        restore(workdir)


def test_run_does_not_start_over_if_all_checkpoints_are_damaged(workdir):
    for step in (1, 2, 3):
        DAMAGES["truncated"](workdir / "checkpoints" / str(step))
    # The second attempt stands for a restart by a supervisor. It must fail like the first one.
    for _ in range(2):
        with pytest.raises(BertjaxError, match="all checkpoints"):
            restore(workdir)


def test_checkpoint_of_another_model_is_not_resumed(workdir):
    relu = MODEL.clone(config=dataclasses.replace(CONFIG, hidden_act="relu"))
    for model, change in ((relu, "hidden_act: gelu_tanh -> relu"), (EncoderModel(CONFIG), "kind: pretraining -> enc")):
        with pytest.raises(BertjaxError, match=rf"checkpoints/3 differs from this run .*{change}"):
            restore(workdir, model=model)
    assert not (workdir / DAMAGED).exists()


def test_new_metrics_and_fields_of_the_state_have_initial_values(workdir, state):
    @flax.struct.dataclass
    class WithDouble(TrainState):
        double: Any = None
        off: Any = None

        def with_initial_params(self, params):
            return self.replace(params=params, double=jax.tree.map(lambda x: 2 * x, params))

    def changed(sums):
        return {"mlm_entropy": sums["mlm_loss"], **{name: sums[name] for name in sums if name != "nsp_loss"}}

    abstract = abstract_state(OBJECTIVE, OPTIMIZER, mesh_of(ONE_DEVICE))
    new = WithDouble(**{**vars(abstract), "sums": changed(abstract.sums)}, double=abstract.params)
    restored = vars(restore(workdir, abstract=new))
    # Fields that depend on the initial parameters get those of the checkpoint.
    sums, double = {**changed(state.sums), "mlm_entropy": np.ones(2)}, jax.tree.map(lambda x: 2 * x, state.params)
    assert_equal(restored, {**vars(state), "sums": sums, "double": double, "off": None})


def test_architecture_field_missing_in_an_old_checkpoint_has_its_default(workdir, state):
    file = workdir / "checkpoints" / "3" / "meta" / "metadata"
    content = json.loads(file.read_text())
    del content["sha256"]  # Earlier versions wrote no checksum.
    assert content["architecture"].pop("layer_norm_eps") == 1e-12
    file.write_text(json.dumps(content))
    assert_equal(state, restore(workdir))


def test_path_with_glob_characters_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="which Orbax reads as a pattern"):
        resolve_checkpoint_path(tmp_path / "run[1]" / "deeper")


def test_missing_arrays_are_reported_as_damage(workdir):
    shutil.rmtree(workdir / "checkpoints" / "3" / "params")
    with pytest.raises(BertjaxError, match="checkpoints/3 is damaged.*the list of arrays is missing"):
        load_params_on_host(find_checkpoint(workdir))


def test_load_params_accepts_a_workdir_a_checkpoints_folder_or_one_checkpoint(workdir, state):
    target = abstract_state(OBJECTIVE, OPTIMIZER, mesh_of(ONE_DEVICE)).params
    for path in (workdir, workdir / "checkpoints", workdir / "checkpoints" / "3"):
        assert_equal(load_params(find_checkpoint(path), target), state.params)
    with pytest.raises(UsageError, match="no checkpoint at"):
        find_checkpoint(workdir / "nowhere")


def test_parameter_of_another_shape_is_an_error_that_names_both_shapes(workdir):
    with pytest.raises(UsageError, match=r"pooler/dense/kernel has shape \(16, 16\) .* but \(16, 8\)"):
        load_params(find_checkpoint(workdir), {"pooler": {"dense": {"kernel": np.zeros((16, 8), np.float32)}}})


def test_new_and_reinitialized_parameters_have_initial_values_and_are_logged(workdir, state, log_lines):
    target = {**jax.tree.map(lambda x: x * 0 + 5, state.params), "new": {"bias": np.full(3, 7.0, np.float32)}}
    del target["pooler"]
    loaded = load_params(find_checkpoint(workdir), target, output_params=("next_sentence",), outputs=None)
    assert_equal(loaded["encoder"], state.params["encoder"])
    np.testing.assert_array_equal(loaded["new"]["bias"], 7)
    np.testing.assert_array_equal(loaded["next_sentence"]["dense"]["bias"], 5)
    restored, initialized, ignored = log_lines
    assert restored.startswith("restored from ") and "encoder (21 arrays)" in restored
    assert initialized == "initialized randomly: new/bias, next_sentence/dense/bias, next_sentence/dense/kernel"
    assert ignored.startswith("ignored parameters of ") and "pooler/dense/kernel" in ignored


# Fingerprint of `make_tree()`. Checkpoints store fingerprints, so they must not change.
FINGERPRINT = "75a9942a47f5266f"


def make_tree() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"matrix": rng.standard_normal((8, 6), np.float32), "stack": rng.standard_normal((3, 2, 4), np.float32)}


@pytest.fixture(params=[0, checkpoint_metadata._SMALL_BYTES], ids=["on devices", "in NumPy"])
def each_implementation(request, monkeypatch):
    """Runs a test twice: with fingerprints computed on devices, and in NumPy."""
    monkeypatch.setattr(checkpoint_metadata, "_SMALL_BYTES", request.param)


@pytest.mark.parametrize(
    "change",
    [
        lambda matrix: -matrix,
        lambda matrix: matrix[:, [1, 0, 2, 3, 4, 5]],
        lambda matrix: (matrix.view(np.uint32) + np.array([1, 2**32 - 1, 0, 0, 0, 0], np.uint32)).view(np.float32),
    ],
    ids=["all signs", "columns", "increment and decrement"],
)
@pytest.mark.usefixtures("each_implementation")
def test_changes_that_could_cancel_out_change_the_fingerprint(change):
    tree = make_tree()
    changed = {**tree, "matrix": np.ascontiguousarray(change(tree["matrix"]))}
    for put in (jax.device_put, lambda tree: tree):
        assert fingerprint(put(tree)) == FINGERPRINT != fingerprint(put(changed))


@pytest.mark.usefixtures("each_implementation")
def test_fingerprint_depends_on_names_and_shapes():
    tree = make_tree()
    swapped = {"matrix": tree["stack"], "stack": tree["matrix"]}
    reshaped = {**tree, "matrix": tree["matrix"].reshape(6, 8)}
    assert len({fingerprint(variant) for variant in (tree, swapped, reshaped)}) == 3


@pytest.mark.devices
def test_fingerprint_depends_on_neither_mesh_nor_slice_size(monkeypatch):
    tree = {"matrix": make_tree()["matrix"]}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharded = jax.device_put(tree, NamedSharding(mesh, PartitionSpec("x", "y")))
    expected = fingerprint(tree)
    monkeypatch.setattr(checkpoint_metadata, "_SMALL_BYTES", 0)
    assert fingerprint(sharded) == expected
    monkeypatch.setattr(checkpoint_metadata, "_SLICE_BYTES", 3 * 6 * 4)
    assert fingerprint(sharded) == fingerprint(tree) == expected
