from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from vitcli.commands.encode.analysis import DEVIATIONS, PrincipalColors, cosines_to


def tokens(*sizes: tuple[int, int], channels: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(3, 0.2, channels)
    return [torch.randn(*size, channels, generator=generator) * scale + 1 for size in sizes]


def principal_colors(images: list[torch.Tensor]) -> list[torch.Tensor]:
    fit = PrincipalColors()
    for image in images:
        fit.add(image.flatten(0, 1))
    return fit.colors(images)


def test_colors_are_the_components_of_scikit_learn_over_all_images() -> None:
    images = tokens((3, 5), (4, 2))
    patches = np.concatenate([image.flatten(0, 1).double().numpy() for image in images])
    pca = PCA(3).fit(patches)
    scores = pca.transform(patches)
    largest = np.abs(pca.components_).argmax(1)
    scores *= np.sign(pca.components_[np.arange(3), largest])
    expected = np.clip(0.5 + scores / scores.std(0) / (2 * DEVIATIONS), 0, 1)
    colors = principal_colors(images)
    assert [c.shape for c in colors] == [(3, 5, 3), (4, 2, 3)]
    got = np.concatenate([c.flatten(0, 1).numpy() for c in colors])
    assert np.abs(got - expected).max() < 1e-9


def test_the_sign_does_not_depend_on_the_order_of_patches() -> None:
    (image,) = tokens((4, 4))
    turned = image.flip(0, 1)
    first, second = principal_colors([image])[0], principal_colors([turned])[0]
    assert (first - second.flip(0, 1)).abs().max() < 1e-9


@pytest.mark.parametrize("image", [torch.ones(2, 3, 8), torch.randn(1, 1, 5)])
def test_patches_without_variance_are_gray(image: torch.Tensor) -> None:
    assert torch.equal(
        principal_colors([image])[0], torch.full((*image.shape[:2], 3), 0.5).double()
    )


def test_two_patches_have_one_component() -> None:
    colors = principal_colors([torch.randn(1, 2, 5)])[0]
    assert (colors[..., 0] != 0.5).all()
    assert (colors[..., 1:] == 0.5).all()


def test_fewer_channels_than_colors() -> None:
    assert principal_colors([torch.randn(3, 3, 2)])[0].shape == (3, 3, 3)


def test_cosines_to_one_patch() -> None:
    image = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 3.0], [-1.0, 0.0]]])
    expected = [[1.0, 0.0], [2**-0.5, -1.0]]
    assert (cosines_to(image[0, 0], image) - torch.tensor(expected)).abs().max() < 1e-7
