"""Which vectors of an encoder a file can hold; numpy is imported only to write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitcli.config.schema import EncoderConfig, ModelConfig
from vitcli.errors import VitcliError
from vitcli.files import atomic_write

if TYPE_CHECKING:
    import numpy as np

TOKENS = ("cls", "dist", "register", "patch", "pooled", "output")
"""Kinds of vectors: prefix tokens, patches, the pooled vector, the head's output."""


def available_tokens(c: EncoderConfig) -> list[str]:
    """The kinds of TOKENS that this encoder has."""
    there = {
        "cls": c.cls_token,
        "dist": c.dist_token,
        "register": c.registers > 0,
        "patch": True,
        "pooled": c.pooling != "none",
        "output": c.head != "none",
    }
    return [kind for kind in TOKENS if there[kind]]


def check_tokens(config: ModelConfig, tokens: Sequence[str]) -> None:
    """Refuse kinds that the encoder has not."""
    available = available_tokens(config.encoder)
    for kind in tokens:
        if kind not in available:
            raise VitcliError(
                f"--tokens {kind}: {config.name} has none"
                if kind in TOKENS
                else f"--tokens {kind}: unknown kind",
                "this encoder has " + ",".join(available),
            )


VECTOR_SUFFIXES = (".npz", ".npy", ".safetensors")


def check_vector_file(path: Path, tokens: Sequence[str]) -> None:
    """Refuse a file that `write_vectors` could not write, before anything is computed."""
    if path.suffix not in VECTOR_SUFFIXES:
        raise VitcliError(f"--out {path}: unknown suffix", "one of " + ", ".join(VECTOR_SUFFIXES))
    if path.suffix == ".npy" and len(tokens) > 1:
        raise VitcliError(f"--out {path}: .npy holds one array", "name one kind in --tokens")
    if not path.parent.is_dir():
        raise VitcliError(f"--out {path}: there is no folder {path.parent}", "make it first")


def write_vectors(path: Path, vectors: dict[str, np.ndarray]) -> None:
    """Arrays by name as .npz or .safetensors, a single one as .npy."""
    import numpy as np
    import safetensors.numpy

    with atomic_write(path) as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(vectors.values())), allow_pickle=False)
        elif path.suffix == ".npz":
            np.savez(file, **vectors)  # type: ignore[arg-type]
        else:
            contiguous = {kind: np.ascontiguousarray(array) for kind, array in vectors.items()}
            file.write(safetensors.numpy.save(contiguous))
