import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import formats
from msplit.errors import LoadError, MsplitError, WriteError
from msplit.formats import writer
from msplit.formats.model import STREAM_ID, Format, Model
from msplit.opset import schema
from tests import strategies
from tests.campaign import examples
from tests.cli.runner import msplit

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_graphs"
ALL_SAMPLES = sorted(p for p in SAMPLES.iterdir() if p.suffix != ".md")


def read(path: Path) -> Model:
    return formats.read(path, tags=["serve"] if path.name == "two_tags" else None)


def main(path: Path) -> Path:
    return path / "saved_model.pb" if path.is_dir() else path


def all_nodes(model: Model) -> dict[tuple[str | None, str], Any]:
    found: dict[tuple[str | None, str], Any] = {(None, node.name): node for node in model.graph_def.node}
    for function in model.graph_def.library.function:
        found.update({(function.signature.name, node.name): node for node in function.node_def})
    return found


def ids_of(model: Model) -> dict[tuple[str | None, str], int]:
    return {key: node.attr[STREAM_ID].i for key, node in all_nodes(model).items() if STREAM_ID in node.attr}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL_SAMPLES, ids=lambda p: p.name)
def test_sample_comes_back_unchanged_and_differs_only_in_ids(tmp_path: Path, path: Path) -> None:
    model = read(path)
    out = tmp_path / path.name
    report = formats.write(model, {}, out)
    assert (report.set, report.removed, report.format, report.path) == (0, 0, model.format, out)
    again = read(out)
    assert again.proto == model.proto
    if model.format in (Format.GRAPH_DEF, Format.META_GRAPH, Format.SAVED_MODEL):
        assert main(out).read_bytes() == main(path).read_bytes()
    assert report.bytes == main(out).stat().st_size
    # Ids on everything, functions included, then off again.
    nodes = all_nodes(model)
    annotated = tmp_path / f"annotated_{path.name}"
    shutil.copytree(out, annotated) if out.is_dir() else shutil.copyfile(out, annotated)
    ids: dict[tuple[str | None, str], int | None] = {key: number % 3 for number, key in enumerate(nodes)}
    formats.write(model, ids, annotated, force=True)
    written = formats.read(annotated, tags=model.tags or None)
    assert ids_of(written) == ids
    assert formats.graph_hash(written) == formats.graph_hash(model)
    before = ids_of(model)
    formats.write(written, {key: before.get(key) for key in nodes}, out, force=True)
    assert read(out).proto == model.proto


@pytest.mark.parametrize("path", [p for p in ALL_SAMPLES if p.is_dir()], ids=lambda p: p.name)
def test_files_of_a_saved_model_are_kept(tmp_path: Path, path: Path) -> None:
    report = formats.write(read(path), {}, tmp_path / "out")
    before, after = files(path), files(tmp_path / "out")
    had = before.pop("fingerprint.pb", None)
    assert after == before
    assert bool(report.notes) == (had is not None)
    assert all("fingerprint.pb" in note for note in report.notes)
    # No links: editing one folder must not change the other.
    assert all(p.stat().st_nlink == 1 and not p.is_symlink() for p in (tmp_path / "out").rglob("*") if p.is_file())


@pytest.mark.no_cover  # samples go the same ways; traced, it takes six times as long
@settings(max_examples=examples(50, 1000), deadline=None)
@given(strategies.graph_defs(), st.data())
def test_generated_graph_differs_only_in_the_ids_given(
    tmp_path_factory: pytest.TempPathFactory, graph_def: Any, data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = data.draw(st.booleans())
    source, out = folder / "source", folder / "out"
    if text:
        source.write_text(text_format.MessageToString(graph_def))
    else:
        source.write_bytes(graph_def.SerializeToString(deterministic=True))
    model = formats.read(source)
    before = model.proto.SerializeToString(deterministic=True)
    assert before == graph_def.SerializeToString(deterministic=True)
    formats.write(model, {}, out, force=True)
    assert formats.read(out).proto == graph_def
    nodes = all_nodes(model)
    ids = data.draw(st.dictionaries(st.sampled_from(list(nodes)), st.none() | st.integers(0, 7)))
    report = formats.write(model, ids, out, force=True)
    assert model.proto.SerializeToString(deterministic=True) == before
    old = ids_of(model)
    expected = {key: value for key, value in {**old, **ids}.items() if value is not None}
    written = formats.read(out)
    assert ids_of(written) == expected
    assert report.set == sum(value is not None and old.get(key) != value for key, value in ids.items())
    assert report.removed == sum(value is None and key in old for key, value in ids.items())
    assert formats.graph_hash(written) == formats.graph_hash(model)
    for message in (written.proto, model.proto):
        for node in [*message.node, *(n for f in message.library.function for n in f.node_def)]:
            node.attr.pop(STREAM_ID, None)
    assert written.proto == model.proto


def test_an_id_that_is_not_there_can_be_removed(tmp_path: Path) -> None:
    model = formats.read(SAMPLES / "cond_v1.pb")
    report = formats.write(model, dict.fromkeys(all_nodes(model)), tmp_path / "out")
    assert (report.set, report.removed) == (0, 0)
    assert formats.read(tmp_path / "out").proto == model.proto


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    node = schema.node_def_pb2.NodeDef(name="a", op="NoOp")
    node.MergeFromString(b"\xa2\x3e\x05hello")  # field 1000
    graph_def = schema.graph_pb2.GraphDef(node=[node])
    graph_def.MergeFromString(b"\xa8\x3e\x07")  # field 1001
    (tmp_path / "m").write_bytes(graph_def.SerializeToString())
    model = formats.read(tmp_path / "m")
    formats.write(model, {(None, "a"): 1}, tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    assert b"\xa2\x3e\x05hello" in data
    assert data.endswith(b"\xa8\x3e\x07")


def test_only_the_chosen_graph_of_a_saved_model_is_edited(tmp_path: Path) -> None:
    model = read(SAMPLES / "two_tags")
    key = next(iter(all_nodes(model)))
    formats.write(model, {key: 5}, tmp_path / "out")
    written = formats.read(tmp_path / "out", tags=["serve"])
    others = [i for i in range(len(model.proto.meta_graphs)) if i != model.meta_graph]
    assert ids_of(written)[key] == 5
    assert others
    for other in others:
        assert written.proto.meta_graphs[other] == model.proto.meta_graphs[other]


@pytest.mark.parametrize(
    ("comment", "there"),
    [
        ("# mine\n", True),
        ("node { name: 'c' op: 'NoOp' # mine\n}", True),
        ('node { name: "c" op: "NoOp" device: "a#\\"#b" }', False),
    ],
)
def test_comments_of_a_text_file_do_not_go_without_a_word(tmp_path: Path, comment: str, there: bool) -> None:
    (tmp_path / "m.pbtxt").write_text(f"node {{ name: 'first' op: 'NoOp' }}\n{comment}\n")
    model = formats.read(tmp_path / "m.pbtxt")
    report = formats.write(model, {}, tmp_path / "out.pbtxt")
    assert model.commented == bool(report.warnings) == there
    assert all("comments" in warning for warning in report.warnings)
    done = msplit("assign", tmp_path / "m.pbtxt", "-o", tmp_path / "said.pbtxt", columns=200)
    assert done.code == 0, done.err
    assert ("comments of the text file are not kept" in done.out) == there


def test_text_formats_of_meta_graph_and_saved_model(tmp_path: Path) -> None:
    meta = formats.read(SAMPLES / "training.meta")
    (tmp_path / "m.meta").write_text(text_format.MessageToString(meta.proto))
    model = formats.read(tmp_path / "m.meta")
    assert model.format is Format.META_GRAPH_TEXT
    formats.write(model, {(None, "logits/kernel"): 3}, tmp_path / "out.meta")
    written = formats.read(tmp_path / "out.meta")
    assert written.format is Format.META_GRAPH_TEXT
    assert ids_of(written) == {(None, "logits/kernel"): 3}
    saved = formats.read(SAMPLES / "two_signatures")
    folder = tmp_path / "saved"
    shutil.copytree(saved.path, folder)
    (folder / "saved_model.pb").unlink()
    (folder / "saved_model.pbtxt").write_text(text_format.MessageToString(saved.proto))
    model = formats.read(folder)
    assert model.format is Format.SAVED_MODEL_TEXT
    formats.write(model, {}, tmp_path / "out")
    assert (tmp_path / "out" / "saved_model.pbtxt").exists()
    assert not (tmp_path / "out" / "saved_model.pb").exists()
    assert formats.read(tmp_path / "out").proto == saved.proto


def test_id_of_another_type_is_replaced(tmp_path: Path) -> None:
    graph_def = schema.graph_pb2.GraphDef()
    graph_def.node.add(name="a", op="NoOp").attr[STREAM_ID].s = b"zero"
    (tmp_path / "m").write_bytes(graph_def.SerializeToString())
    report = formats.write(formats.read(tmp_path / "m"), {(None, "a"): 0}, tmp_path / "out")
    assert report.set == 1
    assert formats.read(tmp_path / "out").graph.attrs[0][STREAM_ID] == 0


def test_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from msplit import formats; "
        "m = formats.read(sys.argv[1]); k = {(None, n): i % 4 for i, n in enumerate(m.graph.names)}; "
        "k.update({(f, n.name): 1 for f in m.graph.functions for n in m.graph_def.library.function[0].node_def"
        " if f == m.graph_def.library.function[0].signature.name}); "
        "formats.write(m, k, sys.argv[2]); print(formats.graph_hash(m))"
    )
    results = set()
    for seed in ("0", "1", "2"):
        out = tmp_path / seed
        done = subprocess.run(
            [sys.executable, "-c", code, str(SAMPLES / "two_signatures"), str(out)],
            env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        results.add(((out / "saved_model.pb").read_bytes(), done.stdout))
    assert len(results) == 1


# ---- refusals -----------------------------------------------------------------------------------------------------------


def copy_of(sample: str, folder: Path) -> Path:
    target = folder / sample
    source = SAMPLES / sample
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    return target


@pytest.mark.parametrize("sample", ["cond_v1.pb", "two_signatures"])
@pytest.mark.parametrize("force", [False, True])
def test_input_is_never_written_to(tmp_path: Path, sample: str, force: bool) -> None:
    source = copy_of(sample, tmp_path)
    model = formats.read(source)
    before = main(source).read_bytes()
    (tmp_path / "link").symlink_to(sample)
    for out in (source, tmp_path / "link", tmp_path / "x" / ".." / sample):
        with pytest.raises(WriteError, match="never modified"):
            formats.write(model, {}, out, force=force)
    assert main(source).read_bytes() == before


def test_hard_link_of_the_input_is_the_input(tmp_path: Path) -> None:
    source = copy_of("cond_v1.pb", tmp_path)
    os.link(source, tmp_path / "other.pb")
    with pytest.raises(WriteError, match="never modified"):
        formats.write(formats.read(source), {}, tmp_path / "other.pb", force=True)


def test_output_inside_the_input_or_around_it(tmp_path: Path) -> None:
    (tmp_path / "around").mkdir()
    source = copy_of("two_signatures", tmp_path / "around")
    model = formats.read(source)
    for out in (source / "variables" / "out", tmp_path / "around"):
        with pytest.raises(WriteError, match="never modified"):
            formats.write(model, {}, out, force=True)


@pytest.mark.parametrize("sample", ["cond_v1.pb", "two_signatures"])
def test_existing_output_is_replaced_only_by_force(tmp_path: Path, sample: str) -> None:
    model = formats.read(SAMPLES / sample)
    formats.write(model, {}, tmp_path / "out")
    key = (None, model.graph.names[0])
    with pytest.raises(WriteError, match="is there already"):
        formats.write(model, {key: 1}, tmp_path / "out")
    assert ids_of(formats.read(tmp_path / "out")) == {}
    formats.write(model, {key: 1}, tmp_path / "out", force=True)
    assert ids_of(formats.read(tmp_path / "out")) == {key: 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_force_does_not_remove_a_folder_that_is_no_saved_model(tmp_path: Path) -> None:
    model = formats.read(SAMPLES / "two_signatures")
    (tmp_path / "home").mkdir()
    formats.write(model, {}, tmp_path / "home", force=True)  # empty: nothing to lose
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").touch()
    with pytest.raises(WriteError, match="not a SavedModel"):
        formats.write(model, {}, tmp_path / "photos", force=True)
    (tmp_path / "file").write_text("keep")
    with pytest.raises(WriteError, match="is a file"):
        formats.write(model, {}, tmp_path / "file", force=True)
    assert (tmp_path / "photos" / "1.jpg").exists()
    assert (tmp_path / "file").read_text() == "keep"


def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    model = formats.read(SAMPLES / "two_signatures")
    function = next(iter(model.graph.functions))
    for key, place in (((None, "gone"), "the graph"), ((function, "gone"), "function"), (("gone", "x"), "'gone'")):
        with pytest.raises(WriteError, match=place):
            formats.write(model, {key: 1}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_message_over_two_gib_is_refused_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_BYTES", 100)
    with pytest.raises(WriteError, match=r"2 GiB(.|\n)*SavedModel"):
        formats.write(formats.read(SAMPLES / "cond_v1.pb"), {}, tmp_path / "out")


def test_saved_model_whose_files_can_not_be_copied(tmp_path: Path) -> None:
    source = copy_of("two_signatures", tmp_path)
    model = formats.read(source)
    (source / "assets" / "dangling").parent.mkdir(exist_ok=True)
    (source / "assets" / "dangling").symlink_to("nowhere")
    with pytest.raises(WriteError, match=r"dangling can not be copied"):
        formats.write(model, {}, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two_signatures"]


def test_links_inside_a_saved_model_become_files(tmp_path: Path) -> None:
    source = copy_of("two_signatures", tmp_path)
    (tmp_path / "blob").write_text("vocabulary")
    (source / "assets").mkdir(exist_ok=True)
    (source / "assets" / "words.txt").symlink_to(tmp_path / "blob")
    formats.write(formats.read(source), {}, tmp_path / "out")
    copied = tmp_path / "out" / "assets" / "words.txt"
    assert not copied.is_symlink()
    assert copied.read_text() == "vocabulary"


def test_input_that_has_gone_meanwhile(tmp_path: Path) -> None:
    source = copy_of("two_signatures", tmp_path)
    model = formats.read(source)
    shutil.rmtree(source)
    with pytest.raises(WriteError):
        formats.write(model, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- hash ---------------------------------------------------------------------------------------------------------------


def hash_of(tmp_path: Path, graph_def: Any, **options: Any) -> str:
    (tmp_path / "h").write_bytes(graph_def.SerializeToString())
    return formats.graph_hash(formats.read(tmp_path / "h", **options))


def test_hash_changes_with_anything_but_ids_and_versions(tmp_path: Path) -> None:
    graph_def = formats.read(SAMPLES / "mmoe_small.pb").proto
    original = hash_of(tmp_path, graph_def)
    assert len(original) == 64

    def changed(edit: Any) -> str:
        copy = schema.graph_pb2.GraphDef()
        copy.CopyFrom(graph_def)
        edit(copy)
        return hash_of(tmp_path, copy)

    relu = next(i for i, node in enumerate(graph_def.node) if node.op == "Relu")
    const = next(
        i for i, node in enumerate(graph_def.node) if node.op == "Const" and node.attr["value"].tensor.tensor_content
    )

    def weights(copy: Any) -> None:
        tensor = copy.node[const].attr["value"].tensor
        tensor.tensor_content = bytes(len(tensor.tensor_content))

    edits = [
        lambda copy: copy.node.add(name="more", op="NoOp"),
        lambda copy: setattr(copy.node[relu], "op", "Relu6"),
        lambda copy: setattr(copy.node[relu], "device", "/device:GPU:0"),
        lambda copy: setattr(copy.node[relu].attr["x"], "i", 1),
        lambda copy: setattr(copy.library.function.add().signature, "name", "f"),
        weights,
    ]
    hashes = [changed(edit) for edit in edits]
    assert len({original, *hashes}) == len(edits) + 1
    assert changed(lambda copy: setattr(copy.node[relu].attr[STREAM_ID], "i", 1)) == original
    assert changed(lambda copy: setattr(copy.versions, "producer", 5)) == original
    assert hash_of(tmp_path, graph_def, outputs=["tower_0/out/Sigmoid"]) != original


def test_hash_is_the_same_for_binary_and_text(tmp_path: Path) -> None:
    model = formats.read(SAMPLES / "cond_v1.pb")
    (tmp_path / "text").write_text(text_format.MessageToString(model.proto))
    assert formats.graph_hash(formats.read(tmp_path / "text")) == formats.graph_hash(model)


# ---- TensorFlow ---------------------------------------------------------------------------------------------------------


@pytest.mark.tf
def test_tensorflow_loads_an_annotated_saved_model_and_gives_equal_bits(tmp_path: Path) -> None:
    import tensorflow as tf

    feeds = {
        "keras_lookup": {"city": tf.constant(["city_1", "nowhere"]), "amount": tf.reshape(tf.range(8.0), (2, 4))},
        "gru_while": {"ids": tf.reshape(tf.range(24), (2, 12))},
        "control_flow_v2": {"x": tf.ones((2, 8)), "steps": tf.constant(3)},
    }
    for name, feed in feeds.items():
        model = formats.read(SAMPLES / name)
        ids = {key: number % 4 for number, key in enumerate(all_nodes(model))}
        formats.write(model, ids, tmp_path / name)
        results = []
        for path in (SAMPLES / name, tmp_path / name):
            loaded = tf.saved_model.load(str(path))
            results.append({k: v.numpy() for k, v in loaded.signatures["serving_default"](**feed).items()})
        assert results[0].keys() == results[1].keys()
        for key in results[0]:
            np.testing.assert_array_equal(results[0][key], results[1][key])


@pytest.mark.tf
def test_tensorflow_takes_every_annotated_graph(tmp_path: Path) -> None:
    import tensorflow as tf

    for path in ALL_SAMPLES:
        if path.is_dir() or path.name == "custom_op.pb":
            continue
        model = formats.read(path)
        out = tmp_path / path.name
        formats.write(model, dict.fromkeys(all_nodes(model), 1), out)
        with tf.Graph().as_default() as graph:
            if model.meta is not None:
                tf.compat.v1.train.import_meta_graph(str(out))
            else:
                tf.import_graph_def(formats.read(out).graph_def, name="")
            assert all(op.get_attr(STREAM_ID) == 1 for op in graph.get_operations())


@pytest.mark.tf
def test_tensorflow_takes_generated_graphs_that_pass_the_verifier(tmp_path: Path) -> None:
    """What the verifier lets through, the importer lets through, and the other way round for single defects."""
    import tensorflow as tf

    def imports(data: bytes) -> bool:
        with tf.Graph().as_default():
            try:
                tf.import_graph_def(schema.graph_pb2.GraphDef.FromString(data), name="")
            except ValueError:
                return False
        return True

    def reads(data: bytes) -> bool:
        (tmp_path / "m").write_bytes(data)
        try:
            formats.read(tmp_path / "m")
        except LoadError:
            raise
        except MsplitError:
            return False
        return True

    def node(name: str, *inputs: str, op: str = "Relu", **attrs: Any) -> Any:
        made = schema.node_def_pb2.NodeDef(name=name, op=op, input=inputs)
        made.attr["T"].type = 1
        for key, value in attrs.items():
            made.attr[key].list.s.append(value)
        return made

    x = schema.node_def_pb2.NodeDef(name="x", op="Placeholder")
    x.attr["dtype"].type = 1
    cases = [
        [node("a", "x")], [node("a", "x:0")], [node("a", "x:1")], [node("a", "gone")], [node("a", "^gone")], [node("a")],
        [node("a", "x", "x")], [node("a", "^x", "x")], [node("a", "x", "^x")], [node("a", "a")], [node("a", "b"), node("b", "x")],
        [node("a", "b"), node("b", "a")], [node("a", "x"), node("a", "x")], [node("a b", "x")], [node("_a", "x")],
        [node("a/", "x")], [node("a>b", "x")], [node("a>", "x")], [node("-a", "x")], [node("a", "x", _class=b"loc:@gone")],
        [node("a", "x", _class=b"loc:@x")], [node("a", "x", _class=b"gone")], [node(".a", "x")], [node("a", "x:00")],
        [node("", "x")], [node("a\\b", "x")],
    ]  # fmt: skip
    for nodes in cases:
        data = schema.graph_pb2.GraphDef(node=[x, *nodes]).SerializeToString()
        assert reads(data) == imports(data), nodes


def test_a_message_with_other_files_beside_it(tmp_path: Path) -> None:
    model = read(SAMPLES / "keras_lookup")

    def beside(folder: Path) -> None:
        writer.copy_beside(model, folder, lambda name: name == "assets")

    writer.write_message(model, model.proto, tmp_path / "out", beside=beside)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["assets", "saved_model.pb"]
    assert [path.name for path in (tmp_path / "out" / "assets").iterdir()] == [
        path.name for path in (SAMPLES / "keras_lookup" / "assets").iterdir()
    ]
    writer.write_message(model, model.proto, tmp_path / "out", force=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["saved_model.pb"]
    bare = read(SAMPLES / "while_v1.pb")
    writer.write_message(bare, bare.graph_def, tmp_path / "out.pb")
    assert read(tmp_path / "out.pb").graph_def == bare.graph_def
    with pytest.raises(WriteError, match="is the input"):
        writer.write_message(bare, bare.graph_def, bare.path, force=True)
