"""The results of `vitcli probe`: of one encoder, of several, and without labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import Result


@dataclass(frozen=True)
class ProbeScore:
    """How much of what a classifier had not seen it got right."""

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
    """How well numbers are predicted that ridge regression had not seen."""

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
    """Images of one class that the linear probe takes for another, with the first split seed."""

    is_class: str
    said_class: str
    count: int
    share: float
    """Of the tested images of `is_class`."""


@dataclass(frozen=True)
class ProbeResult(Result):
    """The result of `vitcli probe DIR` for one encoder."""

    rows_at: ClassVar[str] = "scores"

    folder: str
    model: str
    weights: str
    width: int
    images: int
    classes: tuple[str, ...]
    protocol: str
    """Which images were tested and what was learned from."""
    largest_share: float
    """Accuracy of always naming the largest class among those tested; 0 for numbers."""
    failed: int
    """Images without a vector."""
    unlabelled: int
    """Images in no class that can be tested, or without a number."""
    scores: tuple[ProbeScore, ...]
    """Nearest neighbors and linear probe; empty for numbers."""
    verdict: str = ""
    """In words: how well the classes are told apart, and whether better than without looking."""
    verdict_code: str = ""
    """better, no better."""
    largest_class: str = ""
    duplicates: int = 0
    """Images whose vector is identical to another's: they stay on one side of every split."""
    left_out: int = 0
    """Test images of a given split that are learned from too, and so are not tested."""
    groups: int = 0
    """Groups of images that stay on one side; the number of images where each is its own."""
    per_class: tuple[ClassScore, ...] = ()
    """Worst first."""
    confusions: tuple[Confusion, ...] = ()
    """Pairs of classes that are confused, worst first."""
    regression: RegressionScore | None = None
    confusion_matrix: tuple[tuple[int, ...], ...] = ()
    """Counts by the linear probe, a row for each class as it is; empty unless asked for."""


@dataclass(frozen=True)
class Cost:
    """What an encoder costs on this machine."""

    parameters: int
    macs_per_image: int | None
    images_per_s: float
    """Median of rounds in which the encoders were timed in turn; decoding not included."""
    images_per_s_p10: float
    images_per_s_p90: float
    embed_100k_s: float
    """Seconds for 100,000 images: the slower of the encoder and of decoding on all cores."""
    memory_bytes: int
    """Weights, and what a batch adds to the process at its peak."""
    batch: int


@dataclass(frozen=True)
class Difference:
    """How much worse than the best one, on the same images."""

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


@dataclass(frozen=True)
class Ranked:
    """One encoder, or one layer, of a ranking."""

    name: str
    model: str
    weights: str
    layer: int | None
    width: int
    vectors: str
    """The folder that holds its vectors."""
    scores: tuple[ProbeScore, ...]
    regression: RegressionScore | None
    difference: Difference | None
    """None for the best one."""
    cost: Cost | None


@dataclass(frozen=True)
class RankingResult(Result):
    """The result of `vitcli probe DIR` for several encoders or layers, best first."""

    view_prefix: ClassVar[str] = "ranking_"
    rows_at: ClassVar[str] = "ranked"

    folder: str
    images: int
    classes: tuple[str, ...]
    protocol: str
    largest_class: str
    largest_share: float
    failed: int
    unlabelled: int
    duplicates: int
    left_out: int
    groups: int
    ranked: tuple[Ranked, ...]
    per_class: tuple[ClassScore, ...]
    """Of the best one, worst first."""
    confusions: tuple[Confusion, ...]
    timing: str
    """How speed and memory were measured; empty where they were not."""
    verdict: str
    verdict_code: str
    """one best, not told apart, no better."""
    confusion_matrix: tuple[tuple[int, ...], ...] = ()
    """Of the best one, as in ProbeResult."""


@dataclass(frozen=True)
class Agreement:
    """How much an encoder agrees with the others about which images are similar."""

    name: str
    model: str
    weights: str
    layer: int | None
    width: int
    vectors: str
    neighbors: float
    """Mean share of the k nearest images that it has in common with another encoder."""
    low: float
    """95% interval over images."""
    high: float
    cka: float
    """Mean linear CKA (unbiased) with the others."""


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
    """most agreement, not told apart."""
