"""The sampler when memory runs out or a pass breaks: what failed together is tried apart, only what
fails alone fails, and everybody else gets the tokens that were theirs."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from trimtab.engine import memory as memory_module
from trimtab.engine.choose import Chooser
from trimtab.engine.memory import MIB, Memory
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.errors import Invalid, ServerError
from trimtab.types import WeightsRef

from .sampling import random_adapter, request, sampling, step, submit, tokens

SHORT = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


def drawn(future):
    return [sequence.tokens.tolist() for sequence in future.result(0).sequences]


def run(llama, monkeypatch, samples, error=None, when=None):
    """The futures of these samples, all at once, with `when(rows, adapters)` deciding which passes
    raise `error`."""
    with sampling(llama, run=False) as sampler:
        adapter = random_adapter(llama, 1)
        monkeypatch.setattr(sampler._shelf, "_read", lambda _: adapter)
        sampler.publish("other", WeightsRef("v", llama.info.name, llama.info.path))
        hidden = sampler._net.hidden

        def patched(tokens_M, positions_M, plan, adapters):
            if error is not None and when(len(tokens_M), [a for a, _, _ in adapters]):
                raise error
            return hidden(tokens_M, positions_M, plan, adapters)

        with monkeypatch.context() as patch:
            patch.setattr(sampler._net, "hidden", patched)
            futures = [submit(sampler, sample, target) for sample, target in samples]
            step(sampler, 60)
        assert sampler._loop.memory.reserved == 0 and not sampler._loop.busy
        return futures


MINE = (request(tokens(9), 2, max_tokens=20, seed=3), "base")
THEIRS = (request(tokens(40, seed=1), 8, max_tokens=15, seed=4), "other")


@pytest.mark.parametrize("error", [SHORT, OSError("broken")], ids=["memory", "exception"])
@pytest.mark.parametrize("where", ["prompt", "decoding"])
def test_a_neighbours_failure_costs_me_nothing(llama, monkeypatch, error, where):
    """Their adapter raises in every pass it is in, in prompts or in decoding: mine shares those
    passes, and its random numbers are those of a run alone."""
    [alone] = run(llama, monkeypatch, [MINE])

    def when(rows, adapters):
        return any(a is not None for a in adapters) and (where == "prompt" or rows <= 10)

    mine, theirs = run(llama, monkeypatch, [MINE, THEIRS], error, when)
    assert drawn(mine) == drawn(alone)
    with pytest.raises(
        ServerError, match="memory does not suffice" if error is SHORT else "broken"
    ):
        theirs.result(0)


def test_numbers_drawn_in_a_step_that_fails_are_drawn_again(llama, monkeypatch):
    """Ten rows together fail once their random numbers are out; two groups apart do not."""
    alone = [run(llama, monkeypatch, [sample])[0] for sample in (MINE, THEIRS)]
    choose, failures = Chooser.choose, []

    def patched(self, logits_BV, uniform_B):
        if len(logits_BV) == 10:
            failures.append(1)
            raise SHORT
        return choose(self, logits_BV, uniform_B)

    monkeypatch.setattr(Chooser, "choose", patched)
    together = run(llama, monkeypatch, [MINE, THEIRS])
    assert len(failures) >= 10
    assert [drawn(future) for future in together] == [drawn(future) for future in alone]


def test_a_prompt_too_long_for_one_pass_is_computed_in_pieces(llama, monkeypatch):
    sample = (request(tokens(60), 1, max_tokens=3, prompt_logprobs=True), "base")
    [whole] = run(llama, monkeypatch, [sample])
    [parts] = run(llama, monkeypatch, [sample], SHORT, lambda rows, _: rows > 20)
    assert drawn(parts) == drawn(whole)
    np.testing.assert_allclose(
        parts.result(0).prompt_logprobs[1:], whole.result(0).prompt_logprobs[1:], atol=1e-5
    )


def test_where_one_group_does_not_fit_its_largest_request_goes(llama, monkeypatch):
    """Of one shape, so in one batched product: thirteen rows fail, the five of mine do not."""
    small = (request(tokens(9), 5, max_tokens=20, seed=3), "base")
    large = (request(tokens(9, seed=2), 8, max_tokens=20, seed=4), "base")
    [alone] = run(llama, monkeypatch, [small])
    mine, theirs = run(llama, monkeypatch, [small, large], SHORT, lambda rows, _: rows == 13)
    assert drawn(mine) == drawn(alone)
    with pytest.raises(ServerError, match="a decode step failed: memory does not suffice"):
        theirs.result(0)


def test_a_pool_that_may_not_grow_fails_its_request_and_names_the_limit(llama, monkeypatch):
    with sampling(llama, run=False) as sampler:
        mine = submit(sampler, request(tokens(9), 1, max_tokens=20, seed=3))
        step(sampler, 3)
        monkeypatch.setattr(memory_module, "resident_bytes", lambda: 2**50)
        theirs = submit(sampler, request(tokens(40), 4, max_tokens=15))
        step(sampler, 3)
        with pytest.raises(ServerError, match=r"memory does not suffice \(about .* memory_mib"):
            theirs.result(0)
        step(sampler, 30)
        assert len(drawn(mine)[0]) == 20


def test_keys_and_values_take_half_of_what_is_free(llama, monkeypatch, caplog):
    monkeypatch.setattr(memory_module, "resident_bytes", lambda: 100 * MIB)
    memory = Memory(102 * MIB)
    with caplog.at_level(logging.WARNING):
        sampler = TorchSampler(llama, limits=SamplerLimits(kv_bytes=64 * MIB), memory=memory)
    per_token = sampler._layout.bytes_per_token
    assert sampler._loop.memory.budget == MIB // per_token
    assert "keys and values get 1 MiB, not 64: memory_mib is 102, and 2 are free" in caplog.text
    most = sampler._loop.memory.budget
    sampler.check(request(tokens(9), most // 64, max_tokens=40))  # a row at a time would do
    memory = Memory(100 * MIB + 64 * per_token)
    small = TorchSampler(llama, limits=SamplerLimits(kv_bytes=64 * MIB), memory=memory)
    with pytest.raises(Invalid, match="raise kv_cache_mib or memory_mib"):
        small.check(request(tokens(9), 1, max_tokens=40))


def test_a_step_asks_for_its_logits(llama, monkeypatch):
    asked = []
    with sampling(llama, run=False) as sampler:
        monkeypatch.setattr(sampler._loop, "_ask", asked.append)
        submit(sampler, request(tokens(9), 5, max_tokens=3))
        step(sampler, 5)
    assert asked[0] >= 5 * 4 * llama.info.vocab_size
    assert torch.is_tensor(llama.sampler_net.head.base.weight)
