"""The kinds of file that tensors are read from. None runs the code that a file may hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vitcli.checkpoints.formats.numpy_archive import read_npz
from vitcli.checkpoints.formats.pytorch import read_torch, require_copy
from vitcli.checkpoints.tensors import (
    RELEASE_EVERY,
    LazyTensor,
    Mapped,
    Tensors,
    damaged,
    guarded,
)
from vitcli.errors import VitcliError

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


KIND = "a safetensors file"


def read_safetensors(path: Path, which: str | None = None) -> Tensors:
    require_copy(path, which, "")
    mapped = Mapped(lambda: safe_open(path, framework="pt").get_tensor, RELEASE_EVERY)
    try:
        opened: AbstractContextManager[Any] = safe_open(path, framework="pt")
        with opened as file:
            found = Tensors()
            for name in file.keys():  # noqa: SIM118 (the handle is not a mapping)
                header = file.get_slice(name)
                kind = header.get_dtype()
                stored = "" if kind in _DTYPES else kind
                read = guarded(path, KIND, partial(mapped.read, name))
                dtype, shape = _DTYPES.get(kind, torch.uint8), tuple(header.get_shape())
                found[name] = LazyTensor(shape, dtype, read, stored)
            return found
    except RuntimeError as error:  # torch could not map the file
        raise VitcliError(
            f"{path}: not enough address space to map it ({path.stat().st_size} bytes)",
            "ulimit -v unlimited, or a checkpoint in shards",
        ) from error
    except (SafetensorError, OSError) as error:
        raise damaged(path, KIND, error) from error


READERS: dict[str, Callable[[Path, str | None], Tensors]] = {
    ".safetensors": read_safetensors,
    ".bin": read_torch,
    ".pt": read_torch,
    ".pth": read_torch,
    ".npz": read_npz,
}


def read_tensors(path: Path, which: str | None = None) -> Tensors:
    """The tensors of one file, by the kind its suffix names; `which` as in `read_source`.

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
    tensors = reader(path, which)
    if not tensors:
        raise VitcliError(f"{path}: holds no tensors", "is it a checkpoint?")
    return tensors
