"""Random networks as TensorFlow makes them: norms, attention, convolutions, lookups, loops, alike branches, and gradients of all that.

    network(7)                      # a GraphDef, what is fed, and which outputs; the same for the same seed
    training(7)                     # a train step of one, and what TensorFlow makes of its variables

What it is made of is continuous in what is fed, so that another rounding moves outputs a little: nothing is compared, sorted or counted
but ids. What cancels out moves more: how much TensorFlow says (`tolerances`, `state_tolerances`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from tests.network_blocks import BLOCKS, Maker, layer

WITHIN = 2e-4
"""How far IEEE float32 may be from TensorFlow's in any case, as `msplit.verify.compare.compare` and `apart` measure it."""

MOVED = 2.0**-20
"""How far TensorFlow's inputs, weights and variables are moved, relative to each number, to learn how far rounding is carried: by some
ten times what one op rounds."""

MOVES = 3
ROOM = 3.0
"""How many times what that did to a result another computation's may be away."""


@dataclass(frozen=True)
class Network:
    """A model.

    Attributes:
        seed: What it was made of.
        graph: The GraphDef's bytes.
        feeds: Input name -> value.
        outputs: Names of the tensors that are fetched.
        blocks: What it is made of, in order.
        gradient: Whether outputs are gradients.
    """

    seed: int
    graph: bytes
    feeds: dict[str, np.ndarray]
    outputs: tuple[str, ...]
    blocks: tuple[str, ...]
    gradient: bool


def network(seed: int, *, gradient: bool | None = None, most: int = 7) -> Network:
    """A random network of up to so many blocks; with gradients of it in a third of the cases, unless that is said."""
    import tensorflow as tf

    random = Random(f"network:{seed}")
    graph = tf.Graph()
    with graph.as_default():
        maker = Maker(tf, random, np.random.default_rng(seed))
        blocks = []
        for _ in range(random.randint(2, most)):
            block = random.choice(BLOCKS)
            if block(maker):
                blocks.append(block.__name__.strip("_"))
        differs = random.random() < 1 / 3 if gradient is None else gradient
        ends = [value for value in maker.values if value.op.type != "Placeholder"]
        chosen = list(dict.fromkeys([ends[-1], *random.sample(ends, min(len(ends), random.randint(0, 2)))], None))
        if differs:
            loss = sum(tf.reduce_sum(value * maker.normal(*value.shape)) for value in chosen)
            wanted = [*maker.inputs, *maker.weights[-6:]]
            found = tf.gradients(loss, wanted)
            chosen = [tf.convert_to_tensor(one) for one in found if one is not None][:6] or [loss]
        outputs = [tf.identity(value, f"out_{number}").op.name for number, value in enumerate(chosen)]
    return Network(
        seed, graph.as_graph_def().SerializeToString(), maker.feeds, tuple(outputs), tuple(blocks), bool(differs)
    )


def answers(one: Network) -> dict[str, np.ndarray]:
    """What TensorFlow gives, op by op, on the CPU."""
    return _answers(one, 0)[0]


def tolerances(one: Network, expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How far each output may be from TensorFlow's, as `msplit.verify.compare.compare` measures it, where that is more than `WITHIN`:
    `ROOM` times as far as TensorFlow's own is when numbers are `MOVED`."""
    found = {name: ROOM * far for name, far in how_far(one, expected, MOVED).items()}
    return {name: most for name, most in found.items() if most > WITHIN}


def how_far(one: Network, expected: Mapping[str, np.ndarray], share: float) -> dict[str, float]:
    """How far TensorFlow's outputs go, as `msplit.verify.compare.compare` measures it, where inputs and weights are each moved by up to a
    share of themselves."""
    from msplit.verify.compare import compare

    found: dict[str, float] = {}
    for moved in _answers(one, MOVES, share)[1:]:
        for output in compare(moved, expected).outputs:
            if np.isfinite(output.needed):
                found[output.name] = max(found.get(output.name, 0.0), output.needed)
    return found


def _answers(one: Network, moves: int, share: float = 0.0) -> list[dict[str, np.ndarray]]:
    """TensorFlow's outputs, and those of moved inputs and constants."""
    v1, graph, feeds = _imported(one.graph, one.feeds)
    fetches = {name: f"{name}:0" for name in one.outputs}
    with v1.Session(graph=graph, config=_config(v1)) as session:
        every = [session.run(fetches, feeds)]
        every += [session.run(fetches, _moved({**_constants(graph), **feeds}, seed, share)) for seed in range(moves)]
    return [{name: np.asarray(value) for name, value in found.items()} for found in every]


def _imported(definition: bytes, feeds: Mapping[str, np.ndarray]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """TensorFlow 1, the graph in it, and what is fed by names of tensors."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(tf.compat.v1.GraphDef.FromString(definition), name="")
    return tf.compat.v1, graph, {f"{name}:0": value for name, value in feeds.items()}


def _constants(graph: Any) -> dict[str, np.ndarray]:
    """The weights among the constants: of float32, no single numbers, such as exponents, and not those of a loop, which can not be fed."""
    import tensorflow as tf

    found = [op for op in graph.get_operations() if op.type == "Const" and not op.control_inputs]
    found = [op for op in found if op.outputs[0].dtype == tf.float32 and op.outputs[0].shape.rank]
    return {op.outputs[0].name: tf.make_ndarray(op.get_attr("value")) for op in found}


def _moved(values: Mapping[str, np.ndarray], seed: int, share: float) -> dict[str, np.ndarray]:
    """Numbers of float32, each moved by up to a share of itself, and all else as it is."""
    rng = np.random.default_rng(seed)

    def moved(value: np.ndarray) -> np.ndarray:
        if value.dtype != np.float32:
            return value
        return np.asarray(value * (1 + rng.uniform(-share, share, value.shape)), np.float32)

    return {name: moved(np.asarray(value)) for name, value in values.items()}


@dataclass(frozen=True)
class Training:
    """A train step: outputs are ``loss`` and ``train``.

    Attributes:
        seed: What it was made of.
        graph: The GraphDef's bytes.
        feeds: Input name -> value, in every step.
        state: What variables begin with.
        after: What they are after `STEPS` steps of TensorFlow.
        loss: Of the last one.
        blocks: What the model is made of, the optimizer last.
    """

    seed: int
    graph: bytes
    feeds: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    loss: np.ndarray
    blocks: tuple[str, ...]


STEPS = 3
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda train: train.GradientDescentOptimizer(0.02),
    "momentum": lambda train: train.MomentumOptimizer(0.02, 0.9),
    "nesterov": lambda train: train.MomentumOptimizer(0.02, 0.9, use_nesterov=True),
    "adam": lambda train: train.AdamOptimizer(0.02, epsilon=1e-3),
    "adagrad": lambda train: train.AdagradOptimizer(0.02),
    "rmsprop": lambda train: train.RMSPropOptimizer(0.02, centered=True, epsilon=1e-3),
    "ftrl": lambda train: train.FtrlOptimizer(0.02),
}


@functools.lru_cache(maxsize=4)
def training(seed: int, most: int = 5) -> Training:
    """A random network of up to so many blocks whose weights are variables, with an optimizer."""
    import tensorflow as tf

    v1 = tf.compat.v1
    random = Random(f"training:{seed}")
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("", use_resource=random.random() < 0.7):
        maker = Maker(tf, random, np.random.default_rng(seed), trains=True)
        blocks = ["layer"] if layer(maker) else []
        for _ in range(random.randint(1, most)):
            block = random.choice(BLOCKS)
            if block(maker):
                blocks.append(block.__name__.strip("_"))
        ends = [value for value in maker.values if value.op.type != "Placeholder"]
        chosen = [ends[0], ends[-1], *random.sample(ends, min(len(ends), 2))]  # the first one has weights
        loss = sum(tf.reduce_mean(tf.square(tf.tanh(value) - 0.3)) for value in chosen)
        loss = tf.identity(loss, "loss")
        name = random.choice([*OPTIMIZERS])
        OPTIMIZERS[name](v1.train).minimize(loss, name="train")
        variables = {variable.op.name: variable for variable in v1.global_variables()}
        with v1.Session(config=_config(v1)) as session:
            session.run(v1.global_variables_initializer())
            state = session.run(variables)
            feeds = {f"{key}:0": value for key, value in maker.feeds.items()}
            for _ in range(STEPS):
                found, _ = session.run(["loss:0", "train"], feeds)
            after = session.run(variables)
    definition = graph.as_graph_def().SerializeToString()
    return Training(seed, definition, maker.feeds, state, after, np.asarray(found), (*blocks, name))


def state_tolerances(one: Training) -> dict[str, float]:
    """How far each variable may be from TensorFlow's, as `tests.training_graphs.apart` measures it, where that is more than `WITHIN`:
    `ROOM` times as far as TensorFlow's own is when numbers are `MOVED`."""
    from tests.training_graphs import apart

    v1, graph, feeds = _imported(one.graph, one.feeds)
    ops = {op.name: op for op in graph.get_operations()}
    reads = {
        name: f"{name}/{'Read/ReadVariableOp' if f'{name}/Read/ReadVariableOp' in ops else 'read'}:0"
        for name in one.state
    }
    weights, every = _constants(graph), []
    with v1.Session(graph=graph, config=_config(v1)) as session:
        for values, fed in (
            (one.state, feeds),
            *((_moved(one.state, seed, MOVED), _moved({**weights, **feeds}, seed, MOVED)) for seed in range(MOVES)),
        ):
            for name, value in values.items():
                assign = ops[f"{name}/Assign"]
                session.run(assign, {assign.inputs[1]: value})
            for _ in range(STEPS):
                session.run("train", fed)
            every.append(session.run(reads))
    found = dict.fromkeys(one.state, 0.0)
    for moved in every[1:]:
        for name, far in apart(moved, every[0]).items():
            found[name] = max(found[name], ROOM * far) if np.isfinite(far) else found[name]
    return {name: most for name, most in found.items() if most > WITHIN}


def _config(v1: Any) -> Any:
    """Every op by its own kernel on the CPU."""
    config = v1.ConfigProto(device_count={"GPU": 0}, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config
