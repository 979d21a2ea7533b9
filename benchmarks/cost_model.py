"""How far static costs are from measured ones, and how well the simulator ranks assignments: on a GPU, over the benchmark models.

    python benchmarks/cost_model.py GRAPHS --out OUT [--models mmoe,towers:128] [--streams 1,2,4,8,16] [--seconds 4]

GRAPHS is made by `benchmarks/models.py` where TensorFlow is. Writes OUT/cost_model.json (every figure, and the profiles) and
OUT/cost_model.md (two tables). `--device cpu` tries it without a GPU; its figures mean nothing. `--table FILE.json[.gz]` only makes the
tables again.

    python benchmarks/cost_model.py GRAPHS --again FILE.json[.gz]

needs no GPU: it takes the profiles, the assignments and their measured times from FILE, prices and simulates them with the costs and the
simulator as they are now, and makes the tables of that. There the assignment that `auto` takes is the best of those that were measured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api
from msplit.analysis.colocation import groups
from msplit.cost import profile as profile_file
from msplit.cost.costs import Constants, Costs
from msplit.cost.profile import Profile, apply
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.profiling.step_costs import estimated as estimated_steps
from msplit.engines.cuda.runtime.executables import Compiled, executable_for, plan_for
from msplit.flatten.flat import FlatGraph
from msplit.inputs.make import make_inputs
from msplit.report import document
from msplit.report.commands import estimated
from msplit.run.profile import profile
from msplit.run.request import RunRequest
from msplit.schedule.choose import REFINING, best, choose
from msplit.schedule.judge import predict
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import breakdown, evaluate

DEFAULT = "mmoe:1,towers:1,deepfm:1,dlrm:1,inception_v3:1,googlenet:1,nasnet_mobile:1,squeezenet:1,bert:1"
RUNS = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--models", default=DEFAULT)
    parser.add_argument("--streams", default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each model for measuring assignments")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--table", type=Path, help="only make the tables of this file")
    parser.add_argument("--again", type=Path, help="simulate the assignments of this file again")
    arguments = parser.parse_args()
    if arguments.table or arguments.again:
        path = arguments.table or arguments.again
        raw = path.read_bytes()
        rows = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["models"]
        print(markdown([again(arguments.graphs, row) for row in rows] if arguments.again else rows))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, batch in models.rows(arguments.models):
        began = time.time()
        try:
            rows.append(examine(arguments, name, batch))
        except Exception:
            traceback.print_exc()
            continue
        print(f"{name} {batch}: {time.time() - began:.1f} s", flush=True)
        text = json.dumps(document.plain({"schema_version": 1, "models": rows}))
        (arguments.out / "cost_model.json").write_text(text)
        (arguments.out / "cost_model.md").write_text(markdown(rows))
    print(markdown(rows))


def examine(arguments: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """One model: kernels, then assignments."""
    flat = api.load(models.fill(arguments.graphs, Path("/tmp/msplit-models"), name, batch))
    request = RunRequest.of(batch=batch, device=arguments.device)
    found, notes = profile(flat, request, seconds=15, grids=False)
    _, static = api.price(flat, batch=batch)
    _, measured = api.price(flat, batch=batch, profile=found)
    feeds = make_inputs(flat, {}, batch=batch)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=EngineOptions(arguments.device))

    compiled = ENGINE.compile(job)
    widths = [int(width) for width in arguments.streams.split(",")]
    tried, of = assignments(job, compiled, flat, static, measured, widths, arguments.seconds)
    return {
        "model": name,
        "batch": batch,
        "kernels": kernels(found, flat, static),
        "tried": tried,
        "of": of,
        "notes": notes,
        "machine": Machine.of_costs(measured),
        "profile": json.loads(profile_file.dumps(found)),
    }


def again(graphs: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A row of an earlier run, priced and simulated anew at the level of the graph."""
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), row["model"], row["batch"]))
    found = profile_file.parse(json.dumps(row["profile"]), row["model"])
    if found.one_us is None:  # older than that: the run measured it all the same
        found = replace(found, one_us=next(one["measured_us"] for one in row["tried"] if one["streams"] == 1))
    _, static = api.price(flat, batch=row["batch"])
    _, measured = api.price(flat, batch=row["batch"], profile=found)
    # The engine's steps with static times: most nodes are part of another one's kernel.
    guess = zip(found.kernels, estimated(found, flat, static), strict=True)
    guessed = tuple(replace(kernel, time_us=float(time_us), share=None) for kernel, time_us in guess)
    by_step = apply(replace(found, kernels=guessed, constants=Constants(), one_us=None), flat, static)
    place = np.argsort(np.argsort(np.asarray(flat.graph.names, dtype=object)))
    tried = []
    for one in row["tried"]:
        ids = np.asarray(one["ids"], np.int32)[place]
        said = {}
        for label, costs in (("static", by_step), ("profile", measured)):
            problem = predict(flat, costs, ids).problem
            simulated = evaluate(problem, problem.pin)
            said |= {f"{label}_us": simulated.simulation.makespan_us, f"{label}_score": simulated.score_us}
        tried.append({**one, **said, "chosen": ["static-1"] if one["streams"] == 1 else []})
    for label in ("static", "profile"):
        min(tried, key=lambda one: one[f"{label}_score"])["chosen"].append(
            f"{label}-{max(one['streams'] for one in tried)}"
        )
    best_one = min(tried, key=lambda one: one["measured_us"])
    problem = predict(flat, measured, np.asarray(best_one["ids"], np.int32)[place]).problem
    spent = breakdown(problem, evaluate(problem, problem.pin).plan)
    machine = Machine.of_costs(measured)
    return {**row, "kernels": kernels(found, flat, static), "tried": tried, "machine": machine, "spent": spent}


def kernels(found: Profile, flat: FlatGraph, static: Costs) -> dict[str, Any]:
    """Static over measured time, per kind of step."""
    guess = estimated(found, flat, static)
    took = np.asarray([kernel.time_us for kernel in found.kernels])
    uses = np.bincount([step.kernel for step in found.steps if step.kernel >= 0], minlength=len(took))
    ratio = guess / took
    every = np.repeat(ratio, uses)
    by_op: dict[str, list[float]] = {}
    for kernel, one, count in zip(found.kernels, ratio, uses, strict=True):
        by_op.setdefault(kernel.op, []).extend([float(one)] * int(count))
    return {
        "kinds": len(took),
        "steps": int(uses.sum()),
        "median": float(np.median(every)),
        "p10": float(np.percentile(every, 10)),
        "p90": float(np.percentile(every, 90)),
        "spearman": spearman(guess, took),
        "static_us": float(guess @ uses),
        "measured_us": float(took @ uses),
        "by_op": {op: [len(values), float(np.median(values))] for op, values in sorted(by_op.items())},
        "static": guess,
        "measured": took,
        "steps_of": uses,
    }


def assignments(
    job: Job, compiled: Compiled, flat: FlatGraph, static: Costs, measured: Costs, widths: list[int], seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Every candidate for every width, by either costs: simulated and measured, as long as there is time. And how many there are."""
    tie = groups(flat, handles=False).of
    wanted: dict[bytes, tuple[np.ndarray[Any, Any], list[str]]] = {}
    chosen: dict[bytes, list[str]] = {}
    for label, costs in (("static", static), ("profile", measured)):
        problem = Problem.from_flat(flat, costs, tie=tie, machine=Machine.of_costs(costs))
        for width in widths:
            # `auto` takes all the effort; narrower widths only lend their candidates.
            candidates = choose(problem, width, refining=REFINING if width == max(widths) else REFINING // 8)
            winner = best(candidates)
            for candidate in candidates:
                if candidate.skipped is not None:
                    continue
                ids = np.maximum(problem.spread(candidate.stream), 0)
                lanes, _ = compiled.program.lanes(ids)
                key = lanes.tobytes()
                wanted.setdefault(key, (ids, []))[1].append(f"{candidate.name}@{width} ({label})")
                if candidate is winner:
                    chosen.setdefault(key, []).append(f"{label}-{width}")
    keys = list(wanted)
    random.Random(0).shuffle(keys)
    keys.sort(key=lambda key: key not in chosen)  # what would be taken is measured in any case
    stop = time.time() + seconds
    rows = []
    for key in keys:
        if time.time() > stop and key not in chosen:
            break
        ids, names = wanted[key]
        rows.append(
            {
                "names": names,
                "ids": ids[np.argsort(np.asarray(flat.graph.names, dtype=object))],  # in the order of the nodes' names
                "chosen": chosen.get(key, []),
                **_predicted(compiled, flat, ids, static, "static"),
                **_predicted(compiled, flat, ids, measured, "profile"),
                "measured_us": _device_us(job, compiled, ids, measured),
            }
        )
    return rows, len(keys)


def _predicted(compiled: Compiled, flat: FlatGraph, ids: Any, costs: Costs, label: str) -> dict[str, float]:
    lanes, _ = compiled.program.lanes(ids)
    problem = estimated_steps(compiled.program, costs).problem(compiled.program, lanes, machine=Machine.of_costs(costs))
    simulated = evaluate(problem, problem.pin)
    return {
        f"{label}_us": simulated.simulation.makespan_us,
        f"{label}_score": simulated.score_us,
        f"{label}_flat_us": predict(flat, costs, ids).makespan_us,
        "waits": simulated.plan.waits,
        "streams": simulated.plan.streams,
    }


def _device_us(job: Job, compiled: Compiled, ids: Any, costs: Costs) -> float:
    """Median of back-to-back replays by the device's clock; on a CPU the time of a simulated step."""
    program = compiled.program
    plan = plan_for(program, ids, costs)
    executable = executable_for(compiled, plan, job.options, ieee=job.precision.ieee, timing_only=job.options.on_gpu)
    try:
        if not job.options.on_gpu:
            start = time.perf_counter()
            executable.step(job.feeds)
            return (time.perf_counter() - start) * 1e6
        executable.device_times(5)
        return float(np.median(executable.device_times(RUNS) or [0.0])) * 1e6
    finally:
        executable.close()


def ranks(values: Any) -> Any:
    """Ranks from 0; equal values share their mean rank."""
    values = np.asarray(values, float)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts + 1) / 2)[inverse.reshape(-1)]


def spearman(first: Any, second: Any) -> float | None:
    """Rank correlation; None where all are equal or there are fewer than three."""
    if len(first) < 3:
        return None
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum() / scale) if scale else None


def kendall(first: Any, second: Any) -> float | None:
    """Kendall's tau-b."""
    if len(first) < 3:
        return None
    upper = np.triu_indices(len(first), 1)
    a, b = (
        np.sign(np.subtract.outer(np.asarray(one, float), np.asarray(one, float)))[upper] for one in (first, second)
    )
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum() / scale) if scale else None


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | batch | kinds | steps | static / measured: median | p10 | p90 | rank correlation | static µs | measured µs |",
        "| --- " + "| ---: " * 9 + "|",
    ]
    for row in rows:
        one = row["kernels"]
        cells = [
            row["model"],
            row["batch"],
            one["kinds"],
            one["steps"],
            *(f"{one[key]:.2f}" for key in ("median", "p10", "p90")),
        ]
        cells += [_text(one["spearman"]), f"{one['static_us']:.0f}", f"{one['measured_us']:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "Assignments: Spearman's and Kendall's rank correlation of what the simulator compares and measured time; "
        "median error of the simulated time; "
        "µs of what `auto` takes on up to 16 streams by either costs, and of the best that was measured.",
        "",
        "| model | batch | measured | static: rho | tau | error | profile: rho | tau | error | one | auto static | auto profile | best |",
        "| --- " + "| ---: " * 12 + "|",
    ]
    for row in rows:
        took = [one["measured_us"] for one in row["tried"]]
        cells = [row["model"], row["batch"], f"{len(took)} of {row['of']}"]
        for label in ("static", "profile"):
            score, said = (
                [one.get(f"{label}_{what}", one[f"{label}_us"]) for one in row["tried"]] for what in ("score", "us")
            )
            error = np.median(np.abs(np.asarray(said) / took - 1))
            cells += [_text(spearman(score, took)), _text(kendall(score, took)), f"{error:.0%}"]
        widest = max(int(tag.split("-")[1]) for one in row["tried"] for tag in one["chosen"])
        for tag in ("static-1", f"static-{widest}", f"profile-{widest}"):
            cells.append(next((f"{one['measured_us']:.0f}" for one in row["tried"] if tag in one["chosen"]), "-"))
        cells.append(f"{min(took):.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if rows and "spent" in rows[0]:
        names = list(rows[0]["spent"].parts)
        lines += [
            "",
            "Where the time of the best measured plan goes, by switching parts of the simulator off one after the other, µs:",
            "",
            "| model | one stream | best plan, measured | simulated | kernels | " + " | ".join(names) + " |",
            "| --- " + "| ---: " * (4 + len(names)) + "|",
        ]
        for row in rows:
            spent = row["spent"]
            took = [one["measured_us"] for one in row["tried"] if one["streams"] == 1]
            best_us = min(one["measured_us"] for one in row["tried"])
            cells = [
                f"{took[0]:.0f}",
                *(f"{us:.1f}" for us in (best_us, spent.makespan_us, spent.kernels_us, *spent.parts.values())),
            ]
            lines.append(f"| {row['model']} | " + " | ".join(cells) + " |")
    if rows:
        known = rows[0]["profile"]["constants"]
        lines += [
            "",
            "Constants of the device, µs: " + json.dumps(known),
            "",
            f"The simulator's machine: {rows[0]['machine']}",
        ]
    return "\n".join(lines) + "\n"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
