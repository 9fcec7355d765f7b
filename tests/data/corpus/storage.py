"""In-memory stand-in for Google Cloud Storage, registered with fsspec."""

import fsspec
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """In-memory file system for `gs://` paths."""

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


def install_bucket(monkeypatch) -> None:
    """Replaces the file system of `gs://` paths with an empty one in memory."""
    Bucket.store, Bucket.pseudo_dirs = {}, [""]
    for name in Bucket.protocol:
        fsspec.register_implementation(name, Bucket, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    # etils would otherwise use TensorFlow's file system, which accesses the real storage.
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    monkeypatch.setattr(gpath, "_is_zonal_gcs_bucket", lambda bucket: False, raising=False)
