"""Kept answers of TensorFlow: a wrong one is noticed, and so is one that TensorFlow no longer gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import kept

pytest.importorskip("torch")

X = np.array([0.5, -2.0], np.float32)
OURS = ("Neg", [X])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, kept.Answer]:
    """Answers that are kept, none at first."""
    answers: dict[str, kept.Answer] = {}
    monkeypatch.setattr(kept, "answers", lambda: answers)
    monkeypatch.setattr(kept, "HOW", "kept")
    return answers


@pytest.mark.tf
def test_a_wrong_answer_that_is_planted_fails(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.cuda.ops.harness import check

    known[kept.key("Neg", [X], {})] = (-X,)
    check(*OURS)
    known[kept.key("Neg", [X], {})] = (np.nextafter(-X, np.float32(9)) + np.float32(1e-3),)
    with pytest.raises(AssertionError, match="Neg, output 0: 2 of 2 differ"):
        check(*OURS)
    monkeypatch.setattr(kept, "HOW", "anew")
    with pytest.raises(AssertionError, match="TensorFlow's answer to Neg is not the kept one"):
        check(*OURS)
    known.clear()
    check(*OURS)


def test_what_is_kept_is_not_asked_and_nothing_else_is_taken_for_it(known: Any) -> None:
    asked = []

    @kept.kept
    def ask(op: str, inputs: Any, attrs: Any = None) -> kept.Answer:
        asked.append(op)
        return (np.float32(1),)

    known[kept.key("Abs", [X], {"a": 1})] = (abs(X),)
    assert ask("Abs", [X], {"a": 1})[0].tolist() == [0.5, 2.0]
    assert asked == []
    others = [
        ("Neg", [X], {"a": 1}),
        ("Abs", [X], {"a": 2}),
        ("Abs", [X], {"a": True, "b": 1}),
        ("Abs", [X, X], {"a": 1}),
        ("Abs", [X.reshape(2, 1)], {"a": 1}),
        ("Abs", [X.view(np.int32)], {"a": 1}),
        ("Abs", [-X], {"a": 1}),
    ]
    for number, other in enumerate(others, 1):
        ask(*other)
        assert len(asked) == number


def test_a_file_holds_what_was_written_for_this_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "b": (X, np.float32(np.nan), np.zeros((0, 3), np.int8)),
        "a": (X.astype("bfloat16"), np.array([True]), np.array([1 + 2j])),
    }
    content = kept.encoded(given)
    found = kept.decoded(content)
    assert found.keys() == given.keys()
    for name, arrays in given.items():
        for one, other in zip(arrays, found[name], strict=True):
            assert kept._same(np.asarray(one), other)
    monkeypatch.setattr(kept, "place", lambda: "another version")
    assert kept.decoded(content) == {}


def test_the_file_is_small() -> None:
    assert kept.FILE.stat().st_size < 2 << 20
