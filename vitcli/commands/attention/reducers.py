"""Attention weights by hooks: entropies, masses, distances, and maps of one query over the patches.

Every (N, N) array is reduced before the next head is computed.

B images, N tokens of which P prefix tokens come first, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitcli.config.settings import parse_layers
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.nn.attention import Grid, squared_distances
from vitcli.nn.encoder import Observer, VisionEncoder, attentions, explicit_attention, hooked
from vitcli.stats import all_finite

ROWS_AT_ONCE = 2**24
"""Probabilities that may exist at once, B x N x N: 64 MiB in float32 and 128 MiB in float64."""
MASS_KINDS = ("cls", "distillation", "registers", "patches")
FIELDS = (
    *("entropy", "entropy_cls", "entropy_registers", "entropy_patches", "distance"),
    *("row_sum_error", "entropy_share"),
    *(f"cls_on_{kind}" for kind in MASS_KINDS),
)
"""What is kept of each head of each image; NaN where the encoder has no such token.

`entropy_share` is the entropy of each query divided by the log of the tokens that it can see,
averaged over the queries that can see more than one.
"""


def wide(like: Tensor) -> torch.dtype:
    """float64, in which sums over rows cost nothing to precision, except on MPS, which has none."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def row_entropy(rows: Tensor) -> Tensor:
    """Shannon entropy of each row in nats, (..., N, N) -> (..., N); 0 log 0 counts as 0.

    A row is divided by its sum, which float32 keeps at 1 only to rounding: H(p / s) =
    H(p) / s + log s. So uniform attention has entropy log N to the last digits of float64.
    """
    rows = rows.to(wide(rows))
    total = rows.sum(-1)
    logs = rows.clamp_min(torch.finfo(rows.dtype).tiny).log_()
    entropy = total.log() - logs.mul_(rows).sum(-1) / total
    return entropy.clamp(0.0, math.log(rows.shape[-1]))


def patch_distances(grid: Grid, patch_size: int) -> Tensor:
    """Pixels between the centers of any two patches, (N, N) in float64."""
    return (squared_distances(grid) * patch_size**2).double().sqrt()


def token_groups(encoder: VisionEncoder) -> dict[str, slice]:
    """The slice of each kind of token in a sequence, of the kinds that are there."""
    names = {"cls": "cls", "dist": "distillation", "registers": "registers"}
    groups, start = {}, 0
    for kind, tokens in encoder.front_end.prefix.items():
        groups[names[kind]] = slice(start, start + len(tokens))
        start += len(tokens)
    return groups | {"patches": slice(start, None)}


@dataclass
class HeadReducer:
    """Reduces the probabilities of one block, head by head, to the numbers of FIELDS."""

    groups: Mapping[str, slice]
    query: slice
    """The queries whose entropy is averaged."""
    patch_query: slice
    """The patch queries whose distance is averaged."""
    distances: Tensor
    """(queries of `patch_query`, N - P) in pixels."""
    most: Tensor
    """(N,): the largest entropy that each query can have, the log of the tokens it can see."""
    heads: list[Tensor] = field(default_factory=list)
    """(B, len(FIELDS)) for each head seen so far."""

    def __call__(self, rows: Tensor) -> None:
        """Reduce one head of a batch, (B, 1, N, N)."""
        self.heads.append(torch.stack([self._image(image[0]) for image in rows]))

    def _image(self, rows: Tensor) -> Tensor:
        rows = rows.to(wide(rows))  # (N, N)
        entropy = row_entropy(rows)  # (N,)
        values = {
            "entropy": entropy[self.query].mean(),
            "distance": self._distance(rows[self.patch_query, self.groups["patches"]]),
            "row_sum_error": (rows.sum(-1) - 1).abs().max(),
            "entropy_share": self._share(entropy),
        }
        for kind, where in self.groups.items():
            values[f"entropy_{kind}"] = entropy[where].mean()
        if "cls" in self.groups:
            cls = rows[self.groups["cls"]][0]  # (N,)
            for kind, where in self.groups.items():
                values[f"cls_on_{kind}"] = cls[where].sum() / cls.sum()
        absent = rows.new_tensor(math.nan)
        return torch.stack([values.get(name, absent) for name in FIELDS])

    def _share(self, entropy: Tensor) -> Tensor:
        """Mean of entropy / log of what a query can see; NaN where all see a single token."""
        most = self.most[self.query].to(entropy)
        return (entropy[self.query] / most)[most > 0].mean()

    def _distance(self, rows: Tensor) -> Tensor:
        """Mean distance in pixels from patch queries to the patches that they attend to.

        Dosovitskiy et al. 2021, figure 7: an average weighted by the attention, here by the part
        of it that falls on patches, so that prefix tokens do not count as near.
        """
        mass = rows.sum(-1)
        weighted = (rows * self.distances.to(rows)).sum(-1)
        return torch.where(mass > 0, weighted / mass, 0.0).mean()


@dataclass(frozen=True)
class AttentionSamples:
    """What one encoder's attention did on images of one size. L blocks, b images."""

    heads: Tensor
    """(L, b, H, len(FIELDS)) in float64 on the CPU."""
    patch_norms: Tensor
    """(L, b, N - P): norms of the patch tokens as each block leaves them."""
    grid: Grid
    tokens: int


def parse_blocks(layers: str | int | Sequence[int] | None, depth: int) -> tuple[int, ...]:
    """`-1` or `3,7,11` or numbers as blocks counted from 1, in order; None is all of them.

    Raises:
        VitcliError: not numbers, or no such block.
    """
    if layers is None:
        return tuple(range(1, depth + 1))
    if isinstance(layers, str):
        layers = parse_layers(layers)
    asked = [layers] if isinstance(layers, int) else layers
    for number in asked:
        if number == 0 or not -depth <= number <= depth:
            raise VitcliError(
                f"--layers {','.join(map(str, asked))}: the encoder does not have this block (got "
                f"{number}, expected 1 to {depth}, or -1 for the last)",
                f"--layers {depth}",
            )
    return tuple(sorted({number if number > 0 else depth + 1 + number for number in asked}))


def query_slice(query: str, groups: Mapping[str, slice], grid: Grid) -> slice:
    """The tokens that `--query` names: all, cls, patch, or the patch at "ROW,COL"."""
    patches = groups["patches"]
    if query == "all":
        return slice(0, None)
    if query == "patch":
        return patches
    if query == "cls":
        if "cls" not in groups:
            raise VitcliError("--query cls: the encoder does not have a CLS token", "--query patch")
        return groups["cls"]
    index = patches.start + patch_index(query, grid)
    return slice(index, index + 1)


def patch_index(text: str, grid: Grid) -> int:
    """The place of the patch "ROW,COL", counted from 0 at the top left, among the patches."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise VitcliError(
            f"--query {text}: is not a query (expected all, cls, patch or ROW,COL)", "--query 3,7"
        )
    row, column = (int(part) for part in parts)
    if row >= grid[0] or column >= grid[1]:
        raise VitcliError(
            f"--query {text}: is outside the grid of patches (got {row},{column}, expected rows 0 "
            f"to {grid[0] - 1} and columns 0 to {grid[1] - 1})",
            f"--query {grid[0] - 1},{grid[1] - 1}",
        )
    return row * grid[1] + column


def few_at_once(encoder: VisionEncoder, images: Tensor, tokens: int) -> Iterator[Tensor]:
    """(B, C, h, w) in parts so small that B x N x N stays within ROWS_AT_ONCE.

    A library gives the weights of all blocks and heads together.
    """
    at_once = 1
    if isinstance(encoder, LibraryEncoder):
        at_once = encoder.shape.depth * (encoder.shape.heads or 1)
    yield from images.split(max(1, ROWS_AT_ONCE // (at_once * tokens**2)))


def observe_heads(
    encoder: VisionEncoder,
    images: Tensor,
    observers: Mapping[int, Observer],
    points: Sequence[tuple[nn.Module, Observer]] = (),
) -> None:
    """Run images (b, C, height, width) by the explicit path.

    The observer of a block, from 1, is called with each head's probabilities, (b, 1, N, N).
    """
    if isinstance(encoder, LibraryEncoder):
        with hooked(points):
            blocks = encoder.attention(images)
        for block, observe in observers.items():
            for head in blocks[block - 1].split(1, dim=1):
                observe(head)
        return
    with explicit_attention(encoder, head_by_head=True) as probabilities:
        heads = [(probabilities[block - 1], observe) for block, observe in observers.items()]
        with hooked([*heads, *points]):
            encoder(images)


def block_points(encoder: VisionEncoder) -> list[nn.Module]:
    """The module whose output are the tokens that each block leaves."""
    return [point for name, point in encoder.layer_points if name.startswith("block ")]


def head_counts(encoder: VisionEncoder) -> list[int]:
    """Heads of each block."""
    if isinstance(encoder, LibraryEncoder):
        return [encoder.shape.heads or 0] * encoder.shape.depth
    return [module.heads for module in attentions(encoder)]


def largest_entropies(encoder: VisionEncoder, grid: Grid) -> list[Tensor]:
    """For each block (N,): the log of the tokens that each query can see under its mask."""
    prefix, depth = encoder.prefix_tokens, len(block_points(encoder))
    tokens = prefix + grid[0] * grid[1]
    everything = torch.full((tokens,), tokens)
    if isinstance(encoder, LibraryEncoder):
        return [everything.double().log()] * depth
    masks = encoder.mask(grid, prefix, depth, torch.device("cpu"))
    seen = [everything if mask is None else mask.sum(-1) for mask in masks]
    return [count.double().log() for count in seen]


@torch.inference_mode()
def observe_attention(
    encoder: VisionEncoder, images: Tensor, query: str = "all", name: str = "the encoder"
) -> AttentionSamples:
    """Run images (b, C, height, width) by the explicit path and keep what FIELDS names.

    `query` is all, cls, patch or "ROW,COL"; `name` is how errors call the encoder.

    Raises:
        VitcliError: a query that the encoder does not have; attention or tokens that are not
            finite, at the block where that begins (exit code 1).
    """
    groups, grid = token_groups(encoder), encoder.front_end.grid(images)
    patches, chosen = groups["patches"], query_slice(query, groups, grid)
    tokens = patches.start + grid[0] * grid[1]
    patch_query = chosen if chosen.start >= patches.start else patches
    rows = range(-patches.start, tokens - patches.start)[patch_query]  # among the patches
    distances = patch_distances(grid, encoder.front_end.patch_size)[rows.start : rows.stop]
    most = largest_entropies(encoder, grid)
    heads, norms = [], []
    for part in few_at_once(encoder, images, tokens):
        reducers = [HeadReducer(groups, chosen, patch_query, distances, m) for m in most]
        part_norms: list[Tensor] = []

        def keep_norms(x: Tensor, kept: list[Tensor] = part_norms) -> None:
            kept.append(x[:, encoder.prefix_tokens :].float().norm(dim=-1).cpu())

        points = [(point, keep_norms) for point in block_points(encoder)]
        observe_heads(encoder, part, dict(enumerate(reducers, start=1)), points)
        heads.append(torch.stack([torch.stack(r.heads, dim=1) for r in reducers]).cpu())
        norms.append(torch.stack(part_norms))
    samples = torch.cat(heads, dim=1).double()
    patch_norms = torch.cat(norms, dim=1)
    _check_finite(samples[..., FIELDS.index("row_sum_error")], patch_norms, name)
    return AttentionSamples(samples, patch_norms, grid, tokens)


def _check_finite(errors: Tensor, norms: Tensor, name: str) -> None:
    """`errors` (L, b, H) are NaN where a row of the attention is; then what the block leaves."""
    for block, pair in enumerate(zip(errors, norms, strict=True), start=1):
        for what, values in zip(("attention", "output"), pair, strict=True):
            if not all_finite(values):
                raise VitcliError(
                    f"{name}: the {what} of block {block} is not finite (NaN or infinite)",
                    "run it again with --dtype float32",
                    exit_code=1,
                )


FUSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""How the heads of a block become one map; `mean` divides by their number at the end."""


def fuse_heads(heads: Sequence[Tensor], how: str) -> Tensor:
    """Maps or probabilities of H heads in one of the same shape; `how` is a key of FUSIONS."""
    fused = heads[0]
    for head in heads[1:]:
        fused = FUSIONS[how](fused, head)
    return fused / len(heads) if how == "mean" else fused


class Rollout:
    """Attention rollout: the blocks' attention multiplied up, with the residual path as identity.

    Abnar and Zuidema 2020, section 3: A' = 0.5 A + 0.5 I for each block, rows made to sum to 1,
    and A'_l ... A'_1 says how much each input token reaches each token after block l.
    """

    def __init__(self) -> None:
        self.matrix: Tensor | None = None

    def add(self, attention: Tensor) -> None:
        """Take in the next block's attention, (B, N, N), its heads fused."""
        total = attention.sum(-1, keepdim=True)
        identity = torch.eye(attention.shape[-1]).to(attention)
        # A minimum over heads can leave an empty row: that token then keeps itself.
        rows = torch.where(total > 0, attention / total, identity)
        step = rows.mul_(0.5).add_(identity, alpha=0.5)
        self.matrix = step if self.matrix is None else step @ self.matrix


@dataclass
class MapReducer:
    """Keeps one query's row of each head of a block; folds the block into the rollout, if any."""

    heads: int
    query: slice
    patches: slice
    fusion: str
    rollout: Rollout | None
    maps: list[Tensor] = field(default_factory=list)
    rolled: Tensor | None = None
    _fused: Tensor | None = None

    def __call__(self, rows: Tensor) -> None:
        """Reduce one head of a batch, (B, 1, N, N)."""
        rows = rows[:, 0].to(wide(rows))
        self.maps.append(self._map(rows).cpu())
        if self.rollout is None:
            return
        self._fused = rows if self._fused is None else FUSIONS[self.fusion](self._fused, rows)
        if len(self.maps) == self.heads:
            self.rollout.add(self._fused / (self.heads if self.fusion == "mean" else 1))
            self._fused = None
            assert self.rollout.matrix is not None
            self.rolled = self._map(self.rollout.matrix).cpu()

    def _map(self, rows: Tensor) -> Tensor:
        """(B, N, N) -> (B, N - P): the mean over the chosen queries."""
        return rows[:, self.query, self.patches].mean(1)


@dataclass(frozen=True)
class AttentionMaps:
    """One query's attention over the patch grid, for b images of one size."""

    heads: Tensor
    """(layers, b, H, rows, columns); with the prefix tokens a row would sum to 1."""
    fused: Tensor
    """(layers, b, rows, columns) by the chosen fusion."""
    rollout: Tensor | None
    """(layers, b, rows, columns), up to and with each of the layers; None where not asked for."""
    query: str
    """cls, patch (the mean over patch queries) or "ROW,COL"."""


def default_query(encoder: VisionEncoder) -> str:
    """CLS where there is one, else the mean over the patch queries."""
    return "cls" if "cls" in token_groups(encoder) else "patch"


@torch.inference_mode()
def attention_maps(
    encoder: VisionEncoder,
    images: Tensor,
    layers: Sequence[int],
    *,
    query: str = "all",
    fusion: str = "mean",
    rollout: bool = False,
) -> AttentionMaps:
    """Maps of images (b, C, height, width) at blocks `layers`, counted from 1.

    `query` all means `default_query`. VitcliError for a query that the encoder does not have.
    """
    query = default_query(encoder) if query == "all" else query
    groups, grid = token_groups(encoder), encoder.front_end.grid(images)
    chosen, patches = query_slice(query, groups, grid), groups["patches"]
    heads, rolled = [], []
    for part in few_at_once(encoder, images, patches.start + grid[0] * grid[1]):
        roll = Rollout() if rollout else None
        reducers = [
            MapReducer(count, chosen, patches, fusion, roll) for count in head_counts(encoder)
        ]
        blocks = enumerate(reducers, start=1)
        observe_heads(encoder, part, {i: r for i, r in blocks if rollout or i in layers})
        reported = [reducers[block - 1] for block in layers]
        heads.append(torch.stack([torch.stack(r.maps, dim=1) for r in reported]))
        rolled.append([r.rolled for r in reported if r.rolled is not None])
    by_head = torch.cat(heads, dim=1).unflatten(-1, grid)
    return AttentionMaps(
        heads=by_head,
        fused=fuse_heads(by_head.unbind(2), fusion),
        rollout=_joined(rolled).unflatten(-1, grid) if rollout else None,
        query=query,
    )


def _joined(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([torch.stack(list(part)) for part in parts], dim=1)
