"""Names in tables: whole where they fit, without what they share where they do not, and never cut."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from msplit.report.document import Document, Name, Table
from msplit.report.render import common, fitted, to_markdown, to_terminal

SCOPE = "StatefulPartitionedCall/model/tower_with_a_long_name"
NAMES = [f"{SCOPE}/dense_{number}/MatMul" for number in range(3)]
TABLE = Table(
    "Branches", ("first kernel", ">time", "forks at"), [(Name(n), "1 µs", "(inputs)") for n in NAMES], "and 2 more"
)


def shown(table: Table, width: int) -> str:
    out = io.StringIO()
    to_terminal(Document("title", tables=[table]), Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["a/b/c", "a/b/d"], "a/b/"),
        (["a/b/c", "a/bc/d"], "a/"),
        (["a/b", "a/b/c"], "a/"),
        (["a/b/c"], "a/b/"),
        (["a", "b"], ""),
        (["a", "a/b"], ""),
        ([], ""),
    ],
)
def test_what_names_share(names: list[str], shared: str) -> None:
    assert common(names) == shared


def test_a_name_that_fits_is_whole() -> None:
    assert fitted(TABLE, 100) is TABLE
    assert all(name in shown(TABLE, 100) for name in NAMES)


def test_a_narrow_terminal_leaves_out_what_all_names_share_and_says_it() -> None:
    text = shown(TABLE, 60)
    assert "dense_0/MatMul   1 µs   (inputs)" in text
    assert f"every name begins with {SCOPE}/; and 2" in " ".join(text.split())
    assert SCOPE in text  # on one line, to be copied


def test_markdown_has_whole_names() -> None:
    assert f"| {NAMES[0]} | 1 µs | (inputs) |" in to_markdown(Document("title", tables=[TABLE]))


def test_a_line_breaks_behind_a_scope_where_it_can() -> None:
    table = Table("", ("name",), [(Name("a/" + "b" * 40 + "/" + "c" * 30 + "/d"),), (Name("x"),)])
    assert [line.rstrip() for line in shown(table, 60).splitlines()[4:6]] == [
        " a/" + "b" * 40 + "/",
        "   " + "c" * 30 + "/d",
    ]


PARTS = st.lists(st.text("abc_日/", min_size=1, max_size=30), min_size=1, max_size=6).map("/".join)


@given(st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=4), st.integers(60, 140))
def test_nothing_is_lost_and_every_line_fits(names: list[tuple[str, str]], width: int) -> None:
    table = Table("", ("one", ">count", "other"), [(Name(a), "12,345", Name(b)) for a, b in names])
    found = fitted(table, width)
    said = re.match(r"every name begins with (.+)", found.note)
    prefix = said[1] if said else ""
    for row, (a, b) in zip(found.rows, names, strict=True):
        for cell, name in ((row[0], a), (row[2], b)):
            lines = [cell] if isinstance(cell, str) else [cell[0], *(line.removeprefix("  ") for line in cell[1:])]
            assert prefix + "".join(lines) == name
    body = shown(Table("", found.columns, found.rows), width)
    assert all(len(line) <= width for line in body.splitlines())


def test_texts_fold_at_blanks_only() -> None:
    name = f"{SCOPE}/{SCOPE}"
    document = Document(name, facts=[("inputs", f"a {name} b")], notes=[f"run {name} now"], warnings=[f"is {name} it"])
    out = io.StringIO()
    to_terminal(document, Console(file=out, width=60, highlight=False))
    assert out.getvalue().splitlines() == [
        name, "  inputs  a", f"          {name}", "          b", "", "warning: is", name, "it", "run", name, "now",
    ]  # fmt: skip
