"""A step of decoding: one token for every row of a batch, in one pass through the net.

B rows, V vocabulary, k alternatives recorded a token. A batch is made when rows join or leave or
weights change, and then only counts up; nothing in a step is done row by row but taking the token.
Knows nothing of queues or futures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.engine.choose import Chooser, top
from trimtab.engine.decode_attention import DecodePlan, GroupRow, GroupRows
from trimtab.engine.fast_net import FastNet
from trimtab.engine.jobs import Row
from trimtab.engine.kv import Group
from trimtab.engine.lora import Adapter
from trimtab.engine.net import Net
from trimtab.engine.weights import Weights


class DecodeBatch:
    """The rows of `groups`, each group's in the order of their slots, under `weights` by row."""

    def __init__(
        self,
        net: Net | FastNet,
        groups: Sequence[Group],
        weights: Sequence[Weights],
        device: torch.device,
    ) -> None:
        placed = rows_of(groups)
        order = grouped([w.adapter for w in weights])
        self.net = net
        self.rows = [placed[i] for i in order]
        self.adapters = runs([weights[i].adapter for i in order])
        self.top_k = max(row.job.top_k for row in self.rows)
        params = [row.job.request.params for row in self.rows]
        self.chooser = Chooser.of(params, net.head.vocab_size, device)
        self.device = device
        self.tokens_B = torch.tensor([row.last_token for row in self.rows], device=device)
        self.positions_B = torch.tensor([row.position for row in self.rows], device=device)
        self.plan = plan_of(groups, order, device)
        self.advances = False

    def step(self) -> tuple[list[int], list[float], tuple[bytes, bytes] | None]:
        """Draw a token for each row: ids, log-probabilities, and the top k of each as bytes."""
        if self.advances:
            self.positions_B += 1
            self.plan.advance()
        self.advances = True
        hidden_BD = self.net.hidden(self.tokens_B, self.positions_B, self.plan, self.adapters)
        logits_BV = self.net.head.logits(hidden_BD, self.adapters)
        ids_B, chosen_B, scores_BV, norm_B1 = self.chooser.choose(logits_BV, self._uniforms())
        self.tokens_B = ids_B
        best = None
        if self.top_k:
            top_Bk, values_Bk = top(scores_BV, self.top_k)
            values_Bk -= norm_B1
            best = (top_Bk.cpu().numpy().tobytes(), values_Bk.cpu().numpy().tobytes())
        return ids_B.tolist(), chosen_B.tolist(), best

    def record(self, best: tuple[bytes, bytes]) -> None:
        """Give each row its part of the top k, as many as it asked for."""
        width = 4 * self.top_k
        ids, logprobs = best
        for i, row in enumerate(self.rows):
            stop = i * width + 4 * row.job.top_k
            row.top_ids += ids[i * width : stop]
            row.top_logprobs += logprobs[i * width : stop]

    def _uniforms(self) -> Tensor | None:
        if self.chooser.all_greedy:
            return None
        drawn = [row.stream.next() for row in self.rows]
        return torch.tensor(drawn, dtype=torch.float64, device=self.device)


def grouped(adapters: Sequence[Adapter | None]) -> list[int]:
    """An order of the rows in which each adapter's rows stand together, first come first.

    >>> grouped([a, b, a])
    [0, 2, 1]
    """
    first: dict[int, int] = {}
    for i, adapter in enumerate(adapters):
        first.setdefault(id(adapter), i)
    return sorted(range(len(adapters)), key=lambda i: first[id(adapters[i])])


def runs(adapters: Sequence[Adapter | None]) -> list[tuple[Adapter | None, int, int]]:
    """Neighbouring rows of one adapter as (adapter, first row, past the last)."""
    out: list[tuple[Adapter | None, int, int]] = []
    for i, adapter in enumerate(adapters):
        if out and out[-1][0] is adapter:
            out[-1] = (adapter, out[-1][1], i + 1)
        else:
            out.append((adapter, i, i + 1))
    return out


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """Every row that decodes, group by group in the order of their slots."""
    return [row for group in groups for row in group.rows.owners]


def plan_of(groups: Sequence[Group], order: Sequence[int], device: torch.device) -> DecodePlan:
    """The attention of the rows of `groups`, where pass row i is row `order[i]` of them."""
    parts = []
    start = 0
    for group in groups:
        rows = [
            GroupRow(row.job.prompt.slot, row.job.prompt.known, row.used)
            for row in group.rows.owners
        ]
        part = GroupRows(group, start, rows, device)
        parts.append(part)
        start = part.stop
    straight = list(order) == list(range(start))
    back = torch.argsort(torch.tensor(order, device=device))
    return DecodePlan(parts, None if straight else back)
