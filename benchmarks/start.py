"""How long it takes until a model is ready: in a fresh process, with an empty cache and with what the process before has kept.

    python benchmarks/start.py GRAPHS OUT [--models mmoe:128,densenet121:1] [--old CHECKOUT] [--turns 2]

Each turn gives every checkout an empty cache of its own and starts processes one after the other: the first with nothing kept, the second
with what the first has kept, one that builds, likewise, and in empty caches one that opens the build and one with effort fast. Seconds
from the start of the interpreter, and what a step then takes on the device, µs. Writes OUT/start.json, and prints the table last.
`--profile` runs the second one once more under Python's profiler and prints where it spent its time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODELS = "mmoe:128,densenet121:1"
PROCESSES = ("first", "second", "build", "open", "fast")
STREAMS = 8


def main() -> None:
    if sys.argv[1] == "child":
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--old", type=Path, help="another checkout, to be compared with")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=500, help="begin no further process after this")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import models

    # What the first process on a machine reads from the disk, the others find in memory; and the packages' byte code, where it is written.
    warm = "import torch, triton, torch._inductor.compile_fx; torch.ones(1, device='cuda')"
    subprocess.run([sys.executable, "-c", warm], check=True)
    checkouts = {"new": HERE.parent.resolve()} | ({"old": arguments.old.resolve()} if arguments.old else {})
    stop = time.monotonic() + arguments.seconds
    found: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    for name, batch in models.rows(arguments.models):
        path = models.fill(arguments.graphs, Path("/tmp/msplit-models"), name, batch)
        for turn in range(arguments.turns):
            for version, checkout in list(checkouts.items())[:: 1 if turn % 2 else -1]:
                cache = arguments.out / f"cache-{name}-{version}"
                for process in PROCESSES if version == "new" else PROCESSES[:2]:
                    if process in ("first", "open", "fast"):
                        shutil.rmtree(cache, ignore_errors=True)
                    effort = "full" if process in ("first", "second") else process
                    if time.monotonic() < stop and (taken := started(checkout, cache, path, batch, effort)):
                        found[f"{name}:{batch}", version, process].append(taken)
                        print(
                            name, version, process, {key: round(value, 2) for key, value in taken.items()}, flush=True
                        )
        if arguments.profile:
            for _ in range(2):
                started(checkouts["new"], arguments.out / f"cache-{name}-new", path, batch, "full", "profile")
    (arguments.out / "start.json").write_text(json.dumps([[*key, rows] for key, rows in found.items()]))
    print(table(found))


def started(
    checkout: Path, cache: Path, model: Path, batch: int, effort: str, *profile: str
) -> dict[str, float] | None:
    """Seconds of each part of getting ready, in a process of its own; None where it failed."""
    cache.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")])),
        "XDG_CACHE_HOME": str(cache.resolve()),
        "TRITON_CACHE_DIR": str(cache.resolve() / "triton"),
    }
    command = [
        sys.executable,
        str(HERE / "start.py"),
        "child",
        str(model),
        str(batch),
        str(time.time()),
        effort,
        *profile,
    ]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    print(done.stdout if profile else "\n".join(done.stdout.splitlines()[:-1]), flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-3000:])
        return None
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def child(model: str, batch: str, began: str, effort: str, profile: str = "") -> None:
    """Makes one model ready, and prints how long each part took."""
    marks = [("interpreter", float(began))]

    def mark(what: str) -> None:
        marks.append((what, time.time()))

    mark("import PyTorch")
    import torch

    torch.ones(1, device="cuda")
    mark("load")
    from msplit import api

    flat = None if effort == "open" else api.load(model)
    build = Path(os.environ["XDG_CACHE_HOME"]).with_suffix(".build")
    how = {"effort": effort} if effort == "fast" else {}  # which an older version does not know
    request = dict(streams=STREAMS, engine="cuda", batch=int(batch), **how)
    mark("prepare")
    if profile:
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        runner = profiler.runcall(api.prepare, flat, **request)
        for order, rows in (("cumulative", 130), ("tottime", 40)):
            pstats.Stats(profiler).sort_stats(order).print_stats(rows)
    elif effort in ("build", "open"):
        if effort == "build":
            print("   build, bytes:", api.build(flat, build, **request, force=True))
            mark("open")
        runner = api.open(build)
    else:
        runner = api.prepare(flat, **request)
    mark("first step")
    runner.step(dict(runner.buffers))
    mark("")
    parts: dict[str, Any] = {what: after - at for (what, at), (_, after) in itertools.pairwise(marks)}
    parts["in all"] = marks[-1][1] - marks[0][1]
    parts["step, µs"] = statistics.median(runner.executable.device_times(200)) * 1e6
    if hasattr(runner, "preparation"):
        phases = sorted(runner.preparation.phases, key=lambda one: -one.seconds)[:8]
        print("  ", ", ".join(f"{one.phase} {one.seconds:.2f}" for one in phases))
    print(json.dumps(parts))
    sys.stdout.flush()
    os._exit(0)  # what ends afterwards is not waited for


def table(found: dict[tuple[str, str, str], list[dict[str, float]]]) -> str:
    """Medians over the turns, seconds, the least and the most of the sum in brackets."""
    parts = list(dict.fromkeys(part for rows in found.values() for row in rows for part in row))
    lines = [f"| model | version | process | {' | '.join(parts)} |", f"| --- | --- | --- |{' ---: |' * len(parts)}"]
    for (model, version, process), rows in found.items():
        cells = [f"{statistics.median(row.get(part, 0.0) for row in rows):.2f}" for part in parts]
        sums = [row["in all"] for row in rows]
        cells[parts.index("in all")] += f" ({min(sums):.2f} to {max(sums):.2f})"
        lines.append(f"| {model} | {version} | {process} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
