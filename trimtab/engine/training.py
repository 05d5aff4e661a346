"""One model in training: its adapter, AdamW, and the window of gradients between two steps.

Knows nothing of the base model, of losses or of files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimtab.engine.checkpoint import MOMENTS, Accumulated, Moments, adapter_tensors
from trimtab.engine.lora import Adapter
from trimtab.errors import Invalid
from trimtab.types import AdamParams

NAMED = 8  # datums an error names before it counts the rest


@dataclass(eq=False)
class Window:
    """Gradients summed since the last step, in the order of `Adapter.parameters`; `seq_ids` are the
    requests in it, `culprits` the (seq_id, datum) whose gradient was not finite."""

    gradients: list[Tensor] | None = None
    seq_ids: list[int] = field(default_factory=list)
    culprits: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, seq_id: int, gradients: Sequence[Tensor], culprits: Sequence[tuple[int, int]]
    ) -> None:
        if self.gradients is None:
            self.gradients = list(gradients)
        else:
            for mine, theirs in zip(self.gradients, gradients, strict=True):
                mine.add_(theirs)
        self.seq_ids.append(seq_id)
        self.culprits.extend(culprits)

    def blame(self) -> str:
        """Which datums, or failing that which requests, made the sum what it is."""
        if not self.culprits:
            return "the sum of requests " + ", ".join(str(s) for s in self.seq_ids[:NAMED])
        named = [f"seq_id {s} datum {i}" for s, i in self.culprits[:NAMED]]
        rest = len(self.culprits) - len(named)
        return ", ".join(named) + (f" and {rest} more" if rest else "")


class Training:
    """An adapter that learns. `steps` counts the optimizer steps behind its weights."""

    def __init__(self, adapter: Adapter, steps: int = 0, moments: Moments | None = None) -> None:
        self.adapter = adapter
        self.steps = steps
        self.window = Window()
        self.parameters = [p.requires_grad_(True) for p in adapter.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters)
        if moments:
            for name, parameter in self._named().items():
                # AdamW counts on the CPU.
                self.optimizer.state[parameter] = moments[name] | {
                    "step": moments[name]["step"].cpu()
                }

    def clear_window(self) -> None:
        self.window = Window()

    def moments(self) -> Moments:
        """AdamW's state by tensor name; empty before the first step."""
        state = self.optimizer.state
        return {
            name: {part: state[p][part] for part in MOMENTS}
            for name, p in self._named().items()
            if p in state
        }

    def copy(self) -> tuple[Adapter, Moments, Accumulated | None]:
        """All that makes this model what it is, apart from what it becomes."""
        pairs = {
            name: (A.detach().clone(), B.detach().clone())
            for name, (A, B) in self.adapter.pairs.items()
        }
        moments = {
            name: {part: value.clone() for part, value in each.items()}
            for name, each in self.moments().items()
        }
        return Adapter(self.adapter.config, pairs), moments, self._accumulated()

    def _accumulated(self) -> Accumulated | None:
        window = self.window
        if window.gradients is None:
            return None
        named = zip(self._named(), window.gradients, strict=True)
        gradients = {name: gradient.clone() for name, gradient in named}
        return Accumulated(gradients, tuple(window.seq_ids), tuple(window.culprits))

    def accumulate(self, window: Accumulated) -> None:
        """Take up the gradients of a snapshot."""
        gradients = [window.gradients[name] for name in self._named()]
        self.window = Window(gradients, list(window.seq_ids), list(window.culprits))

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW step on the window, all of it or nothing; the window is cleared unless the
        parameters or an empty window are refused."""
        check_adam(params)
        window, self.window = self.window, Window()
        if window.gradients is None:
            raise Invalid(
                "optim_step: no gradient since the last step; call forward_backward first"
            )
        before = self._copy()
        try:
            return self._step(window, params, before[0])
        except BaseException:
            self._restore(*before)
            raise
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def _step(
        self, window: Window, params: AdamParams, weights: Sequence[Tensor]
    ) -> dict[str, float]:
        for parameter, gradient in zip(self.parameters, window.gradients or (), strict=True):
            parameter.grad = gradient
        norm = self._clip(params.grad_clip_norm)
        if not math.isfinite(norm):
            raise Invalid(
                f"optim_step: the gradient is not finite ({window.blame()}); weights and optimizer "
                "are as before and the accumulated gradients are dropped"
            )
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self.optimizer.step()
        with torch.no_grad():
            moved = norm_of([p - w for p, w in zip(self.parameters, weights, strict=True)])
        if not math.isfinite(moved):
            raise Invalid(
                "optim_step: these optimizer parameters would make the weights not finite; weights "
                "and optimizer are as before and the accumulated gradients are dropped"
            )
        averages = norm_of([self.optimizer.state[p]["exp_avg"] for p in self.parameters])
        self.steps += 1
        return {
            "grad_norm": norm,
            "update_norm": moved,
            "exp_avg_norm": averages,
            "learning_rate": params.learning_rate,
            "optimizer_step": float(self.steps),
        }

    def _clip(self, limit: float) -> float:
        """The gradient's norm before clipping; clips to `limit` where it is above 0."""
        if limit > 0:
            return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        return norm_of([p.grad for p in self.parameters])

    def _named(self) -> dict[str, Tensor]:
        return adapter_tensors(self.adapter)

    def _copy(self) -> tuple[list[Tensor], dict[Tensor, dict[str, Tensor]]]:
        """Weights and moments as they are, to go back to."""
        state = self.optimizer.state
        weights = [p.detach().clone() for p in self.parameters]
        return weights, {p: {k: v.clone() for k, v in state[p].items()} for p in state}

    def _restore(self, weights: Sequence[Tensor], moments: dict[Tensor, dict[str, Tensor]]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)
        self.optimizer.state.clear()
        self.optimizer.state.update(moments)


def norm_of(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


# Beyond what anyone trains with, and where AdamW's own products would overflow float32.
LARGE = 1e6

ALLOWED = {
    "learning_rate": (0.0, LARGE),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "eps": (0.0, LARGE),
    "weight_decay": (0.0, LARGE),
    "grad_clip_norm": (0.0, math.inf),
}


def check_adam(params: AdamParams) -> None:
    """Raise Invalid for a number AdamW cannot use."""
    for name, (low, high) in ALLOWED.items():
        value = getattr(params, name)
        if not low <= value < high:
            raise Invalid(f"adam_params.{name} is {value}; allowed is {low} <= {name} < {high}")
