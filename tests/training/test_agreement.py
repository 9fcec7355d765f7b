"""What one process of a run finds out ends all of them."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bertjax.data.corpus.store import open_corpus
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.errors import BertjaxError, LostError
from bertjax.training import agreement

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "pretrain.py"


def start(corpora: list[Path], workdir: Path) -> list[subprocess.Popen]:
    """The processes of one run, each with its own copy of the corpus."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        # The last of two equal flags holds; the others make compilation quick.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(len(corpora)),
    }
    command = [
        *(sys.executable, "-m", "bertjax", "train", "--distributed"),
        *("--config.steps=6", "--config.log_every=2", "--config.eval_every=3", "--config.data.seq_len=16"),
        *("--workdir", str(workdir)),
    ]
    return [
        subprocess.Popen(
            [*command, "--config", f"{EXPERIMENT}:size=L1_H16,corpus={corpus},quick=true"],
            env=environment | {"JAX_PROCESS_ID": str(index)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for index, corpus in enumerate(corpora)
    ]


@pytest.mark.slow
def test_damaged_data_of_one_process_ends_all(corpus, tmp_path):
    copies = [tmp_path / "good", tmp_path / "bad"]
    for copy in copies:
        shutil.copytree(corpus, copy)
        # Makes the pair indices, so that the damage is found during training.
        flags = [f"--config={EXPERIMENT}:size=L1_H16,corpus={copy},quick=true", "--config.data.seq_len=16"]
        subprocess.run([sys.executable, "-m", "bertjax", "inspect", *flags], check=True, capture_output=True)
        open_pair_index(open_corpus(copy), "heldout", 16, 0, 1)
    with open(copies[1] / "train.tokens.bin", "r+b") as file:
        file.write(bytes(2))
    ended = [
        (process.communicate(timeout=180)[1].decode().splitlines(), process.returncode)
        for process in start(copies, tmp_path / "run")
    ]
    assert [code for _, code in ended] == [1, 1]
    errors = [[line for line in lines if line.startswith("bertjax: ")] for lines, _ in ended]
    assert [len(lines) for lines in errors] == [1, 1], errors
    assert "another host found its data damaged" in errors[0][0]
    assert "train.tokens.bin is damaged" in errors[1][0]
    assert not (tmp_path / "run" / "results.json").exists()


class Store:
    """What processes tell each other, and what the second of two says when the first has spoken."""

    def __init__(self, other: str | None) -> None:
        self.said, self.other = {}, other

    def key_value_set(self, key, value):
        self.said[key] = value
        if self.other is not None:
            self.said[f"{key[:-1]}1"] = self.other

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.said.items() if key.startswith(f"{folder}/")]


@pytest.fixture
def two(monkeypatch):
    def with_other(said: str | None) -> None:
        monkeypatch.setattr(agreement.distributed.global_state, "client", Store(said))

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(agreement, "_FAIL_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "_LOOK_SECONDS", 0.01)
    return with_other


def test_processes_go_on_after_what_ends_in_all_of_them_alike(two):
    two("it diverged")
    assert agreement.go_on_after("one", BertjaxError("it diverged")) == "it diverged"
    # Of another thing of the same run nothing is known yet.
    agreement.distributed.global_state.client.other = None
    with pytest.raises(BertjaxError, match="^two failed, and not alike in all processes: it diverged$"):
        agreement.go_on_after("two", BertjaxError("it diverged"))


@pytest.mark.parametrize("other", [None, "RuntimeError: Gloo is gone"])
def test_processes_do_not_go_on_after_what_ends_in_one_or_otherwise_in_each(two, other):
    two(other)
    with pytest.raises(BertjaxError, match="^one failed, and not alike in all processes: OSError: no disk$"):
        agreement.go_on_after("one", OSError("no disk"))


@pytest.mark.parametrize("lost", [LostError("process 1 is gone"), RuntimeError("Gloo AllGather failed")])
def test_a_lost_process_stays_one(two, lost):
    two(None)
    with pytest.raises(type(lost)) as raised:
        agreement.go_on_after("one", lost)
    assert raised.value is lost
