"""The engine's own build without a device and without running anything: what it would refuse, all of it.

The graph is built and loops and conds become what they run, exactly as before a run, on tensors that have a shape and no data (PyTorch's
`meta` device). Only what decides shapes and trip counts is computed: small constants, as shape inference does. What can not be told
without data, such as the shape of what the host part makes, is not held against the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.base import HANDED, MASKED_LOOPS, STEPS
from msplit.engines.cuda.frontend.functionalize import Raised
from msplit.engines.cuda.frontend.importer import build
from msplit.engines.cuda.frontend.list_values import TooMany
from msplit.engines.cuda.frontend.partition import Partition
from msplit.engines.cuda.ir.dtypes import numpy_dtype, torch_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, StandIn
from msplit.engines.cuda.ir.interpret import depends_on_values
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.passes.pipeline import Context, run_dry
from msplit.engines.cuda.passes.tracing import Tracer
from msplit.engines.table_rows import KeyedTable
from msplit.errors import EngineError, LoadError, MsplitError
from msplit.opset import schema
from msplit.shapes import Shapes
from msplit.shapes.registry import known

MOST_OUTPUTS = 16
"""Outputs of an op that nobody counts."""


@dataclass(frozen=True)
class DryRun:
    """Result of a dry build of a graph.

    Attributes:
        refused: What it refuses, in the order of the graph; what follows from another refusal is left out.
        by_values: Ops that stand in the way of a capture, as `depends_on_values` has it.
        whole: Whether loops were followed to their ends.
        sized: Values that the host hands on, and whose shapes are not known from those of the inputs.
        bounds: Loops whose turns depend on values -> the most turns that they take, and what bounds them.
    """

    refused: tuple[MsplitError, ...]
    by_values: tuple[Op, ...] = ()
    whole: bool = True
    sized: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def dry_run(raised: Raised, partition: Partition, sizes: Shapes, most: int | None = None) -> DryRun:
    """Builds what of a graph runs on the device as far as that goes without one.

    `sizes` are the shapes of the graph as it was. Loops that are longer than `most` ops (None: than the engine takes) are not followed
    to their ends.
    """
    flat = raised.flat
    fed: dict[str, Key] = {tensor.name: (tensor.node, tensor.port) for tensor in flat.inputs}
    handed = {f"{flat.graph.names[node]}:{port}{HANDED}": (node, port) for node, port in partition.frontier}
    others = {*partition.fetched, *partition.host_outputs}
    outputs = tuple(tensor for tensor in flat.outputs if tensor.name not in others)
    flat = replace(flat, outputs=(*outputs, *partition.handed_outputs()))
    given = {}
    for name, key in {**fed, **handed}.items():
        shape = sizes.shape(*raised.origin.get(key, key))
        full = tuple(int(size or 0) for size in shape) if shape is not None and known(shape) else None
        given[name] = StandIn(full, sizes.dtype(*key) or "float32")
    given[STEPS] = StandIn((), "int64")
    large: dict[Key, StandIn] = {}
    tracers: list[DryRunTracer] = []

    def traced(graph: OpGraph) -> DryRunTracer:
        tracers.append(DryRunTracer(graph, given, large))
        tracers[-1].most_unrolled = most
        return tracers[-1]

    try:
        keyed = {node: _empty(flat.graph.attrs[table]) for node, table in partition.keyed.items()}
        graph = build(flat, {**fed, **handed}, stand_ins=large, constants=partition.shapes, keyed=keyed)
        run_dry(graph, Context({}, torch.device("meta"), len(flat), raised.bodies, tracer=traced, stand_ins=large))
    except (EngineError, LoadError) as problem:  # a constant that can not be read: nothing was told of the rest
        return DryRun((problem,))
    refused = {(problem.what, problem.where): problem for tracer in tracers for problem in tracer.refused}
    by_values = [op for op in graph.ops.values() if tracers[-1].stops_capture(op)]
    sized = tuple(name.removesuffix(HANDED) for name in handed if given[name].shape is None)
    return DryRun(
        tuple(refused.values()),
        tuple(by_values),
        all(tracer.whole for tracer in tracers),
        sized,
        graph.facts.get(MASKED_LOOPS, {}),
    )


def _empty(attrs: Mapping[str, Any]) -> KeyedTable:
    """A table of no keys, whose contents nobody reads for a dry run."""
    rows = np.zeros((0, *attrs["value_shape"]), numpy_dtype(str(attrs["value_dtype"])))
    return KeyedTable(np.zeros(0, str(attrs["key_dtype"])), rows)


class DryRunTracer(Tracer):
    """A trace of shapes that goes on where the engine would stop.

    Attributes:
        refused: What it would have stopped for.
        whole: Whether all loops were followed to their ends.
    """

    def __init__(self, graph: OpGraph, given: Mapping[str, StandIn], large: Mapping[Key, StandIn]) -> None:
        super().__init__(graph, torch.device("meta"), nchw=False)
        self._given, self._large = given, large
        self.refused: list[MsplitError] = []
        self.whole = True
        self._unknown: set[int] = set()  # ops of which nothing can be told
        self._free: set[Key] = set()  # values whose shapes the engine knows to depend on other values

    def feed(self, feeds: Mapping[str, NDArray[np.generic]]) -> None:
        """Inputs and large constants as tensors without data."""
        named = {key: self._given[name] for name, key in self.graph.feeds.items()}
        for key, value in {**named, **self._large}.items():
            if value.shape is None:
                self._unknown.add(key[0])
                continue
            try:
                self.values[key] = torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=self.device)
            # A dtype that PyTorch lacks, or more bytes than a number of 64 bits counts: the file says so, and it may lie.
            except (Unsupported, RuntimeError):
                self._unknown.add(key[0])
                continue
            self.shapes[key] = value.shape

    def skips(self, op: Op) -> bool:
        """Leaves out what needs something that can not be told."""
        if any(key[0] in self._unknown for key in op.inputs):
            self._unknown.add(op.node)
        self._before = len(self._unknown)
        return op.node in self._unknown

    def forgives(self, op: Op, problem: EngineError) -> bool:
        """Keeps what the engine refuses, and goes on. What came of the lack of data is no refusal."""
        told = len(self._unknown) == self._before
        if isinstance(problem, TooMany) and self.most_unrolled is not None:
            self.whole = told = False
        if told and (problem.__cause__ is None or isinstance(problem.__cause__, Unsupported | KeyError)):
            self.refused.append(problem)
        self._unknown.add(op.node)
        return True

    def run(self, op: Op) -> bool:
        """As `Tracer.run`, on shapes."""
        if op.op not in table() or any(key[0] in self._unknown for key in op.inputs):
            self._unknown.add(op.node)
            return False
        lowering = table()[op.op]
        if not all(key in self.static for key in op.inputs) or not op.inputs:
            follows = any(key in self._free for key in op.inputs)
            if follows or (not lowering.shape_only and depends_on_values(op, self.static)):
                self._let_go(op)
                return False
        try:
            return super().run(op)
        except (EngineError, NotImplementedError) as problem:
            if isinstance(problem.__cause__, Unsupported | KeyError):
                raise
            self._unknown.add(op.node)
        return False

    def _let_go(self, op: Op) -> None:
        """Notes an op whose result has another shape in every run, or may have. What shape it is told to give it gives all the same."""
        self.let_go.add(op.node)
        count, shapes = schema.output_count(op.op, op.attrs), self.fixed_shapes(op)
        for port in range(MOST_OUTPUTS if count is None else count):
            key = op.node, port
            dtype = self.graph.dtypes[key] = schema.output_dtype(op.op, op.attrs, port) or "float32"
            shape = shapes[port] if port < len(shapes) else None
            if known(shape):
                self.values[key], self.shapes[key] = torch.empty(shape, dtype=torch_dtype(dtype), device="meta"), shape
            else:
                self._free.add(key)

    def stops_capture(self, op: Op) -> bool:
        """Tell whether an op that is left depends on values. Of one that reads what can not be told only its name says so."""
        if op.op not in table():
            return False
        told = op.node not in self._unknown
        return depends_on_values(op, self.static) if told else table()[op.op].dynamic_with(op.attrs)
