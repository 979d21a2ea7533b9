"""Writes msplit/opset/data/ops.json from the installed TensorFlow: what msplit knows about ops without importing TensorFlow.

    python scripts/make_op_table.py

Run it when the range of supported TensorFlow versions moves, and commit what changes. The file has one line per op:

    [inputs, outputs, stateful, defaults, kernels]     empty entries at the end are left out

    argument   "name:T" (type attribute), "name:N*T" (N of them), "name:[Ts]" (one per type of the list), "name:=int32" (fixed);
               "&" at the end where it is a reference
    kernel     [bits by type attribute, arguments in host memory]: what a GPU runs, bit i standing for DataType i. Kernels that
               differ only in types are one entry.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, kernel_def_pb2, op_def_pb2, types_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import kernels

TARGET = Path(__file__).parent.parent / "msplit" / "opset" / "data" / "ops.json"
# Attributes that say nothing about what a node computes.
NOISE = {"container", "shared_name", "executor_type", "config_proto", "_class"}


def dtype_names() -> dict[int, str]:
    """msplit's name of every DataType that is not a reference."""
    names = {}
    for value in types_pb2.DataType.values():
        if 0 < value < 100:
            try:
                names[value] = tf.dtypes.as_dtype(value).name
            except TypeError:
                names[value] = types_pb2.DataType.Name(value).removeprefix("DT_").lower()
    return names


def argument(arg: op_def_pb2.OpDef.ArgDef, names: dict[int, str]) -> str:
    """An argument as the text that `msplit.opset.schema` decodes."""
    if arg.type_list_attr:
        spec = f"[{arg.type_list_attr}]"
    else:
        spec = arg.type_attr or f"={names[arg.type]}"
        if arg.number_attr:
            spec = f"{arg.number_attr}*{spec}"
    return f"{arg.name}:{spec}{'&' if arg.is_ref else ''}"


def plain(value: attr_value_pb2.AttrValue, names: dict[int, str]) -> Any:
    """A default value as the plain value that a graph read from a file holds; None where there is no such value."""
    kind = value.WhichOneof("value")
    if kind == "type":
        return names.get(value.type)
    if kind == "s":
        return value.s.decode()
    if kind in ("i", "b", "f"):
        return getattr(value, kind)
    if kind == "shape":
        return None if value.shape.unknown_rank else [None if d.size < 0 else d.size for d in value.shape.dim]
    if kind == "list":
        each = value.list
        return (
            [names[t] for t in each.type]
            or [s.decode() for s in each.s]
            or list(each.i)
            or list(each.f)
            or list(each.b)
            or [plain(attr_value_pb2.AttrValue(shape=s), names) for s in each.shape]
        )
    return None


def merged(combinations: set[tuple[tuple[str, int], ...]]) -> list[dict[str, int]]:
    """Joins combinations of (attribute, type bits) that differ in one attribute, until none do."""
    entries = sorted(combinations)
    for attribute in sorted({name for entry in entries for name, _ in entry}):
        groups: dict[tuple[tuple[str, int], ...], int] = defaultdict(int)
        for entry in entries:
            rest = tuple(pair for pair in entry if pair[0] != attribute)
            groups[rest] |= dict(entry).get(attribute, 0)
        entries = sorted(tuple(sorted([*rest, (attribute, bits)] if bits else rest)) for rest, bits in groups.items())
    return [dict(entry) for entry in entries]


def gpu_kernels(registered: list[kernel_def_pb2.KernelDef]) -> list[list[Any]]:
    """What a GPU device runs for an op, by the runtime's own choice: its kernels, then those of the default device."""
    usable = [k for k in registered if not k.label]
    highest_cpu = max((k.priority for k in usable if k.device_type == "CPU"), default=0)
    found: list[list[Any]] = []
    for device in ("GPU", "DEFAULT"):
        by_memory: dict[tuple[str, ...], set[tuple[tuple[str, int], ...]]] = defaultdict(set)
        for kernel in usable:
            # Where the CPU kernel has the higher priority, TensorFlow places the node there unless it is told otherwise.
            if kernel.device_type != device or kernel.priority < highest_cpu:
                continue
            bits = []
            for constraint in kernel.constraint:
                # Few kernels ask for a certain number too; where the op runs does not hang on it.
                if types := set(constraint.allowed_values.list.type):
                    bits.append((constraint.name, sum(1 << t for t in types)))
            by_memory[tuple(sorted(set(kernel.host_memory_arg)))].add(tuple(sorted(bits)))
        for memory, combinations in sorted(by_memory.items()):
            # Unequal sets of constrained attributes can not be joined.
            by_attributes: dict[tuple[str, ...], set[tuple[tuple[str, int], ...]]] = defaultdict(set)
            for combination in combinations:
                by_attributes[tuple(name for name, _ in combination)].add(combination)
            for _, same in sorted(by_attributes.items()):
                found += [[bits, list(memory)] if memory else [bits] for bits in merged(same)]
    return found


def main() -> None:
    """Writes the table."""
    names = dtype_names()
    op_list = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    by_op: dict[str, list[kernel_def_pb2.KernelDef]] = defaultdict(list)
    for kernel in kernels.get_all_registered_kernels().kernel:
        by_op[kernel.op].append(kernel)
    lines = []
    for op in sorted(op_list.op, key=lambda o: o.name):
        defaults = {
            attr.name: plain(attr.default_value, names)
            for attr in op.attr
            if attr.HasField("default_value") and attr.name not in NOISE
        }
        entry: list[Any] = [
            [argument(arg, names) for arg in op.input_arg],
            [argument(arg, names) for arg in op.output_arg],
            int(op.is_stateful),
            {name: value for name, value in sorted(defaults.items()) if value is not None},
            gpu_kernels(by_op[op.name]),
        ]
        while entry and not entry[-1]:
            entry.pop()
        lines.append(f"{json.dumps(op.name)}:{json.dumps(entry, separators=(',', ':'))}")
    header = f'"tensorflow":{json.dumps(tf.__version__)},\n"dtypes":{json.dumps(names)}'
    TARGET.write_text("{" + header + ',\n"ops":{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    print(f"{TARGET}: {len(lines)} ops, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
