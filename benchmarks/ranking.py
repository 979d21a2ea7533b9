"""Rankers of one user and many items: the user's side once, beside the model as exported and TensorFlow, in one run.

    python benchmarks/ranking.py make GRAPHS                         # where TensorFlow is: the models
    python benchmarks/ranking.py run GRAPHS --items 512 > table.md   # on a GPU; --device cpu tries it, and its times say nothing
    python benchmarks/ranking.py run GRAPHS --items 1050 --users 15  # 15 users x 70 items beside one user x 1,050

Models, each with inputs `user_*` that have one row in a request:

- *encoder*: 12 user tables and an encoder over 50 clicks, 8 item tables, layers of 1024, 512 and 256;
- *din*: attention of each item over a history of 50, by layers over ``[q, h, q - h, q * h]``;
- *bst*: a transformer layer over the history and the item;
- *deepfm*: 26 fields, 13 of them the user's: factors, and layers over all;
- *two_towers*: a tower for each side, and their product;
- *nrms*: self-attention over the words of each title, then over the titles that the user has read, as in
  `recommenders/models/newsrec/models/nrms.py` of recommenders-team/recommenders;
- *sim*: the items of a long history most like the item, a GRU over a short one, and one that updates by the attention of the item, as in
  `TensorFlow2/Recommendation/SIM/sim/models/sim_model.py` of NVIDIA/DeepLearningExamples.

Nothing in msplit was made for the last two. Their sizes are made up.

Each is verified by `msplit.bench` against TensorFlow with the user's rows repeated, where that is installed, else against plain ops. The
table comes last: per model how much of the work is the user's alone (by FLOPs and by the kernels' predicted time), µs of the best row
with shared rows and of the best on all rows, by the device's clock and the host's, and TensorFlow's; with `--users` also of the best where
the items are of so many users.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

SHARED = ("user_*",)
ROWS, WIDTH, CLICKS = 20_000, 32, 50


class Maker:
    """Layers with made-up weights, in the default graph of TensorFlow 1."""

    def __init__(self, tf: Any) -> None:
        self.tf, self.rng = tf, np.random.default_rng(0)

    def weights(self, *sizes: int) -> Any:
        return self.tf.constant((self.rng.standard_normal(sizes) / sizes[0] ** 0.5).astype(np.float32))

    def ids(self, name: str, *sizes: int) -> Any:
        return self.tf.compat.v1.placeholder(self.tf.int32, [None, *sizes], name=name)

    def looked_up(self, name: str, *sizes: int, rows: int = ROWS, width: int = WIDTH) -> Any:
        return self.tf.gather(self.weights(rows, width), self.ids(name, *sizes))

    def layers(self, value: Any, *widths: int, last: bool = False) -> Any:
        for width in widths:
            value = self.tf.nn.bias_add(
                self.tf.tensordot(value, self.weights(value.shape[-1], width), 1), self.weights(width)
            )
            value = self.tf.nn.relu(value)
        return self.tf.sigmoid(self.tf.matmul(value, self.weights(value.shape[-1], 1)), name="y") if last else value

    def attention(self, value: Any, queries: Any) -> Any:
        width = value.shape[-1]
        q, k, v = (self.tf.tensordot(one, self.weights(width, width), 1) for one in (queries, value, value))
        return self.tf.matmul(self.tf.nn.softmax(self.tf.matmul(q, k, transpose_b=True) / float(width) ** 0.5), v)


def encoder(m: Maker) -> None:
    columns = [m.looked_up(f"user_{number}") for number in range(12)]
    clicks = m.looked_up("user_clicks", CLICKS)
    clicks = clicks + m.attention(clicks, clicks)
    clicks = clicks + m.layers(clicks, 4 * WIDTH, WIDTH)
    columns += [m.tf.reduce_mean(clicks, 1), *(m.looked_up(f"item_{number}") for number in range(8))]
    m.layers(m.tf.concat(columns, 1), 1024, 512, 256, last=True)


def din(m: Maker) -> None:
    history, item = m.looked_up("user_history", CLICKS, width=64), m.looked_up("item", width=64)
    query = m.tf.tile(item[:, None, :], [1, CLICKS, 1])
    score = m.layers(m.tf.concat([query, history, query - history, query * history], -1), 80, 40, 1)
    read = m.tf.squeeze(m.tf.matmul(m.tf.nn.softmax(m.tf.transpose(score, [0, 2, 1])), history), 1)
    m.layers(m.tf.concat([m.looked_up("user_id"), read, item, read * item], -1), 200, 80, last=True)


def bst(m: Maker) -> None:
    history, item = m.looked_up("user_history", CLICKS), m.looked_up("item")
    both = m.tf.concat([history, item[:, None, :]], 1)
    both = both + m.attention(both, both)
    both = m.tf.reshape(both + m.layers(both, 4 * WIDTH, WIDTH), [-1, (CLICKS + 1) * WIDTH])
    m.layers(m.tf.concat([both, *(m.looked_up(f"user_{number}") for number in range(4))], 1), 1024, 512, 256, last=True)


def deepfm(m: Maker) -> None:
    fields = [m.looked_up(f"{'user' if number < 13 else 'item'}_{number}") for number in range(26)]
    total, square = m.tf.add_n(fields), m.tf.add_n([m.tf.square(one) for one in fields])
    pairs = 0.5 * (m.tf.square(total) - square)
    m.layers(m.tf.concat([m.layers(m.tf.concat(fields, 1), 400, 400), pairs], 1), 64, last=True)


def two_towers(m: Maker) -> None:
    sides = [m.tf.concat([m.looked_up(f"{side}_{number}") for number in range(6)], 1) for side in ("user", "item")]
    user, item = (m.layers(side, 512, 256, 64) for side in sides)
    m.tf.reduce_sum(user * item, 1, keepdims=True, name="y")


def nrms(m: Maker) -> None:
    table, heads, width = m.weights(ROWS, 64), 8, 64

    def pooled(value: Any) -> Any:
        score = m.tf.tensordot(
            m.tf.tanh(m.tf.tensordot(value, m.weights(width, 64), 1) + m.weights(64)), m.weights(64), 1
        )
        return m.tf.reduce_sum(value * m.tf.nn.softmax(score)[..., None], -2)

    def encoded(value: Any) -> Any:
        length = value.shape[-2]
        q, k, v = (
            m.tf.transpose(
                m.tf.reshape(m.tf.tensordot(value, one, 1), [-1, length, heads, width // heads]), [0, 2, 1, 3]
            )
            for one in (m.weights(value.shape[-1], width) for _ in range(3))
        )
        read = m.tf.matmul(m.tf.nn.softmax(m.tf.matmul(q, k, transpose_b=True) / (width / heads) ** 0.5), v)
        return pooled(m.tf.reshape(m.tf.transpose(read, [0, 2, 1, 3]), [-1, length, width]))

    clicks, words = 20, 12
    m.rng, state = np.random.default_rng(1), np.random.default_rng(1)
    user = encoded(m.tf.gather(table, m.tf.reshape(m.ids("user_titles", clicks, words), [-1, words])))
    m.rng = state  # one encoder of titles for both
    item = encoded(m.tf.gather(table, m.ids("item_title", words)))
    m.rng = np.random.default_rng(2)
    user = encoded(m.tf.reshape(user, [-1, clicks, width]))
    m.tf.sigmoid(m.tf.reduce_sum(user * item, 1, keepdims=True), name="y")


def sim(m: Maker) -> None:
    long, short, most, width = 64, 10, 16, 2 * WIDTH
    tables = m.weights(ROWS, WIDTH), m.weights(300, WIDTH)

    def looked_up(name: str, *sizes: int) -> Any:
        ids = zip(tables, (m.ids(f"{name}_id", *sizes), m.ids(f"{name}_kind", *sizes)), strict=True)
        return m.tf.concat([m.tf.gather(table, one) for table, one in ids], -1)

    def attended(score: Any, mask: Any, values: Any) -> Any:
        score = m.tf.nn.softmax(
            m.tf.where(m.tf.equal(mask, 1.0), score, m.tf.fill(m.tf.shape(score), m.tf.float32.min))
        )
        return score, m.tf.reduce_sum(score[..., None] * values, 1)

    def recurrent(values: Any, attention: Any = None) -> list[Any]:
        gates, new = (
            (m.weights(2 * width, 2 * width), m.weights(2 * width)),
            (m.weights(2 * width, width), m.weights(width)),
        )
        states = [m.tf.zeros_like(values[:, 0])]
        for step, value in enumerate(m.tf.unstack(values, axis=1)):
            both = m.tf.sigmoid(m.tf.matmul(m.tf.concat([value, states[-1]], 1), gates[0]) + gates[1])
            reset, update = m.tf.split(both, 2, 1)
            made = m.tf.tanh(m.tf.matmul(m.tf.concat([value, reset * states[-1]], 1), new[0]) + new[1])
            update = update if attention is None else (1.0 - attention[:, step, None]) * update
            states.append(update * states[-1] + (1.0 - update) * made)
        return states[1:]

    item, user, clicks = looked_up("item"), m.looked_up("user"), looked_up("user_long", long)
    sizes = {"long": long, "short": short}
    masks = [
        m.tf.compat.v1.placeholder(m.tf.float32, [None, size], f"user_{name}_mask") for name, size in sizes.items()
    ]
    clicks, few = clicks * masks[0][..., None], looked_up("user_short", short) * masks[1][..., None]
    scores, interest = attended(m.tf.reduce_sum(item[:, None] * clicks, -1), masks[0], clicks)
    best, places = m.tf.math.top_k(scores, most)
    alike, there = m.tf.gather(clicks, places, batch_dims=1), m.tf.cast(best > 0.0, m.tf.float32)
    _, nearest = attended(m.tf.reduce_sum(item[:, None] * alike, -1), there, alike)
    mean = m.tf.reduce_sum(alike * there[..., None], 1) / (m.tf.reduce_sum(there, 1, keepdims=True) + 1.0)
    first = m.tf.stack(recurrent(few), 1)
    query = m.tf.tile(m.tf.matmul(item, m.weights(width, width))[:, None], [1, short, 1])
    score = m.layers(m.tf.concat([query, first, query - first, query * first], -1), 80, 40, 1)[..., 0]
    last = recurrent(first, attended(score, masks[1], first)[0])[-1]
    m.layers(m.tf.concat([interest, nearest, mean, item, last, user], 1), 200, 80, last=True)


MODELS: dict[str, Callable[[Maker], None]] = {
    one.__name__: one for one in (encoder, din, bst, deepfm, two_towers, nrms, sim)
}


def make(folder: Path) -> None:
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    for name, build in MODELS.items():
        with tf.Graph().as_default() as graph:
            build(Maker(tf))
        (folder / f"{name}.pb").write_bytes(graph.as_graph_def().SerializeToString())


def best_of(flat: Any, users: int, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """The fastest row of each kind, of a bench with so many users in a step."""
    import msplit

    fast = {"effort": "fast"} if arguments.device == "cpu" else {}
    done = msplit.bench(
        flat, batch=arguments.items, streams=(1, 8), engine="cuda", device=arguments.device, shared=SHARED, users=users,
        compare_xla=False, precision=arguments.precision, settings=msplit.Settings(duration=arguments.seconds), **fast,
    )  # fmt: skip
    if done.result.failed:
        raise SystemExit(f"{name}, {users} users: {done.result.describe_failures()}")
    best = dict[str, Any]()
    for one in done.result.variants:
        side = "all" if one.label.endswith("all rows") else "TensorFlow" if one.engine != "cuda" else "shared"
        if one.host is not None:
            print(f"{name}, {users} users: {one.label}: {cell(one)}", file=sys.stderr, flush=True)
            if side not in best or _time(one) < _time(best[side]):
                best[side] = one
    return best


def _time(one: Any) -> float:
    found: float = (one.device or one.host).median
    return found


def run(folder: Path, names: list[str], arguments: argparse.Namespace) -> None:
    import msplit
    from msplit import api
    from msplit.analysis.shared import shared_work

    rows = []
    for name in names:
        flat = msplit.load(folder / f"{name}.pb")
        _, costs = api.price(flat, batch=arguments.items)
        own = shared_work(flat, costs, SHARED)
        assert own is not None
        best = best_of(flat, 1, arguments, name)
        several = [best_of(flat, arguments.users, arguments, name).get("shared")] if arguments.users > 1 else []
        flops = own.flops / max(float(costs.flops.sum()), 1.0)
        rows.append(
            [
                name,
                f"{100 * flops:.0f} %",
                f"{100 * own.share:.0f} %",
                *map(cell, [best.get("shared"), *several, best.get("all"), best.get("TensorFlow")]),
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        f"{arguments.items} items, {arguments.precision}, µs of a step by the device's clock (the host's); where rows are shared, the one "
        "user's inputs have one row\n"
    )
    users = [f"shared rows, {arguments.users} users x {arguments.items // arguments.users}"] * (arguments.users > 1)
    heads = [
        "model",
        "user's share of the FLOPs",
        "of the time",
        "shared rows, one user",
        *users,
        "all rows",
        "TensorFlow",
    ]
    print(f"| {' | '.join(heads)} |")
    print(f"| --- |{' ---: |' * (len(heads) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def cell(one: Any) -> str:
    if one is None:
        return ""
    device = "" if one.device is None else f"{one.device.median * 1e6:,.1f}"
    return f"{device} ({one.host.median * 1e6:,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="which, such as encoder,din")
    parser.add_argument("--items", type=int, default=512)
    parser.add_argument("--users", type=int, default=1, help="also a step of so many users, who share the items")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring each model")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.folder)
    else:
        run(arguments.folder, arguments.models.split(","), arguments)


if __name__ == "__main__":
    main()
