"""On a GPU: rows that are shared, and strings in front of steps that fly, give what TensorFlow gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import msplit
from tests.engines.cuda.cases import graph_of, outputs_of_tensorflow
from tests.engines.cuda.passes.test_shared_rows import USER, of_users, ranked, ranker

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_shared_rows(precision: str) -> None:
    flat, close = graph_of(ranker, outputs=["y", "who"]), 1e-4 if precision == "ieee" else 2e-2
    options = {"streams": 4, "engine": "cuda", "precision": precision, "shared": ["user_*"]}
    with (
        msplit.prepare(flat, batch=64, **options) as model,
        msplit.pool(flat, batches=(16, 64), groups=2, **options) as pool,
    ):
        assert model.facts["captured"]
        for rows in (64, 1, 17, 200):
            feeds = ranked(rows)
            one = {name: value[:1] if name.startswith("user") else value for name, value in feeds.items()}
            expected = outputs_of_tensorflow(flat, feeds)
            for found in (model.step(feeds), model.step(one), pool.step(feeds), pool.step(one)):
                for name, value in expected.items():
                    np.testing.assert_allclose(found[name], value, rtol=close, atol=close)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
def test_shared_rows_of_several_users(precision: str) -> None:
    flat, close = graph_of(ranker, outputs=["y", "who"]), {"ieee": 1e-4, "tf32": 2e-2, "bf16": 1e-1}[precision]
    options = {"streams": 4, "engine": "cuda", "precision": precision, "shared": ["user_*"], "users": 5}
    with (
        msplit.prepare(flat, batch=64, **options) as model,
        msplit.pool(flat, batches=(4, 16, 64), groups=2, max_delay_us=2000.0, **options) as pool,
    ):
        assert model.facts["captured"]
        for rows, users in ((64, 5), (64, 64), (3, 2), (17, 4), (200, 9), (40, 1)):
            of_row = np.random.default_rng(rows).integers(0, users, rows)
            feeds = of_users(ranked(rows, users=rows), of_row, *USER)
            on_gpu = {name: torch.from_numpy(value).cuda() for name, value in feeds.items()}
            expected = outputs_of_tensorflow(flat, feeds)
            for found in (model.step(feeds), model.step(on_gpu), pool.step(feeds), pool.step(on_gpu)):
                for name, value in expected.items():
                    np.testing.assert_allclose(found[name], value, rtol=close, atol=close)
        requests = [ranked(1 + number % 7) for number in range(60)]
        before = pool.stats().steps
        going = [pool.submit(one) for one in requests]
        for one, future in zip(requests, going, strict=True):
            found = future.result(60)
            for name, value in outputs_of_tensorflow(flat, one).items():
                np.testing.assert_allclose(found[name], value, rtol=close, atol=close)
        assert pool.stats().steps - before < len(requests)


@pytest.mark.parametrize("threads", [None, 2])
def test_strings_in_front_of_steps_that_fly(threads: int | None) -> None:
    import tensorflow as tf

    model = tf.saved_model.load(str(SAMPLES / "keras_lookup")).signatures["serving_default"]
    (output,) = model.structured_outputs
    words = [b"paris", b"berlin", b"nowhere", b"", b"\xff", "Zürich".encode()]
    rng, requests = np.random.default_rng(0), []
    for number in range(200):
        city = np.array([words[(number + row) % len(words)] for row in range(1 + number % 4)], object)
        requests.append({"amount": rng.standard_normal((len(city), 4)).astype(np.float32), "city": city})
    options = {"engine": "cuda", "streams": 2, "precision": "ieee", "effort": "fast"}
    with msplit.pool(SAMPLES / "keras_lookup", groups=4, max_batch=4, host_threads=threads, **options) as pool:
        name = next(iter(pool.outputs))
        going = [pool.submit(one) for one in requests]
        for one, future in zip(requests, going, strict=True):
            expected = model(**{key: tf.constant(value) for key, value in one.items()})[output].numpy()
            np.testing.assert_allclose(future.result(60)[name], expected, rtol=1e-4, atol=1e-5)
