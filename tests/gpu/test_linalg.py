"""Linear algebra and XLA's slices are captured: a replay with new inputs gives what the CPU gives, and nothing waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError
from msplit.opset import schema
from tests.engines.cuda.cases import flat_of

pytestmark = pytest.mark.gpu


def _values(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def _regular(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Matrices that have an inverse, none of them close to one that has none."""
    return _values(shape, seed) / np.float32(shape[-1] ** 0.5) + 3 * np.eye(shape[-1], dtype=np.float32)


def _definite(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    matrices = _regular(shape, seed)
    return matrices @ np.swapaxes(matrices, -1, -2)


SQUARE = [(5, 5), (3, 64, 64), (40, 8, 8), (2, 600, 600)]
CASES: list[Any] = [
    *(("Cholesky", lambda seed, s=s: [_definite(s, seed)], {}) for s in SQUARE),
    *(("MatrixInverse", lambda seed, s=s: [_regular(s, seed)], {}) for s in SQUARE[:3]),
    *(("MatrixSolve", lambda seed, s=s: [_regular(s, seed), _values((*s[:-1], 3), seed + 1)], {}) for s in SQUARE[:3]),
    *(
        ("MatrixTriangularSolve", lambda seed, s=s: [_regular(s, seed), _values((*s[:-1], 3), seed + 1)], {"adjoint": True})
        for s in SQUARE[:3]
    ),
    *(("MatrixDeterminant", lambda seed, s=s: [_values(s, seed)], {}) for s in SQUARE[:3]),
    *(("LogMatrixDeterminant", lambda seed, s=s: [_values(s, seed)], {}) for s in SQUARE[:3]),
    *(("Lu", lambda seed, s=s: [_regular(s, seed)], {}) for s in SQUARE[:3]),
    *(("Qr", lambda seed, s=s: [_values(s, seed)], {}) for s in [(5, 3), (3, 64, 64), (40, 8, 8)]),
    (
        "XlaDynamicUpdateSlice",
        lambda seed: [_values((2, 9, 4), seed), _values((2, 1, 4), 9), np.array([0, seed + 3, 0], np.int32)],
        {},
    ),
    (
        "XlaDynamicUpdateSlice",
        lambda seed: [_values((2, 9, 4), seed), _values((1, 2, 4), 9), np.array([seed, 7 + seed, 0], np.int32)],
        {},
    ),
    (
        "XlaDynamicSlice",
        lambda seed: [_values((2, 9, 4), seed), np.array([0, 3 + seed, -1], np.int32), np.array([2, 3, 2], np.int32)],
        {},
    ),
    ("HistogramFixedWidth", lambda seed: [_values((900,), seed), np.array([-1, 1], np.float32), np.array(7)], {}),
    ("ApproxTopK", lambda seed: [_values((4, 90), seed)], {"k": 5}),
    ("Polygamma", lambda seed: [np.full((8,), 2, np.float32), _values((8,), seed) + 2], {}),
]  # fmt: skip


def _run(
    op: str, arrays: list[np.ndarray[Any, Any]], attrs: dict[str, Any], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    lowering = table()[op]
    given = [array if slot in lowering.static else tensors[slot] for slot, array in enumerate(arrays)]
    found = lowering.function(Node("node", op, attrs), *given)
    return list(found) if isinstance(found, tuple) else [found]


def _tensors(arrays: list[np.ndarray[Any, Any]], device: str) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(array)).to(device) for array in arrays]


@pytest.mark.parametrize(("op", "inputs", "attrs"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_a_replay_gives_what_the_cpu_gives(op: str, inputs: Any, attrs: dict[str, Any]) -> None:
    first, second = inputs(0), inputs(1)
    tensors = _tensors(first, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Libraries make their handles and workspaces on first use, which can not be captured.
        _run(op, first, attrs, tensors)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):  # as the engine does
        outputs = _run(op, first, attrs, tensors)
    for tensor, fresh in zip(tensors, _tensors(second, "cuda"), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(outputs, _run(op, second, attrs, _tensors(second, "cpu")), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)


def test_what_the_library_can_not_capture_is_named_and_runs_launch_by_launch() -> None:
    """LU of two matrices of 600 rows waits for the device (PyTorch 2.11 with CUDA 13)."""
    made = schema.graph_pb2.GraphDef()
    node = made.node.add(op="Placeholder", name="x")
    node.attr["dtype"].type = 1
    for size in (2, 600, 600):
        node.attr["shape"].shape.dim.add(size=size)
    made.node.add(op="MatrixInverse", name="inverse", input=["x"]).attr["T"].type = 1
    flat, feeds = flat_of(made, outputs=["inverse"]), {"x": _regular((2, 600, 600), 0)}
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, precision=Precision.IEEE)
    eager = CudaEngine().build(replace(job, options=EngineOptions(capture=False)))
    np.testing.assert_allclose(eager.step(feeds)["inverse"], np.linalg.inv(feeds["x"]), rtol=1e-3, atol=1e-4)
    eager.close()
    with pytest.raises(EngineError, match=r"inverse \(MatrixInverse\) can not be captured: .*\n.*--cuda capture=no"):
        CudaEngine().build(job)
    assert torch.randn(3, device="cuda").shape == (3,), "a capture that failed must leave the generator as it was"
