"""Options of the cuda engine. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from msplit.engines.table_rows import TableOptions

MOST_GPUS = 64
"""More are not simulated."""

BY_VALUES = "the shape of what these compute depends on values, so they can not be captured"
LAUNCHED = "run them launch by launch (--cuda capture=no; in Python capture=False), or cut them off with --part inputs= and outputs="
"""Message on ops in the way of a capture, before a build and by it, with the remedy."""


class KernelMode(StrEnum):
    """Which kernels a graph's ops become."""

    PLAIN = "plain"
    """One per op."""

    FUSED = "fused"
    """One for each group of pointwise ops."""

    GROUPED = "grouped"
    """One for what alike independent branches do at the same place."""

    FUSED_AND_GROUPED = "fused and grouped"

    @classmethod
    def of(cls, *, fuses: bool = False, groups: bool = False) -> KernelMode:
        """The mode that does so."""
        return next(mode for mode in cls if (mode.fuses, mode.groups) == (fuses, groups))

    @property
    def fuses(self) -> bool:
        """True if pointwise ops share kernels."""
        return self in (KernelMode.FUSED, KernelMode.FUSED_AND_GROUPED)

    @property
    def groups(self) -> bool:
        """True if branches share kernels."""
        return self in (KernelMode.GROUPED, KernelMode.FUSED_AND_GROUPED)


@dataclass(frozen=True)
class SharedKernel:
    """Nodes whose work one kernel does.

    Attributes:
        kind: ``"fused"``: pointwise ops that one compiled kernel does; ``"grouped"``: alike nodes of several branches, side by side;
            ``"fused and grouped"``: pointwise ops of several branches; ``"columns"``: lookups of several embedding columns;
            ``"library"``: one of a library's kernels with its epilogue, or another rewrite of several nodes to one.
        nodes: Flat nodes, the one first whose stream decides.
        stream: Where it runs.
    """

    kind: str
    nodes: tuple[int, ...]
    stream: int


@dataclass(frozen=True)
class StoredPlan:
    """A plan of a program, in terms of the flat graph that it was made from.

    Attributes:
        kernels: In record order: (flat node, which of that node's steps, stream). A step belongs to the first node that it covers.
        groups: Nodes that share a kernel, in record order. Nothing runs by them: they say what `kernels` does.
    """

    kernels: tuple[tuple[int, int, int], ...]
    groups: tuple[SharedKernel, ...] = ()


@dataclass(frozen=True)
class Torture:
    """Disturbances by which tests make races show in an executable to make races show.

    Attributes:
        poison: Overwrite memory with NaN bytes when it is let go.
        delay_cycles: Longest random wait put before a step, in GPU cycles.
        seed: Of the waits.
    """

    poison: bool = False
    delay_cycles: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Shards:
    """Split of a batch over processes that train together, each on a GPU of its own: its rank's rows.

    Attributes:
        count: Of processes.
        inputs: Those that each is fed rows of its own of. The others are the same everywhere.
        is_open: Whether the graph leaves the size of the batch open; otherwise it has as many rows as each is fed.
    """

    count: int
    inputs: tuple[str, ...]
    is_open: bool = True


def rows_of_users(users: int, rows: int) -> int:
    """Rows that a step of so many rows, and so many users at most, reads of what is shared: one for each user. One that has fewer than two
    rows for each user reads all: there is little to save."""
    return users if 2 * users <= rows else rows


@dataclass(frozen=True)
class SharedRows:
    """Inputs that have the same row in all rows of a step that are of one user.

    Attributes:
        inputs: Their names.
        entries: Of each input that has rows, how many entries of its first axis belong to one.
        users: Most users of a step.
        whole: Whether all rows are computed nevertheless: what is read of each user is repeated in front of the first op.
    """

    inputs: tuple[str, ...]
    entries: tuple[tuple[str, int], ...]
    users: int = 1
    whole: bool = False

    def rows(self, feeds: Mapping[str, Any]) -> int:
        """Rows of a step."""
        counted = [(name, one) for name, one in self.entries if one]
        return next(len(feeds[name]) // one for name, one in sorted(counted, key=lambda pair: pair[0] in self.inputs))

    def first(self, feeds: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """The first rows of each input that has rows."""
        entries = dict(self.entries)
        return {name: value[: rows * entries[name]] if entries.get(name) else value for name, value in feeds.items()}

    def repeated(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of which those that are shared have the first rows, one for each user, everywhere: as many for each as there is room for,
        one behind the other."""
        rows = self.rows(feeds)
        of_row, entries = np.arange(rows) * rows_of_users(self.users, rows) // rows, dict(self.entries)
        return {
            name: value.reshape(rows, entries[name], *value.shape[1:])[of_row].reshape(value.shape)
            if name in self.inputs
            else value
            for name, value in feeds.items()
        }


@dataclass(frozen=True)
class EngineOptions:
    """Options of the cuda engine for a job.

    Attributes:
        device: "cuda", or "cpu" to simulate streams on CPU tensors; with a number behind it, such as "cuda:1", a certain one.
        shared: Inputs of which one row is computed for each user of a step; None: all rows are.
        table_memory: Bytes of the device for lookup tables: larger ones stay in the host's memory, and the rows that are read most have a
            cache in these bytes. None: all tables are on the device.
        devices: All that share the rows of a step, `device` the first of them; none: `device` alone.
        capture: Capture the step as one CUDA graph, also of one that is split; otherwise it is launched kernel by kernel.
        layout: Memory layout of convolutions: "nhwc", "nchw", or "auto" for the one that measures faster.
        measure: Whether kernels and layouts are chosen by timing them on the GPU. Otherwise the libraries run what they can, and data lie
            as TensorFlow has them.
        compile: Whether fused ops become compiled kernels, or one step that runs op by op; None: they do on a GPU.
        plan: The plan to run by, where it fits the program.
        shards: Of a graph that trains on several GPUs.
        emulate: Compute in IEEE float32 and round only: in half precision what its ops read and what they give, otherwise what products
            read, to TF32 (see `CudaEngine.try_out`). What kernels of these precisions are held against.
        split: Numbers of the GPUs that the job's streams are divided over, evenly and in order, the one that takes inputs and gives outputs
            first; empty: all streams are on `device`. With "cpu" they are simulated, each with a memory of its own.
        simplify: Whether the graph is rewritten. Otherwise it runs op by op as TensorFlow has it: what rewritten ones are held against.
    """

    device: str = "cuda"
    capture: bool = True
    layout: str = "auto"
    measure: bool = True
    mode: KernelMode = KernelMode.PLAIN
    compile: bool | None = None
    plan: StoredPlan | None = None
    torture: Torture | None = None
    shards: Shards | None = None
    shared: SharedRows | None = None
    table_memory: TableOptions | None = None
    devices: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    emulate: bool = False
    simplify: bool = True

    def on(self, device: str) -> EngineOptions:
        """Copy of the options for one device alone."""
        return replace(self, device=device, devices=())

    @property
    def on_gpu(self) -> bool:
        """True if a GPU runs it."""
        return self.device.startswith("cuda")

    @property
    def captures_alone(self) -> bool:
        """True where a step is captured on one GPU: kernels of such a one are priced by the simulator."""
        return self.capture and not self.split

    @property
    def first(self) -> str:
        """The device that takes inputs and gives outputs, as PyTorch names it."""
        return f"{self.device.partition(':')[0]}:{self.split[0]}" if self.split else self.device

    def for_program(self) -> EngineOptions:
        """Copy with the options that decide on the kernels, the rest at its defaults: jobs that agree in it run the same program."""
        return replace(
            self, capture=True, compile=self.compile if self.mode.fuses else None, plan=None, torture=None, devices=()
        )
