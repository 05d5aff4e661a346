"""Attention over packed rows, and the function transformers calls for it.

M packed rows, Hq query heads, Hkv key/value heads, D head size, S segments, L rows of a segment,
W rows of a sliding window (a row sees itself and the W-1 before it), C rows of a query block.

A plan says which rows see which. `PackedCausal` is the learner's: segments one after another, each
causal in itself, no padding anywhere. Knows nothing of caches or of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface

from trimtab.engine.context import current
from trimtab.errors import Invalid

NAME = "trimtab"


class AttentionPlan(Protocol):
    """How the rows of one pass attend to one another (and to whatever the plan remembers)."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q (1, Hq, M, D), k and v (1, Hkv, M, D) after rotary embedding -> (1, M, Hq, D)."""


# ------------------------------------------------------------------------ the registered function

# What an attention layer may pass besides, because it changes nothing for a causal decoder that
# neither drops out nor reports its weights.
HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})


def attention_forward(  # noqa: PLR0917 -- transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, answered by the plan of the running pass."""
    refuse_unknown(module, attention_mask, dropout, is_causal, others)
    layer = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    plan = current().attention
    out = plan.attend(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap)
    return out, None


def refuse_unknown(
    module: nn.Module,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    """Raise Invalid for anything an architecture asks of attention that a plan does not honour."""
    asked = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if mask is not None:
        asked.append("attention_mask")
    if dropout:
        asked.append("dropout")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        asked.append("is_causal=False")
    if asked:
        raise Invalid(
            f"the model's attention ({type(module).__name__}) asks for {', '.join(asked)}, which "
            "trimtab does not support; causal attention with sliding windows and softcaps is"
        )


# Registered under a name that transformers has no mask function for: it then builds no mask.
AttentionInterface.register(NAME, attention_forward)

# --------------------------------------------------------------------------- the learner's plan


BLOCK = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """What one layer asks of attention."""

    scale: float
    window: int | None
    softcap: float | None

    def plain(self, length: int) -> bool:
        """Whether rows of a segment this long see all before them, by an ordinary softmax."""
        return self.softcap is None and (self.window is None or length <= self.window)


@dataclass(frozen=True, slots=True)
class Segments:
    """`prefix` packed rows that several segments begin with, then the `own` rows of each."""

    prefix: int
    own: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.prefix + sum(self.own)

    @property
    def pairs(self) -> int:
        """Of a row and one that it may see, or that stands in its segment."""
        return self.prefix**2 + sum(n * (self.prefix + n) for n in self.own)

    @property
    def longest(self) -> int:
        return self.prefix + max(self.own, default=0)


@dataclass(slots=True)
class PackedCausal:
    """Segments of `lengths` rows one after another, each causal in itself.

    Neighbouring segments of equal length share one call; a segment's numbers do not depend on which
    others are packed with it (up to the rounding of batched kernels).

        >>> PackedCausal([3, 3, 5]).rows
        11
    """

    lengths: Sequence[int]
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        rule = Rule(scale, window, softcap)
        out = []
        for start, stop, length in runs(self.lengths):
            q_SHLD, k_SHLD, v_SHLD = (split(x[:, :, start:stop], length) for x in (q, k, v))
            out.append(self.segments(q_SHLD, k_SHLD, v_SHLD, rule))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def segments(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """q (S, Hq, L, D) against k and v (S, Hkv, P + L, D), whose last L rows are q's own
        -> (1, S*L, Hq, D)."""
        length = k.shape[2]
        if rule.plain(length) and q.shape[2] == length:
            out = causal(q, k, v, rule.scale)
        else:
            out = self._blocks(q, k, v, rule)
        return out.transpose(1, 2).reshape(1, -1, out.shape[1], out.shape[3])

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Query blocks against only the keys their window reaches: memory is L*W, not L*L."""
        length, before = q.shape[2], k.shape[2] - q.shape[2]
        window = min(rule.window or k.shape[2], k.shape[2])
        out = []
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            first = max(0, before + start - window + 1)
            mask = self._mask(stop - start, before + start - first, window).to(q.device)
            keys, values = k[:, :, first : before + stop], v[:, :, first : before + stop]
            out.append(
                masked(
                    q[:, :, start:stop], keys, values, mask, scale=rule.scale, softcap=rule.softcap
                )
            )
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)

    def _mask(self, rows: int, before: int, window: int) -> Tensor:
        """(C, before + C) bool: row i of the block sees key j where
        i + before - W < j <= i + before, counted from the first key the block reaches."""
        key = (rows, before, window)
        if key not in self.masks:
            i = torch.arange(rows)[:, None] + before
            j = torch.arange(rows + before)[None, :]
            self.masks[key] = (j <= i) & (j > i - window)
        return self.masks[key]


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first row, past the last, length) of each run of neighbours of equal length, empty ones
    left out."""
    start = 0
    for length, run in groupby(lengths):
        stop = start + length * sum(1 for _ in run)
        if length:
            yield start, stop, length
        start = stop


def split(x: Tensor, length: int) -> Tensor:
    """(1, H, S*L, D) -> (S, H, L, D), a view."""
    return x[0].unflatten(1, (-1, length)).transpose(0, 1)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """q (S, Hq, C, D) against k, v (S, Hkv, J, D) where `mask` (C, J) is True; softmax in float32.

    `mask` may be anything that broadcasts to (S, Hq, C, J)."""
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
