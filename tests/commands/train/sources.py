"""Folders of pictures, and a run on them of a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.commands.train.runs import TINY


def folder(path: Path, per_class: int = 12, names: tuple[str, ...] = ("blue", "red")) -> Path:
    """Noisy pictures of one color for each class, 20x16 pixels."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(names):
        (path / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = random.integers(0, 120, (16, 20, 3), dtype=np.uint8)
            pixels[..., channel % 3] += 100
            Image.fromarray(pixels).save(path / name / f"{i}.png")
    return path


MIXLESS = {"train.mixup": 0.0, "train.cutmix": 0.0}
SMALL_RUN: dict[str, Any] = {
    "batch": 8,
    "device": "cpu",
    "set": {
        **{key: value for key, value in TINY.items() if not key.startswith(("data", "train.b"))},
        **MIXLESS,
        "encoder.patch_size": 8,
    },
    "epochs": 1,
}
"""Keyword arguments of `train` for a run of a moment."""


class Lines:
    """Keeps what a run says."""

    def __init__(self, kept: list[str]) -> None:
        self.kept = kept

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        pass

    def line(self, text: str) -> None:
        self.kept.append(text)
