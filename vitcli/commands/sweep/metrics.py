"""Numbers out of what a trial writes: its result's JSON, and its JSON lines on the way there."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any


def lookup(value: Any, path: str) -> Any:
    """What stands at a dotted path: `result.val_accuracy`, `runs.0.wall_s.median`.

    In a list, `-1` is the last item, a word the item of that `name` (`runs.0.components.FFN.share`)
    and `*` every item: `history.*.loss` is a list. None where there is nothing.
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part == "*":
            rest = ".".join(parts[index + 1 :])
            items = value if isinstance(value, list) else []
            return [lookup(item, rest) if rest else item for item in items]
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.lstrip("-").isdecimal():
            position = int(part)
            value = value[position] if -len(value) <= position < len(value) else None
        elif isinstance(value, list):
            named = (item for item in value if isinstance(item, dict) and item.get("name") == part)
            value = next(named, None)
        else:
            return None
    return value


def new_values(
    file: Path, start: int, step: str, value: str
) -> tuple[list[tuple[int, float]], int]:
    """The finite (step, value) pairs in the whole lines after byte `start`, and where they end.

    Lines without both are passed over; a file that is not there yet has none.
    """
    try:
        with file.open("rb") as lines:
            lines.seek(start)
            new = lines.read()
    except OSError:
        return [], start
    whole = new[: new.rfind(b"\n") + 1]
    pairs = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            entry = json.loads(line)
            pair = int(entry[step]), float(entry[value])
            if math.isfinite(pair[1]):
                pairs.append(pair)
    return pairs, start + len(whole)
