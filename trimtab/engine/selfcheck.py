"""The check at load: our packed path against plain transformers on the same weights.

Two ragged sequences, a dozen tokens: the first time we run a model, an architecture that does what
we do not honour (another mask, another logit rule, a state that leaks from row to row) is refused
instead of being served wrong. What a dozen tokens cannot show (a wide window) is read from the
configuration. Knows nothing of architectures by name, and of files nothing.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trimtab.engine.attention import PackedCausal
from trimtab.engine.net import Net
from trimtab.errors import Invalid

LENGTHS = (7, 5)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}


class Watched(PackedCausal):
    """A PackedCausal that remembers the window each layer asked for."""

    def attend(self, layer: int, *args: Any, window: int | None, **options: Any) -> Tensor:
        self.windows[layer] = window
        return super().attend(layer, *args, window=window, **options)

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.windows: dict[int, int | None] = {}


def probe(vocab_size: int) -> list[list[int]]:
    """Fixed tokens spread over the vocabulary, other ones in each sequence."""
    flat = [(7919 * i + 11) % vocab_size for i in range(sum(LENGTHS))]
    return [flat[: LENGTHS[0]], flat[LENGTHS[0] :]]


@torch.no_grad()
def reference(model: PreTrainedModel) -> Tensor:
    """Logits (rows, V) float32 of plain transformers, one sequence at a time."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    device = model.device
    out = [
        model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0]
        for tokens in probe(vocab_size)
    ]
    return torch.cat(out).float()


@torch.no_grad()
def check_net(net: Net, expected: Tensor, dtype: torch.dtype) -> dict[int, int | None]:
    """Raise Invalid unless `net` gives the expected logits; return each layer's window."""
    device = expected.device
    tokens = torch.tensor([*chain(*probe(net.head.vocab_size))], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
    plan = Watched(LENGTHS)
    try:
        got = net.head.logits(net.hidden(tokens, positions, plan, []), []).float()
    except (AttributeError, TypeError, AssertionError, RuntimeError, IndexError) as error:
        raise Invalid(f"the model cannot run on packed rows: {error!r}") from error
    worst = float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not worst <= TOLERANCE[dtype]:
        raise Invalid(
            f"on packed rows the model's logits differ from plain transformers' by {worst:.2e} of "
            f"their size in {str(dtype).removeprefix('torch.')}, more than {TOLERANCE[dtype]:.0e}: "
            "this architecture does something trimtab does not honour"
        )
    return plan.windows


@torch.no_grad()
def mismatch(sampler: Net, learner: Net, device: torch.device) -> float:
    """KL(q || p) in nats a token between the two nets on the same weights, over the probe's rows:
    what the sampler's numerics alone put between q and p (0 where both compute alike)."""
    tokens = torch.tensor([*chain(*probe(learner.head.vocab_size))], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
    log_q, log_p = (
        net.head.logits(net.hidden(tokens, positions, PackedCausal(LENGTHS), []), [])
        .double()
        .log_softmax(-1)
        for net in (sampler, learner)
    )
    return max(0.0, float((log_q.exp() * (log_q - log_p)).sum(-1).mean()))


def check_architecture(config: Any, windows: dict[int, int | None], context: int) -> None:
    """Raise Invalid for what the probe is too short to show: layers that are not attention, and
    windows or chunks that the layers did not ask our attention for."""
    layers = getattr(config, "layer_types", None) or []
    strange = sorted(set(layers) - KNOWN_LAYERS)
    if strange:
        raise Invalid(f"the model has layers of kind {', '.join(strange)}; trimtab runs attention")
    if len(windows) != config.num_hidden_layers:
        raise Invalid(
            f"{len(windows)} of the model's {config.num_hidden_layers} layers use the attention "
            "that trimtab can replace; all must"
        )
    width = getattr(config, "sliding_window", None)
    if width is None or context <= width:
        return
    for layer, asked in windows.items():
        slides = layer < len(layers) and layers[layer] == "sliding_attention"
        if asked is None and (slides or not layers):
            raise Invalid(
                f"layer {layer} has a sliding window of {width} that its attention does not pass "
                f"on; set max_context to {width} or less"
            )
