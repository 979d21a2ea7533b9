"""Chooses between ways to compute the same by how long they take on the GPU, alone and side by side.

A kernel that runs ten times in a row finds its weights in the cache and their pages in the tables of addresses. In a model it finds
neither: of 26 convolutions of Inception-v3 one after the other on an H200, cuDNN's take 6 % longer than each in a row of its own, our own
up to 14 %, and another one of ours is then the fastest (`benchmarks/notes`). `RotatingWeights` gives every call weights of its own, and
they are not in the cache when it starts.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from msplit.engines.cuda.autotune.choices import Choices, Family
from msplit.engines.cuda.autotune.timer import CudaTimer, bytes_of
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels.toolchain import can_compile_ahead, compiling_ahead

T = TypeVar("T")
Call = Callable[[], Any]

CALLS = 10
"""Calls in one timed graph, on each stream."""
LANES = 8
"""Streams of the timing side by side: what is faster alone often fills more of the GPU, and then streams gain nothing."""
MARGIN = 0.97
"""A candidate must be this much faster than the baseline: a tie changes nothing."""

SAME = 5e-3
"""Most that results may differ, relative to the largest: TF32 rounds to 11 bits, in another order of summands."""

SECONDS = 60.0
"""What is spent on each device on measuring products and on compiling what is measured; what is left then is chosen by rule."""

MOST_COPIED = 256 << 20
"""Bytes of copies of weights. Larger ones than a cache are not in it the next time anyway."""

MOST_SIDE_BY_SIDE = 2 << 30
"""Bytes of results that calls side by side make at once. Kernels of more fill the GPU: they run one after the other anyway."""


class Ranked(NamedTuple, Generic[T]):
    """A candidate, how long `CALLS` calls of it take alone, and the call."""

    milliseconds: float
    choice: T
    call: Call


class Tuner:
    """What was measured and chosen on one device, which owns it.

    Attributes:
        spent: Seconds of `SECONDS`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timer = device.owned(CudaTimer)
        self._kept = device.owned(Choices)
        self._chosen: dict[str, dict[tuple[Any, ...], Any]] = {}
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
        made = self.chosen(family)
        if key not in made:
            kept = self._kept.known(family, key)
            if kept is None:
                return None
            made[key] = kept[0]
        return (made[key],)

    def choose(self, family: Family[T], key: tuple[Any, ...], measure: Callable[[], T]) -> T:
        """A choice, measured where it was not made before. It holds for this process only where the time is spent meanwhile: kernels are
        chosen by rule then.

        Args:
            key: All that the choice depends on beside the device and the code. Its `repr` tells it from others.
        """
        known = self.known(family, key)
        if known is not None:
            return known[0]
        choice = self.chosen(family)[key] = measure()
        if not self.is_spent:
            self._kept.keep(family, key, choice)
        return choice

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
            forgiving: Whether one that fails is left out: it may need more of an SM than this GPU has, which is said in the words of
                whichever compiler stage.
        """
        found: list[Ranked[T]] = []
        listed = list(candidates)
        self.compile_ahead([call for _, call in listed])
        for choice, call in listed:
            try:
                if not differ(call(), expected):
                    found.append(Ranked(self.milliseconds(call, cold=cold), choice, call))
            except Exception:
                if not forgiving:
                    raise
        return sorted(found, key=lambda one: one.milliseconds)

    def compile_ahead(self, calls: Sequence[Call]) -> None:
        """Compiles the kernels of calls that are to be timed, all at once. The calls run no kernel of ours, and give nothing."""
        if len(calls) < 2 or not self._device.is_gpu or not can_compile_ahead():
            return
        with torch.no_grad(), self._device.semaphores.lent(), compiling_ahead():
            for call in calls:
                with contextlib.suppress(Exception):  # what is wrong with it is told when it is timed
                    call()

    def beats(self, candidate: Call, baseline: Call) -> bool:
        """Whether one call is faster than another both alone and side by side."""
        return all(
            self.milliseconds(candidate, lanes) < MARGIN * self.milliseconds(baseline, lanes) for lanes in (1, LANES)
        )

    def milliseconds(self, call: Call, lanes: int = 1, *, cold: bool = False) -> float:
        """Time of a graph of `CALLS` calls on each of some streams; `cold` as `milliseconds_of` has it."""
        if lanes > 1 and lanes * bytes_of(call()) > MOST_SIDE_BY_SIDE:
            return lanes * self.milliseconds_of([call], cold=cold)
        return self.milliseconds_of([call] * lanes, cold=cold)

    def milliseconds_of(self, lanes: Sequence[Call], *, cold: bool = False) -> float:
        """Time of a graph of `CALLS` calls on each stream, given the call of each; `cold`: the cache is emptied before each run."""
        return self._timer.replay_ms([[call] * CALLS for call in lanes], cold=cold)

    @property
    def is_spent(self) -> bool:
        """Whether the time for measuring products is up."""
        return self.spent > SECONDS

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Counts what is measured inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began


def copies(weights: torch.Tensor) -> list[torch.Tensor]:
    """Weights for as many calls as are timed at once, or as are worth their memory: themselves, and copies that lie like them."""
    count = min(max(MOST_COPIED // max(weights.nbytes, 1), 1), CALLS * LANES)
    return [weights, *(weights.clone() for _ in range(count - 1))]


class RotatingWeights:
    """A call of a function with other weights (of `copies`) each time, one after the other and from the start again."""

    def __init__(
        self, run: Callable[..., Any], data: torch.Tensor, weights: Sequence[torch.Tensor], rest: Sequence[torch.Tensor]
    ) -> None:
        self.run = run
        self._data, self._weights, self._rest = data, itertools.cycle(weights), tuple(rest)

    def __call__(self) -> Any:
        """Runs it with the next weights."""
        return self.run(self._data, next(self._weights), *self._rest)


def differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether results are not the same to within `SAME` of the largest expected number of each."""
    return not all(
        float((one - wanted).abs().max()) <= SAME * float(wanted.abs().max())
        for one, wanted in zip(found, expected, strict=True)
        if wanted.numel()
    )
