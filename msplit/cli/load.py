"""`msplit load`: many requests at once, from another process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options, output
from msplit.cli.engine_options import PoolOptions, SharedEngine
from msplit.cli.keys import key, option, together
from msplit.progress import telling

if TYPE_CHECKING:
    from msplit.serving.loadtest.clients import ServerUnderTest
    from msplit.serving.loadtest.run import LoadSettings


def _rates(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Arrivals per second, and shares with a percent sign."""
    rates, shares = list[float](), list[float]()
    for part in text.split(","):
        share = part.strip().endswith("%")
        try:
            amount = float(part.strip().removesuffix("%"))
        except ValueError:
            amount = 0.0
        if not 0 < amount < float("inf"):
            raise ValueError(f"{text!r} is not a list of rates such as 1000,2000 or 70%")
        (shares if share else rates).append(amount / 100 if share else amount)
    return tuple(rates), tuple(shares)


def _mix(text: str) -> dict[int, float]:
    """Priorities and shares of `0:0.1,1:0.9`."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        mix = {int(priority): float(share) for priority, share in pairs}
    except ValueError:
        mix = {}
    if not mix or not all(0 <= priority <= 255 and 0 <= share < float("inf") for priority, share in mix.items()):
        raise ValueError(f"{text!r} is not a share for each priority, such as 0:0.1,1:0.9")
    return mix


@dataclass(frozen=True)
class Loaded:
    """How much is asked, and how it is measured."""

    clients: tuple[int, ...] = option(
        type=options.numbers(click.IntRange(1, 100_000)),
        default="1,2,4,8,16",
        help="Closed loop: how many clients send, each when it has its answer.",
    )
    rate: tuple[tuple[float, ...], tuple[float, ...]] = option(
        type=options.Parsed("n|n%,…", _rates),
        default=((), ()),
        help="Open loop: arrivals per second, by a Poisson process; 70% is of the most that the arm answered in the closed loop.",
    )
    seconds: float = key("--measure", "Seconds of measuring, per level.", click.FloatRange(0.01), 2.0)
    warmup: float = key("--measure", "Seconds before that.", click.FloatRange(0), 0.5)
    repeat: int = key("--measure", "How often all is measured.", click.IntRange(1), 3)
    most: int = key(
        "--measure",
        "End a run after so many requests, warm-up left out; 0: none.",
        click.IntRange(0),
        0,
        name="requests",
    )
    rows: int = key("--measure", "Rows of a request.", click.IntRange(1), 1)
    distinct: int = key("--measure", "Requests to prepare, all with other inputs.", click.IntRange(1), 64)
    mix: dict[int, float] | None = key(
        "--measure", "Share of requests by priority, such as 0:0.1,1:0.9.", options.Parsed("p:share,…", _mix)
    )
    timeout: float | None = key("--measure", "Seconds that a request may wait to be started.", click.FloatRange(0))


def _tried(what: str, most: int, name: str) -> Any:
    return key("--sweep", what, options.numbers(click.IntRange(1, most)), (), name=name)


@dataclass(frozen=True)
class Swept:
    """Settings of which every combination is measured; fields are those of `serving.loadtest.sweep.OPTIONS`."""

    try_rows: tuple[int, ...] = _tried("Rows of a request.", 1 << 20, "rows")
    try_max_batch: tuple[int, ...] = _tried("Most rows of a step.", 1 << 20, "max-batch")
    try_groups: tuple[int, ...] = _tried("Steps in flight at once.", 64, "groups")
    try_workers: tuple[int, ...] = _tried("Processes on each GPU.", 64, "workers")

    def values(self) -> dict[str, tuple[int, ...]]:
        """Those that are given, each value once."""
        return {name.removeprefix("try_"): tuple(dict.fromkeys(found)) for name, found in vars(self).items() if found}


@dataclass(frozen=True)
class Beside:
    """What TensorFlow is measured as."""

    beside: tuple[str, ...] = key(
        "--tensorflow",
        "What of it is measured beside the pool: sessions, merge, xla, batcher, none (auto: all, where it sees the GPU).",
        options.NAMES,
        ("auto",),
    )
    threads: int = key("--tensorflow", "Threads that call it.", click.IntRange(1, 1024), 16)
    config: Path | None = key("--tensorflow", "ConfigProto as text, for its sessions.")


@dataclass(frozen=True)
class Serving:
    """What answers in place of a pool."""

    address: str | None = key("--server", "HOST:PORT, which may be given alone.")
    model_name: str | None = key(
        "--server", "What the server calls the model (none: the file's or folder's name).", name="name"
    )
    protocol: str = key(
        "--server",
        "TensorFlow Serving's Predict, or ModelInfer as Triton has it.",
        click.Choice(["tensorflow", "kserve"]),
        "tensorflow",
    )
    processes: int = key("--server", "Clients of the server.", click.IntRange(1, 32), 4)
    authorities: Path | None = key("--server", "Ask it over TLS: certificates (PEM) that sign the server's.", name="ca")
    certificate: Path | None = key("--server", "Certificate (PEM) of the clients, for TLS.", name="cert")
    private_key: Path | None = key("--server", "Key (PEM) of that certificate.", name="key")
    token_file: Path | None = key("--server", "File with the bearer token of each request.", name="token-file")


@click.command()
@options.model_argument
@click.argument("further", nargs=-1, metavar="[…]")
@click.option("--html", type=options.PATH, help="Write tables and curves as one HTML file.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--multistream",
    is_flag=True,
    help="Arguments are those of NVIDIA's multistream_inference: MODEL N_IN IN… N_OUT OUT… BATCH ITERS THREADS [CONFIG].",
)
@options.format_of("csv", " csv: a row per target and level.")
@together
def command(
    model: Path,
    choice: options.Choice,
    load: Loaded,
    engine: SharedEngine,
    pooling: PoolOptions,
    beside: Beside,
    serving: Serving,
    swept: Swept,
    **rest: Any,
) -> int:
    """Send requests to a pool of MODEL from another process, check every answer, and measure latency over throughput.

    MODEL may be a build. This executes the model.
    """
    from msplit import formats
    from msplit.formats import build as files
    from msplit.formats.atomic import check_target
    from msplit.report import load as report
    from msplit.serving.loadtest import run, sweep

    settings = run.LoadSettings(**_settings(load, beside))
    if rest["multistream"]:
        choice, settings = _as_multistream(choice, settings, rest["further"])
    elif rest["further"]:
        raise click.UsageError(f"{rest['further'][0]!r} is too much: --multistream takes arguments behind MODEL.")
    html: Path | None = rest["html"]
    if html is not None:
        check_target(html, force=rest["force"])
    loaded = model if files.is_build(model) else choice.load(model)
    with telling() as tell:
        server = _server(serving, model)
        how: Any = {"pool": pooling.settings(), "server": server, "progress": tell}
        if tried := swept.values():
            settings = settings if options.was_given("repeat") else replace(settings, repeat=1)
            found = sweep.sweep(run.load, loaded, engine.request(), tried, settings=settings, **how)
        else:
            found = run.load(loaded, engine.request(), settings=settings, **how)
    if html is not None:
        formats.write_bytes_atomic(html, report.page(found).encode(), force=rest["force"])
    if rest["style"] == "csv":
        output.clear()
        output.rendered(report.text(found))
        for target in filter(lambda one: one.skipped, found.targets):  # which have no rows
            output.tell(f"warning: {target.label}: not measured: {target.skipped}")
    else:
        options.show(rest["style"], "load", report.document(found), lambda: report.payload(found))
    return 1 if found.wrong or found.broken else 0


def _settings(load: Loaded, beside: Beside) -> dict[str, Any]:
    """Arguments of `LoadSettings`."""
    rates, shares = load.rate
    clients = load.clients if options.was_given("clients") or shares or not rates else ()
    own: dict[str, Any] = {**vars(load), **vars(beside), "clients": clients, "rates": rates, "shares": shares}
    own |= {
        "command": ("msplit", *sys.argv[1:]),
        "mix": load.mix or {},
        "beside": () if beside.beside == ("none",) else beside.beside,
    }
    return {name: value for name, value in own.items() if name != "rate"}


def _as_multistream(
    choice: options.Choice, settings: LoadSettings, further: Sequence[str]
) -> tuple[options.Choice, LoadSettings]:
    """What NVIDIA's arguments say, in place of what is not given here."""
    from msplit.serving.loadtest.run import parse

    asked = parse(further)
    return (
        replace(choice, inputs=asked.inputs, outputs=asked.outputs),
        replace(
            settings,
            clients=(asked.threads,),
            rows=asked.batch,
            most=asked.threads * asked.iterations,
            seconds=settings.seconds if options.was_given("seconds") else 3600.0,
            threads=asked.threads,
            config=asked.config or settings.config,
        ),
    )


def _server(serving: Serving, model: Path) -> ServerUnderTest | None:
    from msplit.serving.loadtest.clients import ServerUnderTest

    if serving.address is None:
        return None
    whole = model.resolve()
    name = serving.model_name or (whole.stem if whole.is_file() else whole.name)
    proofs = (serving.authorities, serving.certificate, serving.private_key, serving.token_file)
    return ServerUnderTest(serving.address, name, serving.protocol, serving.processes, *proofs)
