import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from msplit.core.statistics import Ratio
from msplit.report import document, render
from msplit.report.document import Document, Table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 µs"),
        (0.004, "<0.1 µs"),
        (0.05, "0.1 µs"),
        (1.1, "1.1 µs"),
        (99.94, "99.9 µs"),
        (99.96, "100 µs"),
        (999.4, "999 µs"),
        (999.6, "1 ms"),
        (12345, "12.3 ms"),
        (2_500_000, "2.5 s"),
    ],
)
def test_times(value: float, shown: str) -> None:
    assert document.micros(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.54 KB"),
        (95.4e6, "95.4 MB"),
        (999.9e6, "1 GB"),
        (5e12, "5 TB"),
        (7e15, "7 PB"),
    ],
)
def test_sizes(value: float, shown: str) -> None:
    assert document.size(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(500, "500 FLOP"), (2.5e9, "2.5 GFLOP"), (3e20, "3e+05 PFLOP")])
def test_operations(value: float, shown: str) -> None:
    assert document.operations(value) == shown


@pytest.mark.parametrize(
    ("part", "whole", "shown"), [(1, 0, "-"), (0, 10, "0 %"), (12.4, 100, "12 %"), (0.44, 100, "0.4 %")]
)
def test_shares(part: float, whole: float, shown: str) -> None:
    assert document.percent(part, whole) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(1, "1.00x"), (5.612, "5.61x"), (9.996, "10.0x"), (49.3, "49.3x"), (160.2, "160x")]
)
def test_ratios(value: float, shown: str) -> None:
    assert document.ratio(value) == shown


def test_plurals() -> None:
    assert [document.plural(n, "node") for n in (0, 1, 1234)] == ["0 nodes", "1 node", "1,234 nodes"]
    assert document.plural(2, "dependency", "dependencies") == "2 dependencies"


def test_headings_name_the_format() -> None:
    assert document.heading(Path("a.pb"), "graphdef") == "a.pb (GraphDef)"
    assert document.heading("m", "savedmodel-text") == "m (SavedModel, text)"


class Colour(Enum):
    RED = "red"


def test_json_is_plain() -> None:
    ratio = Ratio("one", "host", 2.0, 0.0, math.inf, 0.95, 3)
    payload = {
        "array": np.arange(3),
        "number": np.float32(1.5),
        "nothing": math.nan,
        "path": Path("a/b"),
        "enum": Colour.RED,
        "bytes": b"\xff",
        "ratio": ratio,
        3: (1, 2),
    }
    found = json.loads(document.dumps("test", payload))
    assert list(found)[:2] == ["schema_version", "command"]
    assert found["array"] == [0, 1, 2]
    assert found["number"] == 1.5
    assert found["nothing"] is None
    assert found["path"] == "a/b"
    assert found["enum"] == "red"
    assert found["bytes"] == "\ufffd"
    assert found["ratio"]["high"] is None
    assert found["3"] == [1, 2]


DOCUMENT = Document(
    "title",
    facts=[("name", "value | with\na bar")],  # a line break of the model's
    tables=[
        Table("Empty", ("a",), []),
        Table("Wide", ("name", ">size"), [("x" * 120, "1"), ("y", "22")], whole=True),
        Table("", ("a", ">b"), [("1", "2"), (("two", "lines"), "3")], "a note"),
    ],
    notes=["the end"],
    warnings=["careful"],
)


def printed(width: int = 60, *, terminal: bool = False) -> str:
    from io import StringIO

    out = StringIO()
    render.to_terminal(DOCUMENT, Console(file=out, width=width, force_terminal=terminal, highlight=False))
    return out.getvalue()


def test_rows_of_lists_are_never_broken() -> None:
    lines = printed().splitlines()
    assert "x" * 120 + "     1" in lines
    assert "y" + " " * 119 + "    22" in lines
    assert all(line == line.rstrip() for line in lines)
    assert all(len(line) <= 60 for line in lines if not line.startswith(("x", "y", "name")))


def test_numbers_are_never_cut_off() -> None:
    """On a narrow terminal a line is longer than it; 1,052 was shown as 1,0."""
    from io import StringIO

    columns = ("name", *(f">{head}" for head in ("max-batch", "groups", "requests/s", "p50", "p99", "memory")), "")
    row = ("lstm", "8", "16", "1,052", "1.19 ms", "5.74 ms", "4.59 MB", "best")
    for width in (30, 60, 200):
        out = StringIO()
        sweep = document.Document("title", tables=[Table("Sweep", columns, [row])])
        render.to_terminal(sweep, Console(file=out, width=width, highlight=False))
        assert all(cell in out.getvalue() for cell in row)
        assert all(head.removeprefix(">") in out.getvalue() for head in columns)


def test_the_order_is_title_facts_tables_warnings_notes() -> None:
    out = printed()
    places = [
        out.index(part) for part in ("title", "value", "Empty", "none", "Wide", "a note", "warning: careful", "the end")
    ]
    assert places == sorted(places)
    assert "\x1b[" not in out
    assert "\x1b[33mwarning: " in printed(terminal=True)


def test_markdown_keeps_cells_in_their_cells() -> None:
    lines = render.to_markdown(DOCUMENT).splitlines()
    assert "| name | value \\| with\\na bar |" in lines
    assert "| two<br>lines | 3 |" in lines
    assert "| a | b |" in lines
    assert "| --- | ---: |" in lines
    assert "> **warning:** careful" in lines
    assert "_a note_" in lines


def test_what_a_table_leaves_out() -> None:
    assert document.more(1, "--all", "node") == "and 1 more node (--all)"
    assert document.more(1234, "--all") == "and 1,234 more (--all)"
    assert document.more(0, "--all", "node") == ""


def test_sizes_of_tensors() -> None:
    assert [document.dimensions(shape) for shape in ((None, 4), (), None)] == ["?×4", "scalar", "?"]


@dataclass(frozen=True)
class Inner:
    width: float
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        return {"width_us": self.width}


@dataclass(frozen=True)
class Outer:
    inner: Inner
    names: tuple[str, ...] = ()


def test_keys_of_json_are_attributes_by_their_own_names_or_others():
    found = Outer(Inner(2.0), ("a",))
    assert document.picked(found, "names wide=inner.width note=inner.note?", "inner") == {
        "names": ("a",),
        "wide": 2.0,
        "note": None,
        "inner": found.inner,
    }
    assert [*document.picked(found, "inner names")] == ["inner", "names"]
    with pytest.raises(AttributeError):
        document.picked(found, "name")


def test_a_result_that_says_what_its_json_is_is_asked():
    assert document.plain({"one": Outer(Inner(float("inf")))}) == {"one": {"inner": {"width_us": None}, "names": []}}
