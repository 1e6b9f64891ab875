"""The sorted list on disk."""

from __future__ import annotations

import random
from pathlib import Path

from vitcli.commands.embed.inputs import difference, write_inputs
from vitcli.images.sources import Entry


def test_sorted_without_repetitions_and_cut_into_parts(tmp_path: Path) -> None:
    entries = [Entry(f"{i % 30:03d}\n.jpg", "x") for i in range(40)]
    random.Random(0).shuffle(entries)
    result = write_inputs(entries, tmp_path, part_rows=8)
    assert (result.count, result.duplicates, result.parts) == (30, 10, 4)
    parts = [[entry.name for entry in result.read(part)] for part in range(4)]
    assert [len(part) for part in parts] == [8, 8, 8, 6]
    assert [name for part in parts for name in part] == [f"{i:03d}\n.jpg" for i in range(30)]
    other = write_inputs(reversed(entries), tmp_path, part_rows=5)
    assert other.digest == result.digest
    assert [p.name for p in tmp_path.iterdir()] and len(list(tmp_path.iterdir())) == 2


def test_members_of_one_name_stay_two_in_the_order_of_the_shard(tmp_path: Path) -> None:
    entries = [Entry("s.tar/a", "s.tar", 2048, 1), Entry("s.tar/a", "s.tar", 512, 1)]
    assert [e.offset for e in write_inputs(entries, tmp_path, 9).read(0)] == [512, 2048]


def test_the_difference_names_examples(tmp_path: Path) -> None:
    before = write_inputs([Entry(n, n) for n in "abcd"], tmp_path, 9)
    after = write_inputs([Entry(n, n) for n in "acdef"], tmp_path, 9)
    assert difference(before.path, after.path) == "2 added (e, f), 1 removed (b)"
