"""Vectors and pictures whose right answers are known."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitcli.commands.probe.labeled import Encoded, Images

SETTINGS = [
    f"encoder.{s}" for s in ("patch_size=8", "hidden=24", "depth=1", "heads=3", "mlp_hidden=40")
]
SMALL = [f"--set={setting}" for setting in SETTINGS] + ["--image-size=16"]


def labeled(
    vectors: np.ndarray | Sequence[np.ndarray],
    labels: Sequence[str] | np.ndarray,
    is_test: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> Images:
    """Images of one encoder, or of several, with their labels."""
    several = [vectors] if isinstance(vectors, np.ndarray) else list(vectors)
    encoders = tuple(
        Encoded(f"m{i}", "w", rows.astype(np.float32)) for i, rows in enumerate(several)
    )
    values = labels if isinstance(labels, np.ndarray) else np.array(labels, object)
    names = tuple(f"{i}.png" for i in range(len(values)))
    return Images(names, encoders, values, is_test, None if groups is None else tuple(groups))


def blobs(
    per_class: int, classes: int, apart: float, width: int = 8, seed: int = 0
) -> tuple[np.ndarray, list[str]]:
    """Normal clouds of one standard deviation around centers that are `apart` from zero."""
    rng = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(classes), per_class)
    vectors = rng.normal(size=(len(numbers), width)) + apart * np.eye(classes, width)[numbers]
    return vectors, [chr(ord("a") + number) for number in numbers]


def write_pictures(folder: Path, levels: dict[str, int], count: int, seed: int = 0) -> None:
    """A folder per class; any encoder tells its brightness from that of another."""
    rng = np.random.default_rng(seed)
    for name, level in levels.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = (level + rng.integers(0, 20, (20, 20, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def write_idx(path: Path, values: np.ndarray) -> None:
    """A file in the format of MNIST."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))
