"""The kinds of file that tensors are read from. None runs the code that a file may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitcli.checkpoints.formats.numpy_archive import read_npz
from vitcli.checkpoints.formats.pytorch import read_torch
from vitcli.checkpoints.formats.safetensors_file import read_safetensors
from vitcli.checkpoints.tensors import Tensors
from vitcli.errors import VitcliError

READERS: dict[str, Callable[[Path], Tensors]] = {
    ".safetensors": read_safetensors,
    ".bin": read_torch,
    ".pt": read_torch,
    ".pth": read_torch,
    ".npz": read_npz,
}


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
