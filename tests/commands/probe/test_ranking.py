"""Several encoders on the same images, against scipy, statsmodels and known answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

import vitcli
from tests.commands.probe.sources import SMALL, blobs, labeled, write_pictures
from vitcli.cli import app
from vitcli.commands.probe.evaluate import (
    Answers,
    Splits,
    cka_matrix,
    given_split,
    nearest_rows,
    paired,
    shared_neighbors,
)
from vitcli.commands.probe.labeled import Encoded
from vitcli.commands.probe.result import RankingResult
from vitcli.commands.probe.scores import Trial, agreement, encoder_names
from vitcli.commands.probe.view import pareto, ranking_figure


def given(right: np.ndarray) -> tuple[Answers, Splits]:
    is_test = np.array([False] + [True] * len(right))
    splits, _ = given_split(is_test, np.arange(len(is_test)))
    return Answers((right.astype(float),), (right,)), splits


@pytest.mark.parametrize("seed", range(4))
def test_a_given_split_is_tested_by_mcnemar_as_statsmodels_does(seed: int) -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    rng = np.random.default_rng(seed)
    a, b = rng.random(60) < 0.8, rng.random(60) < 0.6
    (best, splits), (other, _) = given(a), given(b)
    gap = paired(best, other, splits, larger_is_better=True)
    table = [[np.sum(a & b), np.sum(a & ~b)], [np.sum(~a & b), np.sum(~a & ~b)]]
    assert gap.p == pytest.approx(tables.mcnemar(table, exact=True).pvalue, rel=1e-9)
    assert (gap.only_best, gap.only_this) == (np.sum(a & ~b), np.sum(~a & b))
    interval = stats.ttest_rel(a.astype(float), b.astype(float)).confidence_interval(0.95)
    assert (gap.low, gap.high) == pytest.approx(tuple(interval), abs=1e-9)


def test_errors_of_numbers_are_tested_by_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random(30), rng.random(30) + 0.2
    (best, splits), (other, _) = given(np.ones(30)), given(np.ones(30))
    best, other = Answers((a,), (a,)), Answers((b,), (b,))
    gap = paired(best, other, splits, larger_is_better=False)
    reference = stats.ttest_rel(b, a)
    assert gap.p == pytest.approx(reference.pvalue, rel=1e-9)
    assert (gap.low, gap.high) == pytest.approx(tuple(reference.confidence_interval(0.95)))


def test_rounds_that_share_images_are_tested_with_the_corrected_variance() -> None:
    """Nadeau and Bengio 2003, equation 9: t = mean / sqrt((1/J + n2/n1) s^2), J - 1 degrees."""
    rng = np.random.default_rng(0)
    rounds = tuple((np.arange(40), np.arange(10)) for _ in range(10))
    splits = Splits(rounds, 2, 5, 50, "")
    a = tuple((rng.random(10) < 0.9).astype(float) for _ in rounds)
    b = tuple((rng.random(10) < 0.5).astype(float) for _ in rounds)
    gap = paired(Answers(a, a), Answers(b, b), splits, larger_is_better=True)
    means = np.array([x.mean() - y.mean() for x, y in zip(a, b, strict=True)])
    t = means.mean() / np.sqrt((1 / 10 + 10 / 40) * means.var(ddof=1))
    assert gap.p == pytest.approx(2 * stats.t.sf(abs(t), 9), rel=1e-6)
    same = paired(Answers(a, a), Answers(a, a), splits, larger_is_better=True)
    assert (same.accuracy, same.p) == (0.0, 1.0)


def ranked(*vectors: np.ndarray, labels: list[str], **more: Any) -> RankingResult:
    trial = Trial(Path("x"), labeled(list(vectors), labels, **more))
    return trial.ranking([])


def test_the_better_encoder_is_first_and_equal_ones_are_not_told_apart() -> None:
    good, labels = blobs(40, 3, 3.0)
    bad, _ = blobs(40, 3, 0.5, seed=1)
    result = ranked(bad, good, labels=labels)
    assert [one.name for one in result.ranked] == ["m1", "m0"]
    assert result.verdict_code == "one best" and result.verdict.startswith("m1 is best, ")
    gap = result.ranked[1].difference
    assert gap is not None and 0 < gap.low < gap.accuracy < gap.high and gap.p_holm < 1e-4
    assert gap.accuracy == pytest.approx(
        result.ranked[0].scores[-1].accuracy - result.ranked[1].scores[-1].accuracy, abs=1e-12
    )
    turned = good @ np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
    tied = ranked(good, turned, labels=labels)
    assert tied.verdict_code == "cannot be distinguished"
    assert "m0 and m1 do not differ significantly on these 120 images" in tied.verdict
    noise = ranked(blobs(40, 3, 0.0)[0], blobs(40, 3, 0.0, seed=1)[0], labels=labels)
    assert noise.verdict_code == "no better" and "no better than always predicting" in noise.verdict


def test_numbers_rank_by_r2() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(80, 6))
    targets = vectors @ np.arange(6.0)
    result = Trial(Path("x"), labeled([rng.normal(size=(80, 6)), vectors], targets)).ranking([])
    assert [one.name for one in result.ranked] == ["m1", "m0"]
    assert "of R²" in result.verdict and result.verdict_code == "one best"


def test_common_neighbors_by_hand() -> None:
    angles = np.array([0.0, 1, 3, 90, 92, 95])
    a = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], 1)
    near = nearest_rows(a, 2)
    assert [sorted(row) for row in near] == [[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]]
    other = near.copy()
    other[0] = [1, 3]
    assert shared_neighbors(near, other).tolist() == [0.5, 1, 1, 1, 1, 1]


def test_an_encoder_of_noise_agrees_least_and_it_is_said_not_to_be_accuracy() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(120, 10))
    views = [base + 0.3 * rng.normal(size=base.shape) for _ in range(2)]
    images = labeled([rng.normal(size=(120, 10)), *views], ["x"] * 120)
    result = agreement(Path("x"), images, 10)
    assert result.ranked[-1].name == "m0" and result.verdict_code == "cannot be distinguished"
    assert "not accuracy" in result.verdict
    assert result.ranked[0].low < result.ranked[0].neighbors < result.ranked[0].high
    # Two of random neighbors share k / (N - 1) on average.
    place = [one.name for one in result.ranked].index("m0")
    assert result.neighbors[place][0] == pytest.approx(10 / 119, abs=0.03)
    assert result.cka[place][0] == pytest.approx(0, abs=0.05)


def test_cka_of_a_rotation_is_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6))
    turned = x @ np.linalg.qr(rng.normal(size=(6, 6)))[0]
    assert cka_matrix([x, 2 * turned])[0, 1] == pytest.approx(1, abs=1e-12)


def test_layers_of_several_encoders_are_ranked_without_costs(tmp_path: Path) -> None:
    """A layer costs less than its encoder, whose cost it must not have; each has a line."""
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 6)
    call = (tmp_path / "in", *SMALL, "--preset", "vit-ti16", "--preset", "vit-b16", "--layers")
    found = answer(*call, "all", "--workers", "1", "--plot", tmp_path / "layers.png")
    names = sorted(one["name"] for one in found["ranked"])
    assert names == [f"{name} layer {i}" for name in ("vit-b16", "vit-ti16") for i in (0, 1)]
    assert all(one["cost"] is None for one in found["ranked"]) and found["timing"] == ""
    rows = [
        Encoded("m", weights, np.ones((4, 2), np.float32), layer, registers=registers)
        for weights, registers in (("a", 0), ("b", 0), ("b", 4))
        for layer in (0, 1)
    ]
    assert len(set(encoder_names(rows))) == 6
    assert encoder_names(rows)[::2] == [
        "m (a) layer 0",
        "m, registers 0 (b) layer 0",
        "m, registers 4 (b) layer 0",
    ]


def test_the_lines_of_a_figure_over_layers_are_of_one_encoder_each() -> None:
    near, labels = blobs(8, 2, 4.0)
    images = labeled([near, near, near, near], labels)
    encoders = tuple(
        dataclasses.replace(e, model=m, layer=layer)
        for e, (m, layer) in zip(
            images.encoders, [("a", 0), ("a", 2), ("b", 0), ("b", 3)], strict=True
        )
    )
    result = Trial(Path("x"), dataclasses.replace(images, encoders=encoders)).ranking([])
    (axes,) = ranking_figure(result).axes
    lines = [list(line.get_xdata()) for line in axes.lines]
    assert [0, 2] in lines and [0, 3] in lines


def test_the_pareto_front() -> None:
    points = [(1.0, 0.9), (2.0, 0.8), (3.0, 0.85), (4.0, 0.5), (4.0, 0.6)]
    assert pareto(points) == [(1.0, 0.9), (3.0, 0.85), (4.0, 0.6)]


def answer(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["probe", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else {"error": result.stderr}


def test_towers_are_chosen_from_a_folder_and_vectors_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 6)
    call = ("probe", str(tmp_path / "in"), *SMALL, "--preset", "vit-ti16", "--preset", "vit-b16")
    call = (*call, "--workers", "1", "--plot", str(tmp_path / "tower.png"))
    result = CliRunner().invoke(app, [*call, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert {one["name"] for one in said["ranked"]} == {"vit-ti16", "vit-b16"}
    assert said["ranked"][0]["difference"] is None
    assert said["verdict_code"] == "cannot be distinguished"
    for one in said["ranked"]:
        cost = one["cost"]
        assert cost["images_per_s_p10"] <= cost["images_per_s"] <= cost["images_per_s_p90"]
        assert cost["embed_100k_s"] >= 1e5 / cost["images_per_s"] - 1e-6
        assert cost["parameters"] > 0 and cost["macs_per_image"] > 0
        assert Path(one["vectors"]).is_relative_to(tmp_path / "cache")
    assert (tmp_path / "tower.png").read_bytes().startswith(b"\x89PNG")
    # Kept: the second run writes no part anew.
    parts = sorted((tmp_path / "cache").rglob("part-*"))
    before = {path: path.stat().st_mtime_ns for path in parts}
    parts[0].unlink()  # as where the first run was ended before
    again = CliRunner().invoke(app, [*call])
    assert again.exit_code == 0 and "do not differ significantly" in again.stdout
    after = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").rglob("part-*"))}
    assert list(after) == parts
    changed = {path for path in parts if before[path] != after[path]}
    assert parts[0] in changed and {path.parent for path in changed} == {parts[0].parent}
    # Another folder is another set of vectors.
    Image.new("RGB", (20, 20)).save(tmp_path / "in/dark/new.png")
    assert CliRunner().invoke(app, [*call]).exit_code == 0
    assert len(list((tmp_path / "cache/vitcli/probe").iterdir())) == 2


def test_unlabeled_images_rank_by_agreement(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    for number in range(8):
        pixels = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"in/{number}.png")
    call = (tmp_path / "in", *SMALL, "--registers", "0,1", "--workers", "1", "--unlabeled")
    said = answer(*call, "--out", tmp_path / "out", "--k", "3", "--plot", tmp_path / "a.png")
    assert said["k"] == 3
    names = sorted(row["name"].split(" (")[0] for row in said["ranked"])
    assert names == [f"vit-b16, registers {n}" for n in (0, 1)]
    assert "not accuracy" in said["verdict"]
    for option in (("--groups", "parent"), ("--seeds", "2")):
        assert "has no effect with --unlabeled" in answer(*call, *option, code=2)["error"]
    alone = CliRunner().invoke(app, ["probe", *map(str, call[:-5]), "--unlabeled"])
    assert alone.exit_code == 2 and "needs at least 2 encoders" in alone.stderr
    assert "8 images" in alone.stderr and "class" not in alone.stderr


def test_the_best_encoders_vectors_are_shown_in_two_dimensions(tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos", {"dark": 0, "light": 200}, 6)
    more = ("--out", str(tmp_path / "kept"), "--map", str(tmp_path / "x.svg"), "--json")
    many = ("--registers", "0,1", *SMALL)
    done = CliRunner().invoke(app, ["probe", str(tmp_path / "photos"), *many, *more])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["plane"]
    assert sorted(found["labels"]) == ["dark"] * 6 + ["light"] * 6
    assert len(found["points"]) == found["images"] == 12
    first: dict[str, list[float]] = {"dark": [], "light": []}
    for label, (x, _) in zip(found["labels"], found["points"], strict=True):
        first[label].append(x)
    dark, light = sorted(first.values(), key=max)
    assert max(dark) < min(light)  # brightness is most of the variance
    assert ">light" in (tmp_path / "x.svg").read_text()


def test_each_pooling_of_an_encoder_is_ranked_on_its_own(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 6)
    call = (tmp_path / "in", *SMALL, "--preset", "vit-ti16", "--workers", "1")
    said = answer(*call, "--pool", "cls,mean", "--out", tmp_path / "out")
    assert {one["name"] for one in said["ranked"]} == {"vit-ti16, cls", "vit-ti16, mean"}
    for one in said["ranked"]:
        pooling = one["name"].split(", ")[1]
        alone = answer(*call, "--pool", pooling, "--out", tmp_path / pooling)
        assert alone["scores"] == one["scores"]


def test_six_encoders_on_a_folder_with_known_answers_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brightness gives the class away: every encoder is right; what was encoded is not again."""
    pytest.importorskip("timm")
    from vitcli.commands.probe import analysis

    write_pictures(tmp_path / "in", {"dark": 20, "middle": 110, "light": 200}, 6)
    names = ("test_vit", "test_resnet", "test_efficientnet", "test_mambaout")
    models = [vitcli.load(f"timm:{name}", image_size=64) for name in names]
    models += [
        vitcli.load("vit-ti16", set={"encoder.depth": 1, "encoder.pooling": pooling}, image_size=32)
        for pooling in ("cls", "mean")
    ]
    encode, done = analysis.embed, []

    def killed(model: vitcli.Model, *others: Any, **how: Any) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        encode(model, *others, **how)
        done.append(model.name)

    asked: dict[str, Any] = {"folds": 3, "seeds": 1, "k": 3, "out": tmp_path / "out", "workers": 1}
    monkeypatch.setattr(analysis, "embed", killed)
    with pytest.raises(KeyboardInterrupt):
        vitcli.probe(tmp_path / "in", models, **asked)
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("part-*")}
    assert len({path.parent for path in parts}) == 3
    monkeypatch.setattr(analysis, "embed", encode)
    found = vitcli.probe(tmp_path / "in", models, **asked)
    assert {path: path.stat().st_mtime_ns for path in parts} == parts
    whole = vitcli.probe(tmp_path / "in", models, **(asked | {"out": tmp_path / "whole"}))
    scores = [
        {(one.model, one.weights, one.width, one.scores) for one in result.ranked}
        for result in (found, whole)
    ]
    assert len(found.ranked) == 6 and scores[0] == scores[1]
    best = found.ranked[0]
    assert best.scores[-1].accuracy == 1 and best.difference is None
    assert all(one.difference is not None and one.cost is not None for one in found.ranked[1:])
