"""The six models that JAX wrote, on a GPU: prepared (verified against TensorFlow running the module), and timed on 1 and several streams.

PYTHONPATH=. python benchmarks/notes/probes/jax_models.py [cpu]     # with jaxlib (extra jax); 40 s on a GPU
"""

import sys
import time
from pathlib import Path

import numpy as np

import msplit

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
rows, began = [], time.time()
random = np.random.default_rng(0)
for path in sorted(Path("tests/formats/jax_models").iterdir()):
    try:
        step = msplit.prepare(path, batch=32, engine="cuda", device=device, effort="fast")
        import tensorflow as tf

        with tf.device("/cpu:0"):
            run = tf.saved_model.load(path).signatures["serving_default"]
            feeds = {}
            for name, spec in run.structured_input_signature[1].items():
                shape = [32 if size is None else size for size in spec.shape]
                values = random.integers(-40, 60, shape) if spec.dtype.is_integer else random.normal(size=shape)
                feeds[name] = values.astype(spec.dtype.as_numpy_dtype)
            expected = run(**{name: tf.constant(value) for name, value in feeds.items()})
        found = step(**feeds)
        worst = 0.0
        for name, value in expected.items():
            a, b = np.asarray(found[name]).astype(np.float64), np.asarray(value).astype(np.float64)
            assert np.allclose(a, b, rtol=1e-2, atol=1e-3, equal_nan=True), (path.name, name)
            worst = max(worst, float(np.nanmax(np.abs(a - b), initial=0.0)))
        for _ in range(5):
            step(**feeds)
        start = time.perf_counter()
        for _ in range(50):
            step(**feeds)
        micros = (time.perf_counter() - start) / 50 * 1e6
        rows.append((path.name, "ok", f"{worst:.1e}", f"{micros:.0f} us", step.label))
    except Exception as problem:
        rows.append((path.name, type(problem).__name__, "", "", str(problem)[:1500]))
print(
    f"{time.time() - began:.0f} s; columns: model, result, largest difference from TensorFlow's CPU, a call, what runs"
)
for row in rows:
    print(" | ".join(row))
assert all(row[1] == "ok" for row in rows)
