"""How the work of all columns is cut: every element once, in tiles that fit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.kernels import embedding
from msplit.engines.cuda.kernels.embedding import Columns, Segment, Term
from msplit.engines.cuda.ops.embedding import empty_outputs
from tests.campaign import examples

BUCKETS = (0.5, 1.5)


@st.composite
def mixtures(draw):
    """Columns of several widths beside each other, and their inputs."""
    rows = draw(st.sampled_from([1, 3, 128, 1000]))
    inputs, segments, left = [], [], 0
    for _ in range(draw(st.integers(1, 6))):
        width = draw(st.sampled_from([1, 3, 8, 16, 64, 256, 300]))
        terms = []
        for _ in range(draw(st.sampled_from([1, 1, 2, 33]))):
            count = draw(st.sampled_from([1, 1, 3, 50]))
            edges = BUCKETS if draw(st.booleans()) else None
            inputs += [
                torch.zeros(rows, count, dtype=torch.float32 if edges else torch.int64),
                torch.zeros(10, width),
            ]
            terms.append(Term(len(inputs) - 2, len(inputs) - 1, step=count, count=count, boundaries=edges))
        segments.append((left, width, tuple(terms)))
        left += width
    placed = tuple(Segment(0, start, left, rows, width, terms) for start, width, terms in segments)
    return Columns(placed, ((rows, left),), "float32"), inputs


@settings(max_examples=examples(30, 60))
@given(mixtures())
def test_every_element_is_filled_once(given):
    spec, inputs = given
    outputs = empty_outputs(spec, torch.device("cpu"), spec.dtype)
    tables = embedding.describe(spec, inputs, outputs, dict.fromkeys(range(len(inputs)), (0, 0)))
    filled = np.zeros(outputs[0].numel(), np.int32)
    work = tables.work.numpy()
    assert len(work) == sum(tables.programs)
    at = 0
    for count, tile in zip(tables.programs[:2], tables.tiles, strict=True):
        assert tile.rows * tile.ids * tile.width <= embedding.TILE * tile.at_once
        for column, first in work[at : at + count]:
            start, step, rows, width, first_term, terms, *_ = tables.segments[column].tolist()
            assert width <= tile.width
            assert first_term + terms <= len(tables.terms)
            assert not tile.single or terms == 1
            cover(filled, start, step, range(first, min(first + tile.rows, rows)), width)
        at += count
    for column, first in work[at:]:
        start, step, rows, width = tables.plain[column].tolist()[:4]
        assert width % tables.vector == 0
        at_once = tables.block // tables.vector // (width // tables.vector)  # as the kernel divides
        cover(filled, start, step, range(first, min(first + at_once, rows)), width)
    assert (filled == 1).all()


def cover(filled, start, step, rows, width):
    for row in rows:
        filled[start + row * step : start + row * step + width] += 1


def column(start, width, ids, *, rows=1024, total=800, edges=None):
    terms = tuple(Term(0, 1, boundaries=edges) for _ in range(ids))
    return Segment(0, start, total, rows, width, terms)


def shapes(spec, inputs):
    return embedding.describe(spec, inputs, empty_outputs(spec, torch.device("cpu"), spec.dtype), {0: (0, 0)})


def test_a_sum_over_many_columns_and_wide_rows_get_tiles_of_their_own():
    inputs = [torch.zeros(1024, dtype=torch.float32), torch.zeros(10, 64)]
    wide = [column(64 * place, 64, 1, edges=BUCKETS) for place in range(4)]
    spec = Columns((*wide, column(256, 1, 40)), ((1024, 800),), "float32")
    one, two = shapes(spec, inputs).tiles
    assert {(one.ids, one.width), (two.ids, two.width)} == {(1, 64), (64, 1)}


@pytest.mark.parametrize(("total", "vector"), [(800, 4), (802, 1)])
def test_rows_of_16_bytes_move_at_once_where_all_lie_at_multiples(total, vector):
    inputs = [torch.zeros(1024, dtype=torch.int32), torch.zeros(10, 16)]
    spec = Columns(tuple(column(16 * place, 16, 1, total=total) for place in range(4)), ((1024, total),), "float32")
    tables = shapes(spec, inputs)
    assert tables.vector == vector
    assert not any(tile.rows for tile in tables.tiles)
    assert tables.programs[2] >= embedding.PROGRAMS // 2


@pytest.mark.parametrize(
    ("dtype", "width", "offset", "place", "at_once"),
    [
        (torch.float32, 64, 0, 0, 4),
        (torch.bfloat16, 64, 0, 32, 8),
        (torch.float64, 64, 0, 0, 2),
        (torch.float32, 64, 2, 0, 1),  # the table
        (torch.float32, 66, 0, 0, 1),  # its rows
        (torch.float32, 64, 0, 8, 1),  # what is copied
    ],
)
def test_a_sum_loads_16_bytes_at_once_where_all_rows_lie_at_multiples(dtype, width, offset, place, at_once):
    table = torch.zeros(10 * width + offset, dtype=dtype)[offset:].view(10, width)
    inputs = [torch.zeros(512, 3, dtype=torch.int32), table, torch.zeros(512, width, dtype=dtype)]
    terms = (Term(0, 1, step=3, count=3), Term(2, -1, step=width))
    spec = Columns((Segment(0, 0, width, 512, width, terms),), ((512, width),), str(dtype).removeprefix("torch."))
    outputs = empty_outputs(spec, torch.device("cpu"), spec.dtype)
    tables = embedding.describe(spec, inputs, outputs, {0: (0, 0), 2: (0, place)})
    assert [tile.at_once for tile in tables.tiles] == [at_once, 1]
    assert tables.tiles[0].constants()["AT_ONCE"] == at_once


@pytest.mark.parametrize(
    ("rows", "counts", "start", "tiles"),
    [
        (256, [64] * 26, 0, [(4, 8, 4)]),
        (16, [64, 64], 0, [(1, 32, 4)]),  # too few rows for all processors: all ids at once
        (2048, [100, 27, 9, 3, 3, 2], 0, [(4, 8, 4), (8, 4, 4)]),
        (256, [64] * 26, 1, [(4, 8, 1)]),  # no sum begins at a multiple of 16 bytes in the output
    ],
)
def test_warps_have_rows_of_their_own_where_there_are_enough(rows, counts, start, tiles):
    inputs = [torch.zeros(rows, 100, dtype=torch.int32), torch.zeros(10, 128)]
    total = 128 * len(counts) + 4
    bags = [
        Segment(0, 128 * at + start, total, rows, 128, (Term(0, 1, step=100, count=count),))
        for at, count in enumerate(counts)
    ]
    found = shapes(Columns(tuple(bags), ((rows, total),), "float32"), inputs).tiles
    assert [(one.rows, one.ids, one.stored) for one in found if one.rows] == tiles


def test_programs_that_take_longest_come_first():
    inputs = [torch.zeros(1024, 100, dtype=torch.int32), torch.zeros(10, 128)]
    bags = [
        Segment(0, 128 * at, 512, 1024, 128, (Term(0, 1, step=100, count=count),))
        for at, count in enumerate((2, 100, 5, 30))
    ]
    tables = shapes(Columns(tuple(bags), ((1024, 512),), "float32"), inputs)
    work, ids = tables.work[:, 0].tolist(), tables.segments[:, 7].tolist()
    assert [ids[column] for column in dict.fromkeys(work)] == [100, 30, 5, 2]
