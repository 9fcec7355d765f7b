"""Wrong invocations of every command, made from the parser and from the fields of every experiment's config."""

import argparse
import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commanding import commands
from ml_collections import ConfigDict
from oracle import Finding, Outcome, changed, entries, faults_of, temporary_left
from sandbox import EXPERIMENTS, LIMIT_SECONDS, TINY, Sandbox, config, rng_of
from zygote import Starter

from bertjax.cli.main import build_parser
from bertjax.config.load import load_config

# A valid value of each argument that some command cannot do without, and of those that make it quick; "" leaves it out.
_VALUES = {
    "input": "text:{texts}/text.txt",
    "output": "out",
    "workdir": "out",
    "checkpoint": "{pretrained}",
    "predictions": "{predictions}",
    "texts": "bana [MASK]",
    "source": "{pretrained}",
    "destination": "out",
}
_VALUES_OF: dict[str, dict[str, str | tuple[str, ...]]] = {
    "reproduce": {"config": "{table}/table.py", "results": "out"},
    "table": {"number": "5", "results": "{reproduced}"},
    "ensemble": {"checkpoint": ("{glue}", "{glue2}")},
    "prepare": {"vocab_size": "70", "workers": "1"},
    "predict": {"checkpoint": "{glue}", "texts": "", "output": "out"},
    "bench step": {"steps": "1"},
    "bench input": {"seconds": "0.1"},
}
# Where a command writes; all else that has a metavar is read.
_WRITTEN = {"output", "workdir", "destination", "npz", "results", "plot", "keep"}
# Read in cases alone that are not tried here.
_UNREAD = {"data_dir"}
# Do as long as they are told to, and can be stopped.
_ENDLESS = {("bench input", "seconds"), ("bench step", "steps"), ("sweep", "seeds")}
_HUGE = "1000000000000"
_WRONG_NUMBERS = {int: ("", "x", "1.5", "nan"), float: ("", "x")}
_ODD_NUMBERS = {
    int: ("-1", "0", _HUGE, "-" + _HUGE, "9" * 400),
    float: ("-1", "0", _HUGE, "nan", "inf", "-inf", "1e400", "1e-400"),
}
_ODD_WORDS = ("nosuch", "x" * 5000, "\x1b[31mred\x07", "a\nb", "-1", "[a-", "%s{0}", "\udcff")
# What `_plant` makes, and what is there anyway.
_PATHS = (
    "nothing",
    "folder",
    "file.txt",
    "file.txt/below",
    "fifo",
    "/dev/zero",
    "junk.bin",
    "utf16.txt",
    "locked",
    "o[d]d*.txt",
    "loop",
    "x" * 300,
    "/",
    "..",
)
_MUST_REFUSE = (2,)
_BROKEN_EXPERIMENTS = {
    "syntax": "def get_config(:\n",
    "binary": "\x00\x01\x02",
    "empty": "",
    "none": "def get_config(arguments=None):\n    return None\n",
    "raises": "def get_config(arguments=None):\n    raise RuntimeError('first\\nsecond')\n",
    "exits": "def get_config(arguments=None):\n    raise SystemExit(3)\n",
    "interrupts": "def get_config(arguments=None):\n    assert False\n",
    "imports": "import nosuchmodule\n",
    "dictionary": "def get_config(arguments=None):\n    return {'task': 'pretraining'}\n",
    "no_data": "import ml_collections\n\ndef get_config(arguments=None):\n"
    "    return ml_collections.ConfigDict({'task': 'pretraining'})\n",
    "unknown_task": "import ml_collections\n\ndef get_config(arguments=None):\n"
    "    return ml_collections.ConfigDict({'task': 'nosuch'})\n",
    "number_as_task": "import ml_collections\n\ndef get_config(arguments=None):\n"
    "    return ml_collections.ConfigDict({'task': 5})\n",
    "fields_gone": "from bertjax.presets import pretraining_config\n\ndef get_config(arguments=None):\n"
    "    config = pretraining_config('L1_H16')\n    del config.data.seq_len\n    return config\n",
    "no_list": "from bertjax.presets import finetuning_config\n\ndef get_config(arguments=None):\n"
    "    return finetuning_config('glue', 'L1_H16')\n\n\ndef sweep(arguments=None):\n    return 5\n",
}


@dataclasses.dataclass(frozen=True)
class Invocation:
    """A case: one command.

    Attributes:
      name: of the case.
      row: of the summary, the command.
      argv: with names of pieces in braces.
      codes: that it may end with.
      endless: may run on, and must end at a signal.
    """

    name: str
    row: str
    argv: tuple[str, ...]
    codes: tuple[int, ...] = (0, 1, 2)
    endless: bool = False

    def run(self, sandbox: Sandbox, starter: Starter) -> Finding:
        case = sandbox.case(self.name)
        work = case / "work"
        _plant(work)
        before = entries(work)
        outcome = self._outcome(sandbox, starter, case)
        stopped = self.endless and outcome.code in (130, 42, 0)
        faults = faults_of(outcome, (*self.codes, 42, 130) if stopped else self.codes)
        new, touched = changed(before, entries(work))
        # What was there is replaced only by a command that succeeds, and that was told to.
        given = [item for item in new + touched if any(item.partition("/")[0] in word for word in self.argv)]
        if outcome.code == 2 and new:
            faults.append("left behind")
        if touched and not (outcome.code == 0 and set(touched) <= {*given, *_parents(given)}):
            faults.append("planted file changed")
        if outcome.code in (0, 1, 2) and temporary_left(case / "tmp0"):
            faults.append("temporary file left")
        faults += [f"harm: {path}" for path in sandbox.harm()]
        ends = {0: "done", 1: "failed", 2: "refused", 42: "stopped", 130: "stopped"}
        detail = f"exit {outcome.code} in {outcome.seconds:.1f} s; new: {new}; changed: {touched}; {outcome.last_line}"
        return Finding(self.row, ends.get(outcome.code, "odd"), tuple(faults), detail, outcome.argv)

    def _outcome(self, sandbox: Sandbox, starter: Starter, case: Path) -> Outcome:
        if not self.endless:
            return sandbox.execute(starter, case, self.argv)
        argv = [sandbox.filled(item) for item in self.argv]
        began = time.monotonic()
        running, _ = sandbox.start(starter, case, argv)
        code = running.wait(LIMIT_SECONDS / 4)
        if code is None:
            running.send(signal.SIGINT)
            code = running.wait(LIMIT_SECONDS)
        if code is None:
            running.kill()
        return sandbox.outcome(case, argv, code, time.monotonic() - began)


def _parents(paths: Sequence[str]) -> set[str]:
    return {str(parent) for path in paths for parent in Path(path).parents}


def _plant(work: Path) -> None:
    (work / "folder").mkdir()
    (work / "file.txt").write_text("A line of text.\n")
    os.mkfifo(work / "fifo")
    (work / "junk.bin").write_bytes(random.Random(0).randbytes(4096))
    (work / "utf16.txt").write_text("a\tb\n1\t2\n", encoding="utf-16")
    (work / "locked").write_text("{}")
    (work / "locked").chmod(0)
    (work / "o[d]d*.txt").write_text("A line of text.\n")
    (work / "loop").symlink_to("loop")
    for name, content in _BROKEN_EXPERIMENTS.items():
        (work / f"{name}.py").write_text(content)


def invocations(seed: int) -> list[Invocation]:
    """Every case, in an order of its own for each seed."""
    made: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []
    for words, sub in commands(build_parser()).items():
        row = " ".join(words)
        made += [(row, (*words, *argv), more) for argv, more in _of_command(row, sub)]
    made += [(argv[0], argv, more) for argv, more in _of_fields(seed)]
    cases = [Invocation(f"invocation-{index}", row, argv, **more) for index, (row, argv, more) in enumerate(made)]
    rng_of(seed, "invocations").shuffle(cases)
    return cases


def _of_command(row: str, parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    actions = [action for action in parser._actions if action.dest != "help"]
    sound = _sound(row, actions)
    refused = {"codes": _MUST_REFUSE}

    def argv(changes: dict[str, Sequence[str]], *more: str) -> tuple[str, ...]:
        given = {**sound, **changes}
        return (*(item for action in actions for item in given.get(action.dest, ())), *more)

    yield argv({}, "--nosuch"), refused
    yield argv({}, "--nosuch=1"), refused
    yield argv({}, "-x"), refused
    yield argv({}, "--flagfile=nothing"), refused
    many = [action for action in actions if not action.option_strings and action.nargs in ("+", "*")]
    if not many:
        yield argv({}, "stray", "second"), refused
    for action in actions:
        name = action.option_strings[0] if action.option_strings else ""
        needed = action.dest in sound and (action.required or action.dest == "config")
        if needed:
            yield argv({action.dest: ()}), {"codes": (0, *_MUST_REFUSE)} if action.nargs == "*" else refused
        if not name and action.nargs in ("+", "*"):
            for word in ("", *_ODD_WORDS, "x [MASK] " * 3000):
                yield argv({action.dest: (word,)}), {}
            continue
        if action.nargs == 0:
            yield argv({action.dest: (f"{name}=1",)}), refused
            continue
        if name:
            yield argv({action.dest: ()}, name), refused
        for value, more in _values(row, action):
            yield argv({action.dest: (f"{name}={value}" if name else value,)}), more


def _sound(row: str, actions: Sequence[argparse.Action]) -> dict[str, tuple[str, ...]]:
    sound: dict[str, tuple[str, ...]] = {}
    for action in actions:
        value = _VALUES_OF.get(row, {}).get(action.dest)
        if value is None and (action.required or action.dest == "texts"):
            if action.dest not in _VALUES:
                raise KeyError(f"`bertjax {row}` needs {action.dest}; give a sound value of it in _VALUES")
            value = _VALUES[action.dest]
        if value:
            name = f"{action.option_strings[0]}=" if action.option_strings else ""
            sound[action.dest] = tuple(f"{name}{each}" for each in ((value,) if isinstance(value, str) else value))
    # A checkpoint has a config of its own.
    if any(action.dest == "config" for action in actions) and not sound.keys() & {"checkpoint", "config"}:
        sound["config"] = tuple(config("glue", f"{TINY},grid=one") if row == "sweep" else config("pretrain"))
    return sound


def _values(row: str, action: argparse.Action) -> Iterator[tuple[str, dict[str, Any]]]:
    refused = {"codes": _MUST_REFUSE}
    if action.type in (int, float):
        yield from ((value, refused) for value in _WRONG_NUMBERS[action.type])
        endless = {"endless": (row, action.dest) in _ENDLESS}
        yield from ((value, endless) for value in _ODD_NUMBERS[action.type])
    elif action.metavar is None or action.dest == "texts":
        yield from ((value, {}) for value in ("", *_ODD_WORDS))
    else:
        yield "", {} if action.dest in _UNREAD else refused
        for path in (*_PATHS, "gs://nosuchbucket/x", "\x1b[31m"):
            wrong = path == "nothing" and action.dest not in _WRITTEN | _UNREAD
            yield path, refused if wrong else {}
        if action.dest == "config":
            # The config of the one that yields no trials is sound.
            yield from (
                (f"{name}.py", {"codes": (0, 1, 2) if name == "no_list" else (1, 2)}) for name in _BROKEN_EXPERIMENTS
            )
            yield from ((f"{EXPERIMENTS}/glue.py:{rest}", refused) for rest in ("size=L1", "nosuch=1", "quick=x"))
        if action.dest == "input":
            forms = ("text", "prose", "wiki", "docs", "tfds", "nosuch")
            yield from ((f"{form}:{path}", {}) for form in forms[:3] for path in ("", *_PATHS[:-2]))
            yield from ((f"{form}:nosuch", refused) for form in forms[4:])


def _of_fields(seed: int) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each field with wrong and odd values, in one of the experiments that have it."""
    having: dict[tuple[str, type], list[str]] = {}
    for file in sorted(EXPERIMENTS.glob("*.py")):
        for name, value in leaves(load_config(f"{file}:{TINY}", [])):
            having.setdefault((name, type(value)), []).append(file.stem)
    for (name, kind), experiments in sorted(having.items(), key=str):
        rng = rng_of(seed, name, kind.__name__)
        experiment = rng.choice(experiments)
        for value, more in _field_values(kind, data=name.startswith("data.")):
            wrong, odd = more.pop("wrong", False), value == _HUGE
            codes = {"codes": _MUST_REFUSE} if wrong else {}
            given = (*_given(experiment, name), f"--config.{name}={value}")
            yield (("inspect" if name.startswith("data.") and not wrong else "describe"), *given), codes
            if rng.random() < 0.12 and not wrong:
                yield ("train", *given, "--workdir=out"), {"endless": odd}
        for unknown in (f"{name}x=1", f"{name}.deep=1", f"{name[:-1]}=1", name.upper() + "=1"):
            if not any(unknown.startswith(f"{known}=") for known, _ in having):
                yield ("describe", *_given(experiment, ""), f"--config.{unknown}"), {"codes": _MUST_REFUSE}
        yield ("describe", *_given(experiment, name), f"--config.{name}"), {}


def _given(experiment: str, field: str) -> list[str]:
    """The config of an experiment, without the override of one field."""
    return [item for item in config(experiment) if not item.startswith(f"--config.{field}=")]


def leaves(node: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config that is a value, by its path."""
    for name, value in node.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _field_values(kind: type, data: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    if kind is bool:
        yield from ((value, {"wrong": True}) for value in ("maybe", "", "2.5"))
    elif kind in (int, float):
        yield from ((value, {"wrong": True}) for value in _WRONG_NUMBERS[kind])
        yield from ((value, {}) for value in _ODD_NUMBERS[kind])
    else:
        yield from ((value, {}) for value in ("", *_ODD_WORDS, *(_PATHS if data else ())))
