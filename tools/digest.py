"""What msplit makes of every model, in short: to show that a change of its structure changes nothing else.

    python benchmarks/models.py FOLDER                           the benchmark models (needs TensorFlow, once)
    python tools/digest.py write DIGEST.json [--benchmarks FOLDER] [--only NAME ...]
    python tools/digest.py compare OLD.json NEW.json             exit code 1 where they differ

Of a few models: JSON of a build and of its bench on simulated streams, times left out, and the kept choices of a run whose times are given.

Per model: what `analyze` says, what `assign` writes under every shipped rule set, what `check` finds and the plan of it, and for the cuda
engine on CPU tensors, in all kernel modes: ops, steps and shapes, what each stream does, peak memory and outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

RULES = sorted(path.stem for path in (ROOT / "rules").glob("*.yaml") if path.stem != "example")
STREAMS = 4
LARGEST = 2**31
"""FLOPs of a step up to which the engine runs it here; of a larger one all but the outputs is compared."""


def short(content: bytes | str) -> str:
    """A hash, long enough not to meet another."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def listed(items: Iterable[Any]) -> str:
    """A hash of things by how they read."""
    return short("\n".join(str(item) for item in items))


def said(folder: Path, *arguments: str) -> str:
    """The output of a command and its exit code, without the folders that they name."""
    from msplit.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main.run(list(arguments))
    text = out.getvalue().replace(str(folder), "").replace(str(ROOT), "")
    return f"{code} {text}"


def text_of(problem: Exception) -> str:
    """An error's text without the folder of this checkout."""
    return str(problem).replace(f"{ROOT}/", "")


def content(path: Path) -> bytes:
    """Bytes of a file, or of all files of a folder with their names."""
    if not path.is_dir():
        return path.read_bytes()
    return b"".join(
        str(one.relative_to(path)).encode() + one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()
    )


def decided(model: Path, folder: Path) -> dict[str, Any]:
    """What the commands that only decide say and write."""
    found: dict[str, Any] = {"analyze": short(said(folder, "analyze", str(model), "--format", "json"))}
    found["analyze cuda"] = short(said(folder, "analyze", str(model), "--engine", "cuda", "--format", "json"))
    for rules in RULES:
        out, plan = folder / f"{rules}.out", folder / f"{rules}.plan"
        how = ("--rules", rules, "--streams", str(STREAMS))
        told = said(folder, "assign", str(model), *how, "-o", str(out), "--emit", "plan", str(plan))
        found[f"assign {rules}"] = short(content(out)) if out.exists() else told
        found[f"plan {rules}"] = short(plan.read_bytes()) if plan.exists() else None
        if out.exists():
            found[f"check {rules}"] = short(said(folder, "check", str(out), "--format", "json"))
    return found


def ran(model: Path, batch: int) -> dict[str, Any]:
    """What the cuda engine makes of a model, in every kernel mode."""
    import msplit
    from msplit.engines.cuda.options import KernelMode
    from msplit.errors import MsplitError

    try:
        flat = msplit.load(model)
        ids = msplit.assign(flat, "auto", streams=STREAMS, batch=batch).ids
    except MsplitError as problem:
        return {"load": text_of(problem)}
    found: dict[str, Any] = {}
    for mode in KernelMode:
        try:
            found[mode] = _compiled(flat, ids, batch, mode)
        except MsplitError as problem:
            found[mode] = text_of(problem)
    return found


def _compiled(flat: Any, ids: Any, batch: int, mode: Any) -> dict[str, Any]:
    from msplit.api import price
    from msplit.core.arguments import Precision
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.options import EngineOptions
    from msplit.inputs.make import make_inputs

    _, costs = price(flat, batch=batch)
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    streams = int(ids.max(initial=0)) + 1
    executable: Any = ENGINE.build(
        Job(flat, ids, streams, feeds, precision=Precision.IEEE, costs=costs, options=EngineOptions("cpu", mode=mode))
    )
    facts = {name: value for name, value in executable.facts().items() if name != "device"}
    runs = executable
    while not hasattr(runs, "program"):  # the host part stands in front
        runs = runs.device
    steps, stream_program = runs.program.steps, runs.stream_program
    found: dict[str, Any] = {
        "ops": dict(sorted(Counter(step.op.op for step in steps).items())),
        "steps": listed(
            (step.op.name, step.op.op, step.inputs, step.outputs, step.launches, step.bytes, step.bases)
            for step in steps
        ),
        "streams": listed(
            (one.step, one.lane, one.waits, one.records, sorted(one.frees), one.views)
            for one in stream_program.instructions
        ),
        "peak bytes": stream_program.peak_bytes,
        "facts": {name: str(value) for name, value in sorted(facts.items())},
    }
    if costs.flops.sum() <= LARGEST:
        outputs = executable.step(feeds)
        found["outputs"] = {
            name: [str(value.dtype), list(value.shape), short(value.tobytes())]
            for name, value in sorted(outputs.items())
        }
    executable.close()
    return found


BENCHED = ("mmoe_small.pb", "towers_small.pb", "gru_while")
"""Models that are built and measured."""

LAYOUTS = "keras_inception"
"""The one whose layout is chosen by given times."""

_OF_THE_MACHINE = frozenset({"environment", "preparation", "made_for", "host", "device", "warnings"})
_MEASURED = re.compile(r"[\d.]+ (s|ms|µs|us)\b")


def untimed(value: Any) -> Any:
    """JSON without what differs from run to run: fractions, which are times and rounding, samples, and the machine."""
    if isinstance(value, dict):
        return {name: untimed(item) for name, item in value.items() if name not in _OF_THE_MACHINE}
    if isinstance(value, list):
        numbers = value and all(isinstance(item, float) for item in value)
        return "numbers" if numbers else [untimed(item) for item in value]
    return "a number" if isinstance(value, float) else _MEASURED.sub("#", value) if isinstance(value, str) else value


def benched(model: Path, batch: int, folder: Path) -> dict[str, Any]:
    """What is printed of a build, and of its bench on simulated streams."""
    build = folder / "build"
    how = ("--batch", str(batch), "--device", "cpu", "--streams", "2", "--effort", "fast", "-o", str(build))
    quick = ("--duration", "0", "--warmup", "0", "--builds", "1")
    found: dict[str, Any] = {}
    for name, command in {"build": ("build", str(model), *how), "bench": ("bench", str(build), *quick)}.items():
        code, _, text = said(folder, *command, "--format", "json").partition(" ")
        if not text.startswith("{"):
            found[name] = f"{code} {text}"
            continue
        content = untimed(json.loads(text))
        found |= {f"{name} {key}": short(f"{code} {json.dumps(item)}") for key, item in content.items()}
    return found


def kept(model: Path, batch: int, folder: Path) -> list[str]:
    """Lines of the file of kept choices, where channels first are said to be faster with plain kernels, and slower with grouped ones."""
    import msplit
    from msplit.engines.base import Job
    from msplit.engines.cuda import compile as compiler
    from msplit.engines.cuda.autotune import tuner
    from msplit.engines.cuda.device import device as devices
    from msplit.engines.cuda.device.device import Device
    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.options import EngineOptions, KernelMode
    from msplit.inputs.make import make_inputs

    flat = msplit.load(model)
    ids = msplit.assign(flat, "auto", streams=STREAMS, batch=batch).ids
    feeds = make_inputs(flat, {}, batch=batch, seed=0)

    def seconds(compiled: Any, job: Any) -> float:
        return 1.0 if (compiled.layout == "nchw") != job.options.mode.groups else 2.0

    path = folder / "choices.jsonl"
    with (
        mock.patch.object(compiler.Compiled, "one_stream_seconds", seconds),
        mock.patch.object(tuner, "kept_in", return_value=path),
        mock.patch.object(devices, "_DEVICES", {}),
        mock.patch.object(Device, "is_gpu", True),
        mock.patch.object(Device, "is_current", True),
    ):
        for mode in (KernelMode.PLAIN, KernelMode.GROUPED):
            ENGINE.compile(Job(flat, ids, int(ids.max()) + 1, feeds, options=EngineOptions("cpu", mode=mode)))
    return sorted(filter(None, path.read_text().split("\n"))) if path.exists() else []


def models(benchmarks: Path | None) -> dict[str, tuple[Path, int]]:
    """Name -> model and batch."""
    found = {
        path.name: (path, 2)
        for path in sorted((ROOT / "sample_graphs").iterdir())
        if path.suffix in (".pb", ".pbtxt", ".meta") or path.is_dir()
    }
    if benchmarks is not None:
        import foreign
        import models as benchmark_models

        weighed = benchmarks / "filled"
        for name, batches in benchmark_models.BATCHES.items():
            batch = min(batches) if name in benchmark_models.FIXED_BATCH else batches[0]
            found[f"benchmark {name}"] = benchmark_models.fill(benchmarks, weighed, name, batch), batch
        for name, model in foreign.MODELS.items():
            found[f"foreign {name}"] = benchmark_models.fill(benchmarks, weighed, name, model.batch), model.batch
    return found


def write(target: Path, benchmarks: Path | None, names: list[str]) -> None:
    """Makes the digest; models that are in the file already are made anew, others in it are kept where names are given."""
    import torch

    torch.set_num_threads(1)  # sums in the same order
    made = json.loads(target.read_text()) if names and target.exists() else {}
    for name, (model, batch) in models(benchmarks).items():
        if names and name not in names:
            continue
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            made[name] = {"decided": decided(model, Path(folder)), "cuda": ran(model, batch)}
            if name in BENCHED:
                made[name]["bench"] = benched(model, batch, Path(folder))
            if name == LAYOUTS:
                made[name]["kept choices"] = kept(model, batch, Path(folder))
    target.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """Where two digests differ, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in sorted({*old, *new})
            for line in differences(old.get(key), new.get(key), f"{at} / {key}" if at else key)
        ]
    return [] if old == new else [f"{at}: {old} -> {new}"]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write")
    writes.add_argument("target", type=Path)
    writes.add_argument("--benchmarks", type=Path)
    writes.add_argument("--only", action="append", default=[], metavar="NAME")
    compares = commands.add_parser("compare")
    compares.add_argument("old", type=Path)
    compares.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.target, given.benchmarks, given.only)
        return 0
    found = differences(json.loads(given.old.read_text()), json.loads(given.new.read_text()))
    print("\n".join(found) or "the digests are equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
