"""The results of `vitcli export` and `vitcli convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import LoadReport, ModelInfo, Result


@dataclass(frozen=True)
class ExportedFile:
    path: str
    bytes: int


@dataclass(frozen=True)
class ExportedTensor:
    name: str
    shape: tuple[int | str, ...]
    """Sizes; a name for an axis of any size."""


@dataclass(frozen=True)
class ExportResult(Result):
    """The result of `vitcli export`: the graph that was written and checked."""

    rows_at: ClassVar[str] = "files"

    model: ModelInfo
    files: tuple[ExportedFile, ...]
    opset: int
    inputs: tuple[ExportedTensor, ...]
    outputs: tuple[ExportedTensor, ...]
    max_error: float
    """Largest difference to eager, relative to an output's largest value where that is above 1."""
    tolerance: float
    checked_batches: tuple[int, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class ConvertResult(Result):
    """The result of `vitcli convert`."""

    view_prefix: ClassVar[str] = "convert_"

    folder: str
    parameters: int
    bytes: int
    sha256: str
    """Of model.safetensors."""
    checkpoint: LoadReport
