"""What `vitcli profile` is asked to do; no torch, so that a wrong option is told at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vitcli.config.schema import AttendKind
from vitcli.engines import ENGINES
from vitcli.errors import VitcliError


@dataclass(frozen=True)
class ProfileSettings:
    batches: tuple[int, ...] = (1, 8, 64)
    engines: tuple[str, ...] = ("eager",)
    attention: str | None = None
    """fused or explicit; None for what the config says."""
    runs: int | None = None
    backward: bool = False
    """A step is a forward and a backward pass in training mode, in place of inference."""
    ops: int = 12
    trace: Path | None = None
    """Where the Chrome trace of one step, of the first engine at the first batch, goes."""

    def check(self) -> None:
        """Refuse settings that cannot be.

        Raises:
            VitcliError: an unknown name, a value given twice, engines that cannot train or trace.
        """
        for option, values in (("--batch", self.batches), ("--engine", self.engines)):
            for value in values:
                if list(values).count(value) > 1:
                    raise VitcliError(f"{option} {value}: given twice", "name each once")
        ways = (self.attention,) if self.attention else ()
        for option, given, known in (
            ("--engine", self.engines, ENGINES),
            ("--attention", ways, get_args(AttendKind)),
        ):
            for name in given:
                if name not in known:
                    raise VitcliError(f"{option} {name}: unknown", "one of " + ", ".join(known))
        if self.backward and self.engines != ("eager",):
            raise VitcliError(
                "--backward needs gradients, which compiled and exported graphs drop",
                "--engine eager",
            )
        if self.trace and self.engines == ("onnx",):
            raise VitcliError(
                "--trace: torch's profiler sees nothing of ONNX Runtime", "add --engine eager"
            )
