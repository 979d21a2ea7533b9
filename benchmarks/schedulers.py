"""Every way to choose streams, and the tuned plan, on the same executor and kernels: every benchmark model, against one stream.

    python benchmarks/schedulers.py GRAPHS --out OUT [--models mmoe,towers:128] [--seconds 20] [--streams 16]

GRAPHS is made by `benchmarks/models.py` where TensorFlow is. Writes OUT/schedulers.json (every round's time); what is there of other
models is kept, so that several visits add up. `--device cpu` tries it without a GPU: times are then the simulator's.
`python benchmarks/table.py schedulers FILE…` makes the tables.

For each model: kernels are timed alone, which gives the lower bound and what the simulator goes by; every algorithm assigns up to
`--streams` streams; the rule set that fits the model does, too; the tuner searches for `--seconds`. Then all of them are measured,
interleaved with one stream, by the device's clock, in `--builds` fresh builds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models
import table

from msplit import api
from msplit.core import statistics
from msplit.engines.base import Job
from msplit.engines.cuda import search
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.environment import environment
from msplit.inputs.make import make_inputs
from msplit.run.tuning import TuneSettings, tune
from msplit.schedule.algorithms import ONE
from msplit.schedule.choose import best, choose
from msplit.schedule.search import PlanCandidate, candidate_of, single

ROUNDS = 9
AT_ONCE = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--models", default=",".join(models.BATCHES))
    parser.add_argument("--seconds", type=float, default=20, help="of tuning, per model and batch")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--builds", type=int, default=2)
    parser.add_argument(
        "--kernels", choices=["plain", "all"], default="plain", help="all: tuning may make larger kernels, too"
    )
    parser.add_argument("--max-memory", type=float, default=1.5)
    parser.add_argument("--limit", type=float, default=570, help="start no further model after so many seconds")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "schedulers.json"
    rows = table.content(target)["rows"] if target.exists() else []
    start = time.time()
    for name, batch in models.rows(arguments.models):
        if time.time() - start > arguments.limit:
            print(f"out of time before {name} batch {batch}", flush=True)
            continue
        began = time.time()
        try:
            row = run(arguments, name, batch)
        except Exception as problem:
            traceback.print_exc(limit=4)
            print(f"{name} batch {batch}: {type(problem).__name__}: {str(problem).splitlines()[0]}", flush=True)
            continue
        row["took_s"] = time.time() - began
        rows = [other for other in rows if (other["model"], other["batch"]) != (name, batch)] + [row]
        print(line(row), flush=True)
        target.write_text(json.dumps({"schema_version": 1, "environment": environment(sys.argv), "rows": rows}))


def run(arguments: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    from memory_needed import needed_bytes  # SciPy is for measuring, not for making the table again

    path = models.fill(arguments.graphs, Path("/tmp/msplit-models"), name, batch)
    flat = api.load(path)
    sizes, costs = api.price(flat, batch=batch)
    feeds = make_inputs(flat, {}, batch=batch)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options=EngineOptions(arguments.device))
    rules = []
    for streams in sorted({4, 10, arguments.streams}):
        if streams <= arguments.streams:
            found = api.assign(flat, models.RULES[name], streams=streams, priced=(sizes, costs))
            rules.append((f"rules-{streams}", found.ids))
    settings = TuneSettings(
        arguments.seconds,
        arguments.max_memory,
        ("plain",) if arguments.kernels == "plain" else tuple(KernelMode),
    )
    tuned = tune(job, settings, streams=arguments.streams, given=rules, batch=batch)
    variants = tuned.variants
    variant = variants["plain"]
    device = search.CompiledVariants(variants).runner()
    plain: list[tuple[str, PlanCandidate]] = []
    skipped = {}
    candidates = choose(variant.problem, arguments.streams)
    winner = best(candidates)
    for candidate in candidates:
        if candidate.skipped is not None:
            skipped[candidate.name] = candidate.skipped
        elif candidate.name != ONE:
            each = candidate_of(variant.problem, "plain", candidate.name, candidate.stream, candidate.order)
            plain.append((candidate.name, each))
    plain += [(label, candidate_of(variant.problem, "plain", label, variant.streams_of(ids))) for label, ids in rules]
    plain.append(("tuned", tuned.taken))
    one = single(variant.problem, "plain")
    times = measure(device, one, [each for _, each in plain], arguments.builds)
    bound = asdict(variant.bounds())
    one_bytes = device.peak_bytes(one)
    results = []
    for (label, each), (ours, theirs) in zip(plain, times, strict=True):
        ratio = statistics.ratio(theirs, ours, over=ONE, clock="device")
        us = median(value for build in ours for value in build) * 1e6
        needed = needed_bytes(variants[each.mode].compiled.program, variants[each.mode].plan(each))
        results.append(
            {
                "name": label,
                "what": each.name,
                "kernels": each.mode,
                "streams": each.streams,
                "waits": variants[each.mode].plan(each).waits,
                "us": us,
                "predicted_us": each.predicted_us,
                "gain": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "memory": device.peak_bytes(each) / max(one_bytes, 1),
                "counts": device.memory(each) > 1,
                "peak_bytes": device.peak_bytes(each),
                "needed": None if needed is None else needed / max(one_bytes, 1),
                "rounds": ours,
            }
        )
    one_us = median(value for _, theirs in times for build in theirs for value in build) * 1e6
    return {
        "model": name,
        "batch": batch,
        "rules": models.RULES[name],
        "kernels": int(variant.problem.kernels.sum()),
        "one_us": one_us,
        "one_bytes": one_bytes,
        "bounds": bound,
        "auto": winner.name,
        "results": results,
        "skipped": skipped,
        "tuning": {
            "seconds": tuned.found.seconds,
            "stopped": tuned.found.stopped,
            "tried": tuned.found.tried,
            "kept": [[gain.change, gain.ratio, gain.at] for gain in tuned.found.gains],
            "candidate": tuned.found.candidate.name,
            "why": tuned.why,
            "gain": tuned.gain.to_dict() if tuned.gain else None,
        },
    }


Rounds = list[list[float]]


def measure(device: Any, one: PlanCandidate, runners: list[PlanCandidate], builds: int) -> list[tuple[Rounds, Rounds]]:
    """Per candidate its rounds and those of one stream beside it, per build."""
    distinct = list({each.key(): each for each in runners}.values())
    found: dict[Any, tuple[Rounds, Rounds]] = {each.key(): ([], []) for each in distinct}
    for _ in range(builds):
        for at in range(0, len(distinct), AT_ONCE):
            together = distinct[at : at + AT_ONCE]
            device.renew()
            times = device.times([one, *together], ROUNDS)
            for each, rounds in zip(together, times[1:], strict=True):
                found[each.key()][0].append(list(rounds))
                found[each.key()][1].append(list(times[0]))
    device.renew()
    return [found[each.key()] for each in runners]


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['model']} {row['batch']}: one {row['one_us']:.0f} µs, bound {row['bounds']['lower_us']:.0f};"]
    for name in table.COLUMNS:
        entry = table.column(row, name)
        cells.append(f"{name} {entry['gain']:.2f}" if entry else f"{name} -")
    best_one = table.column(row, "tuned")
    assert best_one is not None
    cells.append(
        f"({best_one['streams']} streams, {best_one['waits']} waits, memory {best_one['memory']:.2f}; "
        f"{row['tuning']['tried']} changes, {len(row['tuning']['kept'])} kept, {row['tuning']['stopped']}; {row['took_s']:.0f} s)"
    )
    return " ".join(cells)


if __name__ == "__main__":
    main()
