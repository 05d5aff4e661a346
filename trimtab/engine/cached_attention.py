"""Attention with a memory: a prompt's next piece, and one new token for each of many rows.

M packed rows of a pass, n rows of one pool, Hq query heads, H key/value heads, G = Hq / H, D head
size, C rows of a prompt's piece, J keys that a row may look at.

Decoding takes the rows of a pool in one batched product a layer, whatever their lengths; a bias
hides what a shorter row does not have. Knows nothing of requests or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from trimtab.engine.attention import PackedCausal, Rule, masked
from trimtab.engine.kv import KVLayout, Pool, PromptKV
from trimtab.engine.net import Net


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows [start, start + rows) of a prompt, computed in this pass."""

    prompt: PromptKV
    start: int
    rows: int


class PrefillPlan:
    """Pieces of prompts one after another. Each sees what its prompt remembers and itself, and is
    remembered. Pieces that begin a prompt are the learner's packed attention."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}

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
        self._remember(layer, k, v)
        rule = Rule(scale, window, softcap)
        out: list[Tensor] = []
        start = 0
        for begins, run in groupby(self.pieces, lambda piece: piece.start == 0):
            pieces = list(run)
            stop = start + sum(piece.rows for piece in pieces)
            rows = slice(start, stop)
            if begins:
                plan = PackedCausal([piece.rows for piece in pieces])
                new = (x[:, :, rows] for x in (q, k, v))
                out.append(plan.attend(layer, *new, scale=scale, window=window, softcap=softcap))
            else:
                sizes = [piece.rows for piece in pieces]
                parts = zip(pieces, q[:, :, rows].split(sizes, dim=2), strict=True)
                out += [self._continue(layer, piece, part, rule) for piece, part in parts]
            start = stop
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def _remember(self, layer: int, k: Tensor, v: Tensor) -> None:
        row = 0
        for piece in self.pieces:
            places = slice(piece.start, piece.start + piece.rows)
            rows = slice(row, row + piece.rows)
            piece.prompt.keys[layer][:, places] = k[0, :, rows]
            piece.prompt.values[layer][:, places] = v[0, :, rows]
            row += piece.rows

    def _continue(self, layer: int, piece: Piece, q: Tensor, rule: Rule) -> Tensor:
        """q (1, Hq, C, D) of a later piece -> (1, C, Hq, D)."""
        stop = piece.start + piece.rows
        first = 0 if rule.window is None else max(0, piece.start - rule.window + 1)
        keys = piece.prompt.keys[layer][None, :, first:stop]
        values = piece.prompt.values[layer][None, :, first:stop]
        mask = self._mask(piece, first, rule.window, q.device)
        out = masked(q, keys, values, mask, scale=rule.scale, softcap=rule.softcap)
        return out.transpose(1, 2)

    def _mask(self, piece: Piece, first: int, window: int | None, device: torch.device) -> Tensor:
        """(C, J) bool over the keys from `first` on; the same in every layer of one window."""
        key = (piece.start, piece.rows, window)
        if key not in self.masks:
            stop = piece.start + piece.rows
            i = torch.arange(piece.start, stop, device=device)[:, None]
            j = torch.arange(first, stop, device=device)[None, :]
            seen = j <= i
            self.masks[key] = seen if window is None else seen & (j > i - window)
        return self.masks[key]


# --------------------------------------------------------------------------- decoding


@dataclass(slots=True, eq=False)
class PoolRows:
    """The rows of one pool in a decoding batch, every one of them about to get a token. `ends` (n,)
    is the place each token goes to."""

    pool: Pool
    start: int
    ends: Tensor
    shortest: int
    longest: int
    places: dict[int, Tensor] = field(default_factory=dict)
    biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.ends)

    def advance(self) -> None:
        """Every row has got one token more."""
        self.ends += 1
        self.shortest += 1
        self.longest += 1
        for places in self.places.values():
            places.add_(1)
        self.biases.clear()

    def attend(self, layer: int, q_nD: Tensor, k_nD: Tensor, v_nD: Tensor, rule: Rule) -> Tensor:
        """q (n, Hq, D), k and v (n, H, D) -> (n, Hq, D)."""
        rows, heads = k_nD.shape[:2]
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self._remember(keys, k_nD)
        self._remember(values, v_nD)
        window = rule.window
        if window is not None and window > self.longest:
            window = None
        first = 0 if window is None else max(0, self.shortest - window + 1)
        seen = slice(first, self.longest + 1)
        k = keys[:rows, :, seen].flatten(0, 1)
        v = values[:rows, :, seen].flatten(0, 1)
        q = (q_nD * rule.scale).reshape(rows * heads, -1, q_nD.shape[-1])
        bias = self._bias(heads, first, window)
        return weighted(q, k, v, bias, rule.softcap).view(rows, q_nD.shape[1], -1)

    def _remember(self, tensor: Tensor, new_nD: Tensor) -> None:
        """Put (n, H, D) at the rows' ends of a pool's (R, H, L, D)."""
        rows, heads, size = new_nD.shape
        if heads not in self.places:
            cell = torch.arange(rows * heads, device=tensor.device) * self.pool.length
            self.places[heads] = cell + self.ends.repeat_interleave(heads)
        tensor.view(-1, size).index_copy_(0, self.places[heads], new_nD.reshape(-1, size))

    def _bias(self, heads: int, first: int, window: int | None) -> Tensor | None:
        """(n * H, 1, J): -inf where a row has no key, None where every row sees all of them."""
        if self.shortest == self.longest:
            return None
        key = (heads, window)
        if key not in self.biases:
            j_J = torch.arange(first, self.longest + 1, device=self.ends.device)
            hidden_nJ = j_J > self.ends[:, None]
            if window is not None:
                hidden_nJ |= j_J <= self.ends[:, None] - window
            dtype = self.pool.keys[0].dtype
            bias_nJ = torch.zeros(hidden_nJ.shape, dtype=dtype, device=j_J.device)
            bias_nJ.masked_fill_(hidden_nJ, -torch.inf)
            self.biases[key] = bias_nJ.repeat_interleave(heads, 0)[:, None]
        return self.biases[key]


def weighted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Scaled q (N, G, D) against k, v (N, J, D): the G query heads of a key head share a product.

    Two batched products are as fast here as the fused kernel, which has no softcap."""
    if softcap is not None:
        scores = torch.bmm(q, k.transpose(1, 2)).div_(softcap).tanh_().mul_(softcap)
        scores = scores if bias is None else scores.add_(bias)
    elif bias is not None:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2))
    else:
        scores = torch.bmm(q, k.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)


class DecodePlan:
    """One new token for each row of `parts`. `order` (M,) names, for each row in the order of the
    parts, its row in the pass (None: the same order)."""

    def __init__(self, parts: Sequence[PoolRows], order: Tensor | None) -> None:
        self.parts = parts
        self.order = order
        self.back = None if order is None else torch.argsort(order)

    def advance(self) -> None:
        for part in self.parts:
            part.advance()

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
        q_MD, k_MD, v_MD = (x[0].transpose(0, 1) for x in (q, k, v))
        if self.order is not None:
            q_MD, k_MD, v_MD = q_MD[self.order], k_MD[self.order], v_MD[self.order]
        rule = Rule(scale, window, softcap)
        out = []
        for part in self.parts:
            rows = slice(part.start, part.stop)
            own = (x[rows] for x in (q_MD, k_MD, v_MD))
            out.append(part.attend(layer, *own, rule))
        out_MD = out[0] if len(out) == 1 else torch.cat(out)
        return (out_MD if self.back is None else out_MD[self.back])[None]


# --------------------------------------------------------------------------- the layout


class _Shapes:
    """Notes what each layer would remember."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.dtype = torch.float32

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **_options: object) -> Tensor:
        self.layers[layer] = (k.shape[1], k.shape[3], v.shape[3])
        self.dtype = k.dtype
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)


@torch.inference_mode()
def layout_of(net: Net, device: torch.device) -> KVLayout:
    """Found by running one token through the net (a token sees only itself)."""
    shapes = _Shapes()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    net.hidden(zero, zero, shapes, [])
    layers = tuple(shapes.layers[i] for i in range(len(shapes.layers)))
    return KVLayout(layers, shapes.dtype, device)
