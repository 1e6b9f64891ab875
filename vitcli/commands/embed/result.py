"""What `encode` on many images, `neighbors` and `probe` answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result


@dataclass(frozen=True)
class FailureCount:
    """How many images failed in one way."""

    code: str
    count: int


@dataclass(frozen=True)
class FolderResult(Result):
    """The answer of `vitcli encode PATH... --out DIR`; counts are of this run's share."""

    rows_at: ClassVar[str] = "failures"

    model: ModelInfo
    engine: str
    """What ran the encoder: eager, compile or onnx."""
    out: str
    format: str
    kind: str
    """Which vector: pooled, cls, dist or output."""
    width: int
    """Numbers in a vector."""
    shard: str
    """`1/1` is the whole."""
    parts: int
    rows: int
    ok: int
    failures: tuple[FailureCount, ...]
    examples: tuple[FailedImage, ...]
    """The first few that failed."""
    rows_encoded: int
    """Rows of the parts that this run wrote; the others were there."""
    skipped_files: tuple[FailureCount, ...]
    """Files without an image suffix that a folder's walk left out, by suffix."""
    duplicates: int
    """Inputs that were named more than once."""
    wall_s: float
    images_per_s: float | None
    """Over the rows encoded; None where there were none."""

    @property
    def failed(self) -> int:
        return self.rows - self.ok
