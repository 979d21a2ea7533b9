"""Pools of rows of any length on a GPU: every answer is TensorFlow's at the row's own length, and what joining gains.

PYTHONPATH=. python benchmarks/notes/probes/served_lengths.py [--cpu]      about a minute; prints a table last
"""

import itertools
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import torch

import msplit

CPU = "--cpu" in sys.argv
D, H, LAYERS, VOCAB, LENGTHS, BATCHES, COUNT = (
    (16, 2, 1, 100, (4, 8, 16), (1, 4), 60) if CPU else (256, 4, 2, 1000, (32, 64, 128), (1, 16), 400)
)
OPTIONS = {"device": "cpu", "effort": "fast"} if CPU else {"effort": "fast"}
LONG = LENGTHS[-1]
rng = np.random.default_rng(0)


def w(*shape):
    return tf.constant((rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32))


E, P = w(VOCAB, D), w(2 * LONG, D)
W = [[w(D, D) for _ in range(4)] + [w(D, 4 * D), w(4 * D, D)] for _ in range(LAYERS)]


def norm(x):
    m = tf.reduce_mean(x, -1, keepdims=True)
    return (x - m) * tf.math.rsqrt(tf.reduce_mean(tf.math.squared_difference(x, m), -1, keepdims=True) + 1e-5)


def model(ids, mask):
    b, n = tf.shape(ids)[0], tf.shape(ids)[1]
    x = tf.gather(E, ids) + P[:n]
    bias = (1.0 - tf.cast(mask, tf.float32))[:, None, None, :] * -1e4
    for q, k, v, o, up, down in W:
        q, k, v = (tf.transpose(tf.reshape(x @ one, [b, n, H, D // H]), [0, 2, 1, 3]) for one in (q, k, v))
        p = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(D // H) + bias)
        x = norm(x + tf.reshape(tf.transpose(p @ v, [0, 2, 1, 3]), [b, n, D]) @ o)
        x = norm(x + tf.nn.gelu(x @ up) @ down)
    return {"every": x, "mean": tf.reduce_mean(x, 1), "last": x[:, -1]}


module, path = tf.Module(), tempfile.mkdtemp() + "/model"
spec = {name: tf.TensorSpec([None, None], tf.int32, name=name) for name in ("ids", "mask")}
module.f = tf.function(model, input_signature=[spec["ids"], spec["mask"]])
tf.saved_model.save(module, path, signatures={"serving_default": module.f})


def feeds(rows, n):
    return {
        "ids": rng.integers(0, VOCAB, (rows, n)).astype(np.int32),
        "mask": rng.integers(0, 2, (rows, n)).astype(np.int32),
    }


def right(given, got):
    with tf.device("/CPU:0"):
        expected = module.f(**{k: tf.constant(v) for k, v in given.items()})
    for name, value in expected.items():
        value, own = value.numpy(), np.asarray(got[name].cpu() if hasattr(got[name], "cpu") else got[name])
        error = float(np.abs(own - value).max()) if value.size else 0.0
        assert own.shape == value.shape, (given["ids"].shape, name, own.shape)
        assert error < 2e-2, (given["ids"].shape, name, error)


def flood(pool, given, window):
    going, begin, done = [], time.perf_counter(), 0
    while done < len(given):
        while len(going) < window and done + len(going) < len(given):
            going.append(pool.submit(given[done + len(going)]))
        going.pop(0).result()
        done += 1
    return len(given) / (time.perf_counter() - begin)


build, table = path + ".build", []
begin = time.perf_counter()
msplit.build(path, build, batches=BATCHES, lengths=LENGTHS, **OPTIONS)
made = time.perf_counter() - begin
begin = time.perf_counter()
with msplit.pool(build, groups=2, max_rows=64) as pool:
    opened = time.perf_counter() - begin
    print("polls", pool.polls, "batches", pool.batches, "lengths", pool.lengths)
    some = [
        feeds(rows, n)
        for rows, n in itertools.product(
            (0, 1, 2, BATCHES[-1], BATCHES[-1] + 3), (1, *LENGTHS, LENGTHS[0] + 1, LENGTHS[1] - 1)
        )
    ]
    for given, future in [(one, pool.submit(one)) for one in some]:
        right(given, future.result())
    for given in some:
        right(given, pool.step(given))
    tensors = feeds(2, LENGTHS[0] + 1)
    right(tensors, pool.submit(tensors, on_device=True).result())
    if not CPU:
        right(tensors, pool.step({k: torch.from_numpy(v).cuda() for k, v in tensors.items()}))
    for kind, spread in (("all lengths", (1, LONG)), ("short", (1, LENGTHS[0])), ("long", (LONG, LONG))):
        many = [feeds(1, int(n)) for n in rng.integers(spread[0], spread[1] + 1, COUNT)]
        flood(pool, many, 8)
        before, sizes = pool.stats(), dict(pool.scheduler.steps_of)
        for window in (1, 8, 64):
            table.append((kind, window, flood(pool, many, window)))
        after = pool.stats()
        print(
            kind,
            {size: count - sizes[size] for size, count in pool.scheduler.steps_of.items() if count > sizes[size]},
            f"{after.filled - before.filled} of {after.rows - before.rows} rows nobody's",
        )
with msplit.pool(build, groups=2, workers=1, max_rows=64) as pool:  # another process, whose memory the GPU reads
    for given, future in [(one, pool.submit(one)) for one in some]:
        right(given, future.result())
print(f"right in all companies, in this process and in another one; built in {made:.1f} s, opened in {opened:.1f} s")
print("requests of one row   in flight   requests/s")
for kind, window, rate in table:
    print(f"{kind:19}  {window:10}  {rate:11.0f}")
