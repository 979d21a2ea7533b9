"""Holds each op of the compiled graph against TensorFlow by itself, on TensorFlow's own values of what it reads.

Behind other layers a wrong formula may be invisible: GELU with tanh in place of erf is 5e-4 away where it is computed, and less than
rounding in the last of twelve layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Job
from msplit.engines.tensorflow.engine import session_on_cpu
from msplit.flatten.flat import Tensor
from msplit.opset.traits import CALLS, CONDS, DRAWS, LOOPS, ops_with
from msplit.verify.compare import ModelComparison, OutputComparison, compare, move, tolerance_of
from msplit.verify.fetchable import Key, fetchable

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Compiled

OP_BY_OP = "TensorFlow on the CPU, op by op"
"""Name of what a compiled graph is held against."""

MOST_BYTES = 1 << 30
"""Bytes of values that are fetched in one run: they are in memory twice."""

_ONE_OP = {"float32": 2.0**-16, "float64": 2.0**-42, "complex64": 2.0**-16, "complex128": 2.0**-42}
"""Tolerances of one op that adds nothing up, by type."""

_SUMS = {"float32": 1e-4, "float64": 1e-10, "complex64": 1e-4, "complex128": 1e-10}
"""Tolerances of products and convolutions: algorithms that need fewer products round more."""

_AMPLITUDE, _MOVES, _TIMES = 2.0**-21, 4, 4.0
"""How far the values that an op reads are moved, relative to each; how often; and how many times as far what it makes of them may be
from TensorFlow's. Behind a difference of two numbers that are near each other, or next to a boundary, rounding is all there is."""

_PRODUCTS = ops_with("half gains")
_OPAQUE = DRAWS | LOOPS | CONDS | CALLS
"""Ops of which nothing is compared: what they give is drawn, or is numbered in another way once a loop is one op."""


@dataclass(frozen=True, eq=False)
class _Program:
    """A compiled graph, and the inputs and variables that it is stepped on.

    Attributes:
        meanings: Value -> another of the flat graph, which it is in the compiled graph.
    """

    compiled: Compiled
    job: Job
    feeds: Arrays
    meanings: dict[Key, Key] = field(default_factory=dict)

    def made(self, given: Mapping[Key, NDArray[Any]]) -> Iterator[tuple[str, tuple[int, ...], Key, NDArray[Any]]]:
        """What each step makes of given values; see `Compiled.alone`."""
        return self.compiled.alone(self.job, self.feeds, given)

    @cached_property
    def fetched(self) -> set[Key]:
        """Values that can be compared and do not depend on what the step has written by then."""
        ops, known = self.job.flat.graph.ops, fetchable(self.job.flat)
        return {key for key in known.keys if not known.after[key[0]] and ops[key[0]] not in _OPAQUE}

    @cached_property
    def producers(self) -> Mapping[Key, int]:
        """Step that makes each value."""
        return self.compiled.program.producers()

    @cached_property
    def place(self) -> Mapping[int, int]:
        """Place of each node in topological order."""
        return {int(node): number for number, node in enumerate(self.job.flat.graph.topological)}

    def tolerance(self, nodes: Sequence[int], dtype: str) -> float:
        """Tolerance of what an op makes that does the work of some nodes."""
        adds = any(self.job.flat.graph.ops[node] in _PRODUCTS for node in nodes)
        return (_SUMS if adds else _ONE_OP).get(dtype, 0.0) or tolerance_of(dtype)

    def wrong(self, given: dict[Key, NDArray[Any]], among: Collection[Key]) -> dict[Key, OutputComparison]:
        """Those of some values that are further from the given ones than an op may be, also where what it reads is moved a little.

        An op that does the work of nodes behind its own may give what the last of them gives: then that is what is given from there on.
        """
        found: dict[Key, OutputComparison] = {}
        got: dict[Key, NDArray[Any]] = {}
        for op, nodes, key, made in self.made(given):
            if key in among:
                name = f"{self.job.flat.graph.names[key[0]]}:{key[1]} ({op})"
                tolerance = self.tolerance(nodes, made.dtype.name)
                meanings = [key, *((node, 0) for node in self.behind(key, nodes) if (node, 0) in given)]
                compared = [
                    compare({name: made}, {name: given[one]}, tolerance=tolerance).outputs[0] for one in meanings
                ]
                right = next((one for one, each in zip(meanings, compared, strict=True) if each.passed), None)
                if right is None:
                    found[key], got[key] = compared[0], made
                elif right != key:
                    self.meanings[key] = right
                    given[key] = given[right]
        for seed in range(_MOVES if found else 0):
            moved = {key: move(value, _AMPLITUDE, np.random.default_rng([seed, *key])) for key, value in given.items()}
            for _, _, key, made in self.made(moved):
                if key in found:
                    one = found[key]
                    by = compare({"": made}, {"": got[key]}, tolerance=one.tolerance).outputs[0]
                    carried = (
                        one.mismatches <= _TIMES * by.mismatches if one.exact else one.needed <= _TIMES * by.needed
                    )
                    if carried:
                        del found[key]
        return found

    def behind(self, key: Key, nodes: Sequence[int]) -> list[int]:
        """Nodes that an op does the work of which stand behind the one whose value it gives, the last first."""
        behind = [node for node in nodes if self.place[node] > self.place[key[0]]]
        return sorted(behind, key=self.place.__getitem__, reverse=True)

    def parts(self, left_out: set[Key]) -> Iterator[tuple[set[Key], list[Key]]]:
        """Values to compare, as many as fit into memory at a time, each time with those that the ops read that make them; without some that
        become known meanwhile."""
        fetched = self.fetched
        judged, read, size = set[Key](), dict[Key, None](), 0
        for step in self.compiled.program.steps:
            made = [
                key
                for key in ((step.op.node, port) for port in range(step.outputs))
                if key in fetched and key not in left_out
            ]
            if made and size and size + step.bytes > MOST_BYTES:
                yield judged, [key for key in read if key in fetched]
                judged, read, size = set(), {}, 0
            self.note_read(list(step.inputs) if made else [], read, fetched - left_out if left_out else fetched)
            more = [(node, 0) for key in made for node in self.behind(key, step.op.source_nodes)]
            judged |= set(made)
            read |= dict.fromkeys([*made, *more, *(self.meanings[key] for key in read if key in self.meanings)])
            size += step.bytes
        if judged:
            yield judged, [key for key in read if key in fetched]

    def note_read(self, waiting: list[Key], read: dict[Key, None], fetched: Collection[Key]) -> None:
        """Notes values that are read, and those that values are made of which are not fetched."""
        steps, producers = self.compiled.program.steps, self.producers
        while waiting:
            key = waiting.pop()
            if key not in read:
                read[key] = None
                waiting += steps[producers[key]].inputs if key in producers and key not in fetched else ()


def compare_ops(compiled: Compiled, job: Job, feeds: Arrays) -> ModelComparison:
    """Compares what each op of the compiled graph makes of TensorFlow's values of what it reads with TensorFlow's value of that: see
    `_ONE_OP`.

    A pass may give a value another meaning that its readers know of, such as rows in another order. So a value that is not TensorFlow's is
    wrong only where readers that get it as it is come to other values than TensorFlow, or where it is an output.
    """
    flat = job.flat
    program = _Program(compiled, job, feeds)
    outputs = {(output.node, output.port) for output in flat.outputs}
    found: list[OutputComparison] = []
    other_meaning = set[Key]()
    for judged, keys in program.parts(other_meaning):
        given = _in_tensorflow(job, feeds, keys)
        given |= {key: given[other] for key, other in program.meanings.items() if key in given}
        if wrong := program.wrong(given, judged):
            left = {key: value for key, value in given.items() if key not in wrong}
            blamed = flat.graph.ancestors([key[0] for key in program.wrong(left, judged - wrong.keys())])
            found += [one for key, one in wrong.items() if blamed[key[0]] or key in outputs]
            other_meaning |= wrong.keys()
    return ModelComparison(tuple(found))


def _in_tensorflow(job: Job, feeds: Arrays, keys: Sequence[Key]) -> dict[Key, NDArray[Any]]:
    """TensorFlow's values, on the CPU, of a step."""
    outputs = {f"{node}:{port}": (node, port) for node, port in keys}
    cut = replace(job.flat, outputs=tuple(Tensor(name, *key) for name, key in outputs.items()), targets=())
    session = session_on_cpu(cut, op_libraries=job.op_libraries, inlined=True, state=job.state)
    try:
        made = session.step(feeds)
    finally:
        session.close()
    return {key: np.asarray(made[name]) for name, key in outputs.items()}
