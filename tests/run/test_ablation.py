"""Ablation: larger kernels are measured where there are any, and only there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msplit import api
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.options import KernelMode
from msplit.run import variants
from msplit.run.request import RunRequest
from msplit.run.setup import Comparison
from msplit.run.tensorflow_rows import compile_steps, list_steps
from msplit.verify.results import Variant
from tests.engines.cuda.cases import flat_of, job, scattered
from tests.engines.cuda.random_graphs import _Graph

FLOAT = 1
SAMPLES = Path(__file__).parents[2] / "sample_graphs"


class _First:
    """Draws nothing: only the seed of the constants is asked for."""

    def __call__(self, strategy):
        return 0


def graph(*, pointwise: bool):
    g = _Graph(_First())
    x = g.placeholder("x", (3, 4))
    for name in ("a", "b"):
        y = g.node("MatMul", [x, g.normal(4, 4)], T=FLOAT, transpose_a=False, transpose_b=False)
        if pointwise:
            y = g.node("Tanh", [g.node("Neg", [y], T=FLOAT)], T=FLOAT)
        g.node("Softmax" if name == "a" else "Relu", [y], T=FLOAT)
    flat = flat_of(g.graph_def)
    return flat, {"x": np.ones((3, 4), np.float32)}


def found(flat, feeds, *modes):
    one = Variant("one", ENGINE, job(flat, feeds))
    return compile_steps(one, list_steps(one, (2, scattered(flat, 2), "two"), modes))


def test_each_step_runs_beside_the_one_before() -> None:
    made = found(*graph(pointwise=True), KernelMode.FUSED)
    assert [(step.name, step.before) for step in made.steps][:3] == [
        ("1 stream", None),
        ("2 streams", "one"),
        ("fused", "two"),
    ]
    assert made.variants[0].over == ("two", made.variants[-1].label), "over one stream of the same kernels, too"
    assert made.variants[-1].job.streams == 1
    assert made.variants[0].job.options.mode is KernelMode.FUSED
    assert {variant.against for variant in made.variants} == {"one"}
    assert not made.notes


def test_what_changes_nothing_is_told_and_not_measured() -> None:
    made = found(*graph(pointwise=False), KernelMode.FUSED)
    assert [step.label for step in made.steps] == ["one", "two"]
    assert made.variants == ()
    assert made.notes == ("fused is left out: no pointwise ops can share a kernel",)


def test_nothing_asked_for_is_nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "compile", lambda *_: pytest.fail("lowered for nothing"))
    made = found(*graph(pointwise=True))
    assert (len(made.steps), made.variants, made.notes) == (2, (), ())


def test_a_bench_is_listed_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaEngine, "compile", lambda *_: pytest.fail("compiled to be listed"))
    monkeypatch.setattr(variants, "_reference", lambda *_: (None, ()))
    request = {"engine": "cuda", "device": "cpu", "streams": (1, 2)}
    setup = variants.set_up(api.load(SAMPLES / "mmoe_small.pb"), RunRequest.of(**request))
    assert [variant.job.streams for variant in setup.variants] == [1, 2]
    assert [variant.job.options.mode for variant in setup.ablation.variants] == ["fused", "fused and grouped"]


@pytest.mark.parametrize(("there", "compare"), [(True, True), (True, False), (False, True)])
def test_onnx_runtime_is_two_rows_where_it_is_installed(monkeypatch, there, compare) -> None:
    monkeypatch.setattr(variants.onnx, "runs_on_gpu", lambda: there)
    monkeypatch.setattr(variants, "_tensorflow_sees_gpu", lambda: False)
    comparison = Comparison(compare_tensorflow=compare)
    rows = variants._cuda_variants(job(*graph(pointwise=True)), [], RunRequest(), comparison, False)
    found = {row.label: row for row in rows if row.label.startswith("ONNX")}
    assert [*found] == (["ONNX Runtime", "ONNX Runtime, CUDA graph"] if there and compare else [])
    assert all(row.optional and row.against == "msplit, 1 stream, CUDA graph" for row in found.values())
