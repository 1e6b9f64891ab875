"""Where each tensor goes by a family's names, and that none is left over or missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitcli.checkpoints.family import Family, From, Variant, as_stored, joined
from vitcli.checkpoints.tensors import LazyTensor, Tensors
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """A template's names: `{i}` is a block, a final `.weight` or `.bias` may be left out."""
    body = re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)")
    return re.compile(rf"{body}(?P<suffix>\.weight|\.bias)?")


COUNTER = "n_averaged"
"""What torch's AveragedModel adds to a state dict."""


@dataclass
class Part:
    """One tensor of ours and the foreign tensors it is made from, in order; None is not there."""

    rule: From
    names: list[str]
    """Every foreign name it takes."""
    tensors: list[LazyTensor | None]

    @property
    def complete(self) -> bool:
        return None not in self.tensors

    def read(self, dtype: torch.dtype) -> Tensor:
        """The values, in `dtype` where the rule computes with them and else as they are stored."""
        stored = (t.read() for t in self.tensors if t is not None)
        return self.rule.make(*(t.to(dtype) for t in stored) if self.rule.rounds else stored)

    def fill(self, out: Tensor, dtype: torch.dtype) -> None:
        """The values into `out`; parts that are joined go there one by one, without a copy."""
        if self.rule.make is not joined:
            out.copy_(self.read(dtype))
            return
        start = 0
        for tensor in self.tensors:
            if tensor is not None:
                values = tensor.read()
                out[start : start + len(values)].copy_(values)
                start += len(values)

    def stands_as(self, dtype: torch.dtype) -> bool:
        """Whether it is one stored tensor of this dtype, which needs no memory of its own."""
        return [t.dtype for t in self.tensors if t is not None] == [dtype]

    def try_shape(self) -> tuple[int, ...] | None:
        """The shape that `read` would give; None where it cannot be made of what is there."""
        metas = [torch.empty(t.shape, device="meta") for t in self.tensors if t is not None]
        try:
            return tuple(self.rule.make(*metas).shape)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None


@dataclass
class Match:
    """A checkpoint read as a family: our names, and what became of the foreign ones."""

    family: Family
    prefix: str
    variants: list[Variant]
    spelled: Mapping[str, str]
    """Names as the tables spell them, to the names in the file."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Our state-dict names to what they are made from; incomplete parts included."""
    used: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    from_tensors: dict[str, Any] = field(default_factory=dict)
    """Settings that single foreign tensors give, by Family.from_tensors."""
    left: set[str] = field(default_factory=set)
    """Names in the tower that are neither used nor matched by a drop rule."""
    outside: set[str] = field(default_factory=set)
    """Names beside the tower, which nothing here needs."""

    def renames(self) -> dict[str, From]:
        """The rules in force, the variants' before the family's."""
        merged: dict[str, str | From | None] = dict(self.family.renames)
        for variant in self.variants:
            merged |= variant.renames
        return {
            target: as_stored(rule) if isinstance(rule, str) else rule
            for target, rule in merged.items()
            if rule is not None
        }

    def unproven(self) -> list[str]:
        """Settings that the names alone do not prove."""
        return [*self.family.unproven, *(key for v in self.variants for key in v.unproven)]

    def gate_is_known(self) -> bool:
        """Whether the names, or a family that has one kind alone, show the gate of a gated MLP."""
        first = [p for name, p in self.parts.items() if name.endswith("feed_forward.fc1.weight")]
        return self.family.packed_gate or any(len(part.names) > 1 for part in first)

    def settings(self) -> dict[str, Any]:
        """What the family and its variants decide; functions are still to be called."""
        merged: dict[str, Any] = dict(self.family.decides)
        for variant in self.variants:
            merged |= variant.settings
        return merged


def has(spelled: Iterable[str], template: str) -> bool:
    return any(_pattern(template).fullmatch(name) for name in spelled)


def has_all(spelled: Collection[str], templates: Iterable[str]) -> bool:
    return all(has(spelled, template) for template in templates)


def takes_name(family: Family) -> Callable[[str], bool]:
    """Whether a rename of the family or of one of its variants takes a spelled name."""
    rules = [*family.renames.values(), *(r for v in family.variants for r in v.renames.values())]
    sources = [s for r in rules if r for s in ((r,) if isinstance(r, str) else r.sources)]
    sources += [name for v in family.variants for name in (*v.when, *v.unless)]
    return lambda name: any(_pattern(source).fullmatch(name) for source in sources)


def assign(
    tensors: Tensors,
    family: Family,
    prefix: str,
    spelled: Mapping[str, str],
    inside: Collection[str] | None = None,
) -> Match:
    """Every foreign tensor to a part of ours, a drop rule, or the list of what is left.

    Args:
        spelled: names as the family's tables have them, to those in the file.
        inside: the spelled names that are the tower's own, None for all; what else no rule takes
            is outside the tower, and left unread.
    """
    variants = [
        v
        for v in family.variants
        if has_all(spelled, v.when) and not any(has(spelled, name) for name in v.unless)
    ]
    dropped = (*family.drops, *(drop for v in variants for drop in v.drops), COUNTER)
    drops = [re.compile(drop) for drop in dropped]
    match = Match(family, prefix, variants, spelled)
    renames = match.renames()
    for name in spelled:
        took = False
        if 0 in tensors[spelled[name]].shape:  # DINOv3 without registers still stores them
            match.dropped.add(spelled[name])
            continue
        for target, rule in renames.items():
            for position, source in enumerate(rule.sources):
                found = _pattern(source).fullmatch(name)
                if found:
                    took = True
                    _place(match, target, rule, position, found, tensors[spelled[name]])
        if took:
            match.used.add(spelled[name])
        elif any(drop.fullmatch(name) for drop in drops):
            match.dropped.add(spelled[name])
        elif inside is None or name in inside:
            match.left.add(spelled[name])
        else:
            match.outside.add(spelled[name])
    for key, given in family.from_tensors.items():
        holder = next((n for n in spelled if _pattern(given.source).fullmatch(n)), None)
        if holder is not None:
            match.from_tensors[key] = given.read(tensors[spelled[holder]])
    return match


def _place(
    match: Match,
    target: str,
    rule: From,
    position: int,
    found: re.Match[str],
    tensor: LazyTensor,
) -> None:
    block = found.groupdict().get("i")
    suffix = found["suffix"] or ""
    fill = {} if block is None else {"i": block}
    name = target.format(**fill) + suffix
    if name not in match.parts:
        names = [source.format(**fill) + suffix for source in rule.sources]
        match.parts[name] = Part(rule, names, [None] * len(names))
    match.parts[name].tensors[position] = tensor


def foreign_names(target: str, match: Match) -> list[str]:
    """The names that a tensor of ours would be read from; none if no rule makes it."""
    block = re.search(r"\b(?:blocks|tables|deepstack)\.(\d+)\b", target)
    fill = {"i": block[1] if block else ""}
    for template, rule in match.renames().items():
        for suffix in ("", ".weight", ".bias"):
            if template.format(**fill) + suffix == target:
                return [source.format(**fill) + suffix for source in rule.sources]
    return []


def check(
    encoder: VisionEncoder, parts: Mapping[str, Part], match: Match, tensors: Tensors
) -> None:
    """
    Raises:
        VitcliError: a tensor is missing, unexpected or misshapen; both sides are named.
    """
    expected = {name: tuple(t.shape) for name, t in encoder.state_dict().items()}
    missing: list[str] = []
    misshapen: list[str] = []
    left = sorted(match.left)
    for name, shape in expected.items():
        part = parts.get(name)
        if part is None or not part.complete:
            wanted = foreign_names(name, match) if part is None else part.names
            lost = [match.prefix + n for n in wanted if n not in match.spelled]
            near = difflib.get_close_matches(lost[0], left, 1, 0.8) if lost else []
            missing.append(
                f"{name} (from {', '.join(lost) or 'nothing in this family'}"
                + (f"; nearest there: {near[0]}" if near else "")
                + ")"
            )
        elif part.try_shape() != shape:
            theirs = ", ".join(
                f"{match.spelled[n]} {_by(tensors[match.spelled[n]].shape)}" for n in part.names
            )
            misshapen.append(f"{name} is {_by(shape)}, from {theirs}")
    strange = sorted(
        f"{match.spelled[n]} ({t.stored or str(t.dtype).removeprefix('torch.')})"
        for name, part in parts.items()
        if name in expected
        for n, t in zip(part.names, part.tensors, strict=True)
        if t is not None and (t.stored or not t.dtype.is_floating_point)
    )
    if strange:
        raise VitcliError(
            f"{len(strange)} tensors of the encoder are not plain floating-point numbers: "
            f"{_some(strange)}",
            "use the checkpoint that is not quantized, or save it as float32, bfloat16 or float16",
        )
    used = {n for name, part in parts.items() if name in expected for n in part.names}
    extra = [
        f"{match.spelled[n]} (read as {name})"
        for name, part in parts.items()
        if name not in expected
        for n in part.names
        if n in match.spelled and n not in used
    ]
    unexpected = [*left, *extra]
    problems = [
        f"{len(items)} {kind}: {_some(items)}"
        for kind, items in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if items
    ]
    if problems:
        raise VitcliError(
            f"the tensors do not make a {match.family.name} encoder: " + " | ".join(problems),
            "check that the file is complete and that config.json belongs to it",
        )


def _some(items: Sequence[str], limit: int = 4) -> str:
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
