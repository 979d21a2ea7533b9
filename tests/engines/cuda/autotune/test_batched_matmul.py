"""The ways to compute products of alike layers give the same, whichever is chosen."""

from dataclasses import replace

import pytest
import torch

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.autotune.batched_matmul import TILE, WIDE, Gemm, Layer
from msplit.engines.cuda.autotune.tuner import SECONDS, Tuner
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.ir.graph import Op


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def expected(work):
    """One member after the other."""
    result = []
    for member in range(len(work.one.weights)):
        total = _one(work.one, member)
        if work.second is not None:
            total = total + (_one(work.second, member - work.first) if member >= work.first else work.addend[member])
        result.append({"Relu": torch.relu, "Tanh": torch.tanh, "": lambda x: x}[work.activation](total))
    return torch.stack(result)


def _one(layer, member):
    x = layer.x if layer.x.dim() == 2 else layer.x[member]
    total = x @ layer.weights[member]
    return total if layer.bias is None else total + layer.bias[min(member, len(layer.bias) - 1)]


@pytest.mark.parametrize("activation", ["", "Relu", "Tanh"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("biases", [0, 1, 3])
def test_the_library(activation, shared, biases):
    x = normal(4, 6) if shared else normal(3, 4, 6)
    work = Gemm(Layer(x, normal(3, 6, 5), normal(biases, 5) if biases else None), activation)
    torch.testing.assert_close(batched_matmul.run(work, {}), expected(work))


@pytest.mark.parametrize("activation", ["", "Relu"])
@pytest.mark.parametrize("biases", [0, 1, 3])
def test_rows_first(activation, biases):
    work = Gemm(Layer(normal(3, 4, 6), normal(3, 6, 5), normal(biases, 5) if biases else None), activation)
    found = batched_matmul.run(replace(work, rows_first=True), {})
    torch.testing.assert_close(found, expected(work))
    assert found.permute(1, 0, 2).is_contiguous()


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("biases", [(0, 0), (3, 1), (0, 1), (1, 0)])
def test_two_products(first, biases):
    one = Layer(normal(3, 4, 6), normal(3, 6, 5), normal(3, 5) if biases[0] else None)
    rest = 3 - first
    second = Layer(normal(rest, 4, 2), normal(rest, 2, 5), normal(rest, 5) if biases[1] else None)
    work = Gemm(one, "Relu", second=second, first=first, addend=normal(first, 4, 5) if first else None)
    torch.testing.assert_close(batched_matmul.by_library(work), expected(work))


@pytest.mark.parametrize("activation", ["", "Relu", "Tanh"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("biases", [False, True])
def test_all_weights_side_by_side(activation, turned, members, biases):
    weights = normal(members, 5, 6).mT if turned else normal(6, members, 5).permute(1, 0, 2)
    work = Gemm(Layer(normal(4, 6), weights, normal(members, 5) if biases else None), activation)
    assert batched_matmul._is_wide(work)
    torch.testing.assert_close(batched_matmul.by_wide_product(work), expected(work))


def test_what_is_not_one_matrix_is_not_wide():
    assert not batched_matmul._is_wide(Gemm(Layer(normal(4, 6), normal(3, 6, 5))))
    assert not batched_matmul._is_wide(Gemm(Layer(normal(3, 4, 6), normal(6, 3, 5).permute(1, 0, 2))))
    assert not batched_matmul._is_wide(Gemm(Layer(normal(4, 6), normal(6, 9, 5).permute(1, 0, 2)[2:5])))


@pytest.mark.parametrize("first", [0, 2])
def test_copies_of_the_weights_lie_as_the_model_s_do_and_give_the_same(first):
    """All side by side, of which a part is read; and a second product, for the members from the third on."""
    stacked = normal(6, 9, 5).permute(1, 0, 2)[2:5]
    second = Layer(normal(3 - first, 4, 2), normal(3 - first, 5, 2).mT) if first else None
    work = Gemm(
        Layer(normal(3, 4, 6), stacked), second=second, first=first, addend=normal(first, 4, 5) if first else None
    )
    works = batched_matmul._with_copies(work)[:3]
    weights = [layer.weights for one in works for layer in one.layers()]
    assert len({one.data_ptr() for one in weights}) == len(weights)
    for one in works:
        assert [layer.weights.stride() for layer in one.layers()] == [layer.weights.stride() for layer in work.layers()]
        torch.testing.assert_close(batched_matmul.run(one, {}), expected(work))


@pytest.mark.parametrize(
    ("times", "attrs", "spent_attrs"),
    [
        ({"": 10, WIDE: 8, TILE: 7}, {TILE: "tile"}, {TILE: "tile"}),
        ({"": 10, WIDE: 8, TILE: 9}, {WIDE: True}, {TILE: "tile"}),
        ({"": 10, WIDE: 9.9, TILE: 9.8}, {}, {TILE: "tile"}),
    ],
)
def test_the_kernel_of_a_grouped_product_is_chosen_before_it_runs(times, attrs, spent_attrs, monkeypatch):
    def milliseconds(self, call, lanes=1, *, cold):
        assert cold
        _, kernel = call.args
        return times[next(iter(kernel), "")]

    monkeypatch.setattr(devices, "_DEVICES", {})
    monkeypatch.setattr(Tuner, "milliseconds", milliseconds)
    monkeypatch.setattr(batched_matmul, "tiles", lambda work: ["tile"])
    layers = ({"start": 0, "count": 3, "wide": 1},)
    op = Op(3, "group", "_GroupedMatMul", {"layers": layers}, [], [3])
    arguments = [normal(4, 6), normal(6, 3, 5)]
    assert batched_matmul.choose(op, arguments).attrs == {"layers": layers, **attrs}
    monkeypatch.setattr(Tuner, "milliseconds", None)  # measured once, remembered
    assert batched_matmul.choose(op, arguments).attrs == {"layers": layers, **attrs}
    monkeypatch.setattr(devices, "_DEVICES", {})
    Tuner.of(torch.device("cpu")).spent = SECONDS + 1
    assert batched_matmul.choose(op, arguments).attrs == {"layers": layers, **spent_attrs}, "few rows, by rule"
