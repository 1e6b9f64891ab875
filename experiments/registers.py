"""Do registers change the attention of the shapes encoder, and what does a trained encoder do?

    python experiments/registers.py --out runs/registers

For every seed it trains the shapes encoder with 0 and with 4 registers by `vitcli train-shapes`,
asks `vitcli attn-entropy` about each run on the same unseen images, and stores what was measured in
results/registers.json. Where the trained DINOv2-S/14 without registers is present (--trained), its
layers are measured too. The table and the figure in README.md beside this file (block `registers`)
are made of the stored results; `--report` makes them anew and measures nothing. What is there
already is not trained again. Options that this script does not know go to `vitcli train-shapes`.
Needs scipy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

import vitcli as api

REGISTERS = (0, 4)
COLORS = ("#0072B2", "#D55E00")
"""Blue and vermilion of Okabe and Ito, which color-blind readers can distinguish."""
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


LAYER = (
    *("layer", "entropy_normalised", "entropy_cls", "attention_distance_px", "outlier_share"),
    *("patch_norm_median", "patch_norm_max", "cls_mass"),
)
"""What is stored of a layer."""


def measured(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: layer[key] for key in LAYER} for layer in model["layers"]]


def trained_encoder(weights: Path, images: list[str], size: int) -> dict[str, Any]:
    """The layers of a trained encoder."""
    answer = vitcli("attn-entropy", *images, "--weights", weights, "--image-size", str(size))
    model = answer["models"][0]
    found = {key: model[key] for key in ("name", "registers", "tokens")}
    return {
        **found, "images": len(model["images"]), "size": size, "rule": answer["outlier_rule"],
        "layers": measured(model),
    }  # fmt: skip


def photographs() -> list[str]:
    """The two photographs that scikit-learn ships."""
    from importlib.resources import files

    folder = files("sklearn.datasets") / "images"
    return [str(folder / name) for name in ("china.jpg", "flower.jpg")]


# -- from the stored results ---------------------------------------------------------------------


def ratio(layer: dict[str, Any]) -> float:
    """Largest norm of a patch token over the median."""
    return float(layer["patch_norm_max"] / layer["patch_norm_median"])


def measures(run: dict[str, Any]) -> dict[str, float]:
    """The numbers of the table for one run."""
    layers = run["layers"]
    last = layers[-1]
    return {
        "validation accuracy": run["val_accuracy"],
        "last-layer entropy / log N": last["entropy_normalised"],
        "last-layer entropy of CLS, nats": last["entropy_cls"],
        "last-layer attention distance, px": last["attention_distance_px"],
        "CLS attention on registers, last layer": last["cls_mass"]["registers"],
        "outlier share, worst layer": max(layer["outlier_share"] for layer in layers),
        "largest patch norm / median, worst layer": max(map(ratio, layers)),
    }


def runs_of(stored: dict[str, Any], registers: int) -> list[dict[str, Any]]:
    return [run for run in stored["runs"] if run["registers"] == registers]


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1):.3f}" if values[1:] else "")


def paired(gaps: list[float]) -> str:
    """Mean and Student's 95% interval, as `a - b [low, high]`."""
    if len(gaps) < 2 or not np.ptp(gaps):
        return f"{np.mean(gaps):+.3f}"
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    return f"{np.mean(gaps):+.3f} [{low:+.3f}, {high:+.3f}]"


def table(stored: dict[str, Any]) -> str:
    """Mean ± standard deviation over seeds, and the difference paired by seed."""
    none, some = (list(map(measures, runs_of(stored, count))) for count in REGISTERS)
    lines = [
        f"| {len(none)} seeds | {REGISTERS[0]} registers | {REGISTERS[1]} registers "
        f"| {REGISTERS[1]} - {REGISTERS[0]}, paired, 95% interval |",
        "| --- | --- | --- | --- |",
    ]
    for name in none[0]:
        a, b = [row[name] for row in none], [row[name] for row in some]
        gaps = [y - x for x, y in zip(a, b, strict=True)]
        lines.append(f"| {name} | {spread(a)} | {spread(b)} | {paired(gaps)} |")
    return "\n".join(lines) + "\n"


def trained_table(model: dict[str, Any]) -> str:
    """The norms of a trained encoder's patch tokens by block."""
    lines = [
        f"{model['name']}, {model['registers']} registers, {model['tokens']} tokens, "
        f"{model['images']} photographs at {model['size']} px. Outliers: {model['rule']}.\n",
        "| block | entropy / log N | median norm | largest norm | largest / median | outliers |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for layer in model["layers"]:
        lines.append(
            f"| {layer['layer']} | {layer['entropy_normalised']:.3f} | "
            f"{layer['patch_norm_median']:.2f} | {layer['patch_norm_max']:.2f} | "
            f"{ratio(layer):.2f} | {layer['outlier_share']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def block(stored: dict[str, Any]) -> str:
    """What stands in the README."""
    trained = [trained_table(stored["trained"])] if stored["trained"] else []
    picture = "![entropy, norms and accuracy with and without registers](figures/registers.png)\n"
    return "\n".join([f"`{stored['command']}`:\n", table(stored), *trained, picture])


def figure(stored: dict[str, Any]) -> Figure:
    drawing = Figure(figsize=(12, 3.8), layout="constrained")
    entropy, norms, accuracy = drawing.subplots(1, 3)
    for place, count in enumerate(REGISTERS):
        color = COLORS[place]
        runs = runs_of(stored, count)
        layers = [run["layers"] for run in runs]
        x = [layer["layer"] for layer in layers[0]]
        curves = {
            entropy: [[layer["entropy_normalised"] for layer in run] for run in layers],
            norms: [list(map(ratio, run)) for run in layers],
        }
        for axes, values in curves.items():
            array = np.array(values)
            mean, deviation = array.mean(0), array.std(0, ddof=1) if len(array) > 1 else 0.0
            axes.plot(x, mean, marker="o", ms=3, color=color, label=f"{count} registers")
            axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
        points = [run["val_accuracy"] for run in runs]
        accuracy.plot([place] * len(points), points, "o", color=color)
    entropy.set_title("entropy / log N by block, ± sd over seeds", fontsize=10)
    norms.set_title("largest patch norm / median by block", fontsize=10)
    norms.axhline(3, color="gray", linestyle="--", lw=1, label="outlier cut")
    accuracy.set_title("validation accuracy, one dot per seed", fontsize=10)
    accuracy.set_xticks(range(len(REGISTERS)), [f"{count} registers" for count in REGISTERS])
    accuracy.set_xlim(-0.5, len(REGISTERS) - 0.5)
    for axes in (entropy, norms):
        axes.set_xlabel("block")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    accuracy.grid(alpha=0.3)
    return drawing


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
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--images", type=int, default=256, help="unseen shapes to attend to")
    parser.add_argument("--trained", type=Path, default=Path("../shared/dinov2-small"))
    parser.add_argument("--trained-size", type=int, default=518)
    parser.add_argument("--photo", action="append", help="photographs for the trained encoder")
    parser.add_argument("--report", action="store_true", help="from the stored results alone")
    options, extra = parser.parse_known_args()  # the rest goes to train-shapes

    results = options.readme.parent / "results" / "registers.json"
    if not options.report:
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(measure(options, extra)) + "\n")
    stored = json.loads(results.read_text())
    drawing = options.readme.parent / "figures" / "registers.png"
    drawing.parent.mkdir(exist_ok=True)
    figure(stored).savefig(drawing, dpi=90)
    write_block(options.readme, block(stored))
    print(block(stored))


def measure(options: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    images = unseen_images(options.out / "images", options.images)
    runs = []
    for seed in range(options.seeds):
        for count in REGISTERS:
            folder = options.out / f"registers-{count}-seed-{seed}"
            run = train(folder, count, seed, extra)
            answer = vitcli("attn-entropy", *images, "--weights", folder)
            found = {"registers": count, "seed": seed, "val_accuracy": run["val_accuracy"]}
            runs.append({**found, "layers": measured(answer["models"][0])})
            print(f"{folder.name}: accuracy {run['val_accuracy']:.4f}", file=sys.stderr)
    trained = None
    if options.trained.is_dir():
        photos = options.photo or photographs()
        trained = trained_encoder(options.trained, photos, options.trained_size)
    else:
        print(f"{options.trained} is absent: its layers are not measured", file=sys.stderr)
    command = " ".join(["registers.py --seeds", str(options.seeds), *extra])
    return {"command": command, "runs": runs, "trained": trained}


if __name__ == "__main__":
    main()
