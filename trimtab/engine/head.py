"""The output head: exact full-vocabulary log-probabilities in float32, a bounded piece at a time.

N rows, K ids a row, V vocabulary, C rows of one chunk, d hidden size, r rank of the adapter.

The logits of a row are u = cap(scale * (W h + lora)), cap(z) = softcap * tanh(z / softcap) or z.
For loss gradients g_nk on log p(id_nk) the gradient on u is scatter(g) - softmax(u) * sum_k g, so
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

CHUNK_BYTES = 32 * 2**20
KEPT_BYTES = 256 * 2**20


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
        hidden_N: Tensor,
        ids_NK: Tensor,
        adapters: AdapterPlan,
        temperature_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """log-softmax(logits) at `ids_NK` with its gradient, and log-softmax(logits / temperature)
        at the same ids without one (the first, detached, when no temperature is given).

            >>> logprobs_NK, _ = head.selected_logprobs(hidden_N, ids_NK, [(adapter, 0, N)])
        """
        out = []
        for pair, scale, i, j in self._groups(adapters, len(hidden_N)):
            A, B = pair if pair is not None else (None, None)
            temperature = None if temperature_N is None else temperature_N[i:j]
            keep = torch.is_grad_enabled()
            part = hidden_N[i:j], A, B, ids_NK[i:j], temperature, scale, self, keep
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


class _Selected(torch.autograd.Function):
    """Head.selected_logprobs for rows that share one adapter (A, B) or none."""

    @staticmethod
    def forward(ctx, hidden_Nd, A, B, ids_NK, temperature_N, scale, head, keep):  # noqa: PLR0917
        hidden = hidden_Nd.detach().to(head.dtype)
        kept: dict[int, Tensor] = {}
        room = head.kept_bytes
        lse_N = hidden.new_empty(len(hidden))
        logprobs_NK = hidden.new_empty(ids_NK.shape)
        tempered_NK = logprobs_NK if temperature_N is None else torch.empty_like(logprobs_NK)
        for i in range(0, len(hidden), head.chunk_rows()):
            rows = slice(i, i + head.chunk_rows())
            u_CV = _logits(head, hidden[rows], A, B, scale)
            lse_N[rows] = torch.logsumexp(u_CV, dim=-1)
            at_CK = u_CV.gather(1, ids_NK[rows])
            logprobs_NK[rows] = at_CK - lse_N[rows, None]
            if temperature_N is not None:
                tempered_NK[rows] = _tempered(u_CV, at_CK, lse_N[rows], temperature_N[rows])
            if keep and room >= u_CV.nbytes:
                room -= u_CV.nbytes
                kept[i] = u_CV
        ctx.save_for_backward(hidden_Nd, A, B, ids_NK, lse_N)
        ctx.kept, ctx.scale, ctx.head = kept, scale, head
        if temperature_N is None:
            tempered_NK = logprobs_NK.clone()
        ctx.mark_non_differentiable(tempered_NK)
        return logprobs_NK, tempered_NK

    @staticmethod
    @once_differentiable
    def backward(ctx, g_NK, _tempered):
        hidden_Nd, A, B, ids_NK, lse_N = ctx.saved_tensors
        head, scale, kept, ctx.kept = ctx.head, ctx.scale, ctx.kept, {}
        hidden = hidden_Nd.to(head.dtype)
        grad_hidden = torch.zeros_like(hidden)
        grad_A = None if A is None else torch.zeros_like(A)
        grad_B = None if B is None else torch.zeros_like(B)
        for i in range(0, len(hidden), head.chunk_rows()):
            # Rows no loss looks at (prompts, zero advantages) cost nothing here.
            rows = i + g_NK[i : i + head.chunk_rows()].ne(0).any(dim=1).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            h_Cd = hidden[rows]
            u_CV = kept.pop(i, None)
            if u_CV is None:
                u_CV = _logits(head, h_Cd, A, B, scale)
            elif len(rows) < len(u_CV):
                u_CV = u_CV[rows - i]
            g_CV = _grad_raw(head, u_CV, g_NK[rows], ids_NK[rows], lse_N[rows])
            g_Cd = g_CV @ head.base.weight
            if A is not None:
                g_Cr = (g_CV @ B) * scale
                g_Cd += g_Cr @ A
                grad_A += g_Cr.t() @ h_Cd
                grad_B += g_CV.t() @ ((h_Cd @ A.t()) * scale)
            grad_hidden[rows] = g_Cd
        return grad_hidden.to(hidden_Nd.dtype), grad_A, grad_B, None, None, None, None, None


def _logits(head: Head, h_Cd: Tensor, A: Tensor | None, B: Tensor | None, scale: float) -> Tensor:
    z_CV = head.base(h_Cd)
    if A is not None:
        z_CV.addmm_(h_Cd @ A.t(), B.t(), alpha=scale)
    return head.finish(z_CV)


def _tempered(u_CV: Tensor, at_CK: Tensor, lse_C: Tensor, temperature_C: Tensor) -> Tensor:
    """log-softmax(u / temperature) at the ids; rows at temperature 1 keep the sum they have."""
    out_CK = at_CK - lse_C[:, None]
    t_C = temperature_C.to(u_CV.dtype)
    hot = (t_C != 1).nonzero()[:, 0]
    if len(hot):
        # The largest logit first, or a tiny temperature would give inf - inf.
        u_HV, t_H1 = u_CV[hot], t_C[hot, None]
        top_H1 = u_HV.amax(dim=-1, keepdim=True)
        lse_H1 = torch.logsumexp((u_HV - top_H1) / t_H1, dim=-1, keepdim=True)
        out_CK[hot] = (at_CK[hot] - top_H1) / t_H1 - lse_H1
    return out_CK


def _grad_raw(head: Head, u_CV: Tensor, g_CK: Tensor, ids_CK: Tensor, lse_C: Tensor) -> Tensor:
    """The gradient on the raw logits W h; consumes `u_CV`."""
    slope = None
    if head.softcap is not None:
        slope = 1 - (u_CV / head.softcap).square_()
    g_CV = u_CV.sub_(lse_C[:, None]).exp_().mul_(-g_CK.sum(dim=1, keepdim=True))
    g_CV.scatter_add_(1, ids_CK, g_CK)
    if slope is not None:
        g_CV.mul_(slope)
    return g_CV.mul_(head.scale) if head.scale != 1.0 else g_CV
