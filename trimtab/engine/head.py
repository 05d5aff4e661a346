"""The output head: exact full-vocabulary log-probabilities in float32, a bounded piece at a time.

M hidden rows, N rows that ask about them (n of one chunk), K ids a row, V vocabulary, C rows of one
chunk, d hidden size, r rank of the adapter.

The logits of a row are u = cap(scale * (W h + lora)), cap(z) = softcap * tanh(z / softcap) or z.
For loss gradients g_k on log p(id_k) the gradient on u is scatter(g) - softmax(u) * sum_k g, so
no graph over the vocabulary is ever built: chunks of logits are kept for backward while they fit a
budget and computed again beyond it. The weights are float32 whatever the rest of the model computes
in, because a bfloat16 logit is off by up to 2^-8 of its size. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trimtab.engine.lora import AdapterPlan, Pair, apply_adapters

CHUNK_BYTES = 64 * 2**20
KEPT_BYTES = 512 * 2**20


@dataclass(eq=False)
class Head:
    """`base` maps hidden (..., d) to raw logits (..., V); it is an nn.Linear unless a sampler has
    replaced it, and the gradient needs its weight. `name` is the module's name in the model,
    `shape` is (d, V)."""

    name: str
    base: nn.Module
    shape: tuple[int, int]
    scale: float = 1.0
    softcap: float | None = None
    chunk_bytes: int = CHUNK_BYTES
    kept_bytes: int = KEPT_BYTES

    def logits(self, hidden_M: Tensor, adapters: AdapterPlan) -> Tensor:
        """(M, d) -> (M, V) float32, all at once, without gradient. The result is fresh."""
        with torch.no_grad():
            hidden_M = hidden_M.to(self.dtype)
            return self.finish(apply_adapters(self.name, hidden_M, self.base(hidden_M), adapters))

    def selected_logprobs(
        self,
        hidden_M: Tensor,
        ids_NK: Tensor,
        adapters: AdapterPlan,
        temperature_N: Tensor | None = None,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """log-softmax(logits) at `ids_NK` with its gradient, and log-softmax(logits / temperature)
        at the same ids without one (the first, detached, when no temperature is given). Row n asks
        about hidden row n, or `rows_N[n]`: a row that several ask about is computed once.

            >>> logprobs_NK, _ = head.selected_logprobs(hidden_N, ids_NK, [(adapter, 0, N)])
        """
        out = []
        groups = list(self._groups(adapters, len(hidden_M)))
        assert rows_N is None or len(groups) == 1, "rows are asked for under one adapter at a time"
        for pair, scale, i, j in groups:
            A, B = pair if pair is not None else (None, None)
            asked = slice(i, j) if rows_N is None else slice(None)
            temperature = None if temperature_N is None else temperature_N[asked]
            order = None if rows_N is None else Order.of(rows_N)
            keep = torch.is_grad_enabled()
            part = hidden_M[i:j], A, B, ids_NK[asked], temperature, order, scale, self, keep
            out.append(_Selected.apply(*part))
        if len(out) == 1:
            return out[0]
        return torch.cat([x for x, _ in out]), torch.cat([x for _, x in out])

    @property
    def vocab_size(self) -> int:
        return self.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        weight = getattr(self.base, "weight", None)
        floating = isinstance(weight, Tensor) and weight.is_floating_point()
        return weight.dtype if floating else torch.float32

    def finish(self, z: Tensor) -> Tensor:
        """Raw logits to logits, in place."""
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z

    def chunk_rows(self) -> int:
        return max(1, self.chunk_bytes // (self.vocab_size * 4))

    def _groups(
        self, adapters: AdapterPlan, rows: int
    ) -> Iterator[tuple[Pair | None, float, int, int]]:
        """The plan with its gaps filled by "no adapter"."""
        at = 0
        for adapter, i, j in adapters:
            if at < i:
                yield None, 1.0, at, i
            pair = adapter.pairs.get(self.name) if adapter is not None else None
            yield pair, adapter.scale if adapter is not None else 1.0, i, j
            at = j
        if at < rows or rows == 0:
            yield None, 1.0, at, rows


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Asked rows by the hidden row they ask about: `asked[i]` asks about `rows[i]`, ascending."""

    asked: Tensor
    rows: Tensor

    @staticmethod
    def of(rows_N: Tensor) -> Order:
        rows, asked = torch.sort(rows_N, stable=True)
        return Order(asked, rows)

    @staticmethod
    def plain(rows: int, device: torch.device) -> Order:
        each = torch.arange(rows, device=device)
        return Order(each, each)

    def chunks(self, rows: int, step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First hidden row i of each chunk of `step`, who asks about the chunk, and about which
        of its rows, counted from i."""
        ends = torch.arange(0, rows + step, step, device=self.rows.device)
        at = torch.searchsorted(self.rows, ends).tolist()
        for i, start, stop in zip(range(0, rows, step), at, at[1:], strict=False):
            yield i, self.asked[start:stop], self.rows[start:stop] - i


class _Selected(torch.autograd.Function):
    """Head.selected_logprobs for rows that share one adapter (A, B) or none."""

    @staticmethod
    def forward(ctx, hidden_Md, A, B, ids_NK, temperature_N, order, scale, head, keep):  # noqa: PLR0917
        hidden = hidden_Md.detach().to(head.dtype)
        order = Order.plain(len(hidden), hidden.device) if order is None else order
        kept: dict[int, Tensor] = {}
        room = head.kept_bytes
        lse_M = hidden.new_empty(len(hidden))
        logprobs_NK = hidden.new_empty(ids_NK.shape)
        tempered_NK = logprobs_NK if temperature_N is None else torch.empty_like(logprobs_NK)
        for i, asked_n, at_n in order.chunks(len(hidden), head.chunk_rows()):
            u_CV = _logits(head, hidden[i : i + head.chunk_rows()], A, B, scale)
            lse_C = torch.logsumexp(u_CV, dim=-1)
            at_nK = u_CV[at_n[:, None], ids_NK[asked_n]]
            logprobs_NK[asked_n] = at_nK - lse_C[at_n, None]
            if temperature_N is not None:
                tempered_NK[asked_n] = _tempered(u_CV, at_n, at_nK, lse_C, temperature_N[asked_n])
            lse_M[i : i + head.chunk_rows()] = lse_C
            if keep and room >= u_CV.nbytes:
                room -= u_CV.nbytes
                kept[i] = u_CV
        ctx.save_for_backward(hidden_Md, A, B, ids_NK, lse_M)
        ctx.kept, ctx.order, ctx.scale, ctx.head = kept, order, scale, head
        if temperature_N is None:
            tempered_NK = logprobs_NK.clone()
        ctx.mark_non_differentiable(tempered_NK)
        return logprobs_NK, tempered_NK

    @staticmethod
    @once_differentiable
    def backward(ctx, g_NK, _tempered):
        hidden_Md, A, B, ids_NK, lse_M = ctx.saved_tensors
        head, scale, kept, ctx.kept = ctx.head, ctx.scale, ctx.kept, {}
        hidden = hidden_Md.to(head.dtype)
        grad_hidden = torch.zeros_like(hidden)
        grad_A = None if A is None else torch.zeros_like(A)
        grad_B = None if B is None else torch.zeros_like(B)
        for i, asked_n, at_n in ctx.order.chunks(len(hidden), head.chunk_rows()):
            # Rows no loss looks at (prompts, zero advantages) cost nothing here.
            live = g_NK[asked_n].ne(0).any(dim=1).nonzero()[:, 0]
            if len(live) == 0:
                kept.pop(i, None)
                continue
            at_C, of_n = torch.unique_consecutive(at_n[live], return_inverse=True)
            h_Cd, lse_C = hidden[i + at_C], lse_M[i + at_C]
            u_CV = kept.pop(i, None)
            if u_CV is None:
                u_CV = _logits(head, h_Cd, A, B, scale)
            elif len(at_C) < len(u_CV):
                u_CV = u_CV[at_C]
            n = asked_n[live]
            g_CV = _grad_raw(head, u_CV, g_NK[n], ids_NK[n], of_n, lse_C)
            g_Cd = g_CV @ head.base.weight
            if A is not None:
                g_Cr = (g_CV @ B) * scale
                g_Cd += g_Cr @ A
                grad_A += g_Cr.t() @ h_Cd
                grad_B += g_CV.t() @ ((h_Cd @ A.t()) * scale)
            grad_hidden[i + at_C] = g_Cd
        return grad_hidden.to(hidden_Md.dtype), grad_A, grad_B, *[None] * 6


def _logits(head: Head, h_Cd: Tensor, A: Tensor | None, B: Tensor | None, scale: float) -> Tensor:
    z_CV = head.base(h_Cd)
    if A is not None:
        z_CV.addmm_(h_Cd @ A.t(), B.t(), alpha=scale)
    return head.finish(z_CV)


def _tempered(
    u_CV: Tensor, at_n: Tensor, at_nK: Tensor, lse_C: Tensor, temperature_n: Tensor
) -> Tensor:
    """log-softmax(u / temperature) at the ids; rows at temperature 1 keep the sum they have."""
    out_nK = at_nK - lse_C[at_n, None]
    t_n = temperature_n.to(u_CV.dtype)
    hot = (t_n != 1).nonzero()[:, 0]
    if len(hot):
        # The largest logit first, or a tiny temperature would give inf - inf.
        u_HV, t_H1 = u_CV[at_n[hot]], t_n[hot, None]
        top_H1 = u_HV.amax(dim=-1, keepdim=True)
        lse_H1 = torch.logsumexp((u_HV - top_H1) / t_H1, dim=-1, keepdim=True)
        out_nK[hot] = (at_nK[hot] - top_H1) / t_H1 - lse_H1
    return out_nK


def _grad_raw(  # noqa: PLR0917
    head: Head, u_CV: Tensor, g_nK: Tensor, ids_nK: Tensor, of_n: Tensor, lse_C: Tensor
) -> Tensor:
    """The gradient on the raw logits W h from asked rows that look at rows `of_n`; consumes
    `u_CV`."""
    slope = None
    if head.softcap is not None:
        slope = 1 - (u_CV / head.softcap).square_()
    sum_C = lse_C.new_zeros(len(u_CV)).index_add_(0, of_n, g_nK.sum(dim=1))
    g_CV = u_CV.sub_(lse_C[:, None]).exp_().mul_(-sum_C[:, None])
    where = of_n[:, None] * g_CV.shape[1] + ids_nK
    g_CV.view(-1).scatter_add_(0, where.flatten(), g_nK.flatten())
    if slope is not None:
        g_CV.mul_(slope)
    return g_CV.mul_(head.scale) if head.scale != 1.0 else g_CV
