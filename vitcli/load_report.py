"""How a checkpoint was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settled:
    """One setting of the encoder and who decided it: the tensors, a config's key, the user."""

    key: str
    value: Any
    by: str


@dataclass(frozen=True)
class LoadReport:
    """What loading a checkpoint found out.

    `tensors_dropped` are the names that a drop rule of the family matched; `stored_dtypes` are
    those of the tensors used, `dtype` is the one they were read as; `preprocess_by` is None where
    nothing tells how images are prepared. `preprocess` is that preparation, and `tensors_resized`
    says what follows from the size it gives.
    """

    source: str
    family: str
    library: str
    files: tuple[str, ...]
    tensors_used: int
    tensors_dropped: tuple[str, ...]
    stored_dtypes: tuple[str, ...]
    dtype: str
    settled: tuple[Settled, ...]
    preprocess_by: str | None
    preprocess: Mapping[str, Any] | None = None
    tensors_resized: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for people."""
        dropped = f", {len(self.tensors_dropped)} left out" if self.tensors_dropped else ""
        told = f"from {self.preprocess_by}" if self.preprocess_by else "unknown"
        resized = "".join(f", {text}" for text in self.tensors_resized)
        return (
            f"{self.source}: {self.family} ({self.library}), {self.tensors_used} tensors used"
            f"{dropped}{resized}, {'/'.join(self.stored_dtypes)} read as {self.dtype}, "
            f"preprocessing {told}"
        )


@dataclass(frozen=True)
class ConvertResult:
    """The answer of `vitcli convert`."""

    folder: str
    parameters: int
    bytes: int
    sha256: str
    """Of model.safetensors."""
    checkpoint: LoadReport


@dataclass(frozen=True)
class FamilyRow:
    """A library's way to write one kind of encoder, and what it was compared with."""

    name: str
    library: str
    model_types: tuple[str, ...]
    verified: str


@dataclass(frozen=True)
class FamiliesResult:
    """The answer of `vitcli families`."""

    families: tuple[FamilyRow, ...]
