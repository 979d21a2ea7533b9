"""One user beside many items: pools, builds and the server take one row of what is shared, or equal ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.cuda.engine import CudaEngine
from msplit.errors import MsplitError
from msplit.run import build as builds
from msplit.serving.server import messages, tensors
from tests import forked
from tests.cli.runner import msplit as run_msplit
from tests.engines.cuda.cases import graph_of, outputs_of_tensorflow
from tests.engines.cuda.passes.test_shared_rows import USER, of_users, ranked, ranker, said, words
from tests.run.test_build import change
from tests.serving.server.running import start

pytest.importorskip("torch")
pytestmark = pytest.mark.tf

SHARED: dict[str, Any] = {"engine": "cuda", "device": "cpu", "effort": "fast", "shared": ["user_*"]}

Feeds = Mapping[str, Any]


_forked = forked.always(forked.instead, forked.TENSORFLOW)


@pytest.fixture(scope="module")
def flat() -> Any:
    return graph_of(ranker, outputs=["y", "who"])


@pytest.fixture(scope="module")
def file(flat: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(flat.model.path, tmp_path_factory.mktemp("model") / "ranker.pb"))


@pytest.fixture(scope="module")
def build(file: Path, flat: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "ranker.build"
    msplit.build(flat, path, batches=[1, 4, 16], **SHARED)
    return path


def one_row(feeds: Feeds) -> dict[str, Any]:
    return {name: value[:1] if name.startswith("user") else value for name, value in feeds.items()}


def assert_right(flat: Any, found: Feeds, feeds: Feeds) -> None:
    for name, value in outputs_of_tensorflow(flat, feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_runner_takes_any_number_of_rows_of_one_user(flat: Any) -> None:
    with msplit.prepare(flat, batch=8, streams=4, **SHARED) as model:
        for rows in (8, 1, 3, 20):
            feeds = ranked(rows)
            assert_right(flat, model.step(feeds), feeds)
            assert_right(flat, model.step(one_row(feeds)), feeds)


@pytest.mark.parametrize("workers", [None, 1])
def test_a_pool_joins_requests_of_one_user_and_keeps_users_apart(flat: Any, build: Path, workers: int | None) -> None:
    with msplit.pool(build, device="cpu", groups=2, workers=workers, max_delay_us=2000.0) as pool:
        requests = [ranked(rows) for rows in (3, 16, 1, 40, 7)]
        halves = [{name: value[:4] for name, value in requests[1].items()} for _ in range(4)]
        every = [*requests, *halves]
        going = [pool.submit(one_row(feeds) if number % 2 else feeds) for number, feeds in enumerate(every)]
        for feeds, future in zip(every, going, strict=True):
            assert_right(flat, future.result(60), feeds)
        wrong = {**requests[0], "user_age": np.arange(3, dtype=np.float32)[:, None]}
        with pytest.raises(MsplitError, match="rows of input user_age differ"):
            pool.step(wrong)
        two = {**one_row(requests[0]), "user_clicks": requests[0]["user_clicks"][:2]}
        assert_right(flat, pool.step(two), requests[0])


@pytest.fixture(scope="module")
def text() -> Any:
    return graph_of(words, outputs=["y"])


@pytest.fixture(scope="module")
def text_build(text: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.build"
    msplit.build(text, path, batches=[1, 4, 16], **SHARED)
    return path


def assert_asked_of_text(step: Callable[[Feeds], Feeds], text: Any) -> None:
    requests = [said(rows) for rows in (3, 16, 1, 40, 7)]
    for feeds in requests:
        for sent in (feeds, one_row(feeds)):
            assert_right(text, step(sent), feeds)
    with pytest.raises(MsplitError, match="rows of input user_city differ"):
        step({**requests[0], "user_city": np.array([b"a", b"a", b"b"], object)})


@pytest.mark.parametrize("threads", [None, 2])
def test_a_pool_takes_text_of_the_user_once_or_repeated(text: Any, text_build: Path, threads: int | None) -> None:
    with msplit.pool(text_build, device="cpu", groups=2, host_threads=threads) as pool:
        assert_asked_of_text(pool.step, text)


def test_a_build_takes_text_of_the_user_once_or_repeated(text: Any, text_build: Path) -> None:
    with msplit.open(text_build) as model:
        assert_asked_of_text(model.step, text)


def test_another_process_takes_text_of_the_user_once_or_repeated(text: Any) -> None:
    with msplit.pool(text, batches=(4, 16), groups=1, workers=1, **SHARED) as pool:
        assert_asked_of_text(pool.step, text)


def test_a_runner_takes_text_of_the_user_once_or_repeated(text: Any) -> None:
    with msplit.prepare(text, batch=16, streams=2, **SHARED) as model:
        assert_asked_of_text(model.step, text)


USERS, INDEX = 5, "(user of each row)"


@pytest.fixture(scope="module")
def build_of_users(flat: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "ranker.build"
    msplit.build(flat, path, batches=[1, 4, 16], users=USERS, **SHARED)
    return path


def of_several(rows: int, users: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of so many users, whose rows do not lie together."""
    of_row = np.random.default_rng([rows, users, seed]).integers(0, users, rows)
    return of_users(ranked(rows, users=rows), of_row, *USER)


def test_a_runner_takes_any_number_of_users(flat: Any) -> None:
    requests = [of_several(rows, users) for rows, users in ((8, 3), (8, 8), (1, 1), (5, 2), (40, 40), (40, 2))]
    for batch in (8, 1):
        with msplit.prepare(flat, batch=batch, streams=4, users=3, **SHARED) as model:
            for feeds in requests:
                assert_right(flat, model.step(feeds), feeds)
            for rows in (8, 3, 20):
                assert_right(flat, model.step(one_row(ranked(rows))), ranked(rows))
            for rows in (8, 5):
                other = {"age" if name == "user_age" else name: value for name, value in of_several(rows, 2).items()}
                with pytest.raises(MsplitError, match="no value for input user_age"):
                    model.step(other)
                with pytest.raises(MsplitError, match="input user_age"):
                    model.step({**of_several(rows, 2), "user_age": [[1.0]] * rows})
            with pytest.raises(MsplitError, match="no value for input item"):
                model.step(
                    {
                        "(user of each row)": np.zeros(8, np.int32),
                        **{k: v for k, v in requests[0].items() if k != "item"},
                    }
                )
            with pytest.raises(MsplitError, match=r"input user_age .*\(\d,\)"):
                model.step({**requests[0], "user_age": requests[0]["user_age"][:, 0]})
            assert model.step({name: value[:0] for name, value in requests[0].items()})["y"].shape == (0, 1)


def test_an_opened_build_takes_any_number_of_users(flat: Any, build_of_users: Path) -> None:
    with msplit.open(build_of_users) as model:
        for rows, users in ((16, 5), (16, 16), (4, 4), (1, 1), (3, 2), (50, 7)):
            feeds = of_several(rows, users)
            assert_right(flat, model.step(feeds), feeds)
            assert_right(flat, model.step(one_row(ranked(rows))), ranked(rows))


@pytest.mark.parametrize("workers", [None, 1])
def test_a_pool_joins_requests_of_several_users(flat: Any, build_of_users: Path, workers: int | None) -> None:
    with msplit.pool(build_of_users, device="cpu", groups=1, workers=workers, max_delay_us=20_000.0) as pool:
        before = pool.stats().steps
        every = [ranked(rows) for rows in (3, 2, 1, 4)]
        going = [pool.submit(one_row(feeds) if number % 2 else feeds) for number, feeds in enumerate(every)]
        for feeds, future in zip(every, going, strict=True):
            assert_right(flat, future.result(60), feeds)
        if workers is None:
            assert pool.stats().steps - before < len(every)
        requests = [of_several(rows, users) for rows, users in ((16, 5), (16, 16), (4, 4), (3, 2), (50, 7), (40, 1))]
        going = [pool.submit(feeds) for feeds in requests]
        for feeds, future in zip(requests, going, strict=True):
            assert_right(flat, future.result(60), feeds)
        with pytest.raises(MsplitError, match="rows of input user_age differ"):
            pool.step({**one_row(requests[0]), "user_age": np.arange(16, dtype=np.float32)[:, None]})
        with pytest.raises(MsplitError, match=r"input user_age has the shape \(2, 1\)"):
            pool.step({**requests[0], "user_age": requests[0]["user_age"][:2]})
        with pytest.raises(MsplitError, match=r"no input '\(user of each row\)'"):
            pool.step({**requests[0], "(user of each row)": np.zeros(16, np.int32)})
        with pytest.raises(MsplitError, match="no value for input user_age"):
            pool.step({name: value for name, value in requests[0].items() if name != "user_age"})
        for sent in (requests[0], one_row(requests[0])):
            assert pool.step({name: value[:0] for name, value in sent.items()})["y"].shape == (0, 1)


def test_many_clients_at_once_get_their_own_users_answers(flat: Any, build_of_users: Path) -> None:
    with msplit.pool(build_of_users, device="cpu", groups=2) as pool, ThreadPoolExecutor(8) as threads:
        every = [ranked(1 + number % 5) for number in range(12)] + [of_several(6, 3, seed) for seed in range(4)]
        answers = [outputs_of_tensorflow(flat, feeds) for feeds in every]

        def ask(number: int) -> None:
            feeds, expected = every[number % len(every)], answers[number % len(every)]
            found = pool.step(one_row(feeds) if number % len(every) < 12 and number % 2 else feeds)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)

        list(threads.map(ask, range(400)))
        stats = pool.stats()
        assert stats.failed == 0
        assert stats.steps < stats.requests


@pytest.mark.parametrize("how", [{}, {"host_threads": 2}, {"workers": 1}])
def test_a_pool_takes_text_of_several_users(text: Any, how: dict[str, Any]) -> None:
    with msplit.pool(text, batches=(16,), groups=1, users=USERS, max_delay_us=5000.0, **how, **SHARED) as pool:
        assert_asked_of_several(pool.step, text)
        going = [(feeds := said(rows), pool.submit(one_row(feeds))) for rows in (3, 2, 1, 5)]
        for feeds, future in going:
            assert_right(text, future.result(60), feeds)


def assert_asked_of_several(step: Callable[[Feeds], Feeds], text: Any) -> None:
    for sizes in ((3, 5), (1, 1), (8, 8), (2, 3, 1, 4, 6), (40, 3)):
        each = [said(rows) for rows in sizes]
        feeds = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
        assert_right(text, step(feeds), feeds)
    for rows in (16, 4, 1, 7):
        assert_right(text, step(one_row(said(rows))), said(rows))


def test_what_is_no_text_is_refused_where_users_are_told_apart(text: Any) -> None:
    with (
        msplit.prepare(text, batch=8, users=2, **SHARED) as model,
        msplit.pool(text, batches=(8,), groups=1, users=2, **SHARED) as pool,
    ):
        for wrong in ([1], None, {}, 2.5):
            feeds = said(8)
            feeds["user_city"][3] = wrong
            for step in (model.step, pool.step):
                with pytest.raises(MsplitError):
                    step(feeds)


def test_text_of_several_users_in_a_build_and_in_a_model(text: Any, tmp_path: Path) -> None:
    msplit.build(text, tmp_path / "words.build", batches=[4, 16], users=USERS, **SHARED)
    with msplit.open(tmp_path / "words.build") as model:
        assert_asked_of_several(model.step, text)
    with msplit.prepare(text, batch=16, streams=2, users=USERS, **SHARED) as model:
        assert_asked_of_several(model.step, text)


@pytest.mark.parametrize("size", [80, 400, 900])
def test_a_build_whose_inputs_are_large_is_verified_with_some_rows(
    flat: Any, tmp_path: Path, monkeypatch: Any, size: int
) -> None:
    monkeypatch.setattr(builds, "LARGEST_REFERENCE", size)  # of 16 rows of 36 bytes
    msplit.build(flat, tmp_path / "ranker.build", batches=[16], users=USERS, **SHARED)
    with msplit.open(tmp_path / "ranker.build") as model, msplit.pool(tmp_path / "ranker.build", device="cpu") as pool:
        feeds = of_several(16, 5)
        assert_right(flat, model.step(feeds), feeds)
        assert_right(flat, pool.step(feeds), feeds)


@pytest.mark.parametrize(
    "once",
    [
        {},
        [],
        {"user_age": 1, "user_clicks": 1},
        {"user_age": 1, "user_clicks": 1, INDEX: [5, 1 << 40]},
        {"user_age": 1, "user_clicks": 1, INDEX: [1 << 40, 16]},
        {"user_age": 1, "user_clicks": 1, INDEX: [0, 16]},
        {"user_age": 1, "user_clicks": 1, INDEX: [5]},
        {"user_age": 1 << 40, "user_clicks": 1, INDEX: [5, 16]},
        {"user_age": "1", "user_clicks": None, INDEX: [5, 16]},
        {"user_age": 1, INDEX: [5, 16]},
        {"user_age": 1, "user_clicks": 1, "none": 1, INDEX: [5, 16]},
    ],
)
def test_a_build_that_says_other_rows_is_damaged(build_of_users: Path, tmp_path: Path, once: Any) -> None:
    path = Path(shutil.copytree(build_of_users, tmp_path / "ranker.build"))
    change(path, "3.json", lambda data: json.dumps({**json.loads(data), "once": once}).encode())
    with pytest.raises(MsplitError):
        msplit.open(path)
    with pytest.raises(MsplitError):
        msplit.pool(path, device="cpu", groups=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"spread": {"StringToHashBucketFast:0 (host)": 0}},
        {"spread": {"nothing": 1}},
        {"spread": {"StringToHashBucketFast:0 (host)": 1 << 40}},
        {"spread": {"StringToHashBucketFast:0 (host)": "many"}},
        {"reads": ["nobody"]},
        {"reads": []},
        {"once": None},
        {"once": {"feeds": {}, "fetches": {}, "file": "none.pb"}},
        {"counted": ["nobody", 1]},
    ],
)
def test_a_build_whose_host_makes_other_rows_of_users_is_damaged(text_build: Path, tmp_path: Path, wrong: Any) -> None:
    path = Path(shutil.copytree(text_build, tmp_path / "words.build"))
    name = max(one.name for one in path.glob("*.host.json") if json.loads(one.read_bytes())["once"])
    change(path, name, lambda data: json.dumps({**json.loads(data), **wrong}).encode())
    with pytest.raises(MsplitError):
        msplit.open(path)


def test_a_build_has_as_many_users_as_it_was_built_for(build_of_users: Path, build: Path) -> None:
    for path, users in ((build_of_users, 6), (build, 2)):
        with pytest.raises(MsplitError, match=r"was built for [15] users in a step, not [62]"):
            msplit.pool(path, device="cpu", shared=["user_*"], users=users)


def test_an_opened_build_is_what_was_built(flat: Any, build: Path) -> None:
    with msplit.open(build) as model:
        for rows in (16, 5, 33):
            feeds = ranked(rows)
            assert_right(flat, model.step(one_row(feeds)), feeds)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shared": ["users_*"]}, "no input is called 'users_\\*'"),
        ({"shared": ["*"]}, "no other input has rows"),
        ({"devices": (0, 1)}, "shared excludes devices"),
        ({"engine": "tensorflow"}, "TensorFlow computes all rows"),
        ({"shared": "user_*"}, "shared: 'user_\\*' is no list"),
        ({"shared": [], "users": 2}, "a step has 2 users, and no input is shared"),
        ({"users": 0}, "the number of users is 0"),
        ({"users": 1.5}, "the number of users is 1.5, which is no integer"),
    ],
)
def test_what_can_not_be_shared_is_refused(flat: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MsplitError, match=said):
        msplit.prepare(flat, batch=4, **{**SHARED, **options})


@pytest.mark.parametrize("run", [msplit.prepare, msplit.pool, msplit.bench])
def test_where_tensorflow_is_chosen_it_is_not_left_out_silently(flat: Any, run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(CudaEngine, "unavailable", lambda self: "there is no GPU")
    with pytest.raises(MsplitError, match=r"shared is for the cuda engine; .*there is no GPU"):
        run(flat, shared=["user_*"], **({} if run is msplit.pool else {"batch": 4}))


def test_a_rules_file_names_what_is_shared(flat: Any, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("version: 1\nrules: [manual]\nshared: ['user_*']\n")
    how = {**SHARED, "shared": [], "ruleset": str(rules)}
    with msplit.prepare(flat, batch=8, users=2, **how) as model:
        feeds = of_several(8, 2)
        assert_right(flat, model.step(feeds), feeds)
    with pytest.raises(MsplitError, match=r"no input is called 'nobody'"):
        msplit.prepare(flat, batch=8, **{**how, "shared": ["nobody"]})
    quick = msplit.Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)
    done = msplit.bench(flat, batch=8, settings=quick, engine="tensorflow", device="cpu", ruleset=str(rules))
    assert any("`shared` of the rules is for the cuda engine" in note for note in done.notes), done.notes
    rules.write_text("version: 1\nrules: [manual]\nshared:\n  - user_age\n  - users_*\n")
    with pytest.raises(MsplitError, match=r"no input is called 'users_\*'") as caught:
        msplit.prepare(flat, batch=8, **how)
    assert caught.value.where == f"{rules}:5"


def test_a_build_shares_what_it_was_built_to(flat: Any, build: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.build"
    msplit.build(flat, whole, batches=[4], **{**SHARED, "shared": []})
    with pytest.raises(MsplitError, match="was built without shared rows"):
        msplit.pool(whole, device="cpu", shared=["user_*"])
    with msplit.pool(build, device="cpu", shared=["user_*"], groups=1) as pool:
        assert_right(flat, pool.step(one_row(ranked(3))), ranked(3))


def test_rows_that_are_mixed_are_named() -> None:
    def mixing(tf: Any, v1: Any) -> None:
        user, item = (v1.placeholder(tf.float32, [None, 3], name=name) for name in ("user", "item"))
        tf.identity(item - tf.reduce_mean(user, 0, name="over_the_batch"), name="y")

    with pytest.raises(MsplitError, match="over_the_batch"):
        msplit.prepare(graph_of(mixing, outputs=["y"]), batch=4, **{**SHARED, "shared": ["user"]})


def test_bench_has_the_model_as_it_is_beside_it(flat: Any) -> None:
    quick = msplit.Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)
    done = msplit.bench(flat, batch=8, streams=(1, 2), compare_tensorflow=False, settings=quick, **SHARED)
    assert "msplit, 2 streams, all rows" in [one.label for one in done.result.variants]
    assert not done.result.failed


@pytest.mark.parametrize(
    ("batch", "note"), [(12, "the 12 rows of a step are of 3 users"), (4, "4 rows are fewer than two for each of 3")]
)
def test_bench_has_steps_of_several_users(flat: Any, batch: int, note: str) -> None:
    quick = msplit.Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)
    done = msplit.bench(flat, batch=batch, users=3, streams=(1, 2), compare_tensorflow=False, settings=quick, **SHARED)
    assert not done.result.failed
    assert any(note in one for one in done.notes), done.notes


@pytest.mark.parametrize("of", ["one user", "several users", "a build"])
def test_a_load_test_sends_requests_of_one_user(of: str, file: Path, build: Path) -> None:
    ours = (file, "--shared", "user_*", "--batch", "4,16", "--cuda", "effort=fast")
    model = {"one user": ours, "several users": (*ours, "--users", "3"), "a build": (build,)}[of]
    measure = "rows=8,repeat=1,seconds=0.3,warmup=0.1"
    how = ("--device", "cpu", "--clients", "2", "--measure", measure, "--format", "json")
    done = run_msplit("load", *model, *how)
    assert done.code == 0, done.err


def test_clients_that_repeat_the_user_are_answered(flat: Any, build: Path) -> None:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("uvicorn")
    running = start(build, "--device", "cpu", "--model_name", "ranker")
    try:
        for rows in (1, 5, 20):
            feeds = ranked(rows)
            for sent in (feeds, one_row(feeds)):
                body = {"inputs": {name: value.tolist() for name, value in sent.items()}}
                status, found = running.http("/v1/models/ranker:predict", body)
                assert status == 200, found
                assert_right(flat, {name: np.asarray(value) for name, value in found["outputs"].items()}, feeds)
        request = messages.PredictRequest()
        request.model_spec.name = "ranker"
        for name, value in {**ranked(3), "user_age": np.arange(3, dtype=np.float32)[:, None]}.items():
            tensors.to_tensor_proto(value, request.inputs[name], as_content=True)
        with grpc.insecure_channel(running.address) as channel:
            ask = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
            with pytest.raises(grpc.RpcError) as caught:
                ask(request.SerializeToString(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "rows of input user_age differ" in caught.value.details()
            request.inputs["user_age"].Clear()
            tensors.to_tensor_proto(ranked(3)["user_age"], request.inputs["user_age"], as_content=True)
            answer = messages.PredictResponse.FromString(ask(request.SerializeToString(), timeout=60))
            assert set(answer.outputs) == {"y", "who"}
    finally:
        assert running.stop()[0] == 0


def test_clients_of_several_users_share_steps(flat: Any, build_of_users: Path) -> None:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("uvicorn")
    running = start(build_of_users, "--device", "cpu", "--model_name", "ranker")
    try:
        every = [*map(ranked, (1, 5, 16, 3)), *(of_several(rows, users) for rows, users in ((16, 5), (6, 6), (40, 9)))]
        with ThreadPoolExecutor(4) as threads, grpc.insecure_channel(running.address) as channel:
            ask = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")

            def by_rest(feeds: Feeds) -> Feeds:
                body = {"inputs": {name: value.tolist() for name, value in feeds.items()}}
                status, found = running.http("/v1/models/ranker:predict", body)
                assert status == 200, found
                return {name: np.asarray(value) for name, value in found["outputs"].items()}

            def by_grpc(feeds: Feeds) -> Feeds:
                request = messages.PredictRequest()
                request.model_spec.name = "ranker"
                for name, value in feeds.items():
                    tensors.to_tensor_proto(value, request.inputs[name], as_content=True)
                answer = messages.PredictResponse.FromString(ask(request.SerializeToString(), timeout=60))
                return {
                    name: np.array(value.float_val).reshape([dim.size for dim in value.tensor_shape.dim])
                    for name, value in answer.outputs.items()
                }

            for how in (by_rest, by_grpc):
                sent = [*every, *map(one_row, every[:4])] * 3
                for feeds, found in zip([*every, *every[:4]] * 3, threads.map(how, sent), strict=True):
                    assert_right(flat, found, feeds)
    finally:
        assert running.stop()[0] == 0
