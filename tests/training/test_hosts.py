"""Who trains together, from what torchrun, TF_CONFIG, a ClusterSpec or options say; and what cannot be."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.engines.base import Feeds
from msplit.engines.cuda.options import Shards
from msplit.errors import LoadError, MsplitError, RankLost
from msplit.inputs.sparse_ragged import InputSpec
from msplit.training import hosts, rendezvous
from msplit.training.data import Data, part, shards_of, whole
from msplit.training.hosts import Hosts, Rank
from tests.cli.runner import msplit
from tests.engines.tensorflow.clusters import free_ports

ADDRESSES = st.lists(
    st.builds(
        lambda name, port: f"{name}:{port}",
        st.sampled_from(["a", "host-1", "10.0.0.2", "[::1]"]),
        st.integers(1, 65535),
    ),
    min_size=1,
    max_size=4,
    unique=True,
)


@given(st.dictionaries(st.sampled_from(["chief", "worker", "ps", "evaluator"]), ADDRESSES), st.data())
def test_every_task_that_trains_has_a_rank_of_its_own_and_the_chief_is_the_first(
    cluster: dict[str, list[str]], data: st.DataObject
) -> None:
    tasks = [(job, index) for job in ("chief", "worker") for index in range(len(cluster.get(job, ())))]
    job, index = data.draw(st.sampled_from([*tasks, ("ps", 0)]))
    text = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    if (job, index) not in tasks:
        with pytest.raises(MsplitError, match=r"TF_CONFIG: (task ps:0 trains nothing|names no chief)"):
            hosts.of_tf_config(text)
        return
    assert hosts.of_tf_config(text) == Hosts(len(tasks), tasks.index((job, index)), cluster[tasks[0][0]][0])


def test_a_cluster_spec_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"worker": {"1": "b:2", "0": "a:1"}, "ps": ["c:3"]}')  # as ClusterSpec.as_dict has sparse jobs
    assert hosts.of_file(path, "worker:1") == Hosts(2, 1, "a:1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "holds no jobs"),
        ('{"cluster": 3}', "the job chief is no list of addresses"),
        ('{"worker": [1]}', "task worker:0 has no address but 1"),
        ('{"worker": ["a"]}', "task worker:0 has no address but 'a'"),
        ('{"worker": ["a:1"]}', "does not say which task this is"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "task worker:1 trains nothing"),
        (
            '{"cluster": {"worker": ["a:1\\u001b[31m"]}, "task": {"type": "worker", "index": 0}}',
            "task worker:0 has no address",
        ),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, said: str) -> None:
    with pytest.raises(MsplitError, match=said) as raised:
        hosts.of_tf_config(text)
    assert "\x1b" not in str(raised.value)


def test_a_rank_is_what_torchrun_says() -> None:
    rank = Rank(3, 4, 1, "host0", 2222, is_child=True)
    assert hosts.rank_of(rank.environment()) == rank
    assert hosts.rank_of({"WORLD_SIZE": "4"}) is None
    for changed, said in (
        ({"RANK": "4"}, "RANK: is '4', no number from 0 to 3"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE: is 'x'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: is not set"),
    ):
        with pytest.raises(MsplitError, match=said):
            hosts.rank_of({**rank.environment(), **changed})


def test_what_is_asked_wrong(tmp_path: Path) -> None:
    for further, said in (
        (("--gpus", "0"), "neither a number of GPUs nor a list"),
        (("--gpus", "1,1"), "neither a number of GPUs nor a list"),
        (("--hosts", "nnodes=2"), "several hosts have to know the first one"),
        (("--hosts", "nnodes=2", "--hosts", "node-rank=2", "--hosts", "master=a:1"), "host 2 is none of 2"),
        (("--hosts", "nnodes=2", "--hosts", "master=a"), "'a' is no address"),
        (("--hosts", tmp_path / "none"), "the cluster can not be read"),
        (("--hosts", tmp_path / "none", "--hosts", "nnodes=2"), "leave these out"),
        (("--gpus", 2, "--hosts", "task=worker:0"), "one of those that a file names"),
    ):
        done = msplit("train", "model.meta", "--fetch", "loss", "--data", "x.npz", *further, columns=200)
        assert done.code == 2
        assert said in done.err
        assert "Traceback" not in done.err


# --- Rows


def specs(**shapes: tuple[int | None, ...] | None) -> dict[str, InputSpec]:
    return {name: InputSpec(name, "float32", shape, at, 0) for at, (name, shape) in enumerate(shapes.items())}


def test_how_a_batch_is_split() -> None:
    assert shards_of(specs(x=(None, 3)), 1) is None
    opened = specs(x=(None, 3), rate=(), table=(5, 2), any=None)
    assert shards_of(opened, 2) == Shards(2, ("x", "any"))
    fixed = specs(x=(4, 3), label=(4,), table=(5, 2), rate=())
    split = shards_of(fixed, 2)
    assert split == Shards(2, ("x", "label"), is_open=False)
    assert {name: spec.shape for name, spec in whole(fixed, split).items()} == {
        "x": (8, 3),
        "label": (8,),
        "table": (5, 2),
        "rate": (),
    }
    with pytest.raises(LoadError, match="no input with rows"):
        shards_of(specs(rate=()), 2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_rows_of_all_are_those_of_the_batch(size: int, each: int, start: int) -> None:
    import numpy as np

    def batches(number: int) -> list[Feeds]:
        return [{"x": np.arange(size * each) + 100 * at, "rate": np.float32(at)} for at in range(number, 3)]

    data = Data(lambda number: iter(batches(number)), {})
    parts = [list(part(data, Shards(size, ("x",)), rank).start(start)) for rank in range(size)]
    for at, batch in enumerate(batches(start)):
        np.testing.assert_array_equal(np.concatenate([one[at]["x"] for one in parts]), batch["x"])
        assert all(one[at]["rate"] == batch["rate"] for one in parts)


# --- Processes

SCRIPT = "import os, signal, sys, time; rank = int(os.environ['RANK']); "


def run(script: str, size: int = 3) -> int:
    return hosts.launch([sys.executable, "-S", "-c", SCRIPT + script], Hosts(), [str(one) for one in range(size)])


def test_all_that_are_launched_know_who_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    script = "print(*(os.environ[one] for one in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'CUDA_VISIBLE_DEVICES')))"
    assert run(script) == 0
    assert capfd.readouterr().out == "0 3 0 127.0.0.1 0,1,2\n"  # the others say nothing


def test_nobody_else_gets_the_port_before_the_first_rank_has_it() -> None:
    """It takes seconds to load its libraries, in which any process of the host could be given a port that is merely free."""
    script = (
        "import socket; address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "if rank: socket.create_connection(address); sys.exit()\n"
        "own = socket.socket(fileno=int(os.environ['MSPLIT_LISTENS_AT']))\n"
        "for _ in range(2): own.accept()\n"
        "sys.exit(own.getsockname() != address)"
    )
    assert run(script) == 0


def test_one_that_is_killed_ends_all() -> None:
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 was ended by SIGKILL\n  fix: the last checkpoint is whole"):
        run("rank == 1 and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)")
    assert time.monotonic() - began < 10


def test_one_that_fails_where_nobody_tells_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "GRACE", 0.2)
    with pytest.raises(RankLost, match="rank 2 ended: no GPU here"):
        run("rank == 2 and sys.exit('no GPU here'); time.sleep(60)")


def test_the_exit_code_is_that_of_who_ended_first() -> None:
    assert run("time.sleep(0.1 * rank); sys.exit(rank and 3 + rank)") == 4


def test_a_signal_reaches_each_once(tmp_path: Path) -> None:
    script = (
        f"here = {str(tmp_path)!r}; got = []; signal.signal(signal.SIGTERM, lambda *_: got.append(1)); "
        "open(f'{here}/{rank}', 'w').close()\n"
        "while len(os.listdir(here)) < 3: time.sleep(0.01)  # until each listens\n"
        "rank == 2 and os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5); sys.exit(0 if got == [1] else 7)"
    )
    assert run(script) == 0


def test_a_signal_while_they_are_started_reaches_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the one that starts them, which left them behind."""
    real, started, missed = subprocess.Popen, [], []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(real(*arguments, **options))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.signal(signal.SIGTERM, lambda number, frame: missed.append(number))
    try:
        with pytest.raises(RankLost, match="was ended by SIGTERM"):
            run("time.sleep(60)")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not missed
    assert len(started) == 3
    assert all(one.poll() in (-signal.SIGTERM, -signal.SIGKILL) for one in started)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port at which nobody listens."""
    pytest.importorskip("torch")
    monkeypatch.setattr(rendezvous, "MEET", 1.0)
    return free_ports(1)[0]


def test_a_wrong_address_and_a_port_in_use(nobody: int) -> None:
    with (
        pytest.raises(RankLost, match=rf"127.0.0.1:{nobody}: the first process does not answer"),
        rendezvous.joined(Rank(1, 2, 1, "127.0.0.1", nobody), on_gpu=False, tell=print),
    ):
        pass
    with socket.socket() as one:
        one.bind(("", 0))
        one.listen()
        port = one.getsockname()[1]
        with (
            pytest.raises(RankLost, match="can not listen"),
            rendezvous.joined(Rank(0, 2, 0, "127.0.0.1", port), on_gpu=False, tell=print),
        ):
            pass


def test_one_that_does_not_come_is_waited_for_no_longer_than_said(nobody: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REASON", 0.1)
    with (
        pytest.raises(RankLost, match="1 of 2 processes came within 1 s"),
        rendezvous.joined(Rank(0, 2, 0, "127.0.0.1", nobody), on_gpu=False, tell=print),
    ):
        pass


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with (
        pytest.raises(MsplitError, match="no GPU for rank 1: 1 can be seen"),
        rendezvous.joined(Rank(1, 2, 1, "a", 1), on_gpu=True, tell=print),
    ):
        pass
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
