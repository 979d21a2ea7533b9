"""Scheduling problems for tests: random ones, and the shapes of known models."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem

FREE = Machine(
    wait_us=0.0, join_us=0.0, node_us=0.0, issue_us=0.0, crowd_us=0.0, contention=0.0, step_us=0.0, bandwidth=1e30
)
"""A GPU on which only the SMs cost something."""


class Builder:
    """Makes a problem kernel by kernel."""

    def __init__(self) -> None:
        self.src: list[int] = []
        self.dst: list[int] = []
        self.time: list[float] = []
        self.share: list[float] = []

    def kernel(self, *inputs: int | None, time: float = 1.1, share: float = 0.05) -> int:
        node = len(self.time)
        self.time.append(time)
        self.share.append(share)
        for producer in inputs:
            if producer is not None:
                self.src.append(producer)
                self.dst.append(node)
        return node

    def dag(self) -> Dag:
        return Dag.of(len(self.time), self.src, self.dst)

    def problem(self, **options) -> Problem:
        return Problem.of(self.dag(), self.time, self.share, **options)


def lstm(layers: int = 10, steps: int = 100, **options) -> Problem:
    """An unrolled LSTM: two products, add, bias, a view, four activations, and the state's arithmetic: 13 kernels a cell."""
    b = Builder()
    hidden: dict[tuple[int, int], int] = {}
    state: dict[tuple[int, int], int] = {}
    for layer in range(layers):
        for step in range(steps):
            below = b.kernel(hidden.get((layer - 1, step)), time=1.3)
            before = b.kernel(hidden.get((layer, step - 1)), time=1.3)
            split = b.kernel(b.kernel(b.kernel(below, before)), time=0.0)
            forget, enter, new, out = (b.kernel(split) for _ in range(4))
            kept = b.kernel(forget, state.get((layer, step - 1)))
            state[layer, step] = b.kernel(kept, b.kernel(enter, new))
            hidden[layer, step] = b.kernel(out, b.kernel(state[layer, step]))
    return b.problem(**options)


def experts(count: int = 16, tasks: int = 2, **options) -> Problem:
    """MMoE: experts of three products and ReLUs, read by the gated sum of every task."""
    b = Builder()
    x = b.kernel(time=0.0)
    outputs = []
    for _ in range(count):
        node = x
        for _ in range(3):
            node = b.kernel(b.kernel(node, time=5.0), time=1.2)
        outputs.append(node)
    for _ in range(tasks):
        gate = b.kernel(b.kernel(x, time=3.0), time=1.5)
        b.kernel(b.kernel(gate, *outputs, time=3.0), time=2.0)
    return b.problem(**options)


def towers(count: int = 40, **options) -> Problem:
    """Embedding towers of different lengths that join once."""
    b = Builder()
    x = b.kernel(time=0.0)
    random = np.random.default_rng(0)
    outputs = []
    for _ in range(count):
        node = b.kernel(x, time=1.5)
        for _ in range(4):
            node = b.kernel(node, time=1.1 + 2 * random.random())
        outputs.append(node)
    b.kernel(b.kernel(*outputs, time=2.0))
    return b.problem(**options)


def inception(modules: int = 9, **options) -> Problem:
    """Modules of four branches of different length between two concats."""
    b = Builder()

    def convolution(node: int, time: float) -> int:
        return b.kernel(b.kernel(node, time=time, share=0.2), time=1.2)

    node = b.kernel(time=10.0, share=0.5)
    for _ in range(modules):
        first = convolution(node, 8.0)
        second = convolution(convolution(node, 7.0), 10.0)
        third = convolution(convolution(convolution(node, 7.0), 9.0), 9.0)
        fourth = convolution(b.kernel(node, time=4.0), 6.0)
        node = b.kernel(first, second, third, fourth, time=3.0, share=0.2)
    return b.problem(**options)


def random_dag(seed: int, count: int, density: float) -> Dag:
    """A random DAG whose numbering is not topological."""
    random = np.random.default_rng(seed)
    upper = np.triu(random.random((count, count)) < density, 1)
    names = random.permutation(count)
    src, dst = np.nonzero(upper)
    return Dag.of(count, names[src], names[dst])


@st.composite
def problems(
    draw, largest: int = 24, *, machine: Machine | None = None, free_nodes: bool = True, contracted: bool | None = None
):
    """A random problem; some nodes launch nothing."""
    count = draw(st.integers(1, largest))
    seed = draw(st.integers(0, 2**31))
    random = np.random.default_rng(seed)
    dag = random_dag(seed, count, draw(st.sampled_from([0.05, 0.15, 0.4])))
    time = random.choice([0.0, 1.0, 1.5, 4.0, 20.0], count, p=[0.2, 0.2, 0.2, 0.2, 0.2])
    if not free_nodes:
        time = np.maximum(time, 0.5)
    share = random.choice([0.02, 0.2, 0.5, 0.9, 1.0], count)
    return Problem.of(
        dag,
        time,
        share,
        time * random.choice([0.0, 1e5, 2e6], count),
        machine=machine or Machine(),
        contracted=draw(st.booleans()) if contracted is None else contracted,
    )
