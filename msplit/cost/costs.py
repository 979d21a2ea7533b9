"""Costs of nodes, and the nodes that cost a step nothing on the GPU: those of the host, and those that are computed once.

Costs of the nodes of a flat graph, as arrays, and the overheads of a GPU that runs them.

Host nodes that the cuda engine runs on the device.

TensorFlow computes with integers in host memory: Less, AddV2 and many others on int32 have GPU kernels that launch nothing. The cuda engine
runs whatever it has a lowering for on the device, but for what strings, tables and parsing on the host need. Such a kernel takes its time
and has no stream of its own: it runs where what reads it runs, so the first kernel that needs it carries its time.

What is computed once: before the first step, and so costs a step nothing; or for all nodes that compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import Hashes, mixed
from msplit.core.graph import CONTROL, Edges, Floats, Graph, Ints
from msplit.opset import schema
from msplit.opset.traits import CONSTANTS, VARIABLES, ops_with
from msplit.shapes.result import Shapes

Mask = NDArray[np.bool_]

Overhead = Annotated[float, -1e9]
"""A time or rate that was measured. A difference of two measurements may come out below nothing."""

DEEP = 50
"""Kernels of the chains of `Constants.deep_us`."""


@dataclass(frozen=True)
class Constants:
    """Overheads of a GPU that replays a CUDA graph, µs. None: not measured.

    `schedule.machine` makes the simulator's GPU of them. `join_us`, `root_us`, `crossing_us`, `roots_us`, `spin_us` and `concurrency` are
    for people: they tell GPUs and drivers apart, and no prediction rests on them.

    Attributes:
        launch_us: From the start of a graph to that of its first kernel.
        node_us: A tiny kernel in a chain of such.
        wait_us: Half of what a fork into two and its join take beyond a chain: one crossing.
        join_us: Every further branch of a fork-join.
        root_us: Every further kernel that a graph begins with. The executor's graphs begin with one.
        issue_us: Between the starts of two kernels, when 16 chains run side by side.
        copy_bytes_per_us: Bytes that a large copy reads and writes.
        l2_bytes_per_us: Bytes that a copy within the L2 cache reads and writes.
        crossing_us: What a change of streams adds to a chain.
        fork_join_us: Number of branches -> what a fork, that many kernels and their join take beyond a chain.
        roots_us: Number of kernels that a graph begins with, side by side -> time beyond that of one.
        deep_us: Number of streams -> time of chains of `DEEP` tiny kernels, side by side.
        spin_us: Number of streams -> time of chains of 20 kernels of about 3 µs that use one SM and no memory, side by side.
        concurrency: ``"gemm+gather"`` and so on -> time of two chains of kernels side by side over that of the longer one alone: 1 is
            free company, 2 is nothing gained.
    """

    launch_us: Overhead | None = None
    node_us: Overhead | None = None
    wait_us: Overhead | None = None
    join_us: Overhead | None = None
    root_us: Overhead | None = None
    issue_us: Overhead | None = None
    copy_bytes_per_us: Overhead | None = None
    l2_bytes_per_us: Overhead | None = None
    crossing_us: Overhead | None = None
    fork_join_us: Mapping[int, Overhead] = field(default_factory=dict)
    roots_us: Mapping[int, Overhead] = field(default_factory=dict)
    deep_us: Mapping[int, Overhead] = field(default_factory=dict)
    spin_us: Mapping[int, Overhead] = field(default_factory=dict)
    concurrency: Mapping[str, Overhead] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Costs:
    """Per node of a flat graph.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes read and written in device memory.
        time_us: Time alone on the device, µs; 0 for nodes that launch no kernel (constants, identities, reshapes, views, host nodes) and
            for those whose work another one's kernel does.
        share: Share of the device that the node's kernel can fill, in (0, 1].
        out_bytes: Bytes of all outputs.
        known: Whether shapes were known; where not, a default was taken and `time_us` is a guess.
        gpu: Name of the data sheet, such as ``"h200"``.
        source: "static" or what the profile that the times come from says of itself.
        inside: Nodes whose work is part of another node's kernel, which carries its time, and views; None: none.
        constants: The device's own, measured; None where there is no profile.
        one_us: A whole step on one stream, by the device's clock, back to back; None: not measured.
        host_us: Time of host nodes that the cuda engine runs on the device all the same (arithmetic on integers, which TensorFlow does in
            host memory). No stream is theirs to choose: it is part of the `time_us` of the kernels that read them; None: none.
        carried_us: Per node the part of its `time_us` that is theirs; None: none.
    """

    flops: Floats
    bytes: Floats
    time_us: Floats
    share: Floats
    out_bytes: Floats
    known: Mask
    gpu: str
    source: str = "static"
    inside: Mask | None = None
    constants: Constants | None = None
    one_us: float | None = None
    host_us: Floats | None = None
    carried_us: Floats | None = None

    @property
    def own_us(self) -> Floats:
        """Time of each node's own kernel, host nodes that the device runs included."""
        if self.host_us is None or self.carried_us is None:
            return self.time_us
        return self.time_us - self.carried_us + self.host_us


_NO_TENSOR = frozenset({"string", "string_ref", "resource", "variant"})
_MANY = 64
"""Tensors of one argument that are looked at: a damaged file may claim millions."""


def on_device(graph: Graph, host: Mask) -> Mask:
    """Mask of the host nodes that the engine runs on the device, if they depend on inputs.

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
    within = replace(graph, edges=edges.where((edges.port != CONTROL) & host[edges.src] & host[edges.dst]))
    return host & ~within.ancestors(np.flatnonzero(host & ~runs).tolist())


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


_READS, _REF_READS = ops_with("reads by handle"), ops_with("reads by reference")


def prepared(
    graph: Graph,
    shapes: Shapes,
    stateful: Mask,
    given: Iterable[int] = (),
    back: Iterable[tuple[int, int]] = (),
) -> Mask:
    """Mask of the nodes that depend on constants, on variables that nothing assigns and on static shapes only.

    They are evaluated once, before the first step: such as the batch normalization of a Keras model, which is scales and offsets
    that are made of four variables each time.

    Args:
        graph: A DAG.
        shapes: Its shapes.
        stateful: Which nodes read or write state, or are random.
        given: Parameters of a function for which it is called with what is known before the first step.
        back: What a loop's next iteration takes from the last one, as (from, to). What a loop only counts is known before the first step,
            since it is unrolled there; what it makes of other things is not, even where it starts with a constant.
    """
    count = len(graph)
    edges = graph.edges
    data_inputs = np.bincount(edges.dst[edges.port != CONTROL], minlength=count)
    constant = graph.with_ops(CONSTANTS)
    fixed, reads = _fixed(graph)
    constant |= fixed
    constant[list(given)] = True
    varies = np.flatnonzero((stateful & ~fixed & ~reads) | ((data_inputs == 0) & ~constant))
    onward = edges.where((edges.port != CONTROL) & ~shapes.folded[edges.dst])
    if len(turns := np.array(list(back), np.int32).reshape(-1, 2)):
        port = np.zeros(len(turns), np.int32)
        onward = Edges.of(
            np.append(onward.src, turns[:, 0]),
            np.append(onward.port, port),
            np.append(onward.dst, turns[:, 1]),
            np.append(onward.slot, port),
        )
    return ~replace(graph, edges=onward).descendants(varies.tolist())


def _fixed(graph: Graph) -> tuple[Mask, Mask]:
    """Mask of the variables that nothing in the graph can change, and of the nodes that only read such a variable.

    A variable is one by its shared name, whatever nodes stand for it. What takes it and is not known to read only may change it.
    """
    fixed, reads = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    readers: dict[tuple[str, str], list[int]] = {}
    nodes: dict[tuple[str, str], list[int]] = {}
    changed: set[tuple[str, str]] = set()
    for node, op in enumerate(graph.ops):
        if op not in VARIABLES:
            continue
        attrs = graph.attrs[node]
        key = (str(attrs.get("container", "")), str(attrs.get("shared_name", "") or graph.names[node]))
        nodes.setdefault(key, []).append(node)
        waiting = [node]
        while waiting:
            for edge in graph.out_edges(waiting.pop()).tolist():
                target = int(graph.edges.dst[edge])
                if graph.edges.port[edge] == CONTROL:
                    continue
                kind = graph.ops[target]
                if kind == "Identity":
                    if op == "VarHandleOp":  # the handle again; of a reference it is the value
                        waiting.append(target)
                elif kind in (_READS if op == "VarHandleOp" else _REF_READS):
                    readers.setdefault(key, []).append(target)
                else:
                    changed.add(key)
    for key, found in nodes.items():
        if key not in changed:
            fixed[found] = True
            reads[readers.get(key, [])] = True
    return fixed, reads


def duplicates(graph: Graph, able: Mask) -> Ints:
    """Per node the first of the nodes that have the same op, attributes and inputs: itself, if there is none before it.

    TensorFlow's optimizer and msplit's engine run one of them for all. Only nodes that read the very same tensors are found, not those
    that read duplicates of each other.

    Args:
        graph: A DAG.
        able: Which nodes may be merged: those that launch kernels and have no state.
    """
    count = len(graph)
    same = np.arange(count, dtype=np.int32)
    edges = graph.edges
    data = edges.port != CONTROL
    reads = np.bincount(edges.dst[data], minlength=count) > 0
    candidates = np.flatnonzero(able & reads)
    if len(candidates) < 2:
        return same
    numbers: dict[str, int] = {}
    ops = np.fromiter((numbers.setdefault(op, len(numbers)) for op in graph.ops), np.int64, count)
    signature = _inputs(graph, data) + mixed(ops.astype(np.uint64))
    _, group, size = np.unique(signature[candidates], return_inverse=True, return_counts=True)
    first: dict[tuple[Any, ...], int] = {}
    for node in candidates[size[group.reshape(-1)] > 1].tolist():
        attrs = sorted((name, repr(value)) for name, value in graph.attrs[node].items() if not name.startswith("_"))
        key = (graph.ops[node], tuple(graph.inputs(node)), tuple(attrs))
        same[node] = first.setdefault(key, node)
    return same


def _inputs(graph: Graph, data: Mask) -> Hashes:
    """A number per node that is the same for the same data inputs, and rarely for others."""
    edges = graph.edges
    tensor = mixed(mixed(edges.src.astype(np.uint64)) + (edges.port + 1).astype(np.uint64))
    own = np.where(data, mixed(tensor + edges.slot.astype(np.uint64)), np.uint64(0))
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(own, dtype=np.uint64)))
    result: Hashes = np.diff(total[graph.in_start])
    return result
