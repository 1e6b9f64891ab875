"""Tensors on disk, by name: shapes at once, values when asked for.

Safetensors and NumPy's archives are read here, what torch wrote in `pickles.py`. No reader runs
code that a file may hold.
"""

from __future__ import annotations

import json
import re
import struct
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitcli.errors import VitcliError

MOST_TIMES_LARGER = 20
"""How many times the size of an archive its members may be; weights hardly compress."""
SMALL = 64 << 20
"""Bytes that are unpacked whatever the ratio is."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk. `read` may return a view of the mapped file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    stored: str = ""
    """What it is stored as, where that is nothing that a parameter can be made from."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Tensors(dict[str, LazyTensor]):
    """Tensors by name."""

    wrapper: str | None = None
    """The key that the state dict was under in its file, None where there was none."""
    copied: str = ""
    """Which copy of the weights was read, where the file has an averaged one besides."""
    adapted: str = ""
    """What of some adapters was not read."""
    missing: Mapping[str, Path]
    """Names that an index lists in shards that are not here, to those shards."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.missing = {}

    def names(self) -> list[str]:
        return [*self, *self.missing]


def lazy(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors in memory in the form that files have."""
    return Tensors({name: _given(tensor) for name, tensor in tensors.items()})


def _given(tensor: Tensor) -> LazyTensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
        stored = str(tensor.layout if tensor.layout != torch.strided else tensor.dtype)
        return LazyTensor(tuple(tensor.shape), torch.uint8, lambda: tensor, stored[6:])
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError("a tensor that reaches beyond its storage")
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class Archive:
    """The members of a zip file, checked before a value of them is used.

    Raises:
        ValueError: members that overlap, reach beyond the file or unpack to many times its size.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind
        size = path.stat().st_size
        with zipfile.ZipFile(path) as file:
            self.members = {member.filename: member for member in file.infolist()}
        total = sum(member.file_size for member in self.members.values())
        if total > max(MOST_TIMES_LARGER * size, SMALL) or any(
            member.header_offset + member.compress_size > size for member in self.members.values()
        ):
            raise ValueError(f"{total} bytes unpacked from a file of {size}")
        self.verified: set[str] = set()
        self.unpacked: tuple[str, np.ndarray[Any, Any]] | None = None

    def has(self, name: str) -> bool:
        return name in self.members

    def size(self, name: str) -> int:
        """Bytes of a member, unpacked."""
        if name not in self.members:
            raise ValueError(f"{name} is missing")
        return self.members[name].file_size

    def content(self, name: str) -> bytes:
        """All of a small member, its checksum compared."""
        with zipfile.ZipFile(self.path) as file:
            return file.read(name)

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """A member's bytes, its checksum compared once; mapped where they are not compressed."""
        member = self.members[name]
        if member.compress_type == zipfile.ZIP_STORED:
            if name not in self.verified:
                with zipfile.ZipFile(self.path) as file, file.open(name) as content:
                    while content.read(1 << 20):  # the end of it compares the checksum
                        pass
                self.verified.add(name)
            if member.file_size == 0:
                return np.empty(0, np.uint8)
            begin = self._begin(member)
            return np.memmap(self.path, np.uint8, "c", begin, (member.file_size,))
        if self.unpacked is None or self.unpacked[0] != name:
            self.unpacked = None
            self.unpacked = name, np.frombuffer(bytearray(self.content(name)), np.uint8)
        return self.unpacked[1]

    def _begin(self, member: zipfile.ZipInfo) -> int:
        """Where a member's bytes are in the file, after its own name and extra field."""
        with self.path.open("rb") as file:
            file.seek(member.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
        return member.header_offset + 30 + int(name) + int(extra)


def guarded(path: Path, kind: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`read`, whatever goes wrong in it reported as damage of the file."""

    def safely() -> Tensor:
        try:
            return read()
        except (VitcliError, MemoryError):
            raise
        except Exception as error:  # the file may have been cut or changed since it was opened
            raise damaged(path, kind, error) from error

    return safely


AGAIN = "download or copy it again"


def damaged(path: Path, kind: str, error: Exception) -> VitcliError:
    """What reading `path` as `kind` ended with, in one line: the first sentence of `error`."""
    text = "" if isinstance(error, LookupError) else str(error).strip()  # a key says nothing
    sentence = text.splitlines()[0].split(". ")[0].rstrip(".") if text else ""
    reason = f" ({textwrap.shorten(sentence, 120)})" if sentence else ""
    return VitcliError(f"{path}: truncated or not {kind}{reason}", AGAIN)


TAKEN = {"state_dict_ema": "state_dict", "model_ema": "model"}
"""Keys of an averaged copy that timm takes, in its order, to those of the raw weights."""
AVERAGED = TAKEN | {"ema_state_dict": "state_dict", "ema": "model", "params_ema": "params"}
"""The same with those that are read only where they are asked for."""


def require_copy(path: Path, which: str | None, copy: str) -> None:
    """Raises VitcliError where the averaged copy is asked for and there is none."""
    if which == "ema" and not copy:
        raise VitcliError(
            f"{path}: no averaged copy of the weights ({' or '.join(AVERAGED)})", "--which raw"
        )


SAFETENSORS = "a safetensors file"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(path: Path, which: str | None = None) -> Tensors:
    """Each tensor maps its own bytes: a file may be larger than memory, and what is read is freed.

    The library checks the header, and maps the file for that without a claim on memory.
    """
    require_copy(path, which, "")
    try:
        opened: AbstractContextManager[Any] = safe_open(path, framework="np")
        with opened, path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
    except MemoryError as error:
        raise VitcliError(
            f"{path}: not enough address space to map it ({path.stat().st_size} bytes)",
            "ulimit -v unlimited",
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, SAFETENSORS, error) from error
    header.pop("__metadata__", None)
    found = Tensors()
    for name, about in sorted(header.items()):
        kind, shape, (begin, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        dtype = _DTYPES.get(kind, torch.uint8)
        values = partial(_mapped, path, 8 + size + begin, end - begin, dtype, shape)
        stored = "" if kind in _DTYPES else kind
        found[name] = LazyTensor(shape, dtype, guarded(path, SAFETENSORS, values), stored)
    return found


def _mapped(
    path: Path, begin: int, count: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.memmap(path, np.uint8, "c", begin, (count,))).view(dtype).view(shape)


NUMPY = "a NumPy archive"
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
        archive = Archive(path, NUMPY)
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
        raise damaged(path, NUMPY, error) from error


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
        read = guarded(archive.path, archive.kind, lambda: _as_torch(array()))
        return Tensors({key: LazyTensor(shape, kind, read, stored)})
    found = Tensors()
    for i in range(shape[0]):
        read = guarded(archive.path, archive.kind, partial(_slice, array, i))
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
