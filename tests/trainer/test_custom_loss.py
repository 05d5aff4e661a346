"""The client-side PPO: values and gradients by hand, and against the pure one."""

import numpy as np
import pytest
import torch

from trimtab.trainer.custom_loss import PPOTerms, datum_loss
from trimtab.trainer.ppo import ppo_terms

OLD = [-1.0, -2.0, -0.2, -3.0]
NEW = [-0.7, -2.4, -0.25, -1.2]
A = [1.2, -0.8, 0.5, -0.8]
REF = [-0.9, -1.5, -0.4, -2.5]


def computed(terms, *, advantages=A, new=NEW):
    tensors = {"logprobs": OLD, "advantages": advantages, "mask": [1] * 4, "ref_logprobs": REF}
    inputs = {name: torch.tensor(values, dtype=torch.float64) for name, values in tensors.items()}
    logp = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, metrics = datum_loss(terms, inputs, logp)
    loss.backward()
    return loss.item(), logp.grad.tolist(), metrics


def test_dual_clip():
    """loss -1.536 + 0.64 - 0.47561471 + 2.4 with clip-higher 0.2/0.28 and c = 3."""
    loss, gradient, metrics = computed(PPOTerms(0.8, 1.28, 3.0, 0.0))
    assert loss == pytest.approx(1.02838529, abs=1e-8)
    assert gradient == pytest.approx([0, 0, -0.47561471, 0], abs=1e-8)
    assert metrics["clip_frac_dual/num:sum"] == 1
    assert metrics["clip_frac_high/num:sum"] == metrics["clip_frac_low/num:sum"] == 1
    assert metrics["clip_frac_dual/den:sum"] == 4


def test_without_a_dual_clip_a_bad_token_pushes_in_full():
    loss, gradient, _ = computed(PPOTerms(0.8, 1.28, None, 0.0))
    assert loss == pytest.approx(3.46810326, abs=1e-7)
    assert gradient[3] == pytest.approx(4.83971797, abs=1e-8)


def test_the_reference_loss_is_k2_of_the_learner():
    """k2 = 0.02 + 0.405 + 0.01125 + 0.845, gradient log p - log π_ref."""
    loss, gradient, metrics = computed(PPOTerms(0.8, 1.2, None, 0.5), advantages=[0.0] * 4)
    assert loss == pytest.approx(0.5 * 1.28125)
    assert gradient == pytest.approx([0.1, -0.45, 0.075, 0.65])
    assert metrics["kl_loss_k2/num:sum"] == pytest.approx(1.28125)


def test_it_is_the_pure_one():
    rng = np.random.default_rng(0)
    advantages, new = rng.normal(size=4), np.array(OLD) + rng.normal(size=4)
    loss, gradient, _ = computed(PPOTerms(0.8, 1.2, 1.5, 0.0), advantages=advantages, new=new)
    pure = ppo_terms(new, OLD, advantages, dual_clip=1.5)
    assert loss == pytest.approx(pure.loss_N.sum())
    assert gradient == pytest.approx(pure.gradient_N.tolist())


def test_rows_without_an_advantage_may_hold_anything():
    loss, gradient, _ = computed(
        PPOTerms(0.8, 1.2, 3.0, 0.0),
        advantages=[1.2, 0.0, 0.5, -0.8],
        new=[-0.7, -np.inf, -0.25, -1.2],
    )
    assert np.isfinite(loss)
    assert gradient[1] == 0
