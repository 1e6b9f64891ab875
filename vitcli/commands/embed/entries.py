"""One input of a job, and its name in a table."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass

from vitcli.images.paths import printable


@dataclass(frozen=True, slots=True)
class Entry:
    """One image to encode: a file, or a member of a tar shard."""

    name: str
    """How tables call it. Bytes that are not UTF-8 are lone surrogates, as in `os.fsdecode`."""
    source: str
    """The absolute path of what to open: the image or its shard."""
    offset: int = -1
    """Where a member's content begins in its shard; -1 for a file of its own."""
    size: int = -1
    """Bytes of a member."""
    code: str = ""
    """Set where it is already known that there is nothing to decode."""
    error: str = ""

    @property
    def key(self) -> tuple[bytes, int]:
        """What inputs are sorted by, and what makes two of them the same."""
        return os.fsencode(self.name), self.offset

    def to_line(self) -> bytes:
        """One line of ASCII without a newline in it, whatever the name holds."""
        return json.dumps(astuple(self), separators=(",", ":")).encode("ascii") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        return cls(*json.loads(line))


def escaped(name: str) -> tuple[str, bool]:
    """A name as valid text, and whether that took escapes.

    A name that is UTF-8 stays as it is. In any other, bytes that are not UTF-8 become `\\xNN` and
    backslashes are doubled, so that `unescaped` gives the name back.
    """
    if not any("\ud800" <= c <= "\udfff" for c in name):
        return name, False
    parts = name.split("\\")
    return "\\\\".join("".join(_byte(c) for c in part) for part in parts), True


def _byte(character: str) -> str:
    return printable(character) if "\ud800" <= character <= "\udfff" else character


def unescaped(text: str, was_escaped: bool) -> str:
    """The name that `escaped` wrote, as `os.fsdecode` gives it."""
    if not was_escaped:
        return text
    parts = []
    for part in text.split("\\\\"):
        plain, *codes = part.split("\\x")
        parts.append(plain + "".join(chr(0xDC00 + int(c[:2], 16)) + c[2:] for c in codes))
    return "\\".join(parts)
