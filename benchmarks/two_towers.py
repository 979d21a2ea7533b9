"""A two-tower with eight string features behind `msplit serve`, beside the same model fed with ids, and TensorFlow's own session behind the
same server: requests per second, the time of one client, and how long it takes to open.

    python benchmarks/two_towers.py make FOLDER                  # where TensorFlow is: both models, requests and answers
    python benchmarks/two_towers.py run FOLDER --seconds 240     # on a GPU; --device cpu simulates one

`run` builds what FOLDER lacks, starts the servers, and asks each in turns: one client of grpcio that waits for its answers, then many
requests in flight from several processes (`grpc_load.py`). Each answer to a first request is held against TensorFlow's of `make`. The
TensorFlow row is left out where it is not installed. Every request has `--rows` rows. Builds are opened in new processes, in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
from serving import PREDICT, Asked, asked_by_frames, asked_by_grpcio, free_port, processor_time, started

from msplit.serving.server import decode, messages, tensors

WORDS, HASHES, ROWS = 1500, 2000, 200
NAMES = [f"{side}_{number}" for side in ("user", "item") for number in range(4)]
OPENING = """
import json, sys, time
import numpy as np
import msplit
feeds = dict(np.load(sys.argv[2], allow_pickle=True))
import torch
start = time.perf_counter()
with msplit.open(sys.argv[1]) as runner:
    opened = time.perf_counter() - start
    runner.step(feeds)
    print(json.dumps([opened, time.perf_counter() - start]))
"""
"""Opens a build in a new process: seconds to open it, and to its first answer, once PyTorch is imported."""


def make(folder: Path, rows: int) -> None:
    """Writes both models, a request of each, and TensorFlow's answer, which is the same."""
    import keras
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    words = [f"item_{number}" for number in range(WORDS)]
    turned: dict[str, Any] = {
        name: keras.layers.StringLookup(vocabulary=words, num_oov_indices=2)
        if int(name[-1]) % 2 == 0
        else keras.layers.Hashing(HASHES)
        for name in NAMES
    }
    shared = {name: keras.layers.Embedding(max(WORDS + 2, HASHES), 32) for name in NAMES}
    layers = {
        side: [keras.layers.Dense(256, "relu"), keras.layers.Dense(128, "relu"), keras.layers.Dense(64)]
        for side in ("user", "item")
    }

    def model(strings: bool) -> Any:
        inputs = {name: keras.Input((), dtype="string" if strings else "int64", name=name) for name in NAMES}
        towers = []
        for side, dense in layers.items():
            names = [name for name in NAMES if name.startswith(side)]
            columns = [shared[name](turned[name](inputs[name]) if strings else inputs[name]) for name in names]
            hidden = keras.layers.Concatenate()(columns)
            for layer in dense:
                hidden = layer(hidden)
            towers.append(hidden)
        return keras.Model(inputs, keras.layers.Dot(axes=1)(towers))

    rng = np.random.default_rng(0)
    drawn = {name: np.array([b"item_%d" % one for one in rng.integers(0, HASHES, rows)], object) for name in NAMES}
    ids = {name: np.asarray(turned[name](tf.constant(value)), np.int64) for name, value in drawn.items()}
    np.savez(folder / "strings.npz", **drawn)
    np.savez(folder / "ids.npz", **ids)
    for name, feeds in (("strings", drawn), ("ids", ids)):
        model(name == "strings").export(str(folder / name), verbose=False)
        signature = tf.saved_model.load(str(folder / name)).signatures["serving_default"]
        found = {
            key: value.numpy() for key, value in signature(**{k: tf.constant(v) for k, v in feeds.items()}).items()
        }
        np.savez(folder / f"{name}_answer.npz", **found)


def request_of(feeds: Mapping[str, Any]) -> bytes:
    made = messages.PredictRequest()
    made.model_spec.name = "m"
    for name, value in feeds.items():
        tensors.to_tensor_proto(value, made.inputs[name], as_content=value.dtype != object)
    return bytes(made.SerializeToString())


def check(asked: Asked, expected: Mapping[str, Any]) -> float:
    """Largest difference of an answer from TensorFlow's, by the size of that. Raises where it is wrong."""
    with grpc.insecure_channel(f"127.0.0.1:{asked.port}") as channel:
        found = messages.PredictResponse.FromString(channel.unary_unary(PREDICT)(asked.data, timeout=60))
    (value,), (wanted,) = ([*one.values()] for one in (found.outputs, expected))
    far = float(np.abs(decode.array_of(value, "answer") - wanted).max() / np.abs(wanted).max())
    if not far < 1e-2:
        raise SystemExit(f"{asked.name}: the answer is wrong, by {far:.1e} of the largest")
    return far


def build(folder: Path, name: str, arguments: argparse.Namespace) -> Path:
    made = folder / f"{name}-{arguments.device}.build"
    if not made.is_dir():
        known = importlib.util.find_spec("tensorflow") is not None
        quick = ["--cuda", "effort=fast"] if arguments.device == "cpu" or not known else []
        command = [sys.executable, "-m", "msplit", "build", folder / name, "-o", made, "--device", arguments.device]
        start = time.perf_counter()
        subprocess.run([*command, "--batch", arguments.batch, "--streams", "4", *quick], check=True, stdout=sys.stderr)
        print(f"built {name} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return made


def run(folder: Path, arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    builds = {name: build(folder, name, arguments) for name in ("strings", "ids")}
    opened: dict[str, list[list[float]]] = {name: [] for name in builds}
    for _ in range(arguments.opens):
        for name, path in builds.items():
            command = [sys.executable, "-c", OPENING, str(path), str(folder / f"{name}.npz")]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            opened[name].append(json.loads(said))
    options = ["--device", arguments.device, *shlex.split(arguments.serve)]
    servers = {name: (name, [f"m={path}", *options]) for name, path in builds.items()}
    if importlib.util.find_spec("tensorflow") is not None:
        whole = ["--engine", "tensorflow", "--batch", arguments.batch, "--groups", str(arguments.sessions)]
        servers["TensorFlow"] = "strings", [f"m={folder / 'strings'}", *whole]
    every, ready = list[Asked](), dict[str, float]()
    with ExitStack() as stack:

        def begun(name: str) -> Asked:
            fed, more = servers[name]
            port, rest, start = free_port(), free_port(), time.perf_counter()
            command = ["-m", "msplit", "serve", "--model", *more, "--port", str(port), "--rest-api-port", str(rest)]
            server = stack.enter_context(started(name, command, port))
            ready[name] = time.perf_counter() - start
            feeds = dict(np.load(folder / f"{fed}.npz", allow_pickle=True))
            return Asked(name, server.pid, port, request_of({key: feeds[key] for key in NAMES}))

        with ThreadPoolExecutor(1) as starts:  # one after the other, so that each has all cores
            every = [*starts.map(begun, servers)]
        far = {one.name: check(one, dict(np.load(folder / f"{servers[one.name][0]}_answer.npz"))) for one in every}
        shape = arguments.clients, arguments.connections, arguments.in_flight
        begin, rounds, count = time.perf_counter(), 0, dict.fromkeys(servers, 0)
        # A round ends before time is over, if it takes as long as those before.
        while rounds < 2 or time.perf_counter() + (time.perf_counter() - begin) / rounds < began + arguments.seconds:
            for one in every:
                p50 = asked_by_grpcio(one.port, one.data, arguments.turn)
                requests = count[one.name] or shape[0] * shape[1] * shape[2]
                before = processor_time(one.pid)
                _, rate = asked_by_frames(one.port, one.data, *shape, requests)
                spent = (processor_time(one.pid) - before) / (shape[0] * requests) * 1e6
                count[one.name] = max(round(rate * arguments.turn / shape[0]), shape[1] * shape[2])
                if rounds:  # the first one warms up
                    one.grpcio.append(p50)
                    one.rate.append(rate)
                    one.many.append(spent)
            rounds += 1
    print(
        f"{rounds - 1} rounds of {arguments.turn:g} s, {arguments.rows} rows a request, {len(os.sched_getaffinity(0))} cores"
    )
    print(
        f"many: {shape[0]} processes × {shape[1]} connections × {shape[2]} in flight; s of opening once PyTorch is imported"
    )
    print(
        "| | one client, p50 µs | many, requests/s | processor µs a request | s until ready | s to open | to a first answer "
        "| off by |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for one in every:
        times = [f"{median(column):.2f}" for column in zip(*opened.get(one.name, []), strict=True)] or ["", ""]
        row = [f"{median(values):,.0f}" for values in (one.grpcio, one.rate, one.many)]
        print("| " + " | ".join([one.name, *row, f"{ready[one.name]:.1f}", *times, f"{far[one.name]:.0e}"]) + " |")
    strings, ids, *other = every
    if other:
        print(f"strings: {median(strings.rate) / median(other[0].rate):.1f} × TensorFlow's requests/s (wanted: 20)")
    print(
        f"strings: p50 is {median(strings.grpcio) - median(ids.grpcio):,.0f} µs more than with ids (wanted: at most 250)"
    )
    first, second = (median(one[0] for one in opened[name]) for name in ("strings", "ids"))
    print(f"strings: opens {first - second:.2f} s later than with ids (wanted: at most 0.5), in {first:.2f} s (2.5)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a request")
    parser.add_argument("--batch", default="200,800", help="rows of the steps of the builds, and of TensorFlow's")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--serve", default="--groups 4", help="further arguments of msplit serve of the builds")
    parser.add_argument("--sessions", type=int, default=16, help="steps of TensorFlow's in flight at once")
    parser.add_argument("--seconds", type=float, default=240.0, help="in which all is over, builds and all")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds of a turn of one client, and of many")
    parser.add_argument("--opens", type=int, default=3, help="how often each build is opened")
    parser.add_argument("--clients", type=int, default=4, help="processes that ask for many")
    parser.add_argument("--connections", type=int, default=4, help="of each of them")
    parser.add_argument("--in-flight", type=int, default=4, help="on each connection")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.folder, arguments.rows)
    else:
        run(arguments.folder, arguments)


if __name__ == "__main__":
    main()
