"""What a server adds to a step: `msplit serve` asked by clients in processes of their own, beside a step of the pool from Python, and
beside a gRPC server that sends back what it gets.

    python benchmarks/serving.py model.build --rows 1 --front-ends 0,2,4 --serve '--groups 8'

Prints p50 and p99 of one client, and requests per second of many, for the echo and for each number of front ends. Only the length of
answers is looked at: `msplit load --server` checks their values. Everything after --serve goes to `msplit serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from msplit.serving.server import messages, rpc, tensors

PREDICT = "/tensorflow.serving.PredictionService/Predict"
OWN = [("grpc.use_local_subchannel_pool", 1)]


def request_of(name: str, signature: dict[str, Any], rows: int) -> bytes:
    """A request with made-up inputs."""
    made = messages.PredictRequest()
    made.model_spec.name = name
    generator = np.random.default_rng(0)
    for key, info in signature["inputs"].items():
        shape = [rows if int(dim["size"]) < 0 else int(dim["size"]) for dim in info["tensor_shape"]["dim"]]
        if info["dtype"] != "DT_FLOAT":
            array = np.zeros(shape, {"DT_INT32": np.int32, "DT_INT64": np.int64, "DT_BOOL": bool}[info["dtype"]])
        else:
            array = generator.standard_normal(shape, np.float32)
        tensors.to_tensor_proto(array, made.inputs[key], as_content=True)
    return made.SerializeToString()


def one(port: int, data: bytes, seconds: float) -> list[float]:
    """Seconds of each request of one client that waits for its answers."""
    taken = []
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OWN) as channel:
        call = channel.unary_unary(PREDICT)
        for _ in range(50):
            call(data)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            call(data)
            taken.append(time.perf_counter() - start)
    return taken


def many(port: int, data: bytes, seconds: float, in_flight: int) -> int:
    """Requests that one process has answered, so many at once."""

    async def run() -> int:
        count = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OWN) as channel:
            call = channel.unary_unary(PREDICT)
            first = await call(data)
            end = time.perf_counter() + seconds

            async def client() -> None:
                nonlocal count
                while time.perf_counter() < end:
                    answer = await call(data)
                    assert len(answer) == len(first)
                    count += 1

            await asyncio.gather(*(client() for _ in range(in_flight)))
        return count

    with asyncio.Runner(loop_factory=rpc.loop_factory()) as runner:
        return runner.run(run())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


async def echo(port: int) -> None:
    """Sends back what comes, until it is ended."""

    async def back(data: bytes, context: Any) -> bytes:
        return data

    method = grpc.unary_unary_rpc_method_handler(back)
    server = grpc.aio.server()
    service, name = PREDICT[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready:", flush=True)
    await server.wait_for_termination()


def a_step(arguments: argparse.Namespace) -> None:
    """A step of the same from Python, in this process."""
    import msplit

    with msplit.pool(arguments.model, groups=1) as pool:
        generator = np.random.default_rng(0)
        feeds = {
            name: generator.standard_normal([arguments.rows if size is None else size for size in port.shape]).astype(
                port.dtype
            )
            for name, port in pool.inputs.items()
        }
        taken = []
        for _ in range(3000):
            start = time.perf_counter()
            pool.step(feeds)
            taken.append(time.perf_counter() - start)
    print(f"a step of the pool from Python: p50 {np.median(taken) * 1e6:.0f} µs", flush=True)


def measure(arguments: argparse.Namespace, front_ends: int | None) -> None:
    """A server with so many front ends; None: the echo."""
    port, rest = free_port(), free_port()
    options = [*shlex.split(arguments.serve), "--front-ends", str(front_ends)]
    where = ["--port", str(port), "--rest-api-port", str(rest), "--model", f"m={arguments.model}"]
    command = ["-m", "msplit", "serve", *where, *options]
    if front_ends is None:
        command = [__file__, str(arguments.model), "--echo", str(port)]
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    about = "echo" if front_ends is None else f"front ends {front_ends}"
    try:
        for line in server.stdout or ():
            print(f"  {line}", end="")
            if line.startswith("ready:"):
                break
        if front_ends is None:
            data = bytes(arguments.rows * 512)
        else:
            with urllib.request.urlopen(f"http://127.0.0.1:{rest}/v1/models/m/metadata") as answer:
                signatures = json.load(answer)["metadata"]["signature_def"]["signature_def"]
            data = request_of("m", next(iter(signatures.values())), arguments.rows)
        taken = sorted(one(port, data, arguments.seconds))
        p50, p99 = (taken[len(taken) * part // 100] * 1e6 for part in (50, 99))
        print(
            f"{about}: one client p50 {p50:.0f} µs, p99 {p99:.0f} µs, {len(taken) / arguments.seconds:.0f}/s",
            flush=True,
        )
        command = [sys.executable, __file__, str(arguments.model), "--seconds", str(arguments.seconds)]
        workers = [
            subprocess.Popen(
                [*command, "--client", str(port), "--in-flight", str(arguments.in_flight)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(arguments.clients)
        ]
        counts = []
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(data)
            worker.stdin.close()
        for worker in workers:
            assert worker.stdout is not None
            counts.append(int(worker.stdout.read()))
            worker.wait()
        rate = sum(counts) / arguments.seconds
        print(
            f"{about}: {arguments.clients} processes × {arguments.in_flight} in flight {rate:.0f}/s",
            flush=True,
        )
        if front_ends is None:
            return
        with urllib.request.urlopen(f"http://127.0.0.1:{rest}/metrics") as answer:
            stats = [
                line
                for line in answer.read().decode().splitlines()
                if line.startswith("msplit_pool_") and "_created" not in line
            ]
        print("  " + ", ".join(f"{line.split('{')[0][12:]} {line.rsplit(' ', 1)[1]}" for line in stats))
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--front-ends", default="0,2,4")
    parser.add_argument("--serve", default="")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--echo", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(many(arguments.client, sys.stdin.buffer.read(), arguments.seconds, arguments.in_flight))
        return
    if arguments.echo:
        asyncio.run(echo(arguments.echo))
        return
    a_step(arguments)
    measure(arguments, None)
    for front_ends in map(int, arguments.front_ends.split(",")):
        measure(arguments, front_ends)


if __name__ == "__main__":
    main()
