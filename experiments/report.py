"""Writes what the sweeps have found into experiments/README.md, tables and figures.

    python experiments/report.py [RUNS]

For each block `<!-- begin NAME -->` … `<!-- end NAME -->` of the README it asks
`vitcli sweep --report RUNS/NAME` for the table and the figure, as a user would. A sweep that has
not been run keeps the block it had. RUNS is `runs`; VITCLI is the program to run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
FIGURES = {
    "lora-rank": ("--where", "lr!=1e-9", "--group", "lora,lora_rank", "--plot-kind", "lines"),
    "patch-size": ("--plot-kind", "lines"),
    "profile-resolution": ("--metric", "ffn", "--plot-kind", "bars"),
    "profile-vit-b16": ("--metric", "ffn", "--plot-kind", "bars"),
}
"""How a sweep is drawn where its shape alone does not say it best."""


def main() -> None:
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    readme = HERE / "README.md"
    text = readme.read_text()
    for name in re.findall(r"<!-- begin (\S+) -->", text):
        if not (runs / name / "sweep.yaml").exists():
            print(f"{name}: no sweep in {runs}, left as it is", file=sys.stderr)
            continue
        block = section(name, runs / name)
        text = re.sub(
            rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
            lambda match, block=block: match[1] + block + match[2],
            text,
            flags=re.DOTALL,
        )
    readme.write_text(text)


def section(name: str, place: Path) -> str:
    """Markdown: how it was run and how long it took, the table, the figure."""
    report = json.loads(vitcli("sweep", "--report", str(place), "--json"))
    figure = HERE / "figures" / f"{name}.png"
    figure.parent.mkdir(exist_ok=True)
    if report["groups"] and any(group["metrics"] for group in report["groups"]):
        vitcli("sweep", "--report", str(place), "--plot", str(figure), *FIGURES.get(name, ()))
    states = ", ".join(f"{count} {state}" for state, count in sorted(report["states"].items()))
    seconds = sum(trial["wall_s"] or 0 for trial in report["trials"])
    jobs = yaml.safe_load((place / "sweep.yaml").read_text()).get("jobs", 1)
    together = f", {jobs} at a time" if jobs > 1 else ""
    lines = [
        f"`vitcli sweep experiments/{name}.yaml` — {states}; "
        f"{seconds / 60:.0f} minutes of trials{together}.",
        "",
        *table(report),
        "",
    ]
    if figure.exists():
        lines += [f"![{report['question']}](figures/{name}.png)", ""]
    return "\n".join(lines)


def table(report: dict[str, Any]) -> list[str]:
    """The groups as a Markdown table: mean ± sample standard deviation, and how many trials.

    What a search drew is no group: a row for each trial, and how it ended.
    """
    keys, metrics, search = report["grouped_by"], report["metrics"], report["objective"]
    head = [*(key.rsplit(".", 1)[-1] for key in keys), *metrics, "state" if search else "n"]
    rows = [head, ["---"] * len(head)]
    for trial in report["trials"] if search else ():
        values = [trial["params"][key] for key in keys]
        values += [trial["metrics"].get(name, "") for name in metrics]
        rows.append([*map(number, values), trial["state"]])
    for group in () if search else report["groups"]:
        cells = [number(value) for value in group["params"].values()]
        cells += [cell(group, name) for name in metrics]
        rows.append([*cells, str(len(group["trials"]))])
    return ["| " + " | ".join(row) + " |" for row in rows]


def number(value: Any) -> str:
    """One value; no more than four digits of what a search drew."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cell(group: dict[str, Any], name: str) -> str:
    if name in group["metrics"]:
        spread = group["metrics"][name]
        if spread["min"] == spread["max"]:
            mean = spread["mean"]
            return f"{mean:,.0f}" if mean == int(mean) else f"{mean:.4g}"
        around = "" if spread["std"] is None else f" ± {plain(spread['std'], 2)}"
        return f"{plain(spread['mean'], 4)}{around}"
    return ", ".join(f"{word} {count}" for word, count in group["words"].get(name, {}).items())


def plain(value: float, digits: int) -> str:
    """So many significant digits, without an exponent where the number is large."""
    short = f"{value:.{digits}g}"
    return f"{float(short):,.0f}" if abs(value) >= 1000 else short


def vitcli(*arguments: str) -> str:
    """What the command prints; its talk goes to this process's stderr."""
    program = shlex.split(os.environ.get("VITCLI", "vitcli"))
    return subprocess.run(
        [*program, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
