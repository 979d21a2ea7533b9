"""The arguments of NVIDIA's `multistream_inference`, so that a command for it can be repeated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msplit.errors import MsplitError

_FORM = "MODEL N_IN IN… N_OUT OUT… BATCH ITERS THREADS [CONFIG]"


@dataclass(frozen=True)
class Multistream:
    """Arguments of such a command, without the model.

    Attributes:
        inputs, outputs: Names of tensors.
        batch: Rows of a request.
        iterations: Requests of each thread.
        threads: Number of threads.
        config: A file with a ConfigProto as text.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int
    iterations: int
    threads: int
    config: Path | None


def parse(arguments: Sequence[str]) -> Multistream:
    """Reads what stands behind the model.

    Raises:
        MsplitError: It is something else.
    """
    left = list(arguments)

    def wrong(what: str) -> MsplitError:
        return MsplitError(what, where="--multistream", fix=f"write {_FORM}")

    def take(what: str) -> str:
        if not left:
            raise wrong(f"{what} is missing")
        return left.pop(0)

    def whole(what: str) -> int:
        given = take(what)
        if not given.isdecimal() or int(given) < 1:
            raise wrong(f"{what} is {given!r}, not a number above 0")
        return int(given)

    inputs = tuple(take("the name of an input") for _ in range(whole("the number of inputs")))
    outputs = tuple(take("the name of an output") for _ in range(whole("the number of outputs")))
    batch, iterations, threads = (whole(f"the number of {what}") for what in ("rows", "iterations", "threads"))
    config = Path(left.pop(0)) if left else None
    if left:
        raise wrong(f"{left[0]!r} is too much")
    return Multistream(inputs, outputs, batch, iterations, threads, config)
