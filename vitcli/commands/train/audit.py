"""Which parameters a backward pass reaches, held against which it should reach."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from vitcli.commands.train.result import AuditRow
from vitcli.errors import VitcliError


def audit(model: nn.Module, expected: set[str], still: Collection[str] = ()) -> list[AuditRow]:
    """One row for each parameter after a backward pass; `expected` are the names to be trained.

    `still` are those of them whose gradient may be zero.

    Raises:
        VitcliError: a gradient on a parameter that is not expected, or none (or a zero one) on
            one that is (exit code 1).
    """
    rows = [
        AuditRow(
            name,
            p.numel(),
            name in expected,
            None if p.grad is None else float(p.grad.norm()),
        )
        for name, p in model.named_parameters()
    ]
    leaks = [r.name for r in rows if not r.trainable and r.gradient_norm is not None]
    dry = [
        r.name
        for r in rows
        if r.trainable and not r.gradient_norm and (r.gradient_norm is None or r.name not in still)
    ]
    if leaks:
        raise VitcliError(
            f"gradient audit: a gradient reaches {leaks[0]}, which should be frozen"
            + (f", and {len(leaks) - 1} more" if leaks[1:] else ""),
            "no other code may unfreeze parameters of this run",
            exit_code=1,
        )
    if dry:
        raise VitcliError(
            f"gradient audit: no gradient reaches {dry[0]}, which should train"
            + (f", and {len(dry) - 1} more" if dry[1:] else ""),
            "is the adapted layer cut off from the loss (pooling, head)?",
            exit_code=1,
        )
    return rows
