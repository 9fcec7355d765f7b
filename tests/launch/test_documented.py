"""Commands of other programs in the documents and launchers use flags that exist; launchers pass shellcheck."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flags import check_command

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(text: str) -> list[list[str]]:
    """Returns the commands in code blocks, in `$(...)`, after a pipe, and in inline code with a flag."""
    lines = re.findall(r"^ {4,}(\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    lines += [code for code in re.findall(r"`([^`\n]+)`", text) if " --" in code]
    lines += [inner for line in lines for inner in re.findall(r"\$\((.*)\)", line)]
    return [shlex.split(part) for line in lines for part in line.split(" | ") if part.count("'") % 2 == 0]


@pytest.mark.parametrize("program", ["gcloud", "kubectl", "docker", "sky", "xpk", "sbatch"])
def test_documented_flags_exist(program):
    commands = [words for file in DOCUMENTS for words in commands_of(file.read_text()) if words[:1] == [program]]
    assert commands
    for words in commands:
        check_command(words)


@pytest.mark.parametrize(
    "command",
    [
        "gcloud container node-pools create a --tpu-shape=4x4",
        "gcloud compute tpus queued-resources create a --best-effort",
        "gcloud compute tpus queued-resource create a",
        "gcloud compute tpus tpu-vm ssh a --strict-host-key-checking=perhaps",
        "gcloud container clusters delete a --location",
        "kubectl apply --file=a",
        "sbatch --gpus-per-nod=8 job.sh",
    ],
)
def test_unknown_flags_are_refused(command):
    with pytest.raises(ValueError, match="unknown|invalid"):
        check_command(command.split())


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.sh")), ids=lambda file: file.name)
def test_shellcheck_passes(script):
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "shellcheck is not installed; pip install -e '.[dev]'"
    process = subprocess.run([checker, script], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stdout
