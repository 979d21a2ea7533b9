"""Staging of inputs: host memory that the GPU reads by itself, one block for all inputs of a step, and one for those of the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.base import Feeds, is_array, is_tensor, not_an_array, refuse_fed
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name, numpy_dtype, tensor_of, to_numpy
from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.ir.program import seen_by
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.memory import Gather, copy
from msplit.engines.cuda.runtime.memcpy import AsyncCopy, HostMemory, Memcpy, Tell
from msplit.engines.environment import native_threads
from msplit.errors import EngineError

_ALIGNMENT = 256
_SMALL_BYTES = 1 << 14
"""Inputs up to this size lie gap-free beside others of their type, so that one call copies all of them."""
_ENGINE_BYTES = 1 << 12
"""Up to this size the GPU's copy engine brings inputs sooner than a kernel does."""
_AHEAD_BYTES = 1 << 20
"""From this size on an input is on the bus, piece by piece, while native threads still copy the rest of it into pinned memory: a step with
2 MB takes 366 µs in place of 397, and 450 where one thread copies (an H100 with 16 cores)."""
_AHEAD_ALONE_BYTES = 1 << 22
"""The same where Python's threads copy. That spares 8 % of 4 MB, 13 of 16 and 36 of 134 on an H200; smaller ones take longer, since to read
what the processor is writing slows both."""
_DIRECT_BYTES = 1 << 18
"""Bytes of each array, of several that are joined, from which on the GPU reads them where they lie: to issue a copy takes 2 µs, and as many
bytes are joined in 13."""
_PREFETCHED_BYTES = 1 << 20
"""From this size on inputs are sent while the step before runs. On an H100 that spared 66 of 523 µs with 1 MB; events, a copy on the device
and outputs that a graph does not fetch took 160 µs more than 44 and 80 with 20 and 262 KB."""
_ARRAYS = frozenset({np.ndarray})
_PLAIN = frozenset({torch.Tensor})
_TOGETHER = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}
)
"""Tensors of these types are copied by one kernel where there are several."""


class Block:
    """Tensors side by side in one block of host memory, pinned where there is a GPU.

    Args:
        runs: Their names in groups: those of a group lie side by side without a gap, each group starts where memory is aligned.
        device: Which else is to see the memory.

    Attributes:
        starts: Byte of the block at which each tensor starts, by name.
        arrays: The tensors in it as NumPy arrays.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], runs: Sequence[Sequence[str]], device: Device) -> None:
        self.starts: dict[str, int] = {}
        end = 0
        for run in runs:
            for name in run:
                self.starts[name] = end
                end += _size(like[name])
            end = -(-max(end, 1) // _ALIGNMENT) * _ALIGNMENT
        self.host = torch.zeros(max(end, _ALIGNMENT), dtype=torch.uint8, pin_memory=device.is_gpu)
        memory = self.host.numpy()
        self.arrays = {name: _array(memory, self.starts[name], tensor) for name, tensor in like.items()}


@dataclass(frozen=True, eq=False)
class _Group:
    """Inputs of one type that lie side by side without a gap.

    Attributes:
        take: Their arrays out of all that are fed.
        places: Where they lie in the host block.
        start: Byte of it at which the first one starts.
        memory: The same place as bytes.
    """

    names: tuple[str, ...]
    take: Callable[[Feeds], tuple[Any, ...]]
    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    places: list[NDArray[Any]]
    start: int
    memory: memoryview


@dataclass(frozen=True, eq=False)
class _Together:
    """Places on the device of inputs that a kernel per type copies, if they are tensors there: what is asked of each of dozens, one after
    the other, takes the host longer than all else of a small model's step.

    Attributes:
        take: Their values out of all that are fed.
        like: Shapes, types, devices and layouts.
        alike: Numbers of those of a type, and their places.
    """

    take: Callable[[Feeds], tuple[Any, ...]]
    like: _Described
    alike: list[tuple[Callable[[Sequence[Any]], tuple[Any, ...]], list[torch.Tensor]]]

    @staticmethod
    def of(places: Mapping[str, torch.Tensor]) -> _Together | None:
        """None where no kernel copies one of the types."""
        tensors = list(places.values())
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        if not dtypes or not _TOGETHER.issuperset(dtypes):
            return None
        numbers = [[at for at, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]
        alike = [(_taker(those), [tensors[at] for at in those]) for those in numbers]
        return _Together(_taker(list(places)), _described(tensors), alike)

    def taken(self, feeds: Feeds) -> Sequence[torch.Tensor]:
        """The values of a step; none where one is anything but such a tensor. Each is asked each time: a tensor may have become another."""
        try:
            values = self.take(feeds)
        except KeyError:
            return ()
        if not _PLAIN.issuperset(map(type, values)) or _described(values) != self.like:
            return ()
        return () if any(map(torch.Tensor.is_neg, values)) else values  # only its values say so, not its bits

    def copy(self, feeds: Feeds) -> bool:
        """Issues the copies on the current stream; false, and nothing is copied, where one is anything but such a tensor."""
        if not (values := self.taken(feeds)):
            return False
        for take, places in self.alike:
            _copy_together(take(values), places)
        return True


class InputStaging:
    """A step's inputs in pinned host memory and on the device: one copy moves them all, or all but the large ones.

    Args:
        stream: See `AsyncCopy`.

    Attributes:
        block: The host's side.
        memory: The device's side, as bytes.
        on_device: The tensors on the device, by name.
        reads_callers: True where copies out of the caller's memory were issued, which may not be over.
        rest: Bytes at the start of the block that are not sent ahead.
    """

    def __init__(
        self,
        like: Mapping[str, torch.Tensor],
        device: Device,
        *,
        own_kernel: bool = True,
        stream: int | None = None,
    ) -> None:
        runs = _runs(like)
        self.block = Block(like, runs, device)
        self.rest = next((self.block.starts[run[0]] for run in runs if _goes_ahead(run, like)), self.block.host.numel())
        self._memcpy, self._host_memory, self.reads_callers = device.owned(Memcpy), device.owned(HostMemory), False
        self.memory = torch.zeros_like(self.block.host, device=device.place)
        self.on_device = {name: _tensor(self.memory, self.block.starts[name], tensor) for name, tensor in like.items()}
        self._groups = [self._group(run) for run in runs]
        self._together = _Together.of(self.on_device)
        self._async_copy = AsyncCopy(self.block.host, self.memory, stream)
        self._seen: torch.Tensor | None = None
        if own_kernel and can_launch(device.place) and self.block.host.numel() > _ENGINE_BYTES:
            self._seen = seen_by(device.place, self.block.host)
        self._gather: Gather | None = None

    def _group(self, run: list[str]) -> _Group:
        arrays = [self.block.arrays[name] for name in run]
        start = self.block.starts[run[0]]
        memory = memoryview(self.block.host.numpy()[start : start + sum(array.nbytes for array in arrays)])
        shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
        return _Group(tuple(run), _taker(run), shapes, dtypes, arrays, start, memory)

    def gathers(self) -> bool:
        """Makes, and runs once, the kernel that `gather` issues. False where there is none: inputs are few, large, or of parts of words."""
        places = list(self.on_device.values())
        if self._together is not None and Gather.fits(places):
            with contextlib.suppress(EngineError):  # of a build that has no such kernel, where none can be compiled
                self._gather = Gather(places)
                self._gather.issue()
                return True
        return False

    def gather(self) -> None:
        """Issues the copies of tensors on the device to their places, on the current stream."""
        assert self._gather is not None
        self._gather.issue()

    def aim(self, feeds: Feeds) -> bool:
        """Has the captured `gather` copy these tensors; false where one is anything else than a contiguous tensor there."""
        values = self._together.taken(feeds) if self._together is not None else ()
        if self._gather is None or not values or not all(map(torch.Tensor.is_contiguous, values)):
            return False
        return self._gather.aim([*map(torch.Tensor.data_ptr, values)])

    @property
    def has_large(self) -> bool:
        """True if there are inputs that are sent ahead."""
        return bool(self.rest < self.block.host.numel())

    @property
    def pays_ahead(self) -> bool:
        """True if it is worth sending them for the next step while one runs."""
        return bool(self.block.host.numel() >= _PREFETCHED_BYTES)

    def to_device(self) -> None:
        """Issues the copy of the host block to the device on the current stream."""
        self._to_device(self.block.host.numel())

    def rest_to_device(self) -> None:
        """Issues the copy of what is not sent ahead."""
        self._to_device(self.rest)

    def _to_device(self, size: int) -> None:
        if self._seen is None:
            self.memory[:size].copy_(self.block.host[:size], non_blocking=True)
            return
        copy(self._seen[:size], self.memory[:size])

    def fill(self, feeds: Feeds, *, ahead: bool = False, direct: bool = False) -> bool:
        """Copies arrays into the host block, and tensors of PyTorch in the host's memory as such, but for large pinned ones, which the GPU
        reads where they lie. An array that is its own place in the block is there already.

        Args:
            ahead: True to issue the copies of large ones to the device on the current stream meanwhile.
            direct: True to do so, without the block, from memory of the caller's that the GPU reads; see `reads_callers`.

        Returns:
            True if all were such. Where one is another tensor, nothing has come of it: see `bring`.

        Raises:
            EngineError: An input is missing, has another shape or dtype than the one that was prepared, or is in another one's place.
                Nothing is copied then.
        """
        self.reads_callers = False
        arrays = self._checked(feeds)
        if arrays is None and self.memory.is_cuda and (on_host := arrays_on_host(feeds, pinned=direct)) is not None:
            arrays = self._checked(on_host)
        if arrays is not None:
            self._copy(arrays, ahead=ahead, direct=direct)
        return arrays is not None

    def send_all(self, feeds: Feeds, *, direct: bool = False) -> bool:
        """Sends large inputs ahead like `fill`, and copies small ones behind them, all by the copy engine.

        Returns:
            As above.

        Raises:
            EngineError: As above.
        """
        whole = self.fill(feeds, ahead=True, direct=direct)
        if whole and self.rest:
            self._async_copy.send(0, self.rest)
        return whole

    def join(self, parts: Sequence[Feeds], entries: Mapping[str, int]) -> None:
        """Copies the rows of several requests into the host block, one behind the other, and sends what is large ahead, without the block
        from memory that the GPU reads.

        Behind them stays what was there: rows of earlier steps, which are as legal as these. They are nobody's.

        Args:
            parts: Arrays of the right types and shapes.
            entries: Of each input, how many entries of its first axis belong to a row; 0 where it has none and is the same in all parts.
        """
        for name, place in self.block.arrays.items():
            start = self.block.starts[name]
            if start >= self.rest and self._send_direct(
                name, [part[name] for part in parts[: len(parts) if entries[name] else 1]]
            ):
                continue
            if not entries[name]:
                np.copyto(place, parts[0][name])
            elif len(parts) == 1:
                value = parts[0][name]
                self._memcpy.copy(value, place[: len(value)])
            else:
                arrays = [part[name] for part in parts]
                np.concatenate(arrays, out=place[: sum(map(len, arrays))])
            if start >= self.rest and place.nbytes:
                self._async_copy.send(start, start + place.nbytes)

    def join_tensors(self, parts: Sequence[Feeds], entries: Mapping[str, int]) -> None:
        """Joins inputs like `join`, where some values are tensors on a GPU, ready to be read. On the current stream they are
        copied to where they would have been sent, or into the host block, from where the step's graph fetches what is small.

        Args:
            parts: As above.
            entries: As above.
        """
        for name, place in self.block.arrays.items():
            start, tensor = self.block.starts[name], self.on_device[name]
            goes_ahead = start >= self.rest
            target = tensor if goes_ahead else _tensor(self.block.host, start, tensor)
            first = 0
            for part in parts if entries[name] else parts[:1]:
                value = part[name]
                rows = slice(first, first + len(value)) if entries[name] else ...
                first += len(value) if entries[name] else 0
                size = value.nbytes
                if not is_array(value):
                    target[rows].copy_(value, non_blocking=True)
                else:
                    np.copyto(place[rows], value)
                    if goes_ahead and size:
                        self._async_copy.send(start, start + size)
                start += size

    def bring(self, feeds: Feeds) -> None:
        """Issues what brings every input to its place on the device, on the current stream: tensors from where they lie, without the host
        if they are on a device, and arrays by way of the host block.

        Raises:
            EngineError: As above, or a tensor can not be taken.
        """
        self.reads_callers = False
        if self._together is not None and self._together.copy(feeds):
            return
        if self.fill(feeds):
            self.to_device()
            return
        self._refuse(feeds)
        alike: dict[Hashable, list[str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, place in self.block.arrays.items():
            value, start = feeds[name], self.block.starts[name]
            if is_array(value):
                self._copy_one(name, self._checked_one(name, np.asarray(value)))
                if place.nbytes:
                    self._async_copy.send(start, start + place.nbytes)
                continue
            tensor = tensors[name] = taken(name, value)
            self.reads_callers |= tensor.is_cpu  # if it is pinned
            together = tensor.device == self.memory.device and tensor.dtype in _TOGETHER and not tensor.is_neg()
            alike.setdefault(tensor.dtype if together else name, []).append(name)
        for names in alike.values():
            _copy_together([tensors[name] for name in names], [self.on_device[name] for name in names])

    def _checked(self, feeds: Feeds) -> list[Sequence[Any]] | None:
        """The arrays of each group; None where one of all is a tensor. What is wrong with others is then for `bring` to say."""
        found: list[Sequence[Any]] = []
        for group in self._groups:
            try:
                sources = group.take(feeds)
                same_shapes = [source.shape for source in sources] == group.shapes
                fits = same_shapes and [source.dtype for source in sources] == group.dtypes
            except (KeyError, AttributeError):
                fits = False
            # Others have shapes and types like these, too, and what NumPy makes of them comes through the host.
            if not fits or not (_ARRAYS.issuperset(map(type, sources)) or all(map(is_array, sources))):
                if not any(isinstance(value, torch.Tensor) for value in feeds.values()):
                    self._refuse(feeds)
                return None
            found.append(sources if len(sources) > 1 else (self._checked_one(group.names[0], sources[0]),))
        return found

    def _checked_one(self, name: str, source: NDArray[Any]) -> NDArray[Any]:
        place = self.block.arrays[name]
        if source is place or getattr(source, "base", None) is not place.base:
            return source
        if not np.may_share_memory(source, place):  # another input may be copied over it before it is read
            raise EngineError(f"input {name} is given memory of another input's buffer", fix="copy it first")
        return source.copy()  # copied in pieces, it would be read where it has just been written over

    def _copy(self, arrays: Sequence[Sequence[Any]], *, ahead: bool, direct: bool) -> None:
        """Copies arrays that were checked into the host block."""
        for group, sources in zip(self._groups, arrays, strict=True):
            goes_ahead = ahead and group.start >= self.rest
            if len(sources) > 1:
                _join(group, sources)
            elif not (direct and goes_ahead and self._send_direct(group.names[0], sources)):
                self._copy_one(group.names[0], sources[0], self._teller(group.start) if goes_ahead else None)

    def _send_direct(self, name: str, arrays: Sequence[Any]) -> bool:
        """Issues the copies of an input's rows, one behind the other, from where they lie; false where one has to be copied by the host."""
        start, place, has = self.block.starts[name], self.block.arrays[name], self._host_memory.has
        if len(arrays) > 1 and min(array.nbytes for array in arrays) < _DIRECT_BYTES:
            return False
        if arrays[0] is place or not all(has(array) and array.dtype == place.dtype for array in arrays):
            return False
        for array in arrays:
            if not self._async_copy.send_from(array, start):
                return False
            start += array.nbytes
            self.reads_callers = True
        return True

    def _copy_one(self, name: str, source: NDArray[Any], tell: Tell | None = None) -> None:
        place = self.block.arrays[name]
        if source is not place:
            self._memcpy.copy(source, place, tell)
        elif tell is not None:
            tell(0, place.nbytes)

    def _teller(self, start: int) -> Tell:
        send = self._async_copy.send
        return lambda first, last: send(start + first, start + last)

    def _refuse(self, feeds: Feeds) -> None:
        refuse_fed(feeds, {name: (place.dtype.name, place.shape) for name, place in self.block.arrays.items()})


def arrays_on_host(feeds: Feeds, *, pinned: bool = False) -> Feeds | None:
    """Inputs with tensors of the host's memory as arrays; None where one is a tensor elsewhere, or, unless `pinned`, large and pinned."""
    found: dict[str, Any] = {}
    for name, value in feeds.items():
        if isinstance(value, torch.Tensor):
            if not value.is_cpu or value.layout != torch.strided:
                return None
            if not pinned and value.nbytes >= _AHEAD_BYTES and value.is_pinned():
                return None
            try:
                value = value.numpy()  # takes a fifth of the time of `to_numpy`
            except (TypeError, RuntimeError):  # bfloat16 and its like, what needs a gradient, views that are conjugated
                try:
                    value = to_numpy(value)
                except Unsupported:
                    return None
        found[name] = value
    return found


def _copy_together(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Issues copies, by one launch for dozens of small ones, each of which would take the host some µs."""
    with torch.no_grad():
        if len(places) == 1:
            places[0].copy_(tensors[0], non_blocking=True)
        else:
            torch._foreach_copy_(places, tensors, non_blocking=True)


def taken(name: str, value: Any) -> torch.Tensor:
    """An input that is a tensor of whatever library, where it lies.

    Raises:
        EngineError: It is no tensor, or can not be taken.
    """
    if not is_tensor(value):
        raise not_an_array(name, value)
    try:
        return tensor_of(value)
    except Unsupported as problem:
        raise EngineError(f"input {name}: {problem}", fix="give a NumPy array") from problem


def settled(name: str, value: Any) -> torch.Tensor:
    """Takes a tensor like `taken`, and waits for its library and this thread's current stream: any stream may read it then.

    Raises:
        EngineError: It can not be taken.
    """
    tensor = taken(name, value)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


_Described = tuple[list[torch.Size], list[torch.dtype], list[torch.device], list[torch.layout]]


def _described(tensors: Sequence[torch.Tensor]) -> _Described:
    """All of one kind together: half of the time that it takes one tensor after the other."""
    shapes, dtypes = [*map(torch.Tensor.size, tensors)], [one.dtype for one in tensors]
    return shapes, dtypes, [one.device for one in tensors], [one.layout for one in tensors]


def _taker(names: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:  # with a single name `itemgetter` gives the value instead of a tuple
        return itemgetter(*names)
    (name,) = names
    return lambda feeds: (feeds[name],)


def _join(group: _Group, sources: Sequence[Any]) -> None:
    """Copies the arrays of a group to their places."""
    if all(map(is_, sources, group.places)):
        return
    # Joining bytes and moving them once more takes half as long as np.concatenate, which looks at each array for long.
    try:
        group.memory[:] = b"".join(sources)
    except TypeError:  # one of them is not contiguous
        group.memory[:] = b"".join([source.tobytes() for source in sources])


def _runs(like: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names in groups: small tensors with others of their type, each larger one alone; last those that go ahead."""
    small: dict[torch.dtype, list[str]] = {}
    alone: list[list[str]] = []
    for name, tensor in like.items():
        if 0 < _size(tensor) <= _SMALL_BYTES:
            small.setdefault(tensor.dtype, []).append(name)
        else:
            alone.append([name])
    return [*small.values(), *sorted(alone, key=lambda run: _goes_ahead(run, like))]


def _goes_ahead(run: Sequence[str], like: Mapping[str, torch.Tensor]) -> bool:
    least = _AHEAD_ALONE_BYTES if native_threads() is None else _AHEAD_BYTES
    return len(run) == 1 and _size(like[run[0]]) >= least


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _tensor(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return block[offset : offset + _size(like)].view(like.dtype).view(like.shape)


def _array(block: NDArray[Any], offset: int, like: torch.Tensor) -> NDArray[Any]:
    memory = block[offset : offset + _size(like)]
    return memory.view(numpy_dtype(dtype_name(like.dtype))).reshape(tuple(like.shape))


class Prefetch:
    """A second place for a step's inputs: pinned memory, and as much on the device, to which a stream of its own copies.

    A captured graph reads its inputs at fixed addresses, so a step takes over what is there by one copy on the device, before its graph:
    10 µs for 17 MB, which take 1.2 ms from the host. Neither place is written while somebody may still read it:

    - pinned memory, by the host, once the copies out of it have `arrived`;
    - the place on the device, by these copies, once the step before has `taken` what was there: its graph may still run.

    And what a step takes has `arrived`, whole. One thread does all of this.

    Attributes:
        feeds: The mapping whose values were sent for the next step; None where nothing was.
    """

    def __init__(self, inputs: InputStaging, device: Device) -> None:
        self._device = device
        self._streams = device.streams.lease(1)
        (self._copies,) = self._streams
        self._next = InputStaging(inputs.on_device, device, own_kernel=False, stream=self._copies.cuda_stream)
        self._take_over = AsyncCopy(self._next.memory, inputs.memory)
        self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()
        self._taken.record(torch.cuda.current_stream(device.place))  # which has filled the new memory with zeros
        self.feeds: Feeds | None = None

    def send(self, feeds: Feeds) -> None:
        """Copies arrays into pinned memory, and issues their copies to the device, which do not wait for a step that runs.

        Where a value is no array or does not fit, nothing can be taken: the step that is given it says what is wrong.
        """
        self.feeds = None
        self._arrived.synchronize()
        self._copies.wait_event(self._taken)
        try:
            self.feeds = feeds if self._next.send_all(feeds) else None
        except EngineError:
            pass
        finally:
            self._arrived.record(self._copies)

    def take(self, feeds: Feeds) -> bool:
        """Issues, on the current stream, what makes the values that were sent the inputs of the graphs behind it; false where they were
        those of another mapping, which nobody gets any more."""
        sent, self.feeds = self.feeds, None
        if sent is not feeds:
            return False
        current = torch.cuda.current_stream(self._device.place)
        current.wait_event(self._arrived)
        self._take_over.send(0, self._next.memory.numel())
        self._taken.record(current)
        return True

    def close(self) -> None:
        """Gives the stream back. Nothing may be on it."""
        self._device.streams.give_back(self._streams)
