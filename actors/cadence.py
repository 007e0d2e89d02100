"""When the next snapshot is due: the online interval policy, fed with what the run measures.

Holds no policy of its own: ``policies.online`` decides, this keeps its state, the clock of the last capture and the
journal's record of every change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.config import SnapshotConfig, parse_interval
from policies.domain import PolicyError
from policies.online import Decision, Observation, OnlinePlan, Resized, Saved, Slowed, begin, step
from policies.reliability import GammaRate

NEAR_S = 0.3
"""A round is opened so long before the step it is due at, so that the boundary can be named in time."""


FEWEST_STEPS = 20
"""Steps with and without an upload beside them that a slowdown is judged by."""


class StepTimes:
    """Mean time of a step under one condition; the past is forgotten by halves."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0

    def add(self, seconds: float, steps: int) -> None:
        """So many more steps in so many seconds."""
        if self.steps > 20 * FEWEST_STEPS:
            self.seconds, self.steps = self.seconds / 2, self.steps // 2
        self.seconds, self.steps = self.seconds + seconds, self.steps + steps

    @property
    def mean_s(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


class Cadence:
    """``note(kind, **fields)`` journals. Times are the controller's clock."""

    def __init__(self, config: SnapshotConfig, nodes: int, at: float, note: Callable[..., None]) -> None:
        self._note = note
        self.kind, number = parse_interval(config.interval)
        self.every_steps = int(number) if self.kind == "steps" else 0
        policy: str | float = number if self.kind == "seconds" else "auto" if self.kind == "steps" else self.kind
        chosen = config.remote_every == "auto"
        plan = OnlinePlan(
            policy=policy,
            two_tier=chosen and policy == "auto",
            remote_every=1 if chosen else int(config.remote_every),
            first_stall_s=0.1,
        )
        if config.mtbf_s is not None:
            # A rate that the user knows weighs as many failures as it takes for a few of our own not to move it.
            plan = replace(plan, prior=GammaRate.prior(1.0 / (config.mtbf_s * nodes), worth_failures=30.0))
        self.state, self.decision = begin(plan, nodes=nodes, t=at)
        self.reasons: list[str] = []
        self._adopted(self.decision)
        self.captured_at = at
        self.captured_step = 0
        self._steps = {False: StepTimes(), True: StepTimes()}

    @property
    def remote_every(self) -> int:
        """Every how many node snapshots one becomes durable."""
        return self.decision.k

    def observe(self, observation: Observation) -> None:
        """Learn; a changed interval is journalled with its reason and numbers."""
        try:
            self.state, self.decision = step(self.state, observation)
        except PolicyError as error:
            if error.code != "E_TIME":
                raise
            # Two observations of one instant, seen in the other order: the later time stands for both.
            self.state, self.decision = step(self.state, replace(observation, t=self.state.t))
        if self.decision.changed:
            self._adopted(self.decision)

    def _adopted(self, decision: Decision) -> None:
        if self.kind == "steps":
            reason = f"every {self.every_steps} steps, as asked"
        else:
            reason = f"every {decision.interval_s:.3g} s: {decision.reason}"
        if not self.reasons or self.reasons[-1] != reason:
            self.reasons.append(reason)
            self._note("interval", interval_s=decision.interval_s, steps=self.every_steps or decision.steps,
                       reason=reason, numbers=dict(decision.numbers))  # fmt: skip

    def captured(self, at: float, step: int, stall_s: float, remote: bool) -> None:
        """A snapshot of ``step`` was committed in node memory."""
        self.captured_at, self.captured_step = at, step
        self._note("stall", seconds=stall_s)
        self.observe(Saved(at, stall_s, remote))

    def stepped(self, at: float, seconds: float, steps: int, *, uploading: bool) -> None:
        """So many steps took ``seconds`` while an upload ran, or while none did: what is the slowdown?"""
        self._steps[uploading].add(seconds, steps)
        quiet, busy = self._steps[False], self._steps[True]
        if uploading and quiet.steps >= FEWEST_STEPS and busy.steps >= FEWEST_STEPS:
            share = max(0.0, 1.0 - quiet.mean_s / busy.mean_s)
            self._steps[True] = StepTimes()
            self._note("slowdown", share=round(share, 4), tier="remote")
            self.observe(Slowed(at, share, "remote"))

    def resized(self, at: float, nodes: int) -> None:
        """The run goes on with so many nodes; steps take another time from now on."""
        self._steps = {False: StepTimes(), True: StepTimes()}
        self.observe(Resized(at, max(1, nodes)))

    def due_in(self, at: float, step: int, step_s: float) -> float:
        """Seconds until the next round should be opened; at most 0 when it is due."""
        if self.every_steps:
            left = self.captured_step + self.every_steps - step
            return left * step_s - NEAR_S if step_s > 0 else left
        return self.captured_at + self.decision.interval_s - at

    @property
    def wanted_step(self) -> int:
        """The step that the next snapshot is due at, where steps were asked for; else 0."""
        return self.captured_step + self.every_steps if self.every_steps else 0

    def to_json(self) -> dict[str, Any]:
        """For the status."""
        return {
            "policy": self.kind,
            "interval_s": None if self.every_steps else self.decision.interval_s,
            "steps": self.every_steps or None,
            "reason": self.reasons[-1] if self.reasons else "",
        }
