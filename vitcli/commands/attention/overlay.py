"""Attention maps of the images of a call, ready to be laid on their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from torch import Tensor

from vitcli.commands.attention.analysis import parse_layers
from vitcli.commands.attention.maps import attention_maps
from vitcli.commands.attention.reductions import patch_index
from vitcli.images.geometry import grid_box, patch_box
from vitcli.images.patches import MapPanel, MapSheet
from vitcli.inference import Prepared
from vitcli.model import LoadedModel

MOST_SHEETS = 24
"""Pictures x blocks x encoders in one figure; beyond it nobody looks at them."""


@dataclass
class OverlayCollector:
    """Watches `attn_entropy` and keeps one query's maps of what goes by.

    Without `layers` it is the last block. `left_out` counts what did not fit in MOST_SHEETS.
    """

    query: str
    layers: str | None
    fusion: str
    rollout: bool
    sheets: list[MapSheet] = field(default_factory=list)
    pictures: list[object] = field(default_factory=list)
    """The Pillow images that `MapSheet.image` counts."""
    left_out: int = 0

    def __call__(self, model: LoadedModel, batch: Sequence[Prepared], pixels: Tensor) -> None:
        layers = parse_layers(self.layers or "-1", model.config.encoder.depth)
        room = max(0, MOST_SHEETS - len(self.sheets)) // len(layers)
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
        for place, item in enumerate(batch[:room]):
            picture = item.decoded.image
            size = picture.height, picture.width
            box = grid_box(model.preprocess, size, grid, model.config.encoder.patch_size)
            query_box = None
            if "," in maps.query:
                row, column = divmod(patch_index(maps.query, grid), grid[1])
                query_box = patch_box(box, row, column, grid)
            self.pictures.append(picture)
            for index, layer in enumerate(layers):
                panels = [MapPanel(f"{self.fusion} of heads", _tuples(maps.fused[index, place]))]
                if maps.rollout is not None:
                    rolled = maps.rollout[index, place]
                    panels.append(MapPanel(f"rollout of {self.fusion}", _tuples(rolled)))
                panels += [
                    MapPanel(f"head {head}", _tuples(values))
                    for head, values in enumerate(maps.heads[index, place])
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
