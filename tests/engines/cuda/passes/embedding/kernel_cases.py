"""Random columns through the kernel and through the lowering without it: they must agree. A program of its own.

With TRITON_INTERPRET=1 on the CPU, and compiled where there is a GPU: Triton decides at import which.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import torch

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import embedding, host_tables
from msplit.engines.cuda.kernels.embedding import HIGHEST, LOWEST, Columns, Segment, Term, fill
from msplit.engines.cuda.kernels.host_tables import CachedTable, HostTables
from msplit.engines.cuda.ops import embedding as lowered
from msplit.engines.table_rows import BF16, INT8, is_rounded, rounded

WIDTHS = (1, 1, 3, 4, 8, 16, 33, 64, 130, 300)


def spec_of(chance: np.random.Generator, dtype: str, some_rows: list[int]) -> tuple[Columns, list[torch.Tensor]]:
    """A random mixture of columns, and its inputs: ids in one block of memory, tables, tensors that are copied."""
    rows = int(chance.choice(some_rows))
    inputs: list[torch.Tensor] = []
    segments = []
    left = 0
    kinds = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
    even = chance.random() < 0.3  # all can move by 16 bytes
    for _ in range(int(chance.integers(1, 6))):
        width = int(chance.choice([4, 8, 16, 64] if even else WIDTHS)) * (4 if even and dtype.endswith("16") else 1)
        terms = []
        combiner = str(chance.choice(["sum", "mean", "sqrtn"]))
        for _ in range(int(chance.choice([1, 1, 1, 2, 3, 40]))):
            if chance.random() < 0.2 and combiner == "sum":
                inputs.append(torch.from_numpy(chance.standard_normal((rows, width))).to(getattr(torch, dtype)))
                terms.append(Term(len(inputs) - 1, -1, step=width))
                continue
            if chance.random() < 0.2 and dtype == "float32":
                inputs.append(torch.from_numpy(chance.choice([np.nan, 0.5, -3.0], (rows, 3))).to(torch.float32))
                inputs.append(torch.from_numpy(chance.standard_normal((3, width))).to(torch.float32))
                terms.append(Term(len(inputs) - 2, len(inputs) - 1, first=1, step=3, low=2, high=2, weighted=True))
                continue
            count = int(chance.choice([1, 1, 2, 7, 20]))
            size = int(chance.choice([1, 5, 100]))
            kind = str(chance.choice(list(kinds)))
            edges = None
            if kind.startswith("float") or chance.random() < 0.2:
                edges = tuple(
                    float(np.float32(edge)) for edge in np.sort(chance.normal(size=int(chance.integers(0, 20))))
                )
            if kind.startswith("float"):
                values = chance.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, *chance.normal(size=20)], (rows, count))
                if edges:
                    values.flat[0] = edges[0]
            else:
                values = chance.integers(-3, size + 3, (rows, count))
                if kind == "int64":
                    values.flat[0] = 2**32 + 1
            inputs.append(torch.from_numpy(np.asarray(values)).to(kinds[kind]))
            table = torch.from_numpy(chance.standard_normal((size, width))).to(getattr(torch, dtype))
            if chance.random() < 0.3:
                table[0, 0] = float(chance.choice([np.nan, np.inf]))
            inputs.append(table)
            limited = chance.random() < 0.3
            terms.append(
                Term(
                    len(inputs) - 2,
                    len(inputs) - 1,
                    step=count,
                    count=count,
                    boundaries=edges,
                    narrow=kind == "int64" and bool(chance.random() < 0.5),
                    modulo=int(chance.choice([0, 0, 3])),
                    low=0 if limited else LOWEST,
                    high=size - 1 if limited else HIGHEST,
                    offset=int(chance.choice([0, 0, 1, -2])),
                    valid_from=int(chance.choice([LOWEST, 0])),
                )
            )
        scale = float(chance.choice([0.125, -3.0])) if chance.random() < 0.2 else None
        segments.append((left, rows, width, tuple(terms), combiner, scale))
        left += width
    placed = tuple(
        Segment(0, start, left, rows, width, terms, combiner, scale)
        for start, rows, width, terms, combiner, scale in segments
    )
    # The last column once more, as an output of its own.
    last = segments[-1]
    placed = (*placed, Segment(1, 0, last[2], rows, *last[2:]))
    return Columns(placed, ((rows, left), (rows, last[2])), dtype), inputs


def every_kind(chance: np.random.Generator, kind: str) -> tuple[Columns, list[torch.Tensor]]:
    """Columns of one row of a table, narrow and in pieces; bags in pieces; and a sum over tables; the tables for rows that are packed."""
    rows, inputs, segments, left = 3, list[torch.Tensor](), list[Segment](), 0

    def looked_up(width: int, count: int) -> Term:
        inputs.append(torch.from_numpy(chance.integers(0, 9, (rows, count))))
        inputs.append(
            torch.from_numpy(rounded("table", chance.standard_normal((9, width)).astype(np.float32), kind)[0])
        )
        return Term(len(inputs) - 2, len(inputs) - 1, step=count, count=count)

    for width, counts in ((8, (1,)), (300, (1,)), (130, (2,)), (16, (1, 2, 3))):
        terms = tuple(looked_up(width, count) for count in counts)
        segments.append(Segment(0, left, 470, rows, width, terms))
        left += width
    again = Segment(0, left, 470, rows, 16, segments[-1].terms)
    return Columns((*segments, again), ((rows, 470),), "float32"), inputs


def in_one_block(inputs: list[torch.Tensor], chosen: list[int]) -> list[torch.Tensor]:
    """The same tensors, some of them views of one block of memory, as a model's inputs are."""
    block = torch.zeros(
        sum(-(-inputs[slot].nbytes // 8) * 8 for slot in chosen), dtype=torch.uint8, device=inputs[0].device
    )
    result, at = list(inputs), 0
    for slot in chosen:
        tensor = inputs[slot]
        result[slot] = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        result[slot].copy_(tensor)
        at += -(-tensor.nbytes // 8) * 8
    return result


def in_host_memory(
    chance: np.random.Generator, spec: Columns, inputs: list[torch.Tensor], kind: str, share: float = 0.7
) -> list[torch.Tensor]:
    """The same tensors, some of the tables in the host's memory with a cache of some of their rows for each width."""
    result, device = list(inputs), inputs[0].device
    numbers = {
        term.table for segment in spec.segments for term in segment.terms if term.table >= 0 and not term.weighted
    }
    groups: dict[tuple[int, str], list[int]] = {}
    for number in sorted(numbers):
        if chance.random() < share:
            packs = kind if is_rounded(to_numpy(inputs[number]), kind) and chance.random() < share + 0.1 else ""
            groups.setdefault((inputs[number].shape[1], packs), []).append(number)
    for (_, packs), numbers in groups.items():
        arrays = [to_numpy(inputs[number]) for number in numbers]
        made = Device.of(device).owned(HostTables).cached(arrays, int(chance.choice([1, 3, 40])), packs)
        for number, tensor in zip(numbers, made, strict=True):
            result[number] = tensor
    return result


def with_rounded_rows(
    chance: np.random.Generator, spec: Columns, inputs: list[torch.Tensor], kind: str
) -> list[torch.Tensor]:
    """The same tensors, the rows of some tables of float32 as int8 with a scale, or bf16, can have them."""
    result = list(inputs)
    for number in sorted({term.table for segment in spec.segments for term in segment.terms if term.table >= 0}):
        table = inputs[number]
        finite = kind == BF16 or table.isfinite().all()
        if table.dtype == torch.float32 and finite and chance.random() < 0.6:
            result[number] = torch.from_numpy(rounded("table", table.numpy(), kind)[0])
    return result


def lookups_of(spec: Columns, inputs: list[torch.Tensor], places: dict[int, CachedTable]) -> tuple[int, int]:
    """Rows that a step looks up in tables of the host's memory and finds in their caches, and those that it does not find: a column that is
    read twice, or in pieces, counts once."""
    terms = {id(term): (term, segment) for segment in spec.segments for term in segment.terms}
    found = total = 0
    for term, segment in terms.values():
        if term.table in places and not term.weighted:
            source, place = inputs[term.source].contiguous().reshape(-1), places[term.table]
            ids = lowered._ids(term, torch.as_strided(source, (segment.rows, term.count), (term.step, 1), term.first))
            ids = ids[(ids >= max(term.valid_from, 0)) & (ids < len(inputs[term.table]))]
            found += int((place.cache.slot_of.cpu()[place.first + ids] >= 0).sum())
            total += ids.numel()
    return found, total - found


def expected_of(spec: Columns, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """By the lowering without a kernel, ids out of range standing for zeros as on the GPU; half precision summed in float32, as there."""
    lowered.take = zeros_outside
    if spec.dtype.endswith("16"):
        half = getattr(torch, spec.dtype)
        spec, inputs = replace(spec, dtype="float32"), [one.float() if one.dtype == half else one for one in inputs]
    return lowered.columns(Node("columns", "_Columns", {"columns": spec}), *inputs)


def zeros_outside(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A gather."""
    inside = (ids >= 0) & (ids < table.shape[0])
    return torch.where(inside.unsqueeze(-1), table[ids.clamp(0, table.shape[0] - 1)], 0)


def main() -> None:
    """Prints how many were tried."""
    device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
    chance = np.random.default_rng(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    tries = int(sys.argv[1])
    interpreted, hits, packed = device.type == "cpu", 0, set[str]()
    if interpreted:
        host_tables.can_launch = lambda _: True
    host_tables._EVERY, host_tables._NOTES, host_tables._NOTES_OF_CPU = 1, 1 << 12, 1 << 12
    for number in range(tries):
        dtype = str(chance.choice(["float32", "float64", "float16", "bfloat16"]))
        # Fewer programs, of larger tiles, and fewer rows where each takes an interpreter milliseconds.
        embedding.PROGRAMS = 1 if interpreted else int(chance.choice([1, 264, 10_000]))
        kind = (INT8, BF16)[number % 2]
        if number > 1:
            spec, inputs = spec_of(chance, dtype, [1, 2, 5] if interpreted else [1, 2, 5, 64, 100])
            inputs, share = with_rounded_rows(chance, spec, inputs, kind), 0.7
        else:
            (spec, inputs), share, dtype = every_kind(chance, kind), 1.0, "float32"
        expected = expected_of(spec, inputs)
        result = str(chance.choice([dtype, "float16", "bfloat16"])) if dtype == "float32" else dtype
        sources = sorted({term.source for segment in spec.segments for term in segment.terms})
        tables = Device.of(device).owned(HostTables)
        for shared in ([], sources, sources[1:]):
            given = in_one_block([tensor.to(device) for tensor in inputs], shared)
            given = in_host_memory(chance, spec, given, kind, share) if shared or interpreted else given
            places = {number: place for number, one in enumerate(given) if (place := tables.find(one)) is not None}
            steps = 3 if places else 2
            expected_counts = [0, 0]
            for _ in range(steps):
                if not interpreted:
                    torch.cuda.synchronize()  # a refresh may be on its way
                more = lookups_of(spec, inputs, places)
                expected_counts = [one + other for one, other in zip(expected_counts, more, strict=True)]
                outputs = lowered.empty_outputs(spec, device, result)
                with tables.step(None if interpreted else torch.cuda.current_stream()):
                    fill(spec, tuple(given), outputs)
                for output, right in zip(outputs, expected, strict=True):
                    tolerance = {"float32": 1e-5, "float64": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}[result]
                    wide = {"rtol": tolerance, "atol": tolerance * 3, "equal_nan": True}
                    assert torch.allclose(output.cpu().to(right.dtype), right, **wide), f"{spec}\n{output}\n{right}"
            if not interpreted:
                torch.cuda.synchronize()
            counts = [
                cache.counter()() for cache in {id(place.cache): place.cache for place in places.values()}.values()
            ]
            told = [sum(one[at] for one in counts) for at in range(2)]
            assert told == expected_counts, f"{spec}\n{counts} {expected_counts}"
            hits += told[0]
            packed |= {place.packed for place in places.values()}
    assert hits, "no row was found in a cache"
    assert packed >= {INT8, BF16}, "no rows were packed"
    sys.stdout.write(f"{tries} agree\n")


if __name__ == "__main__":
    main()
