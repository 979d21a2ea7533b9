"""Runs of steps in one call of the C beside it (host_steps.c): nothing that lies between them becomes an array of NumPy or an object.

Each op says beside its function in NumPy what C has to know of a node: `host_op("Pack", native="axis")`. Where a step refuses its
values, or where nothing is compiled, the functions in NumPy run.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.hashing import VIEW, bytes_at, native
from msplit.engines.host.table import TYPES, HostNode, NativeNode, Run, native_forms, objects
from msplit.opset import schema

_DTYPES = tuple(np.dtype(object if name == "string" else name) for name in TYPES)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_TEXT = TYPES.index("string")
_NUMBERS[VIEW] = _TEXT
_AXES, _WORDS = 6, 10
"""Most axes, and numbers of 64 bits that describe a value: address, type, axes, elements, sizes."""


class HostStep(NamedTuple):
    """A node that runs, with the places of its inputs and outputs among all values.

    Attributes:
        in_table: True if the function is that of the table, which may be in C, too: with these attributes and types, C has its values.
    """

    function: Run
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    node: HostNode
    in_table: bool = True


class ProgramPart(NamedTuple):
    """Steps that run one behind the other.

    Attributes:
        native: Runs them in C, on all values; gives whether it could. None where they run in NumPy.
    """

    steps: list[HostStep]
    native: Callable[[list[Any]], bool] | None


def parts_of(steps: Sequence[HostStep], values: Sequence[Any], fetches: set[int]) -> list[ProgramPart]:
    """The steps in parts, as few as there can be of those that run in C.

    Args:
        steps: All of them, in topological order.
        values: Constants at their places, None elsewhere.
        fetches: Places of what is asked for.
    """
    library = native()
    if library is None:
        return [ProgramPart([*steps], None)]
    left = [(step, _in_c(step.node, library) if step.in_table else None) for step in steps]
    waits = {place for step in steps for place in step.outputs}
    parts = list[ProgramPart]()
    while left:
        for compiled in (True, False):
            taken, rest = list[tuple[HostStep, Any]](), list[tuple[HostStep, Any]]()
            for step, form in left:
                fits = (form is not None) == compiled and waits.isdisjoint(step.inputs)
                waits.difference_update(step.outputs if fits else ())
                (taken if fits else rest).append((step, form))
            left = rest
            if taken:
                read = fetches.union(*(step.inputs for step, _ in rest))
                parts.append(
                    ProgramPart([step for step, _ in taken], _Native(taken, values, read) if compiled else None)
                )
    return parts


def _in_c(node: HostNode, library: Any) -> tuple[int, NativeNode] | None:
    """The number of a node's op in C, and what its function has to know; None where that is not made for the node."""
    number, form = library.step_number(node.op.encode()), native_forms().get(node.op)
    types = schema.input_dtypes(node.op, node.attrs), schema.output_dtypes(node.op, node.attrs)
    if form is None or number < 0 or None in types:
        return None
    if any(value is not None and value.ndim > _AXES for value in node.known):
        return None
    allowed = {*TYPES, "resource"} if callable(form) else {*TYPES}
    if not allowed.issuperset(name for some in types for name in some or ()):
        return None
    made = form(node) if callable(form) else _by_names(form.split(), node.attrs)
    return None if made is None else (number, made)


def _by_names(names: list[str], attrs: Mapping[str, Any]) -> NativeNode | None:
    """Attributes by name; what one behind an exclamation mark turns on, C does not have."""
    if any(attrs.get(name[1:]) for name in names if name[0] == "!"):
        return None
    return NativeNode([number for name in names if name[0] != "!" for number in _numbers(attrs.get(name, ()))])


def _numbers(value: Any) -> list[int]:
    """An attribute as whole numbers: a type as its own, a list behind the number of its elements."""
    if isinstance(value, list | tuple):
        return [len(value), *(number for one in value for number in _numbers(one))]
    return [TYPES.index(value) if isinstance(value, str) else int(value)]


def _described(array: NDArray[Any], number: int) -> tuple[int, ...]:
    padding = (0,) * (_AXES - array.ndim)
    return (array.ctypes.data, number, array.ndim, array.size, *array.shape, *padding)


class _Native:
    """Steps in C, which run on what lies at their places, and put there what they make. False where a step refuses its values.

    Args:
        steps: What to run, each with the number of its op and what C has to know.
        values: Constants of the whole at their places.
        read: Places that others read.
    """

    def __init__(self, steps: list[tuple[HostStep, Any]], values: Sequence[Any], read: set[int]) -> None:
        self._library, self._held = native(), list[Any]()
        local, initial, given, code = dict[int, int](), list[int](), list[int](), list[int]()

        def place_of(place: int | NDArray[Any], made: bool) -> int:
            constant = values[place] if isinstance(place, int) else place
            number = len(initial) // _WORDS
            if isinstance(place, int) and (number := local.setdefault(place, number)) * _WORDS < len(initial):
                return number
            initial.extend((0,) * _WORDS if constant is None else self._constant(constant))
            if isinstance(place, int) and constant is None and not made:
                given.append(place)
            return number

        for step, (number, form) in steps:
            slots = range(len(step.inputs)) if form.inputs is None else form.inputs
            inputs = [place_of(step.inputs[one] if isinstance(one, int) else one, False) for one in slots]
            outputs = [place_of(place, True) for place in step.outputs]
            code += (number, len(inputs), len(outputs), len(form.attrs), *inputs, *outputs, *form.attrs)
        self._given, self._made = given, [place for step, _ in steps for place in step.outputs if place in read]
        head = (len(code), len(initial) // _WORDS, len(given), len(self._made), id(bytes))
        places = [local[place] for place in (*given, *self._made)]
        self._program = np.array([*head, *code, *initial, *places], np.int64)
        self._form, self._results = f"{_WORDS * len(given)}q", ctypes.c_int64 * (_WORDS * len(self._made))

    def _constant(self, value: NDArray[Any]) -> tuple[int, ...]:
        """A value that stays where it is. Strings are looked up once."""
        value = np.require(value, requirements=["C", "A"])
        self._held.append(value)
        number = _NUMBERS[value.dtype]
        if number != _TEXT:
            return _described(value, number)
        views = np.empty((value.size, 2), np.int64)
        self._held.append(views)
        if not self._library.view_strings(value.ctypes.data, value.size, id(bytes), views.ctypes.data):
            raise TypeError("a constant of strings holds something else")
        return (views.ctypes.data, *_described(value, number)[1:])

    def __call__(self, values: list[Any]) -> bool:
        words, held = list[int](), list[Any]()
        for place in self._given:
            value = np.asarray(values[place], order="C")
            number = _NUMBERS.get(value.dtype)
            if number is None or value.ndim > _AXES or not value.flags.aligned:
                return False
            held.append(value)
            words += _described(value, _TEXT + 1 if value.dtype.hasobject else number)
        found = self._results()
        run = self._library.run_steps(self._program.ctypes.data, struct.pack(self._form, *words), found)
        if not run:
            return False
        try:
            rows = struct.iter_unpack(f"{_WORDS}q", found)
            for place, (address, number, axes, count, *sizes) in zip(self._made, rows, strict=True):
                values[place] = _array(address, _DTYPES[number], count, tuple(sizes[:axes]))
        except ValueError:  # NumPy takes no such sizes, not even of nothing
            return False
        finally:
            self._library.end_steps(run)
        return True


def _array(address: int, dtype: np.dtype[Any], count: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """A copy of what lies there."""
    if dtype.hasobject:
        return objects([bytes_at(*one) for one in struct.iter_unpack("2q", bytes_at(address, 16 * count))], shape)
    return np.ndarray(shape, dtype, bytes_at(address, count * dtype.itemsize))
