"""Inlines calls: one graph in which every node stands once per place that it runs from.

Ordering is kept as TensorFlow's own inliner keeps it: what a body starts with waits for the control inputs of its call, and what
waits for the call waits for the body's results, control results and stateful nodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, Edges, Function, Ints
from msplit.flatten.calls import FunctionBody
from msplit.flatten.control_flow import CalledAttrs, PickedAttrs

Source = tuple[int, int]
"""A flat node and its output port."""


@dataclass(frozen=True, eq=False)
class Inlined:
    """A graph without calls, and where its nodes come from.

    Attributes:
        devices: A body's node without one has its call's.
        function: Per node the index in `functions` of the function it comes from, -1 for the root graph.
        node: Per node its number in that function's body or in the root graph. Nodes that inlining adds, and those of gradients, which
            no file has, have their call's.
        results: What the root's results became.
        finals: What has to run for the root's finals to have run.
        effects: Nodes inside functions that have to run even where nobody uses what they give.
    """

    names: list[str]
    ops: list[str]
    devices: list[str]
    attrs: PickedAttrs
    edges: Edges
    function: Ints
    node: Ints
    functions: Sequence[str]
    results: tuple[Source, ...]
    finals: tuple[int, ...]
    effects: tuple[int, ...]


@dataclass(eq=False)
class _Instance:
    """One place where a body stands.

    Attributes:
        function: Index of its function's name, -1 for the root and for a gradient.
        parent: The instance that holds the call, None for the root.
        call: The call's node in the parent's body.
        prefix: What stands in front of its nodes' names.
        device: Device of nodes that ask for none.
        base: Flat number of its first ordinary node.
        joined: Whether something waits for it.
    """

    body: FunctionBody
    function: int
    parent: _Instance | None
    call: int
    prefix: str
    device: str
    base: int
    joined: bool
    children: dict[int, _Instance] = field(default_factory=dict)
    arguments: list[Source] = field(default_factory=list)
    results: list[Source] = field(default_factory=list)
    done: int = -1
    before: int | None = None


class _Inliner:
    def __init__(
        self, root: FunctionBody, bodies: Mapping[str, FunctionBody], functions: Mapping[str, Function]
    ) -> None:
        self.root = root
        self.bodies = bodies
        self.functions = functions
        self.function_index: dict[str, int] = {}
        self.of_file = frozenset(functions)
        self.instances: list[_Instance] = []
        self.sources: list[Sequence[Mapping[str, Any]]] = []  # of attributes, one per instance
        self.count = 0
        # Nodes that inlining adds: name, op, attributes, instance of the call.
        self.added: list[tuple[str, str, Mapping[str, Any], _Instance]] = []
        self.edges = array("i")  # src, port, dst and slot of one after the other
        self.passed_through: list[tuple[int, _Instance, int]] = []
        self.empty: list[_Instance] = []

    def run(self) -> Inlined:
        self._place_bodies()
        for instance in reversed(self.instances):
            self._resolve_results(instance)
        for instance in self.instances:
            self._resolve_arguments(instance)
            self._connect(instance)
        self._connect_added()
        return self._assemble()

    def _place_bodies(self) -> None:
        """Gives every ordinary node of every instance its number; callers come before what they call."""
        self.sources.append(self.root.graph.attrs)
        self.instances.append(_Instance(self.root, -1, None, -1, "", "", 0, False))
        self.count = len(self.root.ordinary)
        for instance in self.instances:  # grows while it is walked
            body = instance.body
            waited_for = _waited_for(body, instance)
            for call, called in body.calls.items():
                name = called.name
                target = self.bodies[name]
                prefix = f"{instance.prefix}{body.graph.names[call]}/"
                arguments = {key: value for key, value in called.attrs.items() if not key.startswith("_")}
                self.sources.append(CalledAttrs(target.graph.attrs, target.graph.index, prefix, arguments))
                child = _Instance(
                    target,
                    self.function_index.setdefault(name, len(self.function_index)) if name in self.of_file else -1,
                    instance,
                    call,
                    prefix,
                    body.graph.devices[call] or instance.device,
                    self.count,
                    call in waited_for,
                )
                self.count += len(target.ordinary)
                instance.children[call] = child
                self.instances.append(child)

    def _resolve_results(self, instance: _Instance) -> None:
        """Finds what gives each result and what stands for the end of an instance; what it calls is resolved already."""
        body = instance.body
        for node, port in body.results:
            parameter = int(body.parameter[node])
            if port == CONTROL:
                instance.results.append((self._control_source(instance, node), 0))
                continue
            if parameter < 0 or instance.parent is None:
                instance.results.append(self._source(instance, node, port))
                continue
            # The result would run before the call's control inputs if it were bound straight to the caller's tensor.
            called = instance.parent.body.calls[instance.call].name
            argument = self.functions[called].parameters[parameter]
            added = self._add(instance, f"{argument.name}_through", "Identity", {"T": argument.dtype})
            self.passed_through.append((added, instance, parameter))
            instance.results.append((added, 0))
        if not instance.joined:
            return
        ends = [source for source, _ in instance.results]
        ends += [self._control_source(instance, node) for node in body.finals if body.parameter[node] < 0]
        ends = list(dict.fromkeys(ends))
        if len(ends) == 1:
            instance.done = ends[0]
            return
        instance.done = self._add(instance, "control_outputs", "NoOp", {})
        for end in ends:
            self._edge(end, CONTROL, instance.done, CONTROL)
        if not ends:
            self.empty.append(instance)

    def _resolve_arguments(self, instance: _Instance) -> None:
        """Finds what a call gives its body, and what the body waits for; callers are resolved already."""
        parent = instance.parent
        if parent is None:
            return
        graph = parent.body.graph
        waits: list[int] = []
        inside = False
        for edge in graph.in_edges(instance.call):
            source, port = int(graph.edges.src[edge]), int(graph.edges.port[edge])
            if port == CONTROL:
                inside = inside or parent.body.parameter[source] < 0
                waits.append(self._control_source(parent, source))
            else:
                instance.arguments.append(self._source(parent, source, port))
        if not inside and parent.before is not None:
            waits.append(parent.before)
        waits = list(dict.fromkeys(waits))
        if len(waits) > 1:
            instance.before = self._add(instance, "control_inputs", "NoOp", {})
            for wait in waits:
                self._edge(wait, CONTROL, instance.before, CONTROL)
        elif waits:
            instance.before = waits[0]

    def _connect(self, instance: _Instance) -> None:
        """Adds the edges into ordinary nodes from parameters, from calls and from what the call waits for."""
        body = instance.body
        foreign = body.foreign
        for source, port, place, slot in zip(
            foreign.src.tolist(), foreign.port.tolist(), foreign.dst.tolist(), foreign.slot.tolist(), strict=True
        ):
            if port == CONTROL:
                self._edge(self._control_source(instance, source), CONTROL, instance.base + place, CONTROL)
            else:
                self._edge(*self._source(instance, source, port), instance.base + place, slot)
        if instance.before is not None:
            for place in body.first:
                self._edge(instance.before, CONTROL, instance.base + place, CONTROL)

    def _connect_added(self) -> None:
        for node, instance, parameter in self.passed_through:
            self._edge(*instance.arguments[parameter], node, 0)
            if instance.before is not None:
                self._edge(instance.before, CONTROL, node, CONTROL)
        for instance in self.empty:
            # Nothing runs in it: whoever waits for it waits for what it would have waited for.
            waits = [source for source, _ in instance.arguments]
            if instance.before is not None:
                waits.append(instance.before)
            for wait in dict.fromkeys(waits):
                self._edge(wait, CONTROL, instance.done, CONTROL)

    def _source(self, instance: _Instance, node: int, port: int) -> Source:
        """The flat tensor that a tensor of an instance's body is."""
        place = int(instance.body.place[node])
        if place >= 0:
            return instance.base + place, port
        parameter = int(instance.body.parameter[node])
        return instance.arguments[parameter] if parameter >= 0 else instance.children[node].results[port]

    def _control_source(self, instance: _Instance, node: int) -> int:
        """The flat node to wait for in place of a node of an instance's body."""
        child = instance.children.get(node)
        return child.done if child is not None else self._source(instance, node, 0)[0]

    def _edge(self, src: int, port: int, dst: int, slot: int) -> None:
        self.edges.extend((src, port, dst, slot))

    def _add(self, instance: _Instance, name: str, op: str, attrs: Mapping[str, Any]) -> int:
        """Adds a node that stands for a part of a call."""
        self.added.append((f"{instance.prefix}{name}", op, attrs, instance))
        self.count += 1
        return self.count - 1

    def _assemble(self) -> Inlined:
        names: list[str] = []
        ops: list[str] = []
        devices: list[str] = []
        effects: list[int] = []
        # Nodes of the bodies, under the prefixes and on the devices of their calls.
        for instance in self.instances:
            body, graph, prefix = instance.body, instance.body.graph, instance.prefix
            picked = body.ordinary.tolist()
            names += [prefix + graph.names[n] for n in picked] if prefix else [graph.names[n] for n in picked]
            ops += [graph.ops[n] for n in picked]
            devices += [graph.devices[n] or instance.device for n in picked]
            if instance.parent is not None:
                effects += [instance.base + place for place in body.effects]
        # Nodes that inlining added; each belongs to the call that it was added for.
        attrs_of_added = []
        owner, call = [], []
        for name, op, attrs, instance in self.added:
            names.append(name)
            ops.append(op)
            devices.append(instance.device)
            attrs_of_added.append(attrs)
            function, node = _call_of(instance)
            owner.append(function)
            call.append(node)
        # Where each node came from: its own function and place, or the call of a gradient, whose body no file has.
        added = len(self.added)
        ordinary = [instance.body.ordinary for instance in self.instances]
        sizes = [len(nodes) for nodes in ordinary]
        origins = [(i.function, nodes) for i, nodes in zip(self.instances, ordinary, strict=True)]
        for place, instance in enumerate(self.instances):
            if instance.parent is not None and instance.function < 0:
                function, node = _call_of(instance)
                origins[place] = function, np.full(sizes[place], node, np.int32)
        functions = np.repeat([function for function, _ in origins], sizes)
        which = np.repeat(np.arange(len(sizes) + 1, dtype=np.int32), [*sizes, added])
        index = np.concatenate([*ordinary, np.arange(added, dtype=np.int32)])
        # Edges inside of the bodies, shifted to their new places, and those between them.
        inside = Edges.together([i.body.edges for i in self.instances], [i.base for i in self.instances])
        between = np.array(self.edges, np.int32).reshape(-1, 4).T
        columns = zip(between, (inside.src, inside.port, inside.dst, inside.slot), strict=True)
        root = self.instances[0]
        return Inlined(
            names=_unique(names),
            ops=ops,
            devices=devices,
            attrs=PickedAttrs([*self.sources, attrs_of_added], which, index),
            edges=Edges.of(*map(np.concatenate, columns)),
            function=np.concatenate([functions, owner]).astype(np.int32),
            node=np.concatenate([*(nodes for _, nodes in origins), call]).astype(np.int32),
            functions=list(self.function_index),
            results=tuple(root.results),
            finals=tuple(dict.fromkeys(self._control_source(root, final) for final in root.body.finals)),
            effects=tuple(effects),
        )


def inline(root: FunctionBody, bodies: Mapping[str, FunctionBody], functions: Mapping[str, Function]) -> Inlined:
    """Replaces every call by the body of what it calls, down to the last.

    Args:
        root: The graph to start from; its parameters, if it has any, must be ordinary nodes.
        bodies: Body of every function that is reached (see `msplit.flatten.calls.bodies`).
        functions: All of the library.
    """
    return _Inliner(root, bodies, functions).run()


def _call_of(instance: _Instance) -> tuple[int, int]:
    """The call of an instance that is in the file: its function and its number there. What is called in a gradient has the gradient's."""
    parent = instance.parent
    while parent is not None and parent.parent is not None and parent.function < 0:
        instance, parent = parent, parent.parent
    return (-1 if parent is None else parent.function), instance.call


def _waited_for(body: FunctionBody, instance: _Instance) -> set[int]:
    """Calls of a body whose end somebody waits for."""
    edges = body.graph.edges
    waited = set(edges.src[edges.port == CONTROL].tolist())
    if instance.joined or instance.parent is None:
        waited.update(body.finals)
    return waited


def _unique(names: list[str]) -> list[str]:
    """Gives a name that is taken a number: a call's body may hold a name that the caller holds too."""
    taken = set(names)
    if len(taken) == len(names):
        return names
    seen: set[str] = set()
    last: dict[str, int] = {}
    result = []
    for name in names:
        unique = name
        while unique in seen or (unique is not name and unique in taken):
            last[name] = last.get(name, 0) + 1
            unique = f"{name}_{last[name]}"
        seen.add(unique)
        result.append(unique)
    return result
