"""The shapes of models that streams are for, in any size, as flat graphs with made-up costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.graphs import build


class Builder:
    """Adds nodes one by one; `done` gives the graph and its costs."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ops: list[str] = []
        self.times: list[float] = []
        self.edges: list[tuple[int, int, int, int]] = []

    def add(self, name: str, op: str, inputs: Sequence[int] = (), time_us: float = 0.0) -> int:
        node = len(self.names)
        self.names.append(name)
        self.ops.append(op)
        self.times.append(time_us)
        self.edges += [(source, 0, node, slot) for slot, source in enumerate(inputs)]
        return node

    def done(self) -> Any:
        return build(self.names, self.ops, self.edges, self.times)


def mmoe(experts: int, layers: int = 3) -> Any:
    """Experts on one input, mixed by two gates."""
    b = Builder()
    x = b.add("x", "Placeholder")
    results = []
    for expert in range(experts):
        y = x
        for layer in range(layers):
            y = b.add(f"e{expert}/m{layer}", "MatMul", [y], 6.0)
            y = b.add(f"e{expert}/r{layer}", "Relu", [y], 1.2)
        results.append(y)
    stack = b.add("stack", "Pack", results, 4.0)
    for task in range(2):
        gate = b.add(f"gate{task}/s", "Softmax", [b.add(f"gate{task}/m", "MatMul", [x], 3.0)], 2.0)
        y = b.add(f"task{task}/mul", "Mul", [stack, gate], 3.0)
        b.add(f"task{task}/out", "MatMul", [y], 3.0)
    return b.done()


def towers(count: int) -> Any:
    """Lookups with a small network on each, concatenated."""
    b = Builder()
    results = []
    for tower in range(count):
        y = b.add(f"t{tower}/lookup", "GatherV2", [b.add(f"id{tower}", "Placeholder")], 2.0)
        for layer in range(2):
            y = b.add(f"t{tower}/m{layer}", "MatMul", [y], 3.0)
            y = b.add(f"t{tower}/r{layer}", "Relu", [y], 1.1)
        results.append(y)
    b.add("out", "MatMul", [b.add("concat", "ConcatV2", results, 4.0)], 3.0)
    return b.done()


def inception(modules: int, branches: Sequence[Sequence[float]] = ((8,), (6, 20), (6, 10, 10), (2, 5))) -> Any:
    """Modules of parallel branches, one after the other."""
    b = Builder()
    x = b.add("stem", "Conv2D", [b.add("x", "Placeholder")], 30.0)
    for module in range(modules):
        results = []
        for number, branch in enumerate(branches):
            y = x
            for step, time_us in enumerate(branch):
                y = b.add(f"m{module}/b{number}/{step}", "Conv2D", [y], time_us)
            results.append(y)
        x = b.add(f"m{module}/concat", "ConcatV2", results, 2.0)
    b.add("head", "MatMul", [x], 5.0)
    return b.done()


def lstm(layers: int, steps: int) -> Any:
    """Cells in a lattice: each needs the one below and the one before."""
    b = Builder()
    x = b.add("unstack", "Unpack", [b.add("x", "Placeholder")], 2.0)
    zeros = b.add("zeros", "Const")
    sequence = [x] * steps
    for layer in range(layers):
        h = c = zeros
        kernel, recurrent = b.add(f"layer_{layer}/k", "Const"), b.add(f"layer_{layer}/r", "Const")
        for step in range(steps):
            p = f"layer_{layer}/step_{step}/"
            below = b.add(p + "MatMul_x", "MatMul", [sequence[step], kernel], 3.0)
            before = b.add(p + "MatMul_h", "MatMul", [h, recurrent], 3.0)
            gates = b.add(p + "Split", "Split", [b.add(p + "Add", "AddV2", [below, before], 1.1)], 1.1)
            kept = b.add(p + "Mul_f", "Mul", [b.add(p + "Sigmoid_f", "Sigmoid", [gates], 1.1), c], 1.1)
            i, g = b.add(p + "Sigmoid_i", "Sigmoid", [gates], 1.1), b.add(p + "Tanh_g", "Tanh", [gates], 1.1)
            c = b.add(p + "Add_c", "AddV2", [kept, b.add(p + "Mul_i", "Mul", [i, g], 1.1)], 1.1)
            o = b.add(p + "Sigmoid_o", "Sigmoid", [gates], 1.1)
            h = b.add(p + "Mul_h", "Mul", [o, b.add(p + "Tanh_c", "Tanh", [c], 1.1)], 1.1)
            sequence[step] = h
    return b.done()
