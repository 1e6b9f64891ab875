"""Images on disk to train on: a folder for each class, or a published data set's own files.

Reading and augmenting are torchvision's (the extra `train`); what validation sees goes through the
same preprocessing as every other command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from vitcli.commands.train.data import Batch, Indices, channels
from vitcli.commands.train.datasets import Items, Part, find_sets, torchvision
from vitcli.commands.train.seeds import derived_seed, seed_cpu
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import ImagesData
from vitcli.errors import VitcliError
from vitcli.images.decode import ImageError, decode
from vitcli.images.preprocess import preprocess


class ImagesSource:
    """A training and a validation set of images, as `TrainingData`.

    Args:
        seed: decides the held-out part, the limit and the augmentation.
    """

    def __init__(
        self,
        path: Path,
        data: ImagesData,
        config: PreprocessConfig,
        seed: int,
        size: tuple[int, int],
        download: bool = False,
    ) -> None:
        self.data = data
        train, val, self.classes = find_sets(path, data, seed, download)
        if data.train_limit is not None and data.train_limit < len(train):
            order = np.random.default_rng(derived_seed(seed, "limit")).permutation(len(train))
            train = Part(train, order[: data.train_limit])
        self.train_size, self.val_size = len(train), len(val)
        self.train = Prepared(train, augmentation(data, config, size), seed)
        self.val = Prepared(val, lambda image: torch.from_numpy(preprocess(image, config)))

    def _loader(self, images: Prepared, wanted: Iterable[list[tuple[int, int]]]) -> Iterator[Batch]:
        workers = self.data.workers
        loader = DataLoader(
            images,
            batch_sampler=wanted,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=one_thread if workers else None,
            collate_fn=stacked_or_wrong,
        )
        for batch in loader:
            if isinstance(batch, Unreadable):
                raise VitcliError(
                    str(batch), "repair it, or leave it out and start again", exit_code=1
                )
            yield batch

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return self._loader(
            self.train, Places([[(epoch, int(i)) for i in indices] for epoch, indices in wanted])
        )

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return self._loader(self.val, Places([[(0, int(i)) for i in part] for part in wanted]))


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


class Unreadable(str):
    """What is wrong with an image: workers hand it over, as errors do not cross processes whole."""


def stacked_or_wrong(items: list[Any]) -> Any:
    """A batch, or the first thing that is wrong with it."""
    return next((item for item in items if isinstance(item, Unreadable)), None) or default_collate(
        items
    )


class Places(list[list[tuple[int, int]]]):
    """Batches of (epoch, index), as a DataLoader's batch sampler."""


class Prepared(Dataset[tuple[Tensor, int] | Unreadable]):
    """Image (epoch, index), augmented from a seed of its own: the same in any worker."""

    def __init__(
        self, items: Items, transform: Callable[[Any], Tensor], seed: int | None = None
    ) -> None:
        self.items = items
        self.transform = transform
        self.seed = seed

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, int] | Unreadable:
        epoch, index = place
        image, label = self.items[index]
        if not isinstance(image, Image.Image):
            try:
                image = decode(image).image
            except ImageError as error:
                return Unreadable(error.message)
        if self.seed is not None:
            seed_cpu(derived_seed(self.seed, "augment", epoch, index))
        return self.transform(image.convert("RGB")), label

    def __len__(self) -> int:
        return len(self.items)


def augmentation(
    data: ImagesData, config: PreprocessConfig, size: tuple[int, int]
) -> Callable[[Any], Tensor]:
    """PIL image to the normalised tensor (3, height, width) that training sees."""
    torchvision()
    from torchvision.transforms import InterpolationMode, v2

    filter_ = InterpolationMode(config.filter)
    steps: list[Any] = []
    if data.crop_scale is not None:
        steps.append(v2.RandomResizedCrop(size, data.crop_scale, data.crop_ratio, filter_))
    else:
        steps.append(v2.Resize(size, filter_))
    if data.pad_crop:
        steps.append(v2.RandomCrop(size, padding=data.pad_crop))
    if data.flip:
        steps.append(v2.RandomHorizontalFlip(data.flip))
    mean, scale = channels(config)
    geometry = v2.Compose(steps)
    erase = v2.RandomErasing(data.erase) if data.erase else nn.Identity()

    def pipeline(image: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(geometry(image))).permute(2, 0, 1).float()
        out: Tensor = erase(pixels.sub_(mean).mul_(scale).contiguous())
        return out

    return pipeline
