"""Writing reaches what was named and nothing else; a lock ends with its process."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vitcli import files
from vitcli.errors import VitcliError
from vitcli.files import atomic_folder, atomic_write, is_held, lock, printable, try_lock

WRITER = """
import sys
from vitcli.files import atomic_folder, atomic_write
place = {place}
with {how}(place) as part:
    (part / "x").write_text("half") if {how} is atomic_folder else part.write(b"half")
    print("writing", flush=True)
    sys.stdin.read()
"""

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def write(path: Path, content: bytes = b"new") -> None:
    with atomic_write(path) as file:
        file.write(content)


def test_a_regular_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(0o640)
    before = path.stat().st_ino
    write(path)
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "x")
        with atomic_folder(tmp_path / "folder") as part:
            (part / "y").touch(0o600)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert modes == {"x": 0o640, "folder": 0o750, "y": 0o640}


def test_a_link_is_followed_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "x", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_a_pipe_receives_the_content_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join()
    assert read == [b"new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.open("wb").close()
    except PermissionError:
        device = Path(os.devnull)
    write(device)
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_full_device_is_reported() -> None:
    with pytest.raises(VitcliError, match="No space left on device") as error:
        write(Path("/dev/full"))
    assert error.value.exit_code == 1


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_stdout_is_appended_to_where_it_is(tmp_path: Path, name: str) -> None:
    """Opening it anew would truncate what was printed before."""
    code = (
        "from vitcli.files import atomic_write\n"
        "print('before')\n"
        f"with atomic_write({name!r}) as file: file.write(b'content\\n')\n"
        "print('after')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"


def test_a_folder_and_a_socket_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name in (".", "socket", "loop"):
            Path("loop").is_symlink() or Path("loop").symlink_to("loop")
            with pytest.raises(VitcliError, match="cannot write"):
                write(Path(name))
    assert stat.S_ISSOCK(Path("socket").stat().st_mode)


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "x") as file:
        file.write(b"half")
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "folder") as part:
        (part / "half").touch()
        _ = 1 / 0
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


@pytest.mark.parametrize("how", ["atomic_write", "atomic_folder"])
@pytest.mark.parametrize("name", ["x", "é" * 120])
def test_a_rerun_removes_what_a_killed_writer_left(tmp_path: Path, how: str, name: str) -> None:
    place = tmp_path / name
    code = WRITER.format(place=f"__import__('pathlib').Path({str(place)!r})", how=how)
    writer = subprocess.Popen([sys.executable, "-c", code], **PIPES)
    assert writer.stdout
    assert writer.stdout.readline() == b"writing\n"
    with getattr(files, how)(place) as part:  # beside a writer that lives
        assert len(list(tmp_path.iterdir())) == 2
        part.joinpath("x").touch() if how == "atomic_folder" else part.write(b"1")
    assert len(list(tmp_path.iterdir())) == 2
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    place.unlink() if how == "atomic_write" else (place / "x").unlink()
    with getattr(files, how)(place):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("other", [False, True], ids=["flock", "filelock"])
def test_a_lock_is_held_by_one_and_free_when_its_process_is_killed(
    tmp_path: Path, other: bool
) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, pathlib\n"
        f"if {other}: sys.modules['fcntl'] = None\n"
        "from vitcli.files import lock\n"
        f"held = lock(pathlib.Path({str(path)!r}))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    hidden = f"import sys\nif {other}: sys.modules['fcntl'] = None\n"
    ask = (
        hidden + "import pathlib\nfrom vitcli.files import is_held, try_lock\n"
        f"path = pathlib.Path({str(path)!r})\n"
        "print(is_held(path), try_lock(path) is None)"
    )

    def asked() -> list[str]:
        done = subprocess.run([sys.executable, "-Wignore", "-c", ask], stdout=subprocess.PIPE)
        return done.stdout.decode().split()

    holder = subprocess.Popen([sys.executable, "-Wignore", "-c", code], **PIPES)
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    assert asked() == ["True", "True"]
    holder.kill()
    holder.communicate()
    assert asked() == ["False", "False"]


def test_shared_locks_keep_out_an_exclusive_one(tmp_path: Path) -> None:
    with lock(tmp_path, shared=True), lock(tmp_path, shared=True):
        assert try_lock(tmp_path) is None
    held = try_lock(tmp_path)
    assert held is not None
    with held:
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat 图 é.png", "cat 图 é.png"),
        ("a\x1b[31m\n\r\x07b", "a\\x1b[31m\\n\\r\\x07b"),
        ("\u202etxt.exe\u2066", "\\u202etxt.exe\\u2066"),
        (b"\xff\xfe.png", "\\xff\\xfe.png"),
    ],
)
def test_any_name_is_one_line_without_controls(name: str | bytes, shown: str) -> None:
    assert printable(name) == shown
