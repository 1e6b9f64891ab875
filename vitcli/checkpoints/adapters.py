"""Low-rank adapters (LoRA, Hu et al. 2022): on single heads of a run, and in PEFT's files.

D hidden, d channels of a head, r rank, K adapted (part, head) pairs of a layer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from vitcli.checkpoints.readers import read_tensors
from vitcli.checkpoints.tensors import AGAIN, LazyTensor, Tensors
from vitcli.checkpoints.tower import LANGUAGE, Tower, spell
from vitcli.config.yaml import read_json
from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.nn.attention import MultiHeadSelfAttention, Part
from vitcli.nn.encoder import VisionEncoder

PARTS = {"q": 0, "k": 1, "v": 2}
"""The thirds of the fused projection."""


class HeadAdapter(Part):
    """base(x), plus scale * B A x on the rows of the adapted heads; other rows are not touched.

    For each part (q, k, v) and head an A (r, D), drawn, and a B (d, r), zero at first: r D + d r
    parameters. The base's own parameters stay as they are.

    Args:
        base: the fused projection D -> 3D.
        heads: which of the H heads, from 0.
        parts: which of q, k and v.
        scale: alpha / r in the paper.
    """

    matrices = ("down", "up")
    rows: Tensor

    def __init__(
        self,
        base: nn.Module,
        hidden: int,
        head_dim: int,
        heads: Sequence[int],
        parts: Sequence[str],
        rank: int,
        scale: float,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        pairs = [(PARTS[part], head) for head in heads for part in parts]
        starts = torch.tensor([third * hidden + head * head_dim for third, head in pairs])
        rows = (starts[:, None] + torch.arange(head_dim)).flatten()  # (K d)
        self.register_buffer("rows", rows, persistent=False)
        bound = math.sqrt(3 / hidden)  # uniform of variance 1/D, so A x is of x's size
        down = torch.empty(len(pairs), rank, hidden).uniform_(-bound, bound, generator=generator)
        self.down = nn.Parameter(down)  # A, (K, r, D)
        self.up = nn.Parameter(torch.zeros(len(pairs), head_dim, rank))  # B, (K, d, r)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, 3D)."""
        low = torch.einsum("bnc,krc->bnkr", x, self.down)
        delta = torch.einsum("bnkr,kdr->bnkd", low, self.up).flatten(-2)  # (B, N, K d)
        y: Tensor = self.base(x)
        return y.index_add(-1, self.rows, (self.scale * delta).to(y.dtype))

    def merged_weight(self) -> Tensor:
        """(3D, D): the base's weight with the adapters added in."""
        delta = low_rank_rows(self.down, self.up, self.scale)
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight.index_add(0, self.rows, delta.to(weight.dtype))


def adapters(encoder: nn.Module) -> Iterator[tuple[str, HeadAdapter]]:
    """Every adapter with its name."""
    for name, module in encoder.named_modules():
        if isinstance(module, HeadAdapter):
            yield name, module


def adapt_heads(
    encoder: VisionEncoder,
    places: Sequence[tuple[int, int]],
    parts: Sequence[str] = ("q", "k", "v"),
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
) -> None:
    """Freeze the encoder and put adapters on heads given as (layer, head), both from 0.

    Raises:
        ValueError: no such layer or head; a norm over the full width of q or k, which would carry
            the change of one head to all.
    """
    generator = torch.Generator().manual_seed(seed)
    encoder.requires_grad_(False)
    attentions = [m for m in encoder.vit.modules() if isinstance(m, MultiHeadSelfAttention)]
    for layer in sorted({layer for layer, _ in places}):
        if layer >= len(attentions):
            raise ValueError(f"there is no block {layer + 1}: they are 1 to {len(attentions)}")
        attention = attentions[layer]
        heads = sorted(head for at, head in places if at == layer)
        if heads[-1] >= attention.heads:
            raise ValueError(f"there is no head {heads[-1] + 1}: they are 1 to {attention.heads}")
        if set(parts) & {"q", "k"} and isinstance(attention.q_norm, nn.LayerNorm | nn.RMSNorm):
            raise ValueError("q and k are normalized over all heads together; adapt v alone")
        hidden = attention.proj.in_features
        attention.qkv = HeadAdapter(
            attention.qkv,
            hidden,
            hidden // attention.heads,
            heads,
            parts,
            rank,
            alpha / rank,
            generator,
        ).to(attention.proj.weight)


def adapter_state(encoder: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, to be saved; their shapes name the rank, their keys the layers."""
    return {
        f"{name}.{key}": tensor
        for name, adapter in adapters(encoder)
        for key, tensor in (
            ("down", adapter.down),
            ("up", adapter.up),
            ("rows", adapter.rows),
            ("scale", torch.tensor(adapter.scale)),
        )
    }


@torch.no_grad()
def add_adapter_state(encoder: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Add saved adapters into the plain projections of an encoder, for example their base's.

    Raises:
        ValueError: not adapters; no such layer here; one of another width.
    """
    for name in sorted({key.rpartition(".")[0] for key in state}):
        try:
            down, up, rows, scale = (state[f"{name}.{k}"] for k in ("down", "up", "rows", "scale"))
        except KeyError as error:
            raise ValueError(f"not an adapter: no tensor {error.args[0]}") from error
        try:
            weight = encoder.get_submodule(name).weight
        except AttributeError as error:
            raise ValueError(f"the encoder has no {name}") from error
        if not isinstance(weight, Tensor) or down.ndim != 3 or down.shape[-1] != weight.shape[1]:
            raise ValueError(f"{name}: an adapter of {tuple(down.shape)} for another width")
        if rows.shape != (up.shape[0] * up.shape[1],) or rows.max() >= weight.shape[0]:
            raise ValueError(f"{name}: an adapter for other rows than the encoder has")
        change = low_rank_rows(down, up, float(scale)).to(weight)
        weight.index_add_(0, rows.to(weight.device), change)


def low_rank_rows(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """scale * B A of each adapted (part, head): (K, r, D), (K, d, r) -> (K d, D)."""
    return scale * torch.einsum("kdr,krc->kdc", up, down).flatten(0, 1)


def merged_state(encoder: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain encoder, with the adapters added into its weights."""
    state = {
        name: tensor
        for name, tensor in encoder.state_dict().items()
        if not name.endswith((".down", ".up"))
    }
    for name, adapter in adapters(encoder):
        for key in [key for key in state if key.startswith(f"{name}.base.")]:
            state[name + key[len(name) + 5 :]] = state.pop(key)
        state[f"{name}.weight"] = adapter.merged_weight()
    return state


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
    changed, used = copy(tensors), 0
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
