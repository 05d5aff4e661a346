"""The alternatives of the stability benchmark: worked vectors and on-policy equality."""

import pytest
import torch
from loss_tables import close, gradient, stable_inputs, table

from trimtab.losses import LOSSES
from trimtab.losses.experimental import EXPERIMENTAL, Centred, centred_loss, sequence_gate
from trimtab.losses.record import recorded_rows

P = table([[0.4, 0.35, 0.06, 0.09, 0.02, 0.08]])
Q = table([[0.5, 0.25, 0.1, 0.08, 0.05, 0.02]])
FAR_P = table([[0.02, 0.6, 0.2, 0.1, 0.05, 0.03]])
FAR_Q = table([[0.9, 0.04, 0.03, 0.01, 0.01, 0.01]])

UNGATED = centred_loss("ctr", Centred(delta_sequence=1.0), "")
SCORE = EXPERIMENTAL["score_centring"]


def run(loss, p=P, q=Q, x=(0,), advantages=(1.0,), *, head=((0, 1, 2),), kl_coeff=0.01, **record):
    loss = EXPERIMENTAL[loss] if isinstance(loss, str) else loss
    return gradient(
        loss,
        lambda z: stable_inputs(z, q, x, advantages, head, **record),
        p.log(),
        kl_coeff=kl_coeff,
    )


@pytest.mark.parametrize(
    ("loss", "x", "a", "value", "row"),
    [
        (UNGATED, 0, 1, 0.73526402, [-0.486, 0.2835, 0.0486, 0.0729, 0.0162, 0.0648]),
        (UNGATED, 1, -1, -1.47311570, [-0.556, 0.9035, -0.0834, -0.1251, -0.0278, -0.1112]),
        (UNGATED, 4, -1, -1.55564629, [-0.156, -0.1365, -0.0234, -0.0351, 0.3822, -0.0312]),
        (SCORE, 0, 1, 0.62928442, [-0.506, 0.2535, 0.1006, 0.07195263, 0.01598947, 0.06395789]),
        (
            SCORE,
            4,
            -1,
            -3.61362235,
            [-0.496, -0.2465, -0.0994, -0.07015263, 0.97441053, -0.06235789],
        ),
    ],
)
def test_worked_vectors_of_the_centred_losses(loss, x, a, value, row):
    found, grad, _ = run(loss, x=[x], advantages=[float(a)])
    close(found, value, within=1e-8)
    close(grad[0], row, within=1e-8)


@pytest.mark.parametrize(
    ("a", "row"),
    [
        (-1, [-0.0058, 0.046, -0.018, -0.01233333, -0.00616667, -0.0037]),
        (1, [-0.01597778, -0.03266667, 0.02244444, 0.01455556, 0.00727778, 0.00436667]),
    ],
)
def test_worked_vectors_where_the_cap_acts(a, row):
    close(run(UNGATED, FAR_P, FAR_Q, advantages=[float(a)])[1][0], row, within=1e-8)


def test_score_centring_is_the_gap_to_the_modelled_sampler():
    modelled = table([0.5, 0.25, 0.1, 0.07105263, 0.01578947, 0.06315789])
    wanted = modelled - torch.eye(6, dtype=torch.float64)[1]
    close(run(SCORE, x=[1], kl_coeff=0.0)[1][0], wanted, within=1e-8)


def test_the_gate_scales_a_sequence_by_its_mean_distance():
    made = stable_inputs(
        P.repeat(5, 1), Q.repeat(5, 1), [0] * 5, [1.0] * 5, [[0]] * 5, sequence=[2] * 4 + [0]
    )
    gate = sequence_gate(table([0.02, 0.30, 0.10, 0.06, 0.05]), recorded_rows(made), 0.1)
    close(gate, [0.83333333] * 4 + [1.0], within=1e-8)


@pytest.mark.parametrize("name", sorted(EXPERIMENTAL))
def test_on_policy_every_alternative_is_reinforce(name):
    advantages, rows, head = [1.5, -2.0], torch.cat([P, FAR_Q]), [[0, 1, 2]] * 2
    misses = rows - torch.eye(6)[[0, 3]]
    _, grad, _ = run(name, rows, rows, [0, 3], advantages, head=head, kl_coeff=0.0)
    close(grad, torch.tensor(advantages)[:, None] * misses, within=1e-12)
    _, charged, _ = run(name, rows, rows, [0, 3], advantages, head=head)
    close(charged - grad, 0.01 * misses, within=1e-12)


def pushes(name, **arguments):
    """d loss / d log p(x) of two-token rows: the coordinate of x over 1 - p(x)."""
    p = table([[0.3, 0.7], [0.9, 0.1], [0.5, 0.5]])
    q = table([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    _, grad, _ = run(name, p, q, [0, 0, 0], head=[[0]] * 3, kl_coeff=0.0, **arguments)
    return (grad[:, 0] / (1 - p[:, 0])).tolist()


def test_weights_of_the_uncentred_alternatives():
    """Ratios 1/2, 3 and 1; a distance over the recorded cells of .3, .6 and 0."""
    up, down = [1.0] * 3, [-1.0] * 3
    assert pushes("reinforce", advantages=down) == pytest.approx([1, 1, 1])
    assert pushes("topr_token", advantages=up) == pytest.approx([-1, -1, -1])
    assert pushes("topr_token", advantages=down) == pytest.approx([0.5, 1, 1])
    assert pushes("topr", advantages=down) == pytest.approx([1, 1, 1])  # ratio 3/2
    assert pushes("topr", advantages=down, sequence=[1, 0, 0]) == pytest.approx([0.5, 1, 1])
    assert pushes("dppo", advantages=up) == pytest.approx([-0.5, 0, -1])
    assert pushes("dppo", advantages=down) == pytest.approx([0, 3, 1])


def test_alternatives_are_not_served_by_default():
    assert not set(EXPERIMENTAL) & set(LOSSES)
    assert all(name == loss.spec.name for name, loss in EXPERIMENTAL.items())
