"""Which family a checkpoint belongs to, where each tensor goes, and that none is left over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitcli.checkpoints.family import Family, From, Variant, joined
from vitcli.checkpoints.tensors import LazyTensor, Tensors
from vitcli.config.request import NAME_A_PRESET
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """A template's names: `{i}` is a block, a final `.weight` or `.bias` may be left out."""
    body = re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)")
    return re.compile(rf"{body}(?P<suffix>\.weight|\.bias)?")


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
    told: dict[str, Any] = field(default_factory=dict)
    """Settings that single foreign tensors tell, by Family.tells."""
    left: set[str] = field(default_factory=set)
    """Names in the file that are neither used nor matched by a drop rule."""

    def renames(self) -> dict[str, From]:
        """The rules in force, the variants' before the family's."""
        merged: dict[str, str | From | None] = dict(self.family.renames)
        for variant in self.variants:
            merged |= variant.renames
        return {
            target: From((rule,), _same) if isinstance(rule, str) else rule
            for target, rule in merged.items()
            if rule is not None
        }

    def settings(self) -> dict[str, Any]:
        """What the family and its variants decide; functions are still to be called."""
        merged: dict[str, Any] = dict(self.family.decides)
        for variant in self.variants:
            merged |= variant.settings
        return merged


def detect(
    tensors: Tensors,
    families: Sequence[Family],
    model_type: str | None,
    known: Mapping[str, Any],
    source: str,
) -> tuple[Family, str, dict[str, str]]:
    """The family, its prefix, and the file's names by the spelling of the family's tables.

    Args:
        model_type: what the config beside the weights calls the model, None where there is none.
        known: settings of the encoder by the preset and the user, for families of the same names.
        source: what the errors call the checkpoint.

    Raises:
        VitcliError: no family fits the names, none that fits answers to `model_type`, or several
            do and nothing tells which it is.
    """
    fits: list[tuple[Family, str]] = []
    # Names that differ in a part that is a number are of one kind; one of each is enough to see.
    kinds = list({re.sub(r"\.\d+\.", ".#.", name): name for name in tensors}.values())
    for family in families:
        if family.wrappers and tensors.wrapper not in family.wrappers:
            continue
        for prefix in family.prefixes:
            if not any(name.startswith(prefix) for name in kinds):
                continue
            spelled = {_spell(name, prefix, family) for name in kinds}
            if _has_all(spelled, family.signature) and not any(
                _has(spelled, name) for name in family.absent
            ):
                fits.append((family, prefix))
                break
    if not fits:
        some = ", ".join(sorted(tensors)[:4])
        raise VitcliError(
            f"{source}: its tensors fit no family that is known (they begin {some})",
            "`vitcli families` lists what is read",
        )
    if not model_type:
        fits = _told_apart(fits, known, source)
    for family, prefix in fits:
        if not (model_type and family.model_types) or model_type in family.model_types:
            return family, prefix, _spell_all(tensors, prefix, family)
    names = ", ".join(family.name for family, _ in fits)
    raise VitcliError(
        f"the config says model_type {model_type!r}, the tensors are named as in {names}",
        "`vitcli families` lists what is read; is config.json that of these weights?",
    )


def _told_apart(
    fits: list[tuple[Family, str]], known: Mapping[str, Any], source: str
) -> list[tuple[Family, str]]:
    """The fits without those whose `told_by` another one meets."""
    twins = [(fit, fit[0].told_by) for fit in fits if fit[0].told_by]
    if len(twins) < 2:
        return fits
    told = [fit for fit, (key, value) in twins if known.get(key) == value]
    if not told:
        names = " and ".join(family.name for (family, _), _ in twins)
        choices = " or ".join(
            f"--set encoder.{key}={value} ({family.name})" for (family, _), (key, value) in twins
        )
        raise VitcliError(
            f"{source}: {names} name their tensors alike, and nothing tells which this is",
            f"config.json beside the weights, {NAME_A_PRESET}, {choices}",
        )
    return told


def _spell(name: str, prefix: str, family: Family) -> str:
    name = name.removeprefix(prefix)
    for pattern, replacement in family.aliases:
        name = re.sub(pattern, replacement, name)
    return name


def _spell_all(names: Iterable[str], prefix: str, family: Family) -> dict[str, str]:
    spelled: dict[str, str] = {}
    for name in names:
        short = _spell(name, prefix, family)
        if short in spelled:
            raise VitcliError(
                f"{spelled[short]} and {name} are the same tensor in two spellings",
                "keep one of the two",
            )
        spelled[short] = name
    return spelled


def _has(spelled: Iterable[str], template: str) -> bool:
    return any(_pattern(template).fullmatch(name) for name in spelled)


def _has_all(spelled: Collection[str], templates: Iterable[str]) -> bool:
    return all(_has(spelled, template) for template in templates)


def assign(tensors: Tensors, family: Family, prefix: str, spelled: Mapping[str, str]) -> Match:
    """Every foreign tensor to a part of ours, a drop rule, or the list of what is left."""
    variants = [
        v
        for v in family.variants
        if _has_all(spelled, v.when) and not any(_has(spelled, name) for name in v.unless)
    ]
    drops = [re.compile(d) for d in (*family.drops, *(d for v in variants for d in v.drops))]
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
        else:
            match.left.add(spelled[name])
    for key, tell in family.tells.items():
        teller = next((n for n in spelled if _pattern(tell.source).fullmatch(n)), None)
        if teller is not None:
            match.told[key] = tell.read(tensors[spelled[teller]])
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


def _same(tensor: Tensor) -> Tensor:
    return tensor


def foreign_names(target: str, match: Match) -> list[str]:
    """The names that a tensor of ours would be read from; none if no rule makes it."""
    block = re.search(r"\.blocks\.(\d+)\.", target)
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
            "nothing was loaded; is the file whole, and its config its own?",
        )


def _some(items: Sequence[str], limit: int = 4) -> str:
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
