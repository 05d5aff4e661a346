"""What a sampler accepts: its limits, and the check of a request against them and the model.

Every refusal names the field, what was found and what is allowed. Knows nothing of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.errors import Invalid
from trimtab.types import BaseModelInfo, Sample, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """`kv_bytes` bounds keys and values in memory, `score_bytes` the logits of prompt scoring at
    any moment, `rows` the sequences decoding together, `prefill_tokens` the prompt tokens computed
    between two decode steps, `waiting` the requests not yet begun, `adapters` those kept loaded.
    A second copy of the weights, in the layout that CPU products are fastest in, is made if it
    takes no more than `packed_bytes`. With `prefix_cache` what is left of `kv_bytes` keeps keys and
    values of finished requests for later ones."""

    kv_bytes: int = 2 * 2**30
    packed_bytes: int = 2**30
    score_bytes: int = 64 * 2**20
    rows: int = 256
    prefill_tokens: int = 256
    waiting: int = 2048
    adapters: int = 16
    num_samples: int = 1024
    alternatives: int = 256
    prefix_cache: bool = True


def check_sample(
    request: Sample, info: BaseModelInfo, limits: SamplerLimits, *, has_tokenizer: bool
) -> None:
    """Raise Invalid for a request that this model and these limits cannot serve."""
    _check_prompt(request.prompt, info)
    _between("num_samples", request.num_samples, 1, limits.num_samples)
    _check_params(request.params, info, has_tokenizer)
    most = min(limits.alternatives, info.vocab_size)
    _between("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, most)
    _between("topk_sample_logprobs", request.topk_sample_logprobs, 0, most)
    _between("prompt_alt_tokens_k", request.prompt_alt_tokens_k, 0, limits.alternatives)
    _check_last_n(request)
    if request.target_prompt_logprobs is not None:
        _check_targets(request.target_prompt_logprobs, len(request.prompt), info, limits)


def new_tokens(request: Sample, info: BaseModelInfo) -> int:
    """The most tokens a sequence of this request may get: `max_tokens`, or up to the context."""
    room = info.max_context - len(request.prompt)
    asked = request.params.max_tokens
    return room if asked is None else min(asked, room)


def _check_prompt(prompt: np.ndarray, info: BaseModelInfo) -> None:
    if prompt.ndim != 1:
        raise Invalid(f"prompt has shape {prompt.shape}; it must be one row of token ids")
    if len(prompt) == 0:
        raise Invalid("prompt is empty; it needs at least 1 token")
    if len(prompt) >= info.max_context:
        raise Invalid(
            f"prompt has {len(prompt)} tokens; the context of {info.name} is {info.max_context} "
            f"tokens and at least one must be left, so at most {info.max_context - 1} are allowed"
        )
    _check_ids("prompt", prompt, 0, info.vocab_size)


def _check_ids(field: str, ids: np.ndarray, low: int, vocab: int) -> None:
    if ids.dtype.kind not in "iu":
        raise Invalid(f"{field} has dtype {ids.dtype}; token ids are integers")
    wrong = np.argwhere((ids < low) | (ids >= vocab))
    if len(wrong):
        where = ", ".join(str(int(i)) for i in wrong[0])
        found = int(ids[tuple(wrong[0])])
        raise Invalid(f"{field}[{where}] is {found}; allowed are {low} to {vocab - 1}")


def _check_params(params: SamplingParams, info: BaseModelInfo, has_tokenizer: bool) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise Invalid(f"max_tokens is {params.max_tokens}; allowed are 1 and more, or none")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise Invalid(f"temperature is {params.temperature}; allowed are finite numbers from 0 on")
    if not 0 < params.top_p <= 1:
        raise Invalid(f"top_p is {params.top_p}; allowed are numbers above 0 up to 1")
    if params.top_k < -1:
        raise Invalid(f"top_k is {params.top_k}; allowed are -1 and 0 (no limit) and 1 and more")
    _check_ids("stop", np.array(params.stop_token_ids, dtype=np.int64), 0, info.vocab_size)
    if "" in params.stop_strings:
        raise Invalid("stop has an empty string; a stop string needs at least one character")
    if params.stop_strings and not has_tokenizer:
        raise Invalid(
            f"stop is {params.stop_strings[0]!r}, but {info.name} has no tokenizer to find strings "
            "with; give token ids"
        )


def _check_last_n(request: Sample) -> None:
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return
    if not request.prompt_logprobs:
        raise Invalid(f"prompt_logprobs_last_n is {last_n}, but prompt_logprobs is not asked for")
    most = len(request.prompt) - 1
    if most < 1:
        raise Invalid(
            f"prompt_logprobs_last_n is {last_n}, but a prompt of 1 token has none to score"
        )
    _between("prompt_logprobs_last_n", last_n, 1, most)


def _check_targets(
    targets: np.ndarray, prompt: int, info: BaseModelInfo, limits: SamplerLimits
) -> None:
    if targets.ndim != 2 or targets.shape[0] != prompt - 1 or targets.shape[1] < 1:
        raise Invalid(
            f"target_prompt_logprobs has shape {targets.shape}; it must be ({prompt - 1}, K), a "
            "row for each prompt token after the first"
        )
    _between("target_prompt_logprobs' width", targets.shape[1], 1, limits.alternatives)
    _check_ids("target_prompt_logprobs", targets, -1, info.vocab_size)
    if not (targets >= 0).any():
        raise Invalid("target_prompt_logprobs is -1 everywhere; at least one id is required")


def _between(field: str, found: int, low: int, high: int) -> None:
    if not low <= found <= high:
        raise Invalid(f"{field} is {found}; allowed are {low} to {high}")
