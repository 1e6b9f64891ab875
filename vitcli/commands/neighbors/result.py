"""The result of `vitcli neighbors`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import Result


@dataclass(frozen=True)
class Neighbor:
    """One of the nearest images."""

    index: int
    """Its row among the vectors."""
    path: str
    cosine: float
    width: int
    height: int
    label: str | None = None
    """Its class, where the folders give one."""


@dataclass(frozen=True)
class NeighborsResult(Result):
    """The result of `vitcli neighbors DIR IMAGE`, nearest first."""

    rows_at: ClassVar[str] = "neighbours"

    image: str
    folder: str
    model: str
    weights: str
    index: int | None
    """Its own row if it is among the vectors; it is not a neighbor of itself."""
    searched: int
    """Number of vectors searched."""
    cosine_mean: float
    """Over all vectors that were searched."""
    cosine_std: float
    neighbours: tuple[Neighbor, ...]
    label: str | None = None
    """The class of the image, where it is one of those encoded and the folders give one."""
    same_class: int | None = None
    """How many of `neighbours` are of that class."""
    class_share: float | None = None
    """The share of that class among all that were searched."""
