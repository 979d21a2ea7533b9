"""Several batches of one model as one: a step takes the rung of its batch, or the next larger one, and cuts what that gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msplit.engines.base import Executable, Feeds, Following, is_tensor
from msplit.engines.tensors import tensor
from msplit.errors import EngineError


class Ladder(Executable):
    """Executables of one model for several batches. See `engines.base.Executable`; what has no inputs is of the largest.

    Args:
        rungs: By batch.
        rows: Of inputs and of outputs, how many entries of the leading dimension belong to a row (0: it has no rows), where rows are
            independent; None where that was not shown.
        mixes: Why it was not.
        inputs: Names of all inputs.
    """

    def __init__(
        self,
        rungs: Mapping[int, Executable],
        rows: tuple[Mapping[str, int], Mapping[str, int]] | None,
        mixes: str,
        inputs: Sequence[str],
    ) -> None:
        self._rungs = dict(sorted(rungs.items()))
        self._rows, self._mixes, self._inputs = rows, mixes, inputs
        self._largest = next(reversed(self._rungs.values()))

    def step(self, feeds: Feeds) -> dict[str, Any]:
        """A step of any batch that a rung has; of a smaller one too, where rows are independent.

        Raises:
            EngineError: There is no rung for it.
        """
        return self._step(feeds, lambda rung, filled: rung.step(filled))

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """See `Executable`."""
        return self._step(feeds, lambda rung, filled: rung.step_on_device(filled))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """See `Executable`: where the next step is one of the same batch, and that is a rung. Others are not sent ahead."""
        batch = self._batch(feeds)

        def following() -> Feeds | None:
            found = then()
            with contextlib.suppress(EngineError):  # its own step says so
                return found if found is not None and self._batch(found) == batch and batch in self._rungs else None
            return None

        return self._step(feeds, lambda rung, filled: rung.step_prefetching(filled, following, on_device=on_device))

    def _step(self, feeds: Feeds, step: Callable[[Executable, Feeds], dict[str, Any]]) -> dict[str, Any]:
        batch = self._batch(feeds)
        if batch in self._rungs:
            return step(self._rungs[batch], feeds)
        if self._rows is None:
            raise EngineError(
                f"a batch of {batch} is none of those that were built ({self._list()}), and it can not be filled up to one: {self._mixes}",
                fix="build that batch, too",
            )
        rung = next((size for size in self._rungs if size >= batch), None)
        if rung is None or batch < 1:
            raise EngineError(
                f"a batch of {batch} is not between 1 and {max(self._rungs)}, the largest that was built",
                fix="build a larger one",
            )
        entries, made = self._rows
        filled = {
            name: _filled(name, value, batch, rung, entries[name]) if entries.get(name) else value
            for name, value in feeds.items()
        }
        outputs = step(self._rungs[rung], filled)
        return {name: value[: batch * made[name]] if made.get(name) else value for name, value in outputs.items()}

    def _batch(self, feeds: Feeds) -> int:
        """Rows of a step, by the inputs that have rows; without knowing which these are, by what the first one has."""
        entries = self._rows[0] if self._rows is not None else dict.fromkeys(self._inputs, 1)
        sizes = {
            name: feeds[name].shape[0] / count
            for name, count in entries.items()
            if count and name in feeds and len(getattr(feeds[name], "shape", []))
        }
        if self._rows is None:
            known = [int(size) for size in sizes.values()]
            return next((size for size in known if size in self._rungs), next(iter(known), 0))
        if len(set(sizes.values())) > 1 or not all(size.is_integer() for size in sizes.values()):
            said = ", ".join(f"{name} {size:g}" for name, size in sizes.items())
            raise EngineError(f"inputs have different numbers of rows: {said}", fix="give all of them the same batch")
        return int(next(iter(sizes.values()), 0))

    def _list(self) -> str:
        return ", ".join(map(str, self._rungs))

    def launch(self) -> None:
        """See `Executable`."""
        self._largest.launch()

    def device_times(self, count: int) -> list[float] | None:
        """See `Executable`."""
        return self._largest.device_times(count)

    def facts(self) -> Mapping[str, Any]:
        """Those of the largest, and the batches."""
        return {**self._largest.facts(), "batches": tuple(self._rungs)}

    def close(self) -> None:
        """Closes all of them."""
        for executable in self._rungs.values():
            executable.close()


def _filled(name: str, value: Any, batch: int, rung: int, entries: int) -> Any:
    """An input with its first row repeated at the end: what is a legal row, an index in range for example, is one there, too."""
    if is_tensor(value):
        value = tensor(name, value)
    first = list(range(entries))
    return value[[*range(batch * entries), *first * (rung - batch)]]
