"""Which kernel runs a convolution, given what was measured."""

import pytest
import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ir.windows import TILES
from msplit.engines.cuda.kernels.tiles import Tiles
from tests.engines.cuda.autotune.test_matmul import Noted

OP = Op(0, "conv", "Conv2D", {"strides": (1, 1, 1, 1), "padding": "SAME"}, [(1, 0), (2, 0)], [0])
A, B, C = Tiles(16, 32, 64, 4, 3, turned=True), Tiles(32, 32, 64, 4, 3, 8), Tiles(1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        # per kernel: alone, on each of eight streams
        ({"library": (10, 20), A: (8, 18), B: (7, 19)}, B),
        ({"library": (10, 20), A: (8, 18), B: (7, 25)}, A),
        ({"library": (10, 20), A: (8, 22), B: (7, 25)}, None),
        ({"library": (10, 20), A: (8, 19.5), B: (12, 5)}, None),
        ({"library": (10, 20), A: (9.9, 10), B: (12, 5)}, None),
        ({"library": (10, 20), A: (8, 18), C: (1, 1)}, A),
    ],
)
def test_the_fastest_alone_that_is_faster_under_load_too(times, winner, monkeypatch):
    """C gives other numbers than the library, and is out."""

    def lowered(op):
        def run(data, filter):
            result = table()["Conv2D"].function(Node("conv", "Conv2D", OP.attrs), data, filter)
            return (result * (2 if op.attrs.get(TILES) == C else 1),)

        run.kernel = op.attrs.get(TILES, "library")
        return run

    def milliseconds(self, call, lanes=1, *, cold):
        assert cold
        return times[call.run.kernel][lanes > 1]

    monkeypatch.setattr(Tuner, "milliseconds", milliseconds)
    monkeypatch.setattr(conv, "candidates", lambda *_: [tiles for tiles in times if tiles != "library"])
    monkeypatch.setattr(conv, "worth_a_kernel", lambda dtype: True)
    monkeypatch.setattr(devices, "_DEVICES", {})
    data, filter = torch.randn(1, 5, 5, 4), torch.randn(3, 3, 4, 6).permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for _ in range(2):  # measured once, remembered
        op, weights = conv.choose(OP, [data, filter], lowered)
        assert op.attrs.get(TILES) == winner
        assert weights.is_contiguous() == (winner is not None and winner.turned)
        monkeypatch.setattr(Tuner, "milliseconds", None)


def test_all_that_is_timed_was_listed(monkeypatch):
    """Kernels and how the data lie that they are compiled for; nothing is chosen while they are listed."""
    launched = []

    def lowered(op):
        def run(data, filter):
            if TILES in op.attrs:
                launched.append((op.attrs[TILES], data.stride(), filter.stride()))
            return (table()["Conv2D"].function(Node("conv", "Conv2D", OP.attrs), data, filter),)

        return run

    monkeypatch.setattr(Tuner, "milliseconds", lambda self, call, lanes=1, *, cold: (call(), 1.0)[1])
    monkeypatch.setattr(conv, "candidates", lambda *_: [A, B, C])
    monkeypatch.setattr(conv, "worth_a_kernel", lambda dtype: True)
    monkeypatch.setattr(devices, "_DEVICES", {})
    data, filter = torch.randn(1, 5, 5, 4), torch.randn(3, 3, 4, 6).permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    tuner = Tuner.of(data.device)
    tuner._noted = listing = Noted()
    assert conv.choose(OP, [data, filter], lowered) == (OP, filter)
    tuner._noted = None
    assert all(weight > 0 for weight in listing.weights.values())
    listed = set(launched)
    launched.clear()
    conv.choose(OP, [data, filter], lowered)
    assert set(launched) == listed
    assert len(listed) == 3
