"""Documentation: commands are valid, links resolve, Python code runs and generated pages are up to date."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import references
from flags import check_command as check_flags
from helpers import hub_server
from helpers.checkpoints import random_checkpoint
from helpers.valid_commands import check_command, check_fields

import bertjax
from bertjax.convert.portable import write_workdir
from bertjax.errors import UsageError
from bertjax.model.config import Architecture
from bertjax.reproduce import runs
from bertjax.tasks.finetuning.output_layer import CLASSES, TAGS

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "RESULTS.md", "CONTRIBUTING.md")
DOCUMENTS = [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
every_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)

_INDENTED = re.compile(r"^ {4,}(\S.*)$", re.MULTILINE)
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
# Placeholders such as EXPERIMENT, FIELD or COMMAND.
_PLACEHOLDER = re.compile(r"(?<![\w.$])[A-Z]{3,}\b")
# Programs whose flags tests/launch/flags.json lists.
_OTHERS = ("gcloud", "kubectl", "docker", "sky", "xpk", "sbatch")
_PROGRAMS = "|".join([r"bertjax|make|python3?|pip|launch/\S+", *_OTHERS])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def commands(text: str) -> list[list[str]]:
    """Returns the commands of a document: from code blocks, even in `$(...)` and after a pipe, and from inline code."""
    blocks = [body for _, language, body in _FENCED.findall(text) if language in ("", "bash", "sh", "console")]
    prose = _FENCED.sub("", text)
    lines = "\n".join([*blocks, *_INDENTED.findall(prose)]).replace("\\\n", " ").splitlines()
    lines += [inner for line in lines for inner in re.findall(r"\$\((.*)\)", line)]
    inline = [code for code in _INLINE.findall(_INDENTED.sub("", prose)) if not _PLACEHOLDER.search(code)]
    inline = [code for code in inline if re.match(rf"bertjax .* -|(make|python) \S|({'|'.join(_OTHERS)}) .*--", code)]
    parts = [part.strip().removeprefix("$ ") for line in [*lines, *inline] for part in line.split(" | ")]
    # Code blocks also contain output, which may not be valid shell syntax.
    return [shlex.split(part, comments=True) for part in parts if re.match(rf"({_PROGRAMS})\s", part)]


def check(words: list[str]) -> None:
    """Raises a UsageError, ValueError or AssertionError if a command of a document is invalid."""
    program, *arguments = words
    if program == "bertjax":
        check_command(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= {*targets}, words
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        groups = [group for word in arguments for group in re.findall(r"^\.\[(.+)\]$", word)]
        extras = [extra for group in groups for extra in group.split(",")]
        assert {*extras} <= {*project["optional-dependencies"]}, words
        files = [value for flag, value in zip(arguments, arguments[1:], strict=False) if flag == "-c"]
        assert all((ROOT / file).is_file() for file in files), words
    elif program.startswith("launch/"):
        assert (ROOT / program).is_file(), words
        if "--" in arguments:
            check(arguments[arguments.index("--") + 1 :])
    elif program in _OTHERS:
        check_flags(words)
    elif program.startswith("python"):
        flag, module = (*arguments, "")[:2]
        if flag != "-m":
            assert (ROOT / flag).is_file(), words
        elif module.startswith("bertjax"):
            assert importlib.util.find_spec(module), words


def anchors(text: str) -> Iterator[str]:
    """Yields the anchors that GitHub creates for headings."""
    for heading in re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def check_links(file: Path, text: str) -> None:
    """Raises an AssertionError if a link target is not a file of the repository or a heading."""
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        assert target.is_relative_to(ROOT) and target.exists(), f"{file.name} links to {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{file.name} links to {link}"


@pytest.mark.parametrize("file", references.PAGES, ids=lambda file: file.name)
def test_generated_page_is_up_to_date(file):
    assert file.read_text() == references.PAGES[file]()


def test_api_page_has_all_public_names():
    text = (ROOT / "docs/api.md").read_text()
    assert sorted(re.findall(r"^::: bertjax\.(\w+)$", text, re.MULTILINE)) == sorted(bertjax.__all__)


@every_document
def test_commands_are_valid(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    # Do not open the released checkpoints from which some tables start: this test needs only an architecture.
    monkeypatch.setattr(runs, "load_released", lambda checkpoint: runs.Released("", "0" * 64, Architecture()))
    for words in commands(file.read_text()):
        check(words)


@every_document
def test_overrides_name_existing_fields(file):
    for code in _INLINE.findall(file.read_text()):
        if re.match(r"--config\.[\w.]+=", code) and not _PLACEHOLDER.search(code):
            check_fields(shlex.split(code))


@every_document
def test_links_resolve(file):
    check_links(file, file.read_text())


def test_all_commands_are_found_and_all_documents_are_linked():
    """Tests that `commands` finds every indented `bertjax` command, and that the main pages link to every document."""
    for file in DOCUMENTS:
        text = file.read_text()
        assert sum(words[0] == "bertjax" for words in commands(text)) >= text.count("\n    bertjax "), file.name
    assert {words[0] for file in DOCUMENTS for words in commands(file.read_text())} >= {*_OTHERS}
    counts = {file.name: len(commands(file.read_text())) for file in DOCUMENTS}
    overrides = [code for file in DOCUMENTS for code in _INLINE.findall(file.read_text()) if "--config." in code]
    assert len(overrides) >= 20
    assert counts["README.md"] >= 9 and counts["RESULTS.md"] >= 8 and counts["finetuning.md"] >= 20
    pages = [(ROOT / name).read_text() for name in ("README.md", "RESULTS.md")]
    links = {link.partition("#")[0] for page in pages for link in _LINK.findall(page)}
    assert {str(file.relative_to(ROOT)) for file in DOCUMENTS[1:]} <= links


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


@pytest.mark.ci
@pytest.mark.parametrize("name", ["README.md", "docs/python.md"])
def test_python_code_runs(name, letters, pretrained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, checkpoint in {
        "base": random_checkpoint(letters),
        "sst2": random_checkpoint(letters, CLASSES, ("bad", "good")),
        "ner": random_checkpoint(letters, TAGS, ("O", "B-LOC", "I-LOC")),
    }.items():
        path = tmp_path / "runs" / folder
        path.mkdir(parents=True)
        write_workdir(checkpoint, path)
    blocks = [body for _, language, body in _FENCED.findall((ROOT / name).read_text()) if language == "python"]
    assert blocks
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        files = {file.name: file.read_bytes() for file in pretrained.iterdir()}
        for repository in ("google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"):
            hub.push(repository, files)
        exec(compile("\n".join(blocks), name, "exec"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("    bertjax train --config pretrain --workdr runs/a", "workd"),
        ("    bertjax train --config pretrain --workdir runs/a \\\n      --config.optimizer.lr=1", "lr"),
        ("    bertjax sweep --config glue --workdir runs/a --grid optimizer.lr=1,2", "lr"),
        ("    bertjax predict --checkpoint runs/a --output runs/b --config.data.nosuch=1", "nosuch"),
        ("```\nbertjax fill_mask --checkpoint runs/a\n```", "text"),
        ("```bash\nbertjax fil\n```", "fil"),
        ("so `bertjax describe --conf pretrain` shows", "conf"),
        ("    make nosuch", "nosuch"),
        ("    pip install -e '.[nosuch]'", "nosuch"),
        ("    python tests/nosuch.py", "nosuch"),
        ("    gcloud container node-pools create a --tpu-shape=4x4", "unknown"),
        ("    gcloud compute tpus queued-resource create a", "unknown"),
        ("    gcloud compute tpus tpu-vm ssh a --strict-host-key-checking=perhaps", "invalid"),
        ("so `kubectl apply --file=a` starts", "unknown"),
        ("    gcloud container clusters delete a --location", "invalid"),
        ("    launch/nosuch.sh -- bertjax describe --config pretrain", "nosuch"),
        ("    launch/local_pod.sh -n 2 -- bertjax describe --config nosuch", "nosuch"),
    ],
)
def test_invalid_command_is_detected(text, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    (words,) = commands(text)
    with pytest.raises((UsageError, ValueError, AssertionError), match=message):
        check(words)


@pytest.mark.parametrize("link", ["nosuch.md", "RESULTS.md#nosuch", "../elsewhere.md"])
def test_dead_link_is_detected(link):
    with pytest.raises(AssertionError, match=re.escape(link)):
        check_links(ROOT / "README.md", f"see [this]({link})")
