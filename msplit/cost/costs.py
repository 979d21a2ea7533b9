"""What the nodes of a flat graph cost, as arrays, and what a GPU takes to run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Floats

Mask = NDArray[np.bool_]

DEEP = 50
"""Kernels of the chains of `Constants.deep_us`."""


@dataclass(frozen=True)
class Constants:
    """What a GPU itself takes to replay a CUDA graph, µs. None: not measured.

    `schedule.machine` makes the simulator's GPU of them. `join_us`, `root_us`, `crossing_us`, `roots_us`, `spin_us` and `concurrency` are
    for people: they tell GPUs and drivers apart, and no prediction rests on them.

    Attributes:
        launch_us: From the start of a graph to that of its first kernel.
        node_us: A tiny kernel in a chain of such.
        wait_us: Half of what a fork into two and its join take beyond a chain: one crossing.
        join_us: Every further branch of a fork-join.
        root_us: Every further kernel that a graph begins with. The executor's graphs begin with one.
        issue_us: Between the starts of two kernels, when 16 chains run side by side.
        copy_bytes_per_us: Bytes that a large copy reads and writes.
        l2_bytes_per_us: Bytes that a copy within the L2 cache reads and writes.
        crossing_us: What a change of streams adds to a chain.
        fork_join_us: Number of branches -> what a fork, that many kernels and their join take beyond a chain.
        roots_us: Number of kernels that a graph begins with, side by side -> time beyond that of one.
        deep_us: Number of streams -> time of chains of `DEEP` tiny kernels, side by side.
        spin_us: Number of streams -> time of chains of 20 kernels of about 3 µs that use one SM and no memory, side by side.
        concurrency: ``"gemm+gather"`` and so on -> time of two chains of kernels side by side over that of the longer one alone: 1 is
            free company, 2 is nothing gained.
    """

    launch_us: float | None = None
    node_us: float | None = None
    wait_us: float | None = None
    join_us: float | None = None
    root_us: float | None = None
    issue_us: float | None = None
    copy_bytes_per_us: float | None = None
    l2_bytes_per_us: float | None = None
    crossing_us: float | None = None
    fork_join_us: Mapping[int, float] = field(default_factory=dict)
    roots_us: Mapping[int, float] = field(default_factory=dict)
    deep_us: Mapping[int, float] = field(default_factory=dict)
    spin_us: Mapping[int, float] = field(default_factory=dict)
    concurrency: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Costs:
    """Per node of a flat graph.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes read and written in device memory.
        time_us: Time alone on the device, µs; 0 for nodes that launch no kernel (constants, identities, reshapes, views, host nodes) and
            for those whose work another one's kernel does.
        share: Share of the device that the node's kernel can fill, in (0, 1].
        out_bytes: Bytes of all outputs.
        known: Whether shapes were known; where not, a default was taken and `time_us` is a guess.
        gpu: Name of the data sheet, such as ``"h200"``.
        source: "static" or what the profile that the times come from says of itself.
        inside: Nodes whose work is part of another node's kernel, which carries its time, and views; None: none.
        constants: The device's own, measured; None where there is no profile.
        one_us: A whole step on one stream, by the device's clock, back to back; None: not measured.
        host_us: Time of host nodes that the cuda engine runs on the device all the same (arithmetic on integers, which TensorFlow does in
            host memory). No stream is theirs to choose: it is part of the `time_us` of the kernels that read them; None: none.
        carried_us: Per node the part of its `time_us` that is theirs; None: none.
    """

    flops: Floats
    bytes: Floats
    time_us: Floats
    share: Floats
    out_bytes: Floats
    known: Mask
    gpu: str
    source: str = "static"
    inside: Mask | None = None
    constants: Constants | None = None
    one_us: float | None = None
    host_us: Floats | None = None
    carried_us: Floats | None = None

    @property
    def own_us(self) -> Floats:
        """Time of each node's own kernel, host nodes that the device runs included."""
        if self.host_us is None or self.carried_us is None:
            return self.time_us
        return self.time_us - self.carried_us + self.host_us
