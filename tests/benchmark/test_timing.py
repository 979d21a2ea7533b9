"""The bench with an engine made for the test: it computes what it is told, in the time it is told.

Time is made up, too: on a machine with other things to do, nothing could be said about real sleeps.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from msplit.benchmark.diagnose import Hints, diagnose, hints
from msplit.benchmark.timing import bench
from msplit.cost.costs import Costs
from msplit.engines.base import ClusterOptions, Engine, Executable, Job, TensorFlowOptions
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError
from msplit.formats.cluster import parse
from msplit.inputs.reference import Reference
from msplit.report import document
from msplit.verify.results import Settings, Variant
from tests.inputs.graphs import flat_of, placeholder

QUICK = Settings(duration=0.05, warmup=0.005, min_rounds=10, burst=0.0, builds=1)


def flat():
    return flat_of(
        [placeholder("x", "float32", (None,)), ("y", "Relu", ["x"], {"T": "float32"})],
        [("x", "float32", (None,))],
        ["y"],
    )


class Clock:
    """A clock that steps alone move, but for a microsecond for each look at it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch):
    monkeypatch.setattr("msplit.benchmark.timing.time", CLOCK)


class Fake(Engine):
    """Doubles its input.

    Args:
        seconds: Time of a step by the host's clock.
        device_seconds: Time by a device's clock, None for none.
        wrong: Added to the output: False, "always", "tf32" or "later" (from the third step on).
    """

    def __init__(
        self, name="fake", *, seconds=0.001, device_seconds=None, wrong=None, fail=False, where="CPU", log=None
    ):
        self.name, self.seconds, self.device_seconds = name, seconds, device_seconds
        self.wrong, self.fail, self.where, self.log = wrong, fail, where, log if log is not None else []

    def device(self, job):
        return self.where

    def prepare(self, jobs):
        self.log.append(("prepare", max(job.streams for job in jobs)))

    def build(self, job):
        if self.fail:
            raise EngineError("it does not compile")
        self.log.append(("build", job.streams, job.precision.ieee))
        return Running(self, job)


class Running(Executable):
    def __init__(self, engine, job):
        self.engine, self.job, self.steps, self.closed = engine, job, 0, False

    def step(self, feeds):
        assert not self.closed
        self.engine.log.append(("step", self.job.streams, float(feeds["x"][0])))
        self.steps += 1
        if self.engine.seconds:
            CLOCK.sleep(self.engine.seconds / self.job.streams)
        error = {
            None: 0.0,
            "always": 1.0,
            "tf32": 0.0 if self.job.precision.ieee else 0.004,
            "ieee": 0.004,
            "later": 1.0 if self.steps >= 3 else 0.0,
        }[self.engine.wrong]
        return {"y": (2 * feeds["x"] * (1 + error)).astype(np.float32)}

    def launch(self):
        pass

    def device_times(self, count):
        seconds = self.engine.device_seconds
        return None if seconds is None else [seconds / self.job.streams * (1 + 0.001 * i) for i in range(count)]

    def facts(self):
        return {"device": self.engine.where, "peak_bytes": np.int64(5)}

    def close(self):
        self.closed = True
        self.engine.log.append(("close", self.job.streams))


def fresh(seed):
    return {"x": np.full(4, 1.0 + seed, np.float32)}


def variant(label, engine, streams=1, **more):
    graph = flat()
    return Variant(
        label, engine, Job(graph, np.arange(len(graph), dtype=np.int32) % streams, streams, fresh(0)), **more
    )


def test_a_faster_variant_is_found_faster_and_over_what():
    engine = Fake(seconds=0.002)
    result = bench([variant("one", engine), variant("two", engine, 2)], fresh=fresh, settings=QUICK)
    one, two = result.variants
    assert not result.failed
    assert one.ratios == ()
    assert [ratio.over for ratio in two.ratios] == ["one"]
    ratio = two.ratio_over("one")
    assert 1.3 < ratio.value < 2.2
    assert ratio.significant
    assert len(two.host_times) >= 10
    assert two.host.median == pytest.approx(np.median(two.host_times))
    assert [check.against for check in two.checks] == ["one"]
    assert one.checks == ()


def test_equal_variants_are_not_told_apart():
    engine = Fake(seconds=0.001)
    result = bench([variant("a", engine), variant("b", engine)], fresh=fresh, settings=QUICK)
    ratio = result.variants[1].ratio_over("a")
    assert ratio.low <= 1.0 <= ratio.high or abs(ratio.value - 1) < 0.02


def test_every_round_runs_every_variant_in_changing_order():
    log = []
    engine = Fake(log=log)
    variants = [variant(str(n), engine, n) for n in (1, 2, 3)]
    settings = Settings(duration=0.0, warmup=0.0, min_rounds=12, burst=0.0, builds=1)
    bench(variants, fresh=fresh, settings=settings)
    measured = [entry[1] for entry in log if entry[0] == "step"][-36:]
    rounds = [tuple(measured[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(order) == [1, 2, 3] for order in rounds)
    assert len(set(rounds)) >= 4


def test_everything_is_built_anew_and_checked_anew():
    log = []
    engine = Fake(log=log)
    settings = Settings(duration=0.0, warmup=0.0, min_rounds=9, burst=0.0, builds=3)
    result = bench([variant("1", engine), variant("2", engine, 2)], fresh=fresh, settings=settings)
    assert [entry[1] for entry in log if entry[0] == "build"] == [1, 2] * 3
    assert [entry[1] for entry in log if entry[0] == "close"] == [1, 2] * 3
    assert result.variants[1].ratio_over("1").builds == 3
    assert result.variants[1].ratio_over("1").rounds == len(result.variants[1].host_times) == 9
    assert len(result.variants[1].checks) == 1


def test_a_later_build_that_is_wrong_takes_all_its_times_back():
    class Third(Fake):
        def build(self, job):
            self.wrong = "always" if sum(entry[0] == "build" for entry in self.log) == 2 else None
            return super().build(job)

    settings = Settings(duration=0.0, warmup=0.0, min_rounds=9, burst=0.0, builds=3)
    result = bench([variant("good", Fake()), variant("bad", Third(), 2)], fresh=fresh, settings=settings)
    assert result.failed
    assert result.variants[1].host is None
    assert result.variants[1].ratios == ()
    assert result.variants[1].host_times == ()
    assert result.variants[0].host is not None


def test_the_engine_is_told_the_largest_number_of_streams_first():
    log = []
    engine = Fake(log=log)
    bench([variant("1", engine), variant("4", engine, 4), variant("2", engine, 2)], fresh=fresh, settings=QUICK)
    assert log[0] == ("prepare", 4)
    assert log.count(("prepare", 4)) == 1
    assert [entry for entry in log if entry[0] == "close"] == [("close", 1), ("close", 4), ("close", 2)]


def test_verification_uses_fresh_inputs():
    log = []
    engine = Fake(log=log)
    settings = Settings(duration=0.0, warmup=0.0, min_rounds=1, burst=0.0, verify_inputs=4, seed=10, builds=1)
    bench([variant("1", engine), variant("2", engine, 2)], fresh=fresh, settings=settings)
    steps = [entry for entry in log if entry[0] == "step"]
    assert [entry[2] for entry in steps[:8]] == [12.0, 12.0, 13.0, 13.0, 14.0, 14.0, 15.0, 15.0]


@pytest.mark.parametrize("wrong", ["always", "later"])
def test_wrong_outputs_fail_and_are_not_measured(wrong):
    good, bad = Fake("good"), Fake("bad", wrong=wrong)
    result = bench([variant("good", good), variant("bad", bad, 2)], fresh=fresh, settings=QUICK)
    assert result.failed
    right, failed = result.variants
    assert right.host is not None
    assert failed.failed
    assert failed.host is None
    assert failed.ratios == ()
    assert failed.host_times == ()
    assert "bad against good (ieee): y: 4 of 4 elements differ" in result.describe_failures()
    assert "would pass" in result.describe_failures()


def test_every_variant_is_held_against_the_reference():
    reference = Reference(fresh(5), {"y": np.full(4, 12.0, np.float32)}, "a file")
    good, bad = Fake("good"), Fake("bad", wrong="always")
    assert not bench([variant("1", good)], fresh=fresh, settings=QUICK, reference=reference).failed
    result = bench([variant("1", bad), variant("2", bad, 2)], fresh=fresh, settings=QUICK, reference=reference)
    assert [one.failed for one in result.variants] == [True, True]
    assert "1 against a file" in result.describe_failures()


def test_a_variant_whose_partner_is_skipped_is_still_verified():
    good, broken, bad = Fake("good"), Fake("other", fail=True), Fake("other", wrong="always")
    variants = [variant("good", good), variant("other 1", broken, optional=True), variant("other 2", bad, 2)]
    result = bench(variants, fresh=fresh, settings=QUICK)
    assert [one.failed for one in result.variants] == [False, False, True]
    assert result.variants[1].skipped == "it does not compile"
    assert result.variants[2].checks[0].against == "good"


@pytest.mark.parametrize(("where", "wrong"), [("CPU", "always"), ("GPU", "always"), ("GPU", "ieee")])
def test_what_agrees_with_a_wrong_partner_is_not_right(where, wrong):
    """On a GPU the partner is not even built again in the precision that is measured."""
    good, bad = Fake("good", where=where), Fake("bad", wrong=wrong, where=where)
    variants = [variant("good", good), variant("1", bad), variant("2", bad, 2), variant("3", bad, 2, against="2")]
    result = bench(variants, fresh=fresh, settings=QUICK)
    assert [one.failed for one in result.variants] == [False, True, True, True]
    assert [check.against for check in result.variants[3].checks] == ["2", "1", "good"]
    assert "3 against good (ieee): y: 4 of 4 elements differ" in result.describe_failures()


def test_an_engine_that_can_not_is_an_error_unless_optional():
    log = []
    engine = Fake(log=log)
    with pytest.raises(EngineError, match="does not compile"):
        bench([variant("1", engine), variant("2", Fake(fail=True), 2)], fresh=fresh, settings=QUICK)
    assert ("close", 1) in log, "what was built is closed"


def test_on_a_gpu_everything_is_verified_in_ieee_first_with_the_tight_tolerance():
    log = []
    gpu = Fake("gpu", wrong="tf32", where="GPU", log=log)
    plain = Fake("plain", where="GPU")
    result = bench([variant("plain", plain), variant("gpu", gpu)], fresh=fresh, settings=QUICK)
    assert not result.failed, "0.4 % is TF32"
    assert [check.precision for check in result.variants[1].checks] == ["ieee", "tf32"]
    assert [entry for entry in log if entry[0] == "build"] == [("build", 1, True), ("build", 1, False)]
    bad = Fake("bad", wrong="ieee", where="GPU")
    result = bench([variant("plain", plain), variant("bad", bad)], fresh=fresh, settings=QUICK)
    assert result.failed, "0.4 % is no IEEE float32"
    assert result.variants[1].host is None


def test_the_precision_of_a_cluster_of_gpus_is_its_own():
    """It may round as TF32 does whatever a client asks for; on CPUs there is no such rounding."""
    cluster = TensorFlowOptions(cluster=ClusterOptions(parse("worker: ['a:1']", "cluster.yaml")))
    for where, passed in (("GPU", True), ("CPU", False)):
        over = variant("cluster", Fake("servers", wrong="ieee", where=where), against="here")
        over = replace(over, job=replace(over.job, tensorflow=cluster))
        result = bench([variant("here", Fake("here", where=where)), over], fresh=fresh, settings=QUICK)
        assert result.failed is not passed
        precisions = {check.precision for check in result.variants[1].checks}
        assert precisions == ({"tf32"} if where == "GPU" else {"ieee"})


@pytest.mark.parametrize(
    ("measured", "builds"),
    [((False, False), [False]), ((False, True), [True, False]), ((True, True), [True, False])],
    ids=["fast", "what is chosen of a sketch", "full"],
)
def test_only_what_is_to_be_ready_at_once_is_not_verified_in_ieee(measured, builds):
    log = []
    one, other = Fake("cuda", where="GPU"), Fake("cuda", where="GPU", log=log)
    variants = [variant("1", one), variant("2", other, 2)]
    listed = [
        replace(made, job=replace(made.job, options=EngineOptions(measure=measure)))
        for made, measure in zip(variants, measured, strict=True)
    ]
    assert not bench(listed, fresh=fresh, settings=QUICK).failed
    assert [ieee for what, _, ieee in (entry for entry in log if entry[0] == "build")] == builds


def test_on_a_cpu_there_is_one_tight_verification():
    bad = Fake("bad", wrong="tf32")
    result = bench([variant("good", Fake()), variant("bad", bad)], fresh=fresh, settings=QUICK)
    assert result.failed
    assert [check.precision for check in result.variants[1].checks] == ["ieee"]


def test_a_tolerance_can_be_given():
    bad = Fake("bad", wrong="ieee")
    settings = Settings(duration=0.0, warmup=0.0, min_rounds=1, tolerance=0.01, builds=1)
    assert not bench([variant("good", Fake()), variant("bad", bad)], fresh=fresh, settings=settings).failed
    # The check in IEEE precision before the measured one asks for no more than that.
    far = [variant("good", Fake(where="GPU")), variant("bad", Fake("bad", wrong="ieee", where="GPU"))]
    assert not bench(far, fresh=fresh, settings=settings).failed


def test_device_times_have_ratios_of_their_own():
    engine = Fake(seconds=0.004, device_seconds=1e-4, where="GPU")
    result = bench([variant("1", engine), variant("4", engine, 4)], fresh=fresh, settings=QUICK)
    ratio = result.variants[1].ratio_over("1", "device")
    assert ratio.value == pytest.approx(4.0)
    assert result.variants[1].device.median == pytest.approx(2.5e-5, rel=0.01)
    assert any("1 is host-bound: a step takes" in line for line in result.diagnosis)


def test_three_layers_have_ratios_over_the_baseline_and_over_one_stream():
    tf, cuda = Fake("tf", seconds=0.003, where="GPU"), Fake("cuda", seconds=0.001, where="GPU")
    variants = [variant("tf", tf), variant("cuda 1", cuda), variant("cuda 2", cuda, 2)]
    result = bench(variants, fresh=fresh, settings=QUICK)
    assert [ratio.over for ratio in result.variants[2].ratios] == ["tf", "cuda 1"]
    assert [ratio.over for ratio in result.variants[1].ratios] == ["tf"]


class Stateful(Running):
    """Adds up its inputs."""

    keeps_state = True

    def __init__(self, engine, job):
        super().__init__(engine, job)
        self.total = np.float32(len(engine.log))

    def step(self, feeds):
        self.total = np.float32(self.total + feeds["x"][0] * (1.1 if self.engine.wrong and self.job.streams > 1 else 1))
        return {"y": np.zeros(1, np.float32)}

    def save_state(self):
        return {"total": np.array(self.total)}

    def load_state(self, state):
        self.total = state["total"]


@pytest.mark.parametrize("wrong", [None, "always"])
def test_variables_start_equal_and_must_end_equal(wrong):
    class Engine(Fake):
        def build(self, job):
            self.log.append("something, so that states differ")
            return Stateful(self, job)

    engine = Engine(wrong=wrong)
    result = bench([variant("1", engine), variant("2", engine, 2)], fresh=fresh, settings=QUICK)
    assert result.failed is bool(wrong)
    if wrong:
        assert "variables of 1" in result.describe_failures()


class Learning(Stateful):
    """A step's output is its variable before it, and what the variable is off by grows by 2000 a step, up to 1."""

    def __init__(self, engine, job):
        super().__init__(engine, job)
        self.total = np.float32(2)

    def step(self, feeds):
        loss = self.total
        self.total = np.float32(2 + min(2000 * (self.total - 2) + (1e-6 if self.job.streams > 1 else 0), 1))
        stale = self.engine.wrong and self.job.streams > 1
        return {"loss": np.array([loss if not stale else np.float32(2 + self.engine.wrong)])}


def test_variables_that_agree_with_a_wrong_partners_are_not_right():
    class Bad(Fake):
        def build(self, job):
            return Stateful(self, replace(job, streams=2))

    class Good(Fake):
        def build(self, job):
            return Stateful(self, job)

    good, bad = Good("good"), Bad("bad", wrong="always")
    variants = [variant("good", good), variant("1", bad), variant("2", bad, 2)]
    result = bench(variants, fresh=fresh, settings=QUICK)
    assert [one.failed for one in result.variants] == [False, True, True]
    assert "2 against variables of good (ieee)" in result.describe_failures()


@pytest.mark.parametrize(("wrong", "failed"), [(None, False), (1e-3, True), (0.5, True)])
def test_what_one_step_learns_from_rounding_is_no_fault_of_the_next_ones_outputs(wrong, failed):
    """The third losses are 2e-3 apart; a first one that is 1e-3 off is wrong all the same."""

    class Engine(Fake):
        def build(self, job):
            return Learning(self, job)

    engine = Engine(wrong=wrong)
    settings = replace(QUICK, verify_inputs=3)
    result = bench([variant("1", engine), variant("2", engine, 2)], fresh=fresh, settings=settings)
    assert result.failed is failed


def test_the_result_is_json():
    engine = Fake(device_seconds=1e-3)
    told = []
    result = bench(
        [variant("1", engine), variant("2", engine, 2)],
        fresh=fresh,
        settings=QUICK,
        command=["msplit", "bench", "m.pb"],
        progress=lambda what, share: told.append((what, share)),
    )
    data = json.loads(json.dumps(document.plain(result), allow_nan=False))
    assert data["schema_version"] == 1
    assert data["environment"]["command"] == ["msplit", "bench", "m.pb"]
    assert data["environment"]["cpu"]["cores"] > 0
    assert "numpy" in data["environment"]["versions"]
    assert data["variants"][1]["facts"]["peak_bytes"] == 5
    assert len(data["variants"][0]["host_times"]) == data["variants"][0]["host"]["count"]
    assert any(what == "measuring" for what, _ in told)
    assert all(0 <= share <= 1 for _, share in told)


@pytest.mark.parametrize("labels", [["a", "a"], []])
def test_labels_must_make_sense(labels):
    with pytest.raises(ValueError, match="labels of their own"):
        bench([variant(label, Fake()) for label in labels], fresh=fresh, settings=QUICK)


def test_a_partner_must_be_there():
    with pytest.raises(ValueError, match="'nobody'"):
        bench([variant("a", Fake(), against="nobody")], fresh=fresh, settings=QUICK)


def test_cpu_devices_are_called_what_they_are():
    engine = Fake()
    result = bench([variant("1", engine), variant("2", engine, 2)], fresh=fresh, settings=QUICK)
    assert "say nothing about GPU streams" in result.diagnosis[0]


def costs(times, share=0.1):
    times = np.asarray(times, float)
    zero = np.zeros(len(times))
    return Costs(zero, zero, times, np.full(len(times), share), zero, np.ones(len(times), bool), "h200")


def fork(width):
    nodes = [placeholder("x", "float32", (None,))]
    nodes += [(f"b{i}", "Relu", ["x"], {"T": "float32"}) for i in range(width)]
    return flat_of(nodes, [("x", "float32", (None,))])


def test_hints_are_work_and_critical_path():
    about = hints(fork(4), costs([0, 10, 20, 30, 40], share=0.5))
    assert about == Hints(100.0, 40.0, 0.5, ("b3", 0.4), 2.0, "the kernels fill 50 % of the GPU already")


def words(times, share=0.1, ratio=2.0):
    engine = Fake(seconds=0.001 * ratio, where="GPU", device_seconds=0.001 * ratio)
    slow = Fake("fake", seconds=0.002, where="GPU", device_seconds=0.002)
    result = bench([variant("1", slow), variant("2", engine, 2)], fresh=fresh, settings=QUICK)
    return "\n".join(diagnose(result.variants, hints(fork(len(times)), costs([0, *times], share))))


def test_diagnosis_of_the_structure():
    chain = flat_of(
        [placeholder("x", "float32", (None,)), ("a", "Relu", ["x"], {}), ("b", "Relu", ["a"], {})],
        [("x", "float32", (None,))],
    )
    assert "nothing to overlap" in "\n".join(diagnose((), hints(chain, costs([0, 5, 5]))))
    assert "One node dominates: b0 is 80%" in words([80, 20])
    assert "fill the GPU (90%" in words([10, 10, 10], share=0.9)
    assert "fill the GPU" not in words([10, 10, 10], share=0.3)


def test_a_slow_down_is_said_against_whatever_one_stream_it_was_measured_beside():
    """Not only the first: on a GPU that is one stream without a graph, and larger kernels have one stream of their own."""
    slow, fast = Fake(seconds=0.004, where="GPU"), Fake(seconds=0.001, where="GPU")
    several = Fake(seconds=0.004, where="GPU")  # for both streams together
    variants = [
        variant("1 stream, eager", slow),
        variant("1 stream, fused", fast),
        variant("2 streams, fused", several, 2, against="1 stream, eager", over=("1 stream, fused",)),
    ]
    told = bench(variants, fresh=fresh, settings=QUICK).diagnosis
    (line,) = (line for line in told if "keep one stream" in line)
    assert line.startswith("2 streams, fused is slower than 1 stream, fused (0.")


def test_a_slow_down_is_said():
    assert "keep one stream" in words([1, 1], ratio=6.0)
    assert "keep one stream" not in words([1, 1], ratio=1.0)
