from __future__ import annotations

from vitcli.commands.train.result import chance_accuracy, judge


def test_chance_is_the_commonest_class() -> None:
    assert chance_accuracy([50, 30, 20]) == 0.5


def test_an_accuracy_must_clear_the_bar_by_its_sampling_error() -> None:
    quarters = [512] * 4  # bar 0.25 + 0.075 = 0.325
    assert judge(512, quarters) == "stalled near chance"
    assert judge(round(0.34 * 2048), quarters) == "stalled near chance"
    assert judge(round(0.37 * 2048), quarters) == "learned"


def test_few_images_cannot_tell() -> None:
    """Bar 0.55 for two classes; 6 of 6 has the 99.9 % lower end 6 / (6 + 3.09^2) = 0.386."""
    assert judge(6, [3, 3]) == "too few validation images to tell"
    assert judge(12, [6, 6]) == "learned"  # 12 / (12 + 3.09^2) = 0.557
    assert judge(37, [25] * 4) == "too few validation images to tell"
    assert judge(3, [3, 3]) == "stalled near chance"
