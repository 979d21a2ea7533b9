"""Graphs over a cluster give what they give in one process, and what is wrong with a cluster is told."""

from __future__ import annotations

import functools
import http.server
import socket
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import msplit
from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, ClusterOptions, Job
from msplit.engines.tensorflow import cluster as clusters
from msplit.engines.tensorflow import runtime, variables
from msplit.engines.tensorflow.cluster_session import STRATEGIES, build, kept_by, shared_out
from msplit.engines.tensorflow.engine import ENGINE
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.cluster import parse
from msplit.inputs.make import make_inputs
from msplit.opset.traits import VARIABLES
from msplit.run.request import RunRequest
from msplit.training.trainer import to_train
from msplit.verify.compare import compare
from msplit.verify.tensorflow_process import initial_state
from tests.campaign import CAMPAIGN
from tests.engines.tensorflow.clusters import free_ports, here
from tests.engines.tensorflow.test_samples import SAMPLES, load
from tests.training.models import batches, regression

pytestmark = pytest.mark.tf


def scattered(flat: FlatGraph, streams: int, feeds: Arrays) -> Job:
    """A job whose nodes are on streams drawn at random, with what variables begin with."""
    ids = np.random.default_rng(0).integers(0, streams, len(flat)).astype(np.int32)
    return Job(flat, ids, streams, feeds, precision=Precision.IEEE, state=initial_state(flat))


QUICK = ["training.meta", "keras_lookup", "feature_columns", "while_v1.pb"]
"""References, resources and tables of strings with files, and a loop."""


@pytest.mark.parametrize("strategy", STRATEGIES if CAMPAIGN else ["round-robin"])
@pytest.mark.parametrize("name", SAMPLES if CAMPAIGN else QUICK)
def test_outputs_and_variables_are_those_of_one_process(name: str, strategy: str) -> None:
    flat = load(name)
    job = scattered(flat, 3, make_inputs(flat, {}, batch=3))
    alone = ENGINE.build(replace(job, ids=np.zeros_like(job.ids), streams=1))
    spread = build(job, ClusterOptions(here(2, 2), ps_strategy=strategy))
    try:
        spread.load_state(alone.save_state())
        for seed in (1, 2):
            feeds = make_inputs(flat, {}, batch=3, seed=seed)
            found = compare(spread.step(feeds), alone.step(feeds))
            assert found.passed, found.describe()
        found = compare(spread.save_state(), alone.save_state())
        assert found.passed, found.describe()
    finally:
        spread.close()
        alone.close()


def trained(options: ClusterOptions | None, steps: int, **further: object) -> tuple[dict[str, np.ndarray], list[float]]:
    """Variables and losses of a regression after some steps."""
    request = {"streams": (2,), "engine": "tensorflow", "cluster": options, "precision": "ieee"}
    with msplit.Trainer(model(), fetches=["loss"], **request, **further) as trainer:
        losses = [float(trainer.step(feeds)["loss"]) for feeds in batches(steps)]
        return trainer.variables, losses


@functools.cache
def model() -> Path:
    return regression(Path(tempfile.mkdtemp()) / "model.meta")


@functools.cache
def alone() -> tuple[dict[str, np.ndarray], list[float]]:
    return trained(None, 20)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_container_keeps_variables_for_the_next_client() -> None:
    """And for one beside it; and training over a cluster is that of one process, to the last bit."""
    named = ClusterOptions(here(2, 2), container="kept")
    after, losses = trained(named, 12)
    request = {"streams": (2,), "cluster": named, "precision": "ieee"}
    with msplit.Trainer(model(), fetches=["loss"], **request) as trainer:
        trainer.prepare(batches(1)[0])
        assert trainer.steps == 12
        same(trainer.variables, after)
        losses += [float(trainer.step(feeds)["loss"]) for feeds in batches(20)[12:]]
        same(trainer.variables, alone()[0])
        with msplit.Trainer(model(), fetches=["loss"], **request) as beside:
            beside.step(batches(1)[0])
            trainer.step(batches(1)[0])
            same(beside.variables, trainer.variables)
            assert (beside.steps, int(trainer.variables["global_step"])) == (21, 22)
    assert losses == alone()[1]


def test_variables_of_one_client_are_given_up_at_its_end() -> None:
    flat = to_train(model(), None, ["loss"])
    job = scattered(flat, 2, batches(1)[0])
    tf = runtime.tensorflow()
    executable = build(job, ClusterOptions(here(2, 2)))
    handles = {name: one.handle.op for name, one in executable._variables.items()}
    containers = {handle.get_attr("container") for handle in handles.values()}
    assert len(containers) == 1
    where = {name: handle.device for name, handle in handles.items()}
    assert {device.partition("/device")[0] for device in where.values()} == {"/job:ps/task:0", "/job:ps/task:1"}
    executable.close()
    with tf.Graph().as_default() as graph:
        there = []
        for name, handle in handles.items():
            graph_def = tf.compat.v1.GraphDef()
            graph_def.node.add().CopyFrom(handle.node_def)
            tf.graph_util.import_graph_def(graph_def, name="")
            ops = variables.variable_ops(graph, name)
            there.append(ops.known if ops.handle.dtype == tf.resource else ops.read)
        with tf.compat.v1.Session(clusters.target(here(2, 2).workers[0]), graph=graph) as session:
            for name, found in zip(handles, session.run(there), strict=True):
                assert not np.size(found) or not found, name


# --- Parameter servers


def keeps(strategy: str, servers: int = 2) -> tuple[FlatGraph, dict[str, int]]:
    flat = to_train(model(), None, ["loss"])
    kept = kept_by(flat, servers, strategy, initial_state(flat))
    return flat, {flat.graph.names[v]: int(kept[v]) for v, op in enumerate(flat.graph.ops) if op in VARIABLES}


def test_slots_are_with_their_variable() -> None:
    for strategy in STRATEGIES:
        _, on = keeps(strategy)
        assert set(on.values()) == {0, 1}
        for name, server in on.items():
            if "/Adam" in name:
                assert server == on[name.partition("/Adam")[0]]


def test_one_after_the_other_in_the_order_of_the_graph() -> None:
    flat, on = keeps("round-robin", 3)
    first = [on[name] for name in flat.graph.names if name in on and "/Adam" not in name]
    assert first == [number % 3 for number in range(len(first))]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=7), st.integers(1, 3))
def test_by_bytes_no_server_has_much_more_than_it_must(sizes: list[int], servers: int) -> None:
    """Largest first is at most 4/3 - 1/(3 m) times what is best (Graham 1969)."""
    loads = [0] * servers
    for size, server in zip(sizes, shared_out(sizes, servers, "bytes"), strict=True):
        loads[server] += size
    assert max(loads) <= (4 / 3 - 1 / (3 * servers)) * best(sizes, servers) + 1e-9


def best(sizes: list[int], servers: int) -> int:
    """The lowest load of the most loaded server, by trying all."""
    reached = {(0,) * servers}
    for size in sizes:
        reached = {
            tuple(sorted((*loads[:at], loads[at] + size, *loads[at + 1 :])))
            for loads in reached
            for at in range(servers)
        }
    return min(map(max, reached))


# --- What is wrong


def refusal(options: ClusterOptions, streams: int = 2) -> str:
    flat = load("towers_small.pb")
    with pytest.raises(EngineError) as caught:
        build(scattered(flat, streams, make_inputs(flat, {}, batch=1)), options)
    return str(caught.value)


def test_there_are_as_many_devices_as_streams() -> None:
    assert "the cluster has 3 devices to compute on, and 4 streams" in refusal(ClusterOptions(here(2, 2)), 4)
    assert [device[-5:] for device in clusters.connect(here(2, 2))] == ["CPU:0", "CPU:1", "CPU:0"]


def test_who_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "COMING", 0.1)
    there, port = here(2, 2).workers[0], free_ports(1)[0]
    text = f"worker: ['{there.address}', '127.0.0.1:{port}']"
    assert f"c.yaml: /job:worker/task:1 at 127.0.0.1:{port} can not be reached: Connection refused" in refusal(
        ClusterOptions(parse(text, "c.yaml"))
    )
    said = refusal(ClusterOptions(parse("worker: ['nobody.invalid:2222']", "c.yaml")))
    assert "its host has no address" in said
    assert "msplit worker --cluster FILE --job worker --task 0" in said
    several = parse("worker: [" + ", ".join(f"'127.0.0.1:{port}'" for port in free_ports(10)) + "]", "c.yaml")
    said = refusal(ClusterOptions(several))
    assert "10 of 10 tasks can not be reached" in said
    assert "… and 2 more" in said


def test_a_cluster_of_others_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "ANSWER", 1.0)
    mine = here(2, 2)
    other = f"chief: ['{mine.workers[0].address}']\nworker: ['{mine.workers[1].address}']"
    assert "was started for another cluster" in refusal(ClusterOptions(parse(other, "c.yaml")))
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        web.RequestHandlerClass.log_message = lambda *_: None
        threading.Thread(target=web.serve_forever, daemon=True).start()
        said = refusal(ClusterOptions(parse(f"worker: ['127.0.0.1:{web.server_port}']", "c.yaml")))
        web.shutdown()
    assert "did not say within 1 s what devices it has" in said


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = parse(f"worker: ['127.0.0.1:{taken.getsockname()[1]}']", "c.yaml")
        with pytest.raises(EngineError, match=r"/job:worker/task:0 can not listen on port \d+: Address already in use"):
            clusters.serve(cluster, cluster.tasks[0], ready=lambda _: None)


def test_what_does_not_go_with_a_cluster_is_refused() -> None:
    options = ClusterOptions(here(2, 2))
    with pytest.raises(msplit.MsplitError, match="cluster excludes engine='cuda': a cluster runs TensorFlow"):
        RunRequest.of(engine="cuda", cluster=options)
    with pytest.raises(msplit.MsplitError, match="is not traced"):
        msplit.bench("sample_graphs/towers_small.pb", cluster=options, timelines=True)
    with pytest.raises(msplit.MsplitError, match="plan is for the cuda engine"):
        msplit.bench("sample_graphs/towers_small.pb", cluster=options, plan=Path("plan.json"))
