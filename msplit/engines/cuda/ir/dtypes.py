"""Conversion between NumPy arrays and PyTorch tensors, and between their names of dtypes.

Lowerings on the unsigned integers that PyTorch hardly computes with, by way of signed ones of twice the width.

PyTorch stores uint16, uint32 and uint64, and has kernels for few ops of them. Those that only add, multiply and move give the low bits
right in a wider signed type, since sums wrap around here and there alike; comparing and dividing a number that has not wrapped is right
there, too. Of uint64 there is no wider type: the first kind runs on the same bits as int64, and where the order counts, it is shifted by
half of the range.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.graph import RESULT
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.opset import schema
from msplit.opset.traits import ops_with

_NAMES = (
    "float16 bfloat16 float32 float64 float8_e5m2 float8_e4m3fn complex64 complex128 bool "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_NAMED = {np.dtype(name): name for name in _NAMES.split()}  # NumPy puts a name together anew each time

# Dtypes that NumPy has only through ml_dtypes, with the integer of the same width that carries their bits across.
_BY_BITS: dict[str, tuple[Any, type[np.generic], torch.dtype]] = {
    "bfloat16": (ml_dtypes.bfloat16, np.uint16, torch.uint16),
    "float8_e5m2": (ml_dtypes.float8_e5m2, np.uint8, torch.uint8),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8, torch.uint8),
}

_REASONS = {
    "string": "strings have no place on a GPU",
    "resource": "a resource handle is no tensor",
    "variant": "a variant is no tensor",
}


def torch_dtype(name: str) -> torch.dtype:
    """The PyTorch dtype of a TensorFlow (or NumPy) dtype name such as ``"bfloat16"``.

    Raises:
        Unsupported: PyTorch has no such dtype.
    """
    found = _DTYPES.get(name)
    if found is None:
        reason = _REASONS.get(name, "PyTorch has no such dtype")
        raise Unsupported(f"dtype {name} can not be a tensor of the cuda engine: {reason}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The TensorFlow name of a PyTorch dtype: the inverse of `torch_dtype`."""
    return str(dtype).removeprefix("torch.")


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types of which PyTorch has no sums, products or choices, and the ones in which these give the same bits."""


def in_signed(tensor: torch.Tensor) -> torch.Tensor:
    """Unsigned integers as signed ones in the same memory, anything else as it is."""
    return tensor.view(SIGNED[tensor.dtype]) if tensor.dtype in SIGNED else tensor


def wider_type(node: Node, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The types that an op on `x` computes in and gives; both that of `x` where the engine says nothing else."""
    result = torch_dtype(str(node.attrs[RESULT])) if RESULT in node.attrs else x.dtype
    return torch.promote_types(x.dtype, result) if RESULT in node.attrs else x.dtype, result


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype (ml_dtypes' for bfloat16 and float8) of a dtype name that `torch_dtype` knows.

    Raises:
        Unsupported: PyTorch has no such dtype.
    """
    torch_dtype(name)
    return np.dtype(_BY_BITS[name][0] if name in _BY_BITS else name)


LARGE = 1 << 20
"""Bytes of an array from which on one copy less counts."""


def to_torch(array: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """The array as a tensor of the same shape, dtype and bits on the device.

    On the CPU the tensor shares the memory of a writeable, contiguous array.

    Raises:
        Unsupported: PyTorch has no such dtype (a string array, for example).
    """
    array = np.asarray(array)
    name = _NAMED.get(array.dtype) or ("string" if array.dtype.kind in "OSU" else array.dtype.name)
    dtype = torch_dtype(name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # Not ascontiguousarray, which makes a scalar a vector. PyTorch shares only writeable memory without a warning.
    lent = array.nbytes >= LARGE and torch.device(device).type != "cpu"
    held = array = np.asarray(array, order="C") if array.flags.writeable or lent else np.array(array, order="C")
    if not array.flags.writeable:  # it is copied from where it is, and only read
        memory: Any = (ctypes.c_ubyte * array.nbytes).from_address(held.ctypes.data)
        array = np.frombuffer(memory, array.dtype).reshape(array.shape)
    tensor = torch.from_numpy(array.view(_BY_BITS[name][1]) if name in _BY_BITS else array)
    return (tensor.view(dtype) if name in _BY_BITS else tensor).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values as an array of the same shape, dtype and bits. Waits for the tensor's device."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = dtype_name(tensor.dtype)
    if name in _BY_BITS:
        numpy_type, _, carrier = _BY_BITS[name]
        return np.asarray(tensor.contiguous().view(carrier).numpy().view(numpy_type))
    return np.asarray(tensor.numpy())


def tensor_of(value: Any) -> torch.Tensor:
    """A tensor in the memory of a value that speaks DLPack, wherever that is.

    It may still be being computed: what the current stream of its device does from now on waits for that, as DLPack has it. Of PyTorch's
    own, as everywhere in PyTorch, whatever the current stream was to do before is waited for, and no other.

    Raises:
        Unsupported: Its library hands it to nobody, PyTorch has no such type, or it is a tensor that has no memory or is sparse.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided:
            kind = "meta" if value.is_meta else "sparse"
            raise Unsupported(f"a {kind} tensor can not be taken: its numbers do not lie side by side")
        return value.detach()
    try:
        if type(value).__module__.partition(".")[0] == "tensorflow":  # has no streams: what it hands over is there
            return torch.utils.dlpack.from_dlpack(value.__dlpack__())
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise Unsupported(f"a {type(value).__name__} can not be taken as a tensor: {reason}") from problem


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, without gaps, which any library can take."""
    return tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bits as integers of its elements' width, of 8 bytes at most, without a copy.

    Bits that only move may mean anything: one compiled kernel then serves every dtype of a width. The last axis of a complex128 tensor,
    which must have one, becomes twice as long.
    """
    return tensor.view(_WORDS[min(tensor.element_size(), 8)])


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}

_SAME_BITS, _ORDERED, _EXACT = ops_with("wraps"), ops_with("ordered"), ops_with("exact when widened")


def run_in_signed(function: Callable[..., Any], node: Node, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Runs a lowering that PyTorch has no kernels for, as the lowering itself would.

    Raises:
        NotImplementedError: The inputs are of other types.
        Unsupported: The op can not be computed so.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    wide = any(tensor.dtype == torch.uint64 for tensor in tensors)
    if not wide and not any(tensor.dtype in _WIDER for tensor in tensors):
        raise NotImplementedError(f"there is no kernel for {', '.join(sorted({str(one.dtype) for one in tensors}))}")
    ordered = node.op in _ORDERED
    if not (ordered or node.op in _SAME_BITS or (node.op in _EXACT and not wide)):
        types = sorted({dtype_name(one.dtype) for one in tensors if one.dtype in (*_WIDER, torch.uint64)})
        raise Unsupported(f"there is no kernel for {' and '.join(types)}")
    expected = _result_types(node, inputs)
    results = function(node, *(_signed(value, ordered) if isinstance(value, Tensor) else value for value in inputs))
    found = results if isinstance(results, tuple | list) else (results,)
    return tuple(_unsigned(one, dtype, ordered) for one, dtype in zip(found, expected, strict=False))


def _signed(value: Tensor, ordered: bool) -> Tensor:
    if value.dtype == torch.uint64:
        bits = value.view(torch.int64)
        return bits ^ torch.iinfo(torch.int64).min if ordered else bits
    return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value


def _unsigned(value: Tensor, dtype: torch.dtype | None, ordered: bool) -> Tensor:
    if dtype == torch.uint64 and value.dtype == torch.int64:
        return (value ^ torch.iinfo(torch.int64).min if ordered else value).view(torch.uint64)
    return value.to(dtype) if dtype in _WIDER and value.dtype == _WIDER[dtype] else value


def _result_types(node: Node, inputs: tuple[Any, ...]) -> list[torch.dtype | None]:
    """Types of the results as TensorFlow has them, by the node's attributes or, where those are left out, by the inputs."""
    info = schema.lookup(node.op)
    attrs = dict(node.attrs)
    for arg, value in zip(info.inputs if info else (), inputs, strict=False):
        if arg.number_attr or arg.type_list_attr:
            break
        if arg.type_attr and isinstance(value, Tensor):
            attrs.setdefault(arg.type_attr, dtype_name(value.dtype))
    if info and info.inputs and info.inputs[0].type_attr and isinstance(inputs[0], Tensor):
        attrs.setdefault(info.inputs[0].type_attr, dtype_name(inputs[0].dtype))
    names = schema.output_dtypes(node.op, attrs) or ()
    return [None if name is None else torch_dtype(name) for name in names]
