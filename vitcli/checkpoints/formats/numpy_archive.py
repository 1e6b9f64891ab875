"""NumPy's archive of arrays, as flax parameters are published."""

from __future__ import annotations

import re
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitcli.checkpoints.tensors import LazyTensor, Tensors, damaged
from vitcli.errors import VitcliError


def read_npz(path: Path) -> Tensors:
    """Arrays in NumPy's archive, pickled objects refused.

    Blocks that flax scanned over stand in one array, depth first; they are seen one by one.
    """
    try:
        found = Tensors()
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                with archive.open(member) as file:
                    shape, _, dtype = _array_header(file)
                if dtype.hasobject:
                    raise VitcliError(
                        f"{path}: {member.filename} holds Python objects",
                        "only arrays of numbers are read",
                    )
                key = member.filename.removesuffix(".npy")
                kind = _as_torch(np.empty(0, dtype)).dtype
                read = partial(_npz_member, path, key)
                if stack := _STACKED.fullmatch(key):
                    for i in range(shape[0]):
                        one = LazyTensor(shape[1:], kind, partial(_npz_slice, path, key, i))
                        found[f"{stack[1]}encoderblock_{i}/{stack[2]}"] = one
                else:
                    found[key] = LazyTensor(shape, kind, read)
        return found
    except (zipfile.BadZipFile, OSError, ValueError, TypeError) as error:
        raise damaged(path, "a NumPy archive", error) from error


_STACKED = re.compile(r"(.*Transformer/)encoderblock/(.*)")


def _array_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, column-major, dtype), leaving the file where the values begin."""
    if np.lib.format.read_magic(file) == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _as_torch(array: np.ndarray[Any, Any]) -> Tensor:
    """NumPy has no bfloat16: JAX writes it as two raw bytes."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _npz_array(path: Path, key: str) -> np.ndarray[Any, Any]:
    """One array, mapped where the archive does not compress it."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(key + ".npy")
    if member.compress_type == zipfile.ZIP_STORED:
        with path.open("rb") as file:
            file.seek(member.header_offset + 26)  # lengths of the local name and extra field
            name, extra = struct.unpack("<HH", file.read(4))
            file.seek(name + extra, 1)
            shape, column_major, dtype = _array_header(file)
            if shape and 0 not in shape:
                order: Literal["F", "C"] = "F" if column_major else "C"
                return np.memmap(path, dtype, "c", file.tell(), shape, order)
    with np.load(path, allow_pickle=False) as archive:
        array: np.ndarray[Any, Any] = archive[key]
        return array


def _npz_member(path: Path, key: str) -> Tensor:
    return _as_torch(_npz_array(path, key))


def _npz_slice(path: Path, key: str, index: int) -> Tensor:
    return _as_torch(_npz_array(path, key)[index])
