"""What of a graph the cuda engine can run, known before anything runs.

Three kinds of nodes: those with a lowering, which run on the device; host nodes (strings, tables, parsing), which TensorFlow runs on
the CPU, before the device starts where they depend on inputs only, else behind it, together with all that depends on them; and what can
not run at all. Host nodes that work for the device depends on can run neither before nor behind it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from msplit.core.graph import TensorValue
from msplit.engines.cuda.frontend.callees import Inside
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.frontend.variables import Effects, effects_of
from msplit.engines.cuda.ir.functions import FUNCTIONAL, Bodies, reachable
from msplit.engines.cuda.ir.graph import Key
from msplit.engines.cuda.ir.lowering import listed
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.opset import schema
from msplit.opset.state import on_values
from msplit.opset.traits import DRAWN_ON_DEVICE, DRAWS, VARIABLES, ops_with

READS_A_VARIABLE = ("ReadVariableOp",)
BY_THE_ENGINE = frozenset(
    {"Const", *ops_with("fed"), *VARIABLES, *READS_A_VARIABLE, *FUNCTIONAL, *LISTS, *DRAWN_ON_DEVICE}
)
"""Ops that need no lowering: inputs, constants and variables; loops, conds, calls and their lists, which are unrolled before the run."""


_NO_TENSOR = ("string", "variant", "resource")
_HEAVY = re.compile(r"_?(Fused)?(Batch)?MatMul(V2|V3)?|Einsum|_?(Fused)?(Depthwise)?Conv.*|ResourceGather(Nd)?")
"""Work for the device: what depends on it is in the middle of the model, not in front of it."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Who runs which of the needed nodes.

    Attributes:
        device: Nodes with a lowering, in topological order; constants and variables that they read included.
        host: Nodes that run before, in topological order.
        frontier: Values that the host makes and the device reads.
        fetched: Outputs that the host makes, by name.
        post_nodes: Nodes that the host runs when the device is done, in topological order.
        handed: Values that the device makes and these nodes read.
        host_outputs: Outputs that they make, by name.
        missing: Nodes that nobody can run.
        unplaceable: Host nodes that depend on the device, and that work for the device depends on.
        inside: What loops, conds and calls run.
        effects: What a step does beside giving outputs.
    """

    device: tuple[int, ...]
    host: tuple[int, ...]
    frontier: tuple[Key, ...]
    fetched: Mapping[str, Key]
    post_nodes: tuple[int, ...]
    handed: tuple[Key, ...]
    host_outputs: Mapping[str, Key]
    missing: tuple[int, ...]
    unplaceable: tuple[int, ...]
    inside: Inside
    effects: Effects

    def handed_outputs(self) -> tuple[Tensor, ...]:
        """What the device is to hand back, as outputs."""
        return tuple(Tensor(f"{node}:{port} (device)", node, port) for node, port in self.handed)


def wanted(flat: FlatGraph) -> list[Key]:
    """The values that are fetched."""
    return [(tensor.node, tensor.port) for tensor in flat.outputs]


def partition_graph(flat: FlatGraph, bodies: Bodies | None = None) -> Partition:
    """Divides what the outputs need between the host and the device. Loops of TensorFlow 1 are raised to nodes already.

    Without `bodies` the functions are those of the model.
    """
    outside = {(tensor.node, tensor.port) for tensor in flat.inputs}
    effects = effects_of(flat)
    written = dict.fromkeys((node, 0) for node in effects.writes)
    nodes = reachable(flat.graph, [*wanted(flat), *written], outside)
    inputs = {node: flat.graph.inputs(node) for node in nodes}
    inside = Inside(flat, bodies or Bodies(flat.model))
    kinds = _Kinds(flat, inputs, inside, outside)
    for node in nodes:
        kinds.visit(node, writes=(node, 0) in written)
    post_nodes, handed = kinds.behind_it()
    outputs = {tensor.name: (tensor.node, tensor.port) for tensor in flat.outputs}
    host_outputs = {name: key for name, key in outputs.items() if key not in outside and key[0] in post_nodes}
    roots = [key for name, key in outputs.items() if name not in host_outputs]
    roots += [*handed, *written]
    nodes = reachable(flat.graph, roots, outside)
    before = set(nodes)
    forced = [node for node in kinds.forced if node in before]
    for node, port in roots:
        # A string that is an output as it is: a constant, or an input handed on.
        if (node, port) in kinds.no_tensor and (node, port) not in outside and flat.graph.ops[node] == "Const":
            forced.append(node)
    host = _with_ancestors(forced, inputs, outside)
    constants = {node for node in host if flat.graph.ops[node] == "Const"}
    before_it = host - constants
    device_roots = [key[0] for key in roots if key not in outside and key[0] not in before_it]
    on_device = _with_ancestors(device_roots, inputs, outside, before_it)
    frontier: dict[Key, None] = {}
    for node in nodes:
        if node in on_device:
            frontier |= {key: None for key in inputs[node] if key[0] in before_it and key not in outside}
    fetched = {}
    for name, key in outputs.items():
        made_here = key[0] in host and key[0] not in on_device and key not in outside and name not in host_outputs
        if made_here or (key in outside and key in kinds.no_tensor):
            fetched[name] = key
    behind_it = tuple(reachable(flat.graph, host_outputs.values(), {*outside, *handed}))
    missing = [node for node in kinds.missing if node in before]
    missing += [node for node in (*sorted(host), *behind_it) if _draws(flat, inside, node) and node not in missing]
    return Partition(
        device=tuple(node for node in nodes if node in on_device),
        host=tuple(node for node in nodes if node in host),
        frontier=tuple(frontier),
        fetched=fetched,
        post_nodes=behind_it,
        handed=tuple(handed),
        host_outputs=host_outputs,
        missing=tuple(missing),
        unplaceable=() if post_nodes else tuple(kinds.in_the_way()),
        inside=inside,
        effects=effects,
    )


def _draws(flat: FlatGraph, inside: Inside, node: int) -> bool:
    """Whether a node draws numbers that depend on how often it has run.

    The host part has run before the first step, to learn its shapes, and serves several executables: it can not draw as TensorFlow does.
    """
    return flat.graph.ops[node] in DRAWS or not DRAWS.isdisjoint(inside.of(node).names)


class _Kinds:
    """What can run where: tell it of each node in topological order.

    Attributes:
        no_tensor: Values that are no tensor of the device's.
        forced: Nodes of the host that depend on no work for the device.
        unplaceable: Nodes of the host that do.
        missing: Nodes without a lowering that are none of the host's.
    """

    def __init__(self, flat: FlatGraph, inputs: Mapping[int, list[Key]], inside: Inside, outside: set[Key]) -> None:
        self._flat, self._inputs, self._inside, self._outside = flat, inputs, inside, outside
        self._listed = listed()
        self.no_tensor = {key for key in outside if _dtype(flat, key) in _NO_TENSOR}
        self.forced: list[int] = []
        self.unplaceable: list[int] = []
        self.missing: list[int] = []
        self._after_work: set[int] = set()  # work for the device, and what depends on it
        self._behind: dict[int, None] = {}  # what is stuck, and what depends on that
        self._between: list[int] = []  # work for the device among those

    def visit(self, node: int, *, writes: bool) -> None:
        """Says of a node what it is, and whether it writes a variable: these are the device's."""
        op, within = self._flat.graph.ops[node], self._inside.of(node)
        covered = (op in BY_THE_ENGINE or on_values(op) in self._listed) and not within.missing
        heavy = op in VARIABLES or bool(_HEAVY.fullmatch(op)) or any(map(_HEAVY.fullmatch, within.names))
        made = [key for key in self._inputs[node] if key not in self._outside]
        late = any(key[0] in self._after_work for key in made)
        follows = any(key[0] in self._behind for key in made)
        if op == "Const":
            value = self._flat.graph.attrs[node].get("value")
            if isinstance(value, TensorValue) and value.dtype == "string":
                self.no_tensor.add((node, 0))
        elif not covered or any(key in self.no_tensor for key in self._inputs[node]):
            count = schema.output_count(op, self._flat.graph.attrs[node]) or 0
            keys = [(node, port) for port in range(count)]
            self.no_tensor.update(key for key in keys if _dtype(self._flat, key) in _NO_TENSOR)
            if not covered and not self._flat.host[node]:
                self.missing.append(node)
            elif late:
                self.unplaceable.append(node)
                follows = True
            else:
                self.forced.append(node)
        if heavy or late:
            self._after_work.add(node)
        if follows:
            self._behind[node] = None
            if heavy or writes:
                self._between.append(node)

    def behind_it(self) -> tuple[set[int], dict[Key, None]]:
        """The nodes that the host runs when the device is done, and what they read of the device; none where that does not work."""
        handed = {
            key: None
            for node in self._behind
            for key in self._inputs[node]
            if key not in self._outside and key[0] not in self._behind and key[0] in self._after_work
        }
        if self._between or any(key in self.no_tensor for key in handed):
            return set(), {}
        return set(self._behind), handed

    def in_the_way(self) -> list[int]:
        """The nodes of the host because of which nothing runs behind: those that work for the device depends on, where there is such."""
        if not self._between:
            return self.unplaceable
        before = _with_ancestors(self._between, self._inputs, self._outside)
        return [node for node in self.unplaceable if node in before]


def _with_ancestors(
    roots: list[int], inputs: Mapping[int, list[Key]], outside: set[Key], not_these: Set[int] = frozenset()
) -> set[int]:
    """Nodes and what they need; the walk stops at values from outside and in front of some nodes."""
    found, stack = set(roots), list(roots)
    while stack:
        for key in inputs[stack.pop()]:
            if key not in outside and key[0] not in found and key[0] not in not_these:
                found.add(key[0])
                stack.append(key[0])
    return found


def _dtype(flat: FlatGraph, key: Key) -> str | None:
    attrs = flat.graph.attrs[key[0]]
    found = schema.output_dtype(flat.graph.ops[key[0]], attrs, key[1]) or attrs.get("dtype")
    return found if isinstance(found, str) else None


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
    return found + [name for node in partition.device for name in partition.inside.of(node).writes()]


def by_op(flat: FlatGraph, nodes: tuple[int, ...]) -> dict[str, list[str]]:
    """Names of nodes by their ops."""
    result: dict[str, list[str]] = {}
    for node in nodes:
        result.setdefault(flat.graph.ops[node], []).append(flat.graph.names[node])
    return result


def missing_by_op(flat: FlatGraph, partition: Partition) -> dict[str, list[str]]:
    """What has no lowering; for a loop, a cond or a call what is missing inside of it."""
    result: dict[str, list[str]] = {}
    on_host = {*partition.host, *partition.post_nodes}
    for node in partition.missing:
        name, op = flat.graph.names[node], flat.graph.ops[node]
        if node in on_host and _draws(flat, partition.inside, node):
            op = f"{op} on the host"
        for within, names in (partition.inside.of(node).missing or {op: [name]}).items():
            result.setdefault(within, []).extend(names)
    return result


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
            fix="use --engine tensorflow, or name the tensors to compute with --outputs",
        )
    lines = []
    if partition.missing:
        lines += ["it has no lowering for:", *_lines(missing_by_op(flat, partition))]
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
            fix="use --engine tensorflow, or cut the model with --inputs and --outputs so that these nodes are outside",
        )


def _lines(nodes: Mapping[str, list[str]]) -> list[str]:
    return [
        f"  {op}: {len(names)} node{'s' if len(names) > 1 else ''}, such as {names[0]}"
        for op, names in sorted(nodes.items())
    ]
