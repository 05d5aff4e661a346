"""Properties of REINFORCE++ on random batches, and agreement with a reference written in loops."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trimtab.trainer.reinforce_pp import ReinforcePPConfig, ReinforcePPState, advantages

JUNK = [math.nan, math.inf, -math.inf, 1e300, 7.0]

eighths = st.integers(-40, 40).map(lambda k: k / 8)
logprobs = st.integers(-800, 0).map(lambda k: k / 64)

configs = st.builds(
    ReinforcePPConfig,
    group_baseline=st.booleans(),
    mask_truncated=st.booleans(),
    reward_norm=st.sampled_from(["none", "batch", "running"]),
    reward_clip=st.sampled_from([None, (-1.0, 2.0), (-10.0, 10.0)]),
    clip_before_norm=st.booleans(),
    reward_scale=st.sampled_from([1.0, 0.25]),
    reward_scale_mode=st.sampled_from(["constant", "running_return_std"]),
    kl_coef=st.sampled_from([0.0, 0.125]),
    kl_clamp=st.sampled_from([None, 1.0, 10.0]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    whiten=st.sampled_from(["full", "no_std", "none"]),
)


@st.composite
def batches(draw):
    """Columns of a batch; sequence 0 and 1 are one group and always count."""
    size = draw(st.integers(2, 7))
    columns = {name: [] for name in ("rewards", "old", "ref", "mask", "truncated")}
    for i in range(size):
        mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        mask[-1] = 1 if i < 2 else mask[-1]
        for name in ("old", "ref"):
            rows = [draw(logprobs if m else st.sampled_from(JUNK)) for m in mask]
            columns[name].append(rows)
        columns["mask"].append(mask)
        columns["rewards"].append(draw(eighths))
        columns["truncated"].append(i > 1 and draw(st.booleans()))
    groups = st.integers(0, size // 2 - 1)
    columns["groups"] = [0, 0] + [draw(groups) for _ in range(size - 2)]
    alone = [g for g in columns["groups"] if columns["groups"].count(g) == 1]
    columns["groups"] = [0 if g in alone else g for g in columns["groups"]]
    return columns


def run(batch, config, state=None):
    return advantages(
        batch["rewards"],
        batch["old"],
        batch["ref"],
        batch["mask"],
        config=config,
        group_ids=batch["groups"],
        truncated=batch["truncated"],
        state=state,
    )


# ------------------------------------------------------------------ the reference


def left_in(batch, config):
    size = len(batch["rewards"])
    kept = [
        any(batch["mask"][i]) and not (config.mask_truncated and batch["truncated"][i])
        for i in range(size)
    ]
    if not config.group_baseline:
        return kept
    group = batch["groups"]
    mates = [sum(kept[j] and group[j] == group[i] for j in range(size)) for i in range(size)]
    return [kept[i] and mates[i] > 1 for i in range(size)]


def mean_and_var(values):
    """By raw moments, exactly."""
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    return float(mean), float(sum(v * v for v in exact) / len(exact) - mean**2)


def running(values):
    """All values at once beside a prior of weight 1e-4 with mean 0 and variance 1."""
    exact, weight = [Fraction(v) for v in values], Fraction(1, 10000)
    count = len(exact) + weight
    mean = sum(exact) / count
    return float(mean), float((sum(v * v for v in exact) + weight) / count - mean**2)


def reference(batch, config):
    kept = [i for i, ok in enumerate(left_in(batch, config)) if ok]
    R = {i: batch["rewards"][i] for i in kept}
    if config.group_baseline:
        group = batch["groups"]
        R = {i: R[i] - mean_and_var([R[j] for j in kept if group[j] == group[i]])[0] for i in kept}
    for step in ("clip", "norm") if config.clip_before_norm else ("norm", "clip"):
        if step == "clip" and config.reward_clip:
            low, high = config.reward_clip
            R = {i: min(max(R[i], low), high) for i in kept}
        if step == "norm" and config.reward_norm != "none":
            over = running if config.reward_norm == "running" else mean_and_var
            mean, var = over(R.values())
            R = {i: (R[i] - mean) / (math.sqrt(var) + 1e-8) for i in kept}
    factor = config.reward_scale
    if config.reward_scale_mode == "running_return_std":
        factor /= math.sqrt(running(R.values())[1] + 1e-8)
    G = {}
    for i in kept:
        steps = [t for t, m in enumerate(batch["mask"][i]) if m]
        for at, t in enumerate(steps):
            total = factor * R[i] * config.gamma ** (len(steps) - 1 - at)
            for later, k in enumerate(steps[at:]):
                kl = batch["old"][i][k] - batch["ref"][i][k]
                if config.kl_clamp is not None:
                    kl = min(max(kl, -config.kl_clamp), config.kl_clamp)
                total -= config.kl_coef * kl * config.gamma**later
            G[i, t] = total
    mean, var = mean_and_var(G.values()) if config.whiten != "none" else (0.0, 1.0)
    std = math.sqrt(max(var, 1e-8)) if config.whiten == "full" else 1.0
    return [
        [(G[i, t] - mean) / std if (i, t) in G else 0.0 for t in range(len(mask))]
        for i, mask in enumerate(batch["mask"])
    ]


@settings(max_examples=200, deadline=None)
@given(batches(), configs)
def test_agrees_with_the_reference_whatever_the_masked_rows_hold(batch, config):
    found = run(batch, config).advantages
    for found_T, expected_T in zip(found, reference(batch, config), strict=True):
        np.testing.assert_allclose(found_T, expected_T, rtol=1e-9, atol=1e-8)


# ------------------------------------------------------------------ properties


@settings(max_examples=60, deadline=None)
@given(batches(), configs, st.randoms())
def test_the_order_of_sequences_changes_no_bit(batch, config, random):
    order = list(range(len(batch["rewards"])))
    random.shuffle(order)
    moved = {name: [column[i] for i in order] for name, column in batch.items()}
    expected, found = run(batch, config), run(moved, config)
    assert found.metrics == expected.metrics and found.state == expected.state
    for at, i in enumerate(order):
        assert found.advantages[at].tolist() == expected.advantages[i].tolist()


@settings(max_examples=60, deadline=None)
@given(batches(), configs, st.data())
def test_padding_anywhere_changes_no_bit_and_comes_out_zero(batch, config, data):
    padded = {**batch, "old": [], "ref": [], "mask": []}
    spots = []
    for i, mask in enumerate(batch["mask"]):
        spot = data.draw(st.integers(0, len(mask)))
        width = data.draw(st.integers(0, 3))
        spots.append(slice(spot, spot + width))
        for name, filling in (("mask", 0), ("old", math.nan), ("ref", math.inf)):
            rows = batch[name][i]
            padded[name].append(rows[:spot] + [filling] * width + rows[spot:])
    expected, found = run(batch, config), run(padded, config)
    assert found.metrics == expected.metrics and found.state == expected.state
    for i, spot in enumerate(spots):
        assert not found.advantages[i][spot].any()
        assert np.delete(found.advantages[i], spot).tolist() == expected.advantages[i].tolist()


@settings(max_examples=60, deadline=None)
@given(batches(), configs)
def test_masked_and_left_out_rows_are_zero_and_the_rest_is_finite(batch, config):
    found = run(batch, config)
    for i, kept in enumerate(left_in(batch, config)):
        rows = np.array(batch["mask"][i], bool) & kept
        assert found.left_out[i] == (not kept)
        assert found.action_mask[i].tolist() == rows.tolist()
        assert not found.advantages[i][~rows].any() and not found.returns[i][~rows].any()
        assert np.isfinite(found.advantages[i]).all()
    assert all(math.isfinite(value) for value in found.metrics.values())


@settings(max_examples=60, deadline=None)
@given(batches(), configs, st.integers(2, 4))
def test_whitened_tokens_have_mean_0_and_std_1_over_the_batch_and_any_split_of_it(
    batch, config, parts
):
    found = run(batch, replace(config, whiten="full"))
    assume(found.metrics["return/std"] > 1e-3)
    tokens = [a[m] for a, m in zip(found.advantages, found.action_mask, strict=True)]
    pooled = [np.concatenate(tokens[part::parts]) for part in range(min(parts, len(tokens)))]
    count = sum(t.size for t in pooled)
    assert abs(sum(t.sum() for t in pooled) / count) < 1e-9
    assert abs(sum((t**2).sum() for t in pooled) / count - 1) < 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(eighths, min_size=1, max_size=12), st.data())
def test_running_statistics_do_not_depend_on_how_scores_are_split_into_batches(values, data):
    config = ReinforcePPConfig(reward_norm="running", reward_scale_mode="running_return_std")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(values)), max_size=4)) | {len(values)})
    state = ReinforcePPState()
    for low, high in zip([0, *cuts], cuts, strict=False):
        ones = [[1]] * (high - low)
        state = advantages(values[low:high], ones, None, ones, config=config, state=state).state
    mean, var = running(values)
    np.testing.assert_allclose([state.scores.mean, state.scores.var], [mean, var], 1e-9, 1e-12)
    assert math.isclose(state.scores.count, len(values) + 1e-4)
    assert state.returns.count == state.scores.count


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.lists(st.integers(1, 5), min_size=2, max_size=6), configs)
def test_equal_scores_without_a_reference_whiten_to_exact_zeros(value, lengths, config):
    config = replace(config, kl_coef=0.0, gamma=1.0, whiten="full")
    ones = [[1] * n for n in lengths]
    flags = [False] * len(ones)
    found = advantages(
        [value] * len(ones), ones, None, ones, config=config, group_ids=flags, truncated=flags
    )
    assert all(not a.any() for a in found.advantages)
