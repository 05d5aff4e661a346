"""Every refusal names the field, what was found and what is allowed."""

import numpy as np
import pytest

from trimtab.engine.sampling_limits import SamplerLimits, check_sample
from trimtab.errors import Invalid

from .sampling import request, sampling, submit, tokens

P = tokens(10)


def targets(rows=9, width=2, fill=1):
    return np.full((rows, width), fill, np.int64)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (request(P[:0]), "prompt is empty; .* at least 1"),
        (request(P.reshape(2, 5)), r"prompt has shape \(2, 5\)"),
        (request(P.astype(np.float32)), "prompt has dtype float32"),
        (request(np.array([1, 300, 2])), r"prompt\[1\] is 300; allowed are 0 to 299"),
        (request(np.array([-1])), r"prompt\[0\] is -1; allowed are 0 to 299"),
        (request(np.ones(64, np.int32)), "prompt has 64 tokens; .* is 64 .* at most 63"),
        (request(P, 0), "num_samples is 0; allowed are 1 to 1024"),
        (request(P, 1025), "num_samples is 1025; allowed are 1 to 1024"),
        (request(P, max_tokens=0), "max_tokens is 0; allowed are 1"),
        (request(P, max_tokens=-3), "max_tokens is -3"),
        (request(P, temperature=-0.1), "temperature is -0.1; allowed are finite"),
        (request(P, temperature=float("nan")), "temperature is nan"),
        (request(P, temperature=float("inf")), "temperature is inf"),
        (request(P, top_p=0.0), "top_p is 0.0; allowed are numbers above 0 up to 1"),
        (request(P, top_p=1.01), "top_p is 1.01"),
        (request(P, top_p=float("nan")), "top_p is nan"),
        (request(P, top_k=-2), "top_k is -2; allowed are -1"),
        (request(P, stop_token_ids=(5, 300)), r"stop\[1\] is 300; allowed are 0 to 299"),
        (request(P, stop_strings=("a", "")), "stop has an empty string"),
        (request(P, topk_prompt_logprobs=257), "topk_prompt_logprobs is 257; .* 0 to 256"),
        (request(P, topk_sample_logprobs=-1), "topk_sample_logprobs is -1; .* 0 to 256"),
        (request(P, prompt_alt_tokens_k=999), "prompt_alt_tokens_k is 999; .* 0 to 256"),
        (request(P, prompt_logprobs_last_n=3), "last_n is 3, but prompt_logprobs is not"),
        (
            request(P, prompt_logprobs=True, prompt_logprobs_last_n=10),
            "last_n is 10; allowed are 1 to 9",
        ),
        (
            request(P[:1], prompt_logprobs=True, prompt_logprobs_last_n=1),
            "last_n is 1, but a prompt of 1 token",
        ),
        (request(P, target_prompt_logprobs=targets(10)), r"has shape \(10, 2\); .* \(9, K\)"),
        (request(P, target_prompt_logprobs=targets()[0]), r"has shape \(2,\)"),
        (request(P, target_prompt_logprobs=targets(width=0)), r"has shape \(9, 0\)"),
        (request(P, target_prompt_logprobs=targets(width=257)), "width is 257; .* 1 to 256"),
        (
            request(P, target_prompt_logprobs=targets(fill=300)),
            r"target_prompt_logprobs\[0, 0\] is 300; allowed are -1 to 299",
        ),
        (request(P, target_prompt_logprobs=targets(fill=-2)), "is -2; allowed are -1 to 299"),
        (request(P, target_prompt_logprobs=targets(fill=-1)), "-1 everywhere"),
    ],
)
def test_refusals(llama, sample, words):
    with pytest.raises(Invalid, match=words):
        check_sample(sample, llama.info, SamplerLimits(), has_tokenizer=True)


def test_what_is_just_allowed(llama):
    for sample in (
        request(tokens(63), max_tokens=10**9),
        request(P, 1024, max_tokens=1, temperature=0.0, top_p=1.0, top_k=0),
        request(P, top_k=10**6, topk_sample_logprobs=256, stop_token_ids=(299,)),
        request(P, prompt_logprobs=True, prompt_logprobs_last_n=9),
        request(P, seed=-(2**63), stop_strings=("x",)),
    ):
        check_sample(sample, llama.info, SamplerLimits(), has_tokenizer=True)


def test_strings_need_a_tokenizer_and_submit_checks(llama):
    sample = request(P, stop_strings=("stop",))
    with pytest.raises(Invalid, match=r"'stop', but llama has no tokenizer .* give token ids"):
        check_sample(sample, llama.info, SamplerLimits(), has_tokenizer=False)
    with sampling(llama, run=False) as sampler, pytest.raises(Invalid, match="prompt is empty"):
        submit(sampler, request(P[:0]))
