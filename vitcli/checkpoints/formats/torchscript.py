"""The tensors of a TorchScript archive (OpenAI's CLIP files), without running the program in it.

The archive is a zip of the program's code, which is not looked at, and a pickle of its objects.
Here each object becomes a plain bag of attributes; anything but tensors and lists is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Found = tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]
"""A tensor's shape, its dtype, and what reads its values."""


class _Bag:
    """An object of the program: its attributes, and none of its methods."""

    def __init__(self, *_: object) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _view(storage: Any, offset: int, shape: Any, stride: Any, *_: object) -> _View:
    return _View(storage, int(offset), tuple(shape), tuple(stride))


def _first(value: Any, *_: object) -> Any:
    return value


_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch.jit._pickle", "restore_type_tag"): _first,
    ("torch.jit._pickle", "build_intlist"): _first,
    ("torch.jit._pickle", "build_tensorlist"): _first,
    ("torch.jit._pickle", "build_doublelist"): _first,
    ("torch.jit._pickle", "build_boollist"): _first,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return type(name, (_Bag,), {})
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"an object of kind {kind}")
        return _Storage(str(key), dtype)


def is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def read_torchscript(path: Path) -> dict[str, Found]:
    """Parameters and buffers by the names that the program's state_dict() gives them.

    Raises:
        pickle.UnpicklingError: an object that is neither of the program nor a tensor.
        OSError, zipfile.BadZipFile, ValueError, KeyError, EOFError: a damaged file.
    """
    with zipfile.ZipFile(path) as archive:
        data = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(data) as file:
            program = _Unpickler(file).load()
    folder = data.removesuffix("data.pkl")
    return {
        name: (view.shape, view.storage.dtype, partial(_read, path, folder, view))
        for name, view in _walk(program, "")
    }


def _walk(bag: object, prefix: str) -> Iterator[tuple[str, _View]]:
    if isinstance(bag, _Bag):
        for name, value in bag.attributes.items():
            if isinstance(value, _View):
                yield prefix + name, value
            else:
                yield from _walk(value, f"{prefix}{name}.")


def _read(path: Path, folder: str, view: _View) -> Tensor:
    with zipfile.ZipFile(path) as archive:
        values = bytearray(archive.read(f"{folder}data/{view.storage.key}"))
    flat = torch.frombuffer(values, dtype=view.storage.dtype)
    return flat.as_strided(view.shape, view.stride, view.offset)
