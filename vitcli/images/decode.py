"""From a file to upright RGB pixels, or to one `ImageError`: nothing else comes out.

Needs Pillow and numpy only, so that worker processes start quickly.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, get_args

from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images import MAX_PIXELS
from vitcli.images.formats import COMMON, FORMATS, align_transparency, flatten, recognize

FailureCode = Literal[
    "unreadable",
    "unsupported",
    "truncated",
    "corrupt",
    "too_large",
    "too_small",
    "out_of_memory",
    "timed_out",
    "crashed",
]
FAILURE_CODES: tuple[FailureCode, ...] = get_args(FailureCode)

_MOST_SCANS = 500
"""A progressive JPEG has about ten scans, and each costs a pass over all coefficients."""

_PLAIN = ("JPEG", "PNG", "GIF", "WebP")
"""Their decoders take a time that the number of pixels bounds."""
_QUICK_PIXELS = 2**28
"""Pixels times scans: ten scans of 24 megapixels, a few seconds."""

logging.getLogger("PIL").addHandler(logging.NullHandler())  # else its errors go to stderr

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_NOT_READ = re.compile(
    r"unsupported|not implemented|unknown \w+ mode|cannot handle|^\(\d+, \d+\)$", re.IGNORECASE
)
"""Pillow's words for a sound file of a kind that it does not read; (mode, bits) are a PSD's."""


class ImageError(VitcliError):
    """An image that cannot be used; `code` is one of `FAILURE_CODES`, for counting and columns."""

    def __init__(self, code: FailureCode, message: str, hint: str = "") -> None:
        super().__init__(message, hint, exit_code=1)
        self.code: FailureCode = code

    def __reduce__(self) -> tuple[type[ImageError], tuple[FailureCode, str, str]]:
        """Errors travel from worker processes whole, code and hint included."""
        return type(self), (self.code, self.message, self.hint)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Upright RGB pixels and what the file held."""

    image: Image.Image
    mode: str
    """The mode Pillow gives the file's pixels, before they became RGB."""
    width: int
    height: int
    """Size in pixels after the orientation was applied."""
    format: str | None
    """Pillow's name of the file format; None where there was no file."""
    orientation: int = 1
    """EXIF orientation 1 to 8 that was applied; 1 is none."""
    has_alpha: bool = False
    """Whether there was transparency, now composited on the background."""


def decode(
    source: str | os.PathLike[str] | bytes,
    *,
    name: str | None = None,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
    min_side: int = 1,
) -> DecodedImage:
    """Decode the first frame of an image file (a path) or of its content (bytes).

    `name` is how errors call it; `max_pixels` is checked on the header, before any pixel is
    decoded; a side below `min_side` is an error. The format is told from the content, never from
    the suffix. Pillow's limits and Python's warnings are process-wide, so decode in parallel
    with processes, not threads.

    Raises ImageError for whatever is wrong with the file; no other exception comes from its
    content.
    """
    bytes_given = isinstance(source, bytes)
    label = printable(name or ("<bytes>" if bytes_given else os.fspath(source)))
    try:
        with _open(source, label) as file, _pillow_limits(max_pixels):
            decoded = _decode(file, label, background)
    except ImageError:
        raise
    except Exception as error:  # Pillow's plugins raise nearly every built-in exception
        raise _as_image_error(error, label, max_pixels) from error
    if min(decoded.width, decoded.height) < max(1, min_side):
        raise ImageError(
            "too_small",
            f"{label}: {decoded.width}x{decoded.height} pixels",
            f"both sides must be at least {max(1, min_side)} px",
        )
    return decoded


def is_quick(path: str | os.PathLike[str]) -> bool:
    """Whether the header promises pixels within seconds, in memory a few times their size.

    Or that there is nothing to decode: no such file, or a header that is refused. Other formats
    than the plain ones, many pixels and JPEGs of many scans make no such promise.
    """
    try:
        with _open(path, "") as file:
            head = file.read(48)
            signature = recognize(head)
            if not head or (signature and signature.refusal):
                return True
            if not signature or signature.name not in _PLAIN:
                return head.startswith(b"BM")
            with _pillow_limits(MAX_PIXELS), _identify(file) as image:
                passes = 1
                if image.format in ("JPEG", "MPO") and _has_scans(file, image):
                    passes = _scans(file)
                return passes * image.width * image.height <= _QUICK_PIXELS
    except Exception:  # `decode` meets the same at once, and has the words
        return True


def _open(source: str | os.PathLike[str] | bytes, label: str) -> IO[bytes]:
    """Only ordinary files are opened: a FIFO or a device could block for ever."""
    if isinstance(source, bytes):
        return io.BytesIO(source)
    path = Path(source)
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise ImageError("unreadable", f"{label}: is a folder", "name an image file")
        if not stat.S_ISREG(kind):
            raise ImageError("unreadable", f"{label}: is not an ordinary file")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError("unreadable", f"{label}: {reason}") from error


@contextlib.contextmanager
def _pillow_limits(max_pixels: int) -> Iterator[None]:
    """Pillow errors above twice its limit, also for images nested in ICO and ICNS."""
    limit, truncated = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    reasons = Image.WARN_POSSIBLE_FORMATS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = max_pixels / 2  # type: ignore[assignment]  # not //: odd limits
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        Image.WARN_POSSIBLE_FORMATS = True  # `_identify` reads why a plugin refused
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = limit, truncated
            Image.WARN_POSSIBLE_FORMATS = reasons


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """libtiff writes its complaints straight to the process's stderr; Pillow's error tells all."""
    try:
        saved = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _decode(file: IO[bytes], label: str, background: tuple[int, int, int]) -> DecodedImage:
    head = file.read(48)
    if not head:
        raise ImageError("truncated", f"{label}: the file is empty")
    signature = recognize(head)
    if signature and signature.refusal:
        raise ImageError(
            "unsupported", f"{label}: {signature.name}: {signature.refusal}", signature.hint
        )
    try:
        image = _identify(file)
    except UnidentifiedImageError as error:
        if signature:
            plugin = signature.name.upper().replace(" ", "") + " opening failed. "
            said = next((x.removeprefix(plugin) for x in error.args if x.startswith(plugin)), "")
            reason = " ".join(printable(said).split())
            raise ImageError(
                "unsupported" if _NOT_READ.search(reason) else "corrupt",
                f"{label}: begins as {signature.name}, but its header is not readable"
                + (f": {reason}" if reason else ""),
            ) from error
        raise ImageError("unsupported", f"{label}: not an image in a format read here") from error
    with image:
        if (
            image.format in ("JPEG", "MPO")
            and _has_scans(file, image)
            and (_scans(file) > _MOST_SCANS)
        ):
            raise ImageError("corrupt", f"{label}: a JPEG of more than {_MOST_SCANS} scans")
        return _upright_rgb(image, background)


def from_pillow(
    image: Image.Image, *, name: str = "image", background: tuple[int, int, int] = (255, 255, 255)
) -> DecodedImage:
    """An open Pillow image as `decode` gives the same file: upright, RGB, on `background`.

    The image itself stays as it is.

    Raises ImageError where its pixels cannot be read.
    """
    try:
        whole = not getattr(image, "tile", None)  # pixels are there; else its file is read now
        return _upright_rgb(image.copy() if whole else image, background)
    except Exception as error:  # as in `decode`
        raise _as_image_error(error, printable(name), MAX_PIXELS) from error


def _upright_rgb(image: Image.Image, background: tuple[int, int, int]) -> DecodedImage:
    mode, kind = image.mode, image.format
    align_transparency(image)
    with _quiet_stderr() if kind == "TIFF" else contextlib.nullcontext():
        image.load()
    orientation = _orientation(image)
    rgb, has_alpha = flatten(image, background)
    if orientation in _UPRIGHT:
        rgb = rgb.transpose(_UPRIGHT[orientation])
    return DecodedImage(rgb, mode, rgb.width, rgb.height, kind, orientation, has_alpha)


def _has_scans(file: IO[bytes], image: Image.Image) -> bool:
    """Whether libjpeg reads more than the first scan: unless that holds all components at once.

    Pillow has just read that scan's header: its length, its components' number, two bytes each,
    three more.
    """
    components = getattr(image, "layers", 0)
    if image.format != "JPEG" or image.info.get("progressive") or not components:
        return True
    file.seek(max(file.tell() - 4 - 2 * components, 0))
    return file.read(1) != bytes((components,))


def _scans(file: IO[bytes]) -> int:
    """Start-of-scan markers of a JPEG; compressed data cannot hold one."""
    file.seek(0)
    count, last = 0, b""
    while chunk := file.read(1 << 20):
        count += (last + chunk).count(b"\xff\xda")
        last = b"\xff" if chunk.endswith(b"\xff") else b""
    return count


def _identify(file: IO[bytes]) -> Image.Image:
    """Read the header; the rarer plugins are imported only where the common ones pass.

    Raises UnidentifiedImageError, whose arguments are what each plugin had against it.
    """
    file.seek(0)
    with contextlib.suppress(UnidentifiedImageError):  # nearly all; the rest says why it is not
        return Image.open(file, formats=COMMON)
    for formats in (COMMON, FORMATS):
        if formats is FORMATS:
            Image.init()
        file.seek(0)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with contextlib.suppress(UnidentifiedImageError):
                return Image.open(file, formats=[name for name in formats if name in Image.OPEN])
    raise UnidentifiedImageError(*(str(warning.message) for warning in heard))


def _orientation(image: Image.Image) -> int:
    """1 where there is none; a damaged EXIF block does not make the pixels unusable."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1
    return value if value in _UPRIGHT else 1


def _as_image_error(error: Exception, label: str, max_pixels: int) -> ImageError:
    reason = " ".join(printable(str(error)).split()) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(
            "too_large",
            f"{label}: more than {max_pixels:,} pixels",
            "make it smaller first, or raise the pixel limit",
        )
    if isinstance(error, MemoryError):
        return ImageError("out_of_memory", f"{label}: no memory left to decode it")
    if isinstance(error, EOFError) or "truncated" in reason.lower():
        return ImageError("truncated", f"{label}: {reason}")
    if isinstance(error, ImportError | NotImplementedError) or _NOT_READ.search(reason):
        return ImageError("unsupported", f"{label}: {reason}")
    return ImageError("corrupt", f"{label}: {reason}")
