"""Flattening: a model becomes one graph, with the regions that stay on one stream.

Builds the flat view of a model.

Regions: nodes that must stay together on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import DisjointSets
from msplit.core.graph import CONTROL, FunctionRef, Graph, Ints
from msplit.errors import GraphError, LoadError
from msplit.flatten import control_flow
from msplit.flatten.calls import FunctionBody, acting, bodies, body_of, check_arity, find_calls, split
from msplit.flatten.flat import FlatGraph, Region, Tensor, host_nodes, stateful_nodes
from msplit.flatten.inline import Inlined, inline
from msplit.formats.model import Model
from msplit.opset import schema
from msplit.opset.traits import ops_with

_VARIABLES = ops_with("reference variable") | ops_with("temporary variable")


def find_regions(graph: Graph) -> tuple[Ints, tuple[Region, ...]]:
    """The regions of a graph: v1 loops, v1 conds, and the readers and writers of one ref variable.

    Regions that share a node are one region: its kind and name are those of the outermost, a variable's only where there is no
    loop or cond in it. The graph is a DAG: back edges are cut.

    Returns:
        Per node the index of its region or -1, and the regions, ordered by their first node.
    """
    loop = control_flow.frames(graph)
    cond = control_flow.conds(graph, loop.outermost)
    candidates = [Region("cond", name) for name in cond.names]
    first_loop = len(candidates)
    candidates += [Region("loop", name) for name in loop.names]
    members = [*_members(cond.outermost, 0), *_members(loop.outermost, first_loop)]
    for variable, touched in _variables(graph):
        members += [(node, len(candidates)) for node in touched]
        candidates.append(Region("variable", variable))
    return _union(len(graph), members, candidates)


def _members(region: Ints, first: int) -> Iterable[tuple[int, int]]:
    nodes = np.flatnonzero(region >= 0)
    return zip(nodes.tolist(), (region[nodes] + first).tolist(), strict=True)


def _variables(graph: Graph) -> Iterable[tuple[str, list[int]]]:
    """Ref variables with what reads and writes them, through ops that hand the reference on."""
    if not _VARIABLES & set(graph.ops):
        return
    edges = graph.edges
    for variable, op in enumerate(graph.ops):
        if op not in _VARIABLES:
            continue
        touched = {variable: None}
        stack = [variable]
        while stack:
            node = stack.pop()
            dtypes = schema.output_dtypes(graph.ops[node], graph.attrs[node]) or ()
            for edge in graph.out_edges(node).tolist():
                port = int(edges.port[edge])
                consumer = int(edges.dst[edge])
                is_ref = port != CONTROL and port < len(dtypes) and (dtypes[port] or "").endswith("_ref")
                if is_ref and consumer not in touched:
                    touched[consumer] = None
                    stack.append(consumer)
        if len(touched) > 1:
            yield graph.names[variable], list(touched)


def _union(count: int, members: list[tuple[int, int]], candidates: list[Region]) -> tuple[Ints, tuple[Region, ...]]:
    """Joins candidates that share a node. The first candidate of a joined region gives it its kind and name."""
    joined = DisjointSets(len(candidates))
    owner: dict[int, int] = {}
    for node, region in members:
        joined.join(owner.setdefault(node, region), region)
    result = np.full(count, -1, np.int32)
    number: dict[int, int] = {}
    regions: list[Region] = []
    for node in sorted(owner):
        chosen = joined.find(owner[node])
        if chosen not in number:
            number[chosen] = len(regions)
            regions.append(candidates[chosen])
        result[node] = number[chosen]
    return result, tuple(regions)


def flatten(model: Model) -> FlatGraph:
    """The flat view of a model: what its outputs and targets need, calls inlined, back edges of v1 loops cut.

    What is fed stays, needed or not, and nothing in front of a fed tensor is needed for it. A model without outputs and targets
    keeps all its nodes.

    Raises:
        LoadError: Functions call themselves, are nested too deep, or inlining would make too many nodes.
        GraphError: There is a cycle that is no while loop, or a call does not fit the function it calls.
    """
    graph = model.graph
    index = graph.index
    outputs = [(index[output.node], output.port) for output in model.outputs]
    inputs = [(index[fed.node], fed.port) for fed in model.inputs]
    targets = [index[target] for target in model.targets]
    fetched = [*outputs, *((target, CONTROL) for target in targets)]
    edges = control_flow.without_inputs(graph.edges, control_flow.fed_entirely(graph, inputs, fetched), len(graph))
    if edges is not graph.edges:
        graph = replace(graph, edges=edges)
    if outputs or targets:
        keep = graph.ancestors([*(node for node, _ in outputs), *targets, *(node for node, _ in inputs)])
    else:
        keep = np.ones(len(graph), np.bool_)
    calls = {node: called for node, called in find_calls(graph, graph.functions).items() if keep[node]}
    if calls:
        return _with_calls(model, graph, keep, calls, inputs, outputs, targets)
    nodes = np.flatnonzero(keep).astype(np.int32)
    cut, number = graph, nodes
    if len(nodes) < len(graph):
        attrs = control_flow.PickedAttrs([graph.attrs], np.zeros(len(nodes), np.int32), nodes)
        cut, number = _cut(graph, keep, nodes, attrs)
    return _finish(
        model,
        cut,
        (np.full(len(nodes), -1, np.int32), nodes, ()),
        _tensors([end.name for end in model.inputs], inputs, number),
        _tensors([end.name for end in model.outputs], outputs, number),
        [int(number[target]) for target in targets],
    )


def _cut(graph: Graph, keep: NDArray[np.bool_], nodes: Ints, attrs: control_flow.PickedAttrs) -> tuple[Graph, Ints]:
    """The graph of some nodes, given as a mask and as numbers, with their attributes; and per old node its new number, or -1."""
    edges, number = control_flow.restricted(graph.edges, keep)
    picked = nodes.tolist()
    names, ops, devices = ([column[node] for node in picked] for column in (graph.names, graph.ops, graph.devices))
    return Graph(names, ops, devices, attrs, edges, graph.functions), number


def _tensors(names: Sequence[str], ends: Sequence[tuple[int, int]], number: Ints) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, int(number[node]), port) for name, (node, port) in zip(names, ends, strict=True))


def _with_calls(
    model: Model,
    graph: Graph,
    keep: NDArray[np.bool_],
    calls: Mapping[int, FunctionRef],
    inputs: list[tuple[int, int]],
    outputs: list[tuple[int, int]],
    targets: list[int],
) -> FlatGraph:
    """The flat view of a graph that calls functions."""
    fed_calls = [graph.names[node] for node, _ in inputs if node in calls]
    if fed_calls:
        raise LoadError(
            f"{fed_calls[0]} is a function call and can not be fed",
            where=str(model.source),
            fix="feed a placeholder instead",
        )
    # A call without results can be fetched to be run, as a train step is.
    run = [at for at in outputs if at[1] == 0 and at[0] in calls and not graph.functions[calls[at[0]].name].results]
    missing = [
        f"the output {graph.names[node]}:{port} does not exist: {calls[node].name} has fewer results"
        for node, port in outputs
        if node in calls and (node, port) not in run and port >= len(graph.functions[calls[node].name].results)
    ]
    if missing:
        raise GraphError(missing, where=str(model.source))
    no_parameters = np.full(len(graph), -1, np.int32)
    results = [(node, CONTROL if (node, port) in run else port) for node, port in outputs]
    root = split(graph, keep, no_parameters, calls, results, [*targets, *(node for node, _ in run)], ())
    named_in = [(end.name, *at) for end, at in zip(model.inputs, inputs, strict=True)]
    return _from_inlined(model, root, named_in, [output.name for output in model.outputs], None)


def body(model: Model, function_name: str) -> FlatGraph:
    """The flat view of one function of a model's library, for a look into the body of a `While` or an `If`.

    Its parameters are nodes of op ``_Arg`` and its inputs; they come from no node of the file (their `origin_node` is -1).

    Raises:
        LoadError: There is no such function, or as `flatten`.
        GraphError: As `flatten`.
    """
    functions = model.graph.functions
    if function_name not in functions:
        raise LoadError(
            f"there is no function {function_name}",
            where=str(model.source),
            fix=f"name one of the {len(functions)} functions of the model",
        )
    function = functions[function_name]
    active = acting([function_name], functions)
    own = body_of(function, functions, active)
    graph = function.body
    keep = own.place >= 0
    keep[list(own.calls)] = True
    keep[[parameter.node for parameter in function.parameters]] = True
    effects = [int(own.ordinary[place]) for place in own.effects]
    effects += [node for node, called in own.calls.items() if called.name in active.effects]
    targets = sorted({*effects, *function.control_results})
    no_parameters = np.full(len(graph), -1, np.int32)
    root = split(graph, keep, no_parameters, own.calls, own.results, targets, ())
    named_in = [(parameter.name, parameter.node, parameter.port) for parameter in function.parameters]
    return _from_inlined(model, root, named_in, [result.name for result in function.results], function_name)


def _from_inlined(
    model: Model, root: FunctionBody, inputs: Sequence[tuple[str, int, int]], outputs: Sequence[str], inside: str | None
) -> FlatGraph:
    """Inlines the calls of a body and keeps what is needed of the result.

    Args:
        model: Where it comes from.
        root: The body; its results are the outputs, its finals the targets.
        inputs: (name, node, port) of what is fed.
        outputs: Names of the results.
        inside: The function whose body it is, None for the top-level graph.
    """
    functions = model.graph.functions
    where = str(model.source)
    found = bodies(root, functions, where)
    for called in (root, *found.values()):
        check_arity(called, functions, where)
    flat = inline(root, found, functions)
    graph = Graph(flat.names, flat.ops, flat.devices, flat.attrs, flat.edges, functions)
    fed = [(int(root.place[node]), port) for _, node, port in inputs]
    wanted = [*(node for node, _ in flat.results), *flat.finals, *(node for node, _ in fed), *flat.effects]
    keep = graph.ancestors(wanted) if flat.results or flat.finals else np.ones(len(graph), np.bool_)
    nodes = np.flatnonzero(keep).astype(np.int32)
    cut, number = _cut(graph, keep, nodes, flat.attrs.picked(nodes))
    # What has to run but leads to nothing that is fetched is a target of its own.
    reached = graph.ancestors([*(node for node, _ in flat.results), *flat.finals])
    targets = [*flat.finals, *(effect for effect in flat.effects if not reached[effect])]
    return _finish(
        model,
        cut,
        _origins(model, flat, nodes, inside),
        _tensors([name for name, _, _ in inputs], fed, number),
        _tensors(outputs, flat.results, number),
        dict.fromkeys(int(number[target]) for target in targets),
    )


_Origins = tuple[Ints, Ints, Sequence[str]]
"""Origins of nodes; see `origin_function`, `origin_node` and `function_names` of `FlatGraph`."""


def _origins(model: Model, flat: Inlined, nodes: Ints, inside: str | None) -> _Origins:
    """Origins of the kept nodes."""
    names = list(flat.functions)
    owner = flat.function[nodes]
    if inside is not None:
        if inside not in names:
            names.append(inside)
        owner = np.where(owner < 0, names.index(inside), owner).astype(np.int32)
    parameters = np.array([len(model.graph.functions[name].parameters) for name in names] + [0], np.int32)
    origin = np.maximum(flat.node[nodes] - parameters[owner], -1).astype(np.int32)
    return owner, origin, tuple(names)


def _finish(
    model: Model,
    graph: Graph,
    origins: _Origins,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    targets: Iterable[int],
) -> FlatGraph:
    """Cuts back edges, and finds regions and placement."""
    forward, back = control_flow.cut_back_edges(graph)
    if len(back):
        graph = replace(graph, edges=forward)
    control_flow.check_acyclic(graph, str(model.path))
    origin_function, origin_node, function_names = origins
    region, regions = find_regions(graph)
    return FlatGraph(
        model=model,
        graph=graph,
        back_edges=back,
        origin_function=origin_function,
        origin_node=origin_node,
        function_names=function_names,
        region=region,
        regions=regions,
        host=host_nodes(graph),
        stateful=stateful_nodes(graph),
        inputs=inputs,
        outputs=outputs,
        targets=tuple(targets),
    )
