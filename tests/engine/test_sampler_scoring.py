"""Prompt scoring against plain transformers, whole or in pieces."""

import numpy as np
import pytest

from trimtab.engine.head import Head
from trimtab.types import CsrLayout, WeightsRef

from .reference import plain
from .sampling import draw, full_logprobs, request, sampling, save_adapter, tokens

PROMPT = tokens(23, seed=4)


def everything(**options):
    targets = np.random.default_rng(1).integers(0, 300, (22, 3))
    targets[5] = -1
    targets[7, 1] = -1
    return request(
        PROMPT,
        max_tokens=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=6,
        **options,
    )


@pytest.mark.parametrize("limits", [{}, {"prefill_tokens": 3, "score_bytes": 1}])
def test_every_kind_equals_transformers_however_it_is_cut(base, tmp_path, limits):
    folder = save_adapter(base, tmp_path / "a", seed=3)
    sample = everything(temperature=0.6, top_k=2)
    with sampling(base, **limits) as sampler:
        sampler.publish("t", WeightsRef("v", base.info.name, folder))
        result = draw(sampler, sample, "t")
    model = plain(base.info.path, folder)
    full = full_logprobs(model, PROMPT)[:-1].numpy()
    rows = np.arange(22)

    assert result.prompt_logprobs.dtype == np.float32 and np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(result.prompt_logprobs[1:], full[rows, PROMPT[1:]], atol=1e-4)

    best = np.argsort(-full, axis=1)[:, :4]
    assert result.topk_prompt_logprobs.ids[0].tolist() == [0] * 4
    assert result.topk_prompt_logprobs.logprobs[0].tolist() == [-99999.0] * 4
    assert result.topk_prompt_logprobs.ids[1:].tolist() == best.tolist()
    at_best = np.take_along_axis(full, best, 1)
    np.testing.assert_allclose(result.topk_prompt_logprobs.logprobs[1:], at_best, atol=1e-4)

    targets = sample.target_prompt_logprobs
    at_targets = np.take_along_axis(full, targets.clip(0), 1)
    at_targets[targets < 0] = 0
    np.testing.assert_allclose(result.target_prompt_logprobs, at_targets, atol=1e-4)

    tempered = full_logprobs(model, PROMPT, 0.6)[:-1].numpy()
    assert result.prompt_alt_tokens.shape == (22, 6)
    at_drawn = np.take_along_axis(tempered, result.prompt_alt_tokens.astype(int), 1)
    np.testing.assert_allclose(result.prompt_alt_logprobs, at_drawn, atol=1e-4)


def test_alternatives_are_seeded_unfiltered_draws_whatever_the_pieces(llama):
    prompt = np.full(60, 9, np.int32)
    sample = request(prompt, max_tokens=1, prompt_alt_tokens_k=256, top_k=1, seed=5)
    with sampling(llama) as sampler, sampling(llama, prefill_tokens=7, score_bytes=1) as cut:
        result, again = draw(sampler, sample), draw(cut, sample)
    same = result.prompt_alt_tokens == again.prompt_alt_tokens
    assert same.mean() > 0.999  # up to float error at a boundary
    full = full_logprobs(plain(llama.info.path), prompt)[:-1].exp().double().numpy()
    for row in (0, 30, 58):
        order = np.argsort(-full[row])
        groups = np.array([full[row][order[i::10]].sum() for i in range(10)])
        drawn = result.prompt_alt_tokens[row]
        counts = np.array([np.isin(drawn, order[i::10]).sum() for i in range(10)])
        assert ((counts - 256 * groups) ** 2 / (256 * groups)).sum() < 9 + 4 * np.sqrt(18)


def test_alternatives_at_temperature_zero_are_the_best_token(llama):
    sample = request(PROMPT, max_tokens=1, prompt_alt_tokens_k=2, temperature=0.0)
    with sampling(llama) as sampler:
        result = draw(sampler, sample)
    full = full_logprobs(plain(llama.info.path), PROMPT)[:-1].numpy()
    assert result.prompt_alt_tokens.tolist() == [[i, i] for i in full.argmax(1)]
    np.testing.assert_allclose(result.prompt_alt_logprobs[:, 1], full.max(1), atol=1e-4)


def test_last_n_leaves_the_rest_unscored_and_uncomputed(llama, monkeypatch):
    rows = []
    plain_logits = Head.logits
    monkeypatch.setattr(
        Head, "logits", lambda self, h, a: rows.append(len(h)) or plain_logits(self, h, a)
    )
    sample = request(
        PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=4, topk_prompt_logprobs=2
    )
    with sampling(llama) as sampler:
        result = draw(sampler, sample)
        assert rows == [4, 1]  # the scored rows, then the one token drawn
        every = draw(sampler, request(PROMPT, max_tokens=1, prompt_logprobs=True))
    assert np.isnan(result.prompt_logprobs[:-4]).all()
    np.testing.assert_allclose(result.prompt_logprobs[-4:], every.prompt_logprobs[-4:], atol=1e-6)
    assert (result.topk_prompt_logprobs.logprobs[:-4] == -99999.0).all()
    assert (result.topk_prompt_logprobs.logprobs[-4:] > -20).all()


def test_nothing_asked_is_nothing_returned_and_a_layout_is_kept(llama):
    layout = CsrLayout(np.arange(23), np.zeros(22, np.int64))
    targets = np.full((22, 1), 5)
    with sampling(llama) as sampler:
        bare = draw(sampler, request(PROMPT, max_tokens=1))
        one = draw(
            sampler,
            request(PROMPT[:1], max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2),
        )
        sparse = request(PROMPT, max_tokens=1, target_prompt_logprobs=targets)
        object.__setattr__(sparse, "target_layout", layout)
        kept = draw(sampler, sparse)
    assert bare.prompt_logprobs is bare.topk_prompt_logprobs is bare.prompt_alt_tokens is None
    assert bare.target_prompt_logprobs is None and bare.prompt_cache_hit_tokens == 0
    assert one.prompt_logprobs.shape == (1,) and np.isnan(one.prompt_logprobs[0])
    assert one.topk_prompt_logprobs.ids.shape == (1, 2)
    assert kept.target_layout is layout and kept.target_prompt_logprobs.shape == (22, 1)
