"""A result as JSON: its fields plus `schema_version`."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from vitcli.results import SCHEMA_VERSION


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, NaN and infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(result: Any) -> str:
    """One JSON object, ASCII only, so that any file name survives any pipe."""
    plain = {"schema_version": SCHEMA_VERSION, **to_plain(result)}
    return json.dumps(plain, indent=2, allow_nan=False)
