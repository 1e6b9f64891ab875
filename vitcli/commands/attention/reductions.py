"""Attention seen through hooks: every (N, N) array is reduced before the next head is computed.

B images, N tokens of which P prefix tokens come first, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitcli.errors import VitcliError
from vitcli.measures import all_finite
from vitcli.nn.encoder import VisionEncoder
from vitcli.nn.hooks import explicit_attention, tapped
from vitcli.nn.positions import Grid

ROWS_AT_ONCE = 2**24
"""Probabilities that may exist at once, B x N x N: 64 MiB in float32 and 128 MiB in float64."""

MASS_KINDS = ("cls", "distillation", "registers", "patches")
FIELDS = (
    "entropy",
    "entropy_cls",
    "entropy_registers",
    "entropy_patches",
    "distance",
    "row_sum_error",
    "entropy_share",
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
    axes = (torch.arange(n, dtype=torch.float64) * patch_size for n in grid)
    centers = torch.cartesian_prod(*axes)  # (N, 2)
    return (centers[:, None] - centers[None]).square_().sum(-1).sqrt_()


def token_groups(encoder: VisionEncoder) -> dict[str, slice]:
    """Where each kind of token stands in a sequence; absent kinds are absent."""
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


def query_slice(query: str, groups: Mapping[str, slice], grid: Grid) -> slice:
    """The tokens that `--query` names: all, cls, patch, or the patch at "ROW,COL"."""
    patches = groups["patches"]
    if query == "all":
        return slice(0, None)
    if query == "patch":
        return patches
    if query == "cls":
        if "cls" not in groups:
            raise VitcliError("--query cls: this encoder has no CLS token", "use --query patch")
        return groups["cls"]
    index = patches.start + patch_index(query, grid)
    return slice(index, index + 1)


def patch_index(text: str, grid: Grid) -> int:
    """The place of the patch "ROW,COL", counted from 0 at the top left, among the patches."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise VitcliError(f"query {text!r} is not cls, patch or ROW,COL", "for example 3,7")
    row, column = (int(part) for part in parts)
    if row >= grid[0] or column >= grid[1]:
        raise VitcliError(
            f"query {text}: the grid has {grid[0]} rows and {grid[1]} columns of patches",
            f"rows are 0 to {grid[0] - 1}, columns 0 to {grid[1] - 1}",
        )
    return row * grid[1] + column


def few_at_once(images: Tensor, tokens: int) -> Iterator[Tensor]:
    """(B, C, h, w) in parts so small that B x N x N stays within ROWS_AT_ONCE."""
    yield from images.split(max(1, ROWS_AT_ONCE // tokens**2))


def largest_entropies(encoder: VisionEncoder, grid: Grid) -> list[Tensor]:
    """For each block (N,): the log of the tokens that each query can see under its mask."""
    prefix, depth = encoder.prefix_tokens, len(encoder.vit.blocks)
    tokens = prefix + grid[0] * grid[1]
    everything = torch.full((tokens,), tokens)
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
    distances = patch_distances(grid, encoder.front_end.patch_size)
    distances = distances[patch_query.start - patches.start :][: _length(patch_query)]
    most = largest_entropies(encoder, grid)
    heads, norms = [], []
    for part in few_at_once(images, tokens):
        blocks = list(encoder.vit.blocks)
        reducers = [HeadReducer(groups, chosen, patch_query, distances, m) for m in most]
        part_norms: list[Tensor] = []

        def keep_norms(x: Tensor, kept: list[Tensor] = part_norms) -> None:
            kept.append(x[:, encoder.prefix_tokens :].float().norm(dim=-1).cpu())

        with explicit_attention(encoder, head_by_head=True) as probabilities:
            hooks = zip(probabilities, reducers, strict=True)
            with tapped([*hooks, *((block, keep_norms) for block in blocks)]):
                encoder(part)
        heads.append(torch.stack([torch.stack(r.heads, dim=1) for r in reducers]).cpu())
        norms.append(torch.stack(part_norms))
    samples = torch.cat(heads, dim=1).double()
    patch_norms = torch.cat(norms, dim=1)
    _check_finite(samples[..., FIELDS.index("row_sum_error")], patch_norms, name)
    return AttentionSamples(samples, patch_norms, grid, tokens)


def _length(where: slice) -> int | None:
    return None if where.stop is None else where.stop - where.start


def _check_finite(errors: Tensor, norms: Tensor, name: str) -> None:
    """`errors` (L, b, H) are NaN where a row of the attention is; then what the block leaves."""
    for block, pair in enumerate(zip(errors, norms, strict=True), start=1):
        for what, values in zip(("attention", "output"), pair, strict=True):
            if not all_finite(values):
                raise VitcliError(
                    f"{name}: the {what} of block {block} is not finite (NaN or infinite)",
                    "check the weights and the images; --dtype float32 has the widest range",
                    exit_code=1,
                )
