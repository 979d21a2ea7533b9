"""Layers: larger kernels are measured where there are any, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import KernelMode
from msplit.measure.ablation import layers_of
from msplit.measure.measure import Variant
from tests.engines.cuda.cases import flat_of, job, scattered
from tests.engines.cuda.random_graphs import _Graph

FLOAT = 1


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


def found(flat, feeds, **options):
    one = Variant("one", ENGINE, job(flat, feeds))
    return layers_of(one, (2, scattered(flat, 2), "two"), **{"fuse": True, "group": True, **options})


def test_each_layer_runs_beside_the_one_before() -> None:
    made = found(*graph(pointwise=True), group=False)
    assert [(layer.name, layer.before) for layer in made.layers][:3] == [
        ("1 stream", None),
        ("2 streams", "one"),
        ("fused", "two"),
    ]
    assert made.variants[0].over == ("two",)
    assert made.variants[0].job.options.mode is KernelMode.FUSED
    assert {variant.against for variant in made.variants} == {"one"}
    assert not made.notes


def test_what_changes_nothing_is_told_and_not_measured() -> None:
    made = found(*graph(pointwise=False), group=False)
    assert [layer.label for layer in made.layers] == ["one", "two"]
    assert made.variants == ()
    assert made.notes == ("fused is left out: no pointwise ops can share a kernel",)


def test_nothing_asked_for_is_nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "compile", lambda *_: pytest.fail("lowered for nothing"))
    made = found(*graph(pointwise=True), fuse=False, group=False)
    assert (len(made.layers), made.variants, made.notes) == (2, (), ())
