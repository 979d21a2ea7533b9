"""What the inputs of a bench meet in the model's tables, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.inputs.table_hits import Hits
from msplit.report.document import Table
from msplit.report.text import count, percent

_MOST = 12


def table(found: Sequence[Hits]) -> Table:
    """The tables that are met least, first."""
    rows = sorted(found, key=lambda one: (one.hits / max(one.values, 1), one.distinct / max(one.size, 1)))
    left = len(rows) - _MOST
    note = "in it: of the values that are looked up; different: rows or keys that they meet"
    if left > 0:
        note += f"; {left} more tables are met as well as these or better"
    return Table(
        "What the inputs look up",
        ("input", "table", ">entries", ">values", ">in it", ">different"),
        [
            (
                one.input,
                one.table,
                f"{count(one.size)} {one.kind}",
                count(one.values),
                percent(one.hits, one.values),
                count(one.distinct),
            )
            for one in rows[:_MOST]
        ],
        note,
    )


def payload(found: Sequence[Hits]) -> list[dict[str, Any]]:
    """All of them, for JSON."""
    return [one.to_dict() for one in found]
