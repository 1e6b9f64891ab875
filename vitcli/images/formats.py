"""Which file formats are read, and what is said of the others.

The list is of Pillow's format names. Left out: EPS (Pillow starts Ghostscript), IPTC (opens
whatever it contains, EPS included), WMF, BUFR, GRIB, HDF5 (need a handler from outside), MPEG
(no pixels) and FITS (unpacks gzip without a limit).
"""

from __future__ import annotations

import codecs
import importlib.util
from typing import NamedTuple

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


def recognise(head: bytes) -> Signature | None:
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
        return Signature(
            4, b"ftyp", "HEIF", "needs the plugin pillow-heif", "pip install 'vitcli[heif]'"
        )
    from pillow_heif import register_heif_opener

    register_heif_opener()
    return Signature(4, b"ftyp", "HEIF")
