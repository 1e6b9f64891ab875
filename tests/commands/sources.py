"""Small encoders that several commands' tests run: as options, and as a random model."""

from __future__ import annotations

from typing import Any

import torch

from tests.conftest import TINY, randomize
from vitcli.build import build_encoder
from vitcli.config.schema import ModelConfig
from vitcli.model import Model

SMALL_SIZE = [
    f"--set={setting}"
    for setting in (
        "encoder.hidden=24",
        "encoder.heads=3",
        "encoder.mlp_hidden=48",
        "encoder.image_size=32",
        "preprocess.resize_size=32",
    )
]
SMALL = [*SMALL_SIZE, "--set=encoder.depth=4", "--set=encoder.patch_size=8"]


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Model:
    """A random model of `tests.conftest.TINY`."""
    config = ModelConfig.model_validate(
        {"encoder": TINY | changes, "preprocess": {"resize_size": (24, 32)}}
    )
    encoder = build_encoder(config.encoder)
    randomize(encoder, seed)
    return Model(
        config=config,
        encoder=encoder.to(dtype),
        known_preprocessing=config.preprocess,
        weights="random",
        fresh=False,
        device=torch.device("cpu"),
        dtype=dtype,
    )
