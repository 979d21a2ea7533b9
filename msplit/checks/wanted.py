"""The ids that the rules would write, as the file can hold them."""

from __future__ import annotations

import numpy as np

from msplit.checks.finding import Skip
from msplit.checks.subject import ABSENT, Longs, Subject
from msplit.flatten.origin import as_written
from msplit.rules import Outcome
from msplit.rules.auto import NOT_CHOSEN


def wanted(subject: Subject) -> Longs:
    """Per node the id that applying the rules would write on it; ABSENT for host nodes and for nodes that are not in the file.

    The body of a function that is called from several places has one id per node, which all its copies in the flat graph share.

    Raises:
        Skip: The rules can not be applied, MS003 says why; or they choose kernels, for which the model would have to run; or what they
            went by is not there.
    """
    if subject.basis is not None and subject.basis.missing is not None:
        raise Skip(subject.basis.missing)
    outcome = subject.outcome
    if not isinstance(outcome, Outcome):
        raise Skip("the rules contradict each other on this graph (see MS003)")
    if any(subject.remarks(NOT_CHOSEN)):
        raise Skip("the rules choose kernels, too (`kernels: best`), which takes running the model: give the --plan")
    flat = subject.flat
    ids = as_written(flat, np.where(flat.host, -1, outcome.ids).astype(np.int32), subject.costs.time_us)
    return np.where(ids < 0, ABSENT, ids.astype(np.int64))
