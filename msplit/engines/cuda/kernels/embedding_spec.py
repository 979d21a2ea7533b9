"""Work of one kernel for all columns, as plain data.

The kernel fills outputs, each a tensor in row-major order. A *segment* is a rectangle of one output: a column's part of every row. What
stands in it is a sum of *terms* (or their mean), and a term is, for each row, the rows of one table at the row's ids, or
the row of a tensor as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

COMBINERS = ("sum", "mean", "sqrtn")
LOWEST, HIGHEST = -(2**62), 2**62


@dataclass(frozen=True)
class Term:
    """Addend of one source to the rows of a segment.

    The id of a value v is ``min(max(bucket(v) mod modulo, low), high) + offset``; without boundaries ``bucket(v)`` is v.

    Attributes:
        source: Input with the values that become ids, or with the rows that are copied.
        table: Input with the rows that are looked up; -1 copies the source's.
        first: Element of the source that belongs to row 0.
        step: Elements of the source from row to row.
        count: Ids of a row; 1 where rows are copied.
        boundaries: Ascending numbers; the bucket of a value is how many of them are not above it. None: the value is the id.
        narrow: Whether 64-bit values lose their upper half first.
        modulo: See above; 0 leaves the number as it is. The result has the divisor's sign.
        low: See above.
        high: See above.
        offset: See above.
        valid_from: Ids below it count for nothing (`LOWEST`: all count). Any other id that the table does not have stands for zeros.
        weighted: The source has no ids: it is of the table's type, and its value times row `low` of the table is what is added.
    """

    source: int
    table: int
    first: int = 0
    step: int = 1
    count: int = 1
    boundaries: tuple[float, ...] | None = None
    narrow: bool = False
    modulo: int = 0
    low: int = LOWEST
    high: int = HIGHEST
    offset: int = 0
    valid_from: int = LOWEST
    weighted: bool = False


@dataclass(frozen=True)
class Segment:
    """A column's part of an output.

    Attributes:
        output: Port.
        start: Element of the output where row 0 begins.
        step: Elements of the output from row to row.
        rows: How many rows.
        width: Elements of a row that are this column's.
        terms: What stands there.
        combiner: Of `COMBINERS`. The mean is over the ids that count, sqrtn the sum over the root of how many count; none gives 0.
        scale: What that is multiplied by, rounded before and after; None leaves it as it is.
    """

    output: int
    start: int
    step: int
    rows: int
    width: int
    terms: tuple[Term, ...]
    combiner: str = "sum"
    scale: float | None = None

    def moved(self, start: int, step: int) -> Segment:
        """Copy of the segment elsewhere in the output."""
        return replace(self, start=start, step=step)


@dataclass(frozen=True, eq=False)
class Columns:
    """All columns of one stage.

    Attributes:
        segments: They fill the outputs and do not overlap.
        outputs: Shape of each output.
        dtype: Type of tables and copied rows, and of outputs that have no other.
    """

    segments: tuple[Segment, ...]
    outputs: tuple[tuple[int, ...], ...]
    dtype: str
