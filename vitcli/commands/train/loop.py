"""The training loop: every step follows from the seed and its number, so any step can be resumed.

B images of a step over all processes, K classes.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitcli.checkpoints.adapters import adapter_state, merged_state, write_peft
from vitcli.commands.train.data import (
    Batch,
    TrainingData,
    batch_indices,
    mix_batch,
    seed_device,
    soft_targets,
)
from vitcli.commands.train.distillation import Teacher, distillation_loss
from vitcli.commands.train.inputs import derived_seed
from vitcli.commands.train.result import AuditRow, Outcome, Validation, step_facts, validation_line
from vitcli.commands.train.snapshots import RunDirectory, Snapshot
from vitcli.commands.train.start import (
    World,
    audit,
    first_bad_layer,
    learning_rate,
    make_optimizer,
    trained_names,
    warmup_steps,
)
from vitcli.config.training import TrainConfig
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, VisionEncoder
from vitcli.nn.pooling import DistilledHead
from vitcli.results import QUIET, Progress

VAL_BATCH = 256
LINGERING = 0.1
"""A share of the first weights in the average that a validation mentions."""


class Stopped(BaseException):
    """A signal asked the run to end; it ends where a snapshot can be taken."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in place of obeying; the second one does not wait.

    At the end the signal is sent again, to whoever took it before.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            os.kill(os.getpid(), caught[0])


def average_decay(decay: float, update: int) -> float:
    """Of the average at its update `update`, from 0: the first copies the weights."""
    return min(decay, (1 + update) / (10 + update)) if update else 0.0


def first_weights_share(decay: float, updates: int) -> float:
    """How much of an average is still the weights that its first update copied."""
    share = 1.0
    for update in range(1, updates):
        share *= average_decay(decay, update)
        if share <= LINGERING:
            break
    return share


class Classifier(nn.Module):
    """The encoder's head output alone, as data-parallel and compiled training want it.

    `distilled`: (2, B, K), of the classifiers on CLS and on the distillation token.
    """

    def __init__(self, encoder: VisionEncoder, distilled: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.distilled = distilled

    def forward(self, images: Tensor) -> Tensor:
        found: EncoderOutput = self.encoder(images)
        logits: Tensor | None = found.output
        if self.distilled:
            logits = cast(DistilledHead, self.encoder.head).both(found.tokens)
        assert logits is not None
        return logits


class Trainer:
    """One run of one encoder with a classifier of `len(data.classes)` outputs.

    Args:
        encoder: on its device; parameters that must not train have `requires_grad` off.
        audited: check, once the adapters' B is not zero any more, that gradients reach the
            trainable parameters and no others.
        teacher: what the classifier on the distillation token imitates.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        data: TrainingData,
        train: TrainConfig,
        device: torch.device,
        world: World,
        directory: RunDirectory | None = None,
        audited: bool = False,
        teacher: Teacher | None = None,
        progress: Progress = QUIET,
    ) -> None:
        self.encoder = encoder
        self.data = data
        self.train = train
        self.device = device
        self.world = world
        self.directory = directory if world.first else None
        self.audited = audited
        self.teacher = teacher
        self.progress = progress
        self.writers: list[Callable[[dict[str, Any]], None]] = []
        """Called with every line of metrics, in the first process."""
        self.steps_per_epoch = data.train_size // train.batch
        self.total = self.steps_per_epoch * train.epochs
        self.warmup = warmup_steps(train.warmup, self.total)
        self.expected = trained_names(encoder, train)
        self.trainable = [p for p in encoder.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(encoder, train)
        self.averaged = copy.deepcopy(encoder).requires_grad_(False) if train.ema else None
        model: nn.Module = Classifier(encoder, distilled=teacher is not None)
        if train.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        self.model = world.wrap(model, device)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.audit_rows: tuple[AuditRow, ...] = ()
        self.validation: Validation | None = None
        self.last_batch: Tensor | None = None
        self.signals: list[int] = []
        self.spent = 0.0
        """Seconds that went into validations and snapshots."""
        self.saved_step, self.saved_at = 0, time.monotonic()

    @property
    def validated(self) -> VisionEncoder:
        """The model that counts: the averaged one where there is one."""
        return self.averaged or self.encoder

    def restore(self, snapshot: Snapshot, history: list[dict[str, Any]]) -> None:
        """Continue from a snapshot.

        Raises:
            VitcliError: it does not fit this model.
        """
        optimizer = snapshot.fit(
            self.encoder.state_dict(), self.averaged is not None, self.optimizer
        )
        if snapshot.step > self.total:
            raise VitcliError(
                f"{snapshot.folder}: is beyond the run's end (got step {snapshot.step}, "
                f"expected at most {self.total})",
                "resume with the run's own epochs, batch and data",
            )
        self.encoder.load_state_dict(snapshot.weights)
        if self.averaged is not None and snapshot.ema is not None:
            self.averaged.load_state_dict(snapshot.ema)
        self.optimizer.load_state_dict(optimizer)
        self.step = self.saved_step = snapshot.step
        self.history = history
        self.data.unreadable.update(snapshot.unreadable)

    def run(self) -> Outcome:
        """Train to the last step, or to the first that is not finite.

        A signal to stop and an error in the data leave a snapshot of the last step behind.
        """
        with stop_signals() as self.signals:
            try:
                return self._run()
            except Stopped:
                self._rescue()
                raise KeyboardInterrupt from None  # where no signal handler ends the process

    def _run(self) -> Outcome:
        began, first, self.spent = time.perf_counter(), self.step, 0.0
        self.saved_at = time.monotonic()
        if self._is_due() and not self._is_validated():
            self._log_validation(first, began)  # the run was stopped before it
        batches = self._batches()
        while self.step < self.total:
            self._stop_or_save()
            try:
                batch = next(batches)
            except Exception:  # whatever it is, the steps before it are whole
                self._rescue()
                raise
            finite, entry = self._update(batch)
            if not finite:
                self._log(entry, 0.0)
                return self._outcome(None, first, began + self.spent)
            self.step += 1
            last = self.step == self.total
            if self.step % self.train.log_every == 0 or last:
                self._log(entry, self._rate(first, began + self.spent))
            if self._is_due():
                self._log_validation(first, began)
            if self.step % self.train.snapshot_every == 0 or last:
                self.save()
        return self._outcome(self.validation or self.validate(), first, began + self.spent)

    def _is_due(self) -> bool:
        """Whether a validation follows this step."""
        epoch, rest = divmod(self.step, self.steps_per_epoch)
        last = self.step == self.total
        return epoch > 0 and not rest and (last or epoch % self.train.validate_every == 0)

    def _is_validated(self) -> bool:
        last = self.history[-1] if self.history else {}
        return last.get("step") == self.step and last.get("val_loss") is not None

    def _log_validation(self, first: int, began: float) -> None:
        """Validate, and log it."""
        before, spent = time.perf_counter(), self.spent
        self.validation = self.validate()
        self.spent = spent + time.perf_counter() - before
        entry = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "val_loss": self.validation.loss,
            "val_accuracy": self.validation.accuracy,
        }
        if self.train.ema:
            share = first_weights_share(self.train.ema, self.step)
            if share > LINGERING:
                entry["ema_first_share"] = share
        self._log(entry, self._rate(first, began + self.spent))

    def _stop_or_save(self) -> None:
        """Between two steps or batches: stop if a signal came, save if the last is long ago.

        Raises:
            Stopped: a signal came.
        """
        if self.signals:
            raise Stopped
        late = time.monotonic() - self.saved_at >= self.train.snapshot_seconds
        if late and self.step > self.saved_step:
            self.save()

    def _rescue(self) -> None:
        """Save what is whole, if it is not; what ended the run matters more than a full disk."""
        if self.step > self.saved_step:
            with suppress(VitcliError):
                self.save()
        if self.directory is not None and self.saved_step == self.step > 0:
            self.progress.line(f"snapshot of step {self.step} saved: --resume continues from it")

    def _rate(self, first: int, began: float) -> float:
        elapsed = time.perf_counter() - began
        return (self.step - first) * self.train.batch / max(elapsed, 1e-9)

    def _outcome(self, validation: Validation | None, first: int, began: float) -> Outcome:
        bad = validation is None
        return Outcome(
            self.step,
            validation,
            self.step if bad else None,
            self._bad_layer() if bad else None,
            self._rate(first, began) if self.step > first else None,
            self.audit_rows,
        )

    def _bad_layer(self) -> str | None:
        assert self.last_batch is not None
        found = first_bad_layer(self.encoder, self.last_batch)
        return next((name for name in self.world.gather(found) if name), None)

    def _batches(self) -> Iterator[Batch]:
        train = self.train
        part = self.world.share(train.batch)
        steps = range(self.step, self.total)
        size = self.data.train_size
        wanted = batch_indices(train.seed, size, train.batch, steps, part)
        return self.data.train_batches(wanted)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.train.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.train.dtype))

    def _update(self, batch: Batch) -> tuple[bool, dict[str, Any]]:
        """One update, unless its loss or gradient is not finite; the step's line of metrics."""
        train, step = self.train, self.step
        rate = learning_rate(step, self.total, train.lr, self.warmup, train.schedule, train.min_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.encoder.train(train.freeze == "none")  # a frozen encoder drops nothing
        self.optimizer.zero_grad()
        seed_device(derived_seed(train.seed, "step", step, self.world.rank), self.device)
        sums = torch.zeros(2, device=self.device)  # loss and right answers
        images, labels = (t.to(self.device, non_blocking=True) for t in batch)
        pieces = list(
            zip(images.chunk(train.accumulate), labels.chunk(train.accumulate), strict=True)
        )
        for place, (x, y) in enumerate(pieces):
            with self._unsynced(last=place == len(pieces) - 1):
                sums += self._backward(x, y, len(pieces))
        norm = get_total_norm([p.grad for p in self.trainable if p.grad is not None])
        self.world.total(sums)
        loss, right, size = torch.cat([sums, norm.view(1)]).tolist()
        loss, right = loss / self.world.size, right / train.batch
        finite = loss - loss == 0 and size - size == 0
        if finite:
            # At step 0 the adapters' B is zero, and with it the gradient of A.
            if self.audited and not self.audit_rows and (step > 0 or self.total == 1):
                still = {n for n in self.expected if n.endswith(".down")} if step == 0 else set()
                self.audit_rows = tuple(audit(self.encoder, self.expected, still))
            if train.clip_grad is not None:
                clip_grads_with_norm_(self.trainable, train.clip_grad, norm)
            self.optimizer.step()
            if self.averaged is not None:
                self._average()
        else:
            self.last_batch = images
        entry = {
            "step": step + 1,
            "epoch": (step + 1) / self.steps_per_epoch,
            "loss": loss,
            "accuracy": right,
            "lr": rate,
            "grad_norm": size,
        }
        return finite, entry

    def _backward(self, x: Tensor, y: Tensor, pieces: int) -> Tensor:
        train = self.train
        soft = bool(train.mixup or train.cutmix)
        target: Tensor = y
        if soft:
            target = soft_targets(y, len(self.data.classes), train.label_smoothing)
            x, target = mix_batch(x, target, train, derived_seed(train.seed, "mix", self.step))
        with self._autocast():
            logits = self.model(x).float()
            if self.teacher is not None:
                loss = distillation_loss(logits, target, self.teacher(x).float(), train)
                logits = logits.mean(0)
            else:
                smoothing = 0.0 if soft else train.label_smoothing
                loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        (loss / pieces).backward()
        answers = target.argmax(1) if soft else y
        right = (logits.argmax(1) == answers).sum()
        return torch.stack([loss.detach() / pieces, right])

    def _unsynced(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced over processes with the last micro-batch only."""
        if last or self.world.size == 1:
            return nullcontext()
        context: AbstractContextManager[Any] = self.model.no_sync()  # type: ignore[operator]
        return context

    def _average(self) -> None:
        assert self.averaged is not None and self.train.ema is not None
        average = get_ema_multi_avg_fn(average_decay(self.train.ema, self.step))
        average(list(self.averaged.parameters()), list(self.encoder.parameters()), 0)
        for mine, theirs in zip(self.averaged.buffers(), self.encoder.buffers(), strict=True):
            mine.copy_(theirs)  # a batch norm's statistics are an average already

    def validate(self) -> Validation:
        """Loss and right answers of each class over all validation images."""
        return self.evaluate(self.data.val_batches, self.data.val_size)

    @torch.no_grad()
    def evaluate(
        self, batches: Callable[[Iterable[Sequence[int]]], Iterator[Batch]], size: int
    ) -> Validation:
        """The model that counts, over the `size` images that `batches` gives by index."""
        model = self.validated
        was_training = model.training
        model.eval()
        mine = range(size)[self.world.share(size)]
        wanted: list[Sequence[int]] = [
            mine[at : at + VAL_BATCH] for at in range(0, len(mine), VAL_BATCH)
        ]
        classes = len(self.data.classes)
        sums = torch.zeros(2 * classes + 1, dtype=torch.float64)
        for images, labels in batches(wanted):
            self._stop_or_save()
            with self._autocast():
                logits = model(images.to(self.device)).output.float().cpu()
            known = labels >= 0
            logits, labels = logits[known], labels[known]
            sums[:classes] += labels[logits.argmax(1) == labels].bincount(minlength=classes)
            sums[classes:-1] += labels.bincount(minlength=classes)
            sums[-1] += F.cross_entropy(logits.double(), labels, reduction="sum")
        values = self.world.total(sums).tolist()
        model.train(was_training)
        counts = tuple(map(int, values[classes:-1]))
        if not sum(counts):
            raise VitcliError(
                f"none of {size:,} images can be read",
                "run it with --check to list their errors",
            )
        return Validation(values[-1] / sum(counts), tuple(map(int, values[:classes])), counts)

    def _log(self, entry: dict[str, Any], rate: float) -> None:
        self.history.append(entry)
        if self.directory:
            self.directory.log(entry)
        if not self.world.first:
            return
        for write in self.writers:
            write(entry)
        if "val_loss" in entry:
            self.progress.line(validation_line(entry, self.total))
        else:
            self.progress(self.step, self.total, step_facts(entry, rate))

    def save(self) -> None:
        """A snapshot of this step, and the model for other commands; in the first process."""
        if self.directory is None:
            return
        before = time.perf_counter()
        model: nn.Module = self.validated
        plain = model.net.state_dict() if isinstance(model, TimmNetwork) else merged_state(model)
        exported = {"model.safetensors": plain}
        adapters = adapter_state(self.validated)
        if adapters:
            exported["adapter.safetensors"] = adapters
            write_peft(self.directory.path, self.validated)
        self.directory.save(
            self.step,
            self.encoder.state_dict(),
            self.averaged.state_dict() if self.averaged is not None else None,
            self.optimizer.state_dict(),
            exported,
            self.data.unreadable,
        )
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self.spent += time.perf_counter() - before
