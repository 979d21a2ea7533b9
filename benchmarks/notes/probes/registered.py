"""A step with 2 MB of inputs, from memory that the GPU reads by itself, with that switched off (before) and on (after), in turns.

PYTHONPATH=. python benchmarks/notes/probes/registered.py [cpu]

The model is like MMoE at 1,024 rows of 512 numbers, and is made here: neither TensorFlow nor a file is needed. Each answer is held against
that of a plain array. It ends with exit code 1 where one is wrong, or where something was not read where it lies. Half a minute on a GPU.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import msplit
from msplit.engines.cuda.runtime import input_staging
from msplit.engines.cuda.runtime.input_staging import InputStaging
from msplit.engines.cuda.runtime.memcpy import HostMemory
from msplit.opset import schema
from msplit.progress import Progress, silent
from msplit.run.request import RunOptions, RunRequest, request_of
from msplit.serving.pool import making, sources
from msplit.serving.pool.pool import Pool
from msplit.serving.pool.settings import PoolSettings

ROWS, WIDTH, EXPERTS, UNITS, TASKS = 1024, 512, 8, 128, 4
FLOAT = 1


def model(path: Path) -> Path:
    """Writes a graph of experts over one input, whose sum each task takes."""
    graph, rng = schema.graph_pb2.GraphDef(), np.random.default_rng(0)

    def node(name: str, op: str, *inputs: str, **numbers: int) -> str:
        made = graph.node.add(name=name, op=op, input=inputs)
        made.attr["dtype" if op in ("Placeholder", "Const") else "T"].type = FLOAT
        for key, value in numbers.items():
            made.attr[key].i = value
        return name

    def weight(name: str, *shape: int) -> str:
        node(name, "Const")
        tensor = graph.node[-1].attr["value"].tensor
        tensor.dtype = FLOAT
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.tensor_content = (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32).tobytes()
        return name

    x = node("x", "Placeholder")
    for size in (-1, WIDTH):
        graph.node[-1].attr["shape"].shape.dim.add(size=size)
    experts = [
        node(f"relu_{n}", "Relu", node(f"expert_{n}", "MatMul", x, weight(f"w_{n}", WIDTH, UNITS)))
        for n in range(EXPERTS)
    ]
    total = node("sum", "AddN", *experts, N=EXPERTS)
    for n in range(TASKS):
        node(f"task_{n}", "MatMul", total, weight(f"v_{n}", UNITS, 8))
    path.write_bytes(graph.SerializeToString())
    return path


@contextmanager
def before() -> Iterator[None]:
    """Nothing is read where it lies, but for pinned tensors, by a graph that does not fetch inputs."""
    found = InputStaging._send_direct, input_staging.arrays_on_host
    InputStaging._send_direct = lambda self, name, arrays: False  # type: ignore[method-assign]
    input_staging.arrays_on_host = lambda feeds, *, pinned=False: found[1](feeds)
    try:
        yield
    finally:
        InputStaging._send_direct, input_staging.arrays_on_host = found  # type: ignore[method-assign]


def worker_pool(where: str, request: RunRequest, direct: bool, settings: PoolSettings, tell: Progress) -> Pool:
    """The pool of a process, which may be one that registers nothing."""
    if not direct:
        HostMemory.register = lambda self, address, size: False  # type: ignore[method-assign]
    return sources.pool(where, request, settings, progress=tell)


def registered(feeds: Any) -> Any:
    """Copies of arrays in memory that is registered with CUDA."""
    found = {name: np.array(value) for name, value in feeds.items()}
    for value in found.values() if torch.cuda.is_available() else ():
        status = torch.cuda.cudart().cudaHostRegister(value.ctypes.data, value.nbytes, 0)
        assert int(status) == 0, f"CUDA refuses to register: {status}"
    return found


def right(answer: Any, expected: Any) -> bool:
    return all(np.allclose(answer[name], value, rtol=2e-2, atol=2e-2) for name, value in expected.items())


def timed(
    ask: Callable[[Any], Any], feeds: Sequence[Any], expected: Sequence[Any], seconds: float
) -> tuple[list[float], int]:
    """Seconds of each step, and how many answers are wrong."""
    times, wrong = list[float](), 0
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        number = len(times) % len(feeds)
        answer = ask(feeds[number])
        times.append(time.perf_counter() - start)
        wrong += not right(answer, expected[number])
    return times, wrong


def flood(
    pool: Any, feeds: Sequence[Any], expected: Sequence[Any], window: int, seconds: float
) -> tuple[list[float], int]:
    """Seconds from one step to the next with so many in flight; answers are looked at afterwards."""
    going, answers, count = deque[Any](), list[Any](), 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or going:
        if time.perf_counter() - start < seconds and len(going) < window:
            going.append((count % len(feeds), pool.submit(feeds[count % len(feeds)])))
            count += 1
        else:
            number, future = going.popleft()
            answers.append((number, future.result()))
    each = (time.perf_counter() - start) / count
    return [each], sum(not right(answer, expected[number]) for number, answer in answers)


class Table:
    """Rows of figures that are printed as they come."""

    def __init__(self) -> None:
        self.wrong = 0

    def row(self, what: str, runs: dict[str, Callable[[float], tuple[list[float], int]]]) -> None:
        """Measures each way in turns, and prints the medians side by side."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(6):
            for name, run in runs.items():
                found, wrong = run(0.05 if turn == 0 else 0.15)
                times[name] += found if turn else []
                self.wrong += wrong
        print(
            f"{what:34}"
            + "".join(f" {name} {np.median(each) * 1e6:7.1f} µs" for name, each in times.items())
            + (f"   WRONG: {self.wrong}" if self.wrong else ""),
            flush=True,
        )


def with_before(run: Callable[[float], Any]) -> Callable[[float], Any]:
    def switched(seconds: float) -> Any:
        with before():
            return run(seconds)

    return switched


def main() -> int:
    cpu = "cpu" in sys.argv[1:]
    place = "cpu" if cpu else "cuda"
    where = str(model(Path(tempfile.mkdtemp()) / "experts.pb"))
    how: dict[str, Any] = {"engine": "cuda", "device": place, "streams": 4, "effort": "fast"}
    rng, table = np.random.default_rng(1), Table()
    feeds = [{"x": rng.standard_normal((ROWS, WIDTH)).astype(np.float32)} for _ in range(8)]
    fed = [registered(one) for one in feeds]
    seen = list[bool]()
    sent = InputStaging._send_direct

    def noted(self: Any, name: str, arrays: Sequence[Any]) -> bool:
        seen.append(sent(self, name, arrays))
        return seen[-1]

    with msplit.prepare(where, batch=ROWS, **how) as runner:
        expected = [{name: np.array(value) for name, value in runner.step(one).items()} for one in feeds]
        ways: dict[str, Sequence[Any]] = {"arrays": feeds, "registered arrays": fed, "own buffers": [runner.buffers]}
        if not cpu:
            pinned = [{"x": torch.from_numpy(one["x"]).pin_memory()} for one in feeds]
            ways |= {"pinned tensors": pinned, "arrays of them": [{"x": one["x"].numpy()} for one in pinned]}
        InputStaging._send_direct = noted  # type: ignore[method-assign]
        for name, ours in ways.items():
            for one in ours:
                runner.step(one)
            wanted = name in ("registered arrays", "pinned tensors", "arrays of them")
            if set(seen) != {wanted} and not cpu:
                print(f"{name}: read where they lie {set(seen)}, expected {wanted}")
                table.wrong += 1
            seen.clear()
        InputStaging._send_direct = sent  # type: ignore[method-assign]
        for name, ours in ways.items():
            runner.buffers["x"][...] = feeds[0]["x"]  # steps before have written there
            run = partial(timed, runner.step, ours, expected)
            table.row(f"step alone, {name}", {"before": with_before(run), "after": run})
    pools: dict[str, Any] = {"groups": 2, "batches": [ROWS]}
    with msplit.pool(where, **how, **pools) as pool:
        for window in (1, 2, 3):
            for name, ours in (("arrays", feeds), ("registered", fed)):
                run = partial(flood, pool, ours, expected, window)
                table.row(f"pool, {window} in flight, {name}", {"before": with_before(run), "after": run})
    own = importlib.import_module("registered")  # what is sent to a process is found by the module's name
    request, settings = request_of(msplit.pool, RunOptions, how), PoolSettings(groups=2, batches=[ROWS])
    opened = {
        name: making.make_processes(
            lambda number, given, direct=direct: partial(own.worker_pool, where, request, direct, given),  # type: ignore[misc]
            [request.places[0]],
            settings,
            silent,
            together=True,
        )
        for name, direct in (("before", False), ("after", True))
    }
    for window in (1, 2, 3):
        runs = {name: partial(flood, pool, feeds, expected, window) for name, pool in opened.items()}
        table.row(f"a process, {window} in flight, arrays", runs)
    for pool in opened.values():
        pool.close()
    return table.wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
