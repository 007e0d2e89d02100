"""Every interval model against the simulator, on random jobs: predicted, simulated, and the z between them.

    python tests/benchmarks/interval_models.py [--configurations 20] [--failures 200000] [--seed 0] [--json]

Prints a table; with ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from policies.renewal import Weibull, renewal_efficiency
from policies.simulate import Simulated, exponential, simulate_single, simulate_two_tier, weibull
from policies.single_tier import efficiency, efficiency_unreliable, exact
from policies.two_tier import FailureModel, Tier, TwoTier, optimum

Case = tuple[str, float, Callable[[int, int], Simulated]]


def between(rng: random.Random, low: float, high: float) -> float:
    """Log-uniform."""
    return low * (high / low) ** rng.random()


def blocking(rng: random.Random) -> Case:
    """One tier, saves that stop training."""
    mtbf = between(rng, 600, 86400)
    cost, restart, downtime = mtbf * between(rng, 2e-3, 0.5), mtbf * rng.random() * 0.5, mtbf * rng.random() * 0.1
    interval = exact(cost, mtbf) * between(rng, 0.5, 2)
    predicted = efficiency(interval, cost_s=cost, mtbf_s=mtbf, restart_s=restart, downtime_s=downtime)
    return (
        f"M {mtbf:.0f} a/M {cost / mtbf:.4f} R/M {restart / mtbf:.2f}",
        predicted,
        lambda failures, seed: simulate_single(
            interval,
            stall_s=cost,
            restart_s=restart,
            downtime_s=downtime,
            lifetimes=exponential(mtbf),
            failures=failures,
            seed=seed,
        ),
    )


def background(rng: random.Random) -> Case:
    """One tier, a stall and a write behind it that slows training."""
    mtbf = between(rng, 600, 86400)
    stall, write = mtbf * between(rng, 1e-3, 0.05), mtbf * between(rng, 1e-3, 0.2)
    slowdown, restart = rng.random() * 0.3, mtbf * rng.random() * 0.3
    visible, latency = stall + slowdown * write, (1 - slowdown) * write
    interval = max(exact(visible, mtbf) * between(rng, 0.5, 2), latency * 1.001)
    predicted = efficiency(interval, cost_s=visible, mtbf_s=mtbf, restart_s=restart + latency)
    return (
        f"M {mtbf:.0f} S/M {stall / mtbf:.4f} L/M {write / mtbf:.4f} s {slowdown:.2f}",
        predicted,
        lambda failures, seed: simulate_single(
            interval,
            stall_s=stall,
            write_s=write,
            slowdown=slowdown,
            restart_s=restart,
            lifetimes=exponential(mtbf),
            failures=failures,
            seed=seed,
        ),
    )


def unreliable(rng: random.Random) -> Case:
    """One tier, saves that may turn out broken."""
    mtbf, usable = between(rng, 600, 86400), 0.4 + 0.6 * rng.random()
    cost, restart = mtbf * between(rng, 2e-3, 0.2), mtbf * rng.random() * 0.3
    interval = exact(cost, mtbf) * between(rng, 0.4, 1.5)
    predicted = efficiency_unreliable(interval, usable=usable, cost_s=cost, mtbf_s=mtbf, restart_s=restart)
    return (
        f"M {mtbf:.0f} a/M {cost / mtbf:.4f} p {usable:.2f}",
        predicted,
        lambda failures, seed: simulate_single(
            interval,
            stall_s=cost,
            restart_s=restart,
            lifetimes=exponential(mtbf),
            usable=usable,
            failures=failures,
            seed=seed,
        ),
    )


def weibull_lives(rng: random.Random) -> Case:
    """One tier under Weibull failures."""
    mtbf, shape = between(rng, 600, 86400), between(rng, 0.5, 2)
    law = Weibull.with_mean(mtbf, shape)
    cost, restart = mtbf * between(rng, 2e-3, 0.2), mtbf * rng.random() * 0.3
    interval = exact(cost, mtbf) * between(rng, 0.5, 2)
    predicted = renewal_efficiency(interval, survival=law.survival, mean_s=mtbf, cost_s=cost, restart_s=restart)
    return (
        f"M {mtbf:.0f} a/M {cost / mtbf:.4f} shape {shape:.2f}",
        predicted,
        lambda failures, seed: simulate_single(
            interval,
            stall_s=cost,
            restart_s=restart,
            lifetimes=weibull(law.shape, law.scale_s),
            failures=failures,
            seed=seed,
        ),
    )


def _two_tier(rng: random.Random, *, writes: bool) -> Case:
    mtbf = between(rng, 3600, 86400)
    shares = [0.1 + rng.random(), 0.3 + rng.random(), 0.05 + 0.3 * rng.random()]
    process, node, domain = (share / sum(shares) / mtbf for share in shares)
    restart = mtbf * between(rng, 2e-3, 0.03)
    local = Tier(
        mtbf * between(rng, 5e-4, 5e-3), mtbf * between(rng, 2e-4, 2e-3) if writes else 0.0, 0.1 * rng.random()
    )
    remote = Tier(
        mtbf * between(rng, 1e-3, 2e-2), mtbf * between(rng, 1e-3, 2e-2) if writes else 0.0, 0.05 * rng.random()
    )
    model = FailureModel(process, node, domain, restart, 2 * restart, 6 * restart, restart * rng.random())
    system = TwoTier(local, remote, model)
    best = optimum(system)
    interval, k = best.interval_s * between(rng, 0.7, 1.4), max(1, round(best.k * between(rng, 0.6, 1.6)))
    if writes:
        interval = max(interval, local.latency_s, remote.write_s / k)
    return (
        f"M {mtbf:.0f} q3 {domain * mtbf:.2f} W {interval:.0f} k {k} L2/M {remote.write_s / mtbf:.4f}",
        system.efficiency(interval, k),
        lambda failures, seed: simulate_two_tier(system, interval, k, failures=failures, seed=seed),
    )


def two_tier_blocking(rng: random.Random) -> Case:
    """Two tiers, saves that stop training: the recursion is exact."""
    return _two_tier(rng, writes=False)


def two_tier_background(rng: random.Random) -> Case:
    """Two tiers with background writes that are short beside the MTBF: the recursion is close."""
    return _two_tier(rng, writes=True)


MODELS = (blocking, background, unreliable, weibull_lives, two_tier_blocking, two_tier_background)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=20)
    parser.add_argument("--failures", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three configurations of 20,000 failures")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count, failures = (3, 20_000) if arguments.quick else (arguments.configurations, arguments.failures)
    worst: dict[str, float] = {}
    started = time.perf_counter()
    for model in MODELS:
        rng = random.Random(f"{model.__name__}-{arguments.seed}")
        for number in range(count):
            name, predicted, simulate = model(rng)
            found = simulate(failures, arguments.seed + number)
            z = found.z(predicted)
            worst[model.__name__] = max(worst.get(model.__name__, 0.0), abs(z))
            print(
                f"{model.__name__:<20} {predicted:.6f} {found.efficiency:.6f} +-{found.standard_error:.6f} "
                f"{z:+6.2f}  {name}",
                flush=True,
            )
    print(f"worst |z|: {', '.join(f'{name} {z:.2f}' for name, z in worst.items())}")
    if arguments.json:
        print(
            json.dumps(
                {
                    "worst_z": worst,
                    "configurations_per_model": count,
                    "failures": failures,
                    "seconds": time.perf_counter() - started,
                }
            )
        )


if __name__ == "__main__":
    main()
