"""What is called dense is what the cuda engine proves dense."""

from __future__ import annotations

import pytest

from msplit.analysis.dense import proved
from msplit.analysis.guesses import guesses
from msplit.cost import estimate, infer
from msplit.engines.cuda.engine import CudaEngine
from tests.shapes.small import Builder


def buckets(shift: str = "AddV2", by: int = 0, least: int = 0) -> tuple[list[str], float]:
    """`Where` over buckets that a constant is added to: ops that are guessed, and the share of the kernels."""
    b = Builder()
    ids = b.add("Bucketize", b.input("x", (None, 1), "float32"), T="float32", boundaries=[0.0, 1.0])
    moved = b.add(shift, ids, b.const([by], "int32"), T="int32")
    valid = b.add("GreaterEqual", moved, b.const([least], "int32"), T="int32")
    where = b.add("Where", valid, T="bool")
    b.add("GatherNd", moved, where, Tparams="int32", Tindices="int64")
    flat = b.flat()
    shapes = infer(flat, batch=8)
    found = guesses(flat, estimate(flat, shapes), shapes)
    assert (proved(flat.graph, shapes).all()) == (not found.nodes.size)
    return list(found.ops), found.share


def test_buckets_are_never_negative() -> None:
    assert buckets() == ([], 0.0)
    assert buckets(by=3) == ([], 0.0)
    assert buckets("Mul", by=3) == ([], 0.0)


@pytest.mark.parametrize(("shift", "by", "least"), [("AddV2", -1, 0), ("Sub", 1, 0), ("AddV2", 0, 1), ("Mul", -2, 0)])
def test_what_may_be_negative_proves_nothing(shift: str, by: int, least: int) -> None:
    assert buckets(shift, by, least)[0] == ["Where", "GatherNd"]


@pytest.mark.tf
def test_whatever_is_called_dense_is_dense_to_the_engine() -> None:
    pytest.importorskip("torch", reason="PyTorch, the cuda engine's kernel library, is not installed")
    from tests.engines.cuda.cases import job
    from tests.engines.cuda.passes.embedding.models import feeds_of, flat_columns
    from tests.engines.cuda.passes.embedding.test_static_shapes import COLUMNS

    dense = set()
    for name, (make, feature) in COLUMNS.items():
        flat = flat_columns(lambda columns, make=make, feature=feature: ([make(columns)], {"x": feature}))
        shapes = infer(flat, batch=7)
        found = guesses(flat, estimate(flat, shapes), shapes)
        if not len(found.nodes):
            dense.add(name)
            assert CudaEngine().compile(job(flat, feeds_of(flat, {"x": feature}, 7, 0, 6))).program.dynamic == ()
    assert dense >= {"one bucket", "mean of buckets", "root of buckets", "sum of buckets", "buckets as they are"}
