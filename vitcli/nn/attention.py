"""Multi-head self-attention, the ways to attend, the masks; what every part with weights says.

B batch, N tokens, D hidden, H heads, d = D / H channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Scheme = Callable[[Tensor, float, torch.Generator], object]


class Part(nn.Module):
    """A module that says how its own parameters start and which of them decay."""

    matrices: ClassVar[tuple[str, ...]] = ()
    """Parameters of linear maps: drawn by the config's scheme and decayed. All others are not."""

    def reset(self, std: float, generator: torch.Generator) -> None:
        """Fresh values of the parameters that are not matrices; zeros unless a class says more."""
        for name, parameter in self.named_parameters(recurse=False):
            if name not in self.matrices:
                parameter.zero_()


def trunc_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal of mean 0, drawn again where it falls outside [-2, 2].

    The distribution of `nn.init.trunc_normal_` at a quarter of its time: no inverse error function.
    """
    weight.normal_(std=std, generator=generator)
    while weight.numel() and max(abs(edge.item()) for edge in weight.aminmax()) > 2:
        outside = weight.abs() > 2
        weight[outside] = weight.new_empty(int(outside.sum())).normal_(std=std, generator=generator)


def xavier_uniform(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Glorot and Bengio 2010, equation 16; a convolution counts as the linear map of a patch."""
    nn.init.xavier_uniform_(weight.flatten(1), generator=generator)


SCHEMES: dict[str, Scheme] = {"trunc_normal": trunc_normal, "xavier_uniform": xavier_uniform}


@torch.no_grad()
def initialize(encoder: nn.Module, scheme: str, std: float, seed: int) -> None:
    """Draw every parameter of a CPU encoder in module order from one generator.

    Matrices follow `scheme` (a fused q, k, v projection is one matrix, as in
    `torch.nn.MultiheadAttention`); a Part resets the rest of its own. Of torch's layers biases
    are 0, norms 1 and 0.

    Raises:
        TypeError: a module with parameters of its own that is neither a Part nor a linear map,
            a convolution or a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = SCHEMES[scheme]
    for module in encoder.modules():
        for name in matrices(module):
            draw(module.get_parameter(name), std, generator)
        if isinstance(module, Part):
            module.reset(std, generator)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.ParameterDict | nn.ParameterList):
            continue  # the module that owns it has reset it
        elif list(module.parameters(recurse=False)):
            raise TypeError(f"{type(module).__name__}: not a Part, so nothing says its start")


def matrices(module: nn.Module) -> tuple[str, ...]:
    """The module's own parameters that are linear maps."""
    if isinstance(module, Part):
        return module.matrices
    return ("weight",) if isinstance(module, nn.Linear | nn.Conv2d) else ()


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay is for: matrices, and nothing else.

    So norms, biases, LayerScale, tokens, probes and position tables have none, and neither has a
    parameter that no class has called a matrix.
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in matrices(module)
    }


Grid = tuple[int, int]
"""Patches: rows, columns."""

Rotation = Callable[[Tensor], Tensor]
"""Turns queries or keys (B, H, N, d) by their positions."""


def identity(x: Tensor) -> Tensor:
    return x


def turn_half(x: Tensor) -> Tensor:
    """The partner of each channel where pairs are (i, i + d/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def turn_interleaved(x: Tensor) -> Tensor:
    """The partner of each channel where pairs are (2i, 2i + 1)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], dim=-1).flatten(-2)


ROPE_LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "half": (lambda half: torch.cat([half, half], dim=-1), turn_half),
    "interleaved": (lambda half: half.repeat_interleave(2, dim=-1), turn_interleaved),
}
"""How d/2 angles spread over d channels, and the partner each channel is turned with."""


def turned_by(
    angles: Tensor,
    prefix_tokens: int,
    spread: Callable[[Tensor], Tensor],
    turn: Callable[[Tensor], Tensor],
    like: Tensor,
) -> Rotation:
    """The rotation by angles (.., N, d/2), and none of the prefix tokens."""
    angles = spread(F.pad(angles, (0, 0, prefix_tokens, 0)))  # (.., P+N, d)
    cos, sin = (t.to(like.dtype).to(like.device) for t in (angles.cos(), angles.sin()))

    def rotate(x: Tensor) -> Tensor:
        return x * cos + turn(x) * sin

    return rotate


def join_masks(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Both masks in one: booleans (True attends) are intersected, additive ones are summed."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        return second.masked_fill(~first, float("-inf"))
    if second.dtype == torch.bool:
        return first.masked_fill(~second, float("-inf"))
    return first + second


class FusedAttention(nn.Module):
    """torch's scaled_dot_product_attention: the probabilities are never stored."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); mask (.., N, N), boolean or additive."""
        rate = self.dropout if self.training else 0.0
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)


class ExplicitAttention(nn.Module):
    """The same result by the formula softmax(q k^T / sqrt(d) + mask) v.

    A forward hook on `probabilities` sees the (B, H, N, N) rows of each call.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.probabilities = nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); mask (.., N, N), boolean or additive."""
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, N, N)
        if mask is not None:
            logits = (
                logits.masked_fill(~mask, float("-inf"))
                if mask.dtype == torch.bool
                else logits + mask.to(logits.dtype)
            )
        rows = self.probabilities(logits.softmax(dim=-1))
        out: Tensor = self.dropout(rows) @ v
        return out


ATTENDS: dict[str, type[FusedAttention] | type[ExplicitAttention]] = {
    "fused": FusedAttention,
    "explicit": ExplicitAttention,
}


class ChannelAttention(Part):
    """Softmax over channels in place of tokens: each head mixes its d channels, linear in N.

    Cross-covariance attention (El-Nouby et al. 2021, XCiT, equation 2), which Restormer's
    transposed attention is too: queries and keys of unit length over the tokens, a learned
    temperature per head. There are no (N, N) weights, so masks and positions do not act on it.
    """

    def __init__(self, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(heads, 1, 1))
        self.dropout = nn.Dropout(dropout)

    def reset(self, std: float, generator: torch.Generator) -> None:
        self.temperature.fill_(1.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); `mask` is None."""
        q, k = (F.normalize(t, dim=-2) for t in (q, k))  # over the tokens
        rows = (q.mT @ k * self.temperature).softmax(dim=-1)  # (B, H, d, d)
        out: Tensor = v @ self.dropout(rows).mT
        return out


class QueryValueBiasLinear(Part):
    """A fused q, k, v projection whose keys have no bias (DINOv3)."""

    matrices = ("weight",)

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.q_bias = nn.Parameter(torch.empty(hidden))
        self.v_bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return F.linear(x, self.weight, bias)


QKV_PROJECTIONS: dict[str, Callable[[int], nn.Module]] = {
    "qkv": lambda hidden: nn.Linear(hidden, 3 * hidden),
    "qv": QueryValueBiasLinear,
    "none": lambda hidden: nn.Linear(hidden, 3 * hidden, bias=False),
}


class MultiHeadSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over H heads (Vaswani et al. 2017, section 3.2).

    Args:
        qkv: projection D -> 3D; rows [0:D] are q, then k, then v, heads contiguous within each.
        q_norm, k_norm: applied to (B, N, D) before the head split.
        attend: FusedAttention or ExplicitAttention.
        norm: on what the heads give, (B, N, D), before the projection (EVA-02 of CLIP); None for
            none.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        qkv: nn.Module,
        attend: nn.Module,
        q_norm: nn.Module,
        k_norm: nn.Module,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        proj_bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = qkv
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.attend = attend
        self.norm = nn.Identity() if norm is None else norm
        self.proj = nn.Linear(hidden, hidden, bias=proj_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, rotate: Rotation = identity, attn_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D).

        `attn_mask` is (N, N) or broadcastable to (B, H, N, N): boolean (True attends) or additive.
        """
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # 3 x (B, N, D)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q_norm(q), self.k_norm(k), v)
        )  # 3 x (B, H, N, d)
        out = self.attend(rotate(q), rotate(k), v, attn_mask)  # (B, H, N, d)
        joined = self.norm(out.transpose(1, 2).flatten(-2))  # (B, N, D)
        y: Tensor = self.dropout(self.proj(joined))
        return y


class Mask:
    """Every token sees every token."""

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        """The mask (P+N, P+N) of each of `depth` blocks; True attends."""
        return [self.one(grid, prefix_tokens, device)] * depth

    def one(self, grid: Grid, prefix_tokens: int, device: torch.device) -> Tensor | None:
        """The mask of a block, where all have the same."""
        return None


class CausalMask(Mask):
    """Token i sees tokens 0 .. i, so that the blocks serve as decoder blocks."""

    def one(self, grid: Grid, prefix_tokens: int, device: torch.device) -> Tensor | None:
        tokens = prefix_tokens + grid[0] * grid[1]
        return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


class WindowMask(Mask):
    """Patches see their own square window, aligned to the top-left corner (Qwen2.5-VL).

    With a `shift`, windows of every second block (the 2nd, 4th, ...) begin `shift` patches further
    down and right, and those cut off at the top and left are windows of their own (Swin: Liu et
    al. 2021, figure 4, with its masks). Prefix tokens see and are seen by all; the blocks in
    `full_blocks`, from 0, are not masked.
    """

    def __init__(self, window: int, full_blocks: Collection[int], shift: int = 0) -> None:
        self.window = window
        self.full_blocks = frozenset(full_blocks)
        self.shift = shift

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        plain = self._moved(grid, prefix_tokens, 0, device)
        moved = self._moved(grid, prefix_tokens, self.shift, device) if self.shift else plain
        return [
            None if block in self.full_blocks else moved if block % 2 else plain
            for block in range(depth)
        ]

    def _moved(self, grid: Grid, prefix_tokens: int, shift: int, device: torch.device) -> Tensor:
        first = self.window - shift if shift else 0
        rows, columns = ((torch.arange(n, device=device) + first) // self.window for n in grid)
        across = grid[1] + 1  # windows along a row, at most
        ids = (rows[:, None] * across + columns[None]).flatten()  # (N,)
        return _for_patches(ids[:, None] == ids[None], prefix_tokens)


class NeighborhoodMask(Mask):
    """Each patch sees its k nearest patches, itself among them, by the distance of their centers.

    Of patches at the same distance those that come first row by row are taken. Prefix tokens see
    and are seen by all. Attention to the k nearest points is that of Point Transformer (Zhao et
    al. 2021), here on the grid of patches.
    """

    def __init__(self, neighbors: int) -> None:
        self.neighbors = neighbors

    def one(self, grid: Grid, prefix_tokens: int, device: torch.device) -> Tensor | None:
        squared = squared_distances(grid, device)
        patches = len(squared)
        order = squared * patches + torch.arange(patches, device=device)  # no two are equal
        nearest = order.topk(min(self.neighbors, patches), largest=False).indices  # (N, k)
        seen = torch.zeros_like(order, dtype=torch.bool).scatter_(1, nearest, True)
        return _for_patches(seen, prefix_tokens)


def squared_distances(grid: Grid, device: torch.device | str = "cpu") -> Tensor:
    """Between the centers of any two patches, in patches, as integers (N, N)."""
    centers = torch.cartesian_prod(*(torch.arange(n, device=device) for n in grid))  # (N, 2)
    return (centers[:, None] - centers[None]).square().sum(-1)


def _for_patches(seen: Tensor, prefix_tokens: int) -> Tensor:
    """A mask (N, N) among patches, with prefix tokens that see and are seen by all."""
    return F.pad(seen, (prefix_tokens, 0, prefix_tokens, 0), value=True)
