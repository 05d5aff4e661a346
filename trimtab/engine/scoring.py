"""Scores the prompt of one request, piece by piece as its hidden states come.

P prompt tokens; row i (of P - 1) predicts token i + 1; C rows of a piece, R rows of a chunk, K or k
alternatives a row, V vocabulary.

Only rows that somebody asked for get logits, in chunks that stay within a byte budget. Everything
is untempered but the alternative tokens, which are drawn at the request's temperature, unfiltered.
Knows nothing of caches or of other requests.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trimtab.engine.choose import draw, tempered_logprobs, top
from trimtab.engine.head import Head
from trimtab.engine.lora import Adapter
from trimtab.engine.streams import ALTERNATIVES, UniformStream
from trimtab.types import Sample, TopK

EMPTY = -99999.0
_COPIES = 4  # float32 (R, V) tensors alive at once: logits, log-probabilities, weights and a spare


class PromptScorer:
    """
    >>> scorer = PromptScorer(request, seed=7)
    >>> scorer.score(0, hidden_Cd, head, adapter, budget=64 * 2**20)
    >>> scorer.logprobs
    array([nan, -1.2, ...], dtype=float32)
    """

    def __init__(self, request: Sample, seed: int) -> None:
        self.request = request
        self.prompt = torch.from_numpy(request.prompt.astype(np.int64))
        rows = len(request.prompt) - 1
        last_n = request.prompt_logprobs_last_n
        self._first = 0 if last_n is None else rows - last_n
        self._stream = UniformStream(seed, ALTERNATIVES)
        self.logprobs = _filled(request.prompt_logprobs, rows + 1, np.nan)
        k = request.topk_prompt_logprobs
        self.topk = TopK(*_empty_topk(rows + 1, k)) if k else None
        targets = request.target_prompt_logprobs
        self.targets = None if targets is None else np.zeros(targets.shape, np.float32)
        k = request.prompt_alt_tokens_k
        self.alt_tokens = np.zeros((rows, k), np.int32) if k else None
        self.alt_logprobs = np.zeros((rows, k), np.float32) if k else None
        self._wanted = self._wanted_rows(rows)

    @property
    def anything(self) -> bool:
        return bool(self._wanted.any())

    @property
    def first_wanted(self) -> int:
        """The first row that somebody asked for: no row before it needs hidden states."""
        return int(self._wanted.argmax()) if self.anything else len(self._wanted)

    def _wanted_rows(self, rows: int) -> np.ndarray:
        wanted = np.full(rows, self.alt_tokens is not None)
        if self.logprobs is not None or self.topk is not None:
            wanted[self._first :] = True
        if self.request.target_prompt_logprobs is not None:
            wanted |= (self.request.target_prompt_logprobs >= 0).any(axis=1)
        return wanted

    def score(
        self, start: int, hidden_Cd: Tensor, head: Head, adapter: Adapter | None, budget: int
    ) -> None:
        """Take rows [start, start + C). Pieces come in order, each once; the first may begin as
        late as `first_wanted`."""
        wanted = self._wanted[start : start + len(hidden_Cd)].nonzero()[0]
        size = self._chunk_rows(head.vocab_size, budget)
        for i in range(0, len(wanted), size):
            inside = torch.from_numpy(wanted[i : i + size])
            hidden_Rd = hidden_Cd[inside.to(hidden_Cd.device)]
            logits_RV = head.logits(hidden_Rd, [(adapter, 0, len(hidden_Rd))])
            self._chunk(inside + start, logits_RV)

    def _chunk_rows(self, vocab: int, budget: int) -> int:
        drawn = self.request.prompt_alt_tokens_k * 256 * 16
        return max(1, budget // (vocab * 4 * _COPIES + drawn))

    def _chunk(self, row_R: Tensor, logits_RV: Tensor) -> None:
        logprobs_RV = tempered_logprobs(logits_RV)
        scored = row_R >= self._first
        if scored.any() and (self.logprobs is not None or self.topk is not None):
            self._score_tokens(row_R[scored] + 1, logprobs_RV[scored.to(logprobs_RV.device)])
        if self.targets is not None:
            self._score_targets(row_R.numpy(), logprobs_RV)
        if self.alt_tokens is not None:
            self._draw_alternatives(row_R.numpy(), logits_RV, logprobs_RV)

    def _score_tokens(self, position_R: Tensor, logprobs_RV: Tensor) -> None:
        if self.logprobs is not None:
            ids_R1 = self.prompt[position_R][:, None].to(logprobs_RV.device)
            self.logprobs[position_R.numpy()] = logprobs_RV.gather(1, ids_R1)[:, 0].cpu().numpy()
        if self.topk is not None:
            ids_Rk, values_Rk = top(logprobs_RV, self.request.topk_prompt_logprobs)
            self.topk.ids[position_R.numpy()] = ids_Rk.cpu().numpy()
            self.topk.logprobs[position_R.numpy()] = values_Rk.cpu().numpy()

    def _score_targets(self, row_R: np.ndarray, logprobs_RV: Tensor) -> None:
        ids_RK = self.request.target_prompt_logprobs[row_R]
        at_RK = torch.from_numpy(ids_RK.clip(min=0)).to(logprobs_RV.device)
        values_RK = logprobs_RV.gather(1, at_RK).cpu().numpy()
        self.targets[row_R] = np.where(ids_RK < 0, np.float32(0), values_RK)

    def _draw_alternatives(self, row_R: np.ndarray, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
        temperature = self.request.params.temperature
        k = self.request.prompt_alt_tokens_k
        if temperature not in (0.0, 1.0):
            logprobs_RV = tempered_logprobs(logits_RV, logits_RV.new_tensor([temperature]))
        if temperature == 0:
            ids_Rk = logits_RV.argmax(-1, keepdim=True).expand(-1, k)
        else:
            uniform = torch.from_numpy(self._stream.take(len(row_R) * k))
            ids_Rk = draw(logprobs_RV.exp(), uniform.view(-1, k).to(logprobs_RV.device))
        self.alt_tokens[row_R] = ids_Rk.int().cpu().numpy()
        self.alt_logprobs[row_R] = logprobs_RV.gather(1, ids_Rk).cpu().numpy()


def _filled(asked: bool, length: int, value: float) -> np.ndarray | None:
    return np.full(length, value, np.float32) if asked else None


def _empty_topk(rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, k), np.int32), np.full((rows, k), EMPTY, np.float32)
