"""A process that compiles groups for another one; see `workers.py`, which starts it and stops it.

It is told once what to compile for, a line of JSON, and says with a line, on what was its standard output, when it has started. Then it
is told a group per line, and answers to each with a line: `DONE`, or why not. It ends, with all that it has started, when its standard
input does: that is when the other process has ended, however it did.

Of a GPU it has only been told. PyTorch's compiler is shown the GPU's properties, so that it writes the kernels that the other process
would write, under the same names; they are compiled, and neither loaded nor timed.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO


def main() -> None:
    """Does what it is given, until there is no more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever is printed is no answer
    setup = json.loads(sys.stdin.buffer.readline() or "null")
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, tasks, setup), daemon=True).start()
    compiled = _ready(setup)
    os.write(answers, b"\n")
    while True:
        os.write(answers, compiled(tasks.get()).encode() + b"\n")


def _read(lines: BinaryIO, tasks: queue.SimpleQueue[bytes], setup: Mapping[str, Any] | None) -> None:
    """Takes in tasks as they come, also while one is being done, and ends the process with the last."""
    for line in lines:
        tasks.put(line)
    shutil.rmtree((setup or {}).get("scratch", ""), ignore_errors=True)
    if os.getpgrp() == os.getpid():  # as it is where `workers` has started it
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _ready(setup: Mapping[str, Any]) -> Callable[[bytes], str]:
    """The function that compiles a group, with all that takes long to import."""
    import torch

    from msplit.engines.cuda.device.device import product_switches, set_product_switches
    from msplit.engines.cuda.passes.pointwise_fusion.workers import DONE, matmul_precision

    # A kernel is found by it, and what was never set is a third state.
    if (matmul_precision(), *product_switches()) != (setup["matmul"], *setup["allowed"]):
        set_product_switches(setup["allowed"])
    torch.set_num_threads(setup["threads"])
    if "gpu" in setup:
        _pretend(torch.device(setup["device"]).index, SimpleNamespace(**setup["gpu"]), setup["target"])

    from torch._subclasses.fake_tensor import FakeTensorMode

    from msplit.engines.cuda.passes.pointwise_fusion import fuse
    from msplit.engines.cuda.passes.pointwise_fusion.outline import Body

    fuse.load()
    if "gpu" in setup:
        _only_compile()

    def compiled(task: bytes) -> str:
        try:
            body, lies = json.loads(task)
            with FakeTensorMode():
                inputs = fuse.examples(fuse.unpacked_layouts(lies), torch.device(setup["device"]))
            with torch.no_grad():
                fuse.compile_group(Body.unpacked(body), inputs)
        except Exception as problem:
            # The other process compiles it itself, and tells what is wrong with it.
            return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        return DONE

    return compiled


def _pretend(index: int, gpu: Any, target: list[Any]) -> None:
    """Shows PyTorch's compiler and Triton a GPU by its properties. Before the compiler is loaded, which keeps what it finds."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    shown = {
        "device_count": lambda: index + 1,
        "current_device": lambda: index,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "get_device_name": lambda device=None: gpu.name,
    }
    for name, function in shown.items():
        setattr(torch.cuda, name, function)
    from torch._dynamo.device_interface import CudaInterface  # which takes these functions over

    # To PyTorch itself there is none: it would make tensors on it.
    CudaInterface.is_available = staticmethod(lambda: True)

    made_for = GPUTarget(*target)
    nvidia = triton.backends.backends["nvidia"].driver
    told = {
        "__init__": lambda self: None,
        "get_current_target": lambda self: made_for,
        "get_current_device": lambda self: index,
        "get_current_stream": lambda self, device: 0,
    }
    nvidia.is_active = staticmethod(lambda: True)
    triton.runtime.driver.set_active(type("ToldOf", (nvidia,), told)())


def _only_compile() -> None:
    """Keeps Inductor from loading what it has compiled."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    precompile = CachingAutotuner.precompile

    def compile_only(self: Any, warm_cache_only: bool = False, *rest: Any, **options: Any) -> None:
        precompile(self, True, *rest, **options)

    CachingAutotuner.precompile = compile_only


if __name__ == "__main__":
    main()
