"""Other weights for what is live, without TensorFlow: the memory of a close, `pool.update` beside requests, versions of a server.

    python benchmarks/notes/probes/live.py make MODELS         # where TensorFlow is: two models, and their answers
    python benchmarks/notes/probes/live.py run MODELS OUT      # on a GPU; `run MODELS OUT cpu` simulates one

Each answer is held against those of both models: counted are those of neither, of the first, and of the second. live_h200.txt has what it
printed at c0a30884 (the same steps, before they were put in order here).
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import msplit

START = time.perf_counter()
CLOSES = (50, 100, 200, 650)
"""Opens and closes of a round; growth that is less in each of a longer round is no leak."""


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


class Mallinfo(ctypes.Structure):
    """What mallinfo2 of the C library says: among ten numbers the bytes in mappings of their own, and those given out otherwise."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in [*"abcd", "mapped", "f", "g", "given", "i", "j"])


class Levels(NamedTuple):
    """State of the process: bytes by kind, objects by type, and how many threads and open files there are."""

    sizes: dict[str, int]
    objects: Counter[str]
    handles: tuple[int, int]


def levels() -> Levels:
    """State of now, once all is given back that can be."""
    import torch

    gc.collect()
    library = ctypes.CDLL(None)
    library.malloc_trim(0)
    library.mallinfo2.restype = Mallinfo
    given = library.mallinfo2()
    sizes = Counter(dict.fromkeys(("resident", "heap", "anonymous", "files"), 0))
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            path = line.split(maxsplit=5)[5:]
            kind = "anonymous" if not path else "heap" if path == ["[heap]"] else "files"
        elif line.startswith("Rss:"):
            sizes[kind] += int(line.split()[1]) << 10
    sizes |= {
        "resident": sizes.total(),
        "malloc": given.given + given.mapped,
    }
    if torch.cuda.is_available():
        sizes["GPU"] = torch.cuda.memory_reserved()
        sizes["pinned"] = getattr(torch.cuda, "host_memory_stats", dict)().get("allocated_bytes.current", 0)
    objects = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    objects["blocks of memory of Python's"] = sys.getallocatedblocks()
    threads, files = (len([*Path(f"/proc/self/{kind}").iterdir()]) for kind in ("task", "fd"))
    return Levels(sizes, objects, (threads, files))


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
        """Memory that an open and a close leave behind: of the process, what malloc has given out of it, what PyTorch holds on the GPU;
        and objects of Python by type, and lines that made what tracemalloc finds, in a last round."""

        def opened(count: int) -> None:
            for _ in range(count):
                with msplit.open(self.out / "v1.build") as runner:
                    assert self.version(runner.step({"x": self.x})["y"]) == 1

        opened(10)
        before = levels()
        for count in CLOSES:
            opened(count)
            after = levels()
            sizes = [f"{name} {(after.sizes[name] - size) / count / 1024:.2f}" for name, size in before.sizes.items()]
            more = {
                name: grown for name, grown in (after.objects - before.objects).most_common(8) if grown >= count / 8
            }
            say(f"{count} closes, KB each:", ", ".join(sizes), "| threads, files:", after.handles, "| objects:", more)
            before = after
        tracemalloc.start(8)
        opened(5)
        gc.collect()
        first = tracemalloc.take_snapshot()
        opened(50)
        gc.collect()
        grown = [one for one in tracemalloc.take_snapshot().compare_to(first, "lineno") if one.size_diff >= 50 * 64]
        tracemalloc.stop()
        for one in grown[:10]:
            say(f"  {one.size_diff / 50 / 1024:.2f} KB a close:", one.traceback)

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
