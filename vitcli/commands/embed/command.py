"""`vitcli encode PATH... --out DIR`: the job over many images behind `vitcli encode`."""

from __future__ import annotations

import dataclasses
import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitcli.config.request import ModelRequest
from vitcli.errors import VitcliError
from vitcli.files import is_folder

if TYPE_CHECKING:
    from vitcli.commands.embed.encoder import FolderOptions
    from vitcli.model import Model

_FILES = (".npz", ".npy", ".safetensors")


def job_option(*names: str, **how: Any) -> Any:
    """A typer option in the help's panel about many images."""
    return typer.Option(*names, rich_help_panel="Many images (--out DIR)", **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What only a job over many images takes; None is the default of `FolderOptions`."""

    format: Annotated[
        str | None,
        job_option("--format", metavar="KIND", help="parquet, npy (+ csv), safetensors."),
    ] = None
    vector_dtype: Annotated[
        str | None, job_option("--vector-dtype", metavar="TYPE", help="float32 or float16.")
    ] = None
    norms: Annotated[bool, job_option("--norms", help="Also the norms of each layer's tokens.")] = (
        False
    )
    part_rows: Annotated[
        int | None, job_option("--part-rows", metavar="N", min=1, help="Rows of a part: 1024.")
    ] = None
    batch: Annotated[
        int | None, job_option("--batch", metavar="N", min=1, help="Images in a pass: 16.")
    ] = None
    workers: Annotated[
        int | None,
        job_option("--workers", metavar="N", min=1, help="Decoding processes: one a core."),
    ] = None
    timeout: Annotated[
        float | None,
        job_option("--timeout", metavar="S", min=0.001, help="Seconds to decode an image in: 60."),
    ] = None
    memory: Annotated[
        float | None,
        job_option("--memory", metavar="GIB", min=0.25, help="For each decoding process: 4."),
    ] = None
    max_pixels: Annotated[
        int | None,
        job_option("--max-pixels", metavar="N", min=1, help="Larger images fail: 178956970."),
    ] = None
    min_side: Annotated[
        int | None, job_option("--min-side", metavar="N", min=1, help="Smaller images fail: 1.")
    ] = None
    any_suffix: Annotated[
        bool, job_option("--any-suffix", help="Every file of a folder, whatever its suffix.")
    ] = False
    shard: Annotated[
        str | None,
        job_option("--shard", metavar="I/N", help="Only every N-th part, from the I-th."),
    ] = None
    retry_failed: Annotated[
        bool, job_option("--retry-failed", help="Try the failed rows of finished parts again.")
    ] = False
    fail_fast: Annotated[bool, job_option("--fail-fast", help="Stop at the first failure.")] = False
    cluster: Annotated[
        str | None,
        job_option("--cluster", metavar="ray", help="Encode the parts on a Ray cluster."),
    ] = None
    address: Annotated[
        str | None,
        job_option("--address", metavar="HOST:PORT", help="A running cluster, or auto to find it."),
    ] = None

    def given(self) -> list[str]:
        """The options that were set, as the user wrote them."""
        fields = dataclasses.fields(self)
        return ["--" + f.name.replace("_", "-") for f in fields if getattr(self, f.name)]

    def check(self) -> None:
        if self.cluster not in (None, "ray"):
            raise VitcliError(f"--cluster {self.cluster}: unknown", "--cluster ray")
        if self.address and not self.cluster:
            raise VitcliError("--address is that of a cluster", "add --cluster ray")

    def to_options(self, kind: str | None, background: tuple[int, int, int]) -> FolderOptions:
        from vitcli.commands.embed.encoder import FolderOptions
        from vitcli.commands.embed.job import parse_shard

        if self.vector_dtype not in (None, "float32", "float16"):
            raise VitcliError(f"--vector-dtype {self.vector_dtype}: float32 or float16")
        chosen: dict[str, Any] = {
            "kind": kind,
            "format": self.format,
            "vector_dtype": self.vector_dtype,
            "part_rows": self.part_rows,
            "batch": self.batch,
            "max_pixels": self.max_pixels,
            "min_side": self.min_side,
            "timeout_s": self.timeout,
            "workers": self.workers,
            "memory_bytes": None if self.memory is None else int(self.memory * 2**30),
            "shard": None if self.shard is None else parse_shard(self.shard),
        }
        return FolderOptions(
            **{key: value for key, value in chosen.items() if value is not None},
            norms=self.norms,
            background=background,
            retry_failed=self.retry_failed,
            fail_fast=self.fail_fast,
        )


def is_job(inputs: list[str], out: str | None) -> bool:
    """Whether inputs or the place for the output speak of many images.

    A folder, glob, list or shard does, and an `--out` that is a folder, ends in `/` or has no
    suffix.

    Raises:
        VitcliError: many images, and an `--out` that is a file or not given.
    """
    many = next((text for text in inputs if _is_many(text)), None)
    if out is None:
        if many is not None:
            raise VitcliError(f"{many}: many images", "name a folder for their vectors: --out DIR")
        return False
    folder = is_folder(out) or out.endswith("/") or not Path(out).suffix
    if folder and not inputs:
        raise VitcliError(f"--out {out}: a folder, but no images", "vitcli encode PATH --out DIR")
    if many is not None and not folder and Path(out).suffix in _FILES:
        raise VitcliError(f"{many}: many images need a folder", "--out DIR instead of a file")
    return folder or many is not None


def _is_many(text: str) -> bool:
    if text == "-" or is_folder(text) or text.lower().endswith(".tar"):
        return True
    return not os.path.lexists(text) and (text.startswith("@") or glob.has_magic(text))


def run_job(
    request: ModelRequest, inputs: list[str], out: str, job: JobOptions, **how: Any
) -> None:
    """Encode, show progress, and answer with the table or JSON; exit code 1 if any image failed."""
    from vitcli.commands.embed.view import summary, watch_job
    from vitcli.ui.console import note, status, stream
    from vitcli.ui.tables import show

    job.check()
    with status("loading torch and the encoder"):
        from vitcli.commands.embed.analysis import encode_folder
        from vitcli.commands.embed.inputs import Listing
        from vitcli.model import load_model

        options = job.to_options(how["tokens"], how["background"])
        loaded: Model = load_model(request)
    if loaded.report:
        note(loaded.report.line())
    listing = Listing(tuple(inputs), job.any_suffix, Path(out))
    work = None
    if job.cluster:
        from vitcli.commands.embed.ray_cluster import on_ray

        work = on_ray(request, job.address)
    with watch_job("encoding") as watch:
        result = encode_folder(request, loaded, listing, Path(out), options, watch, work)
    if loaded.fresh:
        note("fresh weights: the vectors describe the architecture, not the images")
    if result.skipped_files:
        first = result.skipped_files[:5]
        kinds = ", ".join(f"{s.count:,} {s.code or 'without suffix'}" for s in first)
        more = " and more" if len(result.skipped_files) > len(first) else ""
        note(f"left out: {kinds}{more}; --any-suffix takes every file")
    if result.duplicates:
        note(f"{result.duplicates:,} repetitions among the inputs: each has one row")
    stream(stderr=True).print(summary(result), markup=False, soft_wrap=True)
    show(result, how["form"])
    if result.failed:
        raise typer.Exit(1)
