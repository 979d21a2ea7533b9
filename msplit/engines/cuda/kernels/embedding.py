"""Lookups of all embedding columns of a model by one kernel: its work as plain data, the tables that describe it, and its launch.

The kernel fills outputs, each a tensor in row-major order. A *segment* is a rectangle of one output: a column's part of every row. What
stands in it is a sum of *terms* (or their mean), and a term is, for each row, the rows of one table at the row's ids, or
the row of a tensor as it is.

Tables tell the kernel which program does what, and where each column's values come from and go. Columns that take one row of one table,
or of a tensor, as it is are *plain*. The others are *summed*, in tiles of at most two shapes, so that a sum over many columns of one
element and bags of wide rows each get a tile that they fill.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.device.capture import is_capturing
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.kernels.host_tables import HostTables, RowCache
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.memory import Place, lay, layout, lie
from msplit.engines.cuda.kernels.tiles import power_of_two
from msplit.engines.table_rows import ROWS, words_of
from msplit.errors import EngineError

COMBINERS = ("sum", "mean", "sqrtn")
LOWEST, HIGHEST = -(2**62), 2**62


@dataclass(frozen=True)
class Term:
    """Addend of one source to the rows of a segment.

    The id of a value v is ``min(max(bucket(v) mod modulo, low), high) + offset``; without boundaries ``bucket(v)`` is v.

    Attributes:
        source: Input with the values that become ids, or with the rows that are copied.
        table: Input with the rows that are looked up; -1 copies the source's.
        first: Element of the source that belongs to row 0.
        step: Elements of the source from row to row.
        count: Ids of a row; 1 where rows are copied.
        boundaries: Ascending numbers; the bucket of a value is how many of them are not above it. None: the value is the id.
        narrow: Whether 64-bit values lose their upper half first.
        modulo: See above; 0 leaves the number as it is. The result has the divisor's sign.
        low: See above.
        high: See above.
        offset: See above.
        valid_from: Ids below it count for nothing (`LOWEST`: all count). Any other id that the table does not have stands for zeros.
        weighted: The source has no ids: it is of the table's type, and its value times row `low` of the table is what is added.
    """

    source: int
    table: int
    first: int = 0
    step: int = 1
    count: int = 1
    boundaries: tuple[float, ...] | None = None
    narrow: bool = False
    modulo: int = 0
    low: int = LOWEST
    high: int = HIGHEST
    offset: int = 0
    valid_from: int = LOWEST
    weighted: bool = False

    @property
    def limited(self) -> bool:
        """True if ids are narrowed, clamped or moved, or some that the table has are left out."""
        return self.narrow or (self.low, self.high, self.offset) != (LOWEST, HIGHEST, 0) or self.valid_from > 0


@dataclass(frozen=True)
class Segment:
    """A column's part of an output.

    Attributes:
        output: Port.
        start: Element of the output where row 0 begins.
        step: Elements of the output from row to row.
        rows: How many rows.
        width: Elements of a row that are this column's.
        terms: What stands there.
        combiner: Of `COMBINERS`. The mean is over the ids that count, sqrtn the sum over the root of how many count; none gives 0.
        scale: What that is multiplied by, rounded before and after; None leaves it as it is.
    """

    output: int
    start: int
    step: int
    rows: int
    width: int
    terms: tuple[Term, ...]
    combiner: str = "sum"
    scale: float | None = None

    def moved(self, start: int, step: int) -> Segment:
        """Copy of the segment elsewhere in the output."""
        return replace(self, start=start, step=step)


@dataclass(frozen=True, eq=False)
class Columns:
    """All columns of one stage.

    Attributes:
        segments: They fill the outputs and do not overlap.
        outputs: Shape of each output.
        dtype: Type of tables and copied rows, and of outputs that have no other.
    """

    segments: tuple[Segment, ...]
    outputs: tuple[tuple[int, ...], ...]
    dtype: str

    @property
    def lookups(self) -> int:
        """How many terms look rows up."""
        return sum(term.table >= 0 for segment in self.segments for term in segment.terms)

    @property
    def rows_of_tables(self) -> Mapping[int, int]:
        """Input with a table -> how many of its rows are read, those that are read twice counted twice."""
        found = Counter[int]()
        for segment in self.segments:
            for term in segment.terms:
                found[term.table] += 1 if term.weighted else segment.rows * term.count
        del found[-1]
        return found


KINDS = {torch.int32: 1, torch.int64: 2, torch.float32: 3, torch.float64: 4}
COPY, WEIGHT = 0, 5

WIDEST = 128
"""Elements of a summed column's row that one program does; the rest of a longer one is another piece."""
WIDEST_PLAIN = 256

TILE = 1024
"""Loads of a tile: eight for each of a program's 128 threads, so that registers hold what they bring and what it takes to find it. Each
brings 16 bytes where rows lie at multiples of that, else an element: all rows of a tile are on their way at once."""
WARPS = 4
LOADS = TILE // (32 * WARPS)
"""Loads of a thread."""
LEAST_TILE = 256
MOST_IDS = 64
MOST_BLOCK = 1024
LEAST_BLOCK = 256
PROGRAMS = 264
"""So many, twice the processors of an H200, are had before a program gets more than the least."""

_VECTOR_BYTES = 16


@dataclass(frozen=True)
class SumTile:
    """The shape of what one program sums.

    Attributes:
        rows: A power of two, as all three are; 0 where nothing is summed.
        ids: Ids of a row at a time.
        width: Elements of a row.
        single: True if every column has one term.
        at_once: Elements of 16 bytes where all rows that are read lie at multiples of that; else 1.
        stored: As many where those that are written lie at multiples of so many in the outputs; else 1.
    """

    rows: int = 0
    ids: int = 1
    width: int = 1
    single: bool = True
    at_once: int = 1
    stored: int = 1

    def constants(self, ending: str = "") -> dict[str, int]:
        """Constants of the kernel, whose names are those of the fields in capitals, with an ending."""
        return {f"{name.upper()}{ending}": value for name, value in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables that the kernel reads about its columns, on the device.

    Attributes:
        work: Per program its column and its first row, int32: programs of the first tile, then of the second, then of plain columns.
        plain: Per plain column 32 numbers.
        segments: Per summed column 12 numbers.
        terms: Per term of those 24 numbers.
        boundaries: Of all buckets, float32.
        programs: How many there are of each.
        tiles: Two.
        block: Elements that a program of a plain column fills; 0 where there are none.
        vector: Elements of 16 bytes, or fewer where plain columns do not lie at multiples of that.
        flags: Constants of the kernel, which leaves out what no column needs. See `code.columns.fill_columns`.
        caches: Those of tables in the host's memory, which are kept as long as these tables are.
    """

    work: Tensor
    plain: Tensor
    segments: Tensor
    terms: Tensor
    boundaries: Tensor
    programs: tuple[int, int, int]
    tiles: tuple[SumTile, SumTile]
    block: int
    vector: int
    flags: Mapping[str, int]
    caches: tuple[RowCache, ...]


@dataclass(frozen=True)
class _Piece:
    """Neighbouring elements of a segment's rows, from `left` on."""

    segment: Segment
    left: int
    width: int

    @property
    def most(self) -> int:
        """Ids of a row that its terms have at most."""
        return max(term.count for term in self.segment.terms)

    @property
    def ids(self) -> int:
        """Ids of a row, of all terms."""
        return self.most * len(self.segment.terms)


def is_plain(segment: Segment) -> bool:
    """True if a segment is one row of something per row. (The mean of one is that one.)"""
    term = segment.terms[0]
    return len(segment.terms) == 1 and term.count == 1 and term.boundaries is None and not term.modulo


def describe(spec: Columns, inputs: Sequence[Tensor], outputs: Sequence[Tensor], places: Mapping[int, Place]) -> Tables:
    """The tables of columns whose inputs lie as they do.

    Args:
        spec: The columns.
        inputs: Where lookup tables lie, and every input's type.
        outputs: Views of one block.
        places: Of every source.
    """
    maker = _Maker(inputs, outputs, places, torch_dtype(spec.dtype).itemsize, spec.lookups)
    plain = [piece for segment in spec.segments if is_plain(segment) for piece in _pieces(segment, WIDEST_PLAIN)]
    summed = [piece for segment in spec.segments if not is_plain(segment) for piece in _pieces(segment, WIDEST)]
    work: list[np.ndarray] = []
    programs, tiles = [], []
    segments: list[list[int]] = []
    for members in divide(summed):
        first = len(maker.terms)
        columns = [maker.summed(piece) for piece in members]
        tile = tile_of(members, maker.at_once(members, first))
        if not any(number % tile.at_once for column in columns for number in column[:2]):
            tile = replace(tile, stored=tile.at_once)
        blocks = [_work(len(segments) + at, piece.segment.rows, tile.rows) for at, piece in enumerate(members)]
        segments += columns
        work += blocks
        programs.append(sum(map(len, blocks)))
        tiles.append(tile)
    rows = [maker.plain(piece) for piece in plain]
    vector = maker.vector(plain)
    block = _block(plain)
    blocks = [_work(at, piece.segment.rows, block // piece.width) for at, piece in enumerate(plain)]
    device = outputs[0].device

    def numbers(rows: list[list[int]], width: int) -> Tensor:
        return torch.tensor(rows or [[0] * width], dtype=torch.int64).to(device)

    return Tables(
        torch.from_numpy(np.concatenate([*work, *blocks])).to(device),
        numbers(rows, 32),
        numbers(segments, 12),
        numbers(maker.terms, 24),
        torch.from_numpy(np.asarray([*maker.edges, 0.0], np.float32)).to(device),
        (programs[0], programs[1], sum(map(len, blocks))),
        (tiles[0], tiles[1]),
        block,
        vector,
        _flags(spec, inputs, maker),
        tuple(maker.caches.values()),
    )


def _flags(spec: Columns, inputs: Sequence[Tensor], maker: _Maker) -> dict[str, int]:
    """Constants that say what any column needs."""
    terms = [term for segment in spec.segments for term in segment.terms]
    kinds = {inputs[term.source].dtype for term in terms if term.table >= 0 and not term.weighted}
    return {
        "SHORT": torch.int32 in kinds,
        "LONG": torch.int64 in kinds,
        "FLOAT": torch.float32 in kinds,
        "DOUBLE": torch.float64 in kinds,
        "EDGES": bool(maker.starts),
        "MODULO": any(term.modulo for term in terms),
        "LIMITED": any(term.limited for term in terms),
        "MEANS": any(segment.combiner != "sum" for segment in spec.segments),
        "WEIGHTED": any(term.weighted for term in terms),
        "SCALED": any(segment.scale is not None for segment in spec.segments),
        "CACHED": bool(maker.caches),
        "PACKED": maker.packs,
    }


def _pieces(segment: Segment, widest: int) -> list[_Piece]:
    return [_Piece(segment, left, min(widest, segment.width - left)) for left in range(0, segment.width, widest)]


def _work(column: int, rows: int, at_once: int) -> np.ndarray:
    first = np.arange(0, rows, at_once, dtype=np.int32)
    return np.stack([np.full_like(first, column), first], 1)


def divide(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Summed columns in two parts, which each get a tile of their own, so that the fewest elements of tiles are left empty. Those with most
    ids come first: others have something to do while they wait for the host's memory."""
    pieces = sorted(pieces, key=lambda piece: -piece.ids)
    most = [LOADS if len(piece.segment.terms) == 1 else MOST_IDS for piece in pieces]
    shapes = [(power_of_two(one.width), power_of_two(min(one.ids, n))) for one, n in zip(pieces, most, strict=True)]
    work = dict.fromkeys(shapes, 0)
    for shape, piece in zip(shapes, pieces, strict=True):
        work[shape] += piece.segment.rows
    best: tuple[float, set[tuple[int, int]]] | None = None
    for order in (sorted(work), sorted(work, key=lambda shape: (shape[1], shape[0]))):
        for cut in range(1, len(order) + 1):
            cost = sum(_cost(part, work) for part in (order[:cut], order[cut:]) if part)
            if best is None or cost < best[0]:
                best = cost, set(order[:cut])
    first = best[1] if best is not None else set()
    halves: list[list[_Piece]] = [[], []]
    for shape, piece in zip(shapes, pieces, strict=True):
        halves[shape not in first].append(piece)
    return sorted(halves, key=lambda part: -part[0].ids if part else 0)


def _cost(shapes: Sequence[tuple[int, int]], rows: Mapping[tuple[int, int], int]) -> float:
    """Elements of the tiles that some shapes would share, with some for a tile's sake."""
    width, ids = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    return sum(rows[shape] for shape in shapes) * width * ids


def tile_of(pieces: Sequence[_Piece], at_once: int = 1) -> SumTile:
    """The tile for some summed columns, of which so many elements lie together at multiples of 16 bytes."""
    if not pieces:
        return SumTile()

    def programs(rows: int) -> int:
        return sum(-(-piece.segment.rows // rows) for piece in pieces)

    single = all(len(piece.segment.terms) == 1 for piece in pieces)
    width = power_of_two(max(piece.width for piece in pieces))
    ids = min(power_of_two(max(piece.ids for piece in pieces)), MOST_IDS, max(TILE * at_once // width, 1))
    rows = max(TILE * at_once // (width * ids), 1)
    # Warps that share a row wait for each other: where there are rows enough, each has rows of its own, and some of the ids at a time.
    while single and ids > LOADS and programs(2 * rows) >= 2 * PROGRAMS:
        rows, ids = 2 * rows, ids // 2
    while rows // 2 * width * ids >= LEAST_TILE and programs(rows) < PROGRAMS:
        rows //= 2
    rows = min(rows, power_of_two(max(piece.segment.rows for piece in pieces)))
    return SumTile(rows, ids, width, single, at_once)


def _block(pieces: Sequence[_Piece]) -> int:
    if not pieces:
        return 0
    block = MOST_BLOCK
    while block > LEAST_BLOCK and sum(-(-piece.segment.rows * piece.width // block) for piece in pieces) < PROGRAMS:
        block //= 2
    return block


def _scale(segment: Segment) -> int:
    """The bits of a segment's scale."""
    return int(np.float64(1.0 if segment.scale is None else segment.scale).view(np.int64))


class _Maker:
    """Makes the rows of the tables.

    Args:
        size: Bytes of an element of what is read.
        lookups: How many terms look rows up.

    Attributes:
        terms: Rows of the terms of summed columns.
        edges: All boundaries.
        starts: Where those of a term begin.
        caches: Those of tables in the host's memory.
        packs: How rows of any are packed: 1 for int8, 2 for bf16 (bytes of an element), 0 where none are.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        places: Mapping[int, Place],
        size: int,
        lookups: int,
    ) -> None:
        self._inputs, self._places, self._lookups = inputs, places, lookups
        origin = min(output.storage_offset() for output in outputs)
        self._begin = [int(output.storage_offset() - origin) for output in outputs]
        self._bytes, self._vector = size, max(_VECTOR_BYTES // size, 1)
        self.terms: list[list[int]] = []
        self.edges: list[float] = []
        self.starts: dict[tuple[float, ...], int] = {}
        self.caches: dict[int, RowCache] = {}
        self._noted = set[int]()
        self.packs = 0

    def plain(self, piece: _Piece) -> list[int]:
        """A plain column."""
        segment = piece.segment
        term = self._term(segment, segment.terms[0])
        kind, distance, table, size, stride = term[:5]
        skipped = piece.left * self._bytes
        row, scale = segment.width * self._bytes, term[23]
        if kind == COPY:
            distance += skipped
        else:
            if scale:
                row, skipped = scale + 4, piece.left * self.packs
                term[23] -= piece.left
            table += skipped
            term[17] += skipped if term[16] else 0
        where = [self._start(piece), segment.step, segment.rows, piece.width]
        last = [row, _scale(segment), 0, *term[16:], *(0,) * 6]
        return [*where, kind, distance, table, size, stride, term[9], *term[11:16], *last]

    def summed(self, piece: _Piece) -> list[int]:
        """A summed column; adds its terms."""
        segment = piece.segment
        first = len(self.terms)
        self.terms += [self._term(segment, term) for term in segment.terms]
        halvings = max(len(term.boundaries or ()).bit_length() for term in segment.terms)
        where = [self._start(piece), segment.step, segment.rows, piece.width]
        what = [first, len(segment.terms), COMBINERS.index(segment.combiner), piece.most, halvings]
        return [*where, *what, segment.width, piece.left, _scale(segment)]

    def at_once(self, pieces: Sequence[_Piece], first: int) -> int:
        """Elements that a load of summed columns brings, by where the rows lie that their terms, from one on, read."""
        numbers = [piece.segment.width * self._bytes for piece in pieces]
        for kind, distance, table, _, stride, *_ in self.terms[first:]:
            numbers += [distance, stride * self._bytes] if kind == COPY else [table]
        return 1 if any(number % _VECTOR_BYTES for number in numbers) else self._vector

    def vector(self, pieces: Sequence[_Piece]) -> int:
        """Elements that plain columns can move at once, by where they lie."""
        return self._vector if all(self._aligned(piece, self._vector) for piece in pieces) else 1

    def _aligned(self, piece: _Piece, vector: int) -> bool:
        row = self.plain(piece)
        kind, distance, table, stride = row[4], row[5], row[6], row[8]
        elements = [row[0], row[3], *([row[1]] if row[2] > 1 else [])]
        if kind == COPY:
            elements += [stride] if row[2] > 1 else []
            return not any(number % vector for number in elements) and distance % (vector * self._bytes) == 0
        at_once = vector * self._bytes
        return not any(number % vector for number in elements) and not (row[15] % at_once or table % at_once)

    def _start(self, piece: _Piece) -> int:
        return self._begin[piece.segment.output] + piece.segment.start + piece.left

    def _cached(self, segment: Segment, term: Term) -> list[int]:
        """A lookup's way to the cache of its table, as `code.columns` has it; zeros where there is none."""
        table = self._inputs[max(term.table, 0)]
        place = Device.of(table.device).owned(HostTables).find(table) if term.table >= 0 else None
        if place is None or term.weighted:
            return [0] * 8
        cache = place.cache
        packs = 1 + [*ROWS].index(place.packed) if place.packed else 0
        mixed = packs and self.packs not in (0, packs)
        if mixed or (packs and 4 * words_of(segment.width, place.packed) > cache.row_bytes):
            raise EngineError("a table has narrower rows than are read", fix="build it anew, with --force")
        self.caches[id(cache)] = cache
        places, notes = cache.slot_of.data_ptr() + 4 * place.first, [0, 0]
        # Of pieces of a row, and of columns that are read twice, one counts and notes what is looked up.
        if id(term) not in self._noted:
            self._noted.add(id(term))
            begin, count = cache.region(segment.rows * term.count, self._lookups)
            notes = [cache.notes.data_ptr() + 4 * begin, count]
        tally = cache.tally.data_ptr()
        self.packs |= packs
        scale = cache.row_bytes - 4 if packs else 0  # of int8; its being there is what counts of bf16
        return [places, cache.rows.data_ptr(), cache.recent.data_ptr(), place.first, *notes, tally, scale]

    def _term(self, segment: Segment, term: Term) -> list[int]:
        width = segment.width
        source = self._inputs[term.source]
        other, distance = self._places[term.source]
        table = self._inputs[term.table] if term.table >= 0 else None
        edges, cached = term.boundaries, self._cached(segment, term)
        if edges is not None and edges not in self.starts:
            self.starts[edges] = len(self.edges)
            self.edges.extend(edges)
        return [
            COPY if table is None else WEIGHT if term.weighted else KINDS[source.dtype],
            distance + term.first * source.element_size(),
            0 if table is None else table.data_ptr(),
            0 if table is None else table.numel() // max(width, 1) if not cached[-1] else len(table),
            term.step,
            term.count,
            0 if edges is None else self.starts[edges],
            -1 if edges is None else len(edges),
            0,
            int(term.narrow),
            term.modulo,
            term.low,
            term.high,
            term.offset,
            term.valid_from,
            other,
            *cached,
        ]


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
    shared, places = lie(sources)
    tables = cache.get(_key(spec, inputs, layout(sources, places)))
    if tables is None and is_capturing():
        shared, places = None, {}
        tables = cache.get(_key(spec, inputs, layout(sources, places)))
    elif tables is None:
        for known in ({}, places):
            found = layout(sources, known)
            tables = cache[_key(spec, inputs, found)] = describe(spec, inputs, outputs, found)
    if tables is None:
        return False
    extra = lay(sources, places)
    somewhere = shared if shared is not None else extra
    assert somewhere is not None
    other = extra if extra is not None else somewhere
    element = torch_dtype(spec.dtype)
    aligned = not any(tensor.data_ptr() % 16 for tensor in (first, somewhere, other))
    one, two = (tile if aligned else replace(tile, at_once=1, stored=1) for tile in tables.tiles)
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
        num_warps=WARPS,
    )
    return True


def _key(spec: Columns, inputs: tuple[Tensor, ...], places: dict[int, Place]) -> tuple[object, ...]:
    tables = {term.table for segment in spec.segments for term in segment.terms if term.table >= 0}
    return (tuple(sorted(places.items())), tuple(inputs[slot].data_ptr() for slot in sorted(tables)))
