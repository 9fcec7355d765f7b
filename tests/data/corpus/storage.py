"""A bucket in memory: object storage for the tests, by the same library that reaches the real one by fsspec."""

import fsspec
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """Files of this process at `gs://`."""

    protocol = ("gcs", "gs")
    store = {}
    pseudo_dirs = [""]

    # As in real ones there are no folders, only names with slashes.
    def mkdir(self, path, create_parents=True, **_):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://").removeprefix("gcs://"))


def use(monkeypatch) -> None:
    """Has `gs://` be a bucket in memory, empty at first."""
    Bucket.store, Bucket.pseudo_dirs = {}, [""]
    for name in Bucket.protocol:
        fsspec.register_implementation(name, Bucket, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    # TensorFlow's own file system knows no other place than Google's.
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    monkeypatch.setattr(gpath, "_is_zonal_gcs_bucket", lambda bucket: False)
