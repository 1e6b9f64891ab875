"""experiments/README.md: its tables come from the stored results, its prose from its tables."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW
from typer.testing import CliRunner

from vitcli.cli import app
from vitcli.commands.sweep.spec import SHIPPED, SweepSection, read_sweep, shipped_sweeps
from vitcli.config.yaml import parse_yaml

FOLDER = Path(__file__).parents[2] / "experiments"
TEXT = (FOLDER / "README.md").read_text()
STORED = [name for name in shipped_sweeps() if (FOLDER / "results" / f"{name}.json").exists()]


def test_every_sweep_has_its_place_in_the_readme() -> None:
    sweeps = set(shipped_sweeps())
    blocks = re.findall(r"<!-- begin (\S+) -->\n.*?<!-- end (\S+) -->", TEXT, re.DOTALL)
    scripts = {file.stem for file in FOLDER.glob("*.py")}  # some write a block of their own
    assert sweeps <= {begin for begin, _ in blocks} <= sweeps | scripts
    assert all(begin == end for begin, end in blocks)


def test_figures_that_the_readme_shows_are_there() -> None:
    for figure in re.findall(r"\]\((figures/[^)]+)\)", TEXT):
        assert (FOLDER / figure).is_file()


def test_the_file_that_the_readme_explains_is_a_sweep_with_every_key() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    document = parse_yaml(example, "README")
    sweep = read_sweep(document)
    assert sweep.axes == ["epochs", "data.train_size", "norm", "lr", "train.weight_decay"]
    assert set(SweepSection.model_fields) - set(document.data) == {"name", "search", "storage"}


# -- the tables, from the stored results ---------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Any:
    """The script, its commands run in this process."""
    spec = importlib.util.spec_from_file_location("report", FOLDER / "report.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stdout

    module.vitcli = run  # type: ignore[attr-defined]
    return module


def test_there_are_stored_results() -> None:
    assert len(STORED) >= 2


@pytest.mark.parametrize("name", STORED)
def test_a_block_is_made_of_the_stored_results(report: Any, name: str) -> None:
    """To the last digit; the sweep's file asks for exactly the trials that are stored."""
    old = report.blocks(TEXT)[name]
    assert report.section(name, old) == old


def test_another_sweep_than_was_stored_is_an_error(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    text = (SHIPPED / "pooling.yaml").read_text()
    (tmp_path / "pooling.yaml").write_text(text.replace("lr: 3e-3", "lr: 2e-3"))
    (tmp_path / "results" / "pooling.json").write_text(report.results("pooling").read_text())
    monkeypatch.setattr(report, "HERE", tmp_path)
    monkeypatch.setattr(report, "SWEEPS", tmp_path)
    with pytest.raises(SystemExit, match="is not what was run"):
        report.section("pooling", "")


def test_a_figure_is_drawn_of_the_stored_results(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    stored = (FOLDER / "results" / "pooling.json").read_text()
    (tmp_path / "results" / "pooling.json").write_text(stored)
    monkeypatch.setattr(report, "HERE", tmp_path)
    report.draw("pooling")
    assert (tmp_path / "figures" / "pooling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", STORED)
def test_an_accuracy_lies_between_0_and_1(name: str) -> None:
    trials = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    assert all(0 <= t["metrics"].get("accuracy", 0) <= 1 for t in trials)


def test_an_arm_is_compared_at_the_rate_that_the_other_seeds_choose(report: Any) -> None:
    values = {1e-3: {0: [0.9], 1: [0.5], 2: [0.6]}, 1e-2: {0: [0.1], 1: [0.7], 2: [0.6, 0.8]}}
    found, chosen = report.at_best_rate(values)
    assert chosen == {0: 1e-2, 1: 1e-3, 2: 1e-3}
    assert found == {0: 0.1, 1: 0.5, 2: 0.6}


def test_a_difference_of_arms_is_that_of_statsmodels(report: Any) -> None:
    one, two = np.random.default_rng(0).normal(0.8, 0.05, (2, 8))
    difference, low, high, p = report.paired(dict(enumerate(one)), dict(enumerate(two)))
    wanted = DescrStatsW(one - two)
    assert difference == pytest.approx(wanted.mean, rel=1e-12)
    assert (low, high) == pytest.approx(wanted.tconfint_mean(0.05), rel=1e-12, abs=1e-14)
    assert p == pytest.approx(wanted.ttest_mean(0)[1], rel=1e-12)


@pytest.mark.parametrize("p", [[0.01], [0.04, 0.01, 0.03], [0.5, 0.001, 0.02, 0.02, 0.9]])
def test_holm_is_that_of_statsmodels(report: Any, p: list[float]) -> None:
    assert report.holm(p) == pytest.approx(list(multipletests(p, method="holm")[1]), rel=1e-12)


def test_a_row_is_what_scipy_makes_of_the_raw_results() -> None:
    """Means, interval and Holm's p of the block on pooling, from the file alone."""
    trials = json.loads((FOLDER / "results" / "pooling.json").read_text())
    levels = {level: [t["metrics"]["accuracy"] for t in trials if t["params"]["pool"] == level]
              for level in ("cls", "mean", "map")}  # fmt: skip
    pairs = list(itertools.combinations(levels, 2))
    tests = [stats.ttest_rel(levels[a], levels[b]) for a, b in pairs]
    adjusted = multipletests([test.pvalue for test in tests], method="holm")[1]
    for (a, b), test, p in zip(pairs, tests, adjusted, strict=True):
        low, high = test.confidence_interval(0.95)
        difference = np.mean(levels[a]) - np.mean(levels[b])
        row = f"{a} | {b} | {difference:+.3f} | [{low:+.3f}, {high:+.3f}] | {p:.2g} | 12 |"
        assert f"| accuracy |  | {row}" in TEXT


# -- the numbers of the text ---------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*\.\d{2,}(?![\w.])")
"""What is measured has two decimals or more; rates are written as 1e-3, counts as whole numbers."""
CLAIM = re.compile(r"([+-]?\d\.\d+)\s+\[([+-]?\d\.\d+),\s+([+-]?\d\.\d+)\]")
"""A difference and its interval."""
SEEDS = {"three": 3, "five": 5, "eight": 8, "ten": 10, "twelve": 12}
NOT_MEASURED = {
    # One run of the seven epochs, whose command is above it; what a table row is made of, below.
    "fashion-seeds": {
        "0.88",
        "0.886",
        "0.8848",
        "0.343",
        "0.667",
        "0.976",
        "0.878",
        "0.891",
        "0.8661",
        "0.8718",
        "0.862",
        "0.876",
    },
    "norm-warmup-init": {"0.3633"},  # one seed, in results/norm-warmup-init.json
    "recipe-search": {"0.966"},  # an earlier search
    "recipe-margin": {"0.05"},  # of 1 - 0.05^(1/10)
    "pooling": {"0.02"},  # the difference asked for
    "profile-resolution": {"0.86", "0.98", "0.49", "0.79", "0.06"},  # ratios of speeds; a spread
    "profile-vit-b16": {"0.64", "0.55", "0.59"},  # of the operations, by `vitcli params`; earlier
}
SECTIONS = {
    re.sub(r"[^\w -]", "", title).replace(" ", "-").lower(): part
    for title, part in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    if "<!-- begin" in part
}
"""By the anchor of its title."""


def numbers(text: str) -> list[float]:
    return [
        float(n.replace(",", "")) for n in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)
    ]


def split(part: str) -> tuple[str, str, str]:
    """Name of the section's first block, its blocks, and the prose outside them."""
    (name, *_) = re.findall(r"<!-- begin (\S+) -->", part)
    inside = "\n".join(re.findall(r"<!-- begin \S+ -->(.*?)<!-- end", part, re.DOTALL))
    return (
        name,
        inside,
        re.sub(r"<!-- begin (\S+) -->.*?<!-- end \1 -->", "", part, flags=re.DOTALL),
    )


def is_rounded(written: str, known: list[float]) -> bool:
    """Whether `written` is one of `known` at its own number of decimals, whatever its sign."""
    places = len(written.partition(".")[2])
    value = abs(float(written.replace(",", "")))
    return any(abs(abs(k) - value) <= 0.5 * 10**-places * 1.001 for k in known)


def not_in_a_row(prose: str, tables: str) -> list[tuple[str, ...]]:
    """Differences with intervals that no row of the tables has, whichever side is subtracted."""
    rows = [numbers(row.replace("|", " ; ")) for row in tables.splitlines() if "[" in row]
    return [
        claim for claim in CLAIM.findall(prose)
        if not any(all(is_rounded(n, row) for n in claim) for row in rows)
    ]  # fmt: skip


@pytest.mark.parametrize("part", SECTIONS.values(), ids=list(SECTIONS))
def test_each_number_of_the_prose_is_in_the_table_it_comes_from(part: str) -> None:
    name, inside, prose = split(part)
    known = numbers(inside)
    written = [n for n in NUMBER.findall(prose) if n not in NOT_MEASURED.get(name, ())]
    assert [n for n in written if not is_rounded(n, known)] == []
    assert not_in_a_row(prose, inside) == []
    counts = {int(row.rstrip(" |").rpartition("|")[2]) for row in inside.splitlines()
              if re.search(r"\| \d+ \|$", row)}  # fmt: skip
    measured = " ".join(
        re.findall(r"^\*Measured\.\*.*?(?=^\*|\Z)", prose, re.DOTALL | re.MULTILINE)
    )
    said = {SEEDS[n] for n in re.findall(r"\b(\w+)\s+seeds\b", measured) if n in SEEDS}
    assert not counts or said <= counts


def test_the_spread_of_fashion_mnist_is_that_of_its_three_seeds() -> None:
    trials = json.loads((FOLDER / "results" / "fashion-seeds.json").read_text())
    values = [trial["metrics"]["accuracy"] for trial in trials]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert f"from {min(values):.4f} to {max(values):.4f}" in TEXT
    assert f"the mean's 95% interval is {low:.3f} to {high:.3f}" in TEXT


def test_a_number_that_no_table_has_is_found() -> None:
    table = "| accuracy |  | pre | post | +0.041 | [-0.031, +0.113] | 0.73 | 3 |"
    assert not_in_a_row("by 0.041 [-0.031, 0.113]", table) == []
    assert not_in_a_row("by 0.041 [-0.113, 0.031]", table) == []
    assert len(not_in_a_row("by 0.041 [-0.031, 0.114]", table)) == 1
    assert not is_rounded("0.05", numbers(table))


@pytest.mark.parametrize("part", SECTIONS.values(), ids=list(SECTIONS))
def test_a_section_says_all_of_a_claim(part: str) -> None:
    words = ["Expected", "Measured", "How sure", "What would change it"]
    if "recipe-search" not in split(part)[0]:  # a tool at work, no claim
        assert [w for w in ["Question", *words] if f"\n*{w}" not in f"\n{part}"] == []


SUMMARY = re.findall(r"^\| \[([^]]*)\]\(#([^)]*)\) \|(.*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("claim", "anchor", "row"), SUMMARY, ids=[row[1] for row in SUMMARY])
def test_the_summary_says_what_the_sections_say(claim: str, anchor: str, row: str) -> None:
    _, inside, prose = split(SECTIONS[anchor])
    known = numbers(inside)
    known += [float(n) for n in NUMBER.findall(prose)]
    assert [n for n in NUMBER.findall(row) if not is_rounded(n, known)] == []
    assert not_in_a_row(row, inside) == []


def test_the_summary_has_the_claims() -> None:
    assert len(SUMMARY) >= 9


def test_the_documentation_says_what_the_experiments_say() -> None:
    """Each number of the main table stands in experiments/README.md, in a table there."""
    text = (FOLDER.parent / "docs" / "start" / "measure-a-claim.md").read_text()
    rows = re.search(r"\| is it true that .*?\n\n", text, re.DOTALL)
    assert rows
    inside = "\n".join(split(part)[1] for part in SECTIONS.values())
    written = NUMBER.findall(rows[0])
    assert len(written) > 10
    assert [n for n in written if not is_rounded(n, numbers(inside))] == []
    assert not_in_a_row(rows[0], inside) == []
