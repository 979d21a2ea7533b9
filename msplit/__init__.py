"""msplit: split TensorFlow graphs over GPU streams.

A stream is a queue: the GPU runs what is in one queue in order, and what is in several side by side where it has room. Splitting a model
means to give every node the number of a stream, so that parts which do not need each other can run at the same time:

    import msplit

    flat = msplit.load("model.pb")                             # the model as one graph, calls inlined
    print(msplit.analyze(flat).suggestion)                     # can streams help it, and by which rules?
    assigned = msplit.assign(flat, "recsys", streams=4)        # a stream id from 0 to 3 for every node
    msplit.save(flat, assigned, "out.pb")                      # the same model with the ids in it

Nothing heavy is imported until it is used: neither TensorFlow nor PyTorch nor networkx comes with `import msplit`.
"""

from __future__ import annotations

from msplit._version import __version__

# Not from `typing`, which takes longer to load than all that comes before the command line can catch Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from msplit.annotate import stream, stream_group
    from msplit.api import *
    from msplit.checks import check
    from msplit.checks.subject import CheckSettings
    from msplit.errors import *

_ELSEWHERE = {
    "CheckSettings": "msplit.checks",
    "check": "msplit.checks",
    "stream": "msplit.annotate",
    "stream_group": "msplit.annotate",
}
"""Where names are that are not in `msplit.api`."""

__all__ = [
    "Analysis",
    "AssignError",
    "Assigned",
    "Bench",
    "BenchOptions",
    "Build",
    "BuildOptions",
    "Busy",
    "CheckSettings",
    "Closed",
    "CompiledFunction",
    "Cut",
    "DeviceLost",
    "EndOfData",
    "EngineError",
    "GraphError",
    "InvalidInput",
    "LoadError",
    "ModelDifference",
    "MsplitError",
    "OutOfMemory",
    "Pool",
    "PoolSettings",
    "ProcessLost",
    "RankLost",
    "RulesError",
    "RunOptions",
    "Runner",
    "Settings",
    "StepOptions",
    "TimedOut",
    "Trainer",
    "TuneSettings",
    "WriteError",
    "WrongShape",
    "__version__",
    "analyze",
    "assign",
    "bench",
    "build",
    "check",
    "compile",
    "cut",
    "diff",
    "emit",
    "load",
    "open",
    "pool",
    "prepare",
    "save",
    "stream",
    "stream_group",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'msplit' has no attribute {name!r}")
    import importlib

    errors = importlib.import_module("msplit.errors")
    where = "msplit.errors" if hasattr(errors, name) else _ELSEWHERE.get(name, "msplit.api")
    value = getattr(importlib.import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
