"""Clusters: one meaning in every form, and a message for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from msplit.errors import MsplitError
from msplit.formats import cluster
from msplit.formats.cluster import Task, parse, read

JOBS = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"], "ps": ["[fe80::1]:2222"]}
TASKS = (
    Task("worker", 0, "10.0.0.1:2222"),
    Task("worker", 1, "10.0.0.2:2222"),
    Task("ps", 0, "[fe80::1]:2222"),
)
NUMBERED = {job: dict(enumerate(addresses)) for job, addresses in JOBS.items()}
OWN = {"cluster": JOBS, "task": {"type": "ps", "index": 0}}


@pytest.mark.parametrize("value", [JOBS, NUMBERED, {"cluster": NUMBERED}, OWN])
@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_all_forms_say_the_same(value: object, write: object) -> None:
    found = parse(write(value), "here")
    assert sorted(found.tasks, key=lambda task: task.job) == sorted(TASKS, key=lambda task: task.job)
    assert (found.workers, found.servers) == (TASKS[:2], TASKS[2:])
    assert found.own == (TASKS[2] if value is OWN else None)
    assert found.source == "here"


def test_it_is_read_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.yaml").write_text("worker:\n  - host:1\n")
    assert read(tmp_path / "cluster.yaml").tasks == (Task("worker", 0, "host:1"),)
    monkeypatch.setenv("TF_CONFIG", json.dumps(OWN))
    assert read("TF_CONFIG").own == TASKS[2]
    monkeypatch.setenv("TF_CONFIG", " ")
    with pytest.raises(MsplitError, match="TF_CONFIG is not set"):
        read("TF_CONFIG")
    with pytest.raises(MsplitError, match="can not be read"):
        read(tmp_path / "nothing")


def test_a_task_has_a_name_and_a_place() -> None:
    assert TASKS[1].name == "/job:worker/task:1"
    assert (TASKS[1].place, TASKS[2].place) == (("10.0.0.2", 2222), ("fe80::1", 2222))
    found = parse(json.dumps({"worker": ["w:1"], "ps": ["p:1"], "chief": ["c:1"]}), "here")
    assert [task.job for task in found.workers] == ["chief", "worker"]
    assert found.task("ps", 0).address == "p:1"
    many = parse(json.dumps({"worker": [f"w:{port}" for port in range(1, 11)]}), "here")
    for one, said in ((found, "it has: chief 0, worker 0, ps 0"), (many, "worker 7, …")):
        with pytest.raises(MsplitError, match="no task 3 of job 'ps'") as caught:
            one.task("ps", 3)
        assert said in str(caught.value)


names = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,5}", fullmatch=True).filter(lambda name: name != "cluster")
addresses = st.builds("{}:{}".format, st.from_regex(r"[a-z0-9.-]{1,8}", fullmatch=True), st.integers(1, 65535))


@st.composite
def specs(draw: st.DrawFn) -> dict[str, dict[int, str]]:
    """Some tasks, numbered with gaps, at least one of which computes."""
    jobs = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    at = draw(st.lists(addresses, min_size=len(jobs), max_size=8, unique=True))
    found: dict[str, dict[int, str]] = {"worker": {}, **{job: {} for job in jobs}}
    for number, address in enumerate(at):
        job = "worker" if not number else draw(st.sampled_from(jobs))
        found[job][number * draw(st.integers(1, 3))] = address
    return {job: tasks for job, tasks in found.items() if tasks}


@given(specs())
def test_what_is_read_is_what_tensorflow_is_given(spec: dict[str, dict[int, str]]) -> None:
    assert parse(json.dumps(spec), "here").spec() == spec
    assert parse(yaml.safe_dump(spec), "here").spec() == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("- a:1", "a cluster is a mapping of jobs, not a list"),
        ("cluster: [a:1]\ntask: {}", "here:2: job 'task' has no task"),
        ("worker: [a]", "'a' is no address"),
        ("worker: [a:0]", "'a:0' is no address"),
        ("worker: [a:65536]", "is no address"),
        ("worker: [grpc://a:1]", "is no address"),
        ("worker: [1]", "1 is no address"),
        ("worker: [[a:1]]", "a list is no address"),
        ("worker: a:1", "job 'worker' are text, not a list"),
        ("worker: []", "job 'worker' has no task"),
        ("worker: {x: a:1}", "are not numbered"),
        ("worker: {0: a:1, -1: b:1}", "are not numbered"),
        ("worker: {true: a:1}", "are not numbered"),
        ("1: [a:1]", "1 is no name of a job"),
        ("'a b': [a:1]", "'a b' is no name of a job"),
        ("worker: [a:1, a:1]", "here:1: a:1 is the address of /job:worker/task:0, too"),
        ("ps: [a:1]", "no task computes"),
        ("{", "not valid YAML"),
        ("worker: [a:1]\nps: [b]\nchief: []", "2 mistakes"),
        ("cluster: {worker: [a:1]}\ntask: {type: worker}", "no type or no index"),
        ("cluster: {worker: [a:1]}\ntask: {index: 0}", "no type or no index"),
        ("cluster: {worker: [a:1]}\ntask: 3", "task needs options in a mapping"),
        ("cluster: {worker: [a:1]}\ntask: {type: worker, index: 1}", "no task 1 of job 'worker'"),
        ("cluster: {worker: [a:1]}\ntask: {type: evaluator, index: 0}", "no task 0 of job 'evaluator'"),
    ],
)
def test_what_is_wrong_is_told(text: str, said: str) -> None:
    with pytest.raises(MsplitError, match=said) as caught:
        parse(text, "here")
    assert "rule set" not in str(caught.value)


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MAX_TASKS", 2)
    with pytest.raises(MsplitError, match="there are 3 tasks"):
        parse("worker: [a:1, a:2, a:3]", "here")
