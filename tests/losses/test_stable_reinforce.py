"""Values, gradients and properties of stable_reinforce, each named in docs/stable_reinforce.md."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_tables import (
    INF,
    NAN,
    close,
    defaults,
    differences,
    gradient,
    mean,
    stable_inputs,
    table,
)

from trimtab.losses import LOSSES, LossInputs
from trimtab.losses.metrics import combine
from trimtab.losses.stable_reinforce import Constants, leaky_trace, with_constants

SR = LOSSES["stable_reinforce"]

Q = table(
    [
        [0.5, 0.25, 0.1, 0.08, 0.05, 0.02],
        [0.7, 0.1, 0.1, 0.05, 0.03, 0.02],
        [0.3, 0.3, 0.2, 0.1, 0.06, 0.04],
    ]
)
P = table(
    [
        [0.4, 0.35, 0.06, 0.09, 0.02, 0.08],
        [0.2, 0.5, 0.1, 0.1, 0.05, 0.05],
        [0.3, 0.2, 0.3, 0.1, 0.06, 0.04],
    ]
)
X = [0, 0, 4]
HEAD = [[0, 1]] * 3

VECTORS = {
    1: (
        4.66413932,
        [
            [-0.606, 0.3535, 0.0606, 0.0909, 0.0202, 0.0808],
            [-0.46514286, 0.29071429, 0.05814286, 0.05814286, 0.02907143, 0.02907143],
            [0.303, 0.202, 0.303, 0.101, -0.9494, 0.0404],
        ],
    ),
    -1: (
        -1.85490335,
        [
            [0.434, -0.2115, -0.0534, -0.0801, -0.0178, -0.0712],
            [0.09717813, 0.01084323, -0.03600712, -0.03600712, -0.01800356, -0.01800356],
            [-0.0861981, -0.0574654, -0.06998026, -0.02332675, 0.24630121, -0.0093307],
        ],
    ),
    0: (
        0.01475907,
        [
            [-0.006, 0.0035, 0.0006, 0.0009, 0.0002, 0.0008],
            [-0.008, 0.005, 0.001, 0.001, 0.0005, 0.0005],
            [0.003, 0.002, 0.003, 0.001, -0.0094, 0.0004],
        ],
    ),
}


def run(p=P, q=Q, x=X, advantages=(1.0, 1.0, 1.0), head=HEAD, *, kl_coeff=0.01, loss=SR, **record):
    """(value, d loss / d logits, metrics) for a learner with the distributions `p`."""
    return gradient(
        loss,
        lambda z: stable_inputs(z, q, x, advantages, head, **record),
        torch.as_tensor(p).log(),
        kl_coeff=kl_coeff,
    )


def same(one, other, within=1e-12):
    close(one[0], other[0], within)
    close(one[1], other[1], within)


# ------------------------------------------------------------------ values and gradients


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1.5e-8), (torch.float32, 3e-7)])
@pytest.mark.parametrize("advantage", VECTORS)
def test_worked_vectors(advantage, dtype, within):
    value, grad, _ = run(P.to(dtype), advantages=[float(advantage)] * 3)
    wanted, rows = VECTORS[advantage]
    close(value, wanted, within=2 * within)
    close(grad, table(rows), within=within)


def objective(base, q, x, advantages, head, *, sequence, tau=1.0):
    """The objective as the derivation writes it: a function of logits, one row at a time, `rest` a
    cell of its own, every weight taken at the logits `base`."""
    p0 = (base / tau).softmax(-1)
    log_r = [(p0[t, x[t]] / q[t, x[t]]).log().item() for t in range(len(x))]
    cells = []
    for t, inside in enumerate(head):
        earlier = [s for s in range(t) if sequence[s] == sequence[t]]
        trace = math.exp(sum(0.9 ** (t - s) * min(0.0, log_r[s]) for s in earlier))
        outside = [v for v in range(base.shape[-1]) if v not in inside]
        m = torch.minimum(p0, q)[t, inside]
        if (
            tau != 1
        ):  # there the mean of grad log p under tempered p is not 0, and the rest left out
            m, outside = m - p0[t, inside], []
        rest = min(p0[t, outside].sum(), q[t, outside].sum())
        cells.append((trace, min(1.0, math.exp(log_r[t])), list(inside), m, outside, rest))

    def loss(logits):
        total = 0.0
        for t, logp in enumerate(logits.log_softmax(-1)):
            a, (trace, w, inside, m, outside, rest) = advantages[t], cells[t]
            if a >= 0:
                total -= a * min(1.0, 2 * math.exp(log_r[t])) * logp[x[t]]
            else:
                centring = (m * logp[inside]).sum()
                if outside:
                    centring += rest * logp[outside].logsumexp(0)
                total -= a * trace * (w * logp[x[t]] - centring)
            total += 0.01 * (q[t, x[t]].log() - logp[x[t]])
        return total

    return loss


def random_case(seed, rows=5, vocabulary=6, k=3):
    """(learner's logits, q, x, A, head)"""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=g, dtype=torch.float64)
    q = (logits + torch.randn(rows, vocabulary, generator=g, dtype=torch.float64)).softmax(-1)
    x = torch.randint(vocabulary, (rows,), generator=g).tolist()
    advantages = torch.randn(rows, generator=g, dtype=torch.float64).round(decimals=2).tolist()
    return logits, q, x, advantages, q.topk(k).indices.tolist()


@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_agrees_with_differences_of_the_objective(seed, k, tau):
    logits, q, x, advantages, head = random_case(seed, k=k)
    q, sequence = (q.log() / tau).softmax(-1), [0, 0, 3, 3, 3]
    if seed == 2:  # a head that holds little of q leaves it more than p
        head = [row[::-1][:k] for row in q.argsort(descending=True).tolist()]
    advantages[4] = -abs(advantages[4])
    wanted = differences(
        objective(logits, q, x, advantages, head, sequence=sequence, tau=tau), logits
    )
    _, found, _ = gradient(
        SR,
        lambda z: stable_inputs(z, q, x, advantages, head, sequence=sequence, tau=tau),
        logits,
    )
    close(found, wanted, within=1e-7)


# ------------------------------------------------------------------ on policy


def reinforce(p, x, advantages):
    grad = torch.zeros_like(p)
    for t, a in enumerate(advantages):
        grad[t] = a * p[t]
        grad[t, x[t]] -= a
    return -sum(a * p[t, x[t]].log() for t, a in enumerate(advantages)), grad


@pytest.mark.parametrize("noise", [0.0, 3e-7])
@pytest.mark.parametrize("sharpness", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_on_policy_it_is_reinforce(tau, sharpness, noise):
    """In float32, with a sampler that differs from the learner by no more than rounding; sharp
    distributions leave nothing outside the head but rounding."""
    g = torch.Generator().manual_seed(1)
    logits = sharpness * torch.randn(64, 40, generator=g)
    q = (logits / tau + noise * torch.randn(64, 40, generator=g)).softmax(-1)
    x = torch.multinomial(q, 1, generator=g)[:, 0].tolist()
    advantages = torch.randn(64, generator=g).tolist()
    head = q.topk(8).indices
    value, grad, metrics = gradient(
        SR, lambda z: stable_inputs(z, q, x, advantages, head, tau=tau), logits, kl_coeff=0.0
    )
    wanted, rows = reinforce(logits.softmax(-1), x, advantages)
    close(value, wanted, within=1e-5 * max(1, abs(wanted)))
    close(grad, rows, within=1e-5)
    assert mean(metrics, "tv") < 1e-6


def test_positive_advantages_are_reinforce_and_the_penalty_down_to_half_the_ratio():
    p = table([[0.3, 0.7], [0.9, 0.1]])
    q = table([[0.6, 0.4], [0.2, 0.8]])
    value, grad, _ = run(p, q, [0, 0], [1.5, 0.5], [[0], [0]])
    wanted, rows = reinforce(p, [0, 0], [1.5, 0.5])
    penalty = 0.01 * (math.log(0.6 / 0.3) + math.log(0.2 / 0.9))
    close(value, wanted + penalty, within=1e-12)
    close(grad, rows + reinforce(p, [0, 0], [0.01, 0.01])[1], within=1e-12)


def test_positive_advantages_fade_below_half_the_ratio():
    q = table([[0.8, 0.2]])
    for p_x in (0.4, 0.2, 1e-3, 1e-12):
        _, grad, metrics = run(table([[p_x, 1 - p_x]]), q, [0], [1.0], [[0]], kl_coeff=0.0)
        weight = min(1.0, 2 * p_x / 0.8)
        close(grad, [[-weight * (1 - p_x), weight * (1 - p_x)]], within=1e-12)
        assert mean(metrics, "positive_weight") == pytest.approx(weight)


# ------------------------------------------------------------------ bounds, fading, drift


@st.composite
def extreme_rows(draw):
    """(p, q, x, A, head): probabilities down to 1e-30, any head, its order included."""
    size = draw(st.integers(2, 7))
    weight = st.one_of(st.sampled_from([1e-30, 1e-8, 1.0]), st.floats(1e-3, 1.0))
    p, q = (
        table([draw(st.lists(weight, min_size=size, max_size=size))]).clamp(min=1e-30)
        for _ in range(2)
    )
    head = draw(st.lists(st.sampled_from(range(size)), unique=True, min_size=1, max_size=size))
    advantage = draw(st.sampled_from([-2.0, -1.0, 1.0, 3.0]))
    return p / p.sum(), q / q.sum(), draw(st.integers(0, size - 1)), advantage, head


@settings(max_examples=150, deadline=None)
@given(extreme_rows(), st.sampled_from([torch.float64, torch.float32]))
def test_the_gradient_of_a_row_is_bounded(row, dtype):
    p, q, x, a, head = row
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    _, grad, metrics = run(p.to(dtype), q, [x], [a], [head], kl_coeff=0.0)
    assert torch.isfinite(grad).all() and all(math.isfinite(v) for v in metrics.values())
    assert grad.norm() <= math.sqrt(2) * abs(a) * (1 + rounding)
    assert grad.abs().sum() <= 2 * abs(a) * (1 + rounding)
    with_penalty = run(p.to(dtype), q, [x], [a], [head], kl_coeff=0.3)[1]
    assert (with_penalty - grad).norm() <= 0.3 * math.sqrt(2) * (1 + rounding)


@settings(max_examples=100, deadline=None)
@given(extreme_rows(), st.sampled_from([0.1, 0.7, 3.0]))
def test_at_another_temperature_the_bound_is_twice_that(row, tau):
    p, q, x, a, head = row
    _, grad, _ = run(p, q, [x], [a], [head], kl_coeff=0.0, tau=tau)
    assert grad.abs().sum() <= 4 * abs(a) * (1 + 1e-12)
    assert grad.norm() <= 2 * math.sqrt(2) * abs(a) * (1 + 1e-12)


def test_the_bounds_are_attained():
    p = table([[1e-12, 1 - 1e-12]])
    for a, q, x in ((1.0, p, 0), (-1.0, table([[1e-12, 1 - 1e-12]]), 0)):
        _, grad, _ = run(p, q, [x], [a], [[0, 1]], kl_coeff=0.0)
        assert grad.abs().sum() == pytest.approx(2) and grad.norm() == pytest.approx(math.sqrt(2))


def test_the_push_on_a_negative_token_fades_as_the_learner_leaves_it():
    q = table([[0.6, 0.3, 0.1]])
    pushes = []
    for p_x in (0.6, 1e-1, 1e-3, 1e-6, 1e-12):
        p = table([[p_x, 0.75 * (1 - p_x), 0.25 * (1 - p_x)]])
        _, grad, _ = run(p, q, [0], [-1.0], [[0, 1, 2]], kl_coeff=0.0)
        pushes.append(grad[0, 0].item())
        assert abs(pushes[-1]) <= 2 * p_x / 0.6
    assert pushes[0] > 0.3 and pushes[-1] < 1e-11


def expected_gradient(p, q, a, head, tau=1.0):
    """E_q of the gradient over the sampled token, at one prefix and one advantage."""
    grads = [run(p, q, [x], [a], [head], kl_coeff=0.0, tau=tau)[1][0] for x in range(p.shape[-1])]
    return sum(q[0, x] * grad for x, grad in enumerate(grads))


@pytest.mark.parametrize("seed", range(5))
def test_negative_drift_is_at_most_the_mass_outside_the_head(seed):
    logits, q, _, _, _ = random_case(seed, rows=1, vocabulary=8)
    p = logits.softmax(-1)
    plain = 1.5 * (q - p).abs().sum()  # what REINFORCE with A = -1.5 would drift
    for k in (8, 5, 2, 1):
        head = q.topk(k).indices[0].tolist()
        outside = [v for v in range(8) if v not in head]
        rest = min(p[0, outside].sum(), q[0, outside].sum()) if outside else 0.0
        drift = expected_gradient(p, q, -1.5, head).abs().sum()
        assert drift <= 1.5 * 2 * rest + 1e-12
    assert plain > 0.1  # with the whole vocabulary recorded (k = 8) the bound is 0


@pytest.mark.parametrize("seed", range(5))
def test_at_another_temperature_the_drift_beyond_reinforces_own_is_bounded_alike(seed):
    tau = 0.7
    logits, q, _, _, _ = random_case(seed, rows=1, vocabulary=8)
    p, tempered = logits.softmax(-1), (logits / tau).softmax(-1)
    own = 1.5 * (tempered - p)[0]  # of REINFORCE on policy: tempered samples, untempered gradient
    for k in (8, 5, 2):
        head = q.topk(k).indices[0].tolist()
        outside = [v for v in range(8) if v not in head]
        rest = (tempered - q)[0, outside].clamp(min=0).sum() if outside else 0.0
        drift = expected_gradient(p, q, -1.5, head, tau) - own
        assert drift.abs().sum() <= 1.5 * 2 * rest + 1e-12


def test_positive_drift_pulls_to_the_sampler():
    p, q = table([[0.5, 0.3, 0.2]]), table([[0.3, 0.5, 0.2]])
    close(expected_gradient(p, q, 1.0, [0, 1]), (p - q)[0], within=1e-12)


# ------------------------------------------------------------------ the head


@pytest.mark.parametrize("advantages", [[1.0, -1.0, -0.5], [-1.0, -1.0, -1.0]])
def test_the_order_of_the_head_and_empty_cells_do_not_matter(advantages):
    wanted = run(advantages=advantages, head=[[0, 1, 3]] * 3)
    same(run(advantages=advantages, head=[[3, 0, 1]] * 3), wanted)
    same(run(advantages=advantages, head=[[-1, 0, 1, 3], [3, -1, 1, 0], [1, 0, 3, -1]]), wanted)


@pytest.mark.parametrize(("p", "q"), [(P[:1], Q[:1]), (P[1:2], Q[1:2]), (Q[1:2], P[1:2])])
@pytest.mark.parametrize("x", [0, 4])
def test_the_target_may_be_inside_or_outside_the_head(x, p, q):
    """With p_rest = q_rest, p_rest > q_rest and p_rest < q_rest."""
    head = [0, 1]
    _, grad, _ = run(p, q, [x], [-1.0], [head], kl_coeff=0.0)
    w = min(1.0, (p[0, x] / q[0, x]).item())
    cells = torch.zeros(6, dtype=torch.float64)
    cells[head] = torch.minimum(p, q)[0, head]
    rest = [2, 3, 4, 5]
    cells[rest] = min(p[0, rest].sum(), q[0, rest].sum()) * p[0, rest] / p[0, rest].sum()
    one = torch.eye(6, dtype=torch.float64)[x]
    close(grad[0], w * (one - p[0]) - (cells - cells.sum() * p[0]), within=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_head_that_holds_the_vocabulary_leaves_nothing(dtype):
    whole = [[0, 1, 2, 3, 4, 5]] * 3
    value, grad, metrics = run(P.to(dtype), advantages=[-1.0] * 3, head=whole)
    close(value, VECTORS[-1][0], within=1e-6)
    assert torch.isfinite(grad).all()
    assert mean(metrics, "head_mass") == pytest.approx(1)
    logits, q, x, advantages, head = random_case(4, k=6)
    wanted = differences(objective(logits, q, x, advantages, head, sequence=[0] * 5), logits)
    _, found, _ = gradient(SR, lambda z: stable_inputs(z, q, x, advantages, head), logits.to(dtype))
    close(found, wanted, within=1e-6)


# ------------------------------------------------------------------ the trace and the sequences


def naive_trace(log_ratios, sequence, decay):
    total, before, out = 0.0, None, []
    for l, s in zip(log_ratios, sequence, strict=True):
        total = total if s == before else 0.0
        out.append(math.exp(total))
        total, before = decay * (total + min(0.0, l)), s
    return out


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.97, 1.0])
def test_the_trace_of_4000_tokens_is_that_of_a_loop(decay):
    g = torch.Generator().manual_seed(0)
    log_ratios = 0.5 * torch.randn(4000, generator=g) ** 3
    log_ratios = torch.where(torch.rand(4000, generator=g) < 0.9, 0.1 * log_ratios, log_ratios)
    log_ratios[2000] = -30.0
    sequence = torch.tensor([7] * 1 + [2] * 999 + [0] * 3000)
    found = leaky_trace(log_ratios, sequence, decay)
    wanted = naive_trace(log_ratios.double().tolist(), sequence.tolist(), decay)
    close(found, wanted, within=2e-6)
    assert found[0] == found[1] == found[1000] == 1
    if 0 < decay < 1:
        assert found[2001] < 1e-6 and found[2400] > 1e-3


def test_the_trace_worked_by_hand():
    found = leaky_trace(table([-1, 1, -2, -5]), torch.tensor([0, 0, 0, 1]), 0.5)
    close(found, table([0, -0.5, -0.25, 0]).exp(), within=1e-12)


def test_a_steady_shortfall_damps_to_its_limit_and_no_further():
    found = leaky_trace(torch.full((4000,), -0.05), torch.zeros(4000, dtype=torch.int64), 0.9)
    close(found[200:], torch.full((3800,), math.exp(-0.05 * 0.9 / 0.1)), within=1e-6)


def test_sequences_of_one_datum_never_mix():
    advantages = [-1.0, -1.0, -1.0]
    parts = [
        run(P[r], Q[r], X[r.start : r.stop], advantages[r.start : r.stop], HEAD[r.start : r.stop])
        for r in (slice(0, 2), slice(2, 3))
    ]
    joined = run(advantages=advantages, sequence=[5, 5, 1])
    close(joined[0], sum(part[0] for part in parts), within=1e-12)
    close(joined[1], torch.cat([part[1] for part in parts]), within=1e-12)
    mixed = run(advantages=advantages, sequence=[5, 5, 5])
    assert (mixed[1][2] - joined[1][2]).abs().max() > 0.1


def test_prompt_rows_between_two_turns_do_not_carry_the_trace():
    apart = run(advantages=[-1.0, 0.0, -1.0], sequence=[0, -1, 1])
    alone = run(P[2:], Q[2:], X[2:], [-1.0], HEAD[2:])
    close(apart[1][2], alone[1][0], within=1e-12)


def test_a_sequence_of_one_token():
    _, grad, metrics = run(P[:1], Q[:1], [0], [-1.0], HEAD[:1])
    close(grad[0], VECTORS[-1][1][0], within=1e-8)
    assert mean(metrics, "negative_trace") == 1


def test_the_constants_are_what_the_benchmark_varies():
    plain = with_constants(Constants(trace_decay=0.0, positive_factor=INF))
    positive = run(advantages=[1.0] * 3, loss=plain)
    close(positive[1], reinforce(P, X, [1.01] * 3)[1], within=1e-12)
    assert mean(run(advantages=[-1.0] * 3, loss=plain)[2], "negative_trace") == 1


# ------------------------------------------------------------------ the penalty and inert rows


def test_the_penalty_covers_all_and_only_rows_under_sampled_spans():
    """Row 0 is a prompt row, row 1 of an unrecorded sequence, rows 2 and 3 of a recorded one."""
    p, q = torch.cat([P, P[:1]]), torch.cat([Q, Q[:1]])
    logprobs = table([-9.0, -0.4, -2.0, -0.7])
    record = {"sequence": [-1, 0, 1, 1], "recorded": [False, False, True, True]}
    value, grad, metrics = run(
        p, q, [0, 0, 4, 1], [0.0] * 4, HEAD + HEAD[:1], kl_coeff=0.5, logprobs=logprobs, **record
    )
    logp = [p[1, 0].log(), p[2, 4].log(), p[3, 1].log()]
    close(value, 0.5 * (logprobs[1:].sum() - sum(logp)), within=1e-12)
    assert metrics["kl_penalty:sum"] == pytest.approx(value)
    wanted = reinforce(p, [0, 0, 4, 1], [0.0, 0.5, 0.5, 0.5])[1]
    close(grad, wanted, within=1e-12)
    assert metrics["active_tokens:sum"] == 3 and metrics["num_action_tokens:sum"] == 0


def test_the_penalty_is_the_same_whatever_the_advantage():
    for advantages in ([1.0, -1.0, 0.0], [-2.0, 3.0, -0.1]):
        difference = run(advantages=advantages)[1] - run(advantages=advantages, kl_coeff=0.0)[1]
        close(difference, reinforce(P, X, [0.01] * 3)[1], within=1e-12)


def test_in_expectation_the_penalty_pulls_to_the_sampler():
    close(expected_penalty(P[:1], Q[:1]), 0.01 * (P - Q)[0], within=1e-12)
    close(expected_penalty(P[:1], P[:1]), torch.zeros(6), within=1e-12)


def expected_penalty(p, q):
    grads = [run(p, q, [x], [0.0], [[0, 1]])[1][0] for x in range(6)]
    return sum(q[0, x] * grad for x, grad in enumerate(grads))


def test_a_coefficient_of_zero_leaves_no_trace_of_the_penalty():
    """Bit for bit, even where the term would be infinite or not a number."""
    advantages = [1.0, -1.0, 0.5]
    wanted = run(P.float(), advantages=advantages, kl_coeff=0.0)
    for q_input in (INF, NAN, -1e30):
        found = run(
            P.float(),
            advantages=advantages,
            kl_coeff=0.0,
            logprobs=torch.full((3,), q_input),
        )
        assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])


JUNKED = (
    "logprobs_N",
    "head_logprobs_NK",
    "target_tempered_N",
    "head_target_logprobs_NK",
    "head_target_tempered_NK",
    "temperature_N",
    "version_step_N",
)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_rows_outside_sampled_spans_are_inert_whatever_they_hold(junk):
    """Three prompt rows before three recorded ones."""

    def junked(values):
        return torch.cat([torch.full_like(values[:3], junk), values[3:]]).detach()

    parts = stable_inputs(
        torch.cat([P, P]).float().log(),
        torch.cat([Q, Q]),
        X + X,
        [0.0] * 3 + [-1.0, 1.0, -0.5],
        HEAD + HEAD,
        sequence=[-1] * 3 + [4] * 3,
        recorded=[False] * 3 + [True] * 3,
    )
    record = {name: junked(getattr(parts.stability, name)) for name in JUNKED}
    head_leaf = record["head_target_logprobs_NK"].requires_grad_()
    target_leaf = junked(parts.target_logprobs).requires_grad_()
    tensors = dict(parts.tensors) | {"logprobs": junked(parts.tensors["logprobs"])}
    out = SR(LossInputs(target_leaf, tensors, replace(parts.stability, **record)), defaults(SR))
    out.loss.backward()
    value, _, metrics = run(P.float(), advantages=[-1.0, 1.0, -0.5])
    assert out.loss.item() == pytest.approx(value, rel=1e-6)
    assert combine([out.metrics]) == pytest.approx(metrics, rel=1e-6)
    for grad in (target_leaf.grad, head_leaf.grad):
        assert torch.isfinite(grad).all() and not grad[:3].any() and grad[3:].any()


def test_head_tokens_the_learner_rules_out_move_nothing():
    p = table([[0.6, 0.0, 0.3, 0.1, 0.0, 0.0]])
    _, grad, metrics = run(p, Q[:1], [0], [-1.0], [[0, 1, 4]])
    assert torch.isfinite(grad).all() and grad[0, 1] == 0
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_stale_row_without_advantage_is_charged_its_penalty_and_remembered():
    """Learner -2, sampler -91 on the middle token (log r = 89), and the other way round."""
    p, q = table([[0.4, 0.6]] * 3), table([[0.5, 0.5]] * 3)
    far, near = math.exp(-91), math.exp(-2)
    p[1], q[1] = table([near, 1 - near]), table([far, 1.0])
    arguments = {"x": [0, 0, 0], "head": [[0]] * 3}
    above = run(p.float(), q, advantages=[1.0, 0.0, -1.0], **arguments)
    outer = run(p[::2].float(), q[::2], [0, 0], [1.0, -1.0], [[0]] * 2, sequence=[0, 1])
    assert above[2]["ratio_clamped:sum"] == 1 and torch.isfinite(above[1]).all()
    close(above[1][0], outer[1][0], within=1e-6)
    trace = 0.8**0.81  # what the first token's ratio leaves two rows on; a surplus adds nothing
    close(above[1][2], trace * outer[1][1], within=0.01)
    close(above[1][1], 0.01 * (p[1] - table([1.0, 0.0])), within=1e-7)
    below = run(q.float(), p, advantages=[1.0, 0.0, -1.0], **arguments)
    assert below[2]["ratio_clamped:sum"] == 1
    assert below[2]["negative_trace/num:sum"] == pytest.approx(0.0, abs=1e-11)


def test_no_advantage_and_no_penalty_is_exactly_nothing():
    value, grad, metrics = run(P.float(), advantages=[0.0] * 3, kl_coeff=0.0)
    assert value == 0 and not grad.any()
    assert metrics["active_tokens:sum"] == 0
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_datum_without_sampled_rows_is_exactly_nothing():
    value, grad, metrics = run(
        P.float(), advantages=[0.0] * 3, sequence=[-1] * 3, recorded=[False] * 3
    )
    assert value == 0 and not grad.any()
    assert not any(name.endswith((":max", ":min")) for name in metrics)
    assert all(math.isfinite(v) for v in metrics.values())


# ------------------------------------------------------------------ metrics


def test_metrics_of_the_worked_rows():
    metrics = run(
        advantages=[-1.0, 1.0, -1.0], version=torch.tensor([3.0, NAN, 7.0]), learner_step=8.0
    )[2]
    tv = [0.5 * (0.1 + 0.1 + 0.0), 0.5 * (0.5 + 0.4 + 0.1), 0.5 * (0.0 + 0.1 + 0.1)]
    r = [0.8, 0.2 / 0.7, 1.0]
    assert mean(metrics, "tv") == pytest.approx(sum(tv) / 3)
    assert metrics["tv:max"] == pytest.approx(max(tv))
    assert mean(metrics, "head_mass") == pytest.approx((0.75 + 0.8 + 0.6) / 3)
    assert mean(metrics, "negative_weight") == pytest.approx((0.8 + 1.0) / 2)
    assert mean(metrics, "negative_trace") == pytest.approx((1 + 0.27029726) / 2)
    assert mean(metrics, "positive_weight") == pytest.approx(2 * 0.2 / 0.7)
    assert mean(metrics, "staleness") == pytest.approx((5 + 1) / 2)
    assert metrics["staleness:min"] == 1 and metrics["staleness:max"] == 5
    assert mean(metrics, "kl_sample_train_v1") == pytest.approx(-sum(map(math.log, r)) / 3)
    assert mean(metrics, "is_weight") == pytest.approx(sum(r) / 3)
    assert metrics["kl_penalty:sum"] == pytest.approx(VECTORS[0][0])
    assert metrics["num_action_tokens:sum"] == metrics["active_tokens:sum"] == 3
