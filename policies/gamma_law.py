"""The regularised incomplete gamma function and its inverse, in the standard library.

``scipy.special`` has both, and takes longer to import than ``elastic tune`` to answer. A test compares the two.
"""

from __future__ import annotations

import math
from statistics import NormalDist

__all__ = ["gamma_cdf", "gamma_quantile", "gamma_survival"]

_EPSILON = 1e-16
_TERMS = 1_000_000


def gamma_cdf(shape: float, x: float) -> float:
    """``P(shape, x)``: the probability that a unit-rate Gamma variable is below ``x``. Relative error about 1e-12."""
    if x <= 0:
        return 0.0
    return _series(shape, x) if x < shape + 1 else 1 - _fraction(shape, x)


def gamma_survival(shape: float, x: float) -> float:
    """``Q(shape, x) = 1 - P``, exact in its own tail."""
    if x <= 0:
        return 1.0
    return 1 - _series(shape, x) if x < shape + 1 else _fraction(shape, x)


def gamma_quantile(shape: float, probability: float) -> float:
    """The ``x`` with ``P(shape, x) = probability``, between 0 and 1: Newton steps from a cube-root guess."""
    normal = NormalDist().inv_cdf(probability)
    guess = shape * (1 - 1 / (9 * shape) + normal / (3 * math.sqrt(shape))) ** 3
    if not guess > 0.1 * shape:
        # Far in the left tail, or for small shapes, P is nearly x^shape / Gamma(shape + 1).
        guess = math.exp((math.log(probability) + math.lgamma(shape + 1)) / shape)
    low, high, x = 0.0, math.inf, guess
    for _ in range(200):
        upper = x >= shape + 1
        miss = (1 - probability) - gamma_survival(shape, x) if upper else gamma_cdf(shape, x) - probability
        low, high = (low, min(high, x)) if miss > 0 else (max(low, x), high)
        slope = math.exp((shape - 1) * math.log(x) - x - math.lgamma(shape))
        step = miss / slope if slope > 0 else math.inf
        following = x - step
        if not low < following < high:
            following = (low + high) / 2 if high < math.inf else 2 * x
        if abs(following - x) <= 1e-14 * x:
            return following
        x = following
    return x


def _front(shape: float, x: float) -> float:
    return math.exp(shape * math.log(x) - x - math.lgamma(shape))


def _series(shape: float, x: float) -> float:
    """P by its power series, for x below shape + 1."""
    term = total = 1 / shape
    for n in range(1, _TERMS):
        term *= x / (shape + n)
        total += term
        if term < total * _EPSILON:
            break
    return _front(shape, x) * total


def _fraction(shape: float, x: float) -> float:
    """Q by its continued fraction (Lentz), for x above shape + 1."""
    b = x + 1 - shape
    c, d = math.inf, 1 / b
    value = d
    for n in range(1, _TERMS):
        a = -n * (n - shape)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        factor = c * d
        value *= factor
        if abs(factor - 1) < _EPSILON * 4:
            break
    return _front(shape, x) * value
