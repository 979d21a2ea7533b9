"""Measure what a model's kernels cost, and use it in place of the data sheet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from msplit._version import __version__
from msplit.assignment.model import opened
from msplit.core.arguments import Precision, whole
from msplit.cost import profile as profiles
from msplit.cost.profile import InputShape, Profile, ProfiledDevice, ProfiledStep, Workload
from msplit.engines import environment
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.summary import structure_hash
from msplit.inputs.make import feeds_for
from msplit.progress import Progress

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure.

    Attributes:
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        inputs: Files by input name, and under "" one that names its inputs itself: .npy, .npz, TFRecord or JSON.
        seed: Of made-up inputs.
        precision: What float32 is computed in, on every engine: ``ieee``, ``tf32``, ``bf16`` or ``fp16``; see `Precision`.
        layout: Memory layout of convolutions: ``auto`` measures.
        seconds: How long measuring may take, building the model not counted. What is not reached is priced statically.
        grids: Record grids and occupancy too.
        device: ``cuda``, or ``cpu`` to try it without a GPU: its times say nothing about one.
        op_libraries: Shared objects with custom TensorFlow ops.
    """

    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Path] = field(default_factory=dict)
    seed: int = 0
    precision: str = "tf32"
    layout: str = "auto"
    seconds: float = 20.0
    grids: bool = True
    device: str = "cuda"
    op_libraries: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if self.batch is not None:
            whole("the batch", self.batch)
        whole("the seed", self.seed, 0)
        Precision.read(self.precision)


def profile(
    flat: FlatGraph | str | os.PathLike[str], request: ProfileRequest | None = None, *, progress: Progress | None = None
) -> tuple[Profile, tuple[str, ...]]:
    """Times every kind of kernel of a model alone on the GPU, and the GPU's own constants. This executes the model.

    Args:
        flat: From `load`, or where the model is.
        request: What to measure; the defaults are those of `msplit profile`.

    Returns:
        The profile, and what the user should know of how it was made.

    Raises:
        EngineError: There is no GPU, or the engine can not run the model.
    """
    flat = opened(flat)
    request = request or ProfileRequest()
    if request.device == "cuda" and (why := ENGINE.unavailable()):
        raise EngineError(
            f"there is nothing to measure on: {why}",
            fix="run `msplit profile` where the GPU is and bring the file here for --costs profile=; without one, a data sheet tells them",
        )
    import torch

    feeds = feeds_for(flat, Workload(request.batch, request.shapes, request.inputs), seed=request.seed)
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
    found = compiled.profile(job, seconds=request.seconds, grids=request.grids, progress=progress)
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
    if request.grids and found.recorded and not made.device.simulated:
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
