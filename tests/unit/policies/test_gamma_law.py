"""The incomplete gamma function and its inverse against scipy's."""

from __future__ import annotations

import pytest
from scipy.special import gammainc, gammaincc, gammaincinv

from policies.gamma_law import gamma_cdf, gamma_quantile, gamma_survival

SHAPES = [0.05, 0.5, 1, 1.7, 3, 26, 420, 5000, 1e5]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [1e-3, 0.1, 0.5, 0.9, 1, 1.1, 2, 5])
def test_both_tails_agree(shape, factor):
    x = shape * factor
    assert gamma_cdf(shape, x) == pytest.approx(gammainc(shape, x), rel=1e-9, abs=1e-300)
    assert gamma_survival(shape, x) == pytest.approx(gammaincc(shape, x), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("probability", [1e-6, 0.025, 0.3, 0.5, 0.9, 0.975, 1 - 1e-6])
def test_quantiles_agree(shape, probability):
    assert gamma_quantile(shape, probability) == pytest.approx(float(gammaincinv(shape, probability)), rel=1e-10)


def test_nothing_lies_below_zero():
    assert (gamma_cdf(2, 0), gamma_cdf(2, -1), gamma_survival(2, 0)) == (0, 0, 1)
