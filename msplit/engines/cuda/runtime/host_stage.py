"""Stage of what the host does, in front of the device part or behind it: by the table of host ops, or in a session of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays
from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.ir.interpret import as_tuple, call, static_slots
from msplit.engines.cuda.ir.lowering import listed, table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.host.program import HostGraph, HostProgram
from msplit.engines.host.table import HostNode, Run
from msplit.engines.table_rows import TableOptions
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph, Tensor

if TYPE_CHECKING:
    from msplit.engines.tensorflow.frozen import FrozenSession
    from msplit.engines.tensorflow.session import SessionExecutable


@dataclass(frozen=True)
class HostOptions:
    """Options of what the host has and does of a model.

    Attributes:
        op_libraries: Shared objects with custom TensorFlow ops.
        timeout: Seconds that a step of it may take; see `TensorFlowOptions`.
        table_memory: See `EngineOptions`.
    """

    op_libraries: Sequence[Path] = ()
    timeout: float | None = None
    table_memory: TableOptions | None = None


class HostStage:
    """All that the host does at a time: in front of the device part, or behind it.

    Attributes:
        graph: The work with all that it takes; None where it can not be taken out of the model.
        why: The op because of which it can not.
        program: What runs it without TensorFlow; None where an op is missing.
        session: What runs it in TensorFlow; None where nothing needs that.
    """

    def __init__(
        self, graph: HostGraph | None, session: SessionExecutable | None, why: str, timeout: float | None, where: str
    ) -> None:
        self.graph, self.why, self.session = graph, why, session
        found = None if graph is None else HostProgram.of(graph, lowered)
        self.missing: Mapping[str, list[str]] = found.missing if found is not None else {why: []}
        self.program = found if found is not None and not found.missing else None
        self._frozen: FrozenSession | None = None
        if session is None and self.program is None and graph is not None:
            from msplit.engines.tensorflow.frozen import FrozenSession

            try:
                self._frozen = FrozenSession(graph, where, timeout)
            except EngineError as problem:
                names = ", ".join(f"{op} ({nodes[0]})" for op, nodes in sorted(self.missing.items()))
                raise EngineError(
                    f"{problem.what}: only that runs {names}, of what the host does", where=where, fix=problem.fix
                ) from problem

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs it on the inputs: outputs by name."""
        if self.program is not None and self.session is not None:
            return self._held_against_tensorflow(self.session, self.program, feeds)
        runs = self.program or self.session or self._frozen
        assert runs is not None
        return runs.step(feeds)

    def _held_against_tensorflow(
        self, session: SessionExecutable, program: HostProgram, feeds: Arrays
    ) -> dict[str, NDArray[Any]]:
        """The first step, in both. The session is given up where they agree, and goes on where they do not."""
        expected = session.step(feeds)
        try:
            made = program.step(feeds)
        except EngineError:
            made = {}
        wrong = [name for name, value in expected.items() if name not in made or not _agree(made[name], value)]
        if wrong:
            self.program, self.missing = None, {"another result than TensorFlow's": wrong}
        else:
            session.close()
            self.session = None
        return expected


def _agree(made: NDArray[Any], expected: NDArray[Any]) -> bool:
    if made.shape != expected.shape or made.dtype != expected.dtype:
        return False
    if made.dtype.kind not in "fcV":
        return bool(np.array_equal(made, expected))
    wide = np.complex128 if made.dtype.kind == "c" else np.float64
    return bool(np.allclose(made.astype(wide), expected.astype(wide), rtol=1e-5, atol=1e-6, equal_nan=True))


def lowered(node: HostNode) -> Run | None:
    """The function of a node by the engine's own lowering, on the CPU; None where there is none."""
    if node.op not in listed() or (lowering := table()[node.op]).mutates:
        return None
    op = Op(0, node.name, node.op, dict(node.attrs), [(0, slot) for slot in range(len(node.known))], [])
    static, known = static_slots(op), Node(op.name, op.op, op.attrs)

    def run(*inputs: NDArray[Any]) -> Any:
        arguments = [value if slot in static else to_torch(value) for slot, value in enumerate(inputs)]
        # Nothing here has a gradient: `torch.no_grad` would take longer than the op.
        made = tuple(to_numpy(result.contiguous()) for result in as_tuple(call(lowering, op, arguments, node=known)))
        return made if len(made) > 1 else made[0]

    return run


def stage_of(
    flat: FlatGraph, wanted: Mapping[str, Key], options: HostOptions, origin: Mapping[Key, Key], *, freezes: bool
) -> HostStage | None:
    """The work that makes some values on the CPU; None where there are none to make."""
    if not wanted:
        return None
    from msplit.engines.tensorflow import frozen, placed, runtime
    from msplit.engines.tensorflow.session import SessionExecutable

    runtime.load_op_libraries(options.op_libraries)
    # The flat graph, so that values inside of functions can be fetched.
    cut = replace(flat, outputs=tuple(Tensor(name, *origin.get(key, key)) for name, key in wanted.items()), targets=())
    whole = placed.place(cut, np.zeros(len(flat), np.int32), ["/device:CPU:0"], "/device:CPU:0")
    config = runtime.session_config(1, cpu_only=True)
    session = SessionExecutable(flat.model, whole, config, ieee=True, facts={}, timeout=options.timeout)
    graph, why = None, "it reads data of its own"
    if freezes:
        try:
            graph, why = frozen.freeze(session, whole), ""
        except frozen.NotFrozen as problem:
            why = str(problem)
        except MsplitError as problem:  # tables without contents, for one: its step says so, too
            why = problem.what
    return HostStage(graph, session, why, options.timeout, str(flat.model.source))
