"""Special values: each op of elements that has a lowering gives for all pairs of them what TensorFlow's kernel on the CPU gives.

Values are zeros, ones, infinities, NaN, the least and the largest numbers of a type and numbers beside these, with some at random. Which
ops are tried is read from the table of lowerings: all that take one or two tensors of one type and give one of their shape.

TensorFlow's kernels are not one function: a vector of elements is computed by another formula than the last few of a tensor, and numbers
below the least normal one are zero. So right is what either formula gives; of such small numbers also what the kernel gives for the least
normal one, or the kernel of float64. Where TensorFlow's result is an accident, `LEFT` says which and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.case import Result

FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (
    *FLOATS,
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
)

BY_ROW = frozenset({"Softmax", "LogSoftmax", "XlaSort", "XlaSharding", "FFT", "IFFT", "Squeeze", "ParallelConcat"})
"""Ops that keep the shape of a vector and are no functions of elements, or none to try."""

WIDE = frozenset({"Zeta", "Polygamma", "Igamma", "Igammac", "SoftplusGrad"})
"""Series, of which TensorFlow's float32 gives few digits, and what it divides by exp(-x), which a narrow type can not hold: its float64 is
right, too."""

_RTOL = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2, "complex64": 1e-4, "complex128": 1e-9}
_MOST = 300  # differing elements that are looked at

Left = Callable[[Sequence[Any], Any, Any, float], bool]


def _near_zeta(got: Any, x: Any, q: Any) -> bool:
    """Whether a number is what Hurwitz's zeta comes to for a large q."""
    return bool(np.isclose(got, q ** (1 - x) / (x - 1), rtol=1e-6, atol=0))


LEFT: dict[str, Left] = {
    # 1 / x is below the least normal number, or the quotient is, and becomes zero.
    "Spence": lambda x, want, got, tiny: x[0] > 0.25 / tiny,
    **dict.fromkeys(("BesselK0", "BesselK0e", "BesselK1", "BesselK1e"), lambda x, want, got, tiny: 0 < x[0] <= tiny),
    "FloorDiv": lambda x, want, got, tiny: abs(x[0] / x[1]) < tiny,
    # PyTorch's in float64 is off by up to 8e-7 between 4 and 9.
    **dict.fromkeys(
        ("BesselJ0", "BesselJ1", "BesselY0", "BesselY1"),
        lambda x, want, got, tiny: 4 < abs(x[0]) < 9 and abs(want - got) < 1e-6,
    ),
    # TensorFlow's polynomial in float64 is infinity by infinity for large numbers.
    "Erf": lambda x, want, got, tiny: np.isnan(want) and abs(x[0]) > 6 and got == np.sign(x[0]),
    # It rounds (x + 1) / 2 before it asks whether that is one.
    "Erfinv": lambda x, want, got, tiny: 1 < x[0] < 1.01 and np.isnan(got),
    # What its series come to for arguments that are nearly zero, or too large for them: terms below the least normal number are zero.
    "Igamma": lambda x, want, got, tiny: x[0] <= 2 * tiny or min(x) > 1e6,
    "Igammac": lambda x, want, got, tiny: x[0] <= 2 * tiny or min(x) > 1e6,
    "Zeta": lambda x, want, got, tiny: 1 < x[0] < 1.01 or (want == 0 and x[1] ** -x[0] < tiny and _near_zeta(got, *x)),
    # Its documentation says that integers stay what they are; its kernel makes them zero.
    "Round": lambda x, want, got, tiny: got == x[0] and want == 0,
    # The logarithm of a complex zero.
    "Log1p": lambda x, want, got, tiny: x[0] == -1 and np.iscomplexobj(want),
    # A range that is empty.
    "FakeQuantWithMinMaxVarsPerChannel": lambda x, want, got, tiny: not x[1] < x[2] or x[2] - x[1] < 1e-30,
    # A limit that is NaN counts or not, by the kernel's formula.
    "ClipByValue": lambda x, want, got, tiny: bool(np.isnan(x[1]) or np.isnan(x[2])),
}
"""Per op whether a difference is left: told the inputs, TensorFlow's result, ours, and the least normal number."""


@dataclass(frozen=True)
class Values:
    """Some ops of one type, and numbers at random beside the special ones.

    Attributes:
        name: Says how to make it again.
        dtype: Of what they take.
        ops: Which.
        more: The numbers.
    """

    name: str
    dtype: str
    ops: tuple[str, ...]
    more: tuple[float, ...]


def make(seed: int) -> Values:
    """A type, a few ops and some numbers."""
    random = Random(f"values:{seed}")
    dtype = DTYPES[seed % len(DTYPES)]
    # Not far from one: TensorFlow's kernels of some series sum as many terms as a number is large.
    more = tuple(random.choice([-1, 1]) * 2.0 ** random.uniform(-6, 6) for _ in range(6))
    return Values(f"values:{seed}", dtype, tuple(random.sample(sorted(ops()), 12)), more)


@functools.cache
def ops() -> dict[str, int]:
    """The ops that may be tried, with how many inputs they take."""
    from msplit.engines.cuda.ir.lowering import table
    from msplit.opset import schema

    found = {}
    for op, lowering in table().items():
        info = None if lowering.own or lowering.static or lowering.dynamic or lowering.mutates else schema.lookup(op)
        if info is None or op in BY_ROW or not 1 <= len(info.inputs) <= 3 or len(info.outputs) != 1:
            continue
        if any(arg.number_attr or arg.type_list_attr or arg.dtype == "resource" for arg in info.inputs):
            continue
        if len({arg.type_attr or arg.dtype for arg in info.inputs}) == 1:
            found[op] = len(info.inputs)
    return found


def special(dtype: str, more: Sequence[float] = ()) -> np.ndarray:
    """Special values of a type, and others."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.array([False, True])
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        wanted = {0, 1, -1, 2, -2, 3, 7, -7, 31, 63, 64, limits.min, limits.min + 1, limits.max, limits.max - 1}
        wanted |= {int(number) for number in more}
        return np.array(sorted(number for number in wanted if limits.min <= number <= limits.max), kind)
    if kind.kind == "c":  # what complex arithmetic makes of infinities is another matter
        parts = [0.0, 1.0, -1.0, 2.5, 0.25, *more]
        return np.array([complex(a, b) for a in parts for b in parts], kind)
    limits = ml_dtypes.finfo(kind)
    tiny, most, eps = float(limits.tiny), float(limits.max), float(limits.eps)
    wanted = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 2.5, 6.0, 100.0, -100.0, np.inf, -np.inf, np.nan]
    wanted += [tiny, -tiny, most, -most, most / 4, eps, -eps, 1 + eps]
    wanted += [] if dtype == "float64" else [tiny / 2, -tiny / 2]  # nothing wider says what comes of smaller ones
    wanted += [most**0.5, -(most**0.5), most**0.75, tiny**0.5, tiny**0.75, 1e30, 1e-30, *more]
    with np.errstate(over="ignore", under="ignore"):
        return np.array(wanted, np.float64).astype(kind)


def run(case: Values, folder: Path) -> Result:
    """Compares every op with TensorFlow's."""
    return Result("; ".join(filter(None, (differences(op, case.dtype, case.more)[1] for op in case.ops))))


def differences(op: str, dtype: str, more: Sequence[float] = ()) -> tuple[bool, str]:
    """Whether both have a kernel of an op of elements for a type, and where they differ."""
    from msplit.engines.cuda.ir.node import Unsupported
    from tests.engines.cuda.ops.harness import run_lowering

    inputs = _pairs(op, special(dtype, more))
    want = _tensorflow(op, inputs)
    if want is None or want.shape != inputs[0].shape:
        return False, ""
    try:
        (result,) = run_lowering(op, inputs)
    except (Unsupported, NotImplementedError, RuntimeError):
        return False, ""  # which says so
    got = _numpy(result)
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return True, f"{op} of {dtype}: {got.dtype}{got.shape}, TensorFlow has {want.dtype}{want.shape}"
    bad = [
        place
        for place in np.flatnonzero(_differ(got, want))[:_MOST]
        if not _accepted(op, [array[place : place + 1] for array in inputs], got[place : place + 1], want[place])
    ]
    if not bad:
        return True, ""
    told = ", ".join(f"{tuple(str(x[place]) for x in inputs)} is {got[place]}, not {want[place]}" for place in bad[:4])
    return True, f"{op} of {dtype}: {len(bad)} of {len(got)} differ: {told}"


def _numpy(tensor: Any) -> np.ndarray:
    from msplit.engines.cuda.ir.dtypes import to_numpy

    return np.asarray(to_numpy(tensor))


def _pairs(op: str, values: np.ndarray) -> list[np.ndarray]:
    """All pairs, in vectors whose last elements do not count: they are computed apart."""
    count = ops()[op]
    if count == 3:
        values = values[:20]
    found = [grid.reshape(-1) for grid in np.meshgrid(*[values] * count, indexing="ij")]
    if count == 2 and values.dtype.kind in "iu" and ("Div" in op or "Mod" in op or op == "Pow"):
        limits = np.iinfo(values.dtype)
        # TensorFlow refuses to divide by zero and to invert integers; its oldest kernels die of the last one.
        keep = found[1] >= 0 if op == "Pow" else found[1] != 0
        if limits.min:
            keep &= (found[0] != limits.min) | (found[1] != -1)
        found = [one[keep] for one in found]
    return [np.concatenate([one, np.ones(-len(one) % 64, values.dtype)]) for one in found]


def _tensorflow(op: str, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    from tensorflow import errors

    from tests.engines.cuda.ops.harness import run_tensorflow

    if not _may_be(op, inputs[0].dtype.name):
        return None
    try:
        return run_tensorflow(op, inputs)[0]
    except (errors.OpError, TypeError, ValueError):  # it has no kernel of the type, or wants other shapes
        return None


@functools.cache
def _may_be(op: str, dtype: str) -> bool:
    """Whether an op is defined for a type: to ask for another one takes longer than to run one, as TensorFlow lists all kernels then."""
    from tensorflow import dtypes
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    of_first = definition.input_arg[0].type_attr
    (allowed,) = [one.allowed_values.list.type for one in definition.attr if one.name == of_first] or [()]
    return not allowed or dtypes.as_dtype(dtype).as_datatype_enum in allowed


def _differ(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    name = want.dtype.name
    if name not in _RTOL:
        return got != want
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    left, right = got.astype(wide), want.astype(wide)
    with np.errstate(all="ignore"):
        near = np.abs(left - right) <= _RTOL[name] * (1 + np.abs(right))
        return ~((left == right) | (np.isnan(left) & np.isnan(right)) | (near & np.isfinite(right)))


def _accepted(op: str, one: list[np.ndarray], got: np.ndarray, want: Any) -> bool:
    name = one[0].dtype.name
    alone = _tensorflow(op, one)
    if alone is not None and not _differ(got, alone)[0]:
        return True
    if name not in FLOATS:
        return op in LEFT and LEFT[op]([x[0] for x in one], want, got[0], 0.0)
    tiny = float(ml_dtypes.finfo(one[0].dtype).tiny)
    numbers = [float(x[0]) for x in one]
    small = [0 < abs(number) < tiny for number in numbers]
    if any(small) or op in WIDE:
        least = [np.copysign(tiny, x).astype(x.dtype) if below else x for x, below in zip(one, small, strict=True)]
        for others in (least, [x.astype(np.float64) for x in one]):
            found = _tensorflow(op, others)
            with np.errstate(over="ignore"):
                if found is None or not _differ(got, found.astype(got.dtype))[0]:
                    return True
    with np.errstate(all="ignore"):
        return op in LEFT and LEFT[op](
            [np.float64(number) for number in numbers], np.float64(want), np.float64(got[0]), tiny
        )
