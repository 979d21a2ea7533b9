"""Lookups in tables of the host's memory: the kernel alone, beside plain copies of the same bytes. Needs neither TensorFlow nor a model.

    PYTHONPATH=. python3 benchmarks/notes/probes/missed_rows.py        # about 60 s on a GPU: --gb 16 of tables
    TRITON_INTERPRET=1 PYTHONPATH=. python3 benchmarks/notes/probes/missed_rows.py \
        --device cpu --gb 0.0004 --tables 2 --lookups 64 --cached 20 \
        --settings 'old,1024 w4 b1024'                             # its host part

A second run with --memory driver has the tables in memory by cuMemCreate, whose pages are large where the driver has such.

1. A: how fast rows of 512 bytes at random can be read from pinned memory at all, by a kernel that does nothing else, by how much memory
   they are spread over (translation of addresses), by loads of 16 and of 4 bytes a thread, and by how the memory was allocated.
2. B: `embedding.fill` for 26 tables x 16,384 lookups of 128 floats, of which 100, 90 and 50 % are in the cache: one id a row,
   bags of 8, bags of 64, and DLRM-v2's mixture; each with the kernel as it was
   (loads of 4 bytes, 1,024 elements) and with the settings of the sweep.
   floor: a plain copy of the same missed rows (bus) and of the same cached rows (HBM), each alone; whichever takes longer.
3. best settings, by the sum of times.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels import embedding, host_tables
from msplit.engines.cuda.kernels.embedding import Columns, Segment, Term, fill
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.kernels.launch import can_precompile, precompiling
from msplit.engines.cuda.ops.embedding import empty_outputs

WIDTH, TABLES = 128, 26  # --tables
HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]  # lookups of a row in DLRM-v2
SETTINGS = {  # name: (TILE, WARPS, MOST_BLOCK); None: the kernel as it was
    "old": None,
    "1024 w4 b1024": (1024, 4, 1024),
    "512 w4 b1024": (512, 4, 1024),
    "1024 w4 b2048": (1024, 4, 2048),
    "2048 w8 b2048": (2048, 8, 2048),
    "512 w2 b512": (512, 2, 512),
}
BEGIN = time.perf_counter()


def spent() -> float:
    return time.perf_counter() - BEGIN


@triton.jit
def copy_rows(addresses, out, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < count
    column = tl.arange(0, WIDTH)
    place = tl.load(addresses + row, mask=here, other=0).to(tl.pointer_type(tl.float32))[:, None] + column[None, :]
    if WIDE:
        place = tl.max_contiguous(tl.multiple_of(place, [1, 16]), [1, 4])
    values = tl.load(place, mask=here[:, None], other=0)
    tl.store(out + row[:, None].to(tl.int64) * WIDTH + column[None, :], values, mask=here[:, None])


def times_of(runs, turns):
    """µs of each of some functions, by turns, on the device's clock; on the CPU a turn by the host's."""
    gpu = DEVICE.type == "cuda"
    turns = turns if gpu else 1
    times = [[] for _ in runs]
    for _turn, (at, run) in itertools.product(range(turns), enumerate(runs)):
        if gpu:
            one, other = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            one.record()
            run()
            other.record()
            other.synchronize()
            times[at].append(one.elapsed_time(other) * 1e3)
        else:
            begin = time.perf_counter()
            run()
            times[at].append((time.perf_counter() - begin) * 1e6)
    return times


def timed(runs, turns=5):
    """Median µs of each of some functions."""
    return [statistics.median(one) for one in times_of(runs, turns)]


def graphed(run):
    """A run as a graph of one replay, after one that compiles and makes tables."""
    if DEVICE.type != "cuda":
        run()
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        run()
        graph.capture_end()
    torch.cuda.synchronize()
    graph.kept = run
    return graph.replay


def copier(addresses, out, wide=True, rows=16, warps=4):
    count = len(addresses)
    return lambda: (
        count
        and copy_rows[(-(-count // rows),)](addresses, out, count, ROWS=rows, WIDTH=WIDTH, WIDE=wide, num_warps=warps)
    )


def filled(gb: float, limit: float, by_driver: bool):
    """One block of memory with rows 0, 1, 2, ... in their first element, as many as can be touched in the time."""
    rows = int(gb * 1e9 / 4 / WIDTH) // TABLES * TABLES
    if by_driver:
        address = driver_memory(rows * WIDTH * 4)
        memory = np.ctypeslib.as_array((ctypes.c_byte * (rows * WIDTH * 4)).from_address(address))
        memory = memory.view(np.float32).reshape(rows, WIDTH)
        print(f"cuMemCreate after {spent():.1f} s")
    else:
        memory = np.empty((rows, WIDTH), np.float32)  # as the tables of msplit are
    block = np.random.default_rng(0).integers(-8, 8, (20_000, WIDTH)).astype(np.float32)
    begin, step, done = time.perf_counter(), max(rows // 64, 1), 0

    def part(first):
        if time.perf_counter() - begin > limit:
            return 0
        for at in range(first, min(first + step, rows), len(block)):
            here = memory[at : min(at + len(block), first + step, rows)]
            np.copyto(here, block[: len(here)])
            here[:, 0] = (np.arange(at, at + len(here)) & 0xFFFF).astype(np.float32)
        return min(step, rows - first)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for count in threads.map(part, range(0, rows, step)):
            if not count:
                break
            done += count
    done = done // TABLES * TABLES
    took = time.perf_counter() - begin
    print(f"{done * 512 / 1e9:.1f} GB written in {took:.1f} s, by {len(os.sched_getaffinity(0))} threads")
    return memory[:done], block


def pages() -> str:
    found = []
    for name in ("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/defrag"):
        try:
            found.append(Path(name).read_text().strip())
        except OSError as problem:
            found.append(str(problem))
    huge = 0
    try:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("AnonHugePages"):
                huge = int(line.split()[1]) * 1024
    except OSError:
        pass
    groups = len(list(Path("/sys/kernel/iommu_groups").glob("*"))) if Path("/sys/kernel/iommu_groups").exists() else 0
    return f"huge pages {' | '.join(found)}; {huge / 1e9:.1f} GB of this process are huge pages; IOMMU groups {groups}"


def driver_memory(size: int):
    """Address of memory of the host by cuMemCreate, mapped for the GPU and the CPU, whose pages are of 2 MiB where the driver has such."""
    from cuda.bindings import driver as cu

    def ok(result):
        if int(result[0]):
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) == 2 else result[1:]

    index = torch.cuda.current_device()
    node = ok(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, index))
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    prop.location.id = max(node, 0)
    unit = ok(
        cu.cuMemGetAllocationGranularity(prop, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
    )
    size = -(-size // unit) * unit
    handle = ok(cu.cuMemCreate(size, prop, 0))
    address = ok(cu.cuMemAddressReserve(size, unit, 0, 0))
    ok((*cu.cuMemMap(address, size, 0, handle, 0), None))
    for kind, number in (
        (cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index),
        (cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA, max(node, 0)),
    ):
        access = cu.CUmemAccessDesc()
        access.location.type, access.location.id = kind, number
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok((*cu.cuMemSetAccess(address, size, [access], 1), None))
    print(f"   cuMemCreate: granularity {unit / 2**20:g} MiB, node {node}")
    return int(address)


def part_a(memory, out, count: int, by_driver: bool) -> None:
    """Rates by span, load and kind of memory."""
    rng, total = np.random.default_rng(2), len(memory)
    spans = sorted({min(int(gb * 1e9 / 512), total) for gb in (0.03, 0.25, 1, 4, 8, 1e3)})

    def at_random(begin: int, span: int):
        return torch.from_numpy(begin + 512 * rng.integers(0, span, count)).to(DEVICE)

    print(f"\nA. {count:,} rows of 512 bytes at random, {count * 512 / 1e6:.1f} MB a run\n")
    print(
        "| memory | GB it is spread over | 16 bytes a thread, us | GB/s | rows/us | 4 bytes a thread, us | GB/s | in order, GB/s |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")

    def line(name: str, begin: int, span: int) -> None:
        found = at_random(begin, span)
        ordered = torch.sort(found).values
        chosen = min(count, span)
        follow = torch.arange(chosen, device=DEVICE) * 512 + begin
        runs = [copier(found, out), copier(found, out, wide=False), copier(follow, out), copier(ordered, out)]
        for run in runs:
            run()
        wide, narrow, after, by_address = timed(runs)
        size = count * 512 / 1e3
        print(
            f"| {name} | {span * 512 / 1e9:.2f} | {wide:,.0f} | {size / wide:.1f} | {count / wide:.0f} "
            f"| {narrow:,.0f} | {size / narrow:.1f} | "
            f"{chosen * 512 / 1e3 / after:.1f} (sorted by address: {size / by_address:.1f}) |",
            flush=True,
        )

    for span in spans:
        line("cuMemCreate" if by_driver else "np.empty, registered", memory.ctypes.data, span)
    if DEVICE.type != "cuda" or by_driver:
        return
    kept = []
    for name in ("cudaHostAlloc", "cuMemCreate"):
        if spent() > 40:
            print(f"| {name}: no time |")
            continue
        try:
            begin, size = time.perf_counter(), 8 << 30
            if name == "cudaHostAlloc":
                pointer = ctypes.c_void_p()
                status = host_tables.runtime().cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), 0)
                if status:
                    raise RuntimeError(f"error {status}")
                address = pointer.value
            else:
                address = driver_memory(size)
            assert address
            kept.append(address)
            view = np.ctypeslib.as_array((ctypes.c_byte * size).from_address(address)).view(np.float32)
            with ThreadPoolExecutor(16) as threads:
                list(
                    threads.map(
                        lambda at, view=view: np.copyto(view[at : at + (1 << 26)], 1.0), range(0, len(view), 1 << 26)
                    )
                )
            took = time.perf_counter() - begin
            for span in (1 << 30, size):
                line(f"{name} ({took:.1f} s)", address, span // 512)
            assert float(out[0, 0]) == 1.0
        except Exception as problem:
            print(f"| {name}: {type(problem).__name__}: {str(problem)[:160]} |")
    sys.stdout.flush()


def put(cache, rows) -> None:
    """Has a cache hold some rows."""
    slots = torch.arange(len(rows), device=rows.device)
    cache.slot_of.fill_(-1)
    cache.slot_of[rows] = slots.int()
    cache._row_of.fill_(-1)
    cache._row_of[slots] = rows.int()
    cache._copy(rows, slots)


AT_ONCE = embedding._Maker.at_once


def use(name: str) -> None:
    """Has kernels that are described from here on be made with a setting."""
    values = SETTINGS[name]
    embedding.TILE, embedding.WARPS, embedding.MOST_BLOCK = (1024, 4, 1024) if values is None else values
    embedding._Maker.at_once = (lambda *_: 1) if values is None else AT_ONCE


def columns_of(rows: int, counts) -> Columns:
    """A column of each table."""
    segments = tuple(
        Segment(0, WIDTH * at, WIDTH * TABLES, rows, WIDTH, (Term(2 * at, 2 * at + 1, step=count, count=count),))
        for at, count in enumerate(counts)
    )
    return Columns(segments, ((rows, WIDTH * TABLES),), "float32")


def part_b(memory, block, lookups: int, each: int, chosen) -> None:
    """The kernel."""
    tables = Device.of(DEVICE).owned(HostTables)
    size = len(memory) // TABLES
    host_tables._copied = lambda array: array  # the block is the tables' memory, pinned already
    host_tables.pin = lambda *_: None
    arrays = [memory[at * size : (at + 1) * size] for at in range(TABLES)]
    each = min(each, size // 2)
    hosted = tables.cached(arrays, TABLES * each)
    cache = tables.find(hosted[0]).cache
    stride = size // each
    there = torch.arange(each, device=DEVICE) * stride  # spread over each table
    put(cache, torch.cat([there + at * size for at in range(TABLES)]))
    rng = np.random.default_rng(3)
    shapes = {
        "1 id a row": (lookups, [1] * TABLES),
        "bags of 8": (max(lookups // 8, 1), [8] * TABLES),
        "bags of 64": (max(lookups // 64, 1), [64] * TABLES),
        "DLRM-v2": (max(lookups // 8, 1), HOT[-TABLES:]),
    }
    print(
        f"\nB. {TABLES} tables, {lookups:,} lookups of {WIDTH} floats in each; {size:,} rows each, {each:,} of them in the cache\n"
    )
    print(
        "| shape | found | MB over the bus | floor us: bus, HBM | "
        + " | ".join(chosen)
        + " | best | GB/s | of the floor: old, best |"
    )
    print("| --- | ---: | ---: | ---: |" + " ---: |" * (len(chosen) + 3))
    sums = dict.fromkeys(chosen, 0.0)
    plain_out = torch.empty((max(rows * sum(counts) for rows, counts in shapes.values()), WIDTH), device=DEVICE)
    if DEVICE.type == "cuda" and can_precompile():
        begin = time.perf_counter()
        with precompiling(20) as ahead, ahead.noting():
            for (rows, counts), name in itertools.product(shapes.values(), chosen):
                use(name)
                parts = torch.zeros(rows * sum(counts), dtype=torch.int32, device=DEVICE).split(
                    [rows * count for count in counts]
                )
                spec = columns_of(rows, counts)
                fill(
                    spec,
                    tuple(itertools.chain(*zip(parts, hosted, strict=True))),
                    empty_outputs(spec, DEVICE, "float32"),
                )
        print(f"compiled in {time.perf_counter() - begin:.1f} s\n")
    for (shape, (rows, counts)), share in itertools.product(shapes.items(), (1.0, 0.9, 0.5)):
        if DEVICE.type == "cuda" and spent() > 57:
            print("no time for more")
            break
        which = np.repeat(np.arange(TABLES), np.array(counts) * rows)  # the table of each lookup
        hit = rng.random(len(which)) < share
        ids = np.where(
            hit, rng.integers(0, each, len(hit)) * stride, rng.integers(0, size // stride, len(hit)) * stride
        )
        ids += np.where(hit, 0, 1 + rng.integers(0, stride - 1, len(hit)) if stride > 1 else 0)
        ids = np.minimum(ids, size - 1).astype(np.int32)
        cached = (ids % stride == 0) & (ids < each * stride)
        edges = np.cumsum(np.array(counts) * rows)[:-1]
        parts = torch.from_numpy(ids).to(DEVICE).split([rows * count for count in counts])
        given = tuple(itertools.chain(*zip(parts, hosted, strict=True)))
        by_table = [part.reshape(rows, count) for part, count in zip(np.split(ids, edges), counts, strict=True)]
        addresses = memory.ctypes.data + 512 * (ids.astype(np.int64) + which * size)
        missed = torch.from_numpy(addresses[~cached]).to(DEVICE)
        slots = ids.astype(np.int64) // stride + which * each
        held = torch.from_numpy(cache.rows.data_ptr() + 512 * slots[cached]).to(DEVICE)
        runs, names = [copier(missed, plain_out), copier(held, plain_out)], list[str]()
        for run in runs:
            run()
        wanted = None
        for name in chosen:
            use(name)
            spec = columns_of(rows, counts)
            (output,) = empty_outputs(spec, DEVICE, "float32")
            output.fill_(float("nan"))
            try:
                runs.append(graphed(lambda spec=spec, given=given, output=output: fill(spec, given, (output,))))
                runs[-1]()
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}")
                runs.append(lambda: None) if len(runs) < len(names) + 3 else None
            names.append(name)
            if wanted is None:
                some = rng.integers(0, rows, min(rows, 50))
                right = [memory[at * size + one[some]].sum(1, dtype=np.float64) for at, one in enumerate(by_table)]
                wanted = torch.from_numpy(some).to(DEVICE), np.stack(right, 1)
            result = output[wanted[0]].cpu().numpy().reshape(-1, TABLES, WIDTH)
            if not np.array_equal(result, wanted[1]):  # whole numbers: sums are the same in any order
                print(f"WRONG VALUES: {name}, {shape}, {share}")
            del output
        bus, memory_us, *times = timed(runs)
        bus = bus if len(missed) else 0.0
        for name, us in zip(names, times, strict=True):
            sums[name] += us
        floor, best = max(bus, memory_us), min(range(len(times)), key=times.__getitem__)
        size_mb = len(missed) * 512 / 1e6
        print(
            f"| {shape} | {100 * cached.mean():.0f} % | {size_mb:.1f} | {bus:,.0f}, {memory_us:,.0f} | "
            + " | ".join(f"{us:,.0f}" for us in times)
            + f" | {names[best]} | {size_mb * 1e3 / times[best]:.1f} | {100 * floor / times[0]:.0f} %, {100 * floor / times[best]:.0f} % |",
            flush=True,
        )
    print(
        "\nsum of all, us: "
        + ", ".join(f"{name} {us:,.0f}" for name, us in sorted(sums.items(), key=lambda one: one[1]))
    )


def main() -> None:
    global DEVICE, TABLES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gb", type=float, default=16)
    parser.add_argument("--lookups", type=int, default=16_384)
    parser.add_argument("--cached", type=int, default=60_000, help="rows of each table in the cache")
    parser.add_argument("--tables", type=int, default=TABLES)
    parser.add_argument("--settings", default="", help="names of SETTINGS, by commas")
    parser.add_argument(
        "--memory", choices=["registered", "driver"], default="registered", help="of the tables of part B"
    )
    parser.add_argument("--only", choices="ab", default="")
    options = parser.parse_args()
    DEVICE, TABLES = torch.device(options.device), options.tables
    chosen = options.settings.split(",") if options.settings else list(SETTINGS)
    if DEVICE.type == "cuda":
        DEVICE = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=DEVICE)
        print(torch.cuda.get_device_name(), torch.__version__, f"ready after {spent():.1f} s")
    by_driver = options.memory == "driver"
    memory, block = filled(options.gb, 12, by_driver)
    begin = time.perf_counter()
    if DEVICE.type == "cuda" and not by_driver:
        host_tables.pin(memory.reshape(-1).view(np.uint8), DEVICE)
    print(f"pinned in {time.perf_counter() - begin:.1f} s; {pages()}; {spent():.1f} s", flush=True)
    out = torch.empty((TABLES * options.lookups // 10 + 1, WIDTH), device=DEVICE)
    if options.only != "b":
        part_a(memory, out, len(out), by_driver)
    print(f"{spent():.1f} s")
    if options.only != "a":
        part_b(memory, block, options.lookups, options.cached, chosen)
    print(f"{spent():.1f} s")
    sys.stdout.flush()
    os._exit(0)  # nothing is unpinned piece by piece


if __name__ == "__main__":
    main()
