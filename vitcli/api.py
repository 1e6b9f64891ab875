"""The Python API: the same questions as the command line, as functions.

import vitcli

model = vitcli.load("vit-s16", set={"encoder.depth": 6})
output = model.encoder(images)              # tokens, pooled, output
result, vectors = vitcli.encode(model, ["photo.jpg"], tokens=["cls"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitcli.commands.encode import analysis as _encode
from vitcli.commands.encode.result import EncodeResult
from vitcli.config.load import Setting
from vitcli.config.request import ModelRequest
from vitcli.model import Model, load_model


def load(
    preset: str | None = None,
    *,
    config: str | Path | None = None,
    weights: str | Path | None = None,
    adapter: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    seed: int = 0,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> Model:
    """An encoder in eval mode, from a preset, a YAML file, dotted keys and a checkpoint.

    Args:
        adapter: a run's adapter.safetensors, added into the weights.
        set: dotted config keys to values, as `--set` takes them.
        image_size: (height, width) in pixels, or the side of a square.

    Raises:
        VitcliError: a bad config, source, device or dtype; its `hint` says what to do.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    settings = tuple(
        Setting(tuple(key.split(".")), value, f"set[{key!r}]") for key, value in (set or {}).items()
    )
    return load_model(
        ModelRequest(
            preset=preset,
            config_file=None if config is None else Path(config),
            settings=settings,
            weights=None if weights is None else str(weights),
            adapter=None if adapter is None else str(adapter),
            seed=seed,
            image_size=size,
            device=device,
            dtype=dtype,
        )
    )


def encode(
    model: Model, images: Sequence[str | Path] = (), tokens: Sequence[str] = ()
) -> tuple[EncodeResult, dict[str, np.ndarray]]:
    """What `vitcli encode` answers, and the vectors that `--out --tokens` would write.

    Each array's first axis is `result.images`; unreadable files are in `result.failed`.
    """
    return _encode.encode(model, [str(path) for path in images], tokens)
