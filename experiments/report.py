"""Writes what the sweeps have found into experiments/README.md: tables, differences, figures.

    python experiments/report.py [RUNS]

Each block `<!-- begin NAME -->` ... `<!-- end NAME -->` of the README is made from
experiments/results/NAME.json, where each trial is a line: what was varied, the seed, what was
measured. A sweep that is in RUNS (default: `runs`) is stored there first. `vitcli sweep --report`
computes and draws, from the stored results as a directory of trials; arms at their own best rates
are compared here. A block without stored results stays as it is. VITCLI is the program to run.
Needs scipy.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

HERE = Path(__file__).resolve().parent
SWEEPS = HERE.parent / "vitcli" / "commands" / "sweep" / "shipped"
FIGURES = {
    "cnn-or-vit": ("--metric", "accuracy", "--group", "data.train_limit,config"),
    "cnn-or-vit-shapes": ("--metric", "accuracy", "--group", "data.train_size,config"),
    "ffn-steps": ("--metric", "val_loss", "--plot-kind", "bars"),
    "lora-rank": ("--metric", "accuracy", "--where", "lr!=1e-9", "--group", "lora_rank,lr",
                  "--plot-kind", "bars"),
    "position": ("--metric", "accuracy"),
}  # fmt: skip
"""How a sweep is drawn where its shape alone does not say it best."""
UNDRAWN = {"fashion-seeds"}
"""One point: a figure would show no more than the number."""
COMPARED: dict[str, tuple[str, ...]] = {
    "norm-warmup-init": ("norm", "warmup", "init"),
    "position-none": ("position",),
    "pooling": ("pool",),
    "register-accuracy": ("registers",),
    "ffn-width": ("mlp_hidden",),
    "ffn-loss": ("mlp_hidden",),
    "ffn-steps": ("mlp_hidden",),
    "ffn-parameters": ("mlp_hidden",),
    "cnn-or-vit": ("config",),
    "cnn-or-vit-shapes": ("config",),
    "patch-few-images": ("patch_size",),
    "warmup-photos": ("warmup",),
    "distillation": ("distillation",),
}
"""The axes whose levels the text compares, at equal values of the other axes."""
UNCOMPARED = {"parameters", "images_per_s", "last_step_loss", "trainable"}

Arm = tuple[tuple[str, Any], ...]
"""What an arm sets, the rate apart: (("norm", "pre"), ("warmup", 0))."""
Values = dict[float, dict[Any, list[float]]]
"""Accuracies by rate and block: the base that an adapter adapts, else the seed."""


def one_apart(a: Arm, b: Arm) -> bool:
    return sum(x != y for x, y in zip(a, b, strict=True)) == 1


def learned_or_patch(a: Arm, b: Arm) -> bool:
    """Learned positions against each encoding, and from patch size to patch size."""
    return one_apart(a, b) and dict(a)["position"] == "learned"


TUNED: dict[str, Callable[[Arm, Arm], bool]] = {
    "norm-rates": one_apart,
    "norm-rates-trunc": one_apart,
    "position": learned_or_patch,
    "lora-rank": lambda a, b: True,
}
"""Sweeps over `lr` whose arms are compared at their own best rates, and which pairs of arms."""
HEAD = ["metric", "where", "a", "b", "a - b", "95% interval", "p", "n"]
PAIRED = "Differences, paired by seed, with Student's 95% interval and Holm's p over the axis:"


def main() -> None:
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    readme = HERE / "README.md"
    text = readme.read_text()
    for name, old in blocks(text).items():
        if (SWEEPS / f"{name}.yaml").exists() and (runs / name / "sweep.yaml").exists():
            store(name, runs / name)
        if results(name).exists() and name not in UNDRAWN:
            draw(name)
        text = text.replace(
            f"<!-- begin {name} -->\n{old}", f"<!-- begin {name} -->\n{section(name, old)}"
        )
    readme.write_text(text)


def blocks(text: str) -> dict[str, str]:
    """What stands between each pair of marks of the README, by name."""
    found = re.findall(r"<!-- begin (\S+) -->\n(.*?)<!-- end \1 -->", text, re.DOTALL)
    return dict(found)


# -- stored results ------------------------------------------------------------------------------


def results(name: str) -> Path:
    return HERE / "results" / f"{name}.json"


def store(name: str, place: Path) -> None:
    """A line per trial: id, state, seconds, what was varied, what was measured."""
    report = json.loads(vitcli("sweep", "--report", str(place), "--json"))
    varied = [*report["axes"], *([report["seeds"]] if report["seeds"] else [])]
    lines = [
        json.dumps({
            **{key: trial[key] for key in ("id", "state", "wall_s")},
            "params": {key: trial["params"][key] for key in varied},
            "metrics": trial["metrics"],
            **({"last_value": last} if (last := trial["last_value"]) is not None else {}),
        })
        for trial in report["trials"]
        if trial["params"]
    ]  # fmt: skip
    results(name).parent.mkdir(exist_ok=True)
    results(name).write_text("[\n" + ",\n".join(lines) + "\n]\n")


def unpack(name: str, place: Path) -> None:
    """The stored results as the directory of trials that `vitcli sweep --report` reads."""
    text = (SWEEPS / f"{name}.yaml").read_text()
    sweep = yaml.safe_load(text)
    metrics = {
        metric: {**(value if isinstance(value, dict) else {}), "path": metric}
        for metric, value in sweep["metrics"].items()
    }
    text = re.sub(r"^(metrics|curve):.*\n([ #].*\n)*", "", text, flags=re.MULTILINE)
    (place / "sweep.yaml").write_text(f"name: {name}\nmetrics: {json.dumps(metrics)}\n{text}")
    same = sweep["base"] if "search" in sweep else {}
    for drawn, trial in enumerate(json.loads(results(name).read_text())):
        folder = place / "trials" / trial["id"]
        folder.mkdir(parents=True)
        config = {"command": sweep["command"], "run": "", "argv": [], "cwd": ""}
        (folder / "config.yaml").write_text(
            json.dumps({**config, "params": same | trial["params"]})
        )
        (folder / "result.json").write_text(json.dumps(trial["metrics"]))
        status = {"state": trial["state"], "wall_s": trial["wall_s"], "attempts": 1}
        status |= {"started": float(drawn), "last_value": trial.get("last_value")}
        (folder / "status").write_text(json.dumps(status))


def report_of(name: str) -> dict[str, Any]:
    """`vitcli sweep --report` of the stored results.

    Raises:
        SystemExit: the sweep's file asks for other trials than were stored.
    """
    with tempfile.TemporaryDirectory() as place:
        unpack(name, Path(place))
        report: dict[str, Any] = json.loads(vitcli("sweep", "--report", place, "--json"))
    if set(report["states"]) != {"done"} and not report["objective"]:
        sys.exit(f"{name}: {name}.yaml is not what was run ({report['states']})")
    return report


def draw(name: str) -> None:
    figure = HERE / "figures" / f"{name}.png"
    figure.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        unpack(name, Path(place))
        vitcli("sweep", "--report", place, "--plot", str(figure), *FIGURES.get(name, ()))


# -- a block of the README -----------------------------------------------------------------------


def section(name: str, old: str) -> str:
    """The block of a sweep from what was stored of it; without that, the old one."""
    if not results(name).exists():
        return old
    report = report_of(name)
    states = ", ".join(f"{count} {state}" for state, count in sorted(report["states"].items()))
    lines = [f"`vitcli sweep {name}`: {states}", ""]
    if name in TUNED:
        lines += tuned(report, TUNED[name])
    else:
        lines += [*table(report), ""]
        rows = [row(c) for c in report["comparisons"] if is_wanted(c, COMPARED.get(name, ()))]
        lines += [PAIRED, "", *markdown([HEAD, *rows]), ""] if rows else []
    if (HERE / "figures" / f"{name}.png").exists():
        lines += [f"![{report['question']}](figures/{name}.png)", ""]
    return "\n".join(lines)


def short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def is_wanted(comparison: Mapping[str, Any], axes: Iterable[str]) -> bool:
    keys = {short(key) for key in comparison["a"]}
    return bool(keys & set(axes)) and comparison["metric"] not in UNCOMPARED


def row(c: Mapping[str, Any]) -> list[str]:
    where = [c["metric"], words(c["at"]), words(c["a"], False), words(c["b"], False)]
    p = "" if c["p_holm"] is None else probability(c["p_holm"])
    return [*where, *interval(c["difference"], c["low"], c["high"]), p, str(c["n"])]


def words(level: Mapping[str, Any], keys: bool = True) -> str:
    pairs = ((f"{short(key)} " if keys else "", value) for key, value in level.items())
    return ", ".join(key + number(value) for key, value in pairs if value != "")


def table(report: Mapping[str, Any]) -> list[str]:
    """The groups as a Markdown table: mean ± sample standard deviation, and how many trials.

    What a search drew is no group: a row for each trial, and how it ended.
    """
    keys, metrics, search = report["grouped_by"], report["metrics"], report["objective"]
    rows = [[*map(short, keys), *metrics, "state" if search else "n"]]
    for trial in report["trials"] if search else ():
        values = [trial["params"][key] for key in keys]
        values += [trial["metrics"].get(name, "") for name in metrics]
        rows.append([*map(number, values), trial["state"]])
    for group in () if search else report["groups"]:
        cells = [number(value) for value in group["params"].values()]
        cells += [cell(group, name) for name in metrics]
        rows.append([*cells, str(len(group["trials"]))])
    return markdown(rows)


# -- arms at their own best rate -----------------------------------------------------------------

CONTROL_RATE = 1e-8
"""A lower one changes nothing."""


def tuned(report: Mapping[str, Any], wanted: Callable[[Arm, Arm], bool]) -> list[str]:
    """Arms by rates, each arm at its own best rate, and the wanted differences of arms."""
    arms = arms_of(report)
    learned = learned_of(report)
    rates = sorted({rate for values in arms.values() for rate in values if rate > CONTROL_RATE})
    keys = [short(key) for key, _ in next(iter(arms))]
    best_of = len(rates) > 1
    rows = [[*keys, *(f"{rate:g}" for rate in rates),
             *(("at its own best rate", "best rate") if best_of else ()), "n"]]  # fmt: skip
    at_best = {}
    for arm, values in arms.items():
        at_best[arm], chosen = at_best_rate(values)
        counts = Counter(chosen.values()).most_common()
        best = ", ".join(f"{rate:g}" + (f" ({n} of {len(chosen)})" if len(counts) > 1 else "")
                         for rate, n in counts)  # fmt: skip
        cells = [mean_and_spread(values[rate]) + learned.get((arm, rate), "")
                 if rate in values else "" for rate in rates]  # fmt: skip
        if best_of:
            cells += [mean_and_spread({b: [v] for b, v in at_best[arm].items()}),
                      "" if counts[0][0] < CONTROL_RATE else best]  # fmt: skip
        rows.append([*(number(value) for _, value in arm), *cells, str(len(chosen))])
    pairs = [(a, b) for a, b in itertools.combinations(arms, 2) if wanted(a, b) or wanted(b, a)]
    found = [paired(at_best[a], at_best[b]) for a, b in pairs]
    adjusted = holm([p for *_, p in found])
    differences = [["a", "b", "a - b", "95% interval", "p", "n"]]
    for (a, b), (difference, low, high, _), p in zip(pairs, found, adjusted, strict=True):
        differences.append([words(dict(a), False), words(dict(b), False),
                            *interval(difference, low, high), probability(p),
                            str(len(at_best[a].keys() & at_best[b].keys()))])  # fmt: skip
    where = " at the arms' own best rates" if best_of else ""
    block = "base" if any("weights" in trial["params"] for trial in report["trials"]) else "seed"
    return [
        "Accuracy by arm and rate, mean ± sample standard deviation over all trials"
        + (", and how many learned" if learned else "")
        + (
            f". The best rate of an arm is chosen, for each {block}, on the other {block}s:"
            if best_of
            else ":"
        ),
        "",
        *markdown(rows),
        "",
        f"Differences{where}, paired by {block}, with "
        "Student's 95% interval and Holm's p over this table:",
        "",
        *markdown(differences),
        "",
    ]


def arm_of(report: Mapping[str, Any], trial: Mapping[str, Any]) -> Arm:
    keys = [key for key in report["axes"] if short(key) not in {"lr", "lora_alpha", "weights"}]
    if trial["params"]["lr"] < CONTROL_RATE:
        return tuple((key, "" if at else "control") for at, key in enumerate(keys))
    return tuple((key, trial["params"].get(key)) for key in keys)


def arms_of(report: Mapping[str, Any]) -> dict[Arm, Values]:
    found: dict[Arm, Values] = {}
    for trial in report["trials"]:
        params = trial["params"]
        block = params.get("weights", params[report["seeds"]])
        rates = found.setdefault(arm_of(report, trial), {})
        values = rates.setdefault(params["lr"], {}).setdefault(block, [])
        values.append(trial["metrics"]["accuracy"])
    return found


def learned_of(report: Mapping[str, Any]) -> dict[tuple[Arm, float], str]:
    """How many trials of an arm at a rate learned, where the sweep asked for the verdict."""
    found: dict[tuple[Arm, float], list[bool]] = {}
    for trial in report["trials"]:
        if "verdict" in trial["metrics"]:
            place = (arm_of(report, trial), trial["params"]["lr"])
            found.setdefault(place, []).append(trial["metrics"]["verdict"] == "learned")
    return {place: f", {sum(each)} of {len(each)}" for place, each in found.items()}


def at_best_rate(values: Values) -> tuple[dict[Any, float], dict[Any, float]]:
    """Per block its mean at the rate that is best on the other blocks, and that rate."""
    means = {rate: {block: statistics.fmean(v) for block, v in blocks.items()}
             for rate, blocks in values.items()}  # fmt: skip
    chosen: dict[Any, float] = {}
    for block in next(iter(means.values())):
        others = {rate: statistics.fmean([v for key, v in blocks.items() if key != block])
                  for rate, blocks in means.items()}  # fmt: skip
        chosen[block] = max(others, key=lambda rate: others[rate])
    return {block: means[rate][block] for block, rate in chosen.items()}, chosen


def paired(one: Mapping[Any, float], two: Mapping[Any, float]) -> tuple[float, float, float, float]:
    """Mean of one - two over what both have, its 95% interval, Student's p."""
    shared = sorted(one.keys() & two.keys())
    test = stats.ttest_rel([one[key] for key in shared], [two[key] for key in shared])
    interval = test.confidence_interval(0.95)
    difference = statistics.fmean([one[key] - two[key] for key in shared])
    return difference, float(interval.low), float(interval.high), float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    raised = itertools.accumulate(
        (min(1.0, (len(order) - rank) * p_values[i]) for rank, i in enumerate(order)), max
    )
    return [p for _, p in sorted(zip(order, raised, strict=True))]


# -- numbers in words ----------------------------------------------------------------------------


def mean_and_spread(blocks: Mapping[Any, Sequence[float]]) -> str:
    values = [value for block in blocks.values() for value in block]
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def interval(difference: float, low: float, high: float) -> list[str]:
    return [f"{difference:+.3f}", f"[{low:+.3f}, {high:+.3f}]"]


def probability(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def markdown(rows: list[list[str]]) -> list[str]:
    """A head and rows as a Markdown table."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(row) + " |" for row in lines]


def number(value: Any) -> str:
    """One value; no more than four digits of what a search drew."""
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def cell(group: Mapping[str, Any], name: str) -> str:
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
    """What the command prints; its messages go to this process's stderr."""
    program = shlex.split(os.environ.get("VITCLI", "vitcli"))
    return subprocess.run(
        [*program, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
