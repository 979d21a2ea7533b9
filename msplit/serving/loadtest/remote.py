"""An arm in a process of its own: TensorFlow, whose devices and streams are the process's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from msplit.engines.process import Problem, serve
from msplit.errors import EngineError
from msplit.serving.loadtest.dispatcher import Watch, settled
from msplit.serving.loadtest.table import Table
from msplit.serving.loadtest.targets import Arm, Spec, sessions


def main(arguments: Sequence[str]) -> None:
    """Builds what it is told, and answers runs until nobody asks any more."""
    parent = int(arguments[1])
    opened: list[tuple[Arm, Table]] = []

    def alive() -> None:
        if os.getppid() != parent:
            raise EngineError("nobody waits for it any more")

    def answer(message: Any) -> Any:
        try:
            if isinstance(message, Spec):
                arm = sessions(message)
                opened.append((arm, Table(message.layout, message.handle)))
                return arm.plain, dict(arm.facts())
            ((arm, table),) = opened
            what, timeout = message
            if what == "facts":
                return dict(arm.facts())
            with settled():
                return dict(arm.run(table, Watch(table, alive), timeout))
        except Exception as problem:  # noqa: BLE001  the other process tells it
            return Problem.of(problem)

    serve(arguments, answer)
    for arm, _ in opened:
        arm.close()


if __name__ == "__main__":
    main(sys.argv[1:])
