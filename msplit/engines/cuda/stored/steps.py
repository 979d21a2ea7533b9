"""Steps of a program as files hold them: an op, its kernel, and what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msplit.engines.cuda.ir.graph import FUSED, Key, Op
from msplit.engines.cuda.ir.interpret import LoweringCall
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.program import KernelCall
from msplit.engines.cuda.kernels.codec import decode, decode_array, encode, encode_array
from msplit.engines.cuda.passes.pointwise_fusion.fuse import Compiler, Kernel, packed_layouts, unpacked_layouts
from msplit.engines.cuda.passes.pointwise_fusion.outline import Body
from msplit.errors import EngineError

_OF_STEP = ("outputs", "launches", "bytes", "bases", "varying", "traffic", "scattered")
"""Fields of a step that are kept as they are, by their names."""


def pack_step(step: KernelCall) -> dict[str, Any]:
    """A step as files hold it.

    Raises:
        EngineError: Something in it can not be stored; the message names it.
    """
    op, call = step.op, step.call
    assert isinstance(call, LoweringCall)
    attrs = {name: value for name, value in call.op.attrs.items() if name not in ("body", "kernel")}
    body, kernel = call.op.attrs.get("body"), call.op.attrs.get("kernel")
    try:
        packed, packed_body = encode(attrs), None if body is None else body.packed()
    except TypeError as problem:
        raise EngineError(f"{op.op}: {problem}", where=f"node {op.name}", fix="report a bug in msplit") from None
    return {
        "name": op.name,
        "op": call.op.op,
        "node": op.node,
        "attrs": packed,
        "body": packed_body,
        "kernel": None if kernel is None else packed_layouts(kernel.layouts),
        "inputs": op.inputs,
        "source_nodes": op.source_nodes,
        "batch": op.batch,
        "replaces": op.replaces,
        "reads": step.inputs,
        "bound": {str(slot): encode_array(value) for slot, value in call.bound.items()},
        "unknown": call.unknown,
        "nchw": call.nchw,
        "mixed": call.mixed,
        **{name: getattr(step, name) for name in _OF_STEP},
    }


def unpack_step(one: Mapping[str, Any], compiler: Compiler | None) -> KernelCall:
    """A step as it was packed. The kernel of a fused op is made by the compiler; without one its members run one by one."""
    names, inputs = one["source_nodes"], [key_of(key) for key in one["inputs"]]
    op = Op(one["node"], one["name"], one["op"], decode(one["attrs"]), inputs, names, one["batch"], one["replaces"])
    if op.op == FUSED:
        op.attrs["body"] = Body.unpacked(one["body"])
        op.attrs["kernel"] = None if compiler is None else _kernel(one, op, compiler)
    bound = {int(slot): decode_array(value) for slot, value in one["bound"].items()}
    call = LoweringCall(table()[op.op], op, bound, tuple(one["unknown"]), bool(one["nchw"]), bool(one.get("mixed")))
    fields = {name: one[name] for name in _OF_STEP} | {"bases": tuple(one["bases"])}
    return KernelCall(op, call, tuple(key_of(key) for key in one["reads"]), bound=bound, **fields)


def _kernel(one: Mapping[str, Any], op: Op, compiler: Compiler) -> Kernel | None:
    """The kernel of a fused op; compiled where the store has none. None runs its members one by one."""
    if one["kernel"] is None:
        return None
    kernel = compiler.kernel(op.attrs["body"], unpacked_layouts(one["kernel"]))
    return None if isinstance(kernel, str) else kernel


def key_of(data: Sequence[int]) -> Key:
    """The key of a value, which files hold as two numbers."""
    node, port = data
    return int(node), int(port)
