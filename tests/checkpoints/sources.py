"""A tiny Hugging Face ViT on disk, and ways to spoil it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.parity.compare import randomized
from tests.checkpoints.parity.hf import SMALL

BLOCK0 = "encoder.layer.0."


def vit_folder(folder: Path, **config: object) -> Path:
    model = randomized(T.ViTModel(T.ViTConfig(**(SMALL | config)))).float()
    model.save_pretrained(folder)
    return folder


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """The same snapshot with its tensors changed."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def reconfigured(folder: Path, **changes: object) -> Path:
    """The same snapshot with keys of config.json changed; None takes a key away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


SQUASH = (
    "preprocess.resize=squash",
    "preprocess.resize_size=32",
    "preprocess.filter=bicubic",
    "preprocess.resize_dtype=uint8",
    "preprocess.crop_size=null",
    "preprocess.mean=[0.1,0.2,0.3]",
    "preprocess.std=[0.5,0.5,0.5]",
)
"""Every setting that decides the pixels, as `--set` takes them."""


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


PUBLISHED = Path(__file__).parents[3] / "shared" / "published"
"""Configs as they are published, beside the project; tests of them are skipped elsewhere."""


def sparse(folder: Path, model: torch.nn.Module | Mapping[str, Tensor], prefix: str = "") -> Path:
    """A file with the names and shapes of a model (on the meta device) and a hole for values."""
    header: dict[str, object] = {}
    end = 0
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    for name, tensor in state.items():
        begin, end = end, end + 4 * tensor.numel()
        shape = list(tensor.shape)
        header[prefix + name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


WORDS = (
    ("gelu", "quick_gelu", "gelu_pytorch_tanh", "silu", "relu"),
    ("layer_norm", "rms_norm"),
    ("layernorm", "rmsnorm"),
    ("token", "avg", "map", ""),
    ("learn", "none"),
    ("cat", "dinov3", "mixed"),
    ("ij", "xy"),
)


def changed(value: Any) -> Iterator[Any]:
    """Values of the same kind, large enough to be seen in the outputs."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, value + 1)
    elif isinstance(value, float):
        yield value * 3 + 0.02
    elif isinstance(value, str):
        yield from (word for words in WORDS if value in words for word in words if word != value)
    elif isinstance(value, list | tuple) and value:
        yield from ([item + 1 if isinstance(item, int) else item for item in value], value[:-1])
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in changed(inner))
    elif value is None:
        yield from (True, 2, [0])
