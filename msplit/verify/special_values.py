"""Holds ops that work element by element, or search and sum along axes, against TensorFlow's kernels on special values.

What a model is fed reaches few of its ops as it is: behind a product nothing is NaN, and behind a sum nothing lies on a boundary. So each
such op of the compiled graph runs by itself on small tensors that hold NaN, infinities, zeros of both signs, numbers that round, ends of
types, and what the constants beside them are. An op that has passed is not run again in this process with the same types, attributes and
small constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import finfo
from numpy.typing import NDArray

from msplit.engines.base import Job
from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.placed import place
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.lookups import constant
from msplit.opset import schema
from msplit.opset.traits import ops_with, traits
from msplit.verify.compare import ModelComparison, OutputComparison, compare

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Compiled, LoneStep

Array = NDArray[Any]

_SEARCHES = ops_with("reduces")
_SELECTS = ops_with("select")
_ELEMENTS = ops_with("unary") | ops_with("binary") | ops_with("limit") | ops_with("operands agree") | _SELECTS
_DIVIDES = ops_with("integer division")
_CHECKED = _SEARCHES | _ELEMENTS | _DIVIDES
_STEPS, _GELU, _ELU = ops_with("step", "passes values"), ops_with("gelu curve"), ops_with("exponential less one")
_ORDERED = ops_with("ordered") | ops_with("comparison")

_FLOATS = (
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 6.0, 1e-7, -1e-7, 1e-3, -1e-3),
    *(0.3, -0.7, 3.7, -3.7, 30.0, -30.0),
)
_WHOLE = (0, 1, -1, 2, -2, 3, -3, 7, -7, 100)
"""Beside these, the ends of the type."""

_ROWS = 600
"""Values of each input of an op with three or more, drawn at random."""

_SIZES = (40, 12, 6, 4)
"""Length of the axes of what an op reduces, by how many there are."""

_RELATIVE, _LEAST = {"float32": 2.0**-14, "float64": 2.0**-40, "float16": 2.0**-8}, 2.0**-110
"""Most distance of a result, relative to it, and the least size that this is taken of: near that TensorFlow has zeros."""

_PASSED: set[tuple[Any, ...]] = set()
"""Ops that are right, with all that decides what they do: their lowering, types, attributes, constants, and the device."""


@dataclass(frozen=True, eq=False)
class _Case:
    """A step, and what it is run on.

    Attributes:
        key: As `_PASSED` has it.
        node: Flat node that the step does the work of.
        slots: Slots of the node that get values; the others have `constants`.
        draws: Values for them, several times.
    """

    key: tuple[Any, ...]
    step: LoneStep
    node: int
    slots: Sequence[int]
    constants: Mapping[int, Array]
    draws: Sequence[Sequence[Array]]

    def fed(self, draw: Sequence[Array]) -> dict[int, Array]:
        """Values of all slots of the node."""
        return {**self.constants, **dict(zip(self.slots, draw, strict=True))}


def compare_special(compiled: Compiled, job: Job) -> ModelComparison:
    """Compares what ops of certain kinds make of special values with what TensorFlow's kernels on the CPU make of them.

    What TensorFlow refuses, or has no kernel for, is left out.
    """
    cases = {case.key: case for case in _cases(compiled, job) if case.key not in _PASSED}
    found: list[OutputComparison] = []
    for case, expected in _in_tensorflow(job, list(cases.values())) if cases else ():
        name = f"{job.flat.graph.names[case.node]} ({case.step.op})"
        try:
            outcomes = [
                _compared(name, case.step.run(given), right) for given, right in zip(case.draws, expected, strict=True)
            ]
        except EngineError:  # what is only a step in its own shapes
            continue
        failed = [one for one in outcomes if not one.passed]
        found += failed[:1]
        if not failed:
            _PASSED.add(case.key)
    return ModelComparison(tuple(found))


def _cases(compiled: Compiled, job: Job) -> Iterator[_Case]:
    flat = job.flat
    for step in compiled.lone_steps(job):
        if (node := _node_of(flat, step)) is None:
            continue
        attrs, inputs = flat.graph.attrs[node], flat.graph.inputs(node)
        known = [(slot, step.bound.get(slot, constant(flat, node, slot))) for slot in range(len(inputs))]
        fixed = {slot: one for slot, one in known if one is not None and (one.size == 1 or slot in step.bound)}
        slots = [slot for slot in range(len(inputs)) if slot not in fixed]
        wanted = [schema.output_dtype(flat.graph.ops[one], flat.graph.attrs[one], port) for one, port in inputs]
        as_they_are = all(one.dtype.name == wanted[slot] for slot, one in fixed.items())
        if not slots or [wanted[slot] for slot in slots] != [name for name, _ in step.inputs] or not as_they_are:
            continue
        bounds = [np.array(attrs[name]) for name in ("tolerance",) if name in attrs]
        if draws := list(_draws(step.op, step.inputs, [*fixed.values(), *bounds], str(attrs.get("DstT", "")))):
            key = (step.op, step.inputs, *step.more, _text(attrs), _text(fixed))
            yield _Case(key, step, node, slots, fixed, draws)


def _node_of(flat: FlatGraph, step: LoneStep) -> int | None:
    """The flat node that a step does the work of, or several that do the same; None where it does more, or another op, which a pass may
    have put there since it holds for what the model has it read."""
    alike = {(flat.graph.ops[one], tuple(flat.graph.inputs(one))) for one in step.nodes}
    if len(alike) != 1 or flat.graph.ops[step.nodes[0]] != step.op:
        return None
    checked = step.op in _CHECKED or not flat.graph.attrs[step.nodes[0]].keys().isdisjoint(("DstT", "tolerance"))
    return step.nodes[0] if checked else None


def _text(mapping: Mapping[Any, Any]) -> str:
    """Attributes or constants, to be compared."""
    return str(sorted((str(name), repr(value)) for name, value in mapping.items() if not str(name).startswith("_")))


def _draws(
    op: str, inputs: Sequence[tuple[str, int]], constants: Iterable[Array], casts_to: str
) -> Iterator[list[Array]]:
    """Values for the inputs of an op, of certain types and ranks."""
    numbers = [float(one.reshape(-1)[0]) for one in constants if one.size == 1 and one.dtype.kind in "fiu"]
    pools = [_pool(op, name, numbers, casts_to) for name, _ in inputs]
    ranks = [rank for _, rank in inputs]
    if traits(op).scalars:  # the ends of a range are no NaN
        pools[1:] = [pool[pool == pool] for pool in pools[1:]]
    rng = np.random.default_rng(0)
    if not all(pool.size for pool in pools) or (op in _SEARCHES and len(pools) > 1):
        return
    if op in _SEARCHES:
        (pool,), shape = pools, (_SIZES[min(ranks[0], len(_SIZES)) - 1],) * ranks[0]
        few = np.where(rng.random(shape) < 0.03, rng.choice(pool, shape), rng.choice(pool[np.isfinite(pool)], shape))
        yield from ([rng.choice(pool, shape)], [few], [np.full(shape, pool[0])])
        return
    every = (
        list(itertools.product(*pools))
        if len(pools) < 3
        else [[rng.choice(pool) for pool in pools] for _ in range(_ROWS)]
    )
    # Whole rows are chosen by a condition of rank 1; otherwise what has fewer axes would be repeated along others.
    most = 0 if op in _SELECTS and ranks[0] == 1 else max(ranks)
    yield [
        np.array(column, pool.dtype).reshape(-1, *(1,) * (max(rank, most, 1) - 1))
        for column, pool, rank in zip(zip(*every, strict=True), pools, ranks, strict=True)
    ]


def _pool(op: str, of: str, constants: Sequence[float], casts_to: str) -> Array:
    """Special values of a type; of types that have none here, none."""
    if of == "bool":
        return np.array([False, True])
    if of.startswith(("int", "uint")) and op not in _STEPS:  # TensorFlow's own Round of integers gives zeros
        return _whole(op, of, constants)
    return _numbers(op, of, constants, casts_to) if of in ("float32", "float64") else np.array([])


def _whole(op: str, of: str, constants: Sequence[float]) -> Array:
    least, most = np.iinfo(of).min, np.iinfo(of).max
    some = {*_WHOLE, least, most, most - 1, *(int(one) + by for one in constants for by in (-1, 0, 1))}
    return np.array(sorted(one for one in some - ({0, least} if op in _DIVIDES else set()) if least <= one <= most), of)


def _numbers(op: str, of: str, constants: Sequence[float], casts_to: str) -> Array:
    own = np.repeat(np.array(constants, of), 3)  # what is nearest to each below and above it
    pool = np.append(np.array(_FLOATS, of), np.nextafter(own, np.resize(np.array([-np.inf, 0, np.inf], of), own.shape)))
    pool = np.append(pool, own)
    pool = pool[(pool == 0) | ~(np.abs(pool) < finfo(of).tiny)]  # TensorFlow has zeros there
    if op in _ORDERED:
        pool = np.append(pool, np.array([finfo(of).max, finfo(of).min, finfo(of).tiny], of))
    elif op in _SEARCHES:  # sums and products that no order rounds, nor carries out of range
        pool = pool[~np.isfinite(pool) | ((pool * 2 == np.round(pool * 2)) & (np.abs(pool) < 2))]
    if casts_to.startswith(("int", "uint")):
        pool = pool[np.isfinite(pool) & (pool > np.iinfo(casts_to).min) & (pool < np.iinfo(casts_to).max)]
    if op in _ELU:  # TensorFlow's calculate exp(x) - 1
        pool = pool[(pool == 0) | ~(np.abs(pool) < 1e-4)]
    if of == "float64" and op in _GELU:  # TensorFlow's Erf of infinity is NaN there
        pool = pool[~np.isinf(pool)]
    return pool


def _in_tensorflow(job: Job, cases: Sequence[_Case]) -> Iterator[tuple[_Case, list[Array]]]:
    """What TensorFlow's kernels make of it, one case after the other."""
    tf = runtime.tensorflow()
    placed = place(job.flat, np.zeros(len(job.flat), np.int32), ["/device:CPU:0"], "/device:CPU:0").graph_def
    defined = {node.name: node for node in placed.node}
    graph_def, graph = type(placed)(versions=placed.versions), tf.Graph()
    names, fed = job.flat.graph.names, dict[str, Any]()
    cases = [case for case in cases if names[case.node] in defined]
    with graph.as_default():
        for number, case in enumerate(cases):
            node = graph_def.node.add()
            node.CopyFrom(defined[names[case.node]])
            del node.input[:]
            node.name = f"op_{number}"
            for slot, value in sorted(case.fed(case.draws[0]).items()):
                node.input.append(f"input_{number}_{slot}")
                fed[node.input[-1]] = tf.compat.v1.placeholder(value.dtype)
        tf.graph_util.import_graph_def(graph_def, fed, name="")
    with tf.compat.v1.Session(graph=graph, config=runtime.session_config(1, cpu_only=True, optimized=False)) as session:
        for number, case in enumerate(cases):
            feeds = (case.fed(draw).items() for draw in case.draws)
            named = [{fed[f"input_{number}_{slot}"]: value for slot, value in feed} for feed in feeds]
            try:
                expected = [session.run(f"op_{number}:0", feed) for feed in named]
            except (tf.errors.OpError, ValueError):
                continue
            yield case, expected


def _compared(name: str, got: Array, expected: Array) -> OutputComparison:
    """Compares a result element by element, each relative to its own size."""
    if expected.dtype.kind != "f" or got.shape != expected.shape:
        return compare({name: got}, {name: expected}).outputs[0]
    with np.errstate(all="ignore"):
        size = np.where(np.isfinite(expected), np.maximum(np.abs(expected), _LEAST), 1)
        away = np.abs(got.astype(np.float64) - expected) / size
    right = (got == expected) | (np.isnan(got) & np.isnan(expected)) | (away <= _RELATIVE[expected.dtype.name])
    # What is right is taken as it is expected, so that the worst that is named is wrong.
    return compare({name: np.where(right, expected, got)}, {name: expected}, tolerance=0.0).outputs[0]
