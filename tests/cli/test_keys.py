"""Options KEY=VALUE: what they take, what they refuse, and that nothing is described or defaulted twice in different ways."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from msplit.cli.keys import Keys, option_of
from msplit.cli.main import COMMANDS, FIRST, cli
from msplit.core.arguments import spelled, spelling
from msplit.errors import MsplitError
from msplit.run.request import EXCLUSIONS, RunRequest, refuse_exclusions
from msplit.serving.loadtest.run import LoadSettings
from msplit.serving.pool.settings import PoolSettings
from msplit.training.loop import TrainSettings
from msplit.verify.results import Settings
from tests.cli.runner import SAMPLES, fine, msplit

MODEL = SAMPLES / "mmoe_small.pb"


def context_of(command: str, *arguments: str) -> click.Context:
    known = cli.get_command(click.Context(cli), command)
    assert known is not None
    return known.make_context(command, list(arguments))


def test_keys_are_given_one_by_one_or_with_commas_and_values_may_have_commas() -> None:
    given = context_of("bench", str(MODEL), "--measure", "duration=1,builds=2", "--measure", "warmup=0").params[
        "measure"
    ]
    assert (given["duration"], given["builds"], given["warmup"], given["min_rounds"]) == (1.0, 2, 0.0, 10)
    told = context_of(
        "bench", "m", "--tensorflow", "device-priorities=-1,0,timeout=3", "--tensorflow", "merge-streams"
    ).params
    assert told["tensorflow"]["device_priorities"] == (-1, 0)
    assert (told["tensorflow"]["timeout"], told["tensorflow"]["merge_streams"]) == (3.0, True)
    told = context_of("bench", "m", "--tensorflow", "op-library=a.so", "--tensorflow", "op-library=b.so").params
    assert told["tensorflow"]["op_libraries"] == (Path("a.so"), Path("b.so"))


def test_a_value_alone_is_that_of_one_key() -> None:
    told = context_of("load", "m", "--server", "localhost:8500", "--server", "protocol=kserve").params["server"]
    assert (told["address"], told["protocol"], told["processes"]) == ("localhost:8500", "kserve", 4)
    told = context_of("train", "m", "--fetch", "a", "--save", "runs/rate=3", "--save", "keep=2").params["save"]
    assert (told["save"], told["keep"], told["every"]) == (Path("runs/rate=3"), 2, 1000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--tensorflow", "tmeout=3"),
            "there is no key 'tmeout'. Did you mean 'timeout'? Keys are: op-library, soft-placement",
        ),
        (("--tensorflow", "timeout"), "'timeout' has no value: write it as timeout=FLOAT"),
        (("--tensorflow", "timeout=soon"), "timeout: 'soon' is not a valid float"),
        (("--cuda", "effort=some"), "effort: 'some' is not one of 'full', 'fast'"),
        (("--cuda", "capture=perhaps"), "capture: 'perhaps' is neither yes nor no"),
        (("--measure", "builds=0"), "builds: 0 is not in the range x>=1"),
    ],
)
def test_a_wrong_key_or_value_names_the_key(given: tuple[str, ...], said: str) -> None:
    done = msplit("bench", MODEL, *given, columns=400)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_key_and_begins_with_what_one_needs_first(command: str) -> None:
    text = fine(command, "--help", columns=100).out
    known = importlib.import_module(f"msplit.cli.{command}").command
    for one in known.params:
        for key in one.type.keys.values() if isinstance(one.type, Keys) else ():
            assert f"\nKeys of {one.opts[0]}:\n" in text
            assert f"\n  {key.name}=" in text
    first = FIRST.get(command, "").split()
    assert len(first) in (0, 5)
    shown = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    if first:
        assert sum(line.startswith("  -") for line in shown.splitlines()) == 5
        assert all(name in shown for name in first)
    assert len([one for one in known.params if isinstance(one, click.Option) and not one.hidden]) <= 28


def test_defaults_are_those_of_the_library() -> None:
    kinds = {
        "bench": (RunRequest, Settings),
        "build": (RunRequest,),
        "load": (LoadSettings, PoolSettings),
        "train": (TrainSettings,),
    }
    compared = set()
    for command, classes in kinds.items():
        defaults: dict[str, Any] = {}
        for one in importlib.import_module(f"msplit.cli.{command}").command.params:
            keys = one.type.keys.values() if isinstance(one.type, Keys) else ()
            defaults |= {key.parameter: key.default for key in keys if not key.several} or {one.name: one.default}
        for kind in classes:
            for field in fields(kind):
                if isinstance(field.default, bool | int | float | str) and isinstance(
                    defaults.get(field.name), bool | int | float | str
                ):
                    assert defaults[field.name] in (field.default, str(field.default)), (command, field.name)
                    compared.add(field.name)
    assert len(compared) > 15


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: f"{row[0][0]}-{row[1][0]}")
def test_each_exclusion_is_refused_in_the_words_of_who_asked(row: Any) -> None:
    (one, first), (other, second), why = row
    given = {one: True if first is None else first, other: True if second is None else second}
    with pytest.raises(MsplitError, match=f"{one}.* excludes {other}.*: {why}"):
        refuse_exclusions(given)
    for name in given:
        refuse_exclusions({name: given[name]})


def test_messages_name_options_as_they_are_typed() -> None:
    with context_of("bench", "m"), spelling(option_of):
        assert spelled("capture", False) == "--cuda capture=no"
        assert (spelled("timelines"), spelled("devices"), spelled("log_placement")) == (
            "--trace",
            "--gpus",
            "--tensorflow log-placement=",
        )
        assert spelled("nothing") == "nothing"
    with context_of("tune", "m"), spelling(option_of):
        assert spelled("tune") == "msplit tune"
    assert spelled("capture", False) == "capture=False"
