"""Every setting of the encoder, from its sources: tensors, user, family, config, preset.

Nothing is guessed: a setting that none of them gives is an error that names the option to give it
with. Where the tensors contradict a config, a preset or the user, the error names both values.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from vitcli.checkpoints.family import Family
from vitcli.checkpoints.match import Match
from vitcli.checkpoints.tower import tower_config
from vitcli.config.attention_variants import POSITIONS
from vitcli.config.request import NAME_A_PRESET
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Layers, Setting, validate
from vitcli.config.yaml import Size, as_tuple, dotted
from vitcli.errors import VitcliError
from vitcli.results import ResolvedSetting

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


def settings_from_shapes(shapes: Shapes) -> dict[str, Any]:
    """Dotted keys of EncoderConfig that the tensors decide, image size and heads left out.

    A key means what any block has, so that a tensor lost from one block is missed later.
    """
    found: dict[str, Any] = {}
    patch = shapes.get("front_end.projection.weight", ())
    if len(patch) == 4:
        found |= {"hidden": patch[0], "channels": patch[1], "patch_size": patch[2]}
    for key, module in MODULES.items():
        found[key] = any(name.startswith(module) for name in shapes)
    found["registers"] = shapes.get("front_end.prefix.registers", (0,))[0]
    found |= _blocks(shapes)
    if any(name.startswith("pooling.") for name in shapes):
        mlp = any(name.startswith("pooling.feed_forward.") for name in shapes)
        found["pooling"] = "map" if mlp else "query"
    pool_mlp = shapes.get("pooling.feed_forward.fc1.weight", (None,))[0]
    if pool_mlp != found.get("mlp_hidden"):
        found["pool_mlp_hidden"] = pool_mlp
    if not any(name.startswith("head.") for name in shapes):
        found |= {"head": "none", "head_out": None}
    for name in ("head.linear.weight", "head.cls.weight", "head.fc2.weight"):
        if name in shapes:
            found["head_out"] = shapes[name][0]
    return found


def _blocks(shapes: Shapes) -> dict[str, Any]:
    blocks: dict[str, tuple[int, ...]] = {}
    depth = 0
    for name, shape in shapes.items():
        if block := _BLOCK.fullmatch(name):
            depth = max(depth, int(block[1]) + 1)
            blocks.setdefault(block[2], shape)

    def kind(norm: str) -> str:
        return "layernorm" if f"{norm}.bias" in blocks else "rmsnorm"

    biases = {"qkv": "attention.qkv.bias", "qv": "attention.qkv.q_bias"}
    found: dict[str, Any] = {"depth": depth, "norm": kind("norm1"), "attention.qk_norm": "none"}
    found["attention.qkv_bias"] = next((b for b, name in biases.items() if name in blocks), "none")
    width, q_norm = blocks.get("norm1.weight"), blocks.get("attention.q_norm.weight")
    if q_norm:
        found["attention.qk_norm_kind"] = kind("attention.q_norm")
        found["attention.qk_norm"] = "width" if q_norm == width else "head"
        if width and q_norm != width:
            found["heads"] = width[0] // q_norm[0]
    found["attention.inner_norm"] = "attention.norm.weight" in blocks
    found["mlp_norm"] = "feed_forward.norm.weight" in blocks
    first, second = blocks.get("feed_forward.fc1.weight"), blocks.get("feed_forward.fc2.weight")
    if first and second and len(second) == 2:
        found["mlp_hidden"] = second[1]
        found["mlp"] = "gated" if first[0] == 2 * second[1] else "plain"
    return found


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


SIZES = ("hidden", "depth", "patch_size", "mlp_hidden")
"""Where a library's own default must agree with the tensors, or it is of another model."""
GEOMETRY = (*SIZES, "channels", "mlp", "norm", "registers", "cls_token", "dist_token", "ln_pre")
"""What a preset given for help must agree on with the tensors."""
BIASED = {"patch_bias": True, "attention.proj_bias": True, "mlp_bias": True}
"""What an encoder has where its family does not say that it has none."""
ROTATIONS = ("rope.theta", "rope.coordinates", "rope.layout", "rope.offset", "rope.first_axis")
"""What says how queries and keys are rotated; families that rotate by another rule decide it."""
FREE = ("pooling", "pool_norm", "head", "head_out", "final_norm", "position")
"""What the user may choose against the tensors; those no longer needed are then left out."""

_SIZE: TypeAdapter[tuple[int, int]] = TypeAdapter(Size)


class _Claims:
    """Values by dotted key, with their origin; the first claim of a key is kept."""

    def __init__(self) -> None:
        self.resolved: dict[str, ResolvedSetting] = {}

    def add(self, values: Mapping[str, Any], by: str | Mapping[str, str]) -> None:
        for key, value in values.items():
            origin = by if isinstance(by, str) else by[key]
            self.resolved.setdefault(key, ResolvedSetting(key, value, origin))

    def values(self) -> dict[str, Any]:
        return {key: setting.value for key, setting in self.resolved.items()}

    def get(self, key: str) -> Any:
        return self.resolved[key].value if key in self.resolved else None

    def agree(self, key: str, value: Any, by: str) -> None:
        """The tensors' value of `key` against another claim."""
        kept = self.resolved.get(key)
        if kept is not None and kept.value != value:
            raise VitcliError(
                f"{by} says {key} = {_shown(value)}, {kept.by} say {_shown(kept.value)}",
                f"leave out {by}: weights have the shape they were trained with"
                if by.startswith("--")
                else "use the config and the weights of the same model",
            )


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def resolve_settings(
    match: Match,
    shapes: Shapes,
    foreign: Mapping[str, Any] | None,
    preset: ModelConfig | None,
    overrides: Sequence[Setting],
) -> tuple[ModelConfig, tuple[ResolvedSetting, ...]]:
    """The model's config, and who decided each setting of the encoder.

    Args:
        shapes: our state-dict names to the shapes of what the checkpoint has for them.
        foreign: the config beside the weights, None where there is none.
        preset: fills in what the checkpoint does not give.
        overrides: the user's settings; they win over everything but the tensors.

    Raises:
        VitcliError: something unknown, contradictory or not supported.
    """
    family = match.family
    stated, implied, origins = (
        read_settings(foreign, family) if foreign is not None else ({}, {}, {})
    )
    # One lost tensor must not pass for a model without it: a family that has none says so.
    decided = {**BIASED, **match.settings()}
    needs, unproven = list(family.needs), []
    if foreign is None:
        for key in match.unproven():
            decided.pop(key, None)
            needs.append(key)
    preset_values = _settings(preset.encoder.model_dump()) if preset else {}
    by_preset = f"preset {preset.name}" if preset else ""
    asked = Layers()
    for setting in overrides:
        asked.set(setting)
    user = _settings(asked.data.get("encoder") or {})
    by_user = {key: asked.source(("encoder", *key.split("."))) for key in user}

    claims = _Claims()
    patch = shapes.get("front_end.projection.weight")
    if patch is not None and len(patch) != 4:
        raise VitcliError(
            f"the patch embedding of a {family.name} encoder is a convolution, here its weight is "
            f"{_shown(patch)}",
            "put config.json, with its model_type, beside the weights",
        )
    found = settings_from_shapes(shapes) | match.from_tensors
    chosen = {key for key in FREE if key in user}
    if user.get("head") == "none":
        chosen.add("head_out")
    if user.get("head", "merger") != "merger":
        decided["deepstack"] = ()
    found = {k: v for k, v in found.items() if k not in decided and k not in chosen}
    stated = {k: v for k, v in stated.items() if k not in chosen}
    config_says = (decided.get("mlp"), stated.get("mlp"))
    if found.get("mlp") == "gated" and not match.gate_is_known() and "gated" not in config_says:
        # A first layer of twice the width: which half is the gate, and its activation, are in the
        # code alone. What a config says of a plain MLP is not said of this one.
        for values in (stated, implied, decided):
            values.pop("mlp", None)
            values.pop("activation", None)
        if preset_values.get("mlp") != "gated":
            preset_values.pop("activation", None)
        needs += ["activation", "mlp"]
        if "gated" not in (user.get("mlp"), preset_values.get("mlp")):
            unproven.append("mlp")
    claims.add(found, "the tensors")
    for key, value in user.items():
        claims.agree(key, value, by_user[key])
    for key, value in stated.items():
        if key not in decided:
            claims.agree(key, value, origins[key])
    for key, value in implied.items():
        if key in SIZES and key in found:
            claims.agree(key, value, origins[key])
    for key in GEOMETRY if preset else ():
        if key in found and key in preset_values:
            claims.agree(key, preset_values[key], by_preset)

    claims.add(user, by_user)
    by_family = f"family {family.name}"
    claims.add({k: v for k, v in decided.items() if not callable(v)}, by_family)
    claims.add(stated, origins)
    claims.add(implied, origins)
    for key, function in decided.items():
        if callable(function):
            with contextlib.suppress(KeyError):  # what it needs is not known: neither is the key
                claims.add({key: function({**preset_values, **claims.values()})}, by_family)
    if has_layer_scale(shapes):
        # There is one; the value it started from says nothing about it any more.
        initial = preset_values.get("layer_scale") or 1.0
        claims.add({"layer_scale": initial}, "the tensors")
    _size(claims, match, shapes, preset)
    claims.add(preset_values, by_preset)

    turns = user.get("position") in ("rope2d", "learned+rope2d")
    if turns and not any(key.startswith("rope.") for key in needs):
        needs += ROTATIONS  # a word of the user's is no reason to rotate by the schema's defaults
    needed = dict.fromkeys(needs)
    if unknown := [key for key in needed if key not in claims.resolved or key in unproven]:
        raise VitcliError(
            f"{family.name}: neither the tensors nor a config give {', '.join(unknown)}",
            f"{NAME_A_PRESET}, or " + " ".join(f"--set encoder.{key}=VALUE" for key in unknown),
        )
    config = _validated(claims, preset, overrides)
    return config, tuple(s for s in claims.resolved.values() if not s.key.startswith("_"))


def _size(claims: _Claims, match: Match, shapes: Shapes, preset: ModelConfig | None) -> None:
    """The native image size and the table's prefix rows, checked against the table's length."""
    table = shapes.get("front_end.position.table")
    position = claims.get("position")
    if table is None or (position in POSITIONS and not POSITIONS[position].has_table):
        return
    patch = claims.get("patch_size")
    if patch is None:
        return  # the patch embedding is missing, which is reported later
    prefix = [int(bool(claims.get("cls_token"))) + int(bool(claims.get("dist_token")))]
    if match.family.any_prefix_rows:
        prefix += [0, prefix[0] + int(claims.get("registers") or 0)]
    grid = None
    if "image_size" not in claims.resolved and preset:
        claims.add({"image_size": preset.encoder.image_size}, f"preset {preset.name}")
    if "image_size" in claims.resolved:
        size = _SIZE.validate_python(claims.get("image_size"))
        grid = size[0] // patch, size[1] // patch
    found = table_grids(table[0], tuple(prefix), grid)
    if grid is not None and not found:
        raise VitcliError(
            f"{claims.resolved['image_size'].by} says image_size = {_shown(size)}, a grid of "
            f"{_shown(grid)}, but the position table has {table[0]} rows",
            "use the config and the weights of the same model",
        )
    if len(found) != 1:
        raise VitcliError(
            f"a position table of {table[0]} rows does not determine the image size",
            "--set encoder.image_size=HEIGHTxWIDTH",
        )
    k, (height, width) = found[0]
    claims.add({"image_size": (height * patch, width * patch)}, "the tensors")
    if match.family.any_prefix_rows:
        claims.add({"position_table.prefix_rows": k}, "the tensors")


def _settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys; YAML's lists as the tuples that the schema holds."""
    return {key: as_tuple(value) for key, value in dotted(section).items()}


def _validated(
    claims: _Claims, preset: ModelConfig | None, overrides: Sequence[Setting]
) -> ModelConfig:
    layers = Layers()
    if preset:
        preprocess = preset.preprocess.model_dump(mode="python")
        layers.set(Setting(("preprocess",), preprocess, f"preset {preset.name}"))
    for claim in claims.resolved.values():
        if claim.key.startswith("_"):
            continue
        path = ("encoder", *claim.key.split("."))
        value = list(claim.value) if isinstance(claim.value, tuple) else claim.value
        layers.set(Setting(path, value, claim.by))
    for setting in overrides:
        if setting.path[0] != "encoder":
            layers.set(setting)
    return validate(ModelConfig, layers)


def read_settings(
    config: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """(our settings the config states, those its library takes for what it leaves out, origins).

    Origins name the foreign key of each setting of ours.

    Raises:
        VitcliError: a value that we cannot follow, or a key that we do not know.
    """
    file = family.config_file
    section, kind, where = tower_config(config)
    if family.flatten:
        section, nested = _flat_config(config, family), True
    else:
        nested = bool(where) or str(kind).endswith(("_vision_model", "_vision"))
    stated: dict[str, Any] = {}
    implied: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, to in family.settings.items():
        if section.get(key) is not None:
            try:
                value = to(section[key])
            except (ValueError, TypeError, KeyError) as error:
                raise VitcliError(
                    f"{file}: {key} = {section[key]!r} is not supported in {family.name} ({error})",
                    "list what is supported: vitcli families",
                ) from error
            if to.key is not None:
                stated[to.key] = value
                origins[to.key] = f"{file}: {key}"
    for key, to in family.settings.items() if nested else ():
        default = to.by_type.get(kind or "", to.default)
        # A key may have another name, under which it is stated.
        if to.key is not None and default is not None and to.key not in stated:
            implied[to.key] = default
            origins[to.key] = f"the default that {family.library} has for {key}"
    unknown = [
        key
        for key, value in section.items()
        if key not in family.settings and key not in family.ignored and not _off(value)
    ]
    if unknown:
        shown = ", ".join(f"{key} = {section[key]!r}"[:60] for key in unknown[:4])
        raise VitcliError(
            f"{file}: settings that are not known in {family.name}: {shown}",
            "if they do not change the encoder's numbers, take them out of a copy of the config",
        )
    return stated, implied, origins


def _flat_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    assert family.flatten is not None
    try:
        return dict(family.flatten(config))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise VitcliError(
            f"{family.config_file}: {family.library} {error} is not supported",
            "list what is supported: vitcli families",
        ) from error


def _off(value: Any) -> bool:
    """A setting that is absent in all but name."""
    return value is None or value is False or value in ("", [], {})
