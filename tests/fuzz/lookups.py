"""Embedding lookups of all forms, a few beside each other, held against TensorFlow's own results.

A case is one to three columns: sparse ids at constant or fed places, a matrix of ids with -1 in its gaps, ragged ids or plain ones,
in tables of one to four parts, with weights or without; and what is made of them: the embeddings, their gradients, or steps of an
optimizer.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.fuzz.case import Result

Arrays = dict[str, NDArray[Any]]

SOURCES = ("sparse", "sparse at constant places", "matrix", "ragged", "plain")
OPTIMIZERS = ("GradientDescent", "Momentum", "Adam", "Adagrad", "RMSProp", "Ftrl", "Adadelta")
ENDS = ("values", "gradients", "training")
TURNS = 2
"""Steps of a case, each with ids of its own."""

RIGHT = ("captured", "launch by launch")
"""Outcomes of cases that give what TensorFlow gives."""


@dataclass(frozen=True)
class Table:
    """A table of some rows, in parts that rows are divided among by a strategy; constant or fed where no step trains it."""

    rows: int
    width: int
    parts: int
    strategy: str
    constant: bool


@dataclass(frozen=True)
class Column:
    """A lookup.

    Attributes:
        source: One of `SOURCES`.
        table: Number of its table.
        length: Ids of an example at most.
        weights: "" for none, "fed", or "learned": by id.
        combiner: As TensorFlow names it.
        safe: By `safe_embedding_lookup_sparse`: ids below 0 and empty rows are defined.
        default: Id of empty rows.
        whole: Every row is full.
        least: The smallest id that is fed.
        most: The largest.
    """

    source: str
    table: int
    length: int
    weights: str
    combiner: str
    safe: bool
    default: int | None
    whole: bool
    least: int
    most: int


@dataclass(frozen=True)
class Lookups:
    """A case.

    Attributes:
        name: Says how to make it again.
        seed: Draws what is fed.
        batch: Examples.
        tables: What columns look up in.
        columns: Lookups beside each other.
        end: One of `ENDS`.
        optimizer: What trains.
        resource: Variables are resources.
        capture: The step is captured, if it can be.
        mode: Pointwise ops share kernels; alike branches do.
        streams: How many, nodes scattered over them.
    """

    name: str
    seed: int
    batch: int
    tables: tuple[Table, ...]
    columns: tuple[Column, ...]
    end: str
    optimizer: str
    resource: bool
    capture: bool
    mode: tuple[bool, bool]
    streams: int


def make(seed: int) -> Lookups:
    """The case of a number."""
    random = Random(seed)
    tables = []
    for _ in range(random.randint(1, 2)):
        parts = random.choice((1, 1, 2, 3, 4))
        strategy = random.choice(("mod", "div"))
        tables.append(Table(random.randint(parts, 8), random.randint(1, 3), parts, strategy, random.random() < 0.5))
    columns = []
    for _ in range(random.choice((1, 1, 2, 3))):
        number, source = random.randrange(len(tables)), random.choice(SOURCES)
        safe, last = source != "plain" and random.random() < 0.7, tables[number].rows - 1
        columns.append(
            Column(
                source=source,
                table=number,
                length=random.randint(1, 4),
                weights=random.choice(("", "fed", "learned")) if source != "plain" else "",
                combiner=random.choice(("sum", "mean", "sqrtn")),
                safe=safe,
                default=random.choice((None, random.randint(0, last))),
                whole=random.random() < 0.4,
                least=random.choice((0, -2)) if safe else 0,
                most=random.choice((last, min(1, last))),
            )
        )
    # Only tables that a column looks up in are part of the model.
    used = sorted({column.table for column in columns})
    columns = [replace(column, table=used.index(column.table)) for column in columns]
    tables = [tables[number] for number in used]
    return Lookups(
        name=f"lookups:{seed}",
        seed=seed,
        batch=random.randint(1, 5),
        tables=tuple(tables),
        columns=tuple(columns),
        end=random.choice(ENDS),
        optimizer=random.choice(OPTIMIZERS),
        resource=random.random() < 0.5,
        capture=random.random() < 0.6,
        mode=(random.random() < 0.5, random.random() < 0.5),
        streams=random.choice((1, 3)),
    )


def run(case: Lookups, folder: Path) -> Result:
    """Runs a case in TensorFlow and on simulated streams. The folder is not used."""
    del folder
    start = time.process_time()
    told = outcome(case)
    problem = "" if told in RIGHT or told.startswith("refused: ") else told
    return Result(problem, seconds=time.process_time() - start)


def outcome(case: Lookups) -> str:
    """One of `RIGHT`, or "refused: " and why, or what is wrong."""
    from msplit.errors import MsplitError
    from tests.engines.cuda.cases import ENGINE, Job, Precision, options_of, scattered

    os.environ.setdefault("MSPLIT_VERIFY", "1")
    made = _made(case)
    if isinstance(made, str):
        return f"refused: {made}"
    flat, state, feeds, expected = made
    ids = scattered(flat, case.streams, case.seed)
    fuse, group = case.mode
    for capture in (True, False) if case.capture else (False,):
        options = options_of(fuse=fuse, group=group, capture=capture)
        job = Job(flat, ids, case.streams, feeds[0], precision=Precision.IEEE, options=options, state=state)
        try:
            executable = ENGINE.build(job)
        except MsplitError as problem:
            if "internal error" in str(problem):
                return str(problem)
            refused = f"refused: {problem}"
            continue
        try:
            wrong = _difference(executable, state, feeds, expected)
        except MsplitError as problem:
            wrong = f"a step ended with: {problem}"
        finally:
            executable.close()
        return wrong or RIGHT[not capture]
    return refused


def _difference(executable: Any, state: Arrays, feeds: list[Arrays], expected: list[Arrays]) -> str:
    """What differs from TensorFlow's results of each step, the last of which has the variables, too; "" if nothing does."""
    if state:
        executable.load_state(state)
    for turn, (values, right) in enumerate(zip(feeds, expected, strict=True)):
        found = dict(executable.step(values))
        if state and turn == len(feeds) - 1:
            found |= executable.save_state()
        for name, value in right.items():
            if name not in found:
                return f"step {turn}: there is no {name}"
            if found[name].shape != value.shape:
                return f"step {turn}, {name}: the shape is {found[name].shape} and should be {value.shape}"
            scale = float(np.abs(value).max(initial=0))
            # Gradients that cancel out leave the rounding errors of numbers around 1.
            if not np.allclose(found[name], value, rtol=1e-5, atol=1e-5 * scale + 1e-6):
                return f"step {turn}, {name}: {found[name].tolist()} should be {value.tolist()}"
    return ""


def _made(case: Lookups) -> tuple[Any, Arrays, list[Arrays], list[Arrays]] | str:
    """The flat graph, its variables, what each step is fed, and TensorFlow's results; or why TensorFlow refuses it."""
    import tensorflow as tf

    from msplit.engines.tensorflow.runtime import session_config
    from tests.engines.cuda.cases import flat_of

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(case.seed)
        fed = _Fed(case)
        tables = [_table(case, fed, number) for number in range(len(case.tables))]
        results = {f"out{number}": _lookup(case, fed, tables, number) for number in range(len(case.columns))}
        outputs = [tf.identity(value, name).op.name for name, value in results.items()]
        if case.end != "values":
            curves = [tf.reduce_sum(tf.sin(value * (2 + number))) for number, value in enumerate(results.values())]
            loss = tf.add_n(curves, name="loss")
        if case.end == "gradients":
            wanted = [one for parts in tables for one in parts] + fed.differentiable
            for number, gradient in enumerate(tf.gradients(loss, wanted)):
                if gradient is not None:
                    outputs.append(tf.identity(tf.convert_to_tensor(gradient), f"gradient{number}").op.name)
        step = []
        if case.end == "training":
            # Adam would make steps of the rounding errors that gradients which cancel out consist of.
            options = {"Momentum": {"momentum": 0.9}, "Adam": {"epsilon": 0.1}}.get(case.optimizer, {})
            step = [getattr(v1.train, f"{case.optimizer}Optimizer")(0.1, **options).minimize(loss, name="train")]
        feeds = [fed.values(turn) for turn in range(TURNS)]
        # Kernels as the graph has them: what TensorFlow makes of it to run it faster adds in another order, and takes its time.
        with v1.Session(config=session_config(1, cpu_only=True, optimized=False)) as session:
            session.run(v1.global_variables_initializer())
            state = session.run({one.op.name: one for one in v1.global_variables()})
            names, expected = [f"{name}:0" for name in outputs], list[Arrays]()
            for values in feeds:
                given = {f"{name}:0": value for name, value in values.items()}
                try:
                    found, _ = session.run((names, step), given)
                except tf.errors.OpError as problem:
                    return f"TensorFlow: {problem.message}"
                expected.append(dict(zip(outputs, found, strict=True)))
            expected[-1] |= session.run({one.op.name: one for one in v1.global_variables()})
    return flat_of(graph.as_graph_def(), outputs=[*outputs, *(one.name for one in step)]), state, feeds, expected


class _Fed:
    """Placeholders of a case, and what they are fed."""

    def __init__(self, case: Lookups) -> None:
        self._case, self._random = case, np.random.default_rng(case.seed)
        self._makers: dict[str, Any] = {}
        self.differentiable: list[Any] = []

    def placeholder(self, name: str, make: Any, *, differentiable: bool = False) -> Any:
        """One that is fed what `make` gives, of one shape each time."""
        import tensorflow as tf

        example = make(self._random)
        self._makers[name] = make
        made = tf.compat.v1.placeholder(example.dtype, example.shape, name)
        self.differentiable += [made] * differentiable
        return made

    def values(self, turn: int) -> Arrays:
        """What is fed in a step."""
        random = np.random.default_rng([self._case.seed, turn])
        return {name: make(random) for name, make in self._makers.items()}


def _table(case: Lookups, fed: _Fed, number: int) -> list[Any]:
    import tensorflow as tf

    table, v1 = case.tables[number], tf.compat.v1
    sizes = [len(part) for part in np.array_split(np.arange(table.rows), table.parts)]
    made = []
    for part, size in enumerate(sizes):
        name, shape = f"table{number}_{part}", (size, table.width)
        if case.end == "training":
            start = v1.random_normal_initializer(seed=part)
            made.append(v1.get_variable(name, shape, initializer=start, use_resource=case.resource))
        elif table.constant:
            value = np.random.default_rng([case.seed, number, part]).standard_normal(shape)
            made.append(tf.constant(value, tf.float32))
        else:
            made.append(
                fed.placeholder(name, lambda random, shape=shape: random.standard_normal(shape).astype(np.float32))
            )
    return made


def _lookup(case: Lookups, fed: _Fed, tables: list[list[Any]], number: int) -> Any:
    import tensorflow as tf

    column, v1 = case.columns[number], tf.compat.v1
    parts, strategy = tables[column.table], case.tables[column.table].strategy
    shape = (case.batch, column.length)
    fixed = np.random.default_rng([case.seed, number])
    chance = 1.0 if column.whole else 0.5
    some = fixed.random(shape) < chance
    some.flat[0] = True  # TensorFlow refuses a list of nothing here and there
    count = int(some.sum())

    def ids_of(*size: int) -> Any:
        return lambda random: random.integers(column.least, column.most + 1, size)

    if column.source == "plain":
        ids = fed.placeholder(f"ids{number}", ids_of(*shape))
        return tf.reduce_mean(v1.nn.embedding_lookup(parts, ids, partition_strategy=strategy), 1)
    weigh = _weights(case, fed, number)
    if column.source == "matrix":

        def matrix(random: np.random.Generator) -> NDArray[Any]:
            found = np.maximum(ids_of(*shape)(random), 0 if not column.safe else -2)
            return np.where(random.random(shape) < chance, found, -1)

        dense = fed.placeholder(f"ids{number}", matrix)
        places = tf.where(tf.not_equal(dense, -1))
        values, at = tf.gather_nd(dense, places), lambda one: tf.gather_nd(one, places)
        weights, dense_shape = weigh(values, shape, at), tf.shape(dense, out_type=tf.int64)
    else:
        values = fed.placeholder(f"ids{number}", ids_of(count))
        weights = weigh(values, (count,), lambda one: one)
        dense_shape = np.array(shape)
        if column.source == "sparse at constant places":
            places = tf.constant(np.argwhere(some))
        elif column.source == "sparse":
            places = fed.placeholder(f"places{number}", lambda random: _places(random, shape, count))
        else:  # all that is ragged is of the same length in the end
            splits = np.array([0, *np.cumsum(some.sum(1))])
            fed_splits = fed.placeholder(f"splits{number}", lambda random: splits)
            ragged = tf.RaggedTensor.from_row_splits(values, fed_splits, validate=False)
            if weights is not None:
                weights = ragged.with_flat_values(weights).to_sparse()
            sparse = ragged.to_sparse()
            return _combined(column, parts, sparse, weights, strategy)
    sparse = tf.SparseTensor(places, values, dense_shape)
    if weights is not None:
        weights = tf.SparseTensor(places, weights, dense_shape)
    return _combined(column, parts, sparse, weights, strategy)


def _places(random: np.random.Generator, shape: tuple[int, int], count: int) -> NDArray[Any]:
    """So many places of a matrix, in order."""
    chosen = np.sort(random.permutation(shape[0] * shape[1])[:count])
    return np.stack(np.unravel_index(chosen, shape), 1)


def _weights(case: Lookups, fed: _Fed, number: int) -> Any:
    """What gives the weights of ids, from places of what is fed for them."""
    import tensorflow as tf

    column, v1 = case.columns[number], tf.compat.v1

    def weigh(ids: Any, shape: tuple[int, ...], at: Any) -> Any:
        if not column.weights:
            return None
        if column.weights == "fed":
            return at(
                fed.placeholder(
                    f"weights{number}",
                    lambda random: random.uniform(0.1, 2, shape).astype(np.float32),
                    differentiable=True,
                )
            )
        rows, name = case.tables[column.table].rows, f"importance{number}"
        if case.end == "training":
            start = v1.random_uniform_initializer(0.1, 2, seed=3)
            own = v1.get_variable(name, [rows], initializer=start, use_resource=case.resource)
        else:
            own = fed.placeholder(
                name, lambda random: random.uniform(0.1, 2, rows).astype(np.float32), differentiable=True
            )
        return tf.gather(own, tf.maximum(ids, 0))

    return weigh


def _combined(column: Column, parts: list[Any], ids: Any, weights: Any, strategy: str) -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1
    if column.safe:
        return v1.nn.safe_embedding_lookup_sparse(
            parts, ids, weights, column.combiner, column.default, partition_strategy=strategy
        )
    return v1.nn.embedding_lookup_sparse(parts, ids, weights, strategy, combiner=column.combiner)
