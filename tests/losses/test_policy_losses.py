"""Values, gradients and identities of the losses that need nothing recorded."""

import pytest
import torch
from loss_tables import (
    INF,
    NAN,
    close,
    defaults,
    differences,
    gradient,
    leaf,
    mean,
    policy_inputs,
    table,
)

from trimtab.losses import LOSSES, LossInputs
from trimtab.losses.metrics import combine

RL = ("importance_sampling", "ppo", "cispo", "dro", "gspo")

# log q, log p, A, the weights of cross_entropy, and the mask of gspo
LOGQ = table([-0.69314718, -1.6, -0.2, -3.0, -2.30258509, -0.9])
LOGP = table([-0.5, -2.1, -0.25, -1.0, -6.0, -0.9])
A = table([1, -0.5, 0.75, -1.5, -2, 0])
W = table([0, 1, 1, 0.5, 1, 0])
MASK = table([1, 1, 1, 1, 0, 1])
WIDE = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
GSPO_GRADIENT = [0, 0.69453151, 0, 2.08359454, 2.77812605, 0]

VECTORS = [
    ("cross_entropy", {}, 8.85, [0, -1, -1, -0.5, -1, 0]),
    (
        "importance_sampling",
        {},
        9.50994113,
        [-1.21306132, 0.30326533, -0.71342207, 11.08358415, 0.04957504, 0],
    ),
    ("ppo", {}, 11.17016208, [0, 0, -0.71342207, 11.08358415, 0, 0]),
    ("cispo", {}, -6.14942128, [-1.21306132, 0.30326533, -0.71342207, 6.0, 0.04957504, 0]),
    ("cispo", WIDE, -11.46164448, [-1.2, 0.4, -0.71342207, 1.8, 1.6, 0]),
    ("dro", {}, -13.41348293, [-0.99034264, 0.475, -0.7525, 1.6, 1.81512925, 0]),
    ("gspo", WIDE, 3.45625209, GSPO_GRADIENT),
    ("gspo", {}, 3.80555209, GSPO_GRADIENT),
]


def inputs(logp, logq=LOGQ, advantages=A, mask=MASK):
    return policy_inputs(logp, logq, advantages, weights=W, sequence_ratio_mask=mask)


@pytest.mark.parametrize(("name", "config", "value", "wanted"), VECTORS)
def test_worked_vectors(name, config, value, wanted):
    found, grad, _ = gradient(name, inputs, LOGP, **config)
    close(found, value, within=2e-8)
    close(grad, table(wanted), within=2e-8)


def test_metrics_of_the_worked_rows():
    advantages = table([1, -0.5, 0.75, -1.5, -2, 1])
    _, _, got = gradient("importance_sampling", lambda p: inputs(p, advantages=advantages), LOGP)
    assert got["num_action_tokens:sum"] == got["active_tokens:sum"] == 6
    assert mean(got, "kl_sample_train_v1") == pytest.approx(0.34237795, rel=1e-6)
    assert mean(got, "kl_sample_train_v2") == pytest.approx(1.49672357, rel=1e-6)
    assert mean(got, "kl_sample_train_v3") == pytest.approx(1.20648879, rel=1e-6)
    assert mean(got, "tv_binary") == pytest.approx(0.10691906, rel=1e-6)
    assert mean(got, "entropy") == pytest.approx(-LOGQ.mean().item(), rel=1e-6)
    effective = mean(got, "is_weight") ** 2 / mean(got, "is_weight_sq")
    assert effective == pytest.approx(0.35736002, rel=1e-6)
    assert mean(got, "is_weight_sq") - 1 == pytest.approx(8.72383318, rel=1e-6)
    assert got["is_weight:max"] == pytest.approx(7.38905610, rel=1e-6)


def frozen(name, logp, base, config):
    """The loss with everything stop-gradient taken at `base`, written with loops over rows."""
    total = 0.0
    mask = [i for i in range(len(base)) if MASK[i] != 0]
    s = torch.stack([base[i] - LOGQ[i] for i in mask]).mean().exp()
    lo, hi = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    for i, a in enumerate(A):
        if a == 0:
            continue
        r = (logp[i] - LOGQ[i]).exp()
        if name == "importance_sampling":
            total -= r * a
        elif name == "ppo":
            total -= min(r * a, r.clamp(lo, hi) * a)
        elif name == "cispo":
            total -= (base[i] - LOGQ[i]).exp().clamp(lo, hi) * a * logp[i]
        elif name == "dro":
            total -= a * logp[i] - 0.5 * config["beta"] * (logp[i] - LOGQ[i]) ** 2
        else:
            ratio = s * (logp[i] - base[i]).exp()
            total -= min(ratio * a, ratio.clamp(lo, hi) * a)
    return total


@pytest.mark.parametrize("name", RL)
def test_gradients_agree_with_differences_through_the_softmax(name):
    torch.manual_seed(0)
    rest = torch.rand(6, 4, dtype=torch.float64) + 0.1
    rest = rest / rest.sum(-1, keepdim=True) * (1 - LOGP.exp())[:, None]
    logits = torch.cat([LOGP.exp()[:, None], rest], -1).log()
    config = defaults(LOSSES[name])
    value, grad, _ = gradient(name, lambda z: inputs(z.log_softmax(-1)[:, 0]), logits)
    assert value == pytest.approx(frozen(name, LOGP, LOGP, config).item(), rel=1e-10)
    wanted = differences(lambda z: frozen(name, z.log_softmax(-1)[:, 0], LOGP, config), logits)
    close(grad, wanted, within=1e-6)


def test_on_policy_ppo_is_importance_sampling():
    ppo = gradient("ppo", inputs, LOGQ)
    sampling = gradient("importance_sampling", inputs, LOGQ)
    assert ppo[0] == sampling[0]
    close(ppo[1], sampling[1], within=0)
    close(ppo[1], -A, within=1e-12)


def test_unbounded_cispo_has_the_gradient_of_importance_sampling():
    cispo = gradient("cispo", inputs, LOGP, clip_high_threshold=INF)
    close(cispo[1], gradient("importance_sampling", inputs, LOGP)[1], within=1e-12)


def test_dro_without_beta_is_reinforce():
    value, grad, _ = gradient("dro", inputs, LOGP, beta=0.0)
    close(value, -(A * LOGP).sum(), within=1e-12)
    close(grad, -A, within=0)


@pytest.mark.parametrize("row", range(5))
def test_gspo_with_one_row_is_ppo(row):
    def one(logp):
        r = slice(row, row + 1)
        return inputs(logp, LOGQ[r], A[r], mask=torch.ones(1))

    gspo = gradient("gspo", one, LOGP[row : row + 1], **WIDE)
    ppo = gradient("ppo", one, LOGP[row : row + 1], **WIDE)
    close(gspo[0], ppo[0], within=1e-12)
    close(gspo[1], ppo[1], within=1e-12)


def test_gspo_with_an_empty_mask_has_ratio_one():
    value, grad, _ = gradient("gspo", lambda p: inputs(p, mask=torch.zeros(6)), LOGP)
    close(grad, -A, within=1e-12)
    close(value, -A.sum(), within=1e-12)


def test_one_hot_alternatives_are_plain_targets():
    alternatives = torch.stack([LOGP - 1, LOGP, LOGP - 2], -1)
    one_hot = torch.stack([torch.zeros(6), W, torch.zeros(6)], -1)
    many = gradient("cross_entropy", lambda p: LossInputs(p, {"weights": one_hot}), alternatives)
    one = gradient("cross_entropy", inputs, LOGP)
    assert many[0] == pytest.approx(one[0])
    close(many[1][:, 1], one[1], within=0)
    close(many[1][:, [0, 2]], torch.zeros(6, 2, dtype=torch.float64), within=0)
    assert many[2] == one[2] == {"active_tokens:sum": 4.0}


def test_cross_entropy_without_weights_weighs_every_target_one():
    value, grad, _ = gradient("cross_entropy", lambda p: LossInputs(p, {}), LOGP)
    close(value, -LOGP.sum())
    close(grad, -torch.ones(6, dtype=torch.float64), within=0)


def test_negative_weights_push_down():
    negative = gradient("cross_entropy", lambda p: LossInputs(p, {"weights": -W}), LOGP)
    close(negative[1], W, within=0)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30, -1e30])
@pytest.mark.parametrize("name", ("cross_entropy", *RL))
def test_rows_without_advantage_are_inert_whatever_they_hold(name, junk):
    def extended(values, extra):
        return torch.cat([values.float(), torch.tensor([extra, extra])])

    tensors = {
        "logprobs": extended(LOGQ, junk),
        "advantages": extended(A, 0.0),
        "weights": extended(W, 0.0),
        "sequence_ratio_mask": extended(MASK, 0.0),
    }
    plain = {key: value[:6] for key, value in tensors.items()}
    value, grad, metrics = gradient(name, lambda p: LossInputs(p, tensors), extended(LOGP, junk))
    wanted = gradient(name, lambda p: LossInputs(p, plain), LOGP.float())
    assert value == pytest.approx(wanted[0], rel=1e-6)
    assert torch.equal(grad[:6], wanted[1])
    assert torch.equal(grad[6:], torch.zeros(2))
    assert metrics == pytest.approx(wanted[2], rel=1e-6)


@pytest.mark.parametrize("name", RL)
def test_a_stale_row_without_advantage_changes_nothing_but_the_count(name):
    """Learner -2, sampler -91: exp(89) is beyond float32."""

    def run(logp, logq, advantages):
        ones = torch.tensor(advantages).ne(0).float()
        return gradient(
            name,
            lambda p: inputs(p, torch.tensor(logq), torch.tensor(advantages), mask=ones),
            torch.tensor(logp),
        )

    with_it = run([-1.0, -2.0, -0.5], [-1.1, -91.0, -0.4], [1.0, 0.0, 1.0])
    without = run([-1.0, -0.5], [-1.1, -0.4], [1.0, 1.0])
    assert with_it[0] == without[0]
    assert with_it[1].tolist() == [without[1][0], 0.0, without[1][1]]
    assert with_it[2]["ratio_clamped:sum"] == 1 and without[2]["ratio_clamped:sum"] == 0


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("importance_sampling", [0, 0]),
        ("ppo", [0, 0]),
        ("cispo", [-4, 0]),
        ("dro", [-1, 1]),
        ("gspo", [-1, 1]),
    ],
)
def test_beyond_the_clamp_the_ratio_is_a_constant(name, wanted):
    """log r = 89 with A = 1, and -89 with A = -1; their mean, gspo's, is 0."""
    logp, logq, advantages = (torch.tensor(v) for v in ([-2.0, -91.0], [-91.0, -2.0], [1.0, -1.0]))
    value, grad, metrics = gradient(
        name, lambda p: inputs(p, logq, advantages, torch.ones(2)), logp
    )
    assert abs(value) < 1e14
    close(grad, wanted, within=1e-6)
    assert metrics["ratio_clamped:sum"] == 2
    assert metrics["kl_sample_train_v2/num:sum"] == pytest.approx(900.0)


def test_clipping_acts_on_one_side_for_each_sign_and_not_at_the_bound():
    logq, ratios = table([-3.0] * 4), table([0.5, 2.0, 0.5, 2.0])
    signs, logp = table([1, 1, -1, -1]), logq + ratios.log()

    def slope(name, row, **config):
        one = slice(row, row + 1)
        made = gradient(
            name, lambda p: inputs(p, logq[one], signs[one], torch.ones(1)), logp[one], **config
        )
        return made[1].item()

    for name in ("ppo", "gspo"):
        found = [slope(name, row, **WIDE) for row in range(4)]
        assert found == pytest.approx([-0.5, 0, 0, 2])
    at_bound = (logp - logq).exp()[1].item()
    assert slope("ppo", 1, clip_high_threshold=at_bound) == pytest.approx(-2)
    assert slope("ppo", 1, clip_high_threshold=at_bound - 1e-9) == 0


def test_prompt_rows_are_not_counted_as_clamped():
    rows = torch.tensor([-40.0, -1.0]), torch.tensor([0.0, -1.0]), torch.tensor([0.0, 1.0])
    metrics = gradient("importance_sampling", lambda p: inputs(p, *rows[1:]), rows[0])[2]
    assert metrics["ratio_clamped:sum"] == 0


@pytest.mark.parametrize("name", RL)
def test_no_advantage_anywhere_is_exactly_nothing(name):
    nothing = torch.zeros(6)
    value, grad, metrics = gradient(name, lambda p: inputs(p, advantages=nothing), LOGP.float())
    assert value == 0 and not grad.any()
    assert metrics["active_tokens:sum"] == metrics["num_action_tokens:sum"] == 0
    assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
    assert not any(name.endswith((":max", ":min")) for name in metrics)


def test_no_weight_anywhere_is_exactly_nothing():
    weights = {"weights": torch.zeros(6)}
    value, grad, metrics = gradient("cross_entropy", lambda p: LossInputs(p, weights), LOGP)
    assert value == 0 and not grad.any() and metrics == {"active_tokens:sum": 0.0}


def test_clipped_rows_are_counted_where_clipping_acts():
    def fractions(name, **config):
        got = gradient(name, inputs, LOGP, **config)[2]
        assert got["clip_frac_low/den:sum"] == got["clip_frac_high/den:sum"] == 5
        return got["clip_frac_low/num:sum"], got["clip_frac_high/num:sum"]

    assert fractions("ppo") == (2, 1)  # row 3, A < 0 and r = 7.4, stays: the hole of PPO
    assert fractions("cispo", **WIDE) == (2, 2)
    assert fractions("gspo", **WIDE) == (0, 2)


def test_datums_add_up_in_value_gradient_and_metrics():
    logp = leaf(LOGP)
    loss, config = LOSSES["ppo"], defaults(LOSSES["ppo"])
    parts = [
        loss(inputs(logp[rows], LOGQ[rows], A[rows]), config)
        for rows in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    sum(part.loss for part in parts).backward()
    value, grad, metrics = gradient("ppo", inputs, LOGP)
    assert sum(part.loss.item() for part in parts) == pytest.approx(value, abs=1e-12)
    close(logp.grad, grad, within=0)
    joined = combine([combine([parts[0].metrics]), combine([p.metrics for p in parts[1:]])])
    assert joined == pytest.approx(metrics, rel=1e-6)
