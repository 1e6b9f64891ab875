"""A checkpoint as an encoder that gives its library's numbers, or a refusal with the reason."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitcli.build import build_meta
from vitcli.config.load import Layers, Setting, load_config, validate
from vitcli.config.schema import ModelConfig
from vitcli.config.yaml import Document
from vitcli.core.encoder import VisionEncoder
from vitcli.errors import VitcliError
from vitcli.results.weights import LoadReport, Settled
from vitcli.weights.families import FAMILIES
from vitcli.weights.family import Family
from vitcli.weights.match import Match, Part, assign, detect, foreign_names
from vitcli.weights.preprocessing import preprocess_of
from vitcli.weights.readers import SNAPSHOT_CONFIG, Checkpoint, read_source
from vitcli.weights.report import LoadedWeights
from vitcli.weights.settle import settle
from vitcli.weights.tensors import Tensors

OWN = Family("vitcli", "vitcli", "saved and loaded back", ("front_end.projection.weight",), {})
"""vitcli's own snapshots, whose names and config are ours already."""
OPTIONAL_MODULES = ("front_end.position.", "pooling.", "pool_norm.", "head.", "vit.norm.")
"""What the user's settings may take away from an encoder."""


def load_weights(
    source: str,
    *,
    preset: ModelConfig | None = None,
    overrides: Sequence[Setting] = (),
    dtype: torch.dtype = torch.float32,
) -> LoadedWeights:
    """The encoder of `source`: a file, directory, sharded index or hub id.

    Args:
        preset: fills in what the source does not tell.
        overrides: settings that win over everything but the tensors themselves.
        dtype: of the parameters; tensors that are stored so are used where the file is mapped.

    Raises:
        VitcliError: unreadable or unknown source, a tensor missing, unexpected or misshapen, a
            setting unknown, contradictory or not supported.
    """
    checkpoint = read_source(source)
    return load_checkpoint(checkpoint, preset=preset, overrides=overrides, dtype=dtype)


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    preset: ModelConfig | None = None,
    overrides: Sequence[Setting] = (),
    dtype: torch.dtype = torch.float32,
) -> LoadedWeights:
    """`load_weights` for a source that has been read."""
    tensors = checkpoint.tensors
    if "front_end.projection.weight" in tensors:
        return _own(checkpoint, preset, overrides, dtype)
    family, prefix, spelled = detect(tensors, FAMILIES, _model_type(checkpoint))
    match = assign(tensors, family, prefix, spelled)
    parts = match.parts
    shapes = {name: shape for name, part in parts.items() if (shape := _shape(part)) is not None}
    foreign = checkpoint.configs.get(family.config_file)
    config, settled = settle(match, shapes, foreign, preset, overrides)
    if config.encoder.attention.qk_norm == "head":
        parts = {_per_head(name): part for name, part in parts.items()}
    encoder = build_meta(config.encoder)
    if any(setting.path[0] == "encoder" for setting in overrides):
        parts = _without_removed_modules(encoder, parts, match)
    _check(encoder, parts, match, tensors)
    _fill(encoder, parts, dtype)
    config, preprocess_by = _with_preprocess(config, checkpoint, family, preset, overrides)
    return LoadedWeights(
        config, encoder.eval(), _report(checkpoint, match, settled, dtype, preprocess_by)
    )


def _with_preprocess(
    config: ModelConfig,
    checkpoint: Checkpoint,
    family: Family,
    preset: ModelConfig | None,
    overrides: Sequence[Setting],
) -> tuple[ModelConfig, str | None]:
    """The config with the preprocessing of the source, else of the preset, then the user's."""
    chosen = [s for s in overrides if s.path[0] == "preprocess"]
    by = f"preset {preset.name}" if preset else None
    layers = Layers()
    layers.add(Document(by or "config", config.model_dump(mode="python")))
    try:
        told = preprocess_of(checkpoint.configs, family, config.encoder)
    except VitcliError:
        if not chosen and not preset:
            raise
        told = None  # the user says it in place of a file that cannot be followed
    if told:
        by = told[1]
        layers.set(Setting(("preprocess",), told[0].model_dump(mode="python"), by))
    for setting in chosen:
        layers.set(setting)
    name = Path(checkpoint.source).name or checkpoint.source
    layers.set(Setting(("name",), name, "the source"))
    for setting in overrides:
        if setting.path == ("name",):
            layers.set(setting)
    by = ", ".join([*([by] if by else []), *(s.source for s in chosen)]) or None
    return validate(ModelConfig, layers), by


def _model_type(checkpoint: Checkpoint) -> str | None:
    kind = checkpoint.configs.get("config.json", {}).get("model_type")
    return str(kind) if kind else None


def _shape(part: Part) -> tuple[int, ...] | None:
    """The shape of what a part makes; None where it cannot be made of what is there."""
    try:
        return part.shape()
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None


def _per_head(name: str) -> str:
    """The name of a q or k norm where each head has its own."""
    for norm in (".attention.q_norm.", ".attention.k_norm."):
        name = name.replace(norm, f"{norm}norm.")
    return name


def _without_removed_modules(
    encoder: VisionEncoder, parts: dict[str, Part], match: Match
) -> dict[str, Part]:
    """Parts without those of modules that the user's settings took away; they count as dropped."""
    expected = set(encoder.state_dict())
    kept: dict[str, Part] = {}
    for name, part in parts.items():
        module = next((m for m in OPTIONAL_MODULES if name.startswith(m)), None)
        if module and not any(key.startswith(module) for key in expected):
            names = {match.spelled[n] for n in part.names if n in match.spelled}
            match.used -= names
            match.dropped |= names
        else:
            kept[name] = part
    return kept


def _check(
    encoder: VisionEncoder, parts: Mapping[str, Part], match: Match, tensors: Tensors
) -> None:
    """Every tensor of ours is there with its shape, and none of theirs is left."""
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
        elif _shape(part) != shape:
            theirs = ", ".join(
                f"{match.spelled[n]} {_by(tensors[match.spelled[n]].shape)}" for n in part.names
            )
            misshapen.append(f"{name} is {_by(shape)}, from {theirs}")
    extra = [
        f"{match.spelled[n]} (read as {name})"
        for name, part in parts.items()
        if name not in expected
        for n in part.names
        if n in match.spelled
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


@torch.no_grad()
def _fill(encoder: VisionEncoder, parts: Mapping[str, Part], dtype: torch.dtype) -> None:
    """Parameters are what was read, so no weight is initialised or held twice."""
    state = {name: parts[name].read(dtype).contiguous() for name in encoder.state_dict()}
    encoder.load_state_dict(state, assign=True)


def _report(
    checkpoint: Checkpoint,
    match: Match,
    settled: tuple[Settled, ...],
    dtype: torch.dtype,
    preprocess_by: str | None,
) -> LoadReport:
    stored = {_dtype_name(checkpoint.tensors[name].dtype) for name in match.used}
    return LoadReport(
        source=checkpoint.source,
        family=match.family.name,
        library=match.family.library,
        files=tuple(str(file) for file in checkpoint.files),
        tensors_used=len(match.used),
        tensors_dropped=tuple(sorted(match.dropped)),
        stored_dtypes=tuple(sorted(stored)),
        dtype=_dtype_name(dtype),
        settled=settled,
        preprocess_by=preprocess_by,
    )


def _own(
    checkpoint: Checkpoint,
    preset: ModelConfig | None,
    overrides: Sequence[Setting],
    dtype: torch.dtype,
) -> LoadedWeights:
    """A snapshot of vitcli's own: the names and the config are ours already."""
    if checkpoint.snapshot_config is not None:
        config = load_config(ModelConfig, file=checkpoint.snapshot_config, settings=overrides)
        by = checkpoint.snapshot_config.name
    elif preset is not None:
        layers = Layers()
        layers.add(Document(f"preset {preset.name}", preset.model_dump(mode="python")))
        for setting in overrides:
            layers.set(setting)
        config, by = validate(ModelConfig, layers), f"preset {preset.name}"
    else:
        raise VitcliError(
            f"{checkpoint.source}: vitcli weights without the {SNAPSHOT_CONFIG} beside them",
            "--preset NAME says what they are",
        )
    tensors = checkpoint.tensors
    parts = {name: Part(_same, [name], [tensor]) for name, tensor in tensors.items()}
    match = Match(OWN, "", [], {name: name for name in tensors}, parts, set(tensors))
    encoder = build_meta(config.encoder)
    if overrides:
        parts = _without_removed_modules(encoder, parts, match)
    _check(encoder, parts, match, tensors)
    _fill(encoder, parts, dtype)
    return LoadedWeights(config, encoder.eval(), _report(checkpoint, match, (), dtype, by))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
