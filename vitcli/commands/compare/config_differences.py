"""Which settings two models do not share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitcli.commands.compare.result import ConfigDifference
from vitcli.model import LoadedModel


def config_differences(a: LoadedModel, b: LoadedModel) -> tuple[ConfigDifference, ...]:
    """The keys of encoder and preprocessing that are not the same."""
    first, second = (
        dict(_leaves({"encoder": m.config.encoder.model_dump(), "preprocess": dict(m.preprocess)}))
        for m in (a, b)
    )
    return tuple(
        ConfigDifference(key, str(first.get(key)), str(second.get(key)))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, value
