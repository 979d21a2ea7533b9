"""Answers one request of any protocol: takes inputs by name, has a pool compute, and picks outputs.

The event loop does the pool's work itself (`LoopDriver`), so that no thread has to be woken for a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from msplit.serving.server import tensors
from msplit.serving.server.models import Signature, Version, known_as
from msplit.serving.server.refusal import invalid, refusal

Arrays = Mapping[str, NDArray[Any]]


def size_of(outputs: Arrays) -> int:
    """Number of bytes of an answer's values; of strings, only the first `tensors.PIECE` are counted."""
    return sum([value.nbytes + tensors.text_bytes(value.reshape(-1)[: tensors.PIECE]) for value in outputs.values()])


@dataclass(frozen=True)
class InferenceRequest:
    """Request for outputs, of any protocol, as it was read.

    Attributes:
        said: The request as the protocol has it, without its inputs.
        version: Version of the model.
        signature: Signature whose pool computes.
        feeds: Arrays by the names of the pool's inputs.
        outputs: Names of outputs, as the client wrote them; none: all outputs.
        timeout: Seconds that it may wait to be started; None: any time.
        priority: Priority level; 0 is the most urgent.
    """

    said: Any
    version: Version
    signature: Signature
    feeds: Arrays
    outputs: Sequence[str] = ()
    timeout: float | None = None
    priority: int = 0


async def predict(request: InferenceRequest) -> dict[str, NDArray[Any]]:
    """Answers a request.

    Returns:
        Arrays by the names that were asked for.

    Raises:
        Refusal: The request is wrong, or could not be answered.
    """
    signature, pool = request.signature, request.signature.pool
    keys = _keys(signature, request.outputs)
    priority = min(request.priority, pool.settings.priorities - 1)
    try:
        answer = pool.submit(request.feeds, timeout=request.timeout, priority=priority)
    except Exception as problem:
        raise refusal(problem) from problem
    waiter = signature.driver.ask(answer)
    try:
        outputs = await waiter
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except Exception as problem:
        raise refusal(problem, ran=True) from problem
    return {asked: outputs[key] for asked, key in keys.items()}


def _keys(signature: Signature, wanted: Sequence[str]) -> dict[str, str]:
    """Names of outputs as the client wrote them -> the pool's names."""
    outputs = signature.pool.outputs
    if not wanted:
        return {key: key for key in outputs}
    found: dict[str, str] = {}
    for name in wanted:
        key = known_as(name, outputs)
        if key is None:
            known = f"Outputs expected to be in the set {{{','.join(outputs)}}}."
            raise invalid(f"output tensor alias not found in signature: {name} {known}")
        if name in found:
            raise invalid(f"duplicate output tensor alias: {name}")
        found[name] = key
    return found
