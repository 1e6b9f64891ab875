from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vitcli.commands.sweep.space import SweepSection
from vitcli.commands.sweep.spec import read_sweep, shipped_sweeps
from vitcli.config.yaml import parse_yaml

FOLDER = Path(__file__).parents[2] / "experiments"
TEXT = (FOLDER / "README.md").read_text()


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


# -- the numbers of the text ---------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*\.\d{2,}(?![\w.])")
"""What is measured has two decimals or more; rates are written as 1e-3, counts as whole numbers."""
NOT_MEASURED = {
    "norm-warmup-init": {"0.02", "0.40"},  # trunc_normal's own spread; Fisher's exact test
    "pooling": {"0.02"},  # the difference asked for
    "profile-resolution": {"0.61", "0.81"},  # ratios of speeds
    "profile-vit-b16": {"0.64"},  # of the multiply-accumulates, by `vitcli params`
}
SECTIONS = [
    part for part in re.split(r"^(?=## )", TEXT, flags=re.MULTILINE) if "<!-- begin" in part
]


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


@pytest.mark.parametrize("part", SECTIONS, ids=lambda part: split(part)[0])
def test_each_number_of_the_prose_is_in_the_table_it_comes_from(part: str) -> None:
    name, inside, prose = split(part)
    if name in ("recipe-search", "ffn-loss") and not NUMBER.search(prose):
        return
    known = numbers(inside)
    written = [n for n in NUMBER.findall(prose) if n not in NOT_MEASURED.get(name, ())]
    assert [n for n in written if not is_rounded(n, known)] == []


def test_the_documentation_says_what_the_experiments_say() -> None:
    """Each number of the main table stands in experiments/README.md, in a table there."""
    text = (FOLDER.parent / "docs" / "start" / "measure-a-claim.md").read_text()
    rows = re.search(r"\| is it true that .*?\n\n", text, re.DOTALL)
    assert rows
    known = numbers("\n".join(split(part)[1] for part in SECTIONS))
    written = NUMBER.findall(rows[0])
    assert len(written) > 10
    speed = {"0.29"}  # a ratio, in the text of the section on patches
    assert [n for n in written if not is_rounded(n, known) and n not in speed] == []


def test_differences_are_those_of_the_tables() -> None:
    """Made again from the tables and the kept results, the file is the same to the last digit."""
    spec = importlib.util.spec_from_file_location("report", FOLDER / "report.py")
    assert spec and spec.loader
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    for name, old in report.blocks(TEXT).items():
        assert report.section(name, FOLDER / "nothing" / name, old) == old, name


def test_a_difference_is_welchs() -> None:
    """Against scipy on samples that have the means and spreads of a row."""
    spec = importlib.util.spec_from_file_location("report", FOLDER / "report.py")
    assert spec and spec.loader
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    one, two = [0.90, 0.94, 0.95], [0.81, 0.88, 0.80]
    rows = [
        {"norm": name, "accuracy": f"{np.mean(v)} ± {np.std(v, ddof=1)}", "n": "3"}
        for name, v in (("pre", one), ("post", two))
    ]
    row = report.welch("accuracy", "", ("norm",), *rows, 4)
    wanted = stats.ttest_ind(one, two, equal_var=False)
    low, high = wanted.confidence_interval(0.95)
    assert row[4:7] == [f"{np.mean(one) - np.mean(two):+.3f}", f"[{low:+.3f}, {high:+.3f}]",
                        f"{4 * wanted.pvalue:.2g}"]  # fmt: skip
