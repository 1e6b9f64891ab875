"""Small image files built byte by byte, for what Pillow cannot write."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

from PIL import Image


def save(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():  # some formats are going to be removed from Pillow
        warnings.simplefilter("ignore", DeprecationWarning)
        image.save(file, format, **options)
    return file.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def png(
    size: tuple[int, int], bits: int, color: int, rows: list[bytes], transparent: bytes = b""
) -> bytes:
    """A PNG of raw rows; `color` is 0 gray, 2 RGB, as in the specification."""
    header = struct.pack(">IIBBBBB", *size, bits, color, 0, 0, 0)
    chunks = [png_chunk(b"IHDR", header)]
    if transparent:
        chunks.append(png_chunk(b"tRNS", transparent))
    chunks.append(png_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))))
    return b"\x89PNG\r\n\x1a\n" + b"".join([*chunks, png_chunk(b"IEND", b"")])


def tiff(
    size: tuple[int, int], bits: int, pixels: bytes, *, photometric: int = 1, sample_format: int = 1
) -> bytes:
    """An uncompressed little-endian gray TIFF of one strip."""
    tags = {256: size[0], 257: size[1], 258: bits, 259: 1, 262: photometric, 277: 1, 278: size[1]}
    tags |= {339: sample_format, 279: len(pixels)}
    offset = 8 + 2 + 12 * (len(tags) + 1) + 4
    tags[273] = offset
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels


def many_scans(count: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    file = io.BytesIO()
    Image.new("RGB", size, (200, 20, 20)).save(file, "JPEG", progressive=True)
    whole = file.getvalue()
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * count + b"\xff\xd9"
