"""Finds the node at which outputs begin to differ: the engine's program and TensorFlow side by side, value by value."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.precision import Precision
from msplit.engines.base import Arrays, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensorflow.engine import reference
from msplit.errors import EngineError
from msplit.flatten.control_flow import all_frames
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.inputs.make import feeds_for
from msplit.inputs.reference import load_reference
from msplit.measure.reference_fit import fit
from msplit.measure.request import BenchRequest, as_recorded
from msplit.measure.verification import OutputComparison, compare, computed_in
from msplit.opset import schema
from msplit.opset.traits import CONSTANTS, EXIT, MERGE, SWITCH, ops_with
from msplit.progress import Progress, silent

Key = tuple[int, int]

AT_A_TIME = 100
"""Values that are fetched in one run: all of them are in memory, twice."""

MOST_SUSPECTS = 50
"""Nodes whose values differ that are run alone."""


@dataclass(frozen=True)
class Suspect:
    """A value that differs.

    Attributes:
        node: Name of the node that makes it.
        found: How it compares in the run.
        inputs: How what the node reads compares; those of other types than numbers are left out.
        alone: How it compares where the node is given TensorFlow's own inputs; None where that was not tried.
        group: Names of the nodes that one kernel does the work of, of which this is one; empty for a node by itself.
    """

    node: str
    op: str
    found: OutputComparison
    inputs: tuple[OutputComparison, ...] = ()
    alone: OutputComparison | None = None
    group: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bisected:
    """What was found.

    Attributes:
        device: Where the engine ran: "cuda", or "cpu" with simulated streams.
        compared: Values that were compared one by one, with plain kernels.
        differing: How many of them differ.
        kernels: The kernels with which the outputs or the culprit differ; "" where nothing does.
        culprit: The first node in topological order that gives another value than TensorFlow for the same inputs, or, where every plain
            node agrees, the node of a group whose value differs; None where there is none.
        drift: Where no node is to blame, the first value that differs all the same: of rounding that grows from node to node.
    """

    device: str
    compared: int
    differing: int
    kernels: str = ""
    culprit: Suspect | None = None
    drift: Suspect | None = None


def bisect(flat: FlatGraph, request: BenchRequest | None = None, *, progress: Progress | None = None) -> Bisected:
    """Runs a model with plain kernels on one stream beside TensorFlow on the CPU and compares every value, then with larger kernels.

    Everything is IEEE float32. This executes the model. Without a GPU the engine runs on CPU tensors: that finds what is wrong in
    lowerings and passes, and not what a GPU's kernels do.

    Args:
        request: As for `bench`: inputs, batch, shapes, seed, tolerance, reference (its inputs).

    Raises:
        EngineError: TensorFlow or PyTorch is not here, or the engine can not run the model.
    """
    request, _ = as_recorded(flat, request or BenchRequest())
    if why := TENSORFLOW.unavailable():
        raise EngineError(f"bisecting compares with TensorFlow: {why}")
    if importlib.util.find_spec("torch") is None:
        raise EngineError("PyTorch, the kernel library of the cuda engine, is not installed", fix="see `msplit doctor`")
    device = "cpu" if request.device == "cuda" and CUDA.unavailable() else request.device
    loaded = None if request.reference is None else load_reference(request.reference)
    if loaded is not None and request.reference is not None:
        fit(flat, loaded, request.reference, batch=request.batch, shapes=request.shapes)
        feeds: Arrays = loaded.feeds
    else:
        feeds = feeds_for(flat, request.workload, seed=request.seed)
    sides = _Sides(flat, feeds, request, device)
    tell = progress or silent
    keys = list(_values(flat))
    wrong: list[tuple[Key, OutputComparison]] = []
    for start in range(0, len(keys), AT_A_TIME):
        tell("comparing values", start / len(keys))
        chunk = keys[start : start + AT_A_TIME]
        found = sides.compared(chunk, KernelMode.PLAIN)
        wrong += [(key, found[key]) for key in chunk if not found[key].passed]
    made = Bisected(device, len(keys), len(wrong))
    drift = None
    for key, comparison in wrong[:MOST_SUSPECTS]:
        tell("running nodes alone", 1.0)
        suspect = sides.suspect(key, comparison)
        if suspect.alone is None or not suspect.alone.passed:
            return replace(made, kernels="plain", culprit=suspect)
        drift = drift or suspect
    for kernels in KernelMode:
        tell(f"comparing outputs with {kernels} kernels", 1.0)
        culprit = sides.among_kernels(kernels)
        if culprit is not None:
            if drift is not None and kernels is KernelMode.PLAIN:
                break
            return replace(made, kernels=kernels, culprit=culprit)
    return replace(made, kernels="plain" if drift else "", drift=drift)


class _Sides:
    """The engine and TensorFlow on the same inputs."""

    def __init__(self, flat: FlatGraph, feeds: Arrays, request: BenchRequest, device: str) -> None:
        self._flat, self._feeds, self._request, self._device = flat, feeds, request, device

    def name(self, key: Key) -> str:
        """A value's name."""
        return f"{self._flat.graph.names[key[0]]}:{key[1]}"

    def compared(
        self, keys: Iterable[Key], kernels: KernelMode, given: Mapping[Key, NDArray[Any]] | None = None
    ) -> dict[Key, OutputComparison]:
        """How some values compare. Where others are given, they are inputs of the engine's side."""
        keys = list(dict.fromkeys(keys))
        if not keys:
            return {}
        cut = self._cut(keys)
        expected = self.tensorflow(keys)
        computed = computed_in(cut)
        got = self._engine(cut, kernels, given or {})
        found = compare(got, expected, tolerance=self._request.settings.tolerance, computed=computed)
        by_name = {one.name: one for one in found.outputs}
        return {key: by_name[self.name(key)] for key in keys}

    def _cut(self, keys: Sequence[Key]) -> FlatGraph:
        return replace(self._flat, outputs=tuple(Tensor(self.name(key), *key) for key in keys), targets=())

    def tensorflow(self, keys: Sequence[Key]) -> dict[str, NDArray[Any]]:
        """Values of the first step of a session on the CPU."""
        return reference(self._cut(keys), self._feeds, op_libraries=self._request.op_libraries, inlined=True)

    def _engine(
        self, cut: FlatGraph, kernels: KernelMode, given: Mapping[Key, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        more = {f"{self.name(key)} (given)": (key, value) for key, value in given.items()}
        flat = replace(cut, inputs=(*cut.inputs, *(Tensor(name, *key) for name, (key, _) in more.items())))
        feeds = {**self._feeds, **{name: value for name, (_, value) in more.items()}}
        executable = CUDA.build(self._job(flat, feeds, kernels))
        try:
            return executable.step(feeds)
        finally:
            executable.close()

    def _job(self, flat: FlatGraph, feeds: Arrays, kernels: KernelMode) -> Job:
        options = EngineOptions(self._device, capture=False, layout=self._request.layout, mode=kernels)
        ids = np.zeros(len(flat), np.int32)
        return Job(
            flat, ids, 1, feeds, precision=Precision.IEEE, options=options, op_libraries=self._request.op_libraries
        )

    def suspect(self, key: Key, found: OutputComparison) -> Suspect:
        """What is known of a node whose value differs."""
        read = [source for source in dict.fromkeys(self._flat.graph.inputs(key[0])) if _is_number(self._flat, source)]
        inputs = self.compared(read, KernelMode.PLAIN)
        # Integers decide shapes: those are known before the run where nothing is given in their place.
        floats = [source for source in read if not _dtype(self._flat, source).startswith(("int", "uint", "bool"))]
        alone = None
        if floats:
            values = self.tensorflow(floats)
            given = {source: values[self.name(source)] for source in floats}
            alone = self.compared([key], KernelMode.PLAIN, given)[key]
        graph = self._flat.graph
        return Suspect(graph.names[key[0]], graph.ops[key[0]], found, tuple(inputs.values()), alone)

    def among_kernels(self, kernels: KernelMode) -> Suspect | None:
        """The first node whose value differs with some kernels where outputs do, and the group that it is in; None where they agree."""
        graph = self._flat.graph
        outputs = [(output.node, output.port) for output in self._flat.outputs]
        outputs = [key for key in outputs if _is_number(self._flat, key)]
        bad = [(key, one) for key, one in self.compared(outputs, kernels).items() if not one.passed]
        if not bad:
            return None
        key, found = bad[0]
        above = graph.ancestors([key[0]])
        path = [value for value in _values(self._flat) if above[value[0]] and value[0] != key[0]]
        low, high = 0, len(path)  # the first of the path that differs, if errors reach what follows
        while low < high:
            middle = (low + high) // 2
            one = self.compared([*outputs, path[middle]], kernels)[path[middle]]
            if one.passed:
                low = middle + 1
            else:
                high, key, found = middle, path[middle], one
        read = [source for source in dict.fromkeys(graph.inputs(key[0])) if source in set(path)]
        inputs = self.compared([*outputs, *read], kernels) if read else {}
        reads, group = tuple(inputs[source] for source in read), self._group(key[0], kernels)
        return Suspect(graph.names[key[0]], graph.ops[key[0]], found, reads, None, group)

    def _group(self, node: int, kernels: KernelMode) -> tuple[str, ...]:
        """The nodes that one step of the program does the work of together with a node."""
        for _, nodes in CUDA.compile(self._job(self._flat, self._feeds, kernels)).kernels():
            if node in nodes and len(nodes) > 1:
                return tuple(self._flat.graph.names[one] for one in nodes)
        return ()


def _values(flat: FlatGraph) -> Iterator[Key]:
    """What can be fetched and compared, in topological order: numbers outside of loops and of branches that may not be taken."""
    graph = flat.graph
    inside = all_frames(graph).inside
    fed = {(tensor.node, tensor.port) for tensor in flat.inputs}
    needed = graph.ancestors([tensor.node for tensor in flat.outputs])
    needed[[tensor.node for tensor in flat.outputs]] = True
    read = set(zip(graph.edges.src.tolist(), graph.edges.port.tolist(), strict=True))
    dead: set[int] = set()
    given, revived = CONSTANTS | ops_with("fed"), MERGE | EXIT
    for node in graph.topological.tolist():
        op = graph.ops[node].removeprefix("Ref")
        if op in SWITCH or (op not in revived and any(int(one) in dead for one in graph.predecessors(node))):
            dead.add(node)
        if node in dead or node in inside or not needed[node] or flat.host[node] or op in given:
            continue
        for port in range(schema.output_count(graph.ops[node], graph.attrs[node]) or 0):
            key = (node, port)
            if key not in fed and (port == 0 or key in read) and _is_number(flat, key):
                yield key


def _dtype(flat: FlatGraph, key: Key) -> str:
    attrs = flat.graph.attrs[key[0]]
    found = schema.output_dtype(flat.graph.ops[key[0]], attrs, key[1]) or attrs.get("dtype")
    return found if isinstance(found, str) else ""


def _is_number(flat: FlatGraph, key: Key) -> bool:
    dtype = _dtype(flat, key)
    return bool(dtype) and dtype not in ("string", "variant", "resource")
