"""Do registers change the attention of the shapes encoder, and what does a trained encoder do?

    python experiments/registers.py --out runs/registers

For every seed it trains the shapes encoder with 0 and with 4 registers by `vitcli train-shapes`,
asks `vitcli attn-entropy` about each run on the same unseen images, and writes the table and the
figure into README.md beside this file (block `registers`). What is there already is not trained
again. Where the trained DINOv2-S/14 without registers is present (--trained), its outliers are told
too. Options that this script does not know go to `vitcli train-shapes`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

import vitcli as api

REGISTERS = (0, 4)
UNSEEN = 10_000_000
"""Images from this index on are neither in the training nor in the validation set."""


RECIPE = (
    *("--lr", "1e-3", "--set", "encoder.depth=12"),
    *("--set", "data.train_size=16384", "--set", "data.val_size=2048"),
    *("--set", "train.clip_grad=null"),
)
"""Twelve blocks, so that there are layers to compare."""


def vitcli(*arguments: str | Path) -> dict[str, Any]:
    """What a vitcli command prints with --json."""
    command = [sys.executable, "-m", "vitcli", *map(str, arguments), "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def train(folder: Path, registers: int, seed: int, extra: list[str]) -> dict[str, Any]:
    """The result of one training run, from its folder if it has finished there before."""
    answer = folder / "result.json"
    if not answer.exists():
        resume = ["--resume"] if (folder / "config.yaml").exists() else []
        options = ["--registers", str(registers), "--seed", str(seed), "--out", str(folder)]
        found = vitcli("train-shapes", *RECIPE, *options, *resume, *extra)
        part = folder / "result.json.part"
        part.write_text(json.dumps(found["result"], indent=2))
        part.replace(answer)
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def unseen_images(folder: Path, count: int) -> list[Path]:
    """Shapes as files, the same for every encoder."""
    images, _ = api.shapes(count, first=UNSEEN)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:04}.png" for index in range(count)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    return paths


def measures(run: dict[str, Any], model: dict[str, Any]) -> dict[str, float]:
    """The numbers of the table for one run."""
    last = model["layers"][-1]
    ratio = max(layer["patch_norm_max"] / layer["patch_norm_median"] for layer in model["layers"])
    return {
        "validation accuracy": run["val_accuracy"],
        "last-layer entropy / log N": last["entropy_normalised"],
        "last-layer entropy of CLS, nats": last["entropy_cls"],
        "last-layer attention distance, px": last["attention_distance_px"],
        "CLS attention on registers, last layer": last["cls_mass"]["registers"],
        "outlier share, last layer": last["outlier_share"],
        "outlier share, worst layer": max(layer["outlier_share"] for layer in model["layers"]),
        "largest patch norm / median, worst layer": ratio,
    }


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def table(rows: dict[int, list[dict[str, float]]]) -> str:
    """Mean ± standard deviation over seeds, and the difference paired by seed."""
    none, some = (rows[count] for count in REGISTERS)
    lines = [
        f"| {len(none)} seeds | {REGISTERS[0]} registers | {REGISTERS[1]} registers "
        "| difference, paired |",
        "|---|---|---|---|",
    ]
    for name in none[0]:
        a, b = [row[name] for row in none], [row[name] for row in some]
        gaps = [y - x for x, y in zip(a, b, strict=True)]
        lines.append(f"| {name} | {spread(a)} | {spread(b)} | {spread(gaps)} |")
    return "\n".join(lines) + "\n"


def figure(models: dict[int, list[dict[str, Any]]], rows: dict[int, list[dict[str, float]]]) -> Any:
    drawing = Figure(figsize=(12, 3.8), layout="constrained")
    entropy, norms, accuracy = drawing.subplots(1, 3)
    for place, count in enumerate(REGISTERS):
        color = f"C{place}"
        layers = [model["layers"] for model in models[count]]
        x = [layer["layer"] for layer in layers[0]]
        curves = {
            entropy: [[layer["entropy_normalised"] for layer in run] for run in layers],
            norms: [[r["patch_norm_max"] / r["patch_norm_median"] for r in run] for run in layers],
        }
        for axes, values in curves.items():
            array = np.array(values)
            mean, deviation = array.mean(0), array.std(0, ddof=1) if len(array) > 1 else 0.0
            axes.plot(x, mean, marker="o", ms=3, color=color, label=f"{count} registers")
            axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
        points = [row["validation accuracy"] for row in rows[count]]
        accuracy.plot([place] * len(points), points, "o", color=color)
    entropy.set_title("entropy / log N by block, ± sd over seeds", fontsize=10)
    norms.set_title("largest patch norm / median by block", fontsize=10)
    norms.axhline(3, color="gray", linestyle="--", lw=1, label="outlier cut")
    accuracy.set_title("validation accuracy, a point a seed", fontsize=10)
    accuracy.set_xticks(range(len(REGISTERS)), [f"{count} registers" for count in REGISTERS])
    accuracy.set_xlim(-0.5, len(REGISTERS) - 0.5)
    for axes in (entropy, norms):
        axes.set_xlabel("block")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    accuracy.grid(alpha=0.3)
    return drawing


def trained_encoder(weights: Path, images: list[str], size: int) -> str:
    """The norms of a trained encoder's patch tokens by block, as a table."""
    answer = vitcli("attn-entropy", *images, "--weights", weights, "--image-size", str(size))
    model = answer["models"][0]
    lines = [
        f"{model['name']}, {model['registers']} registers, {model['tokens']} tokens, "
        f"{len(model['images'])} photographs at {size} px. Outliers: {answer['outlier_rule']}.\n",
        "| block | entropy / log N | median norm | largest norm | largest / median | outliers |",
        "|---|---|---|---|---|---|",
    ]
    for layer in model["layers"]:
        median, largest = layer["patch_norm_median"], layer["patch_norm_max"]
        lines.append(
            f"| {layer['layer']} | {layer['entropy_normalised']:.3f} | {median:.2f} | "
            f"{largest:.2f} | {largest / median:.2f} | {layer['outlier_share']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def photographs() -> list[str]:
    """The two photographs that scikit-learn ships."""
    from importlib.resources import files

    folder = files("sklearn.datasets") / "images"
    return [str(folder / name) for name in ("china.jpg", "flower.jpg")]


def write_block(readme: Path, text: str) -> None:
    """Put `text` between the marks of the block `registers`."""
    begin, end = "<!-- begin registers -->\n", "<!-- end registers -->"
    before, _, rest = readme.read_text().partition(begin)
    if not rest:
        raise SystemExit(f"{readme}: there is no {begin.strip()}")
    after = rest.partition(end)[2]
    part = readme.with_suffix(".part")
    part.write_text(f"{before}{begin}{text}{end}{after}")
    part.replace(readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/registers"))
    parser.add_argument("--readme", type=Path, default=Path(__file__).parent / "README.md")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--images", type=int, default=256, help="unseen shapes to attend to")
    parser.add_argument("--trained", type=Path, default=Path("../shared/dinov2-small"))
    parser.add_argument("--trained-size", type=int, default=518)
    parser.add_argument("--photo", action="append", help="photographs for the trained encoder")
    options, extra = parser.parse_known_args()  # the rest goes to train-shapes

    images = unseen_images(options.out / "images", options.images)
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in REGISTERS}
    models: dict[int, list[dict[str, Any]]] = {count: [] for count in REGISTERS}
    for seed in range(options.seeds):
        for count in REGISTERS:
            folder = options.out / f"registers-{count}-seed-{seed}"
            run = train(folder, count, seed, extra)
            answer = vitcli("attn-entropy", *images, "--weights", folder)
            models[count].append(answer["models"][0])
            rows[count].append(measures(run, answer["models"][0]))
            print(f"{folder.name}: accuracy {run['val_accuracy']:.4f}", file=sys.stderr)

    text = table(rows)
    if options.trained.is_dir():
        photos = options.photo or photographs()
        text += "\n" + trained_encoder(options.trained, photos, options.trained_size)
    else:
        print(f"{options.trained} is absent: its outliers are not told", file=sys.stderr)
    drawing = options.readme.parent / "figures" / "registers.png"
    drawing.parent.mkdir(exist_ok=True)
    figure(models, rows).savefig(drawing, dpi=90)
    text += "\n![entropy, norms and accuracy with and without registers](figures/registers.png)\n"
    extra_words = f" {' '.join(extra)}" if extra else ""
    text = f"`registers.py --seeds {options.seeds}{extra_words}`:\n\n{text}"
    write_block(options.readme, text)
    print(text)


if __name__ == "__main__":
    main()
