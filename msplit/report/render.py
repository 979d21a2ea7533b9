"""Documents as terminal tables (rich) and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from msplit.report.document import Document, Table


def to_terminal(document: Document, console: Console) -> None:
    """Prints a document. Cells that do not fit wrap; nothing is cut off. In a pipe no line ends in spaces."""
    with console.capture() as captured:
        _print(document, console)
    text = captured.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    console.file.write(text)
    console.file.flush()


def _print(document: Document, console: Console) -> None:
    console.print(Text(document.title, style="bold"))
    if document.facts:
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in document.facts:
            grid.add_row(Text(name), Text(value))
        console.print(Padding(grid, (0, 0, 0, 2)))
    for table in document.tables:
        console.print()
        if table.title:
            console.print(Text(table.title, style="bold"))
        if table.rows and table.whole:
            for line in _lines(table):
                console.print(Text(line), soft_wrap=True)
        elif table.rows:
            console.print(_rich_table(table))
        else:
            console.print(Text("  none", style="dim"))
        if table.note:
            console.print(Padding(Text(table.note, style="dim"), (0, 0, 0, 2)))
    if document.warnings or document.notes:
        console.print()
    for warning in document.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))
    for note in document.notes:
        console.print(Text(note))


def _lines(table: Table) -> list[str]:
    rows = [[name.removeprefix(">") for name in table.columns], *table.rows]
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
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def to_markdown(document: Document) -> str:
    """The document as GitHub-flavoured Markdown."""
    lines = [f"### {document.title}", ""]
    if document.facts:
        lines += _markdown_table(("", ""), document.facts)
    for table in document.tables:
        lines += ["", f"**{_escape(table.title)}**", ""]
        lines += _markdown_table(table.columns, table.rows) if table.rows else ["none"]
        if table.note:
            lines += ["", f"_{_escape(table.note)}_"]
    for warning in document.warnings:
        lines += ["", f"> **warning:** {_escape(warning)}"]
    for note in document.notes:
        lines += ["", _escape(note)]
    return "\n".join(lines) + "\n"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(_escape(name.removeprefix(">")) for name in columns) + " |"]
    lines.append("|" + "|".join(" ---: " if name.startswith(">") else " --- " for name in columns) + "|")
    lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows]
    return lines


def _escape(text: str) -> str:
    # Patterns are full of asterisks; in code spans everything but the bar is literal already.
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|").replace("\n", "<br>")
