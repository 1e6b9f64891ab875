"""Ways to run an encoder, and what each of them can do; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from vitcli.errors import VitcliError, check_choice, either

OPSET = 20
"""The ONNX operator set of exported graphs: the first with GELU and LayerNorm as operators."""
OPSETS = range(18, 24)
"""The operator sets that torch's exporter writes and ONNX Runtime reads."""
AUTO = "auto"
"""In place of an engine's name: the fastest one, found by a short trial on the real shape."""


@dataclass(frozen=True)
class EngineKind:
    """What an engine is, and what it can do. Every engine gives each layer's tokens."""

    summary: str
    module: str
    """Below `vitcli.engines`, with a function `prepare_NAME`."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    devices: tuple[str, ...] = ("cpu", "cuda", "mps")
    hooks: bool = False
    """The encoder's own modules are called: hooks see them, attention can be looked into."""
    gradients: bool = False
    profiled: bool = True
    """torch's profiler sees its operators."""
    any_batch: bool = True
    """Other batch sizes than those prepared for cost nothing the first time."""
    own_encoder: bool = True
    """Runs vitcli's encoder, so that it can take another engine's place."""
    exact: bool = True
    """Gives eager's numbers to rounding."""


ENGINES = {
    "eager": EngineKind("plain torch", "pytorch", hooks=True, gradients=True),
    "onednn": EngineKind(
        "torch's oneDNN kernels for linear maps and GELU",
        "pytorch",
        dtypes=("float32", "bfloat16"),
        devices=("cpu",),
        hooks=True,
    ),
    "compile": EngineKind("torch.compile", "pytorch", any_batch=False),
    "onnx": EngineKind(
        "ONNX Runtime on the exported graph (extra onnx)",
        "onnx_graph",
        dtypes=("float32", "float16"),
        devices=("cpu", "cuda"),
        profiled=False,
    ),
    "int8": EngineKind(
        "ONNX Runtime with linear maps in 8-bit integers (extra onnx)",
        "onnx_graph",
        dtypes=("float32",),
        devices=("cpu",),
        profiled=False,
        exact=False,
    ),
    "openvino": EngineKind(
        "OpenVINO on the exported graph (extra openvino)",
        "onnx_graph",
        dtypes=("float32", "bfloat16"),
        devices=("cpu",),
        profiled=False,
    ),
    "reference": EngineKind(
        "the encoder's own library, unchanged (extra reference)",
        "reference",
        any_batch=False,
        own_encoder=False,
    ),
}
"""Every engine by name; the others are compared with `eager`."""


def check_engine(
    name: str, dtype: str | None = None, device: str | None = None, **needs: str
) -> None:
    """Refuse an engine that cannot do what is asked of it.

    Args:
        needs: what it must be able to do (a field of EngineKind) to the option that asks for it.

    Raises:
        VitcliError: with an engine that can.
    """
    check_choice("--engine", name, ENGINES)
    kind = ENGINES[name]
    for field, given, can in (("dtype", dtype, kind.dtypes), ("device", device, kind.devices)):
        if given is not None and given not in can:
            raise VitcliError(
                f"--engine {name}: does not support this {field} (got {given}, expected "
                f"{either(can)})",
                "--engine eager",
            )
    for ability, option in needs.items():
        if not getattr(kind, ability):
            why = WITHOUT[ability] if kind.own_encoder else "its modules are another library's"
            raise VitcliError(
                f"--engine {name}: does not support {option} ({why})",
                "--engine " + next(e for e, k in ENGINES.items() if getattr(k, ability)),
            )


WITHOUT = {
    "hooks": "its graph is fused, so nothing inside can be observed",
    "gradients": "its graph computes no gradients",
    "profiled": "torch's profiler does not see its operators",
    "any_batch": "another batch size is compiled anew",
}
"""Why an ability is missing, in words."""
