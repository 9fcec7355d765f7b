"""Check of the flags of other programs in launchers and documents, without installing these programs.

`flags.json` maps each command to its flags, and each flag to "bool", "value" or a list of allowed values. It also has
the versions of the programs.
"""

import json
from pathlib import Path

FLAGS = json.loads((Path(__file__).parent / "flags.json").read_text())["commands"]


def check_command(words: list[str]) -> None:
    """Raises a ValueError for an unknown command or flag, a missing value or a value that is not allowed."""
    program, *arguments = words
    positional = [word for word in arguments if not word.startswith("-")]
    names = [" ".join([program, *positional[:count]]) for count in range(len(positional), -1, -1)]
    command = next(name for name in names if name in FLAGS)
    if command == program and any(name.startswith(f"{program} ") for name in FLAGS):
        raise ValueError(f"unknown command: {' '.join(words[:4])}")
    flags = {**FLAGS.get(program, {}), **FLAGS[command]}
    remaining = iter(arguments)
    for word in remaining:
        if word == "--" or (program == "sbatch" and not word.startswith("-")):
            return
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        kind = flags.get(flag) or (flags.get(f"--{flag[5:]}") if flag.startswith("--no-") else None)
        if kind is None:
            raise ValueError(f"unknown flag: {command} {word}")
        if kind == "bool":
            if equals and value not in ("true", "false"):
                raise ValueError(f"flag takes no value: {command} {word}")
            continue
        value = value if equals else next(remaining, "")
        if not value or (isinstance(kind, list) and value not in kind):
            raise ValueError(f"invalid value: {command} {flag}={value}")
