"""Tensors in a file, by name: shapes at once, values when asked for. No code of the file is run."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitcli.errors import VitcliError
from vitcli.weights.torchscript import is_torchscript, read_torchscript

WRAPPERS = ("model", "state_dict", "model_state_dict", "encoder", "module", "teacher")
"""Keys under which training code stores the state dict; the first that holds tensors is read."""
WRAPPED_NAMES = ("module.", "_orig_mod.")
"""What data-parallel training and torch.compile put before every name."""
RELEASE_EVERY = 32 << 20
"""Bytes read from a mapped file before its pages are given back."""

DAMAGED = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError),
    *(IndexError, StopIteration, zipfile.BadZipFile),
)
"""What unpickling a file that was cut or changed may raise."""

_SAFETENSORS_DTYPES = {
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
    """The key of WRAPPERS that they stood under in their file."""


def lazy(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors in memory in the form that files have."""
    return Tensors(
        {n: LazyTensor(tuple(t.shape), t.dtype, partial(_given, t)) for n, t in tensors.items()}
    )


def _given(tensor: Tensor) -> Tensor:
    return tensor


def read_tensors(path: Path) -> Tensors:
    """The tensors of one file, by the kind its suffix names.

    Raises:
        VitcliError: unreadable, truncated, of an unknown kind, or in need of code to be read.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise VitcliError(
            f"{path}: not a kind of checkpoint that is read", "one of " + ", ".join(READERS)
        )
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise VitcliError(f"cannot read {path}: {error.strerror}", "check the path") from error
    tensors = reader(path)
    if not tensors:
        raise VitcliError(f"{path}: holds no tensors", "is it a checkpoint?")
    return tensors


class _Mapped:
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


def read_safetensors(path: Path) -> Tensors:
    mapped = _Mapped(lambda: safe_open(path, framework="pt").get_tensor, RELEASE_EVERY)
    try:
        opened: AbstractContextManager[Any] = safe_open(path, framework="pt")
        with opened as file:
            found = Tensors()
            for name in file.keys():  # noqa: SIM118 (the handle is not a mapping)
                header = file.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(header.get_dtype())
                if dtype is None:
                    raise VitcliError(
                        f"{path}: {name} is stored as {header.get_dtype()}",
                        "convert it to float32, bfloat16 or float16 first",
                    )
                shape = tuple(header.get_shape())
                found[name] = LazyTensor(shape, dtype, partial(mapped.read, name))
            return found
    except (SafetensorError, OSError) as error:
        raise VitcliError(
            f"{path}: truncated or not a safetensors file ({_first_line(error)})",
            "download or copy it again",
        ) from error


def read_torch(path: Path) -> Tensors:
    """A pickle of tensors, read without running what else it may hold."""
    try:
        if is_torchscript(path):
            return Tensors({n: LazyTensor(*found) for n, found in read_torchscript(path).items()})
        content = _load(path)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)|global ([\w.]+)", str(error))
        name = next((group for group in wanted.groups() if group), "") if wanted else ""
        if not name:
            raise VitcliError(
                f"{path}: not a checkpoint of tensors ({_first_line(error)})",
                "download or copy it again",
            ) from error
        raise VitcliError(
            f"{path} asks for {name} to be read: only tensors and plain values are",
            "where you trust it, save its state_dict() alone with torch.save",
        ) from error
    except DAMAGED as error:
        raise VitcliError(
            f"{path}: truncated or not a PyTorch checkpoint ({_first_line(error)})",
            "download or copy it again",
        ) from error
    tensors, wrapper = _state_dict(content, path)
    found = lazy(tensors)
    if _is_zip(path):  # what is mapped can be let go and mapped again
        every = max(RELEASE_EVERY // 2, path.stat().st_size // 6)  # opening one takes longer
        mapped = _Mapped(lambda: _state_dict(_load(path), path)[0].__getitem__, every)
        found = Tensors(
            {n: LazyTensor(t.shape, t.dtype, partial(mapped.read, n)) for n, t in found.items()}
        )
    found.wrapper = wrapper
    return found


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))


def _state_dict(content: Any, path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The state dict out of the wrappers that training code puts around it, and the last one."""
    wrapper: str | None = None
    while isinstance(content, dict):
        tensors = {k: v for k, v in content.items() if isinstance(v, Tensor) and isinstance(k, str)}
        key = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), None)
        inner = content[key] if key else None
        if tensors and not (inner and len(tensors) < len(inner)):
            for prefix in WRAPPED_NAMES:
                if all(name.startswith(prefix) for name in tensors):
                    tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
            return tensors, wrapper
        if inner is None:
            break
        content, wrapper = inner, key
    keys = (
        ", ".join(map(str, content))[:80] if isinstance(content, dict) else type(content).__name__
    )
    raise VitcliError(
        f"{path}: no state dict inside (found {keys or 'nothing'})",
        "known wrappers: " + ", ".join(WRAPPERS),
    )


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


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
        raise VitcliError(
            f"{path}: truncated or not a NumPy archive ({_first_line(error)})",
            "download or copy it again",
        ) from error


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


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:120]


READERS: dict[str, Callable[[Path], Tensors]] = {
    ".safetensors": read_safetensors,
    ".bin": read_torch,
    ".pt": read_torch,
    ".pth": read_torch,
    ".npz": read_npz,
}
