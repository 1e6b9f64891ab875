"""What loading a checkpoint found out, and the encoder it gave."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from vitcli.config.schema import ModelConfig
from vitcli.core.encoder import VisionEncoder
from vitcli.weights.settle import Settled


@dataclass(frozen=True)
class LoadReport:
    """How a checkpoint was read.

    `settled` says for each setting of the encoder who decided it; `tensors_dropped` are the names
    that a drop rule of the family matched; `preprocess_by` is None where nothing told how pixels
    are prepared. `stored_dtypes` are those in the file, `dtype` the one asked for.
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

    def line(self) -> str:
        """One line for people."""
        dropped = f", {len(self.tensors_dropped)} left out" if self.tensors_dropped else ""
        pixels = self.preprocess_by or "unknown"
        return (
            f"{self.source}: {self.family} ({self.library}), {self.tensors_used} tensors used"
            f"{dropped}, {'/'.join(self.stored_dtypes)} read as {self.dtype}, "
            f"preprocessing from {pixels}"
        )


@dataclass(frozen=True)
class LoadedWeights:
    """An encoder in eval mode on the CPU that gives its library's numbers."""

    config: ModelConfig
    encoder: VisionEncoder
    report: LoadReport


def digest(files: tuple[str, ...]) -> str:
    """The SHA-256 of the checkpoint's files, one after another, in hexadecimal."""
    total = hashlib.sha256()
    for name in files:
        with Path(name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
