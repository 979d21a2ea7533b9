"""From a flat graph to the ops that run on the device, and what the host runs before and behind them.

Example: a model looks up words in a table, multiplies, and names the best class. The look-up of strings is for the host, which runs it
with TensorFlow before the step; ``MatMul``, ``BiasAdd`` and ``Relu`` become one op for the device; the class's name is the host's
again, afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msplit.engines.base import Arrays
from msplit.engines.cuda.frontend.functionalize_while import raise_control
from msplit.engines.cuda.frontend.importer import build
from msplit.engines.cuda.frontend.partition import partition_graph, refuse
from msplit.engines.cuda.ir.functions import FUNCTIONAL
from msplit.engines.cuda.ir.graph import STEPS, OpGraph
from msplit.engines.cuda.ir.verify import Stage
from msplit.engines.cuda.passes.pipeline import Context, run_passes
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
        context: What passes were asked for.
        host: What runs before and behind; None for most models.
    """

    graph: OpGraph
    feeds: Arrays
    context: Context
    host: HostPart | None = None

    def at(self, stage: Stage, **options: Any) -> Lowered:
        """A copy after the passes of a later stage, with these options of the context changed."""
        context = replace(self.context, **options)
        graph = self.graph.copy()
        run_passes(graph, context, stage)
        return replace(self, graph=graph, context=replace(context, constants=None))


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
    partition = partition_graph(flat, raised.bodies)
    refuse(flat, partition)
    fed: Mapping[str, tuple[int, int]] = {tensor.name: (tensor.node, tensor.port) for tensor in flat.inputs}
    host = None
    if partition.frontier or partition.fetched or partition.host_outputs:
        host = HostPart(whole, partition, op_libraries, raised.origin)
        feeds, _ = host.run(feeds)
        fed = {**fed, **host.feeds}
        others = {*partition.fetched, *partition.host_outputs}
        flat = replace(flat, outputs=(*(tensor for tensor in flat.outputs if tensor.name not in others), *host.handed))
    graph = build(flat, fed)
    if STEPS in graph.feeds:
        feeds = {**feeds, STEPS: np.zeros((), np.int64)}
    graph.streamless = frozenset(np.flatnonzero(whole.host).tolist())
    graph.unrolled = {node: raised.frames.get(node, ()) for node, op in graph.ops.items() if op.op in FUNCTIONAL}
    context = Context(feeds, device, len(flat), raised.bodies, simplify=rewrites, group=group)
    run_passes(graph, context, Stage.IMPORTED, Stage.SPECIALIZED)
    return Lowered(graph, {name: feeds[name] for name in graph.feeds}, context, host)
