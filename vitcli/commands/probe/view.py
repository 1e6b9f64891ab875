"""`vitcli probe` as tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from vitcli.commands.probe.result import (
    AgreementResult,
    ClassScore,
    Confusion,
    ProbeResult,
    ProbeScore,
    Ranked,
    RankingResult,
)
from vitcli.errors import VitcliError
from vitcli.results import csv_text
from vitcli.ui.console import duration, short, table
from vitcli.ui.figures import (
    CHANCE,
    abreast,
    caption,
    chance_line,
    count_along_x,
    ended,
    new_figure,
    series,
    side_by_side,
    styled,
)

WORST = 5
"""Classes and pairs of classes that are shown."""


def tables(result: ProbeResult) -> Iterator[Any]:
    """Scores of one encoder, its worst classes, and the verdict."""
    yield (
        f"[bold]{escape(result.model)}[/], weights: {escape(result.weights)}, vectors of "
        f"{result.width}, on {result.images:,} images{_of_classes(result.classes)}"
    )
    if result.regression:
        rows = table(None, "", ">R²", ">95% interval", ">mean absolute error")
        score = result.regression
        interval = f"{score.low:.3f} to {score.high:.3f}"
        error = f"{score.mean_absolute_error:.4g}"
        rows.add_row(score.method, f"{score.r2:.3f}", interval, error)
    else:
        rows = table(None, "", ">accuracy", ">95% interval", ">correct / tested")
        for one in result.scores:
            rows.add_row(
                one.method + ("" if one.converged else " (not converged)"),
                f"{one.accuracy:.1%}",
                f"{one.low:.1%} to {one.high:.1%}",
                f"{one.correct:,} / {one.tested:,}",
            )
        always = f"always {escape(result.largest_class)}"
        rows.add_row(always, f"{result.largest_share:.1%}", "", "")
    yield rows
    yield from _by_class(result.per_class, result.confusions)
    yield _protocol(result)
    yield escape(result.verdict)


def _of_names(title: str | None, *columns: str) -> Any:
    """A table whose first column holds names, which are folded where they are too long."""
    rows = table(title, *columns)
    rows.columns[0].overflow = "fold"
    return rows


def _of_classes(classes: Sequence[str]) -> str:
    return f" of {len(classes):,} classes" if classes else ""


def _protocol(result: ProbeResult | RankingResult) -> str:
    grouped = result.groups if result.groups < result.images else 0
    counts = {
        "images with identical vectors, kept on one side of every split": result.duplicates,
        "groups kept on one side of every split": grouped,
        "test images left out because they are also training images": result.left_out,
        "images without a vector": result.failed,
        "images that cannot be tested": result.unlabelled,
    }
    facts = [f"{what}: {count:,}" for what, count in counts.items() if count]
    return "; ".join([result.protocol, *facts])


def _by_class(scores: Sequence[ClassScore], pairs: Sequence[Confusion]) -> Iterator[Any]:
    """The classes with the lowest accuracy, and the class predicted most often for each."""
    if len(scores) < 3 or not pairs:
        return
    title = "lowest accuracy by class (linear probe)"
    worst = _of_names(title, "class", ">accuracy", ">95% interval", ">tested")
    worst.add_column("most often predicted", overflow="fold")
    for score in scores[:WORST]:
        taken = next((pair for pair in pairs if pair.is_class == score.name), None)
        worst.add_row(
            escape(score.name),
            f"{score.accuracy:.1%}",
            f"{score.low:.1%} to {score.high:.1%}",
            f"{score.tested:,}",
            f"{escape(taken.said_class)} ({taken.count:,})" if taken else "",
        )
    yield worst


def ranking_tables(result: RankingResult) -> Iterator[Any]:
    """Encoders or layers, best first; what they cost; the verdict."""
    yield f"[bold]{result.images:,} images[/]{_of_classes(result.classes)}"
    yield _accuracies(result)
    if len(result.ranked) > 1:
        yield "below best: difference on the same images; p: paired test, adjusted (Holm)"
    if any(one.cost for one in result.ranked):
        yield _costs(result.ranked)
        yield result.timing
    yield from _by_class(result.per_class, result.confusions)
    yield _protocol(result)
    yield escape(result.verdict)


def _accuracies(result: RankingResult) -> Any:
    numbers = result.ranked[0].regression is not None
    first = "layer" if result.ranked[0].layer is not None else "encoder"
    scores = [">R²", ">95%"] if numbers else [">linear", ">95%", ">k-NN", ">95%"]
    rows = _of_names(None, first, *scores, ">below best", ">p")
    for one in result.ranked:
        cells: list[str] = []
        if one.regression:
            score = one.regression
            cells += [f"{score.r2:.3f}", f"{score.low:.3f}-{score.high:.3f}"]
        for of in reversed(one.scores):
            cells += [f"{of.accuracy:.1%}", f"{100 * of.low:.1f}-{100 * of.high:.1f}"]
        gap = one.difference
        if gap is None:
            cells += ["", ""]
        else:
            below = f"{gap.accuracy:.3f}" if numbers else f"{100 * gap.accuracy:.1f}"
            cells += [below, f"{gap.p_holm:.2g}"]
        rows.add_row(escape(one.name), *cells)
    return rows


def _costs(ranked: Sequence[Ranked]) -> Any:
    numbers = (">vector", ">param.", ">MACs", ">images/s", ">100k images", ">memory")
    rows = _of_names(None, "encoder", *numbers)
    for one in ranked:
        if one.cost is None:
            continue
        cost = one.cost
        rows.add_row(
            escape(one.name),
            str(one.width),
            short(cost.parameters),
            short(cost.macs_per_image or 0, "KMGT"),
            f"{cost.images_per_s:.3g}",
            duration(cost.embed_100k_s),
            f"{cost.memory_bytes / 2**20:,.0f} MiB",
        )
    return rows


def agreement_tables(result: AgreementResult) -> Iterator[Any]:
    """Encoders by agreement, and each pair of them."""
    yield (
        f"[bold]{result.images:,} images without labels[/]: agreement about the "
        f"{result.k} nearest neighbors of each; this is not accuracy"
    )
    numbers = (">vector", ">common neighbors", ">95% interval", ">mean CKA")
    rows = _of_names(None, "encoder", *numbers)
    for one in result.ranked:
        rows.add_row(
            escape(one.name),
            str(one.width),
            f"{one.neighbors:.1%}",
            f"{one.low:.1%} to {one.high:.1%}",
            f"{one.cka:.3f}",
        )
    yield rows
    yield escape(result.verdict)


def _score(one: Ranked) -> tuple[float, float, float]:
    """Value and interval that a ranking is by."""
    if one.regression:
        return one.regression.r2, one.regression.low, one.regression.high
    score: ProbeScore = one.scores[-1]
    return score.accuracy, score.low, score.high


@styled
def ranking_figure(result: RankingResult) -> Any:
    """Accuracy against images per second with the Pareto front, or against layers."""
    drawing = new_figure(4.2)
    axes = drawing.subplots()
    numbers = result.ranked[0].regression is not None
    timed = all(one.cost for one in result.ranked)
    layers = all(one.layer is not None for one in result.ranked)
    points = []
    lines: dict[str, list[tuple[float, float]]] = {}  # of each encoder over its layers
    for place, one in enumerate(result.ranked):
        value, low, high = _score(one)
        x: float = one.layer if layers and one.layer is not None else place
        if timed and one.cost:
            x = one.cost.images_per_s
        points.append((x, value))
        encoder = one.name.rpartition("layer ")[0].strip() if layers else one.name
        of_encoder = lines.setdefault(encoder, [])
        label = None if of_encoder or not encoder else ended(encoder)
        of_encoder.append((x, value))
        bar = [[max(value - low, 0)], [max(high - value, 0)]]
        how = series(list(lines).index(encoder)) | {"linestyle": "none"}
        axes.errorbar([x], [value], bar, capsize=2, label=label, **how)
    if timed:
        front = pareto(points)
        axes.plot(*zip(*front, strict=True), color="0.5", lw=0.8, zorder=1, label="Pareto front")
        axes.set_xscale("log")
        speeds = sorted(x for x, _ in points)
        axes.set_xlim(speeds[0] / 1.4, speeds[-1] * 1.4)
        if speeds[-1] / speeds[0] < 3:
            beside = 1.3 if speeds[-1] / speeds[0] < 1.3 else 1.0  # room between two numbers
            ends = speeds[0] / beside, speeds[-1] * beside
            axes.set_xticks(ends, [f"{x:.3g}" for x in ends])
            axes.set_xticks([], minor=True)
        axes.set_xlabel("images per second (encoder alone, log scale)")
    elif layers:
        for place, line in enumerate(lines.values()):
            axes.plot(*zip(*sorted(line), strict=True), **series(place, marker=False))
        axes.set_xlabel("layer (0: input of the first block)")
        count_along_x(axes)
    else:
        axes.set_xticks([])
    if not numbers:
        chance_line(axes, result.largest_share)
    axes.set_ylabel("R² of ridge regression" if numbers else "accuracy of the linear probe")
    axes.grid()
    drawing.legend(loc="outside upper center", ncols=abreast(2))
    caption(drawing, f"bars: 95% intervals; {result.images:,} images, {result.protocol}")
    return drawing


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, by the first."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (-p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


@styled
def figure(result: ProbeResult) -> Any:
    """Accuracy of each class by the linear probe, lowest first, at most 30 of them."""
    scores = result.per_class[:30]
    if not scores:
        raise VitcliError(
            "--plot: one encoder with --targets does not have a figure", "leave out --plot"
        )
    drawing = new_figure(1.4 + 0.18 * len(scores))
    axes = drawing.subplots()
    places = range(len(scores))
    values = [score.accuracy for score in scores]
    bars = [
        [max(score.accuracy - score.low, 0) for score in scores],
        [max(score.high - score.accuracy, 0) for score in scores],
    ]
    axes.errorbar(values, places, xerr=bars, capsize=2, **series(0) | {"linestyle": "none"})
    axes.set_yticks(places, [ended(score.name) for score in scores])
    axes.set_ylim(len(scores) - 0.5, -0.5)
    axes.axvline(result.largest_share, **CHANCE)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("accuracy of the linear probe")
    axes.set_title(f"{ended(result.model)}, weights: {ended(result.weights)}")
    axes.grid(axis="x")
    caption(
        drawing,
        f"bars: 95% intervals (Wilson); {result.images:,} images; dashed: always the largest class",
    )
    return drawing


@styled
def agreement_figure(result: AgreementResult) -> Any:
    """Common neighbors and CKA of each pair."""
    names = [ended(one.name, 24) for one in result.ranked]
    drawing = new_figure(3.6, panels=2)
    titles = (f"common among {result.k} nearest", "linear CKA")
    for axes, values, title in zip(
        side_by_side(drawing, 2), (result.neighbors, result.cka), titles, strict=True
    ):
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis")
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.set_title(title)
        drawing.colorbar(image, ax=axes, shrink=0.7)
    return drawing


@styled
def confusion_figure(result: ProbeResult | RankingResult) -> Any:
    """The confusion matrix of the linear probe, each row in shares of its class."""
    import numpy as np

    counts = np.array(result.confusion_matrix, dtype=float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(6.75, 2.5 + 0.2 * len(counts))
    drawing = new_figure(side - 0.4, side)
    axes = drawing.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis")
    if len(counts) <= 30:
        names = [ended(name, 24) for name in result.classes]
        axes.set_xticks(range(len(counts)), names, rotation=90)
        axes.set_yticks(range(len(counts)), names)
    axes.set_xlabel("said")
    axes.set_ylabel("is")
    drawing.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
    return drawing


def confusion_csv(result: ProbeResult | RankingResult) -> str:
    """The same as CSV: a line for each class as it is, a column for each as it is said."""
    rows = zip(result.classes, result.confusion_matrix, strict=True)
    return csv_text(
        [{"is \\ said": name, **dict(zip(result.classes, row, strict=True))} for name, row in rows]
    )
