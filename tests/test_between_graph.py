"""docs/examples/between_graph.py: an ensemble of processes that know each other by address."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.campaign import campaign
from tests.cli.runner import ROOT, SAMPLES
from tests.weights import other_weights

pytestmark = pytest.mark.tf


def ensemble(*arguments: object) -> str:
    """What the example prints."""
    command = [sys.executable, "docs/examples/between_graph.py", *map(str, arguments)]
    done = forked.run(command, server=forked.TENSORFLOW, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def members(tmp_path: Path) -> list[Path]:
    return [other_weights(SAMPLES / "mmoe_small.pb", seed, tmp_path / f"{seed}.pb") for seed in (1, 2)]


def test_members_between_graphs_equal_replicas_in_one(members: list[Path]) -> None:
    out = ensemble(*members, "--batches", 3)
    assert len(re.findall("^batch ", out, re.MULTILINE)) == 3
    difference = re.search("^largest difference to one graph: (.*)$", out, re.MULTILINE)
    assert difference is not None
    assert float(difference[1]) < 1e-6
    assert "left out" not in out


@campaign
def test_a_member_that_is_not_there_is_left_out_and_the_others_go_on(members: list[Path], tmp_path: Path) -> None:
    (tmp_path / "broken.pb").write_bytes(members[0].read_bytes()[:100])
    out = ensemble(*members, tmp_path / "broken.pb", "--batches", 3, "--timeout", 15)
    assert out.count("member 2 has not answered within 15 s, and is left out") == 1
    both = ensemble(*members, "--batches", 3)
    assert re.findall("^batch .*$", out, re.MULTILINE) == re.findall("^batch .*$", both, re.MULTILINE)
