"""From a flat graph to the ops that run on the device, and what the host runs before and behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from msplit.engines.base import Arrays
from msplit.engines.cuda.frontend.functionalize_while import raise_control
from msplit.engines.cuda.frontend.importer import build
from msplit.engines.cuda.frontend.partition import divide, refuse
from msplit.engines.cuda.ir.functions import FUNCTIONAL
from msplit.engines.cuda.ir.graph import STEPS, OpGraph
from msplit.engines.cuda.passes import rewrite
from msplit.engines.cuda.passes.embedding.densify import Prover
from msplit.engines.cuda.passes.embedding.fuse_lookups import join_columns
from msplit.engines.cuda.passes.embedding.unique import drop_uniques
from msplit.engines.cuda.passes.fold_partition import join_partitions
from msplit.engines.cuda.passes.horizontal_fusion import Group, group_branches
from msplit.engines.cuda.passes.keep_boundaries import keep_boundaries
from msplit.engines.cuda.passes.specialize import infer
from msplit.engines.cuda.runtime.host import HostPart
from msplit.flatten.flat import FlatGraph

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, eq=False)
class Lowered:
    """A graph lowered for inputs of certain shapes.

    Attributes:
        source: What runs on the device.
        feeds: Example inputs of it.
        host: What runs before and behind; None for most models.
        groups: Merges of alike branches.
    """

    graph: OpGraph
    feeds: Arrays
    host: HostPart | None = None
    groups: tuple[Group, ...] = ()


def lower(
    flat: FlatGraph,
    feeds: Arrays,
    device: torch.device,
    *,
    op_libraries: Sequence[Path] = (),
    rewrites: bool = True,
    group: bool = False,
) -> Lowered:
    """Lowers a graph.

    Args:
        flat: The graph.
        feeds: An array per input: they fix the shapes.
        device: Where it will run.
        op_libraries: Shared objects with custom TensorFlow ops, for the host part.
        rewrites: Whether to fold constants' work into its neighbours and to use the libraries' epilogues.
        group: Whether alike independent branches run as one batched branch.

    Raises:
        EngineError: Something in the graph can not run; the message names it and the way out.
    """
    whole = flat
    raised = raise_control(flat)
    flat = raised.flat
    division = divide(flat, raised.bodies)
    refuse(flat, division)
    fed: Mapping[str, tuple[int, int]] = {tensor.name: (tensor.node, tensor.port) for tensor in flat.inputs}
    host = None
    if division.frontier or division.fetched or division.late:
        host = HostPart(whole, division, op_libraries, raised.origin)
        feeds, _ = host.run(feeds)
        fed = {**fed, **host.feeds}
        others = {*division.fetched, *division.late}
        flat = replace(flat, outputs=(*(tensor for tensor in flat.outputs if tensor.name not in others), *host.handed))
    graph = build(flat, fed, raised.bodies)
    if STEPS in graph.feeds:
        feeds = {**feeds, STEPS: np.zeros((), np.int64)}
    graph.streamless = frozenset(np.flatnonzero(whole.host).tolist())
    graph.unrolled = {node: raised.frames.get(node, ()) for node, op in graph.ops.items() if op.op in FUNCTIONAL}
    if rewrites:
        drop_uniques(graph)
    infer(graph, feeds, device, Prover(graph) if rewrites else None)
    if rewrites:
        if join_partitions(graph):
            infer(graph, feeds, device, Prover(graph))
        rewrite(graph)
    groups: list[Group] = []
    if group:
        join_columns(graph)
        groups = group_branches(graph)
    if rewrites:
        keep_boundaries(graph)
    return Lowered(graph, {name: feeds[name] for name in graph.feeds}, host, tuple(groups))
