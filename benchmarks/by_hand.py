"""PyTorch's own CUDA graph of the same models, written by hand, beside msplit's on one stream and on several: same process, interleaved.

    python benchmarks/by_hand.py GRAPHS [--out OUT]

GRAPHS is made by `benchmarks/models.py`. Needs a GPU; the image models need torchvision. Weights are random on both sides: only times are
compared here (msplit's outputs are verified by `gpu_suite.py`). Writes OUT/by_hand.json with every raw time, prints the table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import itertools

import models

from msplit import api, rules
from msplit.decide.environment import environment
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.inputs.make import make_inputs

STREAMS = {"lstm": 10}
ROUNDS = 15


def mmoe(batch: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """16 experts, two gates, two towers."""
    nn = torch.nn

    class Mmoe(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def mlp(*sizes: int) -> nn.Sequential:
                return nn.Sequential(
                    *(layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU()))
                )

            self.experts = nn.ModuleList(mlp(512, 256, 256, 128) for _ in range(16))
            self.gates = nn.ModuleList(nn.Linear(512, 16) for _ in range(2))
            self.towers = nn.ModuleList(nn.Sequential(mlp(128, 64), nn.Linear(64, 1), nn.Sigmoid()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            mixed = torch.stack([expert(x) for expert in self.experts], 1)
            return [
                tower((mixed * torch.softmax(gate(x), -1).unsqueeze(2)).sum(1))
                for gate, tower in zip(self.gates, self.towers, strict=True)
            ]

    return Mmoe(), [torch.randn(batch, 512)]


def towers(batch: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """40 lookups with an MLP each."""
    nn = torch.nn

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(20_000, 32) for _ in range(40))
            self.mlps = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU()) for _ in range(40)
            )
            self.head = nn.Sequential(nn.Linear(640, 1), nn.Sigmoid())

        def forward(self, *ids: torch.Tensor) -> torch.Tensor:
            parts = [mlp(table(one)) for mlp, table, one in zip(self.mlps, self.tables, ids, strict=True)]
            return self.head(torch.cat(parts, 1))

    return Towers(), [torch.randint(0, 20_000, (batch,)) for _ in range(40)]


def lstm(batch: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """10 layers unrolled over 100 steps, unfused, as the graph has it."""

    class Lstm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = [torch.randn(256, 1024) / 16 for _ in range(20)] + [torch.zeros(1024) for _ in range(10)]
            self.weights = torch.nn.ParameterList(weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sequence = list(x.unbind(1))
            for layer in range(10):
                kernel, recurrent, bias = (self.weights[number] for number in (layer, 10 + layer, 20 + layer))
                h = c = x.new_zeros(batch, 256)
                following = []
                for value in sequence:
                    i, f, g, o = (value @ kernel + h @ recurrent + bias).chunk(4, 1)
                    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                    h = torch.sigmoid(o) * torch.tanh(c)
                    following.append(h)
                sequence = following
            return sequence[-1]

    return Lstm(), [torch.randn(batch, 100, 256)]


def vision(name: str, size: int) -> Callable[[int], tuple[torch.nn.Module, list[torch.Tensor]]]:
    """A model of torchvision."""

    def make(batch: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        import torchvision

        extra = {"init_weights": False, "transform_input": False} if name in ("googlenet", "inception_v3") else {}
        if name == "googlenet":
            extra["aux_logits"] = False
        return getattr(torchvision.models, name)(weights=None, **extra), [torch.randn(batch, 3, size, size)]

    return make


BY_HAND: dict[str, tuple[Callable[[int], tuple[torch.nn.Module, list[torch.Tensor]]], int]] = {
    "mmoe": (mmoe, 128),
    "towers": (towers, 128),
    "googlenet": (vision("googlenet", 224), 1),
    "inception_v3": (vision("inception_v3", 299), 1),
    "lstm": (lstm, 1),
}
"""Model -> what makes it, batch."""


class Captured:
    """A module captured as one CUDA graph on one stream."""

    def __init__(self, module: torch.nn.Module, inputs: list[torch.Tensor], *, channels_last: bool) -> None:
        self.module = module.eval().cuda()
        self.inputs = [value.cuda() for value in inputs]
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.inputs = [value.contiguous(memory_format=torch.channels_last) for value in self.inputs]
        side = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.module(*self.inputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=side):
                self.result = self.module(*self.inputs)

    def device_times(self, count: int) -> list[float]:
        """Seconds of each of `count` back-to-back replays."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def measured(graphs: Path, name: str) -> dict[str, list[float]]:
    """Seconds per step of every variant of one model."""
    make, batch = BY_HAND[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    variants: dict[str, Any] = {"by hand": Captured(*make(batch), channels_last=False)}
    if name in ("googlenet", "inception_v3"):
        variants["by hand, channels last"] = Captured(*make(batch), channels_last=True)
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), name, batch))
    sizes, costs = price(flat, batch=batch)
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    larger = {"fuse": True, "group": True}
    for streams, options in ((1, {}), (STREAMS.get(name, 8), {}), (1, larger)):
        ids = api.assign(flat, rules.load(models.RULES[name], streams=streams), priced=(sizes, costs)).ids
        job = Job(flat=flat, ids=ids, streams=streams, feeds=feeds, costs=costs, options=options)
        label = f"msplit, {streams}{', fused and grouped' if options else ''}"
        variants[label] = ENGINE.build(job)
        variants[label].step(feeds)
    times: dict[str, list[float]] = {label: [] for label in variants}
    order = list(variants)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for label in order:
            times[label] += variants[label].device_times(10)[2:]
    for label, variant in variants.items():
        if label.startswith("msplit"):
            variant.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--models", default=",".join(BY_HAND))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    raw = {name: measured(arguments.graphs, name) for name in arguments.models.split(",")}
    content = {"schema_version": 1, "environment": environment(sys.argv), "seconds": raw}
    (arguments.out / "by_hand.json").write_text(json.dumps(content))
    print("| model | batch | median µs, device clock |\n| --- | ---: | --- |")
    for name, times in raw.items():
        cells = "; ".join(f"{label}: {statistics.median(found) * 1e6:.0f}" for label, found in times.items())
        print(f"| {name} | {BY_HAND[name][1]} | {cells} |")


if __name__ == "__main__":
    main()
