"""Downloads and uploads of Hugging Face Hub repositories, given as Hub addresses `hf:ORG/NAME[@REVISION]`."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertjax.errors import BertjaxError, UsageError, first_line, listed

PREFIX = "hf:"


def is_hub(path: object) -> bool:
    """Returns whether a path is a Hub address, such as `hf:ORG/NAME`."""
    return str(path).startswith(PREFIX)


def parse(address: str) -> tuple[str, str]:
    """Splits a Hub address into repository and revision (default: `main`)."""
    repository, _, revision = address.removeprefix(PREFIX).partition("@")
    return repository, revision or "main"


def download(address: str, patterns: Sequence[str]) -> Path:
    """Downloads the files of a repository that match glob patterns, unless they are cached. Returns the local folder.

    `address` is `hf:ORG/NAME[@REVISION]`. The folder's name is the commit that the revision resolves to. Raises a
    BertjaxError if files do not match their hashes, and removes these files.
    """
    from huggingface_hub import snapshot_download

    repository, revision = parse(address)
    with _one_line_errors(address):
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    if damaged := [file for file in sorted(folder.rglob("*")) if file.is_file() and not _matches_hash(file)]:
        for file in damaged:
            Path(os.path.realpath(file)).unlink(missing_ok=True)
            file.unlink()
        names = listed(str(file.relative_to(folder)) for file in damaged)
        raise BertjaxError(f"files of {address} do not match their hashes: {names}; run the same command again")
    return folder


def upload(folder: Path, address: str, overwrite: bool, message: str, replaced: Sequence[str] = ()) -> str:
    """Uploads all files of a folder as one commit, and returns the URL of the repository.

    `address` is `hf:ORG/NAME[@BRANCH]`. The repository is created if it does not exist. Without `overwrite`, raises a
    UsageError if the repository contains a model. A failed upload adds no commit. The commit removes the
    repository's files that match the patterns `replaced`, unless the folder contains them.
    """
    from huggingface_hub import HfApi

    repository, revision = parse(address)
    api = HfApi()
    with _one_line_errors(address):
        if revision != "main":
            api.list_repo_files(repository, revision=revision)  # Raises if the branch does not exist.
        url = api.create_repo(repository, exist_ok=True)
        if not overwrite and "config.json" in api.list_repo_files(repository, revision=revision):
            raise UsageError(f"{address} contains a model; use --overwrite to add a commit, or choose another name")
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            delete_patterns=list(replaced),
        )
    return str(url)


_NO_ACCESS = "no access to {address} (status {status}); set HF_TOKEN to a token with access"
# Error messages, keyed by HTTP status or by exception name in `huggingface_hub.errors`.
_MESSAGES = {
    401: _NO_ACCESS,
    403: _NO_ACCESS,
    "OfflineModeIsEnabled": "{address} is not in the cache; unset HF_HUB_OFFLINE to use the network",
    "GatedRepoError": "{address} is gated; accept its terms on its page, then set HF_TOKEN",
    "RepositoryNotFoundError": "no repository {address}; check the name, or set HF_TOKEN if the repository is private",
    "RevisionNotFoundError": "no revision {revision!r} of {address}; use a branch, tag or commit",
    "HFValidationError": "invalid address {address}; use hf:ORG/NAME or hf:ORG/NAME@REVISION",
}


@contextlib.contextmanager
def _one_line_errors(address: str) -> Iterator[None]:
    """Converts exceptions of `huggingface_hub`, which have many types and long messages, to one-line errors."""
    try:
        yield
    except BertjaxError:
        raise
    except Exception as error:
        # Report the failed request instead of the LocalEntryNotFoundError that it causes.
        cause = error.__cause__ if type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ else error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if message := _MESSAGES.get(type(cause).__name__) or _MESSAGES.get(status):
            raise UsageError(message.format(address=address, revision=parse(address)[1], status=status)) from error
        if status == 429:
            raise BertjaxError(f"too many requests to the server of {address}; wait, or set HF_TOKEN") from error
        raise BertjaxError(
            f"cannot reach {address}: {first_line(cause)}; check the network, then repeat the command"
        ) from error


def _matches_hash(file: Path) -> bool:
    """Returns whether the content of a cached file has the hash that the cache uses as its name."""
    blob = Path(os.path.realpath(file))
    # The cache names files in Git LFS by their SHA-256, and other files by their Git blob hash.
    digests = {64: hashlib.sha256(), 40: hashlib.sha1(b"blob %d\0" % blob.stat().st_size)}
    if (digest := digests.get(len(blob.name))) is None:
        return True
    with open(blob, "rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest() == blob.name
