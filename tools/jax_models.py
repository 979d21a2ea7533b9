"""Writes `tests/formats/jax_models`: needs jax 0.10, flax, equinox and keras beside TensorFlow, which the tests do not.

python tools/jax_models.py OUT_DIR
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
from flax import linen as nn
from jax.experimental import jax2tf

out = sys.argv[1]


def save(name, function, params, specs, polymorphic, **options):
    module = tf.Module()
    module.weights = tf.nest.map_structure(tf.Variable, params)
    converted = jax2tf.convert(function, polymorphic_shapes=[None, *polymorphic], with_gradient=False, **options)
    signature = [tf.TensorSpec(shape, dtype, key) for key, (shape, dtype) in specs.items()]
    call = tf.function(lambda *args: converted(module.weights, *args), autograph=False, input_signature=signature)
    tf.saved_model.save(module, f"{out}/{name}", signatures=call.get_concrete_function())


class Towers(nn.Module):
    @nn.compact
    def __call__(self, user, item):
        sides = []
        for name, ids in (("user", user), ("item", item)):
            x = nn.Embed(50, 8, name=f"{name}_embedding")(ids)
            sides.append(nn.Dense(4, name=f"{name}_out")(nn.relu(nn.Dense(16, name=f"{name}_hidden")(x.mean(axis=1)))))
        return jax.nn.sigmoid((sides[0] * sides[1]).sum(-1))


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), strides=(2, 2))(x))
        x = nn.Conv(8, (3, 3), feature_group_count=8)(x)
        x = nn.max_pool(nn.GroupNorm(4)(x), (2, 2), strides=(2, 2))
        x = nn.avg_pool(x, (2, 2), padding="SAME")
        return nn.softmax(nn.Dense(5)(x.reshape((x.shape[0], -1))))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y, mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)), approximate=False))


key = jax.random.PRNGKey(0)
f32, i32 = tf.float32, tf.int32
model = Towers()
params = model.init(key, np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32))
save(
    "flax_towers",
    model.apply,
    params,
    {"user": ([None, 3], i32), "item": ([None, 3], i32)},
    ["(b, 3)", "(b, 3)"],
    native_serialization_platforms=("cpu", "cuda"),
)
model = Cnn()
save(
    "flax_cnn",
    model.apply,
    model.init(key, np.zeros((1, 16, 16, 3), np.float32)),
    {"image": ([None, 16, 16, 3], f32)},
    ["(b, ...)"],
)
model = Block()
save(
    "flax_transformer",
    model.apply,
    model.init(key, np.zeros((1, 6, 16), np.float32)),
    {"x": ([None, 6, 16], f32)},
    ["(b, ...)"],
)
cell = eqx.nn.GRUCell(4, 8, key=key)
arrays, static = eqx.partition(cell, eqx.is_array)
leaves, tree = jax.tree_util.tree_flatten(arrays)


def gru(leaves, xs):
    cell = eqx.combine(jax.tree_util.tree_unflatten(tree, leaves), static)
    one = lambda x: jax.lax.scan(lambda h, v: (cell(v, h), h.sum()), jnp.zeros(8), x)
    return dict(zip(("state", "sums"), jax.vmap(one)(xs), strict=True))


save("equinox_gru", gru, leaves, {"xs": ([None, 5, 4], f32)}, ["(b, ...)"])
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((12,)),
        keras.layers.Dense(16, "gelu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, "softmax"),
    ]
)
model.export(f"{out}/keras_jax_mlp", verbose=False)


def edges(params, x, ids):
    table = params["table"]
    place = jnp.clip(ids, -20, 20)
    return {
        "take": jnp.take(table, ids, axis=0, mode="clip"),
        "along": jnp.take_along_axis(x, jnp.abs(ids)[:, None] % 4, axis=1),
        "best": jnp.argmax(x, axis=1),
        "least": jnp.argmin(x, axis=1),
        "sums": jnp.cumsum(x, axis=1),
        "cast": (x * 1e10).astype(jnp.int32),
        "quotient": place // 3,
        "rest": place % 7,
        "divided": jax.lax.div(place, ids - 1),
        "shift": jax.lax.shift_left(ids, ids),
        "sign": jax.lax.shift_right_arithmetic(ids, ids),
        "logical": jax.lax.shift_right_logical(ids, ids),
        "round": jnp.round(x),
        "clip": jnp.clip(x, -1, 1),
        "cond": jax.lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v * 2, x),
        "pad": jax.lax.pad(x, 9.0, ((0, 0, 0), (-1, 2, 1))),
    }


save(
    "jax_edges",
    edges,
    {"table": np.arange(30, dtype=np.float32).reshape(10, 3)},
    {"x": ([None, 4], f32), "ids": ([None], i32)},
    ["(b, 4)", "(b,)"],
)
