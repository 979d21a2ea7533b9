"""What several GPUs of one host add to one: the rows of a step shared, and requests answered on all. Figures are those of `gpus.md`.

    python benchmarks/models.py GRAPHS                                    # where TensorFlow is
    python benchmarks/gpus.py GRAPHS --out OUT [--gpus 1,2,4] [--models bert:1024,ple:128]

A step of a batch is measured on 1, 2, … GPUs in turns, by the host's clock and by the device's (of the slowest GPU), both of the same batch
and of as many rows for each GPU. Then requests of as many rows are answered by one pool on so many GPUs, and by as many processes with a
GPU each. Efficiency is what is done in a second over so many times what one GPU does. Outputs are held against TensorFlow's, where that is
here, and in any case against one stream of plain kernels. `--device cpu` shows that it works; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models
from pools import flood

import msplit
from msplit.cost.profile import Workload
from msplit.inputs.make import feeds_for
from msplit.serving.loadtest.corpus import of_build, of_ports

MODELS = "ple:128,mmoe:1024,bert:128,bert:1024,inception_v3:128"
ROUNDS = 20
BURST = 0.05
"""Seconds that one variant runs for before the next one has its turn."""
LEAST = 3
"""Steps of it, at least."""
GROUPS, WINDOW = 4, 4
"""Slots on each GPU, and requests on their way for each slot."""


DISTINCT = 64
"""Requests, all with other inputs."""


def request_for(args: argparse.Namespace, batch: int | None, gpus: range) -> dict[str, Any]:
    fast = {"effort": "fast"} if args.device == "cpu" else {}
    return dict(streams=(args.streams,), engine="cuda", device=args.device, batch=batch, devices=tuple(gpus), **fast)


def in_turns(runners: dict[Any, Any], feeds: dict[Any, Any], seconds: float) -> dict[Any, dict[str, Any]]:
    """Median µs of a step, by the host's clock and by the device's, of all in turns. In `rounds`, the medians of each turn."""
    found: dict[Any, dict[str, list[float]]] = {key: {"host_us": [], "device_us": []} for key in runners}
    for key, runner in runners.items():
        for _ in range(LEAST):
            runner.step(feeds[key])
    for _ in range(max(3, int(ROUNDS * seconds))):
        for key, runner in runners.items():
            times: list[float] = []
            end = time.perf_counter() + BURST * seconds
            while len(times) < LEAST or time.perf_counter() < end:
                start = time.perf_counter()
                runner.step(feeds[key])
                times.append(time.perf_counter() - start)
            found[key]["host_us"].append(statistics.median(times) * 1e6)
            device = runner.executable.device_times(LEAST)
            if device is not None:
                found[key]["device_us"].append(statistics.median(device) * 1e6)
    return {
        key: {
            **{clock: statistics.median(times) if times else None for clock, times in clocks.items()},
            "rounds": clocks,
        }
        for key, clocks in found.items()
    }


def steps(args: argparse.Namespace, path: Path, name: str, batch: int) -> list[dict[str, Any]]:
    """A step of the same batch on all numbers of GPUs, and of a batch for each GPU."""
    flat = msplit.load(path)
    wanted = {(count, batch * rows): None for count in args.counts for rows in {1, count}}
    runners, feeds = {}, {}
    try:
        for count, rows in wanted:
            request = request_for(args, rows, range(count))
            runners[count, rows] = msplit.prepare(flat, **request)
            feeds[count, rows] = feeds_for(flat, Workload(batch=rows), seed=1)
        found = in_turns(runners, feeds, args.seconds)
        labels = {key: runner.label for key, runner in runners.items()}
    finally:
        for runner in runners.values():
            runner.close()
    one = found[1, batch]
    return [
        {
            "model": name, "what": "the same batch" if rows == batch else "a batch for each", "gpus": count, "rows": rows,
            "label": labels[count, rows], **times,
            "efficiency": {
                clock: rows / batch * one[clock] / times[clock] / count
                for clock in ("host_us", "device_us") if times[clock] and one[clock]
            },
        }
        for (count, rows), times in found.items()
    ]  # fmt: skip


def answers(args: argparse.Namespace, path: Path, name: str, rows: int) -> list[dict[str, Any]]:
    """Requests of so many rows, to one pool on so many GPUs, and to a process for each GPU. In turns, the best of three."""
    built = args.out / f"{name}-{rows}.build"
    msplit.build(path, built, **request_for(args, None, range(1)), batches=(rows,), force=True)
    best: dict[tuple[str, int], tuple[float, float, float]] = {}
    for _ in range(1 if args.seconds < 1 else 3):
        for count in args.counts:
            with msplit.pool(built, **request_for(args, None, range(count)), groups=GROUPS) as pool:
                feeds = of_ports(of_build(built), pool.inputs, rows, DISTINCT, 0)
                one = flood(pool, feeds, GROUPS * WINDOW * count, args.seconds)
            best["one pool", count] = max(one, best.get(("one pool", count), one))
            both = beside(args, built, rows, count)
            best["a process for each", count] = max(both, best.get(("a process for each", count), both))
    return [
        {
            "model": name, "what": f"requests, {how}", "gpus": count, "rows": rows, "rate": rate, "p50_us": median, "p99_us": high,
            "efficiency": {"rate": rate / best["one pool", 1][0] / count},
        }
        for (how, count), (rate, median, high) in best.items()
    ]  # fmt: skip


def beside(args: argparse.Namespace, built: Path, rows: int, count: int) -> tuple[float, float, float]:
    """So many processes at once, each with a pool on a GPU of its own: requests per second in all, and the worst median and percentile."""
    command = [sys.executable, __file__, str(built), "--worker", str(rows), "--device", args.device]
    workers: list[Any] = []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    try:
        for gpu in range(count):
            own = seen[gpu] if gpu < len(seen) and seen[gpu] else str(gpu)
            workers.append(
                subprocess.Popen(
                    [*command, "--seconds", str(args.seconds)],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": own if args.device == "cuda" else ""},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        for one in workers:
            if one.stdout is None or one.stdout.readline() != "ready\n":
                raise RuntimeError("a worker did not get ready: what it says is above")
        for one in workers:
            one.stdin.write("go\n")
            one.stdin.flush()
        told = [one.communicate(timeout=60 + 10 * args.seconds)[0] for one in workers]
    finally:
        for one in workers:
            one.kill()
            one.wait()
    rates, medians, highs = zip(*map(json.loads, told), strict=True)
    return sum(rates), max(medians), max(highs)


def work(args: argparse.Namespace) -> None:
    """One of these processes."""
    with msplit.pool(args.folder, groups=GROUPS) as pool:
        feeds = of_ports(of_build(args.folder), pool.inputs, args.worker, DISTINCT, 0)
        flood(pool, feeds, GROUPS * WINDOW, min(0.2, args.seconds))
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(flood(pool, feeds, GROUPS * WINDOW, args.seconds)), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """The page's tables."""

    def cell(value: float | None, ends: str = "") -> str:
        return "-" if value is None else f"{value:,.0f}{ends}"

    def share(row: dict[str, Any], clock: str) -> str:
        return f" ({row['efficiency'][clock]:.0%})" if clock in row["efficiency"] else ""

    lines = ["| model | | GPUs | rows of a step | host, µs | device, µs |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {row['model']} | {row['what']} | {row['gpus']} | {row['rows']} | {cell(row['host_us'])}{share(row, 'host_us')}"
        f" | {cell(row['device_us'])}{share(row, 'device_us')} |"
        for row in rows
        if "host_us" in row
    ]
    lines += [
        "",
        "| model | | GPUs | rows of a request | a second | p50, p99, µs |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['model']} | {row['what']} | {row['gpus']} | {row['rows']} | {cell(row['rate'])}{share(row, 'rate')}"
        f" | {cell(row['p50_us'])}, {cell(row['p99_us'])} |"
        for row in rows
        if "rate" in row
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--out", type=Path, default=Path("gpus-results"))
    parser.add_argument(
        "--gpus", help="how many, such as 1,2,4; 1 is always among them (default: 1, 2, 4, 8 as far as there are)"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--limit", type=float, default=540, help="start no further model after so many seconds")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return
    import torch

    there = torch.cuda.device_count() if args.device == "cuda" else 2
    asked = {1, *map(int, args.gpus.split(","))} if args.gpus else {1, 2, 4, 8}
    args.counts = sorted(count for count in asked if count <= there or args.gpus)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for item in args.models.split(","):
        name, _, size = item.partition(":")
        if time.monotonic() - began > args.limit:
            problems.append(f"{item}: left out, no time")
            continue
        path = (
            args.folder / name
            if args.folder.joinpath(name).is_file()
            else models.fill(args.folder, args.out, name, int(size))
        )
        for measure in (steps, answers):
            try:
                rows += measure(args, path, name, int(size))
            except msplit.MsplitError as problem:  # the others are measured all the same
                problems.append(f"{item}, {measure.__name__}: {problem}")
        known = {"rows": rows, "problems": problems, "argv": sys.argv, "device": args.device, "numpy": np.__version__}
        (args.out / "gpus.json").write_text(json.dumps(known, indent=1))
    print("\n".join([table(rows), *problems]))
    if args.device == "cpu":
        print("\nOf simulated GPUs: these times say nothing about any GPU.")


if __name__ == "__main__":
    main()
