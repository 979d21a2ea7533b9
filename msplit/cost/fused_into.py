"""Nodes that another node's kernel computes, and the sizes of tensors by which that is told.

Nodes whose work another node's kernel does: what both TensorFlow's optimizer and msplit's engine fuse wherever they find it.

A product or a convolution takes along what alone reads its result: scales and offsets per channel (a batch norm in any spelling, which
become weights and bias), a bias, also one behind the sum with another product, for a convolution the sum with a shortcut in front of a
ReLU, a ReLU, and for a product GELU by `tanh`. Zeros put around the data of a convolution become its padding, and SpaceToBatchND and
BatchToSpaceND around it its dilation. A layer norm or a softmax that is spelled out over the last axis is one kernel, that of its first
reduction. A Concat is a copy: whether its parts are written where they belong depends on kernels that are measured, and so does whether a
mean, the dense layer behind it and a softmax are one. Which of these an engine really fuses it decides with the constants' values at hand;
here only ops, shapes and who reads what are looked at, so that a graph of a million nodes costs no more than a walk over its products.

Sizes of all tensors of a graph as arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Floats, Graph, Ints
from msplit.cost.costs import Mask
from msplit.formats.tensors import itemsize
from msplit.opset.traits import ADD, BATCH_NORMS, BIASES, CONVOLUTIONS, IMAGE_CONVOLUTIONS, PADS, RESHAPES, ops_with
from msplit.shapes.registry import Shape, is_float, known, output_dtypes
from msplit.shapes.result import Shapes

UNNAMED_ITEMSIZE = 4
"""Bytes of an element of a type that the graph does not say (an output of a custom op)."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a graph, those of one node next to each other; tensor t of node v is `start[v] + port`.

    Attributes:
        start: First tensor of each node, and the number of all at the end.
        elements: Elements, with unknown sizes counted as 1: at least that many.
        nbytes: Bytes, likewise; 0 for strings and handles.
        known: Whether the shape is known.
        floating: Whether the type is floating-point.
        dtype: Per node the index in `dtypes` of the type of its first output.
        dtypes: Names of types.
        used: Per data edge the tensor it carries, each (tensor, consumer) once.
        user: Per data edge its consumer, likewise.
        slot: Per data edge the first input slot it fills, likewise.
    """

    start: Ints
    elements: Floats
    nbytes: Floats
    known: NDArray[np.bool_]
    floating: NDArray[np.bool_]
    dtype: Ints
    dtypes: list[str]
    used: Ints
    user: Ints
    slot: Ints

    def per_node(self, values: Floats) -> Floats:
        """Sum over the outputs of each node."""
        total = np.concatenate(([0.0], np.cumsum(values)))
        result: Floats = total[self.start[1:]] - total[self.start[:-1]]
        return result

    def into(self, values: Floats) -> Floats:
        """Sum over the inputs of each node; a tensor that goes in twice counts once."""
        result: Floats = np.bincount(self.user, weights=values[self.used], minlength=len(self.start) - 1).astype(
            np.float64
        )
        return result


def elements(shape: Shape) -> int:
    """Number of elements, with unknown sizes counted as 1: at least that many. No more than fit in 64 bits."""
    return min(math.prod(1 if size is None else size for size in shape or ()), 2**62)


def tensors_of(shapes: Shapes) -> Tensors:
    """The tensors of a graph."""
    graph = shapes.graph
    counts, sizes, is_known = _elements(shapes)
    counted = np.array(sizes, dtype=np.float64)
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    itemsizes, floating, dtype, dtypes = _types(shapes, counts)
    edges = graph.edges
    data = edges.port != CONTROL
    src, port, dst, slot = edges.src[data], edges.port[data], edges.dst[data], edges.slot[data]
    there = port < np.diff(start)[src]
    tensor = start[src] + port
    # Edges of one consumer lie next to each other, so that (consumer, tensor) is nearly sorted already.
    key = dst.astype(np.int64)[there] * (int(start[-1]) + 1) + tensor[there]
    _, first = np.unique(key, return_index=True)
    return Tensors(
        start=start,
        elements=counted,
        nbytes=counted * np.array(itemsizes, dtype=np.float64),
        known=np.array(is_known, dtype=np.bool_),
        floating=np.array(floating, dtype=np.bool_),
        dtype=np.array(dtype, dtype=np.int32),
        dtypes=dtypes,
        used=tensor[there][first],
        user=dst[there][first],
        slot=slot[there][first],
    )


def _elements(shapes: Shapes) -> tuple[list[int], list[int], list[bool]]:
    counts: list[int] = []
    sizes: list[int] = []
    is_known: list[bool] = []
    seen: dict[int, tuple[list[int], list[bool]]] = {}
    for outputs in shapes.outputs:
        found = seen.get(id(outputs))
        if found is None:
            found = seen[id(outputs)] = [elements(shape) for shape in outputs], [known(shape) for shape in outputs]
        counts.append(len(found[0]))
        sizes += found[0]
        is_known += found[1]
    return counts, sizes, is_known


def _types(shapes: Shapes, counts: list[int]) -> tuple[list[int], list[bool], list[int], list[str]]:
    graph = shapes.graph
    sizes: list[int] = []
    floating: list[bool] = []
    first: list[int] = []
    dtypes: dict[str, int] = {"": 0}
    facts: dict[tuple[int, int], tuple[list[int], list[bool], int]] = {}
    for node, key in enumerate(zip(graph.kind.tolist(), counts, strict=True)):
        fact = facts.get(key)
        if fact is None:
            count = key[1]
            given = output_dtypes(graph.ops[node], graph.attrs[node], count)
            padded = (*given[:count], *[given[-1] if given else ""] * (count - len(given)))
            fact = facts[key] = (
                [itemsize(dtype) if dtype else UNNAMED_ITEMSIZE for dtype in padded],
                [is_float(dtype) for dtype in padded],
                dtypes.setdefault(padded[0] if padded else "", len(dtypes)),
            )
        sizes += fact[0]
        floating += fact[1]
        first.append(fact[2])
    return sizes, floating, first, list(dtypes)


HEADS = CONVOLUTIONS | {"MatMul"}
"""Ops that take along what follows them."""

IDENTITIES = ops_with("identity")
MULTIPLIES = ops_with("multiply")
SCALES = ADD | MULTIPLIES | {"Sub"}
EPILOGUES = frozenset({"Relu"})
"""Activations that the libraries have as an epilogue, beside the approximate GELU of a product."""

ACTIVATIONS = ops_with("activation")
"""Activations that a bias takes along. Only an epilogue saves their kernel."""

CURVES = ops_with("gelu curve") - {"Sigmoid"}
"""A GELU has one of them. One with a sigmoid is not looked for: its factor would be taken along as an activation."""

_GELU = ops_with("gelu part") - {"Sigmoid"}
_ROWS, _ROW_STARTS = ops_with("row part") | ops_with("row reduction"), ops_with("row start")
_SHORTEST_GELU = 4
_LARGEST = 24
"""Ops of a function that is spelled out, and readers of a value that one is looked for behind."""


@dataclass(frozen=True, eq=False)
class FusedNodes:
    """Nodes that need no kernel of their own, with the nodes whose kernels do their work.

    Attributes:
        inside: Nodes whose work another node's kernel does.
        sums: (node that carries, node that it adds to its result) for each shortcut.
        behind: (node that carries, node whose own kernel runs behind its one) for each activation that is no epilogue, and
            for the bias of a depthwise convolution.
    """

    inside: Mask
    sums: tuple[tuple[int, int], ...]
    behind: tuple[tuple[int, int], ...] = ()


def find_fused_nodes(
    shapes: Shapes, tensors: Tensors, launches: Mask, prepared: Mask, fetched: Mask, same: Ints
) -> FusedNodes:
    """Finds the nodes whose work another node's kernel does.

    Args:
        shapes, tensors: Those of a DAG.
        launches: Which nodes would launch a kernel if each launched its own.
        prepared: Which are computed once before the first step: constants.
        fetched: Which have an output of the model among theirs.
        same: See `duplicates`; of nodes that compute the same, all are fused or none.
    """
    walk = _Walk(shapes, tensors, launches, prepared, fetched, same)
    ops = shapes.graph.ops
    alone = np.flatnonzero(launches & (same == np.arange(len(ops)))).tolist()
    for node in alone:
        if ops[node] in HEADS:
            walk.follow(node)
        elif ops[node] in _ROW_STARTS and not walk.inside[node]:
            walk.rows(node)
    for node in alone:
        if ops[node] in PADS:
            walk.pad(node)
    return FusedNodes(np.array(walk.inside, dtype=np.bool_)[same], tuple(walk.sums), tuple(walk.behind))


def _passed_on(graph: Graph) -> Ints:
    """Per node whose value it gives: that of an identity's input, over identities behind each other; else its own."""
    result = np.arange(len(graph), dtype=np.int32)
    alike = graph.with_ops(IDENTITIES)
    for node in graph.topological[alike[graph.topological]].tolist():
        source = next(iter(graph.inputs(node)), None)
        if source is not None and source[1] == 0:
            result[node] = result[source[0]]
    return result


class _Walk:
    """The graph as plain lists (numpy's single elements are slow), and what is fused so far."""

    def __init__(
        self, shapes: Shapes, tensors: Tensors, launches: Mask, prepared: Mask, fetched: Mask, same: Ints
    ) -> None:
        self.shapes, self.graph, self.ops = shapes, shapes.graph, shapes.graph.ops
        edges, count = shapes.graph.edges, len(shapes.graph)
        passed = _passed_on(shapes.graph)
        data = (edges.port != CONTROL) & (same[edges.dst] == edges.dst) & (passed[edges.dst] == edges.dst)
        src, dst, slot = same[passed[edges.src[data]]], edges.dst[data], edges.slot[data]
        fetched = fetched.copy()
        np.logical_or.at(fetched, passed, fetched)
        np.logical_or.at(fetched, same, fetched)
        times = np.bincount(src, minlength=count)
        only, place = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
        only[src], place[src] = dst, slot
        alone = (times == 1) & ~fetched
        first = np.minimum(tensors.start[:-1], max(len(tensors.elements) - 1, 0))
        sizes = tensors.elements[first] if len(tensors.elements) else np.zeros(count)
        self.only: list[int] = np.where(alone, only, -1).tolist()
        """The node that reads a node's results, if it is the only one, reads one of them once, and none is fetched."""
        self.slot: list[int] = place.tolist()
        self.readers: list[int] = times.tolist()
        self.size: list[float] = np.where(np.diff(tensors.start) > 0, sizes, 0.0).tolist()
        """Elements of a node's first output."""
        self.launches: list[bool] = launches.tolist()
        self.prepared: list[bool] = prepared.tolist()
        self.fetched: list[bool] = fetched.tolist()
        order = np.argsort(src, kind="stable")
        self.start: list[int] = np.searchsorted(src[order], np.arange(count + 1)).tolist()
        self.reading: list[int] = dst[order].tolist()
        self.taken: list[int] = np.searchsorted(dst, np.arange(count + 1)).tolist()
        self.sources: list[int] = src.tolist()
        self.inside = [False] * count
        self.sums: list[tuple[int, int]] = []
        self.behind: list[tuple[int, int]] = []

    def follow(self, head: int) -> None:
        """Fuses what a product or a convolution takes along."""
        weights = self._inputs(head)[1:2]
        constant = bool(weights) and self.prepared[weights[0]]
        node, biased, added = self._dilation(head), False, False
        while (found := self._reader(node)) is not None:
            reader, slot = found
            if self.ops[reader] in BIASES and slot == 0 and (constant or not biased):
                biased = True
            elif not (constant and self._scales(head, reader, slot)):
                break
            added = added or self.ops[reader] not in MULTIPLIES
            self.inside[reader] = True
            node = reader
        if node == head and self.ops[head] == "MatMul":
            self._behind_sum(head)
        if added and self.ops[head] == "DepthwiseConv2dNative":
            self.behind.append((head, node))
        node = self._shortcut(head, node)
        found = self._reader(node)
        if found is not None and self.ops[found[0]] in (ACTIVATIONS if added else EPILOGUES):
            self.inside[found[0]] = True
            if self.ops[found[0]] not in EPILOGUES:
                self.behind.append((head, found[0]))
        else:
            self._gelu(head, node, added)

    def _dilation(self, head: int) -> int:
        """The BatchToSpaceND behind a convolution that is dilated so, whose pixels it then skips itself; otherwise the convolution."""
        attrs = self.graph.attrs[head]
        if self.ops[head] not in IMAGE_CONVOLUTIONS or attrs.get("padding") != "VALID":
            return head
        before, reader = next(iter(self._inputs(head)), head), self.only[head]
        if self.ops[before] in RESHAPES and self.only[before] == head:
            before = next(iter(self._inputs(before)), before)
        if reader >= 0 and self.ops[reader] in RESHAPES:
            reader = self.only[reader]
        if reader < 0 or self.ops[before] != "SpaceToBatchND" or self.ops[reader] != "BatchToSpaceND":
            return head
        constant = all(self.prepared[source] for node in (before, reader) for source in self._inputs(node)[1:])
        if not constant or self.only[before] < 0:
            return head
        self.inside[before] = self.inside[reader] = True
        return reader

    def pad(self, node: int) -> None:
        """Padding that a convolution does itself."""
        reader, slot = self.only[node], self.slot[node]
        constant = all(self.prepared[source] for source in self._inputs(node)[1:])
        while reader >= 0 and slot == 0 and (self.ops[reader] in RESHAPES or self._dilates(reader)):
            reader, slot = self.only[reader], self.slot[reader]
        if reader >= 0 and slot == 0 and constant and self.ops[reader] in CONVOLUTIONS:
            self.inside[node] = True

    def _dilates(self, node: int) -> bool:
        return self.ops[node] == "SpaceToBatchND" and self.inside[node]

    def rows(self, first: int) -> None:
        """A layer norm (two means of the same rows) or a softmax (maximum, exponential, sum), behind its first reduction."""
        key = next(iter(self._inputs(first)), first)
        whole, columns = self.size[key], self._channels(key)
        if self.readers[key] > _LARGEST or self.size[first] * columns != whole:
            return
        region = self._region(key, _ROWS, {whole, self.size[first]}, columns)
        for end in range(len(region), 2, -1):
            part = region[:end]
            ops = [self.ops[node] for node in part]
            norm = ops.count("Mean") == 2 and "Exp" not in ops
            softmax = ops.count("Max") == 1 and ops.count("Sum") == 1 and "Exp" in ops
            if (norm or softmax) and first in part and self.size[part[-1]] == whole and self._closed(part):
                for node in part:
                    self.inside[node] = node != first and self.launches[node]
                return

    def _reader(self, node: int) -> tuple[int, int] | None:
        """The only node that reads a value, behind what passes it on, and the slot that it comes in by."""
        reader, slot = self.only[node], self.slot[node]
        while reader >= 0 and slot == 0 and self.ops[reader] in RESHAPES:
            reader, slot = self.only[reader], self.slot[reader]
        return (reader, slot) if reader >= 0 and self.launches[reader] and not self.inside[reader] else None

    def _others(self, reader: int, slot: int) -> list[int]:
        """Inputs that a node reads beside the value that comes in by a slot."""
        return [source for index, source in enumerate(self._inputs(reader)) if index != slot]

    def _channels(self, node: int) -> float:
        """Length of the axis of a result that its channels, or a row's columns, lie along."""
        shape = self.shapes.shape(node)
        if not shape:
            return 1.0
        first = str(self.graph.attrs[node].get("data_format", "NHWC")).startswith("NC") and len(shape) > 1
        size = shape[1 if first else -1]
        return 1.0 if size is None else float(size)

    def _scales(self, head: int, reader: int, slot: int) -> bool:
        """True if an op only scales and shifts the channels of a result."""
        op, others = self.ops[reader], self._others(reader, slot)
        if not others or not all(self.prepared[other] for other in others):
            return False
        if op in BATCH_NORMS:
            return slot == 0 and self.ops[head] != "MatMul" and not self.graph.attrs[reader].get("is_training", True)
        return op in SCALES and len(others) == 1 and self.size[others[0]] in (1.0, self._channels(head))

    def _behind_sum(self, head: int) -> None:
        """Takes a constant bias of the sum that alone reads a product: ``(p + q) + b = (p + b) + q``."""
        reader, behind = self.only[head], -1
        if reader >= 0 and self.ops[reader] in ADD and self.launches[reader]:
            behind = self.only[reader]
        if behind < 0 or self.ops[behind] not in BIASES | ADD or not self.launches[behind]:
            return
        others = self._others(behind, self.slot[reader])
        constant = len(others) == 1 and self.prepared[others[0]]
        if constant and self.size[others[0]] == self._channels(head) and self.size[behind] == self.size[head]:
            self.inside[behind] = True

    def _shortcut(self, head: int, node: int) -> int:
        """Takes the sum of a convolution with something as large, if a ReLU follows."""
        found = self._reader(node) if self.ops[head] == "Conv2D" else None
        if found is None or self.ops[found[0]] not in ADD:
            return node
        others, after = self._others(*found), self._reader(found[0])
        if len(others) != 1 or after is None or self.ops[after[0]] != "Relu" or self.size[others[0]] != self.size[node]:
            return node
        beside = self.ops[others[0]] in HEADS | BIASES | BATCH_NORMS | SCALES and self.only[others[0]] == found[0]
        if found[1] and beside:
            return node  # the other convolution takes the sum
        self.sums.append((head, others[0]))
        self.inside[found[0]] = True
        return found[0]

    def _gelu(self, head: int, node: int, added: bool) -> None:
        """Takes a GELU in any spelling, if a bias or an epilogue takes it."""
        while self.only[node] >= 0 and self.slot[node] == 0 and self.ops[self.only[node]] in RESHAPES:
            node = self.only[node]
        if self.fetched[node] or not 1 < self.readers[node] <= _LARGEST:
            return
        region = self._region(node, _GELU, {self.size[node]}, columns=1.0)
        for end in range(_SHORTEST_GELU, len(region) + 1):
            curves = CURVES.intersection(self.ops[one] for one in region[:end])
            if curves and self._closed(region[:end], node):
                epilogue = curves == {"Tanh"} and self.ops[head] == "MatMul"
                if epilogue or added:
                    for one in region[:end]:
                        self.inside[one] = True
                    if not epilogue:
                        self.behind.append((head, region[end - 1]))
                return

    def _region(self, key: int, ops: frozenset[str], sizes: set[float], columns: float) -> list[int]:
        """Nodes of these ops and sizes that depend on one value, and on constants alone, in topological order."""
        inside, found = {key}, list[int]()
        waiting = list(dict.fromkeys(self._consumers(key)))
        while waiting and len(found) < _LARGEST:
            node = next((one for one in waiting if self._belongs(one, ops, sizes, inside, columns)), None)
            if node is None:
                break
            waiting.remove(node)
            inside.add(node)
            found.append(node)
            if self.readers[node] <= _LARGEST:
                waiting += [one for one in self._consumers(node) if one not in inside and one not in waiting]
        return found

    def _belongs(self, node: int, ops: frozenset[str], sizes: set[float], inside: set[int], columns: float) -> bool:
        """True if a node computes from the values inside and from constants that are the same for all rows."""
        if self.ops[node] not in ops or self.size[node] not in sizes or not self.launches[node]:
            return False
        return all(
            source in inside or (self.prepared[source] and self.size[source] <= columns)
            for source in self._inputs(node)
        )

    def _closed(self, part: list[int], key: int | None = None) -> bool:
        """True if nothing but the last node's result is wanted outside."""
        inner = part[:-1] if key is None else [key, *part[:-1]]
        return all(
            not self.fetched[node] and self.readers[node] and all(one in part for one in self._consumers(node))
            for node in inner
        )

    def _inputs(self, node: int) -> list[int]:
        """Producer of each input of a node; of nodes that compute the same, the first."""
        return self.sources[self.taken[node] : self.taken[node + 1]]

    def _consumers(self, node: int) -> list[int]:
        return self.reading[self.start[node] : self.start[node + 1]]
