"""Pools on a real GPU: every answer is right while many steps are in flight, memory is as predicted, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SAMPLES = ["mmoe_small.pb", "towers_small.pb", "keras_inception"]


def requests_of(inputs: Any, rows: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Made-up requests, each with other values. Integers are small, as indices are."""
    rng = np.random.default_rng(seed)

    def value(port: Any) -> Any:
        shape = [rows if size is None else size for size in port.shape]
        if np.dtype(port.dtype).kind in "iu":
            return rng.integers(0, 8, shape).astype(port.dtype)
        return rng.standard_normal(shape).astype(port.dtype)

    return [{name: value(port) for name, port in inputs.items()} for _ in range(count)]


@pytest.fixture(scope="module", params=SAMPLES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import msplit

    path = tmp_path_factory.mktemp("pool") / "build"
    asked = {"streams": (4,), "engine": "cuda"}
    msplit.build(ROOT / "sample_graphs" / request.param, path, **asked, batches=(1, 8, 32))
    return path


def close_to(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Rows of one batch come out of other kernels than those of another, so not equal to the bit."""
    return all(np.allclose(found[name], value, rtol=2e-2, atol=2e-3) for name, value in expected.items())


@pytest.mark.parametrize("groups", [1, 8])
def test_every_answer_is_its_own(built: Path, groups: int) -> None:
    import msplit

    with msplit.pool(built, groups=groups) as pool, msplit.open(built) as runner:
        feeds = [one for rows in (1, 3, 8, 20, 32) for one in requests_of(pool.inputs, rows, 20, seed=rows)]
        expected = [runner.step(one) for one in feeds]
        order = np.random.default_rng(1).permutation(len(feeds) * 40) % len(feeds)
        going: deque[tuple[int, Any]] = deque()
        for number in order:
            going.append((number, pool.submit(feeds[number])))
            if len(going) > 100:
                one, pending = going.popleft()
                assert close_to(pending.result(), expected[one])
        for one, pending in going:
            assert close_to(pending.result(), expected[one])
        stats = pool.stats()
        assert (stats.answered, stats.failed, stats.in_flight) == (len(order), 0, 0)
        assert stats.steps < len(order)  # requests shared steps


def test_tensors_on_the_gpu_are_answered_as_arrays_are(built: Path) -> None:
    """Beside arrays in one step, too, and while another stream still makes them."""
    import torch

    import msplit

    with msplit.pool(built, groups=2) as pool:
        feeds = [one for rows in (1, 5, 8, 30) for one in requests_of(pool.inputs, rows, 8, seed=rows)]
        expected = [pool.step(one) for one in feeds]
        side = torch.cuda.Stream()
        going = []
        for number, one in enumerate(feeds * 3):
            fed: dict[str, Any] = dict(one)
            with torch.cuda.stream(side if number % 5 == 0 else torch.cuda.current_stream()):
                for name, value in one.items():
                    if number % 3 and (number + len(name)) % 4:
                        fed[name] = torch.zeros(value.shape, dtype=torch.from_numpy(value).dtype, device="cuda")
                        torch.cuda._sleep(200_000)
                        fed[name].copy_(torch.from_numpy(value))
                going.append(pool.submit(fed, on_device=number % 2 == 0))
        for number, pending in enumerate(going):
            answer = pending.result()
            if number % 2 == 0:
                assert all(value.is_cuda for value in answer.values())
                answer = {name: value.cpu().numpy() for name, value in answer.items()}
            assert close_to(answer, expected[number % len(feeds)]), number


def test_threads_get_their_own_answers(built: Path) -> None:
    import msplit

    wrong = []
    with msplit.pool(built, groups=4) as pool:
        feeds = requests_of(pool.inputs, 5, 64)
        expected = [pool.step(one) for one in feeds]

        def run(first: int) -> None:
            for number in range(first, first + 300):
                if not close_to(pool.step(feeds[number % 64]), expected[number % 64]):
                    wrong.append(number)

        threads = [threading.Thread(target=run, args=(17 * number,)) for number in range(12)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not wrong


def test_races_between_slots_show_in_no_answer(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msplit
    from msplit.engines.cuda.options import Torture
    from msplit.engines.cuda.stored import builds

    whole = builds.Opened.slot

    def tortured(self: Any, *args: Any, **options: Any) -> Any:
        self._options = replace(self._options, torture=Torture(poison=True, delay_cycles=20_000, seed=1))
        return whole(self, *args, **options)

    with msplit.pool(built, groups=2) as pool:
        feeds = requests_of(pool.inputs, 8, 64)
        expected = [pool.step(one) for one in feeds]
    monkeypatch.setattr(builds.Opened, "slot", tortured)
    with msplit.pool(built, groups=8) as pool:
        found = [pool.submit(feeds[number % 64]) for number in range(2000)]
        assert all(close_to(one.result(), expected[number % 64]) for number, one in enumerate(found))


def reserved() -> int:
    """What PyTorch holds of the device for this process; others may use the device, too."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


TOLD = """
import sys
import torch
import msplit

with msplit.pool(sys.argv[1], groups=10) as pool:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    facts = pool.about.facts
    print(torch.cuda.memory_reserved() - facts["weight_bytes"], facts["arena_bytes"], facts["weight_bytes"])
"""


def test_memory_is_as_told(built: Path) -> None:
    """In a process of its own, as a service has it: workspaces of libraries stay with their streams, which later pools use again."""
    import msplit

    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TOLD, str(built)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    taken, each, weights = map(int, done.stdout.split()[-3:])
    assert taken <= 1.1 * 10 * each, f"10 slots take {taken / 1e6:.2f} MB, and one was told as {each / 1e6:.2f}"
    with pytest.raises(msplit.MsplitError, match=r"do not fit: .*\(max_memory\)") as refused:
        msplit.pool(built, groups=10, max_memory=weights + 1)
    assert "max_memory" in str(refused.value)


def test_opening_and_closing_leaves_nothing_behind(built: Path) -> None:
    import psutil

    import msplit

    process = psutil.Process()
    for _ in range(10):
        msplit.pool(built, groups=2).close()
    device, host, threads = reserved(), process.memory_info().rss, process.num_threads()
    for _ in range(30):
        msplit.pool(built, groups=2).close()
    assert reserved() <= device
    assert process.memory_info().rss - host < 60e6
    assert process.num_threads() <= threads + 1


def test_random_ops_draw_other_numbers_in_every_step(tmp_path: Path) -> None:
    """Each slot takes the number of its step from a counter that all of them share."""
    import msplit
    from msplit.opset import schema

    graph = schema.graph_pb2.GraphDef()

    def node(name: str, op: str, *inputs: str) -> Any:
        found = graph.node.add(name=name, op=op)
        found.input.extend(inputs)
        return found

    shape = node("shape", "Const")
    shape.attr["dtype"].type = 3
    shape.attr["value"].tensor.dtype = 3
    shape.attr["value"].tensor.tensor_shape.dim.add().size = 1
    shape.attr["value"].tensor.int_val.append(4)
    x = node("x", "Placeholder")
    x.attr["dtype"].type = 1
    x.attr["shape"].shape.dim.add().size = 4
    drawn = node("drawn", "RandomUniform", "shape")
    drawn.attr["T"].type, drawn.attr["dtype"].type = 3, 1
    drawn.attr["seed"].i, drawn.attr["seed2"].i = 3, 5
    node("y", "AddV2", "x", "drawn").attr["T"].type = 1
    (tmp_path / "drawn.pb").write_bytes(graph.SerializeToString())
    request = {"engine": "cuda", "effort": "fast"}
    with msplit.pool(tmp_path / "drawn.pb", **request, groups=3) as pool:
        feeds = {"x": np.zeros(4, np.float32)}
        found = [pool.submit(feeds) for _ in range(50)]
        assert len({one.result()["y"].tobytes() for one in found}) == 50


def test_the_urgent_pass_the_others(built: Path) -> None:
    import msplit

    with msplit.pool(built, groups=4, priorities=2) as pool:
        (feeds,) = requests_of(pool.inputs, 32, 1)
        waits: dict[int, list[float]] = {0: [], 1: []}

        def flood() -> None:
            end = time.perf_counter() + 1.0
            going: deque[tuple[float, Any]] = deque()
            while time.perf_counter() < end:
                going.append((time.perf_counter(), pool.submit(feeds, priority=1)))
                if len(going) > 64:
                    since, pending = going.popleft()
                    pending.result()
                    waits[1].append(time.perf_counter() - since)

        thread = threading.Thread(target=flood)
        thread.start()
        while thread.is_alive():
            start = time.perf_counter()
            pool.step(feeds, priority=0)
            waits[0].append(time.perf_counter() - start)
            time.sleep(2e-3)
        thread.join()
    assert np.median(waits[0]) < np.median(waits[1])
    with pytest.raises(msplit.MsplitError, match="levels of priority"):
        msplit.pool(built, groups=64, priorities=64)


def test_auto_chooses(built: Path) -> None:
    import msplit

    with msplit.pool(built, groups="auto") as pool:
        assert pool.settings.groups >= 1
        assert "chosen by measuring" in pool.about.notes[-1]


def test_the_first_look_at_a_step_that_is_over_says_so(tmp_path: Path) -> None:
    """An event loop looks once in some µs: of a build without kernels that were measured, CUDA alone tells the end."""
    import msplit

    for effort in ("fast", "full"):
        path = tmp_path / effort
        msplit.build(ROOT / "sample_graphs" / "mmoe_small.pb", path, engine="cuda", batches=(8,), effort=effort)
        with msplit.pool(path, groups=1) as pool:
            (feeds,) = requests_of(pool.inputs, 8, 1)
            expected, (slot,) = pool.step(feeds), pool._steps.slots
            for _ in range(20):
                slot.start(8, [feeds])
                time.sleep(0.01)
                assert slot.over()
                assert close_to(slot.outputs(), expected)
