"""What our convolution kernels and merged siblings do on a GPU: single shapes with many tiles, then whole models.

    python benchmarks/siblings_probe.py GRAPHS [--models googlenet,inception_v3] [--only kernels|models]

GRAPHS is made by `benchmarks/models.py`. Needs no TensorFlow. Times in µs. Shapes: alone / on each of eight streams. Models: by the
device's clock / a user's step. Kernels are compiled by several processes first, which fill Triton's cache.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

SHAPES = (
    # height, width, channels, output channels of each, window, stride, times in Inception-v3 or GoogLeNet
    (17, 17, 768, (192,), (1, 1), 1),
    (17, 17, 768, (192, 128, 128), (1, 1), 1),
    (17, 17, 768, (192, 192, 192), (1, 1), 1),
    (17, 17, 160, (160,), (1, 7), 1),
    (17, 17, 192, (192,), (7, 1), 1),
    (17, 17, 192, (320,), (3, 3), 2),
    (35, 35, 288, (64,), (1, 1), 1),
    (35, 35, 288, (64, 48, 64), (1, 1), 1),
    (35, 35, 64, (96,), (3, 3), 1),
    (35, 35, 96, (96,), (3, 3), 1),
    (35, 35, 48, (64,), (5, 5), 1),
    (35, 35, 288, (384,), (3, 3), 2),
    (8, 8, 1280, (448,), (1, 1), 1),
    (8, 8, 2048, (320,), (1, 1), 1),
    (8, 8, 2048, (320, 384, 448), (1, 1), 1),
    (8, 8, 384, (384,), (1, 3), 1),
    (8, 8, 448, (384,), (3, 3), 1),
    (28, 28, 128, (192,), (3, 3), 1),
    (14, 14, 512, (112, 144, 32), (1, 1), 1),
    (14, 14, 144, (288,), (3, 3), 1),
    (7, 7, 832, (256, 160, 32), (1, 1), 1),
    (7, 7, 192, (384,), (3, 3), 1),
)
TILES = (
    # pixels, results, summands, warps, stages, slices
    (16, 32, 64, 4, 3, 1),
    (32, 32, 64, 4, 3, 1),
    (32, 32, 128, 8, 3, 1),
    (32, 32, 64, 4, 3, 4),
    (32, 32, 64, 4, 5, 4),
    (32, 32, 128, 8, 3, 8),
    (16, 32, 128, 8, 3, 8),
    (16, 32, 128, 8, 4, 8),
    (16, 32, 64, 4, 4, 4),
    (32, 64, 64, 4, 3, 4),
    (64, 64, 64, 4, 4, 1),
)
PARTS = (1, 2, 4, 8)
BLOCKS = 300
EARLY = (SHAPES[0], SHAPES[3])
PROCESSES = 14


class Case:
    """One shape: its tensors, and calls of it."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        import torch

        from msplit.engines.cuda.ops.conv import prepare_filter
        from msplit.engines.cuda.registry import Node

        height, width, channels, self.sizes, window, stride = shape
        chance = torch.Generator("cuda").manual_seed(0)

        def normal(*sizes: int) -> Any:
            return torch.randn(sizes, device="cuda", generator=chance)

        self.data = normal(1, height, width, channels)
        self.filter = prepare_filter(normal(*window, channels, sum(self.sizes)) / 16, True)
        self.bias = normal(sum(self.sizes))
        padding = "VALID" if stride > 1 else "SAME"
        self.node = Node("conv", "_FusedConv2D", {"strides": (1, stride, stride, 1), "padding": padding})
        starts = np.cumsum([0, *self.sizes])
        self.own = [
            (prepare_filter(self.filter[..., start:end], True), self.bias[start:end].clone())
            for start, end in itertools.pairwise(starts)
        ]
        self.expected = self.library()

    def library(self) -> list[Any]:
        from msplit.engines.cuda.ops.conv import convolve

        return [convolve(self.node, self.data, filter, bias, relu=True) for filter, bias in self.own]

    def lanes(self) -> list[Any]:
        from msplit.engines.cuda.ops.conv import convolve

        return [
            lambda filter=filter, bias=bias: convolve(self.node, self.data, filter, bias, relu=True)
            for filter, bias in self.own
        ]

    def variants(self) -> Iterator[Any]:
        from msplit.engines.cuda import conv_kernel

        pixels = self.expected[0].numel() // self.sizes[0]
        for *size, slices in TILES:
            whole = conv_kernel.Tiles(*size, slices=slices)
            blocks = -(-pixels // whole.pixels) * sum(-(-one // whole.results) for one in self.sizes)
            steps = conv_kernel.summing_steps(self.data, self.filter, whole)
            for parts in PARTS:
                if parts == 1 or (blocks * parts <= BLOCKS and steps >= parts):
                    yield whole._replace(parts=parts)

    def ours(self, tiles: Any) -> list[Any]:
        from msplit.engines.cuda import conv_kernel
        from msplit.engines.cuda.ops.conv import frames_of

        frames = frames_of(self.node, self.data, self.filter)
        return conv_kernel.convolve_siblings(self.data, self.filter, frames, tiles, self.bias, self.sizes, relu=True)

    def error(self, tiles: Any) -> float:
        made = self.ours(tiles)
        return max(
            float((one - wanted).abs().max() / wanted.abs().max())
            for one, wanted in zip(made, self.expected, strict=True)
        )


def kernels() -> None:
    """Every shape with every way to cut it."""
    from msplit.engines.cuda import contest

    us = 1e3 / contest.CALLS
    for shape in SHAPES:
        case = Case(shape)
        library = [us * contest.milliseconds(case.library, lanes) for lanes in (1, 8)]
        beside = us * contest.milliseconds_of(case.lanes())
        found, wrong = [], []
        for tiles in case.variants():
            try:
                error = case.error(tiles)
                if error > 5e-3:
                    wrong.append(f"{tuple(tiles)} {error:.0e}")
                    continue
                call = functools.partial(case.ours, tiles)
                times = [us * contest.milliseconds(call, lanes) for lanes in (1, 8)]
                found.append((*times, tiles))
            except Exception as problem:
                wrong.append(f"{tuple(tiles)} {type(problem).__name__} {str(problem)[:80]}")
        found.sort(key=lambda one: one[0])
        line = f"{shape}: library {library[0]:.1f}/{library[1]:.1f} beside {beside:.1f};"
        best: dict[Any, Any] = {}
        for alone, loaded, tiles in found:
            best.setdefault((tiles[:5], tiles.slices), (alone, loaded, tiles.parts))
        line += "".join(
            f" {'x'.join(map(str, key[0]))}s{key[1]}p{parts} {alone:.1f}/{loaded:.1f}"
            for key, (alone, loaded, parts) in best.items()
        )
        if shape in EARLY:
            line += early_start(case)
        print(line, *wrong, sep="\n  WRONG " if wrong else "", flush=True)


def early_start(case: Case) -> str:
    """What it gains that a kernel may start while the one before it ends."""
    from msplit.engines.cuda import contest, conv_kernel

    us = 1e3 / contest.CALLS
    tiles = conv_kernel.Tiles(*TILES[5][:5], 1, TILES[5][5])
    try:
        conv_kernel.EARLY = True
        times = [us * contest.milliseconds(lambda: case.ours(tiles), lanes) for lanes in (1, 8)]
        return f" | early start {tuple(tiles)} {times[0]:.1f}/{times[1]:.1f} error {case.error(tiles):.0e}"
    except Exception as problem:
        return f" | early start: {type(problem).__name__} {str(problem)[:100]}"
    finally:
        conv_kernel.EARLY = False


def warm(number: int) -> None:
    """One process' share of the compiling."""
    cases = [Case(shape) for shape in SHAPES]
    seen = set()
    work = []
    for case in cases:
        for tiles in case.variants():
            point = case.filter.shape[0] * case.filter.shape[1] == 1
            key = (tiles[:5], tiles.slices, tiles.parts > 1, point, len(case.sizes) > 1)
            if key not in seen:
                seen.add(key)
                work.append((case, tiles, case.filter))
                if tiles.slices == 1 and len(case.sizes) == 1:  # as single convolutions have it
                    work.append((case, tiles, case.filter.contiguous()))
    for case, tiles, filter in work[number::PROCESSES]:
        try:
            case.filter = filter
            case.ours(tiles)
        except Exception as problem:
            print("warm:", tuple(tiles), type(problem).__name__, str(problem)[:200], flush=True)


def whole_models(graphs: Path, names: list[str]) -> None:
    """Each model on 1 and 8 streams, plain, fused, fused and grouped."""
    import models

    from msplit import api, rules
    from msplit.api.model import price
    from msplit.engines.base import Job
    from msplit.engines.cuda import sibling_contest
    from msplit.engines.cuda.engine import CudaEngine
    from msplit.measure.inputs import make_inputs

    for name in names:
        flat = api.load(models.fill(graphs, Path(tempfile.gettempdir()) / "msplit-models", name, 1))
        sizes, costs = price(flat, batch=1)
        feeds = make_inputs(flat, {}, batch=1, seed=0)
        chosen = rules.load
        ids = {n: api.assign(flat, chosen(models.RULES[name], streams=n), priced=(sizes, costs)).ids for n in (1, 8)}
        expected: Any = None
        engine = CudaEngine()
        runs: dict[tuple[str, int], Any] = {}
        for label, options in (
            ("plain", {}),
            ("fused", {"fuse": True}),
            ("fused and grouped", {"fuse": True, "group": True}),
        ):
            began = time.perf_counter()
            for streams in (1, 8):
                runs[label, streams] = engine.build(
                    Job(flat, ids[streams], streams, feeds, options=options, costs=costs)
                )
                outputs = runs[label, streams].step(feeds)
                expected = expected or outputs
                worst = max(
                    float(np.abs(value - expected[key]).max() / np.abs(expected[key]).max())
                    for key, value in outputs.items()
                )
                assert worst < 2e-2, f"{name} {label} {streams}: outputs differ by {worst}"
            facts = runs[label, 1].facts()
            seconds = time.perf_counter() - began
            print(
                f"{name} {label}: {facts['kernels']} kernels, layout {facts['layout']}, groups {facts.get('group_sizes')}, "
                f"weights {facts['weight_bytes'] / 1e6:.1f} MB, diff {worst:.0e}, {seconds:.1f} s",
                flush=True,
            )
        device: dict[Any, list[float]] = {key: [] for key in runs}
        host: dict[Any, list[float]] = {key: [] for key in runs}
        for _ in range(4):
            for key, executable in runs.items():
                device[key] += list(executable.device_times(30))[5:]
                for _ in range(40):
                    start = time.perf_counter()
                    executable.step(feeds)
                    host[key].append(time.perf_counter() - start)
        for (label, streams), times in device.items():
            print(
                f"{name} {label}, {streams} streams: device {1e6 * statistics.median(times):.0f}"
                f" host {1e6 * statistics.median(host[label, streams]):.0f}",
                flush=True,
            )
        for executable in runs.values():
            executable.close()
    for key, times in sibling_contest.measured().items():
        shape, window, widths = key[:3]
        if times is None:
            print(f"siblings {shape} {window} {widths}: none right")
            continue
        print(
            f"siblings {shape} {window} {widths}: {tuple(times.tiles)} {times.merged:.1f}/{times.loaded:.1f}, one by one "
            f"{times.one_by_one:.1f}/{times.one_by_one_loaded:.1f}, beside {times.beside:.1f}{' WINS' if times.wins() else ''}"
        )
    from collections import Counter

    from msplit.engines.cuda import convolutions

    print(Counter(tuple(tiles) if tiles else "library" for tiles in convolutions._chosen.values()).most_common())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--models", default="googlenet,inception_v3")
    parser.add_argument("--only", choices=["kernels", "models"])
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    from msplit.engines.cuda.executable import precision

    began = time.perf_counter()
    if arguments.warm is not None:
        with torch.no_grad(), precision(False):
            warm(arguments.warm)
        return
    command = [sys.executable, __file__, str(arguments.graphs), "--warm"]
    helpers = [
        subprocess.Popen([*command, str(number)], env={**os.environ, "OMP_NUM_THREADS": "1"})
        for number in range(PROCESSES)
    ]
    for helper in helpers:
        helper.wait()
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    if arguments.only != "models":
        with torch.no_grad(), precision(False):
            kernels()
        print(f"shapes after {time.perf_counter() - began:.1f} s", flush=True)
    if arguments.only != "kernels":
        whole_models(arguments.graphs, arguments.models.split(","))
        print(f"models after {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
