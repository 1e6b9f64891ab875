"""Encode any number of images into parts: streaming, resumable, one row for every input."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitcli.commands.embed.inputs import Listing, SeenFolders, write_inputs
from vitcli.commands.embed.job import Job, begin, only_writer, settings
from vitcli.commands.embed.parts import OK, PartError, Rows, check_format
from vitcli.commands.embed.result import (
    FailureCount,
    FolderOptions,
    FolderResult,
    VectorColumn,
    parse_shard,
    remembered,
)
from vitcli.commands.embed.rows import Column, PartEncoder, checked, failure, row_bytes
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError, check_choice
from vitcli.files import printable
from vitcli.images.sources import Entry
from vitcli.images.workers import DecodePool, DecodeWork, available_cpus
from vitcli.loading import as_model
from vitcli.model import Model, model_info
from vitcli.results import QUIET, FailedImage, Progress

_EXAMPLES = 10


@dataclass
class Share:
    """Counts of this run's parts, kept while they are worked on."""

    total: int
    progress: Progress
    done: int = 0
    encoded: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[FailedImage] = field(default_factory=list)

    def count(self, rows: Rows) -> None:
        """Take in a finished part."""
        self.done += len(rows)
        self.failures += rows.failures
        for name, status, error in zip(rows.names, rows.status, rows.error, strict=True):
            if status != OK and len(self.examples) < _EXAMPLES:
                self.examples.append(FailedImage(name, status, error))

    def report(self, more: int = 0, failures: Counter[str] | None = None) -> None:
        """All that is counted, and what a part that is not finished yet has so far."""
        kinds = (self.failures + (failures or Counter())).most_common()
        facts = "failed: " + ", ".join(f"{count:,} {code}" for code, count in kinds)
        self.progress(self.done + more, self.total, facts if kinds else "")


def embed(
    model: Model | str | os.PathLike[str],
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokens: str | Iterable[str] = FolderOptions.kind,
    layers: int | Iterable[int] = FolderOptions.layers,
    format: str = FolderOptions.format,
    vector_dtype: str = FolderOptions.vector_dtype,
    norms: bool = FolderOptions.norms,
    part_rows: int = FolderOptions.part_rows,
    batch: int = FolderOptions.batch,
    background: tuple[int, int, int] = FolderOptions.background,
    max_pixels: int = FolderOptions.max_pixels,
    min_side: int = FolderOptions.min_side,
    any_suffix: bool = False,
    workers: int | None = FolderOptions.workers,
    timeout_s: float = FolderOptions.timeout_s,
    memory_bytes: int = FolderOptions.memory_bytes,
    shard: str | tuple[int, int] = FolderOptions.shard,
    retry_failed: bool = FolderOptions.retry_failed,
    fail_fast: bool = FolderOptions.fail_fast,
    cluster: str | None = None,
    address: str | None = None,
    progress: Progress = QUIET,
) -> FolderResult:
    """Turn a folder of images into embeddings, in parts that a stopped run need not make again.

    Args:
        model: a `Model`, or what `load` takes.
        inputs: folders, files, globs, lists (`@list.txt`) and tar shards, one or several.
        out: the folder of the parts, made if it is missing.
        tokens: pooled, output, cls, dist, register, patch; several in one pass.
        layers: 0 is the input of the first block, i the output of block i, -1 the last; without
            any, the vectors after the final norm.
        any_suffix: every file of a folder, whatever its suffix.
        shard: `"2/8"` or `(2, 8)`: only every 8th part, from the second.
        cluster: `"ray"` makes the parts on a Ray cluster, at `address` or a new one here.
        progress: called with (rows done, rows in all, what failed); its `line` with what is about
            to be done.
        format, vector_dtype, norms, part_rows, batch, background, max_pixels, min_side, workers,
            timeout_s, memory_bytes, retry_failed, fail_fast: as in `FolderOptions`.

    An image that cannot be read is a row with its status, never an exception.

    Raises:
        VitcliError: no inputs, an option that this encoder cannot do, a folder that holds another
            job, or with `fail_fast` the first image that failed.
    """
    loaded = as_model(model, by_library=True)
    many = [inputs] if isinstance(inputs, str | os.PathLike) else [*inputs]
    kinds = tokens.split(",") if isinstance(tokens, str) else [*tokens]
    options = FolderOptions(
        kind=",".join(kind.strip() for kind in kinds),
        layers=(layers,) if isinstance(layers, int) else tuple(layers),
        format=format,
        vector_dtype=vector_dtype,
        norms=norms,
        part_rows=part_rows,
        batch=batch,
        background=background,
        max_pixels=max_pixels,
        min_side=min_side,
        workers=workers,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        shard=parse_shard(shard) if isinstance(shard, str) else shard,
        retry_failed=retry_failed,
        fail_fast=fail_fast,
    )
    folder = Path(out)
    texts = tuple(os.fspath(text) for text in many)
    listing = Listing(texts, any_suffix, folder, timeout_s, memory_bytes)
    work = None
    check_choice("--cluster", cluster, ["ray"])
    if address and not cluster:
        raise VitcliError("--address: is the address of a cluster", "add --cluster ray")
    if cluster:
        from vitcli.commands.embed.ray_cluster import on_ray

        work = on_ray(address)
    return encode_folder(loaded, listing, folder, options, progress, work)


def encode_folder(
    model: Model,
    listing: Listing,
    out: Path,
    options: FolderOptions,
    progress: Progress = QUIET,
    work: Work | None = None,
) -> FolderResult:
    """Encode this shard's share of a listing into `out`, going on where an earlier run stopped.

    `work` makes the rows of parts, here by default.

    The sorted inputs are cut into parts of `part_rows` and these into batches of `batch`, whatever
    fails, so that every vector is computed in the same place of the same shape of batch and a part
    has the same bytes however often the work was interrupted or divided.

    Raises:
        VitcliError: as `embed`.
    """
    start = time.perf_counter()
    if model.request is None:
        raise VitcliError("model: its source is unknown", "load it with vitcli.load(...)")
    request = remembered(model.request)
    check_format(options.format, options.vector_dtype)
    options, arrays = checked(model, options)
    with only_writer(out, shared=options.shard[1] > 1), _threads() as before:
        job = begin_job(model, request, listing, out, options, arrays, before, progress.line)
        torch.set_num_threads(job.threads)
        numbers = range(options.shard[0] - 1, job.inputs.parts, options.shard[1])
        share = Share(sum(map(job.inputs.rows_of, numbers)), progress)
        open_parts = list(unfinished(job, numbers, options.retry_failed, share))
        share.report()  # once: from here on the rate is that of this run
        making = (work or encode_parts)(model, job, open_parts, options, share)
        with contextlib.closing(making):  # its processes end with it, whatever happens here
            for part, rows in making:
                if options.fail_fast and not rows.good.all():
                    raise failure(rows, int(np.argmin(rows.good)))
                job.write(part, rows)
                share.count(read_back(job, part, rows))
                share.encoded += len(rows)
                share.report()
    wall = time.perf_counter() - start
    shapes = {name: tuple(shape) for name, _, shape in arrays}
    columns = tuple(
        VectorColumn(name, kind, layer, shapes[name])
        for name, (kind, layer) in options.columns.items()
    )
    return FolderResult(
        model=model_info(model),
        engine=model.engine,
        out=str(out),
        format=options.format,
        kind=options.kind,
        width=columns[0].shape[-1],
        shard="/".join(map(str, options.shard)),
        parts=len(numbers),
        rows=share.total,
        ok=share.total - share.failures.total(),
        failures=_counts(share.failures),
        examples=tuple(share.examples),
        rows_encoded=share.encoded,
        skipped_files=_counts(listing.skipped),
        duplicates=job.inputs.duplicates,
        wall_s=wall,
        images_per_s=share.encoded / wall if share.encoded else None,
        columns=columns,
    )


@contextlib.contextmanager
def _threads() -> Iterator[int]:
    """The number of threads that torch has, which it has again afterwards."""
    threads = torch.get_num_threads()
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _counts(counter: Counter[str]) -> tuple[FailureCount, ...]:
    return tuple(FailureCount(code, count) for code, count in counter.most_common())


def begin_job(
    model: Model,
    request: dict[str, Any],
    listing: Listing,
    out: Path,
    options: FolderOptions,
    arrays: Sequence[Column],
    threads: int,
    say: Callable[[str], None],
) -> Job:
    """List the inputs and take the folder, or go on with what it holds."""
    seen = SeenFolders(listing)
    try:
        inputs = write_inputs(seen, out, options.part_rows)
    except OSError as error:
        reason = error.strerror or error
        raise VitcliError(
            f"--out {printable(out)}: {reason}", "choose a folder with more free space", exit_code=1
        ) from error
    if inputs.count == 0:
        inputs.path.unlink()
        if listing.root and out.samefile(listing.root):
            raise VitcliError(
                f"--out {printable(out)}: is also the folder of the images", "choose another folder"
            )
        skipped = sum(listing.skipped.values())
        hint = f"add --any-suffix: {skipped:,} files have no image suffix" if skipped else ""
        raise VitcliError(f"no images in {', '.join(map(printable, listing.inputs))}", hint)
    if line := seen.line():
        say(line)
    total = inputs.count * row_bytes(arrays)
    if total >= _LARGE_BYTES or any(len(shape) > 1 for _, _, shape in arrays):
        half = "" if options.vector_dtype == "float16" else "; --vector-dtype float16 halves it"
        say(f"{inputs.count:,} images give about {total / 2**30:,.2f} GiB of vectors{half}")
    root = str(Path(listing.root or ".").resolve())
    identity = settings(model, options, arrays)
    return begin(out, inputs, identity, root, threads, request)


_LARGE_BYTES = 2**30


def unfinished(
    job: Job, numbers: Sequence[int], retry_failed: bool, share: Share
) -> Iterator[tuple[int, bool]]:
    """Parts to make, and whether some of their rows are there; the finished ones are counted."""
    for part in numbers:
        rows = job.read(part)
        if rows is None:
            yield part, False
        elif retry_failed and rows.failures:
            yield part, True
        else:
            share.count(rows)


def read_back(job: Job, part: int, written: Rows) -> Rows:
    """A part from the disk, which must hold what was written."""
    good = written.good
    with contextlib.suppress(PartError):
        rows = job.check(part)
        if rows.status == written.status and all(
            np.array_equal(rows.arrays[name][good], array[good])
            for name, array in written.arrays.items()
        ):
            return rows
    raise VitcliError(
        f"part {part} in {printable(job.folder)} is not what was written",
        "check the disk, then run it again",
        exit_code=1,
    )


Work = Callable[
    [Model, Job, Sequence[tuple[int, bool]], FolderOptions, Share],
    Generator[tuple[int, Rows], None, None],
]
"""Makes the rows of parts; the flag says that some are there already."""


def encode_parts(
    model: Model,
    job: Job,
    parts: Sequence[tuple[int, bool]],
    options: FolderOptions,
    share: Share,
) -> Generator[tuple[int, Rows], None, None]:
    """The rows of each part, decoded ahead of the encoder across batches and parts."""
    if not parts:
        return
    todo = sum(job.inputs.rows_of(part) for part, _ in parts)
    workers = min(options.workers or available_cpus(), todo)
    with decode_pool(model, options, workers) as pool:
        decoded = pool.decode(chain.from_iterable(_to_decode(job, parts)))
        encoder = PartEncoder(model, options, job.settings["columns"], share.report)
        for part, partly in parts:
            yield part, encoder.encode(partial_rows(job, part, partly), decoded)


def decode_pool(model: Model, options: FolderOptions, workers: int) -> DecodePool:
    """Processes that decode a batch, and something for each of them to do, ahead of the encoder."""
    work = DecodeWork(
        model.preprocessing,
        options.background,
        options.max_pixels,
        options.min_side,
        options.memory_bytes,
    )
    return DecodePool(work, workers, options.timeout_s, 2 * (options.batch + workers))


def partial_rows(job: Job, part: int, partly: bool) -> Rows:
    """The rows of a part as far as they are there.

    Images that keep their own size share a batch with whichever others have it: to be as if it
    had never failed, such a part is made whole again.
    """
    fixed = PreprocessConfig.model_validate(job.settings["preprocess"], strict=False).output_size
    if partly and fixed and (rows := job.read(part)):
        return rows
    return Rows.empty(part * job.inputs.part_rows, job.inputs.read(part))


def _to_decode(job: Job, parts: Sequence[tuple[int, bool]]) -> Iterator[Iterator[Entry]]:
    """What each part needs decoded, in the order in which it is asked for."""
    for part, partly in parts:
        pairs = zip(job.inputs.read(part), partial_rows(job, part, partly).status, strict=True)
        yield (entry for entry, status in pairs if status != OK)
