"""From a source (file, directory or hub id) to its tensors and the configs beside them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitcli.checkpoints.pickles import read_torch
from vitcli.checkpoints.preprocessing import PROCESSORS
from vitcli.checkpoints.tensors import AGAIN, Tensors, read_npz, read_safetensors
from vitcli.config.request import preset_names
from vitcli.config.yaml import read_json
from vitcli.errors import VitcliError, install_extra

SNAPSHOT_CONFIG = "config.yaml"
"""vitcli's own config, which is beside the weights of its snapshots."""
FOREIGN_CONFIGS = ("config.json", "open_clip_config.json", *PROCESSORS)
INDEX_SUFFIX = ".index.json"
WEIGHT_FILES = (
    *("model.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "*.bin.index.json"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
)
"""Patterns of what weights are called, best first."""


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
        tensors = copy(self.tensors)
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
                "a path, or a repository id such as facebook/dinov2-small"
                + f"; --preset {source} is the encoder without them" * (source in preset_names()),
            )
        path, fetch = download(source)
    file = _weights_in(path) if path.is_dir() else path
    beside = file.parent
    own = beside / SNAPSHOT_CONFIG
    configs = {
        name: read_json(beside / name, dict[str, Any], AGAIN)
        for name in FOREIGN_CONFIGS
        if (beside / name).is_file()
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
    for pattern in (*WEIGHT_FILES, f"*{INDEX_SUFFIX}"):
        if here := sorted(file for file in folder.glob(pattern) if file.is_file()):
            return here[0]
    others = sorted(f for f in folder.iterdir() if f.suffix.lower() in READERS)
    if others and (len(others) == 1 or _siblings(others[0]) == others):
        return others[0]
    if others:
        names = ", ".join(f.name for f in others[:5])
        raise VitcliError(f"{folder}: several checkpoints: {names}", f"--weights {others[0]}")
    raise VitcliError(
        f"{folder}: no weights found (expected {', '.join(WEIGHT_FILES[:4])})",
        "name a folder of weights",
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
    listed = read_json(file, dict[str, Any], AGAIN).get("weight_map")
    if not isinstance(listed, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in listed.values()
    ):
        raise VitcliError(f"{file}: no weight_map of names to files", AGAIN)
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
            AGAIN,
        )
    return tensors


_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_CHOICES = (
    *((pattern,) for pattern in WEIGHT_FILES),
    *(("*.safetensors",), ("*.npz",), ("*.pth", "*.pt", "*.bin")),
)
"""Patterns of the files of one checkpoint, best first; only the first that is there is fetched.

Of a sharded one that is the index; then the shards that hold what is read.
"""
_CONFIGS = [*FOREIGN_CONFIGS, SNAPSHOT_CONFIG]
Fetch = Callable[[Sequence[str]], None]
"""Brings files of these names into the folder of the snapshot."""
ANSWER_S = 10
"""Seconds that the hub may take to list a repository."""


def is_hub_id(source: str) -> bool:
    return _ID.fullmatch(source) is not None


def download(source: str) -> tuple[Path, Fetch]:
    """The folder of a snapshot of `owner/name[@revision]` with its configs and one checkpoint.

    Of a sharded checkpoint the index alone is there; the second value fetches shards into the same
    folder. The cache and HF_HUB_OFFLINE are respected.

    Raises:
        VitcliError: no extra `hub`, no network and nothing cached, no such repository.
    """
    repo, _, revision = source.partition("@")
    try:
        from huggingface_hub import constants, hf_hub_download, snapshot_download
    except ImportError as error:
        raise VitcliError(
            f"--weights {source}: no such path, and hub ids need the extra `hub`",
            install_extra("hub"),
        ) from error

    def snapshot() -> Path:
        files = [] if constants.HF_HUB_OFFLINE else _listed(repo, revision or None)
        if not files:
            return _cached(repo, revision or None)
        wanted = [*_CONFIGS, *files]
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=wanted))

    with _reported(source):
        folder = snapshot()

    def fetch(names: Sequence[str]) -> None:
        with _reported(source):
            for name in names:
                hf_hub_download(repo, name, revision=folder.name)

    return folder, fetch


@contextlib.contextmanager
def _reported(source: str) -> Iterator[None]:
    """What the hub's library raises, as an error of one line."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise VitcliError(
            f"--weights {source}: no such path, not in the hub's cache, "
            "and the hub cannot be reached",
            "check the id and the network, or give a local directory",
        ) from error
    except (OSError, ValueError) as error:  # the hub's HTTP errors are OSErrors
        reason = next((line for line in str(error).splitlines() if line.strip()), "failed")
        raise VitcliError(
            f"--weights {source}: {reason[:160]}", "check the id, the revision and the access"
        ) from error


def _cached(repo: str, revision: str | None) -> Path:
    """The folder of the best checkpoint that is in the cache whole.

    The cache knows what else the repository holds, so it must be asked for one checkpoint's files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for patterns in _CHOICES:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=[*_CONFIGS, *patterns],
                    local_files_only=True,
                )
            )
            if any(any(folder.glob(pattern)) for pattern in patterns):
                return folder
    raise LocalEntryNotFoundError(f"{repo} is not in the cache")


def _listed(repo: str, revision: str | None) -> list[str]:
    """The files of the best checkpoint at the hub's top level, none when the hub is not reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # One request, which is not tried again: without a network the cache should answer at once.
        info = HfApi().model_info(repo, revision=revision, timeout=ANSWER_S)
    except HfHubHTTPError:
        raise  # the hub answered: no such repository, no such revision, no access
    except Exception:  # whatever the HTTP library raises where there is no network
        return []
    names = [file.rfilename for file in info.siblings or ()]
    top = [name for name in names if "/" not in name]
    for patterns in _CHOICES:
        chosen = [n for n in top if any(Path(n).match(pattern) for pattern in patterns)]
        if chosen:
            return chosen
    raise VitcliError(f"--weights {repo}: the repository has no weights", "check the id")


READERS: dict[str, Callable[[Path, str | None], Tensors]] = {
    ".safetensors": read_safetensors,
    ".bin": read_torch,
    ".pt": read_torch,
    ".pth": read_torch,
    ".npz": read_npz,
}


def read_tensors(path: Path, which: str | None = None) -> Tensors:
    """The tensors of one file, by the kind its suffix names; `which` as in `read_source`.

    Raises:
        VitcliError: unreadable, truncated, of an unknown kind, or in need of code to be read.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise VitcliError(
            f"{path}: unknown kind of file (expected {', '.join(READERS)})", "name a checkpoint"
        )
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise VitcliError(f"cannot read {path}: {error.strerror}", "check the path") from error
    tensors = reader(path, which)
    if not tensors:
        raise VitcliError(f"{path}: holds no tensors", "name a file of weights")
    return tensors
