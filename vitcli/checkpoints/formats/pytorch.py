"""What torch.save wrote: a pickle of tensors, read without running what else it may hold."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitcli.checkpoints.tensors import (
    AGAIN,
    RELEASE_EVERY,
    LazyTensor,
    Mapped,
    Tensors,
    damaged,
    lazy,
)
from vitcli.errors import VitcliError

WRAPPERS = ("model", "state_dict", "model_state_dict", "encoder", "module", "teacher")
"""Keys under which training code stores the state dict; the first that holds tensors is read."""
WRAPPED_NAMES = ("module.", "_orig_mod.")
"""What data-parallel training and torch.compile put before every name."""

DAMAGED = (
    *(RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError),
    *(IndexError, StopIteration, zipfile.BadZipFile),
)
"""What unpickling a file that was cut or changed may raise."""
SAVE_AGAIN = "where you trust it, save its state_dict() alone with torch.save"


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
                f"{path}: damaged, or a pickle that torch.save did not write",
                f"{AGAIN}, or {SAVE_AGAIN}",
            ) from error
        raise VitcliError(
            f"{path} asks for {name} to be read: only tensors and plain values are", SAVE_AGAIN
        ) from error
    except DAMAGED as error:
        raise damaged(path, "a PyTorch checkpoint", error) from error
    tensors, wrapper = _state_dict(content, path)
    found = lazy(tensors)
    if _is_zip(path):  # what is mapped can be let go and mapped again
        every = max(RELEASE_EVERY // 2, path.stat().st_size // 6)  # opening one takes longer
        mapped = Mapped(lambda: _state_dict(_load(path), path)[0].__getitem__, every)
        found = Tensors(
            {n: LazyTensor(t.shape, t.dtype, partial(mapped.read, n)) for n, t in found.items()}
        )
    found.wrapper = wrapper
    return found


def _load(path: Path) -> Any:
    with warnings.catch_warnings():  # of a protocol that it then refuses or reads
        warnings.filterwarnings("ignore", "Detected pickle protocol")
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
