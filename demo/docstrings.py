"""Docstrings of the standard library and the installed packages, as a text file: English prose on every machine.

    python demo/docstrings.py runs/docs.txt
    bertjax prepare --input prose:runs/docs.txt --vocab_size 8000 --output runs/corpus

Each module is one document: a group of lines, one paragraph per line, with a blank line after the group. Code, tables
and docstrings that occurred before are left out. Modules are parsed, not imported.
"""

import argparse
import ast
import importlib.metadata
import inspect
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
# Start of a line that begins a paragraph: bullets, numbers, `name: description`, `name : type`.
_ITEM = re.compile(r"(?:[-*+\u2022]|\d+[.)])\s|:?[\w*`.,\[\]' ]{1,40}?\s?(?:\([^)]*\))?\s?:(?:\s|$)")
_RULE = re.compile(r"[-=~^*#+_\"'`.:\s]+")
_DIRECTIVE = re.compile(r"\.\.\s|@\w")
_WORD = re.compile(r"[^\W\d_]{2,}")
# Minimum fraction of letters and spaces in a line of prose. Other lines are code, tables or formulas.
_MIN_LETTER_FRACTION = 0.75
_MIN_WORDS = 4


def modules() -> list[str]:
    """Returns the paths of all modules: the standard library, then the installed packages, each sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    standard = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [str(root / name) for name in standard if not _SKIPPED.intersection(name.split("/")[:-1])]
    files = {
        file.as_posix(): str(file.locate())
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if file.suffix == ".py"
    }
    return names + [files[name] for name in sorted(files)]


def read_module(name: str) -> list[str]:
    """Returns the prose of each docstring of a module; an empty list if the module cannot be parsed."""
    try:
        source = Path(name).read_bytes()
        # Parsing is slow, and modules without triple quotes rarely have docstrings.
        if b'"""' not in source and b"'''" not in source:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    docstrings = (ast.get_docstring(node, clean=False) for node in _statements(tree) if isinstance(node, _DOCUMENTED))
    return [text for docstring in docstrings if docstring and (text := prose(docstring))]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the statements of a module, as `ast.walk` does, but skips expressions, which are most nodes."""
    nodes = deque([tree])
    while nodes:
        node = nodes.popleft()
        yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            children = getattr(node, name, ())
            nodes.extend(children if isinstance(children, list) else ())


def prose(docstring: str) -> str:
    """Returns the prose of a docstring, one paragraph per line, without doctests, code, tables and directives."""
    paragraphs: list[list[str]] = []
    fenced = False
    literal_indent = None
    starts_paragraph = True
    for line in inspect.cleandoc(docstring).split("\n"):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text.startswith(("```", "~~~")):
            fenced = not fenced
            starts_paragraph = True
            continue
        if literal_indent is not None and text and indent <= literal_indent:
            literal_indent = None
        if not text or fenced or literal_indent is not None or _is_code(text):
            starts_paragraph = True
            continue
        if starts_paragraph or _ITEM.match(text):
            paragraphs.append([])
        paragraphs[-1].append(re.sub("::$", ":", text))
        starts_paragraph = False
        if text.endswith("::"):
            literal_indent = indent
    joined = (" ".join(lines) for lines in paragraphs)
    return "\n".join(text for text in joined if len(_WORD.findall(text)) >= _MIN_WORDS)


def _is_code(text: str) -> bool:
    if text.startswith((">>>", "...", "$ ", "|", "+-")) or _RULE.fullmatch(text) or _DIRECTIVE.match(text):
        return True
    return sum(char.isalpha() or char == " " for char in text) < _MIN_LETTER_FRACTION * len(text)


def documents(names: list[str]) -> list[str]:
    """Returns the new docstrings of each module, one paragraph per line; "" for a module without new docstrings."""
    seen: set[str] = set()
    texts = []
    with ProcessPoolExecutor() as pool:
        for docstrings in pool.map(read_module, names, chunksize=32):
            new = [text for text in dict.fromkeys(docstrings) if text not in seen]
            seen.update(new)
            texts.append("\n".join(new))
    return texts


def main() -> None:
    """Writes the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="text file to write")
    path = parser.parse_args().output
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = list(filter(None, documents(modules())))
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8", errors="replace")
    print(f"{path}: docstrings of {len(texts):,} modules, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
