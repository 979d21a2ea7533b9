"""Ops, networks and gradients at random on a GPU that has no TensorFlow beside it: its answers are made here, and held against over there.

    python -m tests.gpu.networks make .gpu/networks.zip --seconds 300   # where TensorFlow is
    python -m tests.gpu.networks run .gpu/networks.zip --seconds 480    # on the machine with the GPU; the table comes last

Every network (`tests.networks`) runs captured on one and on four streams, in IEEE float32, TF32, bfloat16 and float16: with the libraries'
kernels, with kernels that are chosen by timing them, with groups of pointwise ops as one op, with alike branches as one, and compiled.
Memory is poisoned when it is let go, and steps wait at random. Every op runs on the inputs and the attributes that the tests of the
lowerings have, on inputs that are contiguous and not. `run --case 17` runs one network again, `run --op 1203` one case of an op.

IEEE float32 may be as far from TensorFlow's as `tests.networks.tolerances` says, half precision and TF32 `verification.ROOM` times as far
as rounding alone puts an output on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HALVES = ("bf16", "fp16")
PRECISIONS = ("ieee", "tf32", *HALVES)
MODES: dict[str, dict[str, bool]] = {
    "plain": {"measure": False},
    "fused": {"measure": False, "fuse": True, "compile": False},
    "grouped": {"measure": True, "group": True},
    "chosen": {"measure": True},
    "compiled": {"measure": True, "fuse": True, "group": True, "compile": True},
}
"""What the engine is told."""

STREAMS = (1, 4)
TF32_SHARE = 2.0**-11
"""By how much TF32 rounds a number, at most."""
OPS_AT_ONCE = 200
DELAY = 20_000
"""Cycles that a step waits at most."""


def make(path: Path, seconds: float, first: int, most_bytes: int) -> None:
    """Writes networks and cases of ops with TensorFlow's answers, as many as there is time and room for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        ops = _recorded_ops()
        for start in range(0, len(ops), OPS_AT_ONCE):
            archive.writestr(f"ops/{start}", pickle.dumps(ops[start : start + OPS_AT_ONCE]))
        _say(f"{len(ops):,} cases of ops, {path.stat().st_size:,} bytes, {time.monotonic() - began:.0f} s")
        began, seed, made = time.monotonic(), first, 0
        while time.monotonic() - began < seconds and path.stat().st_size < most_bytes:
            try:
                case = _answered(seed)
            except Exception as problem:  # what TensorFlow itself does not make
                _say(f"network {seed}: {type(problem).__name__}: {str(problem)[:300]}")
            else:
                archive.writestr(f"networks/{seed}", pickle.dumps(case))
                made += 1
            seed += 1
    _say(f"{made:,} networks, {path.stat().st_size:,} bytes in all")


def _answered(seed: int) -> dict[str, Any]:
    """A network with what TensorFlow answers, how far rounding carries that, and how far rounding to coarser types puts it."""
    from msplit.core.arguments import Precision
    from msplit.opset import schema
    from msplit.verify.mixed_precision import emulated_errors
    from tests.engines.cuda.cases import flat_of, job
    from tests.networks import answers, how_far, network, tolerances

    one = network(seed)
    expected = answers(one)
    flat = flat_of(schema.graph_pb2.GraphDef.FromString(one.graph), outputs=one.outputs)
    names = dict(zip(one.outputs, (tensor.name for tensor in flat.outputs), strict=True))
    own = job(flat, {tensor.name: one.feeds[tensor.name] for tensor in flat.inputs})
    rounding = {
        name: emulated_errors(replace(own, precision=Precision(name)), [own.feeds])
        for name in PRECISIONS
        if name != "ieee"
    }
    # Kernels add in other orders than the CPU does: what lies at the kink of a ReLU goes over it on one of them, and not on the other.
    for name, far in how_far(one, expected, TF32_SHARE).items():
        rounding["tf32"][names[name]] = max(rounding["tf32"].get(names[name], 0.0), far)
    return {
        "graph": one.graph, "outputs": one.outputs, "feeds": one.feeds, "blocks": one.blocks, "gradient": one.gradient,
        "expected": {names[output]: value for output, value in expected.items()},
        "tolerances": {names[output]: most for output, most in tolerances(one, expected).items()}, "rounding": rounding,
    }  # fmt: skip


def _recorded_ops() -> list[dict[str, Any]]:
    """What the tests of the lowerings check, as plain data."""
    import pytest

    from tests.engines.cuda.ops import harness

    found: list[dict[str, Any]] = []
    check = harness.check

    def recorded(op: str, inputs: Sequence[Any], attrs: Any = None, **options: Any) -> Any:
        result = check(op, inputs, attrs, **options)
        arrays = [np.asarray(array) for array in inputs]
        if sum(array.nbytes for array in arrays) <= 1 << 16 and all(array.dtype.kind not in "OSU" for array in arrays):
            expected = options.get("expected")
            plain = {**harness._inferred(op, arrays, attrs or {}), **(attrs or {})}
            found.append(
                {
                    "op": op, "inputs": arrays, "attrs": plain, "defaults": {**harness._defaults(op), **plain},
                    "wanted": [*(harness.run_tensorflow(op, arrays, attrs) if expected is None else expected)],
                    **{name: options[name] for name in ("outputs", "rtol", "atol", "exact", "nchw") if name in options},
                }
            )  # fmt: skip
        return result

    harness.check = recorded
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-x", str(Path(harness.__file__).parent)])
    if code:
        raise SystemExit("the tests of the lowerings fail: mend them first")
    harness.check = check
    return found


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(args: argparse.Namespace) -> int:
    """Runs all of it in several processes, and prints what failed."""
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + args.seconds
    workers = {number: _start(args, number, end, []) for number in range(args.processes)}
    deaths: list[str] = []
    while workers:
        time.sleep(0.2)
        for number, worker in list(workers.items()):
            late = time.time() > end + args.grace
            if worker.poll() is None and not late:
                continue
            worker.kill()
            worker.wait()
            del workers[number]
            at = _began(args.out / f"{number}.jsonl")
            if worker.returncode and at is not None:
                why = "did not end" if late else f"ended its process ({worker.returncode})"
                deaths.append(f"{at}: {why}: {_last_words(args.out / f'{number}.log')}")
                if not late:
                    workers[number] = _start(args, number, end, _done(args.out / f"{number}.jsonl"))
    rows = [row for number in range(args.processes) for row in _rows(args.out / f"{number}.jsonl") if "result" in row]
    return _told(rows, deaths, args.out)


def _start(args: argparse.Namespace, number: int, end: float, done: list[str]) -> subprocess.Popen[bytes]:
    """A process for a share of the work; a second one of the same goes on behind what is done."""
    told = args.out / f"{number}.done"
    told.write_text(json.dumps(done))
    command = [sys.executable, "-m", "tests.gpu.networks", "work", str(args.corpus), "--device", args.device]
    command += ["--share", f"{number}/{args.processes}", "--end", str(end), "--done", str(told), "--modes", args.modes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MSPLIT_VERIFY": "1", "MSPLIT_COMPILE_PROCESSES": "0"}
    with (args.out / f"{number}.jsonl").open("ab") as rows, (args.out / f"{number}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=rows, stderr=log, env=environment)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # cut off
            continue


def _began(path: Path) -> str | None:
    """What a process was at when it ended; None where it was done."""
    last = None
    for row in _rows(path):
        last = row["at"] if "result" not in row else None
    return last


def _done(path: Path) -> list[str]:
    return sorted({row["at"] for row in _rows(path)})


def _last_words(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-400:]


def work(args: argparse.Namespace) -> None:
    """One of these processes: says what it begins and what came of it, a line for each."""
    share, count = map(int, args.share.split("/"))
    done = set(json.loads(Path(args.done).read_text()))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with zipfile.ZipFile(args.corpus) as archive:
        names = [name for name in archive.namelist() if name.startswith("networks/")]
        own = [name for number, name in enumerate(names) if number % count == share]
        ops = [name for name in archive.namelist() if name.startswith("ops/")]
        asked = args.modes.split(",")

        def tell(at: str, result: str | None = None) -> None:
            out.write(f"{json.dumps({'at': at} if result is None else {'at': at, 'result': result})}\n")

        def attempt(at: str, try_it: Any) -> None:
            if at in done or time.time() > args.end:
                return
            tell(at)
            try:
                tell(at, try_it())
            except Exception as problem:
                tell(at, f"{type(problem).__name__}: {str(problem)[:1500]}")
                if "AcceleratorError" in repr(problem) or "CUDA error" in str(problem):
                    os._exit(3)  # nothing runs on this context any more

        if "ops" in asked:
            for name in ops[share::count]:
                for number, case in enumerate(pickle.loads(archive.read(name)), int(name[4:])):
                    attempt(f"op {number} {case['op']}", functools.partial(run_op, case, args.device))
        for number, name in enumerate(own):
            case = None
            for mode in (mode for mode in MODES if mode in asked):
                # To compile takes most of the time: each network is compiled in one precision, all of them in turn.
                for precision in PRECISIONS if mode != "compiled" else PRECISIONS[number % len(PRECISIONS) :][:1]:
                    for streams in STREAMS:
                        at = f"{name} {mode} {precision} {streams}"
                        if at in done or time.time() > args.end:
                            continue
                        case = case or _loaded(pickle.loads(archive.read(name)))
                        attempt(at, functools.partial(run_network, case, mode, precision, streams, args.device))
            if case is not None:
                _forget(case)


def _loaded(case: dict[str, Any]) -> dict[str, Any]:
    from msplit.opset import schema
    from tests.engines.cuda.cases import flat_of

    graph = schema.graph_pb2.GraphDef.FromString(case["graph"])
    flat = flat_of(graph, outputs=case["outputs"])
    return {**case, "flat": flat, "feeds": {tensor.name: case["feeds"][tensor.name] for tensor in flat.inputs}}


def _forget(case: dict[str, Any]) -> None:
    from msplit.engines.cuda.engine import ENGINE

    ENGINE.forget(case["flat"])


def run_network(case: dict[str, Any], mode: str, precision: str, streams: int, device: str) -> str:
    """Two steps of a network. "" where they give what TensorFlow gives; otherwise what is wrong."""
    import torch

    from msplit.core.arguments import Precision
    from msplit.engines.cuda.autotune.tuner import Tuner
    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.options import Torture
    from msplit.verify.compare import compare
    from tests.engines.cuda.cases import job, scattered
    from tests.networks import WITHIN

    flat, feeds = case["flat"], case["feeds"]
    if device == "cuda":
        Tuner.of(torch.device("cuda")).spent = 0.0  # there is time to measure
    own = {**MODES[mode], "compile": MODES[mode].get("compile") and device == "cuda"}
    torture = Torture(poison=True, delay_cycles=DELAY, seed=streams)
    wanted = job(flat, feeds, scattered(flat, streams, streams), streams=streams, device=device, torture=torture, **own)
    wanted = replace(wanted, precision=Precision(precision))
    captures = not ENGINE.compile(wanted).dynamic
    executable = ENGINE.build(replace(wanted, options=replace(wanted.options, capture=captures)))
    try:
        for step in range(2):
            found = executable.step(feeds)
            how = compare(
                found,
                case["expected"],
                precision=wanted.precision,
                tolerance=WITHIN if wanted.precision.ieee else None,
                carried=case["tolerances"] if wanted.precision.ieee else None,
                rounding=case["rounding"].get(precision),
            )
            if not how.passed:
                return f"step {step}: {how.describe()} ({', '.join(case['blocks'])})"
    finally:
        executable.close()
    return ""


def run_op(case: dict[str, Any], device: str) -> str:
    """One case of an op through its lowering. "" where it gives what TensorFlow gives; otherwise what is wrong."""
    import torch

    from msplit.engines.cuda.device.device import precision
    from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
    from msplit.engines.cuda.ir.interpret import as_tuple
    from msplit.engines.cuda.ir.lowering import table
    from msplit.engines.cuda.ir.node import Node
    from tests.engines.cuda.ops import harness

    lowering = table()[case["op"]]
    static = harness._static_positions(lowering, len(case["inputs"]))

    def argument(index: int, array: np.ndarray, turned: bool) -> Any:
        if index in static:
            return array.copy()
        tensor = to_torch(array.copy()).to(device)
        reverse = tuple(reversed(range(tensor.dim())))
        return tensor.permute(reverse).contiguous().permute(reverse) if turned and tensor.dim() > 1 else tensor

    for nchw in case.get("nchw", (False,)):
        for attrs in ("attrs", "defaults"):
            for turned in (False, True):
                given = [argument(index, array, turned) for index, array in enumerate(case["inputs"])]
                with torch.no_grad(), precision(ieee=True):
                    got = as_tuple(lowering.function(Node("node", case["op"], case[attrs], nchw), *given))
                for index in case.get("outputs") or range(len(case["wanted"])):
                    label = f"{attrs}, nchw {nchw}, transposed {turned}, output {index}"
                    options = {name: case[name] for name in ("rtol", "atol", "exact") if name in case}
                    try:
                        harness.compare(to_numpy(got[index]), case["wanted"][index], label=label, **options)
                    except AssertionError as wrong:
                        return str(wrong)
    return ""


def _told(rows: list[dict[str, Any]], deaths: list[str], out: Path) -> int:
    """Prints how much ran, how much of it failed, and every failure, the table last."""
    (out / "results.json").write_text(json.dumps({"rows": rows, "deaths": deaths}))
    ran, failed = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    told: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        parts = row["at"].split()
        kind = ("ops", "", "") if parts[0] == "op" else tuple(parts[1:])
        ran[kind] += 1
        if row["result"]:
            failed[kind] += 1
            told[kind].append(f"{row['at']}: {row['result'].splitlines()[0][:300]}")
    for kind, lines in told.items():
        _say(
            "\n".join(
                [f"--- {' '.join(kind)}", *lines[:12], *([f"… {len(lines) - 12} more"] if len(lines) > 12 else [])]
            )
        )
    _say("\n".join(["--- processes that ended", *deaths]) if deaths else "--- no process ended before its time")
    _say(f"\n{'mode':10} {'precision':10} {'streams':8} {'ran':>7} {'failed':>7}")
    for kind in sorted(ran):
        _say(f"{kind[0]:10} {kind[1]:10} {kind[2]:8} {ran[kind]:7,} {failed[kind]:7,}")
    _say(f"{'in all':30} {ran.total():7,} {failed.total():7,}   processes that ended: {len(deaths)}")
    return bool(failed or deaths)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.networks", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("corpus", type=Path)
    maker.add_argument("--seconds", type=float, default=300, help="of making networks; cases of ops come first")
    maker.add_argument("--first", type=int, default=0, help="seed of the first network")
    maker.add_argument("--megabytes", type=float, default=8)
    runner, worker = commands.add_parser("run"), commands.add_parser("work")
    for one in (runner, worker):
        one.add_argument("corpus", type=Path)
        one.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        one.add_argument("--modes", default=",".join(["ops", *MODES]))
    runner.add_argument("--seconds", type=float, default=450)
    runner.add_argument("--grace", type=float, default=60, help="for what is being done when the time is over")
    runner.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    runner.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".gpu/networks-out")))
    runner.add_argument("--case", help="this network alone, by its seed, in this process")
    runner.add_argument("--op", type=int, help="this case of an op alone, in this process")
    for option in ("--share", "--done"):
        worker.add_argument(option, required=True)
    worker.add_argument("--end", type=float, required=True)
    args = parser.parse_args(arguments)
    if args.command == "make":
        make(args.corpus, args.seconds, args.first, int(args.megabytes * 2**20))
        return 0
    if args.command == "work":
        work(args)
        return 0
    if args.case is None and args.op is None:
        return run(args)
    with zipfile.ZipFile(args.corpus) as archive:
        if args.op is not None:
            start = args.op // OPS_AT_ONCE * OPS_AT_ONCE
            found = [run_op(pickle.loads(archive.read(f"ops/{start}"))[args.op - start], args.device)]
        else:
            case = _loaded(pickle.loads(archive.read(f"networks/{args.case}")))
            asked = [mode for mode in MODES if mode in args.modes.split(",")]
            every = [(mode, precision, streams) for mode in asked for precision in PRECISIONS for streams in STREAMS]
            found = [f"{' '.join(map(str, one))}: {run_network(case, *one, args.device)}" for one in every]
    _say("\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
