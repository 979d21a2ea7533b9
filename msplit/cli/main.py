"""The `msplit` command: finds the subcommand, turns errors into one message and an exit code."""

from __future__ import annotations

import copy
import errno
import functools
import importlib
import io
import os
import platform
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click
from click import shell_completion

from msplit._version import __version__
from msplit.cli import output
from msplit.cli.keys import Keys, Sectioned
from msplit.core.arguments import spelling
from msplit.errors import MsplitError, WriteError

COMMANDS = {
    "analyze": "What is independent in a model, and what streams could gain.",
    "assign": "Assign stream ids by rules and write the annotated model.",
    "bench": "Run a model on its streams, verify the outputs, report the gain.",
    "bisect": "Find the first node whose value is not TensorFlow's.",
    "build": "Compile a model once, and keep it ready to run.",
    "check": "Is a model's annotation valid, whole, safe, and still worth it?",
    "cut": "Write the part of a model between tensors as a model.",
    "diff": "What changed between two models: streams, structure, weights, cost.",
    "doctor": "What this machine can do, and why not more.",
    "export": "Write a model for another server: Triton.",
    "load": "Load a model with many requests at once: latency over throughput.",
    "profile": "Time a model's kernels on the GPU, for --costs profile= of other commands.",
    "replicate": "Write an ensemble: copies of a model in one graph, their outputs combined.",
    "report": "One HTML file to look at: graph, timeline, candidates, findings.",
    "rules": "List the shipped rule sets, or print one.",
    "sample": "Build one of the sample models.",
    "serve": "Answer requests over gRPC and HTTP, as TensorFlow Serving and Triton do.",
    "show": "What is in a model's file: tags, signatures, inputs, outputs, functions.",
    "strip": "Write a model without its stream ids.",
    "train": "Train a model on streams, with checkpoints that TensorFlow reads.",
    "tune": "Search for the fastest plan of a model by measuring, and write it.",
    "worker": "Be one process of a cluster that runs graphs in TensorFlow.",
}
"""Subcommand -> one line of help."""

_TOGETHER = {
    "analyze": ("assign",),
    "bench": ("bisect", "tune"),
    "build": ("profile",),
    "models": ("cut", "diff", "replicate", "report", "rules", "sample", "show", "strip"),
    "serve": ("export", "worker"),
}
"""Module -> commands in it, beside its own: functions called `<name>_command`. All others: `command`, in the module of their name."""

EXAMPLES = {
    "analyze": ("msplit analyze model.pb --batch 128",),
    "assign": ("msplit assign model.pb --rules auto --streams 4 -o annotated.pb",),
    "bench": (
        "msplit bench model.pb --streams 1,2,4 --batch 128",
        "msplit bench model.pb --rules auto --streams 16 --batch 1,8,32,128 --plot sweep.html",
        "msplit bench model.pb --batch 128 --baseline old.json --fail-if-slower 5%",
    ),
    "bisect": ("msplit bisect model.pb --batch 8",),
    "build": ("msplit build model.pb --batch 1,8,32 -o model.build",),
    "check": (
        "msplit check annotated.pb --fail-on warning",
        "msplit check models/*.pb --baseline known.json",
    ),
    "cut": (
        "msplit cut model.pb --outputs tower_0/out -o tower.pb",
        "msplit cut saved_model/ --inputs pooled --outputs scores -o head",
    ),
    "diff": ("msplit diff before.pb annotated.pb", "msplit diff old_model/ new_model/ --html changes.html"),
    "doctor": ("msplit doctor",),
    "export": ("msplit export model.build --triton models --groups 8",),
    "load": (
        "msplit load model.pb --clients 1,4,16 --rate 50%,70%,90% --html load.html",
        "msplit load --multistream model.pb 1 input0 1 output 16 1000 4 config_proto",
    ),
    "profile": ("msplit profile model.pb --batch 128 -o profile.json",),
    "replicate": (
        "msplit replicate model.pb --times 4 -o ensemble.pb",
        "msplit replicate first.pb --weights first.pb --weights second.pb --combine stack -o ensemble.pb",
        "msplit replicate saved_model/ --weights runs/1/model-900 --weights runs/2/model-900 --devices /gpu:0,/gpu:1 -o ensemble",
    ),
    "report": ("msplit report annotated.pb -o report.html",),
    "rules": ("msplit rules recsys > my-rules.yaml",),
    "sample": ("msplit sample mmoe --size experts=8 -o mmoe.pb",),
    "serve": (
        "msplit serve model.build --rest-api-port 8501",
        "msplit serve --model ranker=models/ranker --model users=users.pb --groups 8",
    ),
    "show": ("msplit show saved_model/",),
    "strip": ("msplit strip annotated.pb -o plain.pb",),
    "train": (
        "msplit train model.meta --target train_op --fetch loss --data data.npz --batch 128 --epochs 3 --save checkpoints",
        "msplit train model.meta --fetch loss --data 'day-*.tfrecord' --steps 100000 --save checkpoints --save every=5000 --resume",
        "msplit train model.meta --fetch loss --data my_data:batches --steps 1000",
    ),
    "tune": ("msplit tune model.pb --streams 8 --batch 128 -o tuned.pb --plan-out plan.json",),
    "worker": ("msplit worker --cluster cluster.yaml --job worker --task 0",),
}
"""Subcommand -> what to type, for its --help."""

FIRST = {
    "analyze": "--batch --shape --show --part --format",
    "assign": "--rules --streams --output --compare --batch",
    "bench": "--streams --batch --rules --precision --format",
    "bisect": "--batch --shape --input --reference --format",
    "build": "--output --batch --streams --precision --tune",
    "check": "--rules --streams --fail-on --baseline --format",
    "diff": "--rules --streams --all --exit-code --format",
    "load": "--clients --rate --groups --batch --html",
    "profile": "--output --batch --shape --input --seconds",
    "replicate": "--output --times --weights --combine --streams",
    "report": "--output --rules --streams --batch --bench",
    "serve": "--model --port --rest-api-port --groups --max-batch",
    "train": "--fetch --data --batch --steps --save",
    "tune": "--streams --batch --seconds --output --plan-out",
}
"""Subcommand with many options -> the five that one needs first, for its --help."""

INTERRUPTED = 130

_OUT_OF_MEMORY = (
    "error: out of memory\n"
    "  fix: raise the limit (ulimit -v), use a machine with more memory, or cut the model with --part outputs="
)
_NO_ROOM_TO_LOAD = ("failed to map segment from shared object", "cannot allocate memory", "Cannot allocate memory")


class _Commands(click.Group):
    """Imports a subcommand when it is needed, so that --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: Sectioned = copy.copy(command_of(cmd_name))
        command.__class__, command.first = Sectioned, FIRST.get(cmd_name, "").split()
        command.params = [*command.params, *_verbosity()]  # people type them behind the command, too
        title = "Examples:" if len(EXAMPLES[cmd_name]) > 1 else "Example:"
        command.epilog = "\n".join(["\b", title, *(f"  {line}" for line in EXAMPLES[cmd_name])])
        command.callback = _showing_progress(command.callback)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Click would make this exit code 1, which means findings. The reader went away (`| head`) and has what it wanted.
            output.give_up(sys.stdout)
            output.tell_written()
            return 0
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            # Files are written elsewhere, with errors of their own: this is standard output.
            output.give_up(sys.stdout)
            raise WriteError(
                f"can not be written: {problem.strerror}",
                where="standard output",
                fix="free some space, or write elsewhere",
            ) from problem
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help" and not ctx.resilient_parsing:  # `msplit help COMMAND` is `msplit COMMAND --help`
            names = [one for one in args[1:] if not one.startswith("-") and one != "help"]
            if not names:
                output.say(ctx.get_help())
                ctx.exit()
            args = [*names, "--help"]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as problem:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            if near:
                raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx) from problem
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted([*COMMANDS.items(), ("help", "Options, keys and examples of a command.")]))


def command_of(name: str) -> Any:
    """A command. Its module is imported here, and no other command's."""
    module = next((module for module, names in _TOGETHER.items() if name in names), None)
    if module is None:
        return importlib.import_module(f"msplit.cli.{name}").command
    return getattr(importlib.import_module(f"msplit.cli.{module}"), f"{name}_command")


def _verbosity() -> list[click.Option]:
    """--quiet, --verbose and --debug, of the whole tool and of each of its commands. They say what the tool tells on stderr."""
    texts = {
        ("--quiet", "-q"): "Only results and errors.",
        ("--verbose", "-v"): "Say on stderr what is done and how long it takes.",
        ("--debug",): "Like --verbose, and tracebacks of errors.",
    }
    return [
        click.Option(list(names), is_flag=True, help=text, expose_value=False, callback=_remember)
        for names, text in texts.items()
    ]


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    flags = ctx.find_root().ensure_object(dict)
    flags[param.name] = flags.get(param.name, False) or value


def _showing_progress(callback: Callable[..., Any] | None) -> Callable[..., Any]:
    assert callback is not None

    @functools.wraps(callback)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from msplit.cli import options, output

        verbose = options.is_set("verbose") or options.is_set("debug")
        with spelling(options.option_of), output.shown(quiet=options.is_set("quiet"), verbose=verbose):
            return callback(*args, **kwargs)

    return wrapped


class _Bash(shell_completion.BashComplete):
    """Completion in Bash, to which an equals sign is a word: `gpu=h` are three, of which the last one is completed."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*args, incomplete):
            if words and not words[-1].startswith("-") and (word == "=" or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        self.before = words[-1].removesuffix(incomplete.removeprefix("="))
        return words[:-1], words[-1]

    def format_completion(self, item: shell_completion.CompletionItem) -> str:
        value = item.value.removeprefix(self.before) if item.type == "plain" else item.value
        return super().format_completion(shell_completion.CompletionItem(value, item.type))


shell_completion.add_completion_class(_Bash)


@click.group(cls=_Commands, context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100})
@click.version_option(__version__, prog_name="msplit")
def cli() -> None:
    """Split TensorFlow graphs over GPU streams: find what is independent, assign streams, run, verify, measure."""


cli.params += _verbosity()


def run(arguments: list[str]) -> int:
    """Runs the command line. The exit code: 0 fine, 1 findings, 2 usage, load or internal error, 130 interrupted, 143 terminated."""
    debug = "--debug" in arguments
    output.begin()
    # What TensorFlow has to say comes as exceptions; its log is noise here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with output.watched():
            code = _run(arguments, debug)
            output.check()  # something may have caught it and failed for want of what it left out, or gone on to the end
            return code
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _say("interrupted", INTERRUPTED)
    except output.Terminated:
        return _say("terminated", output.exit_code() or INTERRUPTED)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        result = cli.main(arguments, prog_name="msplit", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort as problem:
        if isinstance(problem.__cause__, EOFError):  # Click takes it for Ctrl-D; msplit asks nobody
            return _internal(problem.__cause__, debug)
        raise
    except click.ClickException as problem:
        if isinstance(problem, click.NoSuchOption) and problem.ctx is not None:
            problem = _moved(problem, problem.ctx)
        shown = io.StringIO()
        problem.show(shown)
        return _say(shown.getvalue().rstrip("\n"), 2)
    except MsplitError as problem:
        if debug:
            output.tell(traceback.format_exc())
        return _say(f"error: {problem}", 2)
    except MemoryError:
        return _say(_OUT_OF_MEMORY, 2)
    except Exception as problem:  # noqa: BLE001  a mistake of msplit's own is told as such, with how to report it
        return _say(_OUT_OF_MEMORY, 2) if _without_room(problem) else _internal(problem, debug)


_MOVED = {"--tune": "msplit tune", "--bisect": "msplit bisect", "--model-name": "--server name=TEXT"}
"""Options of earlier versions whose names are not those of keys -> what to write."""
_GONE = {"--front-ends": "one process answers more requests than these did; for more, start several servers"}
"""Options of earlier versions that nothing replaces -> why, and what to do."""


def _moved(problem: click.NoSuchOption, ctx: click.Context) -> click.UsageError:
    """Error for an option of an earlier version that says what to write: the command's key of that name; the same for other options."""
    option, now = problem.option_name, _MOVED.get(problem.option_name)
    if option in _GONE:
        return click.UsageError(f"{option} is gone: {_GONE[option]}.", ctx)
    negated = option.startswith("--no-")
    name = option.removeprefix("--no-" if negated else "--")
    for one in reversed(ctx.command.params):  # of two keys of a name, that of the first option
        key = one.type.keys.get(name) if isinstance(one.type, Keys) else None
        if key is not None and not (negated and key.type is not bool):
            now = f"{one.opts[0]} {name}=no" if negated else f"{one.opts[0]} {key.text}"
    return problem if now is None else click.UsageError(f"{option} is written as {now} now.", ctx)


def _without_room(problem: Exception) -> bool:
    """Whether a limit on memory (`ulimit -v`) kept a library from being loaded or a call from being made."""
    if isinstance(problem, OSError):
        return problem.errno == errno.ENOMEM
    return isinstance(problem, ImportError) and any(said in str(problem) for said in _NO_ROOM_TO_LOAD)


def _say(text: str, code: int) -> int:
    """Says how a command failed, and which files it had written by then."""
    output.tell(text)
    output.tell_written()
    return code


def _internal(problem: Exception, debug: bool) -> int:
    if debug:
        output.tell(traceback.format_exc())
    frame: Any = traceback.extract_tb(problem.__traceback__)[-1]
    return _say(
        f"error: internal error in msplit: {type(problem).__name__}: {problem}\n"
        f"  at {frame.name} ({frame.filename}:{frame.lineno}); msplit {__version__}, Python {platform.python_version()}\n"
        "  fix: this is a bug in msplit; run again with --debug and report what it prints",
        2,
    )
