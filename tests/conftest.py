"""Shared by all tests: one thread a process, tiny encoders, nothing from the network."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # Graphs that were compiled with other vector instructions do not compile with narrower ones.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="vitcli-tests-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import pytest
import torch

from vitcli.build import build_encoder
from vitcli.config.schema import EncoderConfig
from vitcli.nn.encoder import VisionEncoder

torch.set_num_threads(1)

NUMERIC = (
    *("nn", "engines", "images", "checkpoints/parity", "test_model.py", "test_measures.py"),
    *(f"commands/{name}" for name in ("attention", "compare", "encode", "neighbors", "train")),
)
"""Folders and files whose tests compare floating-point numbers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in NUMERIC."""
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / place) for place in NUMERIC):
            item.add_marker(pytest.mark.numeric)


TINY: dict[str, Any] = {
    "image_size": (24, 32),
    "patch_size": 8,
    "hidden": 24,
    "depth": 2,
    "heads": 3,
    "mlp_hidden": 40,
}


def tiny_config(**changes: Any) -> EncoderConfig:
    """A 3x4-patch, two-block EncoderConfig."""
    return EncoderConfig.model_validate(TINY | changes)


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Give every parameter a random value: fresh norms and biases are constants that hide bugs."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise * scale)


def tiny_encoder(**changes: Any) -> VisionEncoder:
    """A tiny encoder in float64 whose every parameter is random."""
    encoder = build_encoder(tiny_config(**changes)).double()
    randomize(encoder)
    return encoder


@pytest.fixture
def images() -> torch.Tensor:
    """Two 24x32 images, (2, 3, 24, 32), in float64."""
    return torch.randn(2, 3, 24, 32, generator=torch.Generator().manual_seed(1)).double()
