"""Kills a training run with SIGKILL at random times and checks that the result does not change.

    python tests/kill_and_resume.py --kills 20 --seed 0

One run is not interrupted. Another run with the same config is killed repeatedly and restarted with the same command:
every second kill occurs while a checkpoint is written, the others at any time between start and end. At the end, both
runs must have byte-identical `metrics.jsonl` and `results.json` files and bitwise equal last checkpoints, including
optimizer state. No checkpoint may be damaged. This takes about ten seconds per kill on two CPU cores.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from helpers.made_up_text import make_corpus
from helpers.orbax_files import checkpoint_arrays, checkpoint_entries, newest_checkpoint
from helpers.processes import train_command

# Log lines, evaluations and checkpoints are at different steps, so that checkpoints contain unfinished metric sums.
FIELDS = {
    "log_every": 7,
    "checkpoint_every": 10,
    "eval_every": 50,
    "model.hidden_size": 64,
    "optimizer.learning_rate": 1e-3,
}
# Maximum of the random delay between the start of a save and the kill. A save takes longer than this.
SAVE_SECONDS = 0.05


class Run:
    """One process of the training command, in a new process group."""

    def __init__(self, corpus: Path, workdir: Path, steps: int, log: Path) -> None:
        self.workdir, self.log, self.began = workdir, log, time.monotonic()
        overrides = [f"--config.{name}={value}" for name, value in (FIELDS | {"steps": steps}).items()]
        command = train_command(corpus, workdir, *overrides)
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Waits until `reached()` is true or the process ends."""
        while self.process.poll() is None and not reached():
            time.sleep(0.001)

    def finish(self) -> None:
        assert self.process.wait() == 0, self.log.read_text()[-1000:]

    def is_training(self) -> bool:
        return b"first step after" in self.log.read_bytes()

    def is_saving(self) -> bool:
        # Before the first step, unfinished checkpoints may be from an earlier process.
        return self.is_training() and bool(checkpoint_entries(self.workdir, unfinished=True))

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def kill_and_compare(folder: Path, kills: int, steps: int, seed: int) -> str:
    """Trains in `folder` without and with kills, and returns a description of the comparison."""
    rng, corpus, runs = random.Random(seed), make_corpus(folder), []
    alone, killed = folder / "alone", folder / "killed"

    def start(workdir: Path) -> Run:
        runs.append(Run(corpus, workdir, steps, folder / f"log{len(runs)}.txt"))
        return runs[-1]

    try:
        run = start(alone)
        run.wait_for(run.is_training)
        start_seconds = run.seconds
        run.finish()
        train_seconds, in_a_save = (run.seconds - start_seconds) / kills, 0
        for number in range(kills):
            run = start(killed)
            if number % 2:
                moment = rng.uniform(0, start_seconds + train_seconds)
                run.wait_for(lambda run=run, moment=moment: run.seconds > moment)
            else:
                # Later starts are faster than the first one, because compiled programs are cached.
                run.wait_for(run.is_training)
                start_seconds = min(start_seconds, run.seconds)
                step = (newest_checkpoint(killed) or 0) + rng.randrange(3) * FIELDS["checkpoint_every"]
                run.wait_for(lambda run=run, step=step: (newest_checkpoint(killed) or 0) >= step and run.is_saving())
                time.sleep(rng.uniform(0, SAVE_SECONDS))
            in_a_save += run.is_saving()
            assert run.process.poll() is None, f"the run ended before the kill; {run.log.read_text()[-1000:]}"
            run.kill()
            print(f"kill {number + 1} after {run.seconds:.1f} s, newest checkpoint: {newest_checkpoint(killed)}")
        start(killed).finish()
    finally:
        for run in runs:
            run.kill()
    assert in_a_save >= kills // 4, f"only {in_a_save} of {kills} kills came during a save"
    return f"{kills} kills, {in_a_save} of them during a save; {compare(alone, killed)}"


def compare(alone: Path, killed: Path) -> str:
    """Returns a description of the equal files of two runs. Raises an AssertionError if they differ."""
    step = newest_checkpoint(alone)
    assert step is not None and step == newest_checkpoint(killed), "the last checkpoints are of different steps"
    left, right = (checkpoint_arrays(workdir / "checkpoints" / str(step)) for workdir in (alone, killed))
    differing = sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
    assert not differing, f"{len(differing)} of {len(left)} stored values differ, such as {differing[0]}"
    for name in ("metrics.jsonl", "results.json"):
        assert (alone / name).read_bytes() == (killed / name).read_bytes(), f"{name} differs"
    assert not (killed / "damaged_checkpoints").exists(), "a kill left a damaged checkpoint that looks complete"
    assert not checkpoint_entries(killed, unfinished=True), "unfinished checkpoints remain"
    arrays, lines = sum(name.endswith(".zarray") for name in left), (alone / "metrics.jsonl").read_text().count("\n")
    return f"{arrays} arrays and {lines} metric lines are identical"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the kill times (default: 0)")
    parser.add_argument("--steps", type=int, help="steps of both runs (default: 25 per kill, at least 200)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bertjax-kills-") as folder:
        # All runs share the compilation cache.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        print(kill_and_compare(Path(folder), args.kills, args.steps or max(200, 25 * args.kills), args.seed))


if __name__ == "__main__":
    main()
