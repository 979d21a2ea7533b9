"""Lookups in a table that lies in parts."""

import numpy as np
import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import (
    normal,
)

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("rows", [(4, 4, 3), (5, 5, 5), (7,)])
def test_a_lookup_in_a_table_of_parts_is_a_lookup_in_the_whole(strategy, rows):
    feeds = {"ids": np.random.default_rng(0).integers(0, sum(rows), (4, 3)).astype(np.int64)}

    def build(tf, v1):
        ids = v1.placeholder(tf.int64, [None, 3], name="ids")
        tables = [tf.constant(normal(count, 2)) for count in rows]
        tf.identity(v1.nn.embedding_lookup(tables, ids, partition_strategy=strategy), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    program = program_of(flat, feeds)
    assert not program.dynamic
    found = kernels(program)
    assert not {"DynamicPartition", "ParallelDynamicStitch"} & set(found)
    assert found.count("GatherV2") == (2 if len(rows) > 1 else 1)


def test_parts_in_another_order_stay():
    """A stitch that does not put the rows back where their ids were."""
    feeds = {"ids": np.array([0, 1, 2, 3], np.int32)}

    def build(tf, v1):
        ids = v1.placeholder(tf.int32, [4], name="ids")
        to = tf.math.floormod(ids, 2)
        places = tf.dynamic_partition(tf.constant([3, 2, 1, 0]), to, 2)
        parts = tf.dynamic_partition(ids // 2, to, 2)
        rows = [tf.gather(tf.constant(normal(2, 3)), part) for part in parts]
        tf.identity(tf.dynamic_stitch(places, rows), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds, capture=False)
    assert program_of(flat, feeds).dynamic
