"""Writes what the sweeps have found into experiments/README.md: tables, differences, figures.

    python experiments/report.py [RUNS]

For each block `<!-- begin NAME -->` ... `<!-- end NAME -->` of the README it asks
`vitcli sweep --report RUNS/NAME` for the table, the differences and the figure, as a user would,
and keeps what each trial measured in experiments/results/NAME.json. Of a sweep that is not in RUNS
the block is made again from that file; where there is none, the table stays and the differences
are computed from its means and spreads. RUNS is `runs`; VITCLI is the program to run; needs scipy.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from scipy import stats

HERE = Path(__file__).resolve().parent
FIGURES = {
    "lora-rank": ("--where", "lr!=1e-9", "--group", "lora,lora_rank", "--plot-kind", "lines"),
    "patch-size": ("--plot-kind", "lines"),
    "profile-resolution": ("--metric", "ffn", "--plot-kind", "bars"),
    "profile-vit-b16": ("--metric", "ffn", "--plot-kind", "bars"),
}
"""How a sweep is drawn where its shape alone does not say it best."""
COMPARED: dict[str, dict[str, Any]] = {
    "norm-warmup-init": {"axes": [("norm",), ("warmup",), ("init",)], "metrics": ("accuracy",)},
    "lr-tolerance": {"axes": [("norm",)], "metrics": ("accuracy",)},
    "position": {"axes": [("position",)], "metrics": ("accuracy",), "with": ("learned",)},
    "pooling": {"axes": [("pool",)], "metrics": ("accuracy",)},
    "register-accuracy": {"axes": [("registers",)], "metrics": ("accuracy",)},
    "ffn-width": {"axes": [("mlp_hidden",)], "metrics": ("accuracy", "val_loss")},
    "ffn-loss": {"axes": [("mlp_hidden",)], "metrics": ("val_loss", "accuracy")},
    "patch-size": {"axes": [("patch_size",)], "metrics": ("accuracy",)},
    "lora-rank": {
        "axes": [("lora_rank", "lr")],
        "metrics": ("accuracy",),
        "with": ("1", "1e-09"),
    },
}
"""The pairs of levels that the text speaks of; `with` names the level that each is compared to."""
FACTS = ("id", "state", "params", "metrics", "wall_s", "command")
HEAD = ["metric", "where", "a", "b", "a - b", "95% interval", "p", "n"]


def main() -> None:
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    readme = HERE / "README.md"
    text = readme.read_text()
    for name, old in blocks(text).items():
        text = text.replace(
            f"<!-- begin {name} -->\n{old}",
            f"<!-- begin {name} -->\n{section(name, runs / name, old)}",
        )
    readme.write_text(text)


def blocks(text: str) -> dict[str, str]:
    """What stands between each pair of marks of the README, by name."""
    found = re.findall(r"<!-- begin (\S+) -->\n(.*?)<!-- end \1 -->", text, re.DOTALL)
    return dict(found)


def section(name: str, place: Path, old: str) -> str:
    """The block of a sweep: from its directory, from what was kept of it, or from its table."""
    kept = HERE / "results" / f"{name}.json"
    if (place / "sweep.yaml").exists():
        report = read(place)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(report, indent=1) + "\n")
        if any(group["metrics"] for group in report["groups"]):
            figure = HERE / "figures" / f"{name}.png"
            figure.parent.mkdir(exist_ok=True)
            vitcli("sweep", "--report", str(place), "--plot", str(figure), *FIGURES.get(name, ()))
    elif kept.exists():
        report = json.loads(kept.read_text())
    else:
        print(f"{name}: no sweep in {place.parent}, its table is left as it is", file=sys.stderr)
        return with_differences(name, old)
    return block(name, report)


def read(place: Path) -> dict[str, Any]:
    """A sweep's report, without what is true of one machine alone."""
    report = json.loads(vitcli("sweep", "--report", str(place), "--json"))
    jobs = re.search(r"^jobs: (\d+)", (place / "sweep.yaml").read_text(), re.MULTILINE)
    report["jobs"] = int(jobs[1]) if jobs else 1
    report["trials"] = [{key: trial[key] for key in FACTS} for trial in report["trials"]]
    return {key: value for key, value in report.items() if key != "directory"}


def block(name: str, report: dict[str, Any]) -> str:
    """Markdown: how it was run and how long it took, the table, the differences, the figure."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(report["states"].items()))
    seconds = sum(trial["wall_s"] or 0 for trial in report["trials"])
    together = f", {report['jobs']} at a time" if report["jobs"] > 1 else ""
    lines = [
        f"`vitcli sweep {name}` — {states}; {seconds / 60:.0f} minutes of trials{together}.",
        "",
        *table(report),
        "",
    ]
    made = compared(name, report)
    if made:
        lines += [PAIRED, "", *markdown([HEAD, *made]), ""]
    if (HERE / "figures" / f"{name}.png").exists():
        lines += [f"![{report['question']}](figures/{name}.png)", ""]
    return "\n".join(lines)


PAIRED = "Differences, paired by seed, with Student's 95% interval and Holm's p over the axis:"
WELCH = (
    "Differences from the means and spreads above, with Welch's 95% interval and Bonferroni's p "
    "over this table:"
)


def compared(name: str, report: dict[str, Any]) -> list[list[str]]:
    """A row per pair of levels that the text speaks of, as `sweep --report` compares them."""
    wanted = COMPARED.get(name, {"axes": [], "metrics": ()})
    rows = []
    for c in report["comparisons"]:
        short = tuple(key.rsplit(".", 1)[-1] for key in c["a"])
        if c["metric"] in wanted["metrics"] and short in wanted["axes"]:
            where = [c["metric"], words(c["at"]), words(c["a"], False), words(c["b"], False)]
            p = "" if c["p_holm"] is None else probability(c["p_holm"])
            rows.append([*where, *interval(c["difference"], c["low"], c["high"]), p, str(c["n"])])
    return rows


def words(level: dict[str, Any], keys: bool = True) -> str:
    named = (f"{key.rsplit('.', 1)[-1]} " if keys else "" for key in level)
    return ", ".join(key + number(value) for key, value in zip(named, level.values(), strict=True))


def with_differences(name: str, old: str) -> str:
    """The old block, its differences computed anew from its table."""
    before, _, _ = old.partition(WELCH)
    figure = re.search(r"!\[.*", old, re.DOTALL)
    made = from_table(name, before)
    if not made:
        return old
    body = before[: figure.start()] if figure and figure.start() < len(before) else before
    lines = [
        body.rstrip(),
        "",
        WELCH,
        "",
        *markdown([HEAD, *made]),
        "",
        figure[0] if figure else "",
    ]
    return "\n".join(lines)


def rows_of(text: str) -> list[dict[str, str]]:
    """The first Markdown table of a text, a mapping per row."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(found[0], row, strict=True)) for row in found[2:]] if found else []


def from_table(name: str, text: str) -> list[list[str]]:
    """The pairs of levels of COMPARED from means, spreads and counts: Welch's test."""
    wanted = COMPARED.get(name)
    if wanted is None:
        return []
    pairs = []
    for axis, metric in itertools.product(wanted["axes"], wanted["metrics"]):
        cells: dict[str, list[dict[str, str]]] = {}
        values = {"accuracy", "val_loss", "verdict", "n", "parameters", "trainable",
                  "images_per_s", "last_step_loss"}  # fmt: skip
        for row in rows_of(text):
            rest = ", ".join(f"{k} {v}" for k, v in row.items() if k not in {*axis, *values})
            cells.setdefault(rest, []).append(row)
        for where, rows in cells.items():
            pairs += [(metric, where, axis, a, b) for a, b in itertools.combinations(rows, 2)
                      if not wanted.get("with")
                      or wanted["with"] in (level(a, axis), level(b, axis))]  # fmt: skip
    return [welch(*pair, len(pairs)) for pair in pairs]


def level(row: dict[str, str], axis: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(row[key] for key in axis)


def welch(
    metric: str, where: str, axis: tuple[str, ...], a: dict[str, str], b: dict[str, str], pairs: int
) -> list[str]:
    """One row of differences."""
    one, two = ([float(x.replace(",", "")) for x in row[metric].split(" ± ")] for row in (a, b))
    counts = int(a["n"]), int(b["n"])
    test = stats.ttest_ind_from_stats(*one, counts[0], *two, counts[1], equal_var=False)
    parts = [std**2 / n for (_, std), n in zip((one, two), counts, strict=True)]
    freedom = sum(parts) ** 2 / sum(v**2 / (n - 1) for v, n in zip(parts, counts, strict=True))
    half = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    difference = one[0] - two[0]
    levels = [", ".join(level(row, axis)) for row in (a, b)]
    p = probability(min(1.0, pairs * test.pvalue))
    return [metric, where, *levels, *interval(difference, difference - half, difference + half), p,
            str(min(counts))]  # fmt: skip


def interval(difference: float, low: float, high: float) -> list[str]:
    return [f"{difference:+.3f}", f"[{low:+.3f}, {high:+.3f}]"]


def probability(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def markdown(rows: list[list[str]]) -> list[str]:
    """A head and rows as a Markdown table."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(row) + " |" for row in lines]


def table(report: dict[str, Any]) -> list[str]:
    """The groups as a Markdown table: mean ± sample standard deviation, and how many trials.

    What a search drew is no group: a row for each trial, and how it ended.
    """
    keys, metrics, search = report["grouped_by"], report["metrics"], report["objective"]
    head = [*(key.rsplit(".", 1)[-1] for key in keys), *metrics, "state" if search else "n"]
    rows = [head]
    for trial in report["trials"] if search else ():
        values = [trial["params"][key] for key in keys]
        values += [trial["metrics"].get(name, "") for name in metrics]
        rows.append([*map(number, values), trial["state"]])
    for group in () if search else report["groups"]:
        cells = [number(value) for value in group["params"].values()]
        cells += [cell(group, name) for name in metrics]
        rows.append([*cells, str(len(group["trials"]))])
    return markdown(rows)


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
