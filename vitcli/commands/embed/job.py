"""Which job a folder belongs to: the manifest, what is done, and whose share a part is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitcli import __version__
from vitcli.checkpoints.weights import weights_digest
from vitcli.commands.embed.inputs import InputList, difference
from vitcli.commands.embed.parts import FORMATS, PartError, PartFormat, Rows
from vitcli.commands.embed.result import MANIFEST, Checksums, FolderOptions, Manifest, recalled
from vitcli.commands.embed.rows import Column
from vitcli.config.yaml import dotted, read_json
from vitcli.errors import VitcliError
from vitcli.files import Lock, as_new, atomic_write, lock, printable, sha256, try_lock
from vitcli.images.folders import read_layout
from vitcli.images.preprocess import small_jpeg
from vitcli.images.sources import Entry
from vitcli.images.workers import decode_within
from vitcli.loading import load_model
from vitcli.model import Model, read_picture
from vitcli.stats import Plane, evenly, plane

INPUTS = "_inputs.jsonl"
CHECKSUMS = "_checksums.json"
_LEFT = re.compile(
    r"\.(part-\d+\.[a-z]+|_checksums\.json)\.[0-9a-f]{12}\.part"
    r"|\.(inputs|manifest)\.[a-z0-9_]{8}(\.jsonl|\.part)?"
)
"""What a killed run leaves: the names of `files.atomic_write` and of `tempfile`, no others'."""
IDENTITY = (
    *("kind", "layers", "format", "vector_dtype", "norms", "part_rows", "batch"),
    *("background", "max_pixels", "min_side"),
)
"""The options that decide the vectors and how they lie."""


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
        """Write a part, then its checksums into the folder's list."""
        self.format.write(self.folder, part, rows, self.about)
        try:
            held = lock(self.folder / MANIFEST)  # other shards write theirs
        except OSError:
            held = Lock()  # a file system without locks
        with held:
            known = {**_checksums(self.folder), str(part): self._digests(part)}
            text = json.dumps(
                {key: known[key] for key in sorted(known, key=lambda key: (len(key), key))},
                indent=0,
            )
            with atomic_write(self.folder / CHECKSUMS) as file:
                file.write(text.encode("ascii"))

    def _digests(self, part: int) -> list[str]:
        return [sha256(path) for path in self.format.files(self.folder, part)]

    def read(self, part: int) -> Rows | None:
        """A part that is whole and is this job's; None where it has to be made."""
        try:
            return self.check(part)
        except PartError:
            return None

    def check(self, part: int) -> Rows:
        """A part from the disk, whole: its checksum, its rows' names, its arrays and their values.

        Raises:
            PartError: it is missing, or what it holds is not what this job wrote; says in what.
        """
        name = self.format.files(self.folder, part)[0].name
        try:
            digests = self._digests(part)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            reason = "is missing" if gone else error.strerror or error
            raise PartError(f"{name}: {reason}") from error
        first_release = "columns" not in self.settings
        if not first_release and digests != _checksums(self.folder).get(str(part)):
            raise PartError(f"{name}: its checksum is not the one that {CHECKSUMS} holds")
        rows, about = self.format.read(self.folder, part)
        if about != self.about:
            raise PartError(f"{name}: it is of another job")
        if rows.first != part * self.inputs.part_rows or rows.names != [
            entry.name for entry in self.inputs.read(part)
        ]:
            raise PartError(f"{name}: its rows are of other images")
        found = [[key, str(v.dtype), list(v.shape[1:])] for key, v in rows.arrays.items()]
        if first_release:
            matches = bool(found) and found[0][:2] == ["vector", self.settings["vector_dtype"]]
        else:
            matches = found == [list(column) for column in self.settings["columns"]]
        if not matches:
            raise PartError(f"{name}: other arrays (got {found})")
        good = rows.good
        if not all(rows.status) or not all(
            np.isfinite(v[good]).all() for v in rows.arrays.values()
        ):
            raise PartError(f"{name}: rows without a status, or values that are not finite")
        return rows


def _checksums(folder: Path) -> Checksums:
    path = folder / CHECKSUMS
    return read_json(path, Checksums) if path.exists() else {}


def settings(model: Model, options: FolderOptions, arrays: Sequence[Column]) -> dict[str, Any]:
    """What decides the vectors and how they lie: the identity of a job, as plain JSON."""
    chosen = {
        "version": __version__,
        "model": model.name,
        "config": model.config.encoder.model_dump(mode="json"),
        "weights": model.weights,
        "weights_sha256": weights_digest(model.encoder),
        "preprocess": model.preprocessing.model_dump(mode="json"),
        "device": model.device.type,
        "dtype": model.dtype_name,
        "engine": model.engine,
        **{key: dataclasses.asdict(options)[key] for key in IDENTITY},
        "columns": arrays,
    }
    plain: dict[str, Any] = json.loads(json.dumps(chosen))
    return plain


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
        if "columns" not in held["settings"]:
            raise VitcliError(
                f"{printable(folder)}: holds vectors of the first release, which are read only",
                "choose another --out",
            )
        changes = list(_changes(manifest, held, folder / INPUTS, inputs.path))
        if changes:
            raise VitcliError(
                f"{printable(folder)} holds another job: {'; '.join(changes)}",
                "use the same options and inputs, or choose another --out",
            )
        os.replace(inputs.path, folder / INPUTS)  # noqa: PTH105
    except BaseException:
        inputs.path.unlink(missing_ok=True)
        raise
    kept = dataclasses.replace(inputs, path=folder / INPUTS)
    # As they were written: parts repeat them, and a setting may have come since, as none.
    return Job(folder, kept, held["settings"], int(held["encoder_threads"]))


def open_job(folder: Path) -> Job:
    """A job that `vitcli embed` wrote, to be read.

    Raises:
        VitcliError: it is not such a folder, or its lists are damaged.
    """
    manifest = load_manifest(folder)
    settings, inputs = manifest["settings"], manifest["inputs"]
    path, part_rows = folder / INPUTS, settings["part_rows"]
    starts, count, at = array("q"), 0, 0
    try:
        with path.open("rb") as file:
            for line in file:
                if count % part_rows == 0:
                    starts.append(at)
                count, at = count + 1, at + len(line)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    if count != inputs["count"]:
        raise _damaged(path, f"{count:,} lines (expected {inputs['count']:,})")
    listed = InputList(path, count, inputs["sha256"], 0, part_rows, starts)
    return Job(folder, listed, settings, manifest["encoder_threads"])


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that `vitcli embed` wrote.

    Raises:
        VitcliError: it is not such a folder, or the manifest is damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise VitcliError(
            f"{printable(folder)}: contains no vectors of `vitcli embed`",
            f"vitcli embed PATH --out {shlex.quote(printable(folder))}",
        )
    return _load(folder / MANIFEST)


def vector_column(settings: dict[str, Any], column: str | None = None) -> str:
    """The name of a column of vectors, one per image: the first where none is asked for.

    Raises:
        VitcliError: the job has no such column.
    """
    norms = ("patch_norm_mean", "cls_norm")
    columns: list[tuple[str, str, list[int]]]
    columns = settings.get("columns", [("vector", settings["vector_dtype"], [1])])
    there = [n for n, _, shape in columns if len(shape) == 1 and n not in norms]
    if column is None and there:
        return there[0]
    if column is None or column not in there:
        raise VitcliError(
            f"{column or 'vectors'}: no such column of one vector per image "
            f"(expected {', '.join(there) or 'one; this job holds patches or registers'})",
            "vitcli embed PATH --out OTHER --tokens pooled",
        )
    return column


def iterate_parts(folder: Path, column: str | None = None) -> Iterator[Rows]:
    """The parts of a job in order, one in memory at a time, each verified whole.

    `arrays["vector"]` is the column asked for, the first one of vectors by default.

    Raises:
        VitcliError: no job there, or a part is missing or not what was written (exit code 1).
    """
    job = open_job(folder)
    column = vector_column(job.settings, column)
    for part in range(job.inputs.parts):
        try:
            rows = job.check(part)
        except PartError as error:
            raise VitcliError(
                f"{printable(folder)}: {error}",
                "run the same `vitcli embed` again to rewrite that part",
                exit_code=1,
            ) from error
        rows.arrays["vector"] = rows.arrays[column]
        yield rows


def vectors_in_plane(folder: Path, by: str = "pca") -> Plane:
    """The vectors of a job in two dimensions, with the classes that folders or shards give.

    Of more than `measures.MOST_POINTS` images evenly spaced ones; parts that other shards have not
    written yet are left out.

    Raises:
        VitcliError: no job there, no vector of an image, or umap-learn is missing.
    """
    job = open_job(folder)
    column = vector_column(job.settings)
    chosen = set(evenly(job.inputs.count))
    entries: list[Entry] = []
    vectors: list[np.ndarray] = []
    for part in range(job.inputs.parts):
        rows = job.read(part)
        if rows is None:
            continue
        for place, (entry, good) in enumerate(zip(job.inputs.read(part), rows.good, strict=True)):
            if good and rows.first + place in chosen:
                entries.append(entry)
                vectors.append(rows.arrays[column][place])
    names = [entry.name for entry in entries]
    layout = read_layout(names)
    labels = [layout.place(entry.name, entry.label or "")[1] for entry in entries]
    about = {key: job.settings[key] for key in ("model", "weights")}
    return plane(vectors, names, labels, by=by, images=job.inputs.count, **about)


MOST_PICTURES = 1000
PICTURE_SIDE = 80
"""Pixels of a thumbnail's longer side: even noise is then below 8 kB, a page below 10 MB."""


def thumbnails(folder: Path, names: Sequence[str]) -> list[str]:
    """The images of these names in a job or a folder as JPEG data URLs; "" for what is not a file.

    Of more than MOST_PICTURES evenly spaced ones.
    """
    chosen = {names[i] for i in evenly(len(names), MOST_PICTURES)}
    if (folder / MANIFEST).is_file():
        found = {entry.name: entry for entry in iterate_entries(folder) if entry.name in chosen}
    else:
        found = {name: Entry(name, str(folder / name)) for name in chosen}
    urls = {}
    for name, entry in found.items():
        picture = picture_of(entry)
        urls[name] = "" if picture is None else small_jpeg(picture, PICTURE_SIDE)[1]
    return [urls.get(name, "") for name in names]


def picture_of(entry: Entry) -> Image.Image | None:
    """The Pillow image of an entry; None where it is gone or cannot be read."""
    try:
        return (decode_within(entry) if entry.offset >= 0 else read_picture(entry.source)).image
    except VitcliError:
        return None


def iterate_entries(folder: Path) -> Iterator[Entry]:
    """The inputs of a job in the order of its rows, with the labels that shards give.

    Raises:
        VitcliError: no job there, or its list is damaged.
    """
    job = open_job(folder)
    for part in range(job.inputs.parts):
        yield from job.inputs.read(part)


def shard_labels(folder: Path) -> dict[str, str]:
    """What tar shards say of a job's inputs, by name."""
    return {entry.name: entry.label for entry in iterate_entries(folder) if entry.label}


def _create(path: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Write the manifest unless there is one: linking fails where another process was first."""
    fd, name = tempfile.mkstemp(prefix=".manifest.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        as_new(Path(name))
        try:
            os.link(name, path)
        except FileExistsError:
            return None
        except OSError:  # exFAT and network drives have no links
            if path.exists():
                return None
            os.replace(name, path)  # noqa: PTH105
        return manifest
    finally:
        Path(name).unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any]:
    """The file alone: no default is added, since parts repeat the settings."""
    return read_json(path, Manifest).model_dump(mode="json", exclude_unset=True)


def _damaged(path: Path, why: str) -> VitcliError:
    return VitcliError(
        f"{printable(path)}: is damaged: {printable(why)}",
        "embed the images again into another folder",
    )


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
        held = try_lock(folder, shared)
    except OSError as error:
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            reason = error.strerror or error
            raise VitcliError(
                f"--out {printable(folder)}: {reason}", "choose another folder"
            ) from error
        held, shared = Lock(), True  # a file system without locks: touch nothing of others
    if held is None:
        raise VitcliError(
            f"another run is writing into {printable(folder)}",
            "wait for it, or divide the work with --shard i/n on both",
        )
    with held:
        if not shared:
            for left in folder.iterdir():
                if not _LEFT.fullmatch(left.name):
                    continue
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)
        yield


def load_saved(folder: Path, device: str = "auto") -> Model:
    """The model that made the vectors in `folder`.

    Raises:
        VitcliError: no vectors there, or the source has other weights now.
    """
    manifest = load_manifest(folder)
    request = dataclasses.replace(recalled(manifest["request"]), device=device)
    model = load_model(request, by_library=True)
    if weights_digest(model.encoder) != manifest["settings"]["weights_sha256"]:
        raise VitcliError(
            f"{model.weights}: not the weights that made the vectors in {printable(folder)}",
            "embed the images again into another folder",
        )
    return model
