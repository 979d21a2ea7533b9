"""The bench where a device has no room for all variants in IEEE precision: they are verified one by one, with the same outcome."""

import weakref
from dataclasses import replace

import numpy as np
import pytest

from msplit.benchmark.timing import bench
from msplit.errors import OutOfMemory
from msplit.inputs.reference import Reference
from tests.benchmark.test_timing import CLOCK, QUICK, Fake, fresh, variant


@pytest.fixture(autouse=True)
def _made_up_time(monkeypatch):
    monkeypatch.setattr("msplit.benchmark.timing.time", CLOCK)


class Small(Fake):
    """A device with room for so many captured graphs at a time, of which those in IEEE precision take twice as much."""

    def __init__(self, room, **more):
        super().__init__("small", where="GPU", **more)
        self.room, self.built = room, []

    def build(self, job):
        self.built = [one for one in self.built if not one.closed]
        if sum(1 + one.job.precision.ieee for one in self.built) + 1 + job.precision.ieee > self.room:
            raise OutOfMemory("CUDA out of memory.", fix="use a smaller --batch")
        self.built.append(super().build(job))
        return self.built[-1]


class OwnMemory(Small):
    """One whose outputs are gone when it is closed."""

    def build(self, job):
        made = super().build(job)
        step, close, given = made.step, made.close, []

        def lent(feeds):
            given.append({name: np.array(value) for name, value in step(feeds).items()})
            return given[-1]

        def lost():
            for outputs in given:
                for value in outputs.values():
                    value[...] = np.nan
            close()

        made.step, made.close = lent, lost
        return made


def test_what_is_verified_one_by_one_keeps_no_memory_of_the_device():
    engine = OwnMemory(4)
    variants = [variant("plain", Fake("plain", where="GPU")), *(variant(f"{n}", engine, n) for n in (1, 2, 3, 4))]
    assert not bench(variants, fresh=fresh, settings=replace(QUICK, verify_inputs=3)).failed


class Memory:
    """Of a device, as long as somebody holds it."""


class Alone(Fake):
    """A device with room for one executable in IEEE precision, one that could not be built included, as long as its error is held."""

    def __init__(self):
        super().__init__("alone", where="GPU")
        self.taken = weakref.WeakSet()

    def build(self, job):
        memory = Memory() if job.precision.ieee else None
        if memory is not None:
            self.taken.add(memory)
            if len(self.taken) > 1:
                raise OutOfMemory("CUDA out of memory.")
        made = super().build(job)
        held, close = [memory], made.close
        made.close = lambda: (close(), held.clear())
        return made


def test_what_could_not_be_built_holds_no_memory_when_the_others_are_built_one_by_one():
    engine = Alone()
    assert not bench([variant("1", engine), variant("2", engine, 2)], fresh=fresh, settings=QUICK).failed


class Keeping(Small):
    """An engine that keeps the memory of what it has closed for what it builds next, until it is asked for it."""

    def __init__(self, room):
        super().__init__(room)
        self.kept = 0

    def build(self, job):
        made = super().build(job)
        close = made.close

        def keep():
            close()
            self.kept += 1

        made.close = keep
        return made

    def free_memory(self):
        self.kept = 0


class Other(Fake):
    """One that needs that memory for a step."""

    def __init__(self, neighbour):
        super().__init__("other", where="GPU")
        self.neighbour = neighbour

    def build(self, job):
        made = super().build(job)
        step = made.step

        def checked(feeds):
            assert not self.neighbour.kept or not job.precision.ieee, "CUDA out of memory."
            return step(feeds)

        made.step = checked
        return made


def test_memory_that_an_engine_keeps_is_there_for_another_one_when_they_are_verified_one_by_one():
    engine = Keeping(4)
    variants = [variant("first", Other(engine)), *(variant(f"{n}", engine, n) for n in (1, 2, 3, 4))]
    assert not bench([*variants, variant("last", Other(engine))], fresh=fresh, settings=QUICK).failed


def test_what_was_skipped_for_want_of_memory_and_fits_alone_is_not_skipped():
    engine = Small(4)
    variants = [variant(f"{n}", engine, n, optional=n == 3) for n in (1, 2, 3, 4)]
    result = bench(variants, fresh=fresh, settings=QUICK)
    assert [one.skipped for one in result.variants] == [""] * 4


@pytest.mark.parametrize(("wrong", "failed"), [(None, False), ("ieee", True), ("tf32", False)])
def test_what_does_not_fit_side_by_side_in_ieee_precision_is_verified_one_by_one(wrong, failed):
    """With the same outcome as what does."""
    expected = {"y": (2 * fresh(7)["x"]).astype(np.float32)}
    found = []
    for room in (4, 99):
        engine = Small(room, wrong=wrong)
        variants = [variant("plain", Fake("plain", where="GPU")), *(variant(f"{n}", engine, n) for n in (1, 2, 3, 4))]
        result = bench(variants, fresh=fresh, settings=QUICK, reference=Reference(fresh(7), expected, "elsewhere"))
        assert [one.failed for one in result.variants] == [False, *[failed] * 4]
        found.append([one.checks for one in result.variants])
    assert found[0] == found[1]
    assert {check.precision for check in found[0][1]} == ({"ieee"} if failed else {"ieee", "tf32"})


class Eager(Small):
    """A variant on one stream takes memory with each step, and finds some only beside fewer others than there are."""

    def build(self, job):
        made = super().build(job)
        step = made.step

        def allocating(feeds):
            if (
                job.streams == 1
                and not job.precision.ieee
                and sum(not one.closed for one in self.built) > self.room - 3
            ):
                raise OutOfMemory("Conv2D: CUDA out of memory.", fix="use a smaller --batch")
            return step(feeds)

        made.step = allocating
        return made


def test_what_finds_no_memory_for_a_step_beside_the_others_is_skipped():
    """Inception-v3 at 1024 was not measured at all: launched op by op, it had no room beside four captured graphs."""
    engine = Eager(5)
    variants = [variant("plain", Fake("plain", where="GPU")), *(variant(f"{n}", engine, n) for n in (1, 2, 4))]
    result = bench(variants, fresh=fresh, settings=QUICK)
    assert [one.failed for one in result.variants] == [False] * 4
    said = "Conv2D: CUDA out of memory. It has no room beside the other variants"
    assert [one.skipped for one in result.variants] == ["", said, "", ""]
    assert [one.host is None for one in result.variants] == [False, True, False, False]


def test_the_only_variant_of_an_engine_is_not_skipped_for_want_of_memory():
    others = Small(3)
    variants = [variant("1", Eager(2)), variant("2", others, 2), variant("3", others, 3)]
    with pytest.raises(OutOfMemory, match="Conv2D"):
        bench(variants, fresh=fresh, settings=QUICK)


def test_what_does_not_fit_at_all_is_told():
    with pytest.raises(OutOfMemory, match="smaller --batch"):
        bench([variant("1", Small(1)), variant("2", Small(1), 2)], fresh=fresh, settings=QUICK)
