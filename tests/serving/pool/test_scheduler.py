"""What waits for a step: nothing is lost, first come first served, and when a step is due."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msplit.errors import Busy
from msplit.serving.pool.scheduler import JOIN_WINDOW, NEVER, SHARE, Queue, Request
from tests.campaign import examples

LEVELS, BATCHES = 3, (1, 4, 8)


class Ticket:
    """What a scheduler sees of a future: somebody cancels it, or it is claimed once."""

    def __init__(self) -> None:
        self.state = "PENDING"

    def claim(self) -> bool:
        assert self.state in ("PENDING", "CANCELLED"), "claimed twice"
        self.state = "RUNNING" if self.state == "PENDING" else "CANCELLED_AND_NOTIFIED"
        return self.state == "RUNNING"

    def cancel(self) -> bool:
        if self.state == "PENDING":
            self.state = "CANCELLED"
        return self.cancelled()

    def cancelled(self) -> bool:
        return self.state.startswith("CANCELLED")

    def running(self) -> bool:
        return self.state == "RUNNING"


def request(
    rows: int = 1,
    key: Hashable = "",
    level: int = 0,
    since: float = 0.0,
    deadline: float = NEVER,
    user: Hashable = None,
    length: int = 0,
) -> Request:
    ticket = Ticket()
    return Request(rows, key, level, since, deadline, ticket.claim, future=ticket, user=user, length=length)


@dataclass
class Model:
    """A queue, and the obvious one beside it. Seconds are whole numbers, so that nothing is rounded."""

    delay: float
    most: int
    users: int = 1
    now: float = 1.0
    waiting: list[Request] = field(default_factory=list)
    gone: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = Queue(LEVELS, BATCHES, self.delay, self.most, self.users)

    def put(self, rows: int, key: Hashable, level: int, patience: float | None, user: str = "") -> None:
        deadline = NEVER if patience is None else self.now + patience
        one = request(rows, key, level, self.now, deadline, user if self.users > 1 else None)
        if self.most and len(self.waiting) >= self.most:
            with pytest.raises(Busy, match=f"{self.most} requests wait"):
                self.queue.put(one)
        else:
            self.queue.put(one)
            self.waiting.append(one)

    def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)].future.cancel()

    def take(self, last: int) -> None:
        due = {(one.level, one.key) for one in self.waiting if one.level <= last and self._is_due(one)}
        found = self.queue.take(self.now, last)
        self._forget([one for one in self.waiting if one.future.state == "CANCELLED_AND_NOTIFIED"])
        allowed = [one for one in self.waiting if one.level <= last]
        if not found:
            assert not any(self._is_due(one) for one in allowed)
            return
        first = found[0]
        assert (first.level, first.key) in due
        assert {one.key for one in found} == {first.key}
        assert all(one in allowed for one in found)
        assert len(found) == 1 or (first.key is not None and sum(one.rows for one in found) <= BATCHES[-1])
        assert len({one.user for one in found}) <= self.users
        for one in found:  # nobody of the same level and key came before
            assert one is next(each for each in self.waiting if (each.level, each.key) == (one.level, one.key))
            assert not one.future.cancel()  # it runs
            self._forget([one])

    def _forget(self, these: list[Request]) -> None:
        for one in these:
            self.waiting.remove(one)
            self.gone.append(one)

    def _is_due(self, one: Request) -> bool:
        line = [each for each in self.waiting if (each.level, each.key) == (one.level, one.key)]
        full = sum(each.rows for each in line) >= BATCHES[-1]
        full |= self.users > 1 and len({each.user for each in line}) >= self.users
        return one.key is None or full or line[0].since <= self.now - self.delay

    def expire(self) -> None:
        late = [one for one in self.waiting if one.deadline < self.now]
        found = self.queue.expired(self.now)
        assert {id(one) for one in found} == {id(one) for one in late if not one.future.cancelled()}
        assert all(one.future.running() for one in found)
        self._forget(late)

    def look(self) -> None:
        queue = self.queue
        assert queue.count == len(self.waiting)
        exact = NEVER
        for one in self.waiting:
            due = one.since if self._is_due(one) else one.since + self.delay
            exact = min(exact, due, one.deadline)
        assert queue.next_time <= exact or (self._is_due_now() and queue.next_time <= self.now)
        if not self.waiting:
            assert queue.next_time == NEVER

    def _is_due_now(self) -> bool:
        return any(self._is_due(one) for one in self.waiting)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.integers(1, BATCHES[-1]),
            st.sampled_from(["a", "b", None]),
            st.integers(0, LEVELS - 1),
            st.none() | st.integers(0, 4),
            st.sampled_from("xyz"),
        ),
        st.tuples(st.just("take"), st.integers(0, LEVELS - 1)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("later"), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=examples(300, 20_000))
@example(  # what was due is cancelled: what shares its key and is not due keeps waiting
    steps=[("put", 2, "b", 0, None), ("cancel", 0), ("later", 2), ("put", 1, "b", 1, None), ("take", 1)],
    delay=2.0,
    most=0,
    users=1,
    finish=False,
)
@given(
    steps=STEPS,
    delay=st.sampled_from([0.0, 2.0]),
    most=st.sampled_from([0, 3]),
    users=st.integers(1, 3),
    finish=st.booleans(),
)
def test_nothing_is_lost_and_who_comes_first_is_served_first(
    steps: list[tuple[object, ...]], delay: float, most: int, users: int, finish: bool
) -> None:
    model = Model(delay, most, users)
    for name, *values in steps:
        if name == "later":
            model.now += values[0]  # type: ignore[operator]
        else:
            getattr(model, str(name))(*values)
        model.look()
    if finish:
        model.now += 10
        while model.queue.count:
            model.take(LEVELS - 1)
        assert not model.waiting
    else:
        left = model.queue.clear()
        assert [id(one) for one in left if one.future.running()] == [id(one) for one in left]  # the cancelled are told
        assert {id(one) for one in left} == {id(one) for one in model.waiting if not one.future.cancelled()}
    assert (model.queue.count, model.queue.next_time) == (0, NEVER)
    states = [one.future.state for one in [*model.gone, *model.waiting]]
    assert set(states) <= {"RUNNING", "CANCELLED_AND_NOTIFIED"}
    assert model.queue.taken == len(states)
    assert model.queue.cancelled == states.count("CANCELLED_AND_NOTIFIED")


def test_a_step_that_is_not_full_waits_exactly_so_long_and_a_full_one_does_not() -> None:
    queue = Queue(1, (1, 4), delay=5.0)
    queue.put(request(rows=3, since=1.0))
    assert queue.next_time == 6.0
    assert queue.take(5.999) == []
    queue.put(request(rows=1, since=2.0))
    assert queue.next_time <= 2.0  # so that whoever looks at it comes at once
    assert [one.rows for one in queue.take(2.0)] == [3, 1]
    queue.put(request(rows=1, since=3.0))
    assert queue.take(7.999) == []
    assert [one.rows for one in queue.take(8.0)] == [1]


def test_a_step_has_room_for_so_many_users_and_for_any_number_of_requests_of_one() -> None:
    queue = Queue(1, (1, 8), delay=5.0, users=2)
    for user in "xxyxz":
        assert queue.put(request(since=1.0, user=user)) == (user in "yz" or len(queue._lines[0]["", 0].users) > 1)
    assert [one.user for one in queue.take(1.0)] == ["x", "x", "y", "x"]
    assert queue.take(5.999) == []
    assert [one.user for one in queue.take(6.0)] == ["z"]


def test_shorter_requests_fill_what_would_be_padding_and_longer_ones_wait_for_a_step_of_their_own() -> None:
    queue = Queue(2, (1, 4, 8), delay=5.0, lengths=(8, 16, 32, 64))
    came = [(2, 32, 0), (1, 16, 0), (1, 64, 0), (1, 32, 1), (1, 8, 0), (1, 16, 0), (1, 64, 0)]
    for number, (rows, length, level) in enumerate(came):
        queue.put(request(rows=rows, since=1.0 + number, length=length, level=level))

    def taken(now: float) -> list[tuple[int, int]]:
        return [(int(one.since) - 1, one.length) for one in queue.take(now)]

    # Of four rows three are of length 32, of both levels; then comes the longest that has at least half of it, and no other has room.
    assert taken(20.0) == [(0, 32), (3, 32), (1, 16)]
    assert taken(20.0) == [(2, 64), (6, 64)], "what is left needs less than half of that"
    assert taken(20.0) == [(4, 8)], "one row has no room for others, and the one that came first is served"
    assert (taken(20.0), taken(20.0)) == ([(5, 16)], [])


def test_what_a_step_leaves_over_is_due_when_it_is_full_itself() -> None:
    queue = Queue(1, (1, 4), delay=5.0)
    for second in (1.0, 2.0, 3.0):
        queue.put(request(rows=4, since=second))
    for _ in range(3):
        assert queue.next_time <= 3.0
        assert [one.rows for one in queue.take(3.0)] == [4]
    assert queue.next_time == NEVER


def test_requests_that_share_no_step_wait_for_no_company() -> None:
    queue = Queue(1, (1, 4), delay=5.0)
    queue.put(request(key=None, since=1.0))
    assert queue.next_time <= 1.0
    assert len(queue.take(1.0, busy=True)) == 1


def test_while_others_are_in_flight_a_step_waits_for_company_and_no_longer() -> None:
    queue = Queue(1, (1, 4))
    queue.put(request(since=1.0))
    assert queue.take(1.0 + JOIN_WINDOW / 2, busy=True) == []
    assert len(queue.take(1.0 + JOIN_WINDOW * 2, busy=True)) == 1


def test_a_request_may_be_larger_than_what_is_left_of_a_step() -> None:
    queue = Queue(1, (1, 4))
    for rows in (3, 2, 1):
        queue.put(request(rows=rows))
    assert [[one.rows for one in queue.take(0.0)] for _ in range(2)] == [[3], [2, 1]]


def test_a_step_has_room_for_another_level_where_it_would_be_filled_up() -> None:
    queue = Queue(2, (1, 4))
    for level, rows in ((0, 1), (0, 1), (1, 1), (1, 2)):
        queue.put(request(rows=rows, level=level))
    assert [(one.level, one.rows) for one in queue.take(0.0)] == [(0, 1), (0, 1), (1, 1)]


def flood(queue: Queue, levels: int = LEVELS, each: int = 200) -> None:
    """Requests of all levels, each a step of its own."""
    for level in range(levels):
        for _ in range(each):
            queue.put(request(key=None, level=level))


@pytest.mark.parametrize("before", [(), (0,), (1,), (2,), (0, 2), (2, 1)])
def test_levels_share_steps_whatever_ran_before(before: tuple[int, ...]) -> None:
    """Of five steps the more urgent of two neighbours gets four; what a level had while nobody else wanted anything is forgotten."""
    queue = Queue(LEVELS, BATCHES)
    for level in before:
        for _ in range(300):
            queue.put(request(key=None, level=level))
        while queue.count:
            queue.take(0.0)
    flood(queue)
    turn = sum(SHARE**level for level in range(LEVELS))
    for _ in range(5):
        found = [queue.take(0.0)[0].level for _ in range(turn)]
        assert found.count(0) in range(SHARE**2 - 2, SHARE**2 + 3)
        assert found.count(1) in range(SHARE - 1, SHARE + 2)
        assert found.count(2) in range(3)
        assert len(set(found)) > 1


def test_a_level_that_comes_back_is_not_behind_for_what_its_own_slots_did() -> None:
    queue = Queue(2, BATCHES)
    queue.put(request(key=None, level=1))
    for _ in range(500):
        queue.put(request(key=None, level=0))
        queue.take(0.0, level=0)
    flood(queue, levels=2)
    found = [queue.take(0.0)[0].level for _ in range(10)]
    assert found.count(0) >= 7


@settings(max_examples=examples(50, 2000))
@given(st.lists(st.integers(-1, LEVELS - 1), min_size=60, max_size=200), st.integers(0, LEVELS - 1))
def test_no_level_starves(arrivals: list[int], level: int) -> None:
    """However requests come, one that waits at the head of its level is served within a turn."""
    queue = Queue(LEVELS, BATCHES)
    mine = request(key=None, level=level)
    for number, other in enumerate(arrivals):
        if number == len(arrivals) // 4:
            queue.put(mine)
        if other >= 0 and (other != level or number < len(arrivals) // 4):
            queue.put(request(key=None, level=other))
            queue.put(request(key=None, level=other))
        queue.take(0.0)
    ahead = sum(1 for other in arrivals[: len(arrivals) // 4] if other == level) * 2
    turn = sum(SHARE**one for one in range(LEVELS))
    for _ in range((ahead + 2) * (turn + LEVELS)):
        queue.take(0.0)
    assert mine.future.running()


@pytest.mark.parametrize("keys", [["a"] * 3000, [None] * 3000, [str(number) for number in range(3000)]])
def test_the_time_of_a_request_does_not_grow_with_the_queue(keys: list[Hashable]) -> None:
    """Counted in comparisons of times, not in seconds."""
    looked = 0

    class Time(float):
        def __lt__(self, other: float) -> bool:
            nonlocal looked
            looked += 1
            return float(self) < float(other)

    queue = Queue(1, (1, 4))
    for number, key in enumerate(keys):
        queue.put(request(key=key, since=Time(number)))
    while queue.count:
        queue.take(1e9)
    assert looked < 40 * len(keys)


def test_requests_that_are_put_back_may_have_one_deadline() -> None:
    """As those of a process that has ended: they are not counted again, and can not be compared."""
    queue = Queue(1, BATCHES)
    for one in (first := [request(since=float(number), deadline=9.0) for number in range(5)]):
        queue.put(one, again=True)
    assert queue.expired(8.0) == []
    assert sorted(one.since for one in queue.expired(10.0)) == [one.since for one in first]


def test_a_full_queue_says_how_many_may_wait_whatever_was_put_back() -> None:
    queue = Queue(1, BATCHES, most=2)
    for _ in range(3):
        queue.put(request(), again=True)
    with pytest.raises(Busy, match=r"^2 requests wait already, the most that may"):
        queue.put(request())
