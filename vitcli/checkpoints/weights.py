"""Load a checkpoint as an encoder that gives its library's numbers, or refuse it with the reason.

`save_snapshot` writes a directory that loads again bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitcli.build import build_meta
from vitcli.checkpoints.adapters import LowRank, adapted
from vitcli.checkpoints.encoder_settings import resolve_settings
from vitcli.checkpoints.families import FAMILIES
from vitcli.checkpoints.family import Family, as_stored
from vitcli.checkpoints.match import Match, Part, assign, check, takes_name
from vitcli.checkpoints.preprocessing import with_preprocess
from vitcli.checkpoints.readers import SNAPSHOT_CONFIG, Checkpoint, read_source
from vitcli.checkpoints.tower import Tower, detect, layers_read, summary, tower_config
from vitcli.config.request import (
    NAME_A_PRESET,
    config_yaml,
    for_input_size,
    preset_layers,
    read_saved_config,
)
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Layers, Setting, validate
from vitcli.config.yaml import Document
from vitcli.errors import VitcliError
from vitcli.files import atomic_folder
from vitcli.nn.encoder import VisionEncoder
from vitcli.results import LoadReport, ResolvedSetting

OWN = Family("vitcli", "vitcli", "saved and loaded back", ("front_end.projection.weight",), {})
"""vitcli's own snapshots, whose names and config are ours already."""
OPTIONAL_MODULES = (
    "front_end.position.",
    "pooling.",
    "pool_norm.",
    "head.",
    "vit.norm.",
    "deepstack.",
)
"""What the user's settings may take away from an encoder."""


def load_weights(source: str, *, dtype: torch.dtype = torch.float32, **how: Any) -> LoadedWeights:
    """The encoder of `source`, with its values.

    Args:
        dtype: of the parameters; tensors that are stored so are used where the file is mapped.
        how: what `plan_weights` takes.

    Raises:
        VitcliError: as `plan_weights`.
    """
    plan = plan_weights(source, **how)
    encoder = plan.encoder
    encoder.load_state_dict(_values(plan, dtype), assign=True)
    return LoadedWeights(plan.config, encoder.eval(), plan.report(dtype))


@torch.no_grad()
def _values(plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    """What was read becomes the parameters: no weight is initialized first, or held twice.

    Tensors stored as they are needed stay where the file is mapped. Room for the others is made
    before any is read, since what is freed between lasting tensors is lost to the allocator.
    """
    shapes = {name: tensor.shape for name, tensor in plan.encoder.state_dict().items()}
    values = {
        name: plan.parts[name].read(dtype).contiguous()
        if plan.parts[name].stands_as(dtype)
        else torch.empty(shape, dtype=dtype)
        for name, shape in shapes.items()
    }
    for name, value in values.items():
        if not plan.parts[name].stands_as(dtype):
            plan.parts[name].fill(value, dtype)
    return values


@dataclass(frozen=True)
class Plan:
    """A checkpoint understood and found whole, before a value is read.

    `encoder` is on the meta device: shapes without values.
    """

    config: ModelConfig
    encoder: VisionEncoder
    checkpoint: Checkpoint
    match: Match
    parts: Mapping[str, Part]
    settled: tuple[ResolvedSetting, ...]
    preprocess_by: str | None
    notes: tuple[str, ...] = ()

    def report(self, dtype: torch.dtype) -> LoadReport:
        stored = {_dtype_name(self.checkpoint.tensors[name].dtype) for name in self.match.used}
        return LoadReport(
            source=self.checkpoint.source,
            family=self.match.family.name,
            library=self.match.family.library,
            files=tuple(map(str, self._files())),
            tensors_used=len(self.match.used),
            tensors_dropped=tuple(sorted(self.match.dropped)),
            stored_dtypes=tuple(sorted(stored)),
            dtype=_dtype_name(dtype),
            settled=self.settled,
            preprocess_by=self.preprocess_by,
            preprocess=self.config.preprocess.model_dump(mode="json")
            if self.preprocess_by
            else None,
            tensors_resized=self._resized(),
            notes=self.notes,
        )

    def _files(self) -> Sequence[Path]:
        shard_of = self.checkpoint.shard_of
        held = sorted({shard_of[name] for name in self.match.used if name in shard_of})
        return held or self.checkpoint.files

    def _resized(self) -> tuple[str, ...]:
        """What happens to the position table at the size that the preprocessing gives."""
        encoder = self.config.encoder
        size = self.config.preprocess.output_size if self.preprocess_by else None
        if not size or not encoder.has_position_table:
            return ()
        before, after = encoder.grid, encoder.grid_at(size)
        if before == after:
            return ()
        grids = f"{before[0]}x{before[1]} to {after[0]}x{after[1]}"
        return (f"position table {grids} by {encoder.position_table.resize}",)


def report_line(report: LoadReport) -> str:
    """What was loaded, in one line for people."""
    dropped = f", {len(report.tensors_dropped)} left out" if report.tensors_dropped else ""
    resized = "".join(f", {text}" for text in report.tensors_resized)
    stored = f"{'/'.join(report.stored_dtypes)} " if report.stored_dtypes else ""
    prepared = f"from {report.preprocess_by}" if report.preprocess_by else "unknown"
    return (
        f"{report.source}: {report.family} ({report.library}), {report.tensors_used} tensors used"
        f"{dropped}{resized}, {stored}read as {report.dtype}, "
        f"preprocessing {prepared}{''.join(f'; {text}' for text in report.notes)}"
    )


def plan_weights(
    source: str,
    *,
    preset: ModelConfig | None = None,
    overrides: Sequence[Setting] = (),
    image_size: tuple[int, int] | None = None,
    which: str | None = None,
    prefix: str | None = None,
    adapters: Mapping[str, LowRank] | None = None,
) -> Plan:
    """The config of `source` and where each tensor goes; no tensor's values are read.

    Args:
        source: a file, directory, sharded index or hub id.
        preset: fills in what the source does not give.
        overrides: settings that win over everything but the tensors themselves.
        image_size: (height, width) in pixels that the preprocessing should give.
        which: `ema` or `raw`, where the file has an averaged copy of its weights; None for what
            the library takes, which is the average.
        prefix: what precedes the vision tower's names, where it is not found by itself.
        adapters: PEFT's, to be added to the checkpoint's own tensors.

    Raises:
        VitcliError: unreadable or unknown source, a tensor missing, unexpected or misshapen, a
            setting unknown, contradictory or not supported.
    """
    checkpoint = read_source(source, which)
    if "front_end.projection.weight" in checkpoint.tensors:
        return _own(checkpoint, preset, overrides, image_size)
    known = {**(preset.encoder.model_dump() if preset else {}), **_encoder_settings(overrides)}
    configs = checkpoint.configs
    tower = detect(checkpoint.tensors, FAMILIES, configs, known, source, prefix)
    family = tower.family
    spelled, outside = _needed(tower, checkpoint)
    checkpoint = checkpoint.holding(spelled.values())
    if adapters:
        tensors = adapted(checkpoint.tensors, tower, spelled, adapters)
        checkpoint = replace(checkpoint, tensors=tensors)
    match = assign(checkpoint.tensors, family, tower.prefix, spelled, tower.inside)
    match.outside.update(outside)
    parts = match.parts
    shapes = {n: shape for n, part in parts.items() if (shape := part.try_shape()) is not None}
    foreign = configs.get(family.config_file)
    config, settled = resolve_settings(match, shapes, foreign, preset, overrides)
    if config.encoder.attention.qk_norm == "head":
        parts = {_per_head(name): part for name, part in parts.items()}
    encoder = build_meta(config.encoder)
    parts = _checked(encoder, parts, match, checkpoint, overrides)
    config, preprocess_by, notes = with_preprocess(
        config, family.preprocess, configs, checkpoint.source, preset, overrides
    )
    if image_size:
        config = for_input_size(config, image_size)
    if config.classes is None:
        names = class_names(configs.get("config.json"), config.encoder.head_out)
        config = config.model_copy(update={"classes": names})
    notes = (*_notes(match, tower, checkpoint), *notes)
    return Plan(config, encoder, checkpoint, match, parts, settled, preprocess_by, notes)


def class_names(config: Mapping[str, Any] | None, outputs: int | None) -> tuple[str, ...] | None:
    """What the outputs of a published classifier mean: `id2label`, or timm's `label_names`.

    None where nobody named them; transformers writes LABEL_0, LABEL_1 ... where it knows no names.
    """
    named: Any = (config or {}).get("id2label") or (config or {}).get("label_names")
    if isinstance(named, dict):
        named = [named.get(str(index), named.get(index)) for index in range(len(named))]
    if not isinstance(named, list) or len(named) != outputs:
        return None
    if not all(isinstance(name, str) for name in named):
        return None
    placeholders = [f"LABEL_{index}" for index in range(len(named))]
    return None if named == placeholders else tuple(named)


def _needed(tower: Tower, checkpoint: Checkpoint) -> tuple[dict[str, str], list[str]]:
    """(the names that the tower's tables may take, those that it leaves in shards not read)."""
    spelled, outside = dict(tower.spelled), list(tower.outside)
    takes = takes_name(tower.family)
    for short, name in tower.spelled.items() if checkpoint.tensors.missing else ():
        if not (name in checkpoint.tensors or short in tower.inside or takes(short)):
            outside.append(spelled.pop(short))
    return spelled, outside


def _notes(match: Match, tower: Tower, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What a reader should know of a tower inside of something larger."""
    config = checkpoint.configs.get("config.json", {})
    kind = tower_config(config)[1]
    notes = [f"vision tower under {tower.prefix}"] if tower.outer else []
    notes += [note for note in (checkpoint.tensors.copied, checkpoint.tensors.adapted) if note]
    if remark := tower.family.remarks.get(kind or ""):
        notes.append(remark)
    for key, layers in layers_read(config):
        shown = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
        notes.append(f"the language model reads {shown} ({key})")
    return (*notes, *summary(match.outside))


def _encoder_settings(overrides: Sequence[Setting]) -> dict[str, Any]:
    """The user's settings of the encoder itself, those of its sections left out."""
    return {s.path[1]: s.value for s in overrides if len(s.path) == 2 and s.path[0] == "encoder"}


def _per_head(name: str) -> str:
    """The name of a q or k norm where each head has its own."""
    for norm in (".attention.q_norm.", ".attention.k_norm."):
        name = name.replace(norm, f"{norm}norm.")
    return name


def _checked(
    encoder: VisionEncoder,
    parts: dict[str, Part],
    match: Match,
    checkpoint: Checkpoint,
    overrides: Sequence[Setting],
) -> dict[str, Part]:
    """The parts that the encoder takes, once it is sure that they fit.

    Those of modules that the user's settings took away count as dropped.
    """
    expected = set(encoder.state_dict())
    kept: dict[str, Part] = {}
    for name, part in parts.items():
        module = next((m for m in OPTIONAL_MODULES if name.startswith(m)), None)
        if overrides and module and not any(key.startswith(module) for key in expected):
            names = {match.spelled[n] for n in part.names if n in match.spelled}
            match.used -= names
            match.dropped |= names
        else:
            kept[name] = part
    check(encoder, kept, match, checkpoint.tensors)
    return kept


def _own(
    checkpoint: Checkpoint,
    preset: ModelConfig | None,
    overrides: Sequence[Setting],
    image_size: tuple[int, int] | None,
) -> Plan:
    """A snapshot of vitcli's own: the names and the config are ours already.

    The config of a training run says more than the model; that is not needed here.
    """
    layers = Layers()
    if checkpoint.snapshot_config is not None:
        document = read_saved_config(checkpoint.snapshot_config)
        by = checkpoint.snapshot_config.name
        base = document.data.get("preset")
        for layer in preset_layers(base) if isinstance(base, str) else []:
            layers.add(layer)
        keys = set(ModelConfig.model_fields) & set(document.data)
        layers.add(replace(document, data={key: document.data[key] for key in keys}))
    elif preset is not None:
        by = f"preset {preset.name}"
        layers.add(Document(by, preset.model_dump(mode="python")))
    else:
        raise VitcliError(
            f"{checkpoint.source}: vitcli weights without the {SNAPSHOT_CONFIG} beside them",
            NAME_A_PRESET,
        )
    for setting in overrides:
        layers.set(setting)
    config = validate(ModelConfig, layers)
    if image_size:
        config = for_input_size(config, image_size)
    tensors = checkpoint.tensors
    parts = {name: Part(as_stored(name), [name], [tensor]) for name, tensor in tensors.items()}
    match = Match(OWN, "", [], {name: name for name in tensors}, parts, set(tensors))
    encoder = build_meta(config.encoder)
    parts = _checked(encoder, parts, match, checkpoint, overrides)
    return Plan(config, encoder, checkpoint, match, parts, (), by)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LoadedWeights:
    """An encoder in eval mode on the CPU that gives its library's numbers.

    `config.preprocess` only means something where `report.preprocess_by` names its source.
    """

    config: ModelConfig
    encoder: VisionEncoder
    report: LoadReport


WEIGHTS_FILE = "model.safetensors"


def save_snapshot(folder: Path, config: ModelConfig, encoder: VisionEncoder) -> None:
    """Write model.safetensors and config.yaml; the directory appears whole, in one rename.

    Raises:
        VitcliError: something is there already, or it cannot be written (exit code 1).
    """
    with atomic_folder(folder) as part:
        state = {name: t.contiguous() for name, t in encoder.state_dict().items()}
        save_file(state, part / WEIGHTS_FILE, metadata={"format": "pt"})
        (part / SNAPSHOT_CONFIG).write_text(config_yaml(config), encoding="utf-8")


def weights_digest(encoder: torch.nn.Module) -> str:
    """SHA-256 over every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
