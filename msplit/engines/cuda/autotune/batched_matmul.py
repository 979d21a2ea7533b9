"""Products of alike dense layers: by the library or by a kernel of our own, whichever measures faster on their sizes.

The library's batched product is good at large matrices and knows no epilogue; one row at a time, or a few, it leaves most of the GPU
idle, and bias and activation are further kernels. Each shape is timed once per device, with weights that are not in the cache, the way
that `matmul` does it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.autotune.tuner import CALLS, MARGIN, Family, Tuner, copies, estimated
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.windows import ROUNDED, ROUNDED_WEIGHTS, ROUNDS, extent, to_tf32
from msplit.engines.cuda.kernels import matmul as kernel
from msplit.engines.cuda.kernels.activations import IN_LIBRARY, LEAKY_ALPHA, NUMBERS, activate
from msplit.engines.cuda.kernels.matmul import Gemm, Layer
from msplit.engines.cuda.kernels.tiles import Tile
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.formats.files import JsonValue
from msplit.opset.traits import EPILOGUE_STEPS

_TILED = (torch.float32, torch.float16, torch.bfloat16)

_LARGEST = 2**31

TILE = "_tile"
"""Attribute of a product that runs in our own kernel: `kernels.matmul.Tile`. Absent: the library runs it."""

WIDE = "_wide"
"""Attribute of a grouped product that the library runs as one with all members' weights side by side."""

_FEW_ROWS = 16
"""Up to so many rows our own kernel is taken where nothing is measured: it has the bias and the activation in it."""


def times_of(value: JsonValue) -> Mapping[str, float]:
    """Times that were measured, µs by name, as they are kept."""
    return {name: time.number() for name, time in value.entries()}


def _choice_of(value: JsonValue) -> tuple[str, Mapping[str, float]]:
    name, times = value.items(2)
    return name.text(), times_of(times)


FAMILY: Family[tuple[str, Mapping[str, float]]] = Family("grouped products", list, _choice_of, ("library", {}))
"""The choices that are made here: the name of the kernel, and the µs of all that was measured."""


def key_of(work: Gemm) -> tuple[Any, ...]:
    """Key of a choice: equal for work that takes about the same time. Members are counted in powers of two."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    second = None if work.second is None else (*_sizes(work.second), work.first > 0)
    members, rounded = (len(work.one.weights) - 1).bit_length(), (work.rounded_data, work.rounded_weights)
    how = _is_wide(work), work.rows_first, *rounded
    return members, work.one.x.dtype, tf32, work.activation, _sizes(work.one), second, *how


def _sizes(layer: Layer) -> tuple[Any, ...]:
    """Sizes and strides that the time of a layer depends on."""
    shared = layer.x.dim() == 2
    strides = tuple(stride > 1 for stride in layer.weights.stride())
    bias = None if layer.bias is None else len(layer.bias) == 1
    return *layer.rows.shape[1:], layer.weights.shape[2], shared, strides, layer.x.stride()[-1] == 1, bias


def dense(data: Tensor, weights: Tensor, steps: Sequence[str], rest: Sequence[Tensor]) -> Gemm | None:
    """One layer, of [rows, inner] and [inner, columns], as work of one member; None where more follows it than a bias and an activation.

    `steps` is what follows, as TensorFlow's `fused_ops` names it, and `rest` its inputs.
    """
    biased = tuple(steps[:1]) == ("BiasAdd",)
    follow = steps[1:] if biased else steps
    if len(rest) != biased or len(follow) > 1 or any(step in EPILOGUE_STEPS for step in follow):
        return None
    return Gemm(Layer(data, weights.unsqueeze(0), rest[0].unsqueeze(0) if biased else None), "".join(follow))


def members(x: Tensor, y: Tensor) -> Gemm | None:
    """A product over batch axes, each batch a member; None where these axes are no single axis in memory, or not the same."""
    if x.dim() < 3 or x.shape[:-2] != y.shape[:-2] or x.dtype != y.dtype:
        return None
    try:
        return Gemm(Layer(x.view(-1, *x.shape[-2:]), y.view(-1, *y.shape[-2:])))
    except RuntimeError:
        return None


def may_round(dtype: torch.dtype) -> bool:
    """True if products of a type may take tensor cores: half precision, and float32 where TF32 is allowed."""
    half = dtype in (torch.float16, torch.bfloat16)
    return half or (dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)


def grouped(attrs: Mapping[str, Any], x: Tensor, weights: Tensor, *rest: Tensor) -> Gemm:
    """A `_GroupedMatMul`, given its attributes and inputs.

    `layers` says per product where its members' weights and biases are; a second product is added for the members from `first` on,
    and the last input for those before.
    """
    operands = iter((x, weights, *rest))
    one, *others = [_layer(layer, operands) for layer in attrs["layers"]]
    first = int(attrs.get("first", 0))
    addend = next(operands) if first else None
    second = others[0] if others else None
    activation, alpha = attrs.get("activation", ""), attrs.get("leakyrelu_alpha", LEAKY_ALPHA)
    return with_rounding(Gemm(one, activation, alpha, second, first, addend, bool(attrs.get("rows_first"))), attrs)


def with_rounding(work: Gemm, attrs: Mapping[str, Any]) -> Gemm:
    """The work, with what an op's attributes say is rounded to TF32."""
    data, weights, rounds = bool(attrs.get(ROUNDED)), bool(attrs.get(ROUNDED_WEIGHTS)), bool(attrs.get(ROUNDS))
    return replace(work, rounded_data=data, rounded_weights=weights, rounds=rounds)


def _layer(layer: Mapping[str, int], operands: Iterator[Tensor]) -> Layer:
    """One product: its rows, its part of the stacked weights and, where it has one, of the stacked biases."""
    x, weights = next(operands), next(operands)
    if layer.get("wide"):
        weights = weights.permute(1, 0, 2)
    weights = weights.narrow(0, layer["start"], layer["count"])
    weights = weights.mT if layer.get("transpose") else weights
    if "bias" not in layer:
        return Layer(x, weights)
    bias = next(operands)
    if layer["bias"] < 0:
        return Layer(x, weights, bias.unsqueeze(0))
    return Layer(x, weights, bias.narrow(0, layer["bias"], layer["biases"]))


def run(work: Gemm, attrs: Mapping[str, Any]) -> Tensor:
    """The result, [members, rows, columns], by the kernel that a grouped product's attributes name."""
    if TILE in attrs:
        return by_kernel(work, attrs[TILE])
    result = by_wide_product(work) if attrs.get(WIDE) else by_library(work)
    return to_tf32(result) if work.rounds else result


def choose(op: Op, arguments: Sequence[Tensor]) -> Op:
    """A `_GroupedMatMul` with the kernel that is fastest for its inputs as they lie, in its attributes."""
    work = grouped(op.attrs, *arguments)
    candidates: dict[str, dict[str, Any]] = {"library": {}}
    if _is_wide(work):
        candidates["wide"] = {WIDE: True}
    candidates |= {f"triton {tile}": {TILE: tile} for tile in tiles(work)}
    tuner = Tuner.of(work.one.x.device)
    name = "library"
    if len(candidates) > 1:
        name, _ = tuner.choose(
            FAMILY,
            key_of(work),
            lambda: _fastest(tuner, work, candidates),
            lambda: (functools.partial(run, work, attrs) for attrs in candidates.values() if TILE in attrs),
            sum(estimated(one.x, one.weights, 2 * one.weights.numel() * one.rows.shape[1]) for one in work.layers()),
        )
    attrs = candidates.get(name)
    return replace(op, attrs={**op.attrs, **attrs}) if attrs else op


def _fastest(tuner: Tuner, work: Gemm, candidates: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, float]]:
    """The fastest, or the baseline, the library, where others are not clearly faster; and all times."""
    baseline = next(iter(candidates))
    if tuner.is_spent:
        own = [name for name in candidates if name.startswith("triton")]
        return (own[0] if own and work.one.rows.shape[1] <= _FEW_ROWS else baseline), {}
    times: dict[str, float] = {}
    with tuner.spending():
        works = _with_copies(work)
        calls = {
            name: functools.partial(_run_next, itertools.cycle(works), attrs) for name, attrs in candidates.items()
        }
        tuner.precompile([call for name, call in calls.items() if TILE in candidates[name]])
        for name, call in calls.items():
            try:
                times[name] = tuner.milliseconds(call, cold=True) * 1e3 / CALLS
            except Exception:  # a tile that needs more of an SM than this GPU has, as whichever compiler stage says it
                if not times:
                    raise
    best = min(times, key=lambda name: times[name])
    chosen = best if times[best] < MARGIN * times[baseline] else baseline
    if work.rounded_data and TILE not in candidates[chosen]:  # see `matmul.choose`
        before = tuner.known(FAMILY, key_of(replace(work, rounded_data=False)))
        chosen = before[0][0] if before is not None and TILE in candidates.get(before[0][0], ()) else chosen
    return chosen, times


def _with_copies(work: Gemm) -> list[Gemm]:
    """The work several times, each with copies of its weights, as many as `copies` makes."""
    layers = [[replace(layer, weights=own) for own in copies(layer.weights)] for layer in work.layers()]
    return [replace(work, one=one, second=second[0] if second else None) for one, *second in zip(*layers, strict=False)]


def _run_next(works: Iterator[Gemm], attrs: Mapping[str, Any]) -> Tensor:
    return run(next(works), attrs)


def tiles(work: Gemm) -> list[Tile]:
    """Tiles of our own kernel that are worth trying; none where it can not do the work."""
    if not can_compile() or work.one.x.dtype not in _TILED:
        return []
    if work.activation not in NUMBERS or not all(map(_fits, work.layers())):
        return []
    members, inner, columns = work.one.weights.shape
    rows = work.one.rows.shape[1]
    return list(kernel.candidates(members, rows, inner, columns, split=work.second is None))


def _fits(layer: Layer) -> bool:
    """True if there is anything to do, and positions in one member's matrices can be counted with 32 bits."""
    return all(one.numel() and extent(one) < _LARGEST for one in (layer.rows[:1], layer.weights[:1]))


def by_library(work: Gemm) -> Tensor:
    """cuBLAS' batched product, then what follows it."""
    if work.second is None:
        return _activated(work, _batched(work.one, rows_first=work.rows_first))
    other = _batched(work.second)
    if work.addend is not None:
        other = torch.cat([work.addend, other])
    if work.one.bias is None:
        return _activated(work, torch.baddbmm(other, work.one.rows, work.one.weights))
    return _activated(work, _batched(work.one) + other)


def _batched(layer: Layer, *, rows_first: bool = False) -> Tensor:
    rows, out = layer.rows, None
    if rows_first:
        members, _, columns = layer.weights.shape
        out = rows.new_empty((rows.shape[1], members, columns)).permute(1, 0, 2)
    if layer.bias is None:
        return torch.bmm(rows, layer.weights, out=out)
    return torch.baddbmm(layer.bias.unsqueeze(1), rows, layer.weights, out=out)


def _activated(work: Gemm, result: Tensor) -> Tensor:
    return activate(work.activation, work.alpha)(result) if work.activation else result


def _is_wide(work: Gemm) -> bool:
    """True if all members' weights side by side are one matrix, as they lie, and all read the same rows."""
    if work.second is not None or work.one.x.dim() != 2:
        return False
    members, inner, columns = work.one.weights.shape
    member, row, column = work.one.weights.stride()
    beside = (row, column) == (members * columns, 1) and member == columns
    below = (row, column) == (1, inner) and member == columns * inner
    return beside or below or (members == 1 and (row, column) in ((columns, 1), (1, inner)))


def by_wide_product(work: Gemm) -> Tensor:
    """One product with all members' weights side by side; the result is a view of it."""
    layer = work.one
    members, inner, columns = layer.weights.shape
    if layer.weights.stride(2) == 1:
        wide = layer.weights.permute(1, 0, 2).reshape(inner, members * columns)
    else:
        wide = layer.weights.mT.reshape(members * columns, inner).t()
    if layer.bias is None:
        result = _activated(work, torch.mm(layer.x, wide))
    else:
        bias = layer.bias.expand(members, -1).reshape(-1)
        if work.activation in IN_LIBRARY:
            result = torch._addmm_activation(bias, layer.x, wide, use_gelu=True)
        else:
            result = _activated(work, torch.addmm(bias, layer.x, wide))
    return result.view(len(layer.x), members, columns).permute(1, 0, 2)


def by_kernel(work: Gemm, tile: Tile, result: torch.dtype | None = None) -> Tensor:
    """Our own kernel, with a tile from `tiles`. Gives another type than the data's, if one is asked for."""
    return kernel.products(work, tile, tf32=torch.backends.cuda.matmul.allow_tf32, result=result)
