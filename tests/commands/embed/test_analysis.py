"""One row for every input, the same bytes whatever happened on the way."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import randomize
from vitcli.commands.embed import analysis as module
from vitcli.commands.embed import rows as embed_rows
from vitcli.commands.embed.analysis import encode_folder
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.job import (
    CHECKSUMS,
    INPUTS,
    MANIFEST,
    iterate_entries,
    iterate_parts,
    load_saved,
    open_job,
)
from vitcli.commands.embed.parts import FORMATS, Rows
from vitcli.commands.embed.result import FolderOptions, FolderResult
from vitcli.commands.embed.rows import normalized, normalized_by_torch
from vitcli.commands.encode.analysis import select_tokens
from vitcli.config.request import ModelRequest
from vitcli.config.schema import PreprocessConfig
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError
from vitcli.images.decode import decode
from vitcli.images.preprocess import levels, preprocess
from vitcli.loading import load_model
from vitcli.model import Model
from vitcli.results import Quiet

SETTINGS = (
    *("encoder.patch_size=8", "encoder.hidden=24", "encoder.depth=2", "encoder.heads=3"),
    "encoder.mlp_hidden=40",
)
REQUEST = ModelRequest(settings=tuple(map(parse_setting, SETTINGS)), image_size=(16, 24))


def tiny_model(*settings: str) -> Model:
    chosen = (*REQUEST.settings, *map(parse_setting, settings))
    model = load_model(dataclasses.replace(REQUEST, settings=chosen))
    randomize(model.encoder)
    return model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven images in two folders, and four files that fail."""
    rng = np.random.default_rng(0)
    for number in range(11):
        path = tmp_path / "in" / f"{'ab'[number % 2]}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    (tmp_path / "in/a/00.jpg").touch()
    (tmp_path / "in/cut.png").write_bytes((tmp_path / "in/a/0.png").read_bytes()[:200])
    (tmp_path / "in/text.gif").write_text("no image")
    (tmp_path / "in/b/1.png").rename(os.fsdecode(os.fsencode(tmp_path / "in/b") + b"/\xff\n.png"))
    (tmp_path / "in/gone.png").symlink_to("nowhere")
    return tmp_path / "in"


def run(model: Model, inputs: Path | list[str], out: Path, **options: Any) -> FolderResult:
    texts = [str(inputs)] if isinstance(inputs, Path) else inputs
    options = {"part_rows": 4, "batch": 3, "workers": 1} | options
    return encode_folder(model, Listing(tuple(texts)), out, FolderOptions(**options))


def rows_of(out: Path) -> list[Rows]:
    return list(iterate_parts(out))


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_every_input_has_its_own_vector_or_a_code(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    result = run(model, folder, tmp_path / "out")
    rows = [
        row
        for part in rows_of(tmp_path / "out")
        for row in zip(part.names, part.status, strict=True)
    ]
    vectors = np.concatenate([part.arrays["vector"] for part in rows_of(tmp_path / "out")])
    on_disk = {os.fspath(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}
    assert [name for name, _ in rows] == sorted(on_disk, key=os.fsencode)
    for (name, status), vector in zip(rows, vectors, strict=True):
        if status != "ok":
            assert np.isnan(vector).all()
            continue
        pixels = preprocess(decode(folder / name).image, model.preprocessing)
        with torch.inference_mode():
            alone = select_tokens(model, model.encoder(torch.from_numpy(pixels)[None]), "pooled")
        np.testing.assert_allclose(vector, alone[0], rtol=1e-4, atol=1e-5)
    failed = {name: status for name, status in rows if status != "ok"}
    assert failed == {
        "a/00.jpg": "truncated",
        "cut.png": "truncated",
        "gone.png": "unreadable",
        "text.gif": "unsupported",
    }
    assert (result.rows, result.ok, result.failed) == (15, 11, 4)
    assert {f.code: f.count for f in result.failures} == Counter(failed.values())
    assert sorted(e.path for e in result.examples) == sorted(failed)
    assert result.width == 24 and result.rows_encoded == 15


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_that_are_lost_or_damaged_are_made_again_with_the_same_bytes(
    model: Model, folder: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    run(model, folder, out, format=kind)
    whole = files(out)
    first = FORMATS[kind].files(out, 0)[0]
    first.write_bytes(first.read_bytes()[:-9])
    FORMATS[kind].files(out, 2)[-1].unlink()
    for mine, another in zip(FORMATS[kind].files(out, 3), FORMATS[kind].files(out, 1), strict=True):
        mine.write_bytes(another.read_bytes())
    result = run(model, folder, out, format=kind)
    assert result.rows_encoded == 11 and result.failed == 4
    assert files(out) == whole
    assert run(model, folder, out, format=kind).rows_encoded == 0


def test_the_union_of_shards_is_the_whole(model: Model, folder: Path, tmp_path: Path) -> None:
    run(model, folder, tmp_path / "whole")
    results = [run(model, folder, tmp_path / "shards", shard=(i, 3)) for i in (3, 1, 2)]
    assert [r.rows for r in results] == [4, 7, 4]
    assert sum(r.failed for r in results) == 4
    assert files(tmp_path / "shards") == files(tmp_path / "whole")


def test_a_failed_row_tried_again_is_as_if_it_had_never_failed(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    picture = (folder / "a/0.png").read_bytes()
    for name in ("cut.png", "a/00.jpg"):
        (folder / name).write_bytes(picture)
    run(model, folder, tmp_path / "never")
    for name in ("cut.png", "a/00.jpg"):
        (folder / name).write_bytes(b"")
    run(model, folder, tmp_path / "out")
    assert files(tmp_path / "out") != files(tmp_path / "never")
    for name in ("cut.png", "a/00.jpg"):
        (folder / name).write_bytes(picture)
    assert run(model, folder, tmp_path / "out").failed == 4
    again = run(model, folder, tmp_path / "out", retry_failed=True)
    assert again.failed == 2 and again.rows_encoded == 7
    assert files(tmp_path / "out") == files(tmp_path / "never")


def test_fail_fast_names_the_first_failure_and_keeps_finished_parts(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    (folder / "a/00.jpg").unlink()
    with pytest.raises(VitcliError, match=r"cut\.png: truncated"):
        run(model, folder, tmp_path / "out", fail_fast=True)
    kept = [path.name for path in sorted((tmp_path / "out").glob("part*"))]
    assert kept == ["part-00000.parquet", "part-00001.parquet"]


def test_another_job_is_refused_and_says_what_changed(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(model, folder, out)
    whole = files(out)
    with pytest.raises(VitcliError, match=r"batch 3 -> 5; max_pixels .* -> 10000$"):
        run(model, folder, out, batch=5, max_pixels=10_000)
    with pytest.raises(VitcliError, match=r"weights_sha256 \w+\.\.\. -> \w+\.\.\.$"):
        other = tiny_model()
        with torch.no_grad():
            next(other.encoder.parameters())[0].add_(1e-3)
        run(other, folder, out)
    with pytest.raises(VitcliError, match=r"preprocess\.filter \w+ -> nearest$"):
        run(tiny_model("preprocess.filter=nearest"), folder, out)
    Image.new("RGB", (9, 9)).save(folder / "zz.png")
    with pytest.raises(VitcliError, match=r"inputs: 1 added \(zz\.png\)$"):
        run(model, folder, out)
    (folder / "zz.png").unlink()
    (tmp_path / "copy").mkdir()
    with pytest.raises(
        VitcliError, match=r"inputs' folder .*in -> .*copy; inputs: 1 added .*, 15 removed"
    ):
        (tmp_path / "copy/a.png").write_bytes(b"")
        run(model, tmp_path / "copy", out)
    assert files(out) == whole


def test_a_second_run_at_the_same_time_is_refused(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = module.begin_job

    def twice(*args: Any) -> Any:
        monkeypatch.setattr(module, "begin_job", begin)
        with pytest.raises(VitcliError, match="another run is writing"):
            run(model, folder, tmp_path / "out")
        return begin(*args)

    monkeypatch.setattr(module, "begin_job", twice)
    assert run(model, folder, tmp_path / "out").ok == 11


def test_norms_and_half_precision(model: Model, folder: Path, tmp_path: Path) -> None:
    run(model, folder, tmp_path / "full", norms=True)
    run(model, folder, tmp_path / "half", vector_dtype="float16")
    full, half = rows_of(tmp_path / "full")[0], rows_of(tmp_path / "half")[0]
    assert half.arrays["vector"].dtype == np.float16
    np.testing.assert_array_equal(half.arrays["vector"], full.arrays["vector"].astype(np.float16))
    # The pooled vector is CLS after the final norm, which is the last layer of the table.
    good = full.good
    np.testing.assert_allclose(
        full.arrays["cls_norm"][good][:, -1],
        np.linalg.norm(full.arrays["vector"][good], axis=1),
        rtol=1e-5,
    )
    assert full.arrays["patch_norm_mean"].shape == full.arrays["cls_norm"].shape == (4, 4)


def test_a_vector_that_is_not_finite_is_not_ok(folder: Path, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.encoder.vit.norm.parameters():
            parameter.mul_(1e6)  # finite in float32, not in float16
    assert run(model, folder, tmp_path / "f32").ok == 11
    result = run(model, folder, tmp_path / "f16", vector_dtype="float16")
    assert {f.code: f.count for f in result.failures}["not_finite"] == 11


def test_images_that_keep_their_size(folder: Path, tmp_path: Path) -> None:
    model = dataclasses.replace(
        tiny_model(), known_preprocessing=PreprocessConfig(resize="none", resize_size=None)
    )
    assert model.preprocessing.output_size is None
    assert run(model, folder, tmp_path / "out").ok == 11


def test_members_of_shards(model: Model, folder: Path, tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    with tarfile.open(shard, "w") as tar:
        for number in range(3):
            content = (folder / f"a/{2 * number}.png").read_bytes()
            info = tarfile.TarInfo(f"{number}.png")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    run(model, folder, tmp_path / "files", part_rows=100, batch=100)
    run(model, [str(shard)], tmp_path / "members")
    by_name = dict(
        zip(*(lambda r: (r.names, r.arrays["vector"]))(rows_of(tmp_path / "files")[0]), strict=True)
    )
    members = rows_of(tmp_path / "members")[0]
    assert members.names == [f"{shard}/{number}.png" for number in range(3)]
    for number, vector in enumerate(members.arrays["vector"]):
        np.testing.assert_allclose(vector, by_name[f"a/{2 * number}.png"], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_written_is_refused_before_any_image(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    for options, message in (
        ({"kind": "dist"}, "--tokens dist: .* does not give it"),
        ({"kind": "output", "layers": (1,)}, "only after the last block"),
        ({"layers": (3,)}, "--layers 3: the encoder does not have this layer"),
        ({"format": "npy", "kind": "cls,pooled"}, "vectors alone, of one kind"),
        ({"format": "xlsx"}, "--format xlsx: unknown"),
        ({"format": "npy", "norms": True}, "vectors alone"),
    ):
        with pytest.raises(VitcliError, match=message):
            run(model, folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    (tmp_path / "none").mkdir()
    with pytest.raises(VitcliError, match="no images in"):
        run(model, tmp_path / "none", tmp_path / "out")
    with pytest.raises(VitcliError, match="is also the folder of the images"):
        encode_folder(model, Listing((str(folder),), out=folder), folder, FolderOptions())


def test_what_a_killed_run_left_is_removed_and_nothing_of_others(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    left = (".manifest.abcd1234.part", "._checksums.json.0123456789ab.part")
    kept = (".inputs.txt", ".part-of-mine.part", "._photo.part", ".manifest.old.part")
    for place in (".inputs.abcd_123", ".inputs.d"):
        (out / place).mkdir(parents=True)
    for name in (*left, *kept, ".inputs.abcd_123/sorted", ".inputs.d/mine"):
        (out / name).touch()
    run(model, folder, out)
    assert {p.name for p in out.iterdir() if p.name.startswith(".")} == {*kept, ".inputs.d"}


def test_a_drive_without_links_locks_and_modes_holds_a_job(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exFAT has none of the three, network drives and mounted buckets lack some."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    run(model, folder, tmp_path / "here")
    for name in ("fcntl.flock", "os.link", "os.chmod"):
        monkeypatch.setattr(name, refused)
    assert run(model, folder, tmp_path / "out").rows_encoded == 15
    assert run(model, folder, tmp_path / "out").rows_encoded == 0
    assert files(tmp_path / "out") == files(tmp_path / "here")


def test_a_disk_without_room_is_told_with_the_place(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(VitcliError, match="out: No space left on device") as caught:
        run(model, folder, tmp_path / "out")
    assert caught.value.exit_code == 1


def test_rows_of_an_earlier_run_are_there_before_the_rate_is_reckoned(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    class Calls(Quiet):
        def __call__(self, done: int, total: int, facts: str = "") -> None:
            calls.append((done, total, facts))

    calls: list[tuple[int, int, str]] = []

    def reported() -> list[tuple[int, int, str]]:
        calls.clear()
        encode_folder(
            model,
            Listing((str(folder),)),
            tmp_path / "out",
            FolderOptions(part_rows=4, batch=3, workers=1),
            Calls(),
        )
        return [*calls]

    first = reported()
    rows, failed = first[-1][1:]
    assert first[0] == (0, rows, "") and first[-1][0] == rows and failed.startswith("failed: ")
    (tmp_path / "out/part-00002.parquet").unlink()
    again = reported()
    assert again[0][:2] == (rows - 4, rows) and again[-1] == first[-1]


@pytest.mark.parametrize("way", [normalized, normalized_by_torch])
@pytest.mark.parametrize("resize_dtype", ["uint8", "float32"])
def test_normalized_on_the_device_is_preprocess_bit_for_bit(
    resize_dtype: str, way: Callable[[torch.Tensor, PreprocessConfig], torch.Tensor]
) -> None:
    config = PreprocessConfig(
        resize_size=(24, 24),
        resize_dtype=resize_dtype,  # type: ignore[arg-type]
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    every_level = np.arange(32 * 24 * 3, dtype=np.uint64).astype(np.uint8).reshape(24, 32, 3)
    image = Image.fromarray(every_level)
    batch = torch.from_numpy(np.stack([levels(image, config)] * 2))
    expected = preprocess(image, config)
    for found in way(batch, config):
        np.testing.assert_array_equal(found.numpy(), expected)


def test_a_batch_is_normalized_where_the_encoder_is() -> None:
    """On a GPU that is not here: every step names the device of the pixels."""
    with FakeTensorMode():
        levels = torch.zeros(2, 6, 8, 3, dtype=torch.uint8).to("cuda")
        values = normalized(levels, PreprocessConfig())
    assert (values.device.type, values.dtype) == ("cuda", torch.float32)
    assert values.shape == (2, 3, 6, 8)


def test_a_setting_that_is_none_and_came_later_makes_no_other_job(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_today = module.settings

    def of_before(*given: Any) -> dict[str, Any]:
        found = of_today(*given)
        kept = {key: value for key, value in found["preprocess"].items() if value is not None}
        assert kept != found["preprocess"]
        return {**found, "preprocess": kept}

    def embed() -> FolderResult:
        options = FolderOptions(workers=1, part_rows=8, batch=4)
        return encode_folder(model, Listing((str(folder),)), tmp_path / "out", options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "settings", of_before)
        embed()
    (tmp_path / "out/part-00001.parquet").unlink()
    again = embed()
    assert again.rows_encoded == again.rows - 8
    assert sum(len(rows) for rows in iterate_parts(tmp_path / "out")) == again.rows


def arrays(out: Path) -> dict[str, np.ndarray]:
    parts = rows_of(out)
    return {key: np.concatenate([part.arrays[key] for part in parts]) for key in parts[0].arrays}


@pytest.mark.parametrize("format", ["parquet", "safetensors"])
def test_kinds_and_layers_in_one_pass_are_those_of_model_features(
    model: Model, folder: Path, tmp_path: Path, format: str
) -> None:
    out = tmp_path / "out"
    result = run(model, folder, out, kind="cls,patch,pooled", layers=(0, -1), format=format)
    names = [f"{kind}_layer_{n}" for kind in ("cls", "patch", "pooled") for n in (0, 2)]
    assert [column.name for column in result.columns] == names
    assert [column.shape for column in result.columns] == [(24,)] * 2 + [(2, 3, 24)] * 2 + [
        (24,)
    ] * 2
    found = arrays(out)
    paths = [folder / name for part in rows_of(out) for name in part.names]
    good = np.concatenate([part.good for part in rows_of(out)])
    expected = model.features([p for p, ok in zip(paths, good, strict=True) if ok], layers=[0, 2])
    for layer in (0, 2):
        features = expected.layers[layer]
        assert features.cls is not None
        for kind, values in (("cls", features.cls), ("patch", features.patches)):
            theirs = values.numpy()
            ours = found[f"{kind}_layer_{layer}"]
            np.testing.assert_allclose(ours[good], theirs, rtol=1e-4, atol=1e-5)
            assert np.isnan(ours[~good]).all() or format == "parquet"
        pooled = found[f"pooled_layer_{layer}"]  # of an encoder that pools by CLS
        np.testing.assert_array_equal(pooled[good], found[f"cls_layer_{layer}"][good])
    # Readers of one vector per image take the first column, or the one they name.
    first = next(iterate_parts(out)).arrays["vector"]
    np.testing.assert_array_equal(first, found["cls_layer_0"][: len(first)])
    named = next(iterate_parts(out, "pooled_layer_2")).arrays["vector"]
    np.testing.assert_array_equal(named, found["pooled_layer_2"][: len(named)])
    with pytest.raises(VitcliError, match="patch_layer_2: no such column"):
        next(iterate_parts(out, "patch_layer_2"))


def test_the_size_of_patch_grids_is_said_before_they_are_made(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    progress = Quiet()
    progress.line = said.append  # type: ignore[method-assign]
    encode_folder(
        model,
        Listing((str(folder),)),
        tmp_path / "out",
        FolderOptions(kind="patch", workers=1, vector_dtype="float16"),
        progress=progress,
    )
    assert said == ["folders: 2 classes: a, b", "15 images give about 0.00 GiB of vectors"]
    grids = open_job(tmp_path / "out").check(0).arrays["vector"]
    assert grids.dtype == np.float16 and grids.shape == (15, 2, 3, 24)


def test_shapes_cost_one_pass_over_zeros(model: Model, folder: Path, tmp_path: Path) -> None:
    sizes: list[int] = []
    hook = model.encoder.register_forward_hook(lambda _, given, out: sizes.append(len(given[0])))
    options = FolderOptions(workers=1, batch=16)
    encode_folder(model, Listing((str(folder),)), tmp_path / "out", options)
    hook.remove()
    assert sizes == [1, 15]


def test_a_part_of_large_rows_has_fewer_of_them(model: Model, monkeypatch: Any) -> None:
    monkeypatch.setattr(embed_rows, "PART_BYTES", 10 * 6 * 24 * 4)  # ten grids of 2 x 3 patches
    assert embed_rows.checked(model, FolderOptions(kind="patch", batch=4))[0].part_rows == 8
    assert embed_rows.checked(model, FolderOptions(kind="patch", batch=16))[0].part_rows == 16
    assert embed_rows.checked(model, FolderOptions(batch=4))[0].part_rows == 60


def test_images_of_one_size_share_a_pass_where_sizes_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(
        tiny_model(), known_preprocessing=PreprocessConfig(resize="none", resize_size=None)
    )
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    for number in range(9):
        size = (16, 24) if number % 3 else (32, 16)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"in/{number}.png")
    passes: list[tuple[int, ...]] = []
    started = embed_rows.forward

    def counted(model: Model, pixels: torch.Tensor, *rest: Any) -> Any:
        passes.append(tuple(pixels.shape))
        return started(model, pixels, *rest)

    monkeypatch.setattr(embed_rows, "forward", counted)
    run(model, tmp_path / "in", tmp_path / "out", part_rows=100, batch=4)
    of_images = sorted(passes[-3:])
    assert of_images == [(2, 3, 16, 24), (3, 3, 32, 16), (4, 3, 16, 24)]
    monkeypatch.setattr(embed_rows, "_TOKENS_PER_IMAGE", 3)  # 12 tokens: two of 6, one of 8
    passes.clear()
    run(model, tmp_path / "in", tmp_path / "small", part_rows=100, batch=4)
    assert sorted(shape[0] for shape in passes[-6:]) == [1, 1, 1, 2, 2, 2]
    expected = arrays(tmp_path / "out")["vector"]
    np.testing.assert_allclose(arrays(tmp_path / "small")["vector"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_part_that_was_swapped_edited_or_cut_is_named_and_made_again(
    model: Model, folder: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    run(model, folder, out, format=kind)
    whole = files(out)
    format = FORMATS[kind]
    rows, about = format.read(out, 0)

    def swap() -> None:
        for mine, other in zip(format.files(out, 0), format.files(out, 1), strict=True):
            mine.write_bytes(other.read_bytes())

    def edit(**changes: Any) -> None:
        format.write(out, 0, dataclasses.replace(rows, **changes), about)

    def checksum_too(damage: Any) -> None:
        """Damage that is older than its checksum: what the part holds is checked too."""
        damage()
        path = out / CHECKSUMS
        digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in format.files(out, 0)]
        path.write_text(json.dumps({**json.loads(path.read_text()), "0": digests}))

    vectors = rows.arrays["vector"]
    nan = np.full_like(vectors, np.nan)
    damages = [
        (swap, "checksum"),
        (lambda: edit(arrays={"vector": vectors + 1}), "checksum"),
        (lambda: checksum_too(swap), "rows are of other images"),
        (lambda: checksum_too(lambda: edit(arrays={"vector": vectors[:, :-1]})), "other arrays"),
        (lambda: checksum_too(lambda: edit(arrays={"vector": vectors.astype("f2")})), "other arr"),
        (lambda: checksum_too(lambda: edit(arrays={"vector": nan})), "not finite"),
        (lambda: checksum_too(lambda: edit(names=rows.names[::-1])), "rows are of other images"),
        (lambda: checksum_too(lambda: edit(status=[""] * len(rows))), "rows without a status"),
    ]
    for damage, reason in damages:
        damage()
        with pytest.raises(VitcliError, match=f"part-00000.*{reason}") as caught:
            next(iterate_parts(out))
        assert caught.value.exit_code == 1
    assert run(model, folder, out, format=kind).rows_encoded == 4
    assert files(out) == whole


@pytest.fixture(scope="module")
def finished(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    (place / "in").mkdir()
    Image.new("RGB", (9, 9)).save(place / "in/a.png")
    run(model, place / "in", place / "out")
    return place / "out"


@given(data=st.data())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_a_tampered_list_or_manifest_is_an_error_in_words(
    finished: Path, data: st.DataObject
) -> None:
    out = finished
    name = data.draw(st.sampled_from([MANIFEST, CHECKSUMS, INPUTS]))
    path = out / name
    whole = path.read_bytes()
    try:
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(whole) - 1))
            bits = data.draw(st.binary(min_size=1, max_size=4))
            path.write_bytes(whole[:at] + bits + whole[at + data.draw(st.integers(0, 9)) :])
        elif name == MANIFEST:
            plain = json.loads(whole)
            keys = data.draw(st.sampled_from([["settings"], ["inputs"], ["request"], []]))
            place = plain[keys[0]] if keys else plain
            key = data.draw(st.sampled_from(sorted(place)))
            values = st.sampled_from([None, -1, 2**70, "", "x", [], {}, [[]], 0.5, True])
            place[key] = data.draw(values)
            path.write_text(json.dumps(plain))
        try:
            list(iterate_parts(out))
            list(iterate_entries(out))
            load_saved(out)
        except VitcliError as error:
            assert error.hint
    finally:
        path.write_bytes(whole)
