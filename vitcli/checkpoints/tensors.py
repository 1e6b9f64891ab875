"""Tensors on disk, by name: shapes at once, values when asked for."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitcli.errors import VitcliError

RELEASE_EVERY = 32 << 20
"""Bytes read from a mapped file before its pages are given back."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk. `read` may return a view of the mapped file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Tensors(dict[str, LazyTensor]):
    """Tensors by name."""

    wrapper: str | None = None
    """The key that the state dict stood under in its file, None where there was none."""


def lazy(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors in memory in the form that files have."""
    return Tensors(
        {n: LazyTensor(tuple(t.shape), t.dtype, partial(_given, t)) for n, t in tensors.items()}
    )


def _given(tensor: Tensor) -> Tensor:
    return tensor


class Mapped:
    """A mapped file, opened anew now and then: the pages of what was copied out are then free.

    `opened` maps the file and gives what reads a tensor of it by name; `every` is after how many
    bytes that is done again.
    """

    def __init__(self, opened: Callable[[], Callable[[str], Tensor]], every: int) -> None:
        self.opened = opened
        self.every = every
        self.bytes_read = 0
        self.reader: Callable[[str], Tensor] | None = None

    def read(self, name: str) -> Tensor:
        if self.bytes_read > self.every:
            self.reader, self.bytes_read = None, 0
        self.reader = self.reader or self.opened()
        tensor = self.reader(name)
        self.bytes_read += tensor.nbytes
        return tensor


AGAIN = "download or copy it again"


def damaged(path: Path, kind: str, error: Exception) -> VitcliError:
    """What reading `path` as `kind` ended with, in one line: the first sentence of `error`."""
    told = "" if isinstance(error, LookupError) else str(error).strip()  # a key says nothing
    sentence = told.splitlines()[0].split(". ")[0].rstrip(".") if told else ""
    reason = f" ({textwrap.shorten(sentence, 120)})" if sentence else ""
    return VitcliError(f"{path}: truncated or not {kind}{reason}", AGAIN)
