"""A pool of msplit in each replica of Ray Serve: Ray places replicas on GPUs and hosts, starts them anew and counts them up and down.

    pip install 'ray[serve]' tensorflow-serving-api
    python docs/examples/ray_serve.py model.build [--replicas 2] [--groups 8] [--device cpu]

A replica answers HTTP (`{"inputs": {name: values}}`, as TensorFlow Serving's REST in columns), TensorFlow Serving's gRPC clients (they add
the metadata `application: msplit`) and calls from Python (`handle.predict.remote(feeds)`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from ray import serve
from starlette.responses import JSONResponse

from msplit.errors import Busy, Closed, MsplitError, TimedOut

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext
    from starlette.requests import Request
    from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse

APPLICATION = "msplit"
SERVICER = "tensorflow_serving.apis.prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server"


@serve.deployment(max_ongoing_requests=1024)  # what waits here can share a step; what waits in Ray can not
class Model:
    """One pool, which is ready before the replica takes requests."""

    def __init__(self, source: str, groups: int = 4, device: str = "cuda") -> None:
        import msplit

        engine = {"engine": "cuda", "device": "cpu"} if device == "cpu" else {}
        self.pool = msplit.pool(source, **engine, groups=groups, max_queue=4096)

    async def predict(self, feeds: dict[str, Any], timeout: float | None = None) -> dict[str, np.ndarray]:
        """Outputs by name. While the GPU works, the replica takes other requests."""
        arrays = {name: np.asarray(feeds[name], port.dtype) for name, port in self.pool.inputs.items() if name in feeds}
        unknown = sorted(set(feeds) - set(arrays))
        if unknown:
            raise MsplitError(f"there is no input {unknown[0]}", fix=f"send {', '.join(self.pool.inputs)}")
        return await asyncio.wrap_future(self.pool.submit(arrays, timeout=timeout))

    async def __call__(self, request: Request) -> JSONResponse:
        """HTTP."""
        try:
            outputs = await self.predict((await request.json())["inputs"])
        except (MsplitError, ValueError, TypeError, KeyError, AttributeError) as problem:
            return JSONResponse({"error": str(problem)}, status_for(problem))
        return JSONResponse({"outputs": {name: value.tolist() for name, value in outputs.items()}})

    async def Predict(self, request: PredictRequest, grpc_context: RayServegRPCContext) -> PredictResponse:
        """TensorFlow Serving's gRPC."""
        import tensorflow as tf
        from tensorflow_serving.apis.predict_pb2 import PredictResponse

        try:
            outputs = await self.predict({name: tf.make_ndarray(value) for name, value in request.inputs.items()})
        except (MsplitError, ValueError, TypeError) as problem:
            code = status_for(problem)
            grpc_context.set_code(
                grpc.StatusCode.UNAVAILABLE
                if code >= HTTPStatus.INTERNAL_SERVER_ERROR
                else grpc.StatusCode.INVALID_ARGUMENT
            )
            grpc_context.set_details(str(problem))
            return PredictResponse()
        response = PredictResponse(model_spec=request.model_spec)
        for name, value in outputs.items():
            response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
        return response

    def check_health(self) -> None:
        """Ray starts a replica anew where this raises."""
        self.pool.stats()

    def __del__(self) -> None:
        self.pool.close()


def status_for(problem: Exception) -> HTTPStatus:
    """What may be tried again, at another replica or later, is told from what is wrong with the request."""
    if isinstance(problem, Busy | Closed):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.GATEWAY_TIMEOUT if isinstance(problem, TimedOut) else HTTPStatus.BAD_REQUEST


def deploy(
    source: str, *, replicas: int = 1, groups: int = 4, device: str = "cuda", port: int = 8000, grpc_port: int = 9000
) -> Any:
    """Serves a build or a model on the cluster that `ray.init` knows, and returns when it is ready.

    Args:
        source: Where it is, on every host.
        replicas: Each has a GPU of its own, unless the device is ``cpu``.
        groups: Steps in flight of each of them.
        device: ``cpu`` simulates streams.
        port: Of HTTP.
        grpc_port: Of gRPC.

    Returns:
        A handle for calls from Python.
    """
    from ray.serve.config import gRPCOptions

    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER]),
    )
    actor = {"num_cpus": 1, "num_gpus": 0 if device == "cpu" else 1}
    model = Model.options(num_replicas=replicas, ray_actor_options=actor)
    return serve.run(model.bind(os.path.abspath(source), groups, device), name=APPLICATION, route_prefix="/predict")


def main() -> None:
    """Serves until it is interrupted."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = vars(parser.parse_args())
    ray.init()
    deploy(**given)
    print("http://127.0.0.1:8000/predict, and gRPC on port 9000. Ctrl-C ends it.")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
