"""Several encoders on the same images: paired differences, costs, and agreement without labels."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vitcli.commands.compare.similarity import MinibatchCka, centered_gram
from vitcli.commands.params.analysis import model_costs
from vitcli.commands.probe.evaluate import (
    ROWS_AT_ONCE,
    Answers,
    Splits,
    corrected_variance,
    unit_rows,
)
from vitcli.commands.probe.result import Cost, Difference
from vitcli.commands.profile.machine import peak_memory, timed
from vitcli.errors import VitcliError
from vitcli.measures import CONFIDENCE, mcnemar, student_p, student_quantile
from vitcli.model import Model

ALPHA = 1 - CONFIDENCE
TIMED_ROUNDS = 7
TIMED_BATCH = 8
CKA_IMAGES = 2048
"""CKA is computed on at most so many images: its Gram matrix has their square."""


def paired(best: Answers, other: Answers, splits: Splits, larger_is_better: bool) -> Difference:
    """How much better `best` is on the same images; `p_holm` is still that of one comparison.

    With a given split and right or wrong answers: McNemar's exact test, and the normal interval
    of the paired differences. Otherwise Student's t with the corrected resampled variance of the
    differences by round (Nadeau and Bengio 2003).
    """
    sign = 1.0 if larger_is_better else -1.0
    rounds = tuple(sign * (a - b) for a, b in zip(best.rounds, other.rounds, strict=True))
    first = np.concatenate(rounds[: splits.folds])  # each image once
    mean = float(np.concatenate(rounds).mean())
    wins, losses = int((first > 0).sum()), int((first < 0).sum())
    spread = float(first.var(ddof=1)) / splits.independent if len(first) > 1 else math.inf
    if splits.given:
        freedom, variance = splits.independent - 1, spread
    else:
        freedom = len(rounds) - 1
        means = np.array([values.mean() for values in rounds])
        variance = max(corrected_variance(means, splits), _within_seeds(rounds, splits))
    error = math.sqrt(variance)
    half = student_quantile(max(freedom, 1), CONFIDENCE) * error
    if splits.given and larger_is_better:
        test, p = "McNemar, exact", mcnemar(wins, losses)
    else:
        test = "paired t" if splits.given else "corrected resampled t"
        p = student_p(mean / error, freedom) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, p, test, wins, losses)


def _within_seeds(rounds: Sequence[np.ndarray], splits: Splits) -> float:
    """Variance of the mean difference as if rounds were independent: the least it can be."""
    values = np.concatenate(rounds)
    return float(values.var()) / splits.independent / max(splits.seeds, 1)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    adjusted, least = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted


def costs(
    models: Sequence[Model],
    decode: Callable[[], float],
    advance: Callable[[int, int], None],
) -> list[Cost]:
    """What each encoder costs here; timed in turn, A B C A B C, after a pass to warm up.

    `decode` gives the seconds that decoding an image takes on one core.
    """
    steps = [_step(model) for model in models]
    total = len(models) * (TIMED_ROUNDS + 1)
    added = []
    for place, (model, step) in enumerate(zip(models, steps, strict=True)):
        step()
        added.append(peak_memory(step, model.device) or 0)
        advance(place + 1, total)
    times: list[list[float]] = [[] for _ in models]
    for turn in range(TIMED_ROUNDS):
        for place, (model, step) in enumerate(zip(models, steps, strict=True)):
            times[place].append(timed(step, model.device))
            advance(len(models) * (turn + 1) + place + 1, total)
    decoding = decode() / (os.cpu_count() or 1)
    found = []
    for model, seconds, memory in zip(models, times, added, strict=True):
        speeds = np.quantile(TIMED_BATCH / np.array(seconds), [0.1, 0.5, 0.9])
        weights = sum(p.numel() * p.element_size() for p in model.encoder.parameters())
        found.append(
            Cost(
                parameters=model.parameters,
                macs_per_image=model_costs(model.config, model.input_size).macs_per_image,
                images_per_s=float(speeds[1]),
                images_per_s_p10=float(speeds[0]),
                images_per_s_p90=float(speeds[2]),
                embed_100k_s=1e5 * max(1 / float(speeds[1]), decoding),
                memory_bytes=weights + memory,
                batch=TIMED_BATCH,
            )
        )
    return found


def _step(model: Model) -> Callable[[], None]:
    channels = model.config.encoder.channels
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(TIMED_BATCH, channels, *model.input_size, generator=generator)
    pixels = pixels.to(model.device, model.dtype)

    def step() -> None:
        model.runner(pixels)

    return step


def decode_seconds(read: Callable[[str], object], paths: Sequence[str], most: int = 12) -> float:
    """Median seconds of decoding one of the images; those that cannot be read are left out."""
    seconds = []
    for path in paths[:: max(1, len(paths) // most)][:most]:
        start = time.perf_counter()
        try:
            read(path)
        except VitcliError:
            continue
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)) if seconds else 0.0


def nearest_rows(vectors: np.ndarray, k: int) -> np.ndarray:
    """(N, D) -> (N, k): the rows nearest to each by cosine, without itself."""
    rows = unit_rows(vectors.astype(np.float64))
    step = max(1, ROWS_AT_ONCE // len(rows))
    found = []
    for start in range(0, len(rows), step):
        cosine = rows[start : start + step] @ rows.T
        cosine[np.arange(len(cosine)), start + np.arange(len(cosine))] = -np.inf
        found.append(np.argpartition(-cosine, k - 1, axis=1)[:, :k])
    return np.concatenate(found)


def shared_neighbors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, k) twice -> (N,): the share of each image's neighbors that both name.

    Mutual k-nearest-neighbor agreement (Huh et al. 2024, section 3).
    """
    both = [len(np.intersect1d(x, y)) for x, y in zip(a, b, strict=True)]
    shares: np.ndarray = np.array(both) / a.shape[1]
    return shares


def cka_matrix(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Unbiased linear CKA of all pairs of encoders on the same images."""
    grams = [centered_gram(torch.from_numpy(rows)) for rows in vectors]
    total = MinibatchCka()
    total.add(grams, grams, [len(vectors[0])])
    matrix: np.ndarray = total.value().numpy()
    return matrix
