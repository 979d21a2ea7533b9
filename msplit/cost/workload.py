"""The work to be done: what sizes a graph and prices its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msplit.cost.gpus import DEFAULT_GPU
from msplit.cost.profile import Profile


@dataclass(frozen=True)
class Workload:
    """What a graph is run with.

    Attributes:
        batch: Size of unknown leading dimensions of inputs; None for 1.
        shapes: Whole shapes by input name.
        inputs: Files by input name, and under "" one that names its inputs itself; the other inputs are made up.
        gpu: Data sheet that prices the nodes.
        profile: What was measured on the graph, in place of the data sheet.
    """

    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Path] = field(default_factory=dict)
    gpu: str = DEFAULT_GPU
    profile: Profile | None = None
