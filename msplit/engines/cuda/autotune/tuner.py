"""The tuner: chooses between ways to compute the same by measuring, and keeps its choices in a file.

Chooses between ways to compute the same by how long they take on the GPU, alone and side by side.

A kernel that runs ten times in a row finds its weights in the cache and their pages in the tables of addresses. In a model it finds
neither: of 26 convolutions of Inception-v3 one after the other on an H200, cuDNN's take 6 % longer than each in a row of its own, our own
up to 14 %, and another one of ours is then the fastest (`benchmarks/notes`). `RotatingWeights` gives every call weights of its own, and
they are not in the cache when it starts.

Choices that outlive the process that measured for them: a line of JSON each, in a file of the GPU that they hold for.

A choice depends on the GPU, on the versions of what computes, and on our own code. All of these are in the file's name, so that nothing
measured elsewhere, or before an update, is ever found. A line is added in one piece, so that processes may add to one file at once; what
can not be read is left out and measured again. The folder is that of compiled kernels, with its rule: none that others may write to.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from msplit.engines.cuda.autotune.timer import CudaTimer, bytes_of
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.launch import Precompiler, can_precompile, precompiling
from msplit.engines.cuda.kernels.store import kept_in
from msplit.errors import MsplitError, WriteError
from msplit.formats.atomic import append_bytes
from msplit.formats.files import JsonValue, read_bytes
from msplit.progress import during

T = TypeVar("T")

LARGEST = 64 << 20
"""Bytes that a file may have. A choice takes some hundred."""


@dataclass(frozen=True)
class Family(Generic[T]):
    """Family of choices that are made and kept in one way.

    Attributes:
        name: Of this family alone.
        pack: A choice as plain JSON data.
        unpack: Likewise back. It raises a MsplitError where the data are no choice.
        baseline: What is chosen before anything is known.
    """

    name: str
    pack: Callable[[T], Any]
    unpack: Callable[[JsonValue], T]
    baseline: T


class Choices:
    """The choices that are kept for one device, which owns it. Of a CPU that stands in for a GPU none are.

    Attributes:
        path: Where; None where nothing is kept.
    """

    def __init__(self, device: Device) -> None:
        self.path = kept_in(device, "choices", ".jsonl")

    def known(self, family: Family[T], key: tuple[Any, ...]) -> tuple[T] | None:
        """A choice that was kept, alone in a tuple since it may be None; None where there is none."""
        found = self._lines.get((family.name, repr(key)))
        if found is None:
            return None
        try:
            return (family.unpack(found),)
        except (MsplitError, ValueError):
            return None

    def keep(self, family: Family[T], key: tuple[Any, ...], choice: T) -> None:
        """Adds a choice. Where the disk or the file is full, or may not be written to, it is not kept, and that is all."""
        if self.path is None or " at 0x" in repr(key):  # which no other process would find
            return
        # The first line break ends what a crash has cut off.
        line = "\n" + json.dumps([family.name, repr(key), family.pack(choice)]) + "\n"
        try:
            if self.path.exists() and self.path.stat().st_size + len(line) > LARGEST:
                self.path = None
                return
            append_bytes(self.path, line.encode())
        except (OSError, WriteError):
            self.path = None

    @cached_property
    def _lines(self) -> dict[tuple[str, str], JsonValue]:
        if self.path is None or not self.path.is_file():
            return {}
        try:
            lines = read_bytes(self.path, LARGEST).split(b"\n")
        except (OSError, EOFError):
            return {}
        found = {}
        for line in filter(None, lines):
            try:
                whole = JsonValue.parse(line.decode(), str(self.path), what="choice", fix="delete the file")
                family, key, choice = whole.items(3)
                found[family.text(), key.text()] = choice
            except (ValueError, MsplitError):  # cut off by a crash, or damaged
                continue
        return found


Call = Callable[[], Any]

CALLS = 10
"""Calls in one timed graph, on each stream."""
LANES = 8
"""Streams of the timing side by side: what is faster alone often fills more of the GPU, and then streams gain nothing."""
MARGIN = 0.97
"""A candidate must be this much faster than the baseline: a tie changes nothing."""
WORST = 1.05
"""Share of the baseline's time, side by side, that a candidate may take which is much faster alone."""

SAME, SAME_BF16 = 5e-3, 2e-2
"""Most that results may differ, relative to the largest: TF32 and float16 have 11 bits, in another order of summands; bfloat16 has 8."""

SECONDS = 60.0
"""Seconds that are spent on each device on measuring products and on compiling what is measured; what is left then is chosen by rule."""

OFF = "MSPLIT_COMPILE_AHEAD"
"""Environment variable: with ``0``, kernels of one choice after the other are compiled, and not those of all choices of a graph at once."""

BYTES_PER_US, FLOPS_PER_US = 2e6, 5e7
"""Speed of some large GPU: only which of two products takes longer is asked for."""

COMPILING = 0.5
"""Share of `SECONDS` in which the kernels of all choices of a graph may be compiled. What is not is compiled where it is timed."""

MOST_COPIED = 256 << 20
"""Bytes of copies of weights. Larger ones than a cache are not in it the next time anyway."""

_ALIGNED = 16
"""Bytes of the widest load."""

MOST_SIDE_BY_SIDE = 2 << 30
"""Bytes of results that calls side by side make at once. Kernels of more fill the GPU: they run one after the other anyway."""


_busy: ContextVar[Callable[[], object]] = ContextVar("msplit_busy", default=lambda: None)


_chain: ContextVar[bool] = ContextVar("msplit_chain", default=False)


def choosing_for(*, chain: bool) -> contextlib.AbstractContextManager[object]:
    """For the choices of one graph.

    Args:
        chain: True if each of its ops waits for the one in front: nothing runs beside a kernel then, and the fastest alone is best.
    """
    return during(_chain, chain)


_times: ContextVar[Callable[[Sequence[Call]], float] | None] = ContextVar("msplit_times", default=None)


def timed_by(times: Callable[[Sequence[Call]], float]) -> contextlib.AbstractContextManager[object]:
    """For tests: inside, a function gives the milliseconds of calls side by side, given the call of each stream, and nothing is timed."""
    return during(_times, times)


def disturbed(busy: Callable[[], object]) -> contextlib.AbstractContextManager[object]:
    """For what measures beside other work: choices made while the value of `busy` changes are not kept for other processes."""
    return during(_busy, busy)


class Ranked(NamedTuple, Generic[T]):
    """A candidate, how long `CALLS` calls of it take alone, and the call."""

    milliseconds: float
    choice: T
    call: Call


class Tuner:
    """Measurements and choices of one device, which owns it.

    Attributes:
        device: The device.
        spent: Seconds of `SECONDS`.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._timer = device.owned(CudaTimer)
        self._kept = device.owned(Choices)
        self._chosen: dict[str, dict[tuple[Any, ...], Any]] = {}
        self._noted: Precompiler | None = None
        self._weights: dict[Any, float] = {}  # by family and key, of choices that are to be made
        self._reserved = 0.0
        self._measured = 0
        self.spent = 0.0

    @staticmethod
    def of(place: torch.device) -> Tuner:
        """The tuner of a device."""
        return Device.of(place).owned(Tuner)

    def chosen(self, family: Family[T]) -> dict[tuple[Any, ...], T]:
        """The choices of a family that were made or found in this process, by what they depend on."""
        return self._chosen.setdefault(family.name, {})

    def known(self, family: Family[T], key: tuple[Any, ...]) -> tuple[T] | None:
        """A choice that was made before, in this process or in another, alone in a tuple; None where there is none."""
        made, key = self.chosen(family), _in_its_graph(key)
        if key not in made:
            kept = self._kept.known(family, key)
            if kept is None:
                return None
            made[key] = kept[0]
        return (made[key],)

    def choose(
        self,
        family: Family[T],
        key: tuple[Any, ...],
        measure: Callable[[], T],
        calls: Callable[[], Iterable[Call]] = tuple,
        weight: float = 0.0,
    ) -> T:
        """A choice, measured where it was not made before. It holds for this process only where the time is spent meanwhile: kernels are
        chosen by rule then; and where something else ran beside it, see `disturbed`.

        Args:
            key: All that the choice depends on beside the device, the code and `choosing_for`. Its `repr` tells it from others.
            calls: What will be timed, as far as it is kernels of ours. In `listing` they are noted, and nothing is measured.
            weight: About how long the work takes, in any unit: where time is short, what weighs most is measured.
        """
        known = self.known(family, key)
        if known is not None:
            return known[0]
        key = _in_its_graph(key)
        if self._noted is not None:
            self._note(self._noted, (family.name, key), calls, weight)
            return family.baseline
        busy = _busy.get()
        at_work = busy()
        before, self._reserved = self._reserved, self._reserve(family, key)
        try:
            choice = self.chosen(family)[key] = measure()
            if not self.is_spent and busy() == at_work:
                self._kept.keep(family, key, choice)
        finally:
            self._reserved = before
        return choice

    def _reserve(self, family: Family[T], key: tuple[Any, ...]) -> float:
        """Seconds that choices of the family will take that weigh more and are still to be made."""
        own = self._weights.pop((family.name, key), None)
        if own is None:
            return self._reserved
        larger = sum(1 for (name, _), weight in self._weights.items() if name == family.name and weight > own)
        return larger * self.spent / max(self._measured, 1)

    @contextlib.contextmanager
    def listing(self, meanwhile: Callable[[], None] | None = None) -> Iterator[None]:
        """Inside, choices that are not known are not made. What they would time is compiled at its end, all at once: several hundred
        kernels, on as many cores as there are.

        Args:
            meanwhile: Is called while that is being done.
        """
        left = max(COMPILING * SECONDS - self.spent, 0.0)
        with torch.no_grad(), self.device.semaphores.lent(), precompiling(left, meanwhile=meanwhile) as noted:
            self._noted = noted
            try:
                yield
            finally:
                self._noted = None
            self._weights = dict(noted.weights)

    def can_list(self) -> bool:
        """True if `listing` is possible, and wanted."""
        return self.device.is_gpu and can_precompile() and os.environ.get(OFF) != "0"

    def _note(self, noted: Precompiler, note: Any, calls: Callable[[], Iterable[Call]], weight: float) -> None:
        first = note not in noted.weights
        noted.weights[note] = noted.weights.get(note, 0.0) + weight  # once more for each op that it is for
        if not first:
            return
        with noted.noting(note), contextlib.suppress(Exception):  # what is wrong with it is told when it is timed
            for call in calls():
                with contextlib.suppress(Exception):
                    call()

    def ranked(
        self,
        candidates: Iterable[tuple[T, Call]],
        expected: Sequence[torch.Tensor],
        *,
        cold: bool = False,
        forgiving: bool = False,
    ) -> list[Ranked[T]]:
        """The candidates that give the baseline's numbers, the fastest first.

        Args:
            candidates: What may be chosen, and the call of it.
            expected: The baseline's results.
            cold: See `milliseconds_of`.
            forgiving: True if one that fails is left out: it may need more of an SM than this GPU has, which is said in the words of
                whichever compiler stage.
        """
        found: list[Ranked[T]] = []
        listed = list(candidates)
        self.precompile([call for _, call in listed])
        for choice, call in listed:
            try:
                if not differ(call(), expected):
                    found.append(Ranked(self.milliseconds(call, cold=cold), choice, call))
            except Exception:
                if not forgiving:
                    raise
        return sorted(found, key=lambda one: one.milliseconds)

    def first_to_beat(self, ranked: Iterable[Ranked[T]], baseline: Call) -> T | None:
        """The first choice that is faster than a baseline both alone and side by side, with weights that are not in the cache; None where
        none is. Where the fastest alone is not faster under load, another that is a little slower alone may be: it may fill less of the
        GPU. In a chain it is the fastest alone."""
        alone = self.milliseconds(baseline, cold=True)
        faster = [one for one in ranked if one.milliseconds < MARGIN * alone]
        if not faster or _chain.get():
            return faster[0].choice if faster else None
        loaded = self.milliseconds(baseline, LANES, cold=True)
        beside = (one for one in faster if self.milliseconds(one.call, LANES, cold=True) < MARGIN * loaded)
        return next((one.choice for one in beside), None)

    def precompile(self, calls: Sequence[Call]) -> None:
        """Compiles the kernels of calls that are to be timed, all at once. The calls run no kernel of ours, and give nothing."""
        if len(calls) < 2 or not self.device.is_gpu or not can_precompile():
            return
        with torch.no_grad(), self.device.semaphores.lent(), precompiling() as ahead, ahead.noting():
            for call in calls:
                with contextlib.suppress(Exception):  # what is wrong with it is told when it is timed
                    call()

    def beats(self, candidate: Call, baseline: Call, *, cold: bool = False) -> bool:
        """True if one call is faster than another alone and, but in a chain, side by side, both together; `cold`: see `milliseconds_of`.

        Where the GPU is full many kernels take the same time. One that takes 0.65 of the baseline's alone takes 0.96 to 0.98 side by side,
        and to be faster by the margin in both was chance: the sample MMoE took 215 µs on one stream, and in every sixth process 262.
        """
        sizes = (1,) if _chain.get() else (1, LANES)
        ratios = [
            self.milliseconds(candidate, lanes, cold=cold) / self.milliseconds(baseline, lanes, cold=cold)
            for lanes in sizes
        ]
        return math.prod(ratios) < MARGIN ** len(ratios) and max(ratios) < WORST

    def milliseconds(self, call: Call, lanes: int = 1, *, cold: bool = False) -> float:
        """Time of a graph of `CALLS` calls on each of some streams; `cold` as `milliseconds_of` has it."""
        if lanes > 1 and lanes * bytes_of(call()) > MOST_SIDE_BY_SIDE:
            return lanes * self.milliseconds_of([call], cold=cold)
        return self.milliseconds_of([call] * lanes, cold=cold)

    def milliseconds_of(self, lanes: Sequence[Call], *, cold: bool = False) -> float:
        """Time of a graph of `CALLS` calls on each stream, given the call of each; `cold`: the cache is emptied before each run."""
        times = _times.get()
        return self._timer.replay_ms([[call] * CALLS for call in lanes], cold=cold) if times is None else times(lanes)

    @property
    def is_spent(self) -> bool:
        """True if the time for measuring products is up: what is left of it is for others, which matter more."""
        return self.spent + self._reserved > SECONDS

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Counts what is measured inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began
            self._measured += 1


def _in_its_graph(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with what `choosing_for` says."""
    return (*key, "chain") if _chain.get() else key


def estimated(data: torch.Tensor, weights: torch.Tensor, flops: int) -> float:
    """About how long a product takes, µs: what weighs more is measured first where time is short."""
    return float(data.nbytes + weights.nbytes) / BYTES_PER_US + flops / FLOPS_PER_US


def copies(weights: torch.Tensor) -> list[torch.Tensor]:
    """Weights for as many calls as are timed at once, or as are worth their memory: themselves, and copies that lie like them."""
    count = min(max(MOST_COPIED // max(weights.nbytes, 1), 1), CALLS * LANES)
    return [weights, *(_copy(weights) for _ in range(count - 1))]


def _copy(weights: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, gaps included, and as far behind a multiple of `_ALIGNED` bytes: kernels are made for both."""
    first = weights.data_ptr() % _ALIGNED // weights.itemsize
    last = first + sum((size - 1) * step for size, step in zip(weights.shape, weights.stride(), strict=True))
    place = weights.new_empty(last + 1 if weights.numel() else first)
    return place.as_strided(weights.shape, weights.stride(), first).copy_(weights)


class RotatingWeights:
    """A call of a function with other weights (of `copies`, or tuples of them) each time, one after the other and from the start again."""

    def __init__(
        self, run: Callable[..., Any], data: torch.Tensor, weights: Sequence[Any], rest: Sequence[torch.Tensor]
    ) -> None:
        self.run = run
        self.weights = itertools.cycle(weights)
        self._data, self._rest = data, tuple(rest)

    def __call__(self) -> Any:
        """Runs it with the next weights."""
        return self.run(self._data, next(self.weights), *self._rest)


def differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], most: float | None = None) -> bool:
    """True if results are not the same to within `most`, by default `SAME` (`SAME_BF16`), of the largest expected number of each."""

    def allowed(wanted: torch.Tensor) -> float:
        usual = SAME_BF16 if wanted.dtype == torch.bfloat16 else SAME
        return usual if most is None else most

    return not all(
        float((one - wanted).abs().max()) <= allowed(wanted) * float(wanted.abs().max())
        for one, wanted in zip(found, expected, strict=True)
        if wanted.numel()
    )
