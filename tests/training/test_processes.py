"""Several processes, as on a pod, compute what one does, wherever the mesh's axes lie."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from several import WORKER, started

from bertjax.cli import main as cli
from bertjax.config.mesh import ClusterConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.training import multihost as processes

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"


def metrics(corpus: Path, folder: Path, processes: int, devices: int, meshes: dict[str, dict[str, int]]) -> dict:
    """Mesh to the lines of `metrics.jsonl` of six steps on it, by `processes` with so many `devices` each."""
    folder = folder / f"{processes}x{devices}"
    commands = commands_for(corpus, folder, meshes)
    for process in started([sys.executable, "-c", WORKER, json.dumps(commands)], processes, devices):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()[-2000:]
    return {name: lines_of(folder / name) for name in meshes}


def commands_for(corpus: Path, folder: Path, meshes: dict[str, dict[str, int]]) -> list[list[str]]:
    return [
        [
            "train",
            f"--config={EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true",
            *("--config.steps=6", "--config.log_every=2", "--config.eval_every=3", "--config.data.seq_len=16"),
            # Two heads, for two tensor shards to hold one each.
            *(
                "--config.model.num_attention_heads=2",
                "--config.model.hidden_dropout_prob=0.1",
                "--config.data.eval_rows=30",
            ),
            *(f"--config.mesh.{axis}={size}" for axis, size in mesh.items()),
            f"--workdir={folder / name}",
        ]
        for name, mesh in meshes.items()
    ]


def lines_of(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("alone")
    (command,) = commands_for(corpus, folder, {"one": {"data": -1}})
    cli.main(command)
    lines = lines_of(folder / "one")
    assert [line["step"] for line in lines] == [0, 2, 3, 4, 6, 6]
    return lines


def assert_same_numbers(alone: list[dict[str, float]], found: dict[str, list[dict[str, float]]]) -> None:
    for mesh, lines in found.items():
        assert [line.keys() for line in lines] == [line.keys() for line in alone], mesh
        for line, expected in zip(lines, alone, strict=True):
            values = [line[name] for name in expected]
            np.testing.assert_allclose(values, list(expected.values()), rtol=2e-6, atol=1e-7, err_msg=mesh)


def test_tensor_shards_of_two_processes_get_the_same_rows(corpus, tmp_path, alone):
    meshes = {"tensor": {"data": 1, "tensor": 2}}
    assert_same_numbers(alone, metrics(corpus, tmp_path, processes=2, devices=1, meshes=meshes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "meshes"),
    [
        (2, 1, {"data": {"data": 2}, "fsdp": {"data": 1, "fsdp": 2}}),
        (2, 2, {"tensor": {"data": 1, "tensor": 4}, "both": {"data": 1, "fsdp": 2, "tensor": 2}, "fsdp": {"fsdp": 4}}),
        (4, 1, {"both": {"data": 2, "tensor": 2}, "inner": {"data": 1, "fsdp": 2, "tensor": 2}}),
    ],
)
def test_any_axes_may_lie_across_processes(corpus, tmp_path, alone, processes, devices, meshes):
    assert_same_numbers(alone, metrics(corpus, tmp_path, processes, devices, meshes))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1], ids=["the one that coordinates", "another"])
def test_a_lost_process_is_named_and_ends_the_others_for_a_new_start(corpus, tmp_path, lost):
    command = [
        *(sys.executable, "-m", "bertjax", "train", "--distributed", f"--workdir={tmp_path}"),
        f"--config={EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true",
        *("--config.steps=100000", "--config.log_every=2", "--config.eval_every=100000", "--config.data.seq_len=16"),
    ]
    running = started(command, processes=2, devices=1)
    for line in running[0].stderr:
        if line.startswith(b"step 2/"):
            running[lost].kill()
            break
    _, said = running[1 - lost].communicate(timeout=180)
    running[lost].communicate()
    assert running[1 - lost].returncode == 43
    *before, last = said.decode().splitlines()
    assert last.startswith(f"bertjax: another process of this run is gone (process {lost}")
    assert all(line.startswith("step ") for line in before)


@pytest.fixture
def bare(monkeypatch) -> pytest.MonkeyPatch:
    """No variable that tells a process of others."""
    for name in [*os.environ]:
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM", "JAX_PROCESS", "TPU_", "MEGASCALE_", "SLURM_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, True),
        # And refused by what joins the others.
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, True),
        ({"TPU_PROCESS_ADDRESSES": "a:8476,b:8476"}, True),
        ({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}, True),
        # An allocation alone, in which nothing was started with `srun`.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
    ],
)
def test_a_process_knows_from_its_environment_whether_it_is_one_of_several(bare, variables, several):
    for name, value in variables.items():
        bare.setenv(name, value)
    assert processes.is_one_of_several() == several


@pytest.mark.parametrize(("tpus", "given", "port"), [(True, 0, "8476"), (True, 9000, "9000"), (False, 0, None)])
def test_limits_and_port_of_the_config_reach_jax(bare, tpus, given, port):
    calls = []
    bare.setattr(jax.distributed, "initialize", lambda *args, **limits: calls.append((args, limits)))
    bare.setattr(processes, "_has_tpus", lambda: tpus)
    # Taken away again, whatever sets it.
    bare.setenv(processes._PORT, "")
    bare.delenv(processes._PORT)
    processes.initialize_distributed(
        ClusterConfig(given, initialization_timeout_seconds=7, heartbeat_timeout_seconds=11)
    )
    assert calls == [((), {"initialization_timeout": 7, "heartbeat_timeout_seconds": 11})]
    assert os.environ.get(processes._PORT) == port


@pytest.mark.parametrize(
    ("address", "count", "index", "says"),
    [
        ("a:1", "2", None, "the environment has JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, and not JAX_PROCESS_ID"),
        (None, "2", None, "and not JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID; set all three"),
        ("garbage", "2", "0", "JAX_COORDINATOR_ADDRESS is 'garbage'; it must be HOST:PORT"),
        ("a:1", "x", "0", "JAX_NUM_PROCESSES is 'x'"),
        ("a:1", "2", "2", "JAX_PROCESS_ID is '2'; it must be a number from 0 to 1"),
    ],
)
def test_an_environment_that_tells_a_part_or_nonsense_is_refused(bare, address, count, index, says):
    for name, value in zip(processes._NAMES, (address, count, index), strict=True):
        if value is not None:
            bare.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        processes.initialize_distributed(ClusterConfig())


@pytest.mark.slow
def test_a_process_that_waits_for_others_in_vain_says_so(corpus, tmp_path):
    command = [*(sys.executable, "-m", "bertjax", "train", f"--workdir={tmp_path}"), *quick(corpus)]
    first, second = started([*command, "--config.cluster.initialization_timeout_seconds=3"], processes=2, devices=1)
    second.kill()
    _, said = first.communicate(timeout=120)
    second.communicate()
    assert first.returncode == 43
    assert said.decode().splitlines()[-1].startswith("bertjax: the processes of this run did not find each other in")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "says"),
    [
        ("--config.optimizer.learning_rate=0.5", "than process 0 (config.optimizer.learning_rate: 0.0001 -> 0.5)"),
        ("--workdir=elsewhere", "process 1 does not see in"),
    ],
)
def test_processes_of_two_runs_train_no_mixture(corpus, tmp_path, own, says):
    program = f"import sys; from bertjax.training import agreement; agreement._SEEN_SECONDS = 1.0; {WORKER}"
    command = ["train", *quick(corpus), f"--workdir={tmp_path / 'run'}"]
    other = [item for item in command if item.split("=")[0] != own.split("=")[0]]
    other.append(own.replace("elsewhere", str(tmp_path / "elsewhere")))
    commands = f"[{json.dumps(command)}, {json.dumps(other)}][int(os.environ['JAX_PROCESS_ID'])]"
    program = program.replace("for command in json.loads(sys.argv[1]):", f"for command in [{commands}]:")
    ends = [
        (process.communicate(timeout=120)[1].decode(), process.returncode)
        for process in started([sys.executable, "-c", program], processes=2, devices=1)
    ]
    assert [code for _, code in ends] == [2, 2]
    assert says in ends[1][0] and "another process of this run" in ends[0][0]
    assert not [*tmp_path.rglob("checkpoints")] and not [*tmp_path.rglob(".shared-*")]


def quick(corpus: Path) -> list[str]:
    return [f"--config={EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true", "--config.data.seq_len=16"]


def test_a_cluster_that_is_not_found_is_one_line(bare):
    with pytest.raises(BertjaxError, match="found no cluster .*; off TPU pods and Slurm, set JAX_COORDINATOR_ADDRESS"):
        processes.initialize_distributed(ClusterConfig())
