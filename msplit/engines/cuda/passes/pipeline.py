"""Every pass over the engine's graph, in order, and what runs them.

A pass changes a graph in place and says whether it did. What it leaves is put in order behind it: ops that no output needs go, and the
others stand in topological order again. Where `MSPLIT_VERIFY` is set, as in the tests, `ir.verify` looks at the graph after each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.functions import Bodies
from msplit.engines.cuda.ir.graph import Key, OpGraph, StandIn
from msplit.engines.cuda.ir.verify import Stage, fingerprint, same, snapshot, verify
from msplit.engines.cuda.options import Shards
from msplit.engines.cuda.passes.attention.fuse_attention import ATTENTION
from msplit.engines.cuda.passes.canonical import rewrites
from msplit.engines.cuda.passes.canonical.composed_functions import fuse_layer_norm, fuse_softmax
from msplit.engines.cuda.passes.convolution.concat_into import SIBLING_CONVOLUTIONS, concat_into, writes_on
from msplit.engines.cuda.passes.convolution.fold import fold_affine, fold_dilation, fold_padding
from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS, SQUEEZES
from msplit.engines.cuda.passes.convolution.fuse_prologue import CASTS, PROLOGUES
from msplit.engines.cuda.passes.distributed.allreduce import insert_allreduce
from msplit.engines.cuda.passes.distributed.split import Split, own_constants, split_graph
from msplit.engines.cuda.passes.embedding.fixed_capacity import pad_hits, pad_unique
from msplit.engines.cuda.passes.embedding.fuse_lookups import fuse_lookups
from msplit.engines.cuda.passes.embedding.static_shapes import eliminate_unique, fold_partition, split_row_unions
from msplit.engines.cuda.passes.horizontal_fusion import batch_branches
from msplit.engines.cuda.passes.measured import MeasuredFusion
from msplit.engines.cuda.passes.pointwise_fusion.fuse import fuse, observe
from msplit.engines.cuda.passes.precision.mixed_precision import compute_in_half
from msplit.engines.cuda.passes.precision.round_results import expect_rounded, takes_tf32
from msplit.engines.cuda.passes.shared_rows import Sharing, share_rows, split_products
from msplit.engines.cuda.passes.specialize import specialize
from msplit.engines.cuda.passes.tracing import Tracer, trace
from msplit.engines.cuda.passes.updates import merge_updates as updates
from msplit.progress import phase

VERIFY = "MSPLIT_VERIFY"
"""Environment variable: set, every graph is verified after every pass."""


@dataclass(frozen=True)
class Context:
    """Settings and data that passes need beside the graph.

    Attributes:
        feeds: An array per input: they fix the shapes.
        device: Where the graph will run.
        nodes: How many nodes the flat graph has.
        bodies: The model's functions, for what loops and conds become.
        simplify: Whether constants' work is folded into its neighbours, and the libraries' epilogues are used.
        group: Whether alike independent branches run as one.
        fuse: Whether groups of pointwise ops run as one kernel each.
        nchw: Memory layout of convolutions, from the stage `LAID_OUT` on.
        measure: Whether kernels are chosen by timing them on a GPU, from that stage on.
        compile: Whether fused groups become kernels; otherwise each is one op that runs its members one by one.
        constants: Constants that are on the device already.
        shards: How the batch is split over processes; None: it is not.
        shared: Inputs of which one row is computed for each user of a step; or what finds them in a graph that repeats rows itself.
        resized: The graph with another size of the batch, where it leaves that open; see `specialized_copy`.
        split: Where flat nodes run, of a graph for several GPUs.
        half: The type in which is computed what gains from half precision; "" for none.
        wide: Flat nodes that stay in float32 all the same.
        emulate: Whether the others compute in float32 and round only.
        tracer: Makes what finds shapes, where that is not a run on the device.
        stand_ins: Constants of which it knows the shapes alone; it is told of those that passes make.
    """

    feeds: Mapping[str, NDArray[Any]]
    device: torch.device
    nodes: int
    bodies: Bodies | None = None
    simplify: bool = True
    group: bool = False
    fuse: bool = False
    nchw: bool = False
    measure: bool = True
    compile: bool = False
    constants: Mapping[Key, torch.Tensor] | None = None
    shards: Shards | None = None
    shared: Sharing | Callable[[OpGraph], Sharing | None] | None = None
    resized: OpGraph | None = None
    split: Split | None = None
    half: str = ""
    wide: frozenset[int] = frozenset()
    emulate: bool = False
    tracer: Callable[[OpGraph], Tracer] | None = None
    stand_ins: dict[Key, StandIn] | None = None


@dataclass(frozen=True)
class Pass:
    """One change of a graph.

    Attributes:
        name: For errors.
        run: Changes a graph in place, and returns whether it did; or a fusion that does where it is faster.
        stage: What the graph is afterwards.
        option: The option of the context that it belongs to; it always runs where there is none.
        phase: What it is part of, for who wants to know where time goes.
    """

    name: str
    run: Callable[[OpGraph, Context], bool] | MeasuredFusion[Any, Any]
    stage: Stage = Stage.SPECIALIZED
    option: Literal["", "simplify", "group", "half", "fuse"] = "simplify"
    phase: str = "rewriting the graph"

    def __call__(self, graph: OpGraph, context: Context) -> bool:
        """Changes a graph in place; returns whether it did."""
        if not isinstance(self.run, MeasuredFusion):
            return self.run(graph, context)
        fits = _fits(self.run, nchw=context.nchw, split=context.split is not None)
        return fits and self.run.run(graph, context.device, measure=context.measure)


def _fits(fusion: MeasuredFusion[Any, Any], *, nchw: bool, split: bool) -> bool:
    return (fusion.either_layout or not nchw) and (fusion.across_gpus or not split)


def _pure(function: Callable[[OpGraph], bool]) -> Callable[[OpGraph, Context], bool]:
    """A pass that needs the graph alone."""
    return lambda graph, _: function(graph)


def _specialize(graph: OpGraph, context: Context) -> bool:
    tracer = None if context.tracer is None else context.tracer(graph)
    specialize(graph, context.feeds, context.device, bodies=context.bodies, static=context.simplify, tracer=tracer)
    return True


def _fold_partition(graph: OpGraph, context: Context) -> bool:
    """Shapes behind the lookups that were joined are known now."""
    if not fold_partition(graph, context.stand_ins):
        return False
    tidy(graph)
    return _specialize(graph, context)


def _allreduce(graph: OpGraph, context: Context) -> bool:
    """Rows that come from others make what is behind them longer."""
    if context.shards is None:
        return False
    # Between ids and what takes them stand no shapes of one process, and no second search for what is distinct.
    rewrites.eliminate_identity(graph)
    updates.keep_distinct(graph)
    tidy(graph)
    if insert_allreduce(graph, context.shards, context.resized):
        tidy(graph)
        return _specialize(graph, context)
    return True


def _share_rows(graph: OpGraph, context: Context) -> bool:
    found = context.shared(graph) if callable(context.shared) else context.shared
    return found is not None and share_rows(graph, found)


def _count_nodes_once(graph: OpGraph) -> bool:
    """One kernel per op from here on: what rides on an op of a loop is the same flat node, and adds no kernel of it."""
    changed = False
    for op in graph.ops.values():
        once = list(dict.fromkeys(op.source_nodes))
        changed |= once != op.source_nodes
        op.source_nodes = once
    return changed


def _keep_boundaries(graph: OpGraph) -> bool:
    """Gives every Bucketize its boundaries as a second input, on the device: two kernels instead of four that write them there anew."""
    found = [op for op in graph.ops.values() if op.op == "Bucketize"]
    for op in found:
        op.op = "_Bucketize"
        wide = np.float64 if op.attrs.get("T") == "float64" else np.float32
        boundaries = np.asarray(op.attrs.get("boundaries", ()), np.float32).astype(wide)
        op.inputs = [*op.inputs, graph.constant(boundaries)]
    return bool(found)


def _compute_in_half(graph: OpGraph, context: Context) -> bool:
    return compute_in_half(graph, context.half, context.wide, emulate=context.emulate)


def _split_graph(graph: OpGraph, context: Context) -> bool:
    return context.split is not None and split_graph(graph, context.split)


def _expect_rounded(graph: OpGraph, context: Context) -> bool:
    return context.measure and not context.nchw and takes_tf32(context.device) and expect_rounded(graph)


def _concat_into(graph: OpGraph, context: Context) -> bool:
    if context.nchw or context.split is not None:
        return False
    return concat_into(graph, writes_on(context.device, measure=context.measure))


def _pointwise_fusion(graph: OpGraph, context: Context) -> bool:
    measure, held = context.measure, context.constants
    layouts = observe(graph, context.feeds, context.device, trace, nchw=context.nchw, held=held, measure=measure)
    fused = fuse(graph, layouts, context.device, measure=measure, compile=context.compile)
    graph.facts |= fused.facts()
    return fused.groups > 0


_SPECIALIZING, _GROUPING = "fixing shapes", "grouping alike branches"

PIPELINE = (
    Pass("eliminate_unique", _pure(eliminate_unique), Stage.IMPORTED),
    Pass("pad_unique", _pure(pad_unique), Stage.IMPORTED),
    Pass("pad_hits", _pure(pad_hits), Stage.IMPORTED),
    Pass("specialize", _specialize, option="", phase=_SPECIALIZING),
    Pass("fold_partition", _fold_partition, phase=_SPECIALIZING),
    Pass("split_row_unions", _pure(split_row_unions), phase=_SPECIALIZING),
    Pass("insert_allreduce", _allreduce, option="", phase=_SPECIALIZING),
    Pass("share_rows", _share_rows, option="", phase=_SPECIALIZING),
    Pass("eliminate_identity", _pure(rewrites.eliminate_identity)),
    Pass("flatten_matmul", _pure(rewrites.flatten_matmul)),  # products become matrices
    Pass("split_products", _pure(split_products), option=""),  # of rows that are shared
    Pass("fold_dilation", _pure(fold_dilation)),
    Pass("fold_padding", _pure(fold_padding)),
    Pass("reassociate_bias", _pure(rewrites.reassociate_bias)),
    Pass("fold_affine", _pure(fold_affine)),  # scales and offsets become weights and a bias
    Pass("eliminate_identity", _pure(rewrites.eliminate_identity)),
    # Not before convolutions and products have taken along what only one of them reads.
    Pass("eliminate_common_subexpressions", _pure(rewrites.eliminate_common_subexpressions)),
    Pass("fuse_layer_norm", _pure(fuse_layer_norm)),
    Pass("fuse_softmax", _pure(fuse_softmax)),
    Pass("fuse_epilogue", _pure(rewrites.fuse_epilogue)),  # bias, sum and activation ride on the product
    Pass("flatten_convolution", _pure(rewrites.flatten_convolution)),
    Pass("eliminate_identity", _pure(rewrites.eliminate_identity)),
    Pass("count_nodes_once", _pure(_count_nodes_once)),
    Pass("sum_in_updates", _pure(updates.sum_in_updates)),
    # Behind what joins an op with its neighbours, before what joins branches.
    Pass("split_graph", _split_graph, option=""),
    Pass("fuse_lookups", lambda graph, one: fuse_lookups(graph, together=one.group), option="", phase=_GROUPING),
    Pass("keep_boundaries", _pure(_keep_boundaries)),  # lookups are proved and fused by the attribute
    Pass("batch_branches", _pure(batch_branches), option="group", phase=_GROUPING),
    Pass("merge_row_updates", _pure(updates.merge_row_updates), option="group", phase=_GROUPING),
    Pass("merge_updates", _pure(updates.merge_updates), option="group", phase=_GROUPING),
    Pass("merge_assigns", _pure(updates.merge_assigns), option="group", phase=_GROUPING),
    Pass("own_constants", _pure(own_constants), option=""),
    Pass("compute_in_half", _compute_in_half, Stage.TYPED, option="half"),  # behind what joins ops: fewer casts
    Pass("fuse_attention", ATTENTION, Stage.LAID_OUT, phase="choosing attention kernels"),
    Pass("expect_rounded", _expect_rounded, Stage.LAID_OUT, phase="merging convolutions"),
    Pass("merge_convolutions", SIBLING_CONVOLUTIONS, Stage.LAID_OUT, "group", "merging convolutions"),
    Pass("fuse_cast", CASTS, Stage.LAID_OUT, phase="choosing prologues"),
    Pass("fuse_prologue", PROLOGUES, Stage.LAID_OUT, phase="choosing prologues"),
    Pass("fuse_mlp", MLPS, Stage.LAID_OUT, phase="choosing kernels of small layers"),
    Pass("fuse_squeeze", SQUEEZES, Stage.LAID_OUT, phase="choosing kernels of small layers"),
    Pass("concat_into", _concat_into, Stage.LAID_OUT, phase="placing what is joined"),
    Pass("pointwise_fusion", _pointwise_fusion, Stage.FUSED, "fuse", "fusing pointwise ops"),
)
"""Up to `SPECIALIZED`, once per graph and shapes; `TYPED`, once per type of half precision; `LAID_OUT`, once per memory layout that is
tried; `FUSED`, in the one that was taken."""


def list_fusions(graph: OpGraph, device: torch.device, *, nchw: bool, group: bool) -> None:
    """Has the tuner, in `Tuner.listing`, hear of every choice that the fusions will make."""
    for one in PIPELINE:
        fusion, wanted = one.run, group or one.option != "group"
        if isinstance(fusion, MeasuredFusion) and fusion.listed and wanted and _fits(fusion, nchw=nchw, split=False):
            fusion.list_choices(graph, device)


_FIXES_SHAPES = PIPELINE[: next(number for number, one in enumerate(PIPELINE) if one.name == "insert_allreduce")]
"""Behind these every shape is what it will be, but for rows that other processes send."""


def run_passes(graph: OpGraph, context: Context, *stages: Stage, pipeline: tuple[Pass, ...] = PIPELINE) -> None:
    """Runs the passes of some stages, as far as the context asks for them.

    Raises:
        EngineError: An op failed on these shapes; the message names the node.
        IllegalGraph: A pass left what is no legal graph (only where `MSPLIT_VERIFY` is set).
    """
    checks = bool(os.environ.get(VERIFY))
    legal: tuple[Any, ...] | None = None  # what was looked at last, and whether its shapes were known
    asked = (one for one in pipeline if one.stage in stages and (not one.option or getattr(context, one.option)))
    for what, passes in groupby(asked, lambda one: one.phase):
        with phase(what):
            for one in passes:
                if checks and legal is None:
                    before = fingerprint(graph)
                changed = one(graph, context)
                if changed:
                    tidy(graph)
                if not checks:
                    continue
                found = (one.stage is Stage.IMPORTED, *snapshot(graph))
                if legal is None or not same(found, legal):
                    verify(graph, one.stage, context.nodes, after=one.name, unchanged=None if changed else before)
                    legal, before = found, fingerprint(graph)


def specialized_copy(graph: OpGraph, context: Context) -> OpGraph:
    """A copy with the shapes and constants that the feeds of a context give, by the keys that they have before `insert_allreduce`."""
    copy = graph.copy()
    run_passes(copy, context, Stage.IMPORTED, Stage.SPECIALIZED, pipeline=_FIXES_SHAPES)
    return copy


def run_dry(graph: OpGraph, context: Context) -> None:
    """Runs the passes that decide which shapes depend on values, by the context's tracer. What it lets go has no shape, so that the graph
    is not one that `verify` could look at."""
    for one in _FIXES_SHAPES:
        if one(graph, context):
            tidy(graph)


def tidy(graph: OpGraph) -> None:
    """Drops what no output needs, and puts the rest in topological order."""
    graph.prune()
    graph.sort()
