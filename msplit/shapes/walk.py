"""One pass over a graph in topological order: shapes, small values, and what handles refer to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from msplit.core.graph import CONTROL, Graph, TensorValue
from msplit.opset import schema
from msplit.opset.traits import ops_with
from msplit.shapes import registry
from msplit.shapes.registry import UNKNOWN_OUTPUT, Node, Outputs, Shape, Value, merge, plain_shape
from msplit.shapes.result import CONTRADICTION, FUNCTIONAL, Bound, Functional, InferenceState, Key, Result, key_of
from msplit.shapes.values import FROM_SHAPE, LIMIT, TABLE, ValueFunction

FLOAT_LIMIT = 16
"""Most elements of a float constant whose value is followed: enough for scales of image sizes."""

FREE_OUTPUTS = 16
"""Outputs of any node that nothing needs to read: more than all ops have whose outputs an attribute does not count."""


@dataclass(frozen=True)
class _Recipe:
    """Recipe for inferring an op."""

    same: bool
    binary: bool
    constant: bool
    shape: registry.ShapeFunction | None
    value: ValueFunction | None
    handle: registry.HandleFunction | None
    functional: Functional | None
    from_shape: bool


def run(
    graph: Graph,
    state: InferenceState,
    overrides: Mapping[tuple[int, int], Shape],
    arguments: Mapping[int, Bound] | None = None,
) -> Result:
    """Infers all shapes of a graph.

    Args:
        graph: A DAG.
        state: Shared by the passes of one inference.
        overrides: Shapes of single tensors that are decided from outside.
        arguments: What parameters (nodes of op ``_Arg``) are bound to.
    """
    # Flat lists of the edges and, per node, where its data inputs begin and end: NumPy's scalars are slow in the loop.
    count = len(graph)
    edges = graph.edges
    data = edges.port != CONTROL
    starts: list[int] = graph.in_start.tolist()
    ends: list[int] = (graph.in_start[:-1] + np.bincount(edges.dst[data], minlength=count)).tolist()
    used = np.ones(count, dtype=np.int64)
    np.maximum.at(used, edges.src[data], edges.port[data].astype(np.int64) + 1)
    readers = np.bincount(edges.src[data], minlength=count)
    walk = _Walk(
        graph,
        state,
        Result([UNKNOWN_OUTPUT] * count, {}, {}),
        edges.src.tolist(),
        edges.port.tolist(),
        used.tolist(),
        readers.tolist(),
    )
    forced: dict[int, dict[int, Shape]] = {}
    for (forced_node, forced_port), shape in overrides.items():
        forced.setdefault(forced_node, {})[forced_port] = shape
    recipes = _recipes(graph, state)
    outputs = walk.result.outputs
    src, port = walk.src, walk.port
    ops = graph.ops
    for node in graph.topological.tolist():
        recipe = recipes[ops[node]]
        first, end = starts[node], ends[node]
        # The common kinds of ops are written out or have a method of their own: they are most nodes of a large graph.
        if recipe.same:
            if first == end:
                outputs[node] = UNKNOWN_OUTPUT
            else:
                got = outputs[src[first]]
                place = port[first]
                outputs[node] = (
                    got if place == 0 and len(got) == 1 else (got[place],) if place < len(got) else UNKNOWN_OUTPUT
                )
        elif recipe.binary and end - first == 2:
            walk.binary(node, first)
        elif recipe.constant:
            walk.constant(node)
        elif arguments is not None and node in arguments:
            walk.bind(node, [arguments[node]])
        else:
            walk.general(node, recipe, first, end)
        if node in forced:
            walk.force(node, forced[node])
        # What the general method does beside shapes, for those two: values, handles, and hints for open sizes.
        if recipe.same or (recipe.binary and end - first == 2):
            if recipe.value is not None and (recipe.from_shape or walk.has_value(first, end)):
                walk.evaluate(node, recipe, walk.view(node, first, end))
            if recipe.handle is not None and walk.result.handles:
                walk.refer(node, recipe.handle, walk.view(node, first, end))
            shape = outputs[node][0]
            if shape is None or None in shape:
                walk.hint(node)
    return walk.result


def _recipes(graph: Graph, state: InferenceState) -> dict[str, _Recipe]:
    binary = ops_with("broadcasts")
    recipes = {}
    for op in dict.fromkeys(graph.ops):
        functional = FUNCTIONAL.get(op) or (FUNCTIONAL["call"] if op in state.functions else None)
        recipes[op] = _Recipe(
            op in registry.SAME_SHAPE,
            op in binary,
            op == "Const",
            registry.SHAPE_FUNCTIONS.get(op),
            TABLE.get(op),
            registry.HANDLE_FUNCTIONS.get(op),
            functional,
            op in FROM_SHAPE,
        )
    return recipes


@dataclass(eq=False)
class _Walk:
    """The tables of one pass; methods fill in one node.

    Attributes:
        graph, state, result: See `run`.
        src, port: Of each edge.
        used: Per node the number of outputs up to the last one that something reads, at least 1.
        readers: Per node the number of data edges that leave it.
        shared: Outputs that were stored: equal ones are the same object.
    """

    graph: Graph
    state: InferenceState
    result: Result
    src: list[int]
    port: list[int]
    used: list[int]
    readers: list[int]
    shared: dict[Outputs, Outputs] = field(default_factory=dict)

    def view(self, node: int, first: int, end: int) -> Node:
        """The node as shape functions see it."""
        outputs, handles = self.result.outputs, self.result.handles
        inputs: list[Shape] = []
        keys: list[Key] = []
        for edge in range(first, end):
            source, place = self.src[edge], self.port[edge]
            given = outputs[source]
            inputs.append(given[place] if place < len(given) else None)
            keys.append(source if place == 0 else (source, place))
        room = self.room(node)
        return Node(
            self.graph.ops[node],
            self.graph.attrs[node],
            inputs,
            lambda: [self.result.value(key) for key in keys],
            [handles.get(key) for key in keys],
            min(self.used[node], room),
            room,
        )

    def room(self, node: int) -> int:
        """Most outputs that a node is believed to have: each edge reads one, a few are free, and the rest share what is spare."""
        return self.readers[node] + FREE_OUTPUTS + self.state.outputs

    def has_value(self, first: int, end: int) -> bool:
        """True if the values of all inputs, given as edges, are known."""
        values = self.result.values
        for edge in range(first, end):
            source, place = self.src[edge], self.port[edge]
            if (source if place == 0 else (source, place)) not in values:
                return False
        return first < end

    def binary(self, node: int, first: int) -> None:
        """Two operands that broadcast."""
        outputs, src, port = self.result.outputs, self.src, self.port
        left, right = outputs[src[first]], outputs[src[first + 1]]
        if left is right and len(left) == 1:
            outputs[node] = left
            return
        a = left[port[first]] if port[first] < len(left) else None
        b = right[port[first + 1]] if port[first + 1] < len(right) else None
        if len(left) == 1 and (a == b or b == ()):
            outputs[node] = left
        elif len(right) == 1 and a == ():
            outputs[node] = right
        else:
            self._store(node, (registry.broadcast(a, b),))

    def constant(self, node: int) -> None:
        """A constant: its shape, and its value where it is small."""
        value = self.graph.attrs[node].get("value")
        if not isinstance(value, TensorValue):
            self.result.outputs[node] = UNKNOWN_OUTPUT
            return
        self._store(node, (value.shape,))
        if len(value.shape) > registry.MAX_RANK:
            return
        size = math.prod(value.shape)
        limit = FLOAT_LIMIT if value.dtype.startswith(("float", "bfloat")) else LIMIT
        if size <= limit and value.dtype not in ("string", "variant") and self.state.may_follow(size):
            self.result.undecoded[node] = value
            self.result.values[node] = _PENDING

    def bind(self, node: int, outputs: Sequence[Bound]) -> None:
        """A node about whose outputs something is known from elsewhere."""
        self._store(node, self._believed(node, tuple(bound.shape for bound in outputs)))
        for port, bound in enumerate(outputs):
            key = key_of(node, port)
            if bound.value is not None:
                self.result.values[key] = bound.value
            if bound.handle is not None:
                self.result.handles[key] = bound.handle

    def general(self, node: int, recipe: _Recipe, first: int, end: int) -> None:
        """Any op, by its functions."""
        view = self.view(node, first, end)
        if recipe.functional is not None and self._call(node, recipe.functional, view):
            return
        try:
            if recipe.shape is not None:
                outputs = recipe.shape(view)
            else:
                count = schema.output_count(view.op, view.attrs)
                outputs = (None,) * (view.outputs if count is None else min(count, view.room))
        except CONTRADICTION:
            outputs = (None,) * view.outputs
        if outputs and len(outputs) < view.outputs:
            outputs = (*outputs, *[None] * (view.outputs - len(outputs)))
        self._store(node, self._believed(node, outputs))
        if any(shape is None or None in shape for shape in self.result.outputs[node]):
            self.hint(node)
        if recipe.value is not None and (recipe.from_shape or any(value is not None for value in view.values)):
            self.evaluate(node, recipe, view)
        if recipe.handle is not None:
            self.refer(node, recipe.handle, view)

    def _believed(self, node: int, outputs: Outputs) -> Outputs:
        """The outputs of a node, as far as there is room for them."""
        if len(outputs) > self.readers[node] + FREE_OUTPUTS:
            outputs = outputs[: self.room(node)]
            self.state.outputs -= max(0, len(outputs) - self.readers[node] - FREE_OUTPUTS)
        return outputs

    def _call(self, node: int, functional: Functional, view: Node) -> bool:
        try:
            outcome = functional(view, self.state)
        except CONTRADICTION:
            return False
        if outcome is None:
            return False
        self.bind(node, outcome.outputs)
        self.result.bodies[node] = outcome.bodies
        if outcome.trip_count is not None:
            self.result.trip_counts[node] = outcome.trip_count
        self.hint(node)
        return True

    def evaluate(self, node: int, recipe: _Recipe, view: Node) -> None:
        """Fills in the values of a node's outputs where they are known."""
        assert recipe.value is not None
        try:
            found = recipe.value(view, self.result.outputs[node])
        except CONTRADICTION:
            return
        if found is None:
            return
        for port, value in enumerate(found if isinstance(found, list | tuple) else (found,)):
            if value is not None and value.size <= LIMIT and self.state.may_follow(value.size):
                self.result.values[key_of(node, port)] = value

    def refer(self, node: int, handle: registry.HandleFunction, view: Node) -> None:
        """Fills in what a node's outputs refer to."""
        try:
            found = handle(view)
        except CONTRADICTION:
            return
        for port, item in enumerate(found):
            if item is not None:
                self.result.handles[key_of(node, port)] = item

    def force(self, node: int, shapes: Mapping[int, Shape]) -> None:
        """Shapes decided from outside replace what was inferred, and the value goes with it."""
        outputs = list(self.result.outputs[node])
        for port, shape in shapes.items():
            outputs.extend([None] * (port + 1 - len(outputs)))
            outputs[port] = shape
            self.result.values.pop(key_of(node, port), None)
        self._store(node, tuple(outputs))

    def hint(self, node: int) -> None:
        """Fills what is unknown from the shapes that the exporter wrote on the node, if it did."""
        attrs = self.graph.attrs[node]
        hints = attrs.get("_output_shapes") if "_output_shapes" in attrs else None
        if isinstance(hints, tuple):
            outputs = self.result.outputs[node]
            merged = tuple(
                merge(shape, plain_shape(hints[port])) if port < len(hints) else shape
                for port, shape in enumerate(outputs)
            )
            self._store(node, merged)

    def _store(self, node: int, outputs: Outputs) -> None:
        try:
            shared = self.shared.get(outputs)
        except TypeError:
            shared, outputs = None, tuple(plain_shape(shape) for shape in outputs)
        if shared is None:
            # Attributes may hold anything: what is not a shape is no statement.
            shared = self.shared[outputs] = tuple(plain_shape(shape) for shape in outputs)
        self.result.outputs[node] = shared


_PENDING: Value = np.empty(0)
"""Stands for the value of a constant that nobody has asked for yet."""
