"""The results of `vitcli probe`: of one encoder, of several, and without labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.results import Result
from vitcli.stats import Plane


def check_options(
    vectors: Path | None,
    targets: bool,
    unlabeled: bool,
    *,
    for_classes: Mapping[str, Any],
    for_labels: Mapping[str, Any],
    for_images: Mapping[str, Any],
) -> None:
    """Refuse what would have no effect: options by name, with their values where they are given.

    Args:
        vectors: the folder, where it holds vectors already.

    Raises:
        VitcliError: two questions at once, or an option of another one.
    """
    other = "--unlabeled" if unlabeled else "--targets" if targets else ""
    for name in (name for name, value in for_classes.items() if other and value):
        raise VitcliError(f"{name}: needs classes (got {other})", f"leave out {name}")
    if unlabeled and targets:
        raise VitcliError(
            "--unlabeled, --targets: only one of them is possible", "leave out --unlabeled"
        )
    for name in (name for name, value in for_labels.items() if unlabeled and value is not None):
        raise VitcliError(f"{name}: has no effect with --unlabeled", f"leave out {name}")
    given = [name for name, value in for_images.items() if value]
    if vectors and given:
        raise VitcliError(
            f"{printable(vectors)}: holds vectors already ({', '.join(given)} is only for images)",
            f"vitcli probe {printable(vectors)}",
        )


@dataclass(frozen=True)
class ProbeScore:
    """Accuracy of a classifier on images it was not trained on."""

    method: str
    correct: int
    """Over all split seeds."""
    tested: int
    """Images tested, each once for each split seed."""
    accuracy: float
    low: float
    """95% interval of the accuracy."""
    high: float
    converged: bool = True


@dataclass(frozen=True)
class RegressionScore:
    """Ridge regression on images it was not trained on."""

    method: str
    r2: float
    """1 - mean squared error / variance of the numbers."""
    low: float
    """95% interval of `r2`."""
    high: float
    mean_absolute_error: float


@dataclass(frozen=True)
class ClassScore:
    """One class by the linear probe, with the first split seed."""

    name: str
    correct: int
    tested: int
    accuracy: float
    low: float
    """Wilson's 95% interval."""
    high: float


@dataclass(frozen=True)
class Confusion:
    """Images of one class for which the linear probe predicts another (first split seed)."""

    is_class: str
    said_class: str
    count: int
    share: float
    """Of the tested images of `is_class`."""


@dataclass(frozen=True, kw_only=True)
class Tested(Result):
    """What a result for one encoder and a ranking of several have in common."""

    folder: str
    images: int
    classes: tuple[str, ...]
    protocol: str
    """How images were split into training and test images."""
    largest_class: str
    largest_share: float
    """Accuracy of always predicting the largest class; 0 for numbers."""
    failed: int
    """Images without a vector."""
    unlabelled: int
    """Images in no class that can be tested, or without a number."""
    duplicates: int
    """Images whose vector is identical to another's; they stay on one side of every split."""
    left_out: int
    """Test images of a given split that are left out because they are training images too."""
    groups: int
    """Number of groups that stay on one side; the number of images without groups."""
    per_class: tuple[ClassScore, ...]
    """Of the best encoder, worst first."""
    confusions: tuple[Confusion, ...]
    """Pairs of classes that are confused, worst first."""
    confusion_matrix: tuple[tuple[int, ...], ...]
    """Counts by the linear probe, a row per true class; empty without `confusion`."""
    verdict: str
    """A sentence: the accuracy, and whether it is better than always predicting one class."""
    verdict_code: str
    """better (of a ranking: one best, cannot be distinguished), no better, too few images."""
    plane: Plane | None = None
    """Vectors in two dimensions (of the best encoder), where they were asked for."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Tested):
    """The result of `vitcli probe DIR` for one encoder."""

    rows_at: ClassVar[str] = "scores"

    model: str
    weights: str
    width: int
    scores: tuple[ProbeScore, ...]
    """Nearest neighbors and linear probe; empty for numbers."""
    regression: RegressionScore | None


@dataclass(frozen=True)
class Cost:
    """Size, speed and memory of an encoder on this machine."""

    parameters: int
    macs_per_image: int | None
    images_per_s: float
    """Median of rounds in which encoders were timed alternately, without decoding."""
    images_per_s_p10: float
    images_per_s_p90: float
    embed_100k_s: float
    """Seconds for 100,000 images: the slower of the encoder and of decoding on all cores."""
    memory_bytes: int
    """Weights, and what a batch adds to the process at its peak."""
    batch: int


@dataclass(frozen=True)
class Difference:
    """Difference to the best encoder on the same images."""

    accuracy: float
    """Best minus this one; of R^2 for numbers."""
    low: float
    """95% interval."""
    high: float
    p: float
    p_holm: float
    """Adjusted for the number of comparisons with the best (Holm 1979)."""
    test: str
    only_best: int
    """Tested images that only the best one gets right, with the first split seed."""
    only_this: int


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """One encoder, or one layer, among several."""

    name: str
    model: str
    weights: str
    layer: int | None
    width: int
    vectors: str
    """The folder that holds its vectors."""


@dataclass(frozen=True, kw_only=True)
class Ranked(Encoder):
    """Its place in a ranking by accuracy."""

    scores: tuple[ProbeScore, ...]
    regression: RegressionScore | None
    difference: Difference | None
    """None for the best one."""
    cost: Cost | None


@dataclass(frozen=True, kw_only=True)
class RankingResult(Tested):
    """The result of `vitcli probe DIR` for several encoders or layers, best first."""

    view_prefix: ClassVar[str] = "ranking_"
    rows_at: ClassVar[str] = "ranked"

    ranked: tuple[Ranked, ...]
    timing: str
    """How speed and memory were measured; empty if they were not."""


@dataclass(frozen=True, kw_only=True)
class Agreement(Encoder):
    """Its agreement with other encoders about nearest neighbors."""

    neighbors: float
    """Mean share of the k nearest images that it has in common with another encoder."""
    low: float
    """95% interval over images."""
    high: float
    cka: float
    """Mean linear CKA (unbiased) with other encoders."""


@dataclass(frozen=True)
class AgreementResult(Result):
    """The result of `vitcli probe DIR --unlabeled`; this is not accuracy."""

    view_prefix: ClassVar[str] = "agreement_"
    rows_at: ClassVar[str] = "ranked"

    folder: str
    images: int
    k: int
    failed: int
    ranked: tuple[Agreement, ...]
    """Most agreement first."""
    neighbors: tuple[tuple[float, ...], ...]
    """Mutual k-nearest-neighbor agreement of each pair, in the order of `ranked`."""
    cka: tuple[tuple[float, ...], ...]
    cka_images: int
    """Images that CKA was computed on."""
    verdict: str
    verdict_code: str
    """most agreement, cannot be distinguished."""
    plane: Plane | None = None
    """Vectors in two dimensions (of the best encoder), where they were asked for."""
