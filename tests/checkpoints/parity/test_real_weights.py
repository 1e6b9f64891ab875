"""A trained DINOv2-S/14: our numbers are transformers' numbers, from the same pixels."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as T
from typer.testing import CliRunner

from vitcli.checkpoints.weights import load_weights
from vitcli.cli import app
from vitcli.config.request import resized_to
from vitcli.images.preprocess import preprocess
from vitcli.images.synthetic import synthetic_image

FOLDER = Path(
    os.environ.get(
        "VITCLI_DINOV2_SMALL", Path(__file__).parents[3] / ".." / "shared" / "dinov2-small"
    )
)
pytestmark = [
    pytest.mark.skipif(
        not (FOLDER / "model.safetensors").is_file(),
        reason="no trained DINOv2-S/14 at ../shared/dinov2-small or $VITCLI_DINOV2_SMALL",
    ),
    pytest.mark.filterwarnings("ignore"),
]
PIXELS = 1e-4
"""Largest difference allowed, on features of size up to about 50."""


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return T.Dinov2Model.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def loaded():
    return load_weights(str(FOLDER))


def test_it_is_the_whole_model(loaded) -> None:
    assert sum(p.numel() for p in loaded.encoder.parameters()) == 22_056_192
    assert loaded.config.encoder.image_size == (518, 518)
    assert loaded.report.family == "hf-dinov2"
    assert loaded.report.tensors_dropped == ()


@pytest.mark.parametrize("size", [(224, 224), (154, 322)])
def test_equals_transformers(size, loaded, reference) -> None:
    config = resized_to(loaded.config.preprocess, size)
    pixels = torch.from_numpy(preprocess(synthetic_image((300, 400)), config))[None]
    assert pixels.shape[-2:] == size
    with torch.no_grad():
        ours, theirs = loaded.encoder(pixels), reference(pixels)
    assert float((ours.tokens - theirs.last_hidden_state).abs().max()) < PIXELS
    assert float((ours.pooled - theirs.pooler_output).abs().max()) < PIXELS


def test_the_command_equals_transformers_end_to_end(reference, tmp_path: Path) -> None:
    """From file to vectors: processor and model of transformers there, one command here."""
    image = synthetic_image((260, 340))
    image.save(tmp_path / "photo.png")
    processor = T.BitImageProcessorPil.from_pretrained(FOLDER)
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        theirs = reference(pixels).last_hidden_state
    arguments = ["encode", str(tmp_path / "photo.png"), "--weights", str(FOLDER)]
    more = ["--out", str(tmp_path / "vectors.npz"), "--tokens", "cls,patch", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, *more])
    assert result.exit_code == 0, result.output
    vectors = np.load(tmp_path / "vectors.npz")
    ours = np.concatenate([vectors["cls"].reshape(1, -1), vectors["patch"].reshape(256, -1)])
    assert float(np.abs(ours - theirs[0].numpy()).max()) < PIXELS
