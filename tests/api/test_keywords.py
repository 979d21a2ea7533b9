"""The library's keywords: each is known, wrong ones are named, and what is prepared is called like a function."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.cost.profile import Workload
from msplit.engines.base import called_with
from msplit.errors import EngineError, MsplitError
from msplit.run.request import BenchOptions, BuildOptions, RunRequest, request_of
from msplit.run.setup import BenchRequest, Comparison

SAMPLE = Path(__file__).parents[2] / "sample_graphs" / "mmoe_small.pb"
SIMULATED: dict[str, Any] = {"engine": "cuda", "device": "cpu", "effort": "fast", "streams": 2}


def test_every_field_of_a_request_is_a_keyword_of_bench() -> None:
    parts = (RunRequest, Workload, Comparison)
    fields = {field.name for part in parts for field in dataclasses.fields(part)}
    assert fields - {"shards", "workload"} == BenchOptions.__annotations__.keys()


def test_only_a_bench_is_told_what_is_compared() -> None:
    compared = {field.name for field in dataclasses.fields(Comparison)}
    assert not compared & BuildOptions.__annotations__.keys()
    request = BenchRequest.of(batch=3, streams=(2,), compare_xla=False, log_placement=True)
    assert (request.run.workload.batch, request.run.streams, request.run.engine) == (3, (2,), "tensorflow")
    assert not request.comparison.compare_xla
    assert not compared & {field.name for field in dataclasses.fields(request.run)}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: msplit.prepare(SAMPLE, stream=4),
            r"msplit\.prepare has no keyword 'stream'\n  fix: did you mean streams",
        ),
        (lambda: msplit.prepare(SAMPLE, improved=True), r"did you mean improve\?"),
        (lambda: msplit.prepare(SAMPLE, compare_xla=True), "bench has it: leave it out"),
        (
            lambda: msplit.build(SAMPLE, "x", batche=3),
            r"msplit\.build has no keyword 'batche'\n  fix: did you mean batch",
        ),
        (lambda: msplit.bench(SAMPLE, presision="bf16"), r"did you mean precision\?"),
        (lambda: msplit.compile(abs, batch=3), r"msplit\.compile has no keyword 'batch'\n  fix: prepare has it"),
        (lambda: msplit.pool(SAMPLE, group_s=3), r"msplit\.pool has no keyword"),
        (
            lambda: msplit.Trainer(SAMPLE.with_name("training.meta"), fetches=["loss/value"], tune=1),
            r"Trainer has no keyword 'tune'",
        ),
        (lambda: msplit.prepare(SAMPLE, zzz=1), r"it has: lengths, variant, .*streams"),
        (lambda: msplit.prepare(SAMPLE, capture="no"), r"capture is 'no'\n  fix: give True or False"),
        (lambda: msplit.prepare(SAMPLE, shapes=[1]), r"shapes: \[1\] is no dictionary"),
        (lambda: msplit.prepare(SAMPLE, device=5), "device: 5 is no text"),
        (lambda: msplit.pool(SAMPLE, device=5), "device: 5 is no text"),
        (lambda: msplit.bench(SAMPLE, engine=5), "engine: 5 is no text"),
        (lambda: msplit.build(SAMPLE, "x", devices=1), "devices: 1 is no list"),
        (lambda: msplit.load(SAMPLE, outputs=5), "outputs: 5 is no list"),
        (lambda: msplit.load(SAMPLE, outputs="y"), "outputs: 'y' is no list"),
        (lambda: msplit.load(SAMPLE, tags="serve"), "tags: 'serve' is no list"),
        (lambda: msplit.load(SAMPLE, signature=1), "signature: 1 is no text"),
    ],
)
def test_a_wrong_keyword_is_told_with_the_one_that_is_near(call: Any, said: str) -> None:
    with pytest.raises(MsplitError, match=said):
        call()


def test_streams_are_one_number_or_several() -> None:
    for given, found in ((3, (3,)), (np.int64(3), (3,)), ([1, 2], (1, 2))):
        assert request_of(msplit.bench, BenchOptions, {"streams": given}).streams == found
    with pytest.raises(MsplitError, match="which is no integer"):
        request_of(msplit.bench, BenchOptions, {"streams": True})


@pytest.mark.tf
@pytest.mark.parametrize("how", ["prepare", "pool"])
def test_what_is_prepared_is_called_by_name(how: str) -> None:
    pytest.importorskip("torch")
    from tests.engines.cuda.cases import graph_of

    def build(tf: Any, v1: Any) -> None:
        first = v1.placeholder(tf.float32, [2, 3], name="z")
        tf.subtract(first, v1.placeholder(tf.float32, [2, 3], name="a"), name="out")

    flat = graph_of(build, outputs=["out"])
    z, a = np.full((2, 3), 5, np.float32), np.full((2, 3), 2, np.float32)
    with getattr(msplit, how)(flat, **SIMULATED) as model:
        for outputs in (model(z=z, a=a), model(a=a, z=z)):
            np.testing.assert_array_equal(outputs["out"], z - a)
        # Of inputs of one shape and type, which comes first can not be told: they would be exchanged without a word.
        for values, named in (((z, a), {}), ((z,), {"a": a}), ((z, a, a), {}), ((z,), {})):
            with pytest.raises(EngineError, match="given by position"):
                model(*values, **named)
        with pytest.raises(EngineError, match="no value for input"):
            model(z=z)


def test_inputs_may_be_called_whatever_they_are() -> None:
    assert called_with(["self", "values"], (), {"self": 1, "values": 2}) == {"self": 1, "values": 2}
    assert called_with(["self"], (1,), {}) == {"self": 1}
    with pytest.raises(EngineError, match="by position and by name"):
        called_with(["self"], (1,), {"self": 1})
    with pytest.raises(EngineError, match="the inputs are: none"):
        called_with([], (1,), {})
