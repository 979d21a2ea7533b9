"""Names of nodes in tables that are narrower than they: without the scopes that all of them share, then on several lines; never cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len, chop_cells

from msplit import escape
from msplit.report.document import Name, Table

_NARROW = 16
"""Columns that a name gets at least, however wide the others are."""

_INDENT = "  "
"""Before what does not fit on the first line of a name."""

_PADDING = 3
"""Columns between two cells; one more than that stands around them all."""


def fitted(table: Table, width: int) -> Table:
    """A table whose names fit a terminal, if they can.

    Args:
        table: The table. Where it fits as it is, it stays so: a whole name can be copied.
        width: Columns of the terminal.
    """
    if _natural(table) <= width or not any(isinstance(cell, Name) for row in table.rows for cell in row):
        return table
    shared = common([cell for row in table.rows for cell in row if isinstance(cell, Name)])
    if shared:
        said = f"every name begins with {shared}"
        table = replace(
            table,
            rows=[
                [Name(cell[len(shared) :]) if isinstance(cell, Name) else cell for cell in row] for row in table.rows
            ],
            note=f"{said}; {table.note}" if table.note else said,
        )
    return table if _natural(table) <= width else _broken(table, width)


def common(names: Sequence[str]) -> str:
    """The scopes that all names share, with the slash behind them; "" where there is none. Each name keeps its last part."""
    scopes = [name.split("/")[:-1] for name in names]
    if not scopes:
        return ""
    first, last = min(scopes), max(scopes)
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return "".join(f"{scope}/" for scope in first[:shared])


def _widths(table: Table) -> list[int]:
    widths = [cell_len(name.removeprefix(">")) for name in table.columns]
    for row in table.rows:
        for column, cell in enumerate(row):
            lines = [cell] if isinstance(cell, str) else cell
            widths[column] = max(widths[column], *(cell_len(escape.line(part)) for part in lines), 0)
    return widths


def _natural(table: Table) -> int:
    widths = _widths(table)
    return sum(widths) + _PADDING * len(widths) - 1


def _broken(table: Table, width: int) -> Table:
    """Names on several lines, broken behind slashes. Columns of names share what the others leave, the shorter ones first."""
    widths = _widths(table)
    named = sorted(
        {column for row in table.rows for column, cell in enumerate(row) if isinstance(cell, Name)},
        key=lambda column: widths[column],
    )
    left = width - _PADDING * len(widths) + 1 - sum(widths) + sum(widths[column] for column in named)
    for place, column in enumerate(named):
        widths[column] = min(widths[column], max(left // (len(named) - place), _NARROW))
        left -= widths[column]
    rows = [
        [_lines(cell, widths[column]) if isinstance(cell, Name) else cell for column, cell in enumerate(row)]
        for row in table.rows
    ]
    return replace(table, rows=rows)


def _lines(name: str, width: int) -> tuple[str, ...]:
    lines, rest = [], escape.line(name)
    while cell_len(rest) > width:
        fits = len(chop_cells(rest, width)[0])
        end = max(rest.rfind("/", len(_INDENT), fits) + 1 or fits, len(_INDENT) + 1)
        lines.append(rest[:end])
        rest = _INDENT + rest[end:]
    return (*lines, rest)
