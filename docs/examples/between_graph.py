"""An ensemble with a client per member: each has a graph, a server and weights of its own, and queues are all that they share.

    msplit sample mmoe --seed 1 -o first.pb
    msplit sample mmoe --seed 2 -o second.pb
    python docs/examples/between_graph.py first.pb second.pb

One client puts inputs into a queue per member and averages what comes back. A member that does not answer in time is left out, and the
others go on. Beside it the same ensemble as one graph over the same tasks (`msplit replicate --devices`): for that all must be there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import msplit
from msplit import api

v1 = tf.compat.v1
NUMBER = "number"
"""Component of the queues that tells which batch something belongs to."""


def queues(flat: Any, member: int) -> Iterator[Any]:
    """What a member takes and what it gives, as queues of one name for every client. They are where the inputs come from."""
    with tf.device("/job:inputs/task:0"):
        for what, tensors in (("inputs", flat.model.inputs), ("outputs", flat.model.outputs)):
            names = [NUMBER, *(tensor.name for tensor in tensors)]
            types = [tf.int64, *(tf.as_dtype(tensor.dtype) for tensor in tensors)]
            yield v1.FIFOQueue(8, types, names=names, shared_name=f"{what}_{member}")


def only(*devices: str) -> Any:
    """A session that waits for no other task than these."""
    return v1.ConfigProto(device_filters=devices)


def within(seconds: float) -> Any:
    """A limit for a step."""
    return v1.RunOptions(timeout_in_ms=int(seconds * 1000))


def answer(cluster: dict[str, list[str]], member: int, path: Path, seconds: float) -> None:
    """A member: computes on its own task whatever comes, until its queue is closed."""
    flat = msplit.load(path)
    server = v1.train.Server(cluster, job_name="member", task_index=member)
    here = f"/job:member/task:{member}"
    with tf.Graph().as_default():
        given, made = queues(flat, member)
        with tf.device(here):
            fed = given.dequeue()
            ends = flat.model.inputs, flat.model.outputs
            found = tf.import_graph_def(
                flat.model.graph_def,
                input_map={end.tensor: fed[end.name] for end in ends[0]},
                return_elements=[end.tensor for end in ends[1]],
            )
        step = made.enqueue(
            {NUMBER: fed[NUMBER], **{end.name: value for end, value in zip(ends[1], found, strict=True)}}
        )
        with v1.Session(server.target, config=only("/job:inputs", here)) as session:
            try:
                while True:
                    session.run(step, options=within(10 * seconds))
            except tf.errors.OutOfRangeError:  # closed, and empty: the end of the data
                session.run(made.close())
    server.join()  # its task stays for others until it is ended


def ask(
    target: str, flat: Any, alive: list[int], batches: Sequence[dict[str, Any]], seconds: float
) -> Iterator[dict[str, Any]]:
    """The client: sends each batch to all members, and averages what those give that answer; the others are taken out of `alive`."""
    with tf.Graph().as_default():
        pairs = [tuple(queues(flat, member)) for member in alive]
        fed = {end.name: v1.placeholder(end.dtype) for end in flat.model.inputs}
        number = v1.placeholder(tf.int64, ())
        puts = [given.enqueue({NUMBER: number, **fed}) for given, _ in pairs]
        gets = [made.dequeue() for _, made in pairs]
        closes = [given.close() for given, _ in pairs]
        with v1.Session(target, config=only("/job:inputs")) as session:
            for count, batch in enumerate(batches):
                given = {number: count, **{fed[name]: value for name, value in batch.items()}}
                for member in alive:
                    session.run(puts[member], given, options=within(seconds))
                answers = []
                for member in tuple(alive):
                    try:
                        answers.append(session.run(gets[member], options=within(seconds)))
                        assert answers[-1][NUMBER] == count
                    except tf.errors.DeadlineExceededError:
                        alive.remove(member)
                        print(f"member {member} has not answered within {seconds:g} s, and is left out")
                if not answers:
                    raise SystemExit("no member answers")
                yield {end.name: np.mean([one[end.name] for one in answers], 0) for end in flat.model.outputs}
            session.run(closes, options=within(seconds))


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine at which nobody listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def in_one_graph(
    target: str, paths: Sequence[Path], batches: Sequence[dict[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """The same by one graph and one client, each replica on the task of a member."""
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        devices = [f"/job:member/task:{member}" for member in range(len(paths))]
        made = api.replicate(
            paths[0], api.Replication(len(paths), paths, devices=devices), Path(folder) / "ensemble.pb"
        )
        ensemble = msplit.load(made.path).model
        tf.import_graph_def(ensemble.graph_def, name="")
        names = {end.name: end.tensor for end in ensemble.inputs}
        fetches = {name: f"{tensor}:0" for name, tensor in made.outputs.items()}
        config = v1.ConfigProto(operation_timeout_in_ms=int(seconds * 1000))
        with v1.Session(target, config=config) as session:
            return [session.run(fetches, {names[key]: value for key, value in batch.items()}) for batch in batches]


@contextmanager
def members_of(paths: Sequence[Path], seconds: float) -> Iterator[str]:
    """Starts a process per member, as each host would with the same cluster, and gives the address of the inputs."""
    first, *others = free_addresses(1 + len(paths))
    cluster = {"inputs": [first], "member": others}
    # Forked before TensorFlow starts a thread here: its import is paid once.
    context = multiprocessing.get_context("fork")
    arguments = [(cluster, member, path, seconds) for member, path in enumerate(paths)]
    processes = [context.Process(target=answer, args=given, daemon=True) for given in arguments]
    for process in processes:
        process.start()
    server = v1.train.Server(cluster, job_name="inputs", task_index=0)
    try:
        yield server.target
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """Runs an ensemble both ways."""
    parser = argparse.ArgumentParser(
        description="An ensemble between graphs: a client, a server and a graph per member."
    )
    parser.add_argument("models", nargs="+", type=Path, help="frozen models of one graph, a member each")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a member may take to answer")
    options = parser.parse_args()
    flat = msplit.load(options.models[0])
    random = np.random.default_rng(0)
    batches = [
        {end.name: random.normal(size=[options.rows, *end.shape[1:]]).astype(end.dtype) for end in flat.model.inputs}
        for _ in range(options.batches)
    ]
    alive = list(range(len(options.models)))
    with members_of(options.models, options.timeout) as target:
        between = list(ask(target, flat, alive, batches, options.timeout))
        # TensorFlow would wait for a task that is not there however long.
        everybody = len(alive) == len(options.models)
        inside = in_one_graph(target, options.models, batches, options.timeout) if everybody else []
    for count, means in enumerate(between):
        print(f"batch {count}:", ", ".join(f"{name} {value.mean():.6f}" for name, value in means.items()))
    if inside:
        pairs = [(means[name], other[name]) for means, other in zip(between, inside, strict=True) for name in means]
        print(f"largest difference to one graph: {max(np.abs(one - other).max() for one, other in pairs):.2g}")


if __name__ == "__main__":
    main()
