"""How values are written in a config: sizes, lists and rates, and how they are printed again."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, PositiveFloat, PositiveInt


def _as_size(value: Any) -> Any:
    """A height and a width from `224`, `[384, 512]` or `"384x512"`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, str):
        sides = value.lower().split("x")
        if all(side.isdecimal() for side in sides) and len(sides) <= 2:
            return (int(sides[0]), int(sides[-1]))
    return as_tuple(value)


def as_tuple(value: Any) -> Any:
    """YAML's list as the tuple that the schema holds."""
    return tuple(value) if isinstance(value, list) else value


def _short_size(value: tuple[int, int]) -> int | list[int]:
    return value[0] if value[0] == value[1] else list(value)


AS_LIST = PlainSerializer(lambda v: list(v))
"""YAML has lists, not tuples."""
Size = Annotated[
    tuple[PositiveInt, PositiveInt], BeforeValidator(_as_size), PlainSerializer(_short_size)
]
"""(height, width) in pixels; one number means a square."""
Triple = Annotated[tuple[float, float, float], BeforeValidator(as_tuple), AS_LIST]
Ints = Annotated[tuple[int, ...], BeforeValidator(as_tuple), AS_LIST]
Floats = Annotated[tuple[PositiveFloat, ...], BeforeValidator(as_tuple), AS_LIST]
Pair = Annotated[tuple[float, float], BeforeValidator(as_tuple), AS_LIST]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A share of what is dropped: not all."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def as_words(value: Any) -> Any:
    """A list, or one text with commas: `q,v`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return as_tuple(value)


def words(kind: Any) -> Any:
    """Several words of `kind`."""
    return Annotated[tuple[kind, ...], BeforeValidator(as_words), AS_LIST]
