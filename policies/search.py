"""The best point of a function that rises and then falls."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["maximise_log"]

_GOLDEN = (math.sqrt(5) - 1) / 2
# An optimum is flat: below sqrt(machine epsilon) its values no longer differ, so that a closer search finds only noise.
_RELATIVE_WIDTH = 1e-9


def maximise_log(objective: Callable[[float], float], low: float, high: float) -> float:
    """Where a unimodal ``objective`` is largest on [low, high], 0 < low <= high, searched in the logarithm.

    Golden section down to a bracket of 1e-3, then parabolas through three points. Located to about 1e-8 of its value.
    """
    left, right = math.log(low), math.log(high)
    if right - left < _RELATIVE_WIDTH:
        return low
    inner_left, inner_right = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
    value_left, value_right = objective(math.exp(inner_left)), objective(math.exp(inner_right))
    while right - left > 1e-3:
        if value_left < value_right:
            left, inner_left, value_left = inner_left, inner_right, value_right
            inner_right = left + _GOLDEN * (right - left)
            value_right = objective(math.exp(inner_right))
        else:
            right, inner_right, value_right = inner_right, inner_left, value_left
            inner_left = right - _GOLDEN * (right - left)
            value_left = objective(math.exp(inner_left))
    middle = (left + right) / 2
    for step in (5e-4, 5e-5):
        below, here, above = (objective(math.exp(middle + shift)) for shift in (-step, 0.0, step))
        curvature = below - 2 * here + above
        if curvature < 0:
            vertex = middle + step * (below - above) / (2 * curvature)
            middle = min(max(vertex, math.log(low)), math.log(high))
    ends = [min(max(math.exp(middle), low), high), low, high]
    return max(ends, key=objective)
