"""Files as people have them: right pixels, or one ImageError with the right code."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile

from tests.images.files import png, png_chunk, save, tiff
from vitcli.errors import VitcliError
from vitcli.images.decode import FAILURE_CODES, FORMATS, ImageError, decode, flatten
from vitcli.images.synthetic import synthetic_image
from vitcli.ui.options import parse_color

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)

ALL_MODES = [
    *("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX"),
    *("RGBa", "La", "I;16", "I;16L", "I;16B", "I;16N"),
]


def pixels(source: bytes | Path, **options: Any) -> NDArray[np.uint8]:
    return np.asarray(decode(source, **options).image)


def failure(source: Any, **options: Any) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decode(source, **options)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 1
    return caught.value


@pytest.fixture(autouse=True)
def no_warnings(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is said on stderr, by Python or by a C library."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert capfd.readouterr().err == ""


class TestModes:
    @pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "TGA", "PCX", "SGI", "QOI"])
    def test_rgb_is_kept_exactly(self, format: str) -> None:
        image = synthetic_image((30, 40))
        decoded = decode(save(image, format))
        assert (decoded.width, decoded.height) == (40, 30)
        assert (decoded.mode, decoded.format, decoded.has_alpha) == ("RGB", format, False)
        assert np.array_equal(decoded.image, image)

    @pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP"])
    @pytest.mark.parametrize("mode", ["1", "L", "P"])
    def test_gray_bilevel_and_palette(self, mode: str, format: str) -> None:
        image = synthetic_image((30, 40)).convert(mode)
        decoded = decode(save(image, format))
        assert decoded.mode == mode
        assert np.array_equal(decoded.image, image.convert("RGB"))

    @pytest.mark.parametrize("format", ["JPEG", "TIFF"])
    def test_cmyk(self, format: str) -> None:
        ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # no cyan, full magenta and yellow
        decoded = decode(save(ink, format))
        assert decoded.mode == "CMYK"
        assert np.abs(np.asarray(decoded.image).astype(int) - RED).max() <= 2

    def test_ycck_jpeg_is_inverted_as_adobe_writes_it(self) -> None:
        adobe = save(Image.new("CMYK", (16, 16), (0, 0, 0, 255)), "JPEG")
        assert b"Adobe" in adobe
        assert pixels(adobe).max() <= 2

    @pytest.mark.parametrize(
        "mode",
        [
            pytest.param(
                "YCbCr",
                marks=pytest.mark.skipif(
                    int(PIL.__version__.split(".")[0]) < 13,
                    reason="Pillow 12 cannot read back the uncompressed YCbCr TIFF it writes",
                ),
            ),
            "LAB",
        ],
    )
    def test_other_color_spaces(self, mode: str) -> None:
        colors = [(255, 0, 0), (128, 128, 128), (255, 255, 255), (0, 0, 0)]
        levels = {
            "YCbCr": [(76, 85, 255), (128, 128, 128), (255, 128, 128), (0, 128, 128)],
            # CIE L*a*b* under D50, L scaled to 255, a and b as signed bytes
            "LAB": [(138, 81, 70), (137, 0, 0), (255, 0, 0), (0, 0, 0)],
        }[mode]
        image = Image.frombytes(mode, (4, 1), bytes(sum(levels, ())))
        decoded = decode(save(image, "TIFF"))
        assert decoded.mode == mode
        assert np.abs(np.asarray(decoded.image)[0].astype(int) - colors).max() <= 6

    @pytest.mark.parametrize("mode", ALL_MODES)
    def test_every_pillow_mode_becomes_rgb(self, mode: str) -> None:
        """White stays white and black black, at any depth and in any color space."""
        for level in (0, 255):
            gray = Image.new("L", (3, 2), level)
            if mode.startswith("I;16"):
                order = ">u2" if mode == "I;16B" else "<u2"
                image = Image.frombytes(mode, (3, 2), np.full(6, level * 257, order).tobytes())
            elif mode == "I":
                image = Image.new(mode, (3, 2), level * 257)
            elif mode == "F":
                image = Image.new(mode, (3, 2), level / 255)
            elif mode in ("La", "RGBa", "PA"):
                image = gray.convert({"La": "LA", "RGBa": "RGBA", "PA": "P"}[mode]).convert(mode)
            else:
                image = (gray.convert("RGB") if mode in ("LAB", "HSV") else gray).convert(mode)
            assert image.mode == mode
            rgb, _ = flatten(image, (0, 0, 255))
            assert rgb.mode == "RGB" and rgb.size == (3, 2)
            assert np.abs(np.asarray(rgb).astype(int) - level).max() <= 2

    @pytest.mark.parametrize("step", [256, 257])
    @pytest.mark.parametrize("container", ["PNG", "TIFF", "big-endian TIFF", "32-bit TIFF", "PPM"])
    def test_a_16_bit_ramp_keeps_256_levels(self, step: int, container: str) -> None:
        ramp = (np.arange(256) * step).astype(np.uint16)[None]
        if container == "PPM":
            content = b"P5 256 1 65535 " + ramp.astype(">u2").tobytes()
        elif container == "32-bit TIFF":
            content = save(Image.fromarray(ramp.astype(np.int32)), "TIFF")
        elif container == "big-endian TIFF":
            gray = Image.frombytes("I;16B", (256, 1), ramp.astype(">u2").tobytes())
            content = save(gray, "TIFF")
        else:
            content = save(Image.fromarray(ramp), container)
        assert np.array_equal(pixels(content)[0], np.repeat(np.arange(256)[:, None], 3, axis=1))

    def test_depth_comes_from_the_file(self) -> None:
        """12 bits, signed 16 bits and 32 bits are scaled by their own depth."""
        levels = np.arange(0, 256, 5)
        width = len(levels)
        gray = np.repeat(levels[:, None], 3, axis=1)
        twelve = [level << 4 | 9 for level in levels]
        packed = b"".join(
            bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255])
            for a, b in zip(twelve[::2], twelve[1::2], strict=True)
        )
        assert np.array_equal(pixels(tiff((width, 1), 12, packed))[0], gray)
        unsigned = (levels.astype(np.uint32) << 24).astype("<u4").tobytes()
        assert np.array_equal(pixels(tiff((width, 1), 32, unsigned))[0], gray)
        signed = struct.pack("<4h", -32768, -1, 128, 32767)
        assert pixels(tiff((4, 1), 16, signed, sample_format=2))[0, :, 0].tolist() == [0, 0, 1, 255]

    def test_white_is_zero(self) -> None:
        samples = np.array([0, 257, 65535], "<u2").tobytes()
        content = tiff((3, 1), 16, samples, photometric=0)
        assert pixels(content)[0, :, 0].tolist() == [255, 254, 0]

    def test_floats_in_unit_range_or_as_levels(self) -> None:
        unit = Image.fromarray(np.array([[0, 0.5, 1]], dtype=np.float32))
        assert pixels(save(unit, "TIFF"))[0, :, 0].tolist() == [0, 128, 255]
        level = Image.fromarray(np.array([[0, 100, 255]], dtype=np.float32))
        assert pixels(save(level, "TIFF"))[0, :, 1].tolist() == [0, 100, 255]
        for impossible in (-1.0, 300.0, np.nan, np.inf):
            image = Image.fromarray(np.array([[0, impossible]], dtype=np.float32))
            assert failure(save(image, "TIFF")).code == "unsupported"


class TestTransparency:
    BACKGROUND = (10, 200, 30)

    def test_alpha_is_composited(self) -> None:
        image = Image.new("RGBA", (3, 1))
        for x, alpha in enumerate((0, 128, 255)):
            image.putpixel((x, 0), (*BLUE, alpha))
        decoded = decode(save(image, "PNG"), background=self.BACKGROUND)
        assert decoded.has_alpha
        row = np.asarray(decoded.image)[0].astype(int)
        half = np.array(BLUE) * 128 / 255 + np.array(self.BACKGROUND) * 127 / 255
        assert np.abs(row - [self.BACKGROUND, half, BLUE]).max() <= 1
        assert pixels(save(image, "PNG"))[0, 0].tolist() == list(WHITE)

    @pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
    def test_gray_with_alpha(self, format: str) -> None:
        image = Image.new("LA", (2, 1), (50, 0))
        image.putpixel((1, 0), (50, 255))
        image = image.convert("RGBA") if format == "WEBP" else image
        options = {"lossless": True} if format == "WEBP" else {}
        row = pixels(save(image, format, **options), background=self.BACKGROUND)[0]
        assert row.tolist() == [list(self.BACKGROUND), [50, 50, 50]]

    @pytest.mark.parametrize("format", ["PNG", "GIF"])
    def test_palette_with_one_transparent_entry(self, format: str) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([*RED, *BLUE])
        image.putpixel((1, 0), 1)
        row = pixels(save(image, format, transparency=1), background=self.BACKGROUND)[0]
        assert row.tolist() == [list(RED), list(self.BACKGROUND)]

    def test_palette_with_alpha_for_each_entry(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([*RED, *BLUE])
        image.putpixel((1, 0), 1)
        content = save(image, "PNG", transparency=bytes([0, 255]))
        row = pixels(content, background=self.BACKGROUND)[0]
        assert row.tolist() == [list(self.BACKGROUND), list(BLUE)]

    @pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
    def test_transparent_gray_of_any_depth(self, bits: int) -> None:
        top = 2**bits - 1  # black, then white, which is declared transparent
        row = {1: b"\x40", 2: b"\x30", 4: b"\x0f", 8: b"\0\xff", 16: b"\0\0\xff\xff"}[bits]
        content = png((2, 1), bits, 0, [row], struct.pack(">H", top))
        decoded = decode(content, background=self.BACKGROUND)
        assert decoded.has_alpha
        assert np.asarray(decoded.image)[0].tolist() == [[0, 0, 0], list(self.BACKGROUND)]

    @pytest.mark.parametrize("bits", [8, 16])
    def test_transparent_color(self, bits: int) -> None:
        sample = ">B" if bits == 8 else ">H"
        top = 2**bits - 1
        row = b"".join(struct.pack(sample, v) for v in (top, 0, 0, 0, top, 0))
        content = png((2, 1), bits, 2, [row], struct.pack(">3H", 0, top, 0))
        row_out = pixels(content, background=self.BACKGROUND)[0]
        assert row_out.tolist() == [list(RED), list(self.BACKGROUND)]


def stored(upright: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The pixels that a camera stores for this EXIF orientation (EXIF 2.3, tag 274)."""
    swapped = upright.transpose(1, 0, 2)
    return {
        1: upright,
        2: upright[:, ::-1],  # row 0 top, column 0 right
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: swapped,  # row 0 left, column 0 top
        6: np.rot90(upright, 1),  # row 0 right, column 0 top: shown after a clockwise quarter turn
        7: swapped[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG", "AVIF"])
    @pytest.mark.parametrize("mode", ["RGB", "L"])
    def test_every_orientation_is_upright(self, orientation: int, format: str, mode: str) -> None:
        upright = np.asarray(synthetic_image((24, 40)).convert(mode).convert("RGB"))
        image = Image.fromarray(np.ascontiguousarray(stored(upright, orientation))).convert(mode)
        exif = Image.Exif()
        exif[274] = orientation
        options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(format, {})
        decoded = decode(save(image, format, exif=exif, **options))
        assert (decoded.width, decoded.height) == (40, 24)
        apart = np.abs(np.asarray(decoded.image).astype(int) - upright).mean()
        assert apart <= (8 if format in ("JPEG", "AVIF") else 0)

    @pytest.mark.parametrize("exif", [b"Exif\0\0II*\0\xff\xff\xff\xff", b"garbage", b"Exif\0\0"])
    def test_damaged_exif_leaves_the_pixels(self, exif: bytes) -> None:
        image = synthetic_image((24, 40))
        assert np.array_equal(pixels(save(image, "PNG", exif=exif)), image)

    @pytest.mark.parametrize("value", [0, 9, 65535])
    def test_unknown_orientation_is_none(self, value: int) -> None:
        exif = Image.Exif()
        exif[274] = value
        decoded = decode(save(synthetic_image((24, 40)), "PNG", exif=exif))
        assert (decoded.orientation, decoded.width) == (1, 40)


class TestAnimations:
    @pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
    def test_the_first_frame(self, format: str) -> None:
        first, second = (Image.new("RGB", (8, 8), color) for color in (RED, GREEN))
        options = {"lossless": True} if format == "WEBP" else {}
        content = save(first, format, save_all=True, append_images=[second], **options)
        assert pixels(content)[3, 3].tolist() == list(RED)


class TestHeif:
    def test_heic_with_the_plugin(self) -> None:
        plugin = pytest.importorskip("pillow_heif")
        image = synthetic_image((64, 80))
        file = io.BytesIO()
        plugin.from_pillow(image).save(file, quality=-1)
        decoded = decode(file.getvalue())
        assert (decoded.format, decoded.width, decoded.height) == ("HEIF", 80, 64)
        assert np.abs(np.asarray(decoded.image).astype(int) - np.asarray(image)).mean() < 6

    def test_without_the_plugin_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        error = failure(b"\0\0\0\x18ftypheic" + bytes(60))
        assert error.code == "unsupported"
        assert "[heif]" in error.hint and error.hint in error.message  # a row has the message alone


class TestRefused:
    def test_too_many_pixels_from_the_header_alone(self) -> None:
        row = png_chunk(b"IDAT", b"")  # there are no pixels to decode
        header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0))
        bomb = b"\x89PNG\r\n\x1a\n" + header + row
        error = failure(bomb, name="bomb.png")
        assert error.code == "too_large" and "bomb.png" in error.message

    @pytest.mark.parametrize("limit", [99, 100, 101])
    def test_the_pixel_limit_is_exact(self, limit: int) -> None:
        content = save(Image.new("L", (101, 1)), "PNG")
        if limit < 101:
            assert failure(content, max_pixels=limit).code == "too_large"
        else:
            assert decode(content, max_pixels=limit).width == 101

    @pytest.mark.parametrize("format", ["ICO", "ICNS"])
    def test_the_limit_holds_for_nested_images(self, format: str) -> None:
        content = save(Image.new("RGBA", (256, 256)), format)
        assert failure(content, max_pixels=200).code == "too_large"

    def test_global_limits_are_put_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12345)
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        half = save(synthetic_image(), "JPEG")
        assert failure(half[: len(half) // 2]).code == "truncated"
        assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (12345, True)

    @pytest.mark.parametrize(
        "content",
        [
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
            b"\xc5\xd0\xd3\xc6" + bytes(40),
            b"%PDF-1.7\n",
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"\xd7\xcd\xc6\x9a" + bytes(60),
            b"GRIB" + bytes(60),
            b"just some text\n",
            b"PK\x03\x04" + bytes(60),
        ],
    )
    def test_other_kinds_of_file(self, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("subprocess.Popen", None)  # and nothing may start a program
        assert failure(content).code == "unsupported"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "Git LFS"),
            (b"<!DOCTYPE html>\n<html><body>404</body></html>", "HTML"),
            (b"\n  <!doctype HTML>\n<html>", "HTML"),
            (b"<html><head></head></html>", "HTML"),
            (b"<?xml version='1.0' encoding='UTF-8'?>\n<!-- made by -->\n<svg/>", "XML"),
            (b"\xef\xbb\xbf<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
            (b"\xff\x0a" + bytes(60), "JPEG XL"),
            (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(60), "JPEG XL"),
            (b"v/1\x01" + bytes(60), "OpenEXR"),
            (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n", "Radiance"),
        ],
    )
    def test_what_lies_in_folders_instead_of_images_is_named(
        self, content: bytes, said: str
    ) -> None:
        error = failure(content)
        assert error.code == "unsupported" and said in error.message

    def test_postscript_inside_an_allowed_suffix(self, tmp_path: Path) -> None:
        path = tmp_path / "photo.jpg"
        synthetic_image().save(path, "EPS")
        error = failure(path)
        assert error.code == "unsupported" and "PostScript" in error.message

    def test_formats_that_start_programs_or_need_handlers_are_not_listed(self) -> None:
        Image.init()
        left_out = set(Image.OPEN) - set(FORMATS)
        assert {"EPS", "IPTC", "WMF", "BUFR", "GRIB", "HDF5", "FITS", "MPEG"} <= left_out

    @pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "AVIF", "JPEG2000"])
    @pytest.mark.parametrize("kept", [0.02, 0.5, 0.9])
    def test_truncated_files(self, format: str, kept: float) -> None:
        content = save(synthetic_image((64, 64)), format)
        error = failure(content[: int(len(content) * kept)])
        assert error.code in ("truncated", "corrupt", "unsupported")
        if format in ("JPEG", "PNG") and kept >= 0.5:
            assert error.code == "truncated"

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (tiff((8, 8), 3, bytes(24)), "unknown pixel mode"),
            (struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, 4, 4, 16, 3) + bytes(240), "(3, 16)"),
            (
                save(Image.new("L", (8, 8)), "JPEG").replace(
                    b"\xff\xc0\x00\x0b\x08", b"\xff\xc0\x00\x0b\x0c"
                ),
                "cannot handle 12-bit layers",
            ),
        ],
        ids=["tiff", "psd", "jpeg"],
    )
    def test_a_sound_file_of_a_kind_not_read_is_not_called_corrupt(
        self, content: bytes, reason: str
    ) -> None:
        error = failure(content)
        assert error.code == "unsupported" and reason in error.message

    def test_a_header_that_cannot_be_read_says_why(self) -> None:
        content = bytearray(save(Image.new("L", (4, 4)), "PNG"))
        content[29] ^= 1  # the checksum of IHDR
        error = failure(bytes(content), name="x.png")
        assert error.code == "corrupt"
        assert "begins as PNG" in error.message and "bad header checksum" in error.message
        assert Image.WARN_POSSIBLE_FORMATS is False  # as it was

    def test_what_a_decoder_has_not_implemented_is_unsupported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: Image.Image) -> None:
            raise RuntimeError("Failed to decode image: Not implemented")  # libavif's words

        content = save(Image.new("L", (4, 4)), "PNG")
        monkeypatch.setattr(ImageFile.ImageFile, "load", broken)
        assert failure(content).code == "unsupported"

    def test_empty(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.png"
        path.touch()
        assert failure(path).code == "truncated"

    def test_too_small(self) -> None:
        content = save(Image.new("L", (1, 5000)), "PNG")
        assert decode(content).height == 5000
        assert failure(content, min_side=2).code == "too_small"

    def test_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: Image.Image) -> None:
            raise MemoryError

        content = save(Image.new("L", (4, 4)), "PNG")
        monkeypatch.setattr(ImageFile.ImageFile, "load", full)
        assert failure(content).code == "out_of_memory"

    @pytest.mark.parametrize(
        "error",
        [
            *(OSError, ValueError, SyntaxError, TypeError, NotImplementedError, struct.error),
            *(RecursionError, EOFError, IndexError, KeyError, OverflowError, ZeroDivisionError),
            *(
                AssertionError,
                AttributeError,
                RuntimeError,
                UnicodeError,
                Image.UnidentifiedImageError,
            ),
        ],
    )
    def test_nothing_else_escapes(
        self, error: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: Image.Image) -> None:
            raise error

        content = save(Image.new("L", (4, 4)), "PNG")
        monkeypatch.setattr(ImageFile.ImageFile, "load", broken)
        assert failure(content).code in FAILURE_CODES

    def test_ctrl_c_is_not_swallowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(self: Image.Image) -> None:
            raise KeyboardInterrupt

        content = save(Image.new("L", (4, 4)), "PNG")
        monkeypatch.setattr(ImageFile.ImageFile, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decode(content)


class TestPaths:
    def test_a_wrong_suffix_does_not_matter(self, tmp_path: Path) -> None:
        path = tmp_path / "photo.jpg"
        synthetic_image().save(path, "PNG")
        assert decode(path).format == "PNG"
        assert decode(str(path)).format == "PNG"

    def test_missing_and_folder(self, tmp_path: Path) -> None:
        (tmp_path / "x.jpg").mkdir()
        assert failure(tmp_path / "x.jpg").code == "unreadable"
        error = failure(tmp_path / "nothing.png")
        assert error.code == "unreadable" and "nothing.png" in error.message
        assert failure(tmp_path / "x.jpg" / "y" / "z.png").code == "unreadable"
        assert failure("nul\0byte.png").code == "unreadable"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_no_permission(self, tmp_path: Path) -> None:
        path = tmp_path / "secret.png"
        synthetic_image().save(path)
        path.chmod(0)
        assert failure(path).code == "unreadable"

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
    def test_a_fifo_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.png")
        done: list[str] = []
        reader = threading.Thread(
            target=lambda: done.append(failure(tmp_path / "pipe.png").code), daemon=True
        )
        reader.start()
        reader.join(timeout=600)  # a FIFO that is opened blocks for ever
        assert done == ["unreadable"]

    @pytest.mark.skipif(sys.platform == "win32", reason="no such device")
    def test_a_device_is_refused(self) -> None:
        assert failure("/dev/zero").code == "unreadable"

    @pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux only")
    @pytest.mark.parametrize("name", [b"caf\xe9.png", b"two\nlines.png", b"\x1b[31mred.png"])
    def test_odd_names_are_read_and_printed_on_one_line(self, name: bytes, tmp_path: Path) -> None:
        path = tmp_path / os.fsdecode(name)
        path.write_bytes(save(synthetic_image((8, 8)), "PNG"))
        assert decode(path).width == 8
        path.write_bytes(b"no image")
        error = failure(path)
        error.message.encode("utf-8")
        assert error.message.isprintable()

    def test_files_are_closed(self, tmp_path: Path) -> None:
        """A ResourceWarning would be an error here."""
        path = tmp_path / "x.png"
        synthetic_image((8, 8)).save(path)
        for _ in range(3):
            decode(path)
            failure(tmp_path)


def test_errors_survive_the_way_from_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(failure(b"")))
    assert (error.code, error.exit_code) == ("truncated", 1) and error.message


@pytest.mark.parametrize(
    ("text", "color"),
    [
        ("white", WHITE),
        ("#0f0", GREEN),
        ("#0000ff", BLUE),
        ("rgb(255, 0, 0)", RED),
        ("1,2,3", (1, 2, 3)),
        ("hsl(0, 100%, 50%)", RED),
    ],
)
def test_colors(text: str, color: tuple[int, int, int]) -> None:
    assert parse_color(text) == color


@pytest.mark.parametrize("text", ["", "whiteish", "1,2", "256,0,0", "#00ff0080", "-1,0,0"])
def test_what_is_no_color(text: str) -> None:
    with pytest.raises(VitcliError):
        parse_color(text)


FUZZED = [
    *("JPEG", "PNG", "GIF", "BMP", "DIB", "PPM", "TIFF", "WEBP", "AVIF", "JPEG2000", "ICO"),
    *("ICNS", "TGA", "QOI", "DDS", "PCX", "SGI", "IM", "MSP", "XBM", "SPIDER", "BLP", "PSD"),
]


TIFF_COMPRESSIONS = ("tiff_lzw", "jpeg", "group4", "tiff_adobe_deflate", "packbits")


def small_file(format: str) -> bytes:
    image = synthetic_image((32, 32))
    if format in TIFF_COMPRESSIONS:  # libtiff decodes these
        image = image.convert("1") if format == "group4" else image
        return save(image, "TIFF", compression=format)
    if format == "PSD":  # Pillow cannot write it
        header = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 32, 32, 8, 3)
        return header + bytes(12) + b"\0\0" + bytes(image.tobytes())
    mode = {"MSP": "1", "XBM": "1", "SPIDER": "F", "BLP": "P"}.get(format, "RGB")
    return save(image.convert(mode), format)


@pytest.mark.parametrize("format", [*FUZZED, *TIFF_COMPRESSIONS])
def test_damaged_files_only_raise_image_errors(format: str) -> None:
    generator = random.Random(format)
    original = small_file(format)
    assert decode(original).width > 0
    for _ in range(60):
        damaged = bytearray(original)
        for _ in range(generator.choice((1, 2, 8, 40))):
            place = generator.randrange(min(len(damaged), generator.choice((64, 400, 10**6))))
            damaged[place] = generator.choice((0, 1, 127, 128, 255, generator.randrange(256)))
        if generator.random() < 0.3:
            del damaged[generator.randrange(len(damaged)) :]
        try:
            decoded = decode(bytes(damaged), max_pixels=1_000_000)
        except ImageError as error:
            assert error.code in FAILURE_CODES and "\n" not in error.message
        else:
            assert decoded.image.mode == "RGB"
            assert decoded.image.size == (decoded.width, decoded.height)
