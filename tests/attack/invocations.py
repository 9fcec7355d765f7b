"""Wrong invocations of every command, generated from the argument parser and from the config fields."""

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from helpers.commanding import commands
from oracle import Report, differences, entries, faults_of, leftovers
from sandbox import EXPERIMENTS, PRETRAIN, SHORT_GLUE, TINY, Case, Sandbox, config

from bertjax.cli.main import build_parser
from bertjax.cli.parser import PATH_METAVARS
from bertjax.config.load import load_config

# Valid values of required options, by `COMMAND OPTION` or by `OPTION`. An empty tuple omits the option.
_VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("output", "workdir", "destination", "predict output", "reproduce results"), ("out",)),
    **dict.fromkeys(("checkpoint", "source"), ("{pretrained}",)),
    **{"input": ("text:{files}/text.txt",), "predictions": ("{predictions}",), "texts": ("bana [MASK]",), "config": ()},
    "encode input": ("{files}/text.txt",),
    "encode pooling": ("mean",),
    **{"table number": ("5",), "table results": ("{reproduced}",), "reproduce config": ("{table}/table.py",)},
    **{"ensemble checkpoint": ("{glue}", "{glue2}"), "predict checkpoint": ("{glue}",), "predict texts": ()},
    **{"prepare vocab_size": ("70",), "bench step steps": ("1",), "bench input seconds": ("0.1",)},
    **{"mine input": ("{files}/pairs.tsv",), "mine output": ("out.tsv",)},
    # An invalid topology, because a run of the TPU compiler would take too long.
    "plan topology": ("none",),
}
# Options whose path need not exist.
_OUTPUTS = ("output", "workdir", "destination", "npz", "results", "plot", "keep", "data_dir")
_HUGE = "1000000000000"
_WRONG = {int: ("", "x", "1.5", "nan"), float: ("", "x"), bool: ("", "maybe", "2.5")}
_ODD = {
    int: ("-1", "0", _HUGE, f"-{_HUGE}", "9" * 400),
    float: ("-1", "0", _HUGE, "nan", "inf", "-inf", "1e400", "1e-400"),
    bool: (),
    str: ("", "nosuch", "x" * 5000, "\x1b[31mred\x07", "a\nb", "-1", "[a-", "%s{0}", "\udcff", "x [MASK] " * 3000),
}
_PATHS = ("nothing", "folder", "file.txt/below", "loop", "x" * 300, "..", "gs://nosuchbucket/x", "\x1b[31m")
# Files with unusual content, for all options except --config, whose file is Python code.
_LINE = b"A line.\n"
_FILES = {"file.txt": _LINE, "junk.bin": bytes(range(256)), "utf16.txt": "a\tb\n".encode("utf-16"), "o[d]d*.txt": _LINE}
_ANY, _USAGE = (0, 1, 2), (2,)


def invoke(sandbox: Sandbox, case: Path, argv: Sequence[str], codes: Sequence[int]) -> Report:
    """Runs a command with wrong or odd arguments. `codes` are the valid exit codes."""
    work = case / "work"
    (work / "folder").mkdir()
    (work / "loop").symlink_to("loop")
    for name, content in _FILES.items():
        (work / name).write_bytes(content)
    before = entries(work)
    result = sandbox.run(case, argv)
    changes = differences(before, entries(work))
    faults = [*faults_of(result, codes), *leftovers(case)]
    if result.returncode == 2 and changes:
        faults.append(f"left {changes[0]}")
    # A successful command may replace a file that its arguments name.
    elif any(name in before and not (result.returncode == 0 and name in " ".join(argv)) for name in changes):
        faults.append("changed a file")
    return Report(f"exit {result.returncode}", faults, f"changed: {changes}; {result.stderr[-300:]!r}", result.args)


def invocations(seed: int) -> list[Case]:
    """Returns all cases in random order."""
    parsers = commands(build_parser())
    attempts = [attempt for words in parsers for attempt in _of_command(words, parsers[words])] + list(_of_fields(seed))
    cases = [Case(f"invocation-{i}", row, partial(invoke, **options)) for i, (row, options) in enumerate(attempts)]
    random.Random(seed).shuffle(cases)
    return cases


def _of_command(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple]:
    row = " ".join(words)
    actions = [action for action in parser._actions if action.dest != "help"]
    prefixes = {action.dest: f"{name}=" for action in actions for name in action.option_strings}
    valid: dict[str, tuple[str, ...]] = {}
    for action in actions:
        key = f"{row} {action.dest}" if f"{row} {action.dest}" in _VALUES else action.dest
        values = _VALUES[key] if action.required or key != action.dest else ()
        valid[action.dest] = tuple(prefixes.get(action.dest, "") + value for value in values)
    # `--config` is not needed with a checkpoint, which contains a config.
    if not valid.get("config", "x") and not valid.get("checkpoint"):
        valid["config"] = SHORT_GLUE if row == "sweep" else PRETRAIN

    def changed(codes: tuple[int, ...], dest: str, *values: str) -> tuple:
        argv = (*words, *(item for each in {**valid, dest: values}.values() for item in each))
        return row, {"argv": argv, "codes": codes}

    for unknown in ("--nosuch", "--nosuch=1", "-x", "--flagfile=nothing"):
        yield changed(_USAGE, "", unknown)
    for action in actions:
        if valid[action.dest] and (action.required or action.dest == "config"):
            yield changed(_USAGE, action.dest)
        for name in action.option_strings:
            # A flag with a value, or an option without its value.
            yield changed(_USAGE, "", f"{name}=1" if action.nargs == 0 else name)
        wrong, odd = _values_of(action) if action.nargs != 0 else ((), ())
        yield from (changed(_USAGE, action.dest, prefixes.get(action.dest, "") + value) for value in wrong)
        yield from (changed(_ANY, action.dest, prefixes.get(action.dest, "") + value) for value in odd)


def _values_of(action: argparse.Action) -> tuple[list[str], list[str]]:
    """Returns wrong values, which the command must reject, and odd values, which it may accept."""
    kind = {"int": int, "float": float}.get(getattr(action.type, "__name__", ""), str)
    # Exclude the huge value of `bench input --seconds`, because the command would run for that time.
    odd = [value for value in _ODD[kind] if (action.dest, value) != ("seconds", _HUGE)]
    wrong = list(_WRONG.get(kind, ()))
    if action.metavar == "SPEC":
        odd += [f"{form}:{path}" for form in ("text", "prose", "wiki") for path in ("", *_PATHS, *_FILES)]
        wrong += ["tfds:nosuch", "nosuch:nosuch"]
    elif (action.metavar or "").partition("[")[0] in PATH_METAVARS:
        odd, wrong = [*_PATHS, *(_FILES if action.dest != "config" else ())], [""]
        if action.dest not in _OUTPUTS:
            wrong.append(odd.pop(0))
    return wrong, odd


def _of_fields(seed: int) -> Iterator[tuple]:
    """Yields commands with a wrong or odd value of each config field, in an experiment that has the field."""
    # Import here, because the import reads environment variables of JAX that `run.py` sets first.
    from flax.traverse_util import flatten_dict

    files, rng = sorted(EXPERIMENTS.glob("*.py")), random.Random(seed)
    rng.shuffle(files)
    configs = {file.stem: flatten_dict(load_config(f"{file}:{TINY}", []).to_dict(), sep=".") for file in files}
    fields = {(name, type(value)): stem for stem, values in configs.items() for name, value in values.items()}
    for (name, kind), experiment in fields.items():
        valid = [item for item in config(experiment) if not item.startswith(f"--config.{name}=")]
        is_data = name.startswith("data.")
        for item in (f"{name}x=1", f"{name}.deep=1", *(f"{name}={value}" for value in _WRONG.get(kind, ()))):
            yield "describe", {"argv": ("describe", *valid, f"--config.{item}"), "codes": _USAGE}
        for value in (*_ODD.get(kind, _ODD[str]), *((*_PATHS, *_FILES) if is_data and kind is str else ())):
            words = ("train", "--workdir=out") if rng.random() < 0.1 and value != _HUGE else ("describe",)
            words = ("inspect",) if is_data and words == ("describe",) else words
            yield words[0], {"argv": (*words, *valid, f"--config.{name}={value}"), "codes": _ANY}
