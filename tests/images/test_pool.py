"""Decoding processes: order, time, crashes, and no torch in them. Imports no torch itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from vitcli.config.schema import PreprocessConfig
from vitcli.images.pool import Decoded, DecodePool, DecodeWork
from vitcli.images.shards import Entry

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
    asked = ["a", "crash", "b", "hang", "eaten", "c", "exit", "d", "torch"]
    with DecodePool(WORK, 2, timeout_s=2.0, ahead=4, read=scripted) as pool:
        answers = list(pool.decode(Entry(name, name) for name in asked))
    codes = [answer.code for answer in answers]
    assert codes == [
        *("ok", "crashed", "ok", "timed_out", "out_of_memory", "ok", "crashed", "ok", "ok")
    ]
    assert [a.error for a in answers if a.code == "ok"] == ["a", "b", "c", "d", ""]
    assert answers[1].error == "the decoder crashed (SIGSEGV)"


def test_closing_early_ends_the_processes_and_asks_no_more_than_ahead() -> None:
    asked: list[int] = []

    def entries() -> object:
        for number in range(1000):
            asked.append(number)
            yield Entry(str(number), "x")

    before = set(psutil.Process().children())
    with DecodePool(WORK, 1, timeout_s=60, ahead=5, read=scripted) as pool:
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
    with DecodePool(WORK, 1, timeout_s=60, ahead=2) as pool:
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
    with DecodePool(work, 1, timeout_s=60, ahead=2) as pool:
        codes = [a.code for a in pool.decode([Entry("l", str(large)), Entry("s", str(small))])]
    assert codes == ["out_of_memory", "ok"]
