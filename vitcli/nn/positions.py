"""Position encodings: what they add to tokens, turn in queries and keys, or add to logits.

A new encoding is one class here, its spec in `config.attention_variants` (what it needs and costs)
and one entry in `vitcli.build`. Grids are (rows, columns) of patches; P prefix tokens come before
the patches in every token sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.nn.attention import (
    ROPE_LAYOUTS,
    Grid,
    Part,
    Rotation,
    identity,
    squared_distances,
    trunc_normal,
    turned_by,
)


class NoPosition(Part):
    """No position information; also the base that the others override where they act."""

    def converted(self, source: NoPosition) -> dict[str, Tensor]:
        """The parameters of `source`, an encoding of this kind, for the native grid of this one."""
        return dict(source.state_dict())

    def add(self, prefix: Tensor, patches: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Prefix (B, P, D) and patches (B, N, D) with their positions added."""
        return prefix, patches

    def rotation(self, grid: Grid, prefix_tokens: int, like: Tensor) -> Rotation:
        """What turns queries and keys (B, H, P+N, d)."""
        return identity

    def rotations(
        self, grid: Grid, prefix_tokens: int, depth: int, like: Tensor
    ) -> Iterable[Rotation]:
        """As `rotation`, of each of `depth` blocks."""
        return [self.rotation(grid, prefix_tokens, like)] * depth

    def bias(self, grid: Grid, prefix_tokens: int, like: Tensor) -> Tensor | None:
        """What is added to the attention logits of all blocks, (H, P+N, P+N), or None."""
        return None

    def block_biases(
        self, grid: Grid, prefix_tokens: int, depth: int, like: Tensor
    ) -> Iterable[Tensor | None]:
        """What is added to the logits of each of `depth` blocks alone, as `bias`."""
        return [None] * depth


def _interpolate(
    table: Tensor,
    grid: Grid,
    mode: str,
    antialias: bool = False,
    align_corners: bool | None = False,
    offset: float = 0.0,
) -> Tensor:
    scale = tuple((n + offset) / m for n, m in zip(grid, table.shape[-2:], strict=True))
    return F.interpolate(
        table,
        size=None if offset else grid,
        scale_factor=scale if offset else None,
        mode=mode,
        antialias=antialias,
        align_corners=align_corners,
    )


def nearest_by_fraction(table: Tensor, grid: Grid) -> Tensor:
    """Each patch takes the row of the table's cell that its corner falls into (Idefics 2 and 3).

    The bucket of i / n among the multiples of 1 / m, all in float32, in which some fractions fall
    into the cell before: at a few sizes that is not the identity even where n = m.
    """

    def cells(n: int, m: int) -> Tensor:
        edges = torch.arange(1 / m, 1.0, 1 / m)
        fractions = torch.arange(n, dtype=torch.float32) * (1.0 / torch.tensor(n))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), edges, right=True).to(table.device)

    rows, columns = (cells(n, m) for n, m in zip(grid, table.shape[-2:], strict=True))
    return table[..., rows, :][..., columns]


def cropped(table: Tensor, grid: Grid) -> Tensor:
    """Bilinear to the square of the longer side, of which the top-left is kept (RADIO)."""
    side = max(grid)
    return _interpolate(table, (side, side), mode="bilinear")[..., : grid[0], : grid[1]]


def geometric(table: Tensor, grid: Grid) -> Tensor:
    """Linear between positions whose distances grow by one factor from the middle (BEiT, timm).

    The factor, by bisection, is the one with which the last position of the table is the last of
    the new one, so that what is near the middle stays as it is; `grid` and the table's are odd.
    """

    def weights(n: int, m: int) -> Tensor:
        low, high = 1.01, 1.5
        while high - low > 1e-6:
            ratio = (low + high) / 2.0
            too_far = (1.0 - ratio ** (m // 2)) / (1.0 - ratio) > n // 2
            low, high = (low, ratio) if too_far else (ratio, high)
        steps = torch.tensor([ratio**i for i in range(m // 2)], dtype=torch.float64).cumsum(0)
        known = torch.cat([-steps.flip(0), steps.new_zeros(1), steps]).float()  # as the library
        wanted = torch.arange(n, dtype=torch.float32) - n // 2
        right = torch.bucketize(wanted, known).clamp(max=m - 1)
        left = (right - 1).clamp(min=0)
        after, before = (wanted - known[left]).clamp(min=0), (known[right] - wanted).clamp(min=0)
        alone = (after == 0) & (before == 0)
        after, before = after + alone, before + alone
        found = torch.zeros(n, m)
        rows = torch.arange(n)
        found[rows, left] += before / (after + before)
        found[rows, right] += after / (after + before)
        return found.to(table.dtype).to(table.device)

    down, across = (weights(n, m) for n, m in zip(grid, table.shape[-2:], strict=True))
    return down @ table @ across.T


TABLE_RESIZES: dict[str, Callable[[Tensor, Grid], Tensor]] = {
    "bilinear": partial(_interpolate, mode="bilinear"),
    "bilinear_cropped": cropped,
    "buckets": nearest_by_fraction,
    "geometric": geometric,
    "bicubic": partial(_interpolate, mode="bicubic"),
    "bicubic_antialias": partial(_interpolate, mode="bicubic", antialias=True),
    "bicubic_offset": partial(_interpolate, mode="bicubic", offset=0.1),
    "bicubic_align_corners": partial(_interpolate, mode="bicubic", align_corners=True),
    "bilinear_antialias": partial(_interpolate, mode="bilinear", antialias=True),
    "bilinear_align_corners": partial(_interpolate, mode="bilinear", align_corners=True),
}
"""How a (1, D, rows, columns) table follows another grid; each rule is some library's own.

`bicubic_offset` passes (n + 0.1) / m as the scale factor in place of a size, as the original
DINOv2 does; `bicubic_align_corners` is torchvision's, `bilinear_align_corners` that of Google's
first ViTs (scipy's zoom of order 1).
"""


class TablePosition(NoPosition):
    """Tables with a row for each cell of a grid, which follow another grid by a rule.

    Args:
        grid: the native grid of patches, at which the tables are as they are trained.
        resize: a key of TABLE_RESIZES.
        resize_dtype: in which rows are resized; None for the tables' own.
    """

    def __init__(self, grid: Grid, resize: str, resize_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.grid = grid
        self.resize = TABLE_RESIZES[resize]
        self.resize_dtype = resize_dtype

    def resized(self, rows: Tensor, old: Grid, new: Grid) -> Tensor:
        """The rows (cells, C) of one grid for another."""
        square = rows.T.unflatten(1, old).unsqueeze(0)  # (1, C, rows, columns)
        resized = self.resize(square.to(self.resize_dtype or rows.dtype), new)
        return resized.squeeze(0).flatten(1).T.to(rows.dtype)


class LearnedPosition(TablePosition):
    """A row for each of the first k prefix tokens and for each patch, added to them.

    At another grid the patch rows are resized and the prefix rows are not. With a `rope` queries
    and keys are turned too (Qwen3-VL, Perception Encoder).
    """

    trained = True

    def __init__(
        self,
        hidden: int,
        grid: Grid,
        prefix_rows: int,
        resize: str = "bicubic",
        resize_dtype: torch.dtype | None = torch.float32,
        rope: NoPosition | None = None,
    ) -> None:
        super().__init__(grid, resize, resize_dtype)
        self.prefix_rows = prefix_rows
        rows = torch.empty(prefix_rows + grid[0] * grid[1], hidden)
        self.table = nn.Parameter(rows, requires_grad=self.trained)
        self.rope = NoPosition() if rope is None else rope

    def patch_rows(self, grid: Grid) -> Tensor:
        """The rows of the patches at `grid`, (N, D)."""
        rows = self.table[self.prefix_rows :]
        if grid == self.grid and self.resize is not nearest_by_fraction:
            return rows
        return self.resized(rows, self.grid, grid)

    def add(self, prefix: Tensor, patches: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        k = self.prefix_rows
        moved = prefix[:, :k] + self.table[:k]
        return torch.cat([moved, prefix[:, k:]], dim=1), patches + self.patch_rows(grid)

    def rotations(
        self, grid: Grid, prefix_tokens: int, depth: int, like: Tensor
    ) -> Iterable[Rotation]:
        return self.rope.rotations(grid, prefix_tokens, depth, like)

    def reset(self, std: float, generator: torch.Generator) -> None:
        # torch's draw and not `trunc_normal`: a seed's tables stay what they were.
        self.table.copy_(
            nn.init.trunc_normal_(torch.empty(self.table.shape), std=std, generator=generator)
        )

    def converted(self, source: NoPosition) -> dict[str, Tensor]:
        state = super().converted(source)
        if isinstance(source, LearnedPosition):
            rows = [source.table[: source.prefix_rows], source.patch_rows(self.grid)]
            state["table"] = torch.cat(rows)
        return state


def sincos_table(hidden: int, grid: Grid) -> Tensor:
    """Fixed 2D sines and cosines, (rows * columns, D), in the layout of the MAE weights.

    Per patch [sin x, cos x, sin y, cos y], each D/4 wide, at frequencies 10000^(-j / (D/4))
    (He et al. 2022, appendix A.1; the columns come first in the published code).
    """
    quarter = hidden // 4
    frequency = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    y, x = torch.meshgrid(
        *(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij"
    )  # (rows, columns)
    parts = [
        f(axis.flatten()[:, None] * frequency) for axis in (x, y) for f in (torch.sin, torch.cos)
    ]
    return torch.cat(parts, dim=1).float()


class SinCosPosition(LearnedPosition):
    """A table that holds sines and cosines and is not trained; prefix rows are zero."""

    trained = False

    def reset(self, std: float, generator: torch.Generator) -> None:
        self.table.zero_()
        self.table[self.prefix_rows :] = sincos_table(self.table.shape[1], self.grid)


def centered(n: int, reference: int, offset: float = 0.0) -> Tensor:
    """Patch centers mapped to [-1, 1], in turns of 2 pi (DINOv3)."""
    return 2 * math.pi * ((torch.arange(n, dtype=torch.float64) + 0.5 + offset) / n * 2 - 1)


def index(n: int, reference: int, offset: float = 0.0) -> Tensor:
    """Patch indices from `offset` (Qwen2-VL: 0)."""
    return torch.arange(n, dtype=torch.float64) + offset


def scaled_to_reference(n: int, reference: int, offset: float = 0.0) -> Tensor:
    """Indices from `offset`, scaled to span the reference grid (EVA-02 0, Perception Encoder 1)."""
    return index(n, reference, offset) / n * reference


ROPE_COORDINATES: dict[str, Callable[[int, int, float], Tensor]] = {
    "centered": centered,
    "index": index,
    "reference": scaled_to_reference,
}


class RopePosition(NoPosition):
    """2D rotary positions (Su et al. 2021; 2D form as in DINOv3, Simeoni et al. 2025).

    The first half of the pairs turns with the row, the second with the column (or the other way
    round: `first_axis`), at frequencies theta^(-4j/d), j = 0 .. d/4 - 1, or one over `periods`.
    With `alternate` the columns turn at theta^(-(4j+2)/d), the frequencies between (Pixtral).
    With `in_turns` a pair of either axis follows one of the other at each frequency (Kimi).
    Prefix tokens are not turned.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        coordinates: str,
        layout: str,
        reference_grid: Grid,
        periods: Sequence[float] | None = None,
        offset: float = 0.0,
        first_axis: str = "rows",
        alternate: bool = False,
        in_turns: bool = False,
    ) -> None:
        super().__init__()
        self.in_turns = in_turns
        self.offset = offset
        self.alternate = alternate
        self.first_axis = first_axis
        self.head_dim = head_dim
        self.theta = theta
        self.periods = periods
        self.coordinates = ROPE_COORDINATES[coordinates]
        self.spread, self.turn = ROPE_LAYOUTS[layout]
        self.reference_grid = reference_grid

    def angles(self, grid: Grid) -> Tensor:
        """One angle for each pair of channels, (N, d/2), in float64."""
        j = torch.arange(self.head_dim // 4, dtype=torch.float64)
        frequency = (
            self.theta ** (-4 * j / self.head_dim)
            if self.periods is None
            else 1 / torch.tensor(self.periods, dtype=torch.float64)
        )
        between = frequency * self.theta ** (-2 / self.head_dim) if self.alternate else frequency
        rows, columns = (
            self.coordinates(n, reference, self.offset)[:, None] * turns
            for n, reference, turns in zip(
                grid, self.reference_grid, (frequency, between), strict=True
            )
        )  # (n, d/4)
        shape = (*grid, -1)
        both = [rows[:, None].expand(shape), columns[None].expand(shape)]
        if self.first_axis == "columns":
            both.reverse()
        joined = torch.stack(both, dim=-1).flatten(-2) if self.in_turns else torch.cat(both, dim=-1)
        return joined.flatten(0, 1)  # (N, d/2)

    def rotation(self, grid: Grid, prefix_tokens: int, like: Tensor) -> Rotation:
        return turned_by(self.angles(grid), prefix_tokens, self.spread, self.turn, like)


class MixedRopePosition(NoPosition):
    """Rotary positions of learned frequencies (Heo et al. 2024, section 3.2, RoPE-Mixed).

    In each block and head every pair (2i, 2i + 1) turns by row * a + column * b, with a and b in
    `frequencies` (2, depth, H, d/2). They start as those of `rope2d` at base theta along two axes
    at right angles, in a direction drawn for each head. Prefix tokens are not turned.
    """

    def __init__(self, depth: int, heads: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.frequencies = nn.Parameter(torch.empty(2, depth, heads, head_dim // 2))

    def reset(self, std: float, generator: torch.Generator) -> None:
        _, depth, heads, pairs = self.frequencies.shape
        j = torch.arange(pairs // 2, dtype=torch.float64)
        size = self.theta ** (-2 * j / pairs)
        along = torch.rand(depth, heads, 1, generator=generator, dtype=torch.float64) * 2 * math.pi
        angles = torch.stack([along, along + math.pi / 2], -2)  # (depth, H, 2, 1)
        axes = torch.stack([size * angles.sin(), size * angles.cos()])
        self.frequencies.copy_(axes.flatten(-2))

    def rotation(self, grid: Grid, prefix_tokens: int, like: Tensor, block: int = 0) -> Rotation:
        axes = (torch.arange(n, device=like.device, dtype=like.dtype) for n in grid)
        rows, columns = torch.cartesian_prod(*axes).T[:, :, None]  # (N, 1) each
        by_row, by_column = self.frequencies[:, block, :, None]  # (H, 1, d/2)
        angles = rows * by_row + columns * by_column  # (H, N, d/2)
        return turned_by(angles, prefix_tokens, *ROPE_LAYOUTS["interleaved"], like)

    def rotations(
        self, grid: Grid, prefix_tokens: int, depth: int, like: Tensor
    ) -> Iterable[Rotation]:
        return (self.rotation(grid, prefix_tokens, like, block) for block in range(depth))


def alibi_slopes(heads: int) -> list[float]:
    """One slope for each head, 2^(-8i/H); other head counts as in the authors' code.

    Press et al. 2022, section 3: for a power of two the geometric series, otherwise the series
    of the power below it, then every second slope of the series of the power above.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


class AlibiPosition(NoPosition):
    """2D ALiBi: minus a head's slope times the distance between patch centers, in patches.

    The 2D form is that of CROMA (Fuller et al. 2023, section 3); prefix tokens get no bias.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(heads)

    def bias(self, grid: Grid, prefix_tokens: int, like: Tensor) -> Tensor:
        distance = squared_distances(grid).double().sqrt()
        distance = F.pad(distance, (prefix_tokens, 0, prefix_tokens, 0))  # (P+N, P+N)
        slopes = torch.tensor(self.slopes, dtype=torch.float64)
        return (-slopes[:, None, None] * distance).to(like.dtype).to(like.device)


def relative_index(grid: Grid, prefix_tokens: int) -> Tensor:
    """Row of a relative table for each (query, key) pair, (P+N, P+N).

    (2 rows - 1)(2 columns - 1) offsets of a query from its key, row by row, then prefix to patch,
    patch to prefix and prefix to prefix.
    """
    rows, columns = grid
    row = torch.arange(rows).repeat_interleave(columns)
    column = torch.arange(columns).repeat(rows)
    down, right = row[:, None] - row[None], column[:, None] - column[None]  # (N, N)
    offsets = (down + rows - 1) * (2 * columns - 1) + right + columns - 1
    index = F.pad(offsets, (prefix_tokens, 0, prefix_tokens, 0))
    beyond = (2 * rows - 1) * (2 * columns - 1)
    index[:prefix_tokens] = beyond
    index[:, :prefix_tokens] = beyond + 1
    index[:prefix_tokens, :prefix_tokens] = beyond + 2
    return index


class RelativePosition(TablePosition):
    """In each block a learned bias per head and offset between two patches (Swin, BEiT).

    Liu et al. 2021, section 3.2; Bao et al. 2022. With prefix tokens each table has three rows
    more: prefix to patch, patch to prefix, prefix to prefix; these are not resized.
    """

    def __init__(
        self,
        heads: int,
        depth: int,
        grid: Grid,
        prefix_tokens: int,
        resize: str = "bilinear",
        resize_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__(grid, resize, resize_dtype)
        self.offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
        rows = self.offsets + (3 if prefix_tokens else 0)
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(rows, heads)) for _ in range(depth))

    def reset(self, std: float, generator: torch.Generator) -> None:
        for table in self.tables:
            trunc_normal(table, std, generator)

    def converted(self, source: NoPosition) -> dict[str, Tensor]:
        state = super().converted(source)
        if isinstance(source, RelativePosition):
            tables = (source.table_at(block, self.grid) for block in range(len(source.tables)))
            state |= {f"tables.{block}": table for block, table in enumerate(tables)}
        return state

    def table_at(self, block: int, grid: Grid) -> Tensor:
        """The table of a block, from 0, for another grid."""
        table: Tensor = self.tables[block]
        if grid == self.grid:
            return table
        old, new = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (self.grid, grid))
        offsets = self.resized(table[: self.offsets], old, new)
        return torch.cat([offsets, table[self.offsets :]])

    def block_biases(
        self, grid: Grid, prefix_tokens: int, depth: int, like: Tensor
    ) -> Iterator[Tensor | None]:
        index = relative_index(grid, prefix_tokens).to(like.device)
        for block in range(depth):
            bias = self.table_at(block, grid)[index]  # (P+N, P+N, H)
            yield bias.permute(2, 0, 1).contiguous()
