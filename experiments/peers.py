"""ViT-B/16 in vitcli, timm, transformers, torchvision, ONNX Runtime and OpenVINO, side by side.

    pip install -e ".[peers]"
    python experiments/peers.py --out runs/peers                  everything: about half an hour
    python experiments/peers.py --batch 1 --rounds 5 --skip cold  a look
    python experiments/peers.py --dtype bfloat16 --out runs/bf16 --skip cold --skip memory
    python experiments/peers.py --int8 --out runs/int8 --skip cold --skip memory

The same weights go into each library, and their outputs must agree before anything is timed. Times
are taken in turn, A B A B, in one process; what is printed is the median of the ratios of each
round, with its 10th and 90th percentile. Memory and cold starts are measured in processes of their
own. What is measured already in --out is not measured again; `--fresh` starts over. `--int8` adds
ONNX Runtime on a graph whose linear maps are quantized dynamically, and prints its cosines to
float32. On a machine that does other work too, `--threads 1 --processor-time` counts what each
takes of a core.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IMAGE = 224
EAGER_PEERS = ("timm", "transformers", "torchvision")
ENGINES = ("vitcli eager", "vitcli onednn", "vitcli compile", "vitcli openvino")
SUBJECTS = {
    "float32": (*ENGINES, "vitcli onnx", *EAGER_PEERS, "timm compile", "onnxruntime", "openvino"),
    "bfloat16": (*ENGINES, "timm", "timm compile", "openvino"),
}
ALONE = {"vitcli onnx": "onnxruntime", "vitcli openvino": "openvino"}
"""Engines of vitcli, and the same library without it."""
INT8 = "onnxruntime int8"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest difference of outputs, whose values are about 1."""
PARTS = ("time", "memory", "cold")
Run = Callable[[Any], Any]
"""Images (B, 3, 224, 224) to the CLS tokens (B, 768) after the final norm."""

BLOCK = {
    "timm": {"attention": "attn", "feed_forward": "mlp"},
    "transformers": {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "feed_forward": "mlp",
        "attention.proj": "attention.o_proj",
    },
    "torchvision": {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "feed_forward.fc1": "mlp.0",
        "feed_forward.fc2": "mlp.3",
        "attention.proj": "self_attention.out_proj",
        "attention.qkv.": "self_attention.in_proj_",
    },
}
"""vitcli's names within a block, and theirs."""
AROUND = {
    "timm": ("patch_embed.proj", "cls_token", "pos_embed", "norm", "blocks."),
    "transformers": (
        "embeddings.patch_embeddings.projection",
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        "layernorm",
        "layers.",
    ),
    "torchvision": (
        "conv_proj",
        "class_token",
        "encoder.pos_embedding",
        "encoder.ln",
        "encoder.layers.encoder_layer_",
    ),
}


def weights() -> dict[str, Any]:
    """A fresh ViT-B/16's parameters, every one of them random: a constant would hide a mistake."""
    import torch

    import vitcli

    state = vitcli.load("vit-b16", device="cpu").encoder.state_dict()
    generator = torch.Generator().manual_seed(0)
    for name, value in state.items():
        noise = torch.randn(value.shape, generator=generator)
        is_scale = name.endswith("weight") and "norm" in name
        value.copy_(1 + 0.1 * noise if is_scale else 0.02 * noise)
    return state


def renamed(state: dict[str, Any], library: str) -> dict[str, Any]:
    """vitcli's parameters under a peer's names."""
    patch, cls, positions, norm, block = AROUND[library]
    theirs: dict[str, Any] = {}
    for name, value in state.items():
        if name.startswith("vit.blocks."):
            index, inner = name.removeprefix("vit.blocks.").split(".", 1)
            if library == "transformers" and inner.startswith("attention.qkv."):
                for part, rows in zip("qkv", value.chunk(3), strict=True):
                    theirs[f"{block}{index}.attention.{part}_proj.{inner[14:]}"] = rows
                continue
            for ours, their in BLOCK[library].items():
                inner = inner.replace(ours, their)
            theirs[f"{block}{index}.{inner}"] = value
        elif name == "front_end.prefix.cls":
            theirs[cls] = value[None]
        elif name == "front_end.position.table":
            theirs[positions] = value[None]
        else:
            name = name.replace("front_end.projection", patch).replace("vit.norm", norm)
            theirs[name] = value
    return theirs


def peer(library: str, state: dict[str, Any] | None) -> Any:
    """A peer's ViT-B/16 module, filled with vitcli's parameters."""
    if library == "timm":
        import timm

        model = timm.create_model("vit_base_patch16_224", num_classes=0)
    elif library == "transformers":
        from transformers import ViTConfig, ViTModel

        model = ViTModel(ViTConfig(layer_norm_eps=1e-6), add_pooling_layer=False)
    else:
        import torch
        import torchvision

        model = torchvision.models.vit_b_16()
        model.heads = torch.nn.Identity()
    if state is not None:
        model.load_state_dict(renamed(state, library))
    return model.eval()


def subject(name: str, state: dict[str, Any], folder: Path, dtype: str = "float32") -> Run:
    """One of SUBJECTS, ready to run: images in that dtype to CLS tokens."""
    import torch

    if name.startswith("vitcli"):
        import vitcli

        ours = vitcli.load("vit-b16", engine=name.split()[1], device="cpu", dtype=dtype)
        ours.encoder.load_state_dict(state)
        return lambda images: ours.runner(images).tokens[:, 0]
    if name in ("onnxruntime", INT8):
        return alone(state, folder, quantized=name == INT8)
    if name == "openvino":
        return by_openvino(state, folder, dtype)
    library, _, compiled = name.partition(" ")
    model = peer(library, state).to(getattr(torch, dtype))
    if compiled:
        model.forward_features = torch.compile(model.forward_features, dynamic=None)
    name = library
    read: dict[str, Run] = {
        "timm": lambda images: model.forward_features(images)[:, 0],
        "transformers": lambda images: model(images).last_hidden_state[:, 0],
        "torchvision": model,
    }
    return torch.inference_mode()(lambda images: read[name](images))


def exported(state: dict[str, Any], folder: Path) -> Path:
    """timm's module as torch's own exporter writes it."""
    import torch

    path = folder / "timm.onnx"
    if not path.exists():
        pair = torch.zeros(2, 3, IMAGE, IMAGE)
        batch = ({0: torch.export.Dim("batch")},)
        module = peer("timm", state)
        torch.onnx.export(module, (pair,), path, dynamo=True, dynamic_shapes=batch, verbose=False)
    return path


def alone(state: dict[str, Any], folder: Path, quantized: bool = False) -> Run:
    """ONNX Runtime without vitcli; `quantized` with linear maps in int8, scaled as they come."""
    import onnxruntime
    import torch

    path = exported(state, folder)
    if quantized:
        from onnxruntime.quantization import quantize_dynamic

        small = folder / "timm-int8.onnx"
        if not small.exists():
            kinds = ["MatMul", "Gemm"]
            quantize_dynamic(path, small, op_types_to_quantize=kinds, per_channel=True)
        path = small
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options)
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def by_openvino(state: dict[str, Any], folder: Path, dtype: str) -> Run:
    """OpenVINO on the same file, computing in `dtype`; images are given in float32."""
    import openvino
    import torch

    kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    how = {"INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    core = openvino.Core()
    compiled = core.compile_model(str(exported(state, folder)), "CPU", how)
    return lambda images: torch.from_numpy(compiled([images.float().numpy()])[0].copy())


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "rounds": len(ordered),
    }


def measure_times(
    names: Sequence[str],
    batch: int,
    rounds: int,
    folder: Path,
    dtype: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Seconds of each subject, all in one process, after their outputs were found to agree."""
    import torch

    state = weights()
    runs = {name: subject(name, state, folder, dtype) for name in names}
    images = torch.randn(batch, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1))
    images = images.to(getattr(torch, dtype))
    answers = {name: run(images).float() for name, run in runs.items()}  # also the warm-up
    cosine = torch.nn.functional.cosine_similarity
    cosines = {n: cosine(answers[n], answers[names[0]], dim=-1).min().item() for n in names}
    exact = [name for name in names if name != INT8]
    worst = max((answers[name] - answers[names[0]]).abs().max().item() for name in exact)
    assert worst < TOLERANCE[dtype], f"outputs differ by {worst}"
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        order = list(names) if index % 2 == 0 else list(reversed(names))
        for name in order:
            start = clock()
            runs[name](images)
            times[name].append(clock() - start)
        say(f"batch {batch}: round {index + 1} of {rounds}")
    return {"largest_difference": worst, "cosine": cosines, "seconds": times}


def measure_memory(name: str, batch: int, folder: Path) -> dict[str, Any]:
    """Growth of the resident set over the second step, in this process (Linux)."""
    import torch

    run = subject(name, weights(), folder)
    run(torch.zeros(1, 3, IMAGE, IMAGE))
    images = torch.randn(batch, 3, IMAGE, IMAGE)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident_bytes("VmHWM")
    run(images)
    return {"peak_bytes": resident_bytes("VmHWM") - before}


def resident_bytes(key: str) -> int:
    """VmRSS or VmHWM, the resident set and its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def processor() -> str:
    """The name that Linux gives it; elsewhere Python's."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


SCRIPTS = {
    "timm": """
import sys, timm, torch
from PIL import Image
model = timm.create_model("vit_base_patch16_224", num_classes=0).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
image = transform(Image.open(sys.argv[1]).convert("RGB"))
with torch.inference_mode():
    print(model(image[None])[0, :4])
""",
    "transformers": """
import sys, torch
from PIL import Image
from transformers import ViTConfig, ViTImageProcessor, ViTModel
model = ViTModel(ViTConfig(), add_pooling_layer=False).eval()
inputs = ViTImageProcessor()(Image.open(sys.argv[1]).convert("RGB"), return_tensors="pt")
with torch.inference_mode():
    print(model(**inputs).last_hidden_state[0, 0, :4])
""",
    "torchvision": """
import sys, torch, torchvision
from PIL import Image
model = torchvision.models.vit_b_16().eval()
model.heads = torch.nn.Identity()
transform = torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1.transforms()
image = transform(Image.open(sys.argv[1]).convert("RGB"))
with torch.inference_mode():
    print(model(image[None])[0, :4])
""",
}
"""The shortest script for each library: an image file to an embedding, fresh weights."""


def measure_cold(rounds: int, folder: Path) -> dict[str, Any]:
    """Wall seconds of whole processes, in turn."""
    from PIL import Image

    image = folder / "image.png"
    Image.effect_mandelbrot((640, 480), (-2, -1.5, 1, 1.5), 100).convert("RGB").save(image)
    commands = {"vitcli": [sys.executable, "-m", "vitcli", "encode", str(image), "--json"]}
    for name, script in SCRIPTS.items():
        commands[name] = [sys.executable, "-c", script, str(image)]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for index in range(rounds + 1):  # the first fills the disk's cache and is not counted
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if index:
                times[name].append(time.perf_counter() - start)
        say(f"cold start: round {index} of {rounds}")
    return {"seconds": times}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Notebook:
    """Measurements in a JSON file: what is in it is not measured again."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path = path
        known = path.exists() and not fresh
        self.entries: dict[str, Any] = json.loads(path.read_text()) if known else {}

    def need(self, key: str, measure: Callable[[], dict[str, Any]]) -> None:
        if key in self.entries:
            return
        self.entries[key] = measure()
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.entries, indent=1))
        part.replace(self.path)


def in_child(arguments: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """`measure_memory` in a process of its own."""
    say(f"memory of {name} at batch {batch}")
    command = [sys.executable, __file__, "--out", str(arguments.out), "--memory-of", name]
    command += ["--batch", str(batch), "--threads", str(arguments.threads)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def report(notebook: Notebook, names: Sequence[str], batches: Sequence[int], dtype: str) -> None:
    """Markdown on stdout: what is there of each part."""
    import torch

    entries = notebook.entries
    threads = torch.get_num_threads()
    print(f"{processor()}, {threads} threads, torch {torch.__version__}, {dtype}\n")
    print("| batch | | seconds | vitcli eager is faster by | best vitcli engine by | memory |")
    print("|---|---|---|---|---|---|")
    for batch in batches:
        times = entries.get(f"time {batch}", {}).get("seconds", {})
        ours = [name for name in times if name.startswith("vitcli")]
        best = min(ours, key=lambda name: statistics.median(times[name]), default="")
        for name in names:
            peak = entries.get(f"memory {name} {batch}", {}).get("peak_bytes")
            memory = f"{peak / 2**20:.0f} MiB" if peak else ""
            if name not in times:
                print(f"| {batch} | {name} | | | | {memory} |")
                continue
            row = [f"{statistics.median(times[name]):.3f}"]
            for mine in ("vitcli eager", best):
                if mine not in times:
                    row.append("")
                    continue
                ratio = spread([b / a for a, b in zip(times[mine], times[name], strict=True)])
                row.append(f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})")
            print(f"| {batch} | {name} | {' | '.join(row)} | {memory} |")
    for batch in batches:
        times = entries.get(f"time {batch}", {}).get("seconds", {})
        ours = [n for n in times if n.startswith("vitcli")]
        theirs = [n for n in times if n not in ours and n != INT8]
        if ours and theirs:
            mine, peers = (
                min((times[n] for n in some), key=statistics.median) for some in (ours, theirs)
            )
            ratio = spread([b / a for a, b in zip(mine, peers, strict=True)])
            print(
                f"\nbatch {batch}: vitcli's best engine is {ratio['median']:.2f} times as fast as "
                f"the best peer ({ratio['p10']:.2f} to {ratio['p90']:.2f})"
            )
        for name in (n for n in ours if ALONE.get(n) in times):
            ratio = spread([b / a for a, b in zip(times[name], times[ALONE[name]], strict=True)])
            print(
                f"batch {batch}: {name} is {ratio['median']:.2f} times as fast as {ALONE[name]} "
                f"alone ({ratio['p10']:.2f} to {ratio['p90']:.2f})"
            )
        found = entries.get(f"time {batch}", {}).get("cosine", {})
        if INT8 in found:
            print(f"batch {batch}: smallest cosine of {INT8} to {names[0]} {found[INT8]:.5f}")
    cold = entries.get("cold", {}).get("seconds", {})
    if cold:
        print("\n| whole process, image file to embedding | seconds | vitcli takes |")
        print("|---|---|---|")
    for name, seconds in cold.items():
        ratio = spread([a / b for a, b in zip(cold["vitcli"], seconds, strict=True)])
        text = f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f}) of it"
        print(f"| {name} | {statistics.median(seconds):.2f} | {text} |")


def installed(name: str) -> bool:
    return "openvino" not in name or importlib.util.find_spec("openvino") is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8, 64")
    parser.add_argument("--rounds", type=int, default=11, help="at batch 64 a third of them")
    parser.add_argument("--cold-rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--processor-time", action="store_true", help="in place of wall time")
    parser.add_argument("--dtype", default="float32", choices=SUBJECTS)
    parser.add_argument("--int8", action="store_true", help=f"with {INT8}, in float32")
    everything = [*SUBJECTS["float32"], INT8]
    parser.add_argument("--subject", action="append", choices=everything, help="default: all")
    parser.add_argument("--skip", action="append", default=[], choices=PARTS)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--memory-of", choices=everything, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    batches = arguments.batch or [1, 8, 64]
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of, batches[0], arguments.out)))
        return
    names = arguments.subject or [name for name in SUBJECTS[arguments.dtype] if installed(name)]
    names += [INT8] if arguments.int8 else []
    clock = time.process_time if arguments.processor_time else time.perf_counter
    notebook = Notebook(arguments.out / "peers.json", arguments.fresh)
    if "cold" not in arguments.skip:
        notebook.need("cold", lambda: measure_cold(arguments.cold_rounds, arguments.out))
    for batch in batches:
        rounds = max(3, arguments.rounds // 3) if batch >= 64 else arguments.rounds
        if "time" not in arguments.skip:
            notebook.need(
                f"time {batch}",
                lambda batch=batch, rounds=rounds: measure_times(  # type: ignore[misc]
                    names, batch, rounds, arguments.out, arguments.dtype, clock
                ),
            )
        for name in names if "memory" not in arguments.skip else ():
            notebook.need(
                f"memory {name} {batch}",
                lambda name=name, batch=batch: in_child(arguments, name, batch),  # type: ignore[misc]
            )
    report(notebook, names, batches, arguments.dtype)


if __name__ == "__main__":
    main()
