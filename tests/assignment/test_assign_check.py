"""`check` right after `assign`, told nothing, finds no error: samples, rule sets, and training graphs with loops of TensorFlow 1."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import formats, rules
from msplit.api import assign, load, save, strip
from msplit.checks import check
from msplit.checks.subject import Severity
from msplit.cost import profile
from msplit.cost import profile as profiles
from msplit.cost.costs import Constants
from msplit.cost.profile import InputShape
from msplit.errors import AssignError
from msplit.formats import model as records
from msplit.formats.model import STREAM_ID
from msplit.opset import schema
from tests import strategies
from tests.campaign import campaign
from tests.cli.runner import SAMPLES, fine, msplit

SMALL = ("mmoe_small.pb", "annotated.pb", "cond_v1.pb", "while_v1.pb", "training.meta", "training_resource.meta", "feature_columns",
         "gru_while", "keras_lookup", "ragged_sparse", "tf1_saved_model", "custom_op.pb", "control_flow_v2")  # fmt: skip
DEAR = {"feature_columns", "training_resource.meta", "lstm_small.pb"}
"""`auto` searches them for seconds, and does so in tests of the command line, too."""
LARGE = ("inception_v3_stripped.pb", "keras_inception", "lstm_small.pb", "towers_small.pb")


def errors(path, **options):
    report = check(load(path, **options))
    return [f"{one.code}: {one.finding.text}" for one in report.findings if one.severity is Severity.ERROR]


sample = cache(load)
"""A sample, loaded once: loading gives what nobody changes."""


def told_nothing(path, out, ruleset, **options):
    """Assigns, and checks what was written without a word about how."""
    flat = sample(path) if path.parent == SAMPLES else load(path)
    save(flat, assign(flat, ruleset, **options), out, force=True)
    return errors(out)


@pytest.mark.parametrize(
    ("model", "ruleset"),
    [
        pytest.param(model, ruleset, marks=campaign if model in DEAR and ruleset == "auto" else ())
        for model in SMALL
        for ruleset in rules.available()
    ],
)
def test_of_a_sample(model, ruleset, tmp_path):
    assert told_nothing(SAMPLES / model, tmp_path / "out", ruleset, batch=3) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ruleset"),
    [
        pytest.param(model, ruleset, marks=campaign if model in DEAR and ruleset == "auto" else ())
        for model in LARGE
        for ruleset in rules.available()
    ],
)
def test_of_a_large_sample(model, ruleset, tmp_path):
    streams = 6 if ruleset == "device" else 5  # as many on each GPU
    assert told_nothing(SAMPLES / model, tmp_path / "out", ruleset, batch=2, streams=streams) == []


@st.composite
def training_graphs(draw):
    """What `dynamic_rnn` and its gradients come to: towers of loops that write arrays, and loops that read them backwards."""
    graph = schema.graph_pb2.GraphDef()
    graph.versions.producer = 1395

    def node(name, op, *inputs, **types):
        made = graph.node.add(name=name, op=op, input=inputs)
        for key, value in types.items():
            if isinstance(value, str):
                made.attr[key].s = value.encode()
            elif isinstance(value, bool):
                made.attr[key].b = value
            elif key == "N":
                made.attr[key].i = value
            else:
                made.attr[key].type = value
        return name

    def scalar(name, value):
        made = graph.node.add(name=name, op="Const")
        made.attr["dtype"].type = 3
        made.attr["value"].tensor.dtype = 3
        made.attr["value"].tensor.tensor_shape.SetInParent()
        made.attr["value"].tensor.int_val.append(value)
        return name

    made = graph.node.add(name="x", op="Placeholder")
    made.attr["dtype"].type = 1
    for size in (4, 8, 8):
        made.attr["shape"].shape.dim.add(size=size)
    scalar("zero", 0), scalar("one", 1), scalar("steps", 4)
    node("range", "Range", "zero", "steps", "one", Tidx=3)
    first = node("first", "Mean", "x", "zero", T=1, Tidx=3)

    def loop(at, array, flow, start, reads, kernels):
        """A loop over one array: it reads or writes an element a turn."""
        enter = {name: node(f"{at}/enter_{name}", "Enter", source, T=kind, frame_name=at)
                 for name, source, kind in (("i", "zero", 3), ("h", start, 1), ("flow", flow, 1))}  # fmt: skip
        handle = node(f"{at}/handle", "Enter", array, T=20, frame_name=at, is_constant=True)
        kinds = {"i": 3, "h": 1, "flow": 1}
        merge = {
            name: node(f"{at}/merge_{name}", "Merge", enter[name], f"{at}/next_{name}", T=kind, N=2)
            for name, kind in kinds.items()
        }
        limit = node(f"{at}/limit", "Enter", "steps", T=3, frame_name=at, is_constant=True)
        go = node(f"{at}/go", "LoopCond", node(f"{at}/less", "Less", merge["i"], limit, T=3))
        switch = {name: node(f"{at}/switch_{name}", "Switch", merge[name], go, T=kind) for name, kind in kinds.items()}
        value = f"{switch['h']}:1"
        if reads:
            read = node(f"{at}/read", "TensorArrayReadV3", handle, f"{switch['i']}:1", f"{switch['flow']}:1", dtype=1)
            value = node(f"{at}/join", "AddV2", value, read, T=1)
        for number in range(kernels):
            value = node(f"{at}/k{number}", "MatMul", value, value, T=1)
        flow_out = f"{switch['flow']}:1"
        if not reads:
            flow_out = node(f"{at}/write", "TensorArrayWriteV3", handle, f"{switch['i']}:1", value, flow_out, T=1)
        step = node(f"{at}/step", "Enter", "one", T=3, frame_name=at, is_constant=True)
        node(f"{at}/next_i", "NextIteration", node(f"{at}/add", "AddV2", f"{switch['i']}:1", step, T=3), T=3)
        node(f"{at}/next_h", "NextIteration", value, T=1)
        node(f"{at}/next_flow", "NextIteration", flow_out, T=1)
        return {name: node(f"{at}/exit_{name}", "Exit", switch[name], T=kind) for name, kind in kinds.items()}

    losses = []
    for tower in range(draw(st.integers(1, 3))):
        at = f"tower_{tower}"
        array = node(f"{at}/array", "TensorArrayV3", "steps", dtype=1)
        forward = loop(f"{at}/while", array, f"{array}:1", first, False, draw(st.integers(1, 3)))
        gather = node(f"{at}/gather", "TensorArrayGatherV3", array, "range", forward["flow"], dtype=1)
        losses.append(gather)
        if draw(st.booleans()):
            # As TensorFlow makes it: the gradient of the gather scatters into the same array, and a loop reads that.
            scatter = node(
                f"gradients/{at}/scatter", "TensorArrayScatterV3", array, "range", gather, forward["flow"], T=1
            )
            backward = loop(f"gradients/{at}/while", array, scatter, first, True, draw(st.integers(0, 2)))
            losses.append(node(f"gradients/{at}/w", "MatMul", backward["h"], forward["h"], T=1))
    for number, loss in enumerate(losses):
        node(f"out_{number}", "Relu", loss, T=1)
    return graph


@settings(max_examples=12)
@given(training_graphs(), st.sampled_from(rules.available()), st.integers(4, 6))
def test_of_training_graphs_with_loops(tmp_path_factory, graph, ruleset, streams):
    path = tmp_path_factory.getbasetemp() / "training.pb"
    path.write_bytes(graph.SerializeToString())
    streams += streams % 2 if ruleset == "device" else 0  # as many on each GPU
    assert told_nothing(path, path.with_name("assigned.pb"), ruleset, streams=streams) == []


@settings(max_examples=20)
@given(strategies.graph_defs(ids=True), st.sampled_from(rules.available()), st.booleans())
def test_of_any_graph_even_twice(tmp_path_factory, graph, ruleset, anew):
    path = tmp_path_factory.getbasetemp() / "any.pb"
    path.write_bytes(graph.SerializeToString())
    once, twice = (path.with_name(name) for name in ("once.pb", "twice.pb"))
    try:
        assert told_nothing(path, once, ruleset, keep_ids=False if anew else None) == []
    except AssignError:  # ids that were set by hand may contradict each other
        return
    assert told_nothing(once, twice, ruleset) == []
    assert once.read_bytes() == twice.read_bytes()
    assert load(once).model.record.by_hand == load(twice).model.record.by_hand


def test_another_number_of_streams_and_another_batch_are_remembered(tmp_path):
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--rules", "default", "--streams", "3", "--batch", "128", "-o", out)
    found = fine("check", out, "--format", "json").json
    assert [one["code"] for one in found["findings"] if one["severity"] == "error"] == []
    assert found["judged_with"] == "rules default (shipped), 3 streams, batch 128, gpu h200 (recorded with the model)"
    other = msplit("check", out, "--batch", "1", "--rules", "auto", "--format", "json").json
    stale = [one for one in other["findings"] if one["code"] == "MS003"]
    assert stale
    assert {one["judged_with"] for one in stale} == {
        "rules auto (shipped), batch 1 (given); 16 streams (as these rules say); gpu h200 (recorded with the model)"
    }
    assert (
        fine("check", out, "--costs", "record=no", "--format", "json").json["judged_with"]
        == "batch 1, gpu h200 (default)"
    )


def test_settings_win_over_the_record_and_options_over_settings(tmp_path, monkeypatch):
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--rules", "default", "--batch", "128", "-o", out)
    (tmp_path / "msplit.yaml").write_text("batch: 64\ngpu: l4\n")
    monkeypatch.chdir(tmp_path)
    words = msplit("check", out, "--costs", "gpu=a100", "--format", "json").json["judged_with"]
    assert "batch 64" in words
    assert "msplit.yaml)" in words
    assert "gpu a100 (given)" in words
    assert "rules default (shipped), 4 streams (recorded with the model)" in words


def test_a_rules_file_and_its_stream_file_need_not_be_there_any_more(tmp_path):
    (tmp_path / "rules.yaml").write_text(
        "version: 1\nstreams: 3\nrules:\n  - regex: {file: streams.txt}\n  - colocation\n  - propagate\n"
    )
    (tmp_path / "streams.txt").write_text("1:expert_1/.*\n2:expert_2/.*\n")
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--rules", tmp_path / "rules.yaml", "-o", out)
    for name in ("rules.yaml", "streams.txt"):
        (tmp_path / name).unlink()
    assert errors(out) == []


def test_ids_set_by_hand_stay_and_those_of_an_earlier_assignment_do_not(tmp_path):
    flat = load(SAMPLES / "mmoe_small.pb")
    message = type(flat.model.proto)()
    message.CopyFrom(flat.model.proto)
    by_hand = next(node for node in message.node if node.name == "expert_1/dense_0/MatMul")
    by_hand.attr[STREAM_ID].i = 3
    (tmp_path / "hand.pb").write_bytes(message.SerializeToString())

    def ids(path):
        nodes = load(path).graph
        return {name: nodes.attrs[n].get(STREAM_ID) for n, name in enumerate(nodes.names)}

    first, second, fresh = tmp_path / "1.pb", tmp_path / "2.pb", tmp_path / "3.pb"
    assert (
        "old ids             1 node had one, taken as set by hand"
        in fine("assign", tmp_path / "hand.pb", "--rules", "default", "-o", first, columns=120).out
    )
    done = fine("assign", first, "--rules", "auto", "--streams", "4", "-o", second, columns=120)
    assert "old ids             134 nodes had one: 1 set by hand, 133 not kept" in done.out
    assert errors(second) == []
    assert ids(second)["expert_1/dense_0/MatMul"] == 3
    told_nothing(tmp_path / "hand.pb", fresh, "auto", streams=4)
    assert ids(second) == ids(fresh)
    fine("assign", second, "--rules", "auto", "--streams", "4", "--no-keep-ids", "-o", tmp_path / "4.pb")
    told_nothing(SAMPLES / "mmoe_small.pb", tmp_path / "5.pb", "auto", streams=4)
    assert ids(tmp_path / "4.pb") == ids(tmp_path / "5.pb")
    kept = fine("assign", second, "--rules", "default", "--keep-ids", "-o", tmp_path / "6.pb", columns=120)
    assert "0 nodes change their stream" in kept.out
    assert ids(tmp_path / "6.pb") == ids(second)


def test_counts_of_nodes_and_of_ids_agree(tmp_path):
    done = fine("assign", SAMPLES / "gru_while", "--rules", "auto", "-o", tmp_path / "m", columns=120)
    assert " ".join(done.out.split()).count("0 nodes change their") == 2  # what was decided, and what was written


@pytest.mark.parametrize(
    "model", ["mmoe_small.pb", "keras_lookup", "two_signatures", "training.meta", "mmoe_small.pbtxt"]
)
def test_strip_gives_back_what_had_no_ids(model, tmp_path):
    signature = "embed" if model == "two_signatures" else None
    options = () if signature is None else ("--part", f"signature={signature}")
    fine("assign", SAMPLES / model, *options, "-o", tmp_path / "m")
    msplit("strip", tmp_path / "m", "-o", tmp_path / "plain")
    plain = load(tmp_path / "plain", signature=signature).model
    assert plain.proto == load(SAMPLES / model, signature=signature).model.proto
    assert (plain.record, plain.record_problem) == (None, None)
    assert not (tmp_path / "plain.msplit.json").exists()


def test_strip_takes_ids_off_functions_and_off_nodes_that_no_output_needs(tmp_path):
    flat = load(SAMPLES / "annotated.pb")
    report = strip(flat, tmp_path / "plain.pb")
    assert report.removed == sum(1 for node in flat.model.proto.node if STREAM_ID in node.attr) > 0
    assert not any(STREAM_ID in node.attr for node in load(tmp_path / "plain.pb").model.proto.node)


def test_a_stray_id_that_can_not_be_kept_is_refused_before_anything_is_written(tmp_path):
    flat = load(SAMPLES / "mmoe_small.pb")
    message = type(flat.model.proto)()
    message.CopyFrom(flat.model.proto)
    message.node.add(name="unused", op="NoOp").attr[STREAM_ID].i = 77
    (tmp_path / "stray.pb").write_bytes(message.SerializeToString())
    arguments = (
        "assign",
        tmp_path / "stray.pb",
        "--part",
        f"outputs={flat.outputs[0].name}",
        "-o",
        tmp_path / "m.pb",
        "--streams",
        "4",
    )
    done = msplit(*arguments)
    assert done.code == 2
    assert "node 'unused': its stream id is 77, but ids are 0..3" in done.err
    assert "--no-keep-ids" in done.err
    fine(*arguments, "--no-keep-ids")
    assert errors(tmp_path / "m.pb") == []


def test_what_was_fetched_for_the_assignment_is_what_is_checked(tmp_path):
    flat = load(SAMPLES / "mmoe_small.pb")
    name = flat.outputs[0].name
    fine("assign", SAMPLES / "mmoe_small.pb", "--part", f"outputs={name}", "-o", tmp_path / "m.pb")
    assert [tensor.name for tensor in load(tmp_path / "m.pb").outputs] == [name]
    assert errors(tmp_path / "m.pb") == []


def test_diff_and_report_go_by_the_record(tmp_path):
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--rules", "default", "--batch", "128", "-o", out)
    found = fine("diff", SAMPLES / "mmoe_small.pb", out, "--format", "json").json
    assert found["judged_with"] == "rules default (shipped), 4 streams, batch 128, gpu h200 (recorded with the model)"
    assert {move["rule"] for move in found["moved"]} <= {"branch", "propagate", "default"}
    given = fine(
        "diff", SAMPLES / "mmoe_small.pb", out, "--batch", "128", "--costs", "record=no", "--format", "json"
    ).json
    assert found["new"]["predicted_us"] == given["new"]["predicted_us"]
    msplit("report", out, "-o", tmp_path / "r.html", "--no-candidates")
    assert "batch 128, gpu h200 (recorded with the model)" in (tmp_path / "r.html").read_text()


def test_a_record_that_asks_for_what_is_not_there_changes_no_comparison(tmp_path):
    """Recorded shapes and profiles are of NEW: an OLD without that input is still compared."""
    out = tmp_path / "m.pb"
    name = load(SAMPLES / "mmoe_small.pb").inputs[0]
    fine("assign", SAMPLES / "mmoe_small.pb", "--shape", f"{name.name}=8,64", "-o", out)
    assert "shapes" not in fine("diff", SAMPLES / "while_v1.pb", out, "--format", "json").json["judged_with"]


def test_rules_of_a_record_that_this_version_can_not_read_are_said(tmp_path):
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "-o", out)
    found = records.load(records.place(out))
    wrong = replace(found, rules=records.RecordedRules("later.yaml", "version: 9\nrules: [nonsense]\n"))
    records.place(out).write_bytes(records.dumps(wrong))
    found = fine("check", out, "--format", "json").json
    assert "the recorded rules can not be read by this version" in found["judged_with"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shapes": {"ghost": (1,)}}, "the recorded shapes do not fit the model"),
        ({"shapes": {"x": (1, 2, 3)}}, "the recorded shapes do not fit the model"),
        ({"gpu": "none"}, "the data sheet 'none', which is not there: give --costs gpu="),
        ({"profile": records.RecordedProfile("/dev/zero", "0" * 64)}, "the profile '/dev/zero', which is not there"),
    ],
)
def test_what_a_record_says_and_can_not_be_had_is_said_and_nothing_is_judged_by_it(tmp_path, change, told):
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--batch", "128", "-o", out)
    record = records.load(records.place(out))
    records.place(out).write_bytes(records.dumps(replace(record, **change)))
    found = fine("check", out, "--format", "json").json
    assert told in found["judged_with"]
    assert told in found["skipped"]["MS002"]
    fine("diff", SAMPLES / "mmoe_small.pb", out)


def profile_of(path, batch):
    """A profile as `msplit profile` would write it, with one kernel that takes long."""
    flat = load(path)
    inputs = {end.name: InputShape(end.dtype, (batch, 64)) for end in flat.model.inputs}
    node = next(name for name, op in zip(flat.graph.names, flat.graph.ops, strict=True) if op == "MatMul")
    return profiles.Profile(
        graph_hash=formats.structure_hash(flat.model),
        ops=profiles.op_counts(flat),
        inputs=inputs,
        device=profiles.ProfiledDevice("NVIDIA H200"),
        precision="tf32",
        layout="none",
        constants=Constants(),
        kernels=(profiles.ProfiledKernel("MatMul", (), 500.0, 0.5, 1e6),),
        steps=(profiles.ProfiledStep((node,), 0),),
    )


def test_a_profile_is_found_again_and_told_where_it_is_not(tmp_path, monkeypatch):
    source = tmp_path / "there" / "p.json"
    source.parent.mkdir()
    source.write_text(profile.dumps(profile_of(SAMPLES / "mmoe_small.pb", 128)))
    out = tmp_path / "m.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--rules", "default", "--costs", f"profile={source}", "-o", out)
    assert errors(out) == []
    assert "profile " in fine("check", out, "--format", "json").json["judged_with"]
    assert [
        c
        for c in msplit("check", out, "--costs", "gpu=h200", "--format", "json").json["findings"]
        if c["code"] == "MS003"
    ]
    source.rename(tmp_path / "p.json")  # beside the model
    assert errors(out) == []
    (tmp_path / "p.json").unlink()
    found = fine("check", out, "--format", "json").json
    assert "p.json', which is not there: give --costs profile=" in found["skipped"]["MS003"]
    source.write_text(profile.dumps(profile_of(SAMPLES / "mmoe_small.pb", 64)))
    assert "which has changed since" in fine("check", out, "--format", "json").json["skipped"]["MS003"]
    (tmp_path / "msplit.yaml").write_text("profile: there/p.json\n")
    monkeypatch.chdir(tmp_path)
    assert "profile " in msplit("check", out, "--format", "json").json["judged_with"]
