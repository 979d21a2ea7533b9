"""A model that was made ready in a hurry is prepared in full meanwhile, in a thread of its own, and takes over between two steps.

What the thread does can be given up at any phase. It shares the interpreter with who runs steps: see `_SWITCH_SECONDS`.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, Executable
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.engine import Background
from msplit.engines.tensors import as_tensors
from msplit.errors import EngineError
from msplit.progress import listening
from msplit.run.runner import FairLock, Improvement, Runner
from msplit.verify.compare import compare
from msplit.verify.results import OutputCheck, Settings

TIMED_STEPS = 9
"""Steps of both that are timed, one of each at a time; medians count."""

_SWITCH_SECONDS = 5e-5
"""How long Python lets the thread run on when a step wants to, instead of 5 ms: beside a thread that is busy in Python, 0.2 ms of waiting
for a GPU took 5.4 ms, and with this 0.42 (0.29 without such a thread)."""

_LOOK_SECONDS = 0.1
"""How often a thread that waits for its turn to prepare looks whether it is given up."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What both are given, to be held against each other: sets of inputs that `fresh` makes from a seed.

    Attributes:
        precision: What float32 is computed in.
        computed: Output -> the type it was computed in; see `compare.compare`.
        device: Where steps run, as PyTorch names it.
    """

    fresh: Callable[[int], Arrays]
    settings: Settings
    precision: Precision
    computed: Mapping[str, str]
    device: str


class GivenUp(BaseException):
    """Nobody wants it any more. No error: what looks for those of a kernel that does not fit must not stop it."""


class _Yields:
    """A listener that stops what it is told of, wherever it has got to: for as long as somebody is in a hurry, and for good once nobody
    wants it, when all that was made is given back."""

    def __init__(self, improved: Future[Improvement], background: Background) -> None:
        self._improved, self._background = improved, background

    def look(self) -> None:
        """Waits for who is in a hurry; raises `GivenUp` if it was cancelled, or the process is about to end."""
        if _hurried:
            with self._background.aside():
                while _hurried and not self._is_over:
                    time.sleep(_LOOK_SECONDS / 10)
        if self._is_over:
            raise GivenUp

    @property
    def _is_over(self) -> bool:
        return self._improved.cancelled() or not threading.main_thread().is_alive()

    def begin(self, what: str) -> None:
        """See `progress.Listener`."""
        self.look()

    def share(self, done: float) -> None:
        """See `progress.Listener`."""
        self.look()

    def end(self) -> None:
        """See `progress.Listener`."""

    def wrote(self, path: Path) -> None:
        """See `progress.Listener`."""


_hurried: list[object] = []
"""Who prepares with little effort now."""


@contextmanager
def hurrying() -> Iterator[None]:
    """For preparing with little effort: what is being improved meanwhile stops for it."""
    me = object()
    _hurried.append(me)
    try:
        yield
    finally:
        _hurried.remove(me)


_alone = threading.Lock()


@contextmanager
def one_at_a_time(look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """For preparing in full: threads that do so take turns, since they time kernels, and compilers have settings of the whole process.

    Args:
        look: Is called now and then while others are at it.
    """
    while not _alone.acquire(timeout=_LOOK_SECONDS):
        look()
    try:
        yield
    finally:
        _alone.release()


def start_improving(runner: Runner, prepare: Callable[[], tuple[Runner, Inputs]]) -> None:
    """Starts a thread that prepares a runner's model in full: `Runner.improved` is what comes of it, pending until then.

    Args:
        runner: What runs meanwhile. The thread takes its turn for single steps of its own.
        prepare: What the thread runs. It has no turn of its own (`one_at_a_time`).
    """
    improved: Future[Improvement] = Future()
    fast, turn = replace(runner), runner.turn
    background = CUDA.beside(lambda: turn.count)

    def work() -> None:
        better: Runner | None = None
        begun = False
        try:
            yields = _Yields(improved, background)
            with one_at_a_time(yields.look), quick_switches(), listening(yields), background.block():
                better, inputs = prepare()
                found = _judged(fast, better, inputs, turn, yields.look)
            begun, wanted = True, improved.set_running_or_notify_cancel()
            if wanted and found.taken:
                with turn:
                    _go_on(better.executable, fast.executable.save_state())
                    runner._take_over(better)
                better = fast
            better.executable.close()
            if wanted:
                improved.set_result(found)
        except BaseException as problem:  # noqa: BLE001  whatever it is, what runs goes on, and the caller is told of it
            try:
                _let_go(problem, better)
            finally:
                better = inputs = None  # the traceback has this frame, too
                if isinstance(problem, GivenUp):
                    improved.cancel()
                if improved.running() or (not begun and improved.set_running_or_notify_cancel()):
                    improved.set_exception(problem)

    runner.improved, runner._thread = improved, threading.Thread(target=work, name="msplit-improve")
    runner._thread.start()


def _let_go(problem: BaseException, unused: Runner | None) -> None:
    """Closes what came of it, and forgets what the frames of an error hold: it may be on the GPU."""
    seen: BaseException | None = problem
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    if unused is not None:
        unused.executable.close()


def _judged(fast: Runner, better: Runner, inputs: Inputs, turn: FairLock, look: Callable[[], None]) -> Improvement:
    """Whether the second is better. It gets what it was held against.

    Raises:
        EngineError: The two do not give the same.
    """
    better.checks += _compared(fast, better, inputs, turn, look)
    before, after = _timed(fast.executable, better.executable, turn, look)
    taken = before is None or after is None or after <= before
    return Improvement(better.label if taken else fast.label, before, after, taken)


def _compared(
    fast: Runner, better: Runner, inputs: Inputs, turn: FairLock, look: Callable[[], None]
) -> tuple[OutputCheck, ...]:
    """Both on the same inputs and from the same state, which is for the fast one what it was afterwards."""
    settings, comparison = inputs.settings, None
    for number in range(settings.verify_inputs):
        look()
        feeds = inputs.fresh(settings.seed + 1 + number)
        elsewhere = as_tensors(feeds, inputs.device)  # the caller may be filling the buffers
        with turn:
            state = fast.executable.save_state()
            expected = fast.executable.step(elsewhere)
            _go_on(fast.executable, state)
        _go_on(better.executable, state)
        comparison = compare(
            better.executable.step(feeds),
            expected,
            precision=inputs.precision,
            tolerance=settings.tolerance,
            computed=inputs.computed,
        )
        if not comparison.passed:
            raise EngineError(
                f"{better.label} gives other outputs than {fast.label}, which ran before it:",
                details=comparison.describe().splitlines(),
                fix="see `msplit bench`, which compares every way to run the model",
            )
    name = f"{fast.label}, with effort fast"
    return () if comparison is None else (OutputCheck(name, inputs.precision, settings.verify_inputs, comparison),)


def _timed(
    first: Executable, second: Executable, turn: FairLock, look: Callable[[], None]
) -> tuple[float | None, float | None]:
    """µs of a step of each, the steps of both by turns, so that whatever else the device does slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(TIMED_STEPS + 1):
        look()
        with turn:
            for executable, found in zip((first, second), times, strict=True):
                seconds = executable.device_times(1)
                if seconds is None:
                    return None, None
                if number:  # the first warms it up
                    found += seconds
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6


def _go_on(executable: Executable, state: Mapping[str, NDArray[Any]]) -> None:
    """Gives an executable the state of another."""
    if state:
        executable.load_state(state)


@contextmanager
def quick_switches() -> Iterator[None]:
    """Lets no thread wait for the interpreter as long as usual. One thread at a time is inside."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
