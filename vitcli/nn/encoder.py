"""The whole encoder: front end, blocks, pooling, head; hooks that observe values inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitcli.errors import VitcliError
from vitcli.nn.attention import (
    ChannelAttention,
    ExplicitAttention,
    FusedAttention,
    Grid,
    Mask,
    MultiHeadSelfAttention,
    Part,
    Rotation,
    identity,
    join_masks,
    trunc_normal,
)
from vitcli.nn.pooling import MergerHead
from vitcli.nn.positions import NoPosition


class DropPath(nn.Module):
    """Drops a residual branch for whole samples while training (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """Pre-norm: x + scale(branch(norm(x))), attention first, then feed-forward."""

    def __init__(
        self,
        attention: MultiHeadSelfAttention,
        feed_forward: nn.Module,
        norm1: nn.Module,
        norm2: nn.Module,
        scale1: nn.Module,
        scale2: nn.Module,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.attention = attention
        self.scale1 = scale1
        self.norm2 = norm2
        self.feed_forward = feed_forward
        self.scale2 = scale2
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, rotate: Rotation = identity, attn_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self.drop_path(self.scale1(self.attention(self.norm1(x), rotate, attn_mask)))
        x = x + self.drop_path(self.scale2(self.feed_forward(self.norm2(x))))
        return x


class PostNormBlock(Block):
    """Post-norm, as in the original Transformer: norm(x + scale(branch(x)))."""

    def forward(
        self, x: Tensor, rotate: Rotation = identity, attn_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = self.norm1(x + self.drop_path(self.scale1(self.attention(x, rotate, attn_mask))))
        y: Tensor = self.norm2(x + self.drop_path(self.scale2(self.feed_forward(x))))
        return y


BLOCKS: dict[str, type[Block]] = {"pre": Block, "post": PostNormBlock}


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the approximation that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "silu": nn.SiLU,
}


class FeedForward(nn.Module):
    """fc2(norm(activation(fc1(x)))): (B, N, D) -> (B, N, M) -> (B, N, D).

    Args:
        norm: on the M channels before `fc2` (EVA-02; Shleifer et al. 2021, NormFormer); None for
            none, as nearly everywhere.
    """

    maps_in = 1

    def __init__(
        self,
        hidden: int,
        mlp_hidden: int,
        activation: nn.Module,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, self.maps_in * mlp_hidden, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.Identity() if norm is None else norm
        self.fc2 = nn.Linear(mlp_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.norm(self.dropout(self.activation(self.fc1(x)))))
        return y


class GatedFeedForward(FeedForward):
    """fc2(norm(activation(gate) * up)), with gate and up the halves of one projection.

    Shazeer 2020, "GLU Variants Improve Transformer"; the first half of `fc1` is the gate.
    """

    maps_in = 2

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)  # 2 x (B, N, M)
        y: Tensor = self.fc2(self.norm(self.dropout(self.activation(gate) * up)))
        return y


FEED_FORWARDS: dict[str, type[FeedForward]] = {"plain": FeedForward, "gated": GatedFeedForward}


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
}


class LayerScale(Part):
    """A learned factor per channel on a branch's output (Touvron et al. 2021, CaiT, section 2)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def reset(self, std: float, generator: torch.Generator) -> None:
        self.gamma.fill_(self.initial)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PerHeadNorm(nn.Module):
    """One norm over the channels of each head, applied before the head split."""

    def __init__(self, norm: nn.Module, heads: int) -> None:
        super().__init__()
        self.norm = norm
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (self.heads, -1))  # (B, N, H, d)
        normed: Tensor = self.norm(split)
        return normed.flatten(-2)  # (B, N, D)


class EncoderOutput(NamedTuple):
    """An encoder's outputs. The P prefix tokens come before the N patches in every token tensor."""

    tokens: Tensor
    """(B, P+N, D) after the final norm, where there is one."""
    tokens_before_norm: Tensor
    """(B, P+N, D) as the last block left them."""
    pooled: Tensor | None
    """(B, D), (B, 2D) for CLS + mean, None without pooling."""
    output: Tensor | None
    """The head's output, None without a head."""
    deepstack: Tensor | None = None
    """(B, K, N/4, width) of the K blocks with a merger of their own, in order; None without."""


class VisionEncoder(nn.Module):
    def __init__(
        self,
        front_end: VisionFrontEnd,
        vit: ViT,
        mask: Mask,
        pooling: nn.Module,
        pool_norm: nn.Module,
        head: nn.Module,
        deepstack: Mapping[int, MergerHead] | None = None,
    ) -> None:
        """`deepstack`: blocks, from 1 and in order, to the mergers of their outputs (Qwen3-VL)."""
        super().__init__()
        self.front_end = front_end
        self.vit = vit
        self.mask = mask
        self.pooling = pooling
        self.pool_norm = pool_norm
        self.head = head
        self.deepstack = nn.ModuleList((deepstack or {}).values())
        self.deepstack_blocks = tuple(deepstack or ())

    @property
    def prefix_tokens(self) -> int:
        return self.front_end.prefix_tokens

    @property
    def layer_points(self) -> list[tuple[str, nn.Module]]:
        """The input of the first block, every block, and the final norm where there is one."""
        blocks = [(f"block {i}", block) for i, block in enumerate(self.vit.blocks, start=1)]
        norm = self.vit.norm
        last = [] if isinstance(norm, nn.Identity) else [("norm", norm)]
        return [("input", self.front_end), *blocks, *last]

    def block_masks(
        self, grid: Grid, tokens: Tensor, attn_mask: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """The position biases, the config's mask and the caller's, joined, block by block.

        One block's at a time, so that biases of each block's own do not all exist at once.
        """
        prefix, depth = self.prefix_tokens, len(self.vit.blocks)
        common = join_masks(self.front_end.position.bias(grid, prefix, tokens), attn_mask)
        masks = self.mask(grid, prefix, depth, tokens.device)
        distinct = {id(mask): mask for mask in masks}
        joined = {key: join_masks(common, mask) for key, mask in distinct.items()}
        own = self.front_end.position.block_biases(grid, prefix, depth, tokens)
        for mask, bias in zip(masks, own, strict=True):
            yield join_masks(joined[id(mask)], bias)

    def forward(self, images: Tensor, attn_mask: Tensor | None = None) -> EncoderOutput:
        """(B, C, height, width) -> EncoderOutput; `attn_mask` as in MultiHeadSelfAttention."""
        grid, prefix = self.front_end.grid(images), self.prefix_tokens
        x = self.front_end(images)  # (B, P+N, D)
        depth = len(self.vit.blocks)
        rotate = self.front_end.position.rotations(grid, prefix, depth, x)
        kept: dict[int, Tensor] = dict.fromkeys((*self.deepstack_blocks, depth), x)
        tokens = self.vit(x, rotate, self.block_masks(grid, x, attn_mask), kept)
        first, patches = tokens.tensor_split([prefix], dim=1)  # (B, P, D), (B, N, D)
        pooled = self.pooling(first, patches)
        pooled = None if pooled is None else self.pool_norm(pooled)
        merged = [
            merger(None, first, kept[block][:, prefix:], grid)
            for block, merger in zip(self.deepstack_blocks, self.deepstack, strict=True)
        ]
        output = self.head(pooled, first, patches, grid)
        deepstack = torch.stack(merged, dim=1) if merged else None
        return EncoderOutput(tokens, kept[depth], pooled, output, deepstack)


class ViT(nn.Module):
    """Blocks one after another, then a norm (`nn.Identity` where there is none)."""

    def __init__(self, blocks: Sequence[Block], norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        rotate: Rotation | Iterable[Rotation] = identity,
        attn_mask: Tensor | Iterable[Tensor | None] | None = None,
        kept: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); `rotate`, `attn_mask`: one for all blocks or one per block.

        The outputs of the blocks, from 1, that are keys of `kept` are put there.
        """
        masks = (
            [attn_mask] * len(self.blocks)
            if isinstance(attn_mask, Tensor) or attn_mask is None
            else attn_mask
        )
        turns = [rotate] * len(self.blocks) if callable(rotate) else rotate
        each = zip(self.blocks, turns, masks, strict=True)
        for index, (block, turn, mask) in enumerate(each, start=1):
            x = cast(Block, block)(x, turn, mask)
            if kept and index in kept:
                kept[index] = x
        y: Tensor = self.norm(x)
        return y


class VisionFrontEnd(Part):
    """Patch projection, prefix tokens in order, additive positions, and CLIP's norm if any.

    Args:
        prefix: how many tokens of each kind, in token order, for example
            `{"cls": 1, "registers": 4}`.
        norm: applied to all tokens at the end (`nn.Identity` for every family but CLIP).
        patch_norm: on the projected patches, before positions are added (AIMv2, GLM-4V); None for
            none.
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        patch_size: int,
        prefix: Mapping[str, int],
        position: NoPosition,
        norm: nn.Module,
        patch_bias: bool = True,
        patch_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(channels, hidden, patch_size, patch_size, bias=patch_bias)
        self.patch_norm = nn.Identity() if patch_norm is None else patch_norm
        self.prefix = nn.ParameterDict(
            {kind: nn.Parameter(torch.empty(count, hidden)) for kind, count in prefix.items()}
        )
        self.prefix_tokens = sum(prefix.values())
        self.position = position
        self.norm = norm

    def reset(self, std: float, generator: torch.Generator) -> None:
        for tokens in self.prefix.values():
            trunc_normal(tokens, std, generator)

    def grid(self, images: Tensor) -> Grid:
        """(rows, columns) of whole patches; trailing pixels are dropped."""
        height, width = images.shape[-2:]
        return height // self.patch_size, width // self.patch_size

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, P+N, D), patches row by row after the prefix tokens."""
        patches = self.patch_norm(self.projection(images).flatten(2).transpose(1, 2))  # (B, N, D)
        rows = [*self.prefix.values(), patches.new_empty(0, patches.shape[-1])]
        prefix = torch.cat(rows).expand(patches.shape[0], -1, -1)  # (B, P, D)
        prefix, patches = self.position.add(prefix, patches, self.grid(images))
        tokens: Tensor = self.norm(torch.cat([prefix, patches], dim=1))  # (B, P+N, D)
        return tokens


Observer = Callable[[Tensor], None]


@contextmanager
def hooked(points: Iterable[tuple[nn.Module, Observer]]) -> Iterator[None]:
    """Call each observer with each output of its module; keep only what the observer keeps."""
    with ExitStack() as stack:
        for module, observe in points:

            def hook(_: nn.Module, __: Any, output: Tensor, observe: Observer = observe) -> None:
                observe(output.detach())

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def layer_points(encoder: VisionEncoder) -> list[tuple[str, nn.Module]]:
    """The input of the first block, every block, and the final norm where there is one."""
    return encoder.layer_points


def attentions(encoder: VisionEncoder) -> list[MultiHeadSelfAttention]:
    """The attention of each block, in order."""
    return [m for m in encoder.vit.modules() if isinstance(m, MultiHeadSelfAttention)]


class HeadByHead(nn.Module):
    """Explicit attention one head after another, so that only (B, 1, N, N) exists at a time."""

    def __init__(self, attend: ExplicitAttention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); mask (.., N, N), boolean or additive."""
        heads = q.shape[1]
        per_head = mask is not None and mask.ndim > 2 and mask.shape[-3] == heads > 1
        out = torch.empty_like(q)
        for head in range(heads):
            one = slice(head, head + 1)
            own = mask[..., one, :, :] if mask is not None and per_head else mask
            out[:, one] = self.attend(q[:, one], k[:, one], v[:, one], own)
        return out


@contextmanager
def explicit_attention(
    encoder: VisionEncoder, *, head_by_head: bool = False
) -> Iterator[list[nn.Module]]:
    """Attend by the explicit path inside the context.

    Yields the module of each block whose output is the (B, H, N, N) probabilities, for `hooked`;
    with `head_by_head` it is called H times per forward with (B, 1, N, N), the first head first.

    Raises:
        VitcliError: an encoder that attends over channels.
    """
    modules = attentions(encoder)
    before = [module.attend for module in modules]
    if any(isinstance(attend, ChannelAttention) for attend in before):
        raise VitcliError(
            "attention: blocks attend over channels, so there are no weights between tokens",
            "use an encoder with attention.over: tokens",
        )
    try:
        explicit: list[nn.Module] = []
        for module in modules:
            rate = module.attend.dropout if isinstance(module.attend, FusedAttention) else 0.0
            attend = ExplicitAttention(rate)
            attend.train(module.training)
            module.attend = HeadByHead(attend) if head_by_head else attend
            explicit.append(attend.probabilities)
        yield explicit
    finally:
        for module, attend_before in zip(modules, before, strict=True):
            module.attend = attend_before
