"""Classes that are drawn on a GPU are those of the CPU, step by step, in one captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.opset import schema
from tests.engines.cuda.cases import flat_of, options_of

pytestmark = pytest.mark.gpu

SIZES = [(8, 20, True), (64, 10_000, True), (8192, 1_000_000, True), (100, 50, False)]


def graph_of(kind: str) -> tuple[Any, list[str]]:
    graph = schema.graph_pb2.GraphDef()
    fed = graph.node.add(name="true", op="Placeholder")
    fed.attr["dtype"].type = 9  # int64
    for size in (4, 2):
        fed.attr["shape"].shape.dim.add(size=size)
    names = []
    for number, (count, size, unique) in enumerate(SIZES):
        node = graph.node.add(name=f"drawn_{number}", op=f"{kind}CandidateSampler", input=["true"])
        for name, value in (("num_true", 2), ("num_sampled", count), ("range_max", size), ("seed", 3), ("seed2", 5)):
            node.attr[name].i = value
        node.attr["unique"].b = unique
        names += [f"drawn_{number}:{port}" for port in range(3)]
    return flat_of(graph, outputs=names), names


@pytest.mark.parametrize("kind", ["Uniform", "LogUniform"])
def test_classes_are_those_of_the_cpu(kind: str) -> None:
    flat, names = graph_of(kind)
    feeds = {"true": np.arange(8, dtype=np.int64).reshape(4, 2)}
    made = []
    for device in ("cpu", "cuda"):
        job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, precision=Precision.IEEE, options=options_of(device))
        made.append(CudaEngine().build(job))
    for _ in range(4):
        wanted, found = (executable.step(feeds) for executable in made)
        for name in names:
            if name.endswith(":0"):
                np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
                count, _, unique = SIZES[int(name[6])]
                assert not unique or len(set(found[name].tolist())) == count
            else:
                np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, err_msg=name)
    for executable in made:
        executable.close()
