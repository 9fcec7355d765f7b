"""Checkpoints: what is saved comes back on any mesh, and damage is found, named and passed over."""

import errno
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from test_step import CONFIG, OPTIMIZER

from bertjax.config.mesh import MeshConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.training import checkpoint, parameters
from bertjax.training.checkpoint import DAMAGED, Checkpoints, absolute, find_checkpoint
from bertjax.training.parameters import load_params
from bertjax.training.sharding import make_mesh
from bertjax.training.step import abstract_state, init_state

ONE = (1, 1, 1)


def mesh_of(sizes):
    return make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])


def saved(workdir, steps=(1, 2, 3), keep=3, sizes=ONE, every=1):
    """Checkpoints of states that differ in a parameter and the step."""
    state = init_state(MaskedLm.for_model(CONFIG), OPTIMIZER, mesh_of(sizes), jax.random.key(0))
    checkpoints = Checkpoints(epath.Path(workdir), keep, {}, every)
    for step in steps:
        state = state.replace(step=state.step * 0 + step, params=jax.tree.map(lambda x: x + 1, state.params))
        checkpoints.save(state)
    checkpoints.wait()
    checkpoints.close()
    return state


def restored(workdir, sizes=ONE, identity=None):
    checkpoints = Checkpoints(epath.Path(workdir), 3, identity or {})
    state = checkpoints.restore_latest(abstract_state(MaskedLm.for_model(CONFIG), OPTIMIZER, mesh_of(sizes)))
    checkpoints.close()
    return state


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.devices
def test_a_state_comes_back_bit_for_bit_on_another_mesh(tmp_path, log_lines):
    state = saved(tmp_path, sizes=(2, 2, 2))
    for sizes in (ONE, (4, 2, 1)):
        back = restored(tmp_path, sizes)
        assert log_lines == []
        assert_equal(state, back)


def test_only_the_newest_are_kept(tmp_path):
    saved(tmp_path, steps=(1, 2, 3, 4), keep=2)
    assert sorted(child.name for child in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


@pytest.mark.parametrize(
    ("steps", "keep", "kept"),
    [
        ((4, 8, 10, 12), 3, [4, 8, 12]),
        # Of a stop the newest: it is what a run goes on from.
        ((4, 8, 10), 3, [4, 8, 10]),
        ((4, 8, 12, 13), 3, [8, 12, 13]),
        ((4, 5, 6, 7), 3, [4, 7]),
        ((4, 8, 10), 1, [10]),
    ],
)
def test_one_that_was_saved_at_a_stop_pushes_out_none_that_was_saved_on_time(tmp_path, steps, keep, kept):
    saved(tmp_path, steps, keep, every=4)
    assert sorted(int(child.name) for child in (tmp_path / "checkpoints").iterdir()) == kept


def data_files(step_folder):
    files = [file for file in (step_folder / "params").rglob("*") if file.is_file() and "d" in file.parent.name]
    return sorted(files, key=lambda file: file.stat().st_size, reverse=True)


def truncate(folder):
    for file in data_files(folder):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_bits(folder):
    """One bit in every 256 bytes: Orbax leaves bytes in its files that nothing reads, and one flip may fall there."""
    file = data_files(folder)[0]
    content = bytearray(file.read_bytes())
    for position in range(0, len(content), 256):
        content[position] ^= 1
    file.write_bytes(bytes(content))


def lose_metadata(folder):
    (folder / "meta" / "metadata").unlink()


def edit_metadata(folder):
    file = folder / "meta" / "metadata"
    file.write_text(file.read_text().replace('"score": null', '"score": 1.0'))


def empty(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_bits, lose_metadata, edit_metadata, empty])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(tmp_path, damage, log_lines):
    saved(tmp_path)
    damage(tmp_path / "checkpoints" / "3")
    state = restored(tmp_path)
    assert int(state.step) == 2
    assert len(log_lines) == 1 and str(tmp_path / "checkpoints" / "3") in log_lines[0] and "damaged" in log_lines[0]
    assert (tmp_path / DAMAGED / "3").is_dir()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (MemoryError(), BertjaxError, r"checkpoints/3 cannot be read \(MemoryError\), which is no damage"),
        (
            ValueError("RESOURCE_EXHAUSTED: 9 GB"),
            BertjaxError,
            r"checkpoints/3 cannot be read \(RESOURCE_EXHAUSTED: 9 GB",
        ),
        (OSError(errno.EMFILE, "Too many open files"), BertjaxError, "Too many open files.*, which is no damage"),
        (ValueError("Gloo all-reduce failed: Connection closed by peer"), ValueError, "Gloo"),
    ],
    ids=["memory of the host", "memory of a device", "files", "lost process"],
)
def test_what_is_no_damage_is_told_and_no_checkpoint_is_set_aside(tmp_path, monkeypatch, error, kind, said):
    saved(tmp_path)

    def fail(tree):
        raise error

    monkeypatch.setattr(checkpoint, "fingerprint", fail)
    monkeypatch.setattr(parameters, "fingerprint", fail)
    with monkeypatch.context() as several, pytest.raises(kind, match=said):
        several.setattr(jax, "process_count", lambda: 2)
        checkpoint.raise_unless_damage(error, tmp_path / "checkpoints/3")
    if kind is BertjaxError:
        abstract = abstract_state(MaskedLm.for_model(CONFIG), OPTIMIZER, mesh_of(ONE))
        for read in (
            lambda: restored(tmp_path),
            lambda: load_params(tmp_path / "checkpoints" / "3", abstract.params),
        ):
            with pytest.raises(BertjaxError, match=said):
                read()
    assert not (tmp_path / DAMAGED).exists()
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 3


def test_checkpoints_that_cannot_be_listed_are_one_error(tmp_path):
    saved(tmp_path, steps=(1,))
    (tmp_path / "checkpoints" / "1" / "_CHECKPOINT_METADATA").write_text("[" * 100_000)
    with pytest.raises(BertjaxError, match="checkpoints cannot be listed"):
        restored(tmp_path)


def test_when_all_are_damaged_nothing_starts_over_in_silence(tmp_path):
    saved(tmp_path)
    for step in (1, 2, 3):
        truncate(tmp_path / "checkpoints" / str(step))
    # The second time too, as after a restart by a supervisor.
    for _ in range(2):
        with pytest.raises(BertjaxError, match="all checkpoints"):
            restored(tmp_path)


def test_a_newest_checkpoint_without_parameters_is_named_and_no_older_one_taken(tmp_path):
    saved(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "params")
    with pytest.raises(BertjaxError, match=r"checkpoints/3 is damaged"):
        find_checkpoint(tmp_path)


def test_a_run_of_another_model_does_not_go_on_from_a_checkpoint(tmp_path):
    saved(tmp_path)
    with pytest.raises(BertjaxError, match=r"checkpoints/3 is of another model .*config.json: \(absent\) -> .*relu"):
        restored(tmp_path, identity={"config.json": {"hidden_act": "relu"}})
    assert not (tmp_path / DAMAGED).exists()


@pytest.mark.parametrize("name", ["run[1]", "run*", "what?", "back\\slash", "a]"])
def test_a_place_where_checkpoints_would_be_lost_is_refused(tmp_path, name):
    for path in (tmp_path / name, tmp_path / name / "deeper"):
        with pytest.raises(UsageError, match="takes for a pattern; choose a place"):
            absolute(path)


def test_a_file_where_a_checkpoint_may_belong_is_named_before_a_step_is_taken(tmp_path):
    saved(tmp_path, steps=(1,))
    (tmp_path / "checkpoints" / "40").write_text("")
    with pytest.raises(UsageError, match="checkpoints/40 is no folder"):
        restored(tmp_path)


def test_a_checkpoint_whose_list_of_arrays_is_gone_is_said_to_be_so(tmp_path):
    saved(tmp_path, steps=(1,))
    (tmp_path / "checkpoints" / "1" / "params" / "_METADATA").write_bytes(b"")
    target = abstract_state(MaskedLm.for_model(CONFIG), OPTIMIZER, mesh_of(ONE)).params
    with pytest.raises(BertjaxError, match="does not tell what arrays it holds"):
        load_params(tmp_path, target)


def test_parameters_load_from_a_workdir_a_folder_or_a_step(tmp_path):
    state = saved(tmp_path)
    target = abstract_state(MaskedLm.for_model(CONFIG), OPTIMIZER, mesh_of(ONE)).params
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "3"):
        assert_equal(load_params(path, target), state.params)
    with pytest.raises(UsageError, match="no checkpoint at"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_shape_that_differs_is_named_with_both_sides(tmp_path):
    saved(tmp_path)
    # A copy: the state is made once and kept.
    target = jax.tree.map(lambda leaf: leaf, abstract_state(MaskedLm.for_model(CONFIG), OPTIMIZER, mesh_of(ONE)).params)
    target["pooler"]["dense"]["kernel"] = jax.ShapeDtypeStruct((16, 8), np.float32)
    with pytest.raises(UsageError, match=r"pooler/dense/kernel has shape \(16, 16\).*\(16, 8\)"):
        load_params(tmp_path, target)


def test_what_is_not_used_is_read_to_the_devices_there_are_and_not_to_those_it_was_saved_from(tmp_path, monkeypatch):
    state, asked = saved(tmp_path), []
    whole = ocp.args.StandardRestore
    monkeypatch.setattr(ocp.args, "StandardRestore", lambda tree: asked.append(tree) or whole(tree))
    load_params(tmp_path, {"encoder": state.params["encoder"]})
    (tree,) = asked
    (devices,) = {frozenset(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)}
    found = [leaf.sharding for leaf in jax.tree.leaves(tree)]
    assert len(found) == len(jax.tree.leaves(state.params)) > len(jax.tree.leaves(state.params["encoder"]))
    assert all(sharding is not None and sharding.device_set == devices for sharding in found)


def test_a_new_output_layer_keeps_its_own_values_and_is_named(tmp_path, log_lines):
    state = saved(tmp_path)
    target = {"encoder": state.params["encoder"], "new": {"bias": np.full(3, 7.0, np.float32)}}
    loaded = load_params(tmp_path, target)
    assert_equal(loaded["encoder"], state.params["encoder"])
    np.testing.assert_array_equal(loaded["new"]["bias"], 7.0)
    assert log_lines[0].startswith("from ") and "encoder (21 arrays)" in log_lines[0]
    assert log_lines[1] == "new, with random values: new/bias"
    assert "not used here" in log_lines[2] and "pooler/dense/kernel" in log_lines[2]


def test_a_layer_that_is_to_be_new_is_not_taken_even_where_it_fits(tmp_path):
    state = saved(tmp_path)
    target = jax.tree.map(lambda x: x * 0 + 5, state.params)
    loaded = load_params(tmp_path, target, fresh=("next_sentence",))
    assert_equal(loaded["encoder"], state.params["encoder"])
    np.testing.assert_array_equal(loaded["next_sentence"]["dense"]["bias"], 5)
