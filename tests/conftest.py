"""Settings for every test."""

import contextlib
import functools
import gc
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.campaign import CAMPAIGN, examples

# A worker has a core: threads of its libraries would wait for each other, and for those of the other worker. What tests start inherits it.
for _threads in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(_threads, "1")

if importlib.util.find_spec("triton") is not None:
    import triton  # noqa: F401  (before TensorFlow, behind which a test that uses PyTorch alone can not load it: `device.load_triton`)

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # workers share a GPU, whose memory it would take whole
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_enable_fast_min_max=false"
)  # read once, by whichever test is the first to use XLA
os.environ.setdefault("MSPLIT_VERIFY", "1")  # the engine's graph is looked at after every pass
os.environ.setdefault(
    "TORCHINDUCTOR_VEC_ISA_OK", "1"
)  # otherwise PyTorch's compiler compiles six programs to see what this processor can do
os.environ.setdefault("MSPLIT_KEEP_CHOICES", "0")  # a test measures what it says that it measures

if CAMPAIGN:
    os.environ.setdefault("PYTEST_TIMEOUT", "3600")

# A test that takes long is no wrong answer, and machines are shared. CI tries the same examples each time; everyone else new ones.
settings.register_profile("msplit", deadline=None, derandomize="CI" in os.environ, max_examples=examples(40, 200))
settings.load_profile("msplit")


logging.getLogger().addHandler(logging.NullHandler())  # else Python writes what is logged to standard error


class _Logged(logging.StreamHandler):
    """Listens to what is logged."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    @property
    def text(self) -> str:
        """Lines so far."""
        return self.stream.getvalue()


@pytest.fixture
def caplog() -> Iterator[_Logged]:
    """What a test logs, in place of pytest's own."""
    logged = _Logged()
    logging.getLogger().addHandler(logged)
    yield logged
    logging.getLogger().removeHandler(logged)


@functools.cache
def _no_gpu(needed: int = 1) -> str | None:
    """Why tests that need so many GPUs can not run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    there = torch.cuda.device_count()
    return None if there >= needed else f"{there} of {needed} CUDA devices"


# Python looks for cycles after every 700 objects, which took a twentieth of all time. Memory that cycles hold is to be used again while the
# processor's cache has it: after 10,000 the same tests took 7 % less than after 100,000 on a busy machine, and at most 2 % on an idle one.
gc.set_threshold(10_000, 20, 20)

# What tests write need not outlive a power cut: each call waits for a disk. Tests of it put their own in its place.
os.fsync = lambda _: None

_REFINING = 1_000
"""Blocks that a search may simulate to refine what it found: a small part of what it takes for users. What most tests ask of ids is
whether they are kept, legal and the same, and not how good they are; those that ask that, or what users see, are marked `whole_search`."""


@functools.cache
def _refining() -> tuple[dict[str, int], int]:
    """The defaults of the search, which can be changed, and what they are for users."""
    from msplit.schedule.choose import choose

    return choose.__kwdefaults__, choose.__kwdefaults__["refining"]


def _limit_search(item: pytest.Item) -> None:
    """How long a search takes in this process. Commands that tests start search as long as ever, and so does a campaign."""
    defaults, whole = _refining()
    entire = CAMPAIGN or any(map(item.get_closest_marker, ("whole_search", "gpu")))
    defaults["refining"] = whole if entire else _REFINING


_LARGE = {"pytest", "torch", "tensorflow.python", "keras", "torch._inductor"}
_settled: set[str] = set()
_last: dict[str, Any] = {"file": None, "collections": 0}
"""The file whose tests run, and how often the garbage collector had run when something was set apart."""


def _collections() -> int:
    """How often the garbage collector has run."""
    return sum(generation["collections"] for generation in gc.get_stats())


def _settle(path: Path) -> None:
    """What imports have left stays to the end. Once for each of the large ones it is set apart, so that the garbage collector does not look
    through a million objects of TensorFlow again and again: half a second each time, in whichever test it happens. So is what the tests of
    a file leave for those of the next: every bench collects, which took a second each in the last files of a run. Where the collector has
    not run in a file, that has made few objects."""
    loaded = _LARGE & sys.modules.keys()
    another, _last["file"] = path != _last["file"], path
    if loaded == _settled and not (another and _collections() != _last["collections"]):
        return
    if "tensorflow.python" in loaded - _settled:
        _trace_no_nodes()
        _import_without_devices()
        _rewrite_nothing()
    _settled.update(loaded)
    gc.collect()
    gc.freeze()
    _last["collections"] = _collections()


def _trace_no_nodes() -> None:
    """Of each node TensorFlow keeps the calls that made it. They are many here, pytest's and Hypothesis's among them, and took a fiftieth
    of all time; nobody asks for them."""
    from tensorflow.python.util import tf_stack

    calls = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: calls


def _rewrite_nothing() -> None:
    """Sessions and functions that ask for nothing else run a graph as it is. TensorFlow would rewrite it before the first step, which takes
    longer than that step. What msplit opens has options of its own."""
    import tensorflow as tf
    from tensorflow.python.client import session

    plain = tf.compat.v1.ConfigProto()
    plain.graph_options.rewrite_options.disable_meta_optimizer = True
    begin = session.BaseSession.__init__

    def begun(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        begin(self, target, graph, plain if config is None else config)

    session.BaseSession.__init__ = begun
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def _import_without_devices() -> None:
    """TensorFlow asks each node of a graph that it imports with which others it is to be on a device, which raises an error for all that
    say nothing of it. Where no node has a device, nothing follows from the answers, and they are a third of an import."""
    from tensorflow.python.framework import importer, ops

    class Made:
        """A graph whose new operations are known already."""

        def __init__(self, graph: ops.Graph, made: list[ops.Operation]) -> None:
            self._graph, self._made = graph, made

        def _add_new_tf_operations(self, **_: bool) -> list[ops.Operation]:
            return self._made

        def __getattr__(self, name: str) -> object:
            return getattr(self._graph, name)

    def process(graph: ops.Graph) -> None:
        made = graph._add_new_tf_operations(compute_devices=False)
        if graph._device_function_stack.peek_objs() or any(one.device for one in made):
            usual(Made(graph, made))

    usual = importer._ProcessNewOps
    importer._ProcessNewOps = process


def _busy() -> str | None:
    """Why times mean nothing now, or None: a short piece of work gets a processor only a part of its time, the best of three."""
    shares = []
    for _ in range(3):
        wall, own = time.perf_counter(), time.process_time()
        while time.process_time() - own < 0.02:
            pass
        shares.append(0.02 / (time.perf_counter() - wall))
    return None if max(shares) > 0.8 else f"the machine is busy: a process gets {max(shares):.0%} of a processor"


SLOW = tomllib.loads((Path(__file__).parent / "slow.toml").read_text("utf-8"))
"""Seconds of processor time that tests may take: `longest`, those of `tests` more."""


_OLD = 0.1
"""Seconds for which a reading of processor times is taken for the present."""


class _Spent:
    """Times from here on."""

    _read = (-1.0, os.times())
    """When processor times were last read, and what they were: where many threads are, that takes half a millisecond."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        if self._began - _Spent._read[0] > _OLD:
            _Spent._read = self._began, os.times()
        self._times = _Spent._read[1]

    def wall(self) -> float:
        """Seconds by the clock."""
        return time.perf_counter() - self._began

    def most(self) -> float:
        """Seconds that all processors have had."""
        return self.wall() * (os.cpu_count() or 1)

    def processor(self) -> float:
        """Seconds of processors that this process took, and those that it started and that are over. One that ends here and has worked
        longer than this lasts is another test's."""
        now, before = os.times(), self._times
        own = now.user + now.system - before.user - before.system
        others = now.children_user + now.children_system - before.children_user - before.children_system
        return own + min(others, self.most())


def _too_slow(item: pytest.Item, spent: _Spent) -> str | None:
    """Why a test fails for the processor time that it took, or None. While other work runs, nobody can tell.

    The limits are of `scripts/test`: tests on a GPU and tests of kernels in Triton's interpreter, which it skips, have none.
    """
    limit = SLOW["tests"].get(f"{item.path.name}::{item.name}", SLOW["longest"])
    if CAMPAIGN or spent.most() <= limit or (seconds := spent.processor()) <= limit:
        return None
    if any(map(item.get_closest_marker, ("gpu", "needs_triton", "interpretable"))) or _busy():
        return None
    return f"{seconds:.1f} s of processor time are more than its limit of {limit} s: see tests/slow.toml"


def _missing(item: pytest.Item) -> str | None:
    """What a test needs that is not here, or None."""
    several = item.get_closest_marker("needs_gpus")
    needed = several.args[0] if several else 1 if item.get_closest_marker("gpu") else 0
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and item.get_closest_marker("interpretable") is not None
    if needed and not interpreted and (why := _no_gpu(needed)):
        return why
    if item.get_closest_marker("needs_triton") and importlib.util.find_spec("triton") is None:
        return "no Triton; .ci/kernels brings it"
    return None


_run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
_HOLD = None if _run is None else Path(tempfile.gettempdir()) / f"msplit-tests-{_run}"
"""Is there while a test wants the machine for itself; None where this process is the only one of the run."""

_LONGEST_HOLD = 60.0
"""Seconds."""


@contextlib.contextmanager
def _in_turn(item: pytest.Item) -> Iterator[None]:
    """A test marked `idle` begins when the tests that run beside it have ended, and no other begins before it has ended. For one that is
    skipped nobody waits."""
    end = time.monotonic() + _LONGEST_HOLD
    if _HOLD is None:
        yield
        return
    if not item.get_closest_marker("idle") or _missing(item):
        while _HOLD.exists():
            if time.monotonic() > end:  # its process is gone
                _HOLD.unlink(missing_ok=True)
            time.sleep(0.05)
        yield
        return
    while True:
        try:
            _HOLD.touch(exist_ok=False)
            break
        except FileExistsError:
            time.sleep(0.05)
    try:
        while _busy() and time.monotonic() < end - 30:
            time.sleep(0.1)
        yield
    finally:
        _HOLD.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Writes down how long a test takes with what it sets up, where a variable names a file: `tools/durations.py` reads it."""
    with _in_turn(item):
        return (yield from _written_down(item))


def _written_down(item: pytest.Item) -> Generator[None, object, object]:
    name = os.environ.get("MSPLIT_DURATIONS")
    spent = _Spent() if name else None
    try:
        return (yield)
    finally:
        if name and spent:
            row = [item.nodeid, round(spent.processor(), 3), round(spent.wall(), 3)]
            with open(name, "a") as file:
                file.write(json.dumps(row) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test that leaves TensorFlow to make loops and conds of another kind fails: models of later tests would be others."""
    yield
    module = sys.modules.get("tensorflow.python.ops.control_flow_util")
    if module is not None and not getattr(module, "ENABLE_CONTROL_FLOW_V2", True):
        module.ENABLE_CONTROL_FLOW_V2 = True  # type: ignore[attr-defined]
        pytest.fail(
            "TensorFlow's control flow is left at version 1: enable_control_flow_v2() in a `finally`", pytrace=False
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` run where there is one, those marked `needs_gpus` where there are enough."""
    _settle(item.path)
    _limit_search(item)
    if why := _missing(item):
        pytest.skip(why)
    if item.get_closest_marker("idle") and (why := _busy()):
        pytest.skip(why)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `idle` that fails as others begin to work tells nothing."""
    loaded, spent = _LARGE & sys.modules.keys(), _Spent()
    try:
        result = yield
    except AssertionError:
        if item.get_closest_marker("idle") and (why := _busy()):
            pytest.skip(f"it failed, and {why}")
        raise
    if loaded == _LARGE & sys.modules.keys() and (why := _too_slow(item, spent)):  # no test is charged with an import
        pytest.fail(why, pytrace=False)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Workers are forked from a process that has imported what they test."""
    from tests.preloaded import fork_workers

    fork_workers(config)


def pytest_report_header() -> str:
    """Tells how many answers of TensorFlow are used that it gave earlier."""
    from tests import kept

    used = len(kept.answers()) if kept.HOW == "kept" else 0
    return f"kept answers of TensorFlow that are used: {used} (tests/kept.py)"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What failed is told at once where a variable asks for it: a run that is cut off before its end has no summary."""
    if report.failed and "MSPLIT_TELL_FAILURES" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stdout.write(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}\n")
        sys.stdout.flush()
