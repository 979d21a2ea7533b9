"""Fused groups on a real GPU: Triton's kernels give what the ops give, in CUDA graphs, on any streams, one kernel per group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import msplit
from msplit.core.precision import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.inputs.make import make_inputs
from msplit.measure.verification import compare
from tests.engines.cuda.cases import flat_of, options_of, scattered
from tests.engines.cuda.random_graphs import POINTWISE, random_graphs

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 88.8, -104.0, 1e-8, 7.0, -2.5]


def built(engine, flat, feeds, streams, **options):
    job = Job(
        flat,
        scattered(flat, streams, streams),
        streams,
        feeds,
        precision=Precision.IEEE,
        options=options_of("cuda", layout="nhwc", **options),
    )
    return engine.build(job)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_graphs(most=25, steps=POINTWISE))
def test_random_graphs_give_the_same_fused_and_replayed(case):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    engine = CudaEngine()
    plain, fused = (built(engine, flat, feeds, 4, fuse=fuse) for fuse in (False, True))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        fresh = {
            name: rng.standard_normal(value.shape).astype(value.dtype) if value.dtype.kind == "f" else value
            for name, value in feeds.items()
        }
        found = compare(fused.step(fresh), plain.step(fresh), tolerance=1e-4)
        assert found.passed, found.describe()
    plain.close()
    fused.close()


def test_a_group_is_one_launch():
    import torch

    flat = msplit.load(SAMPLES / "lstm_small.pb")
    feeds = make_inputs(flat, {}, batch=1, seed=0)
    engine = CudaEngine()
    executable = built(engine, flat, feeds, 2, fuse=True, capture=False)
    facts = executable.facts()
    assert facts["fused_groups"] >= 20
    assert not facts["not_fused"]
    executable.step(feeds)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        executable.launch()
    names = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
    assert sum(name.startswith("triton") for name in names) == facts["fused_groups"]
    executable.close()


def test_memory_of_captures_is_counted_where_others_are_let_go_meanwhile():
    """A capture gives back what PyTorch keeps of others, here 256 MB: the pool was less than nothing."""
    import torch

    flat = msplit.load(SAMPLES / "lstm_small.pb")
    feeds = make_inputs(flat, {}, batch=1, seed=0)
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    executable = built(CudaEngine(), flat, feeds, 2)
    assert executable.facts()["pool_bytes"] > 0
    executable.close()


def test_special_values():
    import torch

    from msplit.engines.cuda.passes.pointwise_fusion.body import Body, Call
    from msplit.engines.cuda.passes.pointwise_fusion.inductor import Compiler, Kernel, layout

    x, y = (-1, 0), (-1, 1)
    binary = [
        "Maximum",
        "Minimum",
        "SquaredDifference",
        "RealDiv",
        "DivNoNan",
        "MulNoNan",
        "Xdivy",
        "Xlogy",
        "Pow",
        "Sub",
        "Less",
    ]
    unary = [
        "Relu",
        "Relu6",
        "Sigmoid",
        "Tanh",
        "Softplus",
        "Elu",
        "Selu",
        "Softsign",
        "Sign",
        "Rsqrt",
        "Sqrt",
        "Log1p",
        "Expm1",
        "Erf",
    ]
    values = torch.tensor(SPECIAL, device="cuda")
    a, b = (part.reshape(-1).contiguous() for part in torch.meshgrid(values, values, indexing="ij"))
    for op in [*binary, *unary, "Neg", "Abs", "Floor", "Rint", "IsNan", "Exp", "Log"]:
        arguments = (x, y) if op in binary else (x,)
        tensors = (a, b)[: len(arguments)]
        # The second op makes it a group; it changes nothing.
        body = Body(
            (Call(op, {}, arguments), Call("Select", {}, ((-1, len(tensors)), (0, 0), (0, 0)))),
            len(tensors) + 1,
            ((1, 0),),
        )
        tensors = (*tensors, torch.ones_like(a, dtype=torch.bool))
        kernel = Compiler(torch.device("cuda")).kernel(body, tuple(map(layout, tensors)))
        assert isinstance(kernel, Kernel), (op, kernel)
        with torch.no_grad():
            made, wanted = kernel(*tensors)[0], body(*tensors)[0]
        torch.testing.assert_close(made, wanted, equal_nan=True, rtol=1e-5, atol=1e-30, msg=f"{op}: {made} {wanted}")
