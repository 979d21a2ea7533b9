"""The processes that train together, as one of them sees it: what the first one says, when all end, and which one is gone.

They meet at the first one's address. Each shows there every second that it is alive, and looks after the next one: one that says why it
ends, or that is silent for some seconds, ends the others, wherever they wait: for a GPU that is gone a kernel would wait forever.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from msplit.engines.base import starting_pytorch
from msplit.errors import EngineError, MsplitError, RankLost
from msplit.training.hosts import Rank

MEET = 120.0
"""Seconds that processes wait for each other to begin: some may have to load a larger model."""

LONGEST = 1800.0
"""Seconds that one waits for what another, which is alive, says: to prepare a model may take that long."""

SILENT = 18.0
"""Seconds after which one that does not show that it is alive is gone: it may be loading a library all the while."""

_RESUME = "the last checkpoint is whole: go on with --resume"
_PULSE = 1.0
_REASON = 1.5
"""Seconds that a lost connection waits for who lost it to say why."""

_PACE = 0.2
"""Seconds between two times that all are asked whether to end."""

_MOST_STEPS = 1000
_ENDED = "ended"
_MOST_SAID = 600


@dataclass(eq=False)
class World:
    """The processes that train together.

    Attributes:
        rank: The number of this one; the first one, 0, writes checkpoints and tells what came of it.
        size: Number of processes.
    """

    rank: int = 0
    size: int = 1
    _store: Any = None
    _said: int = field(default=0, repr=False)
    _left: int = field(default=0, repr=False)
    _ends: bool = field(default=False, repr=False)
    _asked_at: float = field(default=0.0, repr=False)
    _interval: int = field(default=1, repr=False)

    def share(self, value: Any = None) -> Any:
        """Share plain data of the first process with all of them.

        Raises:
            RankLost: It does not answer.
        """
        if self.size == 1:
            return value
        self._said += 1
        key = f"said/{self._said}"
        with _lost("the first process does not answer"):
            if self.rank == 0:
                self._store.set(key, json.dumps(value))
                return value
            return json.loads(self._store.get(key))

    def agree(self, wants: bool) -> bool:
        """True if to end, since one of them wants to: the same answer on all, which all ask before every step. To ask the others takes
        time, so it is done five times a second."""
        if self.size == 1:
            return wants
        self._ends |= wants
        self._left -= 1
        if self._left > 0:
            return False
        import torch

        now = time.monotonic()
        if self._asked_at:
            taken = max((now - self._asked_at) / self._interval, 1e-6)
            self._interval = max(1, min(int(_PACE / taken), _MOST_STEPS))
        self._asked_at = now
        said = torch.tensor([int(self._ends), self._interval if self.rank == 0 else 0])
        with _lost("another process does not answer"):
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
        ends, self._interval = map(int, said.tolist())
        self._left = self._interval
        return bool(ends)


ALONE = World()


@contextmanager
def _lost(said: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise RankLost(f"{said}: {str(error).partition(chr(10))[0]}") from error


@contextmanager
def joined(rank: Rank | None, *, on_gpu: bool, tell: Callable[[str], object]) -> Iterator[World]:
    """A block in which this process trains with others; alone, where it has no rank.

    Args:
        on_gpu: True if each has a GPU, which is the only one that it sees then.
        tell: Called from another thread, before it ends the process, with why: one of the others is gone, and what waits for it can not
            be ended otherwise.

    Raises:
        EngineError: PyTorch is missing, or there is no GPU for this one.
        RankLost: The others are not there, or one of them is gone: the message says which and why.
    """
    if rank is None or rank.size == 1:
        yield ALONE
        return
    if on_gpu:
        _choose_gpu(rank)
    with starting_pytorch():
        import torch
        import torch.distributed
    if on_gpu and not torch.cuda.is_available():
        fix = "start as many processes as there are GPUs; --device cpu simulates them"
        raise EngineError(f"there is no GPU for rank {rank.number}", fix=fix)
    world, watch = _meet(rank, on_gpu, tell)
    try:
        yield world
        watch.leaves = True
        with _lost("another process did not come to its end"):
            torch.distributed.all_reduce(torch.zeros(1))  # on the host: all have come here
        watch.end()
        torch.distributed.destroy_process_group()
    except RankLost as error:  # the group is left as it is: to end it could wait for who is gone
        reason = watch.wait() or error.what
        raise RankLost(reason, fix=_RESUME) from None
    except BaseException as error:
        watch.tell(error)
        raise
    finally:
        watch.end()


def _choose_gpu(rank: Rank) -> None:
    """Lets this process see one GPU, its own, before CUDA is loaded."""
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if visible and rank.local >= len(visible):
        said = f"there is no GPU for rank {rank.number}: {len(visible)} can be seen on this host"
        raise EngineError(said, fix="start as many processes as there are GPUs, or let CUDA_VISIBLE_DEVICES name more")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank.local] if visible else str(rank.local)


def _meet(rank: Rank, on_gpu: bool, tell: Callable[[str], object]) -> tuple[World, _Watch]:
    from torch import distributed

    where, first = f"{rank.host}:{rank.port}", rank.number == 0 and not rank.is_served

    def store(serves: bool) -> Any:
        return distributed.TCPStore(
            rank.host,
            rank.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET),
            master_listen_fd=rank.listener if serves else None,
        )

    try:
        own = distributed.PrefixStore("msplit", store(first))
        watched = distributed.PrefixStore("msplit", store(False))
    except (RuntimeError, OSError) as error:
        said = str(error).partition("\n")[0]
        what, fix = "the first process does not answer", "start it, or mend --hosts master="
        if first:
            what, fix = "can not listen", "give another port with --hosts master=, or end what uses it"
        raise RankLost(f"{what}: {said}", where=where, fix=fix) from None
    watch = _Watch(rank, watched, tell)
    try:
        _wait_for_all(rank, own, where)
        own.set_timeout(timedelta(seconds=LONGEST))
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=distributed.PrefixStore("group", own),
            rank=rank.number,
            world_size=rank.size,
            timeout=timedelta(seconds=LONGEST),
        )
    except (RuntimeError, OSError, RankLost) as error:
        reason = watch.wait() or str(error).partition("\n")[0]
        watch.end()
        raise RankLost(reason, fix="start every rank once, all with the same --hosts master=") from None
    return World(rank.number, rank.size, own), watch


def _wait_for_all(rank: Rank, store: Any, where: str) -> None:
    if store.add(f"here/{rank.number}", 1) > 1:
        raise RankLost(f"rank {rank.number} is there twice", where=where)
    here, until = store.add("here", 1), time.monotonic() + MEET
    while here < rank.size:
        if time.monotonic() > until:
            raise RankLost(f"{here} of {rank.size} processes came within {MEET:.0f} s", where=where)
        time.sleep(_PULSE / 20)
        here = store.add("here", 0)


class _Watch:
    """A thread that shows that this process is alive, and ends it when another is not.

    Attributes:
        reason: Name of the process that ended, and why it did; "" where none did.
        leaves: True if this one is done, so that it is no loss if the first one has gone.
    """

    def __init__(self, rank: Rank, store: Any, tell: Callable[[str], object]) -> None:
        self.reason, self.leaves = "", False
        self._rank, self._store, self._tell = rank, store, tell
        self._over, self._known, self._waits = threading.Event(), threading.Event(), False
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._look, name="msplit-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        next_one = (self._rank.number + 1) % self._rank.size
        seen, since = 0, time.monotonic()
        while not self._over.wait(_PULSE):
            try:
                self._store.add(f"alive/{self._rank.number}", 1)
                count = self._store.add(f"alive/{next_one}", 0)
                now = time.monotonic()
                if count != seen or not seen:  # one that has not begun yet is waited for elsewhere
                    seen, since = count, now
                elif now - since > SILENT:
                    self._store.compare_set(_ENDED, "", f"rank {next_one} is gone: no sign of life for {SILENT:.0f} s")
                if self._store.check([_ENDED]):
                    self._found(self._store.get(_ENDED).decode(errors="replace"))
            except (RuntimeError, OSError):
                if self._over.is_set() or self.leaves:
                    return
                self._found("rank 0 is gone: its address does not answer")
            if self._rank.is_child and os.getppid() != self._parent:
                self._found("what started it is gone")

    def _found(self, reason: str) -> None:
        """Another one ended: the main thread is told if it waits to hear, and ended where it is otherwise, since it may wait forever."""
        if self.reason:
            return
        self.reason = reason[:_MOST_SAID]
        self._known.set()
        if not self._waits and not self._over.wait(_PULSE * 2) and not self._waits:
            if self._rank.local == 0:
                self._tell(f"error: {RankLost(self.reason, fix=_RESUME)}")
            os._exit(2)

    def wait(self) -> str:
        """The process that ended, and why, once that is known; "" where nobody says so."""
        self._waits = True
        self._known.wait(_REASON)
        return self.reason

    def tell(self, error: BaseException) -> None:
        """Tells the others why this one ends."""
        what = str(error).partition("\n")[0] if isinstance(error, MsplitError) else type(error).__name__
        self._waits = True
        with suppress(RuntimeError, OSError):
            said = f"rank {self._rank.number} on {socket.gethostname()}: {what}"
            self._store.compare_set(_ENDED, "", said[:_MOST_SAID])

    def end(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join(SILENT)
