"""Tells which parts of a graph the cuda engine can run, before anything runs."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msplit.analysis.rows.walk import Rows, independent_rows
from msplit.engines.base import Job
from msplit.engines.cuda.frontend.functionalize import Raised, raise_control
from msplit.engines.cuda.frontend.partition import (
    Partition,
    by_op,
    divide,
    missing_by_op,
    unknown_effects,
    wanted,
)
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.ir.functions import FUNCTIONAL, reachable
from msplit.engines.cuda.ir.lowering import listed
from msplit.engines.cuda.kernels.toolchain import c_compiler, kernel_folder, refused_folders
from msplit.engines.cuda.options import BY_VALUES, LAUNCHED
from msplit.engines.host.table import HostNode, host_ops
from msplit.errors import INSTALL_JAXLIB, EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.stablehlo import CALL_MODULE, installed
from msplit.opset import schema
from msplit.opset.traits import BEGINS, ITERATORS, VARIABLES, written
from msplit.shapes import Shapes, infer

if TYPE_CHECKING:
    from msplit.engines.cuda.passes.dry_run import DryRun

OPS_TOLD = 8
"""Ops that a sentence lists."""

_SHARED = ("Const", *VARIABLES)
"""Ops whose values both sides have."""

MOST_BUILT = 10_000
"""Nodes of a graph that is built where nobody has asked for it: a millisecond each."""

MOST_FOLLOWED = 3_000
"""Ops that its loops may become there."""

LEAST_ADDRESS_SPACE = 1 << 33
"""Bytes: PyTorch maps several GB where it is loaded, and may end the process where it can not."""


@dataclass(frozen=True)
class Coverage:
    """Ops of a graph by whether and where the engine can run them.

    Attributes:
        covered: Op -> number of nodes.
        missing: Op -> names of its nodes, for ops without a lowering.
        dynamic: Op -> names of its nodes, for ops whose output shape depends on values: they run eagerly, not captured.
        host: Op -> names of its nodes, for nodes that run before the device part, through TensorFlow on the CPU.
        behind: Op -> names of its nodes, for nodes that run there behind the device part.
        stuck: Op -> names of its nodes, for host nodes between work for the device.
        effects: Names of nodes that are run for an effect that the engine does not have.
        refused: What else the engine's build refuses -> the places, such as a loop whose turns only the run knows.
        unbuilt: Why the build was not tried, or "" where it was, or where nothing in the graph asks for it.
        uncaptured: Op -> names of what a build leaves in the way of a capture: shapes that depend on values. None where none was tried.
        sized: Values that the host makes, and whose sizes depend on values: steps take one size of each.
        bounds: Loop whose turns depend on values -> the most turns that it takes, and what bounds it.
        writes: Nodes that change variables: neither a build nor requests may have any.
        in_tensorflow: Op -> names of its nodes, for those of the host that only TensorFlow can run: with any of them, a build needs it.
        kept_out: Op -> names of its nodes, for those of the host that no build can hold: they read data of their own.
    """

    covered: dict[str, int]
    missing: dict[str, list[str]]
    dynamic: dict[str, list[str]]
    host: dict[str, list[str]] = field(default_factory=dict)
    behind: dict[str, list[str]] = field(default_factory=dict)
    stuck: dict[str, list[str]] = field(default_factory=dict)
    effects: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    unbuilt: str = ""
    uncaptured: dict[str, list[str]] | None = None
    sized: Sequence[str] = ()
    bounds: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    writes: Sequence[str] = ()
    in_tensorflow: dict[str, list[str]] = field(default_factory=dict)
    kept_out: dict[str, list[str]] = field(default_factory=dict)

    @property
    def of_host(self) -> list[str]:
        """Ops that the host runs, before or behind, without those whose values both sides have."""
        ops = sorted({*self.host, *self.behind})
        return [op for op in ops if op not in _SHARED] or ops

    @property
    def ways(self) -> list[str]:
        """Sentences on how the engine runs the graph, one each; none where it can not, as far as is known."""
        if self.reasons:
            return []
        if self.uncaptured is None:
            found = ["Whether its steps can be captured was not tried."] if not self.unbuilt else []
        elif self.uncaptured:
            fix = f"{LAUNCHED[:1].upper()}{LAUNCHED[1:]}"
            found = [f"Its steps can run launch by launch only: {BY_VALUES}: {_some(self.uncaptured)}. {fix}."]
        else:
            found = ["Its steps can be captured as one CUDA graph."]
        if self.writes:
            found.append(
                f"It can be trained, not built or served: a step changes variables ({_some_of([*self.writes])})."
            )
        elif self.kept_out:
            found.append(
                f"It can be served, not built: the host runs {_some(self.kept_out)}, which reads data of its own."
            )
        elif self.in_tensorflow:
            found.append(
                f"It can be built, and needs TensorFlow where it is opened: only that runs {_some(self.in_tensorflow)}."
            )
        elif ops := self.of_host:
            more = f" and {len(ops) - OPS_TOLD} more ops" if len(ops) > OPS_TOLD else ""
            found.append(f"The host runs {', '.join(ops[:OPS_TOLD])}{more}: without TensorFlow, in a build, too.")
        found += masked_loops(self.bounds)
        if self.sized:
            found.append(
                f"The size of {_some_of([*self.sized])}, which the host makes, depends on values, as far as is known: a step takes the "
                "size that it was prepared with, and refuses inputs of which another comes. In the model, pad it to one size; or feed it: "
                "--part inputs=."
            )
        return found

    @property
    def reasons(self) -> list[str]:
        """Why the engine can not run the graph, one sentence each; none where it can, as far as is known."""
        found = []
        if self.effects:
            found.append(
                f"it has steps that are run for an effect that the engine does not have ({', '.join(self.effects[:3])})"
            )
        if self.missing:
            found.append(f"there is no lowering for {_some(self.missing)}")
            if CALL_MODULE in self.missing and not installed():
                found.append(f"jaxlib, which reads what JAX wrote, is not installed: {INSTALL_JAXLIB}")
        if self.stuck:
            found.append(
                f"work for the device needs {_some(self.stuck)}, which the host runs and which needs the device"
            )
        found += [f"{why} ({_some_of(places)})" for why, places in self.refused.items()]
        return found


def masked_loops(bounds: Mapping[str, tuple[int, str]]) -> list[str]:
    """Sentences on loops that run up to a bound, one each for those that a sentence lists."""
    return [
        f"The loop {name} runs its most turns in each step, up to {most:,} as {by} bounds it; turns behind its end change nothing."
        for name, (most, by) in [*bounds.items()][:OPS_TOLD]
    ]


def _some(nodes: Mapping[str, list[str]]) -> str:
    shown = [f"{op} ({_some_of(names)})" for op, names in sorted(nodes.items())]
    more = [f"{len(shown) - OPS_TOLD} more ops"] if len(shown) > OPS_TOLD else []
    return ", ".join(shown[:OPS_TOLD] + more)


def _some_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def cover(flat: FlatGraph, sizes: Shapes | None = None, *, build: bool | None = None) -> Coverage:
    """Tells by op which nodes of a graph the engine can run, and which it refuses: nothing is executed, and no device is needed.

    Args:
        sizes: Its shapes; those of a batch of one if None.
        build: Whether to build the graph as the engine does, which needs PyTorch and time: in any case, for what kernels make of
            attributes, types and shapes, or never. None: where it has loops, conds or lists, for only a build tells of those.
    """
    whole = flat
    raised = raise_control(flat)
    flat = raised.flat
    shapes = functools.cache(lambda: sizes or infer(whole))
    partition = divide(raised, shapes)
    effects = unknown_effects(flat, partition)
    controlled = any(flat.graph.ops[node] in FUNCTIONAL or flat.graph.ops[node] in LISTS for node in partition.device)
    unbuilt, built = "", None
    if build is False:
        unbuilt = "nobody asked for it"
    elif controlled or build:
        built, unbuilt = _built(raised, partition, shapes(), bool(build))
    told, uncaptured, sized = _told(built)
    refused = {**told, **_not_begun(flat, partition.host)}
    unable = {*partition.missing, *partition.unplaceable}
    covered: dict[str, int] = {}
    dynamic: dict[str, list[str]] = {}
    for node in partition.device:
        op = flat.graph.ops[node]
        if node not in unable:
            covered[op] = covered.get(op, 0) + 1
            if op in listed() and listed()[op].dynamic_with(flat.graph.attrs[node]):
                dynamic.setdefault(op, []).append(flat.graph.names[node])
    return Coverage(
        covered,
        missing_by_op(flat, partition),
        dynamic,
        by_op(flat, tuple(node for node in partition.host if node not in unable)),
        by_op(flat, partition.post_nodes),
        by_op(flat, partition.unplaceable),
        effects,
        refused,
        unbuilt if controlled or build else "",
        uncaptured,
        sized,
        {} if built is None else built.bounds,
        [name for name, op in zip(whole.graph.names, whole.graph.ops, strict=True) if written(op)],
        *_of_host(flat, partition),
    )


def by_values(flat: FlatGraph, unknown: Collection[str]) -> bool:
    """True where sizes that are not known may depend on values, of a graph that is small enough to be built for an answer.

    Args:
        flat: The graph.
        unknown: Ops of nodes whose shapes are not known.
    """
    return len(flat) <= MOST_BUILT and any(op in listed() and listed()[op].dynamic for op in unknown)


def _of_host(flat: FlatGraph, partition: Partition) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Nodes of the host that only TensorFlow can run, and those that no build can hold, by their ops. What depends on no input is
    computed when the build is made."""
    graph, nodes = flat.graph, {*partition.host, *partition.post_nodes}
    depends = {(tensor.node, tensor.port) for tensor in flat.inputs} | set(partition.handed)
    theirs = []
    for node in sorted(nodes):
        if depends.isdisjoint(graph.inputs(node)):
            continue
        op, attrs = graph.ops[node], graph.attrs[node]
        depends.update((node, port) for port in range(schema.output_count(op, attrs) or 0))
        info = schema.lookup(op)
        bound = HostNode(graph.names[node], op, attrs if info is None else info.filled(attrs))
        if op not in ("ResourceGather", *host_ops()) and (op not in listed() or bound.handles_strings):
            theirs.append(node)
    own = [node for node in partition.effects.stateful if node in nodes]
    return by_op(flat, tuple(theirs)), by_op(flat, tuple(own))


def _told(built: DryRun | None) -> tuple[dict[str, list[str]], dict[str, list[str]] | None, Sequence[str]]:
    """Gives what a build refuses, what it leaves in the way of a capture (None where none was tried), and what has one size."""
    refused: dict[str, list[str]] = {}
    if built is None:
        return refused, None, ()
    for problem in built.refused:
        refused.setdefault(problem.what, []).append((problem.where or "").removeprefix("node "))
    uncaptured: dict[str, list[str]] = {}
    for left in built.by_values:
        uncaptured.setdefault(left.op, []).append(left.name)
    return refused, uncaptured, built.sized


def _not_begun(flat: FlatGraph, nodes: Sequence[int]) -> dict[str, list[str]]:
    """Refuses iterators that some nodes take data from, and that nothing in the file begins."""
    graph, model = flat.graph, flat.model.graph
    read = {source for node in nodes for source, _ in graph.inputs(node) if graph.ops[source] in ITERATORS}
    before = model.ancestors([model.index[name] for name in flat.model.init_ops if name in model.index]) if read else ()
    begun = any(op == BEGINS for op, runs in zip(model.ops, before, strict=False) if runs)
    what = "it takes its data from an iterator, and nothing in the file says what it goes over"
    return {} if begun or not read else {what: [graph.names[node] for node in sorted(read)]}


def _built(raised: Raised, partition: Partition, sizes: Shapes, always: bool) -> tuple[DryRun | None, str]:
    """Verdict of the engine's build of a graph; None where that was not tried, or not to its end, and why."""
    if not always and len(partition.device) > MOST_BUILT:
        return None, f"{len(partition.device):,} nodes are too many to do so by the way"
    if importlib.util.find_spec("torch") is None:
        return None, "PyTorch is not installed"
    limit = _address_space()
    if limit is not None and limit < LEAST_ADDRESS_SPACE and "torch" not in sys.modules:
        return None, f"PyTorch does not load within {limit >> 20:,} MB of address space, which is the limit here"
    try:
        from msplit.engines.cuda.passes.dry_run import dry_run
    except (ImportError, OSError, MemoryError) as problem:  # a limit on memory, a broken installation
        why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        return None, f"PyTorch can not be loaded ({why})"
    found = dry_run(raised, partition, sizes, None if always else MOST_FOLLOWED)
    return found, "" if found.whole else f"they are more than {MOST_FOLLOWED:,} ops, which is too much to do by the way"


def _address_space() -> int | None:
    """Bytes that this process may map (``ulimit -v``); None for any number."""
    try:
        import resource
    except ImportError:  # no POSIX
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def shared_rows(job: Job) -> tuple[int, Rows]:
    """Rows of a job's inputs, proved to be independent, for its devices to share: how many, and which inputs and outputs carry them.

    Raises:
        EngineError: They can not be shared; it says what stands in the way.
    """
    count = len(job.options.devices)
    try:
        found = independent_rows(job.flat, shapes={name: value.shape for name, value in job.feeds.items()})
        found.check()
    except MsplitError as problem:
        raise EngineError(
            f"{count} devices can not share a step: {problem.what}",
            details=problem.details,
            fix="run it on one; a pool on several answers each request on one of them (`msplit serve --gpus`)",
        ) from problem
    rows = min(job.feeds[name].shape[0] // entries for name, entries in found.inputs.items() if entries)
    if rows < count:
        raise EngineError(f"{count} devices can not share a batch of {rows}", fix="give a larger batch, or fewer GPUs")
    return rows, found


@dataclass(frozen=True)
class Toolchain:
    """Tools and folders that kernels are compiled with on this machine.

    Attributes:
        compiler: The C compiler that Triton builds its launchers with; None where there is none.
        folder: The folder that compiled kernels are kept in; None where there is no such place.
        writable: True if that can be written to.
        refused: Folders that are not used because others may write there, one sentence each.
    """

    compiler: str | None
    folder: Path | None
    writable: bool
    refused: Sequence[str]


def toolchain() -> Toolchain:
    """Looks for the tools that kernels are compiled with. Nothing is made, nothing is written."""
    return Toolchain(c_compiler(), *kernel_folder(), refused_folders())


def needed_nodes(flat: FlatGraph) -> list[int]:
    """Nodes that the outputs need through data edges, in topological order."""
    return reachable(flat.graph, wanted(flat), {(one.node, one.port) for one in flat.inputs})
