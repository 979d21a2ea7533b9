"""The record of an assignment: where it is, what it survives, and that nothing in it is believed."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from msplit import formats
from msplit.errors import MsplitError, WriteError
from msplit.formats import atomic
from msplit.formats import model as records
from msplit.formats.model import AssignmentRecord, ReadOptions, RecordedProfile, RecordedRules

SAMPLE = Path("sample_graphs/mmoe_small.pb")
SAVED = Path("sample_graphs/keras_lookup")
SCHEMA = Draft202012Validator(json.loads(Path("docs/schemas/assignment.json").read_text("utf-8")))
RECORD = AssignmentRecord(
    msplit="0.1.0",
    rules=RecordedRules("rules.yaml", "version: 1\nrules: []\n", {"s.txt": "1:a.*\n"}),
    streams=4,
    wrap=True,
    batch=128,
    shapes={"b": (2, 3), "a": ()},
    gpu="h200",
    profile=RecordedProfile("p.json", "0" * 64),
    by_hand={"": ("x",), "f": ("y", "z")},
    model_hash="1" * 64,
)

texts = st.text(max_size=6) | st.sampled_from(["\ud800", "\x1b[31m", "::error::", "\u202e"])
lists = st.lists(texts, max_size=3).map(tuple)


@given(
    st.builds(
        AssignmentRecord,
        msplit=texts,
        rules=st.none() | st.builds(RecordedRules, texts, texts, st.dictionaries(texts, texts, max_size=2)),
        streams=st.integers(1, 1024),
        wrap=st.booleans(),
        batch=st.none() | st.integers(1, 2**40),
        shapes=st.dictionaries(texts, st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=2),
        gpu=texts,
        profile=st.none() | st.builds(RecordedProfile, texts, st.just("a" * 64)),
        loaded=st.builds(ReadOptions, st.none() | lists, st.none() | texts, st.none() | lists, st.none() | lists),
        by_hand=st.dictionaries(texts, lists, max_size=2),
        model_hash=st.just("b" * 64),
    )
)
def test_what_is_written_is_read_and_fits_the_schema(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / "record.json"
    path.write_bytes(records.dumps(record))
    assert records.load(path) == record
    SCHEMA.validate(json.loads(path.read_text()))


def write(out, model=SAMPLE, record=RECORD, ids=None, **options):
    return formats.write(formats.read(model, **options), ids or {}, out, force=True, record=record)


def test_it_lies_beside_a_file_and_in_a_saved_model_where_tensorflow_looks_for_nothing(tmp_path):
    write(tmp_path / "m.pb")
    write(tmp_path / "saved", SAVED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pb", "m.pb.msplit.json", "saved"]
    inside = {str(path.relative_to(tmp_path / "saved")) for path in (tmp_path / "saved").rglob("*")}
    before = {str(path.relative_to(SAVED)) for path in SAVED.rglob("*")}
    assert inside - before == {"assets.extra", "assets.extra/msplit.json"}
    for path in (tmp_path / "m.pb", tmp_path / "saved", tmp_path / "saved" / "saved_model.pb"):
        found = formats.read(path, outputs=None)
        assert found.record == replace(RECORD, model_hash=found.record.model_hash)
        assert found.record_problem is None


def test_the_same_gives_the_same_bytes(tmp_path):
    for name in ("a.pb", "b.pb"):
        write(tmp_path / name)
    assert records.place(tmp_path / "a.pb").read_bytes() == records.place(tmp_path / "b.pb").read_bytes()


def test_a_link_to_a_model_has_its_record(tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "m.pb")
    (tmp_path / "link.pb").symlink_to(tmp_path / "there" / "m.pb")
    assert formats.read(tmp_path / "link.pb").record is not None


def test_what_was_asked_of_the_file_is_asked_again_unless_something_else_is(tmp_path):
    loaded = ReadOptions(outputs=("expert_0/dense_0/MatMul",))
    write(tmp_path / "m.pb", record=replace(RECORD, loaded=loaded))
    assert [end.node for end in formats.read(tmp_path / "m.pb").outputs] == ["expert_0/dense_0/MatMul"]
    other = formats.read(tmp_path / "m.pb", outputs=["expert_1/dense_0/MatMul"])
    assert [end.node for end in other.outputs] == ["expert_1/dense_0/MatMul"]
    assert len(formats.read(tmp_path / "m.pb", record=False).outputs) > 1


def test_what_it_asks_in_vain_is_no_error_of_the_model(tmp_path):
    for loaded in (ReadOptions(("serve",), "score"), ReadOptions(outputs=("ghost",))):
        write(tmp_path / "m.pb", record=replace(RECORD, loaded=loaded))
        found = formats.read(tmp_path / "m.pb")
        assert (found.record, "does not fit it" in found.record_problem) == (None, True)
        assert found.outputs == formats.read(SAMPLE).outputs


def test_a_model_that_changed_since_is_read_without_it(tmp_path):
    write(tmp_path / "m.pb")
    formats.write(formats.read(SAMPLE), {(None, "expert_0/dense_0/MatMul"): 3}, tmp_path / "other.pb")
    (tmp_path / "other.pb").replace(tmp_path / "m.pb")
    found = formats.read(tmp_path / "m.pb")
    assert found.record is None
    assert "not of this file" in found.record_problem


def test_writing_without_a_record_takes_an_older_one_away_but_nothing_else(tmp_path):
    write(tmp_path / "m.pb")
    write(tmp_path / "m.pb", record=None)
    assert not records.place(tmp_path / "m.pb").exists()
    records.place(tmp_path / "m.pb").write_text("mine")
    write(tmp_path / "m.pb", record=None)
    assert records.place(tmp_path / "m.pb").read_text() == "mine"
    write(tmp_path / "a", SAVED)
    write(tmp_path / "b", tmp_path / "a", record=None)
    assert not (tmp_path / "b" / "assets.extra" / "msplit.json").exists()


def test_a_file_of_someone_else_in_its_place_is_not_replaced(tmp_path):
    records.place(tmp_path / "m.pb").write_text("mine")
    with pytest.raises(WriteError, match="where the record of the assignment goes"):
        formats.write(formats.read(SAMPLE), {}, tmp_path / "m.pb", record=RECORD)
    assert not (tmp_path / "m.pb").exists()
    os.mkfifo(records.place(tmp_path / "p.pb"))
    with pytest.raises(WriteError, match="where the record of the assignment goes"):
        write(tmp_path / "p.pb")


def test_a_record_without_its_model_is_in_nobodys_way(tmp_path):
    write(tmp_path / "m.pb")
    (tmp_path / "m.pb").unlink()
    formats.write(formats.read(SAMPLE), {}, tmp_path / "m.pb", record=RECORD)
    assert formats.read(tmp_path / "m.pb").record is not None


@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_between_model_and_record_leaves_a_record_that_nobody_goes_by(tmp_path, monkeypatch, at):
    write(tmp_path / "m.pb")
    first = (tmp_path / "m.pb").read_bytes()
    puts = []

    def put(*arguments, **options):
        puts.append(arguments)
        if len(puts) == at:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    real = atomic._put
    monkeypatch.setattr(atomic, "_put", put)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m.pb", record=replace(RECORD, batch=1), ids={(None, "expert_0/dense_0/MatMul"): 3})
    found = formats.read(tmp_path / "m.pb")
    if at == 1:
        assert (tmp_path / "m.pb").read_bytes() == first
        assert found.record.batch == 128
    else:
        assert (found.record, "not of this file" in found.record_problem) == (None, True)


def test_a_full_disk_after_the_model_says_that_the_model_was_written(tmp_path, monkeypatch):
    def full(path, data, mode):
        if path.name.startswith(".m.pb.msplit.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, data, mode)

    real = atomic.write_pieces
    monkeypatch.setattr(atomic, "write_pieces", full)
    with pytest.raises(WriteError, match=r"the disk is full; the model was written \(.*m\.pb\), without the record"):
        write(tmp_path / "m.pb")
    assert formats.read(tmp_path / "m.pb").record_problem is None


HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "another kind": b'{"schema_version": 1, "kind": "plan"}',
    "no UTF-8": b'{"kind": "\xff"}',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_record_is_no_error_of_the_model(tmp_path, data):
    write(tmp_path / "m.pb")
    records.place(tmp_path / "m.pb").write_bytes(data)
    found = formats.read(tmp_path / "m.pb")
    assert found.record is None
    assert str(records.place(tmp_path / "m.pb")) in found.record_problem


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "broken link", "loop", "huge"])
def test_a_special_file_in_its_place_is_no_error_of_the_model_either(tmp_path, kind):
    write(tmp_path / "m.pb")
    place = records.place(tmp_path / "m.pb")
    place.unlink()
    match kind:
        case "fifo":
            os.mkfifo(place)
        case "device":
            place.symlink_to("/dev/zero")
        case "folder":
            place.mkdir()
        case "broken link":
            place.symlink_to(tmp_path / "nothing")
        case "loop":
            place.symlink_to(place)
        case "huge":
            with place.open("wb") as file:
                file.truncate(records.MAX_BYTES + 1)
    found = formats.read(tmp_path / "m.pb")
    assert found.record is None
    assert found.record_problem


@settings(max_examples=150)
@given(st.data())
def test_any_value_of_another_type_is_told_by_its_place(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "wrong.json"
    document = json.loads(records.dumps(RECORD))
    places = []

    def walk(value, at):
        if at:
            places.append(at)
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            walk(value[key], (*at, key))

    walk(document, ())
    at = data.draw(st.sampled_from(places))
    holder = document
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = data.draw(st.sampled_from([-1, 1.5, True, [], [[]], {}, {"x": 1}, "x", [1]]))
    path.write_text(json.dumps(document))
    rules, right = document["rules"], json.loads(records.dumps(RECORD))["rules"]
    hashed = isinstance(rules, dict) and all(rules.get(key) == right[key] for key in ("hash", "text", "files"))
    if SCHEMA.is_valid(document) and (hashed or rules is None):
        records.load(path)
    else:
        with pytest.raises(MsplitError, match=re.escape(str(path))):
            records.load(path)
