"""Arrays in files, mapped into memory so that they may be larger than it."""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Newer Pythons name it; the number is Linux's on x86 and Arm.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# No Python names it; the number is that of Linux and macOS.
_MAP_FIXED = 0x10


def map_files(files: Sequence[Path], dtype: np.dtype) -> np.ndarray:
    """Maps an array that lies in one file of raw numbers after the other; what is written to it stays in memory.

    The files are mapped side by side, so that reading the array costs the same whatever their number.

    Not `np.memmap`: of its modes only copy-on-write looks writable, as TensorFlow demands of an array that it takes
    without a copy, and Linux refuses that to a file larger than memory unless told that nothing will be written.

    Args:
      files: each but the last as long as some memory pages.

    Raises:
      OSError: a file cannot be read.
    """
    sizes = [file.stat().st_size for file in files]
    size = sum(sizes)
    if size == 0:
        return np.zeros(0, dtype)
    # Addresses without memory behind them, which are given back with the last array over them.
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for file, length in zip(files, sizes, strict=True):
        if length:
            with open(file, "rb") as opened:
                _map_at(address, length, opened.fileno())
        address += length
    # Reading ahead brings a file that fits into memory there soon. Of a larger one it reads what nobody asked for, up
    # to megabytes for one row.
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        region.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(region, dtype)


def _map_at(address: int, length: int, file: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if library.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
