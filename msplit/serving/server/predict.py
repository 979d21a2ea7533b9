"""One request, from any protocol: names become inputs, a pool computes, outputs are chosen.

The event loop does the pool's work itself (`driver`), so that no thread has to be woken for a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import get_ident
from typing import Any

from numpy.typing import NDArray

from msplit.serving.pool.pool import Pool
from msplit.serving.server import tensors
from msplit.serving.server.models import Signature, known_as
from msplit.serving.server.refusal import invalid, refusal

Arrays = Mapping[str, NDArray[Any]]


def size_of(outputs: Arrays) -> int:
    """Bytes of an answer's values; of many strings, those of the first `tensors.PIECE`."""
    return sum([value.nbytes + tensors.text_bytes(value.reshape(-1)[: tensors.PIECE]) for value in outputs.values()])


async def predict(
    signature: Signature, feeds: Arrays, wanted: Sequence[str] = (), *, timeout: float | None = None, priority: int = 0
) -> dict[str, NDArray[Any]]:
    """Answers a request.

    Args:
        signature: Who is asked.
        feeds: Arrays by the names of the pool's inputs.
        wanted: Keys of outputs; none: all of them.
        timeout: Seconds that it may wait to be started.
        priority: Its level; 0 is the most urgent.

    Returns:
        Arrays by the keys that were asked for.

    Raises:
        Refusal: The request is wrong, or could not be answered.
    """
    pool = signature.pool
    keys = _keys(signature, wanted)
    try:
        answer = pool.submit(feeds, timeout=timeout, priority=min(priority, pool.settings.priorities - 1))
    except Exception as problem:
        raise refusal(problem) from problem
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    _when_done(answer, partial(_land, loop, get_ident(), waiter), pool)
    signature.driver.start()
    try:
        outputs = await waiter
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except Exception as problem:
        raise refusal(problem, ran=True) from problem
    return {asked: outputs[key] for asked, key in keys.items()}


def _keys(signature: Signature, wanted: Sequence[str]) -> dict[str, str]:
    """Outputs as they are asked for, by the pool's names."""
    outputs = signature.pool.outputs
    if not wanted:
        return {key: key for key in outputs}
    found: dict[str, str] = {}
    for name in wanted:
        key = known_as(name, outputs)
        if key is None:
            known = ",".join(outputs)
            raise invalid(
                f"output tensor alias not found in signature: {name} Outputs expected to be in the set {{{known}}}."
            )
        if name in found:
            raise invalid(f"duplicate output tensor alias: {name}")
        found[name] = key
    return found


def _when_done(answer: Future[Any], land: Callable[[Future[Any]], None], pool: Pool) -> None:
    """Has a function called with the answer. A pool that is polled would wake a thread of its own for that; here the loop does the work."""
    if pool.polls:
        Future.add_done_callback(answer, land)
    else:
        answer.add_done_callback(land)


def _land(loop: asyncio.AbstractEventLoop, thread: int, waiter: asyncio.Future[Any], answer: Future[Any]) -> None:
    """Hands an answer to who waits in the loop, from whichever thread has it."""
    if get_ident() == thread:
        _hand(waiter, answer)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_hand, waiter, answer)


def _hand(waiter: asyncio.Future[Any], answer: Future[Any]) -> None:
    if waiter.done():  # whoever waited has gone
        return
    if answer.cancelled():
        waiter.cancel()
    elif (problem := answer.exception()) is not None:
        waiter.set_exception(problem)
    else:
        waiter.set_result(answer.result())
