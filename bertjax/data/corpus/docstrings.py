"""The docstrings of the standard library and of the installed distributions: English prose on every machine.

Modules are read with `ast` and never imported. One module is one document; a docstring seen before is left out.
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

_MODULES_A_CALL = 32
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_HOLDING_STATEMENTS = ("body", "handlers", "orelse", "finalbody", "cases")
# Starts of lines that open a paragraph of their own: bullets, numbers, `name: what it is`, `name : type`.
_ITEM = re.compile(r"(?:[-*+\u2022]|\d+[.)])\s|:?[\w*`.,\[\]' ]{1,40}?\s?(?:\([^)]*\))?\s?:(?:\s|$)")
_RULE = re.compile(r"[-=~^*#+_\"'`.:\s]+")
_DIRECTIVE = re.compile(r"\.\.\s|@\w")
_WORD = re.compile(r"[^\W\d_]{2,}")
# Below this share of letters and spaces a line is code, a table or a formula.
_PROSE_SHARE = 0.75
_MIN_WORDS = 4


def documents(
    names: list[str],
    problems: Counter[str],
    pool: Executor | None = None,
    advance: Callable[[int], object] = lambda modules: None,
) -> Iterator[str]:
    """The prose of one module after another, one paragraph a line, in a fixed order.

    Args:
      names: of the files, from `modules`.
      problems: gains `unparsable_modules`.
      pool: parses in parallel where given.
      advance: told how many modules were read, as they are read.
    """
    batches = [names[start : start + _MODULES_A_CALL] for start in range(0, len(names), _MODULES_A_CALL)]
    results = pool.map(_read_modules, batches) if pool else map(_read_modules, batches)
    seen: set[bytes] = set()
    for batch in results:
        advance(len(batch))
        for docstrings in batch:
            if docstrings is None:
                problems["unparsable_modules"] += 1
                continue
            fresh = []
            for docstring in docstrings:
                digest = hashlib.blake2b(docstring.encode("utf-8", "replace"), digest_size=12).digest()
                if digest not in seen:
                    seen.add(digest)
                    fresh.append(docstring)
            if fresh:
                yield "\n".join(fresh)


def modules() -> list[str]:
    """Paths of all Python modules of the standard library, then of each distribution, sorted within each."""
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


def _read_modules(names: list[str]) -> list[list[str] | None]:
    return [_read_module(name) for name in names]


def _read_module(name: str) -> list[str] | None:
    try:
        source = Path(name).read_bytes()
    except OSError:
        return None
    # Most modules without a triple quote have nothing to say; parsing them is most of the time.
    if b'"""' not in source and b"'''" not in source:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = (ast.get_docstring(node, clean=False) for node in _statements(tree) if isinstance(node, _DOCUMENTED))
    prose = (prose_of(docstring) for docstring in found if docstring)
    return [text for text in prose if text]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As `ast.walk`, without the expressions: most nodes are of those, and none has a docstring."""
    found = deque([tree])
    while found:
        node = found.popleft()
        yield node
        for name in _HOLDING_STATEMENTS:
            found.extend(getattr(node, name, ()))


def prose_of(docstring: str) -> str:
    """The prose of a docstring, one paragraph a line: no doctests, code blocks, tables, rules or directives."""
    paragraphs: list[list[str]] = []
    fenced = False
    literal_indent = None
    fresh = True
    for line in inspect.cleandoc(docstring).split("\n"):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text.startswith(("```", "~~~")):
            fenced = not fenced
            fresh = True
            continue
        if literal_indent is not None and text and indent <= literal_indent:
            literal_indent = None
        if not text or fenced or literal_indent is not None or _is_code(text):
            fresh = True
            continue
        if fresh or _ITEM.match(text):
            paragraphs.append([])
        paragraphs[-1].append(re.sub("::$", ":", text))
        fresh = False
        if text.endswith("::"):
            literal_indent = indent
    joined = (" ".join(lines) for lines in paragraphs)
    return "\n".join(text for text in joined if len(_WORD.findall(text)) >= _MIN_WORDS)


def _is_code(text: str) -> bool:
    if text.startswith((">>>", "...", "$ ", "|", "+-")) or _RULE.fullmatch(text) or _DIRECTIVE.match(text):
        return True
    return sum(char.isalpha() or char == " " for char in text) < _PROSE_SHARE * len(text)
