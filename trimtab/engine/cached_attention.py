"""Attention with a memory: a prompt's next piece, and one new token for each of many rows.

M packed rows of a pass, n rows of one group, R prompts of one group, S samples that share a prompt,
Hq query heads, H key/value heads, G = Hq / H, D head size, C rows of a prompt's piece, J keys.

Decoding takes a group in one batched product a layer with its prompts, each read once for all its
samples, and one with the rows' own tokens, whatever their lengths; a bias hides what a shorter row
does not have. Knows nothing of requests or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.engine.attention import PackedCausal, Rule, masked
from trimtab.engine.fast_net import FastNet
from trimtab.engine.kv import Group, KVLayout, Owner, Pool
from trimtab.engine.net import Net


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows [start, start + rows) of a prompt of `pool`, computed in this pass."""

    pool: Pool
    prompt: Owner
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
            piece.pool.keys[layer][piece.prompt.slot, :, places] = k[0, :, rows]
            piece.pool.values[layer][piece.prompt.slot, :, places] = v[0, :, rows]
            row += piece.rows

    def _continue(self, layer: int, piece: Piece, q: Tensor, rule: Rule) -> Tensor:
        """q (1, Hq, C, D) of a later piece -> (1, C, Hq, D)."""
        stop = piece.start + piece.rows
        first = 0 if rule.window is None else max(0, piece.start - rule.window + 1)
        keys = piece.pool.keys[layer][piece.prompt.slot, None, :, first:stop]
        values = piece.pool.values[layer][piece.prompt.slot, None, :, first:stop]
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


class Sharing:
    """Which row has which prompt: `prompt_n` the number of each row's prompt in its pool.

    `to_prompts` brings the rows' queries (or weights) to their prompts, S to each, and `to_rows`
    the answers back. A prompt with fewer rows gets copies of another's, which nobody takes back.
    """

    def __init__(self, prompt_n: Sequence[int], device: torch.device) -> None:
        taken = Counter[int]()
        places = []
        for prompt in prompt_n:
            places.append((prompt, taken[prompt]))
            taken[prompt] += 1
        self.prompts = max(prompt_n) + 1
        self.samples = max(taken.values())
        back = [prompt * self.samples + column for prompt, column in places]
        straight = back == list(range(self.prompts * self.samples))
        self.back: Tensor | None = None
        self.there: Tensor | None = None
        if not straight:
            self.back = torch.tensor(back, device=device)
            self.there = torch.zeros(
                self.prompts * self.samples, dtype=torch.int64, device=device
            ).index_copy_(0, self.back, torch.arange(len(back), device=device))

    def to_prompts(self, x_nHGX: Tensor) -> Tensor:
        """(n, H, G, X) -> (R * H, S * G, X)."""
        if self.there is not None:
            x_nHGX = x_nHGX[self.there]
        _, heads, share, size = x_nHGX.shape
        x = x_nHGX.reshape(self.prompts, self.samples, heads, share, size).transpose(1, 2)
        return x.reshape(self.prompts * heads, self.samples * share, size)

    def to_rows(self, x: Tensor, heads: int) -> Tensor:
        """(R * H, S * G, X) -> (n * H, G, X)."""
        share, size = x.shape[1] // self.samples, x.shape[2]
        x = x.view(self.prompts, heads, self.samples, share, size).transpose(1, 2)
        x = x.reshape(self.prompts * self.samples, heads, share, size)
        if self.back is not None:
            x = x[self.back]
        return x.reshape(-1, share, size)


class GroupRow(NamedTuple):
    """A row as attention sees it: the number of its prompt in the group's pool and how long that
    is, and how many tokens of its own it remembers: the place its next one goes to."""

    prompt: int
    known: int
    own: int


class GroupRows:
    """The rows of one group, every one of them about to get a token; they are rows [start, stop) of
    a batch."""

    def __init__(
        self, group: Group, start: int, rows: Sequence[GroupRow], device: torch.device
    ) -> None:
        prompt_n, known_n, own_n = zip(*rows, strict=True)
        self.group = group
        self.start, self.stop = start, start + len(rows)
        self.sharing = Sharing(prompt_n, device) if group.shape.prompt else None
        self.known_n = torch.tensor(known_n, device=device)
        self.own_n = torch.tensor(own_n, device=device)
        self.known = (min(known_n), max(known_n))
        self.own = (min(own_n), max(own_n))
        self.end = min(row.known + row.own for row in rows)
        self._cells: dict[int, Tensor] = {}
        self._biases: dict[int | None, Tensor] = {}

    def advance(self) -> None:
        """Every row has got one token more."""
        self.own_n += 1
        self.own = (self.own[0] + 1, self.own[1] + 1)
        self.end += 1
        for cells in self._cells.values():
            cells.add_(1)
        self._biases.clear()

    def attend(self, layer: int, q_nD: Tensor, k_nD: Tensor, v_nD: Tensor, rule: Rule) -> Tensor:
        """q (n, Hq, D), k and v (n, H, D) -> (n, Hq, D)."""
        rows, prompts = self.group.rows, self.group.prompts
        self._remember(rows.keys[layer], k_nD)
        self._remember(rows.values[layer], v_nD)
        n, heads = k_nD.shape[:2]
        window = self._window(rule)
        first, own = self._seen(window)
        q = (q_nD * rule.scale).reshape(n, heads, -1, q_nD.shape[-1])
        scores = torch.bmm(q.flatten(0, 1), seen(rows.keys[layer], n, own).transpose(1, 2))
        shared = first.stop - first.start
        if shared:
            k = seen(prompts.keys[layer], self.sharing.prompts, first)
            on_prompt = torch.bmm(self.sharing.to_prompts(q), k.transpose(1, 2))
            scores = torch.cat([self.sharing.to_rows(on_prompt, heads), scores], -1)
        weights = self._weights(scores, window, rule.softcap).to(v_nD.dtype)
        out = torch.bmm(weights[..., shared:], seen(rows.values[layer], n, own))
        if shared:
            w = weights[..., :shared].unflatten(0, (n, heads))
            v = seen(prompts.values[layer], self.sharing.prompts, first)
            out += self.sharing.to_rows(torch.bmm(self.sharing.to_prompts(w), v), heads)
        return out.view(n, q_nD.shape[1], -1)

    def _remember(self, tensor: Tensor, new_nD: Tensor) -> None:
        """Put (n, H, D) at the rows' ends of a pool's (R, H, L, D)."""
        n, heads, size = new_nD.shape
        if heads not in self._cells:
            first = torch.arange(n * heads, device=tensor.device) * self.group.shape.row
            self._cells[heads] = first + self.own_n.repeat_interleave(heads)
        tensor.view(-1, size).index_copy_(0, self._cells[heads], new_nD.reshape(-1, size))

    def _window(self, rule: Rule) -> int | None:
        """None where every row is still shorter than its layer's window."""
        longest = self.known[1] + self.own[1]
        return None if rule.window is None or rule.window > longest else rule.window

    def _seen(self, window: int | None) -> tuple[slice, slice]:
        """Which places of the prompts and of the rows any row looks at."""
        prompt, own = slice(0, self.known[1]), slice(0, self.own[1] + 1)
        if window is None:
            return prompt, own
        first = min(max(0, self.end - window + 1), prompt.stop)
        return slice(first, prompt.stop), slice(max(0, self.own[0] - window + 1), own.stop)

    def _weights(self, scores: Tensor, window: int | None, softcap: float | None) -> Tensor:
        """(n * H, G, J) to weights that sum to 1, in float32."""
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if window is not None or self.known[0] < self.known[1] or self.own[0] < self.own[1]:
            bias_nJ = self._bias(window)
            scores.view(len(bias_nJ), -1, scores.shape[-1]).add_(bias_nJ[:, None])
        return torch.softmax(scores, -1, dtype=torch.float32)

    def _bias(self, window: int | None) -> Tensor:
        """(n, J): -inf where a row has no key or its window does not reach, else 0."""
        if window not in self._biases:
            prompt, own = self._seen(window)
            j_J = torch.arange(prompt.start, prompt.stop, device=self.own_n.device)
            t_J = torch.arange(own.start, own.stop, device=self.own_n.device)
            known_n1, own_n1 = self.known_n[:, None], self.own_n[:, None]
            hidden_nJ = torch.cat([j_J >= known_n1, t_J > own_n1], 1)
            if window is not None:
                last_n1 = known_n1 + own_n1 - window
                hidden_nJ |= torch.cat([j_J <= last_n1, known_n1 + t_J <= last_n1], 1)
            bias_nJ = torch.zeros(hidden_nJ.shape, device=j_J.device)
            self._biases[window] = bias_nJ.masked_fill_(hidden_nJ, -torch.inf)
        return self._biases[window]


def seen(tensor: Tensor, rows: int, places: slice) -> Tensor:
    """The first rows of a pool's (R, H, L, D) at `places`: (rows * H, J, D), a view."""
    return tensor[:rows, :, places].flatten(0, 1)


class DecodePlan:
    """One new token for each row of `parts`. `order` (M,) names, for each row in the order of the
    parts, its row in the pass (None: the same order)."""

    def __init__(self, parts: Sequence[GroupRows], order: Tensor | None) -> None:
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
def layout_of(net: Net | FastNet, device: torch.device) -> KVLayout:
    """Found by running one token through the net (a token sees only itself)."""
    shapes = _Shapes()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    net.hidden(zero, zero, shapes, [])
    layers = tuple(shapes.layers[i] for i in range(len(shapes.layers)))
    return KVLayout(layers, shapes.dtype, device)
