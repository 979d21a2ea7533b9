"""Other values for a model that runs: it is made again with them, held against TensorFlow, and they are taken over between two steps.

What runs goes on meanwhile. It stays what it is, captured graphs and all: values are copied to where the old ones lie. Where more differs,
such as a constant that a kernel has in its code, a runner takes over the whole model; a pool refuses it.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.assignment.model import load
from msplit.core.arguments import Precision
from msplit.core.graph import TensorValue
from msplit.engines.base import Arrays, Engine, Executable, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import KernelMode
from msplit.engines.table_rows import RoundedTables
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensorflow.engine import reference
from msplit.engines.variables import read_by_rows, table_value, variable_names
from msplit.errors import Closed, EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.lookups import use_of
from msplit.opset.traits import written
from msplit.run.request import RunRequest
from msplit.run.runner import Runner
from msplit.run.upgrade import one_at_a_time, quick_switches
from msplit.verify.compare import compare, computed_in
from msplit.verify.results import NewRows, NewValues, OutputCheck, ValueUpdate

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Compiled, Renewal, RowRenewal


class ModelValues:
    """Values that a model has now, and what others of it are.

    Args:
        flat: The model.
        state: Values of variables in place of those that are in its files.
        tables: Those of them whose rows are rounded, and are to be.
    """

    def __init__(self, flat: FlatGraph, state: Arrays, tables: RoundedTables) -> None:
        self._tables = tables
        self._flat, self._state = flat, {name: state[name] for name in tables.names}
        self._stamp = formats.stamp(flat.model)
        self._names = variable_names(flat)
        self._run = flat.graph.ancestors([*(tensor.node for tensor in flat.outputs), *flat.targets])
        self._needed = {name for node, name in self._names.items() if self._run[node]}

    def changed(self, source: NewValues | None, rows: NewRows | None) -> tuple[FlatGraph, dict[str, NDArray[Any]]]:
        """The model with other values, and values of variables in place of those of its files. Nothing is changed here; see `keep`.

        Raises:
            LoadError: There is no such model or checkpoint, or a variable has no value in it.
            EngineError: It is another model, or a value has another type or shape.
        """
        flat, state = self._flat, dict(self._state)
        if isinstance(source, Mapping):
            state |= {name: np.asarray(value) for name, value in source.items()}
        elif isinstance(source, str | os.PathLike) and Path(f"{_prefix(source)}.index").is_file():
            state |= self._of_checkpoint(_prefix(source))
        elif source is not None:
            flat, state = _opened(source, self._flat), {}
            _refuse_other(self._flat, flat)
        if flat is self._flat and not self._needed <= state.keys() and formats.stamp(flat.model) != self._stamp:
            raise EngineError(
                "the model's files are no longer those that it was made of", fix="give the model, which has all values"
            )
        for name, (ids, values) in (rows or {}).items():
            self._refuse_unknown(name)
            base = table_value(flat, state, name)
            state[name] = _with_rows(name, base, np.asarray(ids), np.asarray(values))
        for name, value in state.items():
            if value is self._state.get(name):
                continue
            self._refuse_unknown(name)
            if said := formats.differs(flat.model, name, value):
                raise EngineError(f"{said} in what it is to be", fix="give values of the same model")
        if flat is not self._flat:
            state |= {name: table_value(flat, state, name) for name in self._tables.names}
        changed = {name: value for name, value in state.items() if value is not self._state.get(name)}
        return copy.copy(flat), state | self._tables.of(changed)

    def row_renewal(
        self, job: Job, rows: NewRows, live: Sequence[Any], beside: Callable[[], Executable], request: RunRequest
    ) -> tuple[RowRenewal | None, list[OutputCheck]]:
        """Renewal of these rows alone, where nothing is made of their tables, so that the model need not be made again.

        Args:
            job: What `live` was made of, with the new values.
            rows: The rows, of which there are such.
            live: Programs that run.
            beside: Makes what runs a step of this job with the values that are there.
            request: What was asked for.

        Returns:
            The renewal, None where it can not be; and a list that has its check when it has taken over.
        """
        flat, found, feeds = self._flat, list[Any](), dict(job.feeds)
        for name, given in rows.items():
            ids = np.unique(np.asarray(given[0]))
            table = read_by_rows(flat, {node for node, own in self._names.items() if own == name}, self._run)
            old = table_value(flat, self._state, name)
            new = job.state[name][ids]
            more = table and CUDA.builds(job.options.first).renewal.rows_of(
                live, *table, ids.astype(np.int64), old[ids], new
            )
            if not table or not more:
                return None, []
            found += more
            _look_up(flat, feeds, {flat.graph.names[node] for node in table[0]}, ids)
        checks, job = list[OutputCheck](), replace(job, feeds=feeds)
        against, running = expected_of(job), beside()

        def check() -> None:
            checks.append(verify_outputs(running.step(feeds), job, request, against))

        return CUDA.builds(job.options.first).renewal.RowRenewal(found, check), checks

    def keep(self, flat: FlatGraph, state: Arrays) -> None:
        """Takes note that the model has these values now."""
        self._flat, self._state, self._stamp = flat, dict(state), formats.stamp(flat.model)

    def _of_checkpoint(self, prefix: str) -> dict[str, NDArray[Any]]:
        found = formats.variables(self._flat.model, None, checkpoint=prefix)
        graph = self._flat.graph
        named = {self._names[graph.index[name]]: value for name, value in found.items() if name in graph.index}
        if missing := sorted(self._needed - named.keys()):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise EngineError(
                f"the checkpoint has no value for variable {missing[0]}{more}", where=prefix, fix="save all of them"
            )
        return {name: value for name, value in named.items() if name in self._needed}

    def _refuse_unknown(self, name: str) -> None:
        if name not in self._names.values():
            known = ", ".join(sorted(self._needed)[:10]) or "none"
            raise EngineError(f"the model has no variable {name!r}", fix=f"its variables are: {known}")


def _look_up(flat: FlatGraph, feeds: dict[str, Any], table: set[str], ids: NDArray[Any]) -> None:
    """Has inputs that are row numbers of a table be these, as far as other tables that they index have such rows."""
    for tensor in flat.inputs:
        use = use_of(flat, tensor.node, tensor.port)
        for offset in [one.offset for one in use.lookups if one.table in table]:
            fit = ids[(ids >= offset) & (ids - offset < (use.rows or 0))] - offset
            if len(fit) and (feeds[tensor.name].dtype.kind in "iu"):
                feeds[tensor.name] = np.resize(fit, feeds[tensor.name].shape).astype(feeds[tensor.name].dtype)


def _prefix(source: str | os.PathLike[str]) -> str:
    return os.fspath(source).removesuffix(".index")


def _opened(source: Any, like: FlatGraph) -> FlatGraph:
    """The model of a path, read with the choices that another one was read with."""
    if isinstance(source, FlatGraph):
        return source
    if not isinstance(source, str | os.PathLike):
        raise MsplitError(f"{type(source).__name__} has no values", fix="give a model, a checkpoint, or arrays by name")
    return load(source, **vars(like.model.choice))


def _refuse_other(old: FlatGraph, new: FlatGraph) -> None:
    """Refuses a model that differs in more than values, as far as its nodes tell.

    Raises:
        EngineError: It does.
    """
    where, fix = str(new.model.path), "prepare it as a model of its own"
    for kind in ("inputs", "outputs"):
        ends = [[end.name for end in getattr(flat, kind)] for flat in (old, new)]
        if ends[0] != ends[1]:
            raise EngineError(f"the model has other {kind}: {ends[1]}, and not {ends[0]}", where=where, fix=fix)
    before, after = (dict(zip(flat.graph.names, flat.graph.ops, strict=True)) for flat in (old, new))
    if list(before.items()) != list(after.items()):
        lost, found = sorted(before.items() - after.items())[:3], sorted(after.items() - before.items())[:3]
        what = f"other nodes: {found}, and not {lost}" if lost or found else "its nodes in another order"
        raise EngineError(f"the model has {what}", where=where, fix=fix)
    for node, name in enumerate(old.graph.names):
        looks = [_looks(flat.graph.attrs[node]) for flat in (old, new)]
        if looks[0] != looks[1]:
            raise EngineError(f"{name} is {looks[1]}, and was {looks[0]}", where=where, fix=fix)


def _looks(attrs: Mapping[str, Any]) -> str:
    """Type and shape of a variable, a constant or an input."""
    value = attrs.get("value")
    shape = value.shape if isinstance(value, TensorValue) else attrs.get("shape")
    return f"{attrs.get('dtype')} {shape}"


def _with_rows(name: str, base: NDArray[Any], ids: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """A table with some rows changed.

    Raises:
        EngineError: They are no rows of it.
    """
    if not base.ndim or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise EngineError(
            f"rows of {name} are given by numbers of {ids.dtype} {ids.shape}", fix="give a list of numbers"
        )
    if values.dtype != base.dtype or values.shape != (len(ids), *base.shape[1:]):
        wanted = f"{base.dtype} {(len(ids), *base.shape[1:])}"
        raise EngineError(f"rows of {name} are {values.dtype} {values.shape}, not {wanted}", fix=f"give {wanted}")
    if len(ids) and not (ids.min() >= 0 and ids.max() < len(base)):
        raise EngineError(f"{name} has {len(base)} rows, and no row {ids.max()} or {ids.min()}", fix="give rows of it")
    if values.dtype.kind not in "OSU" and np.isfinite(base[ids]).all() and not np.isfinite(values).all():
        raise EngineError(f"rows of {name} have numbers that are not finite, and had none", fix="give rows of numbers")
    found = np.array(base)
    found[ids] = values
    return found


class RunnerValues:
    """Gives a runner that was prepared other values; see `Runner.update`.

    Args:
        runner: What runs.
        engine: What runs it.
        job: What it was made of.
        request: What was asked for.
        tables: See `ModelValues`.
    """

    def __init__(self, runner: Runner, engine: Engine, job: Job, request: RunRequest, tables: RoundedTables) -> None:
        self._runner, self._engine, self._job, self._request = runner, engine, job, request
        self._values = ModelValues(job.flat, job.state, tables)
        self._lock = threading.Lock()

    def __call__(self, source: NewValues | None, rows: NewRows | None) -> ValueUpdate:
        """Gives it other values."""
        runner = self._runner
        if runner.improved is not None:
            raise EngineError("what is improved takes no other values", fix="prepare it without improve")
        if any(map(written, self._job.flat.graph.ops)):
            raise EngineError("a step of the model changes its variables itself", fix="train it with msplit.Trainer")
        with self._lock:
            flat, state = self._values.changed(source, rows)
            job = replace(self._job, flat=flat, state=state)
            try:
                with making_beside(job.options.first if self._engine is CUDA else "cpu", lambda: runner.turn.count):
                    renewal, built, checks = self._made(job, rows if source is None else None)
            finally:
                CUDA.forget(flat)
            with runner.turn:
                if runner.renews is None:
                    if built is not None:
                        built.close()
                    raise Closed("the model is closed", fix="prepare or open it again")
                old = runner.executable
                if renewal is not None:
                    renewal.take_over()
                elif built is not None:
                    if self._engine is CUDA:  # random ops draw on; there are no variables that steps write
                        built.load_state(old.save_state())
                    runner.executable, runner.facts = built, built.facts()
                    old.close()
            self._values.keep(flat, state)
            size = renewal.bytes if renewal is not None else int(runner.facts.get("weight_bytes", 0))
            return ValueUpdate(size, renewal is None, tuple(checks))

    def _made(
        self, job: Job, rows: NewRows | None
    ) -> tuple[Renewal | RowRenewal | None, Executable | None, Sequence[OutputCheck]]:
        """The model with other values, verified: as values to be taken over; else as another executable."""
        renewal = CUDA.builds(job.options.first).renewal if self._engine is CUDA else None
        live = renewal.program_of(self._runner.executable) if renewal is not None else None
        if renewal is not None and live is not None:
            if rows:
                alone, checks = self._values.row_renewal(
                    job, rows, [live], lambda: self._runner.executable, self._request
                )
                if alone is not None:
                    return alone, None, checks
            with renewal.sharing_with(live):
                compiled = CUDA.compile(job)
            check = verify_made(compiled, job, self._request)
            with suppress(EngineError):
                return renewal.Renewal.of([live], [compiled.program]), None, [check]
        built = self._engine.build(job)
        try:
            return None, built, [verify_outputs(built.step(job.feeds), job, self._request)]
        except BaseException:
            built.close()
            raise


@contextmanager
def making_beside(device: str, busy: Callable[[], object]) -> Iterator[None]:
    """A block in which a model is made again beside steps."""
    background = CUDA.beside(busy)
    with one_at_a_time(), quick_switches(), background.block(), CUDA.builds(device).renewal.aside(device):
        yield


def verify_made(compiled: Compiled, job: Job, request: RunRequest) -> OutputCheck:
    """Holds a step of a model that was made again against TensorFlow; where that is not installed, against plain ops.

    Raises:
        EngineError: It gives other outputs.
    """
    with closing(_beside(compiled, compiled.plan(job), job)) as executable:
        return verify_outputs(executable.step(job.feeds), job, request)


def _beside(compiled: Compiled, plan: Any, job: Job) -> Executable:
    """What runs steps beside those of what shares its constants; nothing is captured."""
    renewal = CUDA.builds(job.options.first).renewal
    executable: Executable = renewal.beside(compiled, plan, job.options, ieee=job.precision.ieee)
    return executable


def executable_beside(compiled: Compiled, plan: Any, job: Job, stack: ExitStack) -> Executable:
    """Executable as `_beside` makes it, closed with a stack. It has run a step, so that the next one takes no longer than it must."""
    executable = stack.enter_context(closing(_beside(compiled, plan, job)))
    executable.step(job.feeds)
    return executable


def expected_of(job: Job) -> tuple[str, Arrays]:
    """Outputs of a step by TensorFlow, or by plain ops where it is not installed; and which of both."""
    if TENSORFLOW.unavailable():
        options = replace(job.options, mode=KernelMode.PLAIN, simplify=False, plan=None)
        plain = replace(job, options=options, precision=Precision.IEEE)
        return "the same ops one by one", CUDA.try_out(plain, [job.feeds])[0]
    return "TensorFlow on the CPU", reference(job.flat, job.feeds, op_libraries=job.op_libraries, state=job.state)


def verify_outputs(
    outputs: Arrays, job: Job, request: RunRequest, known: tuple[str, Arrays] | None = None
) -> OutputCheck:
    """Holds outputs of a model that was made again against TensorFlow's; see `verify_made`. `known` is what `expected_of` gave."""
    outputs = {name: np.array(value) for name, value in outputs.items()}
    against, expected = known or expected_of(job)
    precision = Precision(request.precision).on(gpu=request.device != "cpu")
    found = compare(
        outputs,
        expected,
        precision=precision,
        tolerance=request.settings.tolerance,
        computed=computed_in(job.flat),
    )
    if not found.passed:
        raise EngineError(
            f"with these values it gives other outputs than {against}:",
            details=found.describe().splitlines(),
            fix="the old values stay; see `msplit bench`, which compares every way to run the model",
        )
    return OutputCheck(against, precision, 1, found)
