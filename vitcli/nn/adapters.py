"""Low-rank adapters on single heads inside a fused q, k, v projection (LoRA, Hu et al. 2022).

D hidden, d channels of a head, r rank, K adapted (part, head) pairs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

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
