"""Chooses the kernel that runs a matrix product, and how its constant weights lie in memory, by measurement.

TensorFlow keeps weights as (inputs, outputs). cuBLAS has other kernels for the transposed layout, up to a third faster or slower
depending on the sizes (on an H200: 16×256×1024 in 3.4 instead of 5.1 µs; 1×512×256 in 3.1 instead of 2.5). Where a product has few rows,
cuBLAS makes too few tiles to fill a GPU, and of activations it knows ReLU and GELU only: there our own kernel (`kernels.matmul`)
competes, with small tiles, shared summands and the activation in it; for a product of one row or of a few columns it multiplies in
float32, otherwise on tensor cores in TF32 or half precision, never where IEEE precision is asked for. Of many small matrices cuBLAS may
even take kernels without tensor cores (1024 of 27×64×27, on an H200: 8.7 µs). No rule that a page could hold
says which is faster. So each shape is timed once per device, with weights that are not in the cache (`RotatingWeights`; what batched
products multiply was just computed, and is), alone and eight side by side: what is faster alone often fills more of
the GPU, and then streams gain nothing (the products of an LSTM take 4.3 µs or, transposed, 2.8; on ten streams the whole takes 2.9 ms
or 4.0). Only what is faster both ways replaces the library with the weights as they are.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.autotune.batched_matmul import TILE, times_of
from msplit.engines.cuda.autotune.tuner import CALLS, MARGIN, Family, RotatingWeights, Tuner, copies, estimated
from msplit.engines.cuda.ir.graph import RESULT, Key, Op, OpGraph
from msplit.engines.cuda.ir.program import without_place
from msplit.engines.cuda.ir.windows import ROUNDED, ROUNDED_WEIGHTS
from msplit.engines.cuda.kernels.tiles import Tile
from msplit.formats.files import JsonValue
from msplit.opset.traits import BATCH_MATMULS, MATMULS

GROUPED = "_GroupedMatMul"
ANY_WEIGHTS = BATCH_MATMULS | {GROUPED}
WITH_WEIGHTS = MATMULS
"""Ops whose kernel is chosen; the latter only where their weights are constant."""

_LAYING = WITH_WEIGHTS | {GROUPED}
"""Ops that may want their constant weights to lie in another way."""

PRODUCTS = ANY_WEIGHTS | WITH_WEIGHTS

_ALIGNED = 4
"""Tensor cores take float32 with the summands side by side. Loads are of 16 bytes only where every row of them begins at a multiple."""

Lowered = Callable[[Op], Callable[..., tuple[torch.Tensor, ...]]]
"""Gives the function that runs an op, which takes its inputs."""


@dataclass(frozen=True)
class Choice:
    """Kernel and layout of weights with which products of one kind run.

    Attributes:
        tile: Of our own kernel; None: the library, or for grouped products what `batched_matmul` chooses.
        turned: True if the weights lie with the summands of an output side by side.
        times: µs, alone, of what was measured.
    """

    tile: Tile | None
    turned: bool
    times: Mapping[str, float] = field(default_factory=dict)


def _packed(choice: Choice) -> list[Any]:
    return [None if choice.tile is None else list(astuple(choice.tile)), choice.turned, choice.times]


def _unpacked(value: JsonValue) -> Choice:
    tile, turned, times = value.items(3)
    return Choice(tile.or_none(_tile_of), turned.flag(), times_of(times))


def _tile_of(value: JsonValue) -> Tile:
    return Tile(*(size.whole(1, 1 << 16) for size in value.items(len(fields(Tile)))))


FAMILY: Family[Choice] = Family("products", _packed, _unpacked, Choice(None, turned=False))
"""The choices that are made here. A key begins with the op, its fused ops and the shapes of data and weights."""


def choose(op: Op, arguments: list[torch.Tensor], lowered: Lowered, *, movable: bool) -> tuple[Op, torch.Tensor]:
    """The op as it runs fastest, itself or with `TILE`, and its weights, the same values and logical shape, as they then lie in memory.

    Args:
        op: A MatMul, _FusedMatMul or _GroupedMatMul, or a batched product.
        arguments: Its inputs, on a CUDA device, of the shapes that they have in every run.
        movable: The second input is constant, and nothing else reads it as it lies now.
    """
    data, weights = arguments[0], arguments[1]
    movable = movable and _inner_axis(op) is not None
    if op.op == GROUPED and not movable:
        return batched_matmul.choose(op, arguments), weights
    attrs = tuple(
        op.attrs.get(name)
        for name in ("transpose_a", "transpose_b", "adj_x", "adj_y", "activation", "rows_first", RESULT)
    )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    key: tuple[Any, ...] = (op.op, op.attrs.get("fused_ops"), tuple(data.shape), tuple(weights.shape))
    key = (*key, data.stride(), weights.dtype, tf32, attrs, repr(op.attrs.get("layers")), len(arguments))
    rounded, *more = bool(op.attrs.get(ROUNDED)), bool(op.attrs.get(ROUNDED_WEIGHTS))
    tuner = Tuner.of(data.device)

    def measured() -> Choice:
        """Our own kernel has less to do where data are rounded, and the library as much: a contest errs that it loses and won before."""
        found = _fastest(tuner, op, arguments, lowered, movable=movable)
        before = tuner.known(FAMILY, (*key, False, *more)) if rounded and found.tile is None else None
        return found if before is None or before[0].tile is None else before[0]

    free = tuner.known(FAMILY, (*key, rounded, *more))
    if free is None or not (movable or weights.shape[-1] == 1 or free[0].turned == _is_turned(op, weights)):
        if not movable:
            more.append(weights.stride())
        choice = tuner.choose(
            FAMILY,
            (*key, rounded, *more),
            measured,
            lambda: _calls(op, arguments, lowered, movable=movable),
            estimated(data, weights, 2 * data.numel() * weights.shape[-1]),
        )
    else:
        choice = free[0]
    if choice.turned and movable:
        weights = _turned(op, weights)
    if op.op == GROUPED:
        return batched_matmul.choose(op, [data, weights, *arguments[2:]]), weights
    return op if choice.tile is None else _tiled(op, choice.tile), weights


def heaviest(graph: OpGraph) -> dict[Key, Op]:
    """Constant weights that several kinds of products read, each with a product of the kind that computes most with them: how the weights
    lie is for that one to say. Of the waves of a recurrent network the first has one member, the hundred in the middle have all."""
    made: dict[Key, Counter[tuple[Any, ...]]] = {}
    one_of: dict[tuple[Any, ...], Op] = {}
    for op in graph.ops.values():
        if op.op in _LAYING and op.inputs[1] in graph.constants and _inner_axis(op) is not None:
            op = without_place(op)
            shapes = [graph.shapes.get(key) for key in ((op.node, 0), *op.inputs) if key not in graph.constants]
            if None not in shapes:
                kind = (op.inputs[1], op.op, *shapes)
                one_of.setdefault(kind, op)
                made.setdefault(op.inputs[1], Counter())[kind] += math.prod(shapes[0] or ())
    return {key: one_of[max(kinds, key=kinds.__getitem__)] for key, kinds in made.items() if len(kinds) > 1}


def weights_of(op: Op) -> list[int]:
    """The input slots of a product's weights."""
    if op.op != GROUPED:
        return [1]
    sizes = [2 + ("bias" in layer) for layer in op.attrs["layers"]]
    return [1 + sum(sizes[:number]) for number in range(len(sizes))]


def data_of(op: Op) -> list[int]:
    """The input slots of a product's data."""
    return [slot - 1 for slot in weights_of(op)]


def rounds_weights(op: Op) -> bool:
    """True if it runs in our own kernel on tensor cores, with weights that are to be rounded."""
    tile = op.attrs.get(TILE)
    return ROUNDED_WEIGHTS in op.attrs and tile is not None and not tile.exact


def _tiled(op: Op, tile: Tile) -> Op:
    return Op(op.node, op.name, op.op, {**op.attrs, TILE: tile}, op.inputs, op.source_nodes, op.batch)


def _inner_axis(op: Op) -> int | None:
    """The axis of the constant weights that the product sums over; None where they lie transposed and are left so."""
    if op.op != GROUPED:
        return None if op.op in BATCH_MATMULS or op.attrs.get("transpose_b") else 0
    layers = op.attrs["layers"]
    if len(layers) > 1 or layers[0].get("transpose"):
        return None
    return 0 if layers[0].get("wide") else 1


def _turned(op: Op, weights: torch.Tensor) -> torch.Tensor:
    axis = _inner_axis(op)
    assert axis is not None
    if weights.dim() == 3 and axis == 0:  # side by side: each member's transposed matrix by itself is one block then
        return weights.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return weights.movedim(axis, -1).contiguous().movedim(-1, axis)


def _is_turned(op: Op, weights: torch.Tensor) -> bool:
    axis = _inner_axis(op)
    return axis is not None and weights.stride(axis) == 1 and weights.stride(-1) != 1


def _calls(op: Op, arguments: list[torch.Tensor], lowered: Lowered, *, movable: bool) -> Iterator[Callable[[], Any]]:
    """Calls of all kernels of ours that `_fastest` may time."""
    others = list(arguments)
    if movable:
        others[1] = _turned(op, arguments[1])
    if op.op == GROUPED:
        for laid in (arguments, others):
            batched_matmul.choose(op, laid)
        return
    for tile in _tiles(op, arguments):
        for turn in {False, movable} if tile.exact else {_aligned(arguments, movable=movable)}:
            yield functools.partial(lowered(_tiled(op, tile)), *(others if turn else arguments))


def _aligned(arguments: list[torch.Tensor], *, movable: bool) -> bool:
    """True if weights for tensor cores lie with the summands side by side."""
    return movable and arguments[1].shape[0] % _ALIGNED == 0


def _fastest(tuner: Tuner, op: Op, arguments: list[torch.Tensor], lowered: Lowered, *, movable: bool) -> Choice:
    times: dict[str, float] = {}
    data, as_they_lie, *rest = arguments
    cold = op.op not in BATCH_MATMULS
    weights = {turn: _turned(op, as_they_lie) if turn else as_they_lie for turn in {False, movable}}
    rotated = {turn: copies(laid) if cold else [laid] for turn, laid in weights.items()}

    def with_weights(chosen: Op, turn: bool) -> RotatingWeights:
        return RotatingWeights(lowered(chosen), data, rotated[turn], rest)

    def timed(name: str, call: RotatingWeights) -> float:
        call()  # loads the kernels
        times[name] = tuner.milliseconds(call, cold=cold) * 1e3 / CALLS
        return times[name]

    # A grouped product has a kernel of its own for each way in which its weights may lie.
    library = {
        turn: with_weights(batched_matmul.choose(op, [data, laid, *rest]) if op.op == GROUPED else op, turn)
        for turn, laid in weights.items()
    }
    timed("library", library[False])
    turns = movable and timed("library, turned", library[True]) < MARGIN * times["library"]
    turns = turns and tuner.beats(library[True], library[False], cold=cold)
    if op.op == GROUPED or tuner.is_spent:
        return Choice(None, turns, times)
    aligned = _aligned(arguments, movable=movable)
    with tuner.spending():
        tiles = [(tile, turns if tile.exact else aligned) for tile in _tiles(op, arguments)]
        calls = (((tile, turn), with_weights(_tiled(op, tile), turn)) for tile, turn in tiles)
        ranked = tuner.ranked(calls, library[turns](), cold=cold, forgiving=True)
        times |= {f"triton {one.choice[0]}": one.milliseconds * 1e3 / CALLS for one in ranked}
        if ranked and tuner.beats(ranked[0].call, library[turns], cold=cold):
            return Choice(*ranked[0].choice, times)
    return Choice(None, turns, times)


def _tiles(op: Op, arguments: list[torch.Tensor]) -> list[Tile]:
    """Tiles of our own kernel that may compute this product."""
    data, weights, *rest = arguments
    batched = op.op in BATCH_MATMULS
    x = data.mT if op.attrs.get("adj_x" if batched else "transpose_a") else data
    y = weights.mT if op.attrs.get("adj_y" if batched else "transpose_b") else weights
    steps = tuple(str(step) for step in op.attrs.get("fused_ops", ()))
    work = batched_matmul.members(x, y) if batched else batched_matmul.dense(x, y, steps, rest)
    if work is None:
        return []
    return [tile for tile in batched_matmul.tiles(work) if tile.exact or batched_matmul.may_round(data.dtype)]
