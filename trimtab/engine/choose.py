"""From logits to tokens: the one rule for log-probabilities, the filters, and the draw.

B rows, V vocabulary, F rows that a filter applies to, W candidates a filter looks at.

The rule: a token's log-probability is log-softmax(logits / temperature) over the full vocabulary in
float32, before top-k and top-p; temperature 0 is scored at temperature 1 and chosen by argmax.

The draw inverts the cumulative distribution at one uniform a token, so a token depends on its own
row alone. Batches of other shapes round differently in the last bits: a uniform within that
rounding of a boundary between two tokens may fall on either side. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.types import SamplingParams

_SMALLEST = 1e-30  # temperature: no logit divided by it becomes infinite, and argmax is long sure
_PIECE = 256  # tokens summed together before the exact part of a draw
_FIRST_CANDIDATES = 64


def tempered_logprobs(logits_BV: Tensor, temperature_B: Tensor | None = None) -> Tensor:
    """The rule. `temperature_B` None means 1 everywhere; its zeros count as 1.

    >>> tempered_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.5]))
    tensor([[-0.1429, -2.1429, -4.1429]])
    """
    return torch.log_softmax(tempered(logits_BV, temperature_B), dim=-1)


def tempered(logits_BV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """float32 logits / temperature: log-probabilities up to a constant of each row."""
    if temperature_B is None:
        return logits_BV.float()
    divisor_B = temperature_B.float().masked_fill(temperature_B == 0, 1.0).clamp(min=_SMALLEST)
    return logits_BV.float() / divisor_B[:, None]


def top(logprobs_BV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row: ids (B, k) int32 and log-probabilities (B, k), best first."""
    values_Bk, ids_Bk = torch.topk(logprobs_BV, k, dim=-1)
    return ids_Bk.int(), values_Bk


# --------------------------------------------------------------------------- filters


def kept_by_filters(probs_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor) -> Tensor:
    """(F, V) bool: the top_k most probable tokens (V where off) and of these the smallest set that
    holds top_p of their mass; at least one token. Ties are broken by the sort.

    >>> kept_by_filters(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([3]), torch.tensor([0.6]))
    tensor([[ True,  True, False]])
    """
    vocab = probs_FV.shape[1]
    wide = int(top_k_F.masked_fill(top_k_F >= vocab, 0).amax())
    width = min(vocab, max(wide, _FIRST_CANDIDATES))
    total_F = probs_FV.sum(-1, dtype=torch.float64)
    while True:
        values_FW, ids_FW = torch.topk(probs_FV, width, dim=-1)
        keep_FW, complete = _kept_in_order(values_FW, top_k_F, top_p_F, total_F)
        if width == vocab or complete:
            return torch.zeros_like(probs_FV, dtype=torch.bool).scatter_(1, ids_FW, keep_FW)
        width = min(vocab, width * 8)


def _kept_in_order(
    values_FW: Tensor, top_k_F: Tensor, top_p_F: Tensor, total_F: Tensor
) -> tuple[Tensor, bool]:
    """Which of the best W tokens stay, and whether no token beyond them could."""
    width = values_FW.shape[1]
    rank_W = torch.arange(width, device=values_FW.device)
    in_top_k_FW = rank_W < top_k_F[:, None]
    within_FW = torch.where(in_top_k_FW, values_FW, 0.0).cumsum(-1, dtype=torch.float64)
    limited_F = top_k_F <= width
    target_F = top_p_F * torch.where(limited_F, within_FW[:, -1], total_F)
    off_F = top_p_F >= 1.0
    before_FW = within_FW - values_FW
    keep_FW = in_top_k_FW & ((before_FW < target_F[:, None]) | off_F[:, None])
    keep_FW[:, 0] = True
    complete_F = limited_F | (~off_F & (within_FW[:, -1] >= target_F))
    return keep_FW, bool(complete_F.all())


# --------------------------------------------------------------------------- the draw


def draw(weights_BV: Tensor, uniform_BN: Tensor) -> Tensor:
    """(B, N) ids: the first token whose cumulative weight passes uniform * total. Sums are float64
    over pieces of float32; a token of weight 0 is never drawn.

    >>> draw(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([[0.0, 0.7]], dtype=torch.float64))
    tensor([[1, 2]])
    """
    rows, vocab = weights_BV.shape
    if vocab <= 4 * _PIECE:
        return _invert(weights_BV.cumsum(-1, dtype=torch.float64), uniform_BN)[0]
    short = -vocab % _PIECE
    if short:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, short))
    pieces_BQP = weights_BV.view(rows, -1, _PIECE)
    piece_BN, rest_BN = _invert(pieces_BQP.sum(-1).cumsum(-1, dtype=torch.float64), uniform_BN)
    row_B1 = torch.arange(rows, device=weights_BV.device)[:, None]
    inside_BNP = pieces_BQP[row_B1, piece_BN].cumsum(-1, dtype=torch.float64)
    inside, _ = _invert(inside_BNP.flatten(0, 1), rest_BN.reshape(-1, 1))
    return piece_BN * _PIECE + inside.view(piece_BN.shape)


def _invert(cumulative_BV: Tensor, uniform_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The cell each uniform falls into, and how far into that cell it falls, from 0 to 1."""
    total_B1 = cumulative_BV[:, -1:]
    # Below the total even where u * total rounds up to it, so that the last cell has weight.
    target_BN = torch.minimum(uniform_BN * total_B1, torch.nextafter(total_B1, total_B1 * 0))
    cell_BN = torch.searchsorted(cumulative_BV, target_BN, right=True)
    cell_BN.clamp_(max=cumulative_BV.shape[1] - 1)
    upper_BN = cumulative_BV.gather(1, cell_BN)
    lower_BN = cumulative_BV.gather(1, (cell_BN - 1).clamp(min=0)).masked_fill(cell_BN == 0, 0.0)
    return cell_BN, (target_BN - lower_BN) / (upper_BN - lower_BN)


# --------------------------------------------------------------------------- a batch of parameters


@dataclass(frozen=True, slots=True, eq=False)
class Chooser:
    """The parameters of B rows, made once for as long as the batch stays the same. None where a
    parameter is off in every row, so that the usual batch pays for nothing it does not use."""

    temperature_B: Tensor | None
    greedy_B: Tensor | None
    filtered_F: Tensor | None
    top_k_F: Tensor | None
    top_p_F: Tensor | None
    all_greedy: bool

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab: int, device: torch.device | str) -> Chooser:
        temperatures = [p.temperature for p in params]
        greedy = [t == 0 for t in temperatures]
        filtered = [
            i
            for i, p in enumerate(params)
            if not greedy[i] and (0 < p.top_k < vocab or p.top_p < 1.0)
        ]

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        tempered = any(t not in (0.0, 1.0) for t in temperatures)
        some = bool(filtered)
        top_k = [params[i].top_k if params[i].top_k > 0 else vocab for i in filtered]
        top_p = [params[i].top_p for i in filtered]
        return Chooser(
            temperature_B=tensor(temperatures, torch.float32) if tempered else None,
            greedy_B=tensor(greedy, torch.bool) if any(greedy) else None,
            filtered_F=tensor(filtered, torch.int64) if some else None,
            top_k_F=tensor(top_k, torch.int64) if some else None,
            top_p_F=tensor(top_p, torch.float64) if some else None,
            all_greedy=all(greedy),
        )

    def choose(self, logits_BV: Tensor, uniform_B: Tensor | None) -> tuple[Tensor, ...]:
        """Token ids (B,), their log-probabilities (B,), and the log-probabilities of all as (B, V)
        and (B, 1) to be taken away from it, by the rule. `uniform_B` float64 may be None when every
        row is greedy."""
        scores_BV = tempered(logits_BV, self.temperature_B)
        weights_BV = torch.softmax(scores_BV, -1)
        # The best token's is large: its logarithm gives the normaliser to the last bit, and the
        # exponentials of a whole vocabulary are taken once.
        norm_B1 = scores_BV.amax(-1, keepdim=True) - weights_BV.amax(-1, keepdim=True).log()
        if self.all_greedy:
            ids_B = logits_BV.argmax(-1)
        else:
            if self.filtered_F is not None:
                self._filter(weights_BV)
            ids_B = draw(weights_BV, uniform_B[:, None])[:, 0]
            if self.greedy_B is not None:
                ids_B = torch.where(self.greedy_B, logits_BV.argmax(-1), ids_B)
        chosen_B = (scores_BV.gather(1, ids_B[:, None]) - norm_B1)[:, 0]
        return ids_B, chosen_B, scores_BV, norm_B1

    def _filter(self, weights_BV: Tensor) -> None:
        every = len(self.filtered_F) == len(weights_BV)
        weights_FV = weights_BV if every else weights_BV[self.filtered_F]
        keep_FV = kept_by_filters(weights_FV, self.top_k_F, self.top_p_F)
        if every:
            weights_BV.mul_(keep_FV)
        else:
            weights_BV[self.filtered_F] = weights_FV * keep_FV
