"""Names survive as they were, whatever bytes they hold."""

import os

from hypothesis import given
from hypothesis import strategies as st

from vitcli.commands.embed.parts import escaped, unescaped
from vitcli.images.sources import Entry


@given(st.binary(min_size=1))
def test_any_name_comes_back(name: bytes) -> None:
    text, flag = escaped(os.fsdecode(name))
    text.encode()  # valid text, as Parquet wants it
    assert os.fsencode(unescaped(text, flag)) == name


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_utf8_name_is_written_as_it_is(name: str) -> None:
    assert escaped(name) == (name, False)


def test_escapes_of_bytes_that_are_not_utf8() -> None:
    assert escaped(os.fsdecode(b"a\xff\\b\n")) == ("a\\xff\\\\b\n", True)


@given(st.binary(), st.integers(-1, 2**40))
def test_a_line_has_no_newline_inside_and_comes_back(name: bytes, offset: int) -> None:
    entry = Entry(os.fsdecode(name), "s.tar", offset, 3, "corrupt", "x\ny")
    line = entry.to_line()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert Entry.from_line(line) == entry
