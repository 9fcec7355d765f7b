"""Docstrings of the standard library and the installed distributions, a source of English text on every machine.

Modules are parsed with `ast`, not imported. One module is one document; repeated docstrings are skipped.
"""

import ast
import hashlib
import importlib.metadata
import inspect
import re
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path

_MODULES_PER_CALL = 32
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENT_FIELDS = ("body", "handlers", "orelse", "finalbody", "cases")
# Start of a line that begins a paragraph: bullets, numbers, `name: description`, `name : type`.
_ITEM = re.compile(r"(?:[-*+\u2022]|\d+[.)])\s|:?[\w*`.,\[\]' ]{1,40}?\s?(?:\([^)]*\))?\s?:(?:\s|$)")
_RULE = re.compile(r"[-=~^*#+_\"'`.:\s]+")
_DIRECTIVE = re.compile(r"\.\.\s|@\w")
_WORD = re.compile(r"[^\W\d_]{2,}")
# Minimum fraction of letters and spaces in a line of prose. Other lines are code, tables or formulas.
_MIN_LETTER_FRACTION = 0.75
_MIN_WORDS = 4


def documents(
    names: list[str],
    problems: Counter[str],
    pool: Executor | None = None,
    advance: Callable[[int], object] = lambda modules: None,
) -> Iterator[str]:
    """Yields the prose of each module in `names`, one paragraph per line.

    Counts modules that cannot be parsed as `unparsable_modules` in `problems`. The executor `pool` parses the modules
    (default: None, parse them in this process). Calls `advance` with the number of modules read since the last call,
    for a progress bar.
    """
    results = pool.map(_read_module, names, chunksize=_MODULES_PER_CALL) if pool else map(_read_module, names)
    seen: set[bytes] = set()
    for docstrings in results:
        advance(1)
        if docstrings is None:
            problems["unparsable_modules"] += 1
            continue
        new_docstrings = []
        for docstring in docstrings:
            digest = hashlib.blake2b(docstring.encode("utf-8", "replace"), digest_size=12).digest()
            if digest not in seen:
                seen.add(digest)
                new_docstrings.append(docstring)
        if new_docstrings:
            yield "\n".join(new_docstrings)


def modules() -> list[str]:
    """Returns the paths of all modules: the standard library, then the installed distributions, each sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    standard = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    names = [str(root / name) for name in standard if not skipped.intersection(name.split("/")[:-1])]
    files = {
        file.as_posix(): str(file.locate())
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if file.suffix == ".py"
    }
    return names + [files[name] for name in sorted(files)]


def _read_module(name: str) -> list[str] | None:
    try:
        source = Path(name).read_bytes()
    except OSError:
        return None
    # Parsing is slow, and modules without triple quotes rarely have docstrings.
    if b'"""' not in source and b"'''" not in source:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    docstrings = (ast.get_docstring(node, clean=False) for node in _statements(tree) if isinstance(node, _DOCUMENTED))
    prose = (docstring_prose(docstring) for docstring in docstrings if docstring)
    return [text for text in prose if text]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the statements of a module; unlike `ast.walk`, skips expressions, which are most nodes."""
    nodes = deque([tree])
    while nodes:
        node = nodes.popleft()
        yield node
        for name in _STATEMENT_FIELDS:
            nodes.extend(getattr(node, name, ()))


def docstring_prose(docstring: str) -> str:
    """Returns the prose of a docstring, one paragraph per line.

    Leaves out doctests, code, tables, horizontal rules and directives.
    """
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
