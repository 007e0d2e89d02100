"""The online loop over a month in which the failure rate triples and falls, against the best fixed interval afterwards.

    python tests/benchmarks/online_interval.py [--seeds 5] [--days 30] [--json]

Prints a table; with ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import json
import random

from policies.online import OnlinePlan
from policies.replay import OnlineDriver, best_static, play

DAY_S = 86400.0
NODES = 64
COST_S = 20.0
RESTART_S = 120.0
MTBF_S = 3 * 3600.0
# The rate of the fleet over the month, times its first value: a bad week, a repair, a quiet end.
PHASES = ((0.0, 1.0), (0.25, 3.0), (0.5, 1.0), (0.75, 1 / 3))


def month_of_failures(seed: int, days: float = 30.0) -> tuple[list[float], float]:
    """(failure times, length of the record) with rates that change by a factor of three."""
    rng = random.Random(seed)
    duration = days * DAY_S
    times, now = [], 0.0
    while True:
        # Thinning: draw at the greatest rate, keep in proportion to the rate of the moment.
        now += rng.expovariate(3 / MTBF_S)
        if now >= duration:
            return times, duration
        factor = [value for start, value in PHASES if now / duration >= start][-1]
        if rng.random() < factor / 3:
            times.append(now)


def month(seed: int, days: float = 30.0) -> dict[str, float]:
    """One month: the online loop beside the best fixed interval in hindsight."""
    times, duration = month_of_failures(seed, days)
    driver = OnlineDriver(OnlinePlan(first_stall_s=COST_S), NODES)
    online = play(times, duration, driver, cost_s=COST_S, restart_s=RESTART_S)
    interval, static = best_static(times, duration, cost_s=COST_S, restart_s=RESTART_S)
    return {
        "seed": seed,
        "failures": online.failures,
        "online": online.efficiency,
        "static": static,
        "static_interval_s": interval,
        "points": 100 * (online.efficiency - static),
        "changes": driver.state.changes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    months = [month(seed, arguments.days) for seed in range(2 if arguments.quick else arguments.seeds)]
    print(f"{'seed':>4} {'failures':>8} {'online':>8} {'hindsight':>9} {'points':>7} {'changes':>7}")
    for row in months:
        print(
            f"{row['seed']:>4.0f} {row['failures']:>8.0f} {row['online']:>8.4f} {row['static']:>9.4f} "
            f"{row['points']:>+7.2f} {row['changes']:>7.0f}"
        )
    if arguments.json:
        worst = min(row["points"] for row in months)
        print(json.dumps({"worst_points": worst, "most_changes": max(r["changes"] for r in months), "months": months}))


if __name__ == "__main__":
    main()
