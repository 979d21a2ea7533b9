"""Triton's own client asks a server of msplit's. Run by .ci/clients, in two environments:

python triton_client.py answer FILE.npz          where TensorFlow is: inputs, and what TensorFlow answers
python triton_client.py ask MSPLIT FILE.npz      where tritonclient is: the server's answers are those
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_graphs"
MESSAGES = ROOT / "msplit" / "serving" / "server" / "data" / "messages.binpb"


def answer(file: str) -> None:
    """Saves inputs and TensorFlow's answers."""
    import tensorflow as tf

    numbers = np.random.default_rng(0)
    graph = tf.Graph()
    with graph.as_default():
        message = tf.compat.v1.GraphDef.FromString((SAMPLES / "mmoe_small.pb").read_bytes())
        tf.import_graph_def(message, name="")
    x = numbers.standard_normal((3, 64), np.float32)
    with tf.compat.v1.Session(graph=graph) as session:
        score = session.run("tower_1/out/Sigmoid:0", {"x:0": x})
    city = np.array([b"Oslo", "Zürich".encode(), b"", b"\xff\x00z"], object)
    amount = numbers.standard_normal((4, 4), np.float32)
    model = tf.saved_model.load(str(SAMPLES / "keras_lookup")).signatures["serving_default"]
    price = model(city=tf.constant(city), amount=tf.constant(amount))["output_0"].numpy()
    lengths = np.array([len(one) for one in city])
    np.savez(
        file,
        x=x,
        score=score,
        city=np.frombuffer(b"".join(city), np.uint8),
        lengths=lengths,
        amount=amount,
        price=price,
    )


def ask(msplit: str, file: str) -> None:
    """Starts a server and asks it."""
    from tritonclient import grpc, http

    with np.load(file) as saved:
        known = dict(saved)
    ends = np.cumsum(known["lengths"])
    text = known["city"].tobytes()
    city = np.array([text[end - size : end] for end, size in zip(ends, known["lengths"], strict=True)], object)
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, rest = taken.getsockname()[1], other.getsockname()[1]
    options = [
        "--device",
        "cpu",
        "--cuda",
        "effort=fast",
        "--batch",
        "1,4",
        "--groups",
        "2",
        "--port",
        str(port),
        "--rest-api-port",
        str(rest),
    ]
    command = [msplit, "serve", SAMPLES / "mmoe_small.pb", "--model", f"words={SAMPLES / 'keras_lookup'}", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            print(line, end="")
            if line.startswith("ready:"):
                break
        with contextlib.closing(grpc.InferenceServerClient(f"127.0.0.1:{port}")) as client:
            assert client.get_server_metadata().name == "msplit"
            inputs = client.get_model_metadata("words").inputs
            asked(grpc, client, [(one.name, one.datatype, list(one.shape)) for one in inputs], city, known, {})
        with contextlib.closing(http.InferenceServerClient(f"127.0.0.1:{rest}")) as client:
            assert client.get_server_metadata()["name"] == "msplit"
            inputs = client.get_model_metadata("words")["inputs"]
            said = [(one["name"], one["datatype"], one["shape"]) for one in inputs]
            asked(http, client, said, city, known, {})
            for kind in ("gzip", "deflate"):
                packed = {"request_compression_algorithm": kind, "response_compression_algorithm": kind}
                asked(http, client, said, city, known, packed)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    messages_agree()
    print("Triton's client got TensorFlow's answers")


CODES = {"NOT_FOUND": "404", "INVALID_ARGUMENT": "400"}


def asked(
    kind: Any, client: Any, said: list[Any], city: np.ndarray, known: dict[str, np.ndarray], options: Any
) -> None:
    """Asks as one of the two clients does: its module and what it made, and what it said of the model's inputs."""
    from tritonclient.utils import InferenceServerException

    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("words", "1")
    assert sorted(said) == [("amount", "FP32", [-1, 4]), ("city", "BYTES", [-1])], said

    over_http = not kind.__name__.endswith("grpc")

    def infer(model: str, output: str, binary: bool = True, **arrays: np.ndarray) -> np.ndarray:
        inputs, outputs = [], [kind.InferRequestedOutput(output)]
        for name, array in arrays.items():
            inputs.append(kind.InferInput(name, array.shape, "BYTES" if array.dtype == object else "FP32"))
            inputs[-1].set_data_from_numpy(array, *((binary,) if over_http else ()))
        if not binary:
            outputs = [kind.InferRequestedOutput(output, binary_data=False)]
        found = client.infer(model, inputs, outputs=outputs, request_id="9", **options)
        response = found.get_response()
        assert (response["id"] if isinstance(response, dict) else response.id) == "9"
        return found.as_numpy(output)

    for binary in (True, False) if over_http else (True,):
        score = infer("mmoe_small", "tower_1/out/Sigmoid", binary, x=known["x"])
        np.testing.assert_allclose(score, known["score"], rtol=1e-5)
    price = infer("words", "output_0", city=city, amount=known["amount"])
    np.testing.assert_allclose(price, known["price"], rtol=1e-5)
    for model, arrays, code in (
        ("nobody", {"x": known["x"]}, "NOT_FOUND"),
        ("mmoe_small", {"x": known["x"][:, :5]}, "INVALID_ARGUMENT"),
        ("mmoe_small", {"y": known["x"]}, "INVALID_ARGUMENT"),
    ):
        try:
            infer(model, "tower_1/out/Sigmoid", **arrays)
            status = "it was answered"
        except InferenceServerException as problem:
            status = problem.status()
        assert (CODES[code] if over_http else code) in status, (model, list(arrays), status)


def messages_agree() -> None:
    """All that our messages have, Triton's have under the same numbers and types. It has more, of its own."""
    from google.protobuf import descriptor_pb2, descriptor_pool
    from tritonclient.grpc import service_pb2

    pool = descriptor_pool.DescriptorPool()
    files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(MESSAGES.read_bytes()).file}
    pool.Add(files["inference.proto"])
    left: list[tuple[Any, Any]] = [
        (message, service_pb2.DESCRIPTOR.message_types_by_name[name])
        for name, message in pool.FindFileByName("inference.proto").message_types_by_name.items()
    ]
    count = len(left)
    while left:
        ours, theirs = left.pop()
        for field in ours.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), (
                field.full_name
            )
            if field.message_type and not ours.GetOptions().map_entry and field.message_type.containing_type is ours:
                left.append((field.message_type, other.message_type))
    assert count == 21, count


if __name__ == "__main__":
    {"answer": answer, "ask": ask}[sys.argv[1]](*sys.argv[2:])
