"""The images of a run: which file trains, validates or tests, and that a resumed run has the same.

An image's side follows from its own name and the seed, so another file beside it moves none.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitcli.config.training import ImagesData
from vitcli.errors import VitcliError
from vitcli.files import atomic_write, first_names, printable
from vitcli.images import MEMORY_BYTES, TIMEOUT_S
from vitcli.images.decode import ImageError, decode
from vitcli.images.folders import (
    ImageFolder,
    bytes_of,
    class_order,
    content_digest,
    content_mark,
)
from vitcli.images.sources import EXAMPLE, Entry, content
from vitcli.images.workers import Decoded, DecodePool, DecodeWork, available_cpus
from vitcli.results import QUIET, Progress

USED = ("train", "val", "test")
SIDES = (*USED, "unused", "unreadable")
SMALL_SET = 20_000
"""Images up to which copies are looked for without --check, and contents are remembered."""


def derived_seed(seed: int, *place: str | int) -> int:
    """A 63-bit seed for a named place, for example `derived_seed(0, "order", epoch)`."""
    text = "/".join(map(str, (seed, *place))).encode("utf-8", "surrogatepass")  # of any name
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class Input:
    """An image of the run, or a file of a published set."""

    path: str
    """Below the folder, with `/`; a shard's member is below its shard."""
    size: int
    side: str
    """One of SIDES."""
    label: str
    """The class; empty for a file of a published set."""
    mark: str = ""
    """A digest of how its content begins; empty where it is not known."""

    def is_changed(self, before: Input) -> bool:
        """Whether a file of one path is another image than `before`."""
        if self.mark and before.mark and self.mark != before.mark:
            return True
        return (self.size, self.label) != (before.size, before.label)


@dataclass
class Inputs:
    """All images of a run with their sides, and what there is to say about them."""

    classes: tuple[str, ...]
    images: tuple[Input, ...]
    entries: dict[str, Entry] = field(default_factory=dict)
    """Where each path is read."""
    notes: list[str] = field(default_factory=list)
    drawn: bool = False
    """Whether the validation images were drawn from the training ones."""

    def of(self, side: str) -> list[Input]:
        return [image for image in self.images if image.side == side]


def spot(image: Input, seed: int, what: str) -> float:
    """The place of an image from 0 to 1 in the draw `what`; its name and the seed decide."""
    return derived_seed(seed, what, image.path) / 2**63


def held_out(images: Sequence[Input], fraction: float, seed: int) -> list[Input]:
    """The images with about `fraction` of them on the side `val`.

    Every class of two images or more has at least one on each side: where the draw leaves one
    side empty, the image nearest to it goes there.
    """
    by_class: dict[str, list[Input]] = defaultdict(list)
    for image in images:
        by_class[image.label].append(image)
    val: set[str] = set()
    for own in by_class.values():
        own.sort(key=lambda image: (spot(image, seed, "held out"), image.path))
        count = sum(spot(image, seed, "held out") < fraction for image in own)
        val.update(image.path for image in own[: min(max(count, 1), len(own) - 1)])
    return [replace(image, side="val" if image.path in val else "train") for image in images]


def assign(folder: ImageFolder, data: ImagesData, seed: int, test: bool = False) -> Inputs:
    """A side for every image of a folder, by its splits or by the draw.

    Args:
        test: a test split is wanted at the end, so nothing else may use it.
    """
    where = printable(folder.folder)
    notes = folder.lines()
    entries = {}
    of: dict[str | None, list[Input]] = defaultdict(list)
    for item in folder.items:
        if item.label is not None and item.split not in ("unlabeled", "other"):
            entries[item.entry.name] = item.entry
            side = item.split or "train"
            of[item.split].append(Input(item.entry.name, bytes_of(item.entry), side, item.label))
    if not entries:
        raise VitcliError(f"{where}: its images have no classes", EXAMPLE)
    train, val, tests = of["train"] or of[None], of["val"], of["test"]
    if not train:
        raise VitcliError(f"{where}: there is no training split with classes", EXAMPLE)
    if not val and tests and not test:
        notes.append(
            "validation on the test split: there is no other (--test keeps it for the end)"
        )
        val, tests = [replace(image, side="val") for image in tests], []
    if not tests and test:
        lack = "its test images have no classes" if folder.of("test") else "there is no test split"
        raise VitcliError(f"{where}: {lack}, which --test needs", "leave --test out")
    sides = train if val else held_out(train, data.val_fraction, seed)
    found = Inputs(folder.classes, (*sides, *val, *tests), entries, notes, drawn=not val)
    if len(found.classes) < 2:
        name = printable(found.classes[0])
        raise VitcliError(f"{where}: contains one class ({name}, expected at least 2)", EXAMPLE)
    if not found.of("val"):
        raise VitcliError(f"{where}: {len(train)} images are too few to hold some out", EXAMPLE)
    return found


def side_notes(inputs: Inputs) -> list[str]:
    """How many images were held out, and the classes that a side is without."""
    train, val = inputs.of("train"), inputs.of("val")
    notes = []
    if inputs.drawn:
        total = len(train) + len(val)
        notes.append(f"held out for validation: {len(val):,} of {total:,} images")
    single = {label for label, count in Counter(i.label for i in train).items() if count == 1}
    for side, what in ((train, "training"), (val, "validation")):
        missing = class_order(set(inputs.classes) - {image.label for image in side})
        if missing:
            alone = inputs.drawn and side is val and single.issuperset(missing)
            reason = " (a class of one image trains)" if alone else ""
            notes.append(f"without a {what} image: {first_names(missing)}{reason}")
    return notes


def limited(images: Sequence[Input], limit: int, seed: int) -> tuple[Input, ...]:
    """At most `limit` training images, drawn by their names; the rest is unused."""
    train = [image for image in images if image.side == "train"]
    train.sort(key=lambda image: (spot(image, seed, "limit"), image.path))
    kept = {image.path for image in train[:limit]}
    return tuple(
        image if image.side != "train" or image.path in kept else replace(image, side="unused")
        for image in images
    )


def published_files(path: Path, out: Path | None = None) -> tuple[Input, ...]:
    """The files of a published set, for a resumed run to know them again; without its own."""
    own = out and out.resolve()
    files = sorted(f for f in path.rglob("*") if f.is_file() and own not in f.resolve().parents)
    return tuple(
        Input(file.relative_to(path).as_posix(), file.stat().st_size, "unused", "")
        for file in files
    )


def same_inputs(
    stored: Inputs, now: Inputs, folder: str, accept_new: bool = False, limit: int | None = None
) -> Inputs:
    """The stored sides for the files that are there now; what could not be read may be gone.

    Args:
        accept_new: new files of known classes train, everything else stays where it was.
    """
    if any(image.mark for image in stored.images):
        now = replace(now, images=marked(now))
    before = {image.path: image for image in stored.images}
    after = {image.path: image for image in now.images}
    used = {path: image for path, image in before.items() if image.side != "unreadable"}
    added = [after[path] for path in after if path not in before]
    removed = [image for path, image in used.items() if path not in after]
    changed = [p for p, image in used.items() if p in after and after[p].is_changed(image)]
    added, removed, moved, renamed = _pairs(added, removed)
    hint = "restore the files, or start another run with another --out"
    lists = [
        ("removed", [image.path for image in removed]),
        ("moved", moved),
        ("renamed", renamed),
        ("changed", changed),
    ]
    if not accept_new:
        lists.insert(0, ("added", [image.path for image in added]))
    wrong = [f"{len(names):,} {what} ({first_names(names)})" for what, names in lists if names]
    if wrong:
        if added and not accept_new and len(wrong) == 1:
            hint = "remove them, or add --accept-new-data: they train, and every old file stays"
        raise VitcliError(
            f"{printable(folder)}: the images are not those of the run: {', '.join(wrong)}", hint
        )
    strange = class_order({image.label for image in added} - set(stored.classes))
    if strange:
        raise VitcliError(
            f"{printable(folder)}: the run has no class {first_names(strange)}",
            "start another run: vitcli train DATA --weights RUN --out DIR",
        )
    # What the folder keeps for validation or test stays unseen, new files there included.
    trains = {"train", "val"} if now.drawn else {"train"}
    room = len(added) if limit is None else max(0, limit - len(stored.of("train")))
    new = []
    for image in added:
        side = "train" if image.side in trains and room > 0 else "unused"
        room -= side == "train"
        new.append(replace(image, side=side))
    notes = list(now.notes)
    if new:
        count = Counter(image.side for image in new)
        notes.append(f"new files: {count['train']:,} train, {count['unused']:,} stay unused")
    return replace(now, classes=stored.classes, images=(*stored.images, *new), notes=notes)


def _pairs(
    added: list[Input], removed: list[Input]
) -> tuple[list[Input], list[Input], list[str], list[str]]:
    """What was added and removed, without the files that only moved or have another name.

    Contents decide, where they are known. Else a file of the same size and name has moved, or one
    of the same size and folder has another name, if there is only one such pair.
    """
    moved: list[str] = []
    renamed: list[str] = []
    left, rest = ({image.path: image for image in images} for images in (added, removed))

    def match(key: Callable[[Input], tuple[object, ...]], known: bool) -> None:
        olds, news = (_by(images.values(), key) for images in (rest, left))
        for value, old in olds.items():
            new = news.get(value, [])
            if known != bool(old[0].mark) or not (known or len(old) == len(new) == 1):
                continue
            for before, after in zip(old, new, strict=False):
                stays = Path(before.path).parent == Path(after.path).parent
                (renamed if stays else moved).append(f"{before.path} to {after.path}")
                del rest[before.path], left[after.path]

    def content(image: Input) -> tuple[object, ...]:
        return image.size, image.mark

    for known in (True, False):
        match(lambda image: (*content(image), Path(image.path).name), known)
        match(lambda image: (*content(image), Path(image.path).parent), known)
    match(content, True)
    return [*left.values()], [*rest.values()], moved, renamed


def _by(
    images: Iterable[Input], key: Callable[[Input], tuple[object, ...]]
) -> dict[tuple[object, ...], list[Input]]:
    found: dict[tuple[object, ...], list[Input]] = defaultdict(list)
    for image in images:
        found[key(image)].append(image)
    return found


def marked(inputs: Inputs) -> tuple[Input, ...]:
    """The images, those of a small set with the digests of their contents."""
    if len(inputs.images) > SMALL_SET:
        return inputs.images
    return tuple(
        image
        if image.mark or image.path not in inputs.entries
        else replace(image, mark=content_mark(inputs.entries[image.path]))
        for image in inputs.images
    )


def write_inputs(path: Path, inputs: Inputs) -> None:
    """A line of the classes, then one per image: path, size, side, class, digest if known."""
    with atomic_write(path) as file:
        file.write(json.dumps({"classes": inputs.classes}).encode() + b"\n")
        for image in inputs.images:
            row = [image.path, image.size, image.side, image.label, image.mark]
            file.write(json.dumps(row).encode() + b"\n")


def read_inputs(path: Path) -> Inputs | None:
    """What `write_inputs` wrote; None where a run has no list."""
    try:
        with path.open("rb") as file:
            classes = json.loads(file.readline())["classes"]
            images = tuple(_row(json.loads(line)) for line in file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise VitcliError(
            f"{printable(path)}: is not a run's list of inputs",
            "start another run with another --out",
        ) from error
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise VitcliError(
            f"{printable(path)}: has no class names", "start another run with another --out"
        )
    return Inputs(tuple(classes), images)


def _row(values: object) -> Input:
    kinds = (str, int, str, str, str)
    if not isinstance(values, list) or tuple(map(type, values)) not in (kinds[:4], kinds):
        raise ValueError("not an input")
    found = Input(*values)
    if found.side not in SIDES:
        raise ValueError("not a side")
    return found


def repeats(inputs: Inputs) -> list[str]:
    """What to say about files of the same bytes in two classes or on two sides.

    Only files of the same length are read. What cannot be read is left out.
    """
    pairs: list[tuple[Input, Input]] = []
    used = (image for image in inputs.images if image.side in USED)
    for (size,), images in _by(used, lambda image: (image.size,)).items():
        first: dict[bytes, Input] = {}
        for image in images if len(images) > 1 and size != -1 else ():
            digest = content_digest(inputs.entries[image.path])
            other = first.setdefault(digest, image) if digest else image
            if (other.side, other.label) != (image.side, image.label):
                pairs.append((other, image))
    notes = []
    for what, key in (("classes", "label"), ("splits", "side")):
        found = [pair for pair in pairs if getattr(pair[0], key) != getattr(pair[1], key)]
        if found:
            names = first_names([f"{one.path} = {other.path}" for one, other in found])
            notes.append(f"the same file in two {what}: {len(found):,} ({names})")
    return notes


def unreadable(inputs: Inputs, progress: Progress = QUIET) -> dict[str, str]:
    """Decodes every image that the run uses, on all cores; path -> reason of those that fail."""
    used = [image for image in inputs.images if image.side in USED]
    cpus = available_cpus()
    bad = {}
    work = DecodeWork(memory_bytes=MEMORY_BYTES)
    with DecodePool(work, cpus, TIMEOUT_S, 4 * cpus, check_entry) as pool:
        answers = pool.decode(inputs.entries[image.path] for image in used)
        for done, (image, answer) in enumerate(zip(used, answers, strict=True), 1):
            if answer.code != "ok":
                bad[image.path] = answer.error
            progress(done, len(used), "images decoded")
    return bad


def check_entry(entry: Entry, work: DecodeWork) -> Decoded:
    """Decode an image and keep nothing of it; runs in a process of its own."""
    if entry.code:
        return Decoded(code=entry.code, error=entry.error)
    try:
        decode(content(entry), name=entry.name)
        return Decoded()
    except ImageError as error:
        return Decoded(code=error.code, error=error.message)
