"""Which job a folder belongs to: the manifest, what is done, and whose share a part is."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitcli.commands.embed.inputs import InputList, difference
from vitcli.commands.embed.parts import FORMATS, PartError, PartFormat, Rows
from vitcli.config.load import Setting
from vitcli.config.request import ModelRequest
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.model import Model, load_model

MANIFEST = "_manifest.json"
INPUTS = "_inputs.jsonl"
"""Readers of a folder of Parquet pass over names with an underscore."""


@dataclass(frozen=True)
class Job:
    """A folder of parts, its inputs and its settings, agreed on with whoever began it."""

    folder: Path
    inputs: InputList
    settings: dict[str, Any]
    threads: int
    """Threads of the encoder: what the first run had, since they move the last bits."""

    @property
    def format(self) -> PartFormat:
        return FORMATS[self.settings["format"]]

    @property
    def about(self) -> dict[str, Any]:
        """The metadata of every part."""
        return {**self.settings, "inputs_sha256": self.inputs.digest}

    def write(self, part: int, rows: Rows) -> None:
        self.format.write(self.folder, part, rows, self.about)

    def read(self, part: int) -> Rows | None:
        """A part that is whole and is this job's; None where it has to be made."""
        try:
            rows, about = self.format.read(self.folder, part)
        except PartError:
            return None
        entries = self.inputs.read(part)
        same = rows.names == [entry.name for entry in entries]
        whole = same and rows.first == part * self.inputs.part_rows and about == self.about
        return rows if whole else None


def begin(
    folder: Path,
    inputs: InputList,
    settings: dict[str, Any],
    root: str,
    threads: int,
    request: dict[str, Any],
) -> Job:
    """Take a folder for a job, or go on with the job that it holds.

    Several processes may do so at once: the first one's manifest counts for all. `request` is how
    the model was asked for, kept for those who want it again.

    Raises:
        VitcliError: the folder holds another job; says in what it differs.
    """
    manifest = {
        "settings": settings,
        "root": root,
        "inputs": {"count": inputs.count, "sha256": inputs.digest},
        "encoder_threads": threads,
        "request": request,
    }
    path = folder / MANIFEST
    try:
        held = _create(path, manifest) or _load(path)
        changes = list(_changes(manifest, held, folder / INPUTS, inputs.path))
        if changes:
            raise VitcliError(
                f"{printable(folder)} holds another job: {'; '.join(changes)}",
                "ask for the same again, or choose another --out",
            )
        os.replace(inputs.path, folder / INPUTS)  # noqa: PTH105
    except BaseException:
        inputs.path.unlink(missing_ok=True)
        raise
    kept = InputList(
        folder / INPUTS,
        inputs.count,
        inputs.digest,
        inputs.duplicates,
        inputs.part_rows,
        inputs.starts,
    )
    return Job(folder, kept, settings, int(held["encoder_threads"]))


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that `vitcli encode` wrote.

    Raises:
        VitcliError: it is not such a folder.
    """
    if not (folder / MANIFEST).is_file():
        raise VitcliError(
            f"{printable(folder)}: no vectors of `vitcli encode` in there",
            f"vitcli encode PATH --out {printable(folder)}",
        )
    return _load(folder / MANIFEST)


def iterate_parts(folder: Path) -> Iterator[Rows]:
    """The parts of a job in order, one in memory at a time.

    Raises:
        VitcliError: no job there, or a part is missing or damaged (exit code 1).
    """
    manifest = load_manifest(folder)
    settings, count = manifest["settings"], manifest["inputs"]["count"]
    for part in range(-(-count // settings["part_rows"])):
        try:
            rows, _ = FORMATS[settings["format"]].read(folder, part)
        except PartError as error:
            name = FORMATS[settings["format"]].files(folder, part)[0].name
            raise VitcliError(
                f"{printable(folder)}: {name} is missing or damaged",
                "run the same `vitcli encode` again to finish it",
                exit_code=1,
            ) from error
        yield rows


def my_share(parts: int, shard: tuple[int, int]) -> range:
    """Every n-th part, beginning with the i-th; shards are counted from 1."""
    number, of = shard
    return range(number - 1, parts, of)


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8).

    Raises:
        VitcliError: not a shard.
    """
    number, _, of = text.partition("/")
    if number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
        return int(number), int(of)
    raise VitcliError(f"--shard {text}: not a shard", "i/n counted from 1, such as 1/4")


def count_failures(rows: Rows) -> Counter[str]:
    return Counter(status for status in rows.status if status != "ok")


def _create(path: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Write the manifest unless there is one: linking fails where another process was first."""
    fd, name = tempfile.mkstemp(prefix=".manifest.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.link(name, path)
        return manifest
    except FileExistsError:
        return None
    finally:
        Path(name).unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("ascii"))
        _ = manifest["settings"], manifest["inputs"]["count"], manifest["encoder_threads"]
        return manifest
    except (ValueError, KeyError, TypeError) as error:
        raise VitcliError(
            f"{printable(path)} is damaged", "choose another --out, or remove the folder"
        ) from error


def _changes(now: dict[str, Any], before: dict[str, Any], old: Path, new: Path) -> Iterator[str]:
    flat_now, flat_before = dotted(now["settings"]), dotted(before["settings"])
    for key in {**flat_before, **flat_now}:
        was, is_now = flat_before.get(key), flat_now.get(key)
        if was != is_now:
            yield f"{key} {_short(was)} -> {_short(is_now)}"
    if now["root"] != before["root"]:
        yield f"inputs' folder {printable(before['root'])} -> {printable(now['root'])}"
    if now["inputs"] != before["inputs"]:
        detail = difference(old, new) if old.exists() else f"now {now['inputs']['count']:,}"
        yield f"inputs: {detail}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


@contextlib.contextmanager
def only_writer(folder: Path, shared: bool) -> Iterator[None]:
    """Make the folder and hold it against a second run, or share it with other shards.

    What a killed run left half-written is removed by a run that has the folder for itself.

    Raises:
        VitcliError: somebody else is writing there, or nobody can.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        reason = error.strerror or error
        raise VitcliError(
            f"--out {printable(folder)}: {reason}", "choose another folder"
        ) from error
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise VitcliError(
                f"another run is writing into {printable(folder)}",
                "wait for it, or divide the work with --shard i/n on both",
            ) from error
        except OSError:
            shared = True  # a file system without locks: touch nothing of others
        if not shared:
            for pattern in (".part-*.part", ".inputs.*.jsonl", ".manifest.*.part"):
                for left in folder.glob(pattern):
                    left.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def remembered(request: ModelRequest) -> dict[str, Any]:
    """A request as plain JSON; files by their absolute paths."""
    plain = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    plain["settings"] = [[list(s.path), s.value, s.source] for s in request.settings]
    for key in ("config_file", "weights", "adapter"):
        value = plain[key]
        plain[key] = str(Path(value).resolve()) if value and Path(value).exists() else value
    return plain


def recalled(plain: dict[str, Any]) -> ModelRequest:
    """The request that `remembered` wrote."""
    size, file = plain["image_size"], plain["config_file"]
    settings = tuple(
        Setting(tuple(path), value, source) for path, value, source in plain["settings"]
    )
    changes = {
        "settings": settings,
        "image_size": tuple(size) if size else None,
        "config_file": Path(file) if file else None,
    }
    return ModelRequest(**{**plain, **changes})


def load_saved(folder: Path, device: str = "auto") -> Model:
    """The model that made the vectors in `folder`.

    Raises:
        VitcliError: no vectors there, or the source has other weights now.
    """
    manifest = load_manifest(folder)
    try:
        request = recalled(manifest["request"])
    except (KeyError, TypeError, ValueError) as error:
        raise VitcliError(f"{printable(folder)}: the manifest does not name a model") from error
    model = load_model(dataclasses.replace(request, device=device))
    if weights_digest(model.encoder) != manifest["settings"]["weights_sha256"]:
        raise VitcliError(
            f"{model.weights}: other weights than those that made the vectors in "
            f"{printable(folder)}",
            "encode the images again into another folder",
        )
    return model


def weights_digest(encoder: torch.nn.Module) -> str:
    """SHA-256 over every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
