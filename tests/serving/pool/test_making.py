"""Pools of real models: every answer is the one that TensorFlow's session gives to that request alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.errors import MsplitError
from msplit.serving.pool import making
from msplit.serving.pool.pool import About
from msplit.serving.pool.ports import Ports
from tests import forked, networks
from tests.campaign import campaign, examples
from tests.leftovers import Leftovers

pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

SAMPLES = Path(__file__).parents[3] / "sample_graphs"
SIMULATED = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}
SESSION = {"engine": "tensorflow"}
SEVERAL = dict(SIMULATED, devices=(0, 1))
ENGINES = pytest.mark.parametrize(
    "request_", [SIMULATED, SEVERAL, SESSION], ids=["simulated", "two GPUs", "tensorflow"]
)

Feeds = Mapping[str, Any]


_forked = forked.always(forked.instead, forked.TENSORFLOW)


def saved(path: Path, build: Callable[[], object]) -> Path:
    """A frozen graph, and its file."""
    with tf.Graph().as_default() as graph:
        tf.compat.v1.set_random_seed(7)
        build()
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def placeholder(name: str, *shape: int | None, dtype: Any = None) -> Any:
    return tf.compat.v1.placeholder(dtype or tf.float32, shape, name)


def towers() -> None:
    """Looks a row's id up, scales it by what all rows share, and has a part for each of two entries of a row."""
    rng = np.random.default_rng(0)
    x, ids, scale = placeholder("x", None, 3), placeholder("ids", None, dtype=tf.int64), placeholder("scale")
    table = tf.constant(rng.standard_normal((10, 4)).astype(np.float32))
    hidden = tf.nn.relu(x @ tf.constant(rng.standard_normal((3, 4)).astype(np.float32)) + tf.gather(table, ids))
    tf.identity(hidden * scale, "y")
    tf.reduce_max(hidden, axis=1, name="best")


def mixing() -> None:
    x = placeholder("x", None, 3)
    tf.identity(x - tf.reduce_mean(x, axis=0, name="over_the_batch"), "y")


def fixed() -> None:
    x = placeholder("x", 2, 3)
    tf.linalg.matmul(x, x, transpose_b=True, name="y")


def random() -> None:
    x = placeholder("x", 2, 3)
    tf.add(x, tf.random.uniform((2, 3), dtype=tf.float32), "y")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {build.__name__: saved(folder / f"{build.__name__}.pb", build) for build in (towers, mixing, fixed, random)}


class Reference:
    """TensorFlow's own session."""

    def __init__(self, path: Path) -> None:
        graph = tf.Graph()
        definition = tf.compat.v1.GraphDef.FromString(path.read_bytes())
        with graph.as_default():
            tf.import_graph_def(definition, name="")
        self._session = tf.compat.v1.Session(graph=graph)

    def step(self, outputs: Any, feeds: Feeds) -> dict[str, Any]:
        names = list(outputs)
        values = self._session.run(
            [f"{name}:0" for name in names], {f"{name}:0": value for name, value in feeds.items()}
        )
        return dict(zip(names, values, strict=True))


def rows_of(seed: int, rows: int, scale: float) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 3)).astype(np.float32),
        "ids": rng.integers(0, 10, rows),
        "scale": np.array(scale, np.float32),
    }


def answered(pool: msplit.Pool, requests: list[dict[str, Any]], ask: Callable[[Feeds], Any] | None = None) -> None:
    """Asks from several threads at once, all ways that there are, and holds every answer against `ask`, which gets one at a time."""
    futures = [pool.submit(one) for one in requests]
    steps: dict[int, Any] = {}

    def client(start: int) -> None:
        for number in range(start, len(requests), 3):
            steps[number] = pool.step(requests[number])

    threads = [threading.Thread(target=client, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    found = [future.result(60) for future in futures]
    for thread in threads:
        thread.join(60)
    for number, one in enumerate(requests):
        expected = ask(one) if ask is not None else steps[number]
        for answer in (found[number], steps[number]):
            assert set(answer) == set(pool.outputs)
            for name, value in expected.items():
                assert answer[name].shape == value.shape
                np.testing.assert_allclose(answer[name], value, rtol=1e-4, atol=1e-5)


@ENGINES
def test_requests_of_all_sizes(models: Mapping[str, Path], request_: Any) -> None:
    reference = Reference(models["towers"])
    with msplit.pool(models["towers"], **request_, groups=3, max_batch=6, max_delay_us=300.0) as pool:
        assert (pool.batches, pool.joins, pool.settings.groups) == ((1, 4, 6), True, 3)
        assert {name: (port.dtype, port.shape) for name, port in pool.inputs.items()} == {
            "x": ("float32", (None, 3)),
            "ids": ("int64", (None,)),
            "scale": ("float32", ()),
        }
        assert {name: port.shape for name, port in pool.outputs.items()} == {"y": (None, 4), "best": (None,)}
        requests = [rows_of(seed, 1 + seed % 6, float(seed % 2)) for seed in range(60)]
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))
        stats = pool.stats()
        assert stats.answered == stats.requests == 120
        assert stats.steps < 120  # some of them shared one
        requests = [rows_of(seed, rows, 1.0) for seed, rows in enumerate((0, 6, 7, 19))]
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))


@ENGINES
def test_an_index_out_of_range_is_no_other_requests_trouble(models: Mapping[str, Path], request_: Any) -> None:
    reference = Reference(models["towers"])
    with msplit.pool(models["towers"], **request_, groups=1, batches=(4,), max_delay_us=5000.0) as pool:
        requests = [rows_of(seed, 1, 1.0) for seed in range(4)]
        wrong = {**requests[1], "ids": np.array([99])}
        futures = [pool.submit(one) for one in (requests[0], wrong, *requests[2:])]
        futures[1].exception(60)  # TensorFlow's sessions refuse it, a GPU has zeros there
        for number in (0, 2, 3):
            expected = reference.step(pool.outputs, requests[number])
            np.testing.assert_allclose(futures[number].result(60)["y"], expected["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("request_", [SIMULATED, SESSION], ids=["simulated", "tensorflow"])
@pytest.mark.parametrize("name", ["fixed", pytest.param("lstm_small", marks=campaign)])
def test_fixed_shapes(models: Mapping[str, Path], name: str, request_: Any) -> None:
    path = models.get(name, SAMPLES / f"{name}.pb")
    reference = Reference(path)
    with msplit.pool(path, **request_, groups=2) as pool:
        assert (pool.batches, pool.joins) == ((), False)
        rng = np.random.default_rng(0)
        requests = [{"x": rng.standard_normal(pool.inputs["x"].shape).astype(np.float32)} for _ in range(6)]
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))
        with pytest.raises(MsplitError, match=r"input x was prepared as float32"):
            pool.step({"x": np.zeros((9, 9), np.float32)})
    with pytest.raises(MsplitError, match="fixed shapes"):
        msplit.pool(path, **request_, max_batch=4)


@ENGINES
@pytest.mark.parametrize("threads", [None, 2])
def test_strings_and_tables(request_: Any, threads: int | None) -> None:
    model = tf.saved_model.load(str(SAMPLES / "keras_lookup")).signatures["serving_default"]
    (output,) = model.structured_outputs
    words = [b"paris", b"berlin", b"nowhere", b"", b"\xff", "Zürich".encode()]
    with msplit.pool(SAMPLES / "keras_lookup", **request_, groups=2, max_batch=4, host_threads=threads) as pool:
        assert (pool.joins, pool.inputs["city"].dtype) == (True, "object")
        requests = []
        for number in range(12):
            rows = 1 + number % 4
            city = np.array([words[(number + row) % len(words)] for row in range(rows)], object)
            amount = np.random.default_rng(number).standard_normal((rows, 4)).astype(np.float32)
            requests.append({"amount": amount, "city": city})
        name = next(iter(pool.outputs))
        answered(
            pool,
            requests,
            lambda one: {name: model(amount=tf.constant(one["amount"]), city=tf.constant(one["city"]))[output].numpy()},
        )
        text = {"amount": requests[1]["amount"], "city": np.array(["Zürich", "paris"])}
        data = {"amount": requests[1]["amount"], "city": np.array([words[5], words[0]], object)}
        both = [pool.submit(text), pool.submit(data)]
        np.testing.assert_array_equal(both[0].result(60)[name], both[1].result(60)[name])


@pytest.mark.parametrize("request_", [SIMULATED, SEVERAL], ids=["simulated", "two GPUs"])
def test_no_two_steps_draw_the_same_numbers(models: Mapping[str, Path], request_: Any) -> None:
    with msplit.pool(models["random"], **request_, groups=3) as pool:
        x = np.zeros((2, 3), np.float32)
        futures = [pool.submit({"x": x}) for _ in range(30)]
        drawn = [future.result(60)["y"] for future in futures] + [pool.step({"x": x})["y"] for _ in range(5)]
        numbers = {value.tobytes() for value in drawn}
        assert len(numbers) == 35


@pytest.mark.parametrize("seed", range(examples(2, 100)))
def test_processes_give_the_same_bits(tmp_path: Path, seed: int) -> None:
    """As one does in this process: random networks, each with several requests."""
    one = networks.network(seed, most=4)
    path = tmp_path / "network.pb"
    path.write_bytes(one.graph)
    flat = msplit.load(path, outputs=one.outputs)
    feeds = {name: value for name, value in one.feeds.items() if name in {each.name for each in flat.model.inputs}}
    scales = (np.float32(0.5**number) for number in range(4))
    requests = [
        {name: value * by if value.dtype.kind == "f" else value for name, value in feeds.items()} for by in scales
    ]
    options = {**SIMULATED, "capture": False, "groups": 1}
    with msplit.pool(flat, **options) as pool:
        expected = [bits(pool.step(one)) for one in requests]
    with msplit.pool(flat, **options, workers=2) as pool:
        going = [pool.submit(one) for one in requests * 3]
        assert [bits(one.result(60)) for one in going] == expected * 3
        assert all(one.stats.steps for one in pool.processes())


def bits(answer: Feeds) -> dict[str, Any]:
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in answer.items()}


def test_processes_give_the_same_bits_for_all_sizes(build: Path) -> None:
    requests = [rows_of(seed, 1 + seed % 4, 1.0) for seed in range(12)]
    with msplit.pool(build, **SIMULATED, groups=1) as pool:
        expected = [bits(pool.step(one)) for one in requests]
    with msplit.pool(build, **SIMULATED, groups=1, workers=1) as pool:
        assert [bits(pool.step(one)) for one in requests] == expected


def test_gpus_that_are_not_there(models: Mapping[str, Path], build: Path) -> None:
    with pytest.raises(MsplitError, match="devices is for the cuda engine; asked for"):
        msplit.pool(models["towers"], **dict(SESSION, devices=(0, 1)))
    with pytest.raises(MsplitError, match=r"(?s)GPUs are \[1, 1\].*name each once"):
        msplit.pool(models["towers"], **dict(SIMULATED, devices=(1, 1)))


def test_rows_that_are_mixed_share_no_step(models: Mapping[str, Path]) -> None:
    with pytest.raises(MsplitError, match=r"can not share a step of 8 rows.*over_the_batch"):
        msplit.pool(models["mixing"], **SIMULATED, max_batch=8)
    reference = Reference(models["mixing"])
    with msplit.pool(models["mixing"], **SIMULATED, batches=(2, 3), groups=2) as pool:
        assert (pool.joins, pool.batches) == (False, (2, 3))
        (note,) = [note for note in pool.about.notes if "each request is a step of its own" in note]
        assert "over_the_batch" in note
        requests = [{"x": rows_of(seed, 2 + seed % 2, 1.0)["x"]} for seed in range(8)]
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))
        with pytest.raises(MsplitError, match="over_the_batch"):
            pool.step({"x": np.zeros((1, 3), np.float32)})
    with msplit.pool(models["mixing"], **SIMULATED, groups=1) as pool:
        assert any(
            "each request is a step of its own" in note and "over_the_batch" in note for note in pool.about.notes
        )


@pytest.fixture(scope="module")
def build(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "towers"
    msplit.build(models["towers"], path, **SIMULATED, batches=(1, 4))
    return path


@pytest.mark.parametrize("gpus", [(), (1,), (0, 2)])
def test_a_build(build: Path, models: Mapping[str, Path], gpus: tuple[int, ...]) -> None:
    reference = Reference(models["towers"])
    requests = [rows_of(seed, 1 + seed % 4, 1.0) for seed in range(12)]
    with msplit.pool(build, **dict(SIMULATED, devices=gpus), groups=2) as pool:
        assert pool.settings.groups == 2
        assert pool.about.facts.get("gpus", 1) == max(len(gpus), 1)
        assert len(pool.about.checks) == 2 * 2 * max(len(gpus), 1), "both batches of all slots are verified"
        assert (pool.batches, pool.joins) == ((1, 4), True)
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))
    with pytest.raises(MsplitError, match="max_batch is 8, and the batches of the build are 1, 4"):
        msplit.pool(build, max_batch=8)


def test_a_build_of_which_only_small_steps_are_wanted(build: Path, models: Mapping[str, Path]) -> None:
    reference = Reference(models["towers"])
    requests = [rows_of(seed, 1 + seed % 4, 1.0) for seed in range(12)]
    with msplit.pool(build, groups=1, max_batch=1) as pool:
        assert pool.batches == (1,)
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))
        assert pool.stats().steps == pool.stats().rows > len(requests), "rows shared a step"


def test_outputs_stay_on_the_device_for_who_asks(build: Path, models: Mapping[str, Path]) -> None:
    """Beside others who do not; those who share a step are of one mind."""
    import torch

    reference = Reference(models["towers"])
    requests = [rows_of(seed, 1 + seed % 3, 1.0) for seed in range(24)]
    with msplit.pool(build, groups=1) as pool:
        tensors = [{name: torch.from_numpy(value) for name, value in one.items()} for one in requests]
        going = [pool.submit(one, on_device=number % 2 == 0) for number, one in enumerate(tensors)]
        answers = [one.result(60) for one in going]
        assert pool.stats().steps < len(requests)
        answers[0] = pool.step(tensors[0], on_device=True)
    for number, (one, answer) in enumerate(zip(requests, answers, strict=True)):
        for name, value in reference.step(pool.outputs, one).items():
            assert isinstance(answer[name], np.ndarray if number % 2 else torch.Tensor)
            np.testing.assert_allclose(np.asarray(answer[name]), value, rtol=1e-4, atol=1e-5)
    pool = msplit.pool(models["towers"], **SESSION, groups=1, max_batch=4)
    with pool, pytest.raises(MsplitError, match="this pool's outputs are on the host"):
        pool.submit(requests[0], on_device=True)


def test_a_build_that_was_made_with_other_versions(
    build: Path, models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from msplit.engines.cuda.stored import builds

    reference = Reference(models["towers"])
    monkeypatch.setattr(builds.Builds, "made_for", {"pytorch": "1.0", "device": "cpu"})
    with msplit.pool(build, groups=2) as pool:
        assert any("here 1.0" in note and "compiled anew" in note for note in pool.about.notes)
        requests = [rows_of(seed, 1 + seed % 4, 1.0) for seed in range(8)]
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))


@pytest.mark.parametrize("gpus", [(), (0, 1)])
def test_slots_are_chosen_by_measuring(build: Path, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msplit.serving.pool.making._TRIAL", 0.01)
    leftovers = Leftovers()
    with msplit.pool(build, **dict(SIMULATED, devices=gpus), groups="auto") as pool:
        assert isinstance(pool.settings.groups, int)
        assert len(pool.about.checks) == 2 * pool.settings.groups * max(len(gpus), 1)
        assert any(note.startswith("slots were chosen by measuring: 1: ") for note in pool.about.notes)
        assert pool.stats().requests == 0
        pool.step(rows_of(0, 2, 1.0))
    assert leftovers.threads() == []


def test_processes_are_chosen_by_measuring(
    build: Path, models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msplit.serving.pool.making._TRIAL", 0.01)
    monkeypatch.setattr("msplit.serving.pool.making._MOST_WORKERS", 2)
    with msplit.pool(build, **SIMULATED, groups=2, workers="auto", latency_us=1e6) as pool:
        assert pool.settings.workers == len(pool.processes())
        note = pool.about.notes[-1]
        assert note.startswith("processes on each GPU were chosen by measuring: 1 of 2 slots: ")
        assert "; 2 of 2 slots: " in note
        assert pool.stats().steps == 0
        reference = Reference(models["towers"])
        requests = [rows_of(seed, 1 + seed % 4, 1.0) for seed in range(8)]
        answered(pool, requests, lambda one: reference.step(pool.outputs, one))


@pytest.mark.parametrize(
    ("rates", "latency", "refused", "expected"),
    [
        ([10, 30, 90], 1e6, None, (4, 3)),
        ([10, 30, 90], None, None, (2, 3)),  # three times what one takes is the most
        ([10, 30, 31], None, None, (2, 3)),
        ([30, 10, 90], None, None, (1, 3)),  # nobody looks further
        ([10, 30, 90], 150.0, None, (1, 3)),
        ([10, 30, 90], 50.0, None, (1, 3)),
        ([10, 30, 90], None, 4, (2, 3)),
        ([10, 30, 90], None, 1, "no room"),
    ],
)
def test_as_many_processes_as_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, rates: list[int], latency: float | None, refused: int | None, expected: Any
) -> None:
    """Slots, where they are auto, are those of the best; more processes take longer to answer."""
    opened: list[Any] = []

    class Trial(contextlib.nullcontext):  # type: ignore[type-arg]
        def __init__(self, settings: msplit.PoolSettings) -> None:
            self.settings = replace(settings, groups=3)
            self.ports, self.about = Ports({}, {1: {}}, None), About("", {}, (), ("one",), {})
            opened.append(self)

        def processes(self) -> list[int]:
            return [0] * int(self.settings.workers or 0)

        def __enter__(self) -> Any:
            return self

    def trial(settings: msplit.PoolSettings) -> Any:
        if settings.workers == refused:
            raise MsplitError("no room")
        return Trial(settings)

    def flood(pool: Any, feeds: Any, window: int) -> tuple[float, float]:
        assert window == 3 * pool.settings.workers
        assert (pool.settings.max_queue, pool.settings.max_delay_us) == (0, 0.0)
        return float(rates[len(opened) - 1]), 100.0 * pool.settings.workers

    monkeypatch.setattr(making, "_flood", flood)
    settings = msplit.PoolSettings("auto", workers="auto", latency_us=latency, max_queue=9, max_delay_us=5)
    if isinstance(expected, str):
        with pytest.raises(MsplitError, match=expected):
            making.make_with_workers(trial, settings)
        return
    found: Any = making.make_with_workers(trial, settings)
    assert (found.settings.workers, found.settings.groups, found.settings.max_queue) == (*expected, 9)
    assert found.about.notes[0] == "one"
    assert f"1 of 3 slots: {rates[0]}/s, p99 100 µs" in found.about.notes[1]
    assert ("4 can not be: no room" in found.about.notes[1]) == (refused == 4)


def test_what_does_not_fit_is_refused_before_it_is_made(build: Path) -> None:
    with pytest.raises(MsplitError, match=r"3 slots of .* MB, with weights of .* do not fit: .* may be taken") as found:
        msplit.pool(build, groups=3, max_memory=1000)
    assert "smaller max_batch" in str(found.value)
    with pytest.raises(MsplitError, match="3 levels of priority share 2 groups, and each has one of its own"):
        msplit.pool(build, groups=2, priorities=3)


def test_a_failure_while_it_is_made_leaves_nothing(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from msplit.serving.pool import making

    leftovers = Leftovers()

    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(making, "_flood", fails)
    with pytest.raises(ZeroDivisionError):
        msplit.pool(build, groups="auto")
    assert leftovers.threads() == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"groups": 0}, "the number of groups is 0"),
        ({"groups": "many"}, "there are no 'many' groups"),
        ({"groups": 2.5}, "no integer"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"batches": 4}, "batches"),
        ({"batches": "14"}, "batches"),
        ({"batches": [0]}, "a batch is 0"),
        ({"max_delay_us": -1}, "max_delay_us is -1"),
        ({"max_delay_us": "1"}, "max_delay_us is '1'"),
        ({"max_delay_us": float("nan")}, "max_delay_us is nan"),
        ({"latency_us": None, "max_queue": -1}, "max_queue is -1"),
        ({"priorities": 0}, "priorities is 0"),
        ({"workers": 65}, "the number of workers is 65"),
        ({"workers": "many"}, "workers"),
        ({"host_threads": 0}, "host_threads is 0"),
        ({"max_memory": 0}, "max_memory is 0"),
    ],
)
def test_settings_that_can_not_be(more: dict[str, Any], said: str) -> None:
    with pytest.raises(MsplitError, match=said):
        msplit.PoolSettings(**more)


def test_a_build_of_a_model_that_draws_numbers(models: Mapping[str, Path], tmp_path: Path) -> None:
    """Its reference is that of a first step."""
    msplit.build(models["random"], tmp_path / "build", **SIMULATED)
    x = np.zeros((2, 3), np.float32)
    with msplit.open(tmp_path / "build") as runner, msplit.pool(tmp_path / "build", groups=2) as pool:
        alone = [runner.step({"x": x})["y"] for _ in range(3)]
        drawn = [pool.step({"x": x})["y"] for _ in range(4)]
        assert len({value.tobytes() for value in drawn}) == 4
        assert len({value.tobytes() for value in alone}) == 3


def test_opens_and_closes_leave_nothing(build: Path) -> None:
    def turn() -> None:
        with msplit.pool(build, groups=2) as pool:
            pool.step(rows_of(0, 2, 1.0))

    turn()
    leftovers = Leftovers()
    for _ in range(5):
        turn()
    assert (leftovers.threads(), leftovers.files()) == ([], [])


def test_where_there_is_no_room_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from msplit.engines.tensorflow.session import SessionExecutable

    began, ended = list[int](), list[int]()
    begin, end = SessionExecutable.__init__, SessionExecutable.close
    monkeypatch.setattr(
        SessionExecutable,
        "__init__",
        lambda self, *given, **more: (began.append(id(self)), begin(self, *given, **more))[1],
    )
    monkeypatch.setattr(SessionExecutable, "close", lambda self: (ended.append(id(self)), end(self))[1])
    with pytest.raises(MsplitError, match="do not fit"):
        msplit.pool(SAMPLES / "mmoe_small.pb", engine="tensorflow", max_memory=1)
    assert began
    assert set(began) <= set(ended)


def random_of_words() -> None:
    """Random numbers on the device, of text that the host makes numbers of, and text that it makes of them."""
    number = tf.strings.to_number(placeholder("x", 3, dtype=tf.string)) * placeholder("scale", 3)
    drawn = tf.random.uniform(tf.shape(number))
    weights = tf.constant(np.eye(3, dtype=np.float32))
    tf.strings.as_string((tf.reshape(number + drawn, (1, 3)) @ weights)[0], name="y")


def test_words_in_front_and_behind_and_random_numbers_between(tmp_path: Path) -> None:
    path = saved(tmp_path / "random_words.pb", random_of_words)
    given = {"x": np.array([b"1", b"2.5", b"-3"], object), "scale": np.ones(3, np.float32)}
    with msplit.pool(path, **SIMULATED, groups=2) as pool:
        going = [pool.submit(given) for _ in range(20)]
        answers = {tuple(one.result(60)["y"]) for one in going}
        assert len(answers) == 20
        away = np.array([[float(text) for text in one] for one in answers]) - [1, 2.5, -3]
        assert 0 <= away.min() < away.max() < 1
        with pytest.raises(MsplitError, match="StringToNumber"):
            pool.step({**given, "x": np.array([b"1", b"one", b"2"], object)})
        assert pool.step(given)["y"].shape == (3,)
