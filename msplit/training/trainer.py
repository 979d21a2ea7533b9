"""A model that trains: steps that change its variables, and checkpoints of them."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.assignment.model import DisplayMixin, Facts, opened
from msplit.core.dag import reached
from msplit.core.graph import Graph
from msplit.engines.base import BESIDE_VARIABLES, FIRST_SCALE, STEPS, Feeds, Following
from msplit.errors import EngineError, MsplitError
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats.atomic import FolderLock, hold, reported
from msplit.inputs.make import input_specs
from msplit.opset.traits import written
from msplit.progress import Progress
from msplit.run.prepare import prepare_for
from msplit.run.request import StepOptions, refuse_exclusions, request_of
from msplit.run.runner import Runner
from msplit.training import checkpoint
from msplit.training.batches import Prefetched, batches_of, fitting
from msplit.training.data import shards_of
from msplit.training.rendezvous import ALONE, World
from msplit.verify.tensorflow_process import initial_state, variables_of

STREAMS = 8
"""The largest number where nobody says one."""

_ON_CUDA = "use --engine cuda, with --device cpu where there is no GPU"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Fetched:
    """Result of a step.

    Attributes:
        step: Its number: how many steps were run by then, itself included.
        values: By name of what was fetched.
    """

    step: int
    values: Arrays


def to_train(
    model: FlatGraph | str | os.PathLike[str], target: str | Sequence[str] | None, fetches: Sequence[str]
) -> FlatGraph:
    """The graph of a training step.

    Args:
        model: From `load`, or where the model is.
        target: The op, or ops, that a step runs; None: what the file names (collection ``train_op``).
        fetches: Tensors that a step gives.

    Raises:
        LoadError: A name is not in the graph.
        EngineError: The step changes no variable.
    """
    flat = opened(model)
    targets = (target,) if isinstance(target, str) else target
    fetched = (fetches,) if isinstance(fetches, str) else tuple(fetches)
    flat = flatten(formats.to_train(flat.model, targets, fetched))
    if not _writes(flat.graph):
        said = f"{', '.join(flat.model.targets)} runs" if flat.model.targets else "is fetched"
        what = f"nothing that {said} changes a variable, so there is nothing to train"
        raise EngineError(what, where=str(flat.model.source), fix="name the op that applies the gradients: --target")
    return flat


def _writes(graph: Graph) -> bool:
    """True if a graph changes a variable, itself or in the conds, loops and other functions that it calls."""

    def called(inside: Graph) -> list[Graph]:
        return [graph.functions[name].body for _, name in inside.calls() if name in graph.functions]

    return any(any(map(written, inside.ops)) for inside in reached([graph], called))


class Trainer(DisplayMixin):
    """A model that trains.

    Example::

        with msplit.Trainer("model.meta", target="train_op", fetches=["loss"]) as trainer:
            for fetched in trainer.each(batches, steps=1000, fetch_every=100):
                print(fetched.step, fetched.values["loss"])
            trainer.save("checkpoints/model")

    The first step prepares the model for the shapes that it is given, which takes seconds on the cuda engine, and is not part of
    training: variables are then what they were before. Later steps take inputs of the same shapes. A trainer is for one thread.

    Args:
        model: From `load`, or where the model is: a graph with its gradients and updates.
        target: The op, or ops, that a step runs; None: what the file names (collection ``train_op``).
        fetches: Tensors that a step gives, such as the loss, by the names of nodes or of the signature. Their values are those before the
            step's updates unless the graph says otherwise.
        state: Values of variables in place of those that they begin with; see `load`.
        progress: Told what is being done and how much of it is done.
        world: Those who train together, of whom each makes a trainer and feeds it rows of its own; see `world.joined`.
        options: As for `prepare`, but for batch and shapes, which are those of the first step's inputs: see `StepOptions`. `streams` are
            eight where nothing is said.

    Attributes:
        flat: The graph of a step.
        steps: Steps that were run, those before the restored checkpoint included.
        specs: Types and shapes of the inputs that a step takes, by name, as far as they are known.
        fetches: Names of what it gives.
        shards: Split of a batch over them; None where this process trains alone.
        runner: Runner of the step, with its label, notes and checks; None before the first step.

    Raises:
        LoadError: A name is not in the graph.
        EngineError: The step changes no variable.
    """

    def __init__(
        self,
        model: FlatGraph | str | os.PathLike[str],
        target: str | Sequence[str] | None = None,
        fetches: Sequence[str] = (),
        *,
        state: Arrays | None = None,
        progress: Progress | None = None,
        world: World = ALONE,
        **options: Unpack[StepOptions],
    ) -> None:
        self.flat = to_train(model, target, fetches)
        self.steps = 0
        self.runner: Runner | None = None
        self.fetches = tuple(tensor.name for tensor in self.flat.outputs)
        self._request = request_of(Trainer, StepOptions, options, streams=STREAMS)
        if world.size > 1:
            refuse_exclusions({**self._request.given, "world": world.size})
        if world.size > 1 and self._request.engine == "tensorflow":
            raise EngineError("the tensorflow engine trains in one process", fix=_ON_CUDA)
        self.specs = {spec.name: spec for spec in input_specs(self.flat, 1, {})[0]}
        self.world, self.shards = world, shards_of(self.specs, world.size)
        self._progress = progress
        self._needed, others = variables_of(self.flat)
        saved = formats.saved_as(self.flat.model, others)
        has_saver = any(place.by_saver for place in saved.values())
        # What neither a step nor the saver wants, such as counts of a metric, is not part of this.
        self._names = (*self._needed, *(name for name in others if saved[name].by_saver or not has_saver))
        self._state: dict[str, NDArray[Any]] | None = None  # by variable, as far as the engine does not hold it
        self._given = False  # whether somebody has said what variables are to begin with
        self._closed = False
        self._folders: dict[Path, FolderLock | None] = {}  # that checkpoints were written to, with their locks
        if state is not None:
            self.load(state)

    def _facts(self) -> Facts:
        runs = "not prepared" if self.runner is None else self.runner.label
        return [("model", str(self.flat.model.source)), ("steps", str(self.steps)), ("runs", runs)]

    # --- Steps

    def step(self, feeds: Feeds, *, on_device: bool = False, then: Feeds | Following | None = None) -> dict[str, Any]:
        """One step, which is over when this returns.

        Args:
            feeds: A value for every input by name.
            on_device: As for `Runner.step`, as is the next.
            then: Inputs of the next step, to be copied to the GPU meanwhile.

        Returns:
            What is fetched, by name: arrays or, `on_device`, PyTorch tensors.

        Raises:
            EngineError: An input is missing, or has another type or shape than that of the first step; or the engine can not run it.
        """
        outputs = (self.runner or self.prepare(feeds)).step(feeds, on_device=on_device, then=then)
        self.steps += 1
        return {name: outputs[name] if on_device else np.asarray(outputs[name]) for name in self.fetches}

    def prepare(self, feeds: Feeds) -> Runner:
        """Makes the model ready for inputs of such shapes, without a step: what the first step does."""
        fitting(feeds, self.specs, str(self.flat.model.source))
        state = self._host_state()
        shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        wanted = [f"{name} {list(shape)}" for name, shape in shapes.items()]
        if (first := self.world.share(wanted)) != wanted:
            said = f"rank {self.world.rank} is fed {', '.join(wanted)}, and the first one {', '.join(first)}"
            raise EngineError(said, fix="feed each as many rows")
        request = replace(self._request.sized(shapes=shapes), shards=self.shards)
        self.runner = runner = prepare_for(self.flat, request, progress=self._progress, state=state)
        if not runner.executable.keeps_state:
            self.close()
            raise EngineError(f"the {runner.engine} engine can not train this model here", fix="see `msplit doctor`")
        shared = bool(runner.executable.kept)
        if shared and not self._given:
            # Others train them, or have: what they have made of them is what this goes on with.
            self.steps = checkpoint.global_step(self.flat.model, runner.executable.save_state()) or 0
        else:
            self._put({**FIRST_SCALE, **state})
        if self.shards is not None:
            if not runner.executable.joins_others:
                self.close()
                raise EngineError(f"the {runner.engine} engine trains in one process", fix=_ON_CUDA)
            runner.executable.join()
        return runner

    def each(self, dataset: Any, steps: int | None = None, *, fetch_every: int = 1) -> Iterator[Fetched]:
        """Runs steps as they are asked for. The next batches are made meanwhile, in a thread, and the next one is copied to the GPU.

        Args:
            dataset: Batches: mappings from input to value, in any iterable, or a `tf.data.Dataset`. Where the model has one input, they
                may be its values alone. A generator may write its arrays over, but not its tensors: later batches are made before
                earlier ones are trained on.
            steps: At most so many; None: up to the end of the data.
            fetch_every: Steps between two whose values are given; those of the last one are, too.

        Yields:
            What those steps gave.

        Raises:
            EngineError: As for `step`.
        """
        if fetch_every < 1:
            raise MsplitError("fetch_every is one or more")
        last: Fetched | None = None
        with closing(Prefetched(islice(batches_of(dataset, [*self.specs]), steps))) as batches:
            for feeds in batches:
                last = Fetched(self.steps + 1, self.step(feeds, then=batches.upcoming))
                if last.step % fetch_every == 0:
                    yield last
                    last = None
        if last is not None:
            yield last

    def run(self, dataset: Any, steps: int | None = None, *, fetch_every: int = 1) -> list[Fetched]:
        """Runs steps to the end, and gives what they gave; see `each`."""
        return list(self.each(dataset, steps, fetch_every=fetch_every))

    # --- Variables

    @property
    def variables(self) -> dict[str, NDArray[Any]]:
        """The value of each variable, by the name of its node: slots, beta powers and the global step included. Copies."""
        state = {**self._host_state(), **(held := self._held())}
        copied = held if self.runner is not None and self.runner.engine == "cuda" else {}  # tables may be large
        return {
            name: value if name in copied else np.array(value)
            for name, value in state.items()
            if name not in BESIDE_VARIABLES
        }

    def load(self, values: Arrays) -> None:
        """Gives variables values, by the names that `variables` has. Those that are not named keep theirs.

        Raises:
            MsplitError: There is no such variable, or it has another type or shape. Nothing is changed then.
        """
        wrong = [f"there is no variable {name!r}" for name in values if name not in self._names]
        for name, value in values.items():
            if not wrong and (said := formats.differs(self.flat.model, name, np.asarray(value))):
                wrong.append(said)
        if wrong:
            fix = "`Trainer.variables` has names, types and shapes"
            raise MsplitError(wrong[0], where=str(self.flat.model.source), fix=fix)
        self._given = True
        self._put({name: np.array(value) for name, value in values.items()})

    def _host_state(self, given: Container[str] = ()) -> dict[str, NDArray[Any]]:
        """Values outside of the engine: what it holds is newer. Where all that a step needs is `given`, nobody is asked how they begin."""
        if self._closed:
            raise EngineError("the trainer is closed", fix="save or take `variables` before")
        if self._state is None:
            if all(name in given for name in self._needed):
                return {}
            found = initial_state(self.flat, op_libraries=self._request.op_libraries)
            self._state = {name: found[name] for name in self._names if name in found}
        return self._state

    def _put(self, state: dict[str, NDArray[Any]]) -> None:
        """Gives these variables values, and no other."""
        self._state = {**self._host_state(state), **state}
        if self.runner is not None:
            executable = self.runner.executable
            known = executable.save_state()
            given = {**state, STEPS: np.array(self.steps, np.int64)}
            executable.load_state({name: value for name, value in given.items() if name in known})

    def _held(self) -> Arrays:
        """Values that the engine holds; before the first step, those outside of it."""
        return self._host_state() if self.runner is None else self.runner.executable.save_state()

    # --- Checkpoints

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        force: bool = False,
        note: str = "",
        state: Arrays | None = None,
    ) -> Path:
        """Writes a checkpoint as TensorFlow does, which reads it: whole, or not at all.

        Args:
            path: Folder and name; the number of steps is added, as in ``model-1000``.
            keep: Remove the oldest of the folder's checkpoints beyond so many, once this one is there; None keeps all.
            force: Replace one of this name.
            note: A text to keep with it.
            state: Values to write, where `variables` was asked for already.

        Returns:
            The beginning of its files' names, as `tf.train.latest_checkpoint` gives it.

        Raises:
            WriteError: It can not be written, is there already, or another process writes checkpoints into this folder. The checkpoints
                that were there are unharmed.
        """
        target = Path(os.fspath(path)).absolute()
        self.hold(target.parent)
        target = target.with_name(f"{target.name}-{self.steps}")
        scaled = self.runner is None or self._request.precision == "fp16"
        held = self._held() if scaled else {}
        scale = {name: held[name] for name in checkpoint.SCALE if name in held}
        saved = checkpoint.CheckpointContents(self.variables if state is None else state, self.steps, note, scale)
        checkpoint.write(self.flat.model, saved, target, force=force)
        checkpoint.add(target, keep)
        return target

    def hold(self, folder: Path) -> None:
        """Keeps other processes from writing checkpoints into a folder until this trainer is closed.

        Raises:
            WriteError: Another one does, or there is no such folder.
        """
        with reported(folder):
            self._folders[folder] = hold(folder)

    def restore(self, path: str | os.PathLike[str]) -> str:
        """Goes on from a checkpoint that `save` or TensorFlow's saver of this graph wrote.

        Args:
            path: The beginning of its files' names, or a folder, whose last one is taken.

        Returns:
            The text that was kept with it.

        Raises:
            LoadError: There is none, or it is one of another model. Nothing is changed then.
        """
        found = checkpoint.read(self.flat.model, self._names, self._needed, checkpoint.latest(Path(path)))
        self._given = True
        self.steps = found.steps or 0
        self._put({**self._host_state(found.state), **found.state, **found.scale})
        return found.note

    # --- The end

    def close(self) -> None:
        """Gives streams and memory back. No step can be run afterwards; checkpoints that were written stay."""
        self._closed = True
        self._folders.clear()
        if self.runner is not None:
            self.runner.close()
            self.runner = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
