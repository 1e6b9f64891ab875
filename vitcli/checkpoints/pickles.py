"""What torch.save and torch.jit.save wrote, read without running what else it may hold.

Archives (every file since PyTorch 1.6) are read here: the pickle says which tensor is which part of
which record, and a record's size and checksum are compared before a value of it is used.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitcli.checkpoints.tensors import (
    AGAIN,
    AVERAGED,
    TAKEN,
    Archive,
    LazyTensor,
    Tensors,
    damaged,
    guarded,
    lazy,
    require_copy,
)
from vitcli.errors import VitcliError

WRAPPERS = (
    *("model", "state_dict", "model_state_dict", "encoder", "module", "teacher", "student"),
    *("weights", "net", "params", "backbone"),
)
"""Keys under which training code stores the state dict; the first that holds tensors is read."""
KIND = "a PyTorch checkpoint"
UNSAFE = "where you trust it, save its state_dict() alone with torch.save"
MOST_NODES = 1_000_000
"""Objects that are looked at in one file; a real one has thousands."""
DEEPEST = 100
MOST_AXES = 64


class _Bag:
    """An object of a TorchScript program: its attributes, and none of its methods."""

    def __init__(self, *_: object) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    numel: int


class _View(NamedTuple):
    """A tensor as a pickle describes it; `stored` is what it is where it is not a dense one."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stored: str = ""


def _view(storage: Any, offset: int, shape: Any, stride: Any, *_: object) -> _View:
    if not isinstance(storage, _Storage) or len(shape) > MOST_AXES or len(stride) > MOST_AXES:
        raise ValueError("a tensor that is not one")
    return _View(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _typed(storage: Any, offset: int, shape: Any, stride: Any, *more: object) -> _View:
    """A tensor whose dtype is given beside its storage of bytes."""
    dtype = next((m for m in more if isinstance(m, torch.dtype)), None)
    if dtype is None or not isinstance(storage, _Storage):
        raise ValueError("a tensor without a dtype")
    count = storage.numel * storage.dtype.itemsize // dtype.itemsize
    return _view(storage._replace(dtype=dtype, numel=count), offset, shape, stride)


def _strange(what: str) -> Callable[..., _View]:
    return lambda *_: _View(_Storage("", torch.uint8, 0), 0, (), (), what)


def _first(value: Any, *_: object) -> Any:
    return value


_DTYPES = {
    name: kind
    for name in dir(torch)
    if isinstance(kind := getattr(torch, name), torch.dtype | torch.qscheme)
}
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
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
        "QInt8": torch.qint8,
        "QUInt8": torch.quint8,
        "QInt32": torch.qint32,
    }.items()
}
_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_tensor_v3"): _typed,
    ("torch._utils", "_rebuild_sparse_tensor"): _strange("a sparse tensor"),
    ("torch._utils", "_rebuild_qtensor"): _strange("a quantized tensor"),
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda f, _, arguments, *__: f(*arguments),
    ("torch.jit._pickle", "restore_type_tag"): _first,
    ("torch.jit._pickle", "build_intlist"): _first,
    ("torch.jit._pickle", "build_tensorlist"): _first,
    ("torch.jit._pickle", "build_doublelist"): _first,
    ("torch.jit._pickle", "build_boollist"): _first,
    ("torch.serialization", "_get_layout"): _first,
    ("torch", "Size"): _first,
    ("torch", "device"): lambda *parts: parts,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch", "UntypedStorage"): torch.uint8,
    # What a call is given is handed on and never copied: a small file cannot grow by it.
    ("collections", "OrderedDict"): lambda *_: OrderedDict(),
    ("collections", "Counter"): _first,
    ("collections", "defaultdict"): lambda *_: {},
    # what training code adds: its arguments and numbers of NumPy
    ("argparse", "Namespace"): _Bag,
    ("numpy", "dtype"): _Bag,
    ("numpy.core.multiarray", "scalar"): _first,
    ("numpy._core.multiarray", "scalar"): _first,
    ("builtins", "set"): _first,
    ("builtins", "dict"): lambda *_: {},
    ("__builtin__", "set"): _first,
    ("_codecs", "encode"): _first,
}


class _Unpickler(pickle.Unpickler):
    """Tensors, plain values and objects without methods; everything else is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return _Bag
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *rest = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"an object of kind {kind}")
        return _Storage(str(key), dtype, int(rest[1]) if len(rest) > 1 else -1)


def read_torch(path: Path, which: str | None = None) -> Tensors:
    """The tensors of a .pt, .pth or .bin file; `which` as in `read_source`.

    Raises:
        VitcliError: damaged, without a state dict, or in need of code to be read.
    """
    try:
        if _is_zip(path):
            return _read_archive(path, which)
        with warnings.catch_warnings():  # of a protocol that it then refuses or reads
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            content = torch.load(path, map_location="cpu", weights_only=True)
        tensors, wrapper, copy = _state_dict(content, Tensor, path, which)
        found = lazy(tensors)
        found.wrapper, found.copied = wrapper, copy
        return found
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)|global ([\w.]+)", str(error))
        name = next((group for group in wanted.groups() if group), "") if wanted else ""
        if not name:
            raise VitcliError(
                f"{path}: damaged, or a pickle that torch.save did not write",
                f"{AGAIN}, or {UNSAFE}",
            ) from error
        raise VitcliError(
            f"{path} asks for {name} to be read: only tensors and plain values are", UNSAFE
        ) from error
    except VitcliError:
        raise
    except Exception as error:  # whatever unpickling a file that was cut or changed raises
        raise damaged(path, KIND, error) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _read_archive(path: Path, which: str | None) -> Tensors:
    archive = Archive(path, KIND)
    data = next((n for n in archive.members if n == "data.pkl" or n.endswith("/data.pkl")), None)
    if data is None:
        raise ValueError("an archive without data.pkl")
    folder = data.removesuffix("data.pkl")
    if archive.has(f"{folder}byteorder") and archive.content(f"{folder}byteorder") != b"little":
        raise ValueError("a big-endian machine wrote it")
    with zipfile.ZipFile(path) as file, file.open(data) as pickled:
        content = _Unpickler(pickled).load()
    wrapper, copy = None, ""
    if archive.has(f"{folder}constants.pkl"):
        views = dict(_walk(content))
    else:
        views, wrapper, copy = _state_dict(content, _View, path, which)
    found = Tensors({name: _lazy(archive, folder, view) for name, view in views.items()})
    found.wrapper, found.copied = wrapper, copy
    return found


def _lazy(archive: Archive, folder: str, view: _View) -> LazyTensor:
    """A tensor of a record, once it is sure that it lies within it."""
    storage, dtype = view.storage, view.storage.dtype
    if view.stored or dtype.is_complex or not _is_plain(dtype):
        stored = view.stored or str(dtype).removeprefix("torch.")
        return LazyTensor(view.shape, torch.uint8, partial(_never, stored), stored)
    record = f"{folder}data/{storage.key}"
    size = archive.size(record)
    count = storage.numel if storage.numel >= 0 else size // dtype.itemsize
    if size != count * dtype.itemsize:
        raise ValueError(f"{record} has {size} bytes, {count * dtype.itemsize} expected")
    numbers = (*view.shape, *view.stride, view.offset)
    if len(view.shape) != len(view.stride) or any(number < 0 for number in numbers):
        raise ValueError(f"a tensor of {record} of an impossible shape")
    elements = int(np.prod(view.shape, dtype=object))
    reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    if elements and (view.offset + reach >= count or elements > count):
        raise ValueError(f"a tensor that reaches beyond {record}")

    def read() -> Tensor:
        raw = archive.values(record)
        flat = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
        return flat.as_strided(view.shape, view.stride, view.offset)

    return LazyTensor(view.shape, dtype, guarded(archive.path, KIND, read))


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype not in (torch.qint8, torch.quint8, torch.qint32)


def _never(stored: str) -> Tensor:
    raise ValueError(stored)


def _walk(program: object) -> Iterator[tuple[str, _View]]:
    """Parameters and buffers of a TorchScript program, as its state_dict() names them."""
    seen = 0
    todo: list[tuple[str, object, int]] = [("", program, 0)]
    while todo:
        prefix, bag, depth = todo.pop()
        if not isinstance(bag, _Bag):
            continue
        seen += len(bag.attributes)
        if seen > MOST_NODES or depth > DEEPEST:
            raise ValueError("modules that contain themselves")
        inner = []
        for name, value in bag.attributes.items():
            if isinstance(value, _View):
                yield f"{prefix}{name}", value
            else:
                inner.append((f"{prefix}{name}.", value, depth + 1))
        todo += reversed(inner)


Kind = TypeVar("Kind")


def _holds_values(content: object, kind: type[Any]) -> bool:
    return isinstance(content, dict) and any(isinstance(v, (kind, dict)) for v in content.values())


def _state_dict(
    content: Any, kind: type[Kind], path: Path, which: str | None
) -> tuple[dict[str, Kind], str | None, str]:
    """(the state dict, the key it was under, which copy it is).

    Training code puts wrappers around a state dict, and an averaged copy beside it.
    """
    wrapper: str | None = None
    copy = ""
    for _ in range(DEEPEST):
        if not isinstance(content, dict):
            break
        average = next((k for k in AVERAGED if _holds_values(content.get(k), kind)), None)
        tensors = {k: v for k, v in content.items() if isinstance(v, kind) and isinstance(k, str)}
        key = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), None)
        inner = content[key] if key else None
        if average and which != "raw" and (which or average in TAKEN or not (inner or tensors)):
            copy = f"averaged weights ({average}); --which raw reads the others"
            content, wrapper = content[average], AVERAGED[average]
            continue
        if average:
            asked = "" if which else " (--which ema)"
            copy = f"raw weights; {average} has the average of them{asked}"
        if tensors and not (inner and len(tensors) < len(inner)):
            require_copy(path, which, copy)
            return tensors, wrapper, copy
        if inner is None:
            break
        content, wrapper = inner, key
    keys = (
        ", ".join(map(str, content))[:80] if isinstance(content, dict) else type(content).__name__
    )
    raise VitcliError(
        f"{path}: no state dict inside (found {keys or 'nothing'})",
        "known wrappers: " + ", ".join((*WRAPPERS, *AVERAGED)),
    )
