"""The training step of the mixture of experts as one writes it in PyTorch by hand: eager, or captured as a CUDA graph on one stream; also
by `DistributedDataParallel` over the processes of `torch.distributed`, its collectives inside of the captured graph.

It has the variables of TensorFlow's graph under their names, and learns from the same data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from msplit.engines.base import Engine, Executable, Job

BETAS = (0.9, 0.999)
RATE, DECAY, DECAY_STEPS = 1e-3, 0.9, 1000
FIRST, SECOND = "Adam", "Adam_1"


@dataclass(frozen=True)
class ByHand(Engine):
    """Builds it. See `engines.base.Engine`."""

    captured: bool
    place: str = "cuda"
    name: str = "torch"
    together: bool = False
    """Whether all processes train one model, each on its own rows."""

    def device(self, job: Job) -> str:
        return "CPU" if self.place == "cpu" else "GPU"

    def unavailable(self) -> str | None:
        return None if self.place == "cpu" or torch.cuda.is_available() else "no CUDA device"

    def build(self, job: Job) -> MixtureOfExperts:
        """The step, for feeds of the job's shapes."""
        return MixtureOfExperts(job, self)


class _Module(torch.nn.Module):
    """The loss as a module, which `DistributedDataParallel` asks for."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.kept, self.loss = torch.nn.ParameterList(parameters.values()), loss

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.loss(x, label)


class MixtureOfExperts(Executable):
    """See `engines.base.Executable`. Sizes are those of the variables that it is given first."""

    keeps_state = True

    def __init__(self, job: Job, how: ByHand) -> None:
        self._how, self._ieee, self._job = how, job.precision.ieee, job
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._forward: Callable[..., torch.Tensor] = self._total
        self._feeds = {name: torch.tensor(value, device=how.place) for name, value in job.feeds.items()}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.zeros((), device=how.place)
        self.load_state(job.state or {})

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Weights and slots, by TensorFlow's names."""
        slots = (f"/{FIRST}", f"/{SECOND}")
        names = [name for name in state if f"{name}{slots[0]}" in state]
        if not names:
            return
        with torch.no_grad():
            if not self._parameters:
                self._parameters = {
                    name: torch.nn.Parameter(torch.tensor(state[name], device=self._how.place)) for name in names
                }
                self._begin()
            done = round(math.log(float(state["beta1_power"])) / math.log(BETAS[0])) - 1
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(state[name]))
                kept = self._adam.state[parameter]
                kept["exp_avg"].copy_(torch.from_numpy(state[name + slots[0]]))
                kept["exp_avg_sq"].copy_(torch.from_numpy(state[name + slots[1]]))
                kept["step"].fill_(done)
            self._step.fill_(float(state["global_step"]))

    def save_state(self) -> dict[str, np.ndarray]:
        """Nothing that could be held against TensorFlow's: PyTorch's Adam adds epsilon before the second moment's bias is corrected, which
        moves weights by 2e-4 of their size after a step. Its losses are held against the others'.
        """
        return {}

    def _begin(self) -> None:
        on_gpu = self._how.place != "cpu"
        self._rate = torch.tensor(RATE, device=self._how.place)
        self._step = torch.zeros((), device=self._how.place)
        every = list(self._parameters.values())
        self._adam = torch.optim.Adam(every, self._rate, BETAS, capturable=on_gpu, fused=on_gpu)
        self._precise()
        with torch.enable_grad():
            if on_gpu:
                self._warm_and_capture()
            else:
                self._join()
                self._train()

    def _join(self) -> None:
        if self._how.together:
            self._forward = DistributedDataParallel(
                _Module(self._parameters, self._total), gradient_as_bucket_view=True
            )

    def _warm_and_capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._join()
            for _ in range(11 if self._how.together else 3):  # so many steps DDP wants before a capture
                self._train()
        torch.cuda.current_stream().wait_stream(side)
        if self._how.captured:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._train()

    def _precise(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = not self._ieee

    def _dense(self, x: torch.Tensor, scope: str) -> torch.Tensor:
        return functional.linear(x, self._parameters[f"{scope}/kernel"].t(), self._parameters[f"{scope}/bias"])

    def _chain(self, x: torch.Tensor, scope: str) -> torch.Tensor:
        layer = 0
        while f"{scope}/dense_{layer}/kernel" in self._parameters:
            x = functional.relu(self._dense(x, f"{scope}/dense_{layer}"))
            layer += 1
        return x

    def _train(self) -> None:
        with torch.no_grad():
            torch.mul(torch.pow(DECAY, self._step / DECAY_STEPS), RATE, out=self._rate)
        loss = self._forward(self._feeds["x"], self._feeds["label"])
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        self._adam.step()
        with torch.no_grad():
            self._step += 1
            self._loss.copy_(loss)

    def _total(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        scopes = {name.partition("/")[0] for name in self._parameters}
        experts = [self._chain(x, f"expert_{expert}") for expert in range(sum("expert" in one for one in scopes))]
        mixed = torch.stack(experts, 1)
        loss = torch.zeros((), device=x.device)
        for task in range(label.shape[1]):
            shares = functional.softmax(self._dense(x, f"gate_{task}/dense"), 1)
            hidden = self._chain((mixed * shares[:, :, None]).sum(1), f"tower_{task}")
            logits = self._dense(hidden, f"tower_{task}/out")
            loss = loss + functional.binary_cross_entropy_with_logits(logits, label[:, task : task + 1])
        return loss

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One step as a user would run it."""
        self._precise()
        for name, tensor in self._feeds.items():
            tensor.copy_(torch.from_numpy(feeds[name]), non_blocking=True)
        self._run()
        return {"loss": self._loss.cpu().numpy()}

    def _run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._train()

    def launch(self) -> None:
        """One step on the inputs of the last one."""
        self._run()
        if self._how.place != "cpu":
            torch.cuda.synchronize()

    def device_times(self, count: int) -> list[float] | None:
        """Seconds of back-to-back steps."""
        if self._how.place == "cpu":
            return None
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._run()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]

    def facts(self) -> Mapping[str, Any]:
        return {"device": self._how.place, "streams": 1}

    def close(self) -> None:
        self._graph, self._parameters, self._feeds = None, {}, {}
