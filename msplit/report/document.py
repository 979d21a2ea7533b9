"""What a command has to say, as plain data: one document becomes a terminal table or Markdown. JSON comes from the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows under a title.

    Attributes:
        title: What the rows are.
        columns: Headings; one that starts with ">" is aligned right.
        rows: Cells as text.
        note: A sentence below the table, "" for none.
        whole: Every row is one line however long, so that lists of nodes can be searched with grep; otherwise cells wrap.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        title: First line.
        facts: (name, value) pairs shown as a list.
        tables: In order.
        notes: Sentences at the end, the conclusions.
        warnings: Sentences that the user should not miss.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
