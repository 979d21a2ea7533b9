"""Flat graphs node by node, with attributes and constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, Edges, Function, Graph, TensorValue
from msplit.cost import estimate
from msplit.cost.costs import Costs
from msplit.cost.gpus import DEFAULT_GPU
from msplit.flatten.flat import FlatGraph, Region, Tensor
from msplit.formats.model import Endpoint, Format, Model
from msplit.shapes.infer import infer


class Builder:
    """Collects nodes; a node is its number, an input is a number or (number, port)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ops: list[str] = []
        self.attrs: list[dict[str, Any]] = []
        self.edges: list[tuple[int, int, int, int]] = []

    def add(
        self, op: str, *inputs: int | tuple[int, int], name: str = "", after: tuple[int, ...] = (), **attrs: Any
    ) -> int:
        node = len(self.names)
        self.names.append(name or f"{op}_{node}")
        self.ops.append(op)
        self.attrs.append(attrs)
        for slot, source in enumerate(inputs):
            producer, port = source if isinstance(source, tuple) else (source, 0)
            self.edges.append((producer, port, node, slot))
        self.edges += [(producer, CONTROL, node, CONTROL) for producer in after]
        return node

    def const(self, value: Any, dtype: str = "float32") -> int:
        array = np.asarray(value, dtype=dtype)
        return self.add("Const", dtype=dtype, value=TensorValue(dtype, array.shape, lambda: array))

    def weight(self, *shape: int, dtype: str = "float32") -> int:
        """A constant that nobody may decode."""

        def load() -> Any:
            raise AssertionError("the inference must not decode weights")

        return self.add("Const", dtype=dtype, value=TensorValue(dtype, shape, load))

    def ints(self, *values: int) -> int:
        return self.const(values, "int32")

    def scalar(self, value: int) -> int:
        return self.const(value, "int32")

    def input(self, name: str, shape: tuple[int | None, ...] | None, dtype: str = "float32") -> int:
        return self.add("Placeholder", name=name, dtype=dtype, shape=shape)

    def graph(self, functions: dict[str, Function] | None = None) -> Graph:
        columns = list(zip(*self.edges, strict=True)) if self.edges else [(), (), (), ()]
        return Graph(self.names, self.ops, [""] * len(self.ops), self.attrs, Edges.of(*columns), functions or {})

    def flat(
        self,
        *,
        functions: dict[str, Function] | None = None,
        back_edges: tuple[tuple[int, int, int, int], ...] = (),
        endpoints: tuple[Endpoint, ...] = (),
        **parts: Any,
    ) -> FlatGraph:
        graph = self.graph(functions)
        count = len(graph)
        used = np.zeros(count, np.bool_)
        used[graph.edges.src] = True
        columns = list(zip(*back_edges, strict=True)) if back_edges else [(), (), (), ()]
        defaults: dict[str, Any] = {
            "region": np.full(count, -1, np.int32),
            "regions": (),
            "host": np.zeros(count, np.bool_),
            "stateful": np.zeros(count, np.bool_),
            "inputs": tuple(Tensor(self.names[n], n, 0) for n, op in enumerate(self.ops) if op == "Placeholder"),
            "outputs": tuple(Tensor(self.names[n], n, 0) for n in np.flatnonzero(~used).tolist()),
        }
        return FlatGraph(
            model=Model(Path("test.pb"), Format.GRAPH_DEF, None, None, graph, inputs=endpoints),
            graph=graph,
            back_edges=Edges.of(*columns),
            origin_function=np.full(count, -1, np.int32),
            origin_node=np.arange(count, dtype=np.int32),
            function_names=(),
            **{**defaults, **parts},
        )

    def looped(self, *nodes: int) -> dict[str, Any]:
        """The parts of a flat graph in which some nodes are in a v1 loop."""
        region = np.full(len(self.ops), -1, np.int32)
        region[list(nodes)] = 0
        return {"region": region, "regions": (Region("loop", "frame"),)}


def costs_of(flat: FlatGraph, gpu: str = DEFAULT_GPU) -> Costs:
    """Static costs at the shapes that the graph itself says."""
    return estimate(flat, infer(flat), gpu)
