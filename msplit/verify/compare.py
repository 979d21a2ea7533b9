"""Holds outputs against what they should be, as closely as the types that they were computed in allow."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import escape
from msplit.core.arguments import Precision
from msplit.engines.base import Arrays
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ops_with

_TIGHT = {"float64": 1e-9, "float32": 2e-4, "float16": 5e-3, "bfloat16": 4e-2, "complex64": 2e-4, "complex128": 1e-9}
"""Tolerances where products are made in the type itself.

Rounding adds up with depth: TensorFlow on a GPU differs from TensorFlow on the CPU by 7e-5 in a network of 95 layers (Inception-v3).
"""

_FLOAT32 = {Precision.IEEE: 0.0, Precision.TF32: 2e-1, Precision.FP16: 1e-1, Precision.BF16: 5e-1}
"""Tolerances of float32 by what it is computed in, where that is more than its own.

What a coarse type does to the outputs of a deep network is no fault of who runs it: TensorFlow's own TF32 results differ from its IEEE
ones by 0.024 in GoogLeNet and by 0.14, XLA's from plain TensorFlow's, in Inception-v3 (random weights, which carry rounding further
than trained ones). So everything is held to the tight tolerance in IEEE precision first; these only catch what goes wrong in one
precision alone.

In half precision it is the distance that is held to them, see `OutputComparison`: what rounds as much as bfloat16 puts single elements
anywhere. In TF32 the distance is held to what rounding alone does, too.
They are for what nobody has emulated (see `ROOM`). It was 0.037 in float16 and 0.16 in bfloat16 for Inception-v3, 0.010 and
0.074 for GoogLeNet, 0.0015 and 0.012 for four layers of BERT. Nothing but zeros are at a distance of 1.
"""

ROOM = 3.0
"""Most distance of an output, as a multiple of that by rounding alone: right kernels, which sum in another order and leave some roundings
out, were 0.93 to 1.28 times as far in six samples in half precision, in all kernel modes, and TensorFlow's 0.76 to 1.1 times in TF32
(`benchmarks/notes/probes/rounding.txt`); what cuts bits off where TF32 rounds was 1.2 to 14 times."""

_SAME_KERNELS = 16.0
"""Units in the last place that may come between two runs of the same kernels, in which a library may sum in another order."""

_MANY = 64
"""Elements of an output from which on its distance is held to what rounding to TF32 does. Of a few, it may leave nothing by chance."""

_UNIT = {Precision.TF32: 2.0**-11, Precision.FP16: 2.0**-11, Precision.BF16: 2.0**-8}
"""Distances up to one unit in the last place are allowed in any case: of a loss, which is a single number, rounding may leave nothing by
chance."""


@dataclass(frozen=True)
class OutputComparison:
    """Comparison of one output.

    A number passes where ``|got - expected| <= tolerance * (|expected| + scale)``; the scale is the root mean square of
    the expected output's finite values, without sentinels such as the -1e9 of masked logits for what is none, so that a value near zero is
    held to the precision of the values it is made of. In half precision (`as_a_whole`) it is the distance of all elements together that
    has to be within the tolerance.

    Attributes:
        passed: Whether every element does, or all together do.
        dtype, shape: Of what is expected.
        tolerance: What was allowed; 0 for types that must be equal.
        needed: The tolerance that would have passed; infinite where none would.
        mismatches: Elements that do not pass.
        elements: Elements in all.
        worst: Index of the worst element, None where there is none to name.
        got, expected: The worst element, and what it should be.
        note: What is wrong where it is not an element, such as a shape.
        exact: Whether the type leaves no room for a tolerance.
        distance: Root mean square of what finite elements differ by, over that of what is expected.
        as_a_whole: Whether that is held to the tolerance.
    """

    name: str
    passed: bool
    dtype: str
    shape: tuple[int, ...]
    tolerance: float
    needed: float
    mismatches: int
    elements: int
    worst: tuple[int, ...] | None = None
    got: Any = None
    expected: Any = None
    note: str = ""
    exact: bool = False
    distance: float = 0.0
    as_a_whole: bool = False

    def describe(self) -> str:
        """One line that says how it fails, or that it does not."""
        if self.passed:
            return f"{self.name}: equal" if self.exact else f"{self.name}: equal within {self.tolerance:g}"
        if self.note:
            return f"{self.name}: {self.note}"
        place = f"[{', '.join(map(str, self.worst))}]" if self.worst else ""
        text = f"{self.name}: {self.mismatches} of {self.elements} elements differ; {self.name}{place} is {self.got}, not {self.expected}"
        if self.exact:
            return text
        if self.as_a_whole:
            away = f"{_up(self.distance):g} away (root mean square, relative)"
            text = f"{self.name}: {away}; worst, {self.name}{place} is {self.got}, not {self.expected}"
        would = f"{_up(self.needed):g} would pass" if np.isfinite(self.needed) else "no tolerance would pass"
        return f"{text}; tolerance {self.tolerance:g}, {would}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data; a tolerance that does not exist is None."""
        data = asdict(self)
        data["needed"] = self.needed if np.isfinite(self.needed) else None
        data["got"], data["expected"] = str(self.got), str(self.expected)
        return data


@dataclass(frozen=True)
class ModelComparison:
    """Comparison of all outputs."""

    outputs: tuple[OutputComparison, ...]

    @property
    def passed(self) -> bool:
        """True if every output does."""
        return all(output.passed for output in self.outputs)

    @property
    def needed(self) -> float:
        """The tolerance that would have passed for all outputs."""
        return max((output.needed for output in self.outputs), default=0.0)

    def describe(self) -> str:
        """Failures, a line per output; empty where nothing fails."""
        return "\n".join(escape.line(output.describe()) for output in self.outputs if not output.passed)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"passed": self.passed, "outputs": [output.to_dict() for output in self.outputs]}


SMALLEST_SCALE = 1e-12
"""Least scale of an output: an output of nothing but smaller values is held to this, not to its own precision."""


def tolerance_of(dtype: str, precision: Precision = Precision.IEEE) -> float:
    """The tolerance for a type such as ``"float32"`` where it is computed in a precision; 0 for what must be equal, such as integers."""
    if not _TIGHT.get(dtype):
        return 0.0
    return max(_TIGHT[dtype], _FLOAT32[precision]) if dtype in ("float32", "complex64") else _TIGHT[dtype]


def compare(
    got: Arrays,
    expected: Arrays,
    *,
    precision: Precision = Precision.IEEE,
    tolerance: float | None = None,
    computed: Mapping[str, str] | None = None,
    carried: Mapping[str, float] | None = None,
    rounding: Mapping[str, float] | None = None,
) -> ModelComparison:
    """Holds outputs against what they should be, by name.

    NaN equals NaN and an infinity equals the same infinity.

    Args:
        expected: What they should be; an output that is only in one of the two fails.
        precision: See `tolerance_of`.
        tolerance: In place of the type's own, for types that have one.
        computed: Output -> a coarser type that it was computed in (see `computed_in`): its tolerance is that type's, whatever the output
            was cast to at the end.
        carried: Output -> its tolerance where that is more; see `output_tolerances`.
        rounding: Output -> how far from float32 rounding alone puts it, which allows it `ROOM` times as much and no more. It
            says nothing of IEEE precision.
    """
    results = []
    computed, carried, rounding = computed or {}, carried or {}, rounding or {}
    for name in dict.fromkeys([*expected, *got]):
        if name not in got or name not in expected:
            said = "is missing" if name not in got else "is not expected"
            array = np.asarray(expected[name] if name in expected else got[name])
            results.append(_failed(name, array, f"the output {said}"))
        else:
            coarsest = tolerance_of(computed.get(name, ""), precision)
            given, least = tolerance, carried.get(name, 0.0)
            known = name in rounding and precision in _UNIT
            explained = max(_UNIT[precision], ROOM * rounding[name]) if known else None
            if given is None and precision.half and explained is not None:
                most = tolerance_of(np.asarray(expected[name]).dtype.name, precision)
                given = max(min(most, explained), coarsest)
            given = None if given is None else max(given, least)
            pair = np.asarray(got[name]), np.asarray(expected[name])
            one = _compare_one(name, *pair, precision, given, max(coarsest, least))
            if precision is Precision.TF32 and tolerance is None and explained is not None:
                one = _within(one, max(explained, coarsest, least))
            results.append(_as_a_whole(one) if precision.half else one)
    return ModelComparison(tuple(results))


def held_to(found: ModelComparison, needed: Mapping[str, float], precision: Precision) -> ModelComparison:
    """Refuses outputs that are further from what is expected than the same kernels were before: `ROOM` times as far, or some units.

    The tolerances of a coarse precision are for kernels that nobody knows. They would let pass what other weights give.

    Args:
        needed: Output -> tolerance that it needed before; others are left as they are.
    """
    if precision not in _UNIT:
        return found
    most = {name: max(ROOM * one, _SAME_KERNELS * _UNIT[precision]) for name, one in needed.items()}
    return ModelComparison(
        tuple(
            replace(one, passed=False, tolerance=most[one.name])
            if one.passed and not one.exact and one.needed > most.get(one.name, math.inf)
            else one
            for one in found.outputs
        )
    )


def compare_state(
    got: Arrays, expected: Arrays, tolerances: Mapping[str, float], before: Arrays | None = None
) -> ModelComparison:
    """Holds variables against what they should be after the same steps, by name; what is only in one of the two is passed over.

    A variable passes where its distance from what is expected, ``sqrt(mean((got - expected) ** 2))``, is at most its tolerance times
    the expected values' root mean square. Single elements may be further away: Adam moves one whose gradient is zero but for rounding
    by a whole learning rate. NaN and infinities must be where they are expected, and what is no
    floating-point number must be equal.

    Args:
        tolerances: By variable; see `state_tolerances`.
        before: What they were before the steps: then what the steps add to each is held against what they should, too. Of a table of
            which few rows change, or in small steps, the values themselves tell nothing.
    """
    if before is not None:
        got, expected = WithChanges(got, before), WithChanges(expected, before)
    pairs = ((name, np.asarray(got[name]), np.asarray(expected[name])) for name in expected if name in got)
    return ModelComparison(tuple(_compare_variable(*pair, tolerances.get(pair[0], 0.0)) for pair in pairs))


class WithChanges(Mapping[str, NDArray[Any]]):
    """Variables, and what steps have added to those of floating-point numbers: each when it is asked for, since tables are large."""

    def __init__(self, after: Arrays, before: Arrays) -> None:
        self._before, self._found = before, {name: np.asarray(value) for name, value in after.items()}
        self._changes = {
            f"change of {name}": name
            for name, value in self._found.items()
            if name in before and tolerance_of(_name_of(value.dtype)) and np.shape(before[name]) == value.shape
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._changes:
            return self._found[name]
        after, before = self._found[self._changes[name]], np.asarray(self._before[self._changes[name]])
        # Where steps change few rows, most pages of memory that the system gives as zeros are never written to.
        dtype, flags = np.result_type(after, before), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        found = np.frombuffer(mmap.mmap(-1, max(after.size * dtype.itemsize, 1), flags=flags), dtype, after.size)
        for at in range(0, after.size, _BLOCK):
            change = after.reshape(-1)[at : at + _BLOCK] - before.reshape(-1)[at : at + _BLOCK]
            if change.any():
                found[at : at + _BLOCK] = change
        return found.reshape(after.shape)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._found, *self._changes])

    def __len__(self) -> int:
        return len(self._found) + len(self._changes)


def _compare_variable(name: str, got: NDArray[Any], expected: NDArray[Any], tolerance: float) -> OutputComparison:
    kind = _kind(expected)
    # A model has hundreds of variables, and a table millions of elements: to look at each as closely as at outputs takes seconds.
    if got.dtype == expected.dtype and got.shape == expected.shape and tolerance_of(kind):
        off, whole = _norms(got, expected)
        away = off / max(whole, SMALLEST_SCALE * expected.size**0.5, 1e-300)
        if math.isfinite(whole) and away <= tolerance:  # which no NaN is
            shape, size = expected.shape, expected.size
            return OutputComparison(name, True, kind, shape, tolerance, away, 0, size, distance=away, as_a_whole=True)
    return _as_a_whole(_compare_one(name, got, expected, Precision.IEEE, tolerance, 0.0))


def _as_a_whole(one: OutputComparison) -> OutputComparison:
    """Verdict by the distance of all elements, where NaN and infinities are as expected."""
    if one.exact or one.note or not np.isfinite(one.needed):
        return one
    return replace(one, needed=one.distance, passed=one.distance <= one.tolerance, as_a_whole=True)


def _within(one: OutputComparison, most: float) -> OutputComparison:
    """This comparison, refused where all elements together are further away than that."""
    if one.exact or one.elements < _MANY or not one.passed or one.distance <= most:
        return one
    return replace(one, passed=False, needed=one.distance, tolerance=most, as_a_whole=True)


_ONE_EXAMPLE = 5e-2
"""Most distance of a variable after a step in which a ReLU let another example through: 0.011 was seen, of slots of a layer 128 wide."""


def best_of(comparisons: Sequence[ModelComparison]) -> ModelComparison:
    """Join comparisons of the same step from the same variables on several inputs: see `compare_state`.

    What computes wrongly does so on every input. Where one input of a ReLU rounds to the other side of zero, another does not: so it is
    enough that a variable passes once, where it is never further away than one example of the batch can move it.
    """
    found = []
    for outputs in zip(*(comparison.outputs for comparison in comparisons), strict=True):
        passed = [one for one in outputs if one.passed]
        far = max(outputs, key=lambda one: one.needed)
        close = not far.exact and not far.note and far.needed <= max(far.tolerance, _ONE_EXAMPLE)
        found.append(passed[0] if passed and (far.passed or close) else far)
    return ModelComparison(tuple(found))


def distance(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Root mean square of what two arrays differ by, over that of what is expected; of elements that are finite in both."""
    off, whole = _norms(got, expected)
    if not math.isfinite(off + whole):
        finite = np.isfinite(got) & np.isfinite(expected)
        got, expected = got[finite], expected[finite]
        off, whole = _norms(got, expected)
    return off / max(whole, float(SMALLEST_SCALE * expected.size**0.5), 1e-300)


_BLOCK = 1 << 13
"""Elements that are taken at a time: what is made of them stays in the caches, and no BLAS starts threads for so few."""


def norm(values: NDArray[Any]) -> float:
    """Root of the sum of squares, in float64; not finite where an element is not."""
    return _norms(values, values)[1]


def _norms(got: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float]:
    """Norms of what two arrays differ by, and of what is expected; not finite where an element is not."""
    wide: Any = np.complex128 if expected.dtype.kind == "c" else np.float64
    alike, got, expected = got is expected, got.reshape(-1), expected.reshape(-1)
    off = whole = 0.0
    with np.errstate(all="ignore"):
        for at in range(0, expected.size, _BLOCK):
            right = expected[at : at + _BLOCK].astype(wide)
            whole += np.vdot(right, right).real
            if not alike:
                away = got[at : at + _BLOCK] - right
                off += np.vdot(away, away).real
    return math.sqrt(off), math.sqrt(whole)


def _compare_one(
    name: str, got: NDArray[Any], expected: NDArray[Any], precision: Precision, tolerance: float | None, coarsest: float
) -> OutputComparison:
    if _kind(got) != _kind(expected):
        return _failed(name, expected, f"its type is {_kind(got)}, not {_kind(expected)}")
    if got.shape != expected.shape:
        return _failed(name, expected, f"its shape is {got.shape}, not {expected.shape}")
    allowed = tolerance_of(_kind(expected), precision)
    if not allowed:
        return _exact(name, _plain(got), _plain(expected))
    return _close(name, got, expected, max(allowed, coarsest) if tolerance is None else tolerance)


def _exact(name: str, got: NDArray[Any], expected: NDArray[Any]) -> OutputComparison:
    if np.array_equal(got, expected):
        return _equal(name, got, expected, 0.0, exact=True, worst=None)
    error = np.where(np.asarray(got != expected), np.inf, 0.0)
    worst = int(np.argmax(error)) if error.any() else None
    return replace(_compared(name, got, expected, error, 0.0, worst), exact=True)


def _close(name: str, got: NDArray[Any], expected: NDArray[Any], tolerance: float) -> OutputComparison:
    if np.array_equal(got, expected):  # as most are, and nothing of that is left to calculate
        return _equal(name, got, expected, tolerance, worst=(0,) * expected.ndim if expected.size else None)
    wide: Any = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), expected.astype(wide)
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        magnitude = np.abs(b)
        known = magnitude[np.isfinite(b)]
        scale: Any = max(_rms(known), SMALLEST_SCALE)
        if (lower := _without_sentinels(known)) is not None:  # which would hide all others
            scale = np.where(magnitude > lower.max(), scale, max(_rms(lower), SMALLEST_SCALE))
        error = np.abs(a - b) / (magnitude + scale)
    error = np.where(same, 0.0, np.where(finite, error, np.inf))
    found = _compared(name, got, expected, error, tolerance, int(np.argmax(error)) if error.size else None)
    return replace(found, distance=distance(got, expected))


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


_SENTINEL, _GAP, _FEWEST = 1e3, 1e2, 8
"""Sentinels, such as the -1e9 of masked logits, are at least so large, and so many times as large as the largest of so many others."""


def _without_sentinels(magnitudes: NDArray[Any]) -> NDArray[Any] | None:
    """The magnitudes below those of sentinels; None where there are no sentinels."""
    if magnitudes.size <= _FEWEST or magnitudes.max() < _SENTINEL:
        return None
    found = np.sort(magnitudes[magnitudes > 0])
    gaps: NDArray[np.intp] = np.flatnonzero((found[1:] >= _SENTINEL) & (found[1:] > _GAP * found[:-1])) + 1
    gaps = gaps[gaps >= _FEWEST]
    return found[: gaps[0]] if len(gaps) else None


def _compared(
    name: str, got: NDArray[Any], expected: NDArray[Any], error: NDArray[Any], tolerance: float, worst: int | None
) -> OutputComparison:
    """The comparison by the error of each element; `worst` is the element to name."""
    count = int(np.count_nonzero(error > tolerance))
    place = None if worst is None else tuple(map(int, np.unravel_index(worst, error.shape)))
    return OutputComparison(
        name=name,
        passed=not count,
        dtype=_kind(expected),
        shape=expected.shape,
        tolerance=tolerance,
        needed=float(error.max()) if error.size else 0.0,
        mismatches=count,
        elements=expected.size,
        worst=place,
        got=_element(got, place),
        expected=_element(expected, place),
    )


def _equal(
    name: str,
    got: NDArray[Any],
    expected: NDArray[Any],
    tolerance: float,
    *,
    worst: tuple[int, ...] | None,
    exact: bool = False,
) -> OutputComparison:
    """The comparison of arrays whose elements are all equal."""
    elements = _element(got, worst), _element(expected, worst)
    kind, shape, size = _kind(expected), expected.shape, expected.size
    return OutputComparison(name, True, kind, shape, tolerance, 0.0, 0, size, worst, *elements, exact=exact)


def _failed(name: str, expected: NDArray[Any], note: str) -> OutputComparison:
    blank = _compared(name, expected, expected, np.zeros(0), 0.0, None)
    return replace(blank, passed=False, needed=np.inf, mismatches=expected.size, note=note)


def _element(array: NDArray[Any], index: tuple[int, ...] | None) -> Any:
    value: Any = None if index is None else array[index]
    return value.item() if hasattr(value, "item") else value


def _kind(array: NDArray[Any]) -> str:
    return _name_of(array.dtype)


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Name of a type; NumPy puts it together each time."""
    return "string" if dtype.kind in "OSU" else str(dtype.name)


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Strings of every kind as bytes, so that they can be compared."""
    if array.dtype.kind not in "OSU":
        return array
    flat = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
    result = np.empty(len(flat), dtype=object)
    result[:] = flat
    return result.reshape(array.shape)


def _up(value: float) -> float:
    """Rounded up to two digits: a tolerance that is told must pass."""
    if value <= 0:
        return 0.0
    digit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(np.ceil(value / digit * (1 - 1e-12)) * digit)


_NARROW = ("float16", "bfloat16")
"""From the finer to the coarser."""

_TYPES = ("T", "DstT", "Tout")
"""Attributes that give the types that an op computes in. A loop has a list of them."""

_STORED = ops_with("stored")


def computed_in(flat: FlatGraph) -> Mapping[str, str]:
    """Per output the coarsest narrow type that something it depends on was computed in; outputs without one are left out."""
    graph = flat.graph
    nodes, kind_of = graph.per_kind()
    found: dict[str, str] = {}
    for dtype in _NARROW:
        of_kind = np.fromiter(
            (_computes(graph.ops[node], graph.attrs[node], dtype) for node in nodes), bool, len(nodes)
        )
        rounding: NDArray[np.intp] = np.flatnonzero(of_kind[kind_of])
        if len(rounding):
            reached = graph.descendants(rounding.tolist())
            found |= {output.name: dtype for output in flat.outputs if reached[output.node]}
    return found


def _computes(op: str, attrs: Mapping[str, Any], dtype: str) -> bool:
    if op in _STORED:
        return False
    values = [attrs.get(name) for name in _TYPES]
    return any(value == dtype or (isinstance(value, tuple) and dtype in value) for value in values)
