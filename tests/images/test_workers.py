"""Decoding processes: order, time, crashes, and no torch in them. Imports no torch itself."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.images.files import many_scans
from vitcli.config.schema import PreprocessConfig
from vitcli.images import decode as decode_module
from vitcli.images import folders
from vitcli.images.decode import ImageError, decode
from vitcli.images.folders import Walk
from vitcli.images.sources import Entry, ShardRequest
from vitcli.images.workers import Decoded, DecodePool, DecodeWork, decode_within

LONG_S = 600.0
"""For answers that come: no machine is that slow."""
WORK = DecodeWork(PreprocessConfig(resize="squash", resize_size=(8, 8)))


def scripted(entry: Entry, work: DecodeWork) -> Decoded:
    """A decoder that does what the name says."""
    if entry.name == "hang":
        time.sleep(3600)
    if entry.name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if entry.name == "eaten":
        os.kill(os.getpid(), signal.SIGKILL)
    if entry.name == "exit":
        os._exit(3)
    if entry.name == "torch":
        return Decoded(code="ok", error=",".join(m for m in ("torch", "typer") if m in sys.modules))
    return Decoded(code="ok", error=entry.name)


def test_one_answer_for_each_entry_in_order_whatever_dies() -> None:
    asked = ["a", "crash", "b", "eaten", "c", "exit", "d", "torch"]
    with DecodePool(WORK, 2, timeout_s=LONG_S, ahead=4, read=scripted) as pool:
        answers = list(pool.decode(Entry(name, name) for name in asked))
    codes = [answer.code for answer in answers]
    assert codes == ["ok", "crashed", "ok", "out_of_memory", "ok", "crashed", "ok", "ok"]
    assert [a.error for a in answers if a.code == "ok"] == ["a", "b", "c", "d", ""]
    assert answers[1].error == "the decoder crashed (SIGSEGV)"


def test_a_process_that_takes_too_long_is_replaced() -> None:
    with DecodePool(WORK, 1, timeout_s=0.1, ahead=4, read=scripted) as pool:
        (hung,) = pool.decode([Entry("hang", "hang")])
        pool.timeout_s = LONG_S
        (next_one,) = pool.decode([Entry("a", "a")])
    assert (hung.code, hung.error) == ("timed_out", "not decoded in 0.1 s")
    assert (next_one.code, next_one.error) == ("ok", "a")


def test_closing_early_ends_the_processes_and_asks_no_more_than_ahead() -> None:
    asked: list[int] = []

    def entries() -> object:
        for number in range(1000):
            asked.append(number)
            yield Entry(str(number), "x")

    before = set(psutil.Process().children())
    with DecodePool(WORK, 1, timeout_s=LONG_S, ahead=5, read=scripted) as pool:
        answers = pool.decode(entries())  # type: ignore[arg-type]
        assert [next(answers).error for _ in range(3)] == ["0", "1", "2"]
        assert len(asked) <= 3 + 5
        ours = set(psutil.Process().children()) - before
        assert ours
    workers = [
        p for p in ours if p.is_running() and "resource_tracker" not in " ".join(p.cmdline())
    ]
    assert workers == []


def test_files_and_members_of_shards_become_pixels(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (20, 10), (255, 0, 0)).save(picture)
    content = picture.read_bytes()
    shard = tmp_path / "s.tar"
    shard.write_bytes(b"#" * 512 + content)
    entries = [
        Entry("a.png", str(picture)),
        Entry("s.tar/a.png", str(shard), 512, len(content)),
        Entry("s.tar/b.png", str(shard), 512, len(content) + 1),
        Entry("gone.png", str(tmp_path / "gone.png")),
        Entry("known", "known", code="corrupt", error="said before"),
    ]
    with DecodePool(WORK, 1, timeout_s=LONG_S, ahead=2) as pool:
        file, member, short, gone, known = pool.decode(entries)
    assert (file.code, file.width, file.height) == ("ok", 20, 10)
    assert file.pixels is not None and file.pixels.shape == (8, 8, 3)
    np.testing.assert_array_equal(file.pixels, member.pixels)
    assert (short.code, short.pixels) == ("truncated", None)
    assert (gone.code, gone.error) == ("unreadable", "No such file or directory")
    assert (known.code, known.error) == ("corrupt", "said before")


@pytest.mark.skipif(sys.platform != "linux", reason="address space is bounded on Linux")
def test_a_decoder_without_memory_is_a_row(tmp_path: Path) -> None:
    large, small = tmp_path / "large.png", tmp_path / "small.png"
    Image.new("RGB", (12000, 12000)).save(large, compress_level=1)
    Image.new("RGB", (8, 8)).save(small)
    work = DecodeWork(WORK.preprocess, memory_bytes=400 * 2**20)
    with DecodePool(work, 1, timeout_s=LONG_S, ahead=2) as pool:
        codes = [a.code for a in pool.decode([Entry("l", str(large)), Entry("s", str(small))])]
    assert codes == ["out_of_memory", "ok"]


def tar_header(name: bytes, size: int, kind: bytes) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[136:148], block[148:156], block[156:157] = b"00000000000\0", b" " * 8, kind
    block[257:265] = b"ustar  \0"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        # headers that each announce a long name for the next one
        ((tar_header(b"x", 1, b"L") + b"y" + b"\0" * 511) * 5000, {"corrupt"}),
        (tar_header(b"x", 32 * 2**30, b"L") + b"y" * 512, {"corrupt"}),
        (tar_header(b"x", 32 * 2**30, b"x") + b"y" * 512, {"corrupt"}),
        (tar_header(b"x.png", 2**62, b"0") + b"y" * 512, {"", "corrupt"}),
    ],
    ids=["names", "long name", "long header", "long member"],  # else contents, in environments
)
def test_a_hostile_shard_costs_its_own_row(tmp_path: Path, content: bytes, codes: set[str]) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    with contextlib.closing(Walk()) as walk:
        entries = list(walk.folder(str(tmp_path)))
    assert {e.code for e in entries if e.name.startswith("a.tar")} == codes
    with DecodePool(WORK, 1, timeout_s=LONG_S, ahead=2) as pool:
        answers = dict(zip([e.name for e in entries], pool.decode(entries), strict=True))
    assert answers.pop("b.png").code == "ok"
    assert answers and all(a.code in ("corrupt", "truncated") for a in answers.values())


def test_a_shard_that_kills_its_process_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eaten.tar").write_bytes(b"")
    (tmp_path / "hang.tar").write_bytes(b"")
    monkeypatch.setattr(folders, "list_members", scripted_shard)
    for name, limit_s, code in (("eaten", LONG_S, "out_of_memory"), ("hang", 0.1, "timed_out")):
        with contextlib.closing(Walk(timeout_s=limit_s)) as walk:
            entries = [*walk.file(str(tmp_path / f"{name}.tar"), f"{name}.tar")]
        assert [(entry.name, entry.code) for entry in entries] == [(f"{name}.tar", code)]


def scripted_shard(asked: ShardRequest, work: DecodeWork) -> Decoded:
    return scripted(Entry(asked.name.removesuffix(".tar"), ""), work)


def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(many_scans(5000))
    with pytest.raises(ImageError, match="scans") as caught:
        decode(path)
    assert caught.value.code == "corrupt"
    assert decode(many_scans(20)).image.size == (64, 64)


def test_only_files_that_may_be_slow_leave_this_process(tmp_path: Path) -> None:
    plain = Image.new("RGB", (40, 30))
    for name in ("a.jpg", "a.png", "a.gif", "a.bmp", "a.webp", "a.tif", "a.jp2", "a.tga"):
        plain.save(tmp_path / name)
    (tmp_path / "scans.jpg").write_bytes(many_scans(400))  # of 64x64 pixels: quick all the same
    (tmp_path / "a.svg").write_text("<svg/>")
    slow = {path.name for path in tmp_path.iterdir() if not decode_module.is_quick(path)}
    assert slow == {"a.tif", "a.jp2", "a.tga"}
    assert decode_module.is_quick(tmp_path / "gone.png")


def test_decoding_within_limits_is_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    found, expected = decode_within(path), decode(path)
    np.testing.assert_array_equal(np.asarray(found.image), np.asarray(expected.image))
    for name in ("mode", "width", "height", "format", "orientation", "has_alpha"):
        assert getattr(found, name) == getattr(expected, name)
    with pytest.raises(ImageError, match=r"gone\.png: No such file") as caught:
        decode_within(tmp_path / "gone.png")
    assert caught.value.code == "unreadable"


def test_a_member_of_a_shard_is_decoded_within_limits_too(tmp_path: Path) -> None:
    image, shard = io.BytesIO(), tmp_path / "one.tar"
    Image.new("RGB", (5, 3), (10, 200, 30)).save(image, "PNG")
    shard.write_bytes(b"x" * 7 + image.getvalue() + b"y" * 9)
    member = Entry("a.png", str(shard), 7, len(image.getvalue()))
    assert decode_within(member).image.getpixel((0, 0)) == (10, 200, 30)
    shard.write_bytes(b"x" * 60)
    with pytest.raises(ImageError, match=r"a\.png"):
        decode_within(member)


def test_the_current_folder_is_never_searched_for_modules(tmp_path: Path) -> None:
    modules = ("numpy", "PIL", "pydantic", "mmap", "yaml", "tarfile", "ctypes", "resource")
    for name in modules:
        (tmp_path / f"{name}.py").write_text("open('poisoned', 'w')\nraise SystemExit(9)\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    program = (
        "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, ''); "
        "from vitcli.images.workers import decode_within; print(decode_within('a.png').width)"
    )
    # This process itself imports everything before it enters the folder.
    program = f"import vitcli.images.workers; {program}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr
    assert not (tmp_path / "poisoned").exists()


def test_scans_are_counted_only_where_libjpeg_would_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[str] = []
    count = decode_module._scans
    monkeypatch.setattr(decode_module, "_scans", lambda file: counted.append("") or count(file))
    for mode in ("L", "RGB", "CMYK"):
        for progressive in (False, True):
            file = io.BytesIO()
            Image.new(mode, (40, 30)).save(file, "JPEG", progressive=progressive)
            counted.clear()
            decode(file.getvalue())
            assert bool(counted) is progressive
    # A scan of its own for each component: the first says that it holds one of three.
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "JPEG")
    content = file.getvalue()
    at = content.index(b"\xff\xda")
    header = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
    with contextlib.suppress(ImageError):
        decode(content[:at] + header * 1000 + content[at + 14 :])
    assert counted
