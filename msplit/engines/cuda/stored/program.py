"""Files of a compiled model: its program as JSON, and its constants.

A compiled model with its plan as JSON, its constants apart, and back: without a trace, since all that a trace learns is in it.

The constants of several programs in one file, each block of memory once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.engines.base import HANDED, STEPS, Arrays
from msplit.engines.cuda.autotune.batched_matmul import TILE, WIDE
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name, numpy_dtype, to_numpy, torch_dtype
from msplit.engines.cuda.ir.graph import FUSED, Key, OpGraph
from msplit.engines.cuda.ir.program import KernelCall, Program
from msplit.engines.cuda.ir.windows import ROUNDS, TILES
from msplit.engines.cuda.kernels.codec import decode, decode_array, encode, encode_array
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.ops.fused import KERNEL
from msplit.engines.cuda.options import SharedKernel, StoredPlan
from msplit.engines.cuda.passes.pointwise_fusion.fuse import Compiler, observe
from msplit.engines.cuda.passes.tracing import trace
from msplit.engines.cuda.runtime import plan_binding
from msplit.engines.cuda.runtime.executables import Compiled, Optimized, prove, untimed_plan
from msplit.engines.cuda.runtime.host import HostPart
from msplit.engines.cuda.stored.steps import key_of, pack_step, unpack_step
from msplit.engines.table_rows import ROWS
from msplit.engines.user_rows import UserRows
from msplit.schedule.plan import Plan

ALIGNED = 512
"""Every block of memory begins at a multiple of so many bytes, as PyTorch's own do: kernels are compiled for aligned addresses."""

_LARGEST, _HOST = 1 << 42, 1 << 41
"""Most bytes that a file can have, and first byte of what stays in the host's memory: it comes last in the file, wherever that begins."""


@dataclass
class Weights:
    """Blocks of memory to be written behind each other. Those of several programs that are equal are one; those of one program are apart,
    since they may get different values later. What the device has comes first, and what stays in the host's memory last.

    Attributes:
        blocks: By where they will be, by content, and by how many others of a program are equal, where a block begins, and its bytes.
        sizes: Bytes of what the device has, and of what the host has.
    """

    blocks: dict[tuple[int, str, int], tuple[int, torch.Tensor]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=lambda: [0, 0])
    _of_program: dict[str, dict[int, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins a further program."""
        self._of_program.clear()

    def add(self, tensor: torch.Tensor) -> list[Any]:
        """Keeps the memory that a tensor lies in. Where the tensor will be: type, shape, strides, and first element of all memory."""
        storage, place = tensor.untyped_storage(), Device.of(tensor.device).owned(HostTables).find(tensor)
        if place is None:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu()
        else:
            data = torch.from_numpy(place.host.reshape(-1).view(np.uint8))
        hosted = int(place is not None)
        content = hashlib.sha256(data.numpy().data).hexdigest()
        equal = self._of_program.setdefault(content, {})
        name = hosted, content, equal.setdefault(storage.data_ptr(), len(equal))
        if name not in self.blocks:
            self.blocks[name] = self.sizes[hosted], data
            self.sizes[hosted] += data.numel() + -data.numel() % ALIGNED
        start = self.blocks[name][0] + tensor.storage_offset() * tensor.element_size()
        where = [dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride()), start + hosted * _HOST]
        return where if place is None else [*where, place.cache.capacity, *filter(None, [place.packed])]

    def memory(self) -> NDArray[np.uint8]:
        """Bytes of what the device has, in one array."""
        pieces = [np.frombuffer(piece, np.uint8) for piece in self.pieces((0,))]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)

    def tables(self) -> dict[int, NDArray[np.uint8]]:
        """Blocks of what stays in the host's memory, by where each begins, for `StoredTables`."""
        return {start: data.numpy() for (hosted, *_), (start, data) in self.blocks.items() if hosted}

    def pieces(self, kinds: Collection[int] = (0, 1)) -> Iterator[memoryview]:
        """The bytes of the file, or of what the device (0) or the host (1) has."""
        for name in sorted(
            (one for one in self.blocks if one[0] in kinds), key=lambda one: (one[0], self.blocks[one][0])
        ):
            data = self.blocks[name][1]
            yield memoryview(data.numpy()).cast("B")
            yield memoryview(bytes(-data.numel() % ALIGNED))


def tensor_of(data: Any, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of a file, bytes on a device, from what `Weights.add` gave.

    Raises:
        ValueError: It would lie outside of it.
        Unsupported: Its type has no tensors.
    """
    name, shape, stride, start = data
    dtype = torch_dtype(name)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else -1
    if (
        not all(isinstance(one, int) and 0 <= one < _LARGEST for one in (*shape, *stride, start))
        or start % dtype.itemsize
    ):
        raise ValueError("a weight has no place")
    if start + (last + 1) * dtype.itemsize > memory.numel():
        raise ValueError("a weight lies outside of the file")
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), start // dtype.itemsize, shape, stride)


@dataclass(frozen=True, eq=False)
class StoredTables:
    """Tables of a file that stay in the host's memory.

    Args:
        blocks: Their bytes, by where they begin behind those of what the device has.
        place: The device that looks rows up in them.
    """

    blocks: Mapping[int, NDArray[np.uint8]]
    place: torch.device
    _arrays: dict[tuple[Any, ...], NDArray[Any]] = field(default_factory=dict)

    def tensors(self, wanted: Mapping[Key, Any]) -> dict[Key, torch.Tensor]:
        """Tables as the device sees them, from what `Weights.add` gave. Those of several programs are the same.

        Raises:
            ValueError: One lies outside of the file.
        """
        groups: dict[tuple[str, int, int, str], dict[Key, NDArray[Any]]] = {}
        for key, (name, shape, _, start, capacity, *packed) in wanted.items():
            array, width = self._array(name, tuple(shape), start - _HOST), math.prod(shape[1:])
            if packed and (packed not in [[kind] for kind in ROWS] or (name, len(shape)) != ("int32", 2)):
                raise ValueError("rows of a table are packed in no known way")
            groups.setdefault((name, width, capacity, packed[0] if packed else ""), {})[key] = array
        found: dict[Key, torch.Tensor] = {}
        for (_, _, capacity, pack), arrays in groups.items():
            if not 0 < capacity <= sum(map(len, arrays.values())):
                raise ValueError("a cache has no size")
            tensors = Device.of(self.place).owned(HostTables).cached([*arrays.values()], capacity, pack)
            found |= dict(zip(arrays, tensors, strict=True))
        return found

    def _array(self, name: str, shape: tuple[int, ...], start: int) -> NDArray[Any]:
        dtype = numpy_dtype(name)
        size = math.prod(shape) * dtype.itemsize
        begin = max((one for one in self.blocks if one <= start), default=0)
        data, start = self.blocks.get(begin, np.zeros(0, np.uint8)), start - begin
        if not shape or min(shape) < 1 or not 0 <= start <= start + size <= len(data):
            raise ValueError("a table lies outside of the file")
        key = name, shape, begin + start
        if key not in self._arrays:
            self._arrays[key] = data[start : start + size].view(dtype).reshape(shape)
        return self._arrays[key]


_CHOSEN = (TILE, WIDE, TILES, KERNEL, ROUNDS)
"""Attributes that hold what was measured or compiled for one GPU."""


@dataclass(frozen=True, eq=False)
class Restored:
    """A compiled model that was read.

    Attributes:
        compiled: Ready for `executables.executable_of`.
        plan: Of its steps, proved.
    """

    compiled: Compiled
    plan: Plan

    @property
    def host(self) -> HostPart | None:
        """What the host runs of it."""
        return self.compiled.optimized.host

    @property
    def shared(self) -> UserRows:
        """Inputs of the model that may come as one row for each user."""
        once, host = self.compiled.optimized.once, UserRows() if self.host is None else self.host.shared
        own = {name: one for name, one in once.entries.items() if not name.endswith(HANDED)}
        return UserRows({**own, **host.entries}, max(once.users, host.users), max(once.rows, host.rows))

    @property
    def device_part(self) -> Restored:
        """The rest of it."""
        return replace(self, compiled=replace(self.compiled, optimized=replace(self.compiled.optimized, host=None)))


def pack(compiled: Compiled, plan: Plan, weights: Weights) -> bytes:
    """A compiled model with its plan. Its constants are added to the weights.

    Raises:
        EngineError: Something in it can not be stored; the message names it.
    """
    program = compiled.program
    weights.begin()
    read = {key for step in program.steps for key in step.inputs} | set(program.fetches.values())
    shapes = {key: shape for key, shape in compiled.optimized.graph.shapes.items() if key in read}
    stored = plan_binding.store(program, plan)
    data = {
        "layout": compiled.layout,
        "facts": encode(dict(compiled.facts)),
        "steps": [pack_step(step) for step in program.steps],
        # In an order that does not depend on the batch, so that of equal ones the same are one.
        "constants": [[*key, weights.add(program.constants[key])] for key in sorted(program.constants) if key in read],
        "feeds": {name: list(key) for name, key in program.feeds.items()},
        "fetches": {name: list(key) for name, key in program.fetches.items()},
        "known": {name: encode_array(value) for name, value in program.known.items()},
        "dynamic": list(program.dynamic),
        "once": compiled.optimized.once.packed(),
        "fed": {name: [list(shape), dtype] for name, (shape, dtype) in program.fed.items()},
        "shapes": [[*key, list(shape)] for key, shape in shapes.items()],
        "plan": [list(kernel) for kernel in stored.kernels],
        "groups": [[group.kind, list(group.nodes), group.stream] for group in stored.groups],
    }
    return json.dumps(data, separators=(",", ":")).encode()


def unpack(data: bytes, memory: torch.Tensor, tables: StoredTables, feeds: Arrays, *, fits: bool) -> Restored:
    """A compiled model as it was packed.

    Args:
        memory: The bytes of the weights, on the device that is to run it.
        tables: Those of them that stay in the host's memory.
        feeds: Inputs for it.
        fits: True if it was made for this device and these versions. Where it was not, kernels are chosen and compiled anew, by timing
            them where there is a GPU; ops, weights and streams stay.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError, Unsupported: That is no such data.
        EngineError: A kernel can not be made anew here.
    """
    found = json.loads(data)
    compiler = Compiler(memory.device)
    steps = tuple(unpack_step(one, compiler if fits else None) for one in found["steps"])
    program = _program(found, steps, memory, tables)
    once = UserRows.unpacked(found.get("once", {}))
    once.hold_to(feeds)
    feeds = {STEPS: np.zeros((), np.int64), **once.of(feeds)}
    feeds = {name: feeds[name] for name in program.feeds}  # others are the host's
    # The graph that it was traced from, as far as another trace needs it.
    shapes = {(node, port): tuple(shape) for node, port, shape in found["shapes"]}
    optimized = Optimized(_graph(program, shapes), feeds, once=once)
    compiled = Compiled(program, str(found["layout"]), optimized, decode(found["facts"]))
    stored = StoredPlan(
        tuple((node, index, lane) for node, index, lane in found["plan"]),
        tuple(SharedKernel(kind, tuple(nodes), stream) for kind, nodes, stream in found["groups"]),
    )
    if not fits:
        compiled = _anew(compiled, compiler)
    return Restored(compiled, _plan(compiled.program, stored))


def _program(
    found: Mapping[str, Any], steps: tuple[KernelCall, ...], memory: torch.Tensor, tables: StoredTables
) -> Program:
    """The program of steps, whose order of execution follows from what they read. Every value is made before it is read."""
    made_by = {(step.op.node, port): number for number, step in enumerate(steps) for port in range(step.outputs)}
    edges = [(made_by[key], number) for number, step in enumerate(steps) for key in step.inputs if key in made_by]
    constants = {(node, port): where for node, port, where in found["constants"]}
    hosted = {key: where for key, where in constants.items() if where[3] >= _HOST}
    program = Program(
        steps,
        {key: tensor_of(where, memory) for key, where in constants.items() if key not in hosted}
        | tables.tensors(hosted),
        {name: key_of(key) for name, key in found["feeds"].items()},
        {name: key_of(key) for name, key in found["fetches"].items()},
        {name: decode_array(value) for name, value in found["known"].items()},
        Dag.of(len(steps), [before for before, _ in edges], [after for _, after in edges]),
        tuple(found["dynamic"]),
        {name: (tuple(shape), dtype) for name, (shape, dtype) in found["fed"].items()},
    )
    _check(program)
    return program


def _check(program: Program) -> None:
    """Checks that every value is made before it is read."""
    there = {*program.constants, *program.feeds.values()}
    for number, step in enumerate(program.steps):
        if not there.issuperset(step.inputs) or not all(-1 <= base <= number for base in step.bases):
            raise ValueError("a step reads what nobody makes")
        there.update((step.op.node, port) for port in range(step.outputs))
    if not there.issuperset(program.fetches.values()):
        raise ValueError("an output is missing")


def _graph(program: Program, shapes: Mapping[Key, tuple[int, ...]]) -> OpGraph:
    """The ops of a program as a graph, without what was chosen for one GPU, and with no constants but those that are bound."""
    ops, known = {}, dict[Key, NDArray[Any]]()
    for step in program.steps:
        if step.op.op == FUSED:
            attrs = {**step.op.attrs, "kernel": None}  # what it rounds is part of its body
        else:
            attrs = {name: value for name, value in step.op.attrs.items() if name not in _CHOSEN}
        ops[step.op.node] = replace(step.op, attrs=attrs, inputs=list(step.op.inputs))
        known |= {step.op.inputs[slot]: value for slot, value in step.bound.items()}
    return OpGraph(ops, known, dict(program.feeds), dict(program.fetches), dict(shapes))


def _anew(compiled: Compiled, compiler: Compiler) -> Compiled:
    """Program of equal ops, with kernels that are chosen and compiled here."""
    graph, feeds, nchw = compiled.optimized.graph, compiled.optimized.feeds, compiled.layout == "nchw"
    constants, host = compiled.program.constants, Device.of(compiler.device).owned(HostTables)
    places = {key: place for key, one in constants.items() if (place := host.find(one)) is not None}
    held = {key: constants[key] for key in places}
    graph.constants |= {
        key: places[key].host if key in places else to_numpy(tensor) for key, tensor in constants.items()
    }
    fused = [op for op in graph.ops.values() if op.op == FUSED]
    if fused and compiler.device.type == "cuda":
        layouts = observe(graph, feeds, compiler.device, trace, nchw=nchw, held=held)
        for op in fused:
            kernel = compiler.kernel(op.attrs["body"], tuple(layouts[key] for key in op.inputs))
            op.attrs["kernel"] = None if isinstance(kernel, str) else kernel
    program = trace(graph, feeds, compiler.device, nchw=nchw, held=held)
    return replace(compiled, program=replace(program, known=compiled.program.known))


def _plan(program: Program, stored: StoredPlan) -> Plan:
    """The plan that was stored; where the program has become another, one on the same streams."""
    plan = plan_binding.restore(program, stored)
    if plan is None:
        lane_of = {node: lane for node, _, lane in stored.kernels}
        lanes = [lane_of.get(step.op.source_nodes[0], 0) if step.launches else -1 for step in program.steps]
        placed = np.asarray(lanes, np.int32)
        placed[placed >= 0] = np.unique(placed[placed >= 0], return_inverse=True)[1]
        plan = untimed_plan(program, placed)
    return prove(plan, program)
