"""Profiles: measured costs of a model, the work that they were measured for, and their files.

Measured costs: what `msplit profile` finds on a GPU, and how it takes the place of static costs.

The work to be done: what sizes a graph and prices its nodes.

Profiles as JSON: `msplit profile -o` writes them, `--costs profile=` reads them. `docs/schemas/profile.json` describes them.

A file may come from anybody: it is bounded in size, and every mistake in it is an error that says where it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from msplit.core.arguments import Precision
from msplit.cost.costs import Constants, Costs, carry
from msplit.cost.gpus import Gpu, data_sheet, gpu_names
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.files import JsonValue, Sha256, read_file
from msplit.formats.summary import structure_hash
from msplit.formats.tensors import fits
from msplit.opset.traits import ops_with


@dataclass(frozen=True)
class ProfiledDevice:
    """The device that a profile was measured on.

    Attributes:
        name: As the driver calls it, such as "NVIDIA H200"; "CPU" for a simulated profile.
        sms: Multiprocessors, 0 on a CPU.
        driver: Version of the driver, "" if it is not known.
        cuda: Version of CUDA that PyTorch is built for.
        pytorch: Version of PyTorch.
    """

    name: str
    sms: int = 0
    driver: str = ""
    cuda: str = ""
    pytorch: str = ""

    @property
    def simulated(self) -> bool:
        """True if there was no GPU: the times are those of a CPU."""
        return self.sms == 0

    def sheet(self) -> str | None:
        """Name of this GPU's data sheet, if there is one."""
        words = self.name.lower().replace("-", " ").split()
        return next((name for name in gpu_names() if name in words), None)

    def __str__(self) -> str:
        if self.simulated:
            return "CPU, simulated streams"
        parts = [f"driver {self.driver}" * bool(self.driver), f"CUDA {self.cuda}", f"PyTorch {self.pytorch}"]
        return ", ".join([self.name, *(part for part in parts if part)])


@dataclass(frozen=True)
class ProfiledKernel:
    """A measured step, and all steps like it.

    Attributes:
        op: What the engine calls it.
        inputs: Per input its type, shape and strides.
        time_us: Time alone on the device, its inputs in the L2 cache as far as they fit.
        share: Share of the device that it takes when enough like it run side by side, in (0, 1]; None: not measured.
        bytes: Bytes of its inputs and outputs.
        launches: Kernels that it launches; None: not known, as all that follows.
        kernel: Name of the longest of them.
        blocks: Blocks of its grid.
        threads: Threads per block.
        registers: Registers per thread.
        shared_bytes: Shared memory per block.
        resident: Blocks of it that the whole device holds at once.
        occupancy: Share of the device's threads that it fills, by CUPTI's estimate.
    """

    op: str
    inputs: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    time_us: float
    share: Annotated[float, 0.0, 1.0] | None
    bytes: Annotated[float, 0.0, 1e15]
    launches: int | None = None
    kernel: str | None = None
    blocks: int | None = None
    threads: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    resident: int | None = None
    occupancy: float | None = None


@dataclass(frozen=True)
class ProfiledStep:
    """One step of the lowered graph.

    Attributes:
        nodes: The nodes of the flat graph that it does the work of, the one that decides its stream first.
        kernel: Index of what was measured for it, or -1.
    """

    nodes: tuple[str, ...]
    kernel: Annotated[int, -1] = -1


@dataclass(frozen=True)
class InputShape:
    """Type and shape of an input: `dtype` is a name such as ``"float32"``, and all sizes are known."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Profile:
    """A profile: the file that `msplit profile` writes.

    Attributes:
        graph_hash: `formats.structure_hash` of the model.
        ops: Op -> nodes of it, to say how another graph differs.
        inputs: What was fed.
        device: Where.
        precision: The name of a `Precision`.
        layout: Memory layout of convolutions: "nhwc", "nchw" or "none".
        constants: Of the device.
        kernels: What was measured.
        steps: What runs.
        one_us: A whole step on one stream, captured, back to back with others, by the device's clock; None: not measured.
        unmeasured: Why steps without a kernel have none -> how many.
        made: When and with which msplit, for people.
        source: The file, "" for one that was just measured.
    """

    graph_hash: Sha256
    ops: Mapping[str, int]
    inputs: Mapping[str, InputShape]
    device: ProfiledDevice
    precision: Annotated[str, tuple(Precision)]
    layout: Annotated[str, ("nhwc", "nchw", "none")]
    constants: Constants
    kernels: tuple[ProfiledKernel, ...]
    steps: tuple[ProfiledStep, ...]
    one_us: float | None = None
    unmeasured: Mapping[str, int] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by input."""
        return {name: given.shape for name, given in self.inputs.items()}

    @property
    def measured(self) -> int:
        """Steps that have a measured time."""
        return sum(step.kernel >= 0 for step in self.steps)

    def describe(self) -> str:
        """One line: what it holds and where from."""
        few = f", {len(self.steps) - self.measured} are priced statically" if self.measured < len(self.steps) else ""
        return f"{self.measured} of {len(self.steps)} steps measured on {self.device}, {self.precision}{few}"


def op_counts(flat: FlatGraph) -> dict[str, int]:
    """Op -> nodes of it, by name."""
    return dict(sorted(Counter(flat.graph.ops).items()))


def apply(profile: Profile, flat: FlatGraph, static: Costs) -> Costs:
    """Costs with what was measured in place of what was estimated.

    The first GPU node of each step, which decides its stream, carries the step's time, share and bytes; the others launch nothing. Nodes
    that no step covers are not run by the engine (constants fold, what needs no kernel vanishes) and cost nothing. Nodes of steps that
    were not measured keep their static costs. FLOPs stay as they are, except for nodes that are not run. What the engine runs of the
    host's nodes is carried by the kernels that read it: no stream is theirs to choose.

    Args:
        profile: Of this graph, see `check`.
        flat: The graph.
        static: Its static costs at the profile's shapes.
    """
    index = flat.graph.index
    time, share, nbytes, flops = (
        column.copy() for column in (static.time_us, static.share, static.bytes, static.flops)
    )
    known = static.known.copy()
    run = np.zeros(len(flat), dtype=np.bool_)
    inside = np.zeros(len(flat), dtype=np.bool_)
    covered = [[index[name] for name in step.nodes if not flat.host[index[name]]] for step in profile.steps]
    host_us = np.zeros(len(flat))
    for step, nodes in zip(profile.steps, covered, strict=True):
        run[nodes] = True
        if step.kernel >= 0:
            time[nodes], nbytes[nodes], share[nodes] = 0.0, 0.0, 0.0
            inside[nodes], known[nodes] = True, True
            if step.nodes and not nodes:
                host_us[index[step.nodes[0]]] += profile.kernels[step.kernel].time_us
    # A node may need several steps: what they take adds up.
    for step, nodes in zip(profile.steps, covered, strict=True):
        if step.kernel < 0 or not nodes:
            continue
        kernel, first = profile.kernels[step.kernel], nodes[0]
        fills = kernel.share if kernel.share is not None else float(static.share[nodes].max())
        area = time[first] * share[first] + kernel.time_us * fills
        time[first] += kernel.time_us
        share[first] = area / time[first] if time[first] > 0 else fills
        # A gather does not read its whole table: the estimate knows that, the sizes of its inputs do not.
        moved = float(static.bytes[nodes].sum())
        nbytes[first] += min(kernel.bytes, moved) if moved > 0 else kernel.bytes
        inside[first] = False
    for column in (time, nbytes, flops):
        column[~run] = 0.0
    carried_us = carry(host_us, flat.graph, time > 0)
    time += carried_us
    return replace(
        static,
        time_us=time,
        share=np.clip(share, 1e-4, 1.0),
        bytes=nbytes,
        flops=flops,
        known=known | ~run,
        inside=inside,
        constants=profile.constants,
        one_us=profile.one_us,
        source=profile.describe(),
        host_us=host_us,
        carried_us=carried_us,
    )


@dataclass(frozen=True)
class Reached:
    """Rates that a measured kernel reaches, beside the ceilings of its GPU.

    Attributes:
        kernel: Its index in `Profile.kernels`.
        op: What the engine calls it.
        steps: Steps of the model that are like it.
        time_us: Time of one of them, alone.
        flops: Operations of one of them, by the shapes of its nodes.
        bytes: Bytes that one of them moves.
        flops_per_s: Operations per second.
        bytes_per_s: Bytes per second.
        intensity: Operations per byte.
        peak_flops_per_s: Ceiling for its types: of the tensor cores for products and convolutions.
        peak_bytes_per_s: Ceiling: of the L2 cache, where the kernel was measured with its inputs, as far as they fit; else of the memory.
        bound: Largest of the three least times: "compute", "memory", or "launch" of a tiny kernel.
        share: The larger of the least times of arithmetic and of memory over the measured time: 1 is at the roof.
    """

    kernel: int
    op: str
    steps: int
    time_us: float
    flops: float
    bytes: float
    flops_per_s: float
    bytes_per_s: float
    intensity: float
    peak_flops_per_s: float
    peak_bytes_per_s: float
    bound: str
    share: float


def roofline(profile: Profile, flat: FlatGraph, costs: Costs) -> tuple[Reached, ...]:
    """Rates of the measured kernels (S. Williams et al., Roofline, CACM 52, 2009), those that take the most time of a step first.

    Left out: kernels that do part of a node's work, as nothing says which part of its operations is theirs; those of nodes whose shapes are
    not known; all of a profile that was measured without a GPU.

    Args:
        profile: Of this graph.
        flat: The graph.
        costs: Its costs at the profile's shapes, static or with the profile applied, on the GPU whose data sheet has the ceilings.
    """
    if profile.device.simulated:
        return ()
    sheet, index = data_sheet(costs.gpu), flat.graph.index
    uses = Counter(step.kernel for step in profile.steps)
    parts = Counter(name for step in profile.steps for name in step.nodes)
    found: dict[int, Reached] = {}
    for step in profile.steps:
        if step.kernel < 0 or step.kernel in found or any(parts[name] > 1 for name in step.nodes):
            continue
        nodes = [index[name] for name in step.nodes]
        kernel, moved = profile.kernels[step.kernel], float(costs.bytes[nodes].sum())
        nbytes = min(kernel.bytes, moved) if moved > 0 else kernel.bytes
        flops = float(costs.flops[nodes].sum())
        # No kernel takes less than a ns or moves less than a byte: what a file says must not make an infinite rate.
        if kernel.time_us < 1e-3 or nbytes < 1 or not np.isfinite(flops) or not costs.known[nodes].all():
            continue
        peak = _peak(
            profile, kernel, sheet, product=any(flat.graph.ops[node] in ops_with("tensor cores") for node in nodes)
        )
        bandwidth = sheet.l2_bytes_per_us if kernel.bytes <= sheet.l2_mb * 1e6 else sheet.bytes_per_us
        least = {"compute": flops / peak, "memory": nbytes / bandwidth, "launch": sheet.launch_us}
        rates = (
            1e6 * flops / kernel.time_us,
            1e6 * nbytes / kernel.time_us,
            flops / nbytes,
            1e6 * peak,
            1e6 * bandwidth,
        )
        share = max(least["compute"], least["memory"]) / kernel.time_us
        about = (step.kernel, kernel.op, uses[step.kernel], kernel.time_us, flops, nbytes)
        found[step.kernel] = Reached(*about, *rates, max(least, key=least.__getitem__), share)
    return tuple(sorted(found.values(), key=lambda one: (-one.time_us * one.steps, one.kernel)))


def _peak(profile: Profile, kernel: ProfiledKernel, sheet: Gpu, *, product: bool) -> float:
    """Operations per µs that a kernel's types allow. Products in float32 run in what the profile's precision makes of them."""
    dtype = next((dtype for dtype, _, _ in kernel.inputs if "float" in dtype or "complex" in dtype), "float32")
    if dtype == "float32" and product:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(profile.precision, dtype)
        product = profile.precision != Precision.IEEE
    return sheet.flops_per_us(dtype, product)


def check(profile: Profile, flat: FlatGraph) -> None:
    """Sees to it that a profile is one of this graph.

    Raises:
        MsplitError: It is not; the message says what differs.
    """
    if profile.graph_hash == structure_hash(flat.model):
        names = flat.graph.index
        missing = next((name for step in profile.steps for name in step.nodes if name not in names), None)
        if missing is None:
            return
        what = f"its node {missing!r} is not in this graph"
    else:
        what = _difference(profile.ops, op_counts(flat))
    raise MsplitError(
        f"the profile was measured on another graph: {what}",
        where=profile.source or None,
        fix=f"measure this one: msplit profile {flat.model.source} -o profile.json --force; or leave --costs profile= out",
    )


def _difference(there: Mapping[str, int], here: Mapping[str, int]) -> str:
    changes = [(op, change) for op in {*there, *here} if (change := here.get(op, 0) - there.get(op, 0))]
    counts = f"it has {sum(there.values()):,} nodes, this one {sum(here.values()):,}"
    if not changes:
        return f"{counts}, of the same kinds; their names, attributes, inputs or outputs differ"
    shown = [f"{change:+d} {op}" for op, change in sorted(changes, key=lambda pair: (-abs(pair[1]), pair[0]))[:5]]
    return f"{counts} ({', '.join(shown)}{', …' if len(changes) > 5 else ''})"


def check_shapes(profile: Profile, shapes: Mapping[str, Sequence[int | None] | None]) -> None:
    """Sees to it that a profile was measured with inputs of these shapes, None or a size of None where nothing is known.

    Raises:
        MsplitError: An input had another shape.
    """
    for name, given in profile.inputs.items():
        wanted = shapes.get(name)
        if wanted is not None and not fits(given.shape, wanted):
            raise MsplitError(
                f"the profile was measured with {name} of {_sizes(given.shape)}, not of {_sizes(wanted)}",
                where=profile.source or None,
                fix="leave --batch and --shape out to take the profile's shapes, or measure with these: msplit profile",
            )


def _sizes(shape: Sequence[int | None]) -> str:
    return "×".join("?" if size is None else str(size) for size in shape) or "no dimensions"


@dataclass(frozen=True)
class Workload:
    """Workload: the batch, streams and GPU that a graph is run with.

    Attributes:
        batch: Size of unknown leading dimensions of inputs; None for 1.
        shapes: Whole shapes by input name.
        inputs: Files by input name, and under "" one that names its inputs itself; the other inputs are made up.
        gpu: Data sheet that prices the nodes; None: the default.
        profile: What was measured on the graph, in place of the data sheet.
    """

    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Path] = field(default_factory=dict)
    gpu: str | None = None
    profile: Profile | None = None


SCHEMA_VERSION = 1
KIND = "profile"
MAX_BYTES = 256 << 20
"""Longest profile: a million steps with long names."""

_LATER = ("one_us",)
"""Keys that older profiles do not have."""

_FIX = "measure it again: msplit profile MODEL -o PATH"


def dumps(profile: Profile) -> str:
    """A profile as JSON text. Keys are in a fixed order; kernels and steps take a line each."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "graph_hash": profile.graph_hash,
        "ops": dict(sorted(profile.ops.items())),
        "inputs": {name: dataclasses.asdict(one) for name, one in profile.inputs.items()},
        "device": dataclasses.asdict(profile.device),
        "precision": profile.precision,
        "layout": profile.layout,
        "made": dict(profile.made),
        "constants": _rounded(dataclasses.asdict(profile.constants)),
        "one_us": _rounded(profile.one_us),
        "unmeasured": dict(sorted(profile.unmeasured.items())),
        "kernels": [_rounded(dataclasses.asdict(kernel)) for kernel in profile.kernels],
        "steps": [vars(step) for step in profile.steps],
    }
    lines = [f"  {json.dumps(key)}: {_value(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def hash_of(profile: Profile) -> str:
    """SHA-256 of a profile as `dumps` writes it, hexadecimal."""
    return hashlib.sha256(dumps(profile).encode()).hexdigest()


def _value(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n  ]"
    return json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Times to a tenth of a nanosecond: more digits say nothing and make files hard to compare."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    return value


def load(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile.

    Raises:
        MsplitError: It can not be read, or is no profile.
    """
    return parse(read_file(path, MAX_BYTES, what=KIND, fix=_FIX), os.fspath(path))


def parse(text: str, source: str) -> Profile:
    """Reads the text of a profile.

    Args:
        text: JSON.
        source: Its name, for messages.

    Raises:
        MsplitError: It is no profile; the message says what is wrong with it, and where.
    """
    top = JsonValue.parse(text, source, what=KIND, fix=_FIX).of_version(KIND, SCHEMA_VERSION)
    profile = top.to(Profile, optional=_LATER, source=source)
    for place, step in enumerate(profile.steps):
        if step.kernel >= len(profile.kernels):
            what = f"`steps[{place}].kernel` is {step.kernel}, but there are {len(profile.kernels)} kernels"
            raise MsplitError(what, where=source, fix=_FIX)
        if not step.nodes:
            raise MsplitError(f"`steps[{place}]` has no node", where=source, fix=_FIX)
    return profile
