"""Memory, time and operations of the ways to attend, against the number of tokens.

    python experiments/attention.py [--measure]

Without --measure the table and the figure are made from experiments/results/attention-tokens.json.
Each way is timed in the same encoder (2 blocks, 64 hidden, 2 heads, patches of 8 px, one image),
way after way at each size, so that a change of the machine's speed falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

import vitcli

HERE = Path(__file__).resolve().parent
KEPT = HERE / "results" / "attention-tokens.json"
TINY = {"patch_size": 8, "hidden": 64, "depth": 2, "heads": 2, "mlp_hidden": 128}
SIDES = (64, 128, 256, 512)
WAYS: dict[str, dict[str, Any]] = {
    "all tokens, explicit": {},
    "all tokens, fused": {},
    "relative positions": {"position": "relative2d"},
    "shifted windows": {"attention.mask": "window", "attention.window": 8, "attention.shift": 4},
    "64 nearest patches": {"attention.mask": "neighborhood", "attention.neighbors": 64},
    "channels": {"attention.over": "channels"},
}


def measure(side: int) -> list[dict[str, Any]]:
    """A row per way; a median of seven steps, taken in turn."""
    models, rows = {}, []
    for way, given in WAYS.items():
        settings = {f"encoder.{key}": value for key, value in (TINY | given).items()}
        settings |= {"encoder.image_size": side}
        if way.endswith("explicit"):
            settings["encoder.attention.attend"] = "explicit"
        models[way] = vitcli.load(set=settings, device="cpu", engine="eager")
    pixels = torch.rand(1, 3, side, side)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(7):
        for way, model in models.items():
            start = time.perf_counter()
            model.runner(pixels)
            seconds[way].append(time.perf_counter() - start)
    for way, model in models.items():
        (costs,) = vitcli.params(model).models
        products = next(c.macs for c in costs.components if c.name == "attention products")
        how = {"attention": "explicit"} if way.endswith("explicit") else {}
        (run,) = vitcli.profile(model, batches=[1], engines=["eager"], runs=2, **how).runs
        row = {"way": way, "tokens": costs.tokens, "products": products}
        rows.append(
            row | {"seconds": statistics.median(seconds[way]), "peak_bytes": run.peak_bytes}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ["way", "tokens", "MACs of the products", "ms a step", "MiB"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        memory = row["peak_bytes"]
        lines.append(
            [
                row["way"],
                f"{row['tokens']:,}",
                f"{row['products']:,}",
                f"{1e3 * row['seconds']:.3g}",
                "" if memory is None else f"{memory / 2**20:.3g}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(rows: list[dict[str, Any]]) -> None:
    panels = (
        ("products", 1e6, "million MACs"),
        ("seconds", 1e-3, "ms"),
        ("peak_bytes", 2**20, "MiB"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    for place, (field, unit, label) in zip(axes, panels, strict=True):
        for way in WAYS:
            points = [(r["tokens"], r[field] / unit) for r in rows if r["way"] == way and r[field]]
            if points:
                place.plot(*zip(*points, strict=True), marker="o", label=way)
        place.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        place.set_title(
            {"products": "attention products", "seconds": "time of a step"}.get(
                field, "memory of a step"
            )
        )
        place.grid(alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(HERE / "figures" / "attention.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        rows = [row for side in SIDES for row in measure(side)]
        KEPT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    rows = json.loads(KEPT.read_text())
    draw(rows)
    readme = HERE / "README.md"
    picture = "![Attention is quadratic](figures/attention.png)"
    block = f"<!-- begin attention -->\n{table(rows)}\n\n{picture}\n<!-- end attention -->"
    text = re.sub(
        r"<!-- begin attention -->.*<!-- end attention -->",
        lambda _: block,
        readme.read_text(),
        flags=re.DOTALL,
    )
    readme.write_text(text)


if __name__ == "__main__":
    main()
