"""Host nodes that the cuda engine runs on the device.

TensorFlow computes with integers in host memory: Less, AddV2 and many others on int32 have GPU kernels that launch nothing. The cuda engine
runs whatever it has a lowering for on the device, but for what strings, tables and parsing on the host need. Such a kernel takes its time
and has no stream of its own: it runs where what reads it runs, so the first kernel that needs it carries its time.
"""

from __future__ import annotations

import numpy as np

from msplit.core.graph import CONTROL, Floats, Graph, Ints
from msplit.cost.costs import Mask
from msplit.opset import schema

_NO_TENSOR = frozenset({"string", "string_ref", "resource", "variant"})
_MANY = 64
"""Tensors of one argument that are looked at: a damaged file may claim millions."""


def on_device(graph: Graph, host: Mask) -> Mask:
    """Which host nodes the engine runs on the device, if they depend on inputs.

    Args:
        graph: A DAG.
        host: The host's nodes, as TensorFlow places them.
    """
    nodes = np.flatnonzero(host)
    runs = np.zeros(len(graph), np.bool_)
    kinds: dict[int, bool] = {}
    for node, kind in zip(nodes.tolist(), graph.kind[nodes].tolist(), strict=True):
        if kind not in kinds:
            kinds[kind] = _runs(graph, node)
        runs[node] = kinds[kind]
    edges = graph.edges
    waiting = np.flatnonzero(host & ~runs).tolist()
    stays = host & ~runs
    starts = graph.in_start.tolist()
    sources, ports = edges.src.tolist(), edges.port.tolist()
    while waiting:
        node = waiting.pop()
        for edge in range(starts[node], starts[node + 1]):
            source = sources[edge]
            if ports[edge] != CONTROL and host[source] and not stays[source]:
                stays[source] = True
                waiting.append(source)
    return host & ~stays


def _runs(graph: Graph, node: int) -> bool:
    info = schema.lookup(graph.ops[node])
    if info is None or graph.ops[node] not in schema.lowered():
        return False
    attrs = info.filled(graph.attrs[node])
    found = (arg.dtypes(attrs, _MANY) or () for arg in (*info.inputs, *info.outputs))
    return not any(_NO_TENSOR.intersection(types) for types in found)


def carry(host_us: Floats, graph: Graph, launches: Mask) -> Floats:
    """Per node what it carries.

    The time of a host node flows to the kernels that need its result, over nodes that launch nothing, in equal parts where several do, so
    that the order of the file does not matter. What no kernel needs flows to those that it needs itself.

    Args:
        host_us: Time of the host nodes that the device runs, 0 elsewhere.
        graph: A DAG.
        launches: Nodes that carry.
    """
    carried, left = _flow(host_us, graph, launches, graph.topological, forward=True)
    if left.any():
        carried += _flow(left, graph, launches, graph.topological[::-1], forward=False)[0]
    return carried


def _flow(given: Floats, graph: Graph, launches: Mask, order: Ints, *, forward: bool) -> tuple[Floats, Floats]:
    """(what arrives at nodes that launch, what ends at others that nothing follows)."""
    edges = graph.edges
    data = np.flatnonzero(edges.port != CONTROL)
    one, other = (edges.src[data], edges.dst[data]) if forward else (edges.dst[data], edges.src[data])
    by_node = np.argsort(one, kind="stable")
    starts = np.searchsorted(one[by_node], np.arange(len(graph) + 1)).tolist()
    following, stops = other[by_node].tolist(), launches.tolist()
    flow, left = given.tolist(), [0.0] * len(graph)
    for node in order.tolist():
        if stops[node] or not flow[node]:
            continue
        first, end = starts[node], starts[node + 1]
        for place in range(first, end):
            flow[following[place]] += flow[node] / (end - first)
        if first == end:
            left[node] = flow[node]
        flow[node] = 0.0
    return np.asarray(flow), np.asarray(left)
