"""Commands that put a model into service: `serve`, `export` and `worker`.

`msplit serve`: models behind the protocols of TensorFlow Serving and Triton.

`msplit export`: a model for other servers.

`msplit worker`: a process of a cluster.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit import escape
from msplit.cli import options, output
from msplit.cli.engine_options import PLACE, WHAT, PoolOptions, SharedEngine, notes, with_flags
from msplit.cli.keys import key, option, together
from msplit.cli.output import say
from msplit.progress import telling

if TYPE_CHECKING:
    from msplit.serving.pool.settings import PoolSettings
    from msplit.serving.server.config import ModelConfig
    from msplit.serving.server.listening import Listening
    from msplit.serving.server.models import Models


_PORT = click.IntRange(0, 65535)


def _switch(default: bool) -> dict[str, Any]:
    """A flag of TensorFlow Serving, which takes a value, too."""
    return {"default": default, "is_flag": False, "flag_value": "true", "type": click.BOOL, "hidden": True}


def _named(text: str) -> tuple[str, Path]:
    """Name and path of `name=path`."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(f"{text!r}: write it as NAME=PATH")
    return name, Path(path)


@dataclass(frozen=True)
class Served:
    """Which models, as they are named."""

    models: Sequence[Path]
    named: Sequence[tuple[str, Path]] = option(
        "--model",
        multiple=True,
        type=options.Parsed("name=path", _named),
        help="A model, or a folder of versions, by name. Repeatable.",
    )
    model_name: str | None = option(hidden=True, help="Name of the one model that is given; see --model.")
    model_base_path: Path | None = option(hidden=True, help="The same as MODELS.")
    model_config_file: Path | None = option(help="Models in TensorFlow Serving's text format.")
    file_system_poll_wait_seconds: float = option(
        default=1.0, type=click.FloatRange(0), hidden=True, help="Seconds between two looks for new versions; 0: none."
    )
    model_config_file_poll_wait_seconds: float = option(
        default=0.0, type=click.FloatRange(0), hidden=True, help="Seconds between two readings of that file; 0: one."
    )
    signatures: Sequence[str] = key(
        "--part",
        "Signatures to serve, or all (none: serving_default, or the only one). Each has weights of its own.",
        options.NAMES,
        (),
        name="signature",
    )
    tags: Sequence[str] | None = key("--part", options.TAG, options.NAMES, name="tag")
    saved_model_tags: Sequence[str] | None = option(type=options.NAMES, hidden=True, help="The same as --part tag=.")

    def configs(self) -> tuple[ModelConfig, ...]:
        """All of them; where none is named, the one of `MODEL_NAME` and `MODEL_BASE_PATH` in the environment.

        Raises:
            UsageError: There are none, or a name is for several.
        """
        from msplit.serving.server.config import ModelConfig, read_models

        paths = [*self.models, *([self.model_base_path] if self.model_base_path is not None else ())]
        if self.model_name is not None and len(paths) != 1:
            raise click.UsageError("--model-name is for one model: name several with --model NAME=PATH")
        found = [ModelConfig(self.model_name or _name(path), path) for path in paths]
        found += [ModelConfig(name, path) for name, path in self.named]
        found += read_models(self.model_config_file) if self.model_config_file is not None else ()
        if not found and (name := os.environ.get("MODEL_NAME")):  # as in TensorFlow Serving's image
            found = [ModelConfig(name, Path(os.environ.get("MODEL_BASE_PATH", "/models")) / name)]
        if not found:
            raise click.UsageError("Nothing to serve: give a model, --model NAME=PATH or --model-config-file.")
        return tuple(found)


def _name(path: Path) -> str:
    """What a model is called that nobody gave a name."""
    whole = path.resolve()
    return (whole.stem if whole.is_file() else whole.name) or "model"


@dataclass(frozen=True)
class Batching:
    """What TensorFlow Serving says of it."""

    enable_batching: bool = option(**_switch(True), help="As in TensorFlow Serving; true is all that it can be.")
    batching_parameters_file: Path | None = option(hidden=True, help="TensorFlow Serving's, in place of the above.")

    def settings(self, given: PoolSettings) -> PoolSettings:
        """Of every pool, given what other options say."""
        from msplit.serving.server.config import read_batching

        if not self.enable_batching:
            fix = "leave the option out, or serve steps of one size with --batch"
            raise click.UsageError(f"Requests share steps where a model's rows are independent: {fix}.")
        return given if self.batching_parameters_file is None else read_batching(self.batching_parameters_file, given)


def _settings(text: str) -> tuple[tuple[str, int | str], ...]:
    """Settings of gRPC, as in `grpc.max_connection_age_ms=2000,…`."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [name for name, equals, _ in pairs if not (name and equals)]:
        raise ValueError(f"{wrong[0]!r}: write it as NAME=VALUE")
    return tuple((name, int(value) if re.fullmatch(r"-?\d{1,9}", value) else value) for name, _, value in pairs)


@dataclass(frozen=True)
class Doors:
    """Where it listens."""

    host: str = option(default="127.0.0.1", help="Address to listen on.")
    port: int = option(default=8500, type=_PORT, help="Of gRPC; 0: none.")
    rest_api_port: int = option(default=8501, type=_PORT, help="Of HTTP; 0: none.")
    timeout: float | None = option(
        type=click.FloatRange(0, min_open=True), help="Seconds that a request without a deadline waits."
    )
    lame_duck: float = option(
        default=0.0, type=click.FloatRange(0), help="Seconds that it goes on answering, but not ready, after SIGTERM."
    )
    grace: float = option(
        default=10.0, type=click.FloatRange(0), help="Seconds that requests in flight have after that."
    )
    max_message_mib: int = option(default=64, type=click.IntRange(1, 2047), help="Size of the largest request.")
    enable_serialization_as_tensor_content: bool = option(
        **_switch(False), help="Answer in tensor_content, not in float_val and its kin."
    )
    ssl_config_file: Path | None = option(hidden=True, help="TLS on both ports, by TensorFlow Serving's SSLConfig.")
    token_file: Path | None = option(help="Bearer tokens, one on each line, of which a request needs one.")
    grpc_channel_arguments: Sequence[tuple[str, int | str]] = option(
        type=options.Parsed("name=value,…", _settings), default=(), hidden=True, help="Further settings of gRPC."
    )
    log_format: str = key("--log", "Form of a line.", click.Choice(["text", "json"]), "text", name="format")
    access_log: float = key(
        "--log", "Share of the requests that are logged.", click.FloatRange(0, 1), 0.0, name="access"
    )

    fronts: int = key("--pool", "Processes that take requests; from 2 on, others run steps.", click.IntRange(1, 64), 1)

    def listening(self) -> Listening:
        """The same for the server.

        Raises:
            UsageError: It would listen nowhere.
            MsplitError: A file of tokens or certificates is of no use.
        """
        from msplit.serving.server import access
        from msplit.serving.server.listening import Listening

        if not self.port and not self.rest_api_port:
            raise click.UsageError("Both ports are 0: nobody could ask.")
        return Listening(
            host=self.host,
            port=self.port,
            rest_port=self.rest_api_port,
            most=self.max_message_mib << 20,
            lame_duck=self.lame_duck,
            grace=self.grace,
            as_content=self.enable_serialization_as_tensor_content,
            timeout=self.timeout,
            access=self.access_log,
            tokens=None if self.token_file is None else access.Tokens(self.token_file),
            certificates=None if self.ssl_config_file is None else access.Certificates(self.ssl_config_file),
            channel=self.grpc_channel_arguments,
            fronts=self.fronts,
        )


# TensorFlow Serving writes `--rest_api_port`.
@with_flags
@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("models", nargs=-1, type=options.PATH)
@together
def command(served: Served, engine: SharedEngine, pooling: PoolOptions, batching: Batching, doors: Doors) -> None:
    """Answer requests for MODELS (models, builds, or folders of versions) until SIGTERM: over gRPC as TensorFlow Serving and as Triton do
    (KServe V2), over HTTP, with health checks and metrics for Prometheus.

    Options go by TensorFlow Serving's names, too, such as --rest_api_port. This executes the models.
    """
    _require()
    from msplit.serving.server import logs, making, run, versions

    as_json = doors.log_format == "json"
    where = doors.listening()
    configs, settings, request = served.configs(), batching.settings(pooling.settings()), engine.request()
    if doors.fronts > 1:
        settings = replace(settings, workers=settings.workers or 1)
    tags = served.saved_model_tags if served.tags is None else served.tags
    reread = 0.0 if served.model_config_file is None else served.model_config_file_poll_wait_seconds
    polling = versions.Polling(served.file_system_poll_wait_seconds, served.configs, reread)
    opener = making.opener(request, settings, tags=tags, signatures=served.signatures, polling=polling)
    # A client that asks before they are looked at hears that they are not ready.
    opener.models.opening = [config.name for config in configs]
    with (
        logs.logging_to(output.tell, as_json=as_json),
        run.held(where) as ports,
        closing(opener) as opened,
        run.answering(opened.models, where, ports) as server,
    ):
        for note in notes(click.get_current_context()):
            logs.LOG.info(note)
        logs.LOG.info("listening, not ready: models are being opened")
        with telling() as tell:
            opened.start(configs, tell)
        gc.freeze()  # to look through all of PyTorch for garbage takes 0.2 s, in which no request is answered; new versions bring some
        server.wait(lambda: _say(opened.models, where, logs.LOG.info if as_json else output.say))


def _require() -> None:
    from msplit.cli.doctor import lacking_to_serve
    from msplit.errors import INSTALL_SERVING, MsplitError

    missing = lacking_to_serve()
    if missing:
        raise MsplitError(f"serving takes what is not installed here: {', '.join(missing)}", fix=INSTALL_SERVING)
    # Else it writes a line, which is no JSON, for each client without TLS.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _say(models: Models, where: Listening, say: Callable[[str], None]) -> None:
    """Says what is served, and where."""
    for version in models:
        for signature in version.signatures.values():
            pool = signature.pool
            batches = f", batches {','.join(map(str, pool.batches))}" if pool.batches else ""
            batches += f", lengths {','.join(map(str, pool.lengths))}" if pool.lengths else ""
            say(
                f"{escape.visible(version.model)} version {version.number}, {escape.visible(signature.name)}: {pool.about.label}{batches}"
            )
            for note in pool.about.notes:
                (options.note if say is output.say else say)(f"note: {note}")
    doors = [
        f"{kind} on {where.host}:{port}" for kind, port in (("gRPC", where.port), ("HTTP", where.rest_port)) if port
    ]
    say(f"ready: {' and '.join(doors)}{'' if where.certificates is None else ', with TLS'}")


@click.command()
@click.argument("model", type=options.PATH)
@click.option(
    "--triton", type=options.PATH, required=True, help="Triton's model repository; it is made where there is none."
)
@click.option("--name", help="Of the model there (default: that of its file or folder).")
@click.option("--force", is_flag=True, help="Replace a model of this name.")
@together
def export_command(
    model: Path, triton: Path, name: str | None, pooling: PoolOptions, device: options.OnDevice, force: bool
) -> None:
    """Write MODEL, a build or a model, into a repository that Triton Inference Server serves with its Python backend.

    The folder holds a copy of MODEL, so that it can be moved. Nothing is executed.
    """
    from msplit.serving.triton import export

    made = export(model, triton, pooling.settings(), name=name, device=device.device, force=force)
    rows = f"up to {made.max_batch:,} rows" if made.max_batch else "of the model's own shapes"
    say(f"Written: {made.path}, for requests of {rows}.")
    say(f"Next: tritonserver --model-repository={triton}")


@click.command()
@click.option("--cluster", metavar=PLACE, help=WHAT)
@click.option("--job", help="Which job's task this is (default: TF_CONFIG's, or worker).")
@click.option("--task", type=click.IntRange(0), help="Which task of it, from 0 (default: TF_CONFIG's, or 0).")
@click.option(
    "--devices",
    default=1,
    show_default=True,
    type=options.STREAMS,
    help="CPU devices to offer, one for each stream. GPUs are offered as they are (CUDA_VISIBLE_DEVICES).",
)
@click.option(
    "--op-library", "op_libraries", multiple=True, type=options.PATH, help="Custom TensorFlow ops. Repeatable."
)
def worker_command(
    cluster: str | None, job: str | None, task: int | None, devices: int, op_libraries: Sequence[Path]
) -> None:
    """Be one process of a cluster, which `bench` and `train` with --tensorflow cluster= run graphs on, until SIGTERM.

    Whoever reaches its port can run anything here: have it on a network of your own. Without --cluster, TF_CONFIG says all.
    """
    from msplit.engines.tensorflow.cluster import serve
    from msplit.formats.cluster import TF_CONFIG, read

    if cluster is None and not os.environ.get(TF_CONFIG):
        raise click.UsageError("Which cluster? Give --cluster FILE, or set TF_CONFIG.")
    found = read(cluster or TF_CONFIG)
    if found.own is not None and job is None and task is None:
        own = found.own
    else:
        own = found.task(job or "worker", task or 0)

    def ready(names: Sequence[str]) -> None:
        output.say(f"ready: {own.name} on port {own.place[1]}, {', '.join(map(escape.visible, names))}")

    serve(found, own, devices=devices, op_libraries=op_libraries, ready=ready)
