"""What the steps of a program cost, from the costs of the graph's nodes."""

from __future__ import annotations

import numpy as np
import pytest

from msplit import api
from msplit.api.profile import ProfileRequest, profile
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.step_costs import LEAST_US, estimated
from msplit.measure.inputs import make_inputs
from tests.cli.runner import SAMPLES


@pytest.fixture(scope="module")
def model():
    import torch

    flat = api.load(SAMPLES / "mmoe_small.pb")
    job = Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {}, batch=4), options={"device": "cpu"})
    return flat, CudaEngine().prepared(job, torch.device("cpu")).program


def test_a_step_takes_what_its_nodes_take_and_fills_what_its_product_fills(model):
    flat, program = model
    _, costs = api.price(flat, batch=4)
    found = estimated(program, costs)
    number = next(place for place, step in enumerate(program.steps) if len(step.op.covers) == 3 and step.launches)
    covers = program.steps[number].op.covers
    assert flat.graph.ops[covers[0]] == "MatMul"
    assert found.time_us[number] == pytest.approx(costs.time_us[covers].sum())
    assert found.share[number] == costs.share[covers[0]]
    launching = [step.launches for step in program.steps]
    assert (found.time_us[launching] >= LEAST_US).all()
    assert found.time_us.sum() == pytest.approx(costs.time_us.sum())


def test_measured_costs_come_out_as_they_were_measured(model):
    flat, program = model
    measured, _ = profile(flat, ProfileRequest(device="cpu", batch=4))
    _, costs = api.price(flat, profile=measured)
    found = estimated(program, costs)
    kinds = {step.nodes: step.kernel for step in measured.steps}
    for place, step in enumerate(program.steps):
        if step.launches:
            kernel = measured.kernels[kinds[tuple(flat.graph.names[node] for node in step.op.covers)]]
            assert found.time_us[place] == pytest.approx(max(kernel.time_us, LEAST_US))
