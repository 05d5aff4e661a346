"""Attention with a memory: a prompt's next piece.

M packed rows of a pass, Hq query heads, H key/value heads, D head size, C rows of a prompt's piece,
J keys. Decoding's is in decode_attention.py. Knows nothing of requests or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from trimtab.engine.attention import PackedCausal, Rule, masked
from trimtab.engine.fast_net import FastNet
from trimtab.engine.kv import KVLayout, Owner, Pool
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
