"""Where one query looks: its attention over the patches, by head, fused over heads, rolled out.

B images, N tokens of which P prefix tokens come first, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from torch import Tensor, nn

from vitcli.commands.attention.analysis import parse_layers
from vitcli.commands.attention.reductions import (
    few_at_once,
    largest_entropies,
    patch_index,
    query_slice,
    token_groups,
    wide,
)
from vitcli.images.patches import MapPanel, MapSheet, grid_box, patch_box
from vitcli.inference import Prepared
from vitcli.model import Model
from vitcli.nn.encoder import VisionEncoder
from vitcli.nn.hooks import attentions, explicit_attention, tapped

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
    for part in few_at_once(images, patches.start + grid[0] * grid[1]):
        roll = Rollout() if rollout else None
        reducers = [
            MapReducer(module.heads, chosen, patches, fusion, roll)
            for module in attentions(encoder)
        ]
        with explicit_attention(encoder, head_by_head=True) as probabilities:
            wanted: list[tuple[nn.Module, MapReducer]] = [
                (module, reducer)
                for block, (module, reducer) in enumerate(
                    zip(probabilities, reducers, strict=True), start=1
                )
                if rollout or block in layers
            ]
            with tapped(wanted):
                encoder(part)
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


MOST_PANELS = 84
"""Maps in one figure: a page of some 20 inches; beyond it nobody looks at them."""


@dataclass
class OverlayCollector:
    """Watches `attn_entropy` and keeps one query's maps of what goes by.

    Without `layers` it is the last block. `left_out` counts sheets that did not fit in MOST_PANELS.
    Values of the sheets are in times uniform: attention times the number of tokens that the query
    can see.
    """

    query: str
    layers: str | None
    fusion: str
    rollout: bool
    sheets: list[MapSheet] = field(default_factory=list)
    pictures: list[object] = field(default_factory=list)
    """The Pillow images that `MapSheet.image` counts."""
    left_out: int = 0

    def __call__(self, model: Model, batch: Sequence[Prepared], pixels: Tensor) -> None:
        layers = parse_layers(self.layers or "-1", model.config.encoder.depth)
        per_sheet = model.config.encoder.heads + 2 + self.rollout
        drawn = sum(len(sheet.panels) + 1 for sheet in self.sheets)
        room = max(0, MOST_PANELS - drawn) // (per_sheet * len(layers))
        if not self.sheets:
            room = max(1, room)
        self.left_out += max(0, len(batch) - room) * len(layers)
        if not room:
            return
        maps = attention_maps(
            model.encoder,
            pixels[:room],
            layers,
            query=self.query,
            fusion=self.fusion,
            rollout=self.rollout,
        )
        names = {"cls": "CLS", "patch": "mean patch query"}
        grid = model.encoder.front_end.grid(pixels)
        query = names.get(maps.query, f"patch {maps.query}")
        chosen = query_slice(maps.query, token_groups(model.encoder), grid)
        most = largest_entropies(model.encoder, grid)
        # Times uniform: attention by the number of tokens that the query can see.
        seen = torch.stack([most[layer - 1][chosen].exp().mean() for layer in layers])
        uniform = seen[:, None, None, None]
        fused, heads = maps.fused * uniform, maps.heads * uniform[..., None]
        rollout = None if maps.rollout is None else maps.rollout * uniform
        for place, item in enumerate(batch[:room]):
            picture = item.decoded.image
            size = picture.height, picture.width
            box = grid_box(model.preprocessing, size, grid, model.config.encoder.patch_size)
            query_box = None
            if "," in maps.query:
                row, column = divmod(patch_index(maps.query, grid), grid[1])
                query_box = patch_box(box, row, column, grid)
            self.pictures.append(picture)
            for index, layer in enumerate(layers):
                panels = [MapPanel(f"{self.fusion} of heads", _tuples(fused[index, place]))]
                if rollout is not None:
                    rolled = _tuples(rollout[index, place])
                    panels.append(MapPanel(f"rollout of {self.fusion}", rolled))
                panels += [
                    MapPanel(f"head {head}", _tuples(values))
                    for head, values in enumerate(heads[index, place], start=1)
                ]
                title = (
                    f"{PurePath(item.path).name}: {model.name}, "
                    f"{model.config.encoder.registers} registers, {model.weights}, "
                    f"block {layer}, query {query}"
                )
                shown = len(self.pictures) - 1
                self.sheets.append(MapSheet(shown, title, box, query_box, tuple(panels)))


def _tuples(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.tolist())
