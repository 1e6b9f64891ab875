"""What runs in a decoding process: numpy and Pillow, never torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitcli.commands.embed.entries import Entry
from vitcli.config.schema import PreprocessConfig
from vitcli.images.decode import MAX_PIXELS, ImageError, decode
from vitcli.images.paths import printable
from vitcli.images.preprocess import preprocess

READY = "ready"


@dataclass(frozen=True)
class DecodeWork:
    """How every image of a job is decoded."""

    preprocess: PreprocessConfig
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = MAX_PIXELS
    min_side: int = 1
    memory_bytes: int = 0
    """Address space a decoding process may take (Linux); 0 is no limit."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of one entry."""

    pixels: NDArray[np.float32] | None = None
    """(3, h, w), None where it failed."""
    width: int | None = None
    height: int | None = None
    """Size of the upright image in pixels, None where it could not be decoded."""
    code: str = "ok"
    error: str = ""


Read = Callable[[Entry, "DecodeWork"], "Decoded"]


def main(number: int) -> None:
    """Answer each `Entry` with a `Decoded`, until the other end of the pipe is closed."""
    connection = Connection(number)
    with contextlib.suppress(EOFError, OSError):
        work, read = connection.recv()
        _settle(work.memory_bytes)
        connection.send(READY)
        while True:
            connection.send(read(connection.recv(), work))


def read(entry: Entry, work: DecodeWork) -> Decoded:
    """Decode and preprocess one entry; every failure is a code."""
    if entry.code:
        return Decoded(code=entry.code, error=entry.error)
    width = height = None
    try:
        source = content(entry)
        image = decode(
            source,
            name=entry.name,
            background=work.background,
            max_pixels=work.max_pixels,
            min_side=work.min_side,
        )
        width, height = image.width, image.height
        return Decoded(preprocess(image.image, work.preprocess), width, height)
    except ImageError as error:
        # The row has the path already.
        message = error.message.removeprefix(f"{printable(entry.name)}: ")
        return Decoded(None, width, height, error.code, message)
    except MemoryError:
        return Decoded(None, width, height, "out_of_memory", "no memory left to decode it")
    except Exception as error:  # one row must not cost the others
        reason = f"{type(error).__name__}: {printable(str(error))}"
        return Decoded(None, width, height, "corrupt", reason)


def content(entry: Entry) -> str | bytes:
    """What `decode` reads: the file's path, or the bytes of a member.

    Raises:
        ImageError: the shard cannot be read so far.
    """
    if entry.offset < 0:
        return entry.source
    try:
        with Path(entry.source).open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.size)
    except OSError as error:
        raise ImageError("unreadable", f"shard: {error.strerror or error}") from error
    if len(content) < entry.size:
        raise ImageError("truncated", f"the shard ends after {len(content)} of {entry.size} bytes")
    return content


def _settle(memory_bytes: int) -> None:
    """Die with the parent, leave Ctrl-C to it, keep a decoder's chatter and appetite in bounds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with contextlib.suppress(ValueError, OSError):
            import resource

            if memory_bytes:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)  # libtiff and others write to the terminal
    os.dup2(null, 1)
    os.dup2(null, 2)
