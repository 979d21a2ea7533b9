"""Documents as terminal tables (rich) and as Markdown.

Names of nodes in tables that are wider than the terminal lose the scopes that all of them share, then stand on several lines; they are
never cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from msplit import escape
from msplit.report.document import Cell, Document, Name, Table

_NARROW = 16
"""Columns that a name gets at least, however wide the others are."""

_INDENT = "  "
"""Before what does not fit on the first line of a name."""

_PADDING = 3
"""Columns between two cells; one more than that stands around them all."""


def to_terminal(document: Document, console: Console) -> None:
    """Prints a document. Cells that do not fit wrap; nothing is cut off. In a pipe no line ends in spaces."""
    with console.capture() as captured:
        _print(document, console)
    text = captured.get()
    if not console.is_terminal:
        text = "\n".join(row.rstrip() for row in text.split("\n"))
    console.file.write(escape.guarded(text))  # anew: where a cell wraps, a line may begin in the middle of a name
    console.file.flush()


def _print(document: Document, console: Console) -> None:
    _put(console, _folded(document.title, console.width), "bold")
    indent = 4 + max((len(name) for name, _ in document.facts), default=0)
    for name, value in document.facts:
        lines = _folded(value, console.width, indent)
        lines[0] = Text.assemble("  ", (name, "dim"), " " * (indent - 2 - len(name)), lines[0].plain[indent:])
        _put(console, lines)
    for table in document.tables:
        console.print()
        if table.title:
            console.print(Text(escape.line(table.title), style="bold"))
        if table.rows and (table.whole or _least(table) > console.width):
            for line in _lines(table):
                console.print(Text(line), soft_wrap=True)
        elif table.rows:
            table = fitted(table, console.width)
            console.print(_rich_table(table))
        else:
            console.print(Text("  none", style="dim"))
        if table.note:
            _put(console, _folded(table.note, console.width, 2), "dim")
    if document.warnings or document.notes:
        console.print()
    for warning in document.warnings:
        lines = _folded(f"warning: {warning}", console.width)
        lines[0].stylize("yellow", 0, len("warning: "))
        _put(console, lines)
    for note in document.notes:
        _put(console, _folded(note, console.width))
    if document.following:
        console.print(Text("Next:"))
        for command in document.following:
            for line in _continued([escape.line(part) for part in command], console.width):
                console.print(Text(line), soft_wrap=True)


def _continued(parts: Sequence[str], width: int) -> list[str]:
    """A command in lines that a shell takes for one: they end in backslashes. A part that is longer than a line is one all the same."""
    lines = [f"  {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {part}")
    return lines


def _folded(text: str, width: int, indent: int = 0) -> list[Text]:
    """Lines of words that stay whole, such as names and commands: they are there to be copied."""
    blank = " " * indent
    return [
        Text(line)
        for line in textwrap.wrap(
            escape.line(text),
            max(width, indent + 1),
            initial_indent=blank,
            subsequent_indent=blank,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ] or [Text(blank)]


def _put(console: Console, lines: Sequence[Text], style: str = "") -> None:
    for line in lines:
        console.print(line, soft_wrap=True, style=style)


def _lines(table: Table) -> list[str]:
    rows = [[name.removeprefix(">") for name in table.columns], *([*map(_shown, row)] for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    right = [name.startswith(">") for name in table.columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(cell.rjust(width) if r else cell.ljust(width) for cell, width, r in cells).rstrip())
    return lines


def _rich_table(table: Table) -> RichTable:
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False, header_style="dim")
    for name in table.columns:
        right = name.startswith(">")
        shown.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in table.rows:
        shown.add_row(*(Text(_shown(cell)) for cell in row))
    return shown


def _shown(cell: Cell) -> str:
    return escape.line(cell) if isinstance(cell, str) else "\n".join(map(escape.line, cell))


def fitted(table: Table, width: int) -> Table:
    """A table whose names fit a terminal of so many columns, if they can. What fits as it is stays so: a whole name can be copied."""
    if _natural(table) <= width or not any(isinstance(cell, Name) for row in table.rows for cell in row):
        return table
    shared = common([cell for row in table.rows for cell in row if isinstance(cell, Name)])
    if shared:
        said = f"every name begins with {shared}"
        cut = [[Name(cell[len(shared) :]) if isinstance(cell, Name) else cell for cell in row] for row in table.rows]
        table = replace(table, rows=cut, note=f"{said}; {table.note}" if table.note else said)
    return table if _natural(table) <= width else _broken(table, width)


def common(names: Sequence[str]) -> str:
    """The scopes that all names share, with the slash behind them; "" where there is none. Each name keeps its last part."""
    levels = zip(*(name.split("/")[:-1] for name in names), strict=False)
    return "".join(f"{scopes[0]}/" for scopes in takewhile(lambda scopes: len(set(scopes)) == 1, levels))


def _widths(table: Table) -> list[int]:
    widths = [cell_len(name.removeprefix(">")) for name in table.columns]
    for row in table.rows:
        for column, cell in enumerate(row):
            lines = [cell] if isinstance(cell, str) else cell
            widths[column] = max(widths[column], *(cell_len(escape.line(part)) for part in lines), 0)
    return widths


def _least(table: Table) -> int:
    """Columns of the terminal that a table needs so that no number is cut off; text may be broken. 0 where cells have several lines."""
    if not all(isinstance(cell, str) for row in table.rows for cell in row):
        return 0
    widths, named = _widths(table), _named(table)
    least = [
        width if name.startswith(">") else min(width, _NARROW) if column in named else 1
        for column, (name, width) in enumerate(zip(table.columns, widths, strict=True))
    ]
    return sum(least) + _PADDING * len(widths) - 1


def _named(table: Table) -> set[int]:
    """Columns that have names."""
    return {column for row in table.rows for column, cell in enumerate(row) if isinstance(cell, Name)}


def _natural(table: Table) -> int:
    widths = _widths(table)
    return sum(widths) + _PADDING * len(widths) - 1


def _broken(table: Table, width: int) -> Table:
    """Names on several lines, broken behind slashes. Columns of names share what the others leave, the shorter ones first."""
    widths = _widths(table)
    named = sorted(_named(table), key=lambda column: widths[column])
    left = width - _PADDING * len(widths) + 1 - sum(widths) + sum(widths[column] for column in named)
    for place, column in enumerate(named):
        widths[column] = min(widths[column], max(left // (len(named) - place), _NARROW))
        left -= widths[column]
    rows = [
        [_name_lines(cell, widths[column]) if isinstance(cell, Name) else cell for column, cell in enumerate(row)]
        for row in table.rows
    ]
    return replace(table, rows=rows)


def _name_lines(name: str, width: int) -> tuple[str, ...]:
    lines, rest = [], escape.line(name)
    while cell_len(rest) > width:
        fits = len(chop_cells(rest, width)[0])
        end = max(rest.rfind("/", len(_INDENT), fits) + 1 or fits, len(_INDENT) + 1)
        lines.append(rest[:end])
        rest = _INDENT + rest[end:]
    return (*lines, rest)


def to_markdown(document: Document) -> str:
    """The document as GitHub-flavoured Markdown."""
    lines = [f"### {escape.markdown(document.title)}", ""]
    if document.facts:
        lines += _markdown_table(("", ""), document.facts)
    for table in document.tables:
        lines += ["", f"**{escape.markdown(table.title)}**", ""]
        lines += _markdown_table(table.columns, table.rows) if table.rows else ["none"]
        if table.note:
            lines += ["", f"_{escape.markdown(table.note)}_"]
    for warning in document.warnings:
        lines += ["", f"> **warning:** {escape.markdown(warning)}"]
    for note in document.notes:
        lines += ["", escape.markdown(note)]
    if document.following:
        lines += ["", "Next:", "", *(f"    {escape.line(' '.join(command))}" for command in document.following)]
    return "\n".join(lines) + "\n"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines = ["| " + " | ".join(_cell(name.removeprefix(">")) for name in columns) + " |"]
    lines.append("|" + "|".join(" ---: " if name.startswith(">") else " --- " for name in columns) + "|")
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return lines


def _cell(cell: Cell) -> str:
    parts = [cell] if isinstance(cell, str) else cell
    return "<br>".join(escape.markdown(part, cell=True) for part in parts)
