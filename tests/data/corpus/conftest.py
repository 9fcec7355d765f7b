import fsspec
import pytest
from etils import epath
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem
from helpers.preparing import WORDS

from bertjax.data.corpus.vocabulary import SPECIAL_PIECES


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    path.write_text("\n".join([*SPECIAL_PIECES, *WORDS, *letters, *(f"##{c}" for c in letters), "."]) + "\n")
    return path


class Bucket(MemoryFileSystem):
    """In-memory stand-in for Google Cloud Storage."""

    protocol = ("gcs", "gs")
    store = {}
    pseudo_dirs = [""]

    # Object storage has no folders, only names with slashes.
    def mkdir(self, path, create_parents=True, **_):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://").removeprefix("gcs://"))


@pytest.fixture
def bucket(monkeypatch):
    """Replaces the file system of `gs://` paths with an empty one in memory, and returns the path of a bucket."""
    Bucket.store, Bucket.pseudo_dirs = {}, [""]
    for name in Bucket.protocol:
        fsspec.register_implementation(name, Bucket, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    # etils would otherwise use TensorFlow's file system, which accesses the real storage.
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    monkeypatch.setattr(gpath, "_is_zonal_gcs_bucket", lambda bucket: False, raising=False)
    return epath.Path("gs://bucket")
