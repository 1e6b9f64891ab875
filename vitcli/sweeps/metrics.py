"""Numbers out of a result's JSON."""

from __future__ import annotations

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
