"""Distillation as in DeiT (Touvron et al. 2021): the distillation token learns from a teacher.

B images, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.checkpoints.load import class_names, weights_digest
from vitcli.commands.train.data import channels
from vitcli.config.load import ModelRequest
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import TrainConfig
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.files import first_names
from vitcli.images.folders import class_order
from vitcli.loading import load_model
from vitcli.measures import all_finite
from vitcli.model import Model


class Teacher(nn.Module):
    """A trained classifier that labels a student's images.

    Args:
        outputs: its output of each of the student's classes.
        preprocess: how the student's images are normalized; the teacher reads them with its own
            mean and standard deviation, and resized where its input size is another.
    """

    def __init__(self, model: Model, outputs: Sequence[int], preprocess: PreprocessConfig) -> None:
        super().__init__()
        self.encoder = model.encoder.eval().requires_grad_(False)
        self.size = model.input_size
        self.sha256 = weights_digest(self.encoder)
        (mean, scale), (its_mean, its_scale) = map(channels, (preprocess, model.preprocessing))
        self.gain = (its_scale / scale).to(model.device)  # (3, 1, 1)
        self.shift = ((mean - its_mean) * its_scale).to(model.device)
        self.outputs = torch.tensor(outputs, device=model.device)

    def line(self, train: TrainConfig) -> str:
        """What is distilled, in a line."""
        height, width = self.size
        soft = f", temperature {train.distillation_temperature:g}"
        return (
            f"teacher: {train.teacher} (sha256 {self.sha256[:12]}), reads {height}x{width}; "
            f"{train.distillation} distillation, alpha {train.distillation_alpha:g}"
            + soft
            * (train.distillation == "soft")
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) as the student reads them -> logits (B, K)."""
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        logits: Tensor = self.encoder(images * self.gain + self.shift).output
        return logits[:, self.outputs]


def load_teacher(
    train: TrainConfig, classes: Sequence[str], preprocess: PreprocessConfig, device: torch.device
) -> Teacher:
    """The teacher of a run, its outputs mapped to the run's classes by name.

    Raises:
        VitcliError: it cannot be loaded, is no classifier of these classes, or has other weights
            than when the run began.
    """
    assert train.teacher is not None
    subject = f"train.teacher: {train.teacher}"
    model = load_model(ModelRequest(weights=train.teacher, device=str(device)), by_library=True)
    with torch.no_grad():
        zeros = torch.zeros(1, 3, *model.input_size, device=model.device)
        logits = model.encoder(zeros).output
    names = None if logits is None or logits.ndim != 2 else output_names(model, logits.shape[1])
    if names is None:
        raise VitcliError(
            f"{subject}: is not a classifier whose outputs have names",
            "name a run of vitcli train, or write the names into the teacher's config (id2label or "
            "label_names in config.json, classes in config.yaml)",
        )
    if missing := class_order(set(classes) - set(names)):
        raise VitcliError(
            f"{subject}: has no output for {first_names(missing)}",
            "train a teacher on the same classes",
        )
    if not all_finite(logits):
        raise VitcliError(f"{subject}: gives values that are not finite", "choose another teacher")
    teacher = Teacher(model, [names.index(name) for name in classes], preprocess)
    if train.teacher_sha256 not in (None, teacher.sha256):
        raise VitcliError(
            f"{subject}: has other weights than when the run began (got sha256 "
            f"{teacher.sha256[:12]}, expected {train.teacher_sha256[:12]})",
            "restore the teacher's weights, or start another run with another --out",
        )
    return teacher


def output_names(model: Model, outputs: int) -> tuple[str, ...] | None:
    """The class of each output; None where nobody named them."""
    if not isinstance(model.encoder, LibraryEncoder):
        return model.config.classes
    backbone = model.encoder.backbone
    config = getattr(backbone.module, "config", None)
    names = {"id2label": getattr(config, "id2label", None), **backbone.prepared_by}
    return class_names(names, outputs)


def distillation_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor, train: TrainConfig
) -> Tensor:
    """The loss of DeiT's equation 2 (soft) or 3 (hard), mean over images.

    (1 - alpha) CE(cls, labels) + alpha CE(dist, argmax teacher), or with the temperature t
    (1 - alpha) CE(cls, labels) + alpha t^2 KL(softmax(teacher / t), softmax(dist / t)).
    The teacher's labels are not smoothed. (DeiT's published code divides the KL by K besides.)

    Args:
        logits: (2, B, K), of the classifiers on CLS and on the distillation token.
        labels: (B), or (B, K) of mixed images.
        teacher: (B, K), the teacher's logits.
    """
    own, imitated = logits
    smoothing = 0.0 if labels.ndim == 2 else train.label_smoothing
    base = F.cross_entropy(own, labels, label_smoothing=smoothing)
    if train.distillation == "hard":
        copied = F.cross_entropy(imitated, teacher.argmax(1))
    else:
        t = train.distillation_temperature
        its, mine = (F.log_softmax(values / t, 1) for values in (teacher, imitated))
        copied = t * t * F.kl_div(mine, its, reduction="batchmean", log_target=True)
    return (1 - train.distillation_alpha) * base + train.distillation_alpha * copied
