"""Soak of `msplit serve`: mixed load while versions come and go, broken ones among them, and processes are killed. Every answer is checked.

    python benchmarks/soak_server.py --seconds 60                                     # simulated, as in CI
    python benchmarks/soak_server.py --device cuda --table-mib 1900 --seconds 540 --within 590 --arm 30 --every 10 --kill-every 60 \
        --rate 1000 --clients 6 --serve '--pool fronts=4' --workers 0 --kill msplit.serving.server.front --tail 1.1 --least 100000

Builds of a model with several sets of weights are made first, or taken from OUT, and the answers of each to all prepared requests. Then
client processes ask over gRPC (TensorFlow Serving's and KServe's protocol) and HTTP: one row, a few, more than the largest step has, wrong
requests, and such with a deadline that is over at once. Time is divided into windows with and without updates, in turns, after a first one
that warms up; processes are killed in the middle of windows of both kinds. In those with updates, every so many seconds a new version is
written into the server's folder: at once, file by file, with a damaged file, or with weights that give other answers than the build's own.
The last two have to be told, and the version before has to stay.

- An answer is wrong where it is not that of the version that it names (HTTP: of any). A version never goes back.
- A request is lost where it has no answer and no error within 30 s, and lost twice where a client that tries once more has none.
- Memory (PSS of all processes, and of the GPU) may not grow: the lower quartile of the last third, while no version is opened or closed,
  against that of the second; not the least, since a process that was killed has none for a moment.
- The longest pause that an update makes is the longest time of an answer in the seconds in which a version is taken over, beside that of
  a second without updates.

The table comes last, and the exit code is 1 where anything of it is not as it should be. It needs no TensorFlow.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from soaked_builds import BUILDS, DISTINCT, copied, prepared, same, spoilt, versions

from msplit.formats.build import KERNELS, MANIFEST, WEIGHTS
from msplit.serving.loadtest.clients import KSERVE, ServerUnderTest, _protocol
from msplit.serving.server import messages

ROOT = Path(__file__).parents[1]
NAME, STATUS = "soak", "/tensorflow.serving.ModelService/GetModelStatus"
PATIENCE = 30.0
"""Seconds after which a request counts as lost, and ten of which a version may take."""
KINDS = {"one row": 8, "many rows": 2, "KServe": 4, "HTTP": 3, "wrong": 1, "late": 1}
"""How often each is asked."""
TURNS = ("at once", "other answers", "file by file", "at once", "damaged", "at once")
"""How versions come, in turns."""
AVAILABLE, END = 30, 50
ENDING = 45.0
"""Seconds that are left for the end of all."""
STEPS = 200
"""Buckets of latency for a factor of ten: each is 1.2 % wide."""


# --- Clients


@dataclass
class Counts:
    """What a client saw, by window: with updates, and without. `worst` has the longest time of an answer, in ms, by the second of it."""

    asked: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    says: list[str] = field(default_factory=list)
    times: dict[str, Counter[int]] = field(default_factory=dict)
    worst: dict[int, float] = field(default_factory=dict)

    def add(self, other: dict[str, Any]) -> None:
        self.asked.update(other["asked"])
        self.errors.update(other["errors"])
        self.bad.update(other["bad"])
        self.says = (self.says + other["says"])[:5]
        for arm, times in other["times"].items():
            self.times.setdefault(arm, Counter()).update({int(key): count for key, count in times.items()})
        for second, most in other["worst"].items():
            self.worst[int(second)] = max(most, self.worst.get(int(second), 0.0))

    def wrong(self, kind: str, says: str) -> None:
        self.bad[kind] += 1
        if len(self.says) < 5:
            self.says.append(f"{kind}: {says}")


class Asking:
    """A client with a connection of each protocol, which asks one request at a time and tries once more where there is an error."""

    def __init__(self, config: dict[str, Any], made: dict[str, Any], seed: int) -> None:
        self.config, self.made, self.counts = config, made, Counts()
        self.random, self.last = random.Random(seed), 0
        self.channel = grpc.insecure_channel(f"127.0.0.1:{config['port']}", [("grpc.use_local_subchannel_pool", 1)])
        self.web: http.client.HTTPConnection | None = None
        self.ways = {}
        for protocol, message in (("tensorflow", messages.PredictResponse), (KSERVE, messages.ModelInferResponse)):
            encode, decode, path = _protocol(ServerUnderTest("", NAME, protocol))
            self.ways[protocol] = (encode, decode, self.channel.unary_unary(path), message)
        self.bodies = {
            (kind, number): self.encoded(kind, one)
            for kind, every in made["feeds"].items()
            for number, one in enumerate(every)
        }
        broken = messages.PredictRequest.FromString(self.bodies["one row", 0])
        next(iter(broken.inputs.values())).dtype = 7  # strings
        self.broken = broken.SerializeToString()

    def encoded(self, kind: str, feeds: Any) -> bytes:
        if kind != "HTTP":
            return bytes(self.ways[KSERVE if kind == "KServe" else "tensorflow"][0](feeds))
        return json.dumps({"inputs": {name: np.asarray(value).tolist() for name, value in feeds.items()}}).encode()

    def run(self) -> None:
        """Asks until time is over."""
        begin, end, pause = self.config["begin"], self.config["end"], self.config["pause"]
        kinds, weights = list(KINDS), list(KINDS.values())
        due = time.time() + self.random.random() * pause
        while (now := time.time()) < end:
            if now < due:
                time.sleep(due - now)
            due = max(due + pause, time.time() - 1.0)
            kind = self.random.choices(kinds, weights)[0]
            arm = arm_of(time.time() - begin, self.config["arm"])
            self.counts.asked[arm] += 1
            start = time.perf_counter()
            if self.ask(kind) and kind not in ("wrong", "late"):
                took, second = time.perf_counter() - start, int(time.time() - begin)
                self.counts.times.setdefault(arm, Counter())[int(STEPS * math.log10(max(took, 1e-6) * 1e6))] += 1
                self.counts.worst[second] = max(took * 1e3, self.counts.worst.get(second, 0.0))
        self.channel.close()

    def ask(self, kind: str) -> bool:
        """One request, or two. True where it has its answer."""
        number, code = self.random.randrange(DISTINCT), ""
        for again in (False, True):
            code = self.once(kind, number)
            if not code:
                return True
            self.counts.errors[f"{code}{', again' if again else ''}"] += 1
            if code == "no answer":
                self.counts.wrong("lost without an error", f"{kind}: nothing in {PATIENCE:g} s")
            if again:
                break
            time.sleep(0.05)
        self.counts.wrong("lost to a client that tries once more", f"{kind}: {code}")
        return False

    def once(self, kind: str, number: int) -> str:
        """Name of the error; "" where there is an answer, which is looked at."""
        if kind == "HTTP":
            return self.once_by_http(number)
        _, decode, call, message = self.ways[KSERVE if kind == "KServe" else "tensorflow"]
        try:
            body = self.broken if kind == "wrong" else self.bodies["one row" if kind == "late" else kind, number]
            data = call(body, timeout=1e-4 if kind == "late" else PATIENCE)
        except grpc.RpcError as problem:
            code = problem.code().name
            if code == {"wrong": "INVALID_ARGUMENT", "late": "DEADLINE_EXCEEDED"}.get(kind):
                return ""
            return "no answer" if code == "DEADLINE_EXCEEDED" else f"{code}: {str(problem.details())[:60]}"
        if kind == "wrong":
            self.counts.wrong("wrong answers", "a wrong request has an answer")
        elif kind != "late":
            said = message.FromString(data)
            version = int(said.model_version) if kind == "KServe" else said.model_spec.version.value
            expected = self.made["answers"][version % BUILDS][kind][number]
            if not same(decode(data), expected):
                self.counts.wrong("wrong answers", f"{kind}, version {version}")
            if version < self.last:
                self.counts.wrong("went back", f"{kind}: version {version} after {self.last}")
            self.last = version
        return ""

    def once_by_http(self, number: int) -> str:
        try:
            if self.web is None:
                self.web = http.client.HTTPConnection("127.0.0.1", self.config["rest"], timeout=PATIENCE)
            self.web.request("POST", f"/v1/models/{NAME}:predict", self.bodies["HTTP", number])
            answer = self.web.getresponse()
            data = answer.read()
        except TimeoutError:
            self.web = None
            return "no answer"
        except (OSError, http.client.HTTPException) as problem:
            self.web = None
            return f"HTTP: {type(problem).__name__}"
        if answer.status != 200:
            return f"HTTP {answer.status}: {data[:60].decode(errors='replace')}"
        said = json.loads(data)["outputs"]
        expected = [one["HTTP"][number] for one in self.made["answers"]]
        said = said if isinstance(said, dict) else {next(iter(expected[0])): said}
        found = {name: np.asarray(value, np.float32) for name, value in said.items()}
        if not any(same(found, one) for one in expected):
            self.counts.wrong("wrong answers", "HTTP, of no version")
        return ""


def arm_of(since: float, window: float) -> str:
    """Kind of window; the first one warms up, without updates."""
    return ("without", "with updates")[int(since / window) % 2] if since >= window else "warming up"


def client(config: dict[str, Any]) -> None:
    """A client process: some threads that ask. Prints what they saw."""
    made = pickle.loads(Path(config["made"]).read_bytes())
    every = [Asking(config, made, config["seed"] * 1000 + number) for number in range(config["threads"])]
    print("ready", flush=True)
    config |= json.loads(sys.stdin.readline())
    threads = [threading.Thread(target=one.run) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([vars(one.counts) for one in every]), flush=True)


# --- Server


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def children(pid: int) -> Iterator[int]:
    """Processes that one has started, and those that these have."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from children(int(child))


def pss(pid: int) -> int:
    """Bytes of memory of a process; what it shares counts in parts."""
    with suppress(OSError):
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    return 0


class Server:
    """The server in a process of its own, with its memory over time."""

    def __init__(self, args: argparse.Namespace, base: Path) -> None:
        self.port, self.rest, self.log = free_port(), free_port(), args.out / "server.log"
        command = [sys.executable, "-m", "msplit", "serve", "--model", f"{NAME}={base}", "--device", args.device]
        command += ["--port", self.port, "--rest_api_port", self.rest, "--file_system_poll_wait_seconds", args.poll]
        command += ["--groups", args.groups, *(["--pool", f"workers={args.workers}"] if args.workers else [])]
        self.file = self.log.open("w")
        self.process = subprocess.Popen(
            [*map(str, command), *shlex.split(args.serve)], stdout=self.file, stderr=subprocess.STDOUT, cwd=ROOT
        )
        self.began, self.opening = time.time(), 0.0
        self.memory: list[tuple[float, int, int]] = []
        self.over = threading.Event()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self._status = self.channel.unary_unary(STATUS)

    def wait(self) -> None:
        """Waits until it is ready."""
        while not re.search("^ready:", self.log.read_text(), re.MULTILINE):
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended: {self.log.read_text()}")
            time.sleep(0.1)
        self.opening = time.time() - self.began

    def statuses(self) -> dict[int, tuple[int, str]]:
        """State of each version, and what is wrong with it."""
        request = messages.GetModelStatusRequest()
        request.model_spec.name = NAME
        data = None
        while data is None:
            try:
                data = self._status(request.SerializeToString(), timeout=PATIENCE)
            except grpc.RpcError as problem:  # the front end that it was connected with is killed
                if problem.code() is not grpc.StatusCode.UNAVAILABLE or self.process.poll() is not None:
                    raise
                time.sleep(0.05)
        said = messages.GetModelStatusResponse.FromString(data)
        return {one.version: (one.state, one.status.error_message) for one in said.model_version_status}

    def watch(self) -> None:
        """Looks at its memory now and then."""
        while not self.over.wait(1.0):
            host = sum(map(pss, {self.process.pid, *children(self.process.pid)}))
            gpu = 0
            with suppress(OSError, http.client.HTTPException):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.rest}/metrics", timeout=PATIENCE) as answer:
                    found = re.findall(rb"^msplit_gpu_memory_used_bytes.* (\S+)$", answer.read(), re.MULTILINE)
                gpu = sum(int(float(one)) for one in found)
            self.memory.append((time.time(), host, gpu))

    def killed(self, pattern: str) -> bool | None:
        """Kills one of its processes, if it has such; None where one of them was started so lately that none might be left to answer."""
        found = dict[int, float]()
        for pid in children(self.process.pid):
            with suppress(OSError):
                if pattern.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found[pid] = os.stat(f"/proc/{pid}").st_ctime
        if found and time.time() < max(found.values()) + 2 * self.opening:
            return None
        with suppress(ProcessLookupError):
            if found:
                os.kill(random.choice([*found]), signal.SIGKILL)
                return True
        return False

    def stop(self) -> tuple[int, list[int]]:
        """Ends it. Exit code, and processes that it has left behind."""
        self.over.set()
        self.channel.close()
        theirs = list(children(self.process.pid))
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        time.sleep(1.0)
        self.file.close()
        return code, [pid for pid in theirs if Path(f"/proc/{pid}").exists()]


class Rollout:
    """Writes versions into the server's folder, and sees what becomes of them."""

    def __init__(self, args: argparse.Namespace, server: Server, base: Path, builds: Sequence[Path]) -> None:
        self.args, self.server, self.base, self.builds = args, server, base, builds
        self.number, self.served, self.turn = 1, 1, 0
        self.done, self.problems, self.took = Counter[str](), list[str](), list[float]()
        self.longest, self.begin, self.end = 0.0, 0.0, 0.0
        self.spans, self.busy = list[tuple[float, float]](), list[tuple[float, float]]()

    def run(self, begin: float, end: float) -> None:
        due, arm = begin, self.args.arm
        self.begin, self.end = begin, end
        while (now := time.time()) < end:
            left = arm - (now - begin) % arm  # what a window has begun is over before the next one, where it can be
            late = left < min(self.longest, arm / 2) or now + self.longest > end
            if not self.args.every or now < due or late or arm_of(now - begin, arm) != "with updates":
                time.sleep(0.05)
                continue
            due = max(due + self.args.every, now)
            how = TURNS[self.turn % len(TURNS)]
            self.turn += 1
            try:
                self.update(how)
            except Exception as problem:
                self.problems.append(f"{how}: {type(problem).__name__}: {problem}")
            self.busy.append((now, time.time()))
            if time.time() < end:
                self.longest = max(self.longest, time.time() - now)

    def update(self, how: str) -> None:
        """Writes the next version, and waits until it is served, or told to be broken."""
        self.number += 1
        number, goal = self.number, self.base / str(self.number)
        build, beside = self.builds[number % BUILDS], self.args.out / "beside"
        shutil.rmtree(beside, ignore_errors=True)
        start = time.time()
        if how == "file by file":
            (goal / KERNELS).mkdir(parents=True)
            for path in sorted(build.rglob("*"), key=lambda one: one.name != MANIFEST):
                if path.is_file():
                    shutil.copyfile(path, goal / path.relative_to(build))
                    time.sleep(2.5 * self.args.poll / 4)
        else:
            if how == "other answers":
                spoilt(build, self.builds[(number + 1) % BUILDS], beside)
            else:
                copied(build, beside)
            if how == "damaged":
                (beside / WEIGHTS).unlink()
                shutil.copyfile(build / WEIGHTS, beside / WEIGHTS)
                with (beside / WEIGHTS).open("r+b") as file:
                    file.seek(-4, os.SEEK_END)
                    file.write(b"\xff\xff\xff\xff")
            beside.rename(goal)
        bad = how in ("other answers", "damaged")
        state, _ = self.waited(
            number, start, lambda state, why: state == AVAILABLE or (bad and state == END and bool(why))
        )
        if time.time() > self.end:
            return
        self.done[how] += 1
        if bad:
            before = self.server.statuses().get(self.served, (0, ""))[0]
            if state != END or before != AVAILABLE:
                self.problems.append(f"{how}: version {number} is in state {state}, the one before in {before}")
            shutil.rmtree(goal)
            return
        self.took.append(time.time() - start)
        served, self.served = self.served, number
        now = time.time()
        self.waited(served, now, lambda state, why: state in (END, 0))
        self.spans.append((now - self.begin, time.time() - self.begin))
        shutil.rmtree(self.base / str(served))

    def waited(self, number: int, start: float, done: Any) -> tuple[int, str]:
        while True:
            state, why = self.server.statuses().get(number, (0, ""))
            if done(state, why):
                return state, why
            if time.time() > self.end:
                return state, why
            if time.time() > start + 10 * PATIENCE:
                self.problems.append(f"version {number} stays in state {state}: {why}")
                return state, why
            time.sleep(0.05)


# --- All of it


def soaked(args: argparse.Namespace) -> tuple[list[tuple[str, str]], list[str]]:
    """Rows of the table, and what is wrong."""
    builds = versions(args)
    made = args.out / "prepared.pickle"
    made.write_bytes(pickle.dumps(prepared(args, builds)))
    base = args.out / "served"
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(builds[1], base / "1")
    server = Server(args, base)
    killed = Counter[str]()
    clients: list[subprocess.Popen[str]] = []
    try:
        server.wait()
        threading.Thread(target=server.watch, daemon=True).start()
        config = {"port": server.port, "rest": server.rest, "arm": args.arm, "made": str(made)}
        config |= {"threads": args.threads, "pause": args.threads * args.clients / args.rate if args.rate else 0.0}
        for number in range(args.clients):
            command = [sys.executable, __file__, "--client", json.dumps({**config, "seed": number})]
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            clients.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
        for one in clients:
            assert one.stdout is not None
            if one.stdout.readline() != "ready\n":
                raise SystemExit("a client can not ask")
        begin = time.time() + 0.5
        end = begin + args.seconds
        if args.within:  # some seconds are left for the last answers, and to end the server
            end = min(end, args.started + args.within - ENDING)
            if end < begin + 3 * args.arm:
                raise SystemExit(f"after {begin - args.started:.0f} s no time is left for a soak: give more --within")
        args.seconds = end - begin
        for one in clients:
            assert one.stdin is not None
            one.stdin.write(json.dumps({"begin": begin, "end": end}) + "\n")
            one.stdin.flush()
        rollout = Rollout(args, server, base, builds)
        updating = threading.Thread(target=rollout.run, args=(begin, end))
        updating.start()
        due = begin + (args.kill_every // args.arm + 0.5) * args.arm
        while time.time() < end and server.process.poll() is None:
            now = time.time() - begin
            if args.kill_every and now >= due - begin and (gone := server.killed(args.kill)) is not None:
                killed[f"killed, {arm_of(now, args.arm)}" if gone else "none to kill"] += 1
                window, later = now // args.arm, (now + args.kill_every) // args.arm
                due = begin + (later + (later - window + 1) % 2 + 0.5) * args.arm  # in a window of the other kind
            time.sleep(0.05)
        counts = Counts()
        for one in clients:
            for found in json.loads(one.communicate(timeout=20 * PATIENCE)[0] or "[]"):
                counts.add(found)
        updating.join()
    finally:
        for one in clients:
            if one.poll() is None:
                one.kill()
        code, left = server.stop()
    return judged(args, server, rollout, counts, killed, code, left, begin)


def quantile(times: Counter[int], share: float) -> float:
    """Quantile in ms of times in buckets."""
    left = share * times.total()
    for bucket in sorted(times):
        left -= times[bucket]
        if left <= 0:
            return float(10 ** ((bucket + 0.5) / STEPS) / 1e3)
    return 0.0


def judged(
    args: argparse.Namespace,
    server: Server,
    rollout: Rollout,
    counts: Counts,
    killed: Counter[str],
    code: int,
    left: list[int],
    begin: float,
) -> tuple[list[tuple[str, str]], list[str]]:
    rows = [(f"requests, {arm}", f"{count:,}") for arm, count in sorted(counts.asked.items())]
    tails = {}
    for arm, times in sorted(counts.times.items()):
        told = ", ".join(f"p{100 * share:g} {quantile(times, share):,.2f}" for share in (0.5, 0.99, 0.999, 1.0))
        rows.append((f"ms, {arm}", told))
        tails[arm] = quantile(times, 0.999)
    tail = tails["with updates"] / tails["without"] if {"with updates", "without"} <= tails.keys() else 0.0
    if tail:
        rows.append(("p99.9 with updates, of that without", f"{tail:.2f}"))
    quiet = [ms for second, ms in counts.worst.items() if arm_of(second, args.arm) == "without"]
    taking = [
        max([0.0, *(counts.worst.get(second, 0.0) for second in range(int(a - 1), int(b) + 2))])
        for a, b in rollout.spans
    ]
    for name, worst in (("a second without updates", quiet), ("the seconds of a takeover", taking)):
        if worst:
            rows.append((f"longest answer of {name}, ms", f"median {np.median(worst):,.1f}, most {max(worst):,.1f}"))
    rows += [
        (kind, f"{counts.bad[kind]}")
        for kind in ("wrong answers", "went back", "lost without an error", "lost to a client that tries once more")
    ]
    rows += [(f"error: {name}", f"{count:,}") for name, count in sorted(counts.errors.items())]
    rows += [(f"version, {how}", f"{count}") for how, count in rollout.done.items()]
    if rollout.took:
        rows.append(
            ("s until a version is served", f"median {np.median(rollout.took):.1f}, most {max(rollout.took):.1f}")
        )
    rows += [(f"processes {what}", f"{count}") for what, count in killed.items()]
    problems = [f"{kind}: {count}" for kind, count in counts.bad.items()] + counts.says + rollout.problems
    if args.tail and tail > args.tail:
        problems.append(f"p99.9 with updates is {tail:.2f} of that without, and not at most {args.tail:g}")
    for arm in ("with updates", "without"):
        if counts.asked[arm] < args.least:
            problems.append(f"{counts.asked[arm]:,} requests {arm}, and not {args.least:,}")
    minutes: dict[int, tuple[int, int]] = {}
    for when, *sizes in server.memory:
        minutes.setdefault(int((when - begin) // 60), (sizes[0] >> 20, sizes[1] >> 20))
    for place, name in ((0, "host"), (1, "GPU")):
        if any(one[place] for one in minutes.values()):
            rows.append((f"MiB of the {name} by minute", " ".join(f"{one[place]:,}" for one in minutes.values())))
    calm = [one for one in server.memory if not any(a <= one[0] <= b + 2.0 for a, b in rollout.busy)]
    thirds = [
        [one for one in calm if third <= 3 * (one[0] - begin) / args.seconds < third + 1]
        or [one for one in server.memory if third <= 3 * (one[0] - begin) / args.seconds < third + 1]
        for third in (1, 2)
    ]
    for place, name in ((1, "host memory, MB"), (2, "GPU memory, MB")):
        if all(thirds) and any(one[place] for one in server.memory):
            before, after = (float(np.percentile([one[place] for one in part], 25)) / 1e6 for part in thirds)
            rows.append(
                (name, f"{before:,.0f}, then {after:,.0f}; most {max(one[place] for one in server.memory) / 1e6:,.0f}")
            )
            if after > before * (1 + args.growth):
                problems.append(f"{name}: grew from {before:,.0f} to {after:,.0f}")
    log = server.log.read_text()
    rows.append(("server's exit code", f"{code}"))
    if code or left:
        problems.append(f"the server ended with {code} and left {len(left)} processes")
    if faults := log.count("Traceback"):
        problems.append(f"{faults} tracebacks in {server.log}")
    if not counts.asked:
        problems.append("no client has asked anything")
    if args.every and not rollout.done["at once"]:
        problems.append("no version was taken over")
    return rows, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "sample_graphs" / "mmoe_small.pb", help="a GraphDef with its weights"
    )
    parser.add_argument(
        "--table-mib", type=int, default=0, help="in place of --model one with tables of so many MiB, at most 1,900"
    )
    parser.add_argument("--out", type=Path, default=Path("soak-results"))
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8))
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes on the device; 0: steps run in the server's own"
    )
    parser.add_argument("--serve", default="", help="further arguments of msplit serve")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--within", type=float, default=0.0, help="seconds in which all is over, builds and all; 0: as long as it takes"
    )
    parser.add_argument("--tail", type=float, default=0.0, help="most p99.9 with updates, in that without; 0: any")
    parser.add_argument("--least", type=int, default=0, help="fewest requests with updates, and without")
    parser.add_argument("--arm", type=float, default=10.0, help="seconds of a window with, or without, updates")
    parser.add_argument(
        "--every", type=float, default=3.0, help="seconds from one version to the next, at least; 0: none"
    )
    parser.add_argument("--poll", type=float, default=0.5, help="seconds between two looks of the server's")
    parser.add_argument(
        "--kill-every", type=float, default=15.0, help="seconds from one kill to the next, at least; 0: none"
    )
    parser.add_argument("--kill", default="msplit.serving", help="what the command of a process has that may be killed")
    parser.add_argument(
        "--rate", type=float, default=100.0, help="requests per second of all clients; 0: each asks at once again"
    )
    parser.add_argument("--clients", type=int, default=2, help="processes that ask")
    parser.add_argument("--threads", type=int, default=4, help="clients in each of them")
    parser.add_argument("--growth", type=float, default=0.05, help="share by which memory may grow")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.started = time.time()
    if args.client:
        client(json.loads(args.client))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    rows, problems = soaked(args)
    print("| soak | |\n| --- | ---: |")
    for name, value in rows:
        print(f"| {name} | {value} |")
    print("\n".join(f"PROBLEM: {one}" for one in problems) or "all as it should be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
