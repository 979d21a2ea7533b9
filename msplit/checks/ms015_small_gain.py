"""The predicted gain is below the threshold.

Finds: The simulated time with these ids, against that of the same kernels on one stream, is a speed-up below `min_gain`. It is a prediction
from the GPU's data sheet for the batch size given: measure with `msplit bench`.

Why: Streams that gain nothing still cost: memory, waits, and the time of whoever has to understand them.

Example: After a change of the model its towers became one batched product; 1.01x is left of the 1.8x that streams gained.

Mend: Assign the streams again, e. g. with `--rules auto`, or take the ids off. `msplit analyze` says whether streams can help at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject


def find(subject: Subject) -> Iterator[Finding]:
    """One finding."""
    prediction, limit = subject.prediction, subject.settings.limits.min_gain
    if prediction.gain < limit:
        judged = subject.judgement
        yield Finding(
            f"the predicted gain over one stream is {prediction.gain:.2f}x ({prediction.one_us:,.0f} µs to "
            f"{prediction.makespan_us:,.0f} µs), below {limit:g}x. {judged.words}",
            "leave this model on one stream"
            if judged.kind == "never"
            else "assign the streams again (`--rules auto`), or leave this model on one stream",
        )


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, limits=("min_gain",), depends="costs")
