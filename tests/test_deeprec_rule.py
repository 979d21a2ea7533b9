"""The same program under msplit.stream and under DeepRec's rule for tf.stream: equal ids.

DeepRec (tensorflow/python/framework/ops.py): a new op takes the id on top of the graph's stack of streams, if there is one. Then the stack
of colocations is walked from the newest to the oldest, and every op on it that has an id overwrites the new op's.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from msplit.annotate import stream

pytestmark = pytest.mark.tf

Program = list[tuple[Any, ...]]
"""Statements: ("op",), ("stream", id, program) or ("colocate", number of an earlier op, program)."""


def program(rng: random.Random, depth: int = 0, made: int = 0) -> tuple[Program, int]:
    """A program, and how many ops there are after it."""
    statements: Program = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(["op", "op", "stream", "colocate"]) if depth < 5 else "op"
        if kind == "op" or (kind == "colocate" and not made):
            statements.append(("op",))
            made += 1
        else:
            argument = rng.randrange(4) if kind == "stream" else rng.randrange(made)
            body, made = program(rng, depth + 1, made)
            statements.append((kind, argument, body))
    return statements, made


def by_deeprec(statements: Program) -> list[int | None]:
    """Ids of the ops of a program, in the order in which they are made."""
    ids: list[int | None] = []
    streams: list[int] = []
    colocations: list[int] = []

    def execute(part: Program) -> None:
        for statement in part:
            if statement[0] == "op":
                found = streams[-1] if streams else None
                for other in reversed(colocations):
                    if ids[other] is not None:
                        found = ids[other]
                ids.append(found)
                continue
            stack = streams if statement[0] == "stream" else colocations
            stack.append(statement[1])
            execute(statement[2])
            stack.pop()

    execute(statements)
    return ids


def by_msplit(statements: Program) -> list[int | None]:
    """The same, by TensorFlow and msplit.stream."""
    import tensorflow as tf

    made: list[Any] = []

    def execute(part: Program) -> None:
        for statement in part:
            if statement[0] == "op":
                made.append(tf.constant(1.0).op)
            elif statement[0] == "stream":
                with stream(statement[1]):
                    execute(statement[2])
            else:
                with tf.compat.v1.colocate_with(made[statement[1]]):
                    execute(statement[2])

    with tf.Graph().as_default():
        execute(statements)
        return [op.get_attr("_stream_id") if "_stream_id" in op.node_def.attr else None for op in made]


def test_programs_get_the_same_ids() -> None:
    different = 0
    for seed in range(200):
        statements, count = program(random.Random(seed))
        expected = by_deeprec(statements)
        assert len(expected) == count
        assert by_msplit(statements) == expected, (seed, statements)
        different += len(set(expected)) > 1
    assert different > 100


def test_the_rule_itself() -> None:
    two_ops: Program = [("stream", 1, [("op",)]), ("stream", 2, [("op",)])]
    assert by_deeprec([*two_ops, ("stream", 3, [("colocate", 0, [("op",)])])])[2] == 1
    assert by_deeprec([*two_ops, ("colocate", 0, [("colocate", 1, [("op",)])])])[2] == 1
    assert by_deeprec([*two_ops, ("op",)])[2] is None
