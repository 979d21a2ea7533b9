from msplit import formats
from msplit.api import assign, load, save
from msplit.checks import check
from msplit.checks.subject import CheckSettings
from msplit.formats import model as records

SAMPLE = "sample_graphs/mmoe_small.pb"


def assigned(tmp_path, name="m.pb", **options):
    found = assign(load(SAMPLE), "default", **options)
    save(found.flat, found, tmp_path / name, force=True)
    return tmp_path / name


def findings(path):
    return [one.finding.text for one in check(load(path), CheckSettings(select=("MS022",))).findings]


def test_finds_a_record_of_another_file(tmp_path):
    path = assigned(tmp_path)
    other = load(path)
    formats.write(other.model, {(None, "expert_1/dense_0/MatMul"): 0}, tmp_path / "edited.pb")
    path.write_bytes((tmp_path / "edited.pb").read_bytes())
    (text,) = findings(path)
    assert text.startswith("there is a record of an assignment, and nothing goes by it: it is not of this file")
    assert load(path).model.record is None


def test_finds_a_damaged_record_and_says_where_the_damage_is(tmp_path):
    path = assigned(tmp_path)
    place = records.place(path)
    place.write_text(place.read_text().replace('"streams": 4', '"streams": "4"'))
    (text,) = findings(path)
    assert "`streams` is not a whole number" in text
    assert str(place) in text


def test_passes_the_record_that_assign_wrote_and_a_model_without_any(tmp_path):
    path = assigned(tmp_path)
    assert findings(path) == []
    records.place(path).unlink()
    assert findings(path) == []
