"""Launches the kernel of all columns: which memory its inputs lie in, and the tables that describe them to it. Needs Triton."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from msplit.engines.cuda.columns.kernel import fill_columns
from msplit.engines.cuda.columns.spec import COMBINERS, Columns, Term

_KINDS = {torch.int32: 1, torch.int64: 2, torch.float32: 3, torch.float64: 4}
_COPY = 0
_WIDEST = 128
_ELEMENTS = 512
"""Elements of an output that a program fills, about."""

Place = tuple[int, int]
"""Where an input lies: 0 for the shared block or 1 for the extra one, and the distance from its start in bytes."""


@dataclass(frozen=True, eq=False)
class _Tables:
    """What the kernel reads about its columns, on the device."""

    segments: Tensor
    terms: Tensor
    boundaries: Tensor
    edges: bool
    modulo: bool


_made: weakref.WeakKeyDictionary[Columns, dict[tuple[object, ...], _Tables]] = weakref.WeakKeyDictionary()


def fill(spec: Columns, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Fills the outputs.

    The tables that describe the columns are made at the first call with inputs that lie as they do. In a capture there is no making
    them: then inputs that lie as none did before are first laid side by side, as they were when the graph was traced.
    """
    if not spec.segments or not any(output.numel() for output in outputs):
        return
    first = min(outputs, key=lambda output: output.storage_offset())
    slots = sorted({term.source for segment in spec.segments for term in segment.terms})
    sources = {slot: inputs[slot].contiguous() for slot in slots}
    cache = _made.setdefault(spec, {})
    shared, places = _lie(sources)
    tables = cache.get(_key(spec, inputs, _layout(sources, places)))
    if tables is None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        shared, places = None, {}
        tables = cache.get(_key(spec, inputs, _layout(sources, places)))
    elif tables is None:
        for known in ({}, places):
            layout = _layout(sources, known)
            tables = cache[_key(spec, inputs, layout)] = _describe(spec, inputs, outputs, layout)
    assert tables is not None, "the columns were never run before they were captured"
    extra = _lay(sources, places)
    rows = max(segment.rows for segment in spec.segments)
    width = min(triton.next_power_of_2(max(segment.width for segment in spec.segments)), _WIDEST)
    block = min(triton.next_power_of_2(rows), max(_ELEMENTS // width, 1))
    blocks = triton.cdiv(rows, block)
    wide = {torch.float64: triton.language.float64}
    somewhere = shared if shared is not None else extra
    fill_columns[(len(spec.segments) * blocks,)](
        somewhere,
        extra if extra is not None else somewhere,
        first,
        tables.segments,
        tables.terms,
        tables.boundaries,
        blocks,
        ROWS=block,
        WIDTH=width,
        SUM=wide.get(first.dtype, triton.language.float32),
        EDGES=tables.edges,
        MODULO=tables.modulo,
    )


def _lie(sources: dict[int, Tensor]) -> tuple[Tensor | None, dict[int, Place]]:
    """The memory that most of the inputs share, from its start, and where in it they lie; nothing where none share any."""
    blocks: dict[int, list[int]] = {}
    for slot, tensor in sources.items():
        blocks.setdefault(tensor.untyped_storage().data_ptr(), []).append(slot)
    members = max(blocks.values(), key=len)
    if len(members) < 2:
        return None, {}
    storage = sources[members[0]].untyped_storage()
    block = torch.empty(0, dtype=torch.int8, device=sources[members[0]].device).set_(storage)
    return block, {slot: (0, sources[slot].storage_offset() * sources[slot].element_size()) for slot in members}


def _rest(sources: dict[int, Tensor], places: dict[int, Place]) -> list[int]:
    """Inputs that do not lie in the shared block, those of large elements first so that all are aligned."""
    return sorted(
        (slot for slot in sources if places.get(slot, (1, 0))[0]), key=lambda slot: -sources[slot].element_size()
    )


def _layout(sources: dict[int, Tensor], places: dict[int, Place]) -> dict[int, Place]:
    """The places of all inputs, given those in the shared block; `_lay` puts the others there."""
    result, end = dict(places), 0
    for slot in _rest(sources, places):
        result[slot] = (1, end)
        end += sources[slot].numel() * sources[slot].element_size()
    return result


def _lay(sources: dict[int, Tensor], places: dict[int, Place]) -> Tensor | None:
    """The memory of the inputs that do not share any: that of the only one, or else copies side by side."""
    flat = [sources[slot].reshape(-1).view(torch.int8) for slot in _rest(sources, places)]
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _key(spec: Columns, inputs: tuple[Tensor, ...], places: dict[int, Place]) -> tuple[object, ...]:
    tables = {term.table for segment in spec.segments for term in segment.terms if term.table >= 0}
    return (tuple(sorted(places.items())), tuple(inputs[slot].data_ptr() for slot in sorted(tables)))


def _describe(
    spec: Columns, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], places: dict[int, Place]
) -> _Tables:
    origin = min(output.storage_offset() for output in outputs)
    starts: dict[tuple[float, ...], int] = {}
    edges: list[float] = []
    segments: list[list[int]] = []
    terms: list[list[int]] = []
    for segment in spec.segments:
        begin = outputs[segment.output].storage_offset() - origin + segment.start
        last = len(terms) + len(segment.terms)
        combiner = COMBINERS.index(segment.combiner)
        segments.append([begin, segment.step, segment.rows, segment.width, len(terms), last, combiner, 0])
        for term in segment.terms:
            if term.boundaries is not None and term.boundaries not in starts:
                starts[term.boundaries] = len(edges)
                edges.extend(term.boundaries)
            terms.append(_term(term, segment.width, inputs, places, starts))
    device = outputs[0].device
    return _Tables(
        torch.tensor(segments, dtype=torch.int64).to(device),
        torch.tensor(terms, dtype=torch.int64).to(device),
        torch.from_numpy(np.asarray([*edges, 0.0], np.float32)).to(device),
        bool(starts),
        any(term.modulo for segment in spec.segments for term in segment.terms),
    )


def _term(
    term: Term,
    width: int,
    inputs: tuple[Tensor, ...],
    places: dict[int, Place],
    starts: dict[tuple[float, ...], int],
) -> list[int]:
    source = inputs[term.source]
    block, distance = places[term.source]
    table = inputs[term.table] if term.table >= 0 else None
    edges = term.boundaries
    return [
        _COPY if table is None else _KINDS[source.dtype],
        distance + term.first * source.element_size(),
        0 if table is None else table.data_ptr(),
        0 if table is None else table.numel() // max(width, 1),
        term.step,
        term.count,
        0 if edges is None else starts[edges],
        -1 if edges is None else len(edges),
        0 if edges is None else len(edges).bit_length(),
        int(term.narrow),
        term.modulo,
        term.low,
        term.high,
        term.offset,
        term.valid_from,
        block,
    ]
