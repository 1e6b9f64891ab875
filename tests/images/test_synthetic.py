"""The built-in picture."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitcli.files import printable
from vitcli.images.synthetic import synthetic_image


def test_it_is_the_same_on_every_run() -> None:
    first, second = (synthetic_image().tobytes() for _ in range(2))
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()


@pytest.mark.parametrize("size", [(224, 224), (1, 1), (96, 160), (37, 20)])
def test_size_is_height_and_width(size: tuple[int, int]) -> None:
    image = synthetic_image(size)
    assert image.mode == "RGB" and image.size == size[::-1]


def test_no_two_patches_are_alike_and_none_is_flat() -> None:
    patches = np.asarray(synthetic_image()).reshape(14, 16, 14, 16, 3).swapaxes(1, 2)
    patches = patches.reshape(196, -1)
    assert len(np.unique(patches, axis=0)) == 196
    assert patches.std(axis=1).min() > 0.5
    assert patches.std(axis=0).min() > 20


@given(st.text())
def test_any_name_prints_on_one_line(name: str) -> None:
    shown = printable(name.encode("utf-8", "replace"))
    assert shown.isprintable() and shown.encode("utf-8").decode() == shown


@given(st.binary())
def test_any_bytes_print_on_one_line(name: bytes) -> None:
    assert printable(name).isprintable()


def test_ordinary_names_stay() -> None:
    assert printable("Fotos/Größe 1 – 写真.png") == "Fotos/Größe 1 – 写真.png"
    assert printable(b"a\xffb\nc") == "a\\xffb\\nc"
