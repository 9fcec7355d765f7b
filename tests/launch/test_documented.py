"""The programs of others in the documents: each flag is one that they have, and each launcher takes its line."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from standin import Refused, parse

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "pods.md", ROOT / "docs" / "workdir.md"]
LAUNCHERS = ("gke", "queued_resource", "instance_group", "slurm")
_SUBSTITUTED = re.compile(r"\$\((.*)\)")


def lines(text: str) -> list[str]:
    """What is to be typed, without the continuations; and what stands in prose and in tables, where it has a flag."""
    typed = re.findall(r"^ {4,}(\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    prose = [code for code in re.findall(r"`([^`\n]+)`", text) if " --" in code]
    nested = [inner for line in typed for inner in _SUBSTITUTED.findall(line)]
    return [line.strip() for line in [*typed, *prose, *nested]]


def typed(program: str) -> list[list[str]]:
    found = [shlex.split(line) for file in DOCUMENTS for line in lines(file.read_text())]
    return [words for words in found if words and words[0].startswith(program)]


@pytest.mark.parametrize("program", ["gcloud", "kubectl", "docker", "sky", "xpk"])
def test_the_flags_of_others_exist(program):
    commands = typed(f"{program}")
    assert commands
    for words in commands:
        parse(words[0], words[1:])


def test_a_flag_that_is_not_there_is_found():
    for line in lines("    gcloud container node-pools create a --tpu-shape=4x4 \\\n      --spot\n"):
        with pytest.raises(Refused, match="--tpu-shape"):
            parse(*[line.split()[0], line.split()[1:]])


def test_each_launcher_takes_its_lines():
    commands = [words for words in typed("launch/") if words[0] != "launch/local_pod.sh"]
    assert {words[0] for words in commands} == {f"launch/{launcher}.sh" for launcher in LAUNCHERS}
    for words in commands:
        if len(words) > 2:
            done = subprocess.run([*words[:3], "--dry-run", *words[3:]], capture_output=True, text=True, cwd=ROOT)
            assert done.returncode == 0, (words, done.stderr)


def test_all_options_of_a_launcher_are_in_its_usage():
    for launcher in LAUNCHERS:
        text = (ROOT / "launch" / f"{launcher}.sh").read_text()
        usage = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        tables = re.findall(r"^(?:with_value|switches)\+?=\((.*)\)$", text, re.MULTILINE)
        options = {"--dry-run", *(option for table in tables for option in table.split())}
        assert len(options) > 5 and options <= {*re.findall(r"--[\w-]+", usage)}, (launcher, options)
