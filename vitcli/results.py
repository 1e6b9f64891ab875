"""What each command answers: frozen dataclasses of scalars, strings and tuples.

Field names carry the unit. Nothing here knows tensors, colours or how it will be shown; the JSON
of a result is its fields plus `schema_version` (see `vitcli.ui.json`).
"""

from __future__ import annotations

from dataclasses import dataclass

from vitcli.load_report import LoadReport

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelInfo:
    """The encoder that gave an answer."""

    name: str
    parameters: int
    hidden: int
    depth: int
    heads: int
    weights: str
    device: str
    dtype: str
    checkpoint: LoadReport | None = None
    """How the weights were read; None where they are fresh."""


@dataclass(frozen=True)
class FailedImage:
    path: str
    code: str
    error: str
