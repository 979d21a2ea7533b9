"""Every JSON that msplit writes is described by a schema, and every amount in it says its unit in its key."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from msplit import api
from msplit.api import compare
from msplit.benchmark.benchmark import bench, limits
from msplit.engines.base import Job
from msplit.engines.cuda.options import EngineOptions
from msplit.inputs.make import make_inputs
from msplit.report import assignment, benchmark, document
from msplit.run.tuning import TuneSettings
from tests import forked
from tests.assignment.test_plans import QUICK
from tests.cli.runner import ROOT, SAMPLES, fine

FOLDER = files("msplit") / "data" / "schemas"
SCHEMAS = {entry.name.removesuffix(".json"): json.loads(entry.read_text("utf-8")) for entry in FOLDER.iterdir()}
MMOE = SAMPLES / "mmoe_small.pb"

UNITS = ("us", "s", "seconds", "bytes", "flops", "percent", "mb", "gb")
"""What a key ends in, or is, where it is an amount."""

PLAIN = frozenset(
    (
        "added", "batch", "batches", "blocks", "bound", "branches", "builds", "changed", "changes_tried", "colocation_groups", "compared",
        "concurrency", "confidence", "constants", "copies", "count", "covered", "crossings", "cv", "decided_by", "differing", "distinct",
        "edges", "edges_cut", "elements", "error", "errors", "evaluations", "fork_join", "functions", "gain", "gain_at_most",
        "gain_over_one", "gpu", "inside",
        "gpus", "graph", "groups", "guessed", "helps", "high", "hits", "host", "info", "inputs", "intensity", "is", "kernel", "kernels",
        "launches",
        "largest", "left_out",
        "level", "level_width", "line", "lookups", "low", "max_antichain", "max_burst", "max_error", "max_gain", "max_rounds",
        "measured", "memory_ratio", "merged_waits", "min_rounds", "minimal", "mismatches", "most", "distance", "needed", "new",
        "node_count", "nodes",
        "occupancy", "of_stream", "old", "omitted", "once_per_stream", "ops", "ops_in_half", "original", "outliers", "predicted_gain",
        "predicted_gain_over_one",
        "processes",
        "ratio", "records", "registers", "relative", "removed",
        "resident", "rounds", "rows", "schema_version", "seed", "shape", "shapes", "share",
        "size", "sizes", "sms", "step", "steps", "steps_before",
        "stream", "streams", "summary", "tables", "tensors", "threads", "times", "tolerance", "total", "unassigned",
        "unknown", "unknown_shapes", "unmeasured", "value", "values", "variables", "verify_inputs", "versions", "waits", "warning", "was",
        "width", "worst",
        # of load
        "answered", "checked", "clients", "failed", "given_up", "most_in_flight", "priority", "refused", "repeat", "requests",
        "timed_out", "told_apart", "tolerances", "wrong",
    )
)  # fmt: skip
"""What is counted, numbers something, or is a ratio: there is no unit to say."""


def validate(name: str, data: Any) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for problem in validator.iter_errors(json.loads(json.dumps(data))):
        while problem.context:  # of a choice, the alternative that comes furthest says what is wrong
            problem = max(problem.context, key=lambda one: len(one.absolute_path))
        where = "/".join(map(str, problem.absolute_path))
        pytest.fail(f"{name}: {where}: {problem.message[:300]}; describe it in msplit/data/schemas/{name}.json")


def numbers(schema: dict[str, Any], key: str = "") -> Iterator[tuple[str, str]]:
    """(key, description) of each number that a schema describes; the key around it for items and for maps."""
    types = schema.get("type")
    if {"number", "integer"} & set(types if isinstance(types, list) else [types]):
        yield key, schema.get("description", "")
    for name, inner in schema.get("properties", {}).items():
        yield from numbers(inner, name)
    for inner in schema.get("$defs", {}).values():
        if "type" not in inner or inner["type"] == "object":  # of a plain number the key that refers to it says more
            yield from numbers(inner)
    for inner in (
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("oneOf", ()),
        *schema.get("prefixItems", ()),
    ):
        if isinstance(inner, dict):
            told = inner if "description" in inner else {**inner, "description": schema.get("description", "")}
            yield from numbers(told, key)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_has_a_version_and_its_amounts_have_units(name: str) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:msplit:schema:{name}:1"
    for head in schema.get("oneOf", schema.get("anyOf", [schema])):
        head = schema["$defs"][head["$ref"].removeprefix("#/$defs/")] if "$ref" in head else head
        assert "schema_version" in head["required"]
        assert head["properties"]["schema_version"] == {"const": 1}
    # Of the next version nothing is said.
    assert not jsonschema.Draft202012Validator(schema).is_valid({"schema_version": 2})
    for key, about in numbers(SCHEMAS[name]):
        unit = key.rpartition("_")[2]
        if about.startswith(("µs", "Stream -> µs")):
            continue  # a map whose keys are data
        newer = about.startswith(("Seconds; see ", "See "))  # an older key, which has a younger one beside it
        assert unit in UNITS or key in PLAIN or newer, f"{name}: {key}: which unit?"


@pytest.mark.parametrize("model", ["control_flow_v2", "training.meta", "feature_columns"])
def test_commands_that_only_look(model: str) -> None:
    path = SAMPLES / model
    validate("analyze", fine("analyze", path, "--show", "all", "--engine", "cuda", "--format", "json").json)
    validate("assign", fine("assign", path, "--rules", "auto", "--dry-run", "--diff", "--format", "json").json)
    validate("show", fine("show", path, "--format", "json").json)


def test_other_answers_of_these_commands(tmp_path: Path) -> None:
    validate("analyze", fine("analyze", MMOE, "--format", "json").json)
    validate("analyze", fine("analyze", MMOE, "--gpus", 2, "--format", "json").json)
    validate("show", fine("show", SAMPLES / "two_tags", "--format", "json").json)
    emits = [part for kind in ("json", "plan", "placement") for part in ("--emit", kind, tmp_path / kind)]
    validate("assign", fine("assign", MMOE, "--streams", "4", "-o", tmp_path / "m.pb", *emits, "--format", "json").json)
    validate("assigned_nodes", json.loads((tmp_path / "json").read_text()))
    validate("plan", json.loads((tmp_path / "plan").read_text()))
    validate("placement", json.loads((tmp_path / "placement").read_text()))
    validate("assign", fine("assign", MMOE, "--explain", "expert_1/dense_0/MatMul", "--format", "json").json)
    validate("assign", fine("assign", MMOE, "--compare", "--no-measure", "--format", "json").json)
    validate("diff", fine("diff", MMOE, tmp_path / "m.pb", "--rules", "default", "--format", "json").json)
    validate("diff", fine("diff", SAMPLES / "towers_small.pb", MMOE, "--format", "json").json)


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli.runner import msplit

    if importlib.util.find_spec("tensorflow"):  # TensorFlow is asked in a process that has it already
        imports = forked.TENSORFLOW if importlib.util.find_spec("torch") else ("tensorflow", *forked.COMMANDS)
        run = functools.partial(forked.run, server=imports, quick=True)
        stand_in = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr("msplit.cli.doctor.subprocess", stand_in)

    validate("doctor", msplit("doctor", "--format", "json").json)


def test_a_bench_with_everything() -> None:
    pytest.importorskip("torch")
    flat = api.load(SAMPLES / "towers_small.pb")
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (1, 3),
        "batch": 2,
        "settings": QUICK,
        "compare_tensorflow": False,
        "tune": TuneSettings(0.5),
    }
    from tests.run.test_tuning import _reference

    found = bench(flat, **dict(request, reference=_reference(flat)))
    _, costs = api.price(flat, batch=2)
    job = Job(
        flat,
        np.zeros(len(flat), np.int32),
        1,
        make_inputs(flat, {}, batch=2),
        costs=costs,
        options=EngineOptions("cpu"),
    )
    found = replace(found, limits=limits(job, ids={one.label: job.ids for one in found.result.variants}))
    validate("bench", json.loads(document.dumps("bench", benchmark.payload(flat, found, ["Written: x."]))))


def test_candidates_that_were_measured() -> None:
    pytest.importorskip("torch")
    from msplit.engines.cuda.search import SimulatedRunner

    found = compare(api.load(MMOE), streams=3, batch=2, device=SimulatedRunner)
    validate("assign", json.loads(document.dumps("assign", assignment.candidates_payload(found))))


def test_builds(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = ["build", str(MMOE), "--batch", "1,4", "--device", "cpu", "--streams", "2", "-o", str(tmp_path / "build")]
    validate("build", json.loads(fine(*made, "--format", "json").out))
    validate("build", json.loads(fine("show", str(tmp_path / "build"), "--format", "json").out))
    measured = fine(
        "bench", str(tmp_path / "build"), "--measure", "duration=0.05", "--format", "json", "--measure", "builds=1"
    )
    validate("build_bench", json.loads(measured.out))


def test_every_command_that_prints_json_has_a_schema() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "msplit" / "cli").glob("*.py"))
    commands = set(re.findall(r'show\(\s*style,\s*"(\w+)"', text))
    assert {"analyze", "assign", "bench", "check", "diff", "doctor", "profile", "show"} <= commands
    for command in commands:
        schema = SCHEMAS["profile_command" if command == "profile" else command]
        heads = [schema, *schema.get("$defs", {}).values()]
        assert {"const": command} in [head.get("properties", {}).get("command") for head in heads]
