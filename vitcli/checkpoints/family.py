"""What a weight family is: data that one engine applies.

A family recognizes tensors and settings of a library's checkpoint (signature), spells its names
one way (prefixes, aliases), says where each tensor goes (renames), what is left out (drops), and
how the library's config reads in ours (settings). Adding one adds a table, no code path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitcli.checkpoints.preprocessing import Reader
from vitcli.checkpoints.tensors import LazyTensor

Value = Any
"""A config value: a number, a string, a bool, None or a tuple."""


@dataclass(frozen=True)
class From:
    """One tensor of ours made from foreign ones.

    `sources` are name templates; `{i}` is the block. Names may leave out `.weight` and `.bias`:
    then both are meant, and carried over. `make` sees the tensors in the order of `sources`; it
    also runs on the meta device to learn shapes, so it may only use shapes and tensor methods.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor]
    rounds: bool = False
    """`make` computes, so it gets its tensors in the dtype asked for; else it only moves values."""


@dataclass(frozen=True)
class FromTensor:
    """What `read` finds in the foreign tensor of this name (a template; any block will do).

    For what no tensor of ours shows, such as the head count in the shape of a kernel.
    """

    source: str
    read: Callable[[LazyTensor], Value]


Configs = Mapping[str, Mapping[str, Any]]
"""The JSON files beside the weights, by name."""
Renames = Mapping[str, str | From | None]
"""State-dict names of ours to foreign ones, both templates; None takes one away."""


@dataclass(frozen=True)
class To:
    """Where a foreign setting goes.

    `key` is a dotted key of EncoderConfig; None means that the setting is only checked, and a key
    that begins with `_` is there for the functions in Family.decides. `read`
    turns the foreign value into ours: a table of the values known, or a function that raises
    ValueError for what it does not know. `default` is what the library takes where a nested
    config leaves the key out (a nested config holds only differences from the defaults),
    `by_type` what it takes for single model_types.
    """

    key: str | None
    read: Mapping[Value, Value] | Callable[[Value], Value] | None = None
    default: Value = None
    by_type: Mapping[str, Value] = field(default_factory=dict)

    def __call__(self, value: Value) -> Value:
        """Our value. Raises ValueError where there is none."""
        if self.read is None:
            return value
        if callable(self.read):
            return self.read(value)
        for foreign, ours in self.read.items():
            if foreign == value and isinstance(foreign, bool) == isinstance(value, bool):
                return ours
        known = ", ".join(repr(known) for known in self.read)
        raise ValueError(f"known here: {known}")


def only(*values: Value) -> To:
    """A setting that must have one of these values."""
    return To(None, {value: value for value in values})


@dataclass(frozen=True)
class Variant:
    """What changes where tensors of certain names are there (`when`) and others not (`unless`).

    Names are templates as in `From`, and any block counts. `settings` win over the foreign
    config; `renames` and `drops` come before the family's. `unproven` as in Family.
    """

    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict)
    renames: Renames = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A library's way to write one kind of encoder.

    Attributes:
        name: for example `hf-dinov2`.
        library: whose numbers the encoder gives.
        verified: what the family was compared with.
        signature: names that must all be there once prefix and aliases are applied.
        absent: names that must not be there.
        ranks: how many axes tensors of these names have, where another family shares the names.
        distinguished_by: a setting of ours, and the value of it that distinguishes this family from
            another of the same names, where no foreign config names the model.
        model_types: the values of the foreign config's `model_type` (or its like) it answers to.
        prefixes: what precedes the encoder's names in the library's own models with a head;
            whatever precedes that in a larger model is found by itself.
        aliases: (pattern, replacement) regular expressions that turn other spellings into the
            one that the tables use.
        renames: our state-dict names (templates) to foreign names.
        drops: regular expressions of names that are known and not needed.
        settings: foreign config keys.
        ignored: foreign config keys that do not change what the encoder computes.
        decides: our settings that the family decides; a function gets those found so far and
            raises KeyError where it lacks one.
        needs: our settings that neither tensors nor the family give.
        unproven: our settings that the family decides only where a config names the model; the
            names alone are those of others too, so without a config they are asked for.
        packed_gate: a first layer of twice the width is a gate and its input in this order,
            because the library has nothing else there.
        remarks: what to report about a model_type.
        variants: see Variant; every one that matches applies.
        config_file: the JSON file beside the weights that the settings are in.
        any_prefix_rows: the table's prefix rows follow from its length (timm) in place of being
            those of CLS and distillation.
        wrappers: keys, one of which the file holds its state dict under; empty for any or none.
        from_tensors: our settings, or keys that begin with `_`, that single foreign tensors give.
        flatten: lays a config that is nested in the library's own way flat, for `settings`; raises
            ValueError for what it does not know.
        preprocess: how images are prepared, from the JSON files beside the weights and the
            encoder's config; None where nothing says it.
    """

    name: str
    library: str
    verified: str
    signature: tuple[str, ...]
    renames: Renames
    absent: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    distinguished_by: tuple[str, Value] | None = None
    model_types: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    aliases: tuple[tuple[str, str], ...] = ()
    drops: tuple[str, ...] = ()
    settings: Mapping[str, To] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    decides: Mapping[str, Value | Callable[[Mapping[str, Value]], Value]] = field(
        default_factory=dict
    )
    needs: tuple[str, ...] = ("heads", "norm_eps", "activation")
    unproven: tuple[str, ...] = ()
    packed_gate: bool = False
    remarks: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    config_file: str = "config.json"
    any_prefix_rows: bool = False
    wrappers: tuple[str, ...] = ()
    from_tensors: Mapping[str, FromTensor] = field(default_factory=dict)
    flatten: Callable[[Mapping[str, Any]], Mapping[str, Value]] | None = None
    preprocess: Reader | None = None


def as_stored(source: str) -> From:
    return From((source,), lambda tensor: tensor)


def joined(*parts: Tensor) -> Tensor:
    """torch.cat; by hand for shapes alone, where torch.cat imports its compiler for a second."""
    if parts[0].device.type != "meta":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError("parts of different widths")
    return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])


def fused(*sources: str) -> From:
    """Matrices or vectors one below the other: q, k and v, or gate and up."""
    return From(sources, joined)


BLOCK_PARTS = {
    "norm1": "norm1",
    "qkv": "attention.qkv",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "proj": "attention.proj",
    "scale1": "scale1.gamma",
    "norm2": "norm2",
    "fc1": "feed_forward.fc1",
    "fc2": "feed_forward.fc2",
    "scale2": "scale2.gamma",
}
"""Parts of a block, to their names in ours."""


def block(at: str, **parts: str | tuple[str, ...]) -> Renames:
    """Renames of the parts of a block, whose foreign names follow `at`.

    Several names are joined, one below the other; `*` is q, k and v in turn.
    """
    renames: dict[str, str | From | None] = {}
    for part, names in parts.items():
        listed = (names,) if isinstance(names, str) else names
        sources = [
            at + name.replace("*", third)
            for name in listed
            for third in ("qkv" if "*" in name else "*")
        ]
        ours = "vit.blocks.{i}." + BLOCK_PARTS[part]
        renames[ours] = sources[0] if len(sources) == 1 else fused(*sources)
    return renames


def no_key_bias(weight: str | From, q_bias: str | From, v_bias: str | From) -> Renames:
    """Renames of a block's fused projection whose keys have no bias."""
    qkv = "vit.blocks.{i}.attention.qkv"
    return {qkv: None, f"{qkv}.weight": weight, f"{qkv}.q_bias": q_bias, f"{qkv}.v_bias": v_bias}


def table_resize(resize: str, dtype: str) -> dict[str, str]:
    """Decides how a position table is resized, and in which dtype."""
    return {"position_table.resize": resize, "position_table.resize_dtype": dtype}


def without(given: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A table of renames or settings without some of its keys."""
    return {key: value for key, value in given.items() if key not in keys}


def rows(*sources: str) -> From:
    """Tokens or tables of any number of leading axes as (rows, D), one below the other."""
    return From(sources, lambda *parts: joined(*(p.reshape(-1, p.shape[-1]) for p in parts)))


def third(index: int, source: str) -> From:
    """One of q, k, v out of a fused projection."""
    return From((source,), lambda t: t.chunk(3)[index])


def last_two_thirds(source: str) -> From:
    """k and v out of a fused projection."""
    return From((source,), lambda t: t[t.shape[0] // 3 :])


def probe_pooling(at: str, attention: str, fc1: str, fc2: str) -> Renames:
    """A pooling by nn.MultiheadAttention from a trained query, with an MLP (SigLIP's)."""
    projections = at + attention + "in_proj_"
    return {
        "pooling.probe": rows(at + "probe"),
        **{f"pooling.q.{part}": third(0, projections + part) for part in ("weight", "bias")},
        **{
            f"pooling.kv.{part}": last_two_thirds(projections + part) for part in ("weight", "bias")
        },
        "pooling.proj": f"{at}{attention}out_proj",
        "pooling.norm": at + "layernorm",
        "pooling.feed_forward.fc1": at + fc1,
        "pooling.feed_forward.fc2": at + fc2,
    }


def transposed(source: str) -> From:
    """A matrix stored for multiplication from the right, (in, out)."""
    return From((source,), lambda t: t.T)


def summed_over_frames(source: str) -> From:
    """A Conv3d weight (D, C, T, p, p) on T equal frames, as a Conv2d weight (D, C, p, p)."""
    return From((source,), lambda t: t.sum(dim=2), rounds=True)


def conv_from_flat(source: str) -> From:
    """A linear map of flattened RGB patches (channel, row, column) as a Conv2d weight."""

    def make(t: Tensor) -> Tensor:
        side = math.isqrt(t.shape[1] // 3)
        return t.reshape(-1, 3, side, side)

    return From((source,), make)


def conv_from_linear(source: str) -> From:
    """A linear map of flattened RGB patches (row, column, channel) as a Conv2d weight."""

    def make(t: Tensor) -> Tensor:
        side = math.isqrt(t.shape[1] // 3)
        return t.reshape(-1, side, side, 3).permute(0, 3, 1, 2)

    return From((source,), make)


def size(value: Any) -> tuple[int, int]:
    """(height, width) of `224`, `[224, 224]` or a mapping of both."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]]
    if isinstance(value, int):
        value = [value, value]
    height, width = value
    return int(height), int(width)


def side(value: Any) -> int:
    """One number, or two equal ones."""
    height, width = size(value)
    if height != width:
        raise ValueError("patches must be square")
    return height


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value
