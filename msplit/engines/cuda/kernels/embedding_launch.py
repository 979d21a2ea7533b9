"""Launches the kernel of all columns: which memory its inputs lie in, and the tables that describe them to it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from msplit.engines.cuda.device.capture import is_capturing
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.kernels.embedding_tables import Columns, Place, Tables, describe
from msplit.engines.cuda.kernels.launch import Code, launch

_FILL = Code("columns", "fill_columns", specialized=False)


def _made(_: Device) -> weakref.WeakKeyDictionary[Columns, dict[tuple[object, ...], Tables]]:
    """The tables of one device, one for each way in which the inputs of columns were seen to lie."""
    return weakref.WeakKeyDictionary()


def fill(spec: Columns, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> bool:
    """Fills the outputs. Returns False, with nothing done, where it can not.

    The tables that describe the columns are made at the first call with inputs that lie as they do. In a capture there is no making
    them: then inputs that lie as none did before are first laid side by side, as they were when the graph was traced. Rows that are
    looked up in what the step itself computes (a table that was joined from parts) lie elsewhere in a capture: that can not be done.
    """
    if not spec.segments or not any(output.numel() for output in outputs):
        return True
    first = min(outputs, key=lambda output: output.storage_offset())
    slots = sorted({term.source for segment in spec.segments for term in segment.terms})
    sources = {slot: inputs[slot].contiguous() for slot in slots}
    cache = Device.of(first.device).owned(_made).setdefault(spec, {})
    shared, places = _lie(sources)
    tables = cache.get(_key(spec, inputs, _layout(sources, places)))
    if tables is None and is_capturing():
        shared, places = None, {}
        tables = cache.get(_key(spec, inputs, _layout(sources, places)))
    elif tables is None:
        for known in ({}, places):
            layout = _layout(sources, known)
            tables = cache[_key(spec, inputs, layout)] = describe(spec, inputs, outputs, layout)
    if tables is None:
        return False
    extra = _lay(sources, places)
    somewhere = shared if shared is not None else extra
    assert somewhere is not None
    other = extra if extra is not None else somewhere
    one, two = tables.tiles
    element = torch_dtype(spec.dtype)
    aligned = not any(tensor.data_ptr() % 16 for tensor in (first, somewhere, other))
    launch(_FILL, (sum(tables.programs),))(
        somewhere,
        other,
        first,
        tables.work,
        tables.plain,
        tables.segments,
        tables.terms,
        tables.boundaries,
        *tables.programs[:2],
        BLOCK=tables.block,
        VECTOR=tables.vector if aligned else 1,
        **one.constants(),
        **two.constants("2"),
        ELEMENT=element,
        BYTES=element.itemsize,
        OUT_BYTES=first.element_size(),
        SUM=torch.float64 if element == torch.float64 else torch.float32,
        **tables.flags,
    )
    return True


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
