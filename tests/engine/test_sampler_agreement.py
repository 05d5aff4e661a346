"""What the sampler records is what plain transformers (with PEFT) computes, at every position."""

from concurrent.futures import wait

import numpy as np
import pytest
import torch

from trimtab.types import WeightsRef

from .reference import plain
from .sampling import (
    draw,
    expected,
    full_logprobs,
    gap,
    request,
    sampling,
    save_adapter,
    submit,
    tokens,
)

RAGGED = (1, 2, 5, 17, 30, 44, 3, 9)


@pytest.mark.parametrize("adapted", [False, True])
def test_ragged_requests_that_join_and_leave_agree_at_every_position(base, tmp_path, adapted):
    folder = save_adapter(base, tmp_path / "a", seed=1) if adapted else None
    model = plain(base.info.path, folder)
    prompts = [tokens(n, seed=n) for n in RAGGED]
    with sampling(base, prefill_tokens=8, rows=5) as sampler:
        sampler.publish("t", WeightsRef("v1", base.info.name, folder))
        futures = [
            submit(sampler, request(p, 1 + i % 3, max_tokens=3 + 5 * i, seed=i), "t")
            for i, p in enumerate(prompts)
        ]
        results = [f.result(60) for f in futures]
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert len(result.sequences) == 1 + i % 3
        for sequence in result.sequences:
            assert len(sequence.tokens) == min(3 + 5 * i, 64 - len(prompt))
            assert sequence.stop_reason == "length"
            assert sequence.versions == (("v1", len(sequence.tokens)),)
            assert gap(model, prompt, sequence) < 1e-4
    if adapted:
        assert gap(plain(base.info.path), prompts[5], results[5].sequences[0]) > 0.1


def test_greedy_is_what_generate_returns(base):
    model = plain(base.info.path)
    prompts = [tokens(n, seed=n) for n in (1, 6, 20)]
    with sampling(base) as sampler:
        futures = [submit(sampler, request(p, temperature=0.0, max_tokens=30)) for p in prompts]
        wait(futures)
    for prompt, future in zip(prompts, futures, strict=True):
        ids = torch.tensor(prompt)[None].long()
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        sequence = future.result().sequences[0]
        assert sequence.tokens.tolist() == generated[0, len(prompt) :].tolist()
        assert gap(model, prompt, sequence) < 1e-4  # scored at temperature 1


def test_temperature_is_in_the_logprobs_and_filters_are_not(base):
    model = plain(base.info.path)
    prompt = tokens(12)
    with sampling(base) as sampler:
        for options in ({"temperature": 0.5}, {"temperature": 1.7, "top_k": 3, "top_p": 0.9}):
            for sequence in draw(sampler, request(prompt, 2, max_tokens=20, **options)).sequences:
                assert gap(model, prompt, sequence, options["temperature"]) < 1e-4
                full_TV = expected(model, prompt, sequence, options["temperature"])
                if "top_k" in options:
                    best_Tk = full_TV.topk(3).indices
                    chosen_T = torch.tensor(sequence.tokens).long()[:, None]
                    assert (best_Tk == chosen_T).any(1).all()


def test_recorded_head_and_topk_are_the_top_of_the_tempered_distribution(base):
    model = plain(base.info.path)
    prompt = tokens(9)
    sample = request(prompt, 2, max_tokens=15, temperature=0.6, top_p=0.7, topk_sample_logprobs=3)
    with sampling(base) as sampler:
        other = submit(sampler, request(tokens(4), max_tokens=15, topk_sample_logprobs=11))
        result = draw(sampler, sample, head_k=8)
        bare = draw(sampler, sample)
    assert other.result().sequences[0].topk.ids.shape == (15, 11)
    for sequence, without in zip(result.sequences, bare.sequences, strict=True):
        values_Tk, ids_Tk = expected(model, prompt, sequence, 0.6).topk(8)
        assert sequence.head.ids.dtype == np.int32
        assert sequence.head.logprobs.dtype == np.float32
        assert sequence.head.ids.tolist() == ids_Tk.tolist()
        np.testing.assert_allclose(sequence.head.logprobs, values_Tk, atol=1e-4)
        assert sequence.topk.ids.tolist() == sequence.head.ids[:, :3].tolist()
        assert without.head is None and without.topk.ids.shape == (15, 3)
        assert without.tokens.tolist() == sequence.tokens.tolist()


def test_the_head_is_no_wider_than_the_vocabulary(llama):
    with sampling(llama) as sampler:
        sequence = draw(sampler, request(tokens(3), max_tokens=2), head_k=10_000).sequences[0]
    assert sequence.head.ids.shape == (2, 300)
    np.testing.assert_allclose(np.exp(sequence.head.logprobs).sum(1), 1, atol=1e-5)


def test_first_tokens_are_drawn_with_the_models_probabilities(llama):
    """Chi-square over 1,024 samples of a request, fixed seed, against a plain forward pass."""
    model = plain(llama.info.path)
    prompt = tokens(10)
    options = {"temperature": 0.5, "top_k": 12}
    with sampling(llama) as sampler:
        result = draw(sampler, request(prompt, 1024, max_tokens=1, seed=11, **options))
    probs = full_logprobs(model, prompt, 0.5)[-1].exp().double().numpy()
    probs[np.argsort(-probs)[12:]] = 0
    probs /= probs.sum()
    counts = np.bincount([s.tokens[0] for s in result.sequences], minlength=300)
    assert counts[probs == 0].sum() == 0
    live = probs > 0
    chi2 = ((counts - 1024 * probs)[live] ** 2 / (1024 * probs[live])).sum()
    assert chi2 < 11 + 4 * np.sqrt(22)


def test_samples_depend_on_seed_and_index_alone(llama):
    prompt = tokens(8)
    with sampling(llama) as sampler:
        eight = draw(sampler, request(prompt, 8, seed=7, max_tokens=16)).sequences
        busy = [submit(sampler, request(tokens(20, i), 3, seed=i)) for i in range(4)]
        again = draw(sampler, request(prompt, 8, seed=7, max_tokens=16)).sequences
        three = draw(sampler, request(prompt, 3, seed=7 + 2**64, max_tokens=16)).sequences
        other = draw(sampler, request(prompt, 8, seed=8, max_tokens=16)).sequences
        wait(busy)
    drawn = [tuple(s.tokens.tolist()) for s in eight]
    assert len(set(drawn)) == 8
    assert [tuple(s.tokens.tolist()) for s in again] == drawn
    assert [tuple(s.tokens.tolist()) for s in three] == drawn[:3]
    assert not {tuple(s.tokens.tolist()) for s in other} & set(drawn)


def test_a_request_without_a_seed_still_draws_distinct_samples(llama):
    with sampling(llama) as sampler:
        sequences = draw(sampler, request(tokens(4), 4, seed=None, max_tokens=8)).sequences
    assert len({tuple(s.tokens.tolist()) for s in sequences}) == 4


def test_groups_of_all_sizes_share_their_prompts_and_agree(base):
    """Prompts of other lengths with other numbers of samples, side by side in one group or not,
    and rows that end at different times, so that places are refilled."""
    model = plain(base.info.path)
    shapes = [(9, 5), (14, 8), (20, 6), (3, 7), (1, 5), (31, 1), (25, 1)]
    with sampling(base, rows=16) as sampler:
        futures = [
            submit(
                sampler,
                request(
                    tokens(p, p),
                    n,
                    max_tokens=25,
                    seed=p,
                    ignore_eos=False,
                    stop_token_ids=tuple(range(0, 300, 9)),
                ),
            )
            for p, n in shapes
        ]
        results = [f.result(60) for f in futures]
    lengths = {len(s.tokens) for r in results for s in r.sequences}
    assert len(lengths) > 5
    for (p, n), result in zip(shapes, results, strict=True):
        assert len(result.sequences) == n
        assert max(gap(model, tokens(p, p), s) for s in result.sequences) < 1e-4
