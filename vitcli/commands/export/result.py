"""What `vitcli export` and `vitcli convert` answer."""

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
    """Sizes, and names of the axes that are free."""


@dataclass(frozen=True)
class ExportResult(Result):
    """The graph as it was written and read back."""

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
    """The answer of `vitcli convert`."""

    view_prefix: ClassVar[str] = "convert_"

    folder: str
    parameters: int
    bytes: int
    sha256: str
    """Of model.safetensors."""
    checkpoint: LoadReport
