"""A user's own loss as the SDK sends it: the nodes of a torch.fx trace, as plain data.

Nothing of it is evaluated. A node names an operation of the tables below, and one that is not there
is refused by its name before anything runs. What a loss may compute is bounded as well: every value
is laid out on the meta device first, where only its shape exists.

    traced = trace(CustomLoss("scaled", inputs, nodes))     # Invalid names the node that is refused
    traced(LossInputs(...), {})                             # like any other loss

The graph runs once a datum and its losses are summed. Metrics are the user's, named
`custom/<name>:sum` or `custom/<name>:mean`; a mean leaves here as the sum over datums, for whoever
knows their number to divide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import Invalid
from trimtab.losses.base import Loss, LossInputs, LossOutputs
from trimtab.losses.traced_check import check
from trimtab.losses.traced_ops import DTYPES, call
from trimtab.types import CustomLoss, CustomLossNode, LossSpec

MOST_VALUES = 2**26  # numbers that all values of one datum may hold together: 256 MiB of float32


def trace(loss: CustomLoss) -> Loss:
    """The loss a graph describes. Invalid names the node and what is refused of it."""
    check(loss)
    first, *others = loss.inputs
    inputs = {"target_tokens": "required", **{i.name: "required" for i in others}}
    spec = LossSpec(
        "custom",
        inputs=inputs,  # type: ignore[arg-type]
        allows_alternatives=first.rank == 2,
        doc=f"the custom loss {loss.name!r}",
    )
    return Loss(spec, Traced(loss, spec))


@dataclass(frozen=True, slots=True)
class Traced:
    """A checked graph. `spec.inputs` names what each datum must bring."""

    loss: CustomLoss
    spec: LossSpec

    def __call__(self, inputs: LossInputs, config: Mapping[str, float]) -> LossOutputs:
        total, sums = inputs.target_logprobs.new_zeros(()), dict[str, Tensor]()
        for logprobs, tensors in _each(inputs):
            given = [logprobs, *(tensors[i.name].clone() for i in self.loss.inputs[1:])]
            self._bound(given)
            loss, metrics = self._run(given, None)
            total = total + loss.to(total.dtype)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float()
        return LossOutputs(total, dict(sums))

    def _bound(self, given: Sequence[Tensor]) -> None:
        """Lay every value out without computing it; refuse what would be too much."""
        room = _Room(MOST_VALUES)
        with torch.device("meta"):
            self._run([tensor.to("meta") for tensor in given], room)

    def _run(self, given: Sequence[Tensor], room: _Room | None) -> tuple[Tensor, dict[str, Tensor]]:
        values: dict[str, Any] = {}
        inputs = iter(given)
        for node in self.loss.nodes:
            if node.op == "placeholder":
                values[node.name] = next(inputs)
            elif node.op == "output":
                return self._output(_decode(node, node.args[0], values))
            else:
                values[node.name] = self._value(node, values, room)
        raise AssertionError("a checked graph ends with its output")

    def _value(self, node: CustomLossNode, values: Mapping[str, Any], room: _Room | None) -> Any:
        args = [_decode(node, arg, values) for arg in node.args]
        kwargs = {key: _decode(node, arg, values) for key, arg in node.kwargs.items()}
        try:
            value = call(node, args, kwargs, laid_out=room is not None)
        except (TypeError, ValueError, RuntimeError, IndexError, ArithmeticError) as error:
            reason = str(error).split("\n", 1)[0][:200]
            raise Invalid(f"custom loss {self.loss.name!r}, node {node.name!r}: {reason}") from None
        if room is not None:
            room.take(self.loss, node, value)
        return value

    def _output(self, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = output
        for name, value in {"loss": loss, **metrics}.items():
            if not isinstance(value, Tensor) or value.numel() != 1 or value.ndim != 0:
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise Invalid(
                    f"custom loss {self.loss.name!r} must return {name} as a scalar tensor, found"
                    f" {found}"
                )
        return loss, metrics


@dataclass(slots=True)
class _Room:
    left: int

    def take(self, loss: CustomLoss, node: CustomLossNode, value: Any) -> None:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        self.left -= sum(part.numel() for part in parts if isinstance(part, Tensor))
        if self.left < 0:
            raise Invalid(
                f"custom loss {loss.name!r}, node {node.name!r}: the values of one datum would hold"
                f" more than {MOST_VALUES} numbers"
            )
        if not all(_plain(part) for part in parts):
            raise Invalid(
                f"custom loss {loss.name!r}, node {node.name!r} gives a {type(value).__name__};"
                " only tensors and numbers are allowed"
            )


def _plain(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or isinstance(value, (Tensor, float, torch.dtype, torch.device))


def _each(inputs: LossInputs) -> list[tuple[Tensor, Mapping[str, Tensor]]]:
    """The datums that stand one after another in `inputs`."""
    if inputs.datum_N is None or not inputs.datum_N.any():
        return [(inputs.target_logprobs.clone(), inputs.tensors)]
    lengths = torch.bincount(inputs.datum_N).tolist()
    logprobs = torch.split(inputs.target_logprobs, lengths)
    split = {name: torch.split(tensor, lengths) for name, tensor in inputs.tensors.items()}
    return [
        (logp.clone(), {name: parts[i] for name, parts in split.items()})
        for i, logp in enumerate(logprobs)
    ]


def _decode(node: CustomLossNode, arg: Any, values: Mapping[str, Any]) -> Any:
    """An encoded argument, checked before by `_check_arg`."""
    if isinstance(arg, (list, tuple)):
        return [_decode(node, a, values) for a in arg]
    if not isinstance(arg, Mapping):
        return arg
    [(kind, inner)] = arg.items()
    if kind == "ref":
        return values[inner]
    if kind == "tuple":
        return tuple(_decode(node, a, values) for a in inner)
    if kind == "dict":
        return {key: _decode(node, a, values) for key, a in inner.items()}
    if kind == "slice":
        return slice(*(_decode(node, a, values) for a in inner))
    if kind == "ellipsis":
        return ...
    if kind == "float":
        return float(inner)
    if kind == "device":  # wherever the loss runs
        return next((v.device for v in values.values() if isinstance(v, Tensor)), None)
    return DTYPES[inner]
