"""Cases that kill commands at random times and restart them. The result must equal that of an uninterrupted run."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from oracle import Report, differences, faults_of, leftovers, state, temporaries
from sandbox import GLUE, PREPARE, PRETRAIN, SWEEP, Case, Sandbox, wait

# Valid exit codes by signal; 0 stands for no signal.
_CODES = {0: (0,), signal.SIGKILL: (0, -9), signal.SIGTERM: (0, 42, 130), signal.SIGINT: (0, 42, 130)}
# Commands that write `out`.
SCENES: dict[str, tuple[str, ...]] = {
    "train": ("train", *PRETRAIN, "--workdir=out"),
    "fine-tune": ("train", *GLUE, "--workdir=out"),
    "fine-tune huggingface": ("train", *GLUE, "--init_from={huggingface}", "--workdir=out"),
    "sweep": (*SWEEP, "--workdir=out"),
    "reproduce": ("reproduce", "--config={table}/table.py", "--results=out"),
    "prepare": (*PREPARE, "--input=text:{files}/text.txt"),
    "prepare by two": (*PREPARE[:-1], "--input=text:{files}/text.txt.xz", "--vocab={files}/vocab.txt", "--workers=2"),
    "convert to huggingface": ("convert", "{pretrained}", "out", "--format=huggingface"),
    "features": ("features", "--checkpoint={huggingface}", "bana", "ke ||| lo", "--output=out"),
    "encode": ("encode", "--checkpoint={huggingface}", "--input={files}/text.txt", "--pooling=mean", "--output=out"),
    "predict": ("predict", "--checkpoint={glue}", "--output=out"),
}
# Repeated names are commands that are killed more often, because they have more intermediate states.
_ROWS = (*SCENES, *("train", "fine-tune", "sweep", "train", "prepare") * 2)


def kill(sandbox: Sandbox, case: Path, scene: str, most: int, seed: str) -> Report:
    """Runs a command of `SCENES` repeatedly and kills it up to `most` times."""
    expected, seconds = sandbox.cached(f"undisturbed {scene}", lambda: undisturbed(sandbox, scene))
    rng, work, output = random.Random(seed), case / "work", case / "work" / "out"
    events, faults = [], []
    for attempt in range(most + 1):
        before, sent = {"out", *os.listdir(work)}, []

        def disturb(pid: int, poll: Callable[[], int | None], sent: list[int] = sent) -> None:
            wait(poll, rng.uniform(0, seconds))
            if rng.random() < 0.4:
                # Wait for a temporary file, to kill the command while it writes.
                wait(lambda: True if poll() is not None or temporaries(work) else None, seconds)
                time.sleep(rng.uniform(0, 0.05))
            if poll() is None:
                sent.append(rng.choice([*_CODES][1:]))
                # Terminals signal the process group; schedulers often signal only the process.
                rng.choice((os.kill, os.killpg))(pid, sent[0])

        result = sandbox.run(case, SCENES[scene], attempt, *([disturb] if attempt < most else []))
        events.append(f"signal {sum(sent)}, exit {result.returncode}")
        faults += faults_of(result, _CODES[sum(sent)])
        faults += leftovers(case, attempt) if result.returncode == 0 else []
        if result.returncode >= 0:
            # A successful command also removes the temporary files of killed commands.
            faults += [f"left {name}" for name in {*os.listdir(work)} - (before if result.returncode else {"out"})]
        # The output of `prepare` and `convert` is complete as soon as it exists, even after a kill.
        if result.returncode == 0 or (scene.startswith(("prepare", "convert")) and output.exists()):
            changes = differences(expected, state(output))
            faults += [f"lost: {len(changes)} files differ, such as {changes[0]}"] if changes else []
            output.rename(case / f"out{attempt}")
        if faults:
            break
    return Report("killed", faults, f"{'; '.join(events)}; {result.stderr[-2000:]!r}", result.args)


def undisturbed(sandbox: Sandbox, scene: str) -> tuple[dict[str, str], float]:
    """Runs a command without kills. Returns the state of its output and half of its run time.

    Later runs take about half as long, because compiled programs are cached.
    """
    case, began = sandbox.case(f"undisturbed-{scene}"), time.monotonic()
    sandbox.run(case, SCENES[scene]).check_returncode()
    return state(case / "work" / "out"), (time.monotonic() - began) / 2


def kills(count: int, seed: int) -> list[Case]:
    """Returns cases with up to `count` kills in total."""
    cases: list[Case] = []
    while count > 0:
        name, scene = f"kills-{len(cases)}", _ROWS[len(cases) % len(_ROWS)]
        most = min(count, random.Random(f"{name}/{seed}").randint(1, 5))
        cases.append(Case(name, scene, partial(kill, scene=scene, most=most, seed=f"{seed}/{name}")))
        count -= most
    return cases
