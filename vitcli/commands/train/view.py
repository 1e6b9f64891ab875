"""`vitcli train-shapes` and `vitcli train` as tables and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.markup import escape
from rich.table import Table

from vitcli.commands.train.result import HistoryRow, TrainResult, TrainSummary
from vitcli.ui.console import plural, table
from vitcli.ui.figures import abreast, chance_line, count_along_x, ended, new_figure, series, styled

SHOWN = 10
"""Unreadable images that are listed."""
ROWS = 10
"""Lines of the history table; each is the mean over the steps since the one before."""


def tables(result: TrainResult) -> Iterator[str | Table]:
    """The model and recipe, the history, the classes, the audit, and the verdict in words."""
    summary, config = result.result, result.config
    encoder, train = config["encoder"], config["train"]
    yield (
        f"[bold]{escape(config['name'])}[/]  {summary.parameters:,} parameters, "
        f"{summary.trainable:,} trainable; {encoder['norm_placement']}-norm, "
        f"{plural(encoder['depth'], 'block')}, {encoder['hidden']} hidden, {escape(_start(config))}"
    )
    speed = "" if summary.images_per_s is None else f", {summary.images_per_s:.0f} images/s"
    where = result.device if result.processes == 1 else f"{result.processes} x {result.device}"
    yield (
        f"lr {train['lr']:g}, warm-up {train['warmup']:g}, batch {train['batch']}, "
        f"{plural(train['epochs'], 'epoch')}, seed {train['seed']}; {where}{speed}"
    )
    if result.history:
        yield history_table(result.history)
    if summary.classes:
        yield classes_table(summary)
    if result.audit:
        yield audit_table(result)
    if result.test is not None:
        test = result.test
        yield (
            f"[bold]test[/]: accuracy {test.accuracy:.4f} of {plural(test.images, 'image')}, "
            f"99.9% interval {test.lower_bound:.4f} to {test.upper_bound:.4f}"
        )
    if result.unreadable:
        yield f"{plural(len(result.unreadable), 'image')} could not be read and were left out:"
        for image in result.unreadable[:SHOWN]:
            yield escape(f"  {image.error}")
        if len(result.unreadable) > SHOWN:
            yield f"  and {len(result.unreadable) - SHOWN:,} more (--json lists all)"
    yield verdict_line(summary)


def history_table(history: Sequence[HistoryRow]) -> Table:
    """The run in `ROWS` pieces: means over each, and the validation that ended it, if any."""
    numbers = (">step", ">loss", ">accuracy", ">lr", ">gradient", ">val loss", ">val accuracy")
    grid = table(None, *numbers)
    last = history[-1].step
    ends = sorted({-(-last * i // ROWS) for i in range(1, ROWS + 1)})
    start = 0
    for end in ends:
        piece = [row for row in history if start < row.step <= end]
        start = end
        steps, tests = logged(piece)
        cells = [
            mean([row.loss for row in steps], ".4f"),
            mean([row.accuracy for row in steps], ".4f"),
            mean([row.lr for row in steps[-1:]], ".2e"),
            mean([row.grad_norm for row in steps], ".3f"),
            mean([row.val_loss for row in tests[-1:]], ".4f"),
            mean([row.val_accuracy for row in tests[-1:]], ".4f"),
        ]
        if piece:
            grid.add_row(str(end), *cells)
    return grid


def logged(history: Sequence[HistoryRow]) -> tuple[list[HistoryRow], list[HistoryRow]]:
    """The steps, and the validations."""
    steps = [row for row in history if row.lr is not None]
    return steps, [row for row in history if row.val_loss is not None]


def mean(values: Sequence[float | None], form: str) -> str:
    """The mean as text; nothing for none, nan where one is not finite."""
    if not values:
        return ""
    if any(value is None for value in values):
        return "nan"
    return format(sum(v for v in values if v is not None) / len(values), form)


def classes_table(summary: TrainSummary) -> Table:
    grid = table(None, "class", ">images", ">accuracy")
    for row in summary.classes:
        value = "" if row.accuracy is None else f"{row.accuracy:.4f}"
        grid.add_row(escape(row.name), str(row.images), value)
    return grid


def audit_table(result: TrainResult) -> Table:
    """Every parameter that trains, and what is frozen by block."""
    grid = table("gradient audit", "parameters", ">count", "trains", ">gradient norm")
    for place, group in groupby(result.audit, key=lambda row: part(row.name)):
        rows = list(group)
        for row in rows:
            if row.trainable:
                norm = f"{row.gradient_norm:.3e}"
                grid.add_row(escape(row.name), f"{row.parameters:,}", "yes", norm)
        frozen = [row.parameters for row in rows if not row.trainable]
        if frozen:
            rest = " (rest)" if len(frozen) < len(rows) else ""
            grid.add_row(f"{place}{rest}", f"{sum(frozen):,}", "no", "none")
    return grid


def part(name: str) -> str:
    """The block or part of the encoder that a parameter belongs to."""
    words = name.split(".")
    return ".".join(words[: {"blocks": 3, "norm": 2}.get(words[1], 1)])


def verdict_line(summary: TrainSummary) -> str:
    """What became of it, in words, with the criterion."""
    if summary.verdict == "diverged":
        layer = f"; first bad layer: {summary.bad_layer}" if summary.bad_layer else ""
        return (
            f"[bold red]diverged[/] at step {summary.bad_step}: "
            f"the loss or its gradient is not finite{escape(layer)}"
        )
    color = "green" if summary.verdict == "learned" else "yellow"
    reach = {"learned": "is above", "stalled near chance": "is not above"}
    return (
        f"[bold {color}]{summary.verdict}[/]: validation accuracy {summary.val_accuracy:.4f} of "
        f"{plural(sum(row.images for row in summary.classes), 'image')}, 99.9% interval "
        f"{summary.lower_bound:.4f} to {summary.upper_bound:.4f}, which "
        f"{reach.get(summary.verdict, 'reaches below')} {summary.bar:.4f}, a tenth of the way "
        f"from chance ({summary.chance:.4f}) to one"
    )


def _start(config: dict[str, Any]) -> str:
    """Where the weights came from."""
    source = config["train"]["weights"]
    return f"weights {source}" if source else f"init {config['encoder']['init']}"


@styled
def figure(result: TrainResult) -> Any:
    """Loss, accuracy, gradient norm and learning rate against the step."""
    steps, tests = logged(result.history)
    drawing = new_figure(4.4, panels=2)
    panels = drawing.subplots(4 // abreast(2), abreast(2), sharex=True, squeeze=False)
    loss, accuracy, norm, rate = panels.flat
    for axes, name in ((loss, "loss"), (accuracy, "accuracy")):
        points = [(row.step, getattr(row, name)) for row in steps if getattr(row, name) is not None]
        if points:
            plain = series(0, marker=False)
            axes.plot(*zip(*points, strict=True), label="a training batch", **plain, alpha=0.35)
            if len(points) > 20:
                how = {**plain, "linewidth": 1.6}
                axes.plot(*smoothed(points), label="mean of 20 training batches", **how)
        ends = [row.step for row in tests]
        values = [getattr(row, f"val_{name}") for row in tests]
        axes.plot(ends, values, label="validation", clip_on=False, **series(1))
    loss.set_ylabel("loss (nats)")
    accuracy.set_ylabel("accuracy")
    accuracy.set_ylim(0, 1)
    chance_line(accuracy, result.result.chance)
    norms = [(row.step, row.grad_norm) for row in steps if row.grad_norm]
    if norms:
        norm.plot(*zip(*norms, strict=True), **series(0, marker=False))
        norm.set_yscale("log")
    norm.set_ylabel("L2 norm of the gradient")
    rate.plot([row.step for row in steps], [row.lr for row in steps], **series(0, marker=False))
    rate.set_ylabel("learning rate")
    for axes in (loss, accuracy, norm, rate):
        axes.grid()
    for axes in panels[-1]:
        axes.set_xlabel("step")
        count_along_x(axes)
    lines, labels = accuracy.get_legend_handles_labels()
    drawing.legend(lines, labels, loc="outside lower center", ncols=2 * abreast(2), frameon=False)
    summary, config = result.result, result.config
    ended_at = "" if summary.val_accuracy is None else f" (accuracy {summary.val_accuracy:.3f})"
    drawing.suptitle(
        f"{ended(config['name'])}, {config['encoder']['norm_placement']}-norm, warm-up "
        f"{config['train']['warmup']:g}, {ended(_start(config))}: {summary.verdict}{ended_at}"
    )
    return drawing


def smoothed(points: Sequence[tuple[int, float]], width: int = 20) -> tuple[list[int], list[float]]:
    """Running means over `width` points."""
    ends = range(min(width, len(points)), len(points) + 1)
    pieces = [points[max(0, end - width) : end] for end in ends]
    return [piece[-1][0] for piece in pieces], [
        sum(y for _, y in piece) / len(piece) for piece in pieces
    ]
