"""What a server has, and changes of it: TensorFlow Serving's `ModelService`, and the repository of KServe's protocol."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from msplit.serving.server import messages
from msplit.serving.server.models import VersionState
from msplit.serving.server.service import RequestContext, version_of
from msplit.serving.server.tensors import Refusal, StatusCode, invalid

_FAILED = 9
"""FAILED_PRECONDITION among TensorFlow's codes of errors."""


def serving_status(context: RequestContext, request: Any) -> Any:
    """`GetModelStatus`."""
    spec, choice = request.model_spec, request.model_spec.WhichOneof("version_choice")
    states = context.service.models.states(spec.name)
    if not states:
        raise Refusal(StatusCode.NOT_FOUND, f"Could not find any versions of model {spec.name}")
    if choice is not None:
        asked = spec.version.value if choice == "version" else version_of(context, spec).number
        if asked not in states:
            raise Refusal(StatusCode.NOT_FOUND, f"Could not find version {asked} of model {spec.name}")
        states = {asked: states[asked]}
    response = messages.GetModelStatusResponse()
    for number, found in states.items():
        status = response.model_version_status.add()
        status.version, status.state = number, found.state
        status.status.error_code = _FAILED if found.why else 0
        status.status.error_message = found.why
    return response


def _change(context: RequestContext, kind: str, what: Any, response: Any) -> Future[Any]:
    """Changes what is served. The future gives the response.

    Raises:
        Refusal: Nothing can be changed.
    """
    control = context.service.models.control
    if control is None:
        raise Refusal(StatusCode.UNIMPLEMENTED, "the models of this server stay as they are")
    return control(kind, what, response)


def serving_reload(context: RequestContext, request: Any) -> Future[Any]:
    """`HandleReloadConfigRequest`: answered when the models are ready."""
    return _change(context, "reload", request.config, messages.ReloadConfigResponse())


_INDEXED = {VersionState.AVAILABLE: "READY", VersionState.LOADING: "LOADING", VersionState.UNLOADING: "UNLOADING"}
"""Triton's names of states. All others are UNAVAILABLE."""


def open_index(context: RequestContext, request: Any) -> Any:
    """`RepositoryIndex`: the versions of all models."""
    models = context.service.models
    response = messages.RepositoryIndexResponse()
    for name in sorted({*models.versions, *models.statuses}):
        for number, found in models.states(name).items():
            if found.state is VersionState.AVAILABLE or not request.ready:
                state = _INDEXED.get(found.state, "UNAVAILABLE")
                reason = found.why or ("unloaded" if found.state is VersionState.END else "")
                response.models.add(name=name, version=str(number), state=state, reason=reason)
    return response


def open_load(context: RequestContext, request: Any) -> Future[Any]:
    """`RepositoryModelLoad`: answered when its versions are ready."""
    if request.parameters:
        raise invalid(f"parameter {next(iter(request.parameters))} is not taken: models are loaded as they are")
    return _change(context, "load", request.model_name, messages.RepositoryModelLoadResponse())


def open_unload(context: RequestContext, request: Any) -> Future[Any]:
    """`RepositoryModelUnload`: answered when no more requests are taken for it; those in flight are answered."""
    return _change(context, "unload", request.model_name, messages.RepositoryModelUnloadResponse())
