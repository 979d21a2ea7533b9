"""msplit: split TensorFlow graphs over GPU streams.

    import msplit

    flat = msplit.load("model.pb")
    print(msplit.analyze(flat).suggestion)
    assigned = msplit.assign(flat, "recsys", streams=4)
    msplit.save(flat, assigned.ids, "out.pb")

Nothing heavy is imported until it is used: neither TensorFlow nor PyTorch nor networkx comes with `import msplit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msplit._version import __version__

if TYPE_CHECKING:
    from msplit.annotate import stream
    from msplit.api import (
        Analysis,
        Assigned,
        Bench,
        BenchRequest,
        Runner,
        Settings,
        analyze,
        assign,
        bench,
        emit,
        load,
        prepare,
        save,
    )
    from msplit.checks import check
    from msplit.errors import MsplitError

_HOME = {
    "Analysis": "msplit.api",
    "Assigned": "msplit.api",
    "Bench": "msplit.api",
    "BenchRequest": "msplit.api",
    "MsplitError": "msplit.errors",
    "Runner": "msplit.api",
    "Settings": "msplit.api",
    "analyze": "msplit.api",
    "assign": "msplit.api",
    "bench": "msplit.api",
    "check": "msplit.checks",
    "emit": "msplit.api",
    "load": "msplit.api",
    "prepare": "msplit.api",
    "save": "msplit.api",
    "stream": "msplit.annotate",
}

__all__ = [
    "Analysis",
    "Assigned",
    "Bench",
    "BenchRequest",
    "MsplitError",
    "Runner",
    "Settings",
    "__version__",
    "analyze",
    "assign",
    "bench",
    "check",
    "emit",
    "load",
    "prepare",
    "save",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'msplit' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
