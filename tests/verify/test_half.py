"""Half precision from end to end: a bench tells what it costs, and what is prepared, built and pooled runs in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.core.arguments import Precision
from msplit.errors import MsplitError
from msplit.report.benchmark import document
from msplit.verify.compare import compare, tolerance_of
from tests.cli.runner import fine

pytest.importorskip("torch")

MODEL = Path(__file__).parents[2] / "sample_graphs" / "mmoe_small.pb"
QUICK = msplit.Settings(duration=0.05, warmup=0.0, min_rounds=2, builds=1, verify_inputs=1)


def request(precision: str, **more) -> dict[str, Any]:
    return dict(streams=(2,), engine="cuda", device="cpu", batch=4, precision=precision, settings=QUICK, **more)


def distances(got, expected) -> list[float]:
    return [one.distance for one in compare(got, expected).outputs]


@pytest.mark.tf
def test_a_bench_shows_half_precision_beside_float32_and_tells_what_it_costs():
    found = msplit.bench(MODEL, **request("bf16", fuse=False))
    assert not found.result.failed
    *half, wide = found.result.variants
    assert [one.label.endswith(", bf16") for one in half] == [True] * len(half)
    assert wide.label.endswith(", float32")
    assert sum(one.ratio_over(wide.label) is not None for one in half) == 1
    for one in half:
        checks = {(check.against, check.precision): check.comparison for check in one.checks}
        proved, measured = (checks["TensorFlow on the CPU", precision].outputs for precision in ("ieee", "bf16"))
        assert all(each.tolerance == 2e-4 and not each.as_a_whole for each in proved)
        assert all(1e-3 < each.distance < 2e-2 and each.as_a_whole for each in measured)
        assert all(each.distance < each.tolerance < 2e-2 for each in measured)
    (table,) = [
        table for table in document(msplit.load(MODEL), found).tables if table.title == "What half precision costs"
    ]
    assert table.rows
    assert {row[2] for row in table.rows if "float32" not in row[0]} == {"TensorFlow on the CPU"}
    assert [float(row[4]) for row in table.rows] == sorted((float(row[4]) for row in table.rows), reverse=True)


@pytest.mark.tf
@pytest.mark.parametrize(("precision", "wrong"), [("bf16", 1.5), ("fp16", 1.1)])
def test_a_kernel_of_half_precision_with_a_wrong_scale_is_caught(precision, wrong, monkeypatch):
    """One product of many; the bounds for networks of any depth let it pass."""
    import torch

    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.ir import lowering

    right = lowering.table()["_FusedMatMul"]

    def scaled(node, *inputs):
        found = right.function(node, *inputs)
        off = inputs[0].dtype in (torch.float16, torch.bfloat16) and "tower_0/dense_0" in node.name
        return found * wrong if off else found

    monkeypatch.setitem(lowering._TABLE, "_FusedMatMul", replace(right, function=scaled))
    model = msplit.load(MODEL)
    found = msplit.bench(model, **request(precision, fuse=False, group=False))
    failed = [
        one
        for variant in found.result.variants
        for check in variant.checks
        for one in check.comparison.outputs
        if not one.passed
    ]
    assert {one.name for one in failed} == {"tower_0/out/Sigmoid"}
    assert all(one.distance < tolerance_of("float32", Precision(precision)) for one in failed)
    ENGINE.forget(model)


@pytest.mark.tf
def test_tensorflow_runs_its_own_mixed_precision():
    short = (
        "--measure",
        "duration=0.1",
        "--measure",
        "builds=1",
        "--measure",
        "warmup=0",
        "--streams",
        "1",
        "--engine",
        "tensorflow",
    )
    done = fine("bench", MODEL, "--precision", "bf16", "--format", "json", *short)
    first, wide = done.json["result"]["variants"]
    assert (first["label"], wide["label"]) == ("TensorFlow, 1 stream, bf16", "TensorFlow, 1 stream, float32")
    distance = {
        check["precision"]: max(one["distance"] for one in check["outputs"])
        for check in first["checks"]
        if check["against"] == "TensorFlow on the CPU"
    }
    assert distance["ieee"] < 1e-6 < 1e-3 < distance["bf16"] < 2e-2


def test_what_is_prepared_built_and_pooled_runs_in_half_precision(tmp_path):
    model = msplit.load(MODEL)
    with msplit.prepare(model, **request("ieee", effort="fast")) as exact:
        feeds = {name: np.array(value) for name, value in exact.buffers.items()}
        expected = exact.step(feeds)
    with msplit.prepare(model, **request("fp16", effort="fast")) as prepared:
        got = prepared.step(feeds)
    assert all(1e-5 < one < 2e-3 for one in distances(got, expected))
    made = msplit.build(model, tmp_path / "build", **request("fp16", effort="fast"))
    assert made.manifest.precision == "fp16"
    with msplit.open(tmp_path / "build") as opened:
        assert distances(opened.step(feeds), got) == [0.0] * len(got)
        assert [check.precision for check in opened.checks] == ["fp16"]
    with msplit.pool(model, **request("bf16", effort="fast")) as pool:
        assert all(1e-3 < one < 2e-2 for one in distances(pool.step(feeds), expected))


def test_a_precision_that_there_is_not_is_refused():
    with pytest.raises(MsplitError, match="there is no precision 'fp8'"):
        msplit.bench(MODEL, **request("fp8"))
