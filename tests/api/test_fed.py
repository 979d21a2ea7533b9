"""What a bench says of what it fed: lookups that hit, data of the model's own, outputs that were guessed."""

import pytest

from msplit.api import load
from msplit.benchmark.benchmark import bench
from msplit.errors import EngineError
from msplit.report import benchmark
from msplit.report.document import plain
from msplit.report.render import to_markdown
from msplit.verify.results import Settings
from tests.formats import foreign as graphs
from tests.formats.foreign import built
from tests.inputs import foreign

pytestmark = pytest.mark.tf
REQUEST = {
    "streams": (1,),
    "engine": "tensorflow",
    "batch": 8,
    "settings": Settings(duration=0, warmup=0, min_rounds=1, builds=1),
}


def test_a_bench_says_what_share_of_its_inputs_is_in_the_tables(tmp_path):
    flat = foreign.written(foreign.examples, tmp_path)
    found = bench(flat, **REQUEST)
    text = to_markdown(benchmark.document(flat, found))
    assert "What the inputs look up" in text
    (line,) = (line for line in text.splitlines() if "x.city" in line)
    assert "40 keys" in line
    assert "100 %" in line
    listed = plain(benchmark.payload(flat, found))["lookups"]
    assert {(one["input"], one["kind"], one["size"]) for one in listed} == {
        ("x.city", "keys", 40), ("x.history", "rows", 30), ("x.age", "rows", 10),
    }  # fmt: skip
    assert all(one["hits"] == one["values"] > 0 for one in listed)


def own_data(tf, v1, times):
    data = tf.data.Dataset.range(100).map(lambda x: tf.cast(x, tf.float32)).batch(100).repeat(times)
    tf.tanh(v1.data.make_one_shot_iterator(data).get_next() / 100.0, name="y")


def test_data_of_the_models_own_that_ends_is_told_with_the_way_to_feed_it(tmp_path):
    flat = foreign.written(lambda tf, v1: own_data(tf, v1, times=1), tmp_path)
    with pytest.raises(EngineError, match="End of sequence") as told:
        bench(flat, **REQUEST)
    assert "--part inputs=" in told.value.fix


def test_data_of_the_models_own_is_said_with_the_way_to_feed_it(tmp_path):
    flat = foreign.written(lambda tf, v1: own_data(tf, v1, times=None), tmp_path)
    found = bench(flat, **REQUEST)
    (said,) = (note for note in found.notes if "another batch" in note)
    assert "outputs are held against those of other batches" in said
    assert "--part inputs=IteratorGetNext" in said
    assert "so that every step has another batch" in to_markdown(benchmark.document(flat, found))
    fed = load(flat.model.path, inputs=["IteratorGetNext"])
    assert not any("another batch" in note for note in bench(fed, **REQUEST).notes)


def test_outputs_that_were_left_out_are_said(tmp_path):
    path = tmp_path / "loop.pb"
    path.write_bytes(built(graphs.loose_ends_in_a_loop).as_graph_def().SerializeToString())
    found = bench(load(path), **REQUEST)
    assert any("nothing reads loop" in note or "nothing reads while" in note for note in found.notes)
    assert any("--part outputs= names others" in note for note in found.notes)
