"""Documents: tables and text as plain data, numbers as people read them, and results as JSON.

Output of a command as plain data: one document becomes a terminal table or Markdown. JSON comes from the results.

Numbers as people read them.

Results as JSON: dataclasses, NumPy scalars and arrays, paths; with the schema's version in front.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from msplit.escape import json_document

if TYPE_CHECKING:
    from msplit.core.statistics import Ratio
    from msplit.cost.profile import Reached


def count(value: int) -> str:
    """1234567 -> "1,234,567"."""
    return f"{value:,}"


def size(value: float) -> str:
    """Bytes: 1536 -> "1.54 KB" (powers of 1000, as disk and bandwidth figures are)."""
    return f"{value:.0f} B" if value < 999.5 else _scaled(value / 1000, ("KB", "MB", "GB", "TB", "PB"))


def micros(value: float) -> str:
    """Microseconds, to a tenth at most: 0.42 -> "0.4 µs", 12345 -> "12.3 ms"."""
    if value == 0:
        return "0 µs"
    if value < 0.05:
        return "<0.1 µs"
    if value < 999.5:
        return f"{value:.1f} µs" if value < 99.95 else f"{value:.0f} µs"
    if value < 999_500:
        return f"{value / 1e3:.3g} ms"
    return f"{value / 1e6:.3g} s"


def operations(value: float) -> str:
    """Floating-point operations: 2.5e9 -> "2.5 GFLOP"."""
    return _scaled(value, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """In the unit, of those a thousand times as large as the one before, that leaves three digits."""
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {units[-1]}"


def percent(part: float, whole: float) -> str:
    """Share of a whole: "12 %", "0.4 %"; "-" of nothing."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.1f} %"


def ratio(value: float) -> str:
    """A speed-up: "5.61x"."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x" if value < 99.95 else f"{value:.0f}x"


def plural(number: int, noun: str, many: str | None = None) -> str:
    """ "1 node", "2 nodes", "2 branches"."""
    return f"{count(number)} {noun if number == 1 else many or noun + 's'}"


def dimensions(shape: Sequence[int | None] | None) -> str:
    """Sizes of a tensor: "?×224×224×3", "scalar" of no axes, "?" of an unknown number of them."""
    return "?" if shape is None else "×".join("?" if size is None else str(size) for size in shape) or "scalar"


def more(left: int, option: str, noun: str = "") -> str:
    """The line below a table that was cut: "and 7 more (--all)", "and 1 more node (--all)"; "" where nothing is left out."""
    if left <= 0:
        return ""
    return f"and {plural(left, f'more {noun}') if noun else f'{count(left)} more'} ({option})"


def some(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of several: "a, b … and 3 more"; "none" of nothing."""
    left = len(names) - most
    return between.join(names[:most]) + (f" … and {left} more" if left > 0 else "") or "none"


_FORMATS = {"graphdef": "GraphDef", "metagraph": "MetaGraphDef", "savedmodel": "SavedModel"}


def heading(path: str | Path, form: str) -> str:
    """First line of a report on a model: "model.pb (GraphDef)"."""
    kind, _, text = form.partition("-")
    return f"{path} ({_FORMATS.get(kind, kind)}{', text' if text else ''})"


def gain(ratio: Ratio | None) -> str:
    """A measured ratio with its confidence interval; "-" for none."""
    if ratio is None:
        return "-"
    if ratio.undecided:
        return f"{ratio.value:.2f} ({ratio.undecided})"
    verdict = "" if ratio.significant else ", no difference"
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f}{verdict})"


SCHEMA_VERSION = 1

ENDPOINT = "name tensor dtype shape"
"""Keys of an input or output of a model."""


def plain(value: Any) -> Any:
    """A value made of dicts, lists, strings, numbers, booleans and None. Infinity and NaN, which JSON lacks, become None."""
    if hasattr(value, "to_dict"):  # a result that JSON has other keys of than its fields
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if value is None or isinstance(value, str | int) else str(value)


def picked(value: object, *keys: str) -> dict[str, Any]:
    """Attributes of a result by the keys that they have in JSON; `plain` makes the rest of it.

    Args:
        value: The result.
        keys: Words, in the order of the JSON: the key of an attribute of that name; ``key=name`` for one of another name, in which a dot
            leads to an attribute of the attribute. A "?" behind either writes null for what is empty.
    """
    found = {}
    for word in " ".join(keys).split():
        key, _, name = word.removesuffix("?").partition("=")
        item = attrgetter(name or key)(value)
        found[key] = item or None if word.endswith("?") else item
    return found


def dumps(command: str, payload: Mapping[str, Any]) -> str:
    """The JSON text of one command's result."""
    document = {"schema_version": SCHEMA_VERSION, "command": command, **plain(payload)}
    return json_document(json.dumps(document, indent=2, ensure_ascii=False))


def roofline(found: Sequence[Reached], most: int | None, option: str) -> Table:
    """A table of the rates that measured kernels reach, of the first so many (None: all)."""

    def row(one: Reached) -> tuple[str, ...]:
        rates = (operations(one.flops_per_s) + "/s", size(one.bytes_per_s) + "/s", f"{one.intensity:.3g}")
        return one.op, count(one.steps), micros(one.time_us), *rates, one.bound, percent(one.share, 1.0)

    columns = ("kernel", ">steps", ">alone", ">reached", ">bytes", ">FLOP per byte", "bound by", ">of the roof")
    return first("Roofline: rates that kernels reach, by time", columns, found, row, most, option, "kernel")


Entry = TypeVar("Entry")


class Name(str):
    """A cell that is the name of a node, a table or a region, whole: where it does not fit, what all names share is left out."""


Cell = str | tuple[str, ...]
"""Text of a table: one line, whatever is in it, or several."""


@dataclass(frozen=True)
class Table:
    """Rows under a title.

    Attributes:
        title: Heading that says what the rows are.
        columns: Headings; one that starts with ">" is aligned right.
        rows: Cells. What a model says is escaped where the document is printed, not here.
        note: A sentence below the table, "" for none.
        whole: Every row is one line however long, so that lists of nodes can be searched with grep; otherwise cells wrap.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    whole: bool = False


def first(
    title: str,
    columns: Sequence[str],
    entries: Sequence[Entry],
    row: Callable[[Entry], Sequence[Cell]],
    most: int | None,
    option: str,
    noun: str = "",
) -> Table:
    """A table of the first entries, at most so many (None: all), with a note where there are others; see `more`."""
    shown = entries[:most]
    return Table(title, columns, [row(entry) for entry in shown], more(len(entries) - len(shown), option, noun))


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        title: First line.
        facts: (name, value) pairs shown as a list.
        tables: In order.
        notes: Sentences at the end, the conclusions.
        warnings: Sentences that the user should not miss.
        following: The commands to run next, each in parts that belong on one line.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    following: Sequence[Sequence[str]] = ()
