"""Other values for programs that run: constants of new programs take the place of their own, where these lie.

A captured graph knows the addresses of its constants, so that values are copied there between two steps. That needs programs that differ in
nothing but these values: the passes have run again on them, and so folded constants and those that lie as a kernel wants them are new ones,
too. What would not be so is refused, before anything is changed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Executable
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name, to_torch
from msplit.engines.cuda.ir.graph import Key
from msplit.engines.cuda.ir.program import Program, sharing
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.runtime.executables import Compiled, executable_of
from msplit.engines.cuda.runtime.host import Counting
from msplit.engines.cuda.stored.steps import pack_step
from msplit.engines.table_rows import is_rounded, packed
from msplit.errors import EngineError
from msplit.schedule.plan import Plan

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by whose values bits are compared, by the bytes of an element."""

_AT_ONCE = 1 << 24
"""Elements that are compared at once."""

Array = NDArray[Any]
_Place = tuple[int, int, torch.Tensor, torch.Tensor]
"""First byte of a constant, the one behind its last, the constant, and what takes its place."""


@dataclass(frozen=True, eq=False)
class Renewal:
    """Values that take the place of others, beside which they lie until then.

    Attributes:
        pairs: Constants that run, and what each is to be.
        known: Likewise outputs that depend on no input.
    """

    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    known: Sequence[tuple[MutableMapping[str, Any], Arrays]]

    @classmethod
    def of(cls, live: Sequence[Program], new: Sequence[Program]) -> Renewal:
        """Pairs programs that run with new ones, which may lie on another device. Values that are the same are let go.

        Raises:
            EngineError: They differ in more than values, or two constants that are to differ lie in one place.
        """
        found: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        known = []
        for one, other in zip(live, new, strict=True):
            if said := difference(one, other):
                raise EngineError(
                    f"with these values it is another program: {said}",
                    fix="open another one with the new model, then close this one",
                )
            assert isinstance(one.known, MutableMapping)
            known.append((one.known, other.known))
            for key in sorted(_read(one)):
                old, value = one.constants[key], other.constants[key]
                place = (old.device, old.data_ptr(), old.dtype, tuple(old.shape), old.stride())
                before = found.setdefault(place, (old, value))[1]
                if before is not value and not _same(before, value):
                    raise EngineError(f"{_name(one, key)} shares memory with another constant", fix="prepare it anew")
        _refuse_overlaps([*found.values()])
        changed = []
        for old, value in found.values():
            beside = value.to(old.device)
            if old is not value and not _same(old, beside):
                changed.append((old, beside))
        return cls(changed, known)

    @property
    def bytes(self) -> int:
        """Size of what changes."""
        return sum(old.numel() * old.element_size() for old, _ in self.pairs)

    def take_over(self, agree: Callable[[], object] = bool) -> None:
        """Copies the values to where the others are, and waits for that. No step may run meanwhile. Nothing has changed where `agree`
        raises."""
        _own(old for old, _ in self.pairs)
        agree()
        for place in {old.device for old, _ in self.pairs}:
            with aside(str(place)), torch.no_grad():
                for old, value in self.pairs:
                    if old.device == place:
                        old.copy_(value)
                        Device.of(place).owned(HostTables).forget(old)
        for known, values in self.known:
            known.update(values)


@dataclass(frozen=True, eq=False)
class RowRenewal:
    """Rows that take the place of others in tables of which steps do nothing but look rows up.

    Attributes:
        rows: Tables, numbers of rows, and what these are to be.
        check: Runs a step and looks at its outputs.
    """

    rows: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    check: Callable[[], object]

    @property
    def bytes(self) -> int:
        """Size of what changes."""
        return sum(values.numel() * values.element_size() for _, _, values in self.rows)

    def take_over(self, agree: Callable[[], object] = bool) -> None:
        """Copies the rows, and looks at a step. The old rows are back where that, or `agree`, raises. No step may run meanwhile."""
        _own(table for table, _, _ in self.rows)
        before = []
        for table, ids, _ in self.rows:
            with aside(str(table.device)):  # over before they are written to
                before.append(table.index_select(0, ids))
        try:
            self._copy([values for _, _, values in self.rows])
            self.check()
            agree()
        except BaseException:
            self._copy(before)
            raise

    def _copy(self, every: Sequence[torch.Tensor]) -> None:
        for (table, ids, _), values in zip(self.rows, every, strict=True):
            with aside(str(table.device)), torch.no_grad():
                table.index_copy_(0, ids, values)
                Device.of(table.device).owned(HostTables).forget(table, ids)


def _own(tables: Iterable[torch.Tensor]) -> None:
    """Has tables that are files of the host in memory: they are about to be written to. Raises what `HostTables.own` does."""
    for one in tables:
        Device.of(one.device).owned(HostTables).own([one])


def rows_of(
    live: Sequence[Program], nodes: Collection[int], lookups: Collection[int], ids: Array, old: Array, new: Array
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows of a table where they lie as they are in every program, each place once; for `RowRenewal`.

    Args:
        live: Programs that run.
        nodes: Nodes of the model that are the table.
        lookups: Nodes that look its rows up.
        ids: Numbers of rows, each once.
        old: Rows of now.
        new: What they are to be.

    Returns:
        Nothing where a program has the table in another way, such as beside others.
    """
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for program in live:
        keys = {(node, 0) for node in nodes}.intersection(_read(program))
        done = {node for step in program.steps if keys & {*step.inputs} for node in step.op.source_nodes}
        if not keys or not done.issuperset(lookups):
            return []
        for table in [program.constants[key] for key in sorted(keys)]:
            place, values = Device.of(table.device).owned(HostTables).find(table), (old, new)
            if place is not None and place.packed:
                if not all(is_rounded(one, place.packed) for one in values):
                    return []
                values = packed(old, place.packed), packed(new, place.packed)
            rows, numbers = (to_torch(array, table.device) for array in (values[0], ids))
            alike = table.is_contiguous() and (table.dtype, table.shape[1:]) == (rows.dtype, rows.shape[1:])
            bits = _BITS.get(table.element_size(), table.dtype)  # PyTorch selects no rows of unsigned numbers
            if not alike or not _same(table.view(bits).index_select(0, numbers), rows.view(bits)):
                return []
            first, end = table.data_ptr(), table.data_ptr() + table.numel() * table.element_size()
            for key in _read(program) - keys:
                start = program.constants[key].data_ptr()
                if first - _span(program.constants[key]) < start < end:
                    return []
            found[first] = table.view(bits), numbers, to_torch(values[1], table.device).view(bits)
    return [*found.values()]


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last one; 0 of an empty one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return last * tensor.element_size() if tensor.numel() else 0


def sharing_with(program: Program) -> contextlib.AbstractContextManager[object]:
    """A block in which a model is made again: what is the same as in a program that runs, under the same key, lies there once."""
    return sharing(program.constants)


class _Stream:
    """A stream of a device, which owns this, for what is made beside steps: memory that it gave back is there for the next time."""

    def __init__(self, device: Device) -> None:
        self.stream = torch.cuda.Stream(device.place)


@contextlib.contextmanager
def aside(device: str) -> Iterator[None]:
    """A block whose copies and kernels hold up no step: on a stream of its own, where there is a GPU. They are over at the end."""
    if torch.device(device).type != "cuda":
        yield
        return
    found = Device.of(torch.device(device))
    stream = found.owned(_Stream).stream
    with found.entered(), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def beside(compiled: Compiled, plan: Plan, options: EngineOptions, *, ieee: bool) -> Executable:
    """Makes what runs a step with new values before they are taken over: nothing is captured."""
    if options.on_gpu:  # streams of ours do not wait for the one on which these were made
        torch.cuda.current_stream(torch.device(options.first)).synchronize()
    return executable_of(compiled, plan, replace(options, capture=False), ieee=ieee)


def program_of(executable: Executable) -> Program | None:
    """The only program of an executable; None where it has several, or the host runs a part."""
    while isinstance(executable, Counting):
        executable = executable.device
    program = getattr(executable, "program", None)
    return program if isinstance(program, Program) and program.gpus is None and not program.state.keys else None


def difference(one: Program, other: Program) -> str:
    """Tells in which step, input, output or constant two programs differ, values of constants apart; "" if in none."""
    if len(one.steps) != len(other.steps):
        why = "an op is left out where values such as zeros allow it"
        return f"it has {len(other.steps)} steps, and not {len(one.steps)} ({why})"
    for step, new in zip(one.steps, other.steps, strict=True):
        before, after = pack_step(step), pack_step(new)
        parts = [name for name in before if json.dumps(before[name]) != json.dumps(after[name])]
        if parts:
            return f"{', '.join(parts)} of {step.op.name} ({step.op.op})"
    for name in ("feeds", "fetches", "dynamic", "fed"):
        if getattr(one, name) != getattr(other, name):
            return f"its {name}"
    if one.known.keys() != other.known.keys():
        return "its outputs that depend on no input"
    for key in sorted(_read(one)):
        looks = [_looks(program.constants[key]) if key in program.constants else None for program in (one, other)]
        if looks[0] != looks[1]:
            return f"{_name(one, key)} is {looks[1]}, and was {looks[0]}"
    for name, value in one.known.items():
        if (value.dtype, value.shape) != (other.known[name].dtype, other.known[name].shape):
            return f"output {name}"
    return ""


def _read(program: Program) -> set[Key]:
    """Constants that steps read, or that are outputs."""
    read = {key for step in program.steps for key in step.inputs} | set(program.fetches.values())
    return read & program.constants.keys()


def _looks(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()


def _name(program: Program, key: Key) -> str:
    """Name of a constant: by the op that reads it."""
    reader = next((step.op.name for step in program.steps if key in step.inputs), "an output")
    return f"the constant {key[0]} that {reader} reads"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one type and shape are equal to the bit."""
    kind = _BITS.get(one.element_size())
    if kind is None or one.dtype.is_complex:
        return False
    first, second = (
        tensor.detach().view(kind) if tensor.dim() else tensor.detach().view(1).view(kind) for tensor in (one, other)
    )
    if first.dim() == 0 or not first.numel():
        return bool(torch.equal(first, second))
    rows = max(_AT_ONCE * len(first) // first.numel(), 1)
    return all(
        torch.equal(first[start : start + rows], second[start : start + rows].to(first.device))
        for start in range(0, len(first), rows)
    )


def _refuse_overlaps(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Refuses constants of which one lies in a part of another, unless what takes their place lies in the same way."""
    places: dict[torch.device, list[_Place]] = {}
    for old, value in pairs:
        if old.numel():
            end = old.data_ptr() + _span(old)
            places.setdefault(old.device, []).append((old.data_ptr(), end, old, value))
    for several in places.values():
        end, last = 0, several[0]
        for one in sorted(several, key=lambda place: place[:2]):
            if one[0] < end:
                apart = [place.data_ptr() - other.data_ptr() for place, other in zip(one[2:], last[2:], strict=True)]
                shared = one[3].untyped_storage().data_ptr() == last[3].untyped_storage().data_ptr()
                if not shared or apart[0] != apart[1]:
                    raise EngineError("two constants that are to differ share memory", fix="prepare it anew")
            if one[1] > end:
                end, last = one[1], one
