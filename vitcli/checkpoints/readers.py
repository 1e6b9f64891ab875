"""From a source as the user names it to its tensors and the configs beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitcli.checkpoints.formats import READERS, read_tensors
from vitcli.checkpoints.hub import Fetch, download, is_hub_id
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
    """What is in a source.

    `configs` holds the JSON files of FOREIGN_CONFIGS beside the weights; `snapshot_config` is
    vitcli's own, where there is one.
    """

    source: str
    tensors: Tensors
    files: tuple[Path, ...]
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    snapshot_config: Path | None = None
    shard_of: Mapping[str, Path] = field(default_factory=dict)
    """The names that an index lists, to their shards; empty where there is no index."""
    fetch: Fetch | None = None
    """Brings files into the folder of a hub's snapshot; None for local sources."""

    def holding(self, names: Collection[str]) -> Checkpoint:
        """The same with the shards of these names read, which are fetched where they can be.

        Raises:
            VitcliError: a shard that is needed is missing.
        """
        shards = sorted({self.tensors.missing[n] for n in names if n in self.tensors.missing})
        if not shards:
            return self
        if self.fetch is not None:
            self.fetch([shard.name for shard in shards])
        if absent := [shard for shard in shards if not shard.is_file()]:
            raise VitcliError(
                f"{self.source}: {absent[0].name} is missing, and the vision tower is in it",
                f"copy {', '.join(shard.name for shard in absent[:4])} beside the index",
            )
        tensors = Tensors(self.tensors)
        for shard in shards:
            tensors |= _shard(shard, self.shard_of)
        tensors.missing = {
            name: shard for name, shard in self.tensors.missing.items() if shard not in shards
        }
        return replace(self, tensors=tensors, files=tuple(sorted({*self.files, *shards})))


def read_source(source: str, which: str | None = None) -> Checkpoint:
    """A file, a sharded index, a directory or a hub id `owner/name[@revision]`.

    Args:
        which: `ema` or `raw`, where a file has an averaged copy of its weights.

    Raises:
        VitcliError: there is no such source, or it cannot be read.
    """
    path = Path(source).expanduser()
    fetch: Fetch | None = None
    if not source or not path.exists():
        if not is_hub_id(source):
            raise VitcliError(
                f"--weights {source or chr(39) * 2}: no such file or directory",
                f"--preset {source} names a preset"
                if source in preset_names()
                else "a path, or a repository id such as facebook/dinov2-small",
            )
        path, fetch = download(source)
    file = _weights_in(path) if path.is_dir() else path
    beside = file.parent
    own = beside / SNAPSHOT_CONFIG
    configs = {
        name: read_json(beside / name) for name in FOREIGN_CONFIGS if (beside / name).is_file()
    }
    if "model_cfg" in configs.get("config.json", {}):  # OpenCLIP's, under another name
        configs.setdefault("open_clip_config.json", configs.pop("config.json"))
    config = own if own.is_file() else None
    if file.name.endswith(INDEX_SUFFIX):
        tensors, shard_of = _indexed(file)
        files = tuple(sorted({shard for shard in shard_of.values() if shard.is_file()}))
        return Checkpoint(source, tensors, files, configs, config, shard_of, fetch)
    files = tuple(_siblings(file)) if path.is_dir() else (file,)
    tensors = read_tensors(files[0], which)
    for shard in files[1:]:
        tensors |= read_tensors(shard, which)
    return Checkpoint(source, tensors, files, configs, config)


_SHARD = re.compile(r"(.*?)-?\d+-of-(\d+)(\.\w+)")
"""Names of the shards of one checkpoint differ in their number alone."""


def _weights_in(folder: Path) -> Path:
    here = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    here += sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if here:
        return here[0]
    others = sorted(f for f in folder.iterdir() if f.suffix.lower() in READERS)
    if others and (len(others) == 1 or _siblings(others[0]) == others):
        return others[0]
    if others:
        names = ", ".join(f.name for f in others[:5])
        raise VitcliError(f"{folder}: several checkpoints: {names}", f"--weights {others[0]}")
    raise VitcliError(
        f"{folder}: no weights found", "expected one of " + ", ".join(WEIGHT_FILES[:4])
    )


def _siblings(file: Path) -> list[Path]:
    """The file, or all shards of its checkpoint where an index is missing."""

    def stem(name: str) -> str:
        return _SHARD.sub(r"\1 \2 \3", name)

    if not _SHARD.fullmatch(file.name):
        return [file]
    return sorted(f for f in file.parent.iterdir() if stem(f.name) == stem(file.name))


def _indexed(file: Path) -> tuple[Tensors, dict[str, Path]]:
    """The tensors of the shards that are here, and every name of the index with its shard."""
    listed = read_json(file).get("weight_map")
    if not isinstance(listed, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in listed.values()
    ):
        raise VitcliError(f"{file}: no weight_map of names to files", "copy or download it again")
    shard_of = {str(name): file.parent / shard for name, shard in listed.items()}
    found = Tensors()
    for shard in sorted(set(shard_of.values())):
        if shard.is_file():
            found |= _shard(shard, shard_of)
    found.missing = {name: shard for name, shard in shard_of.items() if not shard.is_file()}
    return found, shard_of


def _shard(shard: Path, shard_of: Mapping[str, Path]) -> Tensors:
    tensors = read_tensors(shard)
    if lost := [name for name, at in shard_of.items() if at == shard and name not in tensors]:
        raise VitcliError(
            f"{shard}: {len(lost)} tensors of the index are missing, first {lost[0]}",
            "copy or download it again",
        )
    return tensors


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
