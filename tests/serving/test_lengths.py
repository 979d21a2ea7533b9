"""Rows of any length in pools and servers: requests share steps, and each gets what TensorFlow gives at its own length."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.errors import EngineError, MsplitError
from msplit.serving import triton
from msplit.serving.loadtest import corpus
from msplit.serving.pool.settings import PoolSettings
from tests import forked
from tests.campaign import examples
from tests.run.test_lengths import LONGEST, SIMULATED, TOLERANCE, D, attention, model, norm, places, row
from tests.serving.server.running import Server, start
from tests.serving.server.test_server import arrays, request_for

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

LENGTHS, BATCHES = (2, 4, LONGEST), (1, 4)
SPECIAL = (np.nan, np.inf, -np.inf, 3e38, -0.0)
Feeds = dict[str, Any]


class Right:
    """What TensorFlow makes of requests, at their own length."""

    def __init__(self, flat: Any) -> None:
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(tf.compat.v1.GraphDef.FromString(Path(flat.model.path).read_bytes()), name="")
        self.session, self.names = tf.compat.v1.Session(graph=graph), [end.name for end in flat.outputs]

    def __call__(self, feeds: Feeds, got: Feeds) -> None:
        """Holds an answer against it."""
        fed = {f"{name}:0": value for name, value in feeds.items()}
        expected = self.session.run({name: f"{name}:0" for name in self.names}, fed)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), name
            np.testing.assert_allclose(got[name], value, **TOLERANCE)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model(tmp_path_factory.mktemp("model"), (places, attention, norm))


@pytest.fixture(scope="module")
def right(flat: Any) -> Right:
    return Right(flat)


@pytest.fixture(scope="module")
def built(flat: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "encoder"
    msplit.build(flat, path, batches=BATCHES, lengths=LENGTHS, **SIMULATED)
    return path


@pytest.fixture(scope="module")
def pool(built: Path) -> Iterator[Any]:
    with msplit.pool(built, groups=2, max_rows=12) as opened:
        yield opened


def request(rows: int, length: int, seed: int) -> Feeds:
    some = [row(length, 100 * seed + number) for number in range(max(rows, 1))]
    return {name: np.concatenate([one[name] for one in some])[:rows] for name in ("x", "mask")}


def answered(pool: Any, requests: Sequence[Feeds], right: Right) -> None:
    """All of these wait together, so that they share steps, and each is right."""
    with pool._steps.paused(pool._driver.drive):
        waiting = [pool.submit(one) for one in requests]
    for future, one in zip(waiting, requests, strict=True):
        right(one, future.result(60))


SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, LONGEST)), min_size=1, max_size=8)


@given(SIZES, st.integers(0, 1000))
@settings(max_examples=examples(15, 400), deadline=None)
def test_requests_of_any_rows_and_length_share_steps(
    right: Right, pool: Any, sizes: list[tuple[int, int]], seed: int
) -> None:
    """Those of more rows than a step has are cut, and those of none are answered with none."""
    answered(pool, [request(rows, length, seed + number) for number, (rows, length) in enumerate(sizes)], right)


@given(SIZES, st.sampled_from(SPECIAL), st.sampled_from(["x", "mask"]), st.data())
@settings(max_examples=examples(10, 300), deadline=None)
def test_special_values_reach_no_other_row(
    right: Right, pool: Any, sizes: list[tuple[int, int]], value: float, name: str, data: st.DataObject
) -> None:
    """Not from the padding either, which is made of them where they come first."""
    requests = [request(rows, length, number) for number, (rows, length) in enumerate(sizes)]
    spoilt = [one for one in requests if one[name].size and data.draw(st.booleans())]
    for one in spoilt:
        one[name][:, data.draw(st.sampled_from([0, -1]))] = value
    with pool._steps.paused(pool._driver.drive):
        waiting = [pool.submit(one) for one in requests]
    for future, one in zip(waiting, requests, strict=True):
        got, alone = future.result(60), pool.step(one)
        for output in got:  # in whatever company, and padded to whatever length
            np.testing.assert_allclose(got[output], alone[output], **TOLERANCE)
        if not any(one is other for other in spoilt):
            right(one, got)


def test_every_length_in_every_company(right: Right, pool: Any) -> None:
    before = dict(pool.scheduler.steps_of)
    assert before.keys() == set(itertools.product(LENGTHS, BATCHES))
    for length in range(1, LONGEST + 1):
        answered(pool, [request(1, length, 7), request(2, max(length // 2, 1), 8), request(9, length, 9)], right)
        right(request(1, length, 7), pool.step(request(1, length, 7)))
    assert all(count > before[size] for size, count in pool.scheduler.steps_of.items())
    assert (pool.lengths, pool.batches) == (LENGTHS, BATCHES)
    assert {name: port.shape for name, port in pool.inputs.items()} == {"x": (None, None, D), "mask": (None, None)}
    assert pool.outputs["every"].shape == (None, None, D)


def test_a_long_request_makes_no_short_one_longer(right: Right, pool: Any) -> None:
    before = dict(pool.scheduler.steps_of)
    answered(pool, [request(1, 2, 1), request(2, 8, 2), request(1, 1, 3), request(1, 4, 4)], right)
    made = {size: count - before[size] for size, count in pool.scheduler.steps_of.items() if count > before[size]}
    assert made == {(2, 4): 1, (8, 4): 1}, "four rows hold two of length 8, and one of 4 in place of padding"


def test_what_is_no_length(pool: Any) -> None:
    x, mask = request(2, LONGEST, 0).values()
    longer = np.concatenate([x, x], 1)
    for feeds, said in (
        (
            {"x": longer, "mask": np.concatenate([mask, mask], 1)},
            r"rows are 16 long, and lengths up to 8.*--lengths",
        ),
        ({"x": x[:, :0], "mask": mask[:, :0]}, "rows are 0 long"),
        ({"x": x, "mask": mask[:, :3]}, "no rows of one length"),
        ({"x": x, "mask": mask[:1]}, "different numbers of rows"),
        ({"x": x[:, :3, :2], "mask": mask[:, :3]}, r"prepared as float32 \(2, 3, 4\)"),
        ({"x": x.astype(np.float64), "mask": mask}, "float64"),
        ({"x": x, "mask": mask, "lengths": np.ones(2, np.int32)}, "not the model's"),
        ({"x": x, "mask": mask, "other": mask}, "no input 'other'"),
        ({"x": x}, "no rows of one length"),
        ({"x": x[:, :, 0], "mask": mask}, "prepared as float32"),
        (dict(zip(("x", "mask"), request(13, 2, 0).values(), strict=True)), "max_rows"),
        ([x, mask], "mapping"),
    ):
        with pytest.raises(EngineError, match=f"(?s){said}"):
            pool.submit(feeds)


def test_a_model_with_lengths(flat: Any, right: Right) -> None:
    with msplit.pool(flat, lengths=[7], batches=[2], groups=1, **SIMULATED) as made:
        assert (made.lengths, made.polls) == ((7,), True)
        answered(made, [request(rows, length, rows) for rows, length in ((1, 3), (5, 2), (1, 7))], right)
        with pytest.raises(EngineError, match="takes no other values"):
            made.update(flat)
        on_device = made.submit(request(2, 5, 1), on_device=True).result()
        right(request(2, 5, 1), {name: value.numpy() for name, value in on_device.items()})


def test_what_lengths_do_not_go_with(flat: Any, built: Path) -> None:
    for own, said in (
        ({"model": built, "lengths": [4]}, "has the lengths that it was built with: 2, 4, 8"),
        ({"model": flat, "lengths": [0], **SIMULATED}, "length"),
        ({"model": flat, "lengths": [4], "engine": "tensorflow", "device": "cpu"}, "any length"),
        ({"model": flat, "lengths": [4], "shared": ["mask"], **SIMULATED}, "lengths excludes shared"),
        ({"model": "sample_graphs/mmoe_small.pb", "lengths": [4], **SIMULATED}, "leaves the length"),
    ):
        with pytest.raises(MsplitError, match=said):
            msplit.pool(**own)


def test_what_is_sent_under_load_and_exported_has_lengths(built: Path, pool: Any, tmp_path: Path) -> None:
    base = corpus.of_build(built)
    assert corpus.lengths_for(pool, LONGEST, 3) == [LONGEST] * 3, "an output tells them"
    plain = SimpleNamespace(outputs={"last": pool.outputs["last"]})
    assert corpus.lengths_for(plain, LONGEST, 3) == [LONGEST, 4, 1]
    made = corpus.of_ports(base, pool.inputs, 2, 3, 0, [LONGEST, 4, 1])
    assert [one["x"].shape for one in made] == [(2, LONGEST, D), (2, 4, D), (2, 1, D)]
    assert all(one.keys() == {"x", "mask"} and pool.step(one) for one in made)
    text = (triton.export(built, tmp_path / "models").path / "config.pbtxt").read_text()
    for said in ("max_batch_size: 4", "dims: [-1, 4]", "dims: [-1]", "preferred_batch_size: [1, 4]"):
        assert said in text
    assert '"lengths"' not in text.partition("parameters")[0]
    with pytest.raises(MsplitError, match="lengths of a build"):
        triton.export("sample_graphs/mmoe_small.pb", tmp_path / "other", PoolSettings(lengths=[4]))


def test_processes_take_rows_of_any_length(right: Right, built: Path) -> None:
    with forked.instead(forked.ENGINE), msplit.pool(built, workers=2, groups=1, max_rows=12) as made:
        requests = [request(rows, length, rows) for rows, length in itertools.product((0, 1, 3, 9), (1, 3, 8))]
        for future, one in [(made.submit(one), one) for one in requests]:
            right(one, future.result(60))
        with pytest.raises(EngineError, match="rows are 9 long"):
            made.step(request(1, 9, 0))
        assert (made.lengths, made.stats().answered) == (LENGTHS, 18)  # of nine rows there are three parts


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Server]:
    pytest.importorskip("grpc")
    pytest.importorskip("prometheus_client")
    running = start("--model", f"encoder={built}", "--groups", "2", "--pool", "max-rows=12")
    assert ", batches 1,4, lengths 2,4,8" in running.said
    yield running
    running.process.kill()
    running.process.communicate()


def test_a_server_over_grpc(server: Server, right: Right) -> None:
    import grpc
    from tensorflow_serving.apis import prediction_service_pb2_grpc

    with grpc.insecure_channel(server.address) as channel:
        predict = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict
        requests = [request(rows, length, rows) for rows, length in itertools.product((1, 2, 9), (1, 3, 4, 8))]
        for one, call in [(one, predict.future(request_for("encoder", one), timeout=60)) for one in requests]:
            right(one, arrays(call.result()))
        for length, said in ((9, "lengths up to 8 were prepared"), (0, "rows are 0 long")):
            with pytest.raises(grpc.RpcError) as refused:
                predict(request_for("encoder", request(1, length, 0)), timeout=60)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert said in refused.value.details()


def test_a_server_over_http(server: Server, right: Right) -> None:
    _, about = server.http("/v1/models/encoder/metadata")
    found = about["metadata"]["signature_def"]["signature_def"]["serving_default"]
    sizes = {name: [one["size"] for one in end["tensor_shape"]["dim"]] for name, end in found["inputs"].items()}
    assert sizes == {"x": ["-1", "-1", str(D)], "mask": ["-1", "-1"]}
    _, about = server.http("/v2/models/encoder")
    shapes = {one["name"]: one["shape"] for one in (*about["inputs"], *about["outputs"])}
    assert (shapes["x"], shapes["every"], shapes["last"]) == ([-1, -1, D], [-1, -1, D], [-1, D])
    for length in (1, 5, 8):
        one = request(3, length, length)
        rows = [{name: value[row].tolist() for name, value in one.items()} for row in range(3)]
        status, answer = server.http("/v1/models/encoder:predict", {"instances": rows})
        assert status == 200
        names = answer["predictions"][0]
        kinds = {name: np.int64 if name == "best" else np.float32 for name in names}
        right(one, {name: np.array([row[name] for row in answer["predictions"]], kinds[name]) for name in names})
        inputs = [
            {"name": name, "datatype": "FP32", "shape": list(value.shape), "data": value.ravel().tolist()}
            for name, value in one.items()
        ]
        status, answer = server.http("/v2/models/encoder/infer", {"inputs": inputs})
        assert status == 200
        ends = {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer["outputs"]}
        right(one, {name: value.astype(kinds[name]) for name, value in ends.items()})
    x, mask = request(1, 9, 0).values()
    uneven = [{"x": x[0, :2].tolist(), "mask": mask[0, :2].tolist()}, {"x": x[0].tolist(), "mask": mask[0].tolist()}]
    for rows, said in (([uneven[1]], "lengths up to 8 were prepared"), (uneven, "different lengths")):
        status, answer = server.http("/v1/models/encoder:predict", {"instances": rows})
        assert (status, said in json.dumps(answer)) == (400, True), answer
    counts = {line.partition("{")[2] for line in server.text("/metrics").splitlines() if "bucket_steps_total{" in line}
    assert {(f'rows="{rows}"', f'length="{length}"') for length, rows in itertools.product(LENGTHS, BATCHES)} == {
        tuple(sorted(one for one in line.split("}")[0].split(",") if one.startswith(("rows", "length")))[::-1])
        for line in counts
    }
