from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.commands.sources import SMALL_SIZE
from vitcli.cli import app

SMALL = [*SMALL_SIZE, "--set=encoder.depth=2"]
runner = CliRunner()


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["profile", *SMALL, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_json_has_the_promised_shape() -> None:
    answer = json.loads(run("--json", "--batch", 1, "--batch", 2, "--runs", 2, "--ops", 3).stdout)
    assert answer["schema_version"] == 1
    assert answer["image_size"] == [32, 32] and answer["tokens"] == 5
    for row, batch in zip(answer["runs"], (1, 2), strict=True):
        assert (
            row["batch"] == batch
            and row["engine"] in ("eager", "onednn")
            and row["attention"] == "fused"
        )
        assert row["wall_s"].keys() == {"median", "p10", "p90"}
        for figure in ("images_per_s", "gflops", "gemm_fraction"):
            assert math.isfinite(row[figure]) and row[figure] > 0
        assert sum(part["share"] for part in row["components"]) == pytest.approx(1)
        assert row["components"][0].keys() == {"name", "self_s", "share", "flop_share"}
        assert len(row["ops"]) == 3
    machine = answer["machine"]
    assert machine["dtype"] == "float32" and machine["threads"] >= 1 and machine["torch"]


def test_tables_say_the_same_and_end_in_words() -> None:
    result = run("--batch", 1, "--batch", 2, "--runs", 2, "--ops", 1, "--attention", "explicit")
    total = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["total"])
    assert total.count("100.0%") == 3  # two batches and the operations
    assert "residual and other" in result.stdout
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith("At batch 2, FFN ") and "of which the attention products" in last
    assert "From batch 1 to 2" in last and "At twice the side (64x64)" in last


def test_a_batch_too_large_is_a_row_and_the_other_is_answered() -> None:
    result = run("--engine", "eager", "--batch", 10**9, "--batch", 1, "--runs", 1)
    assert "failed" in result.stdout
    assert "batch 1000000000, eager: out of memory: needs about" in result.stdout
    assert "At batch 1, FFN" in result.stdout


def test_no_answer_at_all_is_a_failed_run() -> None:
    answer = json.loads(run("--batch", 10**9, "--runs", 1, "--json", code=1).stdout)
    assert answer["runs"][0]["error"].startswith("out of memory")


def test_figure_and_trace(tmp_path: Path) -> None:
    figure, trace = tmp_path / "shares.svg", tmp_path / "step.json.gz"
    run("--batch", 1, "--runs", 1, "--plot", figure, "--trace", trace)
    drawn = figure.read_text(encoding="utf-8")
    assert "<svg" in drawn
    assert trace.read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "trace.json"], "expected .json.gz"),
        (["--trace", "a.json.gz", "--engine", "onnx"], "does not support --trace"),
        (["--plot", "shares.txt"], "cannot draw this format"),
        (["--engine", "turbo"], "--engine turbo: unknown"),
        (["--batch", "0"], "equal to 1"),
        (["--attention", "flash"], "--attention flash: unknown"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    assert message in run(*arguments, code=2).output
