"""Lookup tables larger than the GPU's memory for them: MLPerf's DLRM-v2 with made-up tables, in one run beside all tables on the GPU.

    python benchmarks/tables.py make FOLDER --gb 40                       # where TensorFlow is: the model, with tables of so many GB in all
    python benchmarks/tables.py run FOLDER --table-memory 4 > tables.md   # on a GPU; --device cpu tries it, and its times say nothing
    python benchmarks/tables.py split FOLDER --gb 24 --card 20            # on two GPUs, each taken for one of 20 GB; --device cpu as well

26 tables of 128 floats with 214 lookups a row (the multi-hot sizes of MLPerf's data set), 13 numbers, a bottom MLP of 512, 256 and 128,
three cross layers of rank 512, a top MLP of 1024, 1024, 512, 256 and 1. Rows of the tables are scaled so that all take the GB that are
asked for.

Ids are of three kinds: *hot*, those of few rows, which the cache has; *zipf*, drawn with a weight of 1 / rank ** 1.05; *even*, all
equally often. The cache is filled by steps of that kind, then no rows come in while a step on other ids is timed, by the device's clock,
the rows of the table by turns. What bus and memory allow: bytes of rows that were missed by the bus's measured rate, or bytes of all rows
by the memory's, whichever takes longer. The bus is measured twice: rows of 1 GB, and rows of all tables that the host has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""MLPerf's DLRM-v2: rows of each table, and lookups of each in a row of the batch."""
WIDTH, NUMBERS, RANK, CROSSES = 128, 13, 512, 3
BOTTOM, TOP = (512, 256, WIDTH), (1024, 1024, 512, 256)
RUNS, TURNS = 30, 5


def sizes(gb: float) -> list[int]:
    """Rows of each table, those of more than 100,000 scaled."""
    fixed = sum(rows for rows in ROWS if rows <= 100_000)
    scale = (gb * 1e9 / (4 * WIDTH) - fixed) / (sum(ROWS) - fixed)
    return [rows if rows <= 100_000 else max(int(rows * scale), 1000) for rows in ROWS]


def filled(rng: np.random.Generator, rows: int) -> np.ndarray:
    """A table: rows of one block again and again, each block times another number. To draw all of them takes longer than to write them."""
    table, block = np.empty((rows, WIDTH), np.float32), block_of(rng, rows)
    for number, begin in enumerate(range(0, rows, len(block))):
        part = table[begin : begin + len(block)]
        np.multiply(block[: len(part)], np.float32(1 + number % 1000 / 1000), out=part)
    return table


def block_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """The block that a table repeats."""
    return (rng.standard_normal((min(rows, 20_000), WIDTH)) / WIDTH).astype(np.float32)


def looked_up(block: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows of a table, without the table."""
    times = (1 + ids // len(block) % 1000 / 1000).astype(np.float32)
    return block[ids % len(block)] * times[..., np.newaxis]


def make(folder: Path, gb: float) -> None:
    """Writes the model."""
    import tensorflow as tf

    rng, module = np.random.default_rng(0), tf.Module()
    with tf.device("cpu"):
        module.tables = [tf.Variable(filled(rng, rows), name=f"table_{at}") for at, rows in enumerate(sizes(gb))]

    def weights(*shape: int) -> Any:
        return tf.constant((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32))

    def layers(value: Any, widths: tuple[int, ...]) -> Any:
        for width in widths:
            value = tf.nn.relu(tf.nn.bias_add(tf.matmul(value, weights(value.shape[-1], width)), weights(width)))
        return value

    def rank(numbers: Any, **ids: Any) -> dict[str, Any]:
        columns = [
            tf.reduce_sum(tf.nn.embedding_lookup(table, ids[f"ids_{at}"]), 1) for at, table in enumerate(module.tables)
        ]
        first = tf.concat([layers(numbers, BOTTOM), *columns], 1)
        value = first
        for _ in range(CROSSES):
            low = tf.matmul(value, weights(first.shape[-1], RANK))
            value += first * tf.nn.bias_add(tf.matmul(low, weights(RANK, first.shape[-1])), weights(first.shape[-1]))
        return {"y": tf.sigmoid(tf.matmul(layers(value, TOP), weights(TOP[-1], 1)))}

    inputs = {f"ids_{at}": tf.TensorSpec([None, count], tf.int32, name=f"ids_{at}") for at, count in enumerate(HOT)}
    signature = tf.function(rank).get_concrete_function(tf.TensorSpec([None, NUMBERS], tf.float32, "numbers"), **inputs)
    shutil.rmtree(folder, ignore_errors=True)
    tf.saved_model.save(module, str(folder), signatures=signature)


def drawn(rng: np.random.Generator, kind: str, rows: int, shape: tuple[int, int], hot: int) -> np.ndarray:
    """Ids of a table. Rows that are read often are spread over it."""
    if kind == "even":
        return rng.integers(0, rows, shape).astype(np.int32)
    if kind == "hot":
        ranks = rng.integers(0, min(hot, rows), shape)
    else:  # the inverse of the distribution's integral
        power = -0.05
        ranks = ((rng.random(shape) * (rows**power - 1) + 1) ** (1 / power)).astype(np.int64) - 1
    return (np.clip(ranks, 0, rows - 1) * 2_654_435_761 % rows).astype(np.int32)


def feeds_of(rng: np.random.Generator, kind: str, batch: int, gb: float, hot: int) -> dict[str, np.ndarray]:
    """Inputs of a step."""
    ids = {
        f"ids_{at}": drawn(rng, kind, rows, (batch, count), hot)
        for at, (rows, count) in enumerate(zip(sizes(gb), HOT, strict=True))
    }
    return {"numbers": rng.standard_normal((batch, NUMBERS)).astype(np.float32), **ids}


def rates(device: str, tables: Sequence[Any]) -> tuple[float, float, float]:
    """GB/s for rows at random, read by a kernel that does nothing else: of 1 GB of pinned memory, of all of some tables in the host's
    memory, and of the GPU's memory. The second one may be less than the first: the more memory, the more addresses to be translated."""
    import torch

    from msplit.engines.cuda.device.device import Device
    from msplit.engines.cuda.kernels.host_tables import HostTables

    place, found = torch.device(device), []
    host = np.zeros((1 << 21, WIDTH), np.float32)
    (table,) = Device.of(place).owned(HostTables).cached([host], 8)
    on_gpu = table.to(place, copy=True) if place.type == "cuda" else table
    for sources in ([table], tables, [on_gpu]):
        rows = sum(map(len, sources))
        ids = [torch.randint(0, len(one), (max((1 << 19) * len(one) // rows, 1),), device=place) for one in sources]
        size = sum(one[:1].nbytes * len(numbers) for one, numbers in zip(sources, ids, strict=True))
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if place.type == "cuda" else []
            for mark in marks[:1]:
                mark.record()
            for one, numbers in zip(sources, ids, strict=True):
                one.index_select(0, numbers)
            for mark in marks[1:]:
                mark.record()
                mark.synchronize()
            times.append(marks[0].elapsed_time(marks[1]) / 1e3 if marks else time.perf_counter() - begin)
        found.append(size / min(times) / 1e9)
    return found[0], found[1], found[2]


def run(folder: Path, options: argparse.Namespace) -> None:
    """Prints the table."""
    import msplit
    from msplit.engines.cuda.kernels import host_tables
    from msplit.engines.table_rows import words_of

    batch, gb = options.batch, options.gb
    common = {"batch": batch, "device": options.device, "engine": "cuda", "streams": 4, "precision": options.precision}
    row = 4 * words_of(WIDTH, options.rows) if options.rows else 4 * WIDTH
    memories = [f"{options.table_memory},rows={options.rows}" if options.rows else options.table_memory]
    memories += [None] if options.whole else []
    runners, labels = [], []
    for memory in memories:
        begin = time.perf_counter()
        runners.append(msplit.prepare(str(folder), table_memory=memory, effort=options.effort, **common))
        labels.append("all on the GPU" if memory is None else f"{memory} GB on the GPU")
        took = time.perf_counter() - begin
        print(f"{labels[-1]}: ready in {took:.1f} s, {gb / took:.2f} GB/s; {runners[-1].facts}", file=sys.stderr)
    facts = runners[0].executable.facts()
    hot = int(facts["table_cache_rows"] * 0.5 / len(HOT))
    tables = [table for cache in caches_of(runners[0]) for table in cache.tables]
    bus, spread_bus, memory_rate = rates(options.device, tables)
    lookups = sum(HOT) * batch
    print(
        f"bus {bus:.1f} GB/s for rows of 1 GB, {spread_bus:.1f} for those of the tables; memory {memory_rate:.0f} GB/s; at random; "
        f"batch {batch}, {lookups:,} lookups a step\n"
    )
    print(
        "| ids | tables | hit rate | µs a step (spread) | rows/s | GB over the bus | at least, µs | share of that "
        "| at least, rows of the tables, µs |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    every, filling = host_tables._EVERY, host_tables.RowCache.is_filling
    host_tables.RowCache.is_filling = lambda _: False
    for kind in ("hot", "zipf", "even"):
        rng = np.random.default_rng(1)
        host_tables._EVERY = 1
        for _ in range(options.fill):
            runners[0].step(feeds_of(rng, kind, batch, gb, hot))
        host_tables._EVERY = 1 << 60
        before = counts(runners[0])
        feeds = feeds_of(rng, kind, batch, gb, hot)
        answers = [runner.step(feeds) for runner in runners]
        for other in answers[1:]:
            for name, value in other.items():
                near = 0.1 if options.rows else 2e-2  # of tables as they are, where those of the host are rounded
                np.testing.assert_allclose(value, answers[0][name], rtol=near, atol=near)
        host_tables._EVERY = 1
        runners[0].step(feeds)  # notes are counted at a refresh, which comes behind it
        hits, misses = (after - one for after, one in zip(counts(runners[0]), before, strict=True))
        host_tables._EVERY = 1 << 60
        feeds = feeds_of(rng, kind, batch, gb, hot)  # not those that just came in
        for runner in runners:
            runner.step(feeds)
        times: list[list[float]] = [[] for _ in runners]
        for _ in range(TURNS):
            for runner, found in zip(runners, times, strict=True):
                found += runner.executable.device_times(RUNS) or [np.nan]
        rate = hits / max(hits + misses, 1)
        for label, found in zip(labels, times, strict=True):
            us, spread = statistics.median(found) * 1e6, (np.quantile(found, 0.9) - np.quantile(found, 0.1)) * 1e6
            hosted = label == labels[0]
            missed = misses / 2 * row / 1e9 if hosted else 0.0  # two steps were counted
            inside = lookups * (row if hosted else WIDTH * 4) / 1e9 / memory_rate
            least = max(missed / bus, inside) * 1e6
            shown = f"{100 * rate:.1f} %" if label == labels[0] else "-"
            print(
                f"| {kind} | {label} | {shown} | {us:,.0f} ({spread:,.0f}) | {batch / us * 1e6:,.0f} | {missed:.3f} | "
                f"{least:,.0f} | {100 * least / us:.0f} % | {max(missed / spread_bus, inside) * 1e6:,.0f} |"
            )
    host_tables._EVERY, host_tables.RowCache.is_filling = every, filling


def split(folder: Path, options: argparse.Namespace) -> None:
    """Runs the model over several GPUs, each taken for one with `--card` GB, holds the sums of its rows against NumPy, and prints its
    time beside the simulated one."""
    import msplit
    from msplit.core.arguments import Precision
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.options import EngineOptions

    flat, begin = msplit.load(folder), time.perf_counter()
    pooled = replace(flat.outputs[0], name="pooled", node=list(flat.graph.ops).index("ConcatV2"), port=0)
    flat = replace(flat, outputs=(*flat.outputs, pooled))
    rng, streams = np.random.default_rng(1), 4 * options.gpus
    with tempfile.TemporaryDirectory() as rules:
        wanted = Path(rules) / "rules.yaml"
        device = f"{{gpus: {options.gpus}, memory_gb: {options.card}}}"
        wanted.write_text(
            f"version: 1\nstreams: {streams}\nrules:\n  - device: {device}\n  - colocation\n  - propagate\n"
        )
        assigned = msplit.assign(flat, wanted, batch=options.batch)
    for remark in assigned.outcome.remarks:
        print(remark.text)
    own = EngineOptions(options.device, split=tuple(range(options.gpus)))
    feeds = feeds_of(rng, "even", options.batch, options.gb, 1)
    job = Job(flat, assigned.ids, streams, feeds, precision=Precision(options.precision), options=own)
    executable = ENGINE.build(job)
    facts = executable.facts()
    print(f"ready in {time.perf_counter() - begin:.1f} s: {facts}")
    held = facts["weight_bytes_of_gpus"]
    assert max(held) <= options.card * 1e9 < sum(held), held
    for kind in ("even", "zipf"):
        feeds = feeds_of(rng, kind, options.batch, options.gb, 1)
        found, drawing = executable.step(feeds), np.random.default_rng(0)
        for at, rows in enumerate(sizes(options.gb)):
            expected = looked_up(block_of(drawing, rows), feeds[f"ids_{at}"]).sum(1, dtype=np.float64)
            np.testing.assert_allclose(
                found["pooled"][:, WIDTH * (at + 1) :][:, :WIDTH], expected, rtol=1e-5, atol=1e-6
            )
        assert np.isfinite(found["y"]).all()
        times = np.array([executable.device_times(RUNS) or [np.nan] for _ in range(TURNS)]) * 1e6
        spread = np.quantile(times, 0.9) - np.quantile(times, 0.1)
        print(
            f"{kind}: all {options.batch} rows of {len(HOT)} tables are right; a step {np.median(times):,.0f} ({spread:,.0f}) µs"
        )
    executable.close()


def caches_of(runner: Any) -> list[Any]:
    """A runner's caches."""
    from msplit.engines.cuda.device.device import Device
    from msplit.engines.cuda.kernels.host_tables import HostTables

    constants = runner.executable.program.constants.values()
    tables = Device.of(next(iter(constants)).device).owned(HostTables)
    return [*{id(place.cache): place.cache for one in constants if (place := tables.find(one)) is not None}.values()]


def counts(runner: Any) -> tuple[int, int]:
    """Lookups of a runner's caches that found their row there, and that did not, up to the last refresh, which is over then."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    hits, misses = (sum(int(cache.counts[at]) for cache in caches_of(runner)) for at in range(2))
    return hits, misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run", "split"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=40, help="of all tables")
    parser.add_argument("--table-memory", type=float, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--fill", type=int, default=1200, help="steps that fill the cache, of each kind")
    parser.add_argument("--whole", action="store_true", help="also with all tables on the GPU")
    parser.add_argument(
        "--rows", choices=["int8", "bf16"], help="how rows of the host's memory are kept, if not as float32"
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--card", type=float, default=20, help="GB that each of several GPUs is taken to have")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--effort", default="full")
    parser.add_argument("--precision", default="tf32")
    options = parser.parse_args()
    {"make": lambda folder, options: make(folder, options.gb), "run": run, "split": split}[options.what](
        options.folder, options
    )


if __name__ == "__main__":
    main()
