"""Shapes of all values of a graph, and constants in place of what depends on constants and shapes only.

The graph runs once for it (`tracing.Tracer`). Loops, conds and calls become the ops that they run, and ops whose shapes depend on values
simpler ones where `embedding.static_shapes` proves that they do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.base import MASKED_LOOPS
from msplit.engines.cuda.frontend.unroll import Unroller
from msplit.engines.cuda.ir.dtypes import dtype_name
from msplit.engines.cuda.ir.functions import Bodies
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.embedding.intervals import COUNTED
from msplit.engines.cuda.passes.embedding.proof import KnownValues, Proof
from msplit.engines.cuda.passes.embedding.static_shapes import prove
from msplit.engines.cuda.passes.tracing import Tracer
from msplit.errors import EngineError


def specialize(
    graph: OpGraph,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    *,
    bodies: Bodies | None = None,
    static: bool = False,
    tracer: Tracer | None = None,
) -> None:
    """Finds the shape of every value, and turns into constants what depends on constants and shapes only.

    The graph runs once for it, as it is but for loops, conds and calls: those become what they run. (PyTorch's `meta` tensors would do
    without data, but the first of them takes longer, since they need PyTorch's compiler loaded.)

    Args:
        graph: Its `shapes` are filled in, its `ops` that need no run become `constants`.
        feeds: An array per input.
        device: Where to run.
        bodies: The model's functions, for what loops and conds become.
        static: True to put simpler ops, of static shapes, in the place of those whose shapes depend on values, where that can be proved.
        tracer: What runs it, where that is not the device.

    Raises:
        EngineError: An op failed on these shapes; the message names the node.
    """
    tracer = tracer or Tracer(graph, device, nchw=False)
    tracer.measures, tracer.only_shapes = False, True
    tracer.feed(feeds)
    names: dict[Key, Key] = {}  # what was proved to be another value
    kept: dict[int, Op] = {}
    # From here on the graph has what is known so far, for proofs and loops.
    graph.constants, graph.shapes = tracer.static, tracer.shapes
    ranges = KnownValues(graph)
    facts = ranges if static else None
    with torch.no_grad():
        graph.dtypes = {key: dtype_name(value.dtype) for key, value in tracer.values.items()}
        unroller = Unroller(graph, bodies, names, tracer.values, ranges)
        if tracer.most_unrolled is not None:
            unroller.most = tracer.most_unrolled
        kept_alive = unroller.kept

        def run(op: Op) -> None:
            """Runs an op, or what is proved to do in its place."""
            op.inputs = [names.get(key, key) for key in op.inputs]
            proof = prove(facts, op) if facts is not None else None
            for step in _instead(op, proof):
                if tracer.run(step):
                    kept[step.node] = step
                    keys = [(step.node, port) for port in range(tracer.steps[-1].outputs)]
                    made = {key: dtype_name(tracer.values[key].dtype) for key in keys}
                    graph.dtypes |= made
                    unroller.made += made
                    # Loops ask for bounds. One that may have ended does so at the latest where a condition is false whatever is fed.
                    if _has_one_value(tracer, ranges, step, keep=not static and not unroller.masking):
                        del kept[step.node]
                elif step.node in tracer.let_go:
                    kept[step.node] = step
            for port, found in () if proof is None else proof.outputs.items():
                if isinstance(found, tuple):
                    names[op.node, port] = found
                    kept_alive.add(found)  # it is read in another's place from now on
                else:
                    tracer.know((op.node, port), found)
            tracer.steps.clear()
            # Proofs may read integers later on.
            kept_alive.update(key for key in op.inputs if static and graph.dtypes.get(key) in COUNTED)
            kept_alive.update(() if proof is None else proof.later)

        for op in graph.ops.values():
            if tracer.skips(op):
                kept[op.node] = op
                continue
            try:
                for piece in unroller.pieces(op):
                    run(piece)
            except EngineError as problem:
                if not tracer.forgives(op, problem):
                    raise
            tracer.forget(op, kept_alive)
    if unroller.bounds:
        graph.facts[MASKED_LOOPS] = {**graph.facts.get(MASKED_LOOPS, {}), **unroller.bounds}
    graph.ops = kept
    graph.shapes = {key: value.shape for key, value in tracer.static.items()} | tracer.shapes
    graph.rename(names)
    graph.prune()


def _instead(op: Op, proof: Proof | None) -> list[Op]:
    """The function that runs in the place of an op."""
    if proof is None:
        return [op]
    return proof.ops if proof.outputs and not proof.stays else [*proof.ops, op]


def _has_one_value(tracer: Tracer, facts: KnownValues, op: Op, *, keep: bool) -> bool:
    """Returns whether an op's only output turned out to be the same in every run; it is a constant then, unless ops are to be kept."""
    name = dtype_name(tracer.values[op.node, 0].dtype)
    always = facts.learn(op, np.dtype(name if name in COUNTED else "float32"))
    if always is None or keep or (op.node, 1) in tracer.values:
        return False
    tracer.know((op.node, 0), always)
    del tracer.values[op.node, 0]
    return True
