"""A document with curves as one HTML file: `load --html` and `bench --plot`; and the tables and lists that every page has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msplit.escape import html as text
from msplit.escape import visible
from msplit.report.document import Cell, Document, Table
from msplit.report.html import embed


@dataclass(frozen=True)
class Plot:
    """Lines over an axis, both axes logarithmic.

    Attributes:
        title: Heading of the plot.
        x: Name of the axis across, with its unit.
        y: Name of the axis up, with its unit.
        lines: Name of each line -> its points, x -> (y, lower end, upper end), all above 0; the ends are drawn as a whisker.
        ticks: True if the values of x are few and chosen by the user: each is a tick of its own, as far as there is room.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Mapping[float, tuple[float, float, float]]]
    ticks: bool = False

    def columns(self) -> dict[str, Any]:
        """Data for the page's script, one entry per point."""
        return {
            "title": visible(self.title),
            "x": visible(self.x),
            "y": visible(self.y),
            "ticks": sorted({x for points in self.lines.values() for x in points}) if self.ticks else [],
            "names": list(map(visible, self.lines)),
            "points": [
                {"line": visible(name), "x": x, "y": y, "low": low, "high": high}
                for name, points in self.lines.items()
                for x, (y, low, high) in points.items()
            ],
        }


def page(document: Document, plots: Sequence[Plot], hint: str) -> str:
    """One HTML file: facts, curves and tables. It loads nothing; without JavaScript the tables are still there.

    Args:
        hint: A sentence that says what the curves show.
    """
    alarms = "".join(f'<p class="warning">{text(warning)}</p>' for warning in document.warnings)
    parts = {
        "summary": facts(document.facts) + alarms,
        "hint": text(hint),
        "tables": "".join(f"<div>{table(one)}</div>" for one in document.tables),
        "notes": "".join(f'<p class="note">{text(note)}</p>' for note in document.notes),
    }
    return embed.page(embed.PLOTS, document.title, parts, {"plots": [plot.columns() for plot in plots]})


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """A list of names and values; a name in capitals is an alarm."""
    shown = "".join(
        f"<dt>{text(name)}</dt><dd{' class=error' if name.isupper() else ''}>{text(value)}</dd>"
        for name, value in pairs
    )
    return f'<dl class="facts">{shown}</dl>'


def table(found: Table) -> str:
    """A table of a document, with its title and note."""
    right = [' class="right"' if name.startswith(">") else "" for name in found.columns]
    rows = [
        f"<tr>{''.join(f'<td{c}>{_cell(cell)}</td>' for c, cell in zip(right, row, strict=True))}</tr>"
        for row in found.rows
    ]
    note = f'<p class="hint">{text(found.note)}</p>' if found.note else ""
    return framed(found.columns, rows, found.title) + note


def framed(columns: Sequence[str], rows: Sequence[str], title: str = "") -> str:
    """A table around rows that are HTML already; headings that start with ">" are aligned right."""
    right = {name: ' class="right"' if name.startswith(">") else "" for name in columns}
    head = "".join(f"<th{right[name]}>{text(name.removeprefix('>'))}</th>" if name else "<td></td>" for name in columns)
    caption = f"<caption>{text(title)}</caption>" if title else ""
    body = "".join(rows)
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    return text(cell) if isinstance(cell, str) else "<br>".join(map(text, cell))
