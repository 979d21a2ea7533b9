"""The interface between `bench` and what runs a graph. A new engine is one module with one `Engine`."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import Precision, number, whole
from msplit.core.graph import Ints, no_collection
from msplit.cost.costs import Costs
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import INSTALL_PYTORCH, DeviceLost, EngineError, MsplitError, WrongShape
from msplit.flatten.flat import FlatGraph
from msplit.formats.cluster import Cluster
from msplit.progress import importing

Arrays = Mapping[str, NDArray[Any]]

Feeds = Mapping[str, Any]
"""Arrays, and tensors wherever they lie: whatever speaks DLPack, as PyTorch, CuPy, JAX and TensorFlow do."""


Following = Callable[[], Feeds | None]
"""Gives what the next step is fed; None where that is not known."""


@dataclass(frozen=True)
class ClusterOptions:
    """Options of the tensorflow engine for a job over a cluster.

    Attributes:
        devices: The device of each stream, as in ``/job:worker/task:1/device:CPU:0``; empty: those that the tasks have are asked for.
        ps_strategy: Which task of `ps` keeps which variable, where there are such tasks: ``bytes`` (even loads) or ``round-robin``.
        container: What the tasks keep variables under, so that they are there for the next client; None: what nobody else sees, and
            is given up at the end.
        limit_s: Seconds that a step may take.
    """

    cluster: Cluster
    devices: tuple[str, ...] = ()
    ps_strategy: str = "bytes"
    container: str | None = None
    limit_s: float = 600.0


@dataclass(frozen=True)
class TensorFlowOptions:
    """Options of the tensorflow engine for a job.

    Attributes:
        xla: Compile the model with XLA; one stream only.
        cpu: Keep it off the GPU.
        merge_streams: Let copies use the stream of the kernels (``stream_merge_options``). The first session of a process decides it for
            all of them.
        config: A file with a ConfigProto as text, for what msplit does not set itself.
        cluster: Processes that run it, in place of this one.
        devices: Device of each id of a job, as in ``/device:GPU:1``; "" leaves a node to TensorFlow. Where there are none, ids are
            logical devices of the first GPU.
        soft: Let TensorFlow move a node from a device that is not there, or has no kernel for it; otherwise that is an error.
        timeout: Seconds that a step may take; None: any, but where it reads a queue.
        memory: Share of the GPU's free memory that TensorFlow takes, at once; None: what it needs, or on logical devices a fixed part.
        private_threads: Threads that launch kernels for each device alone (``TF_GPU_THREAD_MODE=gpu_private``); 0: those of all devices.
        priorities: Of the streams of each logical device, as CUDA has them: -1 comes before 0.
        limits: Memory of each logical device, in MiB.

    The last three and `merge_streams` are NVIDIA's switches. The first session of a process decides them for all, so that what has one
    runs in a process of its own.
    """

    xla: bool = False
    cpu: bool = False
    merge_streams: bool = False
    config: Path | None = None
    cluster: ClusterOptions | None = None
    devices: tuple[str, ...] = ()
    soft: bool = True
    timeout: float | None = None
    memory: float | None = None
    private_threads: int = 0
    priorities: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.memory is not None and number("the share of memory", self.memory, above=True) > 1:
            raise MsplitError(f"the share of memory is {self.memory}", fix="give a number above 0, 1 at most")
        whole("the number of private threads", self.private_threads, 0)
        for limit in self.limits:
            whole("the memory of a logical device", limit)
        if self.timeout is not None:
            number("the timeout", self.timeout, above=True)

    @property
    def without_switches(self) -> TensorFlowOptions:
        """Copy of the options with all of NVIDIA's switches off."""
        return replace(self, merge_streams=False, private_threads=0, priorities=(), limits=())

    @property
    def switches(self) -> Mapping[str, TensorFlowOptions]:
        """Switches that are on, in words, each with the options that have it alone."""
        off = self.without_switches
        listed = {
            "merged copy streams": replace(off, merge_streams=self.merge_streams),
            f"{self.private_threads} private threads": replace(off, private_threads=self.private_threads),
            f"priorities {', '.join(map(str, self.priorities))}": replace(off, priorities=self.priorities),
            f"memory {', '.join(map(str, self.limits))} MiB": replace(off, limits=self.limits),
        }
        return {name: options for name, options in listed.items() if options != off}


@dataclass(frozen=True, eq=False)
class Job:
    """Graph, inputs and options that an engine is asked to run.

    Attributes:
        ids: Stream id per node of `flat`, all in ``0..streams-1``.
        streams: How many streams the assignment uses.
        feeds: Example inputs by name: they fix shapes and dtypes.
        precision: What it is computed in; of TensorFlow, half precision is its own mixed precision.
        options: What only the cuda engine knows.
        tensorflow: What only the tensorflow engine knows.
        op_libraries: Shared objects with custom TensorFlow ops to load first.
        costs: Cost of each node of `flat`, to order what is ready; None where nothing is known.
        state: Variable -> its value before the first step; those that are not there are the model's own.
        wide: Nodes of `flat` that stay in float32 where the precision is half. For the cuda engine: TensorFlow goes by its lists alone.
    """

    flat: FlatGraph
    ids: Ints
    streams: int
    feeds: Arrays
    precision: Precision = Precision.TF32
    options: EngineOptions = field(default_factory=EngineOptions)
    tensorflow: TensorFlowOptions = field(default_factory=TensorFlowOptions)
    op_libraries: Sequence[Path] = ()
    costs: Costs | None = None
    state: Arrays = field(default_factory=dict)
    wide: frozenset[int] = frozenset()


def refuse_fed(feeds: Feeds, inputs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuses inputs of a part of a model like `refuse`; the part before it may hand on more than it takes, which is left out."""
    refuse({name: value for name, value in feeds.items() if name in inputs}, inputs)


def called_with(names: Iterable[str], values: Sequence[Any], named: Feeds) -> dict[str, Any]:
    """Inputs by name, of a call that gives them by name or, where the model has one input, by position.

    A signature is a set of names: of several inputs none is the first, and two that are alike would be exchanged without a word.
    TensorFlow's own signatures take names alone, too.

    Raises:
        EngineError: One is given by position, and the model has several; or it is given twice.
    """
    known = list(names)
    if values and (len(values) > 1 or len(known) != 1):
        said = f"{len(values)} input{'s are' if len(values) > 1 else ' is'} given by position"
        raise EngineError(said, fix=f"give them by name; the inputs are: {', '.join(known) or 'none'}")
    if values and known[0] in named:
        raise EngineError(f"input {known[0]} is given by position and by name", fix="give it once")
    return {**dict(zip(known, values, strict=False)), **named}


def refuse(feeds: Feeds, inputs: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuses what a step can not be given: the one contract of all engines. `inputs` has type and shape of each as it was prepared.

    Raises:
        EngineError: An input is missing or is none of the model's, is neither an array nor a tensor, or has another type or shape. Strings
            are one type, however NumPy keeps them.
    """
    known = f"the inputs are: {', '.join(inputs) or 'none'}"
    if not isinstance(feeds, Mapping):
        raise EngineError(f"inputs are given by name, not as a {type(feeds).__name__}", fix=known)
    for name in inputs:
        if name not in feeds:
            raise EngineError(f"no value for input {name}", fix=known)
    for name in feeds:
        if name not in inputs:
            raise EngineError(f"the model has no input {name!r}", fix=known)
    for name, (dtype, shape) in inputs.items():
        value = feeds[name]
        if is_array(value):
            text = value.dtype.kind in _TEXT and (dtype == "object" or dtype.startswith(("bytes", "str")))
            found, like = value.dtype, text or (value.dtype.name == dtype and value.dtype.isnative)
        elif is_tensor(value):
            found = type_name(value)
            like = found == dtype
        else:
            raise not_an_array(name, value)
        if tuple(value.shape) != tuple(shape) or not like:
            fix = "shapes are fixed when a model is prepared: prepare one per shape"
            if not like:
                fix = "convert it to that type" + (f": array.astype({dtype!r})" if is_array(value) else "")
            what = f"input {name} was prepared as {dtype} {tuple(shape)}, not {found} {tuple(value.shape)}"
            if name.endswith(HANDED):
                name = name.removesuffix(HANDED)
                what = f"with these values {name} is {found} {tuple(value.shape)}, and steps are prepared for {tuple(shape)}"
                fix = f"pad it to one size in the model, or feed it: --part inputs={name}, in Python msplit.load(…, inputs=[{name!r}])"
            raise WrongShape(what, fix=fix)


def not_an_array(name: str, value: object) -> EngineError:
    """The error of an input that is neither an array nor a tensor."""
    if isinstance(value, _MASKED):
        return EngineError(f"input {name} has masked values", fix="fill them: array.filled(0), or what you mean")
    said = f"input {name} is given a {type(value).__name__}, not an array"
    return EngineError(said, fix="give a NumPy array, or a tensor that speaks DLPack")


_TEXT = "OSU"
"""Kinds of arrays that hold strings."""
HANDED = " (host)"
"""End of the names of what the host hands to the device."""


def is_array(value: Any) -> bool:
    """Tell whether a value is NumPy's, in the host's memory, and nothing of it is masked."""
    return isinstance(value, np.ndarray | np.generic) and not (isinstance(value, _MASKED) and np.ma.is_masked(value))


_MASKED = np.ma.MaskedArray


def is_tensor(value: Any) -> bool:
    """True if a value that is not NumPy's speaks DLPack, so that it can be taken where it lies."""
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def type_name(value: Any) -> str:
    """The NumPy name of the type of an array's or tensor's elements."""
    return getattr(value.dtype, "name", "") or str(value.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Span:
    """Something that ran on a stream in one step.

    Attributes:
        name: What viewers write on it, such as the node's name.
        nodes: Flat nodes whose work it does, the one that it is named after first; empty for what belongs to none.
        stream: Number of its stream, from 0.
        start_us: When it began, µs after the step's first.
        end_us: When it was over.
        ran: What the device calls it: its kernels.
        row: Track within its stream, for an engine that runs several nodes of a stream at a time.
    """

    name: str
    nodes: tuple[int, ...]
    stream: int
    start_us: float
    end_us: float
    ran: tuple[str, ...] = ()
    row: int = 0


@dataclass(frozen=True)
class Pause:
    """Time in which a stream does nothing.

    Attributes:
        span: Position of the span that ends it.
        waits_for: Position of the span of another stream that it waits for, None for a gap.
        start_us: Its begin, µs after that of the step's first span.
        time_us: Its duration.
    """

    span: int
    waits_for: int | None
    start_us: float
    time_us: float


@dataclass(frozen=True)
class Timeline:
    """One step as it ran.

    Attributes:
        spans: In any order.
        waits: Pairs (waited for, waiting) of positions in `spans`.
        clock: What measured it, and what that does to it, for the record.
    """

    spans: tuple[Span, ...]
    waits: tuple[tuple[int, int], ...]
    clock: str

    def pauses(self) -> list[Pause]:
        """Times in which streams did nothing between the step's begin and their last span, the longest first.

        What passes until the last span that the next one waits for is over is a wait, the rest a gap.
        """
        awaited: dict[int, list[int]] = {}
        for before, after in self.waits:
            awaited.setdefault(after, []).append(before)
        found: list[Pause] = []
        over: dict[int, float] = {}
        for position in sorted(range(len(self.spans)), key=lambda one: self.spans[one].start_us):
            span = self.spans[position]
            free = over.get(span.stream, 0.0)
            last = max(awaited.get(position, ()), key=lambda before: self.spans[before].end_us, default=None)
            # Clocks of two streams are not exact: nothing is waited for longer than until it begins.
            ready = free if last is None else max(free, min(self.spans[last].end_us, span.start_us))
            found += [Pause(position, last, free, ready - free), Pause(position, None, ready, span.start_us - ready)]
            over[span.stream] = max(free, span.end_us)
        return sorted((one for one in found if one.time_us > 0), key=lambda one: (-one.time_us, one.start_us, one.span))


STEPS = "(steps before this one)"
"""An input of the cuda engine, an int64 scalar, that random ops with a state draw by; no input of a model has such a name."""


MASKED_LOOPS = "masked_loops"
"""The fact of the cuda engine that says which loops run up to a bound: most turns, and what bounds them, by name."""

USERS = "(user of each row)"
"""An input of the cuda engine, an int32 for each row: which of the users of a step the row belongs to; see `UserRows`."""


LOSS_SCALE, GOOD_STEPS = "(loss scale)", "(steps since the loss scale changed)"
"""State that the cuda engine keeps where it scales losses, a float32 and an int64 scalar; see `Executable.save_state`."""

FIRST_SCALE: Arrays = {LOSS_SCALE: np.array(2.0**15, np.float32), GOOD_STEPS: np.array(0, np.int64)}
"""Values of both before the first step, as in Keras and TensorFlow 1."""

BESIDE_VARIABLES = (STEPS, LOSS_SCALE, GOOD_STEPS)
"""All that `Executable.save_state` may give that is no variable of the model."""


class Executable:
    """A graph made ready to run. One step is one call. What an engine can not do has a default here that says so or does nothing."""

    keeps_state = False
    """True if it tells what its variables are: `save_state`."""
    joins_others = False
    """True if its steps may be those of several processes: `join`."""
    _facts: Mapping[str, Any] = MappingProxyType({})

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs one whole step as a user would: host inputs in, host outputs back, synchronous. Outputs by name."""
        raise NotImplementedError

    def launch(self) -> None:
        """Runs one step on the inputs of the last `step`, without copies of inputs and outputs, and waits for it."""
        raise NotImplementedError

    def device_times(self, count: int) -> list[float] | None:
        """Seconds of each of `count` back-to-back steps by the device's own clock, or None where there is no such clock."""
        return None

    def times(self, count: int) -> list[float] | None:
        """Seconds of each of so many steps on the inputs of the last one, measured by an executable that runs elsewhere; else None."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """Reports ``streams``, ``waits``, ``peak_bytes``, ``device``, ``kernels`` …; only what is known."""
        return dict(self._facts)

    def close(self) -> None:
        """Frees what the executable holds. It can not run afterwards."""

    def timeline(self) -> Timeline | None:
        """Runs one more step on the inputs of the last one, and times its parts. None where the engine can not.

        Raises:
            EngineError: That does not work here; the message says what does.
        """
        return None

    def save_state(self) -> Arrays:
        """Values of its variables, by name (see `variables.variable_names`), and under `STEPS` what its random ops count."""
        return {}

    def load_state(self, state: Arrays) -> None:
        """Gives variables values. What is none of its own is passed over."""

    def reopen(self) -> bool:
        """Begins anew, with variables as the model has them and random ops that have drawn nothing, for less than to be built again. False
        where nothing was done, since only that does."""
        return False

    @property
    def kept(self) -> frozenset[str]:
        """Variables outside of it, where others may use them, that had values already when it was built, and have them still."""
        return frozenset()

    def join(self) -> None:
        """Makes steps those of all processes of PyTorch's default group, which all call this. Variables are the first one's. See
        `EngineOptions.shards`."""
        raise NotImplementedError

    def buffers(self) -> Arrays:
        """Arrays by input name, for some inputs or none. A step that is given one of them for its input does not copy it on the host."""
        return {}

    def begin(self, feeds: Feeds) -> bool:
        """Begins a step and does not wait for it, so that one thread keeps several devices busy. False where nothing was begun, since
        only `step` can run it."""
        return False

    def end(self) -> dict[str, NDArray[Any]]:
        """Waits for the step that was begun. Outputs by name."""
        raise NotImplementedError

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """Runs one whole step, synchronous, whose outputs are PyTorch tensors of the caller's own on the device. What the host makes, such
        as strings, are arrays.

        Raises:
            EngineError: The engine has no device to leave outputs on.
        """
        raise EngineError(
            "outputs of this engine are on the host", fix="leave out on_device, or run on the cuda engine"
        )

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """Runs one whole step, synchronous, on `feeds`, and meanwhile copies what the next step is fed to the device: that very mapping,
        whose arrays stay as they are until it has begun. Values that are no arrays, or do not fit, are left to that step. Without a
        device nothing is copied.

        Args:
            then: Gives what the next step is fed, or None; is called while this one runs.
            on_device: As in `step_on_device`.
        """
        return self.step_on_device(feeds) if on_device else self.step(feeds)


class Registers(Protocol):
    """What has a GPU read memory of the host where it lies."""

    def register(self, address: int, size: int) -> bool:
        """Begins with whole pages; false where that can not be."""

    def release(self, address: int) -> None:
        """Ends that, before they go."""


class Engine:
    """Builds executables.

    Attributes:
        name: Name that the user calls it by.
    """

    name: str

    def unavailable(self) -> str | None:
        """None where this machine can run it, else why not and what would help."""
        return None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Hears of all jobs that will be built, before the first of them is, for an engine that must know what devices there will be."""

    def free_memory(self) -> None:
        """Gives memory of the device that is kept for what is built next back: another library could not have it."""

    def device(self, job: Job) -> str:
        """ "CPU" or "GPU", perhaps with more behind it: where a job will run; "" where that is not known before it is built."""
        return ""

    def build(self, job: Job) -> Executable:
        """Makes a job ready to run.

        Raises:
            EngineError: The graph has something that the engine can not run; the message names the nodes and the way out.
        """
        raise NotImplementedError


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


BURST_SECONDS = 0.003
"""Seconds that one executable runs on in a round of `side_by_side`."""

LEAST_BURST, MOST_BURST = 4, 40


def side_by_side(running: Sequence[Executable], rounds: int, chance: random.Random) -> list[list[float]]:
    """Times executables in turn: seconds of a step of each by the device's clock; in every round a burst of each, in a new order."""
    # A cache of the host's tables takes in what steps look up first: before that, all wait for the bus alike.
    for executable in running:
        for _ in range(64 if "host_table_bytes" in executable.facts() else 0):
            _device_times(executable, LEAST_BURST)
    bursts = [_burst(executable) for executable in running]
    found: list[list[float]] = [[] for _ in running]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for number in chance.sample(range(len(running)), len(running)):
                # The first replay finds the caches full of what ran before.
                found[number].append(median(_device_times(running[number], bursts[number] + 1)[1:]))
    finally:
        if collecting:
            gc.enable()
    return found


def _burst(executable: Executable) -> int:
    typical = median(_device_times(executable, 3))
    return max(LEAST_BURST, min(MOST_BURST, int(BURST_SECONDS / max(typical, 1e-7))))


def _device_times(executable: Executable, count: int) -> list[float]:
    times = executable.device_times(count)
    assert times is not None
    return times


def device_lost(problem: BaseException | None) -> DeviceLost | None:
    """Error for a fault of the GPU's, which every later call reports again; None where an error neither is one nor comes from one."""
    torch = sys.modules.get("torch")
    while problem is not None:
        if isinstance(problem, DeviceLost):
            return problem
        if torch is not None and isinstance(problem, (torch.AcceleratorError, torch.cuda.CudaError)):
            said = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            fix = "restart the process; a device that fails again is not healthy"
            return DeviceLost(f"the GPU failed: {said}", fix=fix)
        problem = problem.__cause__
    return None


@contextmanager
def starting_pytorch() -> Iterator[None]:
    """A phase for the import of what needs PyTorch. Collecting garbage meanwhile would take a tenth of it, and find hardly any.

    Raises:
        EngineError: PyTorch is not installed.
    """
    try:
        with importing("torch", "PyTorch"), no_collection():
            yield
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "torch":
            raise
        raise EngineError("PyTorch is not installed, and this needs it", fix=INSTALL_PYTORCH) from None
