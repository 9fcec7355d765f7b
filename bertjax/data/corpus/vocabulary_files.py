"""The vocabulary beside a run's checkpoints, so that they can be used without the data they were made of."""

import json
import os

from etils import epath

from bertjax.data.corpus.tokenizer import VOCABULARY_FILES, Vocabulary, load_vocabulary
from bertjax.errors import UsageError
from bertjax.utils.io import as_path, read_json

ENTRY = "vocabulary.json"


def vocabulary_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Name to content of what a workdir keeps: the vocabulary, whatever its file was called, and how it is read."""
    name = VOCABULARY_FILES[vocabulary.kind]
    entry = {"file": name, "lower_case": vocabulary.lower_case, "sha256": vocabulary.sha256}
    return {
        name: vocabulary.content,
        ENTRY: (json.dumps(entry, indent=1, sort_keys=True) + "\n").encode(),
    }


def workdir_vocabulary(workdir: epath.Path) -> Vocabulary:
    """The vocabulary that a run keeps beside its checkpoints.

    Raises:
      UsageError: there is none.
    """
    if not (workdir / ENTRY).exists():
        raise UsageError(f"{workdir} has no {ENTRY}; give the workdir of a run, or a step inside it")
    return open_vocabulary(workdir / ENTRY)


def open_vocabulary(path: str | os.PathLike) -> Vocabulary:
    """A `vocab.txt`, a SentencePiece `.model`, or the `vocabulary.json` of a workdir, here or at an address.

    Raises:
      UsageError: it is none of them.
    """
    path = as_path(path)
    if path.name != ENTRY:
        return load_vocabulary(path)
    try:
        entry = read_json(path)
        vocabulary = load_vocabulary(path.parent / entry["file"], entry["lower_case"])
        expected = entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {path} ({error}), which tells the vocabulary") from error
    if vocabulary.sha256 != expected:
        raise UsageError(f"{vocabulary.path} is not the vocabulary the run was trained with; bring that file back")
    return vocabulary
