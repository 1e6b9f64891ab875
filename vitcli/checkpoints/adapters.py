"""Low-rank adapters in PEFT's files: added to the tensors of a checkpoint, and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from vitcli.checkpoints.detect import LANGUAGE, Tower, spell
from vitcli.checkpoints.readers import read_tensors
from vitcli.checkpoints.tensors import AGAIN, LazyTensor, Tensors
from vitcli.config.yaml import read_json
from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.nn.adapters import adapters

ROOT = "base_model.model."
"""What PEFT puts before the names of the model that it adapts."""
_KEY = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
FILES = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class LowRank:
    """W becomes W + scale * B A: A (r, in), B (out, r)."""

    down: LazyTensor
    up: LazyTensor
    scale: float

    def added_to(self, weight: Tensor) -> Tensor:
        down, up = (t.read().to(weight) for t in (self.down, self.up))
        return weight + self.scale * (up @ down)


def read_peft(path: str) -> dict[str, LowRank] | None:
    """PEFT's adapters by the module they adapt, as the adapted model names it.

    None where the file is not PEFT's. A folder is read as PEFT writes one.

    Raises:
        VitcliError: what PEFT does besides plain LoRA on linear maps, or a damaged file.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = next((file / name for name in FILES if (file / name).is_file()), file / FILES[0])
    if not file.is_file() or file.suffix not in (".safetensors", ".bin"):
        return None
    tensors = read_tensors(file)
    if not all(name.startswith(ROOT) for name in tensors):
        return None
    config = read_json(file.parent / CONFIG, dict[str, Any], AGAIN)
    _require_plain(config, file)
    pairs: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        found = _KEY.fullmatch(name.removeprefix(ROOT))
        if found is None or len(tensor.shape) != 2:
            raise VitcliError(
                f"--adapter {path}: {name} is not one half of a LoRA on a linear map",
                "merge it in PEFT with merge_and_unload(), and give the merged checkpoint",
            )
        pairs.setdefault(found[1], {})[found[2]] = tensor
    found_adapters = {}
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise VitcliError(f"--adapter {path}: {module}: lora_A and lora_B do not fit")
        scale = _scale(config, module, pair["A"].shape[0])
        found_adapters[module] = LowRank(pair["A"], pair["B"], scale)
    return found_adapters


def _require_plain(config: Mapping[str, Any], file: Path) -> None:
    for key, plain in (
        ("peft_type", ("LORA",)),
        ("bias", ("none", None)),
        ("use_dora", (False, None)),
        ("fan_in_fan_out", (False, None)),
        ("modules_to_save", (None, [])),
        ("lora_bias", (False, None)),
    ):
        if config.get(key) not in plain:
            raise VitcliError(
                f"{file.parent / CONFIG}: {key} = {config.get(key)!r} is not supported",
                "merge it in PEFT with merge_and_unload(), and give the merged checkpoint",
            )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) of rank-stabilized LoRA; patterns choose alpha by module."""
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def adapted(
    tensors: Tensors, tower: Tower, spelled: Mapping[str, str], adapters: Mapping[str, LowRank]
) -> Tensors:
    """The checkpoint's tensors, those that are adapted with the adapters added when read.

    Adapters of a language model beside the tower change nothing of it: they are counted.

    Raises:
        VitcliError: an adapter for a tensor that the tower lacks, or of another shape; none for it.
    """
    changed = Tensors(tensors)
    changed.wrapper, changed.copied = tensors.wrapper, tensors.copied
    changed.missing = tensors.missing
    used = 0
    for module, adapter in adapters.items():
        name = _adapted_name(module, tower, spelled)
        base = tensors[name] if name else None
        if base is None and set(module.split(".")) & set(LANGUAGE):
            continue
        if base is None or base.shape != (adapter.up.shape[0], adapter.down.shape[1]):
            shape = "none" if base is None else "x".join(map(str, base.shape))
            raise VitcliError(
                f"the adapter changes {module}.weight, {adapter.up.shape[0]}x"
                f"{adapter.down.shape[1]}; the tower's is {shape}",
                "--weights with the checkpoint that the adapter was trained on",
            )

        def read(base: LazyTensor = base, adapter: LowRank = adapter) -> Tensor:
            return adapter.added_to(base.read())

        changed[name or ""] = replace(base, read=read)
        used += 1
    if not used:
        raise VitcliError(
            f"{len(adapters)} adapters are of a language model, none of the vision tower",
            "leave out --adapter: the tower is as it was",
        )
    if used < len(adapters):
        changed.adapted = f"{len(adapters) - used} adapters of the language model, not read"
    return changed


def _adapted_name(module: str, tower: Tower, spelled: Mapping[str, str]) -> str | None:
    # In memory transformers 5 has a `model.` that its files do not have.
    for inner in ("", *tower.family.prefixes, "model."):
        name = f"{module}.weight".removeprefix(inner)
        for full in (name, tower.prefix + name):
            short = spell(full, tower.prefix, tower.outer, tower.family)
            if short in spelled:
                return spelled[short]
    return None


def are_of_encoder(adapters: Mapping[str, LowRank]) -> bool:
    """Whether the adapters name modules of vitcli's encoder, not of the checkpoint's library."""
    return all(module.startswith("vit.blocks.") for module in adapters)


def add_to_encoder(encoder: nn.Module, adapters: Mapping[str, LowRank]) -> None:
    """Add adapters into the weights of the modules that they name.

    Raises:
        ValueError: an adapter of another shape.
    """
    for module, adapter in adapters.items():
        weight = encoder.get_submodule(module).weight
        if not isinstance(weight, Tensor) or weight.shape != (
            adapter.up.shape[0],
            adapter.down.shape[1],
        ):
            raise ValueError(f"{module}: an adapter of another width")
        weight.data.copy_(adapter.added_to(weight.data))


def write_peft(folder: Path, encoder: nn.Module) -> None:
    """The adapters of an encoder as PEFT's adapter_model.safetensors and adapter_config.json.

    The K adapted heads of a layer, each of rank r, are one LoRA of rank K r on the fused q, k, v
    projection, whose B is zero outside of their rows: the same change of the same weight.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, adapter in adapters(encoder):
        pairs, rank, width = adapter.down.shape  # K, r, D
        up = adapter.up.new_zeros(3 * width, pairs * rank)
        for k, rows in enumerate(adapter.rows.reshape(pairs, -1)):
            up[rows, k * rank : (k + 1) * rank] = adapter.up[k].detach()
        tensors[f"{ROOT}{name}.lora_A.weight"] = adapter.down.detach().flatten(0, 1).contiguous()
        tensors[f"{ROOT}{name}.lora_B.weight"] = up
        ranks[name], alphas[name] = pairs * rank, adapter.scale * pairs * rank
    if not tensors:
        return
    config = {
        "peft_type": "LORA",
        "r": max(ranks.values()),
        "lora_alpha": max(alphas.values()),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": list(ranks),
        "bias": "none",
        "inference_mode": True,
    }
    with atomic_write(folder / FILES[0]) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    with atomic_write(folder / CONFIG) as file:
        file.write(json.dumps(config, indent=2).encode())
