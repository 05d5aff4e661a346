"""Low-precision linears: the integers are the right ones, and rows do not see one another."""

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.engine.kernels import Int8Linear, int4_linear, quantise_rows


def float64_reference(x, weight, bias):
    """Row-wise symmetric int8 in numpy float64."""

    def rounded(a):
        scale = np.abs(a).max(axis=1) / 127
        return np.round(a / scale[:, None]), scale

    x_q, x_s = rounded(x.numpy())
    w_q, w_s = rounded(weight.numpy())
    return (x_q @ w_q.T) * x_s[:, None] * w_s + bias.numpy()


@pytest.mark.parametrize("integer", [True, False])
def test_int8_is_the_product_of_rounded_integers(integer):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 48), torch.randn(24, 48), torch.randn(24)
    y = Int8Linear(weight, bias, integer=integer)(x)
    np.testing.assert_allclose(y.numpy(), float64_reference(x, weight, bias), rtol=0, atol=2e-5)
    exact = nn.functional.linear(x, weight, bias)
    assert 1e-3 < (y - exact).norm() / exact.norm() < 2e-2  # coarse, and not by much


def test_an_int8_row_does_not_see_its_batch_mates():
    torch.manual_seed(1)
    x = torch.randn(7, 32)
    linear = Int8Linear(torch.randn(16, 32), None, integer=True)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x * torch.ones(7, 1)), alone)
    x[3] *= 1e4  # a loud neighbour
    assert torch.equal(linear(x)[[0, 1, 2, 4, 5, 6]], alone[[0, 1, 2, 4, 5, 6]])


def test_a_zero_row_stays_zero():
    q, scale = quantise_rows(torch.zeros(1, 4))
    assert q.abs().sum() == 0
    assert torch.isfinite(scale).all()


def test_int4_has_fifteen_levels_a_group_and_rounds_to_the_nearest():
    torch.manual_seed(2)
    linear = nn.Linear(80, 6)  # 80 = two groups of 32 and one of 16
    rounded = int4_linear(linear)
    for row, exact in zip(rounded.weight, linear.weight, strict=True):
        for i in range(0, 80, 32):
            group, source = row[i : i + 32], exact[i : i + 32]
            step = source.abs().max() / 7
            levels = group / step
            torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
            assert levels.abs().max() <= 7 + 1e-5
            assert (group - source).abs().max() <= step / 2 + 1e-6
    assert torch.equal(rounded.bias, linear.bias)
