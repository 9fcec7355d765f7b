"""What files of text may be encoded in, and how their lines may end."""

import os

from bertjax.errors import UsageError

_LOOKED_AT_BYTES = 4096
# Of fewer nothing can be told without a byte-order mark.
_LEAST_BYTES = 8
# Of every second byte: of English in UTF-16 nearly all are NUL, UTF-8 has none.
_NUL_SHARE = 0.4


def refuse_utf16(path: os.PathLike | str, start: bytes) -> None:
    """Refuses text in UTF-16 or UTF-32, with or without a byte-order mark, which would be read as rubbish.

    Args:
      start: first bytes of the file, or all of them.

    Raises:
      UsageError: names the encoding and the way out.
    """
    start = start[:_LOOKED_AT_BYTES]
    name = ""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        name = "UTF-32"
    elif start.startswith((b"\xff\xfe", b"\xfe\xff")):
        name = "UTF-16"
    elif len(start) >= _LEAST_BYTES:
        for name_of, half in (("UTF-16BE", start[0::2]), ("UTF-16LE", start[1::2])):
            if half.count(0) > _NUL_SHARE * len(half) and start.count(0) == half.count(0):
                name = name_of
    if name:
        raise UsageError(f"{path} is text in {name}; make it UTF-8, as with `iconv -f {name} -t UTF-8`")


def with_newlines(data: bytes) -> bytes:
    """The text, with line feeds where each line ends with a carriage return alone."""
    return data if b"\n" in data else data.replace(b"\r", b"\n")
