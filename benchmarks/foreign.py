"""Models that no constant of msplit was fitted to, as their users write them: Keras layers, applications and plain functions.

    python benchmarks/foreign.py FOLDER [NAME …]     build them, weights left out (needs TensorFlow)

Each belongs to a family; costs that are fitted are fitted to one half of the families and tested on the other (`benchmarks/notes`).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))

Build = Callable[[], tuple[Any, list[tuple[str, tuple[int | None, ...], str]]]]


@dataclass(frozen=True)
class Foreign:
    """A model.

    Attributes:
        family: Models of one family are on one side of a split.
        batch: The batch that it is measured at.
        half: 0 or 1: which half of the families.
    """

    family: str
    batch: int
    half: int


MODELS: dict[str, Foreign] = {
    "bilstm6": Foreign("loops", 4, 0),
    "gru_speech": Foreign("loops", 8, 0),
    "bucket_columns": Foreign("columns", 256, 1),
    "din": Foreign("attention over history", 256, 0),
    "autoint": Foreign("interactions", 256, 1),
    "dcn": Foreign("interactions", 512, 1),
    "ple": Foreign("experts", 128, 0),
    "text_cnn": Foreign("text convolutions", 64, 1),
    "bert_towers": Foreign("transformers", 1, 0),
    "vit": Foreign("transformers", 4, 0),
    "decoder": Foreign("transformers", 2, 0),
    "efficientnet_b0": Foreign("depthwise images", 1, 1),
    "mobilenet_v2": Foreign("depthwise images", 8, 1),
    "densenet121": Foreign("images", 1, 0),
    "resnet50": Foreign("images", 4, 0),
    "unet": Foreign("dense images", 1, 1),
    "wavenet": Foreign("audio convolutions", 4, 1),
    "graph_net": Foreign("graphs", 1, 0),
}
"""Name -> what it is."""


def bilstm6() -> Any:
    """Six bidirectional LSTMs side by side, of 64 steps, in loops."""
    import keras

    text = keras.Input((64, 64), name="text", dtype="float32")
    branches = [keras.layers.Bidirectional(keras.layers.LSTM(64))(text) for _ in range(6)]
    joined = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(branches))
    return keras.Model(text, keras.layers.Dense(4)(joined)), [("text", (None, 64, 64), "float32")]


def gru_speech() -> Any:
    """Convolutions over a spectrogram, then two bidirectional GRUs, one after the other, 50 steps."""
    import keras

    sound = keras.Input((100, 80, 1), name="sound")
    x = keras.layers.Conv2D(32, (5, 5), strides=(2, 2), padding="same", activation="relu")(sound)
    x = keras.layers.Conv2D(32, (3, 3), strides=(1, 2), padding="same", activation="relu")(x)
    x = keras.layers.Reshape((50, 20 * 32))(x)
    for _ in range(2):
        x = keras.layers.Bidirectional(keras.layers.GRU(128, return_sequences=True))(x)
    return keras.Model(sound, keras.layers.Dense(29, activation="softmax")(x)), [
        ("sound", (None, 100, 80, 1), "float32")
    ]


def bucket_columns() -> Any:
    """60 numbers, each in buckets and embedded, then a deep network."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    tables = [
        tf.Variable(rng.normal(0, 0.1, (17, 16)).astype("float32"), name=f"feature_{i}/embedding") for i in range(60)
    ]
    edges = [sorted(rng.normal(0, 1, 16).tolist()) for _ in range(60)]
    dense = _dense_stack([60 * 16, 256, 128, 1])

    class Model(tf.Module):
        def __call__(self, numbers: Any) -> Any:
            parts = []
            for i in range(60):
                bucket = tf.raw_ops.Bucketize(input=numbers[:, i], boundaries=edges[i])
                parts.append(tf.gather(tables[i], bucket))
            return dense(tf.concat(parts, axis=1))

    return Model(), [("numbers", (None, 60), "float32")]


def din() -> Any:
    """Deep interest network: attention of a candidate over a history of 50 items."""
    import keras
    from keras import layers, ops

    history = keras.Input((50,), name="history", dtype="int32")
    category = keras.Input((50,), name="category", dtype="int32")
    item = keras.Input((1,), name="item", dtype="int32")
    kind = keras.Input((1,), name="kind", dtype="int32")
    user = keras.Input((8,), name="user", dtype="int32")
    items, kinds, users = layers.Embedding(20000, 32), layers.Embedding(500, 32), layers.Embedding(5000, 16)
    keys = layers.Concatenate()([items(history), kinds(category)])
    query = layers.Concatenate()([items(item), kinds(kind)])
    wide = ops.tile(query, (1, 50, 1))
    scores = layers.Concatenate()([wide, keys, wide - keys, wide * keys])
    for width in (80, 40):
        scores = layers.Dense(width, activation="sigmoid")(scores)
    scores = layers.Dense(1)(scores)
    mask = ops.cast(ops.expand_dims(ops.not_equal(history, 0), -1), "float32")
    weights = layers.Softmax(axis=1)(scores - 1e9 * (1 - mask))
    interest = ops.sum(weights * keys, axis=1)
    x = layers.Concatenate()([interest, layers.Flatten()(query), layers.Flatten()(users(user))])
    for width in (200, 80):
        x = layers.Dense(width)(x)
        x = layers.BatchNormalization()(x)
        x = layers.PReLU()(x)
    out = layers.Dense(1, activation="sigmoid")(x)
    inputs = [history, category, item, kind, user]
    return keras.Model(inputs, out), [(one.name, (None, *one.shape[1:]), "int32") for one in inputs]


def autoint() -> Any:
    """Self-attention over 39 embedded features, and a deep network beside it."""
    import keras
    from keras import layers, ops

    ids = keras.Input((39,), name="ids", dtype="int32")
    x = layers.Embedding(10000, 16)(ids)
    deep = layers.Flatten()(x)
    for _ in range(3):
        attended = layers.MultiHeadAttention(2, 16)(x, x)
        x = ops.relu(attended + layers.Dense(16)(x))
    for width in (400, 400):
        deep = layers.Dense(width, activation="relu")(deep)
    both = layers.Concatenate()([layers.Flatten()(x), deep])
    return keras.Model(ids, layers.Dense(1, activation="sigmoid")(both)), [("ids", (None, 39), "int32")]


def dcn() -> Any:
    """Deep and cross network, version 2: 26 tables, 13 numbers, four low-rank crosses beside three dense layers."""
    import keras
    from keras import layers

    ids = keras.Input((26,), name="ids", dtype="int32")
    numbers = keras.Input((13,), name="numbers")
    parts = [layers.Embedding(1000 * (1 + i % 7), 16)(ids[:, i]) for i in range(26)]
    x0 = layers.Concatenate()([*parts, layers.BatchNormalization()(numbers)])
    width = 26 * 16 + 13
    cross = x0
    for _ in range(4):
        cross = x0 * layers.Dense(width)(layers.Dense(64, use_bias=False)(cross)) + cross
    deep = x0
    for units in (512, 256, 128):
        deep = layers.Dense(units, activation="relu")(deep)
    out = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([cross, deep]))
    return keras.Model([ids, numbers], out), [("ids", (None, 26), "int32"), ("numbers", (None, 13), "float32")]


def ple() -> Any:
    """Progressive layered extraction: two levels, three tasks, experts shared and of their own."""
    import keras
    from keras import layers, ops

    x = keras.Input((128,), name="features")
    tasks, own, shared = 3, 4, 4
    task_inputs: list[Any] = [x] * tasks
    shared_input: Any = x

    def expert(value: Any) -> Any:
        return layers.Dense(64, activation="relu")(layers.Dense(128, activation="relu")(value))

    def mixed(value: Any, experts: list[Any]) -> Any:
        gate = layers.Dense(len(experts), activation="softmax")(value)
        return ops.sum(ops.expand_dims(gate, -1) * ops.stack(experts, axis=1), axis=1)

    for level in range(2):
        common = [expert(shared_input) for _ in range(shared)]
        per_task = [[expert(value) for _ in range(own)] for value in task_inputs]
        new = [mixed(task_inputs[t], per_task[t] + common) for t in range(tasks)]
        if level == 0:
            shared_input = mixed(shared_input, [one for experts in per_task for one in experts] + common)
        task_inputs = new
    heads = [layers.Dense(1, activation="sigmoid")(layers.Dense(32, activation="relu")(value)) for value in task_inputs]
    return keras.Model(x, heads), [("features", (None, 128), "float32")]


def text_cnn() -> Any:
    """Two texts, each through convolutions of four widths; their distance."""
    import keras
    from keras import layers

    def tower(ids: Any) -> Any:
        x = layers.Embedding(10000, 100)(ids)
        parts = [layers.GlobalMaxPooling1D()(layers.Conv1D(64, width, activation="relu")(x)) for width in (2, 3, 4, 5)]
        return layers.Dense(64, activation="tanh")(layers.Concatenate()(parts))

    left, right = keras.Input((60,), name="left", dtype="int32"), keras.Input((60,), name="right", dtype="int32")
    out = layers.Dot(axes=1, normalize=True)([tower(left), tower(right)])
    return keras.Model([left, right], out), [("left", (None, 60), "int32"), ("right", (None, 60), "int32")]


def _encoder(x: Any, heads: int, width: int, inner: int, causal: bool = False, norm_first: bool = False) -> Any:
    from keras import layers

    def attend(value: Any) -> Any:
        return layers.MultiHeadAttention(heads, width // heads)(value, value, use_causal_mask=causal)

    def feed(value: Any) -> Any:
        return layers.Dense(width)(layers.Dense(inner, activation="gelu")(value))

    if norm_first:
        x = x + attend(layers.LayerNormalization(epsilon=1e-6)(x))
        return x + feed(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.LayerNormalization(epsilon=1e-12)(x + attend(x))
    return layers.LayerNormalization(epsilon=1e-12)(x + feed(x))


def bert_towers() -> Any:
    """Query and document, each through a transformer of its own: 6 layers of 384, 64 and 128 tokens."""
    import keras
    from keras import layers, ops

    outs, inputs = [], []
    for name, length in (("query", 64), ("document", 128)):
        ids = keras.Input((length,), name=name, dtype="int32")
        inputs.append(ids)
        positions = layers.Embedding(length, 384)(ops.arange(length))
        x = layers.LayerNormalization()(layers.Embedding(20000, 384)(ids) + positions)
        for _ in range(6):
            x = _encoder(x, 6, 384, 1536)
        outs.append(layers.Dense(128, activation="tanh")(x[:, 0]))
    return keras.Model(inputs, layers.Dot(axes=1)(outs)), [
        ("query", (None, 64), "int32"),
        ("document", (None, 128), "int32"),
    ]


def vit() -> Any:
    """Vision transformer, small: 16 x 16 patches of 224 x 224, 6 layers of 384."""
    import keras
    from keras import layers, ops

    image = keras.Input((224, 224, 3), name="image")
    x = layers.Reshape((196, 384))(layers.Conv2D(384, 16, strides=16)(image))
    x = x + layers.Embedding(196, 384)(ops.arange(196))
    for _ in range(6):
        x = _encoder(x, 6, 384, 1536, norm_first=True)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(image, layers.Dense(1000)(x)), [("image", (None, 224, 224, 3), "float32")]


def decoder() -> Any:
    """Causal decoder: 4 layers of 256, 256 tokens, next token's logits."""
    import keras
    from keras import layers, ops

    ids = keras.Input((256,), name="ids", dtype="int32")
    x = layers.Embedding(8000, 256)(ids) + layers.Embedding(256, 256)(ops.arange(256))
    for _ in range(4):
        x = _encoder(x, 8, 256, 1024, causal=True, norm_first=True)
    logits = layers.Dense(8000)(layers.LayerNormalization()(x)[:, -1])
    return keras.Model(ids, logits), [("ids", (None, 256), "int32")]


def _application(name: str, size: int = 224) -> Any:
    import keras

    return getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3)), [
        ("image", (None, size, size, 3), "float32")
    ]


def efficientnet_b0() -> Any:
    """Keras's EfficientNet-B0."""
    return _application("EfficientNetB0")


def mobilenet_v2() -> Any:
    """Keras's MobileNetV2."""
    return _application("MobileNetV2")


def densenet121() -> Any:
    """Keras's DenseNet121."""
    return _application("DenseNet121")


def resnet50() -> Any:
    """Keras's ResNet50."""
    return _application("ResNet50")


def unet() -> Any:
    """U-Net of four levels on 256 x 256."""
    import keras
    from keras import layers

    image = keras.Input((256, 256, 3), name="image")

    def double(x: Any, width: int) -> Any:
        for _ in range(2):
            x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        return x

    kept, x = [], image
    for width in (32, 64, 128, 256):
        x = double(x, width)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = double(x, 512)
    for width, one in zip((256, 128, 64, 32), reversed(kept), strict=True):
        x = layers.Conv2DTranspose(width, 2, strides=2, padding="same")(x)
        x = double(layers.Concatenate()([one, x]), width)
    return keras.Model(image, layers.Conv2D(2, 1, activation="softmax")(x)), [("image", (None, 256, 256, 3), "float32")]


def wavenet() -> Any:
    """Gated dilated convolutions over sound: two stacks of eight, with skips."""
    import keras
    from keras import layers

    sound = keras.Input((2048, 1), name="sound")
    x, skips = layers.Conv1D(64, 1)(sound), []
    for _ in range(2):
        for power in range(8):
            tanh = layers.Conv1D(64, 2, dilation_rate=2**power, padding="causal", activation="tanh")(x)
            gate = layers.Conv1D(64, 2, dilation_rate=2**power, padding="causal", activation="sigmoid")(x)
            both = tanh * gate
            skips.append(layers.Conv1D(64, 1)(both))
            x = x + layers.Conv1D(64, 1)(both)
    total = layers.Activation("relu")(layers.Add()(skips))
    return keras.Model(sound, layers.Conv1D(256, 1)(layers.Conv1D(64, 1, activation="relu")(total))), [
        ("sound", (None, 2048, 1), "float32")
    ]


def graph_net() -> Any:
    """Messages along 8,000 edges among 2,000 nodes, four rounds."""
    import tensorflow as tf

    nodes, edges = 2000, 8000
    embed, out = _dense_stack([32, 64]), _dense_stack([64, 32, 8])
    message = [_dense_stack([128, 64, 64]) for _ in range(4)]
    update = [_dense_stack([128, 64, 64]) for _ in range(4)]

    class Model(tf.Module):
        def __call__(self, features: Any, source: Any, target: Any) -> Any:
            h = embed(features)
            for one, two in zip(message, update, strict=True):
                sent = one(tf.concat([tf.gather(h, source), tf.gather(h, target)], 1))
                got = tf.math.unsorted_segment_sum(sent, target, nodes)
                h = h + two(tf.concat([h, got], 1))
            return out(h)

    return Model(), [("features", (nodes, 32), "float32"), ("source", (edges,), "int32"), ("target", (edges,), "int32")]


def _dense_stack(sizes: list[int]) -> Any:
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    weights = [
        (
            tf.Variable(rng.normal(0, a**-0.5, (a, b)).astype("float32")),
            tf.Variable(rng.uniform(0.01, 0.1, b).astype("float32")),
        )
        for a, b in itertools.pairwise(sizes)
    ]

    def apply(x: Any) -> Any:
        for number, (kernel, bias) in enumerate(weights):
            x = tf.matmul(x, kernel) + bias
            if number + 1 < len(weights):
                x = tf.nn.relu(x)
        return x

    return apply


def frozen(name: str, seed: int = 0) -> Any:
    """The model as a frozen GraphDef, its loops kept, large weights as recipes."""
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model, inputs = globals()[name]()
    _train(model, seed)
    specs = [tf.TensorSpec(shape, dtype, name=key) for key, shape, dtype in inputs]

    @tf.function(autograph=False)
    def forward(*feeds: Any) -> Any:
        if isinstance(model, keras.Model):
            return model(feeds[0] if len(feeds) == 1 else list(feeds), training=False)
        return model(*feeds)

    concrete = forward.get_concrete_function(*specs)
    graph_def = convert_variables_to_constants_v2(concrete, lower_control_flow=False).graph.as_graph_def()
    return with_recipes(graph_def, seed)


def _train(model: Any, seed: int) -> None:
    """Gives biases and norms other values than zero and one, with which an engine could leave them out."""
    import numpy as np

    rng = np.random.default_rng(seed)
    for variable in [*getattr(model, "weights", []), *getattr(model, "variables", [])]:
        value = np.asarray(variable)
        if value.ndim == 1 and value.dtype == np.float32:
            variable.assign(value + rng.uniform(0.01, 0.1, value.shape).astype(np.float32))


def with_recipes(graph_def: Any, seed: int) -> Any:
    """Large float weights get values that a recipe makes again on another machine."""
    import tensorflow as tf

    from msplit.samples.layers import ATTRIBUTE, WeightRecipe, fill, kernel

    gathered = {node.input[0] for node in graph_def.node if node.op in ("GatherV2", "ResourceGather") and node.input}
    for node in graph_def.node:
        tensor = node.attr["value"].tensor if node.op == "Const" else None
        if tensor is None or tensor.dtype != tf.float32.as_datatype_enum:
            continue
        shape = [dim.size for dim in tensor.tensor_shape.dim]
        if len(shape) < 2 or tf.TensorShape(shape).num_elements() < 1024:
            continue
        table = node.name in gathered or "embedding" in node.name
        recipe = WeightRecipe(node.name, seed, -0.1, 0.1) if table else kernel(node.name, seed, shape, 1.2)
        node.attr[ATTRIBUTE].s = recipe.encode()
    return fill(graph_def)


def write(folder: Path, names: list[str]) -> None:
    """Builds the named models."""
    from msplit.samples.layers import strip

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        data = strip(frozen(name)).SerializeToString(deterministic=True)
        (folder / f"{name}.pb").write_bytes(data)
        print(f"{name}: {len(data):,} bytes", flush=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:] or list(MODELS))
