"""Search for the node at which two engines begin to differ, among the values that both can be asked for.

The engine's program and TensorFlow run side by side, and are compared value by value.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensorflow.engine import reference, session_on_cpu
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.inputs.make import feeds_for
from msplit.inputs.reference import load_reference
from msplit.opset.traits import CONSTANTS, DRAWS
from msplit.progress import Progress, silent
from msplit.run.request import RunRequest
from msplit.run.variants import as_recorded
from msplit.verify.compare import OutputComparison, compare, compare_state, computed_in
from msplit.verify.op_by_op import Fetchable, Key, fetchable, is_number, read_by, reads_variable
from msplit.verify.tensorflow_process import fit, initial_state
from msplit.verify.tolerances import state_tolerances

AT_A_TIME = 100
"""Values that are fetched in one run: all of them are in memory, twice."""

MOST_SUSPECTS = 50
"""Nodes whose values differ that are run alone."""


@dataclass(frozen=True)
class Suspect:
    """A value that differs, or what a step makes of a variable.

    Attributes:
        node: Name of the node that makes it. Of a variable, the last that writes it.
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
    """Result of a bisection.

    Attributes:
        device: Where the engine ran: "cuda", or "cpu" with simulated streams.
        compared: Values that were compared one by one, with plain kernels: all that outputs and targets need and that can be.
        differing: How many of them differ.
        variables: Variables that the step writes and that were compared after it.
        left_out: Why -> how many values were not compared for that.
        kernels: The kernels with which the outputs or the culprit differ; "" where nothing does.
        culprit: The first node in topological order that gives another value than TensorFlow for the same inputs, or, where every plain
            node agrees, the node of a group whose value differs; None where there is none.
        drift: Where no node is to blame, the first value that differs all the same: of rounding that grows from node to node.
    """

    device: str
    compared: int
    differing: int
    variables: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    kernels: str = ""
    culprit: Suspect | None = None
    drift: Suspect | None = None


def bisect(flat: FlatGraph, request: RunRequest | None = None, *, progress: Progress | None = None) -> Bisected:
    """Runs a model with plain kernels on one stream beside TensorFlow on the CPU and compares every value, then with larger kernels.

    Of a step that writes variables, that is what its updates read as well, such as gradients, and what it makes of each variable: first by
    every update alone, of what TensorFlow gives it to read, and then by the whole step.

    Everything is IEEE float32. This executes the model. Without a GPU the engine runs on CPU tensors: that finds what is wrong in
    lowerings and passes, and not what a GPU's kernels do.

    Args:
        request: As for `bench`: inputs, batch, shapes, seed, tolerance, reference (its inputs).

    Raises:
        EngineError: TensorFlow or PyTorch is not here, or the engine can not run the model.
    """
    request, _ = as_recorded(flat, request or RunRequest())
    if why := TENSORFLOW.unavailable():
        raise EngineError(f"bisecting compares with TensorFlow: {why}")
    if importlib.util.find_spec("torch") is None:
        raise EngineError("PyTorch, the kernel library of the cuda engine, is not installed", fix="see `msplit doctor`")
    device = "cpu" if request.device == "cuda" and CUDA.unavailable() else request.device
    loaded = None if request.reference is None else load_reference(request.reference)
    if loaded is not None and request.reference is not None:
        fit(flat, loaded, request.reference, batch=request.workload.batch, shapes=request.workload.shapes)
        feeds: Arrays = loaded.feeds
    else:
        feeds = feeds_for(flat, request.workload, seed=request.seed)
    found = fetchable(flat)
    state = initial_state(flat, op_libraries=request.op_libraries) if found.after.any() else {}
    sides = _Sides(flat, found, feeds, request, device, state)
    tell = progress or silent
    keys = found.keys
    wrong: list[tuple[Key, OutputComparison]] = []
    for start in range(0, len(keys), AT_A_TIME):
        tell("comparing values", start / len(keys))
        chunk = keys[start : start + AT_A_TIME]
        compared = sides.compared(chunk, KernelMode.PLAIN)
        wrong += [(key, compared[key]) for key in chunk if not compared[key].passed]
    made = Bisected(device, len(keys), len(wrong), len(found.writers), found.left_out)
    drift = None
    for key, comparison in wrong[:MOST_SUSPECTS]:
        tell("running nodes alone", 1.0)
        suspect = sides.suspect(key, comparison)
        # What reads a variable that was written is given no other value of it: of that the updates below tell.
        told_below = found.after[key[0]] and reads_variable(flat, key[0])
        if not told_below and (suspect.alone is None or not suspect.alone.passed):
            return replace(made, kernels="plain", culprit=suspect)
        drift = drift or suspect
    tell("running updates alone", 1.0)
    if culprit := sides.among_updates():
        return replace(made, kernels="plain", culprit=culprit)
    for kernels in KernelMode:
        tell(f"comparing outputs with {kernels} kernels", 1.0)
        culprit = sides.among_kernels(kernels) or sides.among_variables(kernels)
        if culprit is not None:
            if drift is not None and kernels is KernelMode.PLAIN:
                break
            return replace(made, kernels=kernels, culprit=culprit)
    return replace(made, kernels="plain" if drift else "", drift=drift)


_Values = Mapping[Key, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class _Sides:
    """The engine and TensorFlow on the same inputs, each time from the same variables."""

    flat: FlatGraph
    found: Fetchable
    feeds: Arrays
    request: RunRequest
    device: str
    state: Arrays

    def name(self, key: Key) -> str:
        """A value's name."""
        return f"{self.flat.graph.names[key[0]]}:{key[1]}"

    def compared(
        self, keys: Iterable[Key], kernels: KernelMode, given: _Values | None = None, expected: _Values | None = None
    ) -> dict[Key, OutputComparison]:
        """Compares some values of both sides. Others that are given are inputs of the engine's side. `expected`: TensorFlow's, if known."""
        found: dict[Key, OutputComparison] = {}
        for part in self._parts(keys):
            cut = self._cut(part)
            got = self._stepped(cut, kernels, given or {})[0]
            tolerance, computed = self.request.settings.tolerance, computed_in(cut)
            wanted = self._tensorflow(part) if expected is None else {self.name(key): expected[key] for key in part}
            by_name = {one.name: one for one in compare(got, wanted, tolerance=tolerance, computed=computed).outputs}
            found |= {key: by_name[self.name(key)] for key in part}
        return found

    def tensorflow(self, keys: Sequence[Key]) -> dict[Key, NDArray[Any]]:
        """Values of the first step of a session on the CPU."""
        values = {name: value for part in self._parts(keys) for name, value in self._tensorflow(part).items()}
        return {key: values[self.name(key)] for key in keys}

    def _parts(self, keys: Iterable[Key]) -> list[list[Key]]:
        """Values that may be fetched together: what follows a node that writes a variable apart from what reads it as it was."""
        keys = list(dict.fromkeys(keys))
        after = [key for key in keys if self.found.after[key[0]]]
        return [part for part in ([key for key in keys if not self.found.after[key[0]]], after) if part]

    def _cut(self, keys: Sequence[Key]) -> FlatGraph:
        return replace(self.flat, outputs=tuple(Tensor(self.name(key), *key) for key in keys), targets=())

    def _tensorflow(self, keys: Sequence[Key]) -> dict[str, NDArray[Any]]:
        libraries = self.request.op_libraries
        return reference(self._cut(keys), self.feeds, op_libraries=libraries, inlined=True, state=self.state)

    def _stepped(self, flat: FlatGraph, kernels: KernelMode, given: _Values) -> tuple[dict[str, NDArray[Any]], Arrays]:
        """Outputs of the engine's first step, and the variables after it, if it writes any."""
        more = {f"{self.name(key)} (given)": (key, value) for key, value in given.items()}
        flat = replace(flat, inputs=(*flat.inputs, *(Tensor(name, *key) for name, (key, _) in more.items())))
        feeds = {**self.feeds, **{name: value for name, (_, value) in more.items()}}
        with closing(CUDA.build(self._job(flat, feeds, kernels))) as executable:
            outputs = executable.step(feeds)
            return outputs, executable.save_state()

    def _job(self, flat: FlatGraph, feeds: Arrays, kernels: KernelMode) -> Job:
        return Job(
            flat,
            np.zeros(len(flat), np.int32),
            1,
            feeds,
            precision=Precision.IEEE,
            options=EngineOptions(self.device, capture=False, layout=self.request.layout, mode=kernels),
            op_libraries=self.request.op_libraries,
            state=self.state,
        )

    def _read(self, nodes: Iterable[int]) -> list[Key]:
        return read_by(self.flat, self.found, nodes)

    def _given(self, read: Iterable[Key]) -> dict[Key, NDArray[Any]]:
        """TensorFlow's own values to run nodes alone on. Integers decide shapes: those are known before the run where nothing is given
        in their place."""
        return self.tensorflow([key for key in read if not self.flat.dtype(*key).startswith(("int", "uint", "bool"))])

    def suspect(self, key: Key, found: OutputComparison) -> Suspect:
        """Describes a node whose value differs."""
        read = self._read([key[0]])
        inputs = self.compared(read, KernelMode.PLAIN)
        given = self._given(read)
        alone = self.compared([key], KernelMode.PLAIN, given)[key] if given else None
        graph = self.flat.graph
        return Suspect(graph.names[key[0]], graph.ops[key[0]], found, tuple(inputs.values()), alone)

    def among_updates(self) -> Suspect | None:
        """The first node that makes something else of a variable than TensorFlow does, of what TensorFlow gives it to read. What follows a
        write is not given: the write would not be needed for it."""
        writers = self.found.writers
        if not writers:
            return None
        read = self._read(node for nodes in writers.values() for node in nodes)
        after, ops = self.found.after, self.flat.graph.ops
        given = self._given(key for key in read if not after[key[0]] and ops[key[0]] not in CONSTANTS)
        got, (expected, _) = self._stepped(self.flat, KernelMode.PLAIN, given)[1], self._learned
        for name in self._written():
            found = self._change(name, got, expected)
            if not found.passed:
                inputs = self.compared(self._read(writers[name]), KernelMode.PLAIN)
                return replace(self._update(name, found), inputs=tuple(inputs.values()), alone=found)
        return None

    def among_variables(self, kernels: KernelMode) -> Suspect | None:
        """The first node that writes a variable which is another one after a whole step with some kernels."""
        if not self.found.writers:
            return None
        got, (after, tolerances) = self._stepped(self.flat, kernels, {})[1], self._learned
        for name in self._written():
            for one in compare_state(got, {name: after[name]}, tolerances).outputs:
                if not one.passed:
                    return replace(self._update(name, one), group=self._group(self.found.writers[name][-1], kernels))
        return None

    def _written(self) -> list[str]:
        """Variables in the order in which the step is done with them."""
        place = {int(node): place for place, node in enumerate(self.flat.graph.topological)}
        return sorted(self.found.writers, key=lambda name: place[self.found.writers[name][-1]])

    def _update(self, name: str, found: OutputComparison) -> Suspect:
        node = self.found.writers[name][-1]
        return Suspect(self.flat.graph.names[node], self.flat.graph.ops[node], found)

    @cached_property
    def _learned(self) -> tuple[Arrays, Mapping[str, float]]:
        """The variables after TensorFlow's first step, and how far rounding may put each."""
        session = session_on_cpu(self.flat, op_libraries=self.request.op_libraries, inlined=True)

        def stepped(state: Arrays) -> Arrays:
            session.load_state(state)
            session.step(self.feeds)
            return session.save_state()

        try:
            after = stepped(self.state)
            return after, state_tolerances(
                self.state,
                after,
                stepped,
                draws=not DRAWS.isdisjoint(self.flat.graph.ops),
                precision=Precision.IEEE,
                tolerance=self.request.settings.tolerance,
            )
        finally:
            session.close()

    def _change(self, name: str, got: Arrays, after: Arrays) -> OutputComparison:
        """Compares the change of a variable in a step, as closely as the variable's own type can hold it; of other types, its value."""
        if name not in got:
            return compare({}, {name: after[name]}).outputs[0]
        before, expected, mine = self.state[name], after[name], got[name]
        least = 0.0
        if expected.dtype.kind in "fc" and before.shape == expected.shape == mine.shape:
            size = np.sqrt(np.mean(np.abs(expected - before) ** 2)) if expected.size else 0.0
            if np.isfinite(size) and size:
                least = float(2 * np.finfo(expected.dtype).eps * np.abs(expected).max() / size)
            name, expected, mine = f"change of {name}", expected - before, mine - before
        tolerance = self.request.settings.tolerance
        return compare({name: mine}, {name: expected}, tolerance=tolerance, carried={name: least}).outputs[0]

    @cached_property
    def _expected(self) -> _Values:
        """TensorFlow's values of the outputs and of what updates of variables read, which each kernel mode is compared with."""
        outputs = [(output.node, output.port) for output in self.flat.outputs]
        outputs = [key for key in outputs if is_number(self.flat, key) and key not in self.found.unfetchable]
        return self.tensorflow(outputs + self._read(node for nodes in self.found.writers.values() for node in nodes))

    def among_kernels(self, kernels: KernelMode) -> Suspect | None:
        """The first node whose value differs with some kernels where outputs do, or what updates of variables read, and the group that it
        is in; None where they agree."""
        graph, outputs = self.flat.graph, self._expected
        compared = self.compared(outputs, kernels, expected=outputs)
        bad = [(key, one) for key, one in compared.items() if not one.passed]
        if not bad:
            return None
        key, found = bad[0]
        above = graph.ancestors([key[0]])
        path = [value for value in self.found.keys if above[value[0]] and value[0] != key[0]]
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
        for _, nodes in CUDA.compile(self._job(self.flat, self.feeds, kernels)).kernels():
            if node in nodes and len(nodes) > 1:
                return tuple(self.flat.graph.names[one] for one in nodes)
        return ()
