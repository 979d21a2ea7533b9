"""Results of a pass over a graph: shapes and values of its tensors, the state that passes share, and the ops that run functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Floats, Function, Graph, TensorValue
from msplit.errors import LoadError
from msplit.shapes.registry import Handle, Node, Outputs, Shape, Value, known, output_dtypes
from msplit.shapes.values import LIMIT, as_value

Key = int | tuple[int, int]
"""A tensor: its node for port 0, (node, port) for the others."""

SPARE_OUTPUTS = 1 << 17
"""Outputs beyond these that nothing reads and that are believed, in a whole graph: an attribute may claim millions on every node."""

LARGE = 64
"""Elements of a value from which on it counts as large."""

SPARE_ELEMENTS = 1 << 23
"""Elements of large values that are followed, in a whole graph: a small file can say many times over that it is filled with ones."""

BODY_NODES = 100_000
"""Nodes inside functions that are walked in any case, and .."""

BODY_WALKS = 20
""".. how often on average each function's body may be walked beyond that. Functions that hold each other twice over grow exponentially."""

MAX_NESTING = 64
"""Functions inside functions that are walked."""

CONTRADICTION = (ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, LoadError)
"""Errors that a shape function raises on a node that contradicts itself: its outputs then count as unknown."""


def key_of(node: int, port: int) -> Key:
    """The key of a tensor."""
    return node if port == 0 else (node, port)


@dataclass(frozen=True)
class Bound:
    """Facts about an argument or a result of a function at a call.

    Attributes:
        shape: Its shape.
        value: Its elements, where they are known and few.
        handle: What it refers to, where it is a handle of a variable, a list or an array.
    """

    shape: Shape
    value: Value | None = None
    handle: Handle | None = None


@dataclass(eq=False)
class Result:
    """Result of a pass.

    Attributes:
        outputs: Shapes of the outputs of each node.
        values: Known values.
        handles: What handles refer to.
        undecoded: Small constants that nobody has asked for yet; `values` holds a stand-in for them.
        bodies: For each node with functions: function and result by the name of the attribute.
        trip_counts: For each loop that counts to a known limit: how often its body runs.
    """

    outputs: list[Outputs]
    values: dict[Key, Value]
    handles: dict[Key, Handle]
    undecoded: dict[Key, TensorValue] = field(default_factory=dict)
    bodies: dict[int, dict[str, tuple[Function, Result]]] = field(default_factory=dict)
    trip_counts: dict[int, int] = field(default_factory=dict)

    def shape(self, node: int, port: int) -> Shape:
        """Shape of a tensor."""
        outputs = self.outputs[node]
        return outputs[port] if 0 <= port < len(outputs) else None

    def bound(self, node: int, port: int) -> Bound:
        """All that is known about a tensor."""
        key = key_of(node, port)
        return Bound(self.shape(node, port), self.value(key), self.handles.get(key))

    def value(self, key: Key) -> Value | None:
        """A known value; constants are decoded when they are first asked for."""
        found = self.values.get(key)
        if found is not None and key in self.undecoded:
            try:
                decoded = as_value(self.undecoded.pop(key).load())
            except CONTRADICTION:
                decoded = None
            if decoded is None:
                del self.values[key]
                return None
            found = self.values[key] = decoded
        return found


@dataclass(frozen=True, eq=False)
class Shapes:
    """Shapes of all tensors of a graph.

    Attributes:
        graph: The graph.
        outputs: Per node one shape per output. A shape is a tuple of sizes, None for an unknown size; None alone is an unknown rank.
        folded: Per node, whether its value is known before anything runs: shape arithmetic.
        assumed: What was taken for granted, one sentence each, such as an unknown batch size.
        bodies: For each `While`, `If`, `Case` and call: the shapes inside its functions, by node and attribute.
        trip_counts: For each `While` that counts to a limit known before it runs: how often its body runs.
        runs: Per node how often it runs in a step, by the loops of TensorFlow 1 that it is in: NaN where that is not known. None: once.
        parameters: Of a function's body the nodes that are its parameters, and ..
        results: .. those that give its results.
    """

    graph: Graph
    outputs: Sequence[Outputs]
    folded: NDArray[np.bool_]
    assumed: tuple[str, ...] = ()
    bodies: Mapping[int, Mapping[str, Shapes]] = field(default_factory=dict)
    trip_counts: Mapping[int, int] = field(default_factory=dict)
    runs: Floats | None = None
    parameters: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    def shape(self, node: int, port: int = 0) -> Shape:
        """Shape of a tensor; None where even its rank is unknown."""
        outputs = self.outputs[node]
        return outputs[port] if 0 <= port < len(outputs) else None

    def dtype(self, node: int, port: int = 0) -> str:
        """Type of a tensor as in ``"float32"``, "" where the graph does not say."""
        dtypes = output_dtypes(self.graph.ops[node], self.graph.attrs[node], port + 1)
        return dtypes[port] if 0 <= port < len(dtypes) else ""

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Per node, whether the shapes of its first output and of those that something reads are known in full."""
        verdicts: dict[int, bool] = {}
        result = np.empty(len(self.outputs), dtype=np.bool_)
        for node, outputs in enumerate(self.outputs):
            # Outputs are shared between nodes: one verdict per object spares most of the work.
            verdict = verdicts.get(id(outputs))
            if verdict is None:
                verdict = verdicts[id(outputs)] = all(known(shape) for shape in outputs)
            result[node] = verdict
        for node in np.flatnonzero(~result).tolist():
            out = self.graph.out_edges(node)
            read = set(self.graph.edges.port[out].tolist()) - {CONTROL} | {0}
            result[node] = all(known(shape) for port, shape in enumerate(self.outputs[node]) if port in read)
        return result


@dataclass(eq=False)
class InferenceState:
    """State that passes share.

    Attributes:
        functions: The library.
        active: Functions that are being walked, outermost first: a recursive one ends there.
        done: Results of calls with the same arguments.
        met: Functions that were walked at least once.
        nodes: Nodes of functions that may still be walked.
        outputs: Outputs that nothing reads and that may still be believed.
        elements: Elements of large values that may still be followed.
    """

    functions: Mapping[str, Function]
    active: list[str] = field(default_factory=list)
    done: dict[Any, Result] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    nodes: int = BODY_NODES
    outputs: int = SPARE_OUTPUTS
    elements: int = SPARE_ELEMENTS

    def may_walk(self, function: Function) -> bool:
        """Takes the nodes of a function from those that may still be walked; False where there are not as many left."""
        if function.name not in self.met:
            self.met.add(function.name)
            self.nodes += BODY_WALKS * len(function.body)
        self.nodes -= len(function.body) + len(function.results)
        return self.nodes >= 0 and len(self.active) < MAX_NESTING

    def may_follow(self, size: int) -> bool:
        """True if a value of a number of elements may be followed; takes them from what is left."""
        if size <= LARGE:
            return True
        if size > min(LIMIT, self.elements):
            return False
        self.elements -= size
        return True


@dataclass(frozen=True)
class FunctionShapes:
    """Shapes of a node that runs functions.

    Attributes:
        outputs: What is known about each of its outputs.
        bodies: By attribute or branch, the function that it runs, and what the pass over it found.
        trip_count: How often a loop runs its body; None where that is not known, or the node is no loop.
    """

    outputs: list[Bound]
    bodies: dict[str, tuple[Function, Result]]
    trip_count: int | None = None


Functional = Callable[[Node, InferenceState], FunctionShapes | None]

FUNCTIONAL: dict[str, Functional] = {}
"""Ops that run functions; filled by `functional.py`."""
