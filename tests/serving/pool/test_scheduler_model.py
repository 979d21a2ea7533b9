"""The pool's scheduler as a whole: whatever comes in whatever order, each request has one end, and a slot one step at a time.

No threads, no clock, no engine: calls go in and decisions come out, so a run can be repeated.
"""

from __future__ import annotations

import ast
import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from msplit.errors import Busy, Closed, DeviceLost
from msplit.serving.pool import scheduler as module
from msplit.serving.pool.scheduler import JOIN_WINDOW, NEVER, NOTHING, Decision, Request, Scheduler, Step
from msplit.serving.pool.settings import PoolSettings
from tests.campaign import examples

BUCKETS = (1, 4, 8)
SLOTS = (0, 1, 0, 1)
"""Priority level and GPU of each."""
LEVELS = 2
LENGTHS = (8, 16, 64)


def bucket_of(rows: int) -> int:
    return next((bucket for bucket in BUCKETS if bucket >= rows), rows)


class Fates:
    """What became of requests, by their numbers; a request has one end."""

    def __init__(self) -> None:
        self.ends: dict[int, str] = {}
        self.cancelled: set[int] = set()

    def end(self, number: int, how: str) -> None:
        assert number not in self.ends, f"request {number}: {self.ends[number]}, and then {how}"
        self.ends[number] = how

    def request(
        self,
        number: int,
        rows: int,
        key: Any,
        level: int,
        now: float,
        deadline: float,
        admitted: bool = False,
        length: int = 0,
    ) -> Request:
        claimed = []

        def claim() -> bool:
            assert not claimed, f"request {number} is claimed twice"
            claimed.append(True)
            if number in self.cancelled:
                self.end(number, "cancelled")
            return number not in self.cancelled

        return Request(rows, key, level, now, deadline, claim, future=number, admitted=admitted, length=length)


def number_of(request: Request) -> int:
    return int(request.future)


class SchedulerModel(RuleBasedStateMachine):
    """A pool without threads: what the scheduler decides is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self.fates = Fates()
        own = PoolSettings(groups=2, priorities=LEVELS, max_queue=12)
        self.scheduler = Scheduler(SLOTS, BUCKETS, bucket_of, own, lengths=LENGTHS)
        self.now, self.count = 1.0, 0
        self.running: dict[int, Step] = {}
        self.waiting: dict[int, Request] = {}
        self.alone = 0
        self.cleared = False

    def do(self, decision: Decision) -> None:
        """Does what was decided, and holds it against the rules."""
        for request in decision.late:
            assert request.deadline < self.now
            del self.waiting[number_of(request)]
            self.fates.end(number_of(request), "late")
        if decision.start is not None:
            self.start(decision.start)
        for request in decision.answer:
            self.fates.end(number_of(request), "answered")

    def start(self, step: Step, *, again: bool = False) -> None:
        level = SLOTS[step.slot]
        assert step.slot not in self.running, "two steps in a slot"
        assert step.bucket == bucket_of(step.rows)
        assert step.rows <= step.bucket
        assert step.rows == sum(request.rows for request in step.requests) or not step.requests
        assert len(step.requests) < 2 or (step.bucket <= BUCKETS[-1] and step.requests[0].key is not None)
        assert len({request.key for request in step.requests}) <= 1
        assert all(request.level <= level for request in step.requests)
        assert step.size == (step.length, step.bucket)
        lengths = [request.length for request in step.requests] or [step.length]
        assert step.length == max(lengths) <= 2 * min(lengths), "a row is computed at more than twice its length"
        if not self.fates.cancelled:  # shorter ones have what would be padding
            own = sum(request.rows for request in step.requests if request.length == step.length)
            assert step.bucket == bucket_of(own) or not step.requests
        for request in step.requests:
            if not again:
                del self.waiting[number_of(request)]
        self.running[step.slot] = step

    def drop_cancelled(self) -> None:
        for number in [number for number in self.waiting if self.fates.ends.get(number) == "cancelled"]:
            del self.waiting[number]

    @rule(
        rows=st.integers(1, 8),
        key=st.sampled_from(["a", "b", None]),
        level=st.integers(0, LEVELS - 1),
        patience=st.sampled_from([NEVER, NEVER, 0.0, 2 * JOIN_WINDOW]),
        admitted=st.sampled_from([False, False, False, True]),
        length=st.sampled_from(LENGTHS),
    )
    def put(self, rows: int, key: Any, level: int, patience: float, admitted: bool, length: int) -> None:
        self.count += 1
        request = self.fates.request(self.count, rows, key, level, self.now, self.now + patience, admitted, length)
        self.waiting[self.count] = request
        closed = bool(self.scheduler.closed and (self.cleared or not admitted))
        stopped = closed or self.scheduler.lost is not None
        if stopped or (len(self.waiting) > 12 and not admitted):
            del self.waiting[self.count]
            with pytest.raises((Closed, DeviceLost) if stopped else Busy):
                self.scheduler.put(request)
            self.fates.end(self.count, "refused")
        else:
            self.do(self.scheduler.put(request))

    @rule(rows=st.integers(1, 8), level=st.integers(0, LEVELS - 1), length=st.sampled_from(LENGTHS))
    def take(self, rows: int, level: int, length: int) -> None:
        try:
            step = self.scheduler.take(level, rows, length)
        except (Closed, DeviceLost):
            return
        free = [index for index, other in enumerate(SLOTS) if other >= level and index not in self.running]
        assert (step is not None) == bool(free and not self.scheduler.queue.count)
        if step is not None:
            assert SLOTS[step.slot] >= level
            self.alone += 1
            self.start(step)

    @rule(join=st.booleans())
    def due(self, join: bool) -> None:
        expected = self.scheduler.queue.next_time
        decision = self.scheduler.due(self.now, join=join)
        assert decision is NOTHING or expected <= self.now, "it was due before it was said to be"
        self.do(decision)
        self.drop_cancelled()
        assert all(request.deadline >= self.now for request in self.waiting.values()), (
            "nobody was told that it is too late"
        )

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 10), failed=st.booleans())
    def end(self, which: int, failed: bool) -> None:
        slot = sorted(self.running)[which % len(self.running)]
        step = self.running.pop(slot)
        self.alone -= not step.requests
        decision = self.scheduler.ended(step, self.now, failed=failed)
        wanted = step.requests
        if failed and self.scheduler.lost is not None:
            wanted = (*wanted, *step.again)
        elif failed and len(wanted) > 1:
            wanted = ()
        assert decision.answer == wanted
        following = decision.start
        if following is not None and (again := (step.requests if wanted == () and step.requests else step.again)):
            assert not failed or self.scheduler.lost is None  # else what is left is run, and fails at once
            assert (following.slot, following.requests, following.again) == (slot, again[:1], again[1:])
            self.start(following, again=True)
            decision = Decision(None, decision.late, decision.answer)
        self.do(decision)

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if self.waiting:
            self.fates.cancelled.add(sorted(self.waiting)[which % len(self.waiting)])

    @rule(seconds=st.sampled_from([JOIN_WINDOW / 2, JOIN_WINDOW, 1.0]))
    def later(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.count > 10)
    @rule(how=st.sampled_from(["close", "lose", "clear"]))
    def stop(self, how: str) -> None:
        if how == "lose":
            self.scheduler.lost = DeviceLost("CUDA error", fix="start again")
            return
        self.scheduler.close()
        self.cleared = self.cleared or how == "clear"
        for request in self.scheduler.clear() if how == "clear" else ():
            del self.waiting[number_of(request)]
            self.fates.end(number_of(request), "cleared")

    @invariant()
    def adds_up(self) -> None:
        self.drop_cancelled()
        one = self.scheduler
        assert one.queue.count == len(self.waiting)
        assert (one.running, one.alone) == (len(self.running), self.alone)
        stats, ends = one.stats(), list(self.fates.ends.values())
        assert (stats.timed_out, stats.cancelled) == (ends.count("late"), ends.count("cancelled"))
        assert stats.in_flight == len(self.running)
        going = sum(len(step.requests) + len(step.again) or 1 for step in self.running.values())
        assert (
            stats.requests == stats.answered + stats.failed + stats.timed_out + stats.cancelled + stats.waiting + going
        )

    def teardown(self) -> None:
        """Everything is over in the end, if steps are."""
        self.now += 1.0
        for _ in range(4 * self.count + 10):
            self.due(True)
            if self.running:
                self.end(0, False)
        self.drop_cancelled()
        assert not self.waiting
        assert not self.running
        assert (self.scheduler.queue.count, self.scheduler.running, self.scheduler.alone) == (0, 0, 0)
        assert self.scheduler.queue.next_time == NEVER
        assert sorted(self.fates.ends) == list(range(1, self.count + 1)), "each request has an end"


TestSchedulerModel = SchedulerModel.TestCase
TestSchedulerModel.settings = settings(max_examples=examples(40, 3000), stateful_step_count=40, deadline=None)


def decisions(calls: list[tuple[Any, ...]]) -> list[Any]:
    """Decisions of a new scheduler for some calls, with requests by their numbers."""
    made = Scheduler(SLOTS, BUCKETS, bucket_of, PoolSettings(groups=2, priorities=LEVELS))
    fates, running, found = Fates(), list[Step](), list[Any]()

    def plain(step: Step | None) -> Any:
        if step is None:
            return None
        running.append(step)
        return (*step[:3], [*map(number_of, step.requests)], [*map(number_of, step.again)])

    for number, (name, now, *values) in enumerate(calls):
        if name == "put":
            decision = made.put(fates.request(number, *values, now, now + 3.0))
        elif name == "take":
            found.append(plain(made.take(*values)))
            continue
        elif name == "due":
            decision = made.due(now)
        elif running:
            decision = made.ended(running.pop(0), now, failed=values[0])
        else:
            continue
        found.append((plain(decision.start), [*map(number_of, decision.late)], [*map(number_of, decision.answer)]))
    return [*found, astuple(made.stats())]


@pytest.mark.parametrize("seed", range(20))
def test_equal_calls_give_equal_decisions(seed: int) -> None:
    draw = random.Random(seed)
    now, calls = 1.0, list[tuple[Any, ...]]()
    for _ in range(200):
        now += draw.choice([0.0, JOIN_WINDOW, 1.0])
        name = draw.choice(["put", "put", "put", "take", "due", "end"])
        values = {
            "put": (draw.randint(1, 8), draw.choice(["a", "b", None]), draw.randrange(LEVELS)),
            "take": (draw.randrange(LEVELS), draw.randint(1, 8)),
            "due": (),
            "end": (draw.random() < 0.3,),
        }
        calls.append((name, now, *values[name]))
    assert decisions(calls) == decisions(calls)


def started(count: int) -> tuple[Scheduler, Step]:
    """A scheduler of one slot, and a step of so many requests in it."""
    made = Scheduler((0,), BUCKETS, bucket_of, PoolSettings(groups=1))
    fates = Fates()
    first = made.put(fates.request(0, 8, None, 0, 1.0, NEVER)).start
    assert first is not None
    for number in range(1, count + 1):
        assert made.put(fates.request(number, 1, "a", 0, 1.0, NEVER)) is NOTHING
    step = made.ended(first, 2.0).start
    assert step is not None
    return made, step


def test_a_step_that_failed_is_run_again_request_by_request_in_the_same_slot() -> None:
    made, step = started(3)
    assert [number_of(one) for one in step.requests] == [1, 2, 3]
    decision = made.ended(step, 3.0, failed=True)
    assert decision.answer == ()
    for number, failed in ((1, False), (2, True), (3, False)):
        following = decision.start
        assert following is not None
        assert (following.slot, following.bucket) == (step.slot, 1)
        assert [number_of(one) for one in following.requests] == [number]
        decision = made.ended(following, 4.0, failed=failed)
        assert [number_of(one) for one in decision.answer] == [number]
    assert decision.start is None
    assert (made.stats().answered, made.stats().failed, made.running) == (3, 1, 0)


def test_a_device_that_failed_fails_all_requests_of_a_step_at_once() -> None:
    made, step = started(3)
    made.lost = DeviceLost("CUDA error", fix="start again")
    decision = made.ended(step, 3.0, failed=True)
    assert (decision.start, [number_of(one) for one in decision.answer]) == (None, [1, 2, 3])
    with pytest.raises(DeviceLost):
        made.take(0, 1)


def test_a_device_that_failed_fails_those_that_were_to_be_run_again_too() -> None:
    made, step = started(3)
    again = made.ended(step, 3.0, failed=True).start
    assert again is not None
    made.lost = DeviceLost("CUDA error", fix="start again")
    decision = made.ended(again, 4.0, failed=True)
    assert (decision.start, [number_of(one) for one in decision.answer], made.running) == (None, [1, 2, 3], 0)
    assert made.stats().failed == 3


def test_a_gpu_with_nothing_to_do_waits_for_no_company() -> None:
    made = Scheduler((0, 0), BUCKETS, bucket_of, PoolSettings(groups=2))
    fates = Fates()
    places = [made.put(fates.request(number, 1, "a", 0, 1.0, NEVER)).start for number in range(2)]
    assert [step and step.slot for step in places] == [1, None], "it is busy, and a slot is free: it waits for company"
    assert made.due(1.0 + JOIN_WINDOW / 2) is NOTHING
    assert made.due(1.0 + 2 * JOIN_WINDOW).start is not None


def test_the_scheduler_knows_no_thread_no_clock_and_no_engine() -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in names if name.startswith("msplit")}
    assert ours == {"msplit.errors", "msplit.serving.pool.settings"}
    assert names - ours <= {"__future__", "collections", "collections.abc", "dataclasses", "heapq", "typing"}
