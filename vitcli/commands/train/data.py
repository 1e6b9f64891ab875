"""The batches of a run by step, so that it resumes from any of them: shapes, or images on disk;
how images are augmented and batches mixed.

Images are read and augmented from seeds of their own: neither workers nor resuming change a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from vitcli.commands.train.splits import (
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
from vitcli.config.training import ImagesData, ImagesRun, TrainConfig, TrainRequest
from vitcli.errors import VitcliError, install_extra
from vitcli.images.decode import ImageError, decode
from vitcli.images.folders import read_folder
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import Entry, Items, content, published_sets, recognized
from vitcli.images.synthetic import VALIDATION, Shapes
from vitcli.results import QUIET, Progress

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


def batch_indices(
    seed: int, size: int, batch: int, steps: range, part: slice
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, image indices) of each step's part of the batch; a last short batch is left out."""
    per_epoch = size // batch
    order, of_epoch = np.empty(0, dtype=np.int64), -1
    for step in steps:
        epoch, place = divmod(step, per_epoch)
        if epoch != of_epoch:
            random = np.random.default_rng(derived_seed(seed, "order", epoch))
            order, of_epoch = random.permutation(size), epoch
        yield epoch, order[place * batch : (place + 1) * batch][part]


def channels(preprocess: PreprocessConfig) -> tuple[Tensor, Tensor]:
    """What to subtract from and multiply 8-bit levels with, (3, 1, 1) each."""
    mean, std = (
        torch.tensor(values).mul(255)[:, None, None] for values in (preprocess.mean, preprocess.std)
    )
    return mean, 1 / std


@dataclass
class ShapesSource:
    """Shapes, normalized as the encoder's preprocessing says."""

    shapes: Shapes
    train_size: int
    val_size: int
    preprocess: PreprocessConfig

    def __post_init__(self) -> None:
        self.classes = self.shapes.classes
        self.unreadable: dict[str, str] = {}
        self.mean, self.scale = channels(self.preprocess)

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


NO_LABEL = -1
"""Of a validation image that cannot be read: it counts nowhere."""


def part(items: Items, places: NDArray[np.int64]) -> Items:
    """Some of the items, by index."""
    return cast(Items, Subset(cast(Any, items), places.tolist()))


class ImagesSource:
    """A training, a validation and perhaps a test set of images, as `TrainingData`.

    Args:
        stored: the inputs of the run that is resumed.
        progress: called with how many images of `--check` are decoded, of how many.
    """

    def __init__(
        self,
        config: ImagesRun,
        request: TrainRequest,
        stored: Inputs | None = None,
        download: bool = False,
        progress: Progress = QUIET,
    ) -> None:
        self.data, self.request, self.seed = config.data, request, config.train.seed
        self.unreadable: dict[str, str] = {}
        self.earlier_size: int | None = None
        """Training images of the folder's run that is resumed."""
        path = Path(config.data.path or "")
        kind = self.data.kind if self.data.kind != "auto" else recognized(path)
        if kind == "folder":
            train, val, test = self._folder(path, stored, progress)
        else:
            train, val, test = self._published(path, kind, stored, download)
        self.train_size, self.val_size, self.test_size = len(train), len(val), len(test)
        plain = partial(as_validated, config=config.preprocess)
        augmented = augmentation(self.data, config.preprocess, config.encoder.image_size)
        self.train = Prepared(train, augmented, self.seed)
        self.val, self.test = Prepared(val, plain), Prepared(test, plain)

    def _published(
        self, path: Path, kind: str, stored: Inputs | None, download: bool
    ) -> tuple[Items, Items, Items]:
        train, val, self.classes = published_sets(path, kind, download)
        test: Items = ()
        if self.request.test:  # the published test half decides nothing then
            draw = np.random.default_rng(derived_seed(self.seed, "held out"))
            places = draw.permutation(len(train))
            held = max(1, round(self.data.val_fraction * len(train)))
            test, val = val, part(train, np.sort(places[:held]))
            train = part(train, np.sort(places[held:]))
        self.inputs = Inputs(self.classes, published_files(path, self.request.out))
        self.inputs.notes.append(
            f"{kind}: {len(train):,} images to train on, {len(val):,} to validate on"
        )
        if stored is not None:
            same_inputs(stored, self.inputs, str(path))
        limit = self.data.train_limit
        if limit is not None and limit < len(train):
            order = np.random.default_rng(derived_seed(self.seed, "limit")).permutation(len(train))
            train = part(train, order[:limit])
        return train, val, test

    def _folder(
        self, path: Path, stored: Inputs | None, progress: Progress
    ) -> tuple[Items, Items, Items]:
        request, limit = self.request, self.data.train_limit
        folder = read_folder(path, out=request.out)
        inputs = assign(folder, self.data, self.seed, request.test)
        if stored is not None:
            self.earlier_size = len(stored.of("train"))
            inputs = same_inputs(stored, inputs, str(path), request.accept_new_data, limit)
        elif limit is not None:
            inputs.images = limited(inputs.images, limit, self.seed)
        if request.test and not inputs.of("test"):
            raise VitcliError(f"{path}: the run has kept no test images apart", "leave --test out")
        if request.check or len(inputs.images) <= SMALL_SET:
            inputs.notes += repeats(inputs)
        else:  # in a large set most files have another of their size, and are read whole
            inputs.notes.append("images are not compared for duplicates; --check compares them")
        if request.check:
            self.leave_out(unreadable(inputs, progress).items())
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

        return items("train"), items("val"), items("test") if request.test else ()

    def leave_out(self, images: Iterable[tuple[str, str]]) -> None:
        """Note the (path, reason) of images that cannot be read.

        Raises:
            VitcliError: there is one, and the run is to end at it (exit code 1).
        """
        for path, reason in images:
            self.unreadable[path] = reason
            if self.request.fail_fast:
                raise VitcliError(
                    reason if reason.startswith(path) else f"{path}: {reason}",
                    "repair or remove it, or leave --fail-fast out to train without it",
                    exit_code=1,
                )

    def _loader(self, images: Prepared, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        workers = self.data.workers
        loader = DataLoader(
            images,
            batch_sampler=([(epoch, int(i)) for i in part] for epoch, part in wanted),
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=one_thread if workers else None,
            collate_fn=stacked,
        )
        for pixels, labels, skipped in loader:
            self.leave_out(skipped)
            if images is self.train and (labels == NO_LABEL).any():
                raise VitcliError(
                    f"none of {len(images):,} training images can be read",
                    "run it with --check to list their errors",
                    exit_code=1,
                )
            yield pixels, labels

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return self._loader(self.train, wanted)

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return self._loader(self.val, ((0, part) for part in wanted))

    def test_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return self._loader(self.test, ((0, part) for part in wanted))


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


Sample = tuple[Tensor, int, tuple[tuple[str, str], ...]]
"""An image, its label, and (path, reason) of what could not be read on the way to it."""


def stacked(samples: list[Sample]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """A batch, and what could not be read for it."""
    pixels, labels = default_collate([sample[:2] for sample in samples])
    return pixels, labels, [bad for sample in samples for bad in sample[2]]


@dataclass(eq=False)
class Prepared(Dataset[Sample]):
    """Image (epoch, index), augmented from a seed of its own: the same in any worker.

    In training the next readable image replaces one that cannot be read, the same whenever
    the run comes there; in validation, and where there is none, the label is NO_LABEL.
    """

    items: Items
    transform: Callable[[Any], Tensor]
    seed: int | None = None
    """Of training; without it nothing is random."""

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


def augmentation(
    data: ImagesData, config: PreprocessConfig, size: tuple[int, int]
) -> Callable[[Any], Tensor]:
    """PIL image to the normalized tensor (3, height, width) that training sees."""
    try:
        from torchvision.transforms import InterpolationMode, v2
    except ImportError as error:
        raise VitcliError("training on images needs torchvision", install_extra("train")) from error

    filter_ = InterpolationMode(config.filter)
    scale, ratio = data.crop_scale, data.crop_ratio
    crop = v2.RandomResizedCrop(size, scale, ratio, filter_) if scale else v2.Resize(size, filter_)
    steps: list[Any] = [crop]
    if data.pad_crop:
        steps.append(v2.RandomCrop(size, padding=data.pad_crop))
    if data.flip:
        steps.append(v2.RandomHorizontalFlip(data.flip))
    mean, gain = channels(config)
    erase = v2.RandomErasing(data.erase) if data.erase else nn.Identity()
    return partial(as_trained, v2.Compose(steps), mean, gain, erase)


# Functions of a module, as workers that are not forked get them by their names.


def as_trained(geometry: Any, mean: Tensor, gain: Tensor, erase: Any, image: Any) -> Tensor:
    pixels = torch.from_numpy(np.array(geometry(image))).permute(2, 0, 1).float()
    erased: Tensor = erase(pixels.sub_(mean).mul_(gain).contiguous())
    return erased


def as_validated(image: Any, config: PreprocessConfig) -> Tensor:
    return torch.from_numpy(preprocess(image, config))
