"""Names of files as they may be printed."""

from __future__ import annotations

import os


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """One line for any file name: what cannot be printed is shown as an escape.

    Newlines, other control characters and the bytes of a name that is not UTF-8 come out as
    `\\n`, `\\x1b`, `\\xff`; all other characters stay as they are.
    """
    name = os.fsdecode(path)
    return "".join(c if c.isprintable() else _escape(c) for c in name)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that os.fsdecode kept as a lone surrogate
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def is_folder(path: str) -> bool:
    """Also for what no file can be called; `Path.is_dir` raises for too long a name."""
    return os.path.isdir(path)  # noqa: PTH112
