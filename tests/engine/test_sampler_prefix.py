"""The prefix cache in the sampler: what is reused, counted and given up, and that nothing changes.

P prompt tokens, T sampled tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.engine.memory import MIB, Memory
from trimtab.engine.models import BaseModel
from trimtab.engine.prefix import LEAST
from trimtab.engine.sampling_limits import SamplerLimits
from trimtab.engine.scoring import PromptScorer
from trimtab.engine.sharing import shared_tokens
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.errors import ServerError
from trimtab.types import WeightsRef

from .reference import plain
from .sampling import draw, gap, request, same, sampling, save_adapter, step, submit, tokens

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
PROMPT = tokens(30, seed=1)


def hits(result):
    return result.prompt_cache_hit_tokens


def passes(sampler, monkeypatch):
    """How many rows each pass through the net has from now on."""
    found, hidden = [], sampler._net.hidden
    monkeypatch.setattr(
        sampler._net, "hidden", lambda t, *rest: found.append(len(t)) or hidden(t, *rest)
    )
    return found


def followed(prompt, sequence, more):
    return np.concatenate([prompt, sequence.tokens, more]).astype(np.int32)


def test_turns_and_shared_heads_hit_and_draw_what_they_would_without(base, tmp_path):
    """A turn of a conversation begins with all before it but the token that was drawn last, which
    never went through the model. A prompt's last token is each row's first, so never a hit."""
    folder = save_adapter(base, tmp_path / "a", seed=1)
    model = plain(base.info.path, folder)
    with sampling(base) as cached, sampling(base, prefix_cache=False) as bare:
        for sampler in (cached, bare):
            sampler.publish("t", WeightsRef("v1", base.info.name, folder))
        first = draw(cached, request(PROMPT, 3, max_tokens=18), "t")
        turn = followed(PROMPT, first.sequences[1], tokens(6, seed=2))
        prompts = [
            (PROMPT, 29),
            (turn, 30 + 18 - 1),
            (np.concatenate([PROMPT[:20], tokens(15, seed=3)]), 20),
            (np.concatenate([turn[:41], tokens(9, seed=4)]), 41),
            (np.concatenate([PROMPT[: LEAST - 1], tokens(9, seed=5)]), 0),
            (PROMPT[:25], 24),
            (tokens(30, seed=6), 0),
        ]
        assert hits(first) == 0
        for i, (prompt, expected) in enumerate(prompts):
            sample = request(prompt, 2, max_tokens=10, seed=i, temperature=0.9)
            found = draw(cached, sample, "t", head_k=4)
            without = draw(bare, sample, "t", head_k=4)
            assert (hits(found), hits(without)) == (expected, 0)
            for a, b in zip(found.sequences, without.sequences, strict=True):
                assert same(a, b) and gap(model, prompt, a, 0.9) < 1e-4
                np.testing.assert_allclose(a.head.logprobs, b.head.logprobs, atol=2e-5)


def test_equal_prompts_in_flight_are_computed_once(llama, monkeypatch):
    longer = np.concatenate([PROMPT, tokens(12, seed=3)])
    with sampling(llama, run=False) as sampler:
        rows = passes(sampler, monkeypatch)
        prompts = [PROMPT, PROMPT, tokens(20, seed=2), longer, PROMPT]
        futures = [submit(sampler, request(p, max_tokens=2)) for p in prompts]
        step(sampler, 8)
    assert [hits(f.result(0)) for f in futures] == [0, 29, 0, 29, 29]
    assert rows == [29 + 19, 2, 12, 5, 3]  # prompts, decode, the longer one's rest, decode twice
    model = plain(llama.info.path)
    for future, prompt in ((futures[1], PROMPT), (futures[3], longer)):
        assert gap(model, prompt, future.result(0).sequences[0]) < 1e-4


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_who_waited_for_a_prompt_that_never_comes_computes_it(llama, monkeypatch, how):
    with sampling(llama, run=False, prefill_tokens=5) as sampler:
        first = submit(sampler, request(PROMPT, max_tokens=2, prompt_logprobs=True))
        second = submit(sampler, request(PROMPT, max_tokens=2))
        if how == "fails":
            scorer = sampler._inbox[0].scorer
            monkeypatch.setattr(scorer, "score", lambda *_: 1 / 0)
            step(sampler)
            with pytest.raises(ServerError, match="scoring the prompt failed"):
                first.result(0)
        else:
            step(sampler)
            assert first.cancel()
        step(sampler, 8)
        assert hits(second.result(0)) == 0 and not sampler._loop.busy


def test_scores_that_are_asked_for_are_computed_not_hit(llama):
    with sampling(llama) as sampler:
        draw(sampler, request(PROMPT, max_tokens=1))
        every = draw(sampler, request(PROMPT, max_tokens=1, prompt_logprobs=True))
        last = draw(
            sampler, request(PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=5)
        )
        targets = np.full((29, 1), -1)
        targets[20:] = 7
        some = draw(sampler, request(PROMPT, max_tokens=1, target_prompt_logprobs=targets))
        drawn = draw(sampler, request(PROMPT, max_tokens=1, prompt_alt_tokens_k=2))
    assert [hits(r) for r in (every, last, some, drawn)] == [0, 24, 20, 0]
    np.testing.assert_allclose(last.prompt_logprobs[-5:], every.prompt_logprobs[-5:], atol=1e-5)
    assert (some.target_prompt_logprobs[:20] == 0).all() and some.target_prompt_logprobs[20:].all()


def test_owners_and_versions_share_nothing(llama, tmp_path):
    folders = [save_adapter(llama, tmp_path / f"{i}", seed=i) for i in (1, 2)]
    with sampling(llama, run=False) as sampler:

        def count(target, owner="a"):
            future = submit(sampler, request(PROMPT, max_tokens=2), target, owner=owner)
            step(sampler, 3)
            return hits(future.result(0))

        for name, i in (("live", 0), ("same", 0), ("other", 1)):
            sampler.publish(name, WeightsRef(f"v{i}", "llama", folders[i]))
        assert [count(*who) for who in (("live",), ("live", "b"), ("live",), ("live", "b"))] == [
            0, 0, 29, 29,
        ]  # fmt: skip
        assert [count("same"), count("other"), count("base")] == [29, 0, 0]
        sampler.publish("live", WeightsRef("v2", "llama", folders[1]))
        assert [count("live"), count("same"), count("live")] == [0, 29, 29]
        sampler.retire("same")  # nobody means v0 any more
        assert count("other") == 29
        sampler.publish("late", WeightsRef("v0", "llama", folders[0]))
        assert count("late") == 0


def test_what_two_versions_computed_is_not_kept(llama, tmp_path):
    folders = [save_adapter(llama, tmp_path / f"{i}", seed=i) for i in (1, 2)]
    with sampling(llama, run=False, prefill_tokens=5) as sampler:

        def publish(i):
            sampler.publish("live", WeightsRef(f"v{i}", "llama", folders[i]))

        publish(0)
        sampler.publish("old", WeightsRef("v0", "llama", folders[0]))
        split = submit(sampler, request(PROMPT, max_tokens=20), "live")
        step(sampler)
        publish(1)  # in the middle of the prompt
        step(sampler, 30)
        assert split.done() and sampler._loop.memory.prefixes.places == 0
        publish(0)
        late = submit(sampler, request(PROMPT, max_tokens=20), "live")
        step(sampler, 5)
        publish(1)  # in the middle of the sample
        step(sampler, 30)
        assert late.done() and sampler._loop.memory.prefixes.places == 29
        turn = followed(PROMPT, late.result(0).sequences[0], tokens(3))
        again = submit(sampler, request(turn, max_tokens=2), "old")
        step(sampler, 20)
        assert hits(again.result(0)) == 29


def test_running_requests_take_what_is_kept(llama):
    places = 300
    with sampling(llama, run=False, kv_bytes=places * TOKEN_BYTES) as sampler:
        memory, results = sampler._loop.memory, []
        for i in range(24):
            prompt = tokens(30, seed=i // 2)  # each comes twice
            results.append(submit(sampler, request(prompt, 2, seed=i, max_tokens=20)))
            for _ in range(25):
                step(sampler)
                assert memory.allocated() + memory.prefixes.places <= places
                assert memory.reserved + memory.prefixes.places <= places
                assert sampler._loop.waiting == 0  # admitted at once, whatever was kept
        assert [hits(f.result(0)) for f in results] == [0, 29] * 12
        assert memory.prefixes.places > 150 and memory.allocated() == memory.reserved == 0
        wide = submit(sampler, request(tokens(30), 6, max_tokens=30))  # 32 + 6 x 32 places
        step(sampler)
        assert sampler._loop.waiting == 0 and memory.prefixes.places <= places - 224
        step(sampler, 30)
        assert wide.done()
    model = plain(llama.info.path)
    for i in (1, 13, 23):
        for sequence in results[i].result(0).sequences:
            assert gap(model, tokens(30, seed=i // 2), sequence) < 1e-4


def test_a_shortage_of_memory_anywhere_empties_the_cache(llama):
    memory = Memory(2**40)
    sampler = TorchSampler(llama, limits=SamplerLimits(kv_bytes=MIB), memory=memory)
    sampler.publish("base", WeightsRef("base", "llama"))
    future = submit(sampler, request(PROMPT, max_tokens=20))
    step(sampler, 25)
    assert future.done() and sampler._loop.memory.prefixes.places == 30 + 19
    with pytest.raises(MemoryError):
        memory.check(2**50)
    assert sampler._loop.memory.prefixes.places == 0


def test_without_free_memory_nothing_is_kept_and_the_request_is_none_the_worse(llama, monkeypatch):
    with sampling(llama, run=False) as sampler:
        monkeypatch.setattr(sampler._loop.memory, "_free", lambda: 0)
        future = submit(sampler, request(PROMPT, max_tokens=20))
        step(sampler, 25)
        assert future.done() and sampler._loop.memory.prefixes.places == 0


@pytest.mark.parametrize("numerics", ["int8", "int4", "bfloat16"])
def test_low_precision_samplers_reuse_too(folder_of, numerics):
    base = BaseModel.load("q", folder_of("qwen3"), sampler_dtype=numerics)
    with sampling(base) as cached, sampling(base, prefix_cache=False) as bare:
        first = draw(cached, request(PROMPT, max_tokens=20))
        turn = request(followed(PROMPT, first.sequences[0], tokens(4)), max_tokens=8)
        found, without = draw(cached, turn), draw(bare, turn)
        again, expected = draw(cached, request(PROMPT, max_tokens=20)), first
    assert (hits(found), hits(again)) == (49, 29)
    bound = {"bfloat16": 2e-2, "int8": 1e-3}.get(numerics, 1e-4)  # int8's activations have 15 bits
    for one, other in ((found, without), (again, expected)):
        [a], [b] = one.sequences, other.sequences
        alike = shared_tokens(a.tokens, b.tokens)
        assert alike == len(a.tokens) or numerics == "bfloat16"
        np.testing.assert_allclose(a.logprobs[:alike], b.logprobs[:alike], atol=bound)


def test_a_prompt_that_moves_brings_what_its_pass_computed(llama, monkeypatch):
    """Scoring fails a request whose place another of the same pass takes."""

    def fails(*_):
        raise MemoryError

    prompts, model = [tokens(30, seed=i) for i in range(3)], plain(llama.info.path)
    with sampling(llama, run=False) as sampler:
        monkeypatch.setattr(PromptScorer, "score", fails)
        scored = request(prompts[0], max_tokens=5, prompt_logprobs=True, prompt_logprobs_last_n=5)
        bad = submit(sampler, scored)
        good = [submit(sampler, request(prompt, max_tokens=5)) for prompt in prompts[1:]]
        step(sampler, 6)
        with pytest.raises(ServerError, match="scoring the prompt failed"):
            bad.result(0)
        good += [submit(sampler, request(prompt, max_tokens=5)) for prompt in prompts[1:]]
        step(sampler, 6)
    assert [hits(f.result(0)) for f in good] == [0, 0, 29, 29]
    for future, prompt in zip(good, prompts[1:] * 2, strict=True):
        assert gap(model, prompt, future.result(0).sequences[0]) < 1e-4
