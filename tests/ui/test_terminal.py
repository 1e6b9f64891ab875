"""Real processes: a poisoned folder, a pseudo-terminal, streams that are full, narrow or gone."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.commands.sources import SMALL

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, "-P", "-c", "from vitcli.__main__ import main; main()"]
"""As the console script: nothing of the current folder on the path."""
MODULE = [sys.executable, "-m", "vitcli"]
NASTY = "cat\x1b[2J\x1b]0;title\x07\n\u202egnp.\x9b31m"
"""Clears the screen, sets the title, breaks the line, turns the direction, and C1's escape."""


def start(command: list[str], *arguments: str, **options: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}  # type: ignore[dict-item]
    options = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([*command, *arguments], env=environment, **options)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of every name that a run imports; each leaves a mark if it runs."""
    folder = tmp_path_factory.mktemp("poisoned")
    code = (
        "import vitcli.cli, torch, PIL.Image, matplotlib.figure, rich.progress, sys\n"
        "print(*sys.modules)"
    )
    loaded = start([sys.executable, "-P", "-c", code]).stdout.split()
    names = {name.split(".")[0] for name in loaded} - {"__main__", "vitcli"}
    assert {"yaml", "typing", "torch", "numpy", "rich", "pathlib"} <= names
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write('{name} ')\n")
    Image.new("RGB", (32, 32), "red").save(folder / "photo.png")
    (folder / "sweep.yaml").write_text(
        "command: params\nmetrics: [models.0.total]\ngrid: {preset: [vit-b16]}\n"
    )
    return folder


RUNS = {
    "encode": ["photo.png", *SMALL],
    "params": [],
    "sweep": ["sweep.yaml", "--out", "out"],
    "embed": ["photo.png", "--out", "vectors", "--workers=1", "--format=npy", *SMALL],
}


@pytest.mark.parametrize("how", [SCRIPT, MODULE], ids=["script", "module"])
def test_help_imports_nothing_from_the_current_folder(poisoned: Path, how: list[str]) -> None:
    done = start(how, "train", "--help", cwd=poisoned)
    assert done.returncode == 0, done.stderr
    assert not (poisoned / "ran").exists(), (poisoned / "ran").read_text()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("how", [SCRIPT, MODULE], ids=["script", "module"])
def test_a_run_imports_nothing_from_the_current_folder(
    poisoned: Path, tmp_path: Path, how: list[str], name: str
) -> None:
    words = [str(tmp_path / word) if word in ("out", "vectors") else word for word in RUNS[name]]
    done = start(how, name, *words, cwd=poisoned)
    assert not (poisoned / "ran").exists(), (poisoned / "ran").read_text()
    assert done.returncode == 0, done.stderr


def in_terminal(*arguments: str, columns: int = 80) -> str:
    """What a command writes to a pseudo-terminal of so many columns."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(
        [*SCRIPT, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    written = b""
    try:
        while part := os.read(master, 65536):
            written += part
    except OSError:  # the other end is closed
        pass
    process.wait()
    os.close(master)
    return written.decode("utf-8", "surrogateescape")


OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""rich's colors and cursor movements."""


def untouched(written: str) -> None:
    """Nothing of NASTY got through."""
    for sign in ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\x9b"):
        assert sign not in written
    rest = OWN.sub("", written).replace("\r", "").replace("\n", "")
    assert rest.isprintable(), [c for c in rest if not c.isprintable()]
    assert "\\x1b" in rest or "\\e" in rest  # as rich's text and as YAML


def nasty_photo(folder: Path) -> str:
    Image.new("RGB", (32, 32), "red").save(folder / "photo.png")
    (folder / NASTY).write_bytes((folder / "photo.png").read_bytes())
    return str(folder / NASTY)


def test_names_from_the_command_line_and_files_are_one_clean_line(tmp_path: Path) -> None:
    photo = nasty_photo(tmp_path)
    untouched(in_terminal("encode", photo, *SMALL))
    config = tmp_path / f"{NASTY}.yaml"
    config.write_text('"a\\e[2Jb": 1\n')
    untouched(in_terminal("params", "--config", str(config)))
    untouched(in_terminal("params", "--preset", NASTY))
    untouched(in_terminal("params", f"--{NASTY}"))
    untouched(in_terminal(NASTY))
    config.write_text(f"name: {json.dumps(NASTY)}\nencoder: {{depth: 2}}\n")
    untouched(in_terminal("params", "--config", str(config)))
    untouched(in_terminal("params", "--config", str(config), "--print-config"))
    save_file({f"{NASTY}.weight": torch.zeros(3)}, tmp_path / "x.safetensors")
    untouched(in_terminal("encode", "--weights", str(tmp_path / "x.safetensors")))


@pytest.mark.parametrize("name", ["params", "presets", "profile --help", "params --json"])
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=["ascii", "C", "latin-1"],
)
def test_a_stream_without_unicode_loses_no_answer(name: str, environment: dict[str, str]) -> None:
    done = start(SCRIPT, *name.split(), env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has /dev/full")
@pytest.mark.parametrize(
    "words", ["--help", "params --help", "params", "params --json", "--version"]
)
def test_a_full_disk_is_reported(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = start(
            SCRIPT, *words.split(), capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device\n")


@pytest.mark.parametrize("words", ["--help", "params", "presets --json"])
def test_a_reader_that_left_ends_as_sigpipe_does(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = start(
        SCRIPT, *words.split(), capture_output=False, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_sigterm_leaves_no_part_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time, vitcli.files as files\n"
        "def slow(path):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "files.sync = files.as_new = slow\n"
        "from vitcli.__main__ import main\n"
        "main()"
    )
    from tests.conftest import tiny_config
    from vitcli.build import build_encoder
    from vitcli.checkpoints.weights import save_snapshot
    from vitcli.config.schema import ModelConfig

    config = ModelConfig(encoder=tiny_config())
    save_snapshot(tmp_path / "own", config, build_encoder(config.encoder))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "convert", str(tmp_path / "own"), str(tmp_path / "new")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout
    assert process.stdout.readline() == b"writing\n"
    assert len(list(tmp_path.iterdir())) == 2
    process.terminate()
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_quiet_prints_the_answer_alone_and_verbose_says_more(tmp_path: Path) -> None:
    quiet = start(SCRIPT, "encode", *SMALL, "-q")
    verbose = start(SCRIPT, "encode", *SMALL, "-v")
    assert quiet.stdout == verbose.stdout
    assert quiet.stderr == ""
    assert "note: weights are random" in verbose.stderr
    assert "torch" in verbose.stderr
