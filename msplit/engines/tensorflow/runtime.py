"""Starting TensorFlow: quietly, with the logical devices that the streams need, and with its errors in plain words."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from msplit.engines.base import TensorFlowOptions
from msplit.engines.environment import nvidia_smi, visible
from msplit.errors import INSTALL_TENSORFLOW, EndOfData, EngineError, InvalidInput, LoadError, TimedOut
from msplit.formats.files import read_file
from msplit.opset.traits import ops_with
from msplit.progress import importing

_GPU_SHARE = 0.45
"""Share of the GPU's free memory that all logical devices take together; the rest is for the cuda engine in the same process."""

_MOST_CONFIG = 1 << 20
"""Most bytes of a file with options of a session."""

_configured: dict[str, Any] = {"gpu_memory": None, "gpus": 1, "priorities": (), "libraries": set()}

_SAYS_NOTHING = re.compile(
    r"root error\(s\) found|^Detected at node|^Graph execution error:$|^=+$|^[A-Z_]+: From /job:\S+:$"
)
"""Lines that TensorFlow puts in front of what went wrong."""

_NOT_FETCHED = ("not convertible to numpy", "does not have value", "marked as not fetchable")
"""Messages of TensorFlow on outputs that are handles, or in a loop or on the side of a cond that was not taken."""

OTHER_OUTPUTS = "it is no value that can be fetched: name other outputs with --part outputs="
"""Remedy for that."""


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back what C++ code writes to standard error, and gives it out only when the block fails."""
    try:
        saved = os.dup(2)
    except OSError:
        yield  # no standard error to keep quiet
        return
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(saved, 2)
            held.seek(0)
            shutil.copyfileobj(held, os.fdopen(os.dup(2), "wb"))
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@functools.cache
def tensorflow() -> Any:
    """The tensorflow module, imported on the first call.

    Its start-up notes are kept off the terminal. TF_CPP_MIN_LOG_LEVEL is set to 2 (errors only) where the user has not set it.
    oneDNN is left as TensorFlow has it by default, so that what is measured is what a user has.

    Raises:
        EngineError: It is not installed.
    """
    if "tensorflow" in sys.modules:
        return importlib.import_module("tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with importing("tensorflow", "TensorFlow"), quiet_stderr():
        try:
            module = importlib.import_module("tensorflow")
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            raise EngineError("TensorFlow is not installed, and this needs it", fix=INSTALL_TENSORFLOW) from None
        module.get_logger().setLevel("ERROR")
        module.config.list_physical_devices()  # looks for a GPU, with as many words
    return module


def keep_nan() -> None:
    """Has XLA compile maxima for the CPU so that NaN in either operand stays NaN, as StableHLO asks for and GPUs do.

    XLA reads its flags once, with the first module that it compiles. What a user says of this one stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_enable_fast_min_max" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_fast_min_max=false".strip()


def silent_deprecations() -> AbstractContextManager[Any]:
    """TensorFlow's advice is for who calls it: a user can do nothing about what msplit calls."""
    silence: AbstractContextManager[Any] = importlib.import_module("tensorflow.python.util.deprecation").silence()
    return silence


def configure(streams: int, *, spread: bool = False, options: TensorFlowOptions | None = None) -> None:
    """Gives the GPU, where TensorFlow sees one, as many logical devices as there will be streams.

    TensorFlow fixes its devices when it first uses them, once per process: call this with the largest number that will be
    needed. On a machine without a GPU there is nothing to fix, sessions make their own CPU devices.

    Args:
        spread: Take whole GPUs in place of logical devices of the first one, if there are as many.
        options: Memory and priorities of the devices.

    Raises:
        EngineError: TensorFlow has fixed fewer devices already.
    """
    if not has_gpu():
        return
    tf = tensorflow()
    gpus = tf.config.list_physical_devices("GPU")
    have = _configured["gpu_memory"]
    if have is not None and max(_configured["gpus"], len(have)) >= streams:
        return
    options = options or TensorFlowOptions()
    whole = streams if spread and len(gpus) >= streams else 1
    for what, given in (("priorities", options.priorities), ("limits of memory", options.limits)):
        if given and len(given) != streams:
            raise EngineError(
                f"there are {len(given)} {what} for {streams} logical device{'' if streams == 1 else 's'}",
                fix="give one for each, and as many --streams",
            )
    try:
        tf.config.set_visible_devices(gpus[:whole], "GPU")
        memory = _memory(streams, options) if streams != whole or options.memory or options.limits else []
        for gpu in gpus[:whole] if not memory else ():
            tf.config.experimental.set_memory_growth(gpu, True)
        if memory:
            ranks = options.priorities or (None,) * streams
            tf.config.set_logical_device_configuration(
                gpus[0], [_logical_device(tf, each, rank) for each, rank in zip(memory, ranks, strict=True)]
            )
    except (RuntimeError, ValueError) as error:
        made = len(tf.config.list_logical_devices("GPU"))
        raise EngineError(
            f"TensorFlow has already started with {made} logical GPU device{'' if made == 1 else 's'}, {streams} are needed",
            fix="call msplit before TensorFlow uses the GPU, and with the largest number of streams first",
        ) from error
    _configured.update(gpu_memory=memory, gpus=whole, priorities=options.priorities)


def _memory(streams: int, options: TensorFlowOptions) -> list[int]:
    """MiB of each logical device."""
    if options.limits:
        return [*options.limits]
    return [int(_free_gpu_megabytes() * (options.memory or _GPU_SHARE) / streams)] * streams


def _logical_device(tf: Any, megabytes: int, priority: int | None) -> Any:
    more = {} if priority is None else {"experimental_priority": priority}
    return tf.config.LogicalDeviceConfiguration(memory_limit=megabytes, **more)


def _free_gpu_megabytes() -> float:
    """Free memory of the first GPU that this process sees."""
    rows = nvidia_smi("gpu", "uuid,memory.free", "csv,noheader,nounits") or []
    try:
        first = (*visible([row[0] for row in rows]), 0)[0]
        return float(rows[first][1])
    except (ValueError, IndexError) as error:
        raise EngineError(
            "nvidia-smi does not tell how much GPU memory there is to share among the logical devices",
            fix="make nvidia-smi work, or run with --streams 1",
        ) from error


def has_gpu() -> bool:
    """True if TensorFlow sees a GPU, and nobody has hidden it."""
    return bool(tensorflow().config.get_visible_devices("GPU"))


def devices(streams: int, *, cpu_only: bool = False) -> list[str]:
    """The device of each stream."""
    kind = "GPU" if has_gpu() and not cpu_only else "CPU"
    return [f"/device:{kind}:{stream}" for stream in range(streams)]


def config_of(path: Path | None) -> Any:
    """Reads a file with a ConfigProto as text; without one, nothing. Fields that only other builds of TensorFlow know are passed over.

    Raises:
        LoadError: It is something else.
        MsplitError: It can not be read.
    """
    config = tensorflow().compat.v1.ConfigProto()
    if path is None:
        return config
    text_format = importlib.import_module("google.protobuf.text_format")
    fix = "give a ConfigProto as text, such as: gpu_options { allow_growth: true }"
    text = read_file(path, _MOST_CONFIG, what="file of session options", fix=fix)
    try:
        text_format.Parse(text, config, allow_unknown_field=True)
    except text_format.ParseError as problem:
        raise LoadError(f"this is no ConfigProto: {problem}", where=str(path), fix=fix) from problem
    return config


def session_config(
    streams: int,
    *,
    cpu_only: bool = False,
    auto_jit: bool = False,
    optimized: bool = True,
    merge_streams: bool = False,
    soft: bool = True,
    base: Any = None,
) -> Any:
    """Options of a session with a device per stream. On a GPU they repeat what `configure` fixed for the process.

    Args:
        cpu_only: They are on the CPU even where there is a GPU.
        auto_jit: XLA compiles what it can, in clusters.
        optimized: TensorFlow rewrites the graph first, as it does for everybody. It takes half a minute for 98,000 nodes.
        merge_streams, soft: See `TensorFlowOptions`.
        base: Options for all that is not said here.
    """
    v1 = tensorflow().compat.v1
    config = v1.ConfigProto()
    if base is not None:
        config.CopyFrom(base)
        config.gpu_options.experimental.ClearField("virtual_devices")  # they are the process's
    config.allow_soft_placement = soft
    if merge_streams:
        merged = config.gpu_options.experimental.stream_merge_options
        merged.merge_host_to_device_stream = merged.merge_device_to_host_stream = True
        merged.merge_device_to_device_stream = True
    if cpu_only or not has_gpu():
        config.device_count["CPU"] = streams
        config.device_count["GPU"] = 0
    else:
        config.gpu_options.visible_device_list = ",".join(map(str, range(_configured["gpus"])))
        if _configured["gpu_memory"]:
            devices = config.gpu_options.experimental.virtual_devices.add()
            devices.memory_limit_mb.extend(_configured["gpu_memory"])
            devices.priority.extend(_configured["priorities"])
        else:
            config.gpu_options.allow_growth = True
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimized
    if auto_jit:
        config.graph_options.optimizer_options.global_jit_level = v1.OptimizerOptions.ON_2
    return config


def mix_precision(config: Any, half: str, *, cpu: bool = False) -> None:
    """Switches TensorFlow's own mixed precision on (Grappler's). On a GPU it is float16, whatever is asked for."""
    rewrites = config.graph_options.rewrite_options
    name = "onednn_bfloat16" if half == "bfloat16" else "cpu"
    switch = f"auto_mixed_precision_{name}" if cpu or not has_gpu() else "auto_mixed_precision"
    setattr(rewrites, switch, rewrites.ON)


def set_precision(ieee: bool) -> None:
    """Switches TF32 off (ieee) or on for what runs next. TensorFlow has one switch per process."""
    setting = tensorflow().config.experimental
    if setting.tensor_float_32_execution_enabled() == ieee:
        setting.enable_tensor_float_32_execution(not ieee)


def load_op_libraries(libraries: Sequence[Path]) -> None:
    """Loads shared objects with custom ops, each once.

    Raises:
        EngineError: One can not be loaded.
    """
    tf = tensorflow()
    for library in libraries:
        key = str(Path(library).resolve())
        if key in _configured["libraries"]:
            continue
        try:
            tf.load_op_library(key)
        except (tf.errors.OpError, RuntimeError, OSError) as error:
            raise EngineError(
                f"TensorFlow can not load this op library: {first_line(error)}",
                where=str(library),
                fix="build it against this TensorFlow version, or leave --tensorflow op-library= out",
            ) from error
        _configured["libraries"].add(key)


@contextmanager
def errors_of(model: str) -> Iterator[None]:
    """Turns TensorFlow's errors into EngineError, which names the path of the model."""
    tf = tensorflow()
    try:
        yield
    except tf.errors.DeadlineExceededError as error:
        raise TimedOut(
            f"TensorFlow gave a step up: it took longer than it may (DeadlineExceeded: {first_line(error)})",
            where=model,
            fix="give it more time with --tensorflow timeout=; "
            "one that waits for a queue needs what fills the queue, or --part inputs= to feed it",
        ) from error
    except (tf.errors.OpError, ValueError, KeyError, TypeError) as error:
        text, ended = first_line(error), isinstance(error, tf.errors.OutOfRangeError)
        # Restoring ends so, too, where its file is cut off.
        restores = getattr(getattr(error, "op", None), "type", "") in ops_with("checkpoint")
        if ended and not restores:
            fix = "feed what its iterator or queue gives (--part inputs=), or let its dataset repeat"
            said = f"the data that the model reads itself came to an end: {text}"
            raise EndOfData(said, where=model, fix=fix) from error
        if "'TRTEngineOp'" in str(error):
            fix = "TF-TRT has made engines for one kind of GPU of parts of it: give the model from before that"
        elif "not registered" in str(error):
            fix = "load the library with its kernel: --tensorflow op-library=FILE.so"
        elif "not a valid checkpoint" in str(error):
            fix = "its variables are not with it: copy the folder as a whole, variables/ and all, or export the model again"
        elif "Could not find variable" in str(error) and Path(model).is_dir():  # a SavedModel that has them
            fix = (
                "its variables have no values in a session: what tf.saved_model.save writes of a Keras 3 model runs in none, nor in "
                "TensorFlow Serving; export it with model.export() or keras.export.ExportArchive, or freeze it"
            )
        elif any(part in str(error) for part in _NOT_FETCHED):
            fix = OTHER_OUTPUTS
        elif ended or isinstance(error, tf.errors.DataLossError):
            fix = "a file that the model reads is cut off or damaged: copy or write it again"
        elif isinstance(error, tf.errors.FailedPreconditionError):
            fix = "the model's variables or tables have no values here: export it as a SavedModel, or freeze it"
        elif "Cannot assign a device" in str(error):
            fix = "name a device that is there and has a kernel, or let TensorFlow choose one: leave out --tensorflow soft-placement=no"
        elif isinstance(error, tf.errors.ResourceExhaustedError):
            fix = "choose a smaller --batch, or fewer --streams: logical devices share the GPU's memory"
        elif isinstance(error, tf.errors.InvalidArgumentError):
            fix = "check the inputs: --shape, --batch and --input must fit the model"
        else:
            fix = "see whether plain TensorFlow runs this model; if it does, report this"
        kind = InvalidInput if isinstance(error, tf.errors.InvalidArgumentError) else EngineError
        raise kind(f"TensorFlow can not run this model: {text}", where=model, fix=fix) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = map(str.strip, str(getattr(error, "message", None) or error).splitlines())
    told = [line for line in lines if line and not _SAYS_NOTHING.search(line)]
    text = re.sub(r"^\(\d+\) \w+: ", "", told[0]) if told else type(error).__name__
    text = re.sub(r" in binary running on .*", "", text)  # the machine's name, and advice on TensorFlow 1's contrib
    return text if len(text) <= 300 else text[:297] + "…"
