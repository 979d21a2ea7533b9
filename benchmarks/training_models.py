"""Training graphs as TensorFlow 1 users write them: models, optimizers, data that can be learned, and values to begin with.

    python benchmarks/training_models.py FOLDER [NAME[:OPTIMIZER[:ref]] …]       build them (needs TensorFlow)

Of each there is a `.meta` without a single weight, what `read` takes as `.json`, and the model for inference as `.pb`, without its weights.
Values come from a recipe per variable (`msplit.samples.layers`): each machine makes the same with NumPy alone. A graph that TensorFlow
initializes itself begins with others of the same distribution.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from msplit import samples
from msplit.samples import networks, recommenders
from msplit.samples.layers import ModelBuilder, Sample, SampleInput, WeightRecipe, generate, make_inputs

Values = dict[str, np.ndarray]

OPTIMIZERS = ("GradientDescent", "Momentum", "Adam", "Adagrad", "RMSProp", "Ftrl")
RATES = dict(zip(OPTIMIZERS, (0.05, 0.02, 1e-3, 0.02, 1e-3, 0.05), strict=True))
"""Learning rates where a model has not its own."""

FETCHES = ("loss", "train_op")
LABEL = "label"


class Trained(ModelBuilder):
    """Makes variables of the weights, and keeps how each begins (`recipes`) and what else a step is to run (`updates`)."""

    def __init__(self, seed: int, batch: int | None, *, resource: bool = True) -> None:
        super().__init__(seed, batch)
        self.resource = resource
        self.recipes: dict[str, WeightRecipe] = {}
        self.updates: list[Any] = []

    def variable(
        self, name: str, shape: Sequence[int], recipe: Callable[[str], WeightRecipe], trainable: bool = True
    ) -> Any:
        """A variable that its graph initializes by drawing from what the recipe draws from."""
        v1 = self.tf.compat.v1
        with self.graph.as_default():
            drawn = recipe("")
            made = v1.Variable(
                lambda: self.tf.random.uniform(tuple(shape), drawn.low, drawn.high, seed=len(self.recipes) + 1),
                trainable=trainable,
                name=name,
                dtype=self.tf.float32,
                use_resource=self.resource,
            )
        self.recipes[made.op.name] = recipe(made.op.name)
        return made

    def make_weight(self, name: str, shape: Sequence[int], recipe: Callable[[str], WeightRecipe]) -> Any:
        """See `ModelBuilder`."""
        made = self.variable(name, shape, recipe)
        with self.graph.as_default():
            return self.tf.convert_to_tensor(made)

    def embedding(self, ids: Any, rows: int, width: int, scope: str) -> Any:
        """See `ModelBuilder`: only the rows that are looked up have a gradient."""
        with self.scope(scope):
            table = self.variable("table", (rows, width), lambda key: WeightRecipe(key, self.seed, -0.1, 0.1))
            return self.tf.nn.embedding_lookup(table, ids, name="lookup")

    def finish(self, name: str, outputs: Sequence[Any]) -> Sample:
        """See `ModelBuilder`: the graph stays open, for a loss to come."""
        return Sample(name, None, tuple(self._inputs), tuple(tensor.op.name for tensor in outputs))


@dataclass(frozen=True)
class Model:
    """A model that is trained.

    Attributes:
        build: Takes a builder and sizes, and gives the loss.
        batch: What it is measured at first.
        optimizer: What its authors, or those who run its kind, train it with.
        rate: Learning rate that it learns with.
        rules: The rule set that fits it.
        batches: What else it is measured at.
        inference: The sample of the same sizes that the sizes are given to.
        sizes: What it is built with.
        small: The same for tests.
        fixed: Whether the batch is part of the graph.
    """

    build: Callable[..., Any]
    batch: int
    optimizer: str
    rate: float
    rules: str
    inference: str
    batches: tuple[int, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    fixed: bool = False


@dataclass(frozen=True)
class Training:
    """What is to be known of a training graph beside the graph itself.

    Attributes:
        inputs: Its placeholders; the last one is the label.
        classes: Kinds of labels, where they are classes.
        variables: Type, shape and recipe of each variable, slots of the optimizer included.
    """

    name: str
    optimizer: str
    resource: bool
    inputs: tuple[SampleInput, ...]
    classes: int
    variables: Mapping[str, tuple[str, tuple[int, ...], WeightRecipe]]

    def state(self, seed: int = 0) -> Values:
        """Values of all variables to begin with, by name."""
        return {
            name: generate(replace(recipe, seed=seed), shape, dtype)
            for name, (dtype, shape, recipe) in self.variables.items()
        }

    def feeds(self, batch: int, seed: int = 0) -> Values:
        """Inputs, and labels that can be learned from them: always the same function of the inputs."""
        *inputs, label = self.inputs
        values = make_inputs(Sample(self.name, None, tuple(inputs), ()), batch, seed)
        for spec in inputs:
            if spec.high is not None:  # few ids are seen often and most of them seldom, as with users and items
                often = (values[spec.name] / spec.high) ** 4
                values[spec.name] = (often * spec.high).astype(spec.dtype)
        score = np.zeros((batch, self._teacher[0].shape[-1]))
        for spec, weights in zip(inputs, self._teacher, strict=True):
            value = values[spec.name]
            if spec.high is not None:
                score += weights[value.reshape(batch, -1)].sum(axis=1)
            else:
                # Of a sequence or an image its mean over time or place: what a model can find soon.
                score += value.reshape(batch, -1, value.shape[-1]).mean(axis=1) @ weights
        score /= max(float(score.std()), 1e-6)
        if self.classes:
            return {**values, label.name: score.argmax(axis=1).astype(np.int32)}
        target = np.tanh(score) if self.name == "lstm" else score > 0
        return {**values, label.name: target.astype(np.float32).reshape(batch, *label.shape[1:])}

    @functools.cached_property
    def _teacher(self) -> list[np.ndarray]:
        """A weight per class and number of an input, or per class and row of what it is looked up in."""
        *inputs, label = self.inputs
        width = self.classes or int(np.prod(label.shape[1:]))
        rng = np.random.default_rng(1)
        return [rng.standard_normal((spec.high or spec.shape[-1], width)) for spec in inputs]


def _cross_entropy(b: Trained, sample: Sample) -> Any:
    """The sum over the outputs, which are sigmoids, of the mean cross-entropy of each."""
    tf = b.tf
    label = b.input(LABEL, (len(sample.outputs),))
    losses = []
    with b.scope("objective"):
        for task, output in enumerate(sample.outputs):
            logits = b.graph.get_operation_by_name(output).inputs[0]
            labels = label[:, task : task + 1]
            losses.append(tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)))
        return tf.add_n(losses)


def mmoe(b: Trained, **sizes: Any) -> Any:
    """The mixture of experts, a loss for each of its tasks."""
    return _cross_entropy(b, recommenders.mmoe(b, **sizes))


def towers(b: Trained, **sizes: Any) -> Any:
    """Embedding towers; a step changes the rows of their tables that it saw."""
    return _cross_entropy(b, recommenders.towers(b, **sizes))


def deepfm(b: Trained, **sizes: Any) -> Any:
    """DeepFM, likewise."""
    return _cross_entropy(b, recommenders.deepfm(b, **sizes))


def lstm(b: Trained, **sizes: Any) -> Any:
    """The unrolled LSTM, of whose last output the square error is taken."""
    sample = networks.lstm(b, **sizes)
    output = b.graph.get_operation_by_name(sample.outputs[0]).outputs[0]
    label = b.input(LABEL, (int(output.shape[1]),))
    with b.scope("objective"):
        return b.tf.reduce_mean(b.tf.square(output - label))


def columns(
    b: Trained, *, columns: int = 50, buckets: int = 100, width: int = 8, units: Sequence[int] = (64, 32)
) -> Any:
    """Bucketized feature columns, whose gradients are sparse, and of rows that a `Unique` chooses."""
    v1 = b.tf.compat.v1
    with b.graph.as_default(), v1.variable_scope("", use_resource=b.resource):
        features, score = recommenders.feature_columns(columns, buckets, width, units, b.batch)
        b.recipes |= {one.op.name: recommenders._recipe(one, b.seed) for one in v1.global_variables()}
    b._inputs += [SampleInput(name, "float32", (b.batch, 1)) for name in features]
    return _cross_entropy(b, Sample("columns", None, (), (score.op.name,)))


# Rows of (filters, height, width, stride), a tower each; "max" and "mean" stand for a pool of 3 by 3. Szegedy et al., CVPR 2016.
_A = lambda pool: [[(64, 1, 1, 1)], [(48, 1, 1, 1), (64, 5, 5, 1)], [(64, 1, 1, 1), (96, 3, 3, 1), (96, 3, 3, 1)], ["mean", (pool, 1, 1, 1)]]  # fmt: skip  # noqa: E731, E501
_B = [[(384, 3, 3, 2)], [(64, 1, 1, 1), (96, 3, 3, 1), (96, 3, 3, 2)], ["max"]]
_C = lambda n: [[(192, 1, 1, 1)], [(n, 1, 1, 1), (n, 1, 7, 1), (192, 7, 1, 1)], [(n, 1, 1, 1), (n, 7, 1, 1), (n, 1, 7, 1), (n, 7, 1, 1), (192, 1, 7, 1)], ["mean", (192, 1, 1, 1)]]  # fmt: skip  # noqa: E731, E501
_D = [[(192, 1, 1, 1), (320, 3, 3, 2)], [(192, 1, 1, 1), (192, 1, 7, 1), (192, 7, 1, 1), (192, 3, 3, 2)], ["max"]]
_FORK = [[(384, 1, 3, 1)], [(384, 3, 1, 1)]]
_E = [[(320, 1, 1, 1)], [(384, 1, 1, 1), _FORK], [(448, 1, 1, 1), (384, 3, 3, 1), _FORK], ["mean", (192, 1, 1, 1)]]
_MODULES = {
    "A": [_A(32), _A(64), _A(64)],
    "B": [_B],
    "C": [_C(128), _C(160), _C(160), _C(192)],
    "D": [_D],
    "E": [_E] * 2,
}
_MODULES["a"] = [_A(32)]  # what a test has time for


def inception_v3(
    b: Trained,
    *,
    image: int = 299,
    classes: int = 1000,
    modules: str = "ABCDE",
    divisor: int = 1,
    stem: bool = True,
) -> Any:
    """Inception-v3 with batch normalization over the batch, whose moving averages a step updates, too.

    Args:
        modules: Which of its kinds of modules: tests take few.
        divisor: Filters are so many times fewer.
        stem: Whether all that comes before them is there; otherwise one convolution.
    """
    tf = b.tf
    x = b.input("image", (image, image, 3))

    def convolution(x: Any, filters: int, height: int, width: int, stride: int, padding: str = "SAME") -> Any:
        with b.scope("conv"):
            kernel = b.kernel((height, width, x.shape[-1], max(filters // divisor, 2)))
            return tf.nn.relu(_normalized(b, tf.nn.conv2d(x, kernel, stride, padding)))

    def tower(x: Any, parts: Sequence[Any], reduces: bool) -> Any:
        for part in parts:
            if isinstance(part, list):
                x = tf.concat([tower(x, one, False) for one in part], axis=3)
            elif part == "max":
                x = tf.nn.max_pool2d(x, 3, 2, "VALID")
            elif part == "mean":
                x = tf.nn.avg_pool2d(x, 3, 1, "SAME")
            else:
                x = convolution(x, *part, padding="VALID" if reduces and part[3] == 2 else "SAME")
        return x

    with b.scope("stem"):
        x = convolution(x, 32, 3, 3, 2, "VALID")
        if stem:
            x = convolution(convolution(x, 32, 3, 3, 1, "VALID"), 64, 3, 3, 1)
            x = tf.nn.max_pool2d(x, 3, 2, "VALID")
            x = tf.nn.max_pool2d(convolution(convolution(x, 80, 1, 1, 1), 192, 3, 3, 1, "VALID"), 3, 2, "VALID")
    for kind in modules:
        for number, parts in enumerate(_MODULES[kind]):
            with b.scope(f"mixed_{kind}{number}"):
                x = tf.concat([tower(x, one, kind in "BD") for one in parts], axis=3, name="concat")
    with b.scope("head"):
        logits = b.dense(tf.reduce_mean(x, axis=(1, 2)), classes, "logits", activation=None)
    label = b.input(LABEL, (), "int32", classes)
    with b.scope("objective"):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))


def _normalized(b: Trained, x: Any, momentum: float = 0.99) -> Any:
    """Batch normalization in training: by the batch's mean and variance, which moving averages follow."""
    size = (int(x.shape[-1]),)
    with b.scope("batch_norm"):
        gamma, beta = b.weight("gamma", size, 0.8, 1.2), b.weight("beta", size, -0.1, 0.1)
        moving = [
            b.variable(
                name, size, lambda key, low=low, high=high: WeightRecipe(key, b.seed, low, high), trainable=False
            )
            for name, low, high in (("moving_mean", -0.1, 0.1), ("moving_variance", 0.7, 1.4))
        ]
        y, *found = b.tf.compat.v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3, is_training=True)
        for variable, value in zip(moving, found, strict=True):
            change = (b.tf.convert_to_tensor(variable) - value) * (1.0 - momentum)
            b.updates.append(b.tf.compat.v1.assign_sub(variable, change))
        return y


MODELS: dict[str, Model] = {
    "mmoe": Model(
        mmoe, 128, "Adam", 1e-3, "default", "mmoe", (1024,),
        small={"experts": 2, "features": 16, "units": (16, 8), "tower_units": (4,)},
    ),
    "towers": Model(
        towers, 128, "Adagrad", 0.02, "recsys", "towers", (1024,),
        small={"towers": 4, "rows": 30, "width": 8, "units": (8, 4)},
    ),
    "deepfm": Model(
        deepfm, 128, "Adam", 3e-3, "recsys", "deepfm", (1024,),
        small={"categorical": 3, "numeric": 2, "rows": 20, "width": 4, "units": (8, 4)},
    ),
    "lstm": Model(
        lstm, 16, "Adam", 1e-3, "rnn", "lstm",
        sizes={"layers": 4, "steps": 32, "hidden": 256}, small={"layers": 2, "steps": 3, "hidden": 8}, fixed=True,
    ),
    "inception_v3": Model(
        inception_v3, 16, "RMSProp", 1e-3, "vision", "inception_v3",
        small={"image": 9, "classes": 5, "modules": "a", "divisor": 12, "stem": False},
    ),
    "columns": Model(
        columns, 256, "Adagrad", 0.02, "recsys", "feature_columns",
        sizes={"columns": 50}, small={"columns": 3, "buckets": 8, "width": 4, "units": (8,)},
    ),
}  # fmt: skip
"""Those of the figures, the first one of them first."""


def _optimizer(v1: Any, name: str, rate: Any, model: str) -> Any:
    more: dict[str, dict[str, float]] = {
        "Momentum": {"momentum": 0.9},
        "RMSProp": {"momentum": 0.9},
        # What it begins with (0.1 by default) swallows the squares of small gradients, and what is left of them is rounding alone.
        "Ftrl": {"l1_regularization_strength": 1e-4, "initial_accumulator_value": 1e-5},
    }
    if (
        model == "inception_v3"
    ):  # what TensorFlow's documentation has for this network, of whose gradients some are rounding alone
        more["Adam"] = {"epsilon": 0.1}
    return getattr(v1.train, f"{name}Optimizer")(rate, **more.get(name, {}))


def build(
    name: str, optimizer: str | None = None, *, resource: bool = True, batch: int | None = None, small: bool = False
) -> tuple[Any, Training]:
    """The MetaGraphDef of a model's training graph, and what is to be known of it. The batch is left open where it can be.

    The learning rate falls with the global step, as schedules do, and gradients of the LSTM are clipped by their global norm.
    """
    model = MODELS[name]
    optimizer = optimizer or model.optimizer
    b = Trained(0, (batch or model.batch) if model.fixed else None, resource=resource)
    v1 = b.tf.compat.v1
    objective = model.build(b, **({**model.sizes, **model.small} if small else model.sizes))
    with b.graph.as_default(), v1.variable_scope("", use_resource=resource):
        loss = b.tf.identity(objective, name="loss")
        step = v1.train.get_or_create_global_step()
        own = model.rate if optimizer == model.optimizer else RATES[optimizer]
        rate = v1.train.exponential_decay(own, step, 1000, 0.9)
        chosen = _optimizer(v1, optimizer, rate, name)
        pairs = chosen.compute_gradients(loss)
        if name == "lstm":
            clipped, _ = b.tf.clip_by_global_norm([gradient for gradient, _ in pairs], 5.0)
            pairs = [(gradient, variable) for gradient, (_, variable) in zip(clipped, pairs, strict=True)]
        applied = chosen.apply_gradients(pairs, global_step=step)
        train_op = b.tf.group(applied, *b.updates, name="train_op")
        v1.add_to_collection("train_op", train_op)
        meta = v1.train.export_meta_graph(clear_extraneous_savers=True)
        variables = _described(v1, b.recipes)
    classes = next((one.high or 0 for one in b._inputs if one.name == LABEL), 0)
    inputs = sorted(b._inputs, key=lambda one: one.name == LABEL)
    return meta, Training(name, optimizer, resource, tuple(inputs), classes, variables)


def _described(v1: Any, recipes: Mapping[str, WeightRecipe]) -> dict[str, tuple[str, tuple[int, ...], WeightRecipe]]:
    """Every variable of the default graph. Those without a recipe are the optimizer's, and begin with one number each."""
    every = {one.op.name: one for one in v1.global_variables()}
    own = {name: one.initial_value for name, one in every.items() if name not in recipes}
    with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        begun = session.run(own)
    found = {}
    for name, one in every.items():
        recipe = recipes.get(name)
        if recipe is None:
            (value,) = np.unique(begun[name]).tolist()
            recipe = WeightRecipe(name, 0, value, value)
        found[name] = (one.dtype.base_dtype.name, tuple(one.shape.as_list()), recipe)
    return found


def write(folder: Path, wanted: Sequence[str] = (), *, small: bool = False) -> None:
    """Writes models, all by default: see the module. Small ones are for tests, which have no Inception-v3 for inference."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in wanted or MODELS:
        name, _, rest = item.partition(":")
        optimizer, _, kind = rest.partition(":")
        meta, training = build(name, optimizer or None, resource=kind != "ref", small=small)
        key = file_name(name, training.optimizer, training.resource)
        (folder / f"{key}.meta").write_bytes(meta.SerializeToString(deterministic=True))
        (folder / f"{key}.json").write_text(json.dumps(asdict(training), indent=1))
        model = MODELS[name]
        sizes = {**model.sizes, **(model.small if small else {}), **({"batch": model.batch} if model.fixed else {})}
        if "modules" not in sizes:
            frozen = samples.strip(samples.build(model.inference, **sizes).graph_def)
            (folder / f"{name}.inference.pb").write_bytes(frozen.SerializeToString(deterministic=True))
        print(key, f"{(folder / f'{key}.meta').stat().st_size / 1e6:.1f} MB", flush=True)


def file_name(name: str, optimizer: str | None = None, resource: bool = True) -> str:
    """What a model's files are called."""
    return f"{name}.{optimizer or MODELS[name].optimizer}{'' if resource else '.ref'}"


def read(path: Path) -> Training:
    """What `write` has told of the graph beside it, from the `.json`."""
    told = json.loads(path.read_text())
    told["inputs"] = tuple(SampleInput(**{**one, "shape": tuple(one["shape"])}) for one in told["inputs"])
    told["variables"] = {
        name: (dtype, tuple(shape), WeightRecipe(**recipe))
        for name, (dtype, shape, recipe) in told["variables"].items()
    }
    return Training(**told)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:])
