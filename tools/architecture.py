"""Draws `docs/architecture.svg` from the imports: packages in layers, and inside of the cuda engine likewise.

    python tools/architecture.py

An arrow means "imports", and is left out where a longer way says the same. What is written in a box is the first sentence of the package's
docstring. Imports for type checkers alone do not count. A test compares the file with what this would write.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "architecture.svg"
LEFT_OUT = {"__init__", "__main__", "_version"}

BOX, LANE, GAP = 220, 14, 20  # widths: of a box, of an arrow that passes between boxes, between them
HEIGHT, ROW = 58, 92  # of a box, and from row to row
CHARACTERS, LINES = 36, 3  # in a line, lines in a box
MARGIN, TITLE = 24, 44

BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where statements have statements."""

Edges = dict[str, set[str]]
LATER = re.compile(r"'(msplit(?:\.\w+)+)'")
"""What a package names in order to import it when it is asked for."""

STYLE = """
text { font-family: system-ui, sans-serif; font-size: 10.5px; fill: #4a5160 }
.title { font-size: 15px; font-weight: 600; fill: #1b1f27 }
.name { font-size: 12.5px; font-weight: 600; fill: #1b1f27 }
rect { fill: #f4f6fa; stroke: #8a94a6 }
path { fill: none; stroke: #5b6b8c; stroke-width: 1.2 }
marker path { fill: #5b6b8c; stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #b4bccb }
.title, .name { fill: #f0f3f8 }
rect { fill: #232936; stroke: #6d788c }
path { stroke: #93a5c9 }
marker path { fill: #93a5c9 }
}"""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(path.read_text("utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports when it runs, functions included."""
    for node in (node for field in BODIES for node in getattr(tree, field, ())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from imported(node)


def parts_of(package: str) -> dict[str, Path]:
    """What lies in a package by name: modules, and packages by their `__init__`."""
    folder = ROOT / Path(*package.split("."))
    found = {path.stem: path for path in folder.glob("*.py") if path.stem not in LEFT_OUT}
    return dict(sorted((found | {path.parent.name: path for path in folder.glob("*/__init__.py")}).items()))


def edges_of(package: str) -> Edges:
    """Which part of a package imports which."""
    parts = parts_of(package)
    found: Edges = {name: set() for name in parts}
    for name, path in parts.items():
        for module in sorted(path.parent.rglob("*.py")) if path.stem == "__init__" else [path]:
            tree = parsed(module)
            later = LATER.findall(ast.unparse(tree)) if module.name == "__init__.py" else []
            for target in [*imported(tree), *later]:
                if target.startswith(f"{package}."):
                    other = target.removeprefix(f"{package}.").split(".")[0]
                    if other in parts and other != name:
                        found[name].add(other)
    return found


def below(edges: Edges, name: str) -> set[str]:
    """Everything that a part imports, at any number of steps."""
    seen: set[str] = set()
    waiting = list(edges[name])
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += edges[other]
    return seen


def shortened(edges: Edges) -> Edges:
    """Without arrows that a longer way says, too."""
    return {
        name: {other for other in others if all(other not in below(edges, third) for third in others - {other})}
        for name, others in edges.items()
    }


def rows_of(edges: Edges) -> dict[str, int]:
    """The row of each part, by the longest way to it. What nobody imports stands right above what it imports."""
    rows = dict.fromkeys(edges, 0)
    for _ in edges:
        for name, others in edges.items():
            for other in others:
                rows[other] = max(rows[other], rows[name] + 1)
    if any(rows[other] <= rows[name] for name, others in edges.items() for other in others):
        raise SystemExit("packages import each other in a circle")
    imports_of = {other for others in edges.values() for other in others}
    for name in set(edges) - imports_of:
        if edges[name]:
            rows[name] = min(rows[other] for other in edges[name]) - 1
    return rows


def sentence(path: Path) -> list[str]:
    """The first sentence of a module's docstring, in lines of a box."""
    text = " ".join((ast.get_docstring(parsed(path)) or "").split("\n\n")[0].split())
    lines = textwrap.wrap(text.split(". ")[0].rstrip("."), CHARACTERS)
    if not 0 < len(lines) <= LINES:
        raise SystemExit(f"{path}: the first sentence of its docstring does not fit a box of {LINES} lines: {text!r}")
    return lines


def panel(package: str, left: float) -> tuple[list[str], float, float]:
    """Everything of one package drawn from `left` on, with its right and lower end."""
    parts, edges = parts_of(package), shortened(edges_of(package))
    rows = rows_of(edges)
    depth = max(rows.values()) + 1
    grid: list[list[str]] = [[name for name in parts if rows[name] == row] for row in range(depth)]
    pieces: list[tuple[str, str]] = []  # of arrows, each from one row to the next
    for name in parts:
        for other in sorted(edges[name]):
            before = name
            for row in range(rows[name] + 1, rows[other]):
                lane = f"{name} > {other} > {row}"
                grid[row].append(lane)
                pieces.append((before, lane))
                before = lane
            pieces.append((before, other))
    place: dict[str, float] = {}
    for row in grid:  # each below the middle of what points at it
        middle = {name: [place[before] for before, after in pieces if after == name] for name in row}
        row.sort(key=lambda name: sum(middle[name]) / len(middle[name]) if middle[name] else 0.0)
        at = 0.0
        for name in row:
            wide = BOX if name in parts else LANE
            place[name] = at + wide / 2
            at += wide + GAP
        for name in row:
            place[name] -= (at - GAP) / 2
    reach = max(abs(place[name]) + (BOX if name in parts else LANE) / 2 for row in grid for name in row)
    x = {name: left + reach + where for name, where in place.items()}
    y = {name: TITLE + MARGIN + number * ROW for number, row in enumerate(grid) for name in row}
    drawn = [
        f'<text class="title" x="{left + reach:.0f}" y="{TITLE}" text-anchor="middle">{package.replace(".", "/")}/</text>'
    ]
    for before, after in pieces:
        top, end = y[before] + HEIGHT, y[after] - (0 if after not in parts else 5)
        bend = (end - top) / 2
        way = f"M{x[before]:.1f},{top} C{x[before]:.1f},{top + bend:.1f} {x[after]:.1f},{end - bend:.1f} {x[after]:.1f},{end}"
        if after not in parts:
            way += f" V{y[after] + HEIGHT}"
        head = ' marker-end="url(#arrow)"' if after in parts else ""
        drawn.append(f'<path d="{way}"{head}/>')
    for name, path in parts.items():
        drawn.append(f'<rect x="{x[name] - BOX / 2:.1f}" y="{y[name]}" width="{BOX}" height="{HEIGHT}" rx="6"/>')
        drawn.append(f'<text class="name" x="{x[name]:.1f}" y="{y[name] + 16}" text-anchor="middle">{name}</text>')
        for number, line in enumerate(sentence(path)):
            drawn.append(
                f'<text x="{x[name]:.1f}" y="{y[name] + 29 + 11 * number}" text-anchor="middle">{escape(line)}</text>'
            )
    return drawn, left + 2 * reach, max(y.values()) + HEIGHT


def svg() -> str:
    """The whole picture."""
    whole, right, low = panel("msplit", MARGIN)
    engine, end, lower = panel("msplit.engines.cuda", right + 2.5 * MARGIN)
    wide, high = end + MARGIN, max(low, lower) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" role="img">',
            "<title>Packages of msplit in layers, and inside of the cuda engine: arrows are imports</title>",
            f"<style>{STYLE}\n</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            *whole,
            *engine,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(svg(), "utf-8")
