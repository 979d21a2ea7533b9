"""Promises about ids, on generated graphs: loops, functions that call each other and colocation groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

import msplit
from msplit import api
from tests import strategies
from tests.campaign import examples

GENERATED = settings(max_examples=examples(25, 1000), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assigned(source: Path, out: Path) -> bytes:
    """What `assign` writes.

    Where call sites of one function want different ids for a node, only one can have its way. The command says so, and the result is not
    what was wanted, so that nothing is promised about assigning it again.
    """
    flat = msplit.load(source)
    found = api.assign(flat, wrap=True)
    api.save(flat, found.ids, out, costs=found.costs, force=True)
    assume(not found.outcome.conflicts)
    return out.read_bytes()


@GENERATED
@given(strategies.graph_defs(ids=False))
def test_assigning_twice_is_assigning_once(tmp_path_factory: pytest.TempPathFactory, graph_def: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "model").write_bytes(graph_def.SerializeToString(deterministic=True))
    once = assigned(folder / "model", folder / "once")
    assert assigned(folder / "once", folder / "twice") == once
