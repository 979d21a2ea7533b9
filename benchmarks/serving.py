"""What a server adds to a step, and how many requests a core of it answers: `msplit serve` of a model, of an empty one, and the echo of its
front alone, in turns, asked from other processes.

    python benchmarks/serving.py [model.build] --rows 1 --serve '--groups 8'
    python benchmarks/serving.py [model.build] --short       # one table: 1, 2, 4 … processes that take requests
    python benchmarks/serving.py --fronts            # echoes of other fronts, too: benchmarks/notes/front.md

Prints for each the p50 of one client of grpcio and of one whose frames are made before (`grpc_load.py`), requests per second with many in
flight from several processes, and the processor time of the server for each request, in all its threads and processes (user and system);
and at the end what the targets are about. Answers are counted, not looked at: `msplit load --server` checks their values. Everything after
--serve goes to `msplit serve`. Where other work shares the cores, only processor times mean something. No round begins after `--limit` s.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from msplit.serving.server import messages, rpc, run, tensors

PREDICT = rpc.PATHS[0]
WIDTH = 8
"""Numbers of a row of the empty model."""


def request_of(name: str, shapes: dict[str, tuple[str, list[int]]]) -> bytes:
    """A request with made-up inputs of these types and shapes."""
    made = messages.PredictRequest()
    made.model_spec.name = name
    generator = np.random.default_rng(0)
    for key, (dtype, shape) in shapes.items():
        array = generator.standard_normal(shape, np.float32) if dtype == "DT_FLOAT" else np.zeros(shape, TYPES[dtype])
        tensors.to_tensor_proto(array, made.inputs[key], as_content=True)
    return made.SerializeToString()


def request_for(rest: int, rows: int) -> bytes:
    """A request for the model of a server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{rest}/v1/models/m/metadata") as answer:
        (signature, *_) = json.load(answer)["metadata"]["signature_def"]["signature_def"].values()
    sizes = {
        key: (info["dtype"], [int(dim["size"]) for dim in info["tensor_shape"]["dim"]])
        for key, info in signature["inputs"].items()
    }
    return request_of(
        "m", {key: (kind, [rows if one < 0 else one for one in dims]) for key, (kind, dims) in sizes.items()}
    )


TYPES = {"DT_INT32": np.int32, "DT_INT64": np.int64, "DT_BOOL": bool}


def asked_by_grpcio(port: int, data: bytes, seconds: float) -> float:
    """Median of one client of grpcio that waits for its answers, in µs."""
    taken = []
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary(PREDICT)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            call(data)
            taken.append(time.perf_counter() - start)
    return median(taken) * 1e6


def asked_by_frames(
    port: int, data: bytes, processes: int, connections: int, in_flight: int, requests: int
) -> tuple[float, float]:
    """p50 in µs, and requests per second in all."""
    command = [sys.executable, str(Path(__file__).parent / "grpc_load.py"), str(port), PREDICT]
    command += map(str, (connections, in_flight, requests))
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(processes)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(data)
        worker.stdin.close()
    found = []
    for worker in workers:
        assert worker.stdout is not None
        found.append(json.loads(worker.stdout.read()))
        worker.wait(60)
    rate = sum(len(one["us"]) / one["seconds"] for one in found)
    return median([taken for one in found for taken in one["us"]]), rate


def processor_time(pid: int, *, fronts: bool = False) -> float:
    """Seconds of all threads of a process and of those that it has started; or only of itself and its front ends."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
            for child in (task / "children").read_text().split():
                if not fronts or b"serving.server.front" in Path(f"/proc/{child}/cmdline").read_bytes():
                    total += processor_time(int(child))
    return total


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


# --- What is asked


def echo(port: int, kind: str) -> None:
    """Sends back what comes, until it is ended, by one of several fronts."""
    if kind == "msplit":
        made = rpc.GrpcServer(lambda call, data, left: call.answer(data), threading.Event(), 64 << 20)
        assert made.start("127.0.0.1", port)
    elif kind == "grpcio":
        handler = grpc.unary_unary_rpc_method_handler(lambda data, context: data)
        server = grpc.server(ThreadPoolExecutor(4), handlers=[_handlers(handler)])
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
    elif kind == "pygrpc-native":
        import pygrpc_native

        front = pygrpc_native.NativeGrpcFront(f"127.0.0.1:{port}", [(PREDICT, False)], io_threads=1)
        front.start()
        print("ready:", flush=True)
        while (events := front.recv_batch(64)) is not None:
            for what, call, _, data, _ in events:
                if what == pygrpc_native.EVENT_CALL:
                    front.respond(call, data)
    else:
        asyncio.Runner(loop_factory=run.loop_factory()).run(_echo_on_a_loop(port, kind))
    print("ready:", flush=True)
    threading.Event().wait()


def _handlers(handler: Any) -> Any:
    service, name = PREDICT[1:].split("/")
    return grpc.method_handlers_generic_handler(service, {name: handler})


async def _echo_on_a_loop(port: int, kind: str) -> None:
    if kind == "grpclib":
        from grpclib.const import Cardinality, Handler
        from grpclib.encoding.base import CodecBase
        from grpclib.server import Server

        class Bytes(CodecBase):
            __content_subtype__ = "proto"

            def encode(self, message: Any, message_type: Any) -> bytes:
                return message

            def decode(self, data: bytes, message_type: Any) -> bytes:
                return data

        class Echo:
            async def back(self, stream: Any) -> None:
                await stream.send_message(await stream.recv_message())

            def __mapping__(self) -> dict[str, Any]:
                return {PREDICT: Handler(self.back, Cardinality.UNARY_UNARY, None, None)}

        await Server([Echo()], codec=Bytes()).start("127.0.0.1", port)
    else:

        async def back(data: bytes, context: Any) -> bytes:
            return data

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_handlers(grpc.unary_unary_rpc_method_handler(back)),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
    print("ready:", flush=True)
    await asyncio.Event().wait()


def empty_pool(tell: Any = None) -> Any:
    """Pool of a model that does nothing, on a slot that is polled as one of a GPU."""
    from msplit.serving.pool.pool import About, Pool
    from msplit.serving.pool.ports import Port, Ports
    from msplit.serving.pool.settings import PoolSettings
    from msplit.serving.pool.slots import StepSlot

    batches = (1, 4, 16, 64)
    ports = Ports({"x": np.dtype(np.float32)}, {rows: {"x": (rows, WIDTH)} for rows in batches}, ({"x": 1}, {"y": 1}))
    slot = StepSlot(dict.fromkeys(batches, lambda feeds: {"y": feeds["x"]}), ports)
    about = About("empty", {"y": Port("float32", (None, WIDTH))}, (), (), {})
    return Pool(ports, [(0, slot)], PoolSettings(groups=1), about)


def empty(port: int, rest: int, fronts: int) -> None:
    """`msplit serve` of that pool, in this process where there are no fronts, else in one of its own."""
    from msplit.progress import silent
    from msplit.serving.pool.making import make_processes
    from msplit.serving.pool.settings import PoolSettings
    from msplit.serving.server.models import Models, Version, signature_of

    def there() -> Any:
        import serving  # type: ignore[import-not-found]  # so that the other process finds it

        return make_processes(lambda *_: serving.empty_pool, ["cpu:0"], PoolSettings(groups=1), silent, together=True)

    where = run.Listening(port=port, rest_port=rest, fronts=fronts or 1)
    with there() if fronts else empty_pool() as made, run.held(where) as held:
        only = signature_of(made, None)
        models = Models({"m": {1: Version("m", 1, {only.name: only})}})
        with run.answering(models, where, held) as server:
            server.wait(lambda: print("ready:", flush=True))


@dataclass
class Asked:
    """A server, and what was found out about it.

    Attributes:
        name: Name in the table.
        pid: Its process.
        port: Port of gRPC.
        data: Request.
    """

    name: str
    pid: int
    port: int
    data: bytes
    grpcio: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)


@contextmanager
def started(name: str, command: list[str], port: int) -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = ""
        for line in server.stdout or ():
            if line.startswith("ready:"):
                break
            said += f"  {name}: {line}"
        else:
            raise RuntimeError(f"{name} has ended: {said}")
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
                if server.poll() is not None:
                    raise
        threading.Thread(target=lambda: [*(server.stdout or ())], daemon=True).start()
        yield server
    finally:
        server.terminate()
        server.wait(60)


def a_step(model: Path, rows: int) -> float:
    """Median of a step of the same model from Python, in this process, in µs."""
    import msplit

    with msplit.pool(model, groups=1) as pool:
        generator = np.random.default_rng(0)
        feeds = {
            name: generator.standard_normal([rows if size is None else size for size in port.shape]).astype(port.dtype)
            for name, port in pool.inputs.items()
        }
        taken = []
        for _ in range(3000):
            start = time.perf_counter()
            pool.step(feeds)
            taken.append(time.perf_counter() - start)
    return median(taken) * 1e6


def measure(asked: Asked, arguments: argparse.Namespace, share: float) -> None:
    """One round, or a share of one."""
    processes, connections, in_flight = arguments.clients, arguments.connections, arguments.in_flight
    requests = max(round(arguments.requests * share) // processes, connections * in_flight)
    asked.grpcio.append(asked_by_grpcio(asked.port, asked.data, arguments.seconds * share))
    for times, shape in (
        (asked.one, (1, 1, 1, max(round(arguments.requests * share) // 10, 100))),
        (asked.many, (processes, connections, in_flight, requests)),
    ):
        before = processor_time(asked.pid)
        p50, rate = asked_by_frames(asked.port, asked.data, *shape)
        times.append((processor_time(asked.pid) - before) / (shape[0] * shape[3]) * 1e6)
        (asked.frames if times is asked.one else asked.rate).append(p50 if times is asked.one else rate)


_SHORT = 50.0
"""Seconds after the start after which the short table gets no further row."""


def short(model: Path | None, rows: int, options: list[str], seconds: float) -> None:
    """One table in less than a minute: servers with more and more front ends beside echoes, which are asked one after the other."""
    began, itself, cores = time.monotonic(), [str(Path(__file__)), "--as"], len(os.sched_getaffinity(0))
    clients, connections = max(1, cores // 2), 8
    servers: dict[str, tuple[int, int, list[str]]] = {}
    for name in ("msplit", "grpcio", *(count for count in (1, 2, 4, 8, 12) if count == 1 or count <= cores)):
        port, rest = free_port(), free_port()
        if isinstance(name, str):
            servers[f"echo, {name}"] = port, rest, [*itself, name, str(port)]
        elif model is None:
            servers[f"fronts={name}"] = port, rest, [*itself, "empty", str(port), str(rest), str(name)]
        else:
            own = ["-m", "msplit", "serve", "--model", f"m={model}", "--pool", f"workers=1,fronts={name}", *options]
            servers[f"fronts={name}"] = port, rest, [*own, f"--port={port}", f"--rest-api-port={rest}"]
    with ExitStack() as stack, ThreadPoolExecutor() as starts:
        running = [
            starts.submit(lambda one=one: stack.enter_context(started(one[0], one[1][2], one[1][0])))  # type: ignore[misc]
            for one in servers.items()
        ]
        pids = [one.result().pid for one in running]
        print(f"{clients} processes × {connections} connections × 8 in flight, {cores} cores")
        print(f"started within {time.monotonic() - began:.0f} s")
        print(
            "| | p50 of one client, µs | requests/s | p50, µs | processor µs a request | of it front ends | requests/s per core |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for (name, (port, rest, _)), pid in zip(servers.items(), pids, strict=True):
            if time.monotonic() - began > _SHORT:
                print(f"| {name} | no time was left |")
                continue
            data = request_of("m", {"x": ("DT_FLOAT", [rows, WIDTH])})
            if model is not None and "fronts" in name:
                data = request_for(rest, rows)
            _, rate = asked_by_frames(port, data, 1, 1, 1, 200)
            one, _ = asked_by_frames(port, data, 1, 1, 1, max(round(rate * seconds / 3), 100))
            _, rate = asked_by_frames(port, data, clients, connections, 8, 300)
            count = max(round(rate * seconds / clients), 300)
            before = processor_time(pid), processor_time(pid, fronts=True)
            p50, rate = asked_by_frames(port, data, clients, connections, 8, count)
            each = (processor_time(pid) - before[0]) / (clients * count) * 1e6
            front = (processor_time(pid, fronts=True) - before[1]) / (clients * count) * 1e6
            values = f"{one:,.0f} | {rate:,.0f} | {p50:,.0f} | {each:,.1f} | {front:,.1f} | {1e6 / each:,.0f}"
            print(f"| {name} | {values} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--serve", default="")
    parser.add_argument(
        "--fronts", action="store_true", help="echoes of other fronts, too, as far as they are installed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, default=90.0, help="seconds after which no round begins, but for the first"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of grpcio's client in each round")
    parser.add_argument("--requests", type=int, default=20_000, help="of all processes in each round")
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="processes")
    parser.add_argument("--connections", type=int, default=4, help="of each of them")
    parser.add_argument("--in-flight", type=int, default=8, help="on each connection")
    parser.add_argument("--short", action="store_true", help="one table in less than a minute")
    parser.add_argument("--as", dest="role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        kind, *values = arguments.role
        empty(*map(int, values)) if kind == "empty" else echo(int(values[0]), kind)
        return
    if arguments.short:
        short(arguments.model, arguments.rows, shlex.split(arguments.serve), arguments.seconds * 4)
        return
    itself = [str(Path(__file__)), "--as"]
    shape = {"x": ("DT_FLOAT", [arguments.rows, WIDTH])}
    fronts = ["msplit", *(["grpc.aio", "grpcio", "pygrpc-native", "grpclib"] if arguments.fronts else ["grpc.aio"])]
    fronts = [one for one in fronts if not (package := PACKAGES.get(one)) or importlib.util.find_spec(package)]
    with ExitStack() as stack:

        def opened(name: str, command: Callable[[int, int], list[str]]) -> Asked:
            port, rest = free_port(), free_port()
            server = stack.enter_context(started(name, command(port, rest), port))
            data = request_of("m", shape)
            if name == "msplit serve":
                data = request_for(rest, arguments.rows)
            return Asked(name, server.pid, port, data)

        step = a_step(arguments.model, arguments.rows) if arguments.model else 0.0
        servers: list[tuple[str, Callable[[int, int], list[str]]]] = [
            (f"echo, {kind}", lambda port, rest, kind=kind: [*itself, kind, str(port)])  # type: ignore[misc]
            for kind in fronts
        ]
        servers.append(("empty model", lambda port, rest: [*itself, "empty", str(port), str(rest), "0"]))
        if arguments.model:
            options = [*shlex.split(arguments.serve), "--model", f"m={arguments.model}"]
            command = ["-m", "msplit", "serve", *options]
            servers.append(
                ("msplit serve", lambda port, rest: [*command, "--port", str(port), "--rest-api-port", str(rest)])
            )
        began = time.monotonic()
        with ThreadPoolExecutor() as starts:
            every = [*starts.map(lambda server: opened(*server), servers)]
        for turn in range(arguments.rounds + 1):
            if turn > 1 and time.monotonic() - began > arguments.limit * turn / (
                turn + 1
            ):  # the next would end behind it
                break
            for asked in every:
                measure(asked, arguments, 1.0 if turn else 0.1)
                if not turn:  # the first is not counted
                    for values in (asked.grpcio, asked.frames, asked.rate, asked.one, asked.many):
                        values.clear()
    print(f"{len(every[0].rate)} rounds")
    where = f"{arguments.clients} processes × {arguments.connections} connections × {arguments.in_flight} in flight"
    print(
        f"| | one client of grpcio, p50 µs | one whose frames are made, p50 µs | {where}, requests/s "
        "| processor µs per request: one client | many | requests/s per core |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for asked in every:
        found = [median(values) for values in (asked.grpcio, asked.frames, asked.rate, asked.one, asked.many)]
        print(f"| {asked.name} | " + " | ".join(f"{value:,.0f}" for value in (*found, 1e6 / found[-1])) + " |")
    for asked in every[len(fronts) :]:
        more = median(asked.grpcio) - (step if asked.name == "msplit serve" else 0.0)
        print(
            f"{asked.name}: {median(asked.rate) / median(every[0].rate):.2f} of the requests/s of its front's echo (target 0.6)"
        )
        print(f"{asked.name}: p50 of one client is {more:.0f} µs more than a step (target 250)")
        print(
            f"{asked.name}: {1e6 / median(asked.many):,.0f} requests/s for each core that the server takes (target 10,000)"
        )


PACKAGES = {"pygrpc-native": "pygrpc_native", "grpclib": "grpclib"}

if __name__ == "__main__":
    main()
