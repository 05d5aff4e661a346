"""Attention of decoding: one new token for each of many rows.

M packed rows of a pass, n rows of one group, R prompts of one group, S samples that share a prompt,
Hq query heads, H key/value heads, G = Hq / H, D head size, P places of prompts and T of rows that
are looked at, J = P + T.

A group is taken in one batched product a layer with its prompts, each read once for all its
samples, and one with the rows' own tokens, whatever their lengths; a bias hides what a shorter row
does not have. A step of a small model is mostly the asking, views too, so they are kept: a row's
places are looked at STRIDE at a time, hidden until they hold something. Knows nothing of requests
or tokens.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.engine.attention import Rule
from trimtab.engine.kv import Group

STRIDE = 16


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
        self.alone = straight and self.samples == 1  # there is nothing to bring anywhere
        self.back: Tensor | None = None
        self.there: Tensor | None = None
        if not straight:
            self.back = torch.tensor(back, device=device)
            self.there = torch.zeros(
                self.prompts * self.samples, dtype=torch.int64, device=device
            ).index_copy_(0, self.back, torch.arange(len(back), device=device))

    def to_prompts(self, x_nHGX: Tensor) -> Tensor:
        """(n, H, G, X) -> (R * H, S * G, X)."""
        if self.alone:
            return x_nHGX.flatten(0, 1)
        if self.there is not None:
            x_nHGX = x_nHGX[self.there]
        _, heads, share, size = x_nHGX.shape
        x = x_nHGX.reshape(self.prompts, self.samples, heads, share, size).transpose(1, 2)
        return x.reshape(self.prompts * heads, self.samples * share, size)

    def to_rows(self, x: Tensor, heads: int) -> Tensor:
        """(R * H, S * G, X) -> (n * H, G, X)."""
        if self.alone:
            return x
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


@dataclass(slots=True, eq=False)
class _Seen:
    """Views of a layer's pools: where rows remember and what they look at. `pools` are the tensors
    they were made of."""

    pools: tuple[Tensor, ...]
    keys_nHLD: Tensor
    values_nHLD: Tensor
    own_k: Tensor  # (n * H, D, T)
    own_v: Tensor  # (n * H, T, D)
    prompt_k: Tensor  # (R * H, D, P)
    prompt_v: Tensor  # (R * H, P, D)


class GroupRows:
    """The rows of one group, every one of them about to get a token; they are rows [start, stop) of
    a batch."""

    def __init__(
        self, group: Group, start: int, rows: Sequence[GroupRow], device: torch.device
    ) -> None:
        prompt_n, known_n, own_n = zip(*rows, strict=True)
        self.group = group
        self.start, self.stop = start, start + len(rows)
        self.sharing = Sharing(prompt_n, device)
        self.known_n = torch.tensor(known_n, device=device)
        self.own_n = torch.tensor(own_n, device=device)
        self.known = (min(known_n), max(known_n))
        self.own = (min(own_n), max(own_n))
        self.end = min(row.known + row.own for row in rows)
        self._cells: dict[int, Tensor] = {}
        self._biases: dict[int | None, tuple[tuple[slice, slice], Tensor]] = {}
        self._layers: dict[int, tuple[tuple[slice, slice], _Seen]] = {}

    def advance(self) -> None:
        """Every row has got one token more."""
        self.own_n += 1
        self.own = (self.own[0] + 1, self.own[1] + 1)
        self.end += 1
        for cells in self._cells.values():
            cells.add_(1)
        kept = self._biases.pop(None, None)
        self._biases.clear()
        if kept is not None and kept[0] == self._places(None):
            (prompt, _), bias_n1J = kept
            shown_n1 = self.own_n[:, None] + (prompt.stop - prompt.start)
            bias_n1J.squeeze(1).scatter_(1, shown_n1, 0.0)
            self._biases[None] = kept

    def attend(self, layer: int, q_nD: Tensor, k_nD: Tensor, v_nD: Tensor, rule: Rule) -> Tensor:
        """q (n, Hq, D), k and v (n, H, D) -> (n, Hq, D)."""
        n, heads = k_nD.shape[:2]
        window = self._window(rule)
        places = self._places(window)
        seen = self._seen(layer, places)
        self._remember(seen.keys_nHLD, k_nD)
        self._remember(seen.values_nHLD, v_nD)
        q = (q_nD * rule.scale).reshape(n, heads, -1, q_nD.shape[-1])
        scores = torch.bmm(q.flatten(0, 1), seen.own_k)
        shared = seen.prompt_v.shape[1]
        if shared:
            on_prompt = torch.bmm(self.sharing.to_prompts(q), seen.prompt_k)
            scores = torch.cat([self.sharing.to_rows(on_prompt, heads), scores], -1)
        weights = self._weights(scores, window, places, rule.softcap)
        if weights.dtype != v_nD.dtype:
            weights = weights.to(v_nD.dtype)
        if not shared:
            return torch.bmm(weights, seen.own_v).view(n, q_nD.shape[1], -1)
        on_prompt, on_own = weights.split([shared, weights.shape[-1] - shared], -1)
        out = torch.bmm(on_own, seen.own_v)
        w = self.sharing.to_prompts(on_prompt.unflatten(0, (n, heads)))
        out += self.sharing.to_rows(torch.bmm(w, seen.prompt_v), heads)
        return out.view(n, q_nD.shape[1], -1)

    # ----------------------------------------------------------------------- places

    def _window(self, rule: Rule) -> int | None:
        """None where every row is still shorter than its layer's window."""
        longest = self.known[1] + self.own[1]
        return None if rule.window is None or rule.window > longest else rule.window

    def _places(self, window: int | None) -> tuple[slice, slice]:
        """Which places of the prompts and of the rows are looked at: all that any row may see, the
        rows' from and to a multiple of STRIDE."""
        stop = min(-(-(self.own[1] + 1) // STRIDE) * STRIDE, self.group.shape.row)
        prompt, own = slice(0, self.known[1]), slice(0, stop)
        if window is None:
            return prompt, own
        first = min(max(0, self.end - window + 1), prompt.stop)
        began = max(0, self.own[0] - window + 1) // STRIDE * STRIDE
        return slice(first, prompt.stop), slice(began, stop)

    def _seen(self, layer: int, places: tuple[slice, slice]) -> _Seen:
        """The views of a layer, made anew only where places or pools are other ones."""
        rows, prompts = self.group.rows, self.group.prompts
        pools = (
            rows.keys[layer], rows.values[layer], prompts.keys[layer], prompts.values[layer]
        )  # fmt: skip
        kept = self._layers.get(layer)
        if kept is not None and kept[0] == places and all(map(operator.is_, kept[1].pools, pools)):
            return kept[1]
        n, (prompt, own) = self.stop - self.start, places
        made = _Seen(
            pools,
            pools[0][:n],
            pools[1][:n],
            rows_at(pools[0], n, own).transpose(1, 2),
            rows_at(pools[1], n, own),
            rows_at(pools[2], self.sharing.prompts, prompt).transpose(1, 2),
            rows_at(pools[3], self.sharing.prompts, prompt),
        )
        self._layers[layer] = places, made
        return made

    def _remember(self, pool_nHLD: Tensor, new_nHD: Tensor) -> None:
        """Put (n, H, D) at the rows' ends."""
        if self.own[0] == self.own[1]:
            pool_nHLD.select(2, self.own[0]).copy_(new_nHD)
            return
        n, heads, size = new_nHD.shape
        if heads not in self._cells:
            first = torch.arange(n * heads, device=pool_nHLD.device) * self.group.shape.row
            self._cells[heads] = first + self.own_n.repeat_interleave(heads)
        pool_nHLD.view(-1, size).index_copy_(0, self._cells[heads], new_nHD.reshape(-1, size))

    # ----------------------------------------------------------------------- weights

    def _weights(
        self,
        scores: Tensor,
        window: int | None,
        places: tuple[slice, slice],
        softcap: float | None,
    ) -> Tensor:
        """(n * H, G, J) to weights that sum to 1, in float32."""
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        same = self.known[0] == self.known[1] and self.own[0] + 1 == places[1].stop
        if window is not None or not same:
            bias_n1J = self._bias(window, places)
            scores.view(len(bias_n1J), -1, scores.shape[-1]).add_(bias_n1J)
        return torch.softmax(scores, -1, dtype=torch.float32)

    def _bias(self, window: int | None, places: tuple[slice, slice]) -> Tensor:
        """(n, 1, J): -inf where a row has no key or its window does not reach, else 0."""
        kept = self._biases.get(window)
        if kept is None or kept[0] != places:
            prompt, own = places
            j_J = torch.arange(prompt.start, prompt.stop, device=self.own_n.device)
            t_J = torch.arange(own.start, own.stop, device=self.own_n.device)
            known_n1, own_n1 = self.known_n[:, None], self.own_n[:, None]
            hidden_nJ = torch.cat([j_J >= known_n1, t_J > own_n1], 1)
            if window is not None:
                last_n1 = known_n1 + own_n1 - window
                hidden_nJ |= torch.cat([j_J <= last_n1, known_n1 + t_J <= last_n1], 1)
            bias_nJ = torch.zeros(hidden_nJ.shape, device=j_J.device)
            kept = places, bias_nJ.masked_fill_(hidden_nJ, -torch.inf)[:, None]
            self._biases[window] = kept
        return kept[1]


def rows_at(tensor: Tensor, rows: int, places: slice) -> Tensor:
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
