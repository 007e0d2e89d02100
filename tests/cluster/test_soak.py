"""Random failures of all kinds, from one seed; the same for longer: ``python tests/cluster/soak.py --minutes 30``."""

from __future__ import annotations

from pathlib import Path

from cluster.soak import WORLD, soak
from support.cluster import TestCluster

SEED = 11
SECONDS = 150.0
"""Of training; on two cores, where recoveries take as long again, about five minutes of failures."""


def test_failures_of_all_kinds_change_no_bit_and_leave_nothing(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.ensure(WORLD + 1)
    report = soak(cluster, str(tmp_path), SECONDS, SEED)
    assert report.wrong == [], f"seed {SEED}, {dict(report.faults)}"
    assert report.incidents >= 3, report
    assert report.watched, report
