"""The batches of a run by step, so that it resumes from any of them: shapes, or images on disk.

Images are read and augmented from seeds of their own: neither workers nor resuming change a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from vitcli.commands.train.inputs import (
    SMALL_SET,
    Inputs,
    assign,
    derived_seed,
    limited,
    published_files,
    repeats,
    same_inputs,
    side_notes,
    unreadable,
)
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import ImagesData, TrainConfig
from vitcli.errors import VitcliError, install_extra
from vitcli.images.decode import ImageError, decode
from vitcli.images.folders import read_folder
from vitcli.images.preprocess import preprocess
from vitcli.images.shapes import VALIDATION, Shapes
from vitcli.images.sources import Entry, Items, content, published_sets, recognized

Indices = Sequence[int] | NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
"""Images (B, C, height, width) as the encoder reads them, and labels (B)."""


class TrainingData(Protocol):
    classes: tuple[str, ...]
    train_size: int
    val_size: int
    unreadable: dict[str, str]
    """Path -> reason of each image that was left out so far."""

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        """A batch for each (epoch, image indices)."""
        ...

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        """Labels below zero are of images that count nowhere."""
        ...


def epoch_order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The order of the training images in an epoch."""
    return np.random.default_rng(derived_seed(seed, "order", epoch)).permutation(size)


def batch_indices(
    seed: int, size: int, batch: int, steps: range, part: slice
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, image indices) of each step's part of the batch; a last short batch is left out."""
    per_epoch = size // batch
    order, of_epoch = np.empty(0, dtype=np.int64), -1
    for step in steps:
        epoch, place = divmod(step, per_epoch)
        if epoch != of_epoch:
            order, of_epoch = epoch_order(seed, epoch, size), epoch
        yield epoch, order[place * batch : (place + 1) * batch][part]


def channels(preprocess: PreprocessConfig) -> tuple[Tensor, Tensor]:
    """What to subtract from and multiply 8-bit levels with, (3, 1, 1) each."""
    mean, std = (
        torch.tensor(values).mul(255)[:, None, None] for values in (preprocess.mean, preprocess.std)
    )
    return mean, 1 / std


class ShapesSource:
    """Shapes, normalized as the encoder's preprocessing says."""

    def __init__(
        self, shapes: Shapes, train_size: int, val_size: int, preprocess: PreprocessConfig
    ) -> None:
        self.shapes = shapes
        self.classes = shapes.classes
        self.train_size = train_size
        self.val_size = val_size
        self.unreadable: dict[str, str] = {}
        self.mean, self.scale = channels(preprocess)

    def _batch(self, indices: Indices) -> Batch:
        pixels, labels = self.shapes.batch(indices)
        images = torch.from_numpy(pixels).float().sub_(self.mean).mul_(self.scale)
        return images, torch.from_numpy(labels)

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return (self._batch(indices) for _, indices in wanted)

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return (self._batch([VALIDATION + int(i) for i in indices]) for indices in wanted)


def seed_cpu(seed: int) -> None:
    """Seed torch's CPU generator alone; `torch.manual_seed` takes a millisecond for the others."""
    torch.default_generator.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from."""
    seed_cpu(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def swap_neighbors(x: Tensor) -> Tensor:
    """(B, ...) with rows 2i and 2i + 1 exchanged; B is even."""
    swapped: Tensor = x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return swapped


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(B) -> (B, K): one-hot rows moved by `smoothing` towards uniform; each sums to one."""
    hot = F.one_hot(labels, classes).float()
    return hot * (1 - smoothing) + smoothing / classes


def mix(
    images: Tensor, targets: Tensor, lam: float, box: tuple[int, int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """lam of each image and 1 - lam of its neighbor; within `box`, the neighbor's pixels.

    images (B, C, height, width); targets (B, K); box (top, left, bottom, right) in pixels.
    """
    partners = swap_neighbors(images)
    if box is None:
        images = torch.lerp(partners, images, lam)
    else:
        top, left, bottom, right = box
        images = images.clone()
        images[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
        area = (bottom - top) * (right - left)
        lam = 1 - area / (images.shape[-2] * images.shape[-1])  # what the clipped box left
    return images, targets * lam + swap_neighbors(targets) * (1 - lam)


def cut_box(
    height: int, width: int, lam: float, random: np.random.Generator
) -> tuple[int, int, int, int]:
    """A box of about 1 - lam of the image around a uniform center, clipped (Yun et al., eq. 2)."""
    side = (1 - lam) ** 0.5
    half = int(height * side) // 2, int(width * side) // 2
    row, column = int(random.integers(height)), int(random.integers(width))
    return (
        max(row - half[0], 0),
        max(column - half[1], 0),
        min(row + half[0], height),
        min(column + half[1], width),
    )


def mix_batch(
    images: Tensor, targets: Tensor, train: TrainConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix as the recipe says, drawn from the step's seed."""
    if not (train.mixup or train.cutmix):
        return images, targets
    random = np.random.default_rng(seed)
    cut = bool(train.cutmix) and (not train.mixup or random.random() < 0.5)
    alpha = train.cutmix if cut else train.mixup
    lam = float(random.beta(alpha, alpha))
    box = cut_box(images.shape[-2], images.shape[-1], lam, random) if cut else None
    return mix(images, targets, lam, box)


NO_LABEL = -1
"""Of a validation image that cannot be read: it counts nowhere."""


class Part(Sequence[tuple[Any, int]]):
    """Some of the items, by index."""

    def __init__(self, items: Items, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.items = items
        self.indices = indices

    def __getitem__(self, index: Any) -> Any:
        return self.items[int(self.indices[index])]

    def __len__(self) -> int:
        return len(self.indices)


class ImagesSource:
    """A training, a validation and perhaps a test set of images, as `TrainingData`.

    Args:
        seed: decides the held-out part, the limit and the augmentation.
        stored: the inputs of the run that is resumed.
        accept_new: new files of a resumed run train.
        test: a test split is wanted.
        check: decode every image before the first step.
        fail_fast: an unreadable image is an error.
        report: called with how many images are decoded, of how many.

    Raises:
        VitcliError: nothing to train on there, or other files than the resumed run's.
    """

    def __init__(
        self,
        path: Path,
        data: ImagesData,
        config: PreprocessConfig,
        seed: int,
        size: tuple[int, int],
        *,
        download: bool = False,
        stored: Inputs | None = None,
        accept_new: bool = False,
        test: bool = False,
        check: bool = False,
        fail_fast: bool = False,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.data = data
        self.fail_fast = fail_fast
        self.unreadable: dict[str, str] = {}
        """Path -> reason of each image that was left out."""
        self.earlier_size: int | None = None
        """Training images of the folder's run that is resumed."""
        kind = data.kind if data.kind != "auto" else recognized(path)
        tests: Items
        if kind == "folder":
            train, val, tests = self._folder(path, seed, stored, accept_new, test, check, report)
        else:
            train, val, self.classes = published_sets(path, kind, download)
            tests = ()
            if test:  # the published test half decides nothing then
                draw = np.random.default_rng(derived_seed(seed, "held out"))
                places = draw.permutation(len(train))
                held = max(1, round(data.val_fraction * len(train)))
                tests, val = val, Part(train, np.sort(places[:held]))
                train = Part(train, np.sort(places[held:]))
            self.inputs = Inputs(self.classes, published_files(path))
            self.inputs.notes.append(
                f"{kind}: {len(train):,} images to train on, {len(val):,} to validate on"
            )
            if stored is not None:
                same_inputs(stored, self.inputs, str(path))
            if data.train_limit is not None and data.train_limit < len(train):
                order = np.random.default_rng(derived_seed(seed, "limit")).permutation(len(train))
                train = Part(train, order[: data.train_limit])
        self.train_size, self.val_size, self.test_size = len(train), len(val), len(tests)
        plain = lambda image: torch.from_numpy(preprocess(image, config))  # noqa: E731
        self.train = Prepared(train, augmentation(data, config, size), seed)
        self.val, self.test = Prepared(val, plain), Prepared(tests, plain)

    def _folder(
        self,
        path: Path,
        seed: int,
        stored: Inputs | None,
        accept_new: bool,
        test: bool,
        check: bool,
        report: Callable[[int, int], None],
    ) -> tuple[Items, Items, Items]:
        folder = read_folder(path)
        inputs = assign(folder, self.data, seed, test)
        limit = self.data.train_limit
        if stored is not None:
            self.earlier_size = len(stored.of("train"))
            inputs = same_inputs(stored, inputs, str(path), accept_new, limit)
        elif limit is not None:
            inputs.images = limited(inputs.images, limit, seed)
        if test and not inputs.of("test"):
            raise VitcliError(f"{path}: the run has kept no test images apart", "leave --test out")
        if check or len(inputs.images) <= SMALL_SET:
            inputs.notes += repeats(folder, inputs)
        else:  # in a large set most files have another of their size, and are read whole
            inputs.notes.append("images are not compared for duplicates; --check compares them")
        if check:
            self.unreadable = unreadable(inputs, report)
            if self.unreadable and self.fail_fast:
                raise unreadable_image(*next(iter(self.unreadable.items())))
            if stored is None:  # later they are skipped when met: the order of the rest stays
                inputs.images = tuple(
                    replace(image, side="unreadable") if image.path in self.unreadable else image
                    for image in inputs.images
                )
        inputs.notes += side_notes(inputs)
        self.inputs, self.classes = inputs, inputs.classes
        place = {name: index for index, name in enumerate(self.classes)}

        def items(side: str) -> Items:
            return [(inputs.entries[i.path], place[i.label]) for i in inputs.of(side)]

        return items("train"), items("val"), items("test") if test else ()

    def _loader(self, images: Prepared, wanted: Iterable[list[tuple[int, int]]]) -> Iterator[Batch]:
        workers = self.data.workers
        loader = DataLoader(
            images,
            batch_sampler=wanted,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=one_thread if workers else None,
            collate_fn=stacked,
        )
        for pixels, labels, skipped in loader:
            for path, reason in skipped:
                self.unreadable[path] = reason
                if self.fail_fast:
                    raise unreadable_image(path, reason)
            if images is self.train and (labels == NO_LABEL).any():
                raise VitcliError(
                    f"none of {len(images):,} training images can be read",
                    "run it with --check to list their errors",
                    exit_code=1,
                )
            yield pixels, labels

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return self._loader(
            self.train, Places([[(epoch, int(i)) for i in indices] for epoch, indices in wanted])
        )

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return self._loader(self.val, Places([[(0, int(i)) for i in part] for part in wanted]))

    def test_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return self._loader(self.test, Places([[(0, int(i)) for i in part] for part in wanted]))


def unreadable_image(path: str, reason: str) -> VitcliError:
    return VitcliError(
        reason if reason.startswith(path) else f"{path}: {reason}",
        "repair or remove it, or leave --fail-fast out to train without it",
        exit_code=1,
    )


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


Sample = tuple[Tensor, int, tuple[tuple[str, str], ...]]
"""An image, its label, and (path, reason) of what could not be read on the way to it."""


def stacked(samples: list[Sample]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """A batch, and what could not be read for it."""
    pixels, labels = default_collate([sample[:2] for sample in samples])
    return pixels, labels, [bad for sample in samples for bad in sample[2]]


class Places(list[list[tuple[int, int]]]):
    """Batches of (epoch, index), as a DataLoader's batch sampler."""


class Prepared(Dataset[Sample]):
    """Image (epoch, index), augmented from a seed of its own: the same in any worker.

    In training the next readable image replaces one that cannot be read, the same whenever
    the run comes there; in validation, and where there is none, the label is NO_LABEL.
    """

    def __init__(
        self, items: Items, transform: Callable[[Any], Tensor], seed: int | None = None
    ) -> None:
        self.items = items
        self.transform = transform
        self.seed = seed

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        epoch, index = place
        bad: list[tuple[str, str]] = []
        for step in range(len(self.items)):
            found = (index + step) % len(self.items)
            item, label = self.items[found]
            try:
                image = read_image(item)
            except ImageError as error:
                bad.append((item.name, error.message))
                if self.seed is None:
                    break
                continue
            if self.seed is not None:
                seed_cpu(derived_seed(self.seed, "augment", epoch, found))
            return self.transform(image), label, tuple(bad)
        blank = self.transform(Image.new("RGB", (8, 8)))
        return torch.zeros_like(blank), NO_LABEL, tuple(bad)

    def __len__(self) -> int:
        return len(self.items)


def read_image(item: Any) -> Image.Image:
    """The upright RGB image of an entry, a path or an image.

    Raises:
        ImageError: it cannot be read.
    """
    if isinstance(item, Image.Image):
        return item.convert("RGB")
    if not isinstance(item, Entry):
        return decode(item).image
    if item.code:
        raise ImageError("unreadable", f"{item.name}: {item.error}")
    return decode(content(item), name=item.name).image


def augmentation(
    data: ImagesData, config: PreprocessConfig, size: tuple[int, int]
) -> Callable[[Any], Tensor]:
    """PIL image to the normalized tensor (3, height, width) that training sees."""
    try:
        from torchvision.transforms import InterpolationMode, v2
    except ImportError as error:
        raise VitcliError("training on images needs torchvision", install_extra("train")) from error

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
