"""Rows of a bench say what is used, and what runs the same is measured once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import msplit
from msplit import api
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.options import EngineOptions, SharedRows
from msplit.engines.onnxruntime import OnnxRuntime
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.report import benchmark
from msplit.report.document import plain
from msplit.report.render import to_markdown
from msplit.run.compilation import CompiledSetup, chosen_variant, dedupe
from msplit.run.setup import AblationStep
from msplit.verify.results import Variant
from tests.assignment.test_plans import QUICK
from tests.cli.runner import SAMPLES
from tests.run.test_tuning import _reference

TOWERS = "towers_small.pb"
"""Six towers alike: six streams at most."""


def placed(ids, asked: str, label: str, streams: int = 8, **more) -> Variant:
    flat = api.load(SAMPLES / TOWERS)
    return Variant(label, TENSORFLOW, Job(flat, np.asarray(ids, np.int32), streams, {}), asked=(asked,), **more)


def on(*streams: int) -> np.ndarray:
    """Nodes of the towers dealt out to these streams, in turn."""
    return np.resize(np.asarray(streams, np.int32), len(api.load(SAMPLES / TOWERS)))


@pytest.fixture(scope="module")
def built():
    """A bench for 8 and 16 streams of a model that has work for six, and how often anything was built."""
    pytest.importorskip("torch")
    flat = api.load(SAMPLES / TOWERS)
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (1, 8, 16),
        "batch": 2,
        "settings": QUICK,
        "ruleset": "auto",
        "compare_tensorflow": False,
    }
    request = dict(request, reference=_reference(flat))
    builds = []
    with pytest.MonkeyPatch.context() as patch:
        original = CudaEngine.build
        patch.setattr(CudaEngine, "build", lambda self, job: builds.append(job.options.simplify) or original(self, job))
        found = msplit.bench(flat, **request)
    return flat, found, builds


def test_labels_say_what_is_used_and_equal_plans_are_built_once(built) -> None:
    _, found, builds = built
    assert [(one.label, one.streams) for one in found.result.variants] == [
        ("msplit, 1 stream, CUDA graph", 1),
        ("msplit, 6 streams, CUDA graph", 6),
        ("msplit, 1 stream, fused and grouped", 1),
    ]
    for one in found.result.variants:
        assert one.streams == one.facts["streams"]
    assert builds.count(True) == len(found.result.variants)  # the graph op by op is none of them
    assert found.labels["msplit, 16 streams, CUDA graph"] == "msplit, 6 streams, CUDA graph"


def test_text_and_json_say_which_row_stands_for_what(built) -> None:
    flat, found, _ = built
    text = to_markdown(benchmark.document(flat, found))
    assert "The row 'msplit, 6 streams, CUDA graph' is what runs for 8 streams and for 16 streams." in text
    assert "16 streams, CUDA graph" not in text
    told = json.loads(json.dumps(plain(benchmark.payload(flat, found))))
    assert [one["asked"] for one in told["result"]["variants"]] == [
        [],
        ["8 streams", "16 streams"],
        ["16 streams, fused and grouped", "auto"],
    ]
    assert [(layer["name"], layer["variant"]) for layer in told["layers"]] == [
        ("1 stream", "msplit, 1 stream, CUDA graph"),
        ("6 streams", "msplit, 6 streams, CUDA graph"),
        ("fused and grouped", "msplit, 1 stream, fused and grouped"),
    ]


def test_what_is_prepared_may_be_named_by_what_was_asked_for() -> None:
    pytest.importorskip("torch")
    flat = api.load(SAMPLES / TOWERS)
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (16,),
        "batch": 2,
        "reference": _reference(flat),
        "fuse": False,
        "group": False,
    }
    with msplit.prepare(flat, **request, variant="msplit, 16 streams, CUDA graph") as runner:
        assert runner.label == "msplit, 6 streams, CUDA graph"


def test_numbers_of_streams_do_not_matter_and_those_of_host_nodes_neither() -> None:
    same = dedupe([placed(on(0, 1), "2 streams", "a, 8 logical devices"), placed(on(7, 3), "8 streams", "b")])
    (one,) = same.variants
    assert (one.label, one.used, one.asked) == ("a, 2 logical devices", 2, ("2 streams", "8 streams"))
    assert same.labels == {"a, 8 logical devices": one.label, "b": one.label}


def test_as_many_streams_in_another_plan_are_told_apart() -> None:
    first = placed(on(0, 1), "4 streams", "TensorFlow, 4 logical devices", 4)
    second = placed(on(0, 0, 1), "8 streams", "TensorFlow, 8 logical devices", 8)
    found = dedupe([first, second])
    assert [one.label for one in found.variants] == [
        "TensorFlow, 2 logical devices",
        "TensorFlow, 2 logical devices (8 streams asked for)",
    ]


def test_what_points_at_a_row_that_is_left_out_points_at_the_one_that_stays() -> None:
    one = replace(placed(on(0), "", "one"), asked=())
    same, more = (
        placed(on(5), "5 streams", "same"),
        placed(on(0, 1), "2 streams", "more", against="same", over=("one", "same")),
    )
    found = dedupe(
        [one, same, more],
        [
            AblationStep("1", "one", None),
            AblationStep("2", "same", "one"),
            AblationStep("3", "more", "same"),
            AblationStep("4", "one", None),
        ],
    )
    assert [(v.label, v.against, v.over) for v in found.variants] == [("one", None, ()), ("more", "one", ())]
    assert [(step.name, step.label, step.before) for step in found.steps] == [
        ("1", "one", None),
        ("3", "more", "one"),
    ]
    assert found.notes == ("the row 'one' is what runs for 5 streams, too", "the row 'more' is what runs for 2 streams")


def test_one_engine_set_up_in_two_ways_is_two_rows() -> None:
    job = placed(on(0), "1 stream", "").job
    rows = [Variant(label, OnnxRuntime(captured), job) for label, captured in (("plain", False), ("captured", True))]
    assert [one.label for one in dedupe(rows).variants] == ["plain", "captured"]


@pytest.mark.tf
def test_tensorflow_rows_say_how_many_devices_are_used(tmp_path: Path) -> None:
    flat = api.load(SAMPLES / TOWERS)
    found = msplit.bench(flat, engine="tensorflow", streams=(2, 16), batch=2, settings=QUICK, ruleset="auto")
    assert [one.label for one in found.result.variants][2:] == ["TensorFlow, 6 logical devices"]
    assert "the row 'TensorFlow, 6 logical devices' is what runs for 16 streams" in found.notes


@pytest.mark.parametrize(("shared_us", "chosen"), [(33.5, "repeated"), (31.5, "repeated"), (31.0, "once")])
def test_rows_are_computed_once_where_that_should_gain_more_than_predictions_are_off(shared_us, chosen):
    def variant(label: str, *, whole: bool) -> Variant:
        options = EngineOptions(device="cpu", shared=SharedRows(("user",), (("user", 1),), whole=whole))
        one = placed([0], "1", label)
        return replace(one, engine=ENGINE, job=replace(one.job, options=options))

    steps = (AblationStep("grouped", "once", None, shared_us), AblationStep("users repeated", "repeated", None, 33.0))
    variants = (variant("once", whole=False), variant("repeated", whole=True))
    made = CompiledSetup(variants, steps, None, {}, "", (), ())
    setup = SimpleNamespace(engine=ENGINE, request=SimpleNamespace(plan=None))
    assert chosen_variant(setup, made).label == chosen
