"""Which file formats are read, and what is said of the others.

The list is of Pillow's format names. Left out: EPS (Pillow starts Ghostscript), IPTC (opens
whatever it contains, EPS included), WMF, BUFR, GRIB, HDF5 (need a handler from outside), MPEG
(no pixels) and FITS (unpacks gzip without a limit).
"""

from __future__ import annotations

import codecs
import importlib.util
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitcli.errors import install_extra

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
        return Signature(4, b"ftyp", "HEIF", "needs the plugin pillow-heif", install_extra("heif"))
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
    return Image.alpha_composite(canvas, _rgba(image)).convert("RGB"), True


def _rgba(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # Pillow converts it to LA alone
        image = image.convert("LA")
    return image.convert("RGBA")


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
    """(bits a sample, signed, white is zero) of an integer mode above 8 bits."""
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
            f"floating point samples from {low:.6g} to {high:.6g}: no value is known to be white"
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
