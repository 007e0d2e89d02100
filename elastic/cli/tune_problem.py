"""The question that ``elastic tune`` was asked, with everything resolved, and how each part of it is answered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from policies.constraints import Box, Limits, single_tier_box
from policies.domain import Finding, PolicyError, cost_findings
from policies.interval import choose
from policies.renewal import Weibull, lazy_schedule, renewal_efficiency, schedule_efficiency
from policies.replay import replay_optimum
from policies.single_tier import (
    LostTime,
    efficiency,
    efficiency_unreliable,
    exact_unreliable,
    lost_time,
)
from policies.two_tier import FailureModel, Tier, TwoTier, TwoTierBox, optimum

__all__ = ["Problem", "Solution"]

_NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer for one MTBF: what to do, what moved it, and what it is worth."""

    interval_s: float
    k: int
    efficiency: float
    wanted_s: float
    binding: str | None
    findings: tuple[Finding, ...] = ()
    schedule_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One job: its tiers, its failures and its constraints. Seconds.

    ``restarts_s`` are those of a process, a node and a domain failure; ``shares`` the share of failures of each. With
    one tier (``remote`` None) the node's restart counts for all. ``gaps_s`` is the user's own record, for the policy
    ``trace``.
    """

    mtbf_s: float
    local: Tier
    remote: Tier | None = None
    restarts_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    shares: tuple[float, float, float] = (0.2, 0.77, 0.03)
    downtime_s: float = 0.0
    policy: str = "exact"
    limits: Limits = _NO_LIMITS
    remote_limits: Limits = _NO_LIMITS
    fixed_k: int | None = None
    usable: float = 1.0
    shape: float | None = None
    gaps_s: tuple[float, ...] = ()

    @property
    def visible_s(self) -> float:
        """What one save costs training: of the local tier, where there are two."""
        return self.local.visible_s

    @property
    def effective_restart_s(self) -> float:
        """The restart of the only tier with its latency."""
        return self.restarts_s[1] + self.local.latency_s

    def system(self, mtbf_s: float | None = None) -> TwoTier:
        """The two-tier model at this MTBF. Only with a remote tier."""
        assert self.remote is not None
        mtbf = self.mtbf_s if mtbf_s is None else mtbf_s
        process, node, domain = (part / mtbf for part in self.shares)
        model = FailureModel(process, node, domain, *self.restarts_s, downtime_s=self.downtime_s)
        return TwoTier(self.local, self.remote, model)

    def worth(self, interval_s: float, k: int = 1, mtbf_s: float | None = None) -> float:
        """The efficiency of this interval under the model that the policy uses."""
        mtbf = self.mtbf_s if mtbf_s is None else mtbf_s
        if self.remote is not None:
            return self.system(mtbf).efficiency(interval_s, k)
        if self.usable < 1:
            return efficiency_unreliable(
                interval_s,
                usable=self.usable,
                cost_s=self.visible_s,
                mtbf_s=mtbf,
                restart_s=self.effective_restart_s,
                downtime_s=self.downtime_s,
            )
        if self.shape is not None and self.shape != 1:
            return renewal_efficiency(
                interval_s,
                survival=Weibull.with_mean(mtbf, self.shape).survival,
                mean_s=mtbf,
                cost_s=self.visible_s,
                restart_s=self.effective_restart_s,
                downtime_s=self.downtime_s,
            )
        return efficiency(
            interval_s,
            cost_s=self.visible_s,
            mtbf_s=mtbf,
            restart_s=self.effective_restart_s,
            downtime_s=self.downtime_s,
        )

    def cheaper(self, factor: float) -> Problem:
        """The same job with every cost and latency of saving multiplied by ``factor``."""

        def scaled(tier: Tier) -> Tier:
            return Tier(tier.stall_s * factor, tier.write_s * factor, tier.slowdown)

        return replace(self, local=scaled(self.local), remote=scaled(self.remote) if self.remote else None)

    def ceiling(self, mtbf_s: float) -> float:
        """The efficiency if saves cost nothing at all: only restarts are left."""
        if self.remote is None:
            restart = self.restarts_s[1]
            return mtbf_s / (mtbf_s + self.downtime_s) * math.exp(-restart / mtbf_s)
        lost = sum(
            part * (math.expm1(restart / mtbf_s) * mtbf_s + self.downtime_s)
            for part, restart in zip(self.shares, self.restarts_s, strict=True)
        )
        return mtbf_s / (mtbf_s + lost)

    def solve(self, mtbf_s: float | None = None) -> Solution:
        """The best interval (and k) that the policy and the constraints allow at this MTBF."""
        mtbf = self.mtbf_s if mtbf_s is None else mtbf_s
        return self._solve_two(mtbf) if self.remote is not None else self._solve_one(mtbf)

    def lost_time(self, solution: Solution) -> LostTime:
        """Where the time goes at the solution."""
        if self.remote is not None:
            return self.system().lost_time(solution.interval_s, solution.k)
        return lost_time(
            solution.interval_s,
            cost_s=self.visible_s,
            mtbf_s=self.mtbf_s,
            restart_s=self.restarts_s[1],
            latency_s=self.local.latency_s,
            downtime_s=self.downtime_s,
        )

    def _solve_one(self, mtbf: float) -> Solution:
        box = single_tier_box(self.local.stall_s, self.local.write_s, self.local.slowdown, self.limits)
        findings = [*cost_findings(self.visible_s, mtbf, self.effective_restart_s), *box.findings]
        if self.policy == "lazy":
            return self._solve_lazy(mtbf, box, tuple(findings))
        if self.policy == "trace":
            wanted, _ = replay_optimum(
                self.gaps_s,
                cost_s=self.visible_s,
                restart_s=self.effective_restart_s,
                downtime_s=self.downtime_s,
            )
        elif self.usable < 1 and self.policy == "exact":
            wanted = exact_unreliable(self.visible_s, mtbf, self.usable)
        else:
            wanted = choose(self.policy, cost_s=self.visible_s, mtbf_s=mtbf).wanted_s
        interval, binding = box.clamp(wanted)
        if interval == 0:
            raise PolicyError(
                "E_FREE_SAVE", "saves that cost nothing have no best interval; give --stall, --cost, --write or --min"
            )
        return Solution(interval, 1, self.worth(interval, 1, mtbf), wanted, binding, tuple(findings))

    def _solve_lazy(self, mtbf: float, box: Box, findings: tuple[Finding, ...]) -> Solution:
        assert self.shape is not None
        law = Weibull.with_mean(mtbf, self.shape)
        wanted = lazy_schedule(law, cost_s=self.visible_s, restart_s=self.effective_restart_s)
        schedule = tuple(box.clamp(interval)[0] for interval in wanted)
        value = schedule_efficiency(
            schedule,
            survival=law.survival,
            mean_s=mtbf,
            cost_s=self.visible_s,
            restart_s=self.effective_restart_s,
            downtime_s=self.downtime_s,
        )
        return Solution(schedule[0], 1, value, wanted[0], box.clamp(wanted[0])[1], findings, schedule)

    def _solve_two(self, mtbf: float) -> Solution:
        assert self.remote is not None
        system = self.system(mtbf)
        local = single_tier_box(self.local.stall_s, self.local.write_s, self.local.slowdown, self.limits)
        upload = self.remote.write_s
        if self.remote_limits.write_p95_s is not None:
            upload = 1.1 * max(upload, self.remote_limits.write_p95_s)
        wall = Box().at_least(upload, "in_flight_remote")
        if self.remote_limits.throttle_period_s is not None:
            wall = wall.at_least(self.remote_limits.throttle_period_s, "throttle_remote")
        findings = [*local.findings]
        if self.remote_limits.rpo_s is not None:
            highest = self.remote_limits.rpo_s - self.remote.write_s - self.remote.visible_s
            if highest < max(wall.low, local.low + self.local.visible_s):
                least = max(wall.low, local.low + self.local.visible_s) + self.remote.write_s + self.remote.visible_s
                findings.append(
                    Finding(
                        "R_RPO",
                        "refuse",
                        f"a remote RPO of {self.remote_limits.rpo_s:g} s cannot be kept: the least achievable RPO is "
                        f"{least:g} s; make the upload faster or relax the RPO",
                    )
                )
            else:
                wall = wall.at_most(highest, "rpo_remote")
        if local.high < math.inf and local.high_name == "rpo":
            # The period with the upload in it is the longest, and the promise holds for that one too.
            room = local.high - self.remote.visible_s
            local = local.at_most(room, "rpo") if room >= local.low else local
        free = optimum(system) if self._free_optimum() else None
        if self.policy not in ("exact", "two-tier"):
            named = choose(
                self.policy, cost_s=self.local.visible_s, mtbf_s=1 / (system.failures.local_per_s or 1 / mtbf)
            )
            interval, _ = local.clamp(named.wanted_s)
            local = Box(interval, interval, self.policy, self.policy)
        best = optimum(system, TwoTierBox(local, remote_wall=wall, budget=self.limits.budget), fixed_k=self.fixed_k)
        # A save of both tiers must be affordable, and a restore from the far one must have a chance to succeed.
        findings.extend(cost_findings(self.local.visible_s + self.remote.visible_s, mtbf, self.restarts_s[2]))
        gain = best.efficiency - system.best_remote_only()[1]
        if gain < 0:
            findings.append(
                Finding(
                    "W_LOCAL_TIER", "warn", "the local tier costs more than it saves; the remote one alone is better"
                )
            )
        wanted = free.interval_s if free is not None else best.interval_s
        return Solution(best.interval_s, best.k, best.efficiency, wanted, best.binding, tuple(findings))

    def _free_optimum(self) -> bool:
        return self.local.visible_s > 0 and self.shares[2] > 0 and self.remote is not None and self.remote.visible_s > 0
