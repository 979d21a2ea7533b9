"""Division of a graph between the GPU and the host, known before anything runs.

Three kinds of nodes: those with a lowering, which run on the device; host nodes (strings, tables, parsing), which TensorFlow runs on
the CPU, before the device starts where they depend on inputs only, else behind it, together with all that depends on them; and what can
not run at all. Host nodes that work for the device depends on can run neither before nor behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import reached
from msplit.core.graph import TensorValue
from msplit.engines.cuda.frontend.functionalize import Inside, Raised
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.frontend.variables import Effects, effects_of, keyed_tables
from msplit.engines.cuda.ir.functions import FUNCTIONAL, Bodies, reachable
from msplit.engines.cuda.ir.graph import Key
from msplit.engines.cuda.ir.lowering import listed
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.formats.stablehlo import CALL_MODULE, left_whole
from msplit.opset import schema
from msplit.opset.traits import DRAWN_ON_DEVICE, DRAWS, GATHERS, VARIABLES, on_values, ops_with
from msplit.shapes import Shapes
from msplit.shapes.registry import known

READS_A_VARIABLE = ("ReadVariableOp",)
BY_THE_ENGINE = (
    ops_with("fed") | VARIABLES | FUNCTIONAL | frozenset(LISTS) | DRAWN_ON_DEVICE | {"Const", *READS_A_VARIABLE}
)
"""Ops that need no lowering: inputs, constants and variables; loops, conds, calls and their lists, which are unrolled before the run."""


_NO_TENSOR = ("string", "variant", "resource")
_READ_WHOLE = ("Identity", *READS_A_VARIABLE)
_FLOWS = {op for op in LISTS if op.startswith("TensorArray")} - ops_with("array value")
"""Ops that give the flow of an array, which is a list by another name."""
_GATHERS_ND = ops_with("gather nd")
_KEEPS_LENGTH = ops_with("masks elementwise") | ops_with("per element") | ops_with("identity") | GATHERS
_HEAVY = re.compile(r"_?(Fused)?(Batch)?MatMul(V2|V3)?|Einsum|_?(Fused)?(Depthwise)?Conv.*|ResourceGather(Nd)?")
"""Work for the device: what depends on it is in the middle of the model, not in front of it."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Nodes that outputs need, by who runs them.

    Attributes:
        device: Nodes with a lowering, in topological order; constants and variables that they read included.
        host: Nodes that run before, in topological order.
        frontier: Values that the host makes and the device reads.
        shapes: Shapes of values of the host that the device reads as constants.
        fetched: Outputs that the host makes, by name.
        post_nodes: Nodes that the host runs when the device is done, in topological order.
        handed: Values that the device makes and these nodes read.
        host_outputs: Outputs that they make, by name.
        missing: Nodes that nobody can run.
        unplaceable: Host nodes that depend on the device, and that work for the device depends on.
        inside: What loops, conds and calls run.
        effects: What a step does beside giving outputs.
        keyed: Nodes of the device that look keys up -> the nodes of their tables, see `variables.keyed_tables`.
    """

    device: tuple[int, ...]
    host: tuple[int, ...]
    frontier: tuple[Key, ...]
    shapes: Mapping[Key, NDArray[Any]]
    fetched: Mapping[str, Key]
    post_nodes: tuple[int, ...]
    handed: tuple[Key, ...]
    host_outputs: Mapping[str, Key]
    missing: tuple[int, ...]
    unplaceable: tuple[int, ...]
    inside: Inside
    effects: Effects
    keyed: Mapping[int, int]

    def handed_outputs(self) -> tuple[Tensor, ...]:
        """Values that the device is to hand back, as outputs."""
        return tuple(Tensor(f"{node}:{port} (device)", node, port) for node, port in self.handed)


def divide(raised: Raised, sizes: Callable[[], Shapes]) -> Partition:
    """Divides a graph between the host and the device, given the shapes of the graph as it was; they are asked for where the host does
    something."""

    def shape(key: Key) -> tuple[int, ...] | None:
        found = sizes().shape(*raised.origin.get(key, key))
        return found if known(found) else None

    def value_known(node: int) -> bool:
        return bool(sizes().folded[node]) and raised.flat.graph.ops[node] == sizes().graph.ops[node]

    return partition_graph(raised.flat, raised.bodies, Foreseen(shape, value_known))


def wanted(flat: FlatGraph) -> list[Key]:
    """The values that are fetched."""
    return [(tensor.node, tensor.port) for tensor in flat.outputs]


@dataclass(frozen=True, eq=False)
class Foreseen:
    """Shapes and values that are known before anything runs.

    Attributes:
        shape: Gives the shape of a value; None where only the run knows it.
        value: Tells whether the value of a node is: shape arithmetic.
    """

    shape: Callable[[Key], tuple[int, ...] | None]
    value: Callable[[int], bool]


def partition_graph(
    flat: FlatGraph, bodies: Bodies | None = None, foreseen: Foreseen | None = None, held: Set[int] = frozenset()
) -> Partition:
    """Divides what the outputs need between the host and the device. Loops of TensorFlow 1 are raised to nodes already.

    Args:
        bodies: The functions; those of the model if None.
        foreseen: What is known before the run. The host also does the small work that follows on what has no shape that is, such as
            the words of a text, until there is one: the device can capture what is behind, and nothing before. Of a list with which it
            does not come to one (rows of a table that trains are the device's), and if None, it does only what the device can not: what
            it then hands over has the same shape in every step, or none that can be run.
        held: Nodes that the device runs if it can, whatever is foreseen.
    """
    outside = {(tensor.node, tensor.port) for tensor in flat.inputs}
    effects = effects_of(flat)
    written = dict.fromkeys((node, 0) for node in effects.writes)
    nodes = reachable(flat.graph, [*wanted(flat), *written], outside)
    inputs = {node: flat.graph.inputs(node) for node in nodes}
    inside = Inside(flat, bodies or Bodies(flat.model))
    keyed = keyed_tables(flat, effects)

    def kinds_with(early: Set[int]) -> _Kinds:
        kinds = _Kinds(flat, inputs, inside, outside, foreseen, early, held=held, written=bool(written))
        kinds.keyed, kinds.tables = keyed, {*keyed.values()}
        for node in inputs:
            kinds.visit(node, writes=(node, 0) in written)
        return kinds

    kinds = kinds_with(frozenset())
    if kinds.forced:  # once more, now that it is known what else the host has to make for that
        before = _with_ancestors(kinds.forced, inputs, outside)
        kinds = kinds_with({node for node in before if not kinds.both_have(node)})
    # Outputs that the host makes behind the device; all others are roots of what runs before, with what is written and handed over.
    post_nodes, handed = kinds.behind_it()
    outputs = {tensor.name: (tensor.node, tensor.port) for tensor in flat.outputs}
    host_outputs = {name: key for name, key in outputs.items() if key not in outside and key[0] in post_nodes}
    roots = [key for name, key in outputs.items() if name not in host_outputs]
    roots += [*handed, *written]
    nodes = reachable(flat.graph, roots, outside)
    before = set(nodes)
    forced = [node for node in kinds.forced if node in before]
    for node, port in roots:
        # A string that is an output as it is: a constant, a variable, or an input handed on.
        kept = flat.graph.ops[node] == "Const" or flat.graph.ops[node] in VARIABLES
        if kept and (node, port) in kinds.no_tensor and (node, port) not in outside:
            forced.append(node)
    # The host runs in front what it must and all that needs, but for what both have; the device the rest, down to what the host made.
    host = _with_ancestors(forced, inputs, outside)
    before_it = {node for node in host if not kinds.both_have(node)}
    given = outside | kinds.shapes.keys()
    device_roots = [key[0] for key in roots if key not in given and key[0] not in before_it]
    on_device = _with_ancestors(device_roots, inputs, given, before_it)
    frontier: dict[Key, None] = {}
    for node in nodes:
        if node in on_device:
            frontier |= {key: None for key in inputs[node] if key[0] in before_it and key not in outside}
    # Once more, where the host went on with lists and hands over one whose length the values of a step decide.
    if in_vain := kinds.goes_too_far(frontier):
        return partition_graph(flat, bodies, None if held else foreseen, in_vain)
    # Outputs that the host makes in front, or that are strings from outside.
    fetched = {}
    for name, key in outputs.items():
        made_here = key[0] in host and key[0] not in on_device and key not in outside and name not in host_outputs
        if made_here or (key in outside and key in kinds.no_tensor):
            fetched[name] = key
    behind_it = tuple(reachable(flat.graph, host_outputs.values(), {*outside, *handed}))
    # What nobody can run, and what the host would have to draw.
    missing = [node for node in kinds.missing if node in before]
    missing += [node for node in (*sorted(host), *behind_it) if _draws(flat, inside, node) and node not in missing]
    return Partition(
        device=tuple(node for node in nodes if node in on_device),
        host=tuple(node for node in nodes if node in host),
        frontier=tuple(frontier),
        shapes={key: value for key, value in kinds.shapes.items() if key[0] not in before_it},
        fetched=fetched,
        post_nodes=behind_it,
        handed=tuple(handed),
        host_outputs=host_outputs,
        missing=tuple(missing),
        unplaceable=() if post_nodes else tuple(kinds.in_the_way()),
        inside=inside,
        effects=effects,
        keyed={node: table for node, table in keyed.items() if node in on_device},
    )


def _draws(flat: FlatGraph, inside: Inside, node: int) -> bool:
    """Returns whether a node draws numbers that depend on how often it has run.

    The host part has run before the first step, to learn its shapes, and serves several executables: it can not draw as TensorFlow does.
    """
    return flat.graph.ops[node] in DRAWS or not DRAWS.isdisjoint(inside.of(node).names)


class _Kinds:
    """Kinds of nodes, by where they can run. `visit` takes each node in topological order.

    Attributes:
        no_tensor: Values that are no tensor of the device's.
        variables: Values that are variables of numbers, or handles of such. Both sides have them.
        shapes: What is known of the shapes of values that the host alone has, by the nodes that ask for them.
        forced: Nodes of the host that depend on no work for the device.
        unplaceable: Nodes of the host that do.
        missing: Nodes without a lowering that are none of the host's.
        keyed, tables: Nodes that look keys up on the device, and their tables.
    """

    def __init__(
        self,
        flat: FlatGraph,
        inputs: Mapping[int, list[Key]],
        inside: Inside,
        outside: set[Key],
        foreseen: Foreseen | None,
        early: Set[int] = frozenset(),
        *,
        held: Set[int],
        written: bool,
    ) -> None:
        self.keyed: Mapping[int, int] = {}
        self.tables: Set[int] = frozenset()
        self._flat, self._inputs, self._inside, self._outside = flat, inputs, inside, outside
        self._foreseen, self._written = foreseen, written
        self._listed = listed()
        self.no_tensor = {key for key in outside if flat.dtype(*key) in _NO_TENSOR}
        self.variables: set[Key] = set()
        self.shapes: dict[Key, NDArray[Any]] = {}
        self._early, self._held = early, held
        loops = (node for node in inputs if any(map(_HEAVY.fullmatch, inside.of(node).names)))
        self._of_work = {key[0] for node in loops for key in inputs[node] if flat.graph.ops[key[0]] in LISTS}
        self._on_host: set[Key] = set()  # what the host alone makes
        self._unfixed: set[Key] = set()  # of that what has a shape that only the run knows
        self._ragged: set[Key] = set()  # and of these what has no rows of one length
        # Of what the device could make, too: that which has as many elements as values say.
        self._counted: set[Key] = set()
        self.forced: list[int] = []
        self.unplaceable: list[int] = []
        self.missing: list[int] = []
        self._after_work: set[int] = set()  # work for the device, and what depends on it
        self._behind: dict[int, None] = {}  # what is stuck, and what depends on that
        self._between: list[int] = []  # work for the device among those

    def visit(self, node: int, *, writes: bool) -> None:
        """Says of a node what it is, and whether it writes a variable: these are the device's."""
        op, within, attrs = self._flat.graph.ops[node], self._inside.of(node), self._flat.graph.attrs[node]
        covered = (op in BY_THE_ENGINE or on_values(op) in self._listed or node in self.keyed) and not within.missing
        works = any(map(_HEAVY.fullmatch, (op, *within.names)))
        made = [key for key in self._inputs[node] if key not in self._outside]
        read = self.variables.intersection(made)
        late = any(key[0] in self._after_work for key in made)
        follows = any(key[0] in self._behind for key in made)
        heavy = op in VARIABLES or works
        # The host has variables of its own, which are the same while nothing writes any: to read one there is not to wait.
        can_precede = not any(key[0] in self._after_work for key in made if self._written or key not in read)
        # Strings have no place on the device, wherever they come from.
        if op == "Const":
            value = attrs.get("value")
            if isinstance(value, TensorValue) and value.dtype == "string":
                self.no_tensor.add((node, 0))
        elif op in VARIABLES and attrs.get("dtype") == "string":
            heavy = False
            self.no_tensor.add((node, 0))
        # Variables of numbers are there on both sides, and a shape of the host's is a constant where it is known.
        elif op in VARIABLES or node in self.tables or (op in _READ_WHOLE and read):
            self.variables.add((node, 0))
        elif op == "Shape" and (shape := self._shape_of_host(self._inputs[node][0])) is not None:
            self.shapes[node, 0] = np.array(shape, str(attrs.get("out_type", "int32")))
        # The host's: nobody's where it has no such kernel, and in the way where it comes behind work for the device.
        elif not covered or any(key in self.no_tensor for key in self._inputs[node]):
            heavy = False
            is_handle = any(self._flat.dtype(*key) == "resource" for key in read)
            if not covered and (not self._runs_on_host(node, within.missing) or (is_handle and self._written)):
                self.missing.append(node)
            elif not can_precede:
                self.unplaceable.append(node)
                follows = True
            else:
                self._give_to_host(node)
                late = False
        # The device could run it, and the host does: it needs it itself, or goes on with what has no shape yet.
        elif node in self._early or (can_precede and self._goes_along(node, made, works=works)):
            self._give_to_host(node)
            counts = covered and op in self._listed and self._listed[op].dynamic_with(attrs)
            if counts or (op in _KEEPS_LENGTH and not self._counted.isdisjoint(made)):
                self._counted.update(key for key in self._unfixed if key[0] == node)
            heavy = late = False
        # What comes behind work for the device, and behind nodes of the host that do.
        if heavy or late:
            self._after_work.add(node)
        if follows:
            self._behind[node] = None
            if heavy or writes:
                self._between.append(node)

    def _shape_of_host(self, key: Key) -> tuple[int, ...] | None:
        """The shape of a value that the host alone has, where it is known before the run."""
        there = key in self.no_tensor or key in self._on_host
        return self._foreseen.shape(key) if there and self._foreseen is not None else None

    def both_have(self, node: int) -> bool:
        """Tell whether a node's value is there on both sides: a constant, a variable, or what follows from shapes of inputs alone."""
        if self._flat.graph.ops[node] == "Const" or (node, 0) in self.variables:
            return True
        return self._foreseen is not None and (node, 0) not in self._on_host and self._foreseen.value(node)

    def goes_too_far(self, frontier: Iterable[Key]) -> set[int]:
        """The nodes that the device could run of lists that the host hands over, whose length the values of a step decide."""
        found = {key[0] for key in self._counted.intersection(frontier)}
        uncounted = self._inputs.keys() - {node for node, _ in self._counted}
        return _with_ancestors(list(found), self._inputs, self._outside, uncounted)

    def _give_to_host(self, node: int) -> None:
        """Has the host run a node in front of the device's part."""
        self.forced.append(node)
        unfixed = self._unfixed.intersection(self._inputs[node])
        even = bool(unfixed) and unfixed.isdisjoint(self._ragged)
        ragged = not even and self._flat.graph.ops[node] not in ops_with("makes rows even")
        count = schema.output_count(self._flat.graph.ops[node], self._flat.graph.attrs[node]) or 0
        for key in ((node, port) for port in range(count)):
            self._on_host.add(key)
            if self._flat.dtype(*key) in _NO_TENSOR:
                self.no_tensor.add(key)
            if self._foreseen is not None and self._foreseen.shape(key) is None:
                self._unfixed.add(key)
                if ragged:
                    self._ragged.add(key)

    def _goes_along(self, node: int, made: Iterable[Key], *, works: bool) -> bool:
        """Tell if the host goes on with a node that the device could run: the shape of what the host gives it is not fixed, or the shape of
        what it makes follows from numbers that the host gives.

        Products are the device's. Rows of a table are, too, but for lists of ids of any length.
        """
        op, dtype = self._flat.graph.ops[node], self._flat.dtype(node)
        held = node in self._held or node in self._of_work or _draws(self._flat, self._inside, node)
        if self._foreseen is None or held:
            return False
        if works and op not in GATHERS | _GATHERS_ND:
            return False
        if self._unfixed.isdisjoint(made):
            return not self._on_host.isdisjoint(made) and op not in FUNCTIONAL and self._asks(node)
        is_lookup = op in GATHERS | _GATHERS_ND and dtype.startswith(("float", "bfloat", "half"))
        return not is_lookup or not self._ragged.isdisjoint(made)

    def _asks(self, node: int) -> bool:
        """Tell whether a node takes something that the host makes in the host's memory, such as the new shape of a Reshape."""
        op, attrs = self._flat.graph.ops[node], self._flat.graph.attrs[node]
        info = schema.lookup(op)
        attrs = attrs if info is None else info.filled(attrs)
        kernel = None if info is None else schema.gpu_kernel(op, attrs)
        slots = () if info is None or kernel is None else schema.host_slots(info.inputs, attrs, kernel) or ()
        return any(there and key in self._on_host for there, key in zip(slots, self._inputs[node], strict=False))

    def _runs_on_host(self, node: int, missing: Iterable[str]) -> bool:
        """Tell whether the host can run a node for which the device has no lowering, or not for some ops inside of it."""
        inner = set(missing)
        alone = self._flat.graph.ops[node] not in FUNCTIONAL and not self._on_host.isdisjoint(self._inputs[node])
        if alone and schema.lookup(self._flat.graph.ops[node]) is not None:
            return True  # what the host does can go on there
        return bool(self._flat.host[node]) or (bool(inner) and all(map(_has_no_gpu_kernel, inner)))

    def behind_it(self) -> tuple[set[int], dict[Key, None]]:
        """The nodes that the host runs when the device is done, and what they read of the device; none where that does not work."""
        there = self._outside | (set() if self._written else self.variables)
        behind, waiting, handed = set(self._behind), list(self._behind), dict[Key, None]()
        while waiting:
            for key in self._inputs[waiting.pop()]:
                if key in there or key[0] in behind or key[0] not in self._after_work:
                    continue
                op = self._flat.graph.ops[key[0]]
                if op in LISTS and (op in _FLOWS or self._flat.dtype(*key) in _NO_TENSOR):
                    behind.add(key[0])  # a list is made anew, of the same tensors
                    waiting.append(key[0])
                else:
                    handed[key] = None
        if self._between or any(key in self.no_tensor or self._flat.dtype(*key) in _NO_TENSOR for key in handed):
            return set(), {}
        return behind, dict(sorted(handed.items()))

    def in_the_way(self) -> list[int]:
        """The nodes of the host because of which nothing runs behind: those that work for the device depends on, where there is such."""
        if not self._between:
            return self.unplaceable
        before = _with_ancestors(self._between, self._inputs, self._outside)
        return [node for node in self.unplaceable if node in before]


def _has_no_gpu_kernel(op: str) -> bool:
    """Tell whether an op inside of a function is the host's. A constant that the device can not run is a string."""
    info = schema.lookup(op)
    return op == "Const" or (info is not None and not info.gpu)


def _with_ancestors(
    roots: list[int], inputs: Mapping[int, list[Key]], outside: set[Key], not_these: Set[int] = frozenset()
) -> set[int]:
    """Nodes and what they need; the walk stops at values from outside and in front of some nodes."""

    def before(node: int) -> list[int]:
        return [key[0] for key in inputs[node] if key not in outside and key[0] not in not_these]

    return reached(roots, before)


def unknown_effects(flat: FlatGraph, partition: Partition) -> list[str]:
    """Nodes that are run for an effect that the engine does not have.

    Nobody knows the effect, or they write variables inside of loops, conds and calls, or on the host, or variables of strings.
    """
    needed = {*partition.device, *partition.host, *partition.post_nodes}
    names, inputs = flat.graph.names, flat.graph.inputs
    acts = (node for node in partition.effects.stateful if partition.inside.of(node).acts())
    found = [names[node] for node in acts if node not in needed]
    attrs = flat.graph.attrs
    for node in partition.effects.writes:
        held = {attrs[node].get(name) for name in ("T", "dtype")}.isdisjoint(_NO_TENSOR)
        if node not in partition.device or not inputs(node) or not held:
            found.append(names[node])
    return found + [name for node in sorted(needed) for name in partition.inside.of(node).writes()]


def by_op(flat: FlatGraph, nodes: tuple[int, ...]) -> dict[str, list[str]]:
    """Names of nodes by their ops."""
    result: dict[str, list[str]] = {}
    for node in nodes:
        result.setdefault(flat.graph.ops[node], []).append(flat.graph.names[node])
    return result


def missing_by_op(flat: FlatGraph, partition: Partition) -> dict[str, list[str]]:
    """Names of nodes without a lowering by their ops; for a loop, a cond or a call those inside of it."""
    result: dict[str, list[str]] = {}
    on_host = {*partition.host, *partition.post_nodes}
    for node in partition.missing:
        name, op = flat.graph.names[node], flat.graph.ops[node]
        if node in on_host and _draws(flat, partition.inside, node):
            op = f"{op} on the host"
        for within, names in (partition.inside.of(node).missing or {op: [name]}).items():
            result.setdefault(within, []).extend(names)
    return result


_BY_KEY = re.compile("KvResource|KvVar|TFRA>")
_ROWS_BY_KEY = (
    "DeepRec's embedding variables and the tables of TensorFlow Recommenders Addons find rows by keys, and msplit by number: "
    "export the table as a variable whose rows are numbered, and turn keys into numbers in front of the model (tf.lookup does)"
)
"""Line behind ops that begin like this."""


def refuse(flat: FlatGraph, partition: Partition) -> None:
    """Raises what stands in the way of running a graph, if anything does.

    Raises:
        EngineError: Ops without a lowering, all of them; host nodes in the middle of the model; or effects.
    """
    running = unknown_effects(flat, partition)
    if running:
        names = ", ".join(running[:3])
        raise EngineError(
            f"the graph has steps that are run for an effect that the cuda engine does not have ({names})",
            fix="use --engine tensorflow, or name the tensors to compute with --part outputs=",
        )
    lines = []
    if partition.missing:
        missing = missing_by_op(flat, partition)
        lines += ["it has no lowering for:", *_lines(missing)]
        whole = [left_whole(flat.graph.attrs[flat.graph.ops.index(CALL_MODULE)])] if CALL_MODULE in missing else []
        lines += [f"what JAX wrote is not looked into: {why}" for why in whole]
        lines += [_ROWS_BY_KEY] if any(map(_BY_KEY.match, missing)) else []
    if partition.unplaceable:
        lines += [
            "these run on the host only, depend on what the device computes, and have work for it depend on them,",
            "so that they can run neither before it nor behind it:",
            *_lines(by_op(flat, partition.unplaceable)),
        ]
    if lines:
        raise EngineError(
            "the cuda engine can not run this model",
            details=lines,
            fix="use --engine tensorflow, or cut the model with --part inputs= and outputs= so that these nodes are outside",
        )


def _lines(nodes: Mapping[str, list[str]]) -> list[str]:
    counted = ((op, f"{len(names)} node{'s' * (len(names) > 1)}", names[0]) for op, names in sorted(nodes.items()))
    return [f"  {op}: {count}, such as {name}" for op, count, name in counted]
