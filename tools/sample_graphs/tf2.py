"""SavedModels of TF2 modules: functions, signatures, control flow, ragged and sparse inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msplit.samples.layers import WeightRecipe, generate, kernel


def _variable(name: str, shape: tuple[int, ...]) -> Any:
    import tensorflow as tf

    recipe = WeightRecipe(name, 0, -0.5, 0.5) if len(shape) == 1 else kernel(name, 0, shape)
    return tf.Variable(generate(recipe, shape), name=name)


def two_signatures(path: Path) -> None:
    """Write a module with the signatures `serving_default` and `embed`, which share a function called three times."""
    import tensorflow as tf

    module = tf.Module(name="pair")
    module.kernel = _variable("kernel", (10, 16))
    module.bias = _variable("bias", (16,))
    module.head = _variable("head", (32, 1))

    @tf.function(input_signature=[tf.TensorSpec((None, 10), tf.float32, name="x")])
    def tower(x: Any) -> Any:
        return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, module.kernel, name="product"), module.bias), name="relu")

    @tf.function
    def score(left: Any, right: Any) -> dict[str, Any]:
        joined = tf.concat([tower(left), tower(right)], axis=1, name="joined")
        return {"score": tf.sigmoid(tf.matmul(joined, module.head), name="score")}

    @tf.function
    def embed(item: Any) -> dict[str, Any]:
        vector = tower(item)
        return {"vector": vector, "norm": tf.norm(vector, axis=1, name="norm")}

    def spec(name: str) -> Any:
        return tf.TensorSpec((None, 10), tf.float32, name=name)

    module.score, module.embed = score, embed
    signatures = {
        "serving_default": score.get_concrete_function(spec("left"), spec("right")),
        "embed": embed.get_concrete_function(spec("item")),
    }
    tf.saved_model.save(module, str(path), signatures)


def control_flow_v2(path: Path) -> None:
    """Write a module with If and While nodes, and a While inside a While."""
    import tensorflow as tf

    module = tf.Module(name="flow")
    module.kernel = _variable("kernel", (8, 8))

    @tf.function
    def forward(x: Any, steps: Any) -> dict[str, Any]:
        def inner(index: Any, state: Any) -> Any:
            return index + 1, state * 0.5

        def body(index: Any, state: Any) -> Any:
            state = tf.tanh(tf.matmul(state, module.kernel) + x)
            _, state = tf.while_loop(lambda index, _: index < 2, inner, (0, state))
            return index + 1, state

        _, state = tf.while_loop(lambda index, _: index < steps, body, (0, x))
        chosen = tf.cond(steps > 3, lambda: tf.nn.relu(tf.matmul(x, module.kernel)), lambda: tf.sigmoid(x))
        return {"y": tf.add(state, chosen, name="sum")}

    specs = (tf.TensorSpec((None, 8), tf.float32, name="x"), tf.TensorSpec((), tf.int32, name="steps"))
    module.forward = forward
    tf.saved_model.save(module, str(path), forward.get_concrete_function(*specs))


def ragged_sparse(path: Path) -> None:
    """Write a module that looks up a ragged and a sparse feature and pools each."""
    import tensorflow as tf

    module = tf.Module(name="bags")
    module.words = _variable("words", (50, 8))
    module.tags = _variable("tags", (30, 8))
    module.head = _variable("head", (16, 1))

    @tf.function
    def forward(words: Any, tags: Any) -> dict[str, Any]:
        looked_up = tf.ragged.map_flat_values(lambda ids: tf.gather(module.words, ids, name="words"), words)
        pooled_words = tf.reduce_mean(looked_up, axis=1)
        pooled_tags = tf.nn.safe_embedding_lookup_sparse(module.tags, tags, combiner="sum")
        joined = tf.concat([pooled_words, pooled_tags], axis=1, name="joined")
        return {"score": tf.sigmoid(tf.matmul(joined, module.head), name="score")}

    specs = (
        tf.RaggedTensorSpec((None, None), tf.int64, ragged_rank=1),
        tf.SparseTensorSpec((None, None), tf.int64),
    )
    module.forward = forward
    tf.saved_model.save(module, str(path), forward.get_concrete_function(*specs))
