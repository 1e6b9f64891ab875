"""experiments/registers.py at toy size: what it trains, tabulates and writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from vitcli.cli import app

SCRIPT = Path(__file__).parents[2] / "experiments" / "registers.py"
TOY = [
    "--set=encoder.depth=2",
    "--set=encoder.hidden=24",
    "--set=encoder.mlp_hidden=48",
    "--set=data.train_size=64",
    "--set=data.val_size=32",
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, its commands run in this process and listed in `ran`."""
    spec = importlib.util.spec_from_file_location("registers", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ran = []

    def run(*arguments: object) -> Any:
        module.ran.append([str(a) for a in arguments])
        result = CliRunner().invoke(app, [*module.ran[-1], "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    monkeypatch.setattr(module, "vitcli", run)
    return module


def test_the_block_of_the_readme_and_the_figure(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- begin registers -->\nold\n<!-- end registers -->\nafter\n")
    arguments = ["--out", tmp_path / "runs", "--readme", readme, "--seeds", 1, "--images", 4]
    arguments += ["--trained", tmp_path / "absent", *TOY]
    monkeypatch.setattr(sys, "argv", ["registers.py", *map(str, arguments)])
    script.main()
    text = readme.read_text()
    assert text.startswith("before\n<!-- begin registers -->\n`registers.py --seeds 1 --set")
    assert text.endswith("<!-- end registers -->\nafter\n") and "old" not in text
    assert (tmp_path / "figures" / "registers.png").read_bytes().startswith(b"\x89PNG")
    runs = {count: tmp_path / "runs" / f"registers-{count}-seed-0" for count in (0, 4)}
    accuracy = [json.loads((r / "result.json").read_text())["val_accuracy"] for r in runs.values()]
    row = next(line for line in text.splitlines() if line.startswith("| validation accuracy"))
    cells = [float(cell) for cell in row.strip("|").split("|")[1:]]
    assert cells == pytest.approx([*accuracy, accuracy[1] - accuracy[0]], abs=5e-4)
    assert [command[0] for command in script.ran] == ["train-shapes", "attn-entropy"] * 2

    script.ran.clear()
    script.main()
    assert [command[0] for command in script.ran] == ["attn-entropy"] * 2, "nothing trained again"


def test_a_readme_without_the_block_is_left_alone(script: Any, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    with pytest.raises(SystemExit):
        script.write_block(readme, "text")
    assert readme.read_text() == "nothing here\n"


def run_of(registers: int, seed: int, accuracy: float, norm: float = 1.0) -> dict[str, Any]:
    layer = dict.fromkeys(("entropy_normalised", "entropy_cls", "attention_distance_px"), 0.5)
    layer |= {"layer": 1, "outlier_share": 0.0, "cls_mass": {"registers": 0.1}}
    layer |= {"patch_norm_median": 1.0, "patch_norm_max": norm}
    return {"registers": registers, "seed": seed, "val_accuracy": accuracy, "layers": [layer]}


def test_differences_are_paired_by_seed(script: Any) -> None:
    """Student's interval of scipy over three differences."""
    none, some = [0.5, 0.7, 0.9], [0.6, 0.7, 0.95]
    runs = [run_of(0, seed, value) for seed, value in enumerate(none)]
    runs += [run_of(4, seed, value, 3.0) for seed, value in enumerate(some)]
    low, high = stats.ttest_rel(some, none).confidence_interval(0.95)
    lines = script.table({"runs": runs}).splitlines()
    row = f"| 0.700 ± 0.200 | 0.750 ± 0.180 | +0.050 [{low:+.3f}, {high:+.3f}] |"
    assert f"| validation accuracy {row}" in lines
    assert (
        "| largest patch norm / median, worst layer | 1.000 ± 0.000 | 3.000 ± 0.000 | +2.000 |"
        in lines
    )


def test_the_block_is_made_of_the_stored_results(script: Any) -> None:
    stored = json.loads((SCRIPT.parent / "results" / "registers.json").read_text())
    text = (SCRIPT.parent / "README.md").read_text()
    assert f"<!-- begin registers -->\n{script.block(stored)}<!-- end registers -->" in text
    assert len(stored["runs"]) >= 20
