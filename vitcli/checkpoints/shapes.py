"""What the shapes of our tensors say about the encoder they belong to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
"""State-dict names of ours to shapes."""

MODULES = {
    "cls_token": "front_end.prefix.cls",
    "dist_token": "front_end.prefix.dist",
    "patch_norm": "front_end.patch_norm.",
    "ln_pre": "front_end.norm.",
    "final_norm": "vit.norm.",
    "pool_norm": "pool_norm.",
}
"""Switches to the names whose presence turns them on."""

_BLOCK = re.compile(r"vit\.blocks\.(\d+)\.(.+)")


def told_by_shapes(shapes: Shapes) -> dict[str, Any]:
    """Dotted keys of EncoderConfig that the tensors decide, image size and heads left out.

    A key stands for what any block has, so that a tensor lost from one block is missed later.
    """
    told: dict[str, Any] = {}
    patch = shapes.get("front_end.projection.weight", ())
    if len(patch) == 4:
        told |= {"hidden": patch[0], "channels": patch[1], "patch_size": patch[2]}
    for key, module in MODULES.items():
        told[key] = any(name.startswith(module) for name in shapes)
    told["registers"] = shapes.get("front_end.prefix.registers", (0,))[0]
    told |= _blocks(shapes)
    if any(name.startswith("pooling.") for name in shapes):
        told["pooling"] = "map"
    pool_mlp = shapes.get("pooling.feed_forward.fc1.weight", (None,))[0]
    if pool_mlp != told.get("mlp_hidden"):
        told["pool_mlp_hidden"] = pool_mlp
    if not any(name.startswith("head.") for name in shapes):
        told |= {"head": "none", "head_out": None}
    for name in ("head.linear.weight", "head.cls.weight", "head.fc2.weight"):
        if name in shapes:
            told["head_out"] = shapes[name][0]
    return told


def _blocks(shapes: Shapes) -> dict[str, Any]:
    blocks: dict[str, tuple[int, ...]] = {}
    depth = 0
    for name, shape in shapes.items():
        if found := _BLOCK.fullmatch(name):
            depth = max(depth, int(found[1]) + 1)
            blocks.setdefault(found[2], shape)
    told: dict[str, Any] = {"depth": depth}
    told["norm"] = "layernorm" if "norm1.bias" in blocks else "rmsnorm"
    told["attention.qkv_bias"] = (
        "qkv"
        if "attention.qkv.bias" in blocks
        else "qv"
        if "attention.qkv.q_bias" in blocks
        else "none"
    )
    if "attention.q_norm.weight" in blocks:
        told["attention.qk_norm_kind"] = (
            "layernorm" if "attention.q_norm.bias" in blocks else "rmsnorm"
        )
        whole = blocks["attention.q_norm.weight"] == blocks.get("norm1.weight")
        told["attention.qk_norm"] = "width" if whole else "head"
        if not whole and blocks.get("norm1.weight"):
            told["heads"] = blocks["norm1.weight"][0] // blocks["attention.q_norm.weight"][0]
    else:
        told["attention.qk_norm"] = "none"
    told["attention.inner_norm"] = "attention.norm.weight" in blocks
    told["mlp_norm"] = "feed_forward.norm.weight" in blocks
    first, second = blocks.get("feed_forward.fc1.weight"), blocks.get("feed_forward.fc2.weight")
    if first and second and len(second) == 2:
        told["mlp_hidden"] = second[1]
        told["mlp"] = "gated" if first[0] == 2 * second[1] else "plain"
    return told


def has_layer_scale(shapes: Shapes) -> bool:
    return any(name.endswith(".scale1.gamma") for name in shapes)


def table_grids(
    rows: int, prefix_rows: tuple[int, ...], grid: tuple[int, int] | None
) -> list[tuple[int, tuple[int, int]]]:
    """(prefix rows, grid) that a table of `rows` can have: square, or `grid` where it is known."""
    found = []
    for k in dict.fromkeys(prefix_rows):
        side = math.isqrt(max(rows - k, 0))
        if grid is not None and grid[0] * grid[1] == rows - k:
            found.append((k, grid))
        elif grid is None and side and side * side == rows - k:
            found.append((k, (side, side)))
    return found
