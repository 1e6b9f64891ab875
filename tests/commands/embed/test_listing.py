"""What stands on the command line, as entries."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from vitcli.commands.embed.inputs import Listing
from vitcli.errors import VitcliError
from vitcli.images.sources import HIDDEN, Entry


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(*inputs: str | Path, **how: bool) -> list[str]:
    return sorted(entry.name for entry in Listing(tuple(map(str, inputs)), **how))


def test_a_single_folder_gives_names_relative_to_it(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "b/a.PNG", tmp_path / "b/c/d.JpEg", tmp_path / "b/x.txt")
    listing = Listing((str(tmp_path),))
    entries = {entry.name: entry for entry in listing}
    assert sorted(entries) == ["a.jpg", "b/a.PNG", "b/c/d.JpEg"]
    assert Path(entries["b/a.PNG"].source) == tmp_path / "b/a.PNG"
    assert listing.skipped == {".txt": 1}
    assert names(tmp_path, any_suffix=True) == ["a.jpg", "b/a.PNG", "b/c/d.JpEg", "b/x.txt"]


def test_several_inputs_give_names_as_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "one/a.jpg", tmp_path / "two/a.jpg", tmp_path / "a.jpg")
    monkeypatch.chdir(tmp_path)
    assert names("one", "two/", "a.jpg") == ["a.jpg", "one/a.jpg", "two/a.jpg"]


def test_a_file_that_is_not_there_is_an_entry() -> None:
    assert names("no/such.jpg") == ["no/such.jpg"]


def test_globs_match_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "a1.jpg", tmp_path / "a2.jpg", tmp_path / "d/a3.jpg")
    monkeypatch.chdir(tmp_path)
    assert names("a*.jpg") == ["a1.jpg", "a2.jpg"]
    assert names("**/*.jpg") == ["a1.jpg", "a2.jpg", "d/a3.jpg"]
    touch(tmp_path / "a[1].jpg")
    assert names("a[1].jpg") == ["a[1].jpg"]
    with pytest.raises(VitcliError, match="matches no file"):
        names("*.gif")


@pytest.mark.parametrize("url", ["s3://bucket/photos", "gs://b/*.jpg", "https://x.org/a.jpg"])
def test_a_url_is_refused_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    with pytest.raises(VitcliError, match="is a URL"):
        names(url)
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / url)
    assert names(url, tmp_path / "none.jpg") != []


def test_lists_are_lines_or_nul_separated(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"b.jpg\r\n\na*.jpg\nc\xff.jpg")
    assert names(f"@{lines}") == ["a*.jpg", "b.jpg", os.fsdecode(b"c\xff.jpg")]
    nul = tmp_path / "nul"
    nul.write_bytes(b"new\nline.jpg\0b.jpg\0")
    assert names(f"@{nul}") == ["b.jpg", "new\nline.jpg"]
    with pytest.raises(VitcliError, match="cannot read the list"):
        names(f"@{tmp_path}/none.txt")


def test_lists_as_windows_writes_them(tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_bytes("a.jpg\r\nü.jpg\r\n".encode("utf-8-sig"))
    assert names(f"@{marked}") == ["a.jpg", "ü.jpg"]
    wide = tmp_path / "wide.txt"
    wide.write_bytes("a.jpg\r\n".encode("utf-16"))
    with pytest.raises(VitcliError, match="is UTF-16") as caught:
        names(f"@{wide}")
    assert "UTF-8" in caught.value.hint


def test_stdin_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b"one.jpg\ntwo.jpg\n")

    monkeypatch.setattr("sys.stdin", Stdin)
    assert names("-") == ["one.jpg", "two.jpg"]


def test_a_closed_stdin_is_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert names("-") == []


def test_a_name_longer_than_the_system_takes_is_an_entry_like_others(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg")
    long = "x" * 300
    assert names(f"{long}.jpg", f"{long}.tar", "a\0b") == ["a\0b", f"{long}.jpg", f"{long}.tar"]
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{long}.tar\n{tmp_path}/a.jpg\n")
    assert names(f"@{lines}") == [f"{tmp_path}/a.jpg", f"{long}.tar"]


def test_folders_deeper_than_python_recurses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 1200
    monkeypatch.chdir(tmp_path)
    for _ in range(depth):
        Path("d").mkdir()
        os.chdir("d")
    Path("a.jpg").touch()
    os.chdir(tmp_path)
    try:
        assert names("d", "b.jpg") == ["b.jpg", "d/" * depth + "a.jpg"]
        assert names("**/*.jpg") == ["d/" * depth + "a.jpg"]
    finally:  # what pytest cannot
        os.chdir("d/" * depth)
        Path("a.jpg").unlink()
        for _ in range(depth):
            os.chdir("..")
            Path("d").rmdir()


def test_two_stars_follow_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "d/e/a.jpg", tmp_path / "d/b.jpg", tmp_path / "d/.hidden/c.jpg")
    for number in range(8):  # followed, these are 8**40 folders
        (tmp_path / f"d/e/{number}").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert names("**/*.jpg") == ["d/b.jpg", "d/e/a.jpg"]
    assert names("./d/**/e/*.jpg") == ["./d/e/a.jpg"]
    assert names("d/**", "x.jpg") == ["d/b.jpg", "d/e/a.jpg", "x.jpg"]
    assert names("?/**/**/[a]*") == ["d/e/a.jpg"]
    assert names(f"{tmp_path}/**/b.jpg") == [f"{tmp_path}/d/b.jpg"]


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    touch(tmp_path / "d/a.jpg")
    (tmp_path / "d/up").symlink_to(tmp_path)
    (tmp_path / "self.jpg").symlink_to(tmp_path / "self.jpg")
    (tmp_path / "other").symlink_to(tmp_path / "d")
    assert names(tmp_path) == ["d/a.jpg", "other/a.jpg", "self.jpg"]


def test_the_folder_of_the_output_is_left_out(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "out/b.jpg")
    listing = Listing((str(tmp_path),), out=tmp_path / "out")
    assert [entry.name for entry in listing] == ["a.jpg"]


def make_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_members_of_a_shard_are_read_where_they_lie(tmp_path: Path) -> None:
    shard = tmp_path / "s-0.tar"
    make_tar(shard, [("b.jpg", b"first"), ("b.cls", b"7"), ("a.jpg", b"second"), ("b.jpg", b"3")])
    entries = list(Listing((str(shard),)))
    assert [e.name.removeprefix(f"{shard}/") for e in entries] == ["b.jpg", "a.jpg", "b.jpg"]
    content = shard.read_bytes()
    assert [content[e.offset : e.offset + e.size] for e in entries] == [b"first", b"second", b"3"]


def test_hidden_members_and_those_of_other_programs_are_left_out(tmp_path: Path) -> None:
    """As those of folders: macOS's tar adds a file of attributes beside each file."""
    shard = tmp_path / "mac.tar"
    kept = ["./train/a.jpg", "../b.jpg", "c.jpg"]
    left = ["./train/._a.jpg", "__MACOSX/._c.jpg", ".git/d.jpg", ".e.jpg", "._f.txt"]
    make_tar(shard, [(name, b"x") for name in (*kept, *left)])
    for any_suffix in (False, True):
        listing = Listing((str(shard),), any_suffix)
        assert sorted(entry.name for entry in listing) == sorted(f"{shard}/{n}" for n in kept)
        aside = {HIDDEN: 5} if any_suffix else {HIDDEN: 4, ".txt": 1}
        assert listing.skipped == aside


def damage(entries: list[Entry]) -> list[tuple[str, str]]:
    return [(Path(entry.name).name, entry.code) for entry in entries]


def test_a_damaged_shard_gives_what_stands_before_the_damage_and_a_coded_entry(
    tmp_path: Path,
) -> None:
    shard = tmp_path / "s.tar"
    make_tar(shard, [("a.jpg", b"x" * 600), ("b.jpg", b"y" * 600), ("c.jpg", b"z")])
    whole = shard.read_bytes()
    second = 512 + 1024  # a header, then 600 bytes in two blocks
    shard.write_bytes(whole[:second] + b"?" * 512 + whole[second + 512 :])
    assert damage(list(Listing((str(shard),)))) == [("a.jpg", ""), ("s.tar", "corrupt")]
    shard.write_bytes(whole[:second])
    assert damage(list(Listing((str(shard),)))) == [("a.jpg", ""), ("s.tar", "corrupt")]
    shard.write_bytes(whole[: second + 700])
    assert damage(list(Listing((str(shard),)))) == [
        ("a.jpg", ""),
        ("b.jpg", ""),
        ("s.tar", "corrupt"),
    ]
    shard.write_bytes(b"not a tar" * 100)
    assert damage(list(Listing((str(shard),)))) == [("s.tar", "corrupt")]
    assert damage(list(Listing((str(tmp_path / "s.tar.gz"),)))) == [("s.tar.gz", "unsupported")]
