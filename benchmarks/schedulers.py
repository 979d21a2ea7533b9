"""Every way to choose streams, and the tuned plan, on the same executor and kernels: every benchmark model, against one stream.

    python benchmarks/schedulers.py GRAPHS --out OUT [--models mmoe,towers:128] [--seconds 20] [--streams 16]

GRAPHS is made by `benchmarks/models.py` where TensorFlow is. Writes OUT/schedulers.json (every round's time) and OUT/schedulers.md (the
table of `schedulers.md`); what is there of other models is kept, so that several visits add up. `--device cpu` tries it without a GPU:
times are then the simulator's. `--table FILE.json…` only makes the table again; of several rows for a model and batch the last counts.

For each model: kernels are timed alone, which gives the lower bound and what the simulator goes by; every algorithm assigns up to
`--streams` streams; the rule set that fits the model does, too; the tuner searches for `--seconds`. Then all of them are measured,
interleaved with one stream, by the device's clock, in `--builds` fresh builds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api
from msplit.decide.environment import environment
from msplit.engines.base import Job
from msplit.engines.cuda.search import measurement
from msplit.inputs.make import make_inputs
from msplit.measure import statistics
from msplit.measure.tuning import TuneSettings, tune
from msplit.schedule.algorithms import ONE
from msplit.schedule.search.choose import best, choose
from msplit.schedule.search.search import Trial, single, trial_of

ROUNDS = 9
HEAT = 6

COLUMNS = ("tensorflow", "torchsched", "opara", "nimble", "longest-first", "ios", "list", "rules", "auto", "tuned")
ABOUT = """\
Every way assigns the same kernels, which run on the same executor: one CUDA graph per plan, minimal waits, the better of two
record orders. Numbers are gains over one stream of the same kernels, by the device's clock, measured in the same rounds; the best
(within 0.5 %) is bold. *list*: list scheduling, the best of its widths and grains. *rules*: the shipped rule set that fits, the
best of several numbers of streams. *auto*: what the simulator likes best, as the rule `auto` takes it, with kernels' measured
times. *tuned*: `bench --tune`. *memory*: of values at their highest, over one stream's; below 16 MiB the tuner lets it be.
*needed*: what no allocator could do without, since nothing in the plan keeps those values from being alive at once.
*reached*: the lower bound (critical path, bandwidth, arithmetic, SM time, of kernels timed alone) over the tuned plan's time."""

TARGETS = {("googlenet", 1): 1.75, ("inception_v3", 1): 1.65, ("deepfm", 1): 2.2, ("lstm", 1): 6.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path, nargs="?")
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
    parser.add_argument(
        "--table", type=Path, nargs="+", help="only make the table of these files; of several rows the last counts"
    )
    arguments = parser.parse_args()
    if arguments.table:
        files = [json.loads(raw(path)) for path in arguments.table]
        last = {(row["model"], row["batch"]): row for file in files for row in file["rows"]}
        print(page(list(last.values()), files[0]["environment"]), end="")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "schedulers.json"
    rows = read(target) if target.exists() else []
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
        (arguments.out / "schedulers.md").write_text(page(rows, environment(sys.argv)))
    print("\n".join(verdicts(rows)))


def raw(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(raw(path))["rows"]
    return found


def run(arguments: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    from memory_needed import needed_bytes  # SciPy is for measuring, not for making the table again

    path = models.fill(arguments.graphs, Path("/tmp/msplit-models"), name, batch)
    flat = api.load(path)
    sizes, costs = api.price(flat, batch=batch)
    feeds = make_inputs(flat, {}, batch=batch)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options={"device": arguments.device})
    rules = []
    for streams in sorted({4, 10, arguments.streams}):
        if streams <= arguments.streams:
            found = api.assign(flat, models.RULES[name], streams=streams, priced=(sizes, costs))
            rules.append((f"rules-{streams}", found.ids))
    settings = TuneSettings(
        arguments.seconds,
        arguments.max_memory,
        ("plain",) if arguments.kernels == "plain" else tuple(measurement.OPTIONS),
    )
    tuned = tune(job, settings, streams=arguments.streams, given=rules, batch=batch)
    arms = tuned.arms
    arm = arms["plain"]
    device = measurement.make_trials(arms, torch.device(arguments.device))
    plain: list[tuple[str, Trial]] = []
    skipped = {}
    candidates = choose(arm.problem, arguments.streams)
    winner = best(candidates)
    for candidate in candidates:
        if candidate.skipped is not None:
            skipped[candidate.name] = candidate.skipped
        elif candidate.name != ONE:
            trial = trial_of(arm.problem, "plain", candidate.name, candidate.stream, candidate.order)
            plain.append((candidate.name, trial))
    plain += [(label, trial_of(arm.problem, "plain", label, arm.streams_of(ids))) for label, ids in rules]
    plain.append(("tuned", tuned.trial))
    one = single(arm.problem, "plain")
    times = measure(device, one, [trial for _, trial in plain], arguments.builds)
    bound = asdict(arm.bounds())
    one_bytes = device.peak_bytes(one)
    results = []
    for (label, trial), (ours, theirs) in zip(plain, times, strict=True):
        ratio = statistics.ratio(theirs, ours, over=ONE, clock="device")
        us = median(value for build in ours for value in build) * 1e6
        needed = needed_bytes(arms[trial.arm].prepared.program, arms[trial.arm].plan(trial))
        results.append(
            {
                "name": label,
                "what": trial.name,
                "kernels": trial.arm,
                "streams": trial.streams,
                "waits": arms[trial.arm].plan(trial).waits,
                "us": us,
                "predicted_us": trial.predicted_us,
                "gain": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "memory": device.peak_bytes(trial) / max(one_bytes, 1),
                "counts": device.memory(trial) > 1,
                "peak_bytes": device.peak_bytes(trial),
                "needed": None if needed is None else needed / max(one_bytes, 1),
                "rounds": ours,
            }
        )
    one_us = median(value for _, theirs in times for build in theirs for value in build) * 1e6
    return {
        "model": name,
        "batch": batch,
        "rules": models.RULES[name],
        "kernels": int(arm.problem.kernels.sum()),
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


def measure(device: Any, one: Trial, runners: list[Trial], builds: int) -> list[tuple[Rounds, Rounds]]:
    """Per trial its rounds and those of one stream beside it, per build."""
    distinct = list({trial.key(): trial for trial in runners}.values())
    found: dict[Any, tuple[Rounds, Rounds]] = {trial.key(): ([], []) for trial in distinct}
    for _ in range(builds):
        for at in range(0, len(distinct), HEAT):
            heat = distinct[at : at + HEAT]
            device.renew()
            times = device.times([one, *heat], ROUNDS)
            for trial, rounds in zip(heat, times[1:], strict=True):
                found[trial.key()][0].append(list(rounds))
                found[trial.key()][1].append(list(times[0]))
    device.renew()
    return [found[trial.key()] for trial in runners]


def column(row: dict[str, Any], name: str) -> dict[str, Any] | None:
    """What stands in a column of the table: of several widths or grains the fastest."""
    results = {entry["name"]: entry for entry in row["results"]}
    if name in ("list", "rules"):
        of = [entry for label, entry in results.items() if label.startswith(f"{name}-")]
        return max(of, key=lambda entry: entry["gain"], default=None)
    return results.get(row["auto"] if name == "auto" else name)


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['model']} {row['batch']}: one {row['one_us']:.0f} µs, bound {row['bounds']['lower_us']:.0f};"]
    for name in COLUMNS:
        entry = column(row, name)
        cells.append(f"{name} {entry['gain']:.2f}" if entry else f"{name} -")
    best_one = column(row, "tuned")
    assert best_one is not None
    cells.append(
        f"({best_one['streams']} streams, {best_one['waits']} waits, memory {best_one['memory']:.2f}; "
        f"{row['tuning']['tried']} changes, {len(row['tuning']['kept'])} kept, {row['tuning']['stopped']}; {row['took_s']:.0f} s)"
    )
    return " ".join(cells)


def table(rows: list[dict[str, Any]]) -> str:
    heads = [
        "model",
        "batch",
        "one, µs",
        *COLUMNS,
        "tuned, µs",
        "streams",
        "waits",
        "memory",
        "needed",
        "bound, µs",
        "reached",
    ]
    lines = ["| " + " | ".join(heads) + " |", "| --- " + "| ---: " * (len(heads) - 1) + "|"]
    for row in ordered(rows):
        cells = [row["model"], str(row["batch"]), f"{row['one_us']:.0f}"]
        found = {name: column(row, name) for name in COLUMNS}
        top = max(entry["gain"] for entry in found.values() if entry)
        for entry in found.values():
            text = f"{entry['gain']:.2f}" if entry else "-"
            cells.append(f"**{text}**" if entry and entry["gain"] >= top * 0.995 else text)
        own = found["tuned"]
        assert own is not None
        cells += [f"{own['us']:.1f}", str(own["streams"]), str(own["waits"]), f"{own['memory']:.2f}"]
        cells.append(f"{own['needed']:.2f}" if own.get("needed") else "-")
        cells += [f"{row['bounds']['lower_us']:.1f}", f"{row['bounds']['lower_us'] / own['us']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def fits(entry: dict[str, Any]) -> bool:
    """Whether a plan keeps to 1.5 times the memory of one stream, or is too small for that to matter."""
    return entry["memory"] <= 1.5 or not entry["counts"]


def page(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """`schedulers.md`: the table with what it means."""
    gpus = about.get("gpus") or [{}]
    versions = about.get("versions", {})
    machine = ", ".join(
        filter(None, [gpus[0].get("name"), f"driver {gpus[0].get('driver')}", f"PyTorch {versions.get('torch')}"])
    )
    tuning = [
        f"| {row['model']} | {row['batch']} | {row['tuning']['candidate']} | {row['tuning']['tried']} | {len(row['tuning']['kept'])} "
        f"| {row['tuning']['seconds']:.0f} | {row['tuning']['stopped']} |"
        for row in ordered(rows)
    ]
    skipped = [
        f"- {row['model']}, batch {row['batch']}: {name}: {why}."
        for row in ordered(rows)
        for name, why in row["skipped"].items()
    ]
    return "\n".join(
        [
            "# Ways to choose streams, side by side",
            "",
            ABOUT,
            "",
            table(rows),
            f"Machine: {machine}. Commit {str(about.get('commit'))[:7]}. Raw times: `schedulers/*.json.gz`. Made by",
            "",
            "    " + " ".join(["python", *about.get("command", [])]),
            "",
            "## All of it",
            "",
            "Time in µs / streams / waits / memory over one stream's / share of the lower bound that is reached.",
            "",
            details(rows),
            "## What tuning did",
            "",
            "| model | batch | best candidate | changes tried | kept | seconds | ended because |",
            "| --- | ---: | --- | ---: | ---: | ---: | --- |",
            *tuning,
            "",
            "## Against what was expected",
            "",
            *[f"- {line}" for line in verdicts(rows)],
            *(["", "## Not tried", "", *skipped] if skipped else []),
            "",
        ]
    )


def details(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | batch | " + " | ".join(COLUMNS) + " |", "| --- " + "| ---: " * (len(COLUMNS) + 1) + "|"]
    for row in ordered(rows):
        cells = [row["model"], str(row["batch"])]
        for name in COLUMNS:
            entry = column(row, name)
            cells.append(
                f"{entry['us']:.0f} / {entry['streams']} / {entry['waits']} / {entry['memory']:.1f} "
                f"/ {row['bounds']['lower_us'] / entry['us']:.2f}"
                if entry
                else "-"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (list(models.BATCHES).index(row["model"]), row["batch"]))


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What was expected, and what came."""
    lines = []
    for row in rows:
        own = column(row, "tuned")
        assert own is not None
        others = [entry for name in COLUMNS[:-1] if (entry := column(row, name)) and fits(entry)]
        top = max(others, key=lambda entry: entry["gain"], default=None)
        missed = []
        if top is not None and own["gain"] < top["gain"] * 0.99:
            missed.append(f"tuned {own['gain']:.2f} below {top['name']} {top['gain']:.2f}")
        wanted = TARGETS.get((row["model"], row["batch"]))
        if wanted and own["gain"] < wanted:
            missed.append(f"gain {own['gain']:.2f} below {wanted}")
        if own["high"] < 0.99:
            missed.append(f"slower than one stream: {own['gain']:.2f}")
        if not fits(own):
            missed.append(f"memory {own['memory']:.2f}")
        share = row["bounds"]["lower_us"] / own["us"]
        if row["one_us"] / row["bounds"]["lower_us"] > 1.05 and share < 0.7:
            missed.append(f"{share:.2f} of the bound ({row['bounds']['limit']})")
        if missed:
            lines.append(f"MISSED {row['model']} {row['batch']}: {'; '.join(missed)}")
    return lines or ["all expectations met" if rows else "nothing was measured"]


if __name__ == "__main__":
    main()
