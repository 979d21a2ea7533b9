"""The whole way from a lowered graph to one with fused groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import dtype_name, to_torch
from msplit.engines.cuda.ir.graph import Key, OpGraph
from msplit.engines.cuda.ir.interpret import positions
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.program import KernelCall
from msplit.engines.cuda.passes.pointwise_fusion.inductor import SECONDS, Compiler, Kernel, Layout, Report, layout
from msplit.engines.cuda.passes.pointwise_fusion.outline import Outline, contract, outline
from msplit.engines.cuda.passes.pointwise_fusion.partition import find_groups
from msplit.engines.cuda.passes.specialize import trace
from msplit.opset.traits import VIEWS


@dataclass(frozen=True)
class Fused:
    """What fusion did.

    Attributes:
        groups: Groups that are one kernel each now.
        members: Ops in them that launched something before.
        kernels: Different kernels among them.
        report: What compiling took; None where groups run op by op.
    """

    groups: int = 0
    members: int = 0
    kernels: int = 0
    report: Report | None = None

    def facts(self) -> Mapping[str, Any]:
        """For the report of a run."""
        found: dict[str, Any] = {
            "fused_groups": self.groups,
            "fused_ops": self.members,
            "fused_kernels": self.kernels,
        }
        if self.report is not None:
            found |= {
                "compile_seconds": round(self.report.seconds, 3),
                "compiled": self.report.compiled,
                "compiled_from_cache": self.report.cached,
                "not_fused": dict(sorted(self.report.refused.items())),
            }
        return found


def fuse(
    graph: OpGraph,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    *,
    nchw: bool = False,
    compile: bool = True,
    seconds: float = SECONDS,
    held: Mapping[Key, torch.Tensor] | None = None,
) -> Fused:
    """Makes groups of pointwise ops one op each.

    The graph runs once to learn how every value lies in memory.

    Args:
        source: With known shapes; changed in place.
        feeds: An array per input.
        device: Where it will run.
        nchw: Memory layout of convolutions.
        compile: Whether groups become kernels. Otherwise all are one op each that runs its members one by one: for tests of grouping.
        seconds: How long compiling may take.
        held: Constants that are on the device already.
    """
    layouts = observe(graph, feeds, device, nchw, held)
    compiler = Compiler(device, seconds) if compile else None
    done = Fused(report=compiler.report if compiler else None)
    among: set[int] | None = None
    for strict in (False, True):
        dtypes = {key: dtype_name(found[2]) for key, found in layouts.items()}
        groups = find_groups(graph, dtypes, among=among, strict=strict)
        readers = graph.consumers()
        outlines = [outline(graph, group, readers) for group in groups]
        kernels = _kernels(compiler, outlines, layouts)
        chosen = [(made, kernel) for made, kernel in zip(outlines, kernels, strict=True) if not isinstance(kernel, str)]
        names = contract(graph, chosen)
        layouts |= {names[key]: layouts[key] for key in names if key in layouts}
        done = replace(
            done,
            groups=done.groups + len(chosen),
            members=done.members + sum(made.group.launching for made, _ in chosen),
            kernels=done.kernels + len({id(kernel) for _, kernel in chosen if kernel is not None}),
        )
        refused = [(made, kernel) for made, kernel in zip(outlines, kernels, strict=True) if isinstance(kernel, str)]
        if done.report is not None and not strict:
            done.report.refused.update(Counter(str(reason) for _, reason in refused))
        among = {number for made, _ in refused for number in made.group.members}
        if not among:
            break
    return done


def observe(
    graph: OpGraph,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    nchw: bool,
    held: Mapping[Key, torch.Tensor] | None = None,
) -> dict[Key, Layout]:
    """How every value that an op reads on the device lies in memory: the graph runs once.

    A view of a constant, as grouping leaves them, does not run: it is known before. But a group may have a copy of the view, and
    then it is the constant that it reads.
    """
    layouts: dict[Key, Layout] = {}

    def note(step: KernelCall, arguments: list[torch.Tensor]) -> None:
        layouts.update(zip(step.inputs, map(layout, arguments), strict=True))

    trace(graph, feeds, device, nchw=nchw, observe=note, held=held)
    for op in graph.ops.values():
        if op.op in VIEWS:
            static = positions(table()[op.op], len(op.inputs))
            for slot, key in enumerate(op.inputs):
                if slot not in static and key in graph.constants and key not in layouts:
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
    found: list[Kernel | str | None] = [None] * len(wanted)
    for number in order:
        found[number] = compiler.kernel(*wanted[number])
    return found
