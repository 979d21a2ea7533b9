"""Triton's own client asks a server of msplit's. Run by .ci/clients, in two environments:

python triton_client.py answer FILE.npz          where TensorFlow is: inputs, and what TensorFlow answers
python triton_client.py ask MSPLIT FILE.npz      where tritonclient is: the server's answers are those
"""

from __future__ import annotations

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
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    with np.load(file) as saved:
        known = dict(saved)
    ends = np.cumsum(known["lengths"])
    text = known["city"].tobytes()
    city = np.array([text[end - size : end] for end, size in zip(ends, known["lengths"], strict=True)], object)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
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
        "0",
    ]
    command = [msplit, "serve", SAMPLES / "mmoe_small.pb", "--model", f"words={SAMPLES / 'keras_lookup'}", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            print(line, end="")
            if line.startswith("ready:"):
                break
        client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("words", "1")
        assert client.get_server_metadata().name == "msplit"
        said = {one.name: (one.datatype, list(one.shape)) for one in client.get_model_metadata("words").inputs}
        assert said == {"amount": ("FP32", [-1, 4]), "city": ("BYTES", [-1])}, said

        def infer(model: str, output: str, **arrays: np.ndarray) -> np.ndarray:
            inputs = []
            for name, array in arrays.items():
                kind = "BYTES" if array.dtype == object else "FP32"
                inputs.append(grpc.InferInput(name, array.shape, kind))
                inputs[-1].set_data_from_numpy(array)
            found = client.infer(model, inputs, outputs=[grpc.InferRequestedOutput(output)], request_id="9")
            assert found.get_response().id == "9"
            return found.as_numpy(output)

        np.testing.assert_allclose(infer("mmoe_small", "tower_1/out/Sigmoid", x=known["x"]), known["score"], rtol=1e-5)
        np.testing.assert_allclose(
            infer("words", "output_0", city=city, amount=known["amount"]), known["price"], rtol=1e-5
        )
        for model, arrays, said in (
            ("nobody", {"x": known["x"]}, "NOT_FOUND"),
            ("mmoe_small", {"x": known["x"][:, :5]}, "INVALID_ARGUMENT"),
            ("mmoe_small", {"y": known["x"]}, "INVALID_ARGUMENT"),
        ):
            try:
                infer(model, "tower_1/out/Sigmoid", **arrays)
                status = "it was answered"
            except InferenceServerException as problem:
                status = problem.status()
            assert said in status, (model, list(arrays), status)
    finally:
        server.terminate()
        assert server.wait(60) == 0
    messages_agree()
    print("Triton's client got TensorFlow's answers")


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
    assert count == 14, count


if __name__ == "__main__":
    {"answer": answer, "ask": ask}[sys.argv[1]](*sys.argv[2:])
