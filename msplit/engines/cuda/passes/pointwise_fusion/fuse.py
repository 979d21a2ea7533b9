"""The whole way from a graph with shapes to one with fused groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import dtype_name, to_torch
from msplit.engines.cuda.ir.graph import Key, OpGraph
from msplit.engines.cuda.ir.interpret import device_inputs
from msplit.engines.cuda.ir.program import KernelCall
from msplit.engines.cuda.passes.horizontal_fusion.signature import value_types
from msplit.engines.cuda.passes.pattern import Readers
from msplit.engines.cuda.passes.pointwise_fusion.inductor import (
    SECONDS,
    Compiler,
    CompileReport,
    Kernel,
    Layout,
    layout,
)
from msplit.engines.cuda.passes.pointwise_fusion.outline import Outline, contract, outline
from msplit.engines.cuda.passes.pointwise_fusion.partition import find_groups
from msplit.engines.cuda.passes.precision.round_results import read_by_products, takes_tf32
from msplit.opset.traits import VIEWS
from msplit.progress import phase

Trace = Callable[..., object]
"""`specialize.trace`, which runs a graph once and tells of each step."""


@dataclass
class Fused:
    """Result of fusion.

    Attributes:
        groups: Groups that are one kernel each now.
        members: Ops in them that launched something before.
        kernels: Different kernels among them.
        report: What compiling took; None where groups run op by op.
    """

    groups: int = 0
    members: int = 0
    kernels: int = 0
    report: CompileReport | None = None

    def facts(self) -> Mapping[str, Any]:
        """For the report of a run."""
        counts = {"fused_groups": self.groups, "fused_ops": self.members, "fused_kernels": self.kernels}
        return {**counts, **({} if self.report is None else self.report.facts())}


def likely_groups(graph: OpGraph) -> int:
    """About how many groups there are in a graph with shapes, which does not run for it."""
    return len(find_groups(graph, value_types(graph)))


def fuse(
    graph: OpGraph,
    layouts: dict[Key, Layout],
    device: torch.device,
    *,
    measure: bool = True,
    compile: bool = True,
    seconds: float = SECONDS,
) -> Fused:
    """Makes groups of pointwise ops one op each, which runs its members one by one where kernels are not to be compiled.

    The graph has known shapes; how its values lie in memory is as `observe` finds it, and those of groups are added. After so many seconds
    of compiling no further kernel is begun. `measure` is as for `trace`.
    """
    compiler = Compiler(device, seconds) if compile else None
    done = Fused(report=compiler.report if compiler else None)
    among: set[int] | None = None
    # Groups as large as may be first; then, of the ops of groups for which there is no kernel, smaller ones of equally many elements.
    for strict in (False, True):
        dtypes = {key: dtype_name(found[2]) for key, found in layouts.items()}
        groups = find_groups(graph, dtypes, among=among, strict=strict)
        readers = Readers(graph)
        for_products = read_by_products(graph) if measure and takes_tf32(device) else set()
        outlines = [outline(graph, group, readers, for_products) for group in groups]
        # A group whose kernel is a reason, in words, stays as it is.
        pairs = list(zip(outlines, _kernels(compiler, outlines, layouts), strict=True))
        chosen = [(made, kernel) for made, kernel in pairs if not isinstance(kernel, str)]
        names = contract(graph, chosen)
        layouts |= {names[key]: layouts[key] for key in names if key in layouts}
        done.groups += len(chosen)
        done.members += sum(made.group.launching for made, _ in chosen)
        done.kernels += len({id(kernel) for _, kernel in chosen if kernel is not None})
        refused = [(made, kernel) for made, kernel in pairs if isinstance(kernel, str)]
        if done.report is not None and not strict:
            done.report.refused.update(Counter(reason for _, reason in refused))
        among = {number for made, _ in refused for number in made.group.members}
        if not among:
            break
    return done


def observe(
    graph: OpGraph,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    trace: Trace,
    *,
    nchw: bool,
    held: Mapping[Key, torch.Tensor] | None = None,
    measure: bool = True,
) -> dict[Key, Layout]:
    """Layout in memory of every value that an op reads on the device: the graph runs once.

    A view of a constant, as grouping leaves them, does not run: it is known before. But a group may have a copy of the view, and
    then it is the constant that it reads. Constants that are `held` are on the device already.
    """
    layouts: dict[Key, Layout] = {}

    def note(step: KernelCall, arguments: list[torch.Tensor]) -> None:
        layouts.update(zip(step.inputs, map(layout, arguments), strict=True))

    trace(graph, feeds, device, nchw=nchw, measure=measure, observe=note, held=held)
    for op in graph.ops.values():
        for key in device_inputs(op) if op.op in VIEWS else ():
            if key in graph.constants and key not in layouts:
                layouts[key] = layout(to_torch(graph.constants[key]))
    return layouts


def _kernels(
    compiler: Compiler | None, outlines: Sequence[Outline], layouts: Mapping[Key, Layout]
) -> list[Kernel | str | None]:
    """Per group its kernel, why it has none, or None where nothing is compiled. What saves most is compiled first."""
    if compiler is None:
        return [None] * len(outlines)
    wanted = [(made.body, tuple(layouts[key] for key in made.inputs)) for made in outlines]
    saved: Counter[Any] = Counter()
    for made, (body, lies) in zip(outlines, wanted, strict=True):
        saved[body.key, lies] += made.group.launching - 1
    order = sorted(range(len(wanted)), key=lambda number: -saved[wanted[number][0].key, wanted[number][1]])
    with phase("compiling fused kernels"):
        found = dict(zip(order, compiler.kernels([wanted[number] for number in order]), strict=True))
    return [found[number] for number in range(len(wanted))]
