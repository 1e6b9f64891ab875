from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitcli.errors import VitcliError
from vitcli.images.synthetic import SHAPES, VALIDATION, Shapes, draw_sheet

FOUR = ("circle", "square", "triangle", "cross")


def shapes(**changes: object) -> Shapes:
    values = {"size": (32, 32), "classes": FOUR, "difficulty": 0.25, "seed": 0} | changes
    return Shapes(**values)  # type: ignore[arg-type]


def test_an_image_depends_on_seed_and_index_alone() -> None:
    alone = [shapes().batch([i]) for i in (3, 17, VALIDATION + 5)]
    together = shapes().batch([17, 8, VALIDATION + 5, 3])
    for (image, label), place in zip(alone, (3, 0, 2), strict=True):
        assert np.array_equal(image[0], together[0][place]) and label[0] == together[1][place]
    assert not np.array_equal(shapes(seed=1).batch([3])[0], alone[0][0])


def test_the_same_bytes_on_every_machine() -> None:
    """Raw bits and correctly rounded arithmetic only: the digest is a constant of the drawing."""
    images, labels = shapes(classes=tuple(SHAPES)).batch(range(64))
    digest = hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    assert digest == "24ddb3941dfff2b63f23d2a2a627c2092c0adba458e19f6779b626b35b3a2b54"


def test_every_shape_has_the_same_area() -> None:
    """Painted large, without noise or turn: each covers pi r^2, so area tells no class."""
    big = shapes(size=(256, 256), classes=tuple(SHAPES))
    u = np.full((len(SHAPES), 16), 0.5)
    covered = big._coverage(u, np.arange(len(SHAPES))).sum((1, 2))
    assert covered == pytest.approx(np.full(len(SHAPES), covered[0]), rel=2e-3)
    assert covered[0] == pytest.approx(np.pi * (256 * 0.245) ** 2, rel=1e-3)


def test_shapes_stay_inside_the_image() -> None:
    some = shapes(size=(64, 48), classes=tuple(SHAPES), difficulty=1.0)
    u = np.random.default_rng(0).random((900, 16))
    inside = some._coverage(u, np.arange(900) % len(SHAPES))
    edge = [inside[:, 0], inside[:, -1], inside[:, :, 0], inside[:, :, -1]]
    assert max(side.max() for side in edge) < 0.5  # no center of an edge pixel is inside


def test_labels_are_even_and_split_between_training_and_validation() -> None:
    _, labels = shapes().batch(range(2000))
    assert np.bincount(labels).min() > 430
    _, others = shapes().batch(range(VALIDATION, VALIDATION + 2000))
    assert 0.2 < (labels == others).mean() < 0.3


def test_difficulty_lowers_contrast_and_adds_noise() -> None:
    spread = [shapes(difficulty=d).batch(range(64))[0].std(axis=(2, 3)).mean() for d in (0, 1)]
    corner = [shapes(difficulty=d).batch(range(64))[0][:, :, 0].std(axis=2).mean() for d in (0, 1)]
    assert spread[0] > spread[1]
    assert corner[0] * 3 < corner[1]


def test_the_sheet_is_a_picture(tmp_path: Path) -> None:
    draw_sheet(shapes(), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (8 * 68 + 4, 6 * 82 + 4)
    with pytest.raises(VitcliError, match=r"sheet\.nonsense"):
        draw_sheet(shapes(), tmp_path / "sheet.nonsense")
