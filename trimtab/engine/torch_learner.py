"""The learner: losses and gradients of packed micro-batches, and AdamW on LoRA adapters.

Every result depends on the request, the order of requests and the thread count alone. Knows nothing
of sessions, spans or sequence ids. N rows of a datum, M packed rows, K ids a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimtab.engine import checkpoint
from trimtab.engine.adapters import adapter_bytes, check_lora, new_adapter
from trimtab.engine.batching import (
    Joined,
    MicroBatch,
    asked_ids,
    check_data,
    halves,
    joined,
    micro_batches,
    packed,
    rows_of,
    temperatures,
    to,
    unpack,
    width,
)
from trimtab.engine.cores import Cores
from trimtab.engine.costs import PassCost, measured
from trimtab.engine.flat_net import flat
from trimtab.engine.lora import Adapter
from trimtab.engine.memory import MIB, Memory, first_line, is_out_of_memory, keep_freed
from trimtab.engine.models import BaseModel
from trimtab.engine.shared_attention import SharedCausal
from trimtab.engine.training import Training, check_adam
from trimtab.errors import Invalid, NotFound, ServerError, Stopping, TooLarge, TrimtabError
from trimtab.losses import LOSSES
from trimtab.losses.base import Loss, LossInputs, LossOutputs, Metrics, StabilityInputs
from trimtab.losses.metrics import combine
from trimtab.losses.traced import trace
from trimtab.types import (
    AdamParams,
    BaseModelInfo,
    CustomLoss,
    ForwardBackwardResult,
    LoraConfig,
    LossSpec,
    OptimStepResult,
    TrainingBatch,
)

MICRO_BATCH_TOKENS = 2048
STATES = 5
"""Copies of an adapter during a step: weights, gradient, two moments, one to go back to."""


class TorchLearner:
    """engine.base.Learner on torch, for any number of models on one base model.

    `micro_batch_tokens` bounds the rows of one forward and backward pass and with them the memory;
    `cores` is shared with the samplers of the process; `losses` what it can train with; `memory`
    bounds all that is computed here, and is the machine's where none is given.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        max_lora_rank: int | None = None,
        cores: Cores | None = None,
        losses: Mapping[str, Loss] = LOSSES,
        memory: Memory | None = None,
    ) -> None:
        rank = base.info.max_lora_rank if max_lora_rank is None else max_lora_rank
        self.info: BaseModelInfo = replace(base.info, max_lora_rank=rank)
        self.losses: Mapping[str, LossSpec] = {name: loss.spec for name, loss in losses.items()}
        self._losses = losses
        self._net = flat(base.learner_net)
        self._device = base.device
        self._micro_batch_tokens = micro_batch_tokens
        self._cores = Cores() if cores is None else cores
        self._models: dict[str, Training] = {}
        self._stopping = threading.Event()
        keep_freed()
        self._memory = Memory(device=base.device) if memory is None else memory
        self._room = self._memory.free()  # when nothing is loaded but the base model

    # ----------------------------------------------------------------------- models

    def check_lora(self, config: LoraConfig) -> None:
        check_lora(self._net, config, self.info.max_lora_rank)

    def create(self, model_id: str, config: LoraConfig) -> None:
        self.check_lora(config)
        with self._alone("create_model", adapter_bytes(self._net, config) * STATES):
            self._models[model_id] = Training(new_adapter(self._net, config, self._device))

    def unload(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def step_count(self, model_id: str) -> int:
        return self._model(model_id).steps

    def check_custom(self, loss: CustomLoss) -> None:
        trace(loss)

    def check_step(self, params: AdamParams) -> None:
        check_adam(params)

    def clear_window(self, model_id: str) -> None:
        self._model(model_id).clear_window()

    def stop(self) -> None:
        self._stopping.set()

    def _model(self, model_id: str) -> Training:
        if model_id not in self._models:
            raise NotFound(f"model {model_id!r} is not loaded")
        return self._models[model_id]

    # ----------------------------------------------------------------------- training

    def forward_backward(self, model_id: str, batch: TrainingBatch) -> ForwardBackwardResult:
        model = self._model(model_id)
        loss = self._loss(batch)
        check_data(batch.data, self.info.vocab_size, self.info.max_context)
        run = Run(loss, batch.loss_fn_config, float(model.steps))
        with self._cores.learning():
            for micro in micro_batches(batch.data, self._micro_batch_tokens):
                if self._stopping.is_set():
                    raise Stopping("the server is stopping; the request stays journalled")
                self._carry(model, micro, run, backward=not batch.forward_only)
        if run.gradients is not None:
            culprits = [(batch.seq_id, i) for i in run.culprits]
            model.window.add(batch.seq_id, run.gradients, culprits)
        logprobs = tuple(run.logprobs[i] for i in range(len(batch.data)))
        return ForwardBackwardResult(logprobs, combine(run.metrics, len(batch.data)))

    def _loss(self, batch: TrainingBatch) -> Loss:
        if batch.custom is not None:
            return trace(batch.custom)
        if batch.loss_fn not in self._losses:
            raise Invalid(f"loss_fn is {batch.loss_fn!r}; allowed are {', '.join(self._losses)}")
        return self._losses[batch.loss_fn]

    def optim_step(self, model_id: str, params: AdamParams) -> OptimStepResult:
        model = self._model(model_id)
        size = sum(p.numel() * p.element_size() for p in model.parameters)
        with self._cores.learning(), self._alone("optim_step", size * STATES):
            return OptimStepResult(model.step(params))

    def _carry(self, model: Training, micro: MicroBatch, run: Run, *, backward: bool) -> None:
        """One micro-batch, or its halves where memory does not suffice for the whole. Halves sum to
        the whole up to float error: only a shortage of memory makes a result depend on more than
        its request."""
        part, short = run.apart(), None
        try:
            with self._memory.taking(self._need(model, micro, backward)):
                self._pass(model, micro, part, backward)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            short = first_line(error)
        if short is None:
            run.join(part)
        elif len(micro.data) == 1:
            raise self._too_much(model, micro, backward, short)
        else:  # outside the handler, whose traceback would keep what the pass had computed
            for half in halves(micro):
                self._carry(model, half, run, backward=backward)

    def _pass(self, model: Training, micro: MicroBatch, run: Run, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            loss = self._forward(model.adapter, micro, run)
        if backward:
            run.add(self._gradients(model, loss, micro, run))

    def _need(self, model: Training, micro: MicroBatch, backward: bool) -> int:
        ids = micro.asked * max(width(datum) for datum in micro.data)
        return self._cost.bytes(micro.segments, ids, model.adapter, backward=backward)

    @cached_property
    def _cost(self) -> PassCost:
        return measured(self._net, self._device, self.info.max_context)

    def _too_much(
        self, model: Training, micro: MicroBatch, backward: bool, why: str
    ) -> TrimtabError:
        """What a request fails with whose datum does not fit alone: the user's fault if it never
        would, else the moment's."""
        rows, room = micro.asked, self._room // MIB
        text = f"data[{micro.indices[0]}]: memory does not suffice for its {rows} tokens ({why})"
        if self._need(model, micro, backward) > self._room:
            return TooLarge(f"{text}; with nothing else loaded there would be {room} MiB")
        return ServerError(f"{text}; send it again when less is going on")

    @contextmanager
    def _alone(self, what: str, need: int) -> Iterator[None]:
        """A call that cannot be split: out of memory, it fails by itself and says so."""
        try:
            with self._memory.taking(need):
                yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            short = first_line(error)
            raise ServerError(f"{what}: memory does not suffice ({short})") from None

    def _forward(self, adapter: Adapter, micro: MicroBatch, run: Run) -> Tensor:
        """The summed loss of a micro-batch; its log-probabilities and metrics go to `run`."""
        losses = []
        for piece, logprobs_NK, tempered_NK in self._logprobs(adapter, micro):
            outputs = run.loss_of(piece, logprobs_NK, tempered_NK, self._device)
            losses.append(outputs.loss)
        return torch.stack(losses).sum()

    def _logprobs(self, adapter: Adapter, micro: MicroBatch) -> list[tuple[Joined, Tensor, Tensor]]:
        """Each piece of the micro-batch with the learner's log-probabilities (N, K) at the ids it
        asks for, untempered with their gradient and tempered without."""
        tokens_M, positions_M = packed(micro, self._device)
        plan = [(adapter, 0, len(tokens_M))]
        hidden_M = self._net.hidden(tokens_M, positions_M, SharedCausal(micro.segments), plan)
        logprobs_NK, tempered_NK = self._net.head.selected_logprobs(
            hidden_M,
            asked_ids(micro, self._device),
            plan,
            temperatures(micro, self._device),
            rows_of(micro, self._device),
        )
        pieces = joined(micro)
        each = unpack(logprobs_NK, pieces), unpack(tempered_NK, pieces)
        return list(zip(pieces, *each, strict=True))

    def _gradients(
        self, model: Training, loss: Tensor, micro: MicroBatch, run: Run
    ) -> list[Tensor]:
        """The gradient of a micro-batch; datums whose gradient is not finite are noted in `run`."""
        gradients = gradients_of(loss, model.parameters)
        if not all_finite(gradients):
            run.culprits.extend(self._culprits(model, micro, run))
        return gradients

    def _culprits(self, model: Training, micro: MicroBatch, run: Run) -> list[int]:
        """Which datums of a micro-batch with a broken gradient break it, each run on its own."""
        found = []
        for i, datum in zip(micro.indices, micro.data, strict=True):
            loss = self._forward(model.adapter, MicroBatch.of(i, (datum,)), run.apart())
            if not all_finite(gradients_of(loss, model.parameters)):
                found.append(i)
        return sorted(found or micro.indices)

    # ----------------------------------------------------------------------- files

    def save_state(self, model_id: str, folder: Path) -> int:
        model = self._model(model_id)
        return checkpoint.write(folder, self.info.name, model.adapter, model.steps, model.moments())

    def save_adapter(self, model_id: str, folder: Path) -> int:
        model = self._model(model_id)
        return checkpoint.write(folder, self.info.name, model.adapter, model.steps)

    def load_state(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        with self._alone("load_weights", 2 * sum(f.stat().st_size for f in folder.iterdir())):
            saved = checkpoint.read(
                folder,
                self._net,
                self.info.name,
                max_rank=self.info.max_lora_rank,
                device=self._device,
                optimizer=optimizer,
            )
        if model_id in self._models:
            checkpoint.check_same(self._models[model_id].adapter.config, saved.adapter.config)
        self._models[model_id] = Training(saved.adapter, saved.steps, saved.moments)

    def snapshot(self, model_id: str) -> Callable[[Path], int]:
        model = self._model(model_id)
        steps, (adapter, moments, window) = model.steps, model.copy()
        return lambda folder: checkpoint.write(
            folder, self.info.name, adapter, steps, moments, window=window
        )

    def restore(self, model_id: str, folder: Path) -> None:
        saved = checkpoint.read(
            folder,
            self._net,
            self.info.name,
            max_rank=self.info.max_lora_rank,
            device=self._device,
            optimizer=True,
            window=True,
        )
        model = Training(saved.adapter, saved.steps, saved.moments)
        if saved.window is not None:
            model.accumulate(saved.window)
        self._models[model_id] = model


@dataclass(eq=False)
class Run:
    """What one forward_backward gathers, micro-batch by micro-batch, before any of it counts."""

    loss: Loss
    config: Mapping[str, float]
    learner_step: float
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)  # by index in the request
    metrics: list[Metrics] = field(default_factory=list)
    gradients: list[Tensor] | None = None
    culprits: list[int] = field(default_factory=list)

    def apart(self) -> Run:
        """The same call with nothing gathered."""
        return Run(self.loss, self.config, self.learner_step)

    def loss_of(
        self, piece: Joined, logprobs_NK: Tensor, tempered_NK: Tensor, device: torch.device
    ) -> LossOutputs:
        inputs = loss_inputs(piece, logprobs_NK, tempered_NK, self.learner_step, device)
        outputs = self.loss(inputs, self.config)
        logprobs = inputs.target_logprobs.detach().float().cpu()
        each = (part.numpy() for part in logprobs.split(piece.lengths))
        self.logprobs |= zip(piece.indices, each, strict=True)
        self.metrics.append({"loss:sum": outputs.loss.detach(), **outputs.metrics})
        return outputs

    def add(self, gradients: list[Tensor]) -> None:
        if self.gradients is None:
            self.gradients = gradients
        else:
            for mine, theirs in zip(self.gradients, gradients, strict=True):
                mine.add_(theirs)

    def join(self, part: Run) -> None:
        """Take what a part of the call has gathered."""
        self.logprobs |= part.logprobs
        self.metrics += part.metrics
        self.culprits += part.culprits
        if part.gradients is not None:
            self.add(part.gradients)


def loss_inputs(
    piece: Joined,
    logprobs_NK: Tensor,
    tempered_NK: Tensor,
    learner_step: float,
    device: torch.device,
) -> LossInputs:
    """The columns of one piece, told apart: its targets first, then the recorded head."""
    datum = piece.datum
    tensors = {name: to(array, device) for name, array in datum.inputs.items()}
    targets = tensors["target_tokens"]
    own = 1 if targets.ndim == 1 else targets.shape[1]
    target_logprobs = logprobs_NK[:, 0] if targets.ndim == 1 else logprobs_NK[:, :own]
    stability = None
    record = datum.stability
    if record is not None:
        stability = StabilityInputs(
            sequence_N=to(record.sequence_N, device),
            recorded_N=to(record.recorded_N, device),
            logprobs_N=to(record.logprobs_N, device),
            head_ids_NK=to(record.head_ids_NK, device),
            head_logprobs_NK=to(record.head_logprobs_NK, device),
            target_tempered_N=tempered_NK[:, 0],
            head_target_logprobs_NK=logprobs_NK[:, own:],
            head_target_tempered_NK=tempered_NK[:, own:],
            temperature_N=to(record.temperature_N, device),
            version_step_N=to(record.version_step_N, device),
            target_ids_N=targets,
            learner_step=learner_step,
        )
    return LossInputs(target_logprobs, tensors, stability, to(piece.datum_N, device))


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """d loss / d parameters, zeros for what the loss does not depend on."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    return bool(torch.isfinite(torch.stack([t.sum() for t in tensors])).all())
