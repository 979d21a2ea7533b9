"""What excludes what: one table for the command line and for Python, whose messages name options as the caller has typed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msplit.core.arguments import spelled
from msplit.errors import MsplitError

_ONE_BATCH = "several batches are measured one after the other, and it is for one"

EXCLUSIONS: tuple[tuple[tuple[str, Any], tuple[str, Any], str], ...] = (
    (("tune", None), ("effort", "fast"), "to tune is to measure"),
    (("tune", None), ("capture", False), "what is tuned are CUDA graphs"),
    (("tune", None), ("plan", None), "one finds a plan, and the other gives one"),
    (("cluster", None), ("engine", "cuda"), "a cluster runs TensorFlow"),
    (("cluster", None), ("timelines", None), "a step over a cluster is not traced"),
    (("place", None), ("streams", None), "both say where nodes go"),
    (("improve", None), ("variant", None), "it chooses what runs"),
    (
        ("improve", None),
        ("capture", False),
        "to launch step by step shares settings of PyTorch with what is being prepared",
    ),
    (("resume", None), ("restore", None), "one goes on from a checkpoint, and the other begins with one"),
    (("batches", None), ("reference", None), "a reference is for one batch"),
    *(
        (("batches_in_turn", None), (name, None), _ONE_BATCH)
        for name in ("tune", "plan", "timelines", "reference", "save_reference", "log_placement")
    ),
)
"""Two options, each with the value that is meant (None: any but its default), and why they exclude each other."""


def refuse_exclusions(given: Mapping[str, Any]) -> None:
    """Refuses options that exclude each other.

    Args:
        given: Options that have another value than their default.

    Raises:
        MsplitError: Two of them do.
    """
    for one, other, why in EXCLUSIONS:
        if all(name in given and (value is None or given[name] == value) for name, value in (one, other)):
            first, second = (spelled(name, value) for name, value in (one, other))
            raise MsplitError(f"{first} excludes {second}: {why}", fix="leave one of the two out")
