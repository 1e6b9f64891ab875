"""The encoder of a checkpoint, and how it was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vitcli.config.schema import ModelConfig
from vitcli.load_report import LoadReport
from vitcli.nn.encoder import VisionEncoder


@dataclass(frozen=True)
class LoadedWeights:
    """An encoder in eval mode on the CPU that gives its library's numbers.

    `config.preprocess` only means something where `report.preprocess_by` names who told it.
    """

    config: ModelConfig
    encoder: VisionEncoder
    report: LoadReport


def digest(files: Iterable[str | Path]) -> str:
    """The SHA-256 of a checkpoint's files, one after another, in hexadecimal."""
    total = hashlib.sha256()
    for name in files:
        with Path(name).open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()
