"""Damage is never a number, and a small file cannot take the machine."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.sources import vit_folder
from vitcli.checkpoints.readers import read_tensors
from vitcli.checkpoints.weights import load_weights
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")
NAME = "layernorm.weight"


def values(file: Path) -> None:
    """Every tensor of a file, read."""
    for tensor in read_tensors(file).values():
        tensor.read()


def refusal(file: Path) -> str:
    with pytest.raises(VitcliError) as caught:
        values(file)
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.message.startswith(str(file))
    return caught.value.message


def repacked(file: Path, change: Callable[[str, bytes], bytes], **how: int) -> Path:
    """The same archive with members changed; sizes and checksums are those of the new ones."""
    with zipfile.ZipFile(file) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(file, "w", **how) as new:
        for name, content in members.items():
            new.writestr(name, change(name, content))
    return file


def flipped(file: Path, at: bytes) -> Path:
    """One bit of the values changed, which no size shows."""
    content = bytearray(file.read_bytes())
    where = content.find(at)
    assert where > 0
    content[where] ^= 1
    file.write_bytes(bytes(content))
    return file


MARK = np.arange(1000, dtype=np.float32)


def as_torch(folder: Path) -> Path:
    torch.save({NAME: torch.from_numpy(MARK.copy())}, folder / "a.pth")
    return folder / "a.pth"


def as_npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", **{NAME: MARK})
    return folder / "a.npz"


def as_script(folder: Path) -> Path:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.from_numpy(MARK.copy()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    torch.jit.script(Model()).save(str(folder / "a.pt"))
    return folder / "a.pt"


KINDS = {"torch": as_torch, "npz": as_npz, "torchscript": as_script}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_archive_is_read(kind: str, tmp_path: Path) -> None:
    (tensor,) = read_tensors(KINDS[kind](tmp_path)).values()
    assert np.array_equal(tensor.read().numpy(), MARK)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_record(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)

    def cut(name: str, content: bytes) -> bytes:
        return content[:-400] if len(content) >= MARK.nbytes else content

    told = refusal(repacked(file, cut))
    assert "expected" in told or "beyond" in told


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_record(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)

    def longer(name: str, content: bytes) -> bytes:
        return content + bytes(16) if len(content) >= MARK.nbytes else content

    assert "expected" in refusal(repacked(file, longer))


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit(kind: str, tmp_path: Path) -> None:
    file = flipped(KINDS[kind](tmp_path), MARK[500:510].tobytes())
    assert "Bad CRC-32" in refusal(file)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_after_it_was_opened(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)
    (tensor,) = read_tensors(file).values()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(VitcliError, match="truncated or not"):
        tensor.read()


def test_a_safetensors_file_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    save_file({NAME: torch.zeros(1000)}, tmp_path / "a.safetensors")
    (tensor,) = read_tensors(tmp_path / "a.safetensors").values()
    (tmp_path / "a.safetensors").write_bytes(b"x")
    with pytest.raises(VitcliError, match="truncated or not"):
        tensor.read()


STRANGE = {
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "int8": lambda t: t.to(torch.int8),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_not_plain_numbers_is_refused_in_one_line(
    kind: str, old: bool, tmp_path: Path
) -> None:
    tensors = load_file(vit_folder(tmp_path) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    tensors[NAME] = STRANGE[kind](tensors[NAME])
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    with pytest.raises(VitcliError) as caught:
        load_weights(str(tmp_path))
    assert f"not plain floating-point numbers: {NAME} (" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_a_quantized_tower_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    file = vit_folder(tmp_path) / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items()}
    save_file(tensors | {NAME: tensors[NAME].to(dtype)}, file)
    with pytest.raises(VitcliError, match="not plain floating-point numbers"):
        load_weights(str(tmp_path))


def record(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """A TorchScript-like pickle of one tensor, by hand."""

    class View:
        def __reduce__(self) -> object:
            storage = Storage()
            return torch._utils._rebuild_tensor_v2, (storage, offset, shape, stride, False, {})

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return (
                ("storage", torch.FloatStorage, "0", "cpu", 4)
                if isinstance(value, Storage)
                else None
            )

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump({NAME: View()})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((5,), (1,), 0),
        ((4,), (1,), 1),
        ((2, 2), (3, 1), 0),
        ((2,), (-1,), 1),
        ((4,), (1,), -1),
        ((-4,), (1,), 0),
        ((1 << 40,), (0,), 0),
        ((2, 2), (1,), 0),
        ((1,) * 100, (1,) * 100, 0),
    ],
)
def test_views_beyond_their_record(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.pth"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", record(shape, stride, offset))
        archive.writestr("a/data/0", np.ones(4, np.float32).tobytes())
    assert "truncated or not a PyTorch checkpoint" in refusal(file)


# -- Small files under a memory limit ------------------------------------------------------------

LIMIT = 1 << 30
"""Bytes of address space that reading may take beyond that of the libraries."""


def under_a_limit(file: Path) -> str:
    """The error of reading a file in a process of little memory and time."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("reads /proc")
    code = (
        "import sys\n"
        "from vitcli.errors import VitcliError\n"
        "from vitcli.checkpoints.readers import read_tensors\n"
        "import resource\n"
        "from pathlib import Path\n"
        "import torch, numpy\n"
        "taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (taken + {LIMIT}, taken + {LIMIT}))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "try:\n"
        "    [t.read() for t in read_tensors(Path(sys.argv[1])).values()]\n"
        "except VitcliError as error:\n"
        "    print(error.message)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_safetensors_file_larger_than_memory(tmp_path: Path) -> None:
    """The tower of a whole model in one file is read, whatever the file's size is."""
    count = 1 << 40
    entries = {
        "language": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]},
        "tower": {"dtype": "F32", "shape": [2], "data_offsets": [count, count + 8]},
    }
    header = json.dumps(entries).encode()
    with (tmp_path / "a.safetensors").open("wb") as file:
        try:
            file.truncate(8 + len(header) + count + 8)
        except OSError:
            pytest.skip("a file system without files of terabytes")
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(8 + len(header) + count)
        file.write(struct.pack("<2f", 1.5, -2.0))
    found = read_tensors(tmp_path / "a.safetensors")
    assert found["language"].nbytes == count
    assert found["tower"].read().tolist() == [1.5, -2.0]


def npy(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (NAME, "(4000000000,)"),
        (NAME, "(1 << 60,)"),
        ("Transformer/encoderblock/x", "(4000000000, 0)"),
        ("Transformer/encoderblock/x", "(4000000000,)"),
    ],
)
def test_a_header_that_claims_gigabytes(name: str, shape: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr(f"{name}.npy", npy(shape))
    assert (tmp_path / "a.npz").stat().st_size < 400
    told = under_a_limit(tmp_path / "a.npz")
    assert "truncated or not a NumPy archive" in told or shape.endswith(" 0)")


@pytest.mark.parametrize("suffix", [".npz", ".pth"])
def test_members_by_ratio(suffix: str, tmp_path: Path) -> None:
    """A few megabytes that would be gigabytes."""
    file = tmp_path / f"a{suffix}"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        name = f"{NAME}.npy" if suffix == ".npz" else "a/data.pkl"
        with archive.open(name, "w", force_zip64=True) as member:
            member.write(npy("(1000000000,)") if suffix == ".npz" else b"")
            for _ in range(1000):
                member.write(bytes(4_000_000))
    assert "unpacked from a file of" in under_a_limit(file)


def self_referring() -> object:
    content: dict[str, object] = {}
    content["model"] = content
    return content


def sixty_doublings() -> object:
    content: dict[str, object] = {"weight": 1}
    for _ in range(60):
        content = {"a": content, "b": content}
    return content


class Bag:
    """An object of a program, to be written as one of __torch__."""


def in_a_program(build: Callable[[], object]) -> bytes:
    """The pickle of bags in one another, as TorchScript writes modules."""
    stream = io.BytesIO()
    Bag.__module__, Bag.__qualname__ = "__torch__", "Bag"
    module = type(sys)("__torch__")
    module.Bag = Bag  # type: ignore[attr-defined]
    sys.modules["__torch__"] = module
    try:
        pickle.Pickler(stream, protocol=2).dump(build())
    finally:
        del sys.modules["__torch__"]
    return stream.getvalue()


def bag_in_itself() -> object:
    bag = Bag()
    bag.child = bag  # type: ignore[attr-defined]
    return bag


def bags_doubling() -> object:
    bag = Bag()
    for _ in range(60):
        outer = Bag()
        outer.a = outer.b = bag  # type: ignore[attr-defined]
        bag = outer
    return bag


PICKLES = {
    "a dict in itself": (lambda: pickle.dumps(self_referring(), 2), False),
    "sixty doublings": (lambda: pickle.dumps(sixty_doublings(), 2), False),
    "a module in itself": (lambda: in_a_program(bag_in_itself), True),
    "2^60 paths of modules": (lambda: in_a_program(bags_doubling), True),
    # 100,000 calls that would each copy a list of 100,000 items
    "calls that copy": (
        lambda: (
            b"\x80\x02}X\x01\x00\x00\x00a]q\x00("
            + b"K\x00" * 100_000
            + b"e"
            + b"("
            + b"cbuiltins\nset\nh\x00\x85R" * 100_000
            + b"ts."
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_grow(name: str, tmp_path: Path) -> None:
    build, program = PICKLES[name]
    file = tmp_path / "a.pth"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", build())
        if program:
            archive.writestr("a/constants.pkl", b"")
    told = under_a_limit(file)
    assert str(file) in told
