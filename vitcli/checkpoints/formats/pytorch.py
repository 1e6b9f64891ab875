"""What torch.save wrote: a pickle of tensors, read without running what else it may hold."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitcli.checkpoints.formats.damage import AGAIN, damaged
from vitcli.checkpoints.formats.torchscript import is_torchscript, read_torchscript
from vitcli.checkpoints.tensors import RELEASE_EVERY, LazyTensor, Mapped, Tensors, lazy
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
