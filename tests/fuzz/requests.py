"""Requests that are damaged, contradict themselves, or ask for what there is not: over gRPC as TensorFlow Serving and Triton have it, and
in JSON over HTTP.

Whatever comes, the answer is right, by a reader of its own, or it is a clean error: the client's, in one line, of nothing that only who
runs the server can change. A request that nobody changed is always answered. Afterwards the server still answers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from msplit.formats.tensors import tensor_value
from msplit.inputs.examples import encode
from tests.fuzz.case import Result

PREDICT, INFER = "/tensorflow.serving.PredictionService/Predict", "/inference.GRPCInferenceService/ModelInfer"
V1, V2 = "/v1/models/all:predict", "/v2/models/all/infer"
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "x": ("float32", (3,)), "d": ("float64", ()), "h": ("float16", (2,)), "k": ("int64", ()), "i": ("int8", (2,)), "u": ("uint8", (2,)),
    "b": ("bool", (2,)), "s": ("object", ()),
}  # fmt: skip
"""Inputs of the model: type, and shape of a row."""
TEXT = ("d", "x", "k", "i", "u", "b", "s", "h")
BATCHES = (1, 4)
OPERATORS = re.compile(
    r"--|\breport\b|\bbug\b|internal|Traceback|max_batch|max_queue|max_message|\.astype|msplit (build|serve|bench)"
)
"""What no client is told."""
CLIENTS = {3, 5, 8, 12, 400, 404, 413, 429, 501}
"""Statuses that are a client's fault, of gRPC and of HTTP."""


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        name: Says how to make it again.
        path: Of the method.
        valid: Whether nothing was changed.
    """

    name: str
    path: str
    data: bytes
    valid: bool


def step(feeds: Any) -> dict[str, Any]:
    """The model."""
    with np.errstate(all="ignore"):
        numbers = {f"{name}1": feeds[name] + feeds[name].dtype.type(1) for name in ("x", "d", "h", "k", "i", "u")}
    strings = np.array([value[::-1] for value in feeds["s"]], object).reshape(feeds["s"].shape)
    return {**numbers, "b1": ~feeds["b"], "s1": strings}


@cache
def service() -> Any:
    """A server's inside, for as long as the process lasts."""
    from msplit.serving.pool.pool import About, Pool
    from msplit.serving.pool.ports import Port, Ports
    from msplit.serving.pool.settings import PoolSettings
    from msplit.serving.pool.slots import SimulatedSlot, StepSlot
    from msplit.serving.server.metrics import Metrics
    from msplit.serving.server.models import Models, Version, signature_of
    from msplit.serving.server.service import Service

    dtypes = {name: np.dtype(dtype) for name, (dtype, _) in SHAPES.items()}
    shapes = {rows: {name: (rows, *shape) for name, (_, shape) in SHAPES.items()} for rows in BATCHES}
    outputs = {f"{name}1": Port(dtype, (None, *shape)) for name, (dtype, shape) in SHAPES.items()}
    ports = Ports(dtypes, shapes, (dict.fromkeys(SHAPES, 1), dict.fromkeys(outputs, 1)))
    slot = SimulatedSlot(StepSlot(dict.fromkeys(BATCHES, step), ports))
    pool = Pool(ports, [(0, slot)], PoolSettings(groups=1), About("all", outputs, (), (), {}))
    only = signature_of(pool, None)
    models = Models({"all": {1: Version("all", 1, {only.name: only})}})
    return Service(models, Metrics(models))


# --- Requests


def _values(random: Random) -> dict[str, Any]:
    rows = random.choice([1, 1, 2, 3, 4])
    made = {}
    for name, (dtype, shape) in SHAPES.items():
        size = (rows, *shape)
        count = int(np.prod(size))
        if dtype == "object":
            strings = [random.choice([b"", b"a", "é".encode(), b"x" * 200, b"\0a\0"]) for _ in range(count)]
            made[name] = np.array(strings, object).reshape(size)
        elif dtype == "bool":
            made[name] = np.array([random.random() < 0.5 for _ in range(count)]).reshape(size)
        else:
            whole = dtype[0] in "iu"
            low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if whole else (-1000, 1000)
            picked = [random.choice([0, 1, low, high, random.randint(low, high)]) for _ in range(count)]
            made[name] = np.array(picked, dtype).reshape(size)
    return made


_ODD = [
    b"",
    b"\0",
    b"\x80" * 11,
    b"\xff",
    b"\x2a\x00" * 400,
    b"\x42\x00" * 400,
    b"\x12\x00" * 300,
    b"\x0b",
    b"\x1a\x01y",
]


def damaged(data: bytes, random: Random) -> bytes:
    """The same with a change of its bytes."""
    at, other = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    if (kind := random.random()) < 0.4:
        return data[:at] + bytes([random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])]) + data[at + 1 :]
    if kind < 0.5:
        return data[:at]
    if kind < 0.65:
        return data[:at] + data[other:]
    if kind < 0.8:
        return data[:other] + data[at:]
    return data[:at] + random.choice(_ODD) + data[at:]


def _predict(random: Random, changes: int) -> bytes:
    from msplit.serving.server import messages, tensors

    request = messages.PredictRequest()
    request.model_spec.name = "all"
    for name, value in _values(random).items():
        tensors.to_tensor_proto(value, request.inputs[name], as_content=random.random() < 0.3 and name != "s")
    extra = b""
    for _ in range(changes):
        name = random.choice(TEXT)
        proto, kind = request.inputs[name], random.randrange(8)
        if kind == 0:
            proto.dtype = random.choice([*range(24), 101, 999])
        elif kind == 1 and proto.tensor_shape.dim:
            random.choice(proto.tensor_shape.dim).size = random.choice([-1, 0, 1, 2, 5, 1 << 40, 1 << 62])
        elif kind == 2:
            proto.tensor_shape.dim.add().size = random.choice([0, 1, 2, 1 << 62])
        elif kind == 3:
            proto.int_val.extend(random.choice([[300], [-1], [1] * 5, [1 << 30]]))
        elif kind == 4:
            proto.float_val.append(random.choice([1.0, float("nan")]))
        elif kind == 5:
            other = messages.PredictRequest()
            other.inputs[random.choice([name, f"{name}:0"])].CopyFrom(proto)
            extra += other.SerializeToString()
        elif kind == 6:
            del request.inputs[name]
        else:
            request.output_filter.append(random.choice(["x1", "x1:0", "nothing", "s1"]))
    return bytes(request.SerializeToString()) + extra


_OPEN = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "int8": "INT8", "uint8": "UINT8"}
_OPEN |= {"bool": "BOOL", "object": "BYTES"}
_CONTENTS = {
    "FP32": "fp32",
    "FP64": "fp64",
    "INT64": "int64",
    "INT8": "int",
    "UINT8": "uint",
    "BOOL": "bool",
    "BYTES": "bytes",
}


def _infer(random: Random, changes: int) -> bytes:
    from msplit.serving.server import messages, tensors

    request, packed = messages.ModelInferRequest(model_name="all"), random.random() < 0.5
    values = _values(random)
    for name, value in values.items():
        datatype = _OPEN[SHAPES[name][0]]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=value.shape)
        if packed or changes == 0:
            request.raw_input_contents.append(b"".join(tensors.raw_content(value)))
        elif datatype in _CONTENTS:
            getattr(tensor.contents, f"{_CONTENTS[datatype]}_contents").extend(value.ravel().tolist())
    for _ in range(changes):
        tensor, kind = random.choice(request.inputs), random.randrange(8)
        if kind == 0:
            tensor.datatype = random.choice([*_OPEN.values(), "FP128", ""])
        elif kind == 1:
            tensor.shape.append(random.choice([-1, 0, 1, 2, 1 << 62]))
        elif kind == 2:
            tensor.name = random.choice([*TEXT, "x:0", "", "\n::error::"])
        elif kind == 3:
            tensor.contents.int_contents.append(random.choice([300, -129, 2, 1 << 30]))
        elif kind == 4:
            request.raw_input_contents.append(random.choice([b"", bytes(8), b"\2" * 8, b"\xff\xff\xff\x7fa"]))
        elif kind == 5:
            request.parameters[random.choice(["priority", "timeout", "signature_name", "other"])].string_param = "x"
        elif kind == 6:
            request.outputs.add(name=random.choice(["x1", "x1:0", "nothing"]))
        else:
            request.inputs.add().CopyFrom(tensor)
    return bytes(request.SerializeToString())


_ODD_VALUES: list[Any] = [
    None,
    True,
    2,
    300,
    -1,
    1.5,
    1e39,
    10**400,
    1 << 63,
    "a",
    [],
    [1, [2]],
    {},
    {"b64": "eA=="},
    {"b64": "!"},
]
_ODD_TEXTS = [
    "NaN",
    "Infinity",
    "1e999",
    "1" * 5000,
    '"\\ud800"',
    "[" * 300,
    '{"x": 1, "x": 2}',
    "[1,]",
    "[,1]",
    " " * 300,
]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    def text(value: bytes) -> Any:
        return {"b64": base64.b64encode(value).decode()} if len(value) % 3 else value.decode()

    return {
        name: [text(one) for one in value.tolist()] if name == "s" else value.tolist() for name, value in values.items()
    }


def _json(random: Random, changes: int, path: str) -> bytes:
    columns = _plain(_values(random))
    if path == V2:
        shapes = {name: np.shape(value)[: 1 + len(SHAPES[name][1])] for name, value in columns.items()}
        document: Any = {
            "inputs": [
                {"name": name, "datatype": _OPEN[SHAPES[name][0]], "shape": list(shapes[name]), "data": value}
                for name, value in columns.items()
            ]
        }
    elif random.random() < 0.5:
        document = {"instances": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}
    else:
        document = {"inputs": columns}
    for _ in range(changes):
        place = document
        while isinstance(place, dict | list) and len(place):
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = random.choice(list(keys))
            if not isinstance(place[key], dict | list) or random.random() < 0.2:
                place[key] = deepcopy(random.choice([*_ODD_VALUES, *_plain(_values(random)).values()]))
                if isinstance(place, dict) and random.random() < 0.3:
                    place[f"{key}:0"] = place[key]
                break
            place = place[key]
    data = json.dumps(document)
    if changes and random.random() < 0.4:
        numbers = [found.span() for found in re.finditer(r"-?\d+(\.\d+)?", data)]
        start, end = random.choice(numbers or [(0, 1)])
        data = data[:start] + random.choice(_ODD_TEXTS) + data[end:]
    return data.encode()


def make(seed: int) -> Case:
    """A request, changed in what it says, in its bytes, in both, or not at all."""
    random = Random(f"requests:{seed}")
    path = random.choice([PREDICT, INFER, V1, V2])
    valid = random.random() < 0.1
    changes = 0 if valid else random.choice([0, 1, 1, 2, 4])
    if path == PREDICT:
        data = _predict(random, changes)
    else:
        data = _infer(random, changes) if path == INFER else _json(random, changes, path)
    for _ in range(0 if valid else random.choice([0, 0, 1, 2, 5]) if changes else 1):
        data = damaged(data, random)
    return Case(f"requests:{seed}", path, data, valid)


# --- Answers


def _ask(path: str, data: bytes) -> tuple[int, bytes]:
    from msplit.serving.server import rest
    from tests.serving.server.asking import answer

    if path in (PREDICT, INFER):
        return asyncio.run(answer(service(), path, data, 20.0))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope["headers"] = []
    asyncio.run(rest.app(service(), 1 << 20)({**scope, "http_version": "1.1", "root_path": ""}, receive, send))
    status: int = sent[0]["status"]
    return (0 if status == 200 else status), sent[1]["body"]


def _string(value: Any) -> bytes:
    if not isinstance(value, dict):
        return str(value).encode("utf-8", "surrogatepass")
    if value.keys() == {"b64"}:
        return base64.b64decode(value["b64"])
    return encode({name: _feature(one if isinstance(one, list) else [one]) for name, one in value.items()})


def _feature(values: list[Any]) -> list[Any]:
    """The values of a feature of a tf.Example."""
    if any(isinstance(one, str | dict) for one in values):
        return [_string(one) for one in values]
    return [float(one) for one in values] if any(isinstance(one, Decimal | float) for one in values) else values


def _meant(path: str, data: bytes) -> dict[str, Any]:
    """What a request that was answered means, read in another way: by protobuf's and Python's own readers."""
    from msplit.serving.server import messages

    found = {}
    if path == PREDICT:
        for key, proto in messages.PredictRequest.FromString(data).inputs.items():
            found[key.removesuffix(":0")] = tensor_value(proto).load()
    elif path == INFER:
        request = messages.ModelInferRequest.FromString(data)
        for number, tensor in enumerate(request.inputs):
            name = tensor.name.removesuffix(":0")
            dtype = np.dtype(SHAPES[name][0])
            raw = request.raw_input_contents[number] if request.raw_input_contents else None
            if raw is None:
                values = [one for _, field in tensor.contents.ListFields() for one in field]
            elif not dtype.hasobject:
                values = np.frombuffer(raw, dtype).tolist()
            else:
                values = []
                while raw:
                    size = int.from_bytes(raw[:4], "little")
                    values.append(raw[4 : 4 + size])
                    raw = raw[4 + size :]
            found[name] = np.array(values, dtype).reshape(list(tensor.shape))
    else:
        document = json.loads(data, parse_float=Decimal)
        if "instances" in document:
            named = {name: [row[name] for row in document["instances"]] for name in document["instances"][0]}
        elif path == V1:
            named = document["inputs"]
        else:
            named = {one["name"]: one["data"] for one in document["inputs"]}
        for key, value in named.items():
            name = key.removesuffix(":0")
            dtype, shape = SHAPES[name]
            flat = np.array(value, object).ravel().tolist()
            if dtype == "object":
                flat = [_string(one) for one in flat]
            with np.errstate(over="ignore"):
                found[name] = np.array(flat, dtype).reshape(-1, *shape)
            if dtype[0] == "f" and any(
                isinstance(flat[at], int | Decimal) for at in np.flatnonzero(np.isinf(found[name]))
            ):
                raise AssertionError(f"input {name} has a number that became infinite")
    return found


def _given(path: str, said: bytes) -> dict[str, Any]:
    from msplit.serving.server import decode, messages

    if path == PREDICT:
        response = messages.PredictResponse.FromString(said)
        return {name: decode.array_of(proto, name) for name, proto in response.outputs.items()}
    if path == INFER:
        inferred = messages.ModelInferResponse.FromString(said)
        pairs = zip(inferred.outputs, inferred.raw_output_contents, strict=True)
        return {one.name: decode.array_of_infer(one, raw) for one, raw in pairs}
    document = json.loads(said)
    if path == V2:
        named = {one["name"]: one["data"] for one in document["outputs"]}
    elif "outputs" in document:
        named = document["outputs"]
    else:
        named = {name: [row[name] for row in document["predictions"]] for name in document["predictions"][0]}
    found = {}
    for name, value in named.items():
        dtype, shape = SHAPES[name[0]]
        flat = np.array(value, object).ravel().tolist()
        if dtype == "object":
            flat = [_string(one) for one in flat]
        found[name] = np.array(flat, dtype).reshape(-1, *shape)
    return found


def _wrong(case: Case) -> str:
    status, said = _ask(case.path, case.data)
    if status:
        text = said.decode() if case.path in (PREDICT, INFER) else json.loads(said)["error"]
        if case.valid:
            return f"a request that nobody changed is refused: {status} {text}"
        if status not in CLIENTS:
            return f"status {status}: {text}"
        if OPERATORS.search(text) or len(text) > 1000 or not text or not text.isprintable():
            return f"a client is told: {text!r}"
        return ""
    found = _given(case.path, said)
    wanted = step(_meant(case.path, case.data))
    for name, value in found.items():
        key = name.removesuffix(":0")
        if not np.array_equal(value, wanted[key], equal_nan=value.dtype.kind == "f"):
            return f"output {name} is {value.tolist()}, and not {wanted[key].tolist()}"
    return "" if found else "an answer without outputs"


def run(case: Case, folder: Path) -> Result:
    """Asks, and then asks what nobody changed."""
    del folder
    service()
    start = time.process_time()
    try:
        problem = _wrong(case)
        seconds = time.process_time() - start
        after = next(one for one in map(make, range(100)) if one.valid and one.path == case.path)
        if not problem and (later := _wrong(after)):
            problem = f"afterwards: {later}"
    except Exception as failed:  # whatever it is, it is a finding
        return Result(f"{type(failed).__name__}: {failed}")
    return Result(problem or ("" if seconds < 1 else f"it took {seconds:.1f} s"), (), seconds)
