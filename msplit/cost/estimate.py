"""Static costs: what each node takes on a GPU's data sheet, without running anything.

A node's kernel takes what its operations, its bytes, its grid and its waiting make it take (`timing`); the number of blocks follows from
the kind of op (64 x 64 tiles of a product, 1024 elements of a pointwise kernel, 2048 inputs of a reduction). The share of the device
that it fills is blocks / SMs, at most 1, in the time behind its launch: while a kernel is being launched, others have the device.

Kernels are taken as msplit's cuda engine launches them on one stream, without larger kernels: one per node, but

- none for what is fused into another node's kernel (`fused_into`: bias, batch norm and activation of a product or convolution, as in
  TensorFlow's own optimizer); `Costs.inside` says which nodes these are,
- none for views (`traits.VIEWS`), which stock TensorFlow copies, and one for a reshape behind a transposition,
- one for all nodes that compute the same (`duplicates`), each of which carries its part of the time.

What depends on constants, on variables that nothing assigns and on static shapes only costs nothing: it is computed once, before the
first step (see `precomputed`). So does what a loop counts. What a loop holds, of TensorFlow 1 or a function of a `While`, costs its trips,
where these follow from constants; what XLA would compile costs what its kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from msplit.core.graph import Floats, Graph, Ints
from msplit.cost.costs import Costs, Mask, carry, duplicates, on_device, prepared
from msplit.cost.formulas import FORMULAS, Case, NodeWork, work
from msplit.cost.fused_into import Tensors, find_fused_nodes, tensors_of
from msplit.cost.gpus import ACCESS, BROADCAST, DEFAULT_GPU, REACHED, Gpu, data_sheet, halvings, kernel_times
from msplit.flatten.flat import FlatGraph, host_nodes, stateful_nodes
from msplit.opset.traits import RESHAPES, SELECT, VIEWS, ops_with, traits
from msplit.shapes.registry import Node, output_dtypes
from msplit.shapes.result import FUNCTIONAL, Shapes

_BRANCHES = ops_with("branch")

UNKNOWN_LAUNCHES = 2.0
"""Time of a node of unknown shape, in launches, if what is known of it does not ask for more."""

MOST_REPEATED = 1e30
"""FLOPs, bytes or µs of a loop that are believed: loops inside loops inside loops could be more than a number holds."""

UNKNOWN_SHARE = 0.25
"""Share of the device of a node of unknown shape."""


def estimate(flat: FlatGraph, shapes: Shapes, gpu: str = DEFAULT_GPU) -> Costs:
    """Estimates the cost of every node.

    Args:
        flat: The graph.
        shapes: Its shapes.
        gpu: Name of a data sheet, such as ``"h200"``.

    Returns:
        Costs. Where a shape is not known, or the trip count of a loop, `known` is False: unknown sizes count as 1, a loop's body
        as one iteration, a branch as its costlier side, and no such kernel takes less than two launches.

    Raises:
        MsplitError: There is no such data sheet.
    """
    fetched = np.zeros(len(flat), dtype=np.bool_)
    fetched[[tensor.node for tensor in flat.outputs]] = True
    back = zip(flat.back_edges.src.tolist(), flat.back_edges.dst.tolist(), strict=True)
    constant = prepared(flat.graph, shapes, flat.stateful, back=back)
    return _estimate(shapes, data_sheet(gpu), flat.host, flat.stateful, constant, fetched, {})


def _estimate(
    shapes: Shapes, sheet: Gpu, host: Mask, stateful: Mask, constant: Mask, fetched: Mask, done: _Done
) -> Costs:
    """As `estimate`. A body that stands in several places is the same object in all of them: `done` holds those that are priced."""
    graph = shapes.graph
    count = len(graph)
    if not count:
        empty = np.zeros(0)
        return Costs(empty, empty, empty, empty, empty, np.zeros(0, np.bool_), sheet.name)
    tensors = tensors_of(shapes)
    classes = _Classes(graph)
    moved = on_device(graph, host)
    host = host & ~moved
    launches = (~classes.free | classes.copies) & ~host & ~constant
    out_bytes = tensors.per_node(tensors.nbytes)
    asked = _asked(graph, shapes, tensors, classes, launches, out_bytes, sheet)
    nbytes = asked.nbytes
    same = duplicates(graph, launches & ~stateful)
    fused = find_fused_nodes(shapes, tensors, launches, constant, fetched, same)
    for carrier, added in fused.sums:
        nbytes[carrier] += out_bytes[added]
    behind = [node for _, node in fused.behind]
    nothing_moved = fused.inside.copy()
    nothing_moved[behind] = False
    nbytes[nothing_moved] = 0.0
    grid = np.clip(np.ceil(asked.blocks) / sheet.sms, 1 / sheet.sms, 1.0)
    time = kernel_times(
        sheet,
        peak=_peaks(tensors.dtypes, tensors.dtype, asked.product, sheet)
        * np.where(asked.product, REACHED, 1.0)
        * asked.fill,
        flops=asked.flops,
        nbytes=nbytes,
        share=grid,
        waiting=np.where(
            asked.setup > 0, asked.setup, (ACCESS + BROADCAST * asked.singly) * np.minimum(asked.blocks, 1.0)
        ),
        chain=asked.chain,
        launches=asked.launches,
    )
    share = np.clip(grid * (1 - sheet.launch_us * asked.launches / time), 1 / sheet.sms, 1.0)
    runs = launches & ~fused.inside
    # Which of those that compute the same runs is not said: each carries its part.
    alike = np.bincount(same, minlength=count)[same]
    nbytes, time = nbytes / alike, time / alike
    known = ~launches | _known(tensors)
    if shapes.runs is not None:
        known &= ~launches | ~np.isnan(shapes.runs)
    guessed = launches & ~known
    time = np.where(guessed, np.maximum(time, UNKNOWN_LAUNCHES * sheet.launch_us), time)
    share = np.where(guessed, np.maximum(share, UNKNOWN_SHARE), share)
    carrying = np.zeros(count)
    for carrier, node in fused.behind:
        carrying[carrier] += time[node]
        nbytes[carrier] += nbytes[node]
    nbytes[behind] = 0.0
    time = np.where(runs, time + carrying, 0.0)
    host_us = np.where(moved, time, 0.0)
    time = np.where(moved, 0.0, time)
    carried_us = carry(host_us, graph, time > 0) if host_us.any() else host_us
    time = time + carried_us
    costs = Costs(
        flops=asked.flops,
        bytes=nbytes,
        time_us=time,
        share=np.where(runs, share, 1 / sheet.sms),
        out_bytes=out_bytes,
        known=known,
        gpu=sheet.name,
        inside=fused.inside | (classes.views & ~host & ~constant),
        host_us=host_us,
        carried_us=carried_us,
    )
    return _repeated(_with_bodies(costs, shapes, sheet, host | constant, constant, done), shapes.runs)


@dataclass(frozen=True, eq=False)
class _Asked:
    """Per node what it asks of the device, as `NodeWork` has it for one; beside that the bytes read and written together.

    `singly` says whether it reads and writes single elements.
    """

    flops: Floats
    blocks: Floats
    product: Mask
    setup: Floats
    chain: Floats
    launches: Floats
    nbytes: Floats
    fill: Floats
    singly: Mask


def _asked(
    graph: Graph, shapes: Shapes, tensors: Tensors, classes: _Classes, launches: Mask, out_bytes: Floats, sheet: Gpu
) -> _Asked:
    """By what kind of kernel a node is, or by the formula of its op."""
    count = len(graph)
    in_bytes = tensors.into(tensors.nbytes)
    out_elements = tensors.per_node(tensors.elements)
    in_elements = tensors.into(tensors.elements)
    is_floating = tensors.floating.astype(np.float64)
    floating = (tensors.into(is_floating) + tensors.per_node(is_floating)) > 0
    # What a gather or a cut takes from: its first input, or the second of Split, whose axis is the first and tiny.
    first_bytes = np.zeros(count)
    first = tensors.slot <= 1
    np.maximum.at(first_bytes, tensors.user[first], tensors.nbytes[tensors.used[first]])
    silent = np.diff(tensors.start) == 0
    base = np.where(classes.reduces | silent, in_elements, out_elements)
    flops = np.where(floating, base * classes.per_element, 0.0)
    read = np.where(classes.makes, 0.0, in_bytes)
    read = np.where(
        classes.cuts,
        in_bytes - first_bytes + np.minimum(out_bytes, np.where(first_bytes > 0, first_bytes, np.inf)),
        read,
    )
    # An update of a variable reads and writes it, and its slots; those behind handles are as large as what comes in.
    written = np.where(silent, 2 * in_bytes, out_bytes)
    blocks = np.where(classes.reduces, in_elements / 2048, np.where(silent, in_elements, out_elements) / 1024)
    setup, kernels, fill = np.zeros(count), np.ones(count), np.ones(count)
    chain = np.where(classes.reduces, halvings(in_elements / np.maximum(out_elements, 1.0)), 0.0)
    product = np.zeros(count, dtype=np.bool_)
    for node in np.flatnonzero(launches & classes.formula).tolist():
        found = _work(graph, shapes, tensors, node, sheet)
        if found is not None:
            flops[node], blocks[node], product[node] = found.flops, found.blocks, found.product
            setup[node], chain[node], kernels[node], fill[node] = found.setup, found.chain, found.launches, found.fill
            if found.read is not None:
                read[node] = found.read
    # Nonsense in attributes (windows of -1) must not make negative work.
    nbytes = np.where(launches, np.maximum(read + written, 0.0), 0.0)
    flops = np.where(launches, np.maximum(flops, 0.0), 0.0)
    # The operand that is smaller than the result is read again and again.
    least = np.full(count, np.inf)
    np.minimum.at(least, tensors.user, tensors.elements[tensors.used])
    singly = classes.elementwise & (least < out_elements)
    return _Asked(flops, blocks, product, setup, chain, kernels, nbytes, fill, singly)


MOST_PRICES = 8
"""Prices that a function has, by what is known at its calls: functions in each other could have one per path through them."""

_Done = dict[int, dict[tuple[frozenset[int], bool], tuple[Costs, Mask]]]


def _body(body: Shapes, given: frozenset[int], loops: bool, sheet: Gpu, done: _Done) -> tuple[Costs, Mask]:
    """Costs of the nodes of a function, and which of them are prepared.

    Args:
        body: The function.
        given: Its parameters that are prepared where it is called, by number.
        loops: Whether its results are its parameters in the next iteration.
        sheet: Prices them.
        done: Functions that are priced.
    """
    prices = done.setdefault(id(body), {})
    key = (given if len(prices) < MOST_PRICES or (given, loops) in prices else frozenset[int]()), loops
    found = prices.get(key)
    if found is None:
        graph = body.graph
        host, stateful = host_nodes(graph), stateful_nodes(graph)
        parameters = [node for number, node in enumerate(body.parameters) if number in key[0]]
        back = zip(body.results, body.parameters, strict=False) if loops else ()
        constant = prepared(graph, body, stateful, parameters, back)
        fetched = np.zeros(len(graph), np.bool_)
        found = prices[key] = _estimate(body, sheet, host, stateful, constant, fetched, done), constant
    return found


class _Classes:
    """Per node what kind of kernel it is."""

    def __init__(self, graph: Graph) -> None:
        numbers: dict[str, int] = {}
        which = np.fromiter((numbers.setdefault(op, len(numbers)) for op in graph.ops), np.int32, len(graph))

        def mask(names: frozenset[str]) -> Mask:
            return np.fromiter((op in names for op in numbers), np.bool_, len(numbers))[which]

        self.views = mask(VIEWS - RESHAPES)
        self.free = self.views | mask(ops_with("free"))
        reshapes, transposes, edges = mask(RESHAPES), mask(frozenset({"Transpose"})), graph.edges
        self.copies = np.zeros(len(graph), dtype=np.bool_)  # reshapes of what was transposed
        self.copies[edges.dst[transposes[edges.src] & reshapes[edges.dst] & (edges.slot == 0)]] = True
        self.reduces = mask(ops_with("reduces"))
        self.makes = mask(ops_with("makes"))
        moves, cuts = ops_with("moves"), ops_with("cuts")
        self.cuts = mask(cuts)
        self.formula = mask(frozenset(FORMULAS))
        self.elementwise = ~(self.free | self.reduces | self.makes | self.cuts | self.formula | mask(moves - SELECT))
        factors = [0.0 if op in moves or op in cuts else float(traits(op).flops) for op in numbers]
        self.per_element: Floats = np.array(factors, dtype=np.float64)[which]


def _work(graph: Graph, shapes: Shapes, tensors: Tensors, node: int, sheet: Gpu) -> NodeWork | None:
    sources = graph.inputs(node)
    inputs = [shapes.shape(source, port) for source, port in sources]
    sizes = [
        float(tensors.nbytes[tensors.start[source] + port]) if port < len(shapes.outputs[source]) else 0.0
        for source, port in sources
    ]
    view = Node(graph.ops[node], graph.attrs[node], inputs, [None] * len(inputs), [None] * len(inputs))
    return work(Case(view, shapes.outputs[node], sheet.sms, sizes))


def _peaks(names: list[str], which: Ints, product: Mask, sheet: Gpu) -> Floats:
    plain = np.array([sheet.flops_per_us(name or "float32") for name in names])
    tensor_cores = np.array([sheet.flops_per_us(name or "float32", True) for name in names])
    result: Floats = np.where(product, tensor_cores[which], plain[which])
    return result


def peaks(graph: Graph, sheet: Gpu) -> Floats:
    """Peak operations per µs of each node, by its type and by whether tensor cores run it."""
    names: dict[str, int] = {}
    first, of = graph.per_kind()
    given = [output_dtypes(graph.ops[node], graph.attrs[node], 1) for node in first.tolist()]
    numbers = [names.setdefault(types[0] if types else "", len(names)) for types in given]
    which = np.array(numbers, dtype=np.int32)[of]
    result = _peaks(list(names), which, graph.with_ops(ops_with("tensor cores")), sheet)
    # A loop or a branch holds kernels of many kinds: the fastest keeps the bound a bound.
    return np.where(graph.with_ops(FUNCTIONAL), max(sheet.tflops.values()) * 1e6, result)


def _known(tensors: Tensors) -> Mask:
    """Per node, whether the shapes of its inputs, of its first output and of the outputs that are used are known."""
    unknown = (~tensors.known).astype(np.float64)
    missing = tensors.into(unknown)
    read = np.zeros(len(unknown), dtype=np.bool_)
    read[tensors.used] = True
    first = tensors.start[:-1][np.diff(tensors.start) > 0]
    read[first] = True
    result: Mask = (missing + tensors.per_node(unknown * read)) == 0
    return result


def _with_bodies(costs: Costs, shapes: Shapes, sheet: Gpu, nothing: Mask, constant: Mask, done: _Done) -> Costs:
    """Puts the cost of their functions on `While` (all its trips, or one if there is no count), `If` (the costlier branch) and calls.

    Nodes in `nothing` cost nothing, those in `constant` are prepared.
    """
    if not shapes.bodies:
        return costs
    flops, nbytes, time, share = (array.copy() for array in (costs.flops, costs.bytes, costs.time_us, costs.share))
    known = costs.known.copy()
    for node, bodies in shapes.bodies.items():
        if nothing[node] or not bodies:
            continue
        # Parameters that are constant outside are constant in the body; those of a loop only where its body hands them on unchanged.
        op = shapes.graph.ops[node]
        first = 1 if op in _BRANCHES else 0
        sources = shapes.graph.inputs(node)[first:]
        given = frozenset(number for number, (source, _) in enumerate(sources) if constant[source])
        loops = "While" in op
        inner: list[Costs] = []
        for name, body in bodies.items():
            found, still = _body(body, given, loops and name == "body", sheet, done)
            inner.append(found)
            if loops and name == "body":
                # What the body changes is not known to the condition either.
                stays = still[list(body.parameters)]
                given = frozenset(number for number in given if number < len(stays) and stays[number])
        # A loop pays for all its functions in each trip, a branch for the costliest, a call for its one function.
        totals = np.array([[part.flops.sum(), part.bytes.sum(), part.time_us.sum()] for part in inner])
        chosen = totals.sum(axis=0) if loops else totals[np.argmax(totals[:, 2])]
        trips = shapes.trip_counts.get(node)
        # The condition is asked once more than the body runs; that once is left out.
        with np.errstate(over="ignore"):
            repeated = np.minimum(chosen * (1.0 if trips is None else float(trips)), MOST_REPEATED)
        flops[node], nbytes[node], time[node] = repeated
        # The share of the GPU is the mean over time. Costs are known where those of all parts are, and the trips, or which branch is taken.
        area = sum(float((part.time_us * part.share).sum()) for part in inner)
        whole = float(totals[:, 2].sum())
        share[node] = min(1.0, max(area / whole if whole else 0.0, 1 / sheet.sms))
        whole_known = all(bool(part.known.all()) for part in inner)
        known[node] = whole_known and (trips is not None if loops else len(inner) == 1)
    return replace(costs, flops=flops, bytes=nbytes, time_us=time, share=share, known=known)


def _repeated(costs: Costs, runs: Floats | None) -> Costs:
    """Costs with what runs in a loop of TensorFlow 1 multiplied by its trip count, or once where that is not known."""
    if runs is None:
        return costs
    times = np.where(np.isnan(runs), 1.0, runs)
    every = ("flops", "bytes", "time_us", "host_us", "carried_us")
    return replace(costs, **{name: getattr(costs, name) * times for name in every})
