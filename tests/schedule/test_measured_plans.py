"""The simulator against assignments that were measured on an H200 (commit bf1d7b7): whole models, with the costs measured beside them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit import api, samples
from msplit.cost import profile as profile_file
from msplit.schedule.judge import predict
from msplit.schedule.simulate import Evaluation, evaluate

MEASURED = Path(__file__).parents[2] / "benchmarks" / "schedulers" / "assignments.json.gz"

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["model"]: row for row in json.loads(gzip.decompress(MEASURED.read_bytes()))["models"]}


def simulated(row: dict[str, Any], path: Path) -> list[Evaluation]:
    """Every assignment of a row, by its profile and the time that one stream took in the same run."""
    path.write_bytes(samples.build(row["model"]).graph_def.SerializeToString())
    flat = api.load(path)
    profile = profile_file.parse(json.dumps(row["profile"]), row["model"])
    (one,) = [tried["measured_us"] for tried in row["tried"] if tried["streams"] == 1]
    _, costs = api.price(flat, batch=row["batch"], profile=replace(profile, one_us=one))
    by_name = sorted(range(len(flat)), key=flat.graph.names.__getitem__)
    found = []
    for tried in row["tried"]:
        ids = np.zeros(len(flat), np.int32)
        ids[by_name] = tried["ids"]
        problem = predict(flat, costs, ids).problem
        found.append(evaluate(problem, problem.pin))
    return found


@pytest.mark.parametrize(
    ("model", "error", "rank"),
    [
        ("mmoe", 0.05, 0.98),
        ("towers", 0.04, 0.97),
        ("deepfm", 0.04, 0.98),
        ("dlrm", 0.03, 0.97),
        ("googlenet", 0.03, 0.88),
    ],
)
def test_simulated_times_are_those_that_were_measured(
    rows: dict[str, dict[str, Any]], tmp_path: Path, model: str, error: float, rank: float
) -> None:
    took = np.asarray([tried["measured_us"] for tried in rows[model]["tried"]])
    found = simulated(rows[model], tmp_path / "model.pb")
    said = np.asarray([one.simulation.makespan_us for one in found])
    assert len(took) >= 19
    assert np.median(np.abs(said / took - 1)) < error
    score = np.asarray([one.score_us for one in found])
    places = [np.argsort(np.argsort(column)) for column in (score, took)]
    assert np.corrcoef(*places)[0, 1] > rank
    # What would be taken of them is the fastest, within the noise of measuring.
    assert took[np.argmin(score)] < 1.02 * took.min()
