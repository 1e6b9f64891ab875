"""Colors of several encoders and layers: one basis each, foreground by the first component."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from typer.testing import CliRunner

from tests.commands.explore.sources import TINY, pictures, tiny
from vitcli.cli import app
from vitcli.commands.explore.grid import _foreground, grid
from vitcli.errors import VitcliError


def test_one_basis_per_encoder_over_its_layers_and_images(tmp_path: Path) -> None:
    model, files = tiny(patch=8), pictures(tmp_path)
    result = grid([model], files, layers=[1, 3], foreground=False)
    (row,) = result.encoders
    assert [(p.image, p.layer) for p in row.panels] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    parts = []
    for layer in (1, 3):
        tokens = torch.cat(
            [
                model.features(file, layers=[layer]).layers[layer].patches[0].flatten(0, 1).double()
                for file in files
            ]
        ).numpy()
        tokens = tokens - tokens.mean(0)
        parts.append(tokens / np.sqrt((tokens**2).sum(-1).mean()))
    pca = PCA(3).fit(np.concatenate(parts))
    np.testing.assert_allclose(row.explained, pca.explained_variance_ratio_, rtol=1e-6)
    first = np.array(row.panels[1].colors)[..., 0].ravel()  # image 0, layer 3
    along = pca.transform(parts[1][: len(first)])[:, 0]
    inside = (first > 0) & (first < 1)
    assert inside.sum() > 20
    assert abs(np.corrcoef(first[inside], along[inside])[0, 1]) == pytest.approx(1, abs=1e-6)


def test_foreground_is_the_side_that_touches_less_of_the_border() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(8, 8, 5, generator=generator, dtype=torch.float64) * 0.01
    image[2:5, 3:6] += 1.0
    expected = torch.zeros(8, 8).bool()
    expected[2:5, 3:6] = True
    for sign in (1, -1):
        side = _foreground([image * sign])
        assert side is not None
        masks, explained = side
        assert torch.equal(masks[0], expected) and explained > 0.9
    assert _foreground([torch.ones(4, 4, 3).double()]) is None


def test_the_command_draws_and_prints(tmp_path: Path) -> None:
    files = pictures(tmp_path)
    options = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    call = ["grid", *files, "--preset", "vit-ti16", "--registers", "0,2", *options]
    done = CliRunner().invoke(app, [*call, "--plot", str(tmp_path / "g.png"), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert len(answer["encoders"]) == 2 and (tmp_path / "g.png").stat().st_size > 5000
    shown = [c for row in answer["encoders"][0]["panels"][0]["colors"] for c in row]
    assert 0 < sum(c is not None for c in shown) < len(shown)
    assert answer["encoders"][0]["foreground"] == pytest.approx(
        np.mean(
            [
                c is not None
                for p in answer["encoders"][0]["panels"][::3]
                for r in p["colors"]
                for c in r
            ]
        )
    )
    done = CliRunner().invoke(app, [*call, "--all-patches"])
    assert done.exit_code == 0 and "all patches" in done.stdout
    with pytest.raises(VitcliError, match="no image could be read"):
        grid([tiny()], [str(tmp_path / "none.png")])
