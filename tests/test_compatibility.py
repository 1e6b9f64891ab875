"""The contract with scripts: what the first release took and answered is still there.

`compatibility.json` was written by the first release (commit 0154346): its commands with their
options, and the exit codes and JSON key paths of some command lines. It only ever grows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from vitcli.cli import app

CONTRACT = json.loads(Path(__file__).with_name("compatibility.json").read_text())

MOVED = (
    *("--format", "--vector-dtype", "--norms", "--part-rows", "--batch", "--workers", "--timeout"),
    *("--memory", "--max-pixels", "--min-side", "--any-suffix", "--shard", "--retry-failed"),
    *("--fail-fast", "--cluster", "--address"),
)
"""Options of `encode` that are `embed`'s now."""
DEFAULTS = {("encode", "--engine"): None, ("profile", "--dtype"): None}
"""Changed on purpose: the fastest engine of equal numbers; several types, float32 without any."""
RENAMED = {"encoder.head_dim": "encoder.head_out"}


def test_every_option_is_there_with_its_default() -> None:
    now = get_command(app).commands  # type: ignore[attr-defined]
    lost = []
    for name, command in CONTRACT["commands"].items():
        for option, before in command["options"].items():
            moved = name == "encode" and option in MOVED
            home = "embed" if moved else name
            found = next((p for p in now[home].params if option in p.opts), None)
            default = DEFAULTS.get((name, option), before["default"])
            if (
                found is None
                or bool(found.is_flag) != before["flag"]
                or (before["repeatable"] and not found.multiple)
                or (_plain(found.default) != default and not moved)  # now the help shows it
            ):
                lost.append(f"{home} {option}: {vars(found) if found else 'gone'}")
        arguments = [
            {"required": p.required, "many": p.nargs == -1}
            for p in now[name].params
            if p.param_type_name == "argument"
        ]
        if arguments != command["arguments"]:
            lost.append(f"{name}: {arguments}")
    assert lost == []


def test_every_command_line_answers_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one folder, in turn: some lines read what others wrote."""
    monkeypatch.chdir(tmp_path)
    _write_files(tmp_path)
    wrong = []
    for run in CONTRACT["runs"]:
        done = CliRunner().invoke(app, shlex.split(run["line"]))
        wrong += [f"{run['line']}: {problem}" for problem in _problems(run, done)]
    assert wrong == []


def _problems(run: dict[str, Any], done: Any) -> Iterator[str]:
    """Another exit code, an error that is not two lines on stderr, keys that are gone."""
    if done.exit_code != run["exit"]:
        yield f"exit code {done.exit_code} (expected {run['exit']}): {done.stderr[-300:]}"
        return
    if run["exit"] == 2:
        error, hint = done.stderr.rstrip("\n").split("\n")[-2:]
        if done.stdout or not error.startswith("error: ") or not hint.startswith("  try: "):
            yield f"not one line of error and one of hint: {done.stderr}{done.stdout}"
    if "json" not in run:
        return
    found = _kinds(json.loads(done.stdout))
    for kinds, paths in run["json"].items():
        for path in paths.split():
            for before, now in RENAMED.items():
                path = path.replace(before, now)
            known, got = set(kinds.split("|")) - {"null"}, found.get(path, set())
            if not got or (known and got - {"null"} and not known & got):
                yield f"{path}: {sorted(got) or 'gone'} (expected {kinds})"


def _kinds(value: Any, path: str = "") -> dict[str, set[str]]:
    """The JSON types at each key path; `[]` stands for any place of a list."""
    names = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}
    kinds = {path: {names.get(type(value), "list" if isinstance(value, list) else "object")}}
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inner = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    if isinstance(value, list):
        inner = [(f"{path}[]", item) for item in value]
    for place, item in inner:
        for key, found in _kinds(item, place).items():
            kinds.setdefault(key, set()).update(found)
    return kinds


def _plain(default: Any) -> Any:
    return default if isinstance(default, bool | int | float | str | None) else str(default)


def _write_files(folder: Path) -> None:
    random = np.random.default_rng(0)
    for channel, name in ((0, "red"), (2, "blue")):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(6):
            pixels = random.integers(0, 120, (16, 20, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(folder / "photos" / name / f"{i}.png")
    Image.fromarray(pixels).save(folder / "a.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "toy.yaml").write_text(
        "command: params\nbase: {encoder.depth: 1}\ngrid: {image_size: [32]}\n"
        "metrics: {macs: models.0.macs_per_image}\n"
    )
