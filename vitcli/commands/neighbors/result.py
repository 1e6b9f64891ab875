"""What `vitcli neighbors` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import Result


@dataclass(frozen=True)
class Neighbor:
    """An image near the one asked about."""

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
    """The answer of `vitcli neighbors DIR IMAGE`, nearest first."""

    rows_at: ClassVar[str] = "neighbours"

    image: str
    folder: str
    model: str
    weights: str
    index: int | None
    """Its own row where it is one of those encoded; it is then no neighbor of itself."""
    searched: int
    """Vectors compared with."""
    cosine_mean: float
    """Over all of them: what a cosine means depends on how alike everything is."""
    cosine_std: float
    neighbours: tuple[Neighbor, ...]
    label: str | None = None
    """The class of the image, where it is one of those encoded and the folders give one."""
    same_class: int | None = None
    """How many of `neighbours` are of that class."""
    class_share: float | None = None
    """The share of that class among all that were searched."""
