"""Results that only products in TF32 read are rounded to it where they are made.

A product in TF32, or a convolution, rounds what it reads, so that it is all the same to it whether it was rounded before. Who writes a
result has an instruction more for each of its elements, which costs nothing; our kernels that multiply would have it in their innermost
loops. Whatever hands values on, one by one, hands rounded ones on. A mean that only products read may be one of rounded values: each of
them is as far off as the mean is, once it is rounded itself, and in both directions.

Only our own kernels and fused groups round what they write, and which kernels run is measured. So `expect_rounded` says what will be read
if ours win, for whoever measures kernels, and `Rounding` knows what was made in the end. Constant weights of products that our kernels run
are rounded once, as filters are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch

from msplit.engines.cuda.autotune import matmul
from msplit.engines.cuda.autotune.batched_matmul import TILE
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.program import BUFFER, JOINED
from msplit.engines.cuda.ir.windows import ROUNDED, ROUNDED_WEIGHTS, ROUNDS, TILES
from msplit.engines.cuda.kernels.activations import IN_CONVOLUTIONS
from msplit.engines.cuda.kernels.channelwise import WIDEST
from msplit.engines.cuda.kernels.matmul import ATTENTION_TILES as ATTENTION_TILES
from msplit.engines.cuda.kernels.matmul import FEW_COLUMNS
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.ops.fused import ATTENTION, KERNEL, SQUEEZE
from msplit.opset.traits import CONV2D, EPILOGUE_STEPS, ops_with

_CONVOLVING = CONV2D | {"_SiblingConv2D"}
"""Ops whose first input is rounded to TF32, whoever's kernel runs them."""

_PRODUCTS = matmul.PRODUCTS | {ATTENTION}
"""Ops that multiply on tensor cores however images lie."""

_HAND_ON = (
    ops_with("picks values")
    | ops_with("identity")
    | ops_with("concatenates")
    | (ops_with("activation") & ops_with("exact"))  # what is not cut off stays as it is
    | {"_Copy", JOINED}
)
"""Ops that give rounded values where they read rounded ones."""

_MEANS = ops_with("pool") - _HAND_ON
_TRANSPARENT = _HAND_ON | _MEANS
_CONVOLUTIONS = frozenset(op for op in FILTERS if "conv2d" in op.lower() and "Backprop" not in op) - {SQUEEZE}
"""Those whose kernels of ours round. What squeeze-and-excitation is part of goes on to be multiplied by factors, not to a product."""

_STEPS = EPILOGUE_STEPS - ops_with("old batch norm") | IN_CONVOLUTIONS.keys()
"""Steps that may follow a convolution in our own kernel."""


def read_by_products(graph: OpGraph) -> set[Key]:
    """Values in float32 that nothing but products reads, directly or through what hands them on or takes their mean. The graph is in
    topological order."""
    read: dict[Key, list[tuple[Op, int]]] = {}
    for op in graph.ops.values():
        for slot, key in enumerate(op.inputs):
            read.setdefault(key, []).append((op, slot))
    ports = by_op(read)
    kept, found = graph.kept(), set[Key]()

    def for_products(op: Op, slot: int) -> bool:
        if op.op in _CONVOLVING or op.op in _PRODUCTS:
            return slot in operands(graph, op)
        if op.op == BUFFER:
            return True  # which comes behind a value, and does not look at it
        results = [(op.node, port) for port in ports.get(op.node, ())]
        return op.op in _TRANSPARENT and bool(results) and found.issuperset(results)

    for number in reversed(graph.ops):
        for key in ((number, port) for port in ports.get(number, ())):
            wanted = graph.dtypes.get(key) != "float32" or key in kept
            if not wanted and all(for_products(op, slot) for op, slot in read[key]):
                found.add(key)
    return found


def operands(graph: OpGraph, op: Op) -> list[int]:
    """The slots of what an op multiplies on tensor cores, whoever's kernel runs it: none of a product of one row or of a few columns, which
    is as exact in IEEE precision, and of attention those of our own kernel."""
    if op.op in _CONVOLVING:
        return [0]
    if op.op == ATTENTION:
        return [0, 1, 2] if op.attrs.get(KERNEL) in ATTENTION_TILES else []
    shape = graph.shapes.get((op.node, 0), ())
    multiplies = len(shape) > 1 and shape[-2] > 1 and shape[-1] > FEW_COLUMNS
    return [*matmul.data_of(op), *matmul.weights_of(op)] if multiplies else []


def by_op(values: Iterable[Key]) -> dict[int, tuple[int, ...]]:
    """The ports of each op among some values."""
    return {number: tuple(port for _, port in keys) for number, keys in groupby(sorted(values), itemgetter(0))}


def expect_rounded(graph: OpGraph) -> bool:
    """Marks the convolutions and products that read rounded data if our own kernels run all that can be run by them."""
    wanted, rounded, changed = by_op(read_by_products(graph)), set[Key](), False
    for op in graph.ops.values():
        if can_round(op) or hands_on(op, [key for key in op.inputs if key not in graph.constants], rounded):
            rounded.update((op.node, port) for port in wanted.get(op.node, ()))
        data = _data(op)
        if data and rounded.issuperset(data):
            op.attrs = {**op.attrs, ROUNDED: True}
            changed = True
    return changed


def _data(op: Op) -> list[Key]:
    """The data of a convolution, product or attention; nothing of another op."""
    if op.op in _CONVOLVING or op.op == ATTENTION:
        return op.inputs[: 3 if op.op == ATTENTION else 1]
    return [op.inputs[slot] for slot in matmul.data_of(op)] if op.op in matmul.PRODUCTS else []


def can_round(op: Op) -> bool:
    """Returns whether a kernel of ours for an op can round its results."""
    if op.attrs.get("data_format", "NHWC") != "NHWC":
        return False
    if op.op in matmul.PRODUCTS:
        return True
    if op.op == ATTENTION:
        return op.attrs.get(KERNEL) in ATTENTION_TILES
    if op.op in _MEANS:
        return bool(math.prod(op.attrs.get("ksize", ())) <= WIDEST)
    return op.op in _CONVOLUTIONS and _STEPS.issuperset(map(str, op.attrs.get("fused_ops", ())))


def takes_tf32(device: torch.device) -> bool:
    """Returns whether convolutions and products there are in TF32, by kernels of ours where those win."""
    return device.type == "cuda" and bool(torch.backends.cudnn.allow_tf32)


def rounds(op: Op) -> bool:
    """Returns whether such a kernel was chosen."""
    return can_round(op) and (op.op in _MEANS or op.op == ATTENTION or TILES in op.attrs or TILE in op.attrs)


def hands_on(op: Op, inputs: Collection[Key], rounded: set[Key]) -> bool:
    """Checks if the results of an op with these inputs are rounded because they are. In a buffer are only the parts that were written."""
    return op.op == BUFFER or (op.op in _HAND_ON and bool(inputs) and rounded.issuperset(inputs))


def _with_rounded(op: Op, *, rounded: bool) -> Op:
    """An op that is told whether its data are rounded."""
    others = {name: value for name, value in op.attrs.items() if name != ROUNDED}
    return replace(op, attrs={**others, ROUNDED: True} if rounded else others)


class Rounding:
    """Values that are rounded to TF32 while a graph is traced, op by op.

    Args:
        graph: In topological order.
        results: Whether kernels may round their results.
        nchw: Whether convolutions and pools run in that layout, which only the libraries' kernels do.
        lists: Whether choices are only listed, so that nothing is known of kernels yet: what `expect_rounded` expects is taken for
            done.
    """

    def __init__(self, graph: OpGraph, *, results: bool = False, lists: bool = False, nchw: bool = False) -> None:
        self._rounded: set[Key] = set()
        self._nchw = nchw
        self.lists = lists
        self._graph = graph
        self._for_products = by_op(read_by_products(graph)) if results else {}

    @functools.cached_property
    def _weights(self) -> set[Key]:
        """Weights that only products read."""
        read: dict[bool, set[Key]] = {True: set(), False: set()}
        for op in self._graph.ops.values():
            slots = matmul.weights_of(op) if op.op in matmul.PRODUCTS else ()
            for slot, key in enumerate(op.inputs):
                read[slot in slots].add(key)
        return read[True] - read[False] - self._graph.kept()

    def of_data(self, op: Op) -> Op:
        """The op, which is told whether its data are rounded, whatever was expected. A convolution is only where that was expected: its
        kernel was chosen before groups were fused, and takes longer to choose than what that would save."""
        data = _data(op)
        if self.lists or not data:
            return op
        rounded = self._rounded.issuperset(data) and (ROUNDED in op.attrs or op.op in _PRODUCTS)
        return _with_rounded(op, rounded=rounded)

    def otherwise(self, op: Op) -> Op | None:
        """The op as it will be if its data are not rounded as expected: where the library's kernel makes them, or a fused group does. None
        where that can not be."""
        data = _data(op)
        if ROUNDED in op.attrs:
            return _with_rounded(op, rounded=False)
        fused = op.op in matmul.PRODUCTS and all(port in self._for_products.get(node, ()) for node, port in data)
        return _with_rounded(op, rounded=True) if data and fused else None

    def of_results(self, op: Op) -> Op:
        """The op, which rounds its results where only products read them and the kernel that was chosen can."""
        may = not self.lists and rounds(op) and (op.op in _PRODUCTS or not self._nchw)
        ports = self._for_products.get(op.node, ()) if may else ()
        return replace(op, attrs={**op.attrs, ROUNDS: ports}) if ports else op

    def has_run(self, op: Op, inputs: Collection[Key], outputs: int) -> None:
        """Notes which of an op's results are rounded."""
        if ROUNDS in op.attrs:
            self._rounded.update((op.node, port) for port in op.attrs[ROUNDS])
        elif hands_on(op, inputs, self._rounded):
            self._rounded.update((op.node, port) for port in range(outputs))

    def of_weights(self, op: Op, arguments: Sequence[torch.Tensor], constants: Mapping[Key, torch.Tensor]) -> Op:
        """A product, which may find its weights rounded where they are constants that only products read, as weights, and in TF32."""
        keys = {slot: op.inputs[slot] for slot in matmul.weights_of(op)}
        may_round = (
            torch.backends.cuda.matmul.allow_tf32
            and all(arguments[slot].dtype == torch.float32 for slot in keys)
            and all(key in constants and key in self._weights for key in keys.values())
        )
        return replace(op, attrs={**op.attrs, ROUNDED_WEIGHTS: True}) if may_round else op

    def to_round(self, op: Op) -> list[int]:
        """The slots of a product's weights that have to be rounded for the kernel that was chosen, and have not been yet."""
        slots = matmul.weights_of(op) if matmul.rounds_weights(op) else []
        found = [slot for slot in slots if op.inputs[slot] not in self._rounded]
        self._rounded.update(op.inputs[slot] for slot in found)
        return found
