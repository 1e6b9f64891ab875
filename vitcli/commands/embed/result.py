"""The options, the result and the manifest of an embedding job."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vitcli.config.request import ModelRequest, split_library
from vitcli.config.settings import Setting
from vitcli.errors import VitcliError
from vitcli.images import MAX_PIXELS, MEMORY_BYTES, TIMEOUT_S
from vitcli.results import FailedImage, ModelInfo, Result

MANIFEST = "_manifest.json"
"""In the folder of a job: readers of a folder of Parquet pass over names with an underscore."""
PART_BYTES = 2**28
"""A part holds fewer rows than `part_rows` where it would be larger than this."""


@dataclass(frozen=True)
class FolderOptions:
    """How a job is done. What `job.IDENTITY` names must not change while the job lasts."""

    kind: str = "pooled"
    """Kinds of vectors with commas: pooled, output, cls, dist, register, patch."""
    layers: tuple[int, ...] = ()
    """Layers whose vectors are written: 0 is the input of the first block, i the output of block
    i, -1 the last; without any, the vectors after the final norm."""
    format: str = "parquet"
    """parquet, npy (+ csv) or safetensors."""
    vector_dtype: str = "float32"
    """float32 or float16."""
    norms: bool = False
    """Also write, for each layer, the mean patch norm and the norm of CLS."""
    part_rows: int = 1024
    """Rows per part; fewer where a part would be larger than `PART_BYTES`."""
    batch: int = 16
    """Images per forward pass; fewer where they keep their own size and that is larger."""
    background: tuple[int, int, int] = (255, 255, 255)
    """Red, green, blue behind transparent pixels."""
    max_pixels: int = MAX_PIXELS
    """Images of more pixels fail."""
    min_side: int = 1
    """Images with a shorter side fail."""

    workers: int | None = None
    """Decoding processes; None is one per core."""
    timeout_s: float = TIMEOUT_S
    """Seconds in which an image must be decoded."""
    memory_bytes: int = MEMORY_BYTES
    """Address space of a decoding process (Linux): what needs more is `out_of_memory`."""
    shard: tuple[int, int] = (1, 1)
    """(i, n): only every n-th part, from the i-th, counted from 1."""
    retry_failed: bool = False
    """Try the failed rows of finished parts again."""
    fail_fast: bool = False
    """Stop at the first failure."""

    @property
    def columns(self) -> dict[str, tuple[str, int | None]]:
        """Kind and layer (None: the encoder's end) of each column of vectors, by its name.

        A single one is called `vector`, several `KIND` or `KIND_layer_N`.
        """
        kinds = [kind.strip() for kind in self.kind.split(",")]
        pairs = [(kind, layer) for kind in kinds for layer in self.layers or (None,)]
        if len(pairs) == 1:
            return {"vector": pairs[0]}
        return {
            kind if layer is None else f"{kind}_layer_{layer}": (kind, layer)
            for kind, layer in pairs
        }


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8).

    Raises:
        VitcliError: not a shard.
    """
    number, _, of = text.partition("/")
    if number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
        return int(number), int(of)
    raise VitcliError(
        f"--shard {text}: is not a shard (expected I/N, I from 1 to N)", "--shard 1/4"
    )


@dataclass(frozen=True)
class FailureCount:
    """How many images failed in one way."""

    code: str
    count: int


@dataclass(frozen=True)
class VectorColumn:
    """One column of vectors."""

    name: str
    kind: str
    layer: int | None
    """None is the end of the encoder, after the final norm."""
    shape: tuple[int, ...]
    """Of one image: (width), (h, w, width) for patches."""


@dataclass(frozen=True)
class FolderResult(Result):
    """The answer of `vitcli embed PATH... --out DIR`; counts are of this run's share."""

    model: ModelInfo
    engine: str
    """The engine that ran the encoder."""
    out: str
    format: str
    kind: str
    """Which vectors: pooled, output, cls, dist, register, patch; several with commas."""
    width: int
    """Numbers in one vector of the first column."""
    shard: str
    """`1/1` is the whole."""
    parts: int
    rows: int
    ok: int
    failures: tuple[FailureCount, ...]
    examples: tuple[FailedImage, ...]
    """The first few that failed."""
    rows_encoded: int
    """Rows of the parts that this run wrote; the rest was finished before."""
    skipped_files: tuple[FailureCount, ...]
    """Files of folders and shards that were left out: by suffix, and hidden ones."""
    duplicates: int
    """Inputs that were named more than once."""
    wall_s: float
    images_per_s: float | None
    """Over the rows encoded; None where there were none."""
    columns: tuple[VectorColumn, ...] = ()

    @property
    def failed(self) -> int:
        return self.rows - self.ok


class _Plain(BaseModel):
    """Strict: what a file says is never turned into something else."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
Level = Annotated[int, Field(ge=0, le=255)]


class _Settings(_Plain):
    """What readers use of a job's settings."""

    model: str
    weights: str
    weights_sha256: str
    kind: str
    layers: list[int] = Field(default=[])
    format: Literal["parquet", "npy", "safetensors"]
    vector_dtype: Literal["float32", "float16"]
    part_rows: Positive
    batch: Positive
    background: Annotated[list[Level], Field(min_length=3, max_length=3)]
    columns: Annotated[
        list[tuple[str, str, list[Positive]]], Field(default=[], strict=False, min_length=1)
    ]
    """Missing in a folder of the first release, as are `layers` and checksums: it is read only."""
    preprocess: dict[str, Any]


class _Inputs(_Plain):
    count: Positive
    sha256: str


class _Request(_Plain):
    """How the model was asked for; the fields of `ModelRequest`."""

    preset: str | None
    config_file: str | None
    settings: Annotated[list[tuple[list[str], Any, str]], Field(strict=False)]
    weights: str | None
    adapter: str | None
    seed: int
    image_size: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None
    device: str
    dtype: str
    engine: str | None


class Manifest(_Plain):
    settings: _Settings
    root: str
    inputs: _Inputs
    encoder_threads: Annotated[int, Field(ge=1, le=4096)]
    request: _Request


Checksums = dict[str, list[str]]
"""SHA-256 of each file of a part, by the part's number."""


def remembered(request: ModelRequest) -> dict[str, Any]:
    """A request as plain JSON, as `_Request` has it; files by their absolute paths."""
    plain = {**vars(request)}
    plain["settings"] = [[list(s.path), s.value, s.source] for s in request.settings]
    for key in ("config_file", "weights", "adapter"):
        library, value = split_library(str(plain[key] or ""))
        if value and Path(value).exists():
            plain[key] = f"{library}:" * bool(library) + str(Path(value).resolve())
    return plain


def recalled(plain: dict[str, Any]) -> ModelRequest:
    """The request that `remembered` wrote.

    Raises:
        VitcliError: settings that no model has.
    """
    size, file, settings = plain["image_size"], plain["config_file"], plain["settings"]
    known = {field.name: plain[field.name] for field in fields(ModelRequest) if field.name in plain}
    known["settings"] = tuple(Setting(tuple(path), *rest) for path, *rest in settings)
    known["image_size"] = tuple(size) if size else None
    known["config_file"] = Path(file) if file else None
    return ModelRequest(**known)
