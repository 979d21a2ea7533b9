"""Answers that are written like ones before: the same bytes as if each were the first, but for the order of fields."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from msplit.serving.server import decode, exchange, messages, rpc, service, tensors
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import Models, Version, signature_of
from msplit.serving.server.service import Heads, InferenceRequest, Service
from tests.serving.server import trivial
from tests.serving.server.asking import answer

VERSION = Version("m", 3, {})
STRINGS = np.array([b"a", b"bc"], object)


def served(*, as_content: bool = False) -> Service:
    return Service(Models({}), None, as_content)  # type: ignore[arg-type]


def request(identifier: str = "") -> InferenceRequest:
    return InferenceRequest(SimpleNamespace(id=identifier), VERSION, SimpleNamespace(name="s"), {})  # type: ignore[arg-type]


def outputs(turn: int, dtypes: str) -> dict[str, Any]:
    random = np.random.default_rng(turn)
    made = {"f": np.float32, "d": np.float64, "l": np.int64, "h": np.float16, "b": bool, "i": np.int8}
    shape = (1 + turn % 3, 2)
    found = {name: random.integers(0, 2, shape).astype(made[name]) for name in dtypes if name != "s"}
    return {**found, **({"s": STRINGS[: 1 + turn % 2]} if "s" in dtypes else {})}


@pytest.mark.parametrize("dtypes", ["", "f", "fd", "fl", "hib", "fs", "fdlhbis"])
@pytest.mark.parametrize("as_content", [False, True])
def test_predictions_are_what_went_in(dtypes: str, as_content: bool) -> None:
    kept = served(as_content=as_content)
    for turn in range(9):
        wanted = outputs(turn, dtypes)
        said = service.write_predict(kept, request(), wanted)
        assert said == service.write_predict(served(as_content=as_content), request(), wanted)
        found = messages.PredictResponse.FromString(said)
        assert (found.model_spec.name, found.model_spec.version.value, found.model_spec.signature_name) == ("m", 3, "s")
        assert found.outputs.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(decode.array_of(found.outputs[name], name), value)
    plain = set(dtypes) <= (set("fdlhbi") if as_content else set("fdb"))
    assert len(kept.heads._known) == (3 if dtypes and plain else 0)


@pytest.mark.parametrize("dtypes", ["f", "fl", "hib", "fs"])
def test_inferences_are_what_went_in(dtypes: str) -> None:
    kept = served()
    for turn in range(9):
        wanted, identifier = outputs(turn, dtypes), "" if turn % 2 else f"é{turn}"
        found = messages.ModelInferResponse.FromString(service.write_infer(kept, request(identifier), wanted))
        assert (found.model_name, found.model_version, found.id) == ("m", "3", identifier)
        for one, raw, (name, value) in zip(found.outputs, found.raw_output_contents, wanted.items(), strict=True):
            assert one.name == name
            np.testing.assert_array_equal(decode.array_of_infer(one, raw), value)
    assert len(kept.heads._known) == (0 if "s" in dtypes else 3)


def test_what_is_kept_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_HEADS", 5)
    heads = Heads()
    for size in range(1, 30):
        value = np.zeros(size, np.float32)
        assert heads.write("k", {"y": value}, lambda: [[b"all"], [b"head", value.tobytes()]], as_content=True)  # noqa: B023
        assert len(heads._known) <= 5


def test_an_answered_request_is_given_back_at_once() -> None:
    """Its arrays may be large, and to collect it as garbage took a tenth of the time of each."""
    asked = messages.PredictRequest()
    asked.model_spec.name = "double"
    tensors.to_tensor_proto(np.ones((1, trivial.WIDTH), np.float32), asked.inputs["x"], as_content=True)
    with trivial.pool() as pool:
        only = signature_of(pool, None)
        models = Models({"double": {1: Version("double", 1, {only.name: only})}})
        kept = Service(models, Metrics(models))
        gc.disable()
        try:
            for _ in range(3):
                assert asyncio.run(answer(kept, rpc.PATHS[0], asked.SerializeToString(), None))[0] == 0
            assert not [one for one in gc.get_objects() if isinstance(one, exchange._Exchange)]
        finally:
            gc.enable()
