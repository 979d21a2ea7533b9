"""Options KEY=VALUE: what they take, what they refuse, and that nothing is described or defaulted twice in different ways."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from msplit.cli.keys import Keys
from msplit.cli.main import COMMANDS, FIRST, cli, command_of
from msplit.cli.options import option_of
from msplit.core.arguments import spelled, spelling
from msplit.errors import MsplitError
from msplit.opset import schema
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


def test_a_file_without_a_name_is_refused_and_not_taken_for_the_folder() -> None:
    for option, text in (("--server", "h:1,ca="), ("--measure", "save-reference=")):
        command = "load" if option == "--server" else "bench"
        with pytest.raises(click.BadParameter, match="the name of the file is empty"):
            context_of(command, str(MODEL), option, text)


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


def test_a_part_of_the_model_is_named_by_whatever_names_may_hold() -> None:
    def part(*given: str, command: str = "analyze") -> dict[str, Any]:
        needed = ("--fetch", "loss") if command == "train" else ()
        words = (word for one in given for word in ("--part", one))
        return dict(context_of(command, "m", *needed, *words).params["part"])

    nothing = {"signature": None, "tags": None, "inputs": None, "outputs": None, "function": None}
    assert part() == nothing
    assert part("tag=") == {**nothing, "tags": ()}
    assert part("tag=a, b,", "signature=") == {**nothing, "tags": ("a", "b"), "signature": ""}
    assert part("signature=a,b=c:1\\,tag=d") == {**nothing, "signature": "a,b=c:1\\,tag=d"}
    assert part("outputs=a:1,^b,inputs=c", "inputs=x=y") == {
        **nothing,
        "outputs": ("a:1", "^b", "inputs=c"),
        "inputs": ("x=y",),
    }
    assert part("inputs=a,b", "inputs=c") == {**nothing, "inputs": ("c",)}  # the last one wins
    assert part("signature=a,b", command="serve") == {"signatures": ("a", "b"), "tags": None}
    assert set(part(command="train")) == {"signature", "tags", "inputs"}


def test_the_seed_is_told_from_the_file_of_an_input_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("5", "x.npy", "seed=7"):
        (tmp_path / name).touch()

    def told(*given: str) -> tuple[Any, Any]:
        found = context_of("bench", "m", *(word for one in given for word in ("--input", one))).params["input"]
        return found["given"], found["seed"]

    assert told() == ((), 0)
    assert told("seed=5", "a,seed=3") == (("a,seed=3",), 5)
    assert told("seed=-5", "seed=6", "x=x.npy") == (("x=x.npy",), 6)
    assert told("seed=./5", "seed=x.npy", "seed=7") == (("seed=./5", "seed=x.npy", "seed=7"), 0)
    done = msplit("bench", MODEL, "--input", "seed=x", columns=200)
    assert (done.code, done.out) == (2, "")
    assert "'seed=x': 'x' is neither a whole number nor a file" in done.err


def test_a_model_with_an_input_called_seed_has_it_told_apart(tmp_path: Path) -> None:
    graph = schema.graph_pb2.GraphDef()
    graph.node.add(name="seed", op="Placeholder").attr["dtype"].type = 1
    graph.node.add(name="y", op="Abs", input=["seed"]).attr["T"].type = 1
    (tmp_path / "m.pb").write_bytes(graph.SerializeToString())
    done = msplit("profile", tmp_path / "m.pb", "--input", "seed=5", "-o", tmp_path / "profile.json", columns=200)
    assert "a file called N is given as seed=./N" in done.err
    done = msplit("profile", tmp_path / "m.pb", "-o", tmp_path / "profile.json", columns=200)
    assert "seed=" not in done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_became_a_key_is_answered_with_the_key(command: str) -> None:
    known = command_of(command)
    options = {name for one in known.params for name in one.opts}
    for one in known.params:
        for key in one.type.keys.values() if isinstance(one.type, Keys) else ():
            for old in (f"--{key.name}", f"--no-{key.name}")[: 2 if key.type is bool else 1]:
                # What --sweep tries are settings, by the names that they have elsewhere.
                if old not in options and key.name != one.type.bare and one.opts[0] != "--sweep":
                    done = msplit(command, "m", f"{old}=3" if key.type is not bool else old, columns=400)
                    assert (done.code, done.out) == (2, "")
                    assert done.err.splitlines()[-1].startswith(f"Error: {old} is written as {one.opts[0]} {key.name}=")


@pytest.mark.parametrize(
    ("given", "now"),
    [
        (("analyze", "m", "--tag", "serve"), "--part tag=A,B,…"),
        (("analyze", "m", "--function", "f"), "--part function=TEXT"),
        (("check", "m", "--no-record"), "--costs record=no"),
        (("report", "m", "--gpu", "a100"), "--costs gpu=NAME|FILE"),
        (("train", "m", "--seed=3"), "--input seed=INTEGER"),
        (("bench", "m", "--no-tensorflow"), "--measure tensorflow=no"),
        (("bench", "m", "--tune"), "msplit tune"),
        (("load", "m", "--model-name", "a"), "--server name=TEXT"),
    ],
)
def test_options_of_earlier_versions_are_answered_with_what_to_write(given: tuple[str, ...], now: str) -> None:
    done = msplit(*given, columns=400)
    old = next(word.partition("=")[0] for word in given if word.startswith("--"))
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1] == f"Error: {old} is written as {now} now."


def test_other_options_are_unknown() -> None:
    assert re.search(r"No such option:? .?--outputs", msplit("train", "m", "--outputs", "a").err)
    assert re.search(r"No such option:? .?--no-gpu", msplit("check", "m", "--no-gpu").err)
    assert context_of("serve", "m", "--saved_model_tags", "a,b").params["saved_model_tags"] == ("a", "b")


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
    known = command_of(command)
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
    assert len([one for one in known.params if isinstance(one, click.Option) and not one.hidden]) <= 30


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
        for one in command_of(command).params:
            keys = one.type.keys.values() if isinstance(one.type, Keys) else ()
            defaults |= {key.field: key.default for key in keys if not key.several} or {one.name: one.default}
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
        assert (spelled("given"), spelled("seed", 3), spelled("tags")) == ("--input", "--input seed=3", "--part tag=")
    with context_of("tune", "m"), spelling(option_of):
        assert spelled("tune") == "msplit tune"
    assert spelled("capture", False) == "capture=False"


def test_an_option_that_is_gone_says_what_to_do() -> None:
    done = msplit("serve", "m", "--front-ends", "2", columns=400)
    assert (done.code, done.out) == (2, "")
    said = "one process answers more requests than these did; for more, start several servers"
    assert done.err.splitlines()[-1] == f"Error: --front-ends is gone: {said}."
