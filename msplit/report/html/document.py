"""HTML files with curves and tables, into which every text and every number goes safely.

A document with curves as one HTML file: `load --html` and `bench --plot`; and the tables and lists that every page has.

Puts everything into one file, safely: names in a model are not to be trusted.

Text goes through `escape.html`. Data go in as base64 of gzip, in which no name can end anything. Scripts run only if their hash is
in the page's Content-Security-Policy, which also forbids every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from msplit._version import __version__
from msplit.escape import html as text
from msplit.escape import visible
from msplit.report.document import Cell, Document, Table

_PACKAGE = "msplit.report.html"
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


@dataclass(frozen=True)
class Kit:
    """The files that a kind of page is made of.

    Attributes:
        body: Its HTML, with places to fill, in ``assets``.
        scripts: Its own scripts there.
        vendor: Libraries in ``vendor``, which run before them.
        licences: Their licences, there too.
        credits: Names and licences of the libraries, as the page shows them.
    """

    body: str
    scripts: tuple[str, ...]
    vendor: tuple[str, ...]
    licences: tuple[str, ...]
    credits: str


REPORT = Kit(
    "report.html",
    ("look.js", "data.js", "rows.js", "minimap.js", "graph.js", "timeline.js", "panel.js", "main.js"),
    ("cytoscape.min.js", "cytoscape-dagre.min.js"),
    ("LICENSE.cytoscape", "LICENSE.cytoscape-dagre", "LICENSE.dagre"),
    "Cytoscape.js and dagre (MIT licence)",
)
PLOTS = Kit(
    "plots.html",
    ("look.js", "plots.js"),
    ("d3.min.js", "plot.umd.min.js"),
    ("LICENSE.d3", "LICENSE.plot"),
    "Observable Plot and D3 (ISC licence)",
)
MEASURED = Kit(
    REPORT.body,
    (*REPORT.scripts[:-1], "roofline.js", REPORT.scripts[-1]),
    (*REPORT.vendor, *PLOTS.vendor),
    (*REPORT.licences, *PLOTS.licences),
    f"{REPORT.credits}; {PLOTS.credits}",
)
"""A report with a roofline."""


COMPARED = Kit("compared.html", (), (), (), "HTML and CSS alone")


def asset(folder: str, name: str) -> str:
    """A file that ships with this package."""
    return resources.files(_PACKAGE).joinpath(folder, name).read_text("utf-8")


def packed(data: Mapping[str, Any]) -> str:
    """Data for the page's script: JSON, compressed, in base64. Equal data give equal text."""
    plain = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(plain.encode("utf-8"), 6, mtime=0)).decode("ascii")


def embedded(kit: Kit, title: str, parts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The whole file, all of which has a UTF-8 form: `parts` are HTML for the places of the kit's body beside its title."""
    app = "\n".join(["(() => {", '"use strict";', *(asset("assets", name) for name in kit.scripts), "})();"])
    scripts = [*(_SOURCE_MAP.sub("", asset("vendor", name)) for name in kit.vendor), app]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    places = {
        "title": text(title),
        "version": text(__version__),
        "body": _filled(kit.body, {"title": text(title), **parts}),
        "style": asset("assets", "style.css"),
        "policy": (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'none'; base-uri 'none'; form-action 'none'"
        ),
        "credits": kit.credits,
        "licences": "\n".join(asset("vendor", name) for name in kit.licences).replace("--", "- -"),
        "data": packed(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return _filled("frame.html", places)


def _filled(name: str, places: Mapping[str, str]) -> str:
    """An asset with its places filled: in one pass, so that a name that looks like a place is not."""
    return _PLACE.sub(lambda found: places[found[1]], asset("assets", name))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


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
    return embedded(PLOTS, document.title, parts, {"plots": [plot.columns() for plot in plots]})


def side_by_side(document: Document, rows: Sequence[tuple[str, str, Sequence[str], Sequence[str]]], left: str) -> str:
    """One HTML file: facts and tables, and what two models have that is not the same. It works without JavaScript.

    Args:
        document: The report on both.
        rows: Scope, kind (``added``, ``removed``, ``changed`` or ``renamed``) and lines of the old and of the new model.
        left: A sentence on rows that are left out, "" for none.
    """
    by_scope: dict[str, list[str]] = {}
    for scope, kind, *sides in rows:
        cells = "".join(f"<td>{_cell(tuple(lines))}</td>" for lines in sides)
        by_scope.setdefault(scope, []).append(f'<tr class="{text(kind)}"><td>{text(kind)}</td>{cells}</tr>')
    parts = {
        "summary": facts(document.facts) + "".join(f'<p class="warning">{text(one)}</p>' for one in document.warnings),
        "notes": "".join(f'<p class="note">{text(note)}</p>' for note in document.notes),
        "rows": "".join(framed(("", "before", "now"), found, scope) for scope, found in by_scope.items()) + text(left),
        "tables": "".join(f"<div>{table(one)}</div>" for one in document.tables),
    }
    return embedded(COMPARED, document.title, parts, {})


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
