"""Constants that take the place of others: equal to the bit or copied, and refused where one place would need two values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from msplit.core.dag import Dag
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.program import KernelCall, Program
from msplit.engines.cuda.stored.program import Weights, tensor_of
from msplit.engines.cuda.stored.renewal import Renewal, RowRenewal, difference, rows_of
from msplit.errors import EngineError


def program(*constants: Any, **known: Any) -> Program:
    """A program without a step, whose outputs are constants."""
    keys = {f"out{number}": (number, 0) for number in range(len(constants))}
    values = {name: np.asarray(value) for name, value in known.items()}
    return Program((), dict(zip(keys.values(), constants, strict=True)), {}, keys, values, Dag.of(0, [], []))


def of(*values: float, dtype: Any = torch.float32) -> Any:
    return torch.tensor(values, dtype=dtype)


def test_what_differs_is_copied_to_where_it_lies() -> None:
    live, new = program(of(1, 2), of(3), k=1.0), program(of(1, 2), of(4), k=2.0)
    places = [tensor.data_ptr() for tensor in live.constants.values()]
    renewal = Renewal.of([live], [new])
    assert renewal.bytes == 4
    assert live.constants[1, 0].tolist() == [3]
    renewal.take_over()
    assert [tensor.tolist() for tensor in live.constants.values()] == [[1, 2], [4]]
    assert [tensor.data_ptr() for tensor in live.constants.values()] == places
    assert live.known["k"] == 2.0
    assert Renewal.of([live], [new]).bytes == 0


@pytest.mark.parametrize(
    ("old", "new", "size"),
    [
        (of(0.0), of(-0.0), 4),
        (of(float("nan")), of(float("nan")), 0),
        (torch.tensor(1.0), torch.tensor(1.0), 0),
        (torch.tensor(1.0), torch.tensor(2.0), 4),
        (of(True, False, dtype=torch.bool), of(True, True, dtype=torch.bool), 2),
        (of(1, 2, dtype=torch.bfloat16), of(1, 2, dtype=torch.bfloat16), 0),
        (of(1, 2, dtype=torch.complex64), of(1, 3, dtype=torch.complex64), 16),
        (of(dtype=torch.float64), of(dtype=torch.float64), 0),
        (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t(), 0),
        (torch.arange(6.0).view(2, 3).t(), torch.arange(1.0, 7.0).view(2, 3).t(), 24),
    ],
)
def test_equal_is_equal_to_the_bit(old: Any, new: Any, size: int) -> None:
    renewal = Renewal.of([program(old)], [program(new)])
    assert renewal.bytes == size
    renewal.take_over()
    assert torch.equal(old, new) or torch.isnan(new).any()
    assert old.stride() == new.stride()


def test_one_place_has_one_value() -> None:
    shared = of(1, 2)
    live = program(shared, shared)
    assert Renewal.of([live], [program(of(3, 4), of(3, 4))]).bytes == 8
    with pytest.raises(EngineError, match="shares memory with another constant"):
        Renewal.of([live], [program(of(3, 4), of(3, 5))])
    assert shared.tolist() == [1, 2]


def test_parts_of_one_memory_stay_parts_of_one() -> None:
    whole, other = of(1, 2, 3, 4), of(5, 6, 7, 8)
    live = program(whole, whole[1:3], whole[2:])
    renewal = Renewal.of([live], [program(other, other[1:3], other[2:])])
    renewal.take_over()
    assert [tensor.tolist() for tensor in live.constants.values()] == [[5, 6, 7, 8], [6, 7], [7, 8]]
    with pytest.raises(EngineError, match="share memory"):
        Renewal.of([live], [program(other, other[1:3].clone(), other[2:])])
    with pytest.raises(EngineError, match="share memory"):
        Renewal.of([live], [program(other, other[2:4], other[2:])])
    apart = program(whole[:2], whole[2:])
    Renewal.of([apart], [program(of(1, 1), of(2, 2))]).take_over()
    assert whole.tolist() == [1, 1, 2, 2]


def looking_up(table: Any, *others: Any, node: int = 1, source: int = 5) -> Program:
    """A program with one step, which does what node `source` did, on a table; and constants beside."""
    step = KernelCall(Op(9, "g", "Gather", {}, [(node, 0)], [source]), lambda *_: (), ((node, 0),), 1, True, 0, (-1,))
    beside = {(20 + number, 0): other for number, other in enumerate(others)}
    fetches = {str(key): key for key in beside}
    return Program((step,), {(node, 0): table, **beside}, {}, fetches, {}, Dag.of(1, [], []))


def test_rows_are_found_where_the_table_lies_as_it_is() -> None:
    table, ids = torch.arange(12.0).view(6, 2), np.array([1, 4])
    old, new = table.numpy()[ids], np.full((2, 2), -1, np.float32)
    found = rows_of([looking_up(table), looking_up(table, of(1))], {1}, {5}, ids, old, new)
    assert [one[0].data_ptr() for one in found] == [table.data_ptr()], "two programs share it"
    for live, more in (
        (looking_up(table, table[5:]), {}),  # something else has a part of its memory
        (looking_up(table.t().contiguous().t()), {}),
        (looking_up(table + 1), {}),
        (looking_up(table.double()), {}),
        (looking_up(table, node=2), {}),  # made of it: another constant
        (looking_up(table), {"lookups": {5, 6}}),  # the other lookup reads something else
    ):
        assert (
            rows_of([looking_up(table), live], **({"nodes": {1}, "lookups": {5}} | more), ids=ids, old=old, new=new)
            == []
        )

    def refuse() -> None:
        assert table[4].tolist() == [-1, -1]
        raise EngineError("no")

    before = table.clone()
    for check, agree in ((refuse, bool), (bool, refuse)):
        renewal = RowRenewal(found, check)
        assert renewal.bytes == 16
        with pytest.raises(EngineError, match="no"):
            renewal.take_over(agree)
        assert torch.equal(table, before)
    RowRenewal(found, bool).take_over()
    assert table[4].tolist() == [-1, -1]
    for kind in (np.uint16, np.uint32, np.uint64, np.bool_, np.float16, np.int8, np.complex64):
        table = torch.from_numpy(np.arange(6).reshape(3, 2).astype(kind))
        old, new = table.numpy()[[1]].copy(), np.ones((1, 2), kind)
        RowRenewal(rows_of([looking_up(table)], {1}, {5}, np.array([1]), old, new), bool).take_over()
        assert table.numpy()[1].tolist() == new[0].tolist()


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (program(of(1, 2), of(3, 4)), "its fetches"),
        (program(of(1, 2, 3)), r"is \('float32', \(3,\), \(1,\)\), and was \('float32', \(2,\), \(1,\)\)"),
        (program(of(1, 2, dtype=torch.float64)), "float64"),
        (program(of(1, 2), k=1), "its outputs that depend on no input"),
    ],
)
def test_programs_that_differ_in_more_are_refused(new: Program, said: str) -> None:
    live = program(of(1, 2))
    with pytest.raises(EngineError, match=f"it is another program: .*{said}"):
        Renewal.of([live], [new])
    assert difference(live, program(of(8, 9))) == ""


def test_equal_constants_of_a_program_lie_apart_in_a_file_and_those_of_several_in_one_place() -> None:
    weights = Weights()
    places = []
    for _ in range(2):
        weights.begin()
        zeros, more = torch.zeros(8), torch.zeros(8)
        places.append([weights.add(one)[3] for one in (zeros, more, zeros[2:])])
    assert places[0] == places[1]
    first, second, part = places[0]
    assert (second > first, part) == (True, first + 8)
    memory = torch.from_numpy(weights.memory().copy())
    tensor_of(["float32", [8], [1], first], memory).fill_(1)
    assert tensor_of(["float32", [8], [1], second], memory).sum() == 0
