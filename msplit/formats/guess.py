"""Guesses the inputs and outputs of a graph, where nothing in the file says so.

An output is something that TensorFlow can fetch and that somebody would want: nothing consumes it, it is not inside of a loop or of
one branch of a cond, it is no handle, and none of what training, assertions, summaries and loops leave over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from msplit.core.graph import CONTROL, FunctionRef, Graph, TensorValue
from msplit.formats.endpoints import Endpoints, behind, endpoint, endpoints_of, has_outputs
from msplit.formats.model import Endpoint, Model
from msplit.opset import schema, traits

MAX_PORTS = 128
"""Most outputs of one node that are taken for outputs of a graph: its attribute may claim millions."""

_SOURCES, _SAVERS = traits.ops_with("data source"), traits.ops_with("checkpoint")
_NOISE, _SUMMARIES, _LEFT_OVER = traits.ops_with("no result"), traits.ops_with("summary"), traits.ops_with("left over")
_NOT_FETCHED = traits.PLACEHOLDERS | traits.CONSTANTS | _NOISE | {"LoopCond"}
_ARRAY_VALUES, _FIRST_PORT_ONLY = traits.ops_with("array value"), traits.ops_with("first port counts")
_SAME, _FILE_NAMES = traits.ops_with("hands on"), traits.ops_with("hands on file names")
_GRADIENTS = re.compile(r"(^|/)gradients(_\d+)?/")
_GUARD = re.compile(r"(^|/)AssertGuard(_\d+)?/")
"""Name scopes of tf.gradients and of assertions. Nobody needs what is not used of them."""

_FILLS, _WAITS = traits.ops_with("fills a source"), traits.ops_with("waits")
_NO_WORK = traits.VARIABLES | traits.ops_with("silent") | traits.ops_with("free") | traits.ops_with("assigns")
_HARDLY = 10
"""An n-th of the nodes at most is hardly any."""

_RESULT = 2
_FEW = 8
"""Most of them that are followed: TensorFlow makes no long chains of them."""


def guessed(graph: Graph) -> Endpoints:
    """Endpoints of a graph that does not name any.

    Inputs are placeholders, without those that only name a checkpoint file for a saver, without those that nothing reads (freezing a
    loop leaves them behind), and without settings: scalars with a default (`is_training`, `keep_prob`), which TensorFlow takes where
    nobody feeds them, beside inputs that somebody has to feed. In place of placeholders that only fill queues, what the model takes from
    those is fed.

    Outputs are sinks (nodes that nothing consumes) which depend on an input, or on an iterator or a queue where there is no input; with
    neither, all sinks. Sinks without a tensor (train ops) are targets. Left out is what can not be fetched. Assertions, savers,
    initializers, summaries, what gradients leave over, and variables of a loop that only count its iterations or never change count as
    outputs only where there is nothing else.
    """
    # Inputs: placeholders that a caller has to feed. Each filter gives way where it would leave none.
    placeholders = [node for node, op in enumerate(graph.ops) if op in traits.PLACEHOLDERS]
    inputs = [node for node in placeholders if not _only_feeds_saver(graph, node)]
    inputs = [node for node in inputs if not _is_setting(graph, node) and len(graph.out_edges(node))] or inputs
    inputs, fed = _behind_queues(graph, inputs)
    origins = [*inputs, *{end.node: graph.index[end.node] for end in fed}.values()]
    origins = origins or [node for node, op in enumerate(graph.ops) if op in _SOURCES]
    # Sinks that depend on an input, each filter again only as far as it leaves some.
    sinks = _sinks(graph)
    if origins:
        reached = graph.descendants(origins)
        sinks = [node for node in sinks if reached[node]] or sinks
    sinks = [node for node in sinks if graph.ops[node] not in traits.PLACEHOLDERS] or sinks
    # Outputs: the tensors of those sinks that are results and can be fetched; targets: sinks without a tensor.
    conditional = _conditional(graph)
    found = [
        end
        for node in sinks
        if graph.ops[node] not in _NOISE and has_outputs(graph, node)
        for end in _shown(graph, node)
    ]
    sound = [end for end in found if graph.index[end.node] not in conditional and not _is_handle(end)]
    worth = [_worth(graph, end) for end in sound]
    outputs = [end for end, of in zip(sound, worth, strict=True) if of == _RESULT]
    targets = [node for node in sinks if origins and graph.ops[node] == "NoOp"]
    targets += [node for node in sinks if graph.ops[node] not in _NOISE and not has_outputs(graph, node)]
    targets = [node for node in targets if node not in conditional]
    # Without any, the best of what is left, or what comes before the sinks; without that, all sinks.
    if not outputs and not targets:
        best = max(worth, default=0)
        outputs = [end for end, of in zip(sound, worth, strict=True) if of == best] or _before(
            graph, sinks, conditional
        )
    if not outputs and not targets:
        outputs = [end for node in sinks if has_outputs(graph, node) for end in _shown(graph, node)]
        targets = [node for node in sinks if not has_outputs(graph, node)]
    taken = {(end.node, end.port) for end in outputs}
    return Endpoints(
        (*(endpoint(graph, node, 0) for node in inputs), *fed),
        tuple(outputs),
        tuple(graph.names[node] for node in sorted(targets)),
        tuple(end.name for end in found if (end.node, end.port) not in taken),
    )


def _behind_queues(graph: Graph, inputs: list[int]) -> tuple[list[int], list[Endpoint]]:
    """The placeholders without those that only put data into queues, stages or iterators that the rest of the graph reads; and, where
    there were such, what is taken from queues and stages: who puts it there is a program that is not in the file."""
    fills, sources = graph.with_ops(_FILLS), graph.with_ops(_SOURCES)
    if not inputs or not fills.any() or not sources.any():
        return inputs, []
    # What runs when a queue was filled reads nothing of it.
    beyond = replace(graph, edges=graph.edges.where(~fills[graph.edges.src]))
    needed = beyond.ancestors([node for node in _sinks(beyond) if not fills[node]])
    if not (needed & sources).any() or all(needed[node] for node in inputs):
        return inputs, []
    read = [node for node in np.flatnonzero(needed & graph.with_ops(_WAITS)).tolist() if graph.ops[node] in _SOURCES]
    ports = {node: {int(graph.edges.port[edge]) for edge in graph.out_edges(node)} - {CONTROL} for node in read}
    fed = [endpoint(graph, node, port) for node, found in ports.items() for port in sorted(found)]
    return [node for node in inputs if needed[node]], fed


_SHOWN = 3


def left_out_text(model: Model) -> str:
    """Sentence on what a guess did not take: most of the graph, or sinks; "" where nothing was guessed or left out."""
    names = model.left_out or ()
    if model.left_out is not None and (nodes := _mostly_left_out(model)):
        return (
            f"{nodes}, such as {', '.join(names[:_SHOWN])}; --part outputs= names others"
            if names
            else f"{nodes}; --part outputs= names them"
        )
    if not names:
        return ""
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"nothing reads {listed}, and {'they are' if len(names) > 1 else 'it is'} no output all the same: inside of a loop or a cond, a "
        "handle, or left over from training, logs or assertions; --part outputs= names others"
    )


def _mostly_left_out(model: Model) -> str:
    """A remark that the guessed outputs need hardly any of the nodes that may launch kernels; "" where they need enough of them."""
    graph = model.graph
    work = graph.with_ops(
        {op for op in set(graph.ops) if op not in _NO_WORK and (info := schema.lookup(op)) and info.gpu}
    )
    needed = graph.ancestors(
        [*(graph.index[end.node] for end in model.outputs), *map(graph.index.__getitem__, model.targets)]
    )
    count, kept = int(np.count_nonzero(work)), int(np.count_nonzero(work & needed))
    if count < _HARDLY or kept * _HARDLY > count or not (model.outputs or model.targets):
        return ""
    return f"the outputs that were guessed need {kept:,} of the {count:,} nodes that may launch kernels"


def _sinks(graph: Graph) -> list[int]:
    """Nodes that nothing consumes but summaries."""
    used = np.zeros(len(graph), np.bool_)
    used[graph.edges.src[~graph.with_ops(_SUMMARIES)[graph.edges.dst]]] = True
    found: list[int] = np.flatnonzero(~used).tolist()
    return found


def _shown(graph: Graph, node: int) -> list[Endpoint]:
    op = graph.ops[node]
    count = 1 if op in _FIRST_PORT_ONLY else schema.output_count(op, graph.attrs[node]) or 1
    return endpoints_of(graph, node, range(min(count, MAX_PORTS)))


def _is_handle(end: Endpoint) -> bool:
    """True if an endpoint has no value outside of TensorFlow."""
    return end.dtype.removesuffix("_ref") in ("resource", "variant")


def _before(graph: Graph, sinks: Sequence[int], conditional: frozenset[int]) -> list[Endpoint]:
    """Fetchable tensors on which sinks depend that can not be fetched, where only they read it."""
    inside = graph.ancestors(sinks)
    found = {
        node: ends
        for node in np.flatnonzero(inside).tolist()
        if node not in conditional and graph.ops[node] not in _NOT_FETCHED
        if (ends := [end for end in _shown(graph, node) if not _is_handle(end)]) and has_outputs(graph, node)
    }
    followed = graph.ancestors(int(source) for node in found for source in graph.predecessors(node))
    return [end for node, ends in found.items() if not followed[node] for end in ends]


def _conditional(graph: Graph) -> frozenset[int]:
    """Nodes that TensorFlow 1's control flow may run never or many times: in a loop, or on one side of a Switch."""
    ops = graph.ops
    roots = [node for node, op in enumerate(ops) if op in traits.ENTER or op in traits.SWITCH]
    if not roots:
        return frozenset()
    edges = graph.edges
    back = graph.with_ops(traits.NEXT)[edges.src] & graph.with_ops(traits.MERGE)[edges.dst]
    forward = replace(graph, edges=edges.where(~back))
    of_loop = set(edges.dst[back].tolist())
    # How many loops and sides of Switches the outputs of a node are in; 0 where it is left out.
    depth: dict[int, int] = {}
    order = forward.topological
    starts, sources = forward.in_start.tolist(), forward.edges.src.tolist()
    for node in order[forward.descendants(roots)[order]].tolist():
        op = ops[node]
        around = [depth.get(source, 0) for source in sources[starts[node] : starts[node + 1]]]
        inside = max(around, default=0)
        if op in traits.ENTER:
            inside += 1
        elif op in traits.EXIT:
            inside -= 1
        elif op in traits.MERGE and node not in of_loop:
            inside = min(around, default=0) - 1  # what joins branches of unequal depth ends with the outermost
        elif op in traits.SWITCH:
            inputs = forward.inputs(node)
            inside += len(inputs) < 2 or ops[inputs[1][0]] != "LoopCond"
        if inside > 0:
            depth[node] = inside
    return frozenset(depth)


def _worth(graph: Graph, end: Endpoint) -> int:
    """Higher for what somebody would rather have: a result; what training, logs or loops leave over; what assertions do."""
    node = graph.index[end.node]
    op = graph.ops[node]
    if _GUARD.search(end.node):
        return 0
    left_over = op in _LEFT_OVER or _GRADIENTS.search(end.node) is not None
    left_over = left_over or (op.startswith("TensorArray") and op not in _ARRAY_VALUES)
    return 1 if left_over or _is_counter(graph, *behind(graph, (node, end.port), _SAME, _FEW)) else _RESULT


def _is_counter(graph: Graph, node: int, port: int) -> bool:
    """True if a tensor is a loop variable that counts iterations, or that none changes."""
    if graph.ops[node] in traits.LOOPS:
        called = graph.attrs[node].get("body")
        body = graph.functions.get(called.name) if isinstance(called, FunctionRef) else None
        if body is None or port >= min(len(body.results), len(body.parameters)):
            return False
        result = body.results[port]
        return _is_step(body.body, (result.node, result.port), body.parameters[port].node)
    if graph.ops[node] not in traits.EXIT or not (switch := graph.inputs(node)):
        return False
    merge = next(iter(graph.inputs(switch[0][0])), (node, 0))[0]
    if graph.ops[merge] not in traits.MERGE:
        return False
    for source, _ in graph.inputs(merge)[:2]:
        if graph.ops[source] in traits.NEXT and (fed_back := graph.inputs(source)):
            return _is_step(graph, fed_back[0], switch[0][0])
    return False


def _is_step(graph: Graph, value: tuple[int, int], variable: int) -> bool:
    """True if a value is that of a loop variable, or a constant more."""
    node, port = behind(graph, value, _SAME, _FEW)
    if node == variable:
        return True
    if graph.ops[node] not in traits.ADD or port:
        return False
    sides = [behind(graph, side, _SAME, _FEW)[0] for side in graph.inputs(node)[:2]]
    whole = graph.attrs[node].get("T") in ("int32", "int64")
    return whole and variable in sides and any(graph.ops[side] == "Const" for side in sides)


def _is_setting(graph: Graph, node: int) -> bool:
    """True if a placeholder is a scalar with a constant default."""
    if graph.ops[node] != "PlaceholderWithDefault" or not (sources := graph.inputs(node)):
        return False
    value = graph.attrs[sources[0][0]].get("value")
    return graph.ops[sources[0][0]] == "Const" and isinstance(value, TensorValue) and value.shape == ()


def _only_feeds_saver(graph: Graph, node: int) -> bool:
    """True if a placeholder is the file name of a saver: a string that comes to a save or restore op within a few steps."""
    if graph.attrs[node].get("dtype") != "string":
        return False
    frontier: Iterable[int] = [node]
    for _ in range(4):
        following: list[int] = []
        for producer in frontier:
            edges = graph.out_edges(producer)
            following += [int(graph.edges.dst[e]) for e in edges.tolist() if graph.edges.port[e] != CONTROL]
        if any(graph.ops[consumer] in _SAVERS for consumer in following):
            return True
        frontier = dict.fromkeys(consumer for consumer in following if graph.ops[consumer] in _FILE_NAMES)
    return False
