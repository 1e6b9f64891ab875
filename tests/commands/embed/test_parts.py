"""Parts come back as they were written, and have the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vitcli.commands.embed.parts import FORMATS, PartError, Rows


def rows(dtype: str = "float32", norms: bool = False) -> Rows:
    vectors = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    vectors[1] = np.nan
    arrays = {"vector": vectors}
    if norms:
        arrays["cls_norm"] = vectors[:, :2].astype(np.float32)
    return Rows(
        first=6,
        names=['a,"b"\n.jpg', "caf\udce9\\.jpg", "é.jpg"],
        width=[4, None, 7],
        height=[5, None, 8],
        status=["ok", "corrupt", "ok"],
        error=["", "line\nbreak", ""],
        arrays=arrays,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(tmp_path: Path, name: str, dtype: str) -> None:
    written, kind = rows(dtype, norms=name != "npy"), FORMATS[name]
    about = {"model": "é", "mean": [0.1, 0.2]}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        kind.write(tmp_path / folder, 2, written, about)
    read, said = kind.read(tmp_path / "one", 2)
    assert said == about
    assert read.first == 6
    for field in ("names", "width", "height", "status", "error"):
        assert getattr(read, field) == getattr(written, field)
    assert list(read.arrays) == list(written.arrays)
    for key, array in written.arrays.items():
        assert read.arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(read.arrays[key], array)
    for one, two in zip(
        kind.files(tmp_path / "one", 2), kind.files(tmp_path / "two", 2), strict=True
    ):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_that_is_missing_or_cut_off_is_an_error_to_read(tmp_path: Path, name: str) -> None:
    kind = FORMATS[name]
    with pytest.raises(PartError):
        kind.read(tmp_path, 0)
    kind.write(tmp_path, 0, rows(), {})
    for path in kind.files(tmp_path, 0):
        whole = path.read_bytes()
        for cut in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(PartError):
                kind.read(tmp_path, 0)
        path.write_bytes(whole)
    kind.read(tmp_path, 0)


def test_parquet_is_read_by_pandas_and_holds_null_where_it_failed(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    FORMATS["parquet"].write(tmp_path, 0, rows(), {"model": "m"})
    (tmp_path / "_manifest.json").write_text("{}")
    table = pandas.read_parquet(tmp_path)
    assert list(table.columns[:3]) == ["index", "path", "escaped"]
    assert list(table["path"]) == ['a,"b"\n.jpg', "caf\\xe9\\\\.jpg", "é.jpg"]
    assert table["vector"][1] is None and len(table["vector"][0]) == 5


@pytest.mark.parametrize("good", [(True, False, True), (False, False, False), (True, True, True)])
def test_grids_come_back_whichever_rows_failed(tmp_path: Path, good: tuple[bool, ...]) -> None:
    written = rows()
    written.status = ["ok" if one else "corrupt" for one in good]
    grids = np.random.default_rng(0).normal(size=(3, 2, 4, 5)).astype("float16")
    grids[~np.array(good)] = np.nan
    written.arrays = {"patch": grids}
    FORMATS["parquet"].write(tmp_path, 0, written, {})
    read, _ = FORMATS["parquet"].read(tmp_path, 0)
    assert read.arrays["patch"].dtype == np.float16
    np.testing.assert_array_equal(read.arrays["patch"], grids)


def test_lists_are_such_as_every_pyarrow_reads_with_nulls(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    FORMATS["parquet"].write(tmp_path, 0, rows(), {})
    schema = pq.read_schema(tmp_path / "part-00000.parquet")
    assert schema.field("vector").type == pa.list_(pa.float32())


def test_parts_with_lists_of_a_fixed_size_are_read(tmp_path: Path) -> None:
    """As they were written before, beside those of today."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written = rows()
    written.status, written.arrays["vector"][1] = ["ok"] * 3, 1.0
    FORMATS["parquet"].write(tmp_path, 0, written, {})
    table = pq.read_table(tmp_path / "part-00000.parquet")
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(written.arrays["vector"].reshape(-1)), 5)
    old = table.set_column(table.column_names.index("vector"), "vector", fixed)
    pq.write_table(old, tmp_path / "part-00001.parquet")
    read, _ = FORMATS["parquet"].read(tmp_path, 1)
    np.testing.assert_array_equal(read.arrays["vector"], written.arrays["vector"])
    both = pq.read_table(tmp_path)
    assert both.num_rows == 6 and both["vector"].null_count == 0
