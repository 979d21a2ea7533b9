"""Strings that become numbers where a request is read: with TensorFlow's answers, and in front of the processes that run steps."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.host.hashing import Texts
from msplit.engines.host.program import HostProgram
from msplit.errors import EngineError
from msplit.serving.server import decode, messages
from msplit.serving.server.tensors import to_tensor_proto
from tests import forked, string_models
from tests.cli.runner import ROOT
from tests.run.test_host_builds import QUICK, answers
from tests.serving.server.test_large import field, varint

pytest.importorskip("torch")
pytestmark = pytest.mark.tf

Served = tuple[Path, dict[str, Any], Any]


_forked = forked.always(forked.instead, forked.TENSORFLOW)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A build of a two-tower, its inputs, and TensorFlow's answers."""
    folder = tmp_path_factory.mktemp("front")
    feeds = string_models.two_tower(folder / "model")
    msplit.build(str(folder / "model"), folder / "build", batches=[2, 4], **QUICK)
    return folder / "build", feeds, answers(folder / "model", feeds)


def request_of(feeds: dict[str, Any], *, order: int = 1) -> bytes:
    """A PredictRequest, whose inputs come in this order or the other one."""
    made = [messages.PredictRequest(model_spec={"name": "m"}).SerializeToString()]
    for name, value in [*feeds.items()][::order]:
        proto = messages.TensorProto()
        to_tensor_proto(value, proto, as_content=True)
        made.append(field(2, field(1, name.encode()) + field(2, proto.SerializeToString())))
    return b"".join(made)


def same(found: dict[str, Any], expected: dict[str, Any], rows: slice) -> None:
    for made, wanted in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(made, wanted[rows], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"workers": 1}, {"host_threads": 2}], ids=["here", "process", "threads"])
def test_answers_are_tensorflows_however_many_rows_come(served: Served, more: dict[str, Any]) -> None:
    path, feeds, expected = served
    read = decode.Reader(decode.predict_request)
    with msplit.pool(path, device="cpu", groups=2, **more) as pool:
        assert (pool.ports.before is not None) == ("host_threads" not in more)
        for start, end in [(0, 2), (0, 8), (3, 4), (0, 3), (5, 8), (2, 2), (1, 5), (1, 5), (4, 8), (6, 8)] * 2:
            given = {name: value[start:end] for name, value in feeds.items()}
            came = read.parts(request_of(given)).feeds(pool.inputs)
            wanted = expected if end > start else {name: value[:0] for name, value in expected.items()}
            futures = [pool.submit(one) for one in (given, came, given)]
            for future in futures:
                same(future.result(60), wanted, slice(start, end))
        with pytest.raises(EngineError, match="input user"):
            pool.step({**feeds, "user": np.zeros(8, np.int64)})


def test_strings_of_a_request_like_one_before_become_no_objects(served: Served) -> None:
    path, feeds, _ = served
    read = decode.Reader(decode.predict_request)
    with msplit.pool(path, device="cpu", groups=1) as pool:
        for number in range(4):
            given = {name: np.roll(value, number, 0) for name, value in feeds.items()}
            found = read.parts(request_of(given)).feeds(pool.inputs)
            texts = [name for name, value in given.items() if value.dtype == object]
            assert {type(found[name]) for name in texts} == {Texts if number else np.ndarray}
            for name, value in pool.ports._given._checked({**found})[0].items():
                objects = pool.ports._given._taken(name, value)
                np.testing.assert_array_equal(objects, given[name])
                assert objects.dtype == given[name].dtype
            first, second = (pool.ports.check(one)[0] for one in (given, found))
            assert [value.tobytes() for value in first.values()] == [value.tobytes() for value in second.values()]
        other = read.parts(request_of(feeds, order=-1)).feeds(pool.inputs)
        assert type(other["user"]) is np.ndarray


def test_requests_that_are_damaged_or_written_otherwise_are_read_as_before(served: Served) -> None:
    """Whatever a reader knows already, it reads what one reads that knows nothing."""
    path, feeds, _ = served
    rng = np.random.default_rng(0)
    small = {name: value[:2] for name, value in feeds.items()}
    data = request_of(small)
    text = b"\x08" + varint(7)
    two = text + field(2, field(2, b"\x08\x02"))
    odd = [
        two + field(8, b"a") + field(5, b"") + field(8, b"b"),
        two + field(8, b"a") + field(20, b"zz") + field(8, b"b"),
        field(8, b"a") + two + field(8, b""),
        two + field(4, b"\x01\x01ab"),
        two + field(8, b"only one"),
        two + field(8, b"a") * 3,
        text + field(2, field(2, b"\x08\x00")),
    ]
    begin = data.index(b"\x0a\x04user") - 2
    length = data[begin + 1]
    others = [data[:begin] + field(2, field(1, b"user") + field(2, one)) + data[begin + 2 + length :] for one in odd]
    for _ in range(600):
        made = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            made[rng.integers(len(made))] = rng.integers(256)
        others.append(bytes(made[: rng.integers(len(made))] if rng.random() < 0.2 else made))

    with msplit.pool(path, device="cpu", groups=1) as pool:

        def found(read: decode.Reader, one: bytes) -> Any:
            try:
                parts = read.parts(one)
                arrays = pool.ports.check({**parts.feeds(pool.inputs)})[0]
            except Exception as problem:
                return type(problem), str(problem)
            return parts.request, {name: (value.shape, value.tobytes()) for name, value in arrays.items()}

        knows = decode.Reader(decode.predict_request)
        for one in [data, *others, *others]:
            assert found(knows, one) == found(decode.Reader(decode.predict_request), one), one
        kept = len(knows._known)
        assert 1 < kept <= decode._MOST_LAYOUTS


def test_a_program_is_sent_to_other_processes(served: Served) -> None:
    with msplit.pool(served[0], device="cpu", groups=1) as pool:
        function, values = pool.ports.before.__reduce__()
        assert function(*values) is pool.ports.before  # of equal ones there is one, vocabularies and all
        assert isinstance(pool.ports.before, HostProgram)


def test_processes_that_are_sent_a_program_need_no_tensorflow(served: Served, tmp_path: Path) -> None:
    with msplit.pool(served[0], device="cpu", groups=1) as pool:
        (tmp_path / "ports").write_bytes(pickle.dumps(pool.ports))
    code = "from tests.without_tensorflow import block; block(); import pickle, sys; ports = pickle.load(open(sys.argv[1], 'rb'))"
    code += "; print(ports.before.compiled, 'tensorflow' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "ports")]
    done = forked.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


def test_what_needs_other_rows_or_more_than_a_program_in_c_runs_around_steps(tmp_path: Path) -> None:
    import tensorflow as tf

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def __call__(self, word: Any) -> Any:
            number = tf.strings.to_hash_bucket_fast(word, 100)
            return {"y": tf.cast(number, tf.float32) * 2.0, "upper": tf.strings.upper(word)}

    module = Model()
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.__call__)
    msplit.build(str(tmp_path / "model"), tmp_path / "build", batches=[2], **QUICK)
    with msplit.pool(tmp_path / "build", device="cpu", groups=1) as pool:
        assert pool.ports.before is None
        words = string_models.strings(b"a", b"\xff", b"")
        found, expected = pool.step({"word": words}), module(tf.constant(words))
        np.testing.assert_array_equal(found["upper"], expected["upper"].numpy())
        np.testing.assert_allclose(found["y"], expected["y"].numpy())


def test_inputs_whose_sizes_go_with_no_number_of_rows_are_prepared(tmp_path: Path) -> None:
    import tensorflow as tf

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.float32)])
        def __call__(self, word: Any, x: Any) -> Any:
            number = tf.strings.to_hash_bucket_fast(word, 100)
            return {"y": tf.reduce_sum(tf.cast(number, tf.float32)) * x}

    module = Model()
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.__call__)
    words, x = string_models.strings(b"a", b"b", b"c"), np.arange(5, dtype=np.float32)
    flat = msplit.load(tmp_path / "model")
    with msplit.prepare(flat, **QUICK, shapes={"word": (3,), "x": (5,)}) as runner:
        (found,) = runner.step({"word": words, "x": x}).values()
    np.testing.assert_allclose(found, module(tf.constant(words), tf.constant(x))["y"].numpy())
