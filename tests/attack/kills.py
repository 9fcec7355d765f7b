"""Commands killed at random moments, and started again until they end: nothing may be lost, nothing may be left."""

import dataclasses
import itertools
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from oracle import Finding, differences, faults_of, state, temporary_left
from sandbox import LIMIT_SECONDS, Sandbox, config, prepare, rng_of, sweep
from zygote import Running, Starter

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# In which a run that does not end is hit.
_ENDLESS_SECONDS = 3.0
# Of the time that the first run of a shape takes.
_WITHOUT_COMPILING = 0.4
# Of one run, from its first start to its end.
_SAID_CHARACTERS = 2000
_MOST_KILLS = 5
_POLL_SECONDS = 0.005
# For the processes that a command has started, to end after it.
_WAIT_FOR_GROUP_SECONDS = 10
# Within this after a file under a temporary name was seen.
_DURING_SECONDS = 0.05
_TEMPORARY = re.compile(r"tmp|temp|partial|unfinished|bertjax|__autograph_generated_file|pymp-|\.old$", re.IGNORECASE)
# Asked to stop, a run that trains has saved, and others have cleaned up.
_ENDS = dict.fromkeys(SIGNALS, (0, 42, 130)) | {signal.SIGKILL: (0, -signal.SIGKILL)}
_FINETUNING = config("glue", data__vocabulary="")


@dataclasses.dataclass(frozen=True)
class Scene:
    """A command and where it writes, in the folder that it runs in.

    Attributes:
      piece: of the sandbox that the same command has made, if there is one.
      at_once: what it writes appears when it is whole, and is not written again.
      endless: it writes nothing, and ends when it is told to.
    """

    argv: tuple[str, ...]
    output: str = "out"
    piece: str = ""
    at_once: bool = False
    endless: bool = False


SCENES = {
    "train": Scene(("train", *config("pretrain"), "--workdir=out"), piece="pretrained"),
    "fine-tune": Scene(("train", *_FINETUNING, "--init_from={pretrained}", "--workdir=out"), piece="glue"),
    "fine-tune from theirs": Scene(("train", *_FINETUNING, "--init_from={huggingface}", "--workdir=out")),
    "sweep": Scene(tuple(sweep("out")), piece="swept"),
    "reproduce": Scene(("reproduce", "--config={table}/table.py", "--results=out")),
    "prepare": Scene(tuple(prepare("text:{texts}/text.txt", "out")), at_once=True),
    "prepare with a vocabulary": Scene(
        ("prepare", "--input=text:{texts}/text.txt.xz", "--vocab={letters}/vocab.txt", "--workers=2", "--output=out"),
        at_once=True,
    ),
    "convert to huggingface": Scene(("convert", "{pretrained}", "out", "--format=huggingface"), at_once=True),
    "convert to tensorflow": Scene(("convert", "{pretrained}", "out", "--format=tensorflow"), at_once=True),
    "convert from tensorflow": Scene(("convert", "{tensorflow}", "out"), at_once=True),
    "features": Scene(("features", "--checkpoint={huggingface}", "--input={texts}/lines.txt", "--output=out")),
    "predict": Scene(("predict", "--checkpoint={glue}", "--output=out")),
    # A request that a library keeps to itself would show as a run that goes on.
    "bench input": Scene(("bench", "input", *config("pretrain"), "--seconds=600"), endless=True),
}
# Runs that save and go on have more moments worth a kill than those that begin anew.
_SHARES = {"train": 6, "fine-tune": 4, "fine-tune from theirs": 2, "sweep": 3, "prepare": 4}


class References:
    """How each scene ends undisturbed, and how long that takes; found when first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[dict[str, str], float]] = {}
        self._locks = {name: threading.Lock() for name in SCENES}

    def of(self, sandbox: Sandbox, name: str) -> tuple[dict[str, str], float]:
        """State of the scene's output, and seconds.

        Raises:
          RuntimeError: the command, left alone, does not end well.
        """
        with self._locks[name]:
            if SCENES[name].endless:
                return {}, _ENDLESS_SECONDS
            if name not in self._found and SCENES[name].piece:
                made = sandbox.piece(SCENES[name].piece)
                self._found[name] = state(made), sandbox.seconds[SCENES[name].piece] * _WITHOUT_COMPILING
            elif name not in self._found:
                case = sandbox.case(f"alone-{name.replace(' ', '-')}")
                outcome = sandbox.execute(sandbox.zygote, case, SCENES[name].argv, 300)
                if outcome.code != 0:
                    raise RuntimeError(f"{name}, left alone, ended with {outcome.code}: {outcome.err}")
                self._found[name] = state(case / "work" / SCENES[name].output), outcome.seconds
            return self._found[name]


@dataclasses.dataclass(frozen=True)
class Kills:
    """A case: one scene, killed up to `most` times.

    Attributes:
      name: of the case.
      row: of the summary, the scene.
      seed: of the moments and signals.
      most: kills.
      references: of all cases.
    """

    name: str
    row: str
    seed: str
    most: int
    references: References

    def run(self, sandbox: Sandbox, starter: Starter) -> Finding:
        rng, scene = random.Random(self.seed), SCENES[self.row]
        expected, seconds = self.references.of(sandbox, self.row)
        case = sandbox.case(self.name)
        argv = tuple(sandbox.filled(item) for item in scene.argv)
        output = case / "work" / scene.output
        story, faults, hits = [], [], 0
        for attempt in range(self.most + (not scene.endless)):
            blow = attempt < self.most
            number, aimed, group = rng.choice(SIGNALS), rng.random() < 0.4, rng.random() < 0.5
            before = {path.name for path in (case / "work").iterdir()}
            began = time.monotonic()
            running, temporary = sandbox.start(starter, case, argv, attempt)
            seen = _wait_for_moment(running, case / "work", rng, starter.deaf_seconds, seconds, aimed) if blow else ""
            hit = blow and running.wait(0) is None
            if hit:
                running.send(number, group)
                told = f"{number.name} to {'all' if group else 'one'} at {time.monotonic() - began:.2f} s{seen}"
            code = running.wait(LIMIT_SECONDS)
            outcome = sandbox.outcome(case, argv, code, time.monotonic() - began)
            hits += hit
            story.append(f"{told if hit else 'left alone'}: {code}")
            after = number.name if hit else "the last kill"
            ends = _ENDS[number] if hit else (0,)
            faults += [f"{fault} after {after}" for fault in faults_of(outcome, ends)]
            faults += _left_over(running, case, temporary, scene, code, before)
            if faults:
                story.append(f"said {outcome.err[-_SAID_CHARACTERS:]!r}")
                break
            if (scene.at_once and output.exists()) or code == 0:
                # It has come to its end; what is left of the kills is for a run that begins anew.
                faults += _compared(expected, output)
                seconds = min(seconds, outcome.seconds)
                output.rename(case / f"ended{attempt}")
        faults += [f"harm: {path}" for path in sandbox.harm()]
        kinds = "same" if not faults else "fault"
        return Finding(self.row, kinds, tuple(dict.fromkeys(faults)), "; ".join(story), argv, hits)


def _compared(expected: dict[str, str], output: Path) -> list[str]:
    differing = differences(expected, state(output))
    faults = [f"silent: {len(differing)} differ, such as {differing[0]}"] if differing else []
    if (output / "damaged_checkpoints").exists():
        faults.append("damaged checkpoint under a whole one's name")
    return faults


def kills(
    count: int, seed: int, references: References, scenes: Sequence[str] = tuple(SCENES), most: int = _MOST_KILLS
) -> list[Kills]:
    """Cases with `count` kills in all, `most` in one, each scene as often as its share."""
    turns = itertools.cycle([name for turn in range(6) for name in scenes if turn < _SHARES.get(name, 1)])
    cases: list[Kills] = []
    while count > 0:
        name = f"kills-{len(cases)}"
        several = min(count, rng_of(seed, name, "several").randint(1, most))
        cases.append(Kills(name, next(turns), f"{seed}/{name}", several, references))
        count -= several
    return cases


def _wait_for_moment(running: Running, work: Path, rng: random.Random, deaf: float, seconds: float, aimed: bool) -> str:
    """Waits for a moment to kill in; or for the end of the run, whatever is first.

    Args:
      deaf: seconds in which it may not listen to signals yet.
      seconds: that the run takes when left alone.
      aimed: at a moment in which something is being written.
    """
    end = time.monotonic() + deaf + rng.uniform(0, seconds)
    delay = rng.uniform(0, _DURING_SECONDS)
    if not aimed:
        running.wait(max(0.0, end - time.monotonic()))
        return ""
    while time.monotonic() < end + seconds and running.wait(_POLL_SECONDS) is None:
        # Any of them, once some time has passed, lest it is always the first.
        if time.monotonic() > end and _unfinished(work):
            running.wait(delay)
            return " while writing"
    return ""


def _unfinished(work: Path) -> list[str]:
    folders = [work, *work.glob("out"), *work.glob("out/checkpoints"), *work.glob("out/trials/*/checkpoints")]
    return [
        entry.name for folder in folders for entry in _listed(folder) if re.search("tmp|partial|unfinished", entry.name)
    ]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _left_over(
    running: Running, case: Path, temporary: Path, scene: Scene, code: int | None, before: set[str]
) -> list[str]:
    """What is wrong with what a command has left besides its output.

    Args:
      before: names that were there when it began, which it must have cleared if it has come to its end.
    """
    if code is None:
        return []
    faults = []
    if not _gone(running.alive):
        faults.append("processes left")
        running.kill()
    names = temporary_left(temporary)
    strange = [name for name in names if not _TEMPORARY.search(name)]
    if code >= 0 and names:
        faults.append(f"temporary files left: {', '.join(names[:3])}")
    elif strange:
        faults.append(f"strange temporary files left: {', '.join(strange[:3])}")
    there = {path.name for path in (case / "work").iterdir()} - {scene.output}
    beside = sorted(there if code == 0 else there - before)
    strange = [name for name in beside if not _TEMPORARY.search(name)]
    if strange or (code >= 0 and (beside or (code == 0 and _unfinished(case / "work")))):
        faults.append(f"left beside the output: {', '.join(beside or _unfinished(case / 'work'))}")
    return faults


def _gone(alive: Callable[[], bool]) -> bool:
    """Whether what is alive ends soon."""
    until = time.monotonic() + _WAIT_FOR_GROUP_SECONDS
    while alive():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True
