"""From a file to upright RGB pixels, or to one `ImageError`: nothing else comes out.

Needs Pillow and numpy only, so that worker processes start quickly.

FORMATS has Pillow's format names. Left out: EPS (Pillow starts Ghostscript), IPTC (opens whatever
it contains, EPS included), WMF, BUFR, GRIB, HDF5 (need an external handler), MPEG (no pixels) and
FITS (unpacks gzip without a limit).
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import logging
import os
import re
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from vitcli.errors import VitcliError, install_extra
from vitcli.files import printable
from vitcli.images import MAX_PIXELS

COMMON = ("JPEG", "PNG", "GIF", "BMP", "PPM")
FORMATS = (
    *("JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "PPM", "TIFF", "WEBP", "AVIF", "HEIF"),
    *("JPEG2000", "ICO", "CUR", "ICNS", "PSD", "TGA", "QOI", "DDS", "PCX", "DCX", "SGI", "SUN"),
    *("BLP", "FLI", "FTEX", "GBR", "IM", "IMT", "MCIDAS", "MSP", "PCD", "PIXAR", "SPIDER"),
    *("XBM", "XPM", "XVTHUMB"),
)


class Signature(NamedTuple):
    """The first bytes of a known format; `refusal` says why it is not read, if it is not."""

    offset: int
    content: bytes
    name: str
    refusal: str = ""
    hint: str = ""


_STARTS_PROGRAM = "reading it would start another program"
_DRAWING = "a drawing without pixels"
_CONVERT = "convert it to PNG first"
_AGAIN = "download the image again"
_MARKUP = (b"<svg", b"<?xml", b"<!doctype html", b"<html")
_SIGNATURES = (
    Signature(0, b"%!PS", "PostScript", _STARTS_PROGRAM, _CONVERT),
    Signature(0, b"\xc5\xd0\xd3\xc6", "EPS", _STARTS_PROGRAM, _CONVERT),
    Signature(0, b"%PDF", "PDF", "not an image", _CONVERT),
    Signature(0, b"\xd7\xcd\xc6\x9a", "WMF", _DRAWING, _CONVERT),
    Signature(40, b" EMF", "EMF", _DRAWING, _CONVERT),
    Signature(0, b"<svg", "SVG", _DRAWING, _CONVERT),
    Signature(0, b"<?xml", "XML, as SVG is", _DRAWING, _CONVERT),
    Signature(0, b"<!doctype html", "HTML", "a web page, not an image", _AGAIN),
    Signature(0, b"<html", "HTML", "a web page, not an image", _AGAIN),
    Signature(0, b"version https://git-lfs", "a Git LFS pointer", "not the image", "git lfs pull"),
    Signature(0, b"\xff\x0a", "JPEG XL", "not read", _CONVERT),
    Signature(4, b"JXL ", "JPEG XL", "not read", _CONVERT),
    Signature(0, b"v/1\x01", "OpenEXR", "not read", _CONVERT),
    Signature(0, b"#?RADIANCE", "Radiance HDR", "not read", _CONVERT),
    Signature(0, b"SIMPLE  =", "FITS", "not read", _CONVERT),
    Signature(0, b"\x89HDF\r\n", "HDF5", "not read", _CONVERT),
    Signature(0, b"\xff\xd8\xff", "JPEG"),
    Signature(0, b"\x89PNG\r\n", "PNG"),
    Signature(0, b"GIF8", "GIF"),
    Signature(8, b"WEBP", "WebP"),
    Signature(0, b"II*\x00", "TIFF"),
    Signature(0, b"MM\x00*", "TIFF"),
    Signature(0, b"8BPS", "PSD"),
    Signature(4, b"jP  ", "JPEG 2000"),
    Signature(4, b"ftypavi", "AVIF"),
)
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def recognize(head: bytes) -> Signature | None:
    """What the first 48 bytes of a file say it is. Makes the HEIF plugin ready when it is that."""
    if head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS and b"avif" not in head:
        return _heif()
    text = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if text.startswith(_MARKUP):
        head = text
    for signature in _SIGNATURES:
        if head.startswith(signature.content, signature.offset):
            return signature
    return None


def _heif() -> Signature:
    if importlib.util.find_spec("pillow_heif") is None:
        how = install_extra("heif")  # in the message too: rows and warnings have no hints
        return Signature(4, b"ftyp", "HEIF", f"needs pillow-heif ({how})", how)
    from pillow_heif import register_heif_opener

    register_heif_opener()
    return Signature(4, b"ftyp", "HEIF")


_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
_WHITE_IS_ZERO, _UNSIGNED = 0, 1


def flatten(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, bool]:
    """(RGB image, whether it had transparency) of a loaded image in any mode.

    * More than 8 bits an integer sample are scaled by their depth: the 8 highest bits are kept,
      as Pillow keeps them for 16-bit RGB, so that a ramp of 256 levels keeps 256 levels whether
      it was widened by 256 or by 257. Signed samples count from zero; below is black. 32-bit
      samples of at most 65535 are 16-bit samples that a program stored in more room.
    * Floating point samples have no depth. If all lie in 0 to 1, that range is black to white;
      else if all lie in 0 to 255, they are 8-bit levels; otherwise NotImplementedError.
    * CMYK, YCbCr, HSV and LAB become RGB by Pillow's formulas; color profiles are not applied.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _deep_gray(image, background)
    if image.mode == "F":
        return Image.fromarray(_float_gray(image)).convert("RGB"), False
    if not image.has_transparency_data:
        return (image if image.mode == "RGB" else image.convert("RGB")), False
    canvas = Image.new("RGBA", image.size, (*background, 255))
    straight = image.convert("LA") if image.mode == "La" else image  # Pillow has no other way
    return Image.alpha_composite(canvas, straight.convert("RGBA")).convert("RGB"), True


def _deep_gray(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, bool]:
    samples = np.asarray(image)
    bits, signed, inverted = _depth(image)
    if bits == 32 and samples.min() >= 0 and samples.max() <= 0xFFFF:
        bits, signed = 16, False
    if signed:
        levels = np.maximum(samples, 0) >> max(bits - 9, 0)
    else:
        unsigned = samples.view(np.uint32) if samples.dtype == np.int32 else samples
        levels = unsigned >> max(bits - 8, 0)
    gray = np.minimum(levels, 255).astype(np.uint8)
    rgb = np.repeat((255 - gray if inverted else gray)[..., None], 3, axis=2)
    transparent = image.info.get("transparency")
    if transparent is None:
        return Image.fromarray(rgb), False
    rgb[samples == transparent] = background
    return Image.fromarray(rgb), True


def _depth(image: Image.Image) -> tuple[int, bool, bool]:
    """(bits per sample, signed, white is zero) of an integer mode above 8 bits."""
    tags: Any = getattr(image, "tag_v2", None)
    if tags is not None:
        signed = tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0] != _UNSIGNED
        inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        return int(tags.get(_BITS_PER_SAMPLE, (16,))[0]), signed, inverted
    if image.mode == "I" and image.format in ("IM", "MCIDAS"):
        return 32, True, False
    return 16, False, False  # PNG, PPM, JPEG 2000: Pillow widens them to 16 bits


def _float_gray(image: Image.Image) -> NDArray[np.uint8]:
    samples = np.asarray(image)
    low, high = float(samples.min()), float(samples.max())
    if not (low >= 0.0 and high <= 255.0):  # also false for NaN
        raise NotImplementedError(
            f"floating point samples from {low:.6g} to {high:.6g}: the white level is unknown"
        )
    return np.rint(samples * (255.0 if high <= 1.0 else 1.0)).astype(np.uint8)


def align_transparency(image: Image.Image) -> None:
    """Scale the transparent color of a PNG as Pillow will scale the pixels; call before load().

    The color is written in the file's depth; Pillow widens gray of 2 and 4 bits and narrows
    16-bit RGB to 8 bits, but leaves the color as it is.
    """
    color = image.info.get("transparency")
    if color is None or image.format != "PNG" or not getattr(image, "tile", None):
        return
    raw_mode = image.tile[0].args  # type: ignore[attr-defined]
    if raw_mode in ("L;2", "L;4"):
        image.info["transparency"] = color * (85 if raw_mode == "L;2" else 17)
    elif raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(channel >> 8 for channel in color)


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
    decoded; a side below `min_side` is an error. The format follows from the content, never from
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
                return _passes(file, image) * image.width * image.height <= _QUICK_PIXELS
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
    """libtiff writes its complaints straight to the process's stderr; Pillow's error has it too."""
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
        raise ImageError("unsupported", f"{label}: not an image in a supported format") from error
    with image:
        if _passes(file, image) > _MOST_SCANS:
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


def _passes(file: IO[bytes], image: Image.Image) -> int:
    """Scans of a JPEG that libjpeg reads one after another; 1 for all else."""
    jpeg = image.format in ("JPEG", "MPO") and _has_scans(file, image)
    return _scans(file) if jpeg else 1


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
