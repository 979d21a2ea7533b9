"""Nodes on the devices that a user's function gives them, and the log of where TensorFlow put them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.api import load
from msplit.benchmark.benchmark import bench
from msplit.cost.profile import Workload
from msplit.engines.base import Job, TensorFlowOptions
from msplit.engines.tensorflow.cluster import Node, canonical, places
from msplit.engines.tensorflow.engine import ENGINE
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import EngineError, LoadError, MsplitError
from msplit.inputs.make import feeds_for
from msplit.run.prepare import prepare
from msplit.run.request import RunRequest
from msplit.verify.results import Settings
from tests.campaign import examples
from tests.cli.runner import SAMPLES, fine, msplit
from tests.engines.tensorflow import models

QUICK = Settings(duration=0, warmup=0, min_rounds=1, builds=1)
TOWERS = SAMPLES / "towers_small.pb"
SHORT = ("--measure", "duration=0", "--measure", "warmup=0", "--measure", "builds=1", "--measure", "min-iters=1")


def by_tower(node: Node) -> str | None:
    """Tower k on the k-th CPU device."""
    scope = node.name.partition("/")[0]
    return f"/cpu:{scope.rpartition('_')[2]}" if scope.startswith("tower_") else None


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (None, ""), ("", ""), ("/gpu:1", "/device:GPU:1"), ("/device:gpu:*", "/device:GPU:0"), ("cpu:3", "/device:CPU:3"),
        ("/job:localhost/replica:0/task:0/device:CPU:2", "/device:CPU:2"), ("/job:localhost", ""), ("/GPU", "/device:GPU:0"),
    ],
)  # fmt: skip
def test_devices_as_people_write_them(text: str | None, device: str) -> None:
    assert canonical(text) == device
    assert canonical(device) == device


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (3, "no device"), ("gpu one", "no device"), ("/tpu:0", "kinds CPU, GPU"), ("/gpu:1024", "largest number"),
        ("/job:worker/task:1/gpu:0", "task of a cluster"), ("/task:2/cpu:0", "task of a cluster"), ("/gpu:1\n", "no device"),
    ],
)  # fmt: skip
def test_what_is_no_device_is_refused_with_its_node(text: Any, why: str) -> None:
    with pytest.raises(MsplitError) as told:
        places(load(TOWERS), lambda _: text, "mine:place")
    assert why in str(told.value)
    assert "node 'id_0'" in str(told.value)
    assert told.value.where == "mine:place"


@pytest.mark.tf
def test_a_function_for_tensorflows_own_device_scopes_places_alike(tmp_path: Path) -> None:
    """What `tf.train.replica_device_setter`, and a function of an operation, give each node inside of TensorFlow, it gets here, too."""
    tf = tensorflow()
    v1 = tf.compat.v1
    flat = load(SAMPLES / "training.meta")
    setter = v1.train.replica_device_setter(
        ps_tasks=1, ps_device="/device:CPU:1", worker_device="/device:CPU:2", merge_devices=False
    )

    def by_type(op: Any) -> str:
        return "/device:CPU:3" if op.type == "MatMul" else f"/cpu:{len(op.inputs) % 2}"

    for function in (setter, by_type):
        found = places(flat, function)
        with v1.Graph().as_default() as graph, v1.device(function):
            tf.graph_util.import_graph_def(flat.model.graph_def, name="")
        for node, name in enumerate(flat.graph.names):
            if not (
                flat.host[node] or flat.graph.devices[node] or "_class" in flat.graph.attrs[node]
            ):  # which goes first
                theirs = graph.get_operation_by_name(name).device
                assert found.devices[found.ids[node]] == canonical(theirs), name


@pytest.mark.tf
@settings(max_examples=examples(6, 200), deadline=None)
@given(seed=st.integers(0, 1 << 30), kinds=st.sampled_from([("CPU",), ("CPU", "GPU")]))
def test_any_placement_gives_the_same_outputs_and_the_log_has_it(seed: int, kinds: tuple[str, ...]) -> None:
    flat = load(TOWERS)
    draw = np.random.default_rng(seed)
    given_to: dict[str, str] = {}

    def anyhow(node: Node) -> str:
        given_to[node.name] = f"/device:{draw.choice(kinds)}:{draw.integers(4)}"
        return given_to[node.name]

    found = places(flat, anyhow)
    feeds = feeds_for(flat, Workload(batch=4), seed=0)
    plain = Job(flat, np.zeros(len(flat), np.int32), 1, feeds)
    placed = Job(flat, found.ids, len(found.devices), feeds, tensorflow=TensorFlowOptions(devices=found.devices))
    outputs = []
    for job in (plain, placed):
        executable = ENGINE.build(job)
        outputs.append(executable.step(feeds))
        executable.close()
    for name, value in outputs[0].items():
        np.testing.assert_allclose(outputs[1][name], value, rtol=1e-5)
    log = {one.name: one for one in ENGINE.placement(placed)}
    products = {node.name: node.op for node in flat.model.graph_def.node if node.op == "MatMul"}
    assert products.keys() <= log.keys()
    for name in products:
        assert (log[name].op, log[name].asked) == ("MatMul", given_to[name])
        there = tensorflow().config.list_physical_devices("GPU") or "GPU" not in given_to[name]
        assert log[name].device == (given_to[name] if there else "/device:CPU:0")


@pytest.mark.tf
@pytest.mark.parametrize("resource", [False, True])
def test_a_variable_is_where_its_handle_is_whoever_reads_or_writes_it_elsewhere(resource: bool) -> None:
    flat, _, _ = models.training(resource=resource)
    found = places(flat, lambda node: "/cpu:1" if node.op in ("VarHandleOp", "VariableV2") else "/cpu:2")
    own = TensorFlowOptions(devices=found.devices, soft=False)
    draw = np.random.default_rng(0)
    feeds = {name: draw.random((4, width), np.float32) for name, width in (("a", 3), ("b", 3), ("y", 1))}
    job = Job(flat, found.ids, len(found.devices), feeds, tensorflow=own)
    executable = ENGINE.build(job)
    losses = [float(executable.step(feeds)["loss"]) for _ in range(5)]
    executable.close()
    assert losses == sorted(losses, reverse=True)
    log = ENGINE.placement(job)
    touching = [
        one for one in log if one.op in ("ReadVariableOp", "ResourceApplyGradientDescent", "ApplyGradientDescent")
    ]
    assert touching
    assert {(one.asked, one.device) for one in touching} == {("/device:CPU:2", "/device:CPU:1")}
    assert {one.device for one in log if one.op == "MatMul"} == {"/device:CPU:2"}


@pytest.mark.tf
def test_prepare_runs_the_placement() -> None:
    runner = prepare(TOWERS, place=by_tower, batch=4, settings=QUICK)
    assert runner.label == "TensorFlow, placed by by_tower"
    runner.close()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_places.py").write_text(
        "def towers(node):\n    return '/gpu:7' if node.name.startswith('tower_1/') else '/cpu:1'\n"
        "def broken(node):\n    return 1 // 0\n"
    )
    (tmp_path / "list.json").write_text('{"schema_version": 1, "devices": ["/cpu:0"]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.tf
def test_bench_places_by_a_function_and_shows_the_log(mine: Path) -> None:
    if tensorflow().config.list_physical_devices("GPU"):
        pytest.skip("here GPU 7 may be one")
    done = fine("bench", TOWERS, "--place", "my_places:towers", "--tensorflow", "log-placement", *SHORT, columns=250)
    assert "TensorFlow, placed by my_places:towers" in done.out
    assert "Placement: TensorFlow, placed by my_places:towers" in done.out
    (line,) = (one for one in done.out.splitlines() if one.startswith("tower_1/dense_0/MatMul ") and "GPU" in one)
    assert line.split() == ["tower_1/dense_0/MatMul", "MatMul", "/device:GPU:7", "/device:CPU:0"]
    assert re.search(
        r"\d+ nodes of \d+ are elsewhere than asked, such as tower_1/\S+ on /device:CPU:0 instead of /device:GPU:7",
        done.out,
    )
    hard = msplit("bench", TOWERS, "--place", "my_places:towers", "--tensorflow", "soft-placement=no", *SHORT)
    assert (hard.code, hard.out) == (2, "")
    assert "was explicitly assigned to /device:GPU:7" in hard.err
    assert "leave out --tensorflow soft-placement=no" in hard.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--place", "my_places:broken"), "raised ZeroDivisionError"),
        (("--place", "my_places:nothing"), "has no function 'nothing'"),
        (("--place", "no_such_module:place"), "there is no module 'no_such_module'"),
        (("--place", "my_places"), "is no file and names no function"),
        (("--place", "my_places.py"), "the placement is not valid JSON"),
        (("--place", "list.json"), "`devices` is not an object"),
        (("--place", "my_places:towers", "--streams", "2"), "leave one of the two out"),
        (("--tensorflow", "log-placement", "--batch", "1,2"), "--batch excludes --tensorflow log-placement="),
    ],
)
def test_what_can_not_be_a_placement_is_told(options: tuple[str, ...], said: str, mine: Path) -> None:
    done = msplit("bench", TOWERS, *options, *SHORT)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err


def test_only_tensorflow_places() -> None:
    from msplit.run.variants import choose_engine

    assert choose_engine(RunRequest.of(place=by_tower))[0] is ENGINE
    with pytest.raises((EngineError, LoadError), match="place is for TensorFlow"):
        bench(TOWERS, engine="cuda", device="cpu", place=by_tower)


@pytest.mark.tf
def test_assign_tells_the_device_of_every_node_and_bench_puts_it_there(tmp_path: Path) -> None:
    arguments = ("assign", TOWERS, "--streams", "2", "--emit", "placement", tmp_path / "devices.json", "--explain")
    told = fine(*arguments, "--format", "json").json["placement"]
    written = json.loads((tmp_path / "devices.json").read_text())["devices"]
    assert {one["node"]: one["device"] for one in told} == written
    assert {one["stream"] for one in told} == {None, 0, 1}
    request = {"place": str(tmp_path / "devices.json"), "log_placement": True, "settings": QUICK}
    log = {one.name: one.asked for one in list(bench(TOWERS, **request).placements.values())[-1]}
    products = [name for name in log if name.endswith("/MatMul")]
    assert products
    assert all(log[name] == written[name] for name in products)
    assert all(one["rule"] and one["why"] for one in told)
    out = fine(*arguments, "--force", columns=300).out
    assert any(
        line.split()[:4] == ["tower_0/embedding/lookup/axis", "Const", "-", "/device:CPU:0"]
        for line in out.splitlines()
    )
