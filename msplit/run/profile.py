"""Measure what a model's kernels cost, and use it in place of the data sheet."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from msplit._version import __version__
from msplit.assignment.model import opened
from msplit.core.arguments import Precision
from msplit.cost import profile as profiles
from msplit.cost.profile import InputShape, Profile, ProfiledDevice, ProfiledStep
from msplit.engines import environment
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.summary import structure_hash
from msplit.inputs.make import feeds_for
from msplit.progress import Progress
from msplit.run.request import RunRequest

if TYPE_CHECKING:
    import torch


def profile(
    flat: FlatGraph | str | os.PathLike[str],
    request: RunRequest | None = None,
    *,
    seconds: float = 20.0,
    grids: bool = True,
    progress: Progress | None = None,
) -> tuple[Profile, tuple[str, ...]]:
    """Times every kind of kernel of a model alone on the GPU, and the GPU's own constants. This executes the model.

    Args:
        flat: From `load`, or where the model is.
        request: What to measure: its workload, seed, precision, layout, device and libraries of ops.
        seconds: How long measuring may take, building the model not counted. What is not reached is priced statically.
        grids: Record grids and occupancy too.

    Returns:
        The profile, and what the user should know of how it was made.

    Raises:
        EngineError: There is no GPU, or the engine can not run the model.
    """
    flat = opened(flat)
    request = request or RunRequest()
    if request.device == "cuda" and (why := ENGINE.unavailable()):
        raise EngineError(
            f"there is nothing to measure on: {why}",
            fix="run `msplit profile` where the GPU is and bring the file here for --costs profile=; without one, a data sheet tells them",
        )
    import torch

    feeds = feeds_for(flat, request.workload, seed=request.seed)
    device = torch.device(request.device)
    job = Job(
        flat,
        np.zeros(len(flat), np.int32),
        1,
        feeds,
        options=EngineOptions(device=request.device, layout=request.layout),
        op_libraries=request.op_libraries,
        precision=Precision(request.precision),
    )
    if progress is not None:
        progress("building the model", 0.0)
    compiled = ENGINE.compile(job)
    found = compiled.profile(job, seconds=seconds, grids=grids, progress=progress)
    one_us = None
    if device.type == "cuda" and not compiled.dynamic:
        one_us = compiled.one_stream_seconds(job) * 1e6
    names = flat.graph.names
    steps = tuple(
        ProfiledStep(tuple(names[node] for node in nodes if node < len(flat)), kernel)
        for nodes, kernel in zip(found.nodes, found.kernel, strict=True)
        if nodes
    )
    made = Profile(
        graph_hash=structure_hash(flat.model),
        ops=profiles.op_counts(flat),
        inputs={name: InputShape(value.dtype.name, value.shape) for name, value in sorted(feeds.items())},
        device=_device(device),
        precision=str(Precision(request.precision)),
        layout=compiled.layout,
        constants=found.constants,
        kernels=found.kernels,
        steps=steps,
        one_us=one_us,
        unmeasured=found.unmeasured,
        made={"msplit": __version__, "time": datetime.now(UTC).isoformat(timespec="seconds")},
    )
    notes = [f"{number} steps are priced statically: {why}" for why, number in found.unmeasured.items()]
    if grids and found.recorded and not made.device.simulated:
        notes.append(f"no grids: {found.recorded}")
    return made, tuple(notes)


def compared(profile: Profile, *, precision: str, layout: str = "auto") -> list[str]:
    """What costs a run goes by, and how this run differs from the one that they were measured in; layout "auto" leaves that open."""
    gpu = next(iter(environment.gpus()), {})
    there = profile.device
    pairs = [
        (there.name, gpu.get("name", ""), "on"),
        (f"driver {there.driver}", f"driver {gpu['driver']}" if gpu else "", "with"),
        (f"PyTorch {there.pytorch}", f"PyTorch {_torch_version()}", "with"),
        (profile.precision, precision, "in"),
        (profile.layout, layout if layout != "auto" and profile.layout != "none" else "", "with convolutions in"),
    ]
    notes = [f"costs: {profile.describe()}"]
    return notes + [
        f"the profile was measured {how} {measured}, this run is {how} {now}"
        for measured, now, how in pairs
        if now and now != measured
    ]


def _torch_version() -> str:
    return environment.version("torch") or "none"


def _device(device: torch.device) -> ProfiledDevice:
    import torch

    version = _torch_version()
    if device.type != "cuda":
        return ProfiledDevice(name="CPU", pytorch=version)
    listed = environment.gpus()
    return ProfiledDevice(
        name=torch.cuda.get_device_name(device),
        sms=torch.cuda.get_device_properties(device).multi_processor_count,
        driver=listed[0].get("driver", "") if listed else "",
        cuda=str(torch.version.cuda),
        pytorch=version,
    )
