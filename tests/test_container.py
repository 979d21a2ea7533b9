"""deploy: what its files say, held against each other and the server's options. `.ci/container` runs them, and knows their schemas."""

from __future__ import annotations

import importlib.util
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import yaml

from msplit.cli import serve
from tests.cli.runner import ROOT, msplit

DEPLOY = ROOT / "deploy"
TEXT = (DEPLOY / "Dockerfile").read_text()
KUBERNETES = (DEPLOY / "kubernetes.yaml").read_text()
IGNORED = (DEPLOY / "Dockerfile.dockerignore").read_text()


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tests.script_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


container = pytest.fixture(scope="module")(lambda: script("tools/container.py"))


def stages(container: ModuleType) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in container.instructions(TEXT):
        if word == "FROM":
            one = found[rest.partition(" AS ")[2]] = []
        one.append((word, rest))
    return found


def test_the_list_of_packages_is_up_to_date() -> None:
    for name in ("grpc", "uvicorn", "starlette"):
        pytest.importorskip(name)
    slim = script("scripts/make_slim.py")
    assert slim.TARGET.read_text("utf-8") == slim.page(), "run: python scripts/make_slim.py"
    assert not {"tensorflow", "keras", "torch"} & slim.needed()
    assert {"grpcio", "uvicorn", "starlette", "uvloop", "h11", "anyio"} <= slim.needed()


def test_the_context_holds_what_a_build_of_the_package_reads_and_no_more(container: ModuleType) -> None:
    """And nothing that tests or an editor left there."""
    sent = container.context(ROOT, IGNORED)
    tops = {name.partition("/")[0] for name in sent}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = {built["project"]["readme"], *built["project"]["license-files"], *wheel["packages"], *wheel["force-include"]}
    assert tops == {*read, "pyproject.toml", "hatch_build.py", "constraints.txt", "deploy"}
    assert [name for name in sent if name.startswith("deploy/")] == ["deploy/slim.txt"]
    assert not [name for name in sent if "__pycache__" in name or name.endswith((".native", ".pyc"))]
    tracked = subprocess.run(["git", "ls-files", "msplit"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= set(sent)


def test_patterns_of_a_context_are_those_of_docker(container: ModuleType, tmp_path: Path) -> None:
    for name in ("a/b.py", "a/__pycache__/b.pyc", "a/c/d.native", "b.txt", "c/keep.txt", "c/leave.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    rules = "# said\n*\n!a\n!c/keep.txt\n**/__pycache__\n**/*.native\n"
    assert container.context(tmp_path, rules) == ["a/b.py", "c/keep.txt"]


def test_the_server_s_image(container: ModuleType) -> None:
    slim = dict(stages(container)["slim"])
    assert slim["USER"] == "1000"
    assert slim["STOPSIGNAL"] == signal.SIGTERM.name
    program, *options = container.words(slim["ENTRYPOINT"])
    assert (program, options) == ("msplit", ["serve", "--host", "0.0.0.0"])
    flags, _, check = slim["HEALTHCHECK"].partition("CMD ")
    assert set(re.findall(r"--([a-z-]+)=", flags)) == {"interval", "timeout", "start-period"}
    compile(container.words(check)[2], "HEALTHCHECK", "exec")
    assert [rest for word, rest in stages(container)["slim"] if word == "RUN" and "tensorflow" in rest] == []


def test_steps_are_shell_and_versions_are_those_that_are_tested(container: ModuleType) -> None:
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert dict(stages(container)["slim"])["ARG"].removeprefix("TORCH=") in pinned
    steps = [rest for word, rest in container.instructions(TEXT) if word == "RUN"]
    assert len(steps) == 6
    for step in steps:
        assert subprocess.run(["sh", "-n", "-c", step], check=False).returncode == 0, step
    said = TEXT + (ROOT / "docs" / "install.md").read_text()
    for line in re.findall(r"msplit (doctor(?: --[a-z]+ [a-z]+)*)", said):
        assert msplit(*shlex.split(line), "--help").code == 0, line


@pytest.mark.parametrize("line", ["ADD a b", "ONBUILD RUN x", "VOLUME /a"])
def test_an_instruction_that_is_not_run_is_an_error(container: ModuleType, tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match="does not know"):
        container.Builder(tmp_path, borrow=False).build(line, "", "x")


def manifests() -> dict[str, Any]:
    return {f"{one['kind']} {one['metadata']['name']}": one for one in yaml.safe_load_all(KUBERNETES)}


def test_a_pod_has_the_time_to_drain_and_is_asked_where_the_server_answers() -> None:
    pod = manifests()["Deployment ranker"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    options = serve.command.make_context("serve", ["--host", "0.0.0.0", *server["args"]]).params
    assert options["lame_duck"] + options["grace"] < pod["terminationGracePeriodSeconds"]
    ready = server["readinessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"] < options["lame_duck"]
    assert str(options["model_base_path"]) == f"/models/{options['model_name']}"
    assert {one["containerPort"] for one in server["ports"]} == {options["port"], options["rest_api_port"]}
    paths = {server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"/livez", "/readyz"}
    pytest.importorskip("starlette")
    from msplit.serving.server import rest

    assert paths <= {route.path for route in rest.app(mock.Mock(), 1).routes}
    assert pod["securityContext"]["runAsUser"] == 1000
    assert {one["name"] for one in server["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_services_the_monitor_and_envoy_find_the_pods() -> None:
    found = manifests()
    labels = found["Deployment ranker"]["spec"]["template"]["metadata"]["labels"]
    for name in ("ranker", "ranker-pods"):
        spec = found[f"Service {name}"]["spec"]
        assert spec["selector"] == labels
        assert {(one["name"], one["port"]) for one in spec["ports"]} == {("grpc", 8500), ("http", 8501)}
    monitor = yaml.safe_load((DEPLOY / "servicemonitor.yaml").read_text())["spec"]
    monitored = [one for one in found.values() if one["metadata"].get("labels") == monitor["selector"]["matchLabels"]]
    assert [one["kind"] for one in monitored] == ["Deployment", "Service"]
    assert [one["port"] for one in monitor["endpoints"]] == ["http"]
    envoy = (DEPLOY / "envoy.yaml").read_text()
    asked = re.findall(r"address: (ranker\S*), port_value: (\d+)", envoy)
    assert asked == [("ranker-pods", "8500"), ("ranker-pods", "8501")]
