"""From a source as the user names it to its tensors and the configs beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitcli.checkpoints.formats import READERS, read_tensors
from vitcli.checkpoints.hub import download, is_hub_id
from vitcli.checkpoints.preprocessing import PROCESSORS
from vitcli.checkpoints.tensors import Tensors
from vitcli.config.load import preset_names
from vitcli.errors import VitcliError

SNAPSHOT_CONFIG = "config.yaml"
"""vitcli's own config, which stands beside the weights of its snapshots."""
FOREIGN_CONFIGS = ("config.json", "open_clip_config.json", *PROCESSORS)
INDEX_SUFFIX = ".index.json"
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
"""What weights are called in a directory, best first."""


@dataclass(frozen=True)
class Checkpoint:
    """What stands in a source.

    `configs` holds the JSON files of FOREIGN_CONFIGS that stand beside the weights;
    `snapshot_config` is vitcli's own, where there is one.
    """

    source: str
    tensors: Tensors
    files: tuple[Path, ...]
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    snapshot_config: Path | None = None


def read_source(source: str) -> Checkpoint:
    """A file, a sharded index, a directory or a hub id `owner/name[@revision]`.

    Raises:
        VitcliError: there is no such source, or it cannot be read.
    """
    path = Path(source).expanduser()
    if not source or not path.exists():
        if not is_hub_id(source):
            raise VitcliError(
                f"--weights {source or chr(39) * 2}: no such file or directory",
                f"--preset {source} names a preset"
                if source in preset_names()
                else "a path, or a repository id such as facebook/dinov2-small",
            )
        path = download(source)
    file = _weights_in(path) if path.is_dir() else path
    tensors, files = _tensors(file)
    beside = file.parent
    own = beside / SNAPSHOT_CONFIG
    configs = {
        name: read_json(beside / name) for name in FOREIGN_CONFIGS if (beside / name).is_file()
    }
    return Checkpoint(source, tensors, files, configs, own if own.is_file() else None)


def _weights_in(folder: Path) -> Path:
    here = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if here:
        return here[0]
    others = sorted(f for f in folder.iterdir() if f.suffix.lower() in READERS)
    if len(others) == 1:
        return others[0]
    if others:
        names = ", ".join(f.name for f in others[:5])
        raise VitcliError(f"{folder}: which of {names}?", "name the file itself")
    raise VitcliError(
        f"{folder}: holds no weights", "expected one of " + ", ".join(WEIGHT_FILES[:4])
    )


def _tensors(file: Path) -> tuple[Tensors, tuple[Path, ...]]:
    if not file.name.endswith(INDEX_SUFFIX):
        return read_tensors(file), (file,)
    shard_of = read_json(file).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
        raise VitcliError(f"{file}: no weight_map inside", "is it the index of a sharded model?")
    shards = tuple(file.parent / name for name in sorted(set(shard_of.values())))
    for shard in shards:
        if shard.parent != file.parent or not shard.is_file():
            raise VitcliError(f"{file} names {shard.name}, which is not there", "copy all shards")
    found = Tensors()
    for shard in shards:
        found |= read_tensors(shard)
    if lost := sorted(set(shard_of) - set(found)):
        raise VitcliError(
            f"{file}: {len(lost)} tensors are in no shard, first {lost[0]}", "copy all shards"
        )
    return found, shards


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        VitcliError: unreadable, not JSON or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise VitcliError(f"cannot read {path}: {error.strerror}", "check the path") from error
    except (ValueError, RecursionError) as error:
        raise VitcliError(f"{path}: not JSON ({error})", "download or copy it again") from error
    if not isinstance(data, dict):
        raise VitcliError(f"{path}: expected an object of keys and values")
    return data
