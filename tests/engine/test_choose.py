"""The rule for log-probabilities, the filters and the draw, on logits made by hand."""

import numpy as np
import pytest
import torch

from trimtab.engine.choose import Chooser, draw, kept_by_filters, tempered_logprobs
from trimtab.engine.streams import UniformStream
from trimtab.types import SamplingParams

HAND = torch.tensor([[2.0, 1.0, 0.0]])
AT_1 = [-0.40760596, -1.40760596, -2.40760596]
AT_HALF = [-0.14293162, -2.14293162, -4.14293162]


def choose(logits, uniforms, **params):
    """One row of `logits` a uniform, all with the same parameters."""
    logits_BV = torch.as_tensor(logits).expand(len(uniforms), -1)
    params = [SamplingParams(**params)] * len(uniforms)
    return chosen_of(params, logits_BV, torch.tensor(uniforms, dtype=torch.float64))


def chosen_of(params, logits_BV, uniform_B):
    """Ids, their log-probabilities, and everybody's."""
    chooser = Chooser.of(params, logits_BV.shape[1], "cpu")
    ids_B, chosen_B, scores_BV, norm_B1 = chooser.choose(logits_BV, uniform_B)
    return ids_B, chosen_B, scores_BV - norm_B1


@pytest.mark.parametrize(
    ("params", "values"),
    [
        ({}, AT_1),
        ({"temperature": 0.5}, AT_HALF),
        ({"temperature": 0.0}, AT_1),
        ({"top_k": 1}, AT_1),
        ({"top_p": 0.1}, AT_1),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.5}, AT_HALF),
    ],
)
def test_logprobs_are_tempered_and_unfiltered(params, values):
    ids, chosen, every = choose(HAND, [0.0], **params)
    np.testing.assert_allclose(every[0], values, atol=1e-6)
    assert ids.tolist() == [0] and chosen[0] == every[0, 0]


def test_temperature_zero_and_top_k_one_take_the_best_whatever_the_uniform():
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-40}):
        ids, chosen, _ = choose([[0.0, 3.0, 1.0]], [0.0, 0.5, 1 - 2**-53], **params)
        assert ids.tolist() == [1, 1, 1]
        assert torch.isfinite(chosen).all()


def test_a_draw_falls_where_the_cumulative_distribution_passes_the_uniform():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    u = torch.tensor([[0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]], dtype=torch.float64)
    assert draw(weights, u).tolist() == [[1, 1, 3, 3, 4, 4]]


def test_a_large_vocabulary_draws_like_one_exact_sum():
    generator = torch.Generator().manual_seed(1)
    probs = torch.randn(3, 5003, generator=generator).mul(3).softmax(-1)
    probs[:, 700:1400] = 0
    u = torch.rand(3, 4000, generator=generator, dtype=torch.float64)
    exact = torch.searchsorted(probs.double().cumsum(-1) / probs.double().sum(-1, True), u)
    found = draw(probs, u)
    assert (found == exact).float().mean() > 0.999  # boundaries within float error
    assert probs.gather(1, found).min() > 0


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (5, 0.5, [0]),  # 0.5 alone reaches the mass
        (5, 0.51, [0, 1]),
        (5, 0.75, [0, 1]),
        (5, 0.76, [0, 1, 2]),
        (5, 1.0, [0, 1, 2, 3, 4]),
        (2, 1.0, [0, 1]),
        (2, 0.66, [0]),  # of the two's mass 0.75, 0.66 is 0.495
        (2, 0.67, [0, 1]),
        (1, 0.01, [0]),
    ],
)
def test_filters_keep_the_smallest_set_with_the_mass_after_top_k(top_k, top_p, kept):
    order = torch.tensor([3, 0, 4, 1, 2])
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]])[:, order]
    keep = kept_by_filters(probs, torch.tensor([top_k]), torch.tensor([top_p]).double())
    assert sorted(order[keep[0]].tolist()) == kept


def test_a_nucleus_wider_than_the_first_candidates_is_found():
    probs = torch.full((2, 1000), 1e-3)
    keep = kept_by_filters(probs, torch.tensor([1000, 1000]), torch.tensor([0.5, 0.9999]).double())
    assert keep.sum(1).tolist() == pytest.approx([500, 1000], abs=1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.9, "top_k": 7},
        {"top_p": 0.8},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    ],
)
def test_frequencies_are_the_exact_probabilities(params):
    """Chi-square over 40,000 draws, fixed seed; its mean is the degrees of freedom."""
    draws = 40_000
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3)) * 1.5
    ids, _, _ = choose(logits[None], UniformStream(5, 0).take(draws).tolist(), **params)
    probs = np.exp(logits.double().numpy() / params.get("temperature", 1.0))
    order = np.argsort(-probs)
    probs[order[params.get("top_k", 20) :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.get("top_p", 1.0)]] = 0
    probs /= probs.sum()
    counts = np.bincount(ids, minlength=20)
    assert counts[probs == 0].sum() == 0
    live = probs > 0
    chi2 = ((counts - draws * probs)[live] ** 2 / (draws * probs[live])).sum()
    freedom = live.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_rows_of_a_mixed_batch_choose_as_they_would_alone():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.3, top_k=4),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=2.5, top_k=0, top_p=0.99),
    ]
    generator = torch.Generator().manual_seed(2)
    logits_BV = torch.randn(5, 300, generator=generator) * 2
    u_B = torch.rand(5, generator=generator, dtype=torch.float64)
    ids, chosen, every = chosen_of(params, logits_BV, u_B)
    for i, one in enumerate(params):
        row = slice(i, i + 1)
        alone = chosen_of([one], logits_BV[row], u_B[row])
        assert ids[i] == alone[0][0] and chosen[i] == alone[1][0]
        torch.testing.assert_close(every[i], alone[2][0], atol=1e-6, rtol=0)
    for t in (0.0, 0.3, 2.5):
        expected = (logits_BV / (t or 1.0)).log_softmax(-1)
        found = tempered_logprobs(logits_BV, torch.full((5,), t))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)


def test_streams_depend_on_seed_and_index_alone_and_fold_64_bits():
    first = [UniformStream(7, 0).next() for _ in range(3)]
    assert first == [first[0]] * 3 and 0 <= first[0] < 1
    stream = UniformStream(7, 0)
    assert [stream.next() for _ in range(200)] == UniformStream(7, 0).take(200).tolist()
    heads = {UniformStream(s, i).next() for s in (0, 7, -1, 2**64 - 2) for i in range(5)}
    assert len(heads) == 20
    assert UniformStream(2**64 - 1, 3).next() == UniformStream(-1, 3).next()
    values = UniformStream(123, 4).take(100_000)
    assert abs(values.mean() - 0.5) < 0.005 and values.max() < 1
