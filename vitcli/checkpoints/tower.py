"""Which family a checkpoint belongs to, and under which prefix its vision tower is.

Evidence comes from two sides: the config beside the weights says what the tower is, and the names
of the tensors show where one of that kind is. What lies outside the tower is not looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitcli.checkpoints.family import Configs, Family
from vitcli.checkpoints.match import has, has_all, takes_name
from vitcli.checkpoints.tensors import Tensors
from vitcli.config.request import NAME_A_PRESET
from vitcli.errors import VitcliError

WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
"""What torch.compile, activation checkpointing and FSDP put into names, anywhere."""
CONFIG_SECTIONS = ("vision_config", "backbone_config")
"""Where a config of transformers holds that of its vision tower."""
CONFIGS_AROUND = ("thinker_config", "vlm_config", "encoder")
"""Configs that hold the model with the vision tower."""
LAYER_KEYS = (
    *("vision_feature_layer", "vision_feature_layers", "mm_vision_select_layer", "select_layer"),
    *("deepstack_layer_map", "spatial_vision_layer"),
)
"""Keys of a whole model that say which layers of its tower the language model reads."""
PREFERRED = ("teacher", "image_tower", "model_ema")
"""Where a file has two towers of one kind, the one whose prefix has one of these is read."""
_WINDOWS = "biases of the scores computed from the queries, windows filled up with zeros"
_BETWEEN = "a merger of 2x2 patches between its blocks"
COMPUTED_OTHERWISE = {
    "sam": _WINDOWS,  # old configs do not name the tower's own kind
    "sam_vision_model": _WINDOWS,
    "sam_hq_vision_model": _WINDOWS,
    "gemma4_vision": "four norms in a block, a norm of values, scores that are not scaled",
    "vjepa2": "rotations of a third of each head's channels by frame, row and column",
    "minicpmv4_6_vision": _BETWEEN,
    "minicpmv4_7_vision": _BETWEEN,
}
"""What this encoder does not compute, by the model_type of towers that do."""
LANGUAGE = (
    *("language_model", "text_model", "text", "lm_head", "embed_tokens", "mtp", "talker"),
    *("text_projection", "llm", "token_embedding", "score"),
)
"""Parts of names that say that a tensor is the language model's."""


@dataclass(frozen=True)
class Tower:
    """A vision tower found in a checkpoint."""

    family: Family
    outer: str
    """What precedes the names of the model that has the tower and its heads."""
    inner: str
    """What follows it, before the tower's own names."""
    spelled: Mapping[str, str]
    """Names as the family's tables spell them, to those in the file; under `outer` alone."""
    inside: frozenset[str]
    """The spelled names that are the tower's own."""
    outside: tuple[str, ...] = ()
    """Names in the file that are not under `outer`."""

    @property
    def prefix(self) -> str:
        return self.outer + self.inner


def tower_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, str]:
    """(the tower's part of a config of transformers, its model_type, the keys that lead to it).

    CLIP configs of 2022 keep a second copy, `vision_config_dict`, which wins. A section that does
    not name its model is of the kind that the whole config names.
    """
    whole = config.get("model_type")
    encoder = config.get("encoder")
    if whole == "vision-encoder-decoder" and isinstance(encoder, dict):
        return dict(encoder), str(encoder.get("model_type") or whole), "encoder"
    for path, holder in _holders(config):
        for key in CONFIG_SECTIONS:
            inner = holder.get(key)
            if not isinstance(inner, dict):
                continue
            newer = holder.get(f"{key}_dict")
            section = {**inner, **(newer if isinstance(newer, dict) else {})}
            kind = section.get("model_type") or _unnamed(section)
            kind = kind or holder.get("model_type") or whole
            return section, str(kind) if kind else None, f"{path}{key}"
    whole = whole or _unnamed(config)
    return dict(config), str(whole) if whole else None, ""


def _unnamed(config: Mapping[str, Any]) -> str | None:
    """What a config is of whose library does not name its models: RADIO's own code."""
    args = config.get("args")
    return "radio" if isinstance(args, dict) and {"model", "cpe_max_size"} <= set(args) else None


def _holders(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, config
    for key in CONFIGS_AROUND:
        inner = config.get(key)
        if isinstance(inner, dict):
            yield from _holders(inner, f"{path}{key}.")


def layers_read(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """The keys of a whole model that say which of the tower's layers are read, and those layers.

    They count as `--layer` does: 0 is the input of the first block, -1 the last block's output.
    """
    for _, holder in _holders(config):
        for key in LAYER_KEYS:
            value = holder.get(key)
            listed = value if isinstance(value, list) else [value]
            # Granite: pairs of the tower's layer and the language model's
            firsts = [pair[0] if isinstance(pair, list) and pair else pair for pair in listed]
            layers = [layer for layer in firsts if isinstance(layer, int)]
            if layers and len(layers) == len(listed):
                yield key, layers


def detect(
    tensors: Tensors,
    families: Sequence[Family],
    configs: Configs,
    known: Mapping[str, Any],
    source: str,
    prefix: str | None = None,
) -> Tower:
    """The vision tower of a checkpoint.

    Args:
        configs: the JSON files beside the weights.
        known: settings of the encoder by the preset and the user, for families of the same names.
        source: what the errors call the checkpoint.
        prefix: `--prefix`, what precedes the tower's names.

    Raises:
        VitcliError: no supported family has the tower that the config names or these names, or
            several have and nothing says which it is.
    """
    names = {name: WRAPPED.sub("", name) for name in tensors.names()}
    stripped = {name: _without_module(clean) for name, clean in names.items()}
    # Names that differ in a part that is a number are of one kind; one of each is enough to see.
    kinds = list({re.sub(r"\.\d+\.", ".#.", clean): clean for clean in stripped.values()}.values())
    fits = _fits(tensors, stripped, kinds, families, prefix)
    claimed = [fit for fit in fits if _answers(fit[0], configs)]
    if not claimed:
        raise _refusal(source, configs, families, fits, list(stripped.values()), prefix)
    claimed = _told_apart(_outermost(claimed), configs, known, source)
    family, outer, inner = _one(claimed, configs, source)
    spelled = _spell_all(stripped, outer, inner, family)
    whole = outer + inner
    inside = frozenset(s for s, name in spelled.items() if stripped[name].startswith(whole))
    if not whole and tower_config(configs.get("config.json", {}))[2]:
        inside -= _language_at_root(inside, family)
    outside = tuple(name for name, clean in stripped.items() if not clean.startswith(outer))
    return Tower(family, outer, inner, spelled, inside, outside)


def _language_at_root(names: Iterable[str], family: Family) -> set[str]:
    """A language model's names beside a tower whose own have no prefix (Cosmos 3).

    They are only those that begin like no name of the tower, which could be a part of it.
    """
    language = {name for name in names if _part(name) == "language model"}
    takes = takes_name(family)
    own = {name.split(".")[0] for name in names if takes(name)}
    return {name for name in language if name.split(".")[0] not in own}


Fit = tuple[Family, str, str]
"""A family, and the outer and inner prefix under which its names are."""


def _without_module(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _fits(
    tensors: Tensors,
    stripped: Mapping[str, str],
    kinds: Sequence[str],
    families: Sequence[Family],
    prefix: str | None,
) -> list[Fit]:
    """Every family with every prefix under which its names are."""
    outers = _outers(kinds)
    if prefix is not None:
        wanted = prefix if not prefix or prefix.endswith((".", "/")) else prefix + "."
        outers = [wanted, *(o for o in outers if wanted.startswith(o) and o != wanted)]
    under = {outer: [name for name in kinds if name.startswith(outer)] for outer in outers}
    ranks = {clean: len(t.shape) for name, clean in stripped.items() if (t := tensors.get(name))}
    fits: list[Fit] = []
    for family in families:
        if family.wrappers and tensors.wrapper not in family.wrappers:
            continue
        seen: set[str] = set()
        for outer in outers:
            for inner in sorted(family.prefixes, key=len, reverse=True):
                whole = outer + inner
                if whole in seen or (prefix is not None and wanted not in (outer, whole)):
                    continue
                if inner and not any(name.startswith(whole) for name in under[outer]):
                    continue
                spelled = {spell(name, whole, outer, family): name for name in under[outer]}
                if has_all(spelled, family.signature) and not (
                    any(has(spelled, name) for name in family.absent)
                    or any(
                        ranks.get(spelled[name], rank) != rank
                        for name, rank in family.ranks.items()
                        if name in spelled
                    )
                ):
                    seen.add(whole)
                    fits.append((family, outer, inner))
    return fits


def _outers(kinds: Iterable[str]) -> list[str]:
    """What may precede a model's names: the beginnings of what leads to numbered blocks."""
    found = {""}
    for name in kinds:
        if block := re.search(r"\.\d+\.", name):
            parts = name[: block.start()].split(".")
            found |= {".".join(parts[:count]) + "." for count in range(1, len(parts))}
    return sorted(found, key=lambda outer: (outer.count("."), outer))


def spell(name: str, whole: str, outer: str, family: Family) -> str:
    """A name as the family's tables have it: its prefix off, its aliases on."""
    name = name.removeprefix(whole) if name.startswith(whole) else name.removeprefix(outer)
    for pattern, replacement in family.aliases:
        name = re.sub(pattern, replacement, name)
    return name


def _spell_all(
    stripped: Mapping[str, str], outer: str, inner: str, family: Family
) -> dict[str, str]:
    spelled: dict[str, str] = {}
    for name, clean in stripped.items():
        if not clean.startswith(outer):
            continue
        short = spell(clean, outer + inner, outer, family)
        if short in spelled:
            raise VitcliError(
                f"{spelled[short]} and {name} are the same tensor in two spellings",
                "keep one of the two",
            )
        spelled[short] = name
    return spelled


def _answers(family: Family, configs: Configs) -> bool:
    """Whether the configs beside the weights let the family be what they are of."""
    config = configs.get("config.json")
    if config is None or family.config_file != "config.json":
        return True  # a family with a file of its own is judged by that
    section, kind, _ = tower_config(config)
    if "architecture" in section or "pretrained_cfg" in section:
        return family.flatten is not None
    return kind in family.model_types


def _outermost(fits: list[Fit]) -> list[Fit]:
    """The fits that are not within another one: the whole explains its parts."""
    prefixes = {outer + inner for _, outer, inner in fits}
    return [
        (family, outer, inner)
        for family, outer, inner in fits
        if not any(p != outer + inner and (outer + inner).startswith(p) for p in prefixes)
    ]


def _told_apart(
    fits: list[Fit], configs: Configs, known: Mapping[str, Any], source: str
) -> list[Fit]:
    """The fits without those whose `distinguished_by` another one meets."""
    twins = [(fit, fit[0].distinguished_by) for fit in fits if fit[0].distinguished_by]
    if len(twins) < 2 or any(family.config_file in configs for (family, _, _), _ in twins):
        return fits
    strangers = [fit for fit, (key, value) in twins if known.get(key) != value]
    if len(strangers) == len(twins):
        names = " and ".join(family.name for (family, _, _), _ in twins)
        choices = " or ".join(
            f"--set encoder.{key}={value} ({family.name})" for (family, _, _), (key, value) in twins
        )
        raise VitcliError(
            f"{source}: {names} have the same tensor names, and no config says which one this is",
            f"put config.json beside the weights, or add {NAME_A_PRESET} or {choices}",
        )
    return [fit for fit in fits if fit not in strangers]


def _reads(family: Family, configs: Configs) -> bool:
    """Whether the architecture that a config names is among the family's."""
    config = configs.get(family.config_file)
    if family.flatten is None or config is None:
        return True
    try:
        family.flatten(config)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    return True


def _one(fits: list[Fit], configs: Configs, source: str) -> Fit:
    """The fit that is read: of one prefix the most particular family, of several what is asked."""
    prefixes = list(dict.fromkeys(outer + inner for _, outer, inner in fits))
    if len(prefixes) > 1:
        best = [p for p in prefixes if set(p.split(".")) & set(PREFERRED)]
        if len(best) != 1:
            shown = ", ".join(f"{p or 'none'} ({_names(fits, p)})" for p in prefixes[:4])
            raise VitcliError(
                f"{source}: {len(prefixes)} vision towers, under the prefixes {shown}",
                f"--prefix {prefixes[0] or repr('')}",
            )
        prefixes = best
    there = [fit for fit in fits if fit[1] + fit[2] == prefixes[0]]
    return next((fit for fit in there if _reads(fit[0], configs)), there[0])


def _names(fits: list[Fit], prefix: str) -> str:
    return " or ".join(family.name for family, outer, inner in fits if outer + inner == prefix)


def _refusal(
    source: str,
    configs: Configs,
    families: Sequence[Family],
    fits: list[Fit],
    names: list[str],
    prefix: str | None,
) -> VitcliError:
    """What the checkpoint is, and that it is not read."""
    listed = "list what is supported: vitcli families"
    if _library_knows(configs):
        command = f"vitcli encode --weights {shlex.quote(source)} --engine reference"
        listed = f"run it by its own library: {command}"
    config = configs.get("config.json", {})
    _, kind, where = tower_config(config)
    group, count = _largest(names)
    if prefix is not None:
        return VitcliError(
            f"{source}: no supported family matches under the prefix {prefix!r}",
            f"--prefix {group or 'P'}",
        )
    if kind and "architecture" not in config:
        at, count = _tower_names(names)
        tower = f"{where or 'model_type'} {kind}, {count} tensors{f' under {at}' if at else ''}"
        whole = str(config.get("model_type") or kind if where else kind)
        what = f"{'an' if whole[0] in 'aeiou' else 'a'} {whole} checkpoint whose tower ({tower})"
        of_kind = [family.name for family in families if kind in family.model_types]
        if not of_kind:
            why = f": {COMPUTED_OTHERWISE[kind]}" if kind in COMPUTED_OTHERWISE else ""
            return VitcliError(f"{source}: {what} is not supported{why}", listed)
        if not fits:
            return VitcliError(
                f"{source}: {what} does not have the tensor names of {' or '.join(of_kind)}",
                "check that the file is complete and that config.json belongs to it",
            )
    if fits and config:
        shown_kind = f"model_type {kind!r}" if kind else "no model_type"
        shown = ", ".join(dict.fromkeys(family.name for family, _, _ in fits))
        return VitcliError(
            f"config.json has {shown_kind}, the tensors of {source} are named as in {shown}",
            "put the config.json of these weights beside them",
        )
    architecture = config.get("architecture")
    named = f"; config.json: architecture {architecture}" if architecture else ""
    return VitcliError(
        f"{source}: unrecognized checkpoint: no supported family matches ({len(names)} tensors; "
        f"largest group {group or 'at the root'}, {count}{named})",
        listed,
    )


def _library_knows(configs: Configs) -> bool:
    """Whether a library builds what the config names by code of its own, so far as is known."""
    config = configs.get("config.json", {})
    with contextlib.suppress(ImportError, KeyError, TypeError):
        if "open_clip_config.json" in configs:
            given = set(configs["open_clip_config.json"]["model_cfg"]["vision_cfg"])
            model = importlib.import_module("open_clip.model")
            return given <= {field.name for field in dataclasses.fields(model.CLIPVisionCfg)}
        if "architecture" in config:
            return bool(importlib.import_module("timm").is_model(str(config["architecture"])))
        if "model_type" in config:
            auto = importlib.import_module("transformers.models.auto.configuration_auto")
            return str(config["model_type"]) in auto.CONFIG_MAPPING_NAMES
    return "model_type" in config and "auto_map" not in config


_VISION = ("vision_tower", "vision_model", "visual", "vision_encoder", "vision", "vit", "backbone")


def _tower_names(names: list[str]) -> tuple[str, int]:
    """The prefix that looks like a vision tower's, and how many tensors are under it."""
    for word in _VISION:
        at = [name for name in names if f".{word}." in f".{name}"]
        if at:
            start = f".{at[0]}".index(f".{word}.")
            return at[0][: start + len(word) + 1], len(at)
    return "", len(names)


def _largest(names: list[str]) -> tuple[str, int]:
    groups = Counter(name.split(".")[0] + "." if "." in name else "" for name in names)
    return groups.most_common(1)[0] if groups else ("", 0)


def summary(names: Iterable[str]) -> tuple[str, ...]:
    """What lies outside the tower, part by part: `language model: 291 tensors, not read`."""
    groups = Counter(_part(name) for name in names)
    return tuple(
        f"{part}: {count} tensor{'s' * (count != 1)}, not read"
        for part, count in groups.most_common()
    )


def _part(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in ("model", "module", "_orig_mod", "base_model", "thinker"):
        parts = parts[1:]
    if parts[0] in ("layers", "norm", "decoder") or set(parts[:3]) & set(LANGUAGE):
        return "language model"
    return parts[0]
