"""Encode any number of images into parts: streaming, resumable, one row for every input."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitcli import __version__
from vitcli.commands.embed.encoder import (
    IDENTITY,
    VECTORS,
    FolderOptions,
    PartEncoder,
    failure,
    vector_width,
)
from vitcli.commands.embed.inputs import Listing, write_inputs
from vitcli.commands.embed.job import (
    Job,
    begin,
    count_failures,
    my_share,
    only_writer,
    remembered,
    weights_digest,
)
from vitcli.commands.embed.parts import OK, Rows, check_format
from vitcli.commands.embed.result import FailureCount, FolderResult
from vitcli.commands.encode.analysis import model_info
from vitcli.commands.encode.vectors import available_tokens
from vitcli.commands.params.analysis import model_costs
from vitcli.config.request import ModelRequest
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.pool import DecodePool, DecodeWork
from vitcli.images.shards import Entry
from vitcli.model import Model
from vitcli.results import FailedImage

_EXAMPLES = 10

Watch = Callable[[int, int, Counter[str]], None]
"""Told (rows done, rows in all, failures by code) as work goes on."""


@dataclass
class Progress:
    """Counts of a share, kept while it is worked on."""

    total: int
    watch: Watch
    done: int = 0
    encoded: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[FailedImage] = field(default_factory=list)

    def count(self, rows: Rows) -> None:
        """Take in a finished part."""
        self.done += len(rows)
        self.failures += count_failures(rows)
        for name, status, error in zip(rows.names, rows.status, rows.error, strict=True):
            if status != OK and len(self.examples) < _EXAMPLES:
                self.examples.append(FailedImage(name, status, error))

    def tell(self, more: int = 0, failures: Counter[str] | None = None) -> None:
        """All that is counted, and what a part that is not finished yet has so far."""
        self.watch(self.done + more, self.total, self.failures + (failures or Counter()))


def encode_folder(
    request: ModelRequest,
    model: Model,
    listing: Listing,
    out: Path,
    options: FolderOptions,
    watch: Watch = lambda done, total, failures: None,
    work: Work | None = None,
) -> FolderResult:
    """Encode this shard's share of a listing into `out`, going on where an earlier run stopped.

    `request` is what `model` was loaded from; `work` makes the rows of parts, here by default.

    The sorted inputs are cut into parts of `part_rows` and these into batches of `batch`, whatever
    fails, so that every vector is computed in the same place of the same shape of batch and a part
    has the same bytes however often the work was interrupted or divided.

    Raises:
        VitcliError: no inputs, an option that this encoder cannot do, a folder that holds another
            job, or with `fail_fast` the first image that failed (exit code 1).
    """
    start = time.perf_counter()
    check_kind(model, options)
    with only_writer(out, shared=options.shard[1] > 1):
        job = begin_job(request, model, listing, out, options)
        torch.set_num_threads(job.threads)
        share = my_share(job.inputs.parts, options.shard)
        progress = Progress(sum(map(job.inputs.rows_of, share)), watch)
        open_parts = list(unfinished(job, share, options.retry_failed, progress))
        progress.tell()  # once: from here on the rate is that of this run
        making = (work or encode_parts)(model, job, open_parts, options, progress)
        with contextlib.closing(making):  # its processes end with it, whatever happens here
            for part, rows in making:
                if options.fail_fast and not rows.good.all():
                    raise failure(rows, int(np.argmin(rows.good)))
                job.write(part, rows)
                progress.count(read_back(job, part, rows))
                progress.encoded += len(rows)
                progress.tell()
    wall = time.perf_counter() - start
    return FolderResult(
        model=model_info(model),
        engine=model.engine,
        out=str(out),
        format=options.format,
        kind=options.kind,
        width=vector_width(model, options.kind),
        shard="/".join(map(str, options.shard)),
        parts=len(share),
        rows=progress.total,
        ok=progress.total - progress.failures.total(),
        failures=_counts(progress.failures),
        examples=tuple(progress.examples),
        rows_encoded=progress.encoded,
        skipped_files=_counts(listing.skipped),
        duplicates=job.inputs.duplicates,
        wall_s=wall,
        images_per_s=progress.encoded / wall if progress.encoded else None,
    )


def _counts(counter: Counter[str]) -> tuple[FailureCount, ...]:
    return tuple(FailureCount(code, count) for code, count in counter.most_common())


def check_kind(model: Model, options: FolderOptions) -> None:
    """Refuse what could not be written, before any image is read."""
    check_format(options.format)
    model.check_reads_images()
    _ = model.preprocessing  # an error where nothing tells how pixels are prepared
    there = [kind for kind in VECTORS if kind in available_tokens(model.config.encoder)]
    if options.kind not in there:
        raise VitcliError(
            f"{options.kind}: {model.name} does not give one such vector an image",
            f"--tokens {' or '.join(there)}" if there else "--pool mean",
        )
    if options.norms and options.format == "npy":
        raise VitcliError(
            "--norms: a .npy file holds vectors alone", "--format parquet or safetensors"
        )


def begin_job(
    request: ModelRequest, model: Model, listing: Listing, out: Path, options: FolderOptions
) -> Job:
    """List the inputs and take the folder, or go on with what it holds."""
    try:
        inputs = write_inputs(listing, out, options.part_rows)
    except OSError as error:
        reason = error.strerror or error
        raise VitcliError(
            f"--out {printable(out)}: {reason}", "it must have room and may be written", exit_code=1
        ) from error
    if inputs.count == 0:
        inputs.path.unlink()
        if listing.root and out.samefile(listing.root):
            raise VitcliError(
                f"--out {printable(out)}: is where the images are", "choose another folder"
            )
        skipped = sum(listing.skipped.values())
        hint = f"{skipped} files have no image suffix: --any-suffix takes them" if skipped else ""
        raise VitcliError(f"no images in {', '.join(map(printable, listing.inputs))}", hint)
    root = str(Path(listing.root or ".").resolve())
    identity, threads = settings(model, options), encoder_threads(model)
    return begin(out, inputs, identity, root, threads, remembered(request))


def encoder_threads(model: Model) -> int:
    """Threads for a new job: half of them where decoding a photograph costs as much as encoding.

    Decoding 12 megapixels takes a core about as long as this many multiplications take it; above
    that the decoding processes mostly wait for the encoder.
    """
    threads = torch.get_num_threads()
    costs = model_costs(model.config, model.input_size)
    return max(1, threads // 2) if costs.macs_per_image < 5e9 else threads


def settings(model: Model, options: FolderOptions) -> dict[str, Any]:
    """What decides the vectors and how they lie: the identity of a job, as plain JSON."""
    chosen = {
        "version": __version__,
        "model": model.name,
        "config": model.config.encoder.model_dump(mode="json"),
        "weights": model.weights,
        "weights_sha256": weights_digest(model.encoder),
        "preprocess": model.preprocessing.model_dump(mode="json"),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "engine": model.engine,
        **{key: asdict(options)[key] for key in IDENTITY},
    }
    plain: dict[str, Any] = json.loads(json.dumps(chosen))
    return plain


def unfinished(
    job: Job, share: Sequence[int], retry_failed: bool, progress: Progress
) -> Iterator[tuple[int, bool]]:
    """Parts to make, and whether some of their rows are there; the finished ones are counted."""
    for part in share:
        rows = job.read(part)
        if rows is None:
            yield part, False
        elif retry_failed and count_failures(rows):
            yield part, True
        else:
            progress.count(rows)


def read_back(job: Job, part: int, written: Rows) -> Rows:
    """A part from the disk, which must hold what was written."""
    rows = job.read(part)
    if rows is None or rows.status != written.status:
        raise VitcliError(
            f"part {part} in {printable(job.folder)} is not what was written",
            "check the disk, then run it again",
            exit_code=1,
        )
    return rows


Work = Callable[
    [Model, Job, Sequence[tuple[int, bool]], FolderOptions, Progress],
    Generator[tuple[int, Rows], None, None],
]
"""Makes the rows of parts; the flag says that some are there already."""


def encode_parts(
    model: Model,
    job: Job,
    parts: Sequence[tuple[int, bool]],
    options: FolderOptions,
    progress: Progress,
) -> Generator[tuple[int, Rows], None, None]:
    """The rows of each part, decoded ahead of the encoder across batches and parts."""
    if not parts:
        return
    work = decode_work(model, options)
    todo = sum(job.inputs.rows_of(part) for part, _ in parts)
    workers = options.workers_for(todo)
    with DecodePool(work, workers, options.timeout_s, options.ahead(workers)) as pool:
        decoded = pool.decode(chain.from_iterable(_to_decode(job, parts)))
        encoder = PartEncoder(model, options, progress.tell)
        for part, partly in parts:
            yield part, encoder.encode(partial_rows(job, part, partly), decoded)


def decode_work(model: Model, options: FolderOptions) -> DecodeWork:
    return DecodeWork(
        model.preprocessing,
        options.background,
        options.max_pixels,
        options.min_side,
        options.memory_bytes,
    )


def partial_rows(job: Job, part: int, partly: bool) -> Rows:
    """The rows of a part as far as they are there."""
    if partly and (rows := job.read(part)):
        return rows
    return Rows.empty(part * job.inputs.part_rows, job.inputs.read(part))


def _to_decode(job: Job, parts: Sequence[tuple[int, bool]]) -> Iterator[Iterator[Entry]]:
    """What each part needs decoded, in the order in which it is asked for."""
    for part, partly in parts:
        pairs = zip(job.inputs.read(part), partial_rows(job, part, partly).status, strict=True)
        yield (entry for entry, status in pairs if status != OK)
