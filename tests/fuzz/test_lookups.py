"""A few lookups of all forms against TensorFlow. `python -m tests.fuzz --kind lookups --seconds 600` tries more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from msplit.engines.cuda.passes.embedding import masked_rows, masked_sums
from msplit.engines.cuda.passes.embedding.proof import KnownValues
from tests.campaign import examples
from tests.fuzz import lookups

pytestmark = pytest.mark.tf


def problems(seeds: Sequence[int]) -> dict[str, str]:
    """What is wrong with cases, by how to run them again."""
    found = {f"python -m tests.fuzz --case lookups:{seed}": lookups.outcome(lookups.make(seed)) for seed in seeds}
    return {case: told for case, told in found.items() if told not in lookups.RIGHT and "refused" not in told}


def test_lookups_give_what_tensorflow_gives() -> None:
    assert not problems(range(examples(12, 2000)))


def test_all_forms_are_tried() -> None:
    cases = [lookups.make(seed) for seed in range(500)]
    forms = {(column.source, column.weights, case.end) for case in cases for column in case.columns}
    assert len(forms) == 3 * (1 + 3 * (len(lookups.SOURCES) - 1))
    assert {(column.combiner, column.safe) for case in cases for column in case.columns} == set(
        product(("sum", "mean", "sqrtn"), (False, True))
    )
    assert {(table.parts, table.strategy) for case in cases for table in case.tables} == set(
        product((1, 2, 3, 4), ("mod", "div"))
    )
    assert {(case.capture, case.mode) for case in cases} == set(
        product((False, True), product((False, True), repeat=2))
    )
    assert {case.optimizer for case in cases} == set(lookups.OPTIMIZERS)


def test_rows_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the form of these cases was made for: distinct ids with gaps in the place of those without."""
    right = masked_sums.SEGMENT_RULES["_UniquePadded"]

    def wrong(facts: KnownValues, op: Any) -> Any:
        proof = right(facts, op)
        facts.kept.pop((op.node, 0), None)
        return proof and replace(proof, outputs={0: facts.ops[-1].out}, stays=True)

    monkeypatch.setitem(masked_rows._RULES, "_UniquePadded", wrong)
    monkeypatch.setattr(KnownValues, "has_gaps", lambda *_: False)
    assert len(problems([15, 205, 241, 284])) == 4
