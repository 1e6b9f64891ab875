"""Tiny encoders and pictures for the tests of explore and grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitcli.config.request import ModelRequest
from vitcli.config.settings import Setting
from vitcli.loading import load_model
from vitcli.model import Model

TINY = {
    "encoder.hidden": 24,
    "encoder.depth": 3,
    "encoder.heads": 2,
    "encoder.mlp_hidden": 32,
    "encoder.image_size": [64, 64],
}


def tiny(patch: int = 16, seed: int = 0, **more: Any) -> Model:
    """A fresh three-block encoder that reads 64 x 64 pixels."""
    keys = TINY | {"encoder.patch_size": patch} | more
    settings = tuple(Setting(tuple(key.split(".")), value, key) for key, value in keys.items())
    return load_model(ModelRequest(preset="vit-ti16", settings=settings, seed=seed, device="cpu"))


def pictures(folder: Path, count: int = 2) -> list[str]:
    """Smooth random pictures of different shapes."""
    files = []
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (5, 7, 3), dtype=np.uint8)
        file = folder / f"p{number}.png"
        Image.fromarray(noise).resize((90 + 20 * number, 70), Image.Resampling.BICUBIC).save(file)
        files.append(str(file))
    return files
