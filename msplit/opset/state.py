"""Ops that change variables: TensorFlow has most of them twice, on references and on resources."""

from __future__ import annotations

import functools

from msplit.opset.traits import traits

_NAMES = {"AssignVariableOp": "Assign", "AssignAddVariableOp": "AssignAdd", "AssignSubVariableOp": "AssignSub"}


@functools.lru_cache(maxsize=4096)
def written(op: str) -> tuple[int, ...]:
    """Input slots of the variables that an op, or an op on values, changes; none for one that is not known to change any."""
    return traits(op).writes or traits(f"Resource{op}").writes


def on_values(op: str) -> str:
    """The name under which an op that changes variables is known once values stand in the place of handles: that of the op on references.

    ``ResourceApplyAdam`` is ``ApplyAdam``, ``AssignAddVariableOp`` is ``AssignAdd``. The first outputs are the changed variables; what a
    resource op gives of its own follows behind them.
    """
    return _NAMES.get(op) or op.removeprefix("Resource")


def own_outputs(op: str) -> int:
    """From which output of the op on values on those of the op itself begin: an op on references gives the reference first."""
    return 0 if on_values(op) == op and op not in _NO_REFERENCE else len(written(op))


_NO_REFERENCE = frozenset({"CountUpTo", "RngReadAndSkip", "RngSkip"})
"""Ops whose names do not tell that they give no reference."""
