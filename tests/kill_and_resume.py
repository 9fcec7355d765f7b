"""Kills a training run with SIGKILL at random moments and shows that nothing is lost by it.

    python tests/kill_and_resume.py --kills 20 --seed 0

One run is left alone. Another, with the same config, is killed again and again and each time started again with the
same command: a third of the kills while a checkpoint is being written, a third between steps, a third while the
process starts. In the end both must have the same `metrics.jsonl`, byte for byte, and the same last checkpoint, bit
for bit: parameters, optimizer state and all else in it. No checkpoint may have been found damaged on the way.

Takes about ten seconds a kill on two CPU cores. All runs get the same environment, so the same devices.
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
# Log lines, evaluations and checkpoints fall on different steps, so that a checkpoint holds unfinished sums.
OVERRIDES = {
    "log_every": 7,
    "checkpoint_every": 10,
    "eval_every": 50,
    "data.batch_size": 8,
    "data.seq_len": 32,
    "optimizer.learning_rate": 1e-3,
}
KINDS = ("save", "steps", "start")
# A save of this size takes longer, so that a delay below this hits it in different places.
SAVE_SECONDS = 0.05
POLL_SECONDS = 0.001
STARTED = b"first step after"


class Failure(Exception):
    """What went against the promise, in one line."""


class Run:
    """One start of the training command, in a process group of its own."""

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
        """Returns when `reached` says so, with the process still alive."""
        while not reached():
            if self.process.poll() is not None:
                raise Failure(f"the run ended by itself ({self.process.returncode}) before its kill: {self.tail()}")
            if time.monotonic() > self.deadline:
                raise Failure(f"out of time: {self.tail()}")
            time.sleep(POLL_SECONDS)

    def wait(self) -> None:
        """Returns when the run has ended well."""
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
    """Waits for a moment of the given kind and kills the run in it.

    Args:
      run: just started.
      workdir: of the run.
      kind: one of `KINDS`.
      rng: draws the moment.
      usual: seconds that a `start` takes, updated here, and seconds of training from one kill to the next, `steps`.
    """
    if kind == "start":
        moment = rng.uniform(0, usual["start"])
        run.wait_for(lambda: run.seconds > moment)
    else:
        # Only then: what a save that was killed has left is still there while the process starts.
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
    """What is equal, in words.

    Raises:
      Failure: something differs.
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
        raise Failure("a kill left a damaged checkpoint under a whole one's name")
    if left_over := checkpoint_entries(killed, unfinished=True):
        raise Failure(f"{', '.join(left_over)} was left behind")
    arrays, size = sum(name.endswith(".zarray") for name in left), sum(map(len, left.values()))
    lines = len((alone / "metrics.jsonl").read_bytes().splitlines())
    return f"{arrays} arrays ({size:,} bytes stored) and {lines} metric lines are identical"


def kill_and_compare(folder: Path, kills: int, steps: int, seed: int, deadline: float) -> str:
    """Trains twice in `folder`, once with kills, and says how both ended.

    Raises:
      Failure: they differ, or a run ended before its time.
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
        print(f"left alone: {steps} steps in {run.seconds:.1f} s, {usual['start']:.1f} s to the first", flush=True)
        kinds = [KINDS[index % len(KINDS)] for index in range(kills)]
        rng.shuffle(kinds)
        in_a_save = 0
        for number, kind in enumerate(kinds, 1):
            run = start(killed)
            kill_at_random(run, killed, kind, rng, usual)
            unfinished = checkpoint_entries(killed, unfinished=True)
            # While a process starts, what is there may be left from the kill before.
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
    parser.add_argument("--seed", type=int, default=0, help="of the moments to kill in")
    parser.add_argument("--steps", type=int, help="of both runs (default: 25 a kill, at least 200)")
    parser.add_argument("--limit", type=float, default=1200.0, metavar="SECONDS", help="fails after this time")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bertjax-kills-") as folder:
        # The first run compiles for all of them.
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
