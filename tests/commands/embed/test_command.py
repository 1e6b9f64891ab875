"""`vitcli embed PATH... --out DIR` as people call it, killed and taken up again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vitcli.cli import app

SMALL = [
    f"--set=encoder.{setting}"
    for setting in ("hidden=24", "depth=2", "heads=3", "mlp_hidden=48", "patch_size=8")
] + ["--image-size=16", "--workers=1", "--part-rows=4", "--batch=2"]
runner = CliRunner()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(23):
        pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{number:02d}.png")
    (tmp_path / "photos/05.png").write_bytes(b"")
    (tmp_path / "photos/readme.txt").write_bytes(b"")
    return tmp_path / "photos"


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["embed", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def parts(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(out.iterdir())}


def test_the_answer_as_a_table_and_as_json(photos: Path, tmp_path: Path) -> None:
    first = run(photos, "--out", tmp_path / "out", *SMALL, code=1)
    assert "05.png: truncated: the file is empty" in first.stdout
    assert "left out: 1 .txt" in first.stderr
    assert "23 rows in 6 parts read back" in first.stderr
    second = run(photos, "--out", tmp_path / "out", *SMALL, "--json", code=1)
    assert "--retry-failed" in second.stderr and "--retry-failed" not in first.stderr
    again = json.loads(second.stdout)
    assert (again["rows"], again["ok"], again["parts"], again["rows_encoded"]) == (23, 22, 6, 0)
    assert again["failures"] == [{"code": "truncated", "count": 1}]
    assert f"{again['engine']} engine, float32 on cpu" in first.stdout
    (photos / "05.png").unlink()
    run(photos, "--out", f"{tmp_path}/other/", *SMALL)


def test_a_faster_type_of_the_processor_is_named_once(photos, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    for dtype in ("float32", "bfloat16"):
        how = [photos, "--out", tmp_path / dtype, *SMALL, "--device", "cpu", "--dtype", dtype]
        said = run(*how, code=1).stderr
        assert said.count("bfloat16 units (AMX): --dtype bfloat16") == (dtype == "float32")


def test_kinds_of_inputs_make_a_job(photos: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(map(str, sorted(photos.glob("1*.png")))))
    for number, given in enumerate((f"{photos}/1*.png", f"@{names}")):
        out = tmp_path / f"out{number}"
        assert json.loads(run(given, "--out", out, *SMALL, "--json").stdout)["rows"] == 10
    assert (tmp_path / "out0/part-00000.parquet").read_bytes() == (
        tmp_path / "out1/part-00000.parquet"
    ).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{photos}", "--out", "{tmp}/o", "--shard", "4/3"], "not a shard"),
        (["{photos}", "--out", "{tmp}/o", "--tokens", "dust"], "--tokens dust: unknown"),
        (["{photos}", "--out", "{tmp}/o", "--layers", "a"], "is not a list of layers"),
        (["{photos}", "--out", "{tmp}/o", "--layers", "3"], "does not have this layer"),
        (["@/dev/zero", "--out", "{tmp}/o"], "is a device, not a list"),
        (["{photos}", "--out", "{tmp}/o", "--vector-dtype", "int8"], "float32 or float16"),
        (["{photos}", "--out", "{tmp}/o", "--cluster", "slurm"], "--cluster slurm: unknown"),
        (["{photos}", "--out", "{tmp}/o", "--address", "x:1"], "add --cluster ray"),
        (["{photos}/*.gif", "--out", "{tmp}/o"], "matches no file"),
        (["{photos}", "--out", "{photos}/00.png/x"], "Not a directory"),
    ],
)
def test_what_cannot_be_is_one_line(
    photos: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    texts = [text.format(photos=photos, tmp=tmp_path) for text in arguments]
    assert message in run(*texts, *SMALL, code=2).stderr


def test_fail_fast(photos: Path, tmp_path: Path) -> None:
    result = run(photos, "--out", tmp_path / "out", *SMALL, "--fail-fast", code=1)
    assert "05.png: truncated" in result.stderr


DYING = """
import os, signal, sys
import psutil
from vitcli.__main__ import main
from vitcli.commands.embed.job import Job

last, listed = int(sys.argv.pop(1)), sys.argv.pop(1) == "listed"
write, digests = Job.write, Job._digests

def die(part):
    if part == last:
        for child in psutil.Process().children(recursive=True):
            print(child.pid, child.create_time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

def writing(self, part, rows):
    if not listed:
        Job._digests = lambda self, part: die(part) or digests(self, part)
    write(self, part, rows)
    die(part)

Job.write = writing
main()
"""
"""The command, which kills itself when a part is written: before or after its checksum is."""


def killed(photos: Path, out: Path, part: int, when: str) -> list[list[str]]:
    """Run the command until that part is written; pid and start of the children it had."""
    command = [sys.executable, "-c", DYING, str(part), when, "embed", photos, "--out", out, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def alive(children: list[list[str]]) -> list[psutil.Process]:
    """Those that run still, waited for as long as the system takes to end them."""
    found = []
    for pid, created in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):  # not another one of its number
                found.append(process)
    remaining: list[psutil.Process] = psutil.wait_procs(found, timeout=300)[1]
    return remaining


def test_killed_at_any_moment_the_same_command_finishes_with_the_same_bytes(
    photos: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(photos, "--out", whole, *SMALL, code=1)

    children = killed(photos, out, 1, "not listed")
    assert children
    assert sorted(p.name for p in out.glob("part-*")) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    kept = (out / "part-00000.parquet").stat().st_ino
    children += killed(photos, out, 3, "listed")
    assert len(list(out.glob("part-*.parquet"))) == 4
    assert not alive(children), "decoding processes outlive the command"

    # What a kill can leave behind, put there in any case.
    (out / ".part-00009.parquet.0123456789ab.part").write_bytes(b"half")
    (out / ".inputs.abcd_123.jsonl").write_bytes(b"half")
    result = run(photos, "--out", out, *SMALL, "--json", code=1)
    answer = json.loads(result.stdout)
    assert 0 < answer["rows_encoded"] < 23 and answer["rows"] == 23
    assert parts(out) == parts(whole)
    assert (out / "part-00000.parquet").stat().st_ino == kept  # not made again


def test_progress_in_a_pipe_is_plain_lines(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitcli.ui.console.PLAIN_EVERY_S", 0.0)
    lines = run(photos, "--out", tmp_path / "out", *SMALL, code=1).stderr.splitlines()
    shown = [line for line in lines if line.startswith("encoding: ")]
    assert shown[-1].startswith("encoding: 23 of 23, ") and shown[-1].endswith(
        "failed: 1 truncated"
    )
    assert "img/s" in shown[-1] and "left" in shown[-1]


def test_names_that_are_no_text_go_through_the_command_line(photos: Path, tmp_path: Path) -> None:
    name = os.fsencode(photos) + b"/\xff\n.png"
    (photos / "00.png").rename(os.fsdecode(name))
    command = [sys.executable, "-m", "vitcli", "embed", name, "--out", tmp_path / "o", *SMALL]
    done = subprocess.run([*command, "--json"], capture_output=True, check=True)
    assert json.loads(done.stdout)["ok"] == 1


def test_fit_is_part_of_the_job(photos: Path, tmp_path: Path) -> None:
    """Vectors of one fit are not continued with another, and a query is fitted as they were."""
    out = tmp_path / "out"
    (photos / "05.png").unlink()
    run(photos, "--out", out, *SMALL, "--fit", "whole")
    manifest = json.loads((out / "_manifest.json").read_text())
    assert manifest["settings"]["preprocess"]["fit"] == "whole"
    again = run(photos, "--out", out, *SMALL, "--fit", "crop", code=2)
    assert "preprocess.fit whole -> crop" in again.stderr
    other = shutil.copy(photos / "07.png", tmp_path / "other.png")
    found = runner.invoke(app, ["neighbors", str(out), str(other), "--json"])
    best = json.loads(found.stdout)["neighbours"][0]
    assert best["path"] == "07.png" and best["cosine"] == pytest.approx(1, abs=1e-5)


def test_the_vectors_in_two_dimensions(photos: Path, tmp_path: Path) -> None:
    """Colored by the folders' classes; an image that failed is not a point."""
    for number, name in enumerate(("05", "06", "07")):
        (photos / ("cat", "dog", "dog")[number]).mkdir(exist_ok=True)
        (photos / f"{name}.png").rename(photos / ("cat", "dog", "dog")[number] / f"{name}.png")
    classes = [str(photos / "cat"), str(photos / "dog")]
    shutil.copy(photos / "dog/06.png", photos / "cat/good.png")
    drawn = tmp_path / "x.svg"
    run(*classes, "--out", tmp_path / "out", *SMALL, "--plot", drawn, "--width", "column", code=1)
    text = drawn.read_text()
    for said in ("cat", "dog", "principal component 1", "3 of 4 images"):
        assert f">{said}" in text
    page = tmp_path / "x.html"
    again = ("--plot", page, "--result-format", "csv", "-q")
    told = run(*classes, "--out", tmp_path / "out", *SMALL, *again, code=1)
    assert told.stderr == ""
    (row,) = pd.read_csv(io.StringIO(told.stdout)).to_dict("records")
    assert (row["rows"], row["ok"], row["rows_encoded"]) == (4, 3, 0)
    assert "3 of 4 images; 3 with a picture" in page.read_text()
    assert page.read_text().count("data:image/jpeg;base64,") == 3
    patches = ("--out", tmp_path / "p", "--tokens=patch", "--plot", drawn)
    refused = run(*classes, *patches, *SMALL, code=2)
    assert "one vector per image" in refused.stderr
    assert not (tmp_path / "p").exists()
