"""Output of a command as plain data: one document becomes a terminal table or Markdown. JSON comes from the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msplit.report.text import more

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
    """A table of the first entries, at most so many (None: all), with a note where there are others; see `text.more`."""
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
