"""Requests that are ready to be sent, and what their answers should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.rows.lengths import lengths_of, sized_shapes
from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, Job, TensorFlowOptions
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.variables import rounded_tables, table_value
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as files
from msplit.inputs.make import feeds_for
from msplit.inputs.reference import load_reference
from msplit.progress import phase
from msplit.run.request import RunRequest
from msplit.serving.loadtest.generator import SENT, OutputLayout, RequestState, RequestTable, digest
from msplit.serving.pool.ports import Port
from msplit.verify.compare import compare, tolerance_of

_CHUNK = 1 << 26
"""Bytes of answers that are looked at at once."""

_ROUNDING = 2e-3
"""Least tolerance of products in TF32 that plain steps are taken to need: kernels of larger batches round otherwise."""

_ROOM = 10.0
"""Tolerance for answers under load, in multiples of the deviation of plain steps."""

_SAMPLE = 4096
"""Most numbers of an answer by which answers are told apart."""


def lengths_for(pool: Any, longest: int, count: int) -> list[int]:
    """Lengths of the rows of so many requests: evenly from the longest down to 1, where no output of a pool tells them by its shape; else
    all are the longest, as answers have one shape."""
    if pool is None or any(None in port.shape[1:] for port in pool.outputs.values()):
        return [longest] * count
    return [int(one) for one in np.linspace(longest, 1, count)]


def from_model(flat: FlatGraph, request: RunRequest, count: int, lengths: Sequence[int] = ()) -> list[Arrays]:
    """Inputs made up for a model, each set from another seed, with rows of these lengths, if any; those that files give are varied, see
    `from_rows`."""
    works = [request.workload] * count
    if lengths:
        own = request.workload.shapes
        sized = partial(sized_shapes, flat, lengths_of(flat, own), own, request.workload.batch or 1)
        works = [replace(request.workload, shapes=sized(length)) for length in lengths]
    with phase("making inputs"):
        made: list[Arrays] = [feeds_for(flat, work, seed=request.seed + number) for number, work in enumerate(works)]
    if not request.workload.inputs:
        return made
    given = {name: value for name, value in made[0].items() if all(_same(one[name], value) for one in made)}
    shapes = {name: value.shape for name, value in given.items()}
    rows = [name for name, shape in shapes.items() if shape[:1] == (request.workload.batch or 1,)]
    drawn = from_rows(given, shapes, rows, count, request.seed)
    return [{**own, **new} for own, new in zip(made, drawn, strict=True)]


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)


def of_build(folder: Path) -> Arrays:
    """Inputs that a build was verified with."""
    return load_reference(folder / files.read(folder).rungs[-1].reference).feeds


def of_ports(
    base: Arrays, ports: Mapping[str, Port], rows: int, count: int, seed: int, lengths: Sequence[int] = ()
) -> list[Arrays]:
    """Inputs of a pool, of so many rows, of these lengths, if any, out of some that are known to be legal; see `from_rows`."""
    shapes = {name: tuple(rows if size is None else size for size in port.shape) for name, port in ports.items()}
    made = from_rows(base, shapes, [name for name, port in ports.items() if port.shape[:1] == (None,)], count, seed)
    several = [name for name, port in ports.items() if lengths and None in port.shape[1:]]
    return [
        {**one, **{name: one[name][:, :length] for name in several}}
        for one, length in zip(made, lengths or [0] * count, strict=True)
    ]


def of_one_user(feeds: Arrays, ports: Mapping[str, Port]) -> Arrays:
    """Inputs whose shared ones have the first row everywhere, as clients send them that repeat the user."""
    rows = {name: port.once for name, port in ports.items() if port.once}
    return {
        name: np.resize(value[: rows[name]], value.shape) if name in rows else value for name, value in feeds.items()
    }


def from_rows(
    base: Arrays, shapes: Mapping[str, tuple[int, ...]], rows: Sequence[str], count: int, seed: int
) -> list[Arrays]:
    """Inputs out of some that are known to be legal. Rows are drawn, the same of all inputs that have `rows`, since what stands in a row
    belongs together; numbers with a fraction are made smaller besides, so that no two requests are the same."""
    rng = np.random.default_rng(seed)
    there = min((len(base[name]) for name in rows), default=0)
    made: list[Arrays] = []
    for _ in range(count):
        feeds = {}
        chosen = rng.integers(0, there, shapes[rows[0]][0]) if there else None
        for name in shapes:
            value = np.asarray(base[name])
            if chosen is not None and name in rows:
                value = value[chosen]
            if value.dtype.kind == "f":
                value = (value * rng.uniform(0.5, 1.0, value.shape)).astype(value.dtype)
            feeds[name] = value.copy()
        made.append(feeds)
    return made


@dataclass(frozen=True, eq=False)
class Prepared:
    """Requests and their right answers.

    Attributes:
        feeds: Inputs by name, of each request.
        answers: Outputs by name, of each.
        source: Description of the source of the answers.
        precision: In which requests are answered; see `compare.tolerance_of`.
        computed: Output -> a coarser type that it was computed in.
    """

    feeds: Sequence[Arrays]
    answers: Sequence[Arrays]
    source: str
    precision: Precision
    computed: Mapping[str, str]

    @property
    def kept(self) -> dict[str, OutputLayout]:
        """Type and shape of each output in the table.

        Raises:
            MsplitError: Answers have different shapes.
        """
        shapes = [{name: value.shape for name, value in one.items()} for one in self.answers]
        for one in shapes[1:]:
            if one != shapes[0]:
                name = next(name for name in shapes[0] if one.get(name) != shapes[0][name])
                raise MsplitError(
                    f"output {name} has another shape for each request: {shapes[0][name]}, {one.get(name)}",
                    fix="name other outputs with --part outputs=",
                )
        return {
            name: OutputLayout("object" if value.dtype.kind in "OSU" else value.dtype.name, value.shape)
            for name, value in self.answers[0].items()
        }


def by_tensorflow(flat: FlatGraph, feeds: Sequence[Arrays], request: RunRequest) -> list[Arrays]:
    """Answers of TensorFlow on the CPU, in IEEE float32, one request after the other."""
    tables = rounded_tables(flat, request.options.table_memory)
    with phase("running the reference in TensorFlow"):
        job = Job(
            flat=flat,
            ids=np.zeros(len(flat), np.int32),
            streams=1,
            feeds=feeds[0],
            precision=Precision.IEEE,
            tensorflow=TensorFlowOptions(cpu=True),
            op_libraries=request.op_libraries,
            state=tables.of({name: table_value(flat, {}, name) for name in tables.names}),
        )
        with closing(TENSORFLOW.build(job)) as executable:
            return by_steps(executable.step, feeds)


def by_steps(step: Callable[[Arrays], Arrays], feeds: Sequence[Arrays]) -> list[Arrays]:
    """Answers of a pool, one request after the other."""
    return [{name: np.array(value) for name, value in step(one).items()} for one in feeds]


@dataclass(frozen=True)
class Verdict:
    """Verdict on the answers of a run.

    Attributes:
        checked: Answers that were looked at.
        wrong: Wrong answers among them.
        says: The first one in words; "" where none is wrong.
    """

    checked: int
    wrong: int
    says: str


class Checker:
    """Holds every answer of a run against what it should be, many at once.

    The tolerance is that of `msplit.verify.compare`, or less: what TF32 may be off by there is more than the answers of two requests
    differ by, so an answer under load may be off by ten times what plain steps of the same target are.

    Args:
        prepared: Requests, and what their answers should be.
        plain: Answers of plain steps of the target.

    Attributes:
        wrong: Description of the first wrong one of those; "" where none is.
        tolerances: By output; 0 for what must be equal.
    """

    def __init__(self, prepared: Prepared, plain: Sequence[Arrays]) -> None:
        self._prepared = prepared
        found = [
            compare(got, expected, precision=prepared.precision, computed=prepared.computed)
            for expected, got in zip(prepared.answers, plain, strict=True)
        ]
        self.wrong = next((one.describe().splitlines()[0] for one in found if not one.passed), "")
        needed = defaultdict[str, float](float)
        for one in chain.from_iterable(comparison.outputs for comparison in found):
            needed[one.name] = max(needed[one.name], one.needed)
        self.tolerances: dict[str, float] = {}
        self._exact: dict[str, NDArray[Any]] = {}
        self._close: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        for name, kept in prepared.kept.items():
            values = [answer[name] for answer in prepared.answers]
            most = tolerance_of(kept.dtype, prepared.precision)
            self.tolerances[name] = most
            if kept.dtype == "object":
                self._exact[name] = np.array([digest(value) for value in values], np.uint64)
            elif not most:
                self._exact[name] = np.stack(values)
            else:
                coarse = tolerance_of(prepared.computed.get(name, ""))
                least = max(min(tolerance_of(kept.dtype), most), 0.0 if prepared.precision.ieee else _ROUNDING, coarse)
                if prepared.precision.half:
                    most *= 2  # single elements are further away than all together
                tolerance = min(max(most, coarse), _ROOM * max(least, needed[name]))
                self.tolerances[name] = tolerance
                expected = np.stack([_parts(value) for value in values])
                scales = np.array([_scale(value) for value in values])
                allowed = tolerance * (np.abs(expected) + scales.reshape(-1, *[1] * (expected.ndim - 1)))
                allowed = np.where(np.isfinite(expected), allowed, 0.0)  # what is infinite is so, or is wrong
                self._close[name] = (expected, allowed.astype(expected.dtype))

    def told_apart(self) -> int:
        """Number of prepared requests whose answer would pass for that of no other."""
        count = len(self._prepared.answers)
        alike = np.ones((count, count), bool)
        for expected in self._exact.values():
            flat = expected.reshape(count, -1)[:, :_SAMPLE]
            alike &= np.stack([(flat == one).all(1) for one in flat])
        for expected, allowed in self._close.values():
            flat, room = expected.reshape(count, -1)[:, :_SAMPLE], allowed.reshape(count, -1)[:, :_SAMPLE]
            alike &= np.stack([_near(flat, one, most).all(1) for one, most in zip(flat, room, strict=True)])
        np.fill_diagonal(alike, False)
        return int((~alike.any(1)).sum())

    def check(self, table: RequestTable) -> Verdict:
        """Looks at all answers of a run. Rows without an answer are none."""
        rows = np.flatnonzero(table.status[: table.counters[SENT]] == RequestState.DONE)
        size = max(1, sum(kept.bytes for kept in table.layout.outputs.values()))
        step = max(1, _CHUNK // size)
        parts = [rows[start : start + step] for start in range(0, len(rows), step)]
        found = [part[~self._right(table, part)] for part in parts]
        wrong = np.concatenate([*found, rows[:0]])
        return Verdict(len(rows), len(wrong), self._says(table, int(wrong[0])) if len(wrong) else "")

    def _right(self, table: RequestTable, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Marks the rows that have the right answer."""
        asked = table.request[rows]
        right = np.ones(len(rows), bool)
        for name, expected in self._exact.items():
            right &= (table.outputs[name][rows] == expected[asked]).reshape(len(rows), -1).all(1)
        for name, (expected, allowed) in self._close.items():
            near = _near(_parts(table.outputs[name][rows]), expected[asked], allowed[asked])
            right &= near.reshape(len(rows), -1).all(1)
        return right

    def _says(self, table: RequestTable, row: int) -> str:
        """Describes a wrong answer."""
        asked = int(table.request[row])
        for other in range(len(self._prepared.answers)):
            if other != asked and self._passes_for(table, row, other):
                return f"request {row}, of the prepared ones {asked}, has the answer of {other}"
        expected = self._prepared.answers[asked]
        for name, tolerance in self.tolerances.items():
            if table.layout.outputs[name].dtype != "object":
                one = {name: table.outputs[name][row]}
                if said := compare(one, {name: expected[name]}, tolerance=tolerance).describe():
                    return f"request {row}: {said}"
        return f"request {row}: other strings"

    def _passes_for(self, table: RequestTable, row: int, asked: int) -> bool:
        """True if an answer would be right for another request."""
        kept = int(table.request[row])
        try:
            table.request[row] = asked
            return bool(self._right(table, np.array([row]))[0])
        finally:
            table.request[row] = kept


def _near(got: NDArray[Any], should: NDArray[Any], allowed: NDArray[Any]) -> NDArray[np.bool_]:
    """Marks the numbers that are what they should be; NaN counts as equal to NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(got - should) <= allowed
        if not near.all():
            near |= (got == should) | (np.isnan(got) & np.isnan(should))
    found: NDArray[np.bool_] = near
    return found


def _parts(value: NDArray[Any]) -> NDArray[Any]:
    """In a type in which a distance can be told; real and imaginary parts side by side."""
    if value.dtype.kind == "c":
        return np.stack([value.real, value.imag], -1)
    return value if value.dtype in (np.float32, np.float64) else value.astype(np.float32)


def _scale(value: NDArray[Any]) -> float:
    """Root mean square of what is finite, as `compare.compare` has it."""
    wide = np.abs(value.astype(np.complex128 if value.dtype.kind == "c" else np.float64))
    known = wide[np.isfinite(wide)]
    return max(float(np.sqrt(np.mean(known**2))) if known.size else 0.0, 1e-12)
