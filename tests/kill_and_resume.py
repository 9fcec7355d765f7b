"""Kills a training run with SIGKILL at random times and checks that the result does not change.

    python tests/kill_and_resume.py --kills 20 --seed 0

One run is not interrupted. Another run with the same config is killed repeatedly and restarted with the same command:
one third of the kills occur while a checkpoint is written, one third between steps, and one third while the process
starts. At the end, both runs must have byte-identical `metrics.jsonl` files and bitwise equal last checkpoints,
including optimizer state. No checkpoint may be damaged.

This takes about ten seconds per kill on two CPU cores. All runs have the same environment and therefore the same
devices.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_up_text import make_corpus
from orbax_files import checkpoint_arrays, checkpoint_entries, newest_checkpoint

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "pretrain.py"
# Log lines, evaluations and checkpoints are at different steps, so that checkpoints contain unfinished metric sums.
OVERRIDES = {
    "log_every": 7,
    "checkpoint_every": 10,
    "eval_every": 50,
    "data.batch_size": 8,
    "data.seq_len": 32,
    "optimizer.learning_rate": 1e-3,
}
KINDS = ("save", "steps", "start")
# Maximum of the random delay between the start of a save and the kill. A save takes longer than this.
SAVE_SECONDS = 0.05
POLL_SECONDS = 0.001
STARTED = b"first step after"


class Failure(Exception):
    """Failure of the check, with a one-line message."""


class Run:
    """One process of the training command, in a new process group."""

    def __init__(self, command: list[str], log: Path, deadline: float) -> None:
        self.log, self.deadline, self.began = log, deadline, time.monotonic()
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def training(self) -> bool:
        return STARTED in self.log.read_bytes()

    def wait_for(self, reached: Callable[[], Any]) -> None:
        """Waits until `reached()` is true. Raises a Failure if the process ends or the deadline passes first."""
        while not reached():
            if self.process.poll() is not None:
                raise Failure(f"the run exited with code {self.process.returncode} before it was killed: {self.tail()}")
            if time.monotonic() > self.deadline:
                raise Failure(f"out of time: {self.tail()}")
            time.sleep(POLL_SECONDS)

    def wait(self) -> None:
        """Waits for the end of the run. Raises a Failure unless the exit code is 0."""
        try:
            code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failure(f"out of time: {self.tail()}") from None
        if code:
            raise Failure(f"the run ended with exit code {code}: {self.tail()}")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-3:])


def train_command(corpus: Path, workdir: Path, steps: int) -> list[str]:
    fields = OVERRIDES | {"steps": steps}
    return [
        *(sys.executable, "-c", "from bertjax.cli.main import main; main()", "train"),
        f"--config={EXPERIMENT}:size=L2_H64,quick=true,corpus={corpus}",
        f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


def kill_at_random(run: Run, workdir: Path, kind: str, rng: random.Random, usual: dict[str, float]) -> None:
    """Kills a run at a random time during its start, its training steps or a save, as `kind` says.

    Args:
      run: run that was just started.
      workdir: workdir of the run.
      kind: one of `KINDS`.
      rng: random generator that draws the time.
      usual: seconds that a start takes (`start`, updated here), and seconds of training between kills (`steps`).
    """
    if kind == "start":
        moment = rng.uniform(0, usual["start"])
        run.wait_for(lambda: run.seconds > moment)
    else:
        # Wait until training has started: before that, unfinished files may be from the previous kill.
        run.wait_for(run.training)
        usual["start"] = min(usual["start"], run.seconds)
    if kind == "steps":
        moment = run.seconds + rng.uniform(0, usual["steps"])
        run.wait_for(lambda: run.seconds > moment)
    if kind == "save":
        reached = (newest_checkpoint(workdir) or 0) + rng.randrange(4) * OVERRIDES["checkpoint_every"]
        while True:
            run.wait_for(
                lambda: (newest_checkpoint(workdir) or 0) >= reached and checkpoint_entries(workdir, unfinished=True)
            )
            begun = checkpoint_entries(workdir, unfinished=True)
            moment = run.seconds + rng.uniform(0, SAVE_SECONDS)
            run.wait_for(lambda until=moment: run.seconds > until)
            if set(begun) & set(checkpoint_entries(workdir, unfinished=True)):
                break
    run.kill()


def compare(alone: Path, killed: Path) -> str:
    """Compares the files of two runs and returns a description of the equal files.

    Raises:
      Failure: some files differ.
    """
    steps = newest_checkpoint(alone), newest_checkpoint(killed)
    if steps[0] is None or steps[0] != steps[1]:
        raise Failure(f"the last checkpoints are of steps {steps[0]} and {steps[1]}")
    left, right = (checkpoint_arrays(workdir / "checkpoints" / str(steps[0])) for workdir in (alone, killed))
    differing = sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
    if differing:
        raise Failure(f"{len(differing)} of {len(left)} stored values differ, such as {differing[0]}")
    for name in ("metrics.jsonl", "results.json"):
        if (alone / name).read_bytes() != (killed / name).read_bytes():
            raise Failure(f"{name} differs")
    if (killed / "damaged_checkpoints").exists():
        raise Failure("a kill left a damaged checkpoint that is marked as complete")
    if left_over := checkpoint_entries(killed, unfinished=True):
        raise Failure(f"unfinished checkpoints remain: {', '.join(left_over)}")
    arrays, size = sum(name.endswith(".zarray") for name in left), sum(map(len, left.values()))
    lines = len((alone / "metrics.jsonl").read_bytes().splitlines())
    return f"{arrays} arrays ({size:,} bytes stored) and {lines} metric lines are identical"


def kill_and_compare(folder: Path, kills: int, steps: int, seed: int, deadline: float) -> str:
    """Trains in `folder` without and with kills, and returns a description of the comparison.

    Raises:
      Failure: the runs differ, or a run ended early.
    """
    rng = random.Random(seed)
    corpus = make_corpus(folder)
    runs: list[Run] = []

    def start(workdir: Path) -> Run:
        runs.append(Run(train_command(corpus, workdir, steps), folder / f"log_{len(runs)}.txt", deadline))
        return runs[-1]

    alone, killed = folder / "alone", folder / "killed"
    try:
        run = start(alone)
        run.wait_for(run.training)
        usual = {"start": run.seconds}
        run.wait()
        usual["steps"] = (run.seconds - usual["start"]) / (kills + 1)
        print(f"uninterrupted: {steps} steps in {run.seconds:.1f} s, {usual['start']:.1f} s to the first", flush=True)
        kinds = [KINDS[index % len(KINDS)] for index in range(kills)]
        rng.shuffle(kinds)
        in_a_save = 0
        for number, kind in enumerate(kinds, 1):
            run = start(killed)
            kill_at_random(run, killed, kind, rng, usual)
            unfinished = checkpoint_entries(killed, unfinished=True)
            # While a process starts, unfinished files may be from the previous kill.
            during = "during a save" if run.training() and unfinished else "not during a save"
            if not run.training():
                during += ", starting"
            in_a_save += during == "during a save"
            newest = newest_checkpoint(killed)
            print(
                f"kill {number:>2} ({kind:<5}) after {run.seconds:>5.1f} s, {during}; newest checkpoint: "
                f"{'none' if newest is None else newest}, unfinished: {', '.join(unfinished) or 'none'}",
                flush=True,
            )
        if in_a_save < kills // len(KINDS):
            raise Failure(f"only {in_a_save} of {kills} kills came during a save")
        run = start(killed)
        run.wait()
        return f"{kills} kills, {in_a_save} of them during a save; {compare(alone, killed)}"
    finally:
        for run in runs:
            run.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the kill times (default: 0)")
    parser.add_argument("--steps", type=int, help="steps of both runs (default: 25 per kill, at least 200)")
    parser.add_argument("--limit", type=float, default=1200.0, metavar="SECONDS", help="time limit (default: 1200)")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bertjax-kills-") as folder:
        # All runs share the compilation cache.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        try:
            steps = args.steps or max(200, 25 * args.kills)
            outcome = kill_and_compare(Path(folder), args.kills, steps, args.seed, began + args.limit)
        except Failure as failure:
            print(f"FAIL after {time.monotonic() - began:.0f} s: {failure}")
            sys.exit(1)
    print(f"PASS in {time.monotonic() - began:.0f} s: {outcome}")


if __name__ == "__main__":
    main()
