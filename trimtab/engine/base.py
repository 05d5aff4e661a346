"""The seam between service and arithmetic: what a Learner and a Sampler are. No torch here.

Both are synchronous and used from one thread each. A model is named by an opaque `model_id`; the
engine knows no sessions, no futures, no order beyond the order of the calls it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab.types import (
    AdamParams,
    BaseModelInfo,
    CustomLoss,
    Drawn,
    ForwardBackwardResult,
    LoraConfig,
    LossSpec,
    OptimStepResult,
    Sample,
    SampleResult,
    TrainingBatch,
    WeightsRef,
)


class Learner(Protocol):
    """Trains LoRA adapters on one base model. Every call runs to its end, or raises and changes
    nothing."""

    info: BaseModelInfo
    losses: Mapping[str, LossSpec]

    def check_lora(self, config: LoraConfig) -> None:
        """Raise Invalid for a configuration this base model cannot honour."""

    def create(self, model_id: str, config: LoraConfig) -> None:
        """A fresh adapter (B = 0) and a fresh AdamW. `config.seed` is set."""

    def forward_backward(self, model_id: str, batch: TrainingBatch) -> ForwardBackwardResult:
        """Loss and log-probabilities of every datum; unless `forward_only`, add the gradient to the
        window. A user error leaves the window as it was."""

    def optim_step(self, model_id: str, params: AdamParams) -> OptimStepResult:
        """Apply and clear the window. A non-finite gradient raises Invalid naming the datums, keeps
        weights and moments, and clears the window. An empty window raises Invalid."""

    def check_custom(self, loss: CustomLoss) -> None:
        """Raise Invalid for a custom loss that is not allowed, naming the node."""

    def check_step(self, params: AdamParams) -> None:
        """Raise Invalid for parameters `optim_step` would refuse before it touches anything."""

    def clear_window(self, model_id: str) -> None:
        """Drop accumulated gradients."""

    def step_count(self, model_id: str) -> int:
        """Optimizer steps behind the current weights."""

    def save_state(self, model_id: str, folder: Path) -> int:
        """Write adapter and optimizer into `folder` (created; the caller renames it into place) as
        adapter.safetensors, optimizer.safetensors and state.json; return bytes written."""

    def save_adapter(self, model_id: str, folder: Path) -> int:
        """Write the adapter alone (adapter.safetensors, state.json); return bytes written."""

    def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Replace adapter (and optimizer, or start it fresh) and clear the window. A model
        that does not exist is created with the LoRA configuration of the checkpoint."""

    def snapshot(self, model_id: str) -> Callable[[Path], int]:
        """Copy what the model is now (weights, optimizer, steps, accumulated gradient) and return
        what writes the copy into a folder and says how many bytes. Copying is quick; the writing
        may be done by any thread, whatever the model becomes meanwhile."""

    def restore(self, model_id: str, folder: Path) -> None:
        """Make the model what it was when that snapshot was taken, to the last bit."""

    def unload(self, model_id: str) -> None:
        """Forget the model. Unknown ids are fine."""

    def stop(self) -> None:
        """Called from another thread: the running call raises Stopping at its next micro-batch."""


@dataclass(frozen=True, slots=True)
class SampleWork:
    """A Sample and the name of the weights it draws from; `head_k` > 0 records the top of every
    step. `request.params.seed` is set (the service draws one where the client gave none).
    `owner` says who asks: what was computed for one owner is never used for another.
    `on_token` is told of every token on the sampler's thread, before the result is set."""

    request: Sample
    target: str
    head_k: int = 0
    owner: str = ""
    on_token: Callable[[Drawn], None] | None = None


class Sampler(Protocol):
    """Draws tokens from one base model under any number of adapters, on its own thread."""

    info: BaseModelInfo

    def publish(self, target: str, ref: WeightsRef) -> None:
        """Make `target` mean `ref` from the next decode step on. Thread-safe; raises NotFound or
        Invalid if the adapter folder cannot be read."""

    def retire(self, target: str) -> None:
        """Forget a target; requests in flight keep their weights. Thread-safe."""

    def check(self, request: Sample) -> None:
        """Raise Invalid for a request this model cannot serve (prompt too long, ids out of range,
        limits). Thread-safe, no arithmetic."""

    def submit(self, work: SampleWork) -> Future[SampleResult]:
        """Queue it. `Future.cancel()` on the result, before or while it runs, frees its rows.
        Raises Busy when the queue is full."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """Finish the current decode step, fail what is in flight with Stopping, end the thread."""


Progress = Callable[[str, float], None]
"""(what is being done, fraction done 0..1)"""
