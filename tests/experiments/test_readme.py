from __future__ import annotations

import re
from pathlib import Path

from vitcli.commands.sweep.space import SweepSection
from vitcli.commands.sweep.spec import read_sweep
from vitcli.config.yaml import parse_yaml

FOLDER = Path(__file__).parents[2] / "experiments"
TEXT = (FOLDER / "README.md").read_text()


def test_every_sweep_has_its_place_in_the_readme() -> None:
    sweeps = {file.stem for file in FOLDER.glob("*.yaml") if "\ncommand:" in file.read_text()}
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
    assert set(SweepSection.model_fields) - set(document.data) == {"name", "search"}
