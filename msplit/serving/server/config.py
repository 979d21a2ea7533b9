"""Configuration of a server: models by name and version, from the command line or in the files that TensorFlow Serving takes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msplit.errors import LoadError
from msplit.formats.build import is_build
from msplit.formats.files import read_file
from msplit.serving.pool.settings import MAX_GROUPS, PoolSettings

_LARGEST = 16 << 20
_QUOTED = re.compile(r"""#[^\n]*|'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+\"""", re.DOTALL)
"""Comments and strings of protobuf's text format."""


@dataclass(frozen=True)
class ModelConfig:
    """A model to be served.

    Attributes:
        name: As clients call it.
        path: A model's file or folder, a build, or a folder of versions that have numbers for names.
        versions: Numbers of the versions to serve; None: the `latest` ones.
        latest: Number of versions, the highest first; 0: all.
        labels: Label -> number of a version.
    """

    name: str
    path: Path
    versions: tuple[int, ...] | None = None
    latest: int = 1
    labels: Mapping[str, int] = field(default_factory=dict)

    def folders(self) -> dict[int, Path]:
        """Folders of its versions, by number. A path without versions is version 1.

        Raises:
            LoadError: There are none, or not those that are asked for.
        """
        chosen = self.present()
        missing = [number for number in self.versions or () if number not in chosen]
        if missing:
            found = ", ".join(map(str, sorted(_numbered(self.path)))) or "none"
            raise LoadError(
                f"model {self.name!r} has no version {missing[0]}", where=str(self.path), fix=f"it has {found}"
            )
        for label, number in self.labels.items():
            if number not in chosen:
                what = f"label {label!r} of model {self.name!r} is for version {number}, which is not served"
                raise LoadError(what, where=str(self.path), fix="serve it, too, or take the label off")
        return chosen

    def present(self) -> dict[int, Path]:
        """Wanted versions among those that are there now.

        Raises:
            LoadError: There is no version at all.
        """
        found = _numbered(self.path)
        chosen = sorted(found)[-self.latest :] if self.versions is None else sorted(found.keys() & {*self.versions})
        return {number: found[number] for number in chosen}


def _numbered(path: Path) -> dict[int, Path]:
    """The folders of a path whose names are numbers; the path itself as version 1 where it is a model or a build."""
    if not path.exists():
        fix = "copy it to this machine: only its own files are served" if ":/" in str(path) else "check the path"
        raise LoadError("there is no such file or folder", where=str(path), fix=fix)
    if not path.is_dir() or is_build(path) or any((path / f"saved_model.{end}").exists() for end in ("pb", "pbtxt")):
        return {1: path}
    try:
        names = [entry.name for entry in os.scandir(path) if entry.is_dir()]
    except OSError as problem:
        what = f"can not be read: {problem.strerror}"
        raise LoadError(what, where=str(path), fix="check its permissions") from problem
    found = {int(name): path / name for name in names if name.isascii() and name.isdigit() and len(name) < 19}
    if not found:
        what = "is neither a model nor a build, and has no folder with a number for a name"
        raise LoadError(what, where=str(path), fix="give a model's file or folder, or one such as models/1, models/2")
    return found


def read_models(path: Path) -> tuple[ModelConfig, ...]:
    """The models of TensorFlow Serving's `--model_config_file`.

    Raises:
        LoadError: It can not be read, or asks for what there is not.
    """
    from msplit.serving.server import messages

    example = "model_config_list { config { name: 'm' base_path: '/models/m' } }"
    return listed_models(parsed(path, messages.ModelServerConfig(), example), str(path))


def listed_models(found: Any, where: str) -> tuple[ModelConfig, ...]:
    """The models of a ModelServerConfig.

    Args:
        found: The message.
        where: Place of it for errors.

    Raises:
        LoadError: It lists none, or asks for what there is not.
    """
    if found.WhichOneof("config") != "model_config_list":
        raise LoadError("has no model_config_list", where=where, fix="list models there; other kinds are not known")
    models = tuple(_model(config, where) for config in found.model_config_list.config)
    if not models:
        raise LoadError("lists no model", where=where, fix="give each a name and a base_path")
    for label in ("name", "base_path"):
        if any(not getattr(config, label) for config in found.model_config_list.config):
            raise LoadError(f"a model has no {label}", where=where, fix=f"give each a {label}")
    return models


def _model(config: Any, where: str) -> ModelConfig:
    if config.model_platform not in ("", "tensorflow"):
        what = f"model {config.name!r} is of the platform {config.model_platform!r}"
        raise LoadError(what, where=where, fix="serve TensorFlow's")
    if config.HasField("logging_config"):  # TensorFlow Serving's own binary refuses it, too
        what = f"model {config.name!r} has a logging_config: requests are not written to files"
        raise LoadError(what, where=where, fix="take it out; --log access=0.01 logs that one of 100 was asked")
    policy = config.model_version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "specific" and not policy.specific.versions:
        raise LoadError(f"model {config.name!r} lists no specific versions", where=where, fix="list one or more")
    return ModelConfig(
        config.name,
        Path(config.base_path),
        tuple(dict.fromkeys(policy.specific.versions)) if kind == "specific" else None,
        0 if kind == "all" else policy.latest.num_versions or 1,
        dict(config.version_labels),
    )


def read_batching(path: Path, settings: PoolSettings) -> PoolSettings:
    """Settings of a pool with what TensorFlow Serving's `--batching_parameters_file` says.

    Raises:
        LoadError: It can not be read, or asks for what there is not.
    """
    from msplit.serving.server import messages

    found = parsed(path, messages.BatchingParameters(), "max_batch_size { value: 64 }")
    if found.pad_variable_length_inputs:
        what = "asks to pad inputs of different lengths"
        fix = "take pad_variable_length_inputs out; `msplit build --lengths` makes what takes rows of any length"
        raise LoadError(what, where=str(path), fix=fix)
    given = {name: getattr(found, name).value for name in _WRAPPED if found.HasField(name)}
    for name, value in given.items():
        if value < (1 if name in ("max_batch_size", "num_batch_threads") else 0):
            raise LoadError(f"{name} is {value}", where=str(path), fix="give a positive number")
    sizes = list(found.allowed_batch_sizes)
    largest = given.get("max_batch_size", sizes[-1] if sizes else None)
    if sizes and (sizes != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] != largest):
        fix = "have them rise, and end with max_batch_size"
        raise LoadError(f"allowed_batch_sizes are {sizes}", where=str(path), fix=fix)
    if largest is not None:
        settings = replace(settings, max_batch=largest, batches=tuple(sizes) or settings.batches)
    if "batch_timeout_micros" in given:
        settings = replace(settings, max_delay_us=float(given["batch_timeout_micros"]))
    if "num_batch_threads" in given:
        settings = replace(settings, groups=min(given["num_batch_threads"], MAX_GROUPS))
    if "max_enqueued_batches" in given:
        settings = replace(settings, max_queue=max(given["max_enqueued_batches"], 1) * (largest or 1))
    return settings


_WRAPPED = ("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads")


def parsed(path: Path, message: Any, example: str, *, secret: bool = False) -> Any:
    """A file of protobuf's text format; as TensorFlow Serving has it, strings may go over several lines.

    Args:
        path: The file.
        message: Message that is filled.
        example: Text that would be right, for errors.
        secret: True where errors must not quote the file.

    Raises:
        MsplitError: It can not be read, or is no such message.
    """
    from google.protobuf import text_format

    text = read_file(path, _LARGEST, what="configuration", fix=f"write {example}")
    text = _QUOTED.sub(lambda part: part[0] if part[0][0] == "#" else part[0].replace("\n", "\\n"), text)
    try:
        return text_format.Parse(text, message)
    except (text_format.ParseError, RecursionError, ValueError) as problem:
        what = f"is no {message.DESCRIPTOR.name}" if secret else f"can not be read: {problem}"
        raise LoadError(what, where=str(path), fix=f"write, for example, {example}") from None


def distinct(models: Sequence[ModelConfig]) -> None:
    """Refuses two models of one name.

    Raises:
        LoadError: There are.
    """
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            what = f"there are two models called {model.name!r}"
            raise LoadError(what, where=str(model.path), fix="give them different names")
