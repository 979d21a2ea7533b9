"""Too many shapes are unknown for the prediction to mean anything.

Finds: More than `max_unknown` of the kernels read or write tensors of unknown shape, so that their cost is a guess.

Why: Rules that weigh costs, and the checks of balance, overlap and gain (MS012, MS014, MS015), then work with guesses.

Example: Inputs of unknown rank: `tf.compat.v1.placeholder(tf.float32)` without a shape.

Mend: Give the shapes of the inputs (--shape NAME=D,D,…, or `shapes:` in the settings), or export the model with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Subject


def find(subject: Subject) -> Iterator[Finding]:
    """One finding."""
    kernels = np.flatnonzero(subject.launches)
    which = kernels[~subject.costs.known[kernels]] if subject.guesses is None else subject.guesses.nodes
    limit = subject.settings.limits.max_unknown
    if len(kernels) and len(which) / len(kernels) > limit:
        ops = subject.flat.graph.ops
        common = Counter(ops[node] for node in which.tolist()).most_common(3)
        yield Finding(
            f"the shapes of {len(which):,} of {len(kernels):,} kernels are not known (limit: {limit:.0%}), most of them "
            f"{', '.join(f'{op} ({count})' for op, count in common)}: what is predicted means little",
            "give the shapes of the inputs: --batch N, --shape NAME=D,D,…"
            if subject.guesses is None
            else subject.guesses.mend,
            subject.names(which),
            len(which),
        )


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, limits=("max_unknown",), depends="costs")
