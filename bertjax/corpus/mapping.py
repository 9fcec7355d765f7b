"""Arrays in files, mapped into memory so that they may be larger than it."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np

# Newer Pythons name it; the number is Linux's on x86 and Arm.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def map_file(file: Path, dtype: np.dtype) -> np.ndarray:
    """Maps a file of raw numbers; what is written to the array stays in memory.

    Not `np.memmap`: of its modes only copy-on-write looks writable, as TensorFlow demands of an array that it takes
    without a copy, and Linux refuses that to a file larger than memory unless told that nothing will be written.

    Raises:
      OSError: the file cannot be read.
    """
    size = file.stat().st_size
    if size == 0:
        return np.zeros(0, dtype)
    with open(file, "rb") as opened:
        mapped = mmap.mmap(
            opened.fileno(),
            0,
            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    # Reading ahead brings a file that fits into memory there soon. Of a larger one it reads what nobody asked for, up
    # to megabytes for one row.
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)
