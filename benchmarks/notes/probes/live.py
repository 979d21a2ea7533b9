"""Other weights for what is live, without TensorFlow: the memory of a close, `pool.update` beside requests, versions of a server.

    python benchmarks/notes/probes/live.py make MODELS         # where TensorFlow is: two models, and their answers
    python benchmarks/notes/probes/live.py run MODELS OUT      # on a GPU; `run MODELS OUT cpu` simulates one

Each answer is held against those of both models: counted are those of neither, of the first, and of the second. live_h200.txt has what it
printed at c0a30884 (the same steps, before they were put in order here).
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import msplit

START = time.perf_counter()
CLOSES = 25


def say(*what: object) -> None:
    """Prints something behind the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f}]", *what, flush=True)


def make(folder: Path) -> None:
    """Writes the models, and their answers to one request."""
    import tensorflow as tf

    v1, found = tf.compat.v1, {"x": np.random.default_rng(0).standard_normal((3, 64), np.float32)}
    folder.mkdir(parents=True, exist_ok=True)
    for version in (1, 2):
        draw = np.random.default_rng(version)
        with v1.Graph().as_default() as graph:
            x, towers = v1.placeholder(tf.float32, (None, 64), "x"), []
            for _ in range(4):
                hidden = x
                for rows, columns in ((64, 128), (128, 64)):
                    weights = draw.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
                    hidden = tf.nn.relu(tf.matmul(hidden, tf.constant(weights)))
                towers.append(tf.matmul(hidden, tf.constant(draw.standard_normal((64, 2), np.float32) / 8)))
            tf.concat(towers, 1, name="y")
            (folder / f"v{version}.pb").write_bytes(graph.as_graph_def().SerializeToString())
            with v1.Session(graph=graph) as session:
                found[f"y{version}"] = session.run("y:0", {"x:0": found["x"]})
    np.savez(folder / "expected.npz", **found)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def beside(ask: Callable[[], int], do: Callable[[], object]) -> str:
    """Asks from three threads while something is done; says what came of it."""
    stop, seen, problems, times = threading.Event(), [0, 0, 0], list[str](), list[float]()

    def client() -> None:
        while not stop.is_set():
            start = time.perf_counter()
            try:
                seen[ask()] += 1
                times.append((time.perf_counter() - start) * 1e6)
            except Exception as problem:  # is told
                problems.append(repr(problem)[:160])

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.6)
        do()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    p50, most = np.percentile(times, (50, 99.9))
    return f"by neither, 1, 2: {seen}, errors {len(problems)} {problems[:1]}, p50 {p50:.0f}, p99.9 {most:.0f} µs"


class Live:
    """The probe.

    Args:
        models: Folder of `make`.
        out: Folder to write to; emptied first.
        device: GPU, or cpu.
    """

    def __init__(self, models: Path, out: Path, device: str) -> None:
        self.models, self.out, data = models, out, np.load(models / "expected.npz")
        self.x, self.answers = data["x"], {version: data[f"y{version}"] for version in (1, 2)}
        self.quick: dict[str, Any] = {"engine": "cuda", "effort": "fast"} | (
            {"device": "cpu"} if device == "cpu" else {}
        )
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)

    def version(self, found: Any) -> int:
        """Model that gives such an answer; 0: neither."""
        near = [version for version, answer in self.answers.items() if np.allclose(found, answer, rtol=5e-3, atol=2e-3)]
        return near[0] if near else 0

    def builds(self) -> None:
        for version in (1, 2):
            start = time.perf_counter()
            msplit.build(self.models / f"v{version}.pb", self.out / f"v{version}.build", batches=[1, 8], **self.quick)
            say(f"build {version}: {time.perf_counter() - start:.1f} s")

    def closes(self) -> None:
        """Host memory that an open and a close leave behind."""
        levels = []
        for count in (5, CLOSES, CLOSES):
            for _ in range(count):
                with msplit.open(self.out / "v1.build") as runner:
                    assert self.version(runner.step({"x": self.x})["y"]) == 1
            levels.append(resident())
        say(
            "KB of the host a close:",
            *(f"{(b - a) / CLOSES / 1024:.1f}" for a, b in pairwise(levels)),
        )

    def updates(self, name: str, **more: Any) -> None:
        with msplit.pool(self.models / "v1.pb", groups=2, max_batch=8, **more, **self.quick) as pool:
            took = []

            def update() -> None:
                for number in range(4):
                    start = time.perf_counter()
                    pool.update(self.models / f"v{2 - number % 2}.pb")
                    took.append(round(time.perf_counter() - start, 2))
                    time.sleep(0.3)

            say(name, beside(lambda: self.version(pool.step({"x": self.x})["y"]), update), "updates, s:", took)

    def server(self) -> None:
        """A folder of versions: a new one, a broken one, SIGHUP, SIGTERM."""
        folder, rest = self.out / "served", free_port()
        shutil.copytree(self.out / "v1.build", folder / "1")
        command = [sys.executable, "-m", "msplit", "serve", "--model", f"m={folder}", "--port", "0"]
        with open(self.out / "serve.log", "w") as log:
            process = subprocess.Popen([*command, "--rest-api-port", str(rest)], stdout=log, stderr=subprocess.STDOUT)
        url, start = f"http://127.0.0.1:{rest}", time.perf_counter()
        while True:
            try:
                urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.05)
        say(f"server ready after {time.perf_counter() - start:.2f} s")
        body = json.dumps({"inputs": {"x": self.x.tolist()}}).encode()

        def get(path: str, data: bytes | None = None) -> Any:
            with urllib.request.urlopen(f"{url}{path}", data, timeout=20) as answer:
                return json.load(answer)

        def ask() -> int:
            return self.version(get("/v1/models/m:predict", body)["outputs"])

        def change() -> None:
            shutil.copytree(self.out / "v2.build", self.out / "new")
            (self.out / "new").rename(folder / "2")
            start = time.perf_counter()
            while ask() != 2:
                time.sleep(0.02)
            say(f"version 2 answers {time.perf_counter() - start:.2f} s after it was there")
            (folder / "3").mkdir()
            (folder / "3" / "manifest.json").write_text("{}")
            time.sleep(2.5)

        say("served", beside(ask, change))
        say("versions", [(one["version"], one["state"]) for one in get("/v1/models/m")["model_version_status"]])
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        say("after SIGHUP: alive", process.poll() is None, "version", ask())
        process.send_signal(signal.SIGTERM)
        say("exit code", process.wait(30))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
        return
    live = Live(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "cuda:0")
    live.builds()
    live.closes()
    live.updates("in this process:")
    live.updates("two processes:", workers=2)
    live.server()


if __name__ == "__main__":
    main()
