"""Runs the steps of deploy/Dockerfile without a container engine, and starts the server that it describes.

    unshare --mount python tools/container.py FOLDER BUILD [--borrow] [--envoy PROGRAM]        as root, on Linux

A stage's root is this machine's own system under a layer in FOLDER (overlayfs). In place of the image `python:…` it has an environment
of this Python in /opt/python, with nothing but pip in it; /home, /opt, /root and the like are empty. RUN, COPY, ARG, ENV, USER, WORKDIR,
ENTRYPOINT, CMD, HEALTHCHECK and STOPSIGNAL are read from the Dockerfile, and an instruction that is unknown here is an error. The server
serves BUILD as a version of /models/model, with a read-only root, as process 1 of its own process and network namespaces. With `--borrow`
PyTorch and what it needs are there from the start, from this Python's packages: to install them takes most of the time. With `--envoy` the
server is also asked through that program, which reads deploy/envoy.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import fnmatch
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PYTHON = "/opt/python"
SYSTEM = ("bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "var")
"""Folders of this machine that a stage sees."""
ELSEWHERE = "127.0.0.2"
"""Address that reaches a server which listens everywhere, and not one that listens on 127.0.0.1."""


@dataclass(frozen=True)
class Image:
    """What the instructions up to some line say.

    Attributes:
        root: Folder that it is mounted at.
        environment: Variables of ENV.
        arguments: Variables of ARG, which only RUN sees.
        user: Name or number of USER.
        workdir: Folder of WORKDIR.
        entrypoint: Words of ENTRYPOINT.
        command: Words of CMD.
        health: Words of HEALTHCHECK.
        stop: Number of the signal of STOPSIGNAL.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    stop: int = signal.SIGTERM

    def wrapped(self, words: list[str] | tuple[str, ...], **more: str) -> list[str]:
        """The command that runs `words` in this image, as its user."""
        home = "/root"
        for line in (self.root / "etc" / "passwd").read_text().splitlines():
            name, _, number, _, _, place, _ = line.split(":")
            home = place if self.user in (name, number) else home
        path = f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "HOME": home, "LANG": "C.UTF-8", **self.environment, **more}
        values = [f"{name}={value}" for name, value in variables.items()]
        return [
            "chroot",
            f"--userspec={self.user}",
            str(self.root),
            "env",
            "-i",
            f"--chdir={self.workdir}",
            *values,
            *words,
        ]


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with what follows each, its lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def words(text: str) -> tuple[str, ...]:
    """Words of a command: a JSON list, or what the shell is to run."""
    return tuple(json.loads(text)) if text.startswith("[") else ("/bin/sh", "-c", text)


def context(folder: Path, ignored: str) -> list[str]:
    """Files of a build's context: the last pattern of a `.dockerignore` that fits a path, or a folder above it, decides.

    Args:
        folder: The context.
        ignored: Text of the file of patterns.

    Returns:
        Paths relative to it.
    """
    patterns = [line.strip() for line in ignored.splitlines() if line.strip() and line[0] != "#"]

    def sent(path: str) -> bool:
        above = [str(one) for one in (Path(path), *Path(path).parents)][:-1]
        keep = True
        for pattern in patterns:
            bare = pattern.lstrip("!").removeprefix("**/")
            anywhere = "**/" in pattern
            if any(fnmatch.fnmatchcase(Path(one).name if anywhere else one, bare) for one in above):
                keep = pattern.startswith("!")
        return keep

    wanted = {pattern[1:].split("/")[0] for pattern in patterns if pattern.startswith("!")}
    found = [path for top in sorted(wanted) for path in [folder / top, *sorted((folder / top).rglob("*"))]]
    return [name for path in found if path.is_file() and sent(name := path.relative_to(folder).as_posix())]


def mount(*arguments: str) -> None:
    """Calls mount(8)."""
    subprocess.run(["mount", *arguments], check=True)


class Builder:
    """Makes stages in a folder.

    Args:
        folder: Where their layers are.
        borrow: True to find PyTorch there.
    """

    def __init__(self, folder: Path, borrow: bool) -> None:
        self._folder = folder
        self._borrow = borrow
        self._python: Path | None = None
        self.stages: dict[str, Image] = {}

    def _root(self, name: str) -> Path:
        """A root with nothing in it but the system and Python."""
        root = self._folder / name
        root.mkdir()
        mount("--bind", str(root), str(root))
        for one in SYSTEM:
            system = Path("/", one)
            if system.is_symlink():
                (root / one).symlink_to(system.readlink())
            elif system.is_dir():
                layers = [self._folder / f"{name}.{one}{end}" for end in ("", ".work")]
                for made in (*layers, root / one):
                    made.mkdir()
                options = f"lowerdir={system},upperdir={layers[0]},workdir={layers[1]}"
                mount("-t", "overlay", "overlay", "-o", options, str(root / one))
        for one in ("tmp", "mnt", "root", "home", "opt"):
            (root / one).mkdir()
        (root / "tmp").chmod(0o1777)
        accounts = (root / "etc" / "passwd").read_text().splitlines(keepends=True)
        people = [line for line in accounts if 1000 <= int(line.split(":")[2]) < 60000]  # no image has this machine's
        (root / "etc" / "passwd").write_text("".join(line for line in accounts if line not in people))
        names = {line.split(":")[0] for line in people}
        for one in ("group", "gshadow", "shadow"):
            lines = (root / "etc" / one).read_text().splitlines(keepends=True)
            (root / "etc" / one).write_text("".join(line for line in lines if line.split(":")[0] not in names))
        for one in ("dev", "proc", "sys"):
            (root / one).mkdir()
            mount("--rbind", f"/{one}", str(root / one))
        if Path(sys.base_prefix).parts[1] not in SYSTEM:
            (root / sys.base_prefix[1:]).mkdir(parents=True)
            mount("--bind", "-o", "ro", sys.base_prefix, str(root / sys.base_prefix[1:]))
        if Path(links := os.environ.get("PIP_FIND_LINKS", "")).is_dir() and links:
            mount("--bind", "-o", "ro", links, str(root / "mnt"))
        if self._python is None:
            python = [f"{sys.base_prefix}/bin/python3", "-m", "venv", PYTHON]
            subprocess.run(Image(root).wrapped(python), check=True)
            self._python = self._folder / "python"
            shutil.copytree(root / PYTHON[1:], self._python, symlinks=True)
        else:
            shutil.copytree(self._python, root / PYTHON[1:], symlinks=True)
        if self._borrow:
            site = packages(root)
            for old in site.glob("setuptools-*"):  # Python 3.11 brings one that is too old for PyTorch
                shutil.rmtree(old)
            for place in sorted(files_of("torch")):
                (site / place.name).mkdir(exist_ok=True) if place.is_dir() else (site / place.name).touch()
                mount("--bind", "-o", "ro", str(place), str(site / place.name))
        return root

    def build(self, text: str, ignored: str, target: str) -> Image:
        """Runs the instructions up to the end of the stage `target`."""
        image = Image(self._folder)
        stage = ""
        for word, rest in instructions(text):
            if word == "FROM":
                if stage == target:
                    break
                origin, _, stage = rest.partition(" AS ")
                image = replace(self.stages.get(origin) or Image(self._root(stage)), arguments={})
            else:
                used = resource.getrusage(resource.RUSAGE_CHILDREN)
                print(f"==> {used.ru_utime + used.ru_stime:4.0f} s {stage}: {word} {rest[:130]}", flush=True)
                image = self._after(image, word, rest, ignored)
            self.stages[stage] = image
        return self.stages[target]

    def _after(self, image: Image, word: str, rest: str, ignored: str) -> Image:
        """The image after one instruction."""
        match word:
            case "RUN":
                pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
                if os.listdir(image.root / "mnt"):
                    pip["PIP_FIND_LINKS"] = "/mnt"
                subprocess.run(image.wrapped(words(rest), **pip, PIP_QUIET="2", **image.arguments), check=True)
            case "COPY":
                self._copy(image, shlex.split(rest), ignored)
            case "ARG" | "ENV":
                said = dict(one.split("=", 1) for one in shlex.split(rest))
                if word == "ARG":
                    return replace(image, arguments={**image.arguments, **said})
                return replace(image, environment={**image.environment, **said})
            case "USER":
                return replace(image, user=rest)
            case "WORKDIR":
                (image.root / rest[1:]).mkdir(parents=True, exist_ok=True)
                return replace(image, workdir=rest)
            case "ENTRYPOINT":
                return replace(image, entrypoint=words(rest), command=())
            case "CMD":
                return replace(image, command=words(rest))
            case "HEALTHCHECK":
                return replace(image, health=words(rest.partition("CMD ")[2]))
            case "STOPSIGNAL":
                return replace(image, stop=signal.Signals[rest])
            case "EXPOSE":
                pass
            case _:
                raise ValueError(f"{word}: an instruction that tools/container.py does not know")
        return image

    def _copy(self, image: Image, arguments: list[str], ignored: str) -> None:
        *sources, target = arguments
        place = image.root / target[1:]
        if sources[0].startswith("--from="):
            (source,) = sources[1:]
            shutil.copytree(self.stages[sources[0].partition("=")[2]].root / source[1:], place, dirs_exist_ok=True)
            return
        sent = context(ROOT, ignored)
        for source in sources:
            found = sent if source == "." else [source]
            assert set(found) <= set(sent), f"{source} is not in the context"
            for name in found:
                end = place / (name if source == "." else Path(name).name)
                end.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, end)


def packages(root: Path) -> Path:
    """Folder of an image's Python packages."""
    return next((root / PYTHON[1:] / "lib").glob("python*/site-packages"))


def files_of(name: str) -> set[Path]:
    """Top folders and files of a package of this Python and of all that it needs."""
    found: dict[str, set[Path]] = {}
    waiting = [name]
    while waiting:
        if (one := canonicalize_name(waiting.pop())) not in found:
            package = distribution(one)
            tops = {Path(str(file)).parts[0] for file in package.files or ()} - {"..", "__pycache__"}
            found[one] = {Path(str(package.locate_file(top))) for top in tops}
            needs = map(Requirement, package.requires or ())
            waiting += [each.name for each in needs if not each.marker or each.marker.evaluate({"extra": ""})]
    return set().union(*found.values())


def size(image: Image) -> dict[str, int]:
    """Bytes of an environment's packages that take more than 1 % of it, and of all of it."""
    sizes = {
        one.name: sum(each.stat().st_size for each in (one, *one.rglob("*")) if each.is_file())
        for one in packages(image.root).iterdir()
    }
    total = sum(sizes.values())
    largest = sorted((name for name in sizes if sizes[name] > total / 100), key=lambda name: -sizes[name])
    return {name: sizes[name] for name in largest} | {"all": total}


def have_a_network() -> None:
    """Leaves this process alone in a network of its own, in which it may reach itself."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET; os.unshare came with Python 3.12
        raise OSError(ctypes.get_errno(), "no network namespace")
    with socket.socket() as any_socket:
        request = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


@contextlib.contextmanager
def running(image: Image, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """What the image starts, as process 1, with its number here. It is killed at the end if it has not ended."""
    inside = image.wrapped([*image.entrypoint, *(options or image.command)])
    process = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", *inside])
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.01)
        yield process, int(found[0])
    finally:
        process.kill()
        process.wait()


def fetched(path: str, body: Any = None, *, door: str = f"http://{ELSEWHERE}:8501") -> tuple[int, bytes]:
    """Status and text of an answer over HTTP; 0 where nobody listens yet."""
    data = None if body is None else json.dumps(body).encode()
    secure = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE")) if door.startswith("https") else None
    try:
        with urllib.request.urlopen(f"{door}{path}", data, timeout=30, context=secure) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read()
    except OSError:
        return 0, b""


ROWS = {"instances": [{"x": [1.0] * 64}] * 2}
"""A request for sample_graphs/mmoe_small.pb."""


def called(image: Image, channel: str, method: str = "/inference.GRPCInferenceService/ServerReady") -> str:
    """Answer of gRPC, asked from inside of the image over a channel of Python's `grpc`: the bytes, or the status."""
    asked = f"""
import grpc
try:
    print({channel}.unary_unary({method!r})(b"", timeout=10))
except grpc.RpcError as problem:
    print(problem.code().name)
"""
    done = subprocess.run(image.wrapped(["python", "-c", asked]), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def check(image: Image, build: Path, envoy: Path | None) -> None:
    """Serves a build of sample_graphs/mmoe_small.pb from the image, asks it, and stops it."""
    shutil.copytree(build, image.root / "models" / "model" / "1")
    without = image.wrapped(["python", "-c", "import importlib.util as u; assert u.find_spec('tensorflow') is None"])
    subprocess.run(without, check=True)
    for private in ("tmp", "dev/shm"):
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(image.root / private))
    for system in (image.root, *map(image.root.joinpath, SYSTEM)):
        if system.is_dir() and not system.is_symlink():
            mount("-o", "remount,bind,ro", str(system))
    began = time.monotonic()
    with running(image, "--lame-duck", "1") as (process, number):
        health = image.wrapped(image.health)
        while subprocess.run(health, stderr=subprocess.DEVNULL).returncode:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < began + 120, fetched("/readyz")
            time.sleep(0.2)
        ticks = sum(map(int, Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13]))
        used = ticks / os.sysconf("SC_CLK_TCK")
        print(f"healthy after {time.monotonic() - began:.1f} s, {used:.1f} s of them on a processor", flush=True)
        assert fetched("/livez")[0] == 200
        status = Path(f"/proc/{number}/status").read_text()
        assert re.search(r"^Uid:\s+1000\s+1000", status, re.MULTILINE), status
        assert re.search(r"^NSpid:.*\s1$", status, re.MULTILINE), status
        code, text = fetched("/v1/models/model:predict", ROWS)
        assert code == 200, text
        rows = json.loads(text)["predictions"]
        assert len(rows) == 2, rows
        assert rows[0] == rows[1], rows
        assert all(0 < value[0] < 1 for value in rows[0].values()), rows
        assert b'msplit_model_ready{model="model"' in fetched("/metrics")[1]
        assert called(image, f"grpc.insecure_channel('{ELSEWHERE}:8500')") == r"b'\x08\x01'"
        if envoy is not None:
            check_envoy(image, envoy, text)
        os.kill(number, image.stop)
        while fetched("/readyz")[0] != 503:
            assert process.poll() is None, "it ended at once"
        assert fetched("/v1/models/model:predict", ROWS) == (200, text), "it answers on, and is not ready"
        code = process.wait(30)
        assert code == 0, code
    print("served from a root without TensorFlow, as user 1000, and ended by its signal with exit code 0")


def check_envoy(image: Image, envoy: Path, known: bytes) -> None:
    """Asks the server through Envoy, with a certificate made for that.

    Args:
        image: A server of it runs.
        envoy: Envoy's program.
        known: Answer of the server to `ROWS`.
    """
    folder = image.root / "tmp"
    key, certificate = folder / "tls.key", folder / "tls.crt"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "1"]
    request = ["openssl", "req", *kind, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(request, check=True, capture_output=True)
    os.environ["SSL_CERT_FILE"] = str(certificate)
    text = (ROOT / "deploy" / "envoy.yaml").read_text()
    (folder / "envoy.yaml").write_text(text.replace("ranker-pods", "127.0.0.1").replace("/etc/envoy/tls", str(folder)))
    command = [envoy, "--config-path", folder / "envoy.yaml", "--disable-hot-restart", "--concurrency", "1"]
    process = subprocess.Popen([*map(str, command), "--log-level", "warning"])
    try:
        door = "https://localhost:8443"
        until = time.monotonic() + 30
        while (found := fetched("/v1/models/model:predict", ROWS, door=door))[0] != 200:
            assert time.monotonic() < until, found
            time.sleep(0.1)
        assert found[1] == known, found
        hidden = ("/metrics", "//metrics", "/monitoring/prometheus/metrics")
        for path in (*hidden, "/v2/repository/index", "/v2/models/../repository/index"):
            assert fetched(path, door=door)[0] == 403, path
        secure = f"grpc.secure_channel('localhost:8443', grpc.ssl_channel_credentials({certificate.read_bytes()!r}))"
        assert called(image, secure) == r"b'\x08\x01'", called(image, secure)
        methods = re.findall(r"prefix: (/\w+\.\S+)}", text)
        assert len(methods) == 2, methods
        for path in methods:
            full = path if path.endswith("Request") else f"{path}Index"
            assert called(image, secure, full) == "PERMISSION_DENIED", full
    finally:
        process.terminate()
        process.wait()
    print("answered through Envoy over TLS, HTTP and gRPC; what is for operators was refused")


def main(folder: Path, build: Path, borrow: bool, envoy: Path | None) -> None:
    """Builds the image `slim`, tells its size, and checks it."""
    text = DOCKERFILE.read_text()
    image = Builder(folder, borrow).build(text, DOCKERFILE.with_suffix(".dockerignore").read_text(), "slim")
    for name, count in size(image).items():
        print(f"{count / 1e6:8.1f} MB {name}")
    have_a_network()
    check(image, build, envoy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("--borrow", action="store_true")
    parser.add_argument("--envoy", type=Path)
    main(**vars(parser.parse_args()))
