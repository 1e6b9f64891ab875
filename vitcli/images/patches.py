"""Values of patch grids, ready to be laid on the pictures they belong to."""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of a picture."""


@dataclass(frozen=True)
class MapPanel:
    title: str
    values: tuple[tuple[float, ...], ...]
    """A value for each patch, by rows."""


@dataclass(frozen=True)
class MapSheet:
    """Attention maps of one image by one block of one encoder."""

    image: int
    """Which picture of the figure the maps belong to."""
    title: str
    box: Box
    """What the patch grid covers of the picture."""
    query_box: Box | None
    """The query's own patch, where it is one."""
    panels: tuple[MapPanel, ...]


@dataclass(frozen=True)
class FeatureSheet:
    """The patch features of one image as colours, and their cosine to one patch."""

    image: int
    title: str
    box: Box
    colours: tuple[tuple[tuple[float, float, float], ...], ...]
    """Red, green and blue in [0, 1] for each patch, by rows: the principal components."""
    cosines: tuple[tuple[float, ...], ...] | None
    query_box: Box | None
    """The chosen patch, on the picture that holds it."""
