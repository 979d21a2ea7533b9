"""Our kernel of lookups beside FBGEMM's table-batched embedding (forward, no gradient) on the same ids and tables, by turns in one run.

    PYTHONPATH=.:SITE python3 benchmarks/notes/probes/fbgemm.py     # 17 s on a GPU; SITE has fbgemm-gpu 1.6.0, of PyTorch 2.11
    TRITON_INTERPRET=1 PYTHONPATH=.:SITE_OF_fbgemm_gpu_cpu python3 …/fbgemm.py --device cpu --rows 200 --lookups 64 --tables 2

26 tables x 16,384 lookups of 128 floats: one id a row, bags of 8, of 64, and DLRM-v2's mixture. Ours: tables in HBM, and in the host's
memory with all rows that are read in the cache. FBGEMM: tables in HBM, without and with its check of ids, ids of int64 and of int32.
All as captured graphs where that works (told otherwise).
"""

import argparse
import itertools
import os
import statistics
import sys
import time

import numpy as np
import torch

sys.path.insert(0, os.path.join(os.getcwd(), "benchmarks/notes/probes"))
import missed_rows

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.embedding import fill
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.ops.embedding import empty_outputs

WIDTH, TURNS, EACH = 128, 15, 10
BEGIN = time.perf_counter()


def theirs(tables, rows, counts, index_type, checks):
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    gpu = DEVICE.type == "cuda"
    place = EmbeddingLocation.DEVICE if gpu else EmbeddingLocation.HOST
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(len(tables[0]), WIDTH, place, ComputeDevice.CUDA if gpu else ComputeDevice.CPU)] * len(tables),
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.WARNING if checks else BoundsCheckMode.NONE,
        embedding_table_index_type=index_type,
        embedding_table_offset_type=index_type,
        device=DEVICE,
    )
    for weights, table in zip(module.split_embedding_weights(), tables, strict=True):
        weights.data.copy_(table)
    return module.eval()


def graphed(run):
    if DEVICE.type != "cuda":
        run()
        return run, ""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            for _ in range(EACH):  # a launch of a graph must not be what is measured
                run()
        graph.kept = run
        return graph.replay, ""
    except Exception as problem:
        torch.cuda.synchronize()
        print(f"not captured: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}")
        return (lambda: [run() for _ in range(EACH)]), " (launched)"


def timed(runs):
    """µs of one run: least, median, largest of all turns but the first."""
    every = [[us / EACH for us in one[1:] or one] for one in missed_rows.times_of(runs, TURNS)]
    return [(min(one), statistics.median(one), max(one)) for one in every]


def main():
    global DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=250_000, help="of each table")
    parser.add_argument("--lookups", type=int, default=16_384)
    parser.add_argument("--tables", type=int, default=26)
    options = parser.parse_args()
    DEVICE = torch.device(options.device)
    if DEVICE.type == "cuda":
        DEVICE = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=DEVICE)
    missed_rows.DEVICE, missed_rows.TABLES = DEVICE, options.tables
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-8, 8, (options.rows, WIDTH), np.int8).astype(np.float32) for _ in range(options.tables)]
    tables = [torch.from_numpy(one).to(DEVICE) for one in arrays]
    hot = max(options.rows // 4, 1)  # rows that are read
    hosts = Device.of(DEVICE).owned(HostTables)
    hosted = hosts.cached(arrays, options.tables * hot)
    cache = hosts.find(hosted[0]).cache
    missed_rows.put(
        cache, torch.cat([torch.arange(hot, device=DEVICE) + at * options.rows for at in range(options.tables)])
    )
    print(
        torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
        f"torch {torch.__version__}; ready after {time.perf_counter() - BEGIN:.1f} s",
        flush=True,
    )
    shapes = {
        "1 id a row": (options.lookups, [1] * options.tables),
        "bags of 8": (max(options.lookups // 8, 1), [8] * options.tables),
        "bags of 64": (max(options.lookups // 64, 1), [64] * options.tables),
        "DLRM-v2": (max(options.lookups // 8, 1), missed_rows.HOT[-options.tables :]),
    }
    lines, wrong = [], 0
    modules = {
        (kind, checks): theirs(tables, 0, (), kind, checks)
        for kind, checks in ((torch.int64, False), (torch.int64, True), (torch.int32, False))
    }
    if DEVICE.type == "cpu":
        modules = {(kind, checks): one for (kind, checks), one in modules.items() if kind == torch.int64}
    print(f"FBGEMM's tables after {time.perf_counter() - BEGIN:.1f} s", flush=True)
    for shape, (rows, counts) in shapes.items():
        if time.perf_counter() - BEGIN > 55:
            print("no time for more")
            break
        ids = rng.integers(0, hot, rows * sum(counts))
        edges = [rows * count for count in counts]
        offsets = np.concatenate([[0], np.cumsum(np.repeat(counts, rows))])
        spec = missed_rows.columns_of(rows, counts)
        runs, names, outputs = [], [], []
        for name, own, kind in (
            ("ours, HBM, int64", tables, torch.int64),
            ("ours, HBM, int32", tables, torch.int32),
            ("ours, cache all hot, int32", hosted, torch.int32),
        ):
            parts = torch.from_numpy(ids).to(DEVICE, kind).split(edges)
            given = tuple(itertools.chain(*zip(parts, own, strict=True)))
            (output,) = empty_outputs(spec, DEVICE, "float32")
            output.fill_(float("nan"))
            run, note = graphed(lambda spec=spec, given=given, output=output: fill(spec, given, (output,)))
            runs.append(run)
            names.append(name + note)
            outputs.append([output])
        for (kind, checks), module in modules.items():
            given = torch.from_numpy(ids).to(DEVICE, kind), torch.from_numpy(offsets).to(DEVICE, kind)
            kept = []

            def run(module=module, given=given, kept=kept):
                with torch.no_grad():
                    kept[:] = [module(*given)]

            name = f"FBGEMM, {str(kind)[6:]}{', ids checked' if checks else ''}"
            try:
                made, note = graphed(run)
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
                continue
            runs.append(made)
            names.append(name + note)
            outputs.append(kept)
        times = timed(runs)
        by_table = [one.reshape(rows, -1) for one in np.split(ids, np.cumsum(edges)[:-1])]
        some = rng.integers(0, rows, min(rows, 100))
        wanted = np.concatenate([array[one[some]].sum(1) for array, one in zip(arrays, by_table, strict=True)], 1)
        for name, (output,) in zip(names, outputs, strict=True):
            found = output.float().reshape(rows, -1)
            if not np.array_equal(found[torch.from_numpy(some).to(DEVICE)].cpu().numpy(), wanted) or not torch.equal(
                found, outputs[0][0].reshape(rows, -1)
            ):
                print(f"WRONG VALUES: {shape}, {name}")
                wrong += 1
        best = min(
            (median for name, (_, median, _) in zip(names, times, strict=True) if name.startswith("FB")),
            default=float("nan"),
        )
        size = rows * (sum(counts) + options.tables) * WIDTH * 4
        for name, (least, median, most) in zip(names, times, strict=True):
            spread = f"{least:,.1f} to {most:,.1f} | {size / median / 1e3:,.0f} | {median / best:.2f}"
            lines.append(f"| {shape} | {rows} | {name} | {median:,.1f} | {spread} |")
            print(lines[-1], flush=True)
    print("\n| shape | rows | what | µs, median | least to largest | GB/s read and written | by FBGEMM's best |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    print(*lines, sep="\n")
    print(f"answers equal to the bit: {'NO' if wrong else 'yes'}; {time.perf_counter() - BEGIN:.1f} s")
    sys.stdout.flush()
    os._exit(bool(wrong))


if __name__ == "__main__":
    main()
