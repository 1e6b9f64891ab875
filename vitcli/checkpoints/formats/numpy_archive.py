"""NumPy's archive of arrays, as flax parameters are published."""

from __future__ import annotations

import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitcli.checkpoints.formats.pytorch import require_copy
from vitcli.checkpoints.tensors import Archive, LazyTensor, Tensors, damaged
from vitcli.errors import VitcliError

KIND = "a NumPy archive"
_STACKED = re.compile(r"(.*Transformer/)encoderblock/(.*)")
Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
"""Shape, whether columns come first, and dtype."""


def read_npz(path: Path, which: str | None = None) -> Tensors:
    """Arrays in NumPy's archive, pickled objects refused.

    Blocks that flax scanned over are in one array, depth first; they are seen one by one.

    Raises:
        VitcliError: damaged, too large for its file, or objects in place of numbers.
    """
    require_copy(path, which, "")
    try:
        found = Tensors()
        archive = Archive(path, KIND)
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                if member.filename.endswith(".npy"):
                    with file.open(member) as content:
                        header = _header(content)
                        begin = content.tell()
                    found |= _arrays(archive, member, header, begin)
        return found
    except VitcliError:
        raise
    except Exception as error:  # whatever reading a file that was cut or changed raises
        raise damaged(path, KIND, error) from error


def _header(file: Any) -> Header:
    """What the array is, leaving the file where its values begin."""
    if np.lib.format.read_magic(file) == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _arrays(archive: Archive, member: zipfile.ZipInfo, header: Header, begin: int) -> Tensors:
    """One array by its name, or the blocks that it stacks."""
    shape, column_major, dtype = header
    key = member.filename.removesuffix(".npy")
    if dtype.hasobject:
        raise VitcliError(
            f"{archive.path}: {member.filename} holds Python objects",
            "save arrays of numbers alone",
        )
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if member.file_size - begin != expected:
        raise ValueError(f"{key} has {member.file_size - begin} bytes, {expected} expected")
    try:
        kind, stored = _as_torch(np.empty(0, dtype)).dtype, ""
    except TypeError:
        kind, stored = torch.uint8, str(dtype)
    if kind.is_complex:
        kind, stored = torch.uint8, str(dtype)

    def array() -> np.ndarray[Any, Any]:
        raw = archive.values(member.filename)[begin:]
        return np.ndarray(shape, dtype, raw, order="F" if column_major else "C")

    stack = _STACKED.fullmatch(key)
    if stack is None or not shape or 0 in shape:
        read = archive.guarded(lambda: _as_torch(array()))
        return Tensors({key: LazyTensor(shape, kind, read, stored)})
    found = Tensors()
    for i in range(shape[0]):
        read = archive.guarded(partial(_slice, array, i))
        name = f"{stack[1]}encoderblock_{i}/{stack[2]}"
        found[name] = LazyTensor(shape[1:], kind, read, stored)
    return found


def _slice(array: Any, index: int) -> Tensor:
    return _as_torch(array()[index])


def _as_torch(array: np.ndarray[Any, Any]) -> Tensor:
    """NumPy has no bfloat16: JAX writes it as two raw bytes."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
