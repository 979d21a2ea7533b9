from pathlib import Path

import networkx
import numpy as np
import pytest

from msplit import formats

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "training.meta", "while_v1.pb", "keras_inception"])
def test_ancestors_and_descendants_are_networkx_own(sample):
    graph = formats.read(SAMPLES / sample).graph
    whole = graph.to_networkx()
    chance = np.random.default_rng(0)
    for _ in range(10):
        roots = chance.choice(len(graph), 3).tolist()
        names = {graph.names[root] for root in roots}
        for found, reach in (
            (graph.ancestors(roots), networkx.ancestors),
            (graph.descendants(roots), networkx.descendants),
        ):
            expected = names.union(*(reach(whole, name) for name in names))
            assert {graph.names[node] for node in np.flatnonzero(found)} == expected
    assert not graph.ancestors([]).any()
