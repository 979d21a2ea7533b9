"""What is written for Triton, served by a real tritonserver: `.ci/triton` brings it and names its environment in MSPLIT_TRITON."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.triton import export
from tests.cli.runner import SAMPLES

ENVIRONMENT = os.environ.get("MSPLIT_TRITON", "")
pytestmark = pytest.mark.skipif(not ENVIRONMENT, reason="needs a tritonserver, which .ci/triton brings")

READY = 120.0
"""Seconds that three models have to be ready in: TensorFlow and PyTorch are imported by each."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("triton") / "mmoe.build"
    request = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}
    msplit.build(SAMPLES / "mmoe_small.pb", path, **request, batches=[1, 8])
    return path


@pytest.fixture(scope="module")
def server(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it listens."""
    folder = tmp_path_factory.mktemp("server")
    export(build, folder / "models", PoolSettings(groups=4))
    export(build, folder / "models", PoolSettings(groups=1, max_queue=1), name="small")
    export(SAMPLES / "keras_lookup", folder / "models", device="cpu")
    (site,) = Path(ENVIRONMENT).glob("lib/python*/site-packages")
    triton = site / "pytriton" / "tritonserver"
    # The backend looks for its stub beside it; of the several that there are, the one for this Python.
    stub = (
        triton / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}" / "triton_python_backend_stub"
    )
    shutil.copy(stub, triton / "backends" / "python")
    for program in (triton / "bin" / "tritonserver", triton / "backends" / "python" / stub.name):
        program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model-repository": folder / "models",
        "backend-directory": triton / "backends",
        "http-address": "127.0.0.1",
        "http-port": port,
        "allow-grpc": "false",
        "allow-metrics": "false",
    }
    # Its Python ignores PYTHONPATH, and is the one that PATH has first.
    environment = {**os.environ, "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}"}
    environment["LD_LIBRARY_PATH"] = f"{os.environ.get('LD_LIBRARY_PATH', '')}:{site / 'nvidia_pytriton.libs'}"
    url = f"http://127.0.0.1:{port}/v2"
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [triton / "bin" / "tritonserver", *(f"--{name}={value}" for name, value in options.items())],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + READY
        while not is_ready(url):
            said = (folder / "log").read_text("utf-8", "replace")[-4000:]
            assert running.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.2)
        yield url
    finally:
        running.terminate()
        running.wait(60)


def is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health/ready", timeout=5).status == 200)
    except OSError:
        return False


def ask(url: str, model: str, **arrays: Any) -> Any:
    """Outputs by name, or the code and the words of an error."""
    types = {"f": "FP32", "O": "BYTES"}
    inputs = [
        {"name": name, "shape": value.shape, "datatype": types[value.dtype.kind], "data": value.reshape(-1).tolist()}
        for name, value in arrays.items()
    ]
    request = urllib.request.Request(f"{url}/models/{model}/infer", json.dumps({"inputs": inputs}).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read().decode()
    return {one["name"]: np.reshape(one["data"], one["shape"]) for one in found["outputs"]}


def rows(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(1 + seed % 3, 64)).astype(np.float32)


def test_many_requests_at_once_get_each_its_own_answer(server: str, build: Path) -> None:
    with ThreadPoolExecutor(16) as clients, msplit.open(build) as runner:
        answers = list(clients.map(lambda seed: ask(server, "mmoe", x=rows(seed)), range(200)))
        for seed, found in enumerate(answers):
            expected = runner.step({"x": rows(seed)})
            assert set(found) == set(expected)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_strings_and_tables_run_on_the_host(server: str) -> None:
    amount, cities = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([["Rome"], ["Oslo"], ["nowhere"]], object)
    flat = msplit.load(SAMPLES / "keras_lookup")
    with msplit.prepare(flat, engine="tensorflow", batch=3) as runner:
        expected = runner.step({"amount": amount, "city": cities[:, 0]})
    found = ask(server, "keras_lookup", amount=amount, city=cities)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_a_wrong_request_is_refused_and_harms_no_other(server: str) -> None:
    assert ask(server, "mmoe", x=np.ones((9, 64), np.float32))[0] == 400
    assert ask(server, "mmoe", x=np.ones((1, 63), np.float32))[0] == 400
    assert len(ask(server, "mmoe", x=rows(2))) == 2


def test_who_comes_when_too_many_wait_is_told_so(server: str) -> None:
    with ThreadPoolExecutor(32) as clients:
        found = list(clients.map(lambda seed: ask(server, "small", x=rows(seed)), range(200)))
    refused = [one for one in found if isinstance(one, tuple)]
    assert 0 < len(refused) < 200
    assert {code for code, _ in refused} == {503}
    assert all("wait" in said for _, said in refused)
