"""Groups of nodes that should share a stream and do not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Subject
from msplit.checks.words import listed
from msplit.core.graph import Ints


def splits(subject: Subject, of: Ints) -> Iterator[tuple[int, Ints, str]]:
    """The groups with nodes on several streams.

    Args:
        subject: The model. Nodes without a stream (host nodes) do not count.
        of: Per node its group or -1.

    Yields:
        The group, its nodes in order (first one of each stream, then the others), and the streams in words.
    """
    member = np.flatnonzero((of >= 0) & subject.placed)
    if not len(member):
        return
    low = np.full(int(of.max()) + 1, np.iinfo(np.int64).max)
    high = np.full(int(of.max()) + 1, np.iinfo(np.int64).min)
    np.minimum.at(low, of[member], subject.ids[member])
    np.maximum.at(high, of[member], subject.ids[member])
    torn = member[low[of[member]] < high[of[member]]]
    torn = torn[np.argsort(of[torn], kind="stable")]
    groups, starts = np.unique(of[torn], return_index=True)
    for group, nodes in zip(groups.tolist(), np.split(torn, starts[1:]) if len(groups) else (), strict=True):
        streams, first = np.unique(subject.ids[nodes], return_index=True)
        others = np.delete(nodes, first)
        yield group, np.concatenate([nodes[first], others]).astype(np.int32), f"streams {listed(streams.tolist())}"
