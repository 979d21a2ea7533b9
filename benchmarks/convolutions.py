"""Each convolution of a model alone and along the model's critical path, µs: the library's, ours, and ours started early.

    python benchmarks/convolutions.py GRAPHS [--model inception_v3] [--batch 1]
    python benchmarks/convolutions.py GRAPHS --steps [--streams 8]

GRAPHS is made by `models.py`. Needs a GPU, and no TensorFlow. Weights are not in the cache. *Alone* is a kernel among ten of its own in a
row, the fastest of all ways to cut it; *on the path*, how much longer the path's convolutions take, one after the other in one graph,
with this one at their end. *At least* is what the GPU's memory or its tensor cores need, by the data sheet, and the way from one kernel
of a graph to the next. With `--steps`, whole steps are benched, with early kernels and without: plain and fused, on one stream and several.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api
from msplit.engines.base import Job
from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.tuner import CALLS, RotatingWeights, Tuner, copies
from msplit.engines.cuda.device.device import Device, precision
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.interpret import as_tuple, call
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.program import KernelCall
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.passes.tracing import trace
from msplit.flatten.flat import FlatGraph
from msplit.inputs.make import make_inputs
from msplit.opset.traits import CONV2D

BYTES_PER_US, FLOPS_PER_US = 4.8e6, 4.9e8
"""Memory of an H200, and TF32 on its tensor cores."""

NEXT_US = 1.3
"""From one kernel of a graph to the next."""

OTHER_US = 2.5
"""A kernel that is no convolution, on the critical path."""

WAYS = ("library", "ours", "early")

_Call = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(eq=False)
class Convolution:
    """A convolution of the model with its inputs; what was measured of its kind, by the way: µs, tiles, and what runs it."""

    op: Op
    arguments: list[torch.Tensor]
    out: tuple[int, ...]
    us: dict[str, float] = field(default_factory=dict)
    tiles: dict[str, Tiles | None] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for those that take the same time."""
        attrs = tuple(str(self.op.attrs.get(name)) for name in ("strides", "padding", "explicit_paddings", "dilations"))
        return (tuple(self.arguments[0].shape), tuple(self.arguments[1].shape), attrs, len(self.arguments))

    @property
    def flops(self) -> int:
        """Two for each product that is added up."""
        summed = self.arguments[1].shape[: 2 if conv.is_depthwise(self.op) else 3]
        return int(2 * math.prod(self.out) * math.prod(summed))

    @property
    def bytes(self) -> int:
        """Of data, filter and result."""
        return int(sum(one.nbytes for one in self.arguments[:2]) + 4 * math.prod(self.out))

    @property
    def least_us(self) -> float:
        """See `at least` above."""
        return NEXT_US + max(self.bytes / BYTES_PER_US, self.flops / FLOPS_PER_US)

    def blocks(self, way: str) -> str:
        """How many blocks it has, and of what."""
        tiles = self.tiles.get(way)
        if tiles is None:
            return ""
        pixels, results = math.prod(self.out[:-1]), self.out[-1]
        count = -(-pixels // tiles.pixels) * -(-results // tiles.results) * tiles.parts
        return f"{count} of {tiles.pixels}x{tiles.results}x{tiles.summands}/{tiles.stages}"

    def run(self, way: str) -> _Call:
        """What runs it so, the filter given as `filter` has it."""
        tiles = self.tiles.get(way)
        return lowered(self.op if tiles is None else conv._tiled(self.op, tiles))

    def filter(self, way: str) -> torch.Tensor:
        """The filter as it lies for that."""
        tiles, filter = self.tiles.get(way), self.arguments[1]
        return filter.contiguous() if tiles is not None and tiles.turned else filter


def lowered(op: Op) -> _Call:
    """What runs an op on NHWC data."""
    return lambda *tensors: as_tuple(call(table()[op.op], op, list(tensors)))


def convolutions(job: Job, device: torch.device) -> tuple[list[Convolution], list[Convolution]]:
    """All of a model, and those on its critical path, once they were measured by `measure`."""
    optimized = ENGINE.compile(job).optimized
    found: dict[int, Convolution] = {}

    def observe(step: KernelCall, arguments: list[torch.Tensor]) -> None:
        if (step.op.op in CONV2D or conv.is_depthwise(step.op)) and len(arguments) > 1 and arguments[1].dim() == 4:
            out = tuple(step.call(*arguments)[0].shape)
            found[step.op.node] = Convolution(
                step.op, [one.clone(memory_format=torch.preserve_format) for one in arguments], out
            )

    program = trace(optimized.graph, optimized.feeds, device, measure=False, observe=observe)
    tuner, known = Tuner.of(device), dict[tuple[Any, ...], Convolution]()
    for one in found.values():
        first = known.setdefault(one.kind, one)
        if first is one:
            measure(tuner, one)
        one.us, one.tiles = first.us, first.tiles
    ends = np.zeros(len(program.steps))
    before = np.full(len(program.steps), -1)
    for number, step in enumerate(program.steps):
        sources = program.dag.src[program.dag.start[number] : program.dag.start[number + 1]]
        if len(sources):
            before[number] = sources[np.argmax(ends[sources])]
        own = found[step.op.node].us["ours"] if step.op.node in found else OTHER_US * step.launches
        ends[number] = own + (ends[before[number]] if len(sources) else 0.0)
    path, at = [], int(np.argmax(ends))
    while at >= 0:
        path.append(found.get(program.steps[at].op.node))
        at = int(before[at])
    return list(found.values()), [one for one in reversed(path) if one is not None]


def measure(tuner: Tuner, one: Convolution) -> None:
    """Times it alone in every way."""
    data, filter, *rest = one.arguments
    turned = filter.contiguous()
    weights = {False: copies(filter), True: copies(turned)}
    library = RotatingWeights(lowered(one.op), data, weights[False], rest)
    expected = library()
    one.us["library"], one.tiles["library"] = tuner.milliseconds(library, cold=True) * 1e3 / CALLS, None
    for way in WAYS[1:]:
        conv.EARLY = way == "early"
        calls = [
            (tiles, RotatingWeights(lowered(conv._tiled(one.op, tiles)), data, weights[tiles.turned], rest))
            for tiles in conv.cuts(one.op, data, filter, expected)
        ]
        ranked = tuner.ranked(calls, expected, cold=True, forgiving=True)
        best = ranked[0] if ranked else None
        wins = best is not None and best.milliseconds * 1e3 / CALLS < one.us["library"]
        one.us[way] = best.milliseconds * 1e3 / CALLS if best is not None and wins else one.us["library"]
        one.tiles[way] = best.choice if best is not None and wins else None
    conv.EARLY = True


def along(tuner: Tuner, path: Sequence[Convolution], way: str) -> list[float]:
    """µs that each adds to those in front of it, one after the other in one graph."""
    calls = [functools.partial(one.run(way), one.arguments[0], one.filter(way), *one.arguments[2:]) for one in path]
    until = [1e3 * tuner._timer.replay_ms([calls[: count + 1]], cold=True) for count in range(len(calls))]
    return [until[0], *np.diff(until)]


def table_of(flat: FlatGraph, batch: int) -> None:
    """Prints a row per kind of convolution, those on the critical path first, in its order."""
    feeds = make_inputs(flat, {}, batch=batch)
    options = EngineOptions("cuda", measure=False, layout="nhwc")
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=options)
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad(), Device.of(device).entered(), precision(ieee=False):
        every, path = convolutions(job, device)
        tuner = Tuner.of(device)
        added = {way: along(tuner, path, way) for way in WAYS}
    name = torch.cuda.get_device_name(device)
    print(f"{name}, PyTorch {torch.__version__}, batch {batch}: {len(every)} convolutions, {len(path)} on the path\n")
    inside = [f"on the path: {way}" for way in WAYS]
    head = ["data", "filter", "strides", "of all", "MFLOP", "KB", "at least", *WAYS, "blocks, ours", *inside]
    print(f"| {' | '.join(head)} |\n|{' --- |' * 3}{' ---: |' * 7} --- |{' ---: |' * 3}")
    rows = [*zip(path, *added.values(), strict=True)]
    on_path = {one.kind for one in path}
    rest = {one.kind: one for one in every if one.kind not in on_path}
    for one, *us in [*rows, *((one,) for one in rest.values())]:
        data, filter, *_ = one.arguments
        size = "x".join(map(str, data.shape[1:])), "x".join(map(str, filter.shape)), str(one.op.attrs.get("strides"))
        same = sum(other.kind == one.kind for other in every)
        alone = " | ".join(f"{one.us[way]:.1f}" for way in WAYS)
        added_us = " | ".join(f"{value:.1f}" for value in us) or " | | "
        print(
            f"| {' | '.join(size)} | {same} | {one.flops / 1e6:.0f} | {one.bytes / 1e3:.0f} | {one.least_us:.1f} "
            f"| {alone} | {one.blocks('ours')} | {added_us} |"
        )
    least = sum(one.least_us for one in path)
    alone = ", ".join(f"{way} {sum(one.us[way] for one in path):.0f}" for way in WAYS)
    in_one = ", ".join(f"{way} {sum(us):.0f}" for way, us in added.items())
    print(f"\nThe path: at least {least:.0f}; alone {alone}; in one graph {in_one}.")


def steps_of(flat_of: Callable[[], FlatGraph], batch: int, streams: int) -> None:
    """Benches whole steps, without early kernels and with them: of all that is chosen, nothing is kept in between."""
    for early in (False, True):
        conv.EARLY = early
        Tuner.of(torch.device("cuda", torch.cuda.current_device()))._chosen.clear()
        request = {
            "engine": "cuda",
            "batch": batch,
            "streams": (streams,),
            "ruleset": "vision",
            "compare_tensorflow": False,
        }
        made = api.bench(flat_of(), **request)
        print(f"early: {early}")
        for one in made.result.variants:
            us = "-" if one.device is None else f"{one.device.median * 1e6:.0f}"
            checked = "right" if one.checks and not one.failed else "WRONG" if one.failed else "not checked"
            print(f"  {one.label}: {us} µs on the device, {checked}", flush=True)
    conv.EARLY = True


def main() -> None:
    """Prints the table, or the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--model", default="inception_v3")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args()
    os.environ["MSPLIT_KEEP_CHOICES"] = "0"  # what is chosen here is for here
    with tempfile.TemporaryDirectory() as folder:
        path = models.fill(args.graphs, Path(folder), args.model, args.batch)
        if args.steps:
            steps_of(lambda: api.load(path), args.batch, args.streams)
        else:
            table_of(api.load(path), args.batch)


if __name__ == "__main__":
    main()
