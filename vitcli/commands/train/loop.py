"""The training loop: every step follows from the seed and its number, so any step can be resumed.

B images of a step over all processes, K classes.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
from vitcli.commands.train.optimization import (
    LINGERING,
    audit,
    average_decay,
    distillation_loss,
    first_bad_layer,
    first_weights_share,
    learning_rate,
    make_optimizer,
    trained_names,
    warmup_steps,
)
from vitcli.commands.train.result import AuditRow, Outcome, Validation, step_facts, validation_line
from vitcli.commands.train.snapshots import RunDirectory, Snapshot
from vitcli.commands.train.splits import derived_seed
from vitcli.commands.train.start import Stopped, Teacher, World, stop_signals
from vitcli.config.training import TrainConfig
from vitcli.engines.pytorch import not_compiled
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, VisionEncoder
from vitcli.nn.pooling import DistilledHead
from vitcli.results import QUIET, Progress

VAL_BATCH = 256


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


@dataclass(eq=False)
class Trainer:
    """One run of one encoder with a classifier of `len(data.classes)` outputs."""

    encoder: VisionEncoder
    """On its device; parameters that must not train have `requires_grad` off."""
    data: TrainingData
    train: TrainConfig
    device: torch.device
    world: World
    directory: RunDirectory | None = None
    """Where the first process writes; no other process has one."""
    audited: bool = False
    """Check, once the adapters' B is not zero any more, that gradients reach the trainable
    parameters and no others."""
    teacher: Teacher | None = None
    """What the classifier on the distillation token imitates."""
    progress: Progress = QUIET

    def __post_init__(self) -> None:
        encoder, data, train = self.encoder, self.data, self.train
        self.writers: list[Callable[[dict[str, Any]], None]] = []
        """Called with every line of metrics, in the first process."""
        self.steps_per_epoch = data.train_size // train.batch
        self.total = self.steps_per_epoch * train.epochs
        self.warmup = warmup_steps(train.warmup, self.total)
        self.expected = trained_names(encoder, train)
        self.trainable = [p for p in encoder.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(encoder, train)
        self.averaged = copy.deepcopy(encoder).requires_grad_(False) if train.ema else None
        model: nn.Module = Classifier(encoder, distilled=self.teacher is not None)
        if train.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        self.model = self.world.wrap(model, self.device)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.audit_rows: tuple[AuditRow, ...] = ()
        self.validation: Validation | None = None
        self.last_batch: Tensor | None = None
        self.signals: list[int] = []
        self.first_step, self.began = 0, time.perf_counter()
        """Where this process went on, and when; validations and snapshots do not count."""
        self.saved_step, self.saved_at = 0, time.monotonic()

    @property
    def validated(self) -> VisionEncoder:
        """The model that counts: the averaged one where there is one."""
        return self.averaged or self.encoder

    def restore(self, snapshot: Snapshot, history: list[dict[str, Any]]) -> None:
        """Continue from a snapshot."""
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
            except RuntimeError as error:
                if self.train.compile and isinstance(error, torch._dynamo.exc.TorchDynamoException):
                    raise not_compiled("train.compile", error, "leave out --compile") from error
                raise

    def _run(self) -> Outcome:
        self.first_step, self.began = self.step, time.perf_counter()
        self.saved_at = time.monotonic()
        last = self.history[-1] if self.history else {}
        validated = last.get("step") == self.step and last.get("val_loss") is not None
        if self._is_due() and not validated:  # the run was stopped before it
            self._log_validation()
        batches = self._batches()
        while self.step < self.total:
            self._stop_or_save()
            with self._rescuing():
                batch = next(batches)
            finite, entry = self._update(batch)
            if not finite:
                self._log(entry)
                assert self.last_batch is not None
                found = self.world.gather(first_bad_layer(self.encoder, self.last_batch))
                layer = next((name for name in found if name), None)
                return self._outcome(None, self.step, layer)
            self.step += 1
            ends = self.step == self.total
            if self.step % self.train.log_every == 0 or ends:
                self._log(entry)
            if self._is_due():
                self._log_validation()
            if self.step % self.train.snapshot_every == 0 or ends:
                self.save()
        return self._outcome(self.validation or self.validate())

    def _is_due(self) -> bool:
        """Whether a validation follows this step."""
        epoch, rest = divmod(self.step, self.steps_per_epoch)
        last = self.step == self.total
        return epoch > 0 and not rest and (last or epoch % self.train.validate_every == 0)

    def _log_validation(self) -> None:
        """Validate, and log it."""
        with self._uncounted(), self._rescuing():
            self.validation = self.validate()
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
        self._log(entry)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """The time of the block is none of the steps'; of a block within it neither."""
        before, began = time.perf_counter(), self.began
        try:
            yield
        finally:
            self.began = began + time.perf_counter() - before

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

    @contextmanager
    def _rescuing(self) -> Iterator[None]:
        """Around what reads images: whatever its error is, the steps before it are whole."""
        try:
            yield
        except Exception:
            self._rescue()
            raise

    def _rescue(self) -> None:
        """Save what is whole, if it is not; what ended the run matters more than a full disk."""
        if self.step > self.saved_step:
            with suppress(VitcliError):
                self.save()
        if self.directory is not None and self.saved_step == self.step > 0:
            self.progress.line(f"snapshot of step {self.step} saved: --resume continues from it")

    def _images_per_s(self) -> float:
        elapsed = time.perf_counter() - self.began
        return (self.step - self.first_step) * self.train.batch / max(elapsed, 1e-9)

    def _outcome(
        self, validation: Validation | None, bad_step: int | None = None, layer: str | None = None
    ) -> Outcome:
        speed = self._images_per_s() if self.step > self.first_step else None
        return Outcome(self.step, validation, bad_step, layer, speed, self.audit_rows)

    def _batches(self) -> Iterator[Batch]:
        seed, batch, size = self.train.seed, self.train.batch, self.data.train_size
        steps, part = range(self.step, self.total), self.world.share(batch)
        return self.data.train_batches(batch_indices(seed, size, batch, steps, part))

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
        pieces = zip(images.chunk(train.accumulate), labels.chunk(train.accumulate), strict=True)
        for place, (x, y) in enumerate(pieces, start=1):
            # gradients are reduced over processes with the last micro-batch only
            alone = self.world.size == 1 or place == train.accumulate
            with nullcontext() if alone else self.model.no_sync():  # type: ignore[operator]
                sums += self._backward(x, y)
        norm = get_total_norm([p.grad for p in self.trainable if p.grad is not None])
        self.world.total(sums)
        loss, right, size = torch.cat([sums, norm.view(1)]).tolist()
        loss, right = loss / self.world.size, right / train.batch
        finite = math.isfinite(loss) and math.isfinite(size)
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

    def _backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradients of a micro-batch; its share of the step's loss, and its right answers."""
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
        loss = loss / train.accumulate
        loss.backward()
        answers = target.argmax(1) if soft else y
        right = (logits.argmax(1) == answers).sum()
        return torch.stack([loss.detach(), right])

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
        for left_out in self.world.gather(self.data.unreadable):  # for the first one's snapshots
            self.data.unreadable.update(left_out)
        model.train(was_training)
        counts = tuple(map(int, values[classes:-1]))
        if not sum(counts):
            raise VitcliError(
                f"none of {size:,} images can be read",
                "run it with --check to list their errors",
                exit_code=1,
            )
        return Validation(values[-1] / sum(counts), tuple(map(int, values[:classes])), counts)

    def _log(self, entry: dict[str, Any]) -> None:
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
            self.progress(self.step, self.total, step_facts(entry, self._images_per_s()))

    def save(self) -> None:
        """A snapshot of this step, and the model for other commands; in the first process."""
        if self.directory is None:
            return
        with self._uncounted():
            model: nn.Module = self.validated
            plain = (
                model.net.state_dict() if isinstance(model, TimmNetwork) else merged_state(model)
            )
            exported = {"model.safetensors": plain}
            if adapters := adapter_state(model):
                exported["adapter.safetensors"] = adapters
                write_peft(self.directory.path, model)
            self.directory.save(
                self.step,
                self.encoder.state_dict(),
                self.averaged.state_dict() if self.averaged is not None else None,
                self.optimizer.state_dict(),
                exported,
                self.data.unreadable,
            )
        self.saved_step, self.saved_at = self.step, time.monotonic()
