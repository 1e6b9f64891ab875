"""What others install: extras, metadata, commands from outside, other systems."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vitcli import errors
from vitcli.errors import install_extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def vitcli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (environment.pop("path", ""), str(ROOT))))
    return subprocess.run(
        [sys.executable, "-m", "vitcli", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_names_every_extra_of_the_package() -> None:
    (whole,) = EXTRAS["all"]
    named = set(whole.removeprefix("vitcli[").removesuffix("]").split(","))
    assert named == set(EXTRAS) - {"all", "docs", "peers", "test"}


def test_every_extra_that_a_hint_names_exists() -> None:
    import re

    used = {
        name
        for file in (ROOT / "vitcli").rglob("*.py")
        for name in re.findall(r'install_extra\("(\w+)"\)', file.read_text())
    }
    assert len(used) > 5
    assert used <= set(EXTRAS)


def test_the_hint_is_a_command_for_this_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(errors, "_checkout", lambda: None)
    assert install_extra("onnx") == "pip install 'vitcli[onnx]'"
    monkeypatch.setattr(errors, "_checkout", lambda: tmp_path / "my code")
    assert install_extra("onnx") == f"pip install -e '{tmp_path}/my code[onnx]'"


def test_a_command_from_another_package(tmp_path: Path) -> None:
    folder = ROOT / "tests" / "outside_command"
    metadata = tmp_path / "vitcli_depth-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vitcli-depth\nVersion: 1.0\n")
    declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{key} = {value}" for key, value in declared["vitcli.commands"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[vitcli.commands]", *lines, ""]))
    path = os.pathsep.join((str(folder), str(tmp_path)))
    done = vitcli("depth", "vit-l16", path=path)
    assert (done.stdout, done.stderr, done.returncode) == ("24\n", "", 0)
    assert "How many blocks" in vitcli("--help", path=path).stdout
    # One that fails, and one that would replace a command of ours, stop nothing.
    broken = "[vitcli.commands]\nbroken = nowhere:nothing\nparams = depth_command:depth\n"
    (metadata / "entry_points.txt").write_text(broken)
    done = vitcli("params", "--json", path=path)
    assert done.returncode == 0 and '"models"' in done.stdout
    assert done.stderr.count("is left out") == 2


HIDDEN = """
import os, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("fchmod", "fork", "getuid", "geteuid", "mkfifo", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
import ctypes
class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = CDLL
"""


@pytest.fixture(scope="module")
def other_system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose sitecustomize takes away what Windows and macOS lack, in children too."""
    folder = tmp_path_factory.mktemp("system")
    (folder / "sitecustomize.py").write_text(HIDDEN)
    return folder


TINY = [
    f"--set=encoder.{setting}"
    for setting in ("hidden=24", "depth=1", "heads=3", "mlp_hidden=24", "patch_size=8")
]


@pytest.mark.parametrize(
    "command",
    [
        ["params"],
        ["presets"],
        ["encode", *TINY, "--image-size=16"],
        ["attn-entropy", "PHOTO", *TINY, "--image-size=16"],
        ["embed", "PHOTO", "--out", "OUT", *TINY, "--image-size=16", "--format=npy", "--workers=1"],
        ["train-shapes", *TINY, "--out", "OUT", "--set=train.epochs=1", "--set=data.train_size=32",
         "--set=data.val_size=32", "--set=encoder.image_size=16"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_main_commands_need_no_posix(
    other_system: Path, tmp_path: Path, command: list[str]
) -> None:
    from PIL import Image

    Image.new("RGB", (20, 20), "red").save(tmp_path / "photo.png")
    places = {"PHOTO": str(tmp_path / "photo.png"), "OUT": str(tmp_path / "out")}
    done = vitcli(*(places.get(word, word) for word in command), path=str(other_system))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_hidden_modules_are_hidden(other_system: Path) -> None:
    code = "import fcntl"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(other_system)},
        capture_output=True,
    )
    assert done.returncode == 1
