"""What is told of a file that cannot be read."""

from __future__ import annotations

import textwrap
from pathlib import Path

from vitcli.errors import VitcliError

AGAIN = "download or copy it again"


def damaged(path: Path, kind: str, error: Exception) -> VitcliError:
    """What reading `path` as `kind` ended with, in one line: the first sentence of `error`."""
    told = "" if isinstance(error, LookupError) else str(error).strip()  # a key says nothing
    sentence = told.splitlines()[0].split(". ")[0].rstrip(".") if told else ""
    reason = f" ({textwrap.shorten(sentence, 120)})" if sentence else ""
    return VitcliError(f"{path}: truncated or not {kind}{reason}", AGAIN)
