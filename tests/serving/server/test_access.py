"""Who may ask, and how it is proved: bearer tokens, TLS and clients' certificates, against the real server; all read again at SIGHUP."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

from msplit.errors import EngineError, LoadError, MsplitError  # noqa: E402
from msplit.serving.loadtest import clients  # noqa: E402
from msplit.serving.server import access, listening, messages, run, tensors  # noqa: E402
from msplit.serving.server.models import Models  # noqa: E402
from tests.cli.runner import msplit  # noqa: E402
from tests.serving.server.running import Server, start_trivial  # noqa: E402
from tests.serving.server.trivial import WIDTH  # noqa: E402

PREDICT = "/tensorflow.serving.PredictionService/Predict"
HEALTH = "/grpc.health.v1.Health/"
OPEN = "/inference.GRPCInferenceService/"
ROWS = {"instances": [[1.0] * WIDTH]}
NAME = "localhost"


# --- Authorities and what they sign


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


USE = (
    "-addext",
    "keyUsage=critical,digitalSignature,keyCertSign",
)  # from 3.13 on Python takes no authority that does not say so


def authority(folder: Path, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
    openssl(folder, "req", "-x509", *key, *USE, "-out", f"{name}.crt", "-days", "2", "-subj", f"/CN={name}")


def signed(folder: Path, by: str, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
    extra = ("-CA", f"{by}.crt", "-CAkey", f"{by}.key", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1")
    openssl(folder, "req", "-x509", *key, *extra, *USE, "-out", f"{name}.crt", "-days", "2", "-subj", f"/CN={name}")


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two authorities, `first` and `second`, and what each signed: `first_server`, `first_client` …"""
    folder = tmp_path_factory.mktemp("pems")
    for one in ("first", "second"):
        authority(folder, one)
        for what in ("server", "client"):
            signed(folder, one, f"{one}_{what}")
    return folder


def inline(pems: Path, by: str, verify: bool, lines: str = "\n") -> str:
    """An SSLConfig as TensorFlow Serving has it: PEM in strings, which may go over lines."""

    def pem(name: str) -> str:
        return (pems / name).read_text().replace("\n", lines)

    text = f"# it's ours\nserver_key: '{pem(f'{by}_server.key')}'\nserver_cert: \"{pem(f'{by}_server.crt')}\"\n"
    return text + (f"custom_ca: '{pem(f'{by}.crt')}'\nclient_verify: true\n" if verify else "")


# --- Clients


def predict(server: Server, authority: bytes | None = None, client: Path | None = None, token: str = "") -> Any:
    """Status of a request over gRPC."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", NAME)]
    if authority is None:
        channel = grpc.insecure_channel(server.address, options[:1])
    else:
        pair = {}
        if client is not None:
            pair = {
                "private_key": client.with_suffix(".key").read_bytes(),
                "certificate_chain": client.with_suffix(".crt").read_bytes(),
            }
        channel = grpc.secure_channel(server.address, grpc.ssl_channel_credentials(authority, **pair), options)
    request = messages.PredictRequest()
    request.model_spec.name = "double"
    tensors.to_tensor_proto(np.ones((1, WIDTH), np.float32), request.inputs["x"], as_content=True)
    metadata = [("authorization", token)] if token else []
    return asked(channel, PREDICT, request, "PredictResponse", metadata)


def asked(channel: Any, path: str, request: Any, answer: str, metadata: Any = ()) -> Any:
    with channel:
        ask = channel.unary_unary(path, type(request).SerializeToString, getattr(messages, answer).FromString)
        try:
            ask(request, timeout=20, metadata=metadata)
        except grpc.RpcError as problem:
            return problem.code().name
        return "OK"


def trust(pems: Path, by: str, client: str = "") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=pems / f"{by}.crt")
    if client:
        made.load_cert_chain(pems / f"{client}.crt", pems / f"{client}.key")
    return made


def http(server: Server, path: str, body: Any = None, context: Any = None, **headers: str) -> tuple[Any, Any]:
    """Status and headers of an answer; the error where there is none."""
    data = None if body is None else json.dumps(body).encode()
    where = f"{'http' if context is None else 'https'}://127.0.0.1:{server.rest}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(where, data, headers), timeout=20, context=context) as found:
            return found.status, found.headers
    except urllib.error.HTTPError as problem:
        return problem.code, problem.headers
    except OSError as problem:
        return type(problem), {}


def reloaded(server: Server, *said: str) -> None:
    """Sends SIGHUP, and waits for what the log says of it."""
    server.process.send_signal(signal.SIGHUP)
    for line in server.process.stdout:
        server.said += line
        said = tuple(one for one in said if one not in line)
        if not said:
            return
    raise AssertionError(server.said)


@pytest.fixture
def running() -> Iterator[Callable[..., Server]]:
    found: list[Server] = []

    def start(*options: str) -> Server:
        found.append(start_trivial("log=text", *options))
        return found[-1]

    yield start
    for one in found:
        one.process.kill()


# --- Tokens


def test_a_request_needs_a_token_and_health_does_not(running: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\nfirst-token\n\nsecond.token==\n")
    server = running(f"tokens={file}", "access=1")
    wrong = ("", "Bearer", "Bearer first", "Bearer first-token2", "first-token", "Basic first-token", "Bearer \xff")
    for token in ("Bearer first-token", "bearer second.token=="):
        assert predict(server, token=token) == "OK"
        assert http(server, "/v1/models/double:predict", ROWS, authorization=token)[0] == 200
        assert http(server, "/metrics", authorization=token)[0] == 200
    for token in wrong:
        if token.isascii():
            assert predict(server, token=token) == "UNAUTHENTICATED"
        for path in ("/v1/models/double", "/v2/models/double/ready", "/v2", "/metrics", "/nothing"):
            status, headers = http(server, path, **({"authorization": token} if token else {}))
            assert (path, status, headers["www-authenticate"]) == (path, 401, "Bearer")
    assert http(server, "/v2/repository/models/double/unload", {})[0] == 401
    assert http(server, "/v1/models/double", Host="a/healthz?")[0] == 401, "the path is the client's word"
    for path in ("/livez", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert http(server, path)[0] == 200
    for path, name in ((f"{HEALTH}Check", "HealthCheck"), (f"{OPEN}ServerLive", "ServerLive")):
        request = getattr(messages, f"{name}Request")()
        assert asked(grpc.insecure_channel(server.address), path, request, f"{name}Response") == "OK"
    for name, request in (("ServerMetadata", {}), ("RepositoryIndex", {}), ("ModelReady", {"name": "double"})):
        request = getattr(messages, f"{name}Request")(**request)
        assert asked(grpc.insecure_channel(server.address), f"{OPEN}{name}", request, f"{name}Response") == (
            "UNAUTHENTICATED"
        )

    file.write_text("third\n")
    reloaded(server, "tokens are as configured now")
    assert predict(server, token="Bearer first-token") == "UNAUTHENTICATED"
    assert predict(server, token="Bearer third") == "OK"
    file.write_text("fourth\nse cret\n")
    reloaded(server, "tokens stay as they were", "line 2 is no bearer token")
    assert predict(server, token="Bearer third") == "OK"
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{server.rest}/metrics", headers={"authorization": "Bearer third"})
    ) as answer:
        counted = [line for line in answer.read().decode().splitlines() if 'status="UNAUTHENTICATED"' in line]
    assert len(counted) == 3, "over HTTP and two services of gRPC"
    code, said = server.stop()
    assert code == 0
    assert not [
        secret for secret in ("first-token", "second.token", "third", "fourth", "cret") if secret in server.said + said
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no token"),
        ("# none\n", "has no token"),
        ("a\nb c\n", "line 2 is no"),
        ("a\n\x1b[2J\n", "line 2 is no"),
    ],
)
def test_files_of_tokens_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(LoadError, match=said) as caught:
        access.Tokens(file)
    assert "\x1b" not in str(caught.value)
    with pytest.raises(MsplitError, match="can not be read"):
        access.Tokens(tmp_path / "nothing")


# --- TLS


def test_both_ports_speak_tls_and_renew_it(running: Callable[..., Server], pems: Path, tmp_path: Path) -> None:
    first, second = (trust(pems, one) for one in ("first", "second"))
    roots = {one: (pems / f"{one}.crt").read_bytes() for one in ("first", "second")}
    file = tmp_path / "ssl.config"
    file.write_text(inline(pems, "first", verify=False))
    server = running(f"tls={file}")
    assert predict(server, roots["first"]) == "OK"
    assert http(server, "/v1/models/double:predict", ROWS, first)[0] == 200
    assert predict(server) == predict(server, roots["second"]) == "UNAVAILABLE"
    assert not isinstance(http(server, "/healthz")[0], int)
    assert not isinstance(http(server, "/healthz", context=second)[0], int)

    file.write_text(inline(pems, "second", verify=False))
    with grpc.secure_channel(
        server.address, grpc.ssl_channel_credentials(roots["first"]), [("grpc.ssl_target_name_override", NAME)]
    ) as before:
        ask = before.unary_unary(f"{HEALTH}Check", None, None)
        ask(b"", timeout=20)
        reloaded(server, "certificates are as configured now")
        assert (predict(server, roots["second"]), predict(server, roots["first"])) == ("OK", "UNAVAILABLE")
        assert http(server, "/healthz", context=second)[0] == 200
        ask(b"", timeout=20)  # who is connected stays so
    for wrong, said in (("server_key: 'a", "is no SSLConfig"), (inline(pems, "second", verify=True), "client_verify")):
        file.write_text(wrong)
        reloaded(server, "certificates stay as they were", said)
        assert predict(server, roots["second"]) == "OK"
        assert http(server, "/healthz", context=second)[0] == 200
    code, said = server.stop()
    assert (code, "PRIVATE" in server.said + said) == (0, False)


def test_front_ends_take_tokens_and_certificates_again(
    running: Callable[..., Server], pems: Path, tmp_path: Path
) -> None:
    """Each of them: connections go to any."""
    tls, tokens = tmp_path / "ssl.config", tmp_path / "tokens"
    tls.write_text(inline(pems, "first", verify=False))
    tokens.write_text("old-token")
    server = running(f"tls={tls}", f"tokens={tokens}", "fronts=2")

    def answers(by: str, token: str) -> set[tuple[Any, Any]]:
        ca = (pems / f"{by}.crt").read_bytes()
        return {
            (
                predict(server, ca, token=f"Bearer {token}"),
                http(server, "/v1/models/double", None, trust(pems, by), authorization=f"Bearer {token}")[0],
            )
            for _ in range(8)
        }

    assert answers("first", "old-token") == {("OK", 200)}
    tls.write_text(inline(pems, "second", verify=False))
    tokens.write_text("new-token")
    reloaded(server, "tokens are as configured now", "certificates are as configured now")
    until = time.monotonic() + 10
    while answers("second", "new-token") != {("OK", 200)}:  # they read on their own
        assert time.monotonic() < until
    assert answers("second", "old-token") == {("UNAUTHENTICATED", 401)}
    assert server.stop()[0] == 0


def test_clients_need_a_certificate(running: Callable[..., Server], pems: Path, tmp_path: Path) -> None:
    file = tmp_path / "ssl.config"
    for name in ("first_server.key", "first_server.crt", "first.crt"):
        (tmp_path / name).write_bytes((pems / name).read_bytes())
    file.write_text(
        "server_key: 'first_server.key' server_cert: 'first_server.crt' custom_ca: 'first.crt' client_verify: true"
    )
    server = running(f"tls={file}")
    root = (pems / "first.crt").read_bytes()
    assert predict(server, root, pems / "first_client") == "OK"
    assert http(server, "/healthz", context=trust(pems, "first", "first_client"))[0] == 200
    for client in (None, "second_client"):
        assert predict(server, root, client and pems / client) == "UNAVAILABLE"
        assert not isinstance(http(server, "/healthz", context=trust(pems, "first", client or ""))[0], int)
    (tmp_path / "first.crt").write_bytes((pems / "second.crt").read_bytes())  # another authority for clients
    reloaded(server, "certificates are as configured now")
    assert predict(server, root, pems / "second_client") == "OK"
    assert predict(server, root, pems / "first_client") == "UNAVAILABLE"
    assert http(server, "/healthz", context=trust(pems, "first", "second_client"))[0] == 200
    assert not isinstance(http(server, "/healthz", context=trust(pems, "first", "first_client"))[0], int)
    assert server.stop()[0] == 0


def test_tensorflow_servings_configuration_is_read_as_it_reads_it(pems: Path, tmp_path: Path) -> None:
    file = tmp_path / "ssl.config"
    for lines in ("\n", "\\n"):
        file.write_text(inline(pems, "first", verify=True, lines=lines))
        assert access.Certificates(file).context.now.verify_mode is ssl.CERT_REQUIRED


def test_configurations_of_tls_that_are_of_no_use(pems: Path, tmp_path: Path) -> None:
    file, locked = tmp_path / "ssl.config", tmp_path / "locked.key"
    openssl(tmp_path, "ec", "-in", str(pems / "first_server.key"), "-aes128", "-passout", "pass:x", "-out", str(locked))
    whole = inline(pems, "first", verify=False)
    crt = f"server_cert: '{pems}/first_server.crt'"
    for text, said in (
        ("", "lacks server_key or server_cert"),
        (crt, "lacks server_key"),
        (f"{whole} client_verify: true", "no custom_ca"),
        (f"{whole} custom_ca: '-----BEGIN nothing' client_verify: true", "can not be used"),
        (f"server_key: '{pems}/second_server.key' {crt}", "KEY_VALUES_MISMATCH"),
        (f"server_key: '{locked}' {crt}", "can not be used"),
        (f"server_key: '-----BEGIN nonsense' {crt}", "can not be used"),
        (f"server_key: 'nowhere' {crt}", "(?s)can not be used: No such file.*files in this folder"),
        (f"server_key: '{pems}' {crt}", "can not be used"),
        (whole.replace("-----BEGIN", "-----BEGI"), "can not be used"),
        (f"server_key: 'secret {'MHcCAQEEI' * 9}' {crt}", "can not be used: No such file"),
        ("server_keyy: '-----BEGIN secret'", "is no SSLConfig"),
    ):
        file.write_text(text)
        with pytest.raises(MsplitError, match=said) as caught:
            access.Certificates(file)
        assert not [secret for secret in ("secret", "BEGI", "MHcC") if secret in str(caught.value)]


# --- SIGHUP


def test_a_server_whose_terminal_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP does what it did before the server was there. Where there was no terminal it goes on, and so it does under `nohup`."""
    terminal = tmp_path / "tty"
    monkeypatch.setattr(listening, "_TERMINAL", str(terminal))

    def ends(*signal: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGHUP)
    try:
        for there, ours in ((True, ends), (False, ends), (True, signal.SIG_IGN)):
            terminal.unlink(missing_ok=True)
            if there:
                terminal.touch()
            signal.signal(signal.SIGHUP, ours)
            models = Models({})
            with run.answering(models, run.Listening(port=0, rest_port=0, grace=0), {}) as server:

                def goes(server: run.Answering = server) -> None:
                    signal.raise_signal(signal.SIGHUP)  # the terminal is there, or was not
                    terminal.unlink(missing_ok=True)
                    assert server._thread.is_alive()
                    signal.raise_signal(signal.SIGHUP)
                    signal.raise_signal(signal.SIGTERM)

                with pytest.raises(KeyboardInterrupt) if there and ours is ends else contextlib.nullcontext():
                    server.wait(goes)
            assert signal.getsignal(signal.SIGHUP) == ours
    finally:
        signal.signal(signal.SIGHUP, before)


# --- The load test as a client


def test_a_load_test_proves_who_it_is(
    running: Callable[..., Server], pems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, tokens = tmp_path / "ssl.config", tmp_path / "tokens"
    tls.write_text(inline(pems, "first", verify=True))
    tokens.write_text("# ours\nfirst-token\nother-token\n")
    server = running(f"tls={tls}", f"tokens={tokens}")
    feeds = [{"x": np.ones((2, WIDTH), np.float32)}]
    certificate = {"certificate": pems / "first_client.crt", "key": pems / "first_client.key"}

    def answer(protocol: str = "tensorflow", **proofs: Path) -> Any:
        channel = clients.Channel(clients.ServerUnderTest(server.address, "double", protocol, **proofs), feeds)
        return channel.submit(feeds[0], timeout=20).result()["y"] + channel.step(feeds[0])["y"]

    first = {"authorities": pems / "first.crt", "token_file": tokens, **certificate}
    for protocol in clients.PROTOCOLS:
        assert (answer(protocol, **first) == 4).all()
    with pytest.raises(EngineError, match="UNAUTHENTICATED"):
        answer(authorities=pems / "first.crt", **certificate)
    (tmp_path / "wrong").write_text("wrong-token")
    with pytest.raises(EngineError, match="UNAUTHENTICATED") as caught:
        answer(**{**first, "token_file": tmp_path / "wrong"})
    assert "wrong-token" not in str(caught.value)
    monkeypatch.setattr("msplit.serving.loadtest.clients._CONNECT", 1.0)
    for asked, proofs in (("with", {**first, "authorities": pems / "second.crt"}), ("without", {"token_file": tokens})):
        with pytest.raises(EngineError, match=f"it was asked {asked} TLS"):
            answer(**proofs)
    assert server.stop()[0] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ca=first.key", "can not be used"),
        ("ca=nowhere.pem", "nowhere.pem: can not be used: No such file"),
        ("ca=first.crt,cert=first_client.crt,key=second_client.key", "KEY_VALUES_MISMATCH"),
        ("ca=first.crt,cert=first_client.crt", "a client's certificate needs its key"),
        ("cert=first_client.crt,key=first_client.key", "a client's certificate needs its key, and TLS"),
        ("token-file=first.crt", "is no bearer token"),
    ],
)
def test_proofs_of_a_load_test_that_are_of_no_use(
    pems: Path, monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    """They are told at once: gRPC would try again and again, and say nothing."""
    model = Path(__file__).parents[3] / "sample_graphs" / "mmoe_small.pb"
    monkeypatch.chdir(pems)
    done = msplit("load", model, "--device", "cpu", "--server", f"127.0.0.1:9,{given}")
    assert (done.code, done.out) == (2, "")
    assert said in done.err
