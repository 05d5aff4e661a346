"""Low-precision linears: the weights are rounded as said, and rows do not see one another."""

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.engine.kernels import Int8Linear, digits, int4_linear, quantise_rows


def rounded_weights(weight):
    """Symmetric int8 an output channel, in numpy float64."""
    w = weight.double().numpy()
    scale = np.abs(w).max(axis=1, keepdims=True) / 127
    return np.round(w / scale) * scale


def int8(weight, bias=None, *, integer=True):
    return Int8Linear(*quantise_rows(weight), bias, integer=integer)


@pytest.mark.parametrize("integer", [True, False])
def test_int8_is_the_product_with_the_rounded_weights(integer):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 48), torch.randn(24, 48), torch.randn(24)
    x[2, 7] = 300.0  # an outlying channel must not drown the others of its row
    y = int8(weight, bias, integer=integer)(x)
    expected = x.double().numpy() @ rounded_weights(weight).T + bias.double().numpy()
    worst = np.abs(y.numpy() - expected) / x.abs().amax(dim=1, keepdim=True).numpy()
    assert worst.max() < (1e-3 if integer else 1e-5)
    exact = nn.functional.linear(x, weight, bias)
    assert 1e-3 < (y - exact).norm() / exact.norm() < 2e-2  # coarse, and not by much


def test_an_int8_row_does_not_see_its_batch_mates():
    torch.manual_seed(1)
    x = torch.randn(7, 32)
    linear = int8(torch.randn(16, 32))
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)
    x[3] *= 1e4  # a loud neighbour
    assert torch.equal(linear(x)[[0, 1, 2, 4, 5, 6]], alone[[0, 1, 2, 4, 5, 6]])


def test_two_digits_carry_fifteen_bits():
    torch.manual_seed(3)
    x = torch.randn(4, 256)
    (high, low), scale = digits(x)[0].chunk(2), digits(x)[1]
    assert high.abs().max() == 127
    back = (128.0 * high + low) * scale
    assert ((back - x).abs() <= scale * 0.51).all()


def test_linears_side_by_side_have_the_numbers_of_each():
    torch.manual_seed(4)
    x, one, other = torch.randn(5, 32), int8(torch.randn(8, 32)), int8(torch.randn(24, 32) * 50)
    assert torch.equal(Int8Linear.of(one, other)(x), torch.cat([one(x), other(x)], 1))


def test_a_zero_row_stays_zero():
    q, scale = quantise_rows(torch.zeros(1, 4))
    assert q.abs().sum() == 0
    assert torch.isfinite(scale).all()
    assert int8(torch.randn(3, 4))(torch.zeros(1, 4)).abs().sum() == 0


def test_int4_has_sixteen_levels_a_group_and_rounds_to_the_nearest():
    torch.manual_seed(2)
    linear = nn.Linear(80, 6)  # 80 = two groups of 32 and one of 16
    rounded = int4_linear(linear)
    for row, exact in zip(rounded.weight, linear.weight, strict=True):
        for i in range(0, 80, 32):
            group, source = row[i : i + 32], exact[i : i + 32]
            step = (source.max() - source.min()) / 15
            levels = (group - source.min()) / step
            torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
            assert levels.round().max() == 15
            assert (group - source).abs().max() <= step / 2 + 1e-6
    assert torch.equal(rounded.bias, linear.bias)
