from __future__ import annotations

import pytest

from vitcli.commands.train.outcome import chance_accuracy, judge, lower_bound


def test_wilson_bound_equals_its_definition() -> None:
    """The lower end p0 is where (p - p0)^2 = z^2 p0 (1 - p0) / n."""
    p, n, z = 0.3, 400, 3.09
    low = lower_bound(120, n, z)
    assert low < p
    assert (p - low) ** 2 == pytest.approx(z * z * low * (1 - low) / n)


def test_chance_is_the_commonest_class() -> None:
    assert chance_accuracy([50, 30, 20]) == 0.5


def test_an_accuracy_must_clear_the_bar_by_its_sampling_error() -> None:
    quarters = [512] * 4  # bar 0.25 + 0.075 = 0.325
    assert judge(512, quarters) == "stalled near chance"
    assert judge(round(0.34 * 2048), quarters) == "stalled near chance"
    assert judge(round(0.37 * 2048), quarters) == "learned"
    assert judge(37, [25] * 4) == "stalled near chance"  # as much of 100 images says little
