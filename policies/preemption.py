"""Failures that announce themselves: notices of spot machines, and predictors.

A notice long enough for a final save costs no work, so that such events leave the failure rate: only unnoticed failures
call for periodic saves. Notices: AWS gives 120 s, Google Cloud and Azure 30 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.domain import PolicyError, check_nonnegative, check_positive

__all__ = ["FinalSave", "final_save", "predicted_interval", "should_act_on_prediction", "unnoticed_mtbf_s"]

# The rest of the notice is for the decision, for stragglers and for closing down.
_SHARE_OF_NOTICE = 0.7


@dataclass(frozen=True, slots=True)
class FinalSave:
    """Whether a notice is worth a final save. ``target`` is where it goes: ``"remote"``, ``"peer"`` or ``"none"``."""

    target: str
    reason: str


def final_save(notice_s: float, *, peer_save_p95_s: float, remote_save_p95_s: float | None = None) -> FinalSave:
    """The farthest tier whose save ends, at its 95th percentile, within 0.7 of the notice."""
    usable = _SHARE_OF_NOTICE * check_positive("notice_s", notice_s)
    peer = check_nonnegative("peer_save_p95_s", peer_save_p95_s)
    if remote_save_p95_s is not None and check_nonnegative("remote_save_p95_s", remote_save_p95_s) <= usable:
        return FinalSave("remote", f"an upload takes {remote_save_p95_s:.3g} s at p95 of {usable:.3g} s usable")
    if peer <= usable:
        why = "" if remote_save_p95_s is None else f"; an upload ({remote_save_p95_s:.3g} s) does not fit"
        return FinalSave("peer", f"a copy to a peer takes {peer:.3g} s at p95, the notice leaves {usable:.3g} s{why}")
    return FinalSave("none", f"a copy to a peer takes {peer:.3g} s at p95, but the notice leaves only {usable:.3g} s")


def unnoticed_mtbf_s(mtbf_s: float, noticed_share: float) -> float:
    """The MTBF of what is left when ``noticed_share`` (0 to below 1) of the failures announce themselves in time."""
    mtbf, share = check_positive("mtbf_s", mtbf_s), check_nonnegative("noticed_share", noticed_share)
    if share >= 1:
        raise PolicyError("E_FRACTION", f"noticed_share = {noticed_share!r} must be below 1: some come unannounced")
    return mtbf / (1 - share)


def predicted_interval(cost_s: float, mtbf_s: float, recall: float) -> float:
    """The periodic interval beside a predictor that announces the share ``recall`` of failures: ``sqrt(2aM/(1-r))``.

    Aupy et al., JPDC 74(2), 2014, first order.
    """
    return math.sqrt(2 * cost_s * unnoticed_mtbf_s(mtbf_s, recall))


def should_act_on_prediction(
    since_last_save_s: float, lead_s: float, *, proactive_cost_s: float, precision: float
) -> bool:
    """Whether a predicted failure is worth a save now: enough work at risk for the odds, and time to finish it."""
    return since_last_save_s > proactive_cost_s / precision and lead_s >= proactive_cost_s
