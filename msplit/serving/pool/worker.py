"""Process of a pool: has a GPU, or a part of one, with a pool of its own, and answers what its clients write into memory shared with each.

It ends when the process that started it does, however that ends, or when its GPU fails, so that another one takes its place. Clients
connect to its socket: the process that started it, and each process that the pool was sent to. One that is gone takes nothing with it but
its own requests.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from msplit.engines.base import Registers
from msplit.engines.environment import THREADS_BYTES
from msplit.engines.process import WEIGHTS, is_ours
from msplit.errors import DeviceLost, EngineError
from msplit.progress import Progress
from msplit.serving.pool.given_values import Message, take_values
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Ports
from msplit.serving.pool.ring import COUNTS, DROPPED, ERROR, OUTPUTS, Memory, MemorySizes, bytes_of, packed_error
from msplit.serving.pool.settings import PoolSettings

_SPIN = 1e-3
"""Seconds for which it looks for what is over without sleeping, where there is a core for it. Then it sleeps `_NAP` between two looks."""
_NAP = 50e-6
_LINGER = 250e-6
"""Seconds for which it looks for the next request in this way, where there are more: who has one at a time sends it by then, and to be
woken takes up to 50 µs."""
_WATCH = 1.0
"""Seconds between two looks whether the process that started it is there, in case that another one holds the end of its pipe."""
_GRACE = 0.8
"""Seconds to close the pool in."""
_FEWEST, _MOST = 16, 1024
"""Slots of the memory."""
_ROOM = 1 << 28
"""Bytes that slots may take, where more than `_FEWEST` are."""


@dataclass(frozen=True, eq=False)
class Start:
    """Task of a process.

    Attributes:
        make: Makes its pool; called with a function that is told of progress.
        listens: Descriptor of the socket that its clients connect to.
        cores: Cores for each process, of which it needs one.
        weights: Descriptors of both ends of the socket through which it shares weights; none: it has its own.
    """

    make: Callable[[Progress], Pool]
    listens: int
    cores: int
    weights: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Hello:
    """Greeting of a process to a client: its number, the description of its pool, and the sizes of the memory that they share."""

    pid: int
    ports: Ports
    about: About
    settings: PoolSettings
    sizes: MemorySizes


def sizes_of(ports: Ports, about: About, settings: PoolSettings) -> MemorySizes:
    """Sizes of the memory: slots for all rows of two steps in each group, so that steps that are full wait behind those that run."""
    rows = ports.batches[-1] if ports.batches else 0
    longest = ports.lengths[-1] if ports.lengths else 0
    inputs, outputs = ports.input_layout(rows, longest), ports.output_layout(about.outputs, rows, longest)
    sizes = [0 if layout is None else bytes_of(layout) for layout in (inputs, outputs)]
    if sizes[0] >= THREADS_BYTES:  # CUDA registers pages
        sizes[0] += -sizes[0] % mmap.PAGESIZE
    wanted = 2 * int(settings.groups) * (rows if ports.joins else 1)
    slots = max(min(wanted, _MOST, _ROOM // max(sum(sizes), 1)), _FEWEST, 2 * settings.priorities)
    return MemorySizes(slots, sizes[0], sizes[1], inputs is None)


def memory_of(hello: Hello, handle: int, bells: Sequence[int], host_memory: Registers | None = None) -> Memory:
    """The memory that a process and a client share, as either sees it."""
    ports, outputs = hello.ports, hello.about.outputs
    return Memory(handle, bells, hello.sizes, ports.input_layout, partial(ports.output_layout, outputs), host_memory)


class _Client:
    """A process that asks.

    Attributes:
        memory: Shared with it.
        taken: Requests that it has sent.
        gone: True when it has ended.
    """

    def __init__(self, line: socket.socket, hello: Hello, counts: int, host_memory: Registers | None) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.line, self.taken, self.gone = line, 0, False
        self.bells = os.eventfd(0, flags), os.eventfd(0, flags)
        handle = os.memfd_create("msplit-pool")
        try:
            os.ftruncate(handle, hello.sizes.parts()[-1])
            self.memory = memory_of(hello, handle, self.bells, host_memory)
            line.settimeout(_WATCH)
            socket.send_fds(line, [b"\0"], [handle, *self.bells, counts])
            line.sendall(pickle.dumps(hello))
        except OSError:
            self.leave()
        finally:
            os.close(handle)

    def leave(self) -> None:
        """Drops what it had asked, and gives back what was shared."""
        self.gone, self.memory.flags[:] = True, b"\1" * len(self.memory.flags)
        self.line.close()
        for bell in self.bells:
            os.close(bell)


class _Serving:
    """The main loop, and what its callbacks share.

    Attributes:
        values: Number of the model's values; steps that run have them.
    """

    def __init__(self, pool: Pool, hello: Hello, listener: socket.socket, stop: int, cores: int) -> None:
        self.pool, self._hello, self._listener, self._stop = pool, hello, listener, stop
        # The other one looks, too.
        self._spin, self._linger = _SPIN if cores > 1 else 0.0, _LINGER if cores > 2 else 0.0
        self._main, self._lock = get_ident(), threading.Lock()
        self._clients: dict[int, _Client] = {}
        self._concerned, self._answered, self._under_way = set[_Client](), False, 0
        self._counted = os.memfd_create("msplit-pool")
        os.ftruncate(self._counted, mmap.PAGESIZE)
        self._counts = mmap.mmap(self._counted, mmap.PAGESIZE)
        self._poller = select.epoll()
        for handle in (listener.fileno(), stop):
            self._poller.register(handle, select.EPOLLIN)
        self.lost: DeviceLost | None = None
        self.values = 0

    def run(self) -> None:
        """Answers requests until it is to stop, or the GPU fails."""
        pool, polls, poller = self.pool, self.pool.polls, self._poller
        busy, since = False, 0.0
        self._tell()
        while self.lost is None:
            looks = time.perf_counter() - since < (self._spin if busy else self._linger)
            if busy and not looks:
                select.select((poller,), (), (), _NAP)
            ready = poller.poll(0 if busy or looks else None)
            for handle, _ in ready:
                if handle == self._stop:
                    return
                self._hear(handle)
            busy = pool.drive() if polls else False
            if ready or self._answered:
                since = time.perf_counter()
                self._tell()

    def _hear(self, handle: int) -> None:
        """Takes the requests of a client, or takes note that it is there or has gone."""
        if handle == self._listener.fileno():
            self._meet()
        elif (client := self._clients.get(handle)) is None:
            return  # what it has said came together with its end
        elif handle != client.line.fileno():
            slots = client.memory.requests.take()
            with self._lock:  # a thread of the pool may tell of answers just then
                client.taken += len(slots)
                self._concerned.add(client)
            for slot in slots:
                self._accept(client, slot)
        else:
            for each in (client.bells[0], handle):
                self._poller.unregister(each)
                del self._clients[each]
            with self._lock:
                client.leave()

    def _meet(self) -> None:
        """Takes a client, if it is one of this user's and listens."""
        line, _ = self._listener.accept()
        if not is_ours(line):
            line.close()
        elif not (client := _Client(line, self._hello, self._counted, self.pool.host_memory)).gone:
            for handle in (client.bells[0], line.fileno()):
                self._clients[handle] = client
                self._poller.register(handle, select.EPOLLIN)

    def _accept(self, client: _Client, slot: int) -> None:
        reply = SlotReply(self, client, slot)
        try:
            feeds, reply.rows, level, since, deadline = client.memory.asked(slot)
            reply.length = self.pool.ports.positions(feeds)
            with self._lock:
                reply.weight = reply.rows or 1
                self._under_way += reply.weight
            self.pool.accept(feeds, reply.rows, level, since, deadline, reply)
        except Exception as problem:  # noqa: BLE001  the client gets it
            reply.set_exception(problem)

    def tell(self, reply: SlotReply, kind: int, size: int) -> None:
        """Puts an answer into its ring. What the main loop brings is told at its end, what another thread brings at once."""
        client = reply.client
        with self._lock:
            self._under_way -= reply.weight
            if not client.gone:
                client.memory.tell(reply.slot, kind, size, reply.values)
                client.memory.answers.push(reply.slot)
            self._concerned.add(client)
            self._answered = True
        if get_ident() != self._main:
            self._tell()

    def _tell(self) -> None:
        stats = self.pool.scheduler.stats()  # without its lock, which is held where a request is claimed
        own = (stats.waiting, stats.steps, stats.in_flight, stats.rows, stats.filled)
        looked_up = self.pool.lookups()
        with self._lock:
            COUNTS.pack_into(self._counts, 0, self._under_way, *own, *looked_up)
            for client in self._concerned:
                if not client.gone:
                    client.memory.taken[0] = client.taken  # what waits is among the counts by now
                    client.memory.answers.ring()
            self._concerned.clear()
            self._answered = False

    def fail(self, problem: DeviceLost) -> None:
        """Ends the loop, since the GPU has failed."""
        self.lost = problem
        os.eventfd_write(self._stop, 1)


class SlotReply:
    """Place of the answer to a request: what a pool knows as its future.

    Attributes:
        client, slot: Who gets it, and where.
        rows: Rows of the request.
        length: Length of these; 0 where they have none.
        weight: Rows that it adds to those under way; 0 until it has been read.
        values: Number of the values that its step has.
    """

    __slots__ = ("_serving", "client", "length", "rows", "slot", "values", "weight")

    def __init__(self, serving: _Serving, client: _Client, slot: int) -> None:
        self._serving, self.client, self.slot = serving, client, slot
        self.rows = self.length = self.weight = self.values = 0

    def begun(self) -> None:
        """Takes note that a step has it: other values come when no step runs."""
        self.values = self._serving.values

    def set_running_or_notify_cancel(self) -> bool:
        """Takes the request for a step; False where nobody waits for it, which the client is told."""
        if not self.client.memory.flags[self.slot]:
            self.begun()
            return True
        self._serving.tell(self, DROPPED, 0)
        return False

    def places(self) -> Mapping[str, Any] | None:
        """Places of outputs."""
        return self.client.memory.outputs.views(self.slot, self.rows, self.length)

    def set_result(self, outputs: Mapping[str, Any]) -> None:
        """Writes outputs."""
        try:
            size = self.client.memory.outputs.write(self.slot, self.rows, outputs, self.length)
        except Exception as problem:  # noqa: BLE001  the client gets it
            self.set_exception(problem)
        else:
            self._serving.tell(self, OUTPUTS, size)

    def set_exception(self, problem: Exception) -> None:
        """Writes an error. That of a GPU ends the process, and its requests are run in another one."""
        if isinstance(problem, DeviceLost):
            self._serving.fail(problem)
            return
        area, data = self.client.memory.outputs, packed_error(problem)
        try:
            size = area.spill(self.slot, data)
        except EngineError:  # a message of 64 MB
            size = area.spill(self.slot, packed_error(EngineError(str(problem)[:1000])))
        self._serving.tell(self, ERROR, size)


def _watch(pipe: Connection, parent: int, stop: int, said: SimpleQueue[Message]) -> None:
    """Takes what the process that started this one says, and ends this one when that is gone or wants it to, whatever other threads do."""
    with suppress(OSError, EOFError):
        while os.getppid() == parent:
            if pipe.poll(_WATCH):
                said.put(pipe.recv())
    os.eventfd_write(stop, 1)
    time.sleep(_GRACE)
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """The process. Says None when its clients may connect, else the error that hinders it."""
    pipe, parent = Connection(int(arguments[0])), int(arguments[1])
    start: Start = pipe.recv()
    stop, listener = os.eventfd(0), socket.socket(fileno=start.listens)
    said, begin = SimpleQueue[Message](), threading.Event()
    threading.Thread(target=_watch, args=(pipe, parent, stop, said), daemon=True).start()
    try:
        if start.weights:
            first, second = (socket.socket(fileno=one) for one in start.weights)
            WEIGHTS.set((first, second))
        pool = start.make(lambda what, share: pipe.send((what, share)))
        ports, _ = pool.ports.on_host(), pool.host_memory  # of which there may be a note
        sizes = sizes_of(ports, pool.about, pool.settings)
        serving = _Serving(
            pool, Hello(os.getpid(), ports, pool.about, pool.settings, sizes), listener, stop, start.cores
        )
    except Exception as problem:  # noqa: BLE001  the other process raises it
        pipe.send(packed_error(problem))
        return
    gc.collect()
    gc.freeze()

    def numbered(number: int) -> None:
        serving.values = number
        begin.set()

    pipe.send(None)
    threading.Thread(target=take_values, args=(pool.take_values, pipe, said, numbered), daemon=True).start()
    begin.wait()
    serving.run()
    if serving.lost is not None:
        pipe.send(packed_error(serving.lost))
        os._exit(1)
    pool.close(finish=False)
    os._exit(0)  # what is left in memory needs no tidying up


if __name__ == "__main__":
    from msplit.serving.pool import worker  # so that classes of what is sent are those of the module

    worker.main(sys.argv[1:])
