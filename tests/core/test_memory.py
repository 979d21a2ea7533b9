import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.core.graph import memoize, no_collection

SAMPLES = Path(__file__).parent.parent.parent / "sample_graphs"


class Owner:
    pass


def test_a_question_is_answered_once_for_equal_details() -> None:
    owner, other, asked = Owner(), Owner(), []

    def find(*details: object, of: object = owner, question: str = "sum") -> int:
        return memoize(of, question, details, lambda: asked.append(details) or len(asked))

    costs = np.ones(2)
    assert find(costs, {"Gather": 0}) == 1
    assert find(costs, {"Gather": 0}) == 1
    assert find(np.ones(2), {"Gather": 0}) == 2  # an array may be changed: only the same one is equal
    assert find(costs, {"Gather": 1}) == 3
    assert find(costs, {"Gather": 0}, question="product") == 4
    assert find(costs, {"Gather": 0}, of=other) == 5
    assert find(costs, {"Gather": 0}) == 1


def test_few_answers_are_kept() -> None:
    owner, asked = Owner(), []
    for number in (1, 2, 3, 4, 4, 1):
        memoize(owner, "square", (number,), lambda number=number: asked.append(number))
    assert asked == [1, 2, 3, 4, 1]


def test_what_is_remembered_goes_with_the_graph() -> None:
    flat = msplit.load(SAMPLES / "towers_small.pb")
    msplit.assign(flat, "recsys", streams=2)
    msplit.analyze(flat)
    gone = weakref.ref(flat)
    del flat
    gc.collect()
    assert gone() is None


def test_an_analysis_in_between_changes_no_assignment() -> None:
    """Each asks for branches and columns of its own costs."""
    flat = msplit.load(SAMPLES / "towers_small.pb")
    alone = {
        batch: msplit.assign(msplit.load(SAMPLES / "towers_small.pb"), "vision", batch=batch) for batch in (1, 4096)
    }
    msplit.analyze(flat, batch=1)
    for batch in (4096, 1, 4096):
        found = msplit.assign(flat, "vision", batch=batch)
        assert found.ids.tolist() == alone[batch].ids.tolist()
        assert found.outcome.assignment.reasons == alone[batch].outcome.assignment.reasons


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with no_collection(), no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError, match="x"), no_collection():
            raise ValueError("x")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_made_meanwhile_is_not_looked_at_again_and_what_somebody_froze_stays_frozen(frozen: bool) -> None:
    before, held = gc.get_freeze_count(), [[]]
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        with no_collection():
            made = [[number] for number in range(200_000)]
        # By object and not by gc.get_freeze_count(): a cache elsewhere may let frozen objects go at any time.
        seen = {id(one) for one in gc.get_objects()}
        assert (id(held) in seen) is not frozen
        assert {id(one) for one in made} <= seen
        young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
        assert frozen or not young & {id(one) for one in made}
    finally:
        (gc.freeze if before else gc.unfreeze)()


def test_what_somebody_froze_is_not_counted_for_a_few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting walks through it: 46 ms a time in a process with TensorFlow, which took five of them for every command."""

    def counted() -> int:
        raise AssertionError("walked through everything frozen")

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    with no_collection():
        made = [[number] for number in range(1000)]
    assert len(made) == 1000
