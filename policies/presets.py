"""Failure rates of published fleets, with their sources. Counts as printed; nothing smoothed.

A preset stands in until a run has failures of its own; an answer that rests on one says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.domain import PolicyError
from policies.reliability import DAY_S, GammaRate

__all__ = ["PRESETS", "SPOT_NOTICES", "Preset", "SpotNotice", "preset", "spot_notice"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A published failure rate. ``failures`` and ``node_days`` are None where only the rate was published."""

    name: str
    title: str
    per_1000_node_days: float
    failures: int | None
    node_days: float | None
    nodes: int | None
    source: str
    caveat: str

    @property
    def rate_per_node_s(self) -> float:
        """Failures per node-second."""
        return self.per_1000_node_days / 1000 / DAY_S

    def mtbf_s(self, nodes: float) -> float:
        """The MTBF of a job on ``nodes`` such nodes, all of it scaled with the nodes."""
        return 1 / (self.rate_per_node_s * nodes)

    def prior(self, worth_failures: float = 1.0) -> GammaRate:
        """This rate as a belief worth ``worth_failures``."""
        return GammaRate.prior(self.rate_per_node_s, worth_failures)


def _counted(name: str, title: str, failures: int, days: float, nodes: int, source: str, caveat: str) -> Preset:
    node_days = days * nodes
    return Preset(name, title, 1000 * failures / node_days, failures, node_days, nodes, source, caveat)


_LANL = "LANL 1996-2005, LA-UR-05-7318; the laboratory asks to be credited; fitted from the public failure records"
_LANL_CAVEAT = "machines of 1996-2005; bursts and trends make half of the apparent Weibull shape"

PRESETS: dict[str, Preset] = {
    entry.name: entry
    for entry in (
        _counted(
            "llama3-405b",
            "Llama 3 405B pre-training, 16,384 H100",
            419,
            54,
            2048,
            "arXiv 2407.21783, section 3.3.4, table 5: 419 unexpected interruptions in 54 days",
            "47 planned interruptions left out; the paper's percentages do not match its counts, the counts are used",
        ),
        Preset(
            "meta-rsc1",
            "Meta RSC-1 research cluster, A100",
            6.50,
            None,
            None,
            None,
            "arXiv 2410.21680 (HPCA 2025): 6.50 failures per 1000 node-days",
            "hardware only; small jobs see three times as many interruptions, mostly not from hardware",
        ),
        Preset(
            "meta-rsc2",
            "Meta RSC-2 research cluster, A100",
            2.34,
            None,
            None,
            None,
            "arXiv 2410.21680 (HPCA 2025): 2.34 failures per 1000 node-days",
            "hardware only",
        ),
        _counted(
            "opt-175b",
            "OPT-175B, 992 A100",
            105,
            60,
            124,
            "arXiv 2205.01068, section 2.5: at least 35 manual and over 70 automatic restarts in two months",
            "restarts, not failures; the lower bounds of both counts, two months taken as 60 days",
        ),
        _counted(
            "crusoe-h200",
            "A 1,600 H200 cluster at Crusoe",
            205,
            122,
            200,
            "GTC 2025, by way of G. Lockwood: about 205 failures in four months",
            "counts are approximate",
        ),
        _counted(
            "lablup-b200",
            "504 B200",
            10,
            55,
            63,
            "arXiv 2605.09370: 10 GPU failures with an XID error in 55 days",
            "GPU failures only; ten events, so that the rate is known within a factor of two",
        ),
        _counted("lanl-18", "LANL system 18", 3997, 3997 * 7.335 / 24, 1024, _LANL, _LANL_CAVEAT),
        _counted("lanl-19", "LANL system 19", 3284, 3284 * 7.724 / 24, 1024, _LANL, _LANL_CAVEAT),
        _counted("lanl-20", "LANL system 20", 2478, 2478 * 13.167 / 24, 512, _LANL, _LANL_CAVEAT),
    )
}


def preset(name: str) -> Preset:
    """The preset called ``name``. Raises ``PolicyError`` that lists the names."""
    if name not in PRESETS:
        raise PolicyError("E_PRESET", f"preset {name!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """How long before a preemption a cloud says so."""

    name: str
    notice_s: float
    caveat: str


SPOT_NOTICES: dict[str, SpotNotice] = {
    entry.name: entry
    for entry in (
        SpotNotice("aws-spot", 120.0, "two minutes, not guaranteed"),
        SpotNotice(
            "gcp-spot",
            30.0,
            "machines end after 24 h, mostly at both ends of that day (arXiv 1911.05160): not Poisson",
        ),
        SpotNotice("azure-spot", 30.0, "thirty seconds at least"),
    )
}


def spot_notice(name: str) -> SpotNotice:
    """The notice of the spot offer called ``name``. Raises ``PolicyError`` that lists the names."""
    if name not in SPOT_NOTICES:
        raise PolicyError("E_PRESET", f"spot offer {name!r} is not known; use one of {', '.join(SPOT_NOTICES)}")
    return SPOT_NOTICES[name]
