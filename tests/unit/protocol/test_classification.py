"""What kind of failure it was: the surest sign decides."""

from __future__ import annotations

import signal

import pytest

from elastic.protocol.classification import Evidence, classify


@pytest.mark.parametrize(
    ("evidence", "found"),
    [
        (Evidence("ValueError: no", ("builtins.ValueError",)), "user"),
        (Evidence("x", ("builtins.MemoryError",)), "out of memory"),
        (Evidence("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", ("torch.OutOfMemoryError",)),
         "out of memory"),
        (Evidence("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (Evidence("x", ("botocore.exceptions.ClientError",)), "storage"),
        (Evidence("x", ("builtins.OSError",), errno=28), "storage"),
        (Evidence("x", ("builtins.FileNotFoundError",), errno=2), "user"),
        (Evidence("RuntimeError: CUDA error: uncorrectable ECC error encountered"), "infrastructure"),
        (Evidence(lost=True), "infrastructure"),
        (Evidence(lost=True, exit_code=3), "user"),
        (Evidence(lost=True, exit_code=0), "user"),
        (Evidence(lost=True, exit_code=128 + signal.SIGTERM), "preemption"),
        (Evidence(lost=True, signal=signal.SIGSEGV), "infrastructure"),
        (Evidence(lost=True, oom_killed=True, noticed=True), "out of memory"),
        (Evidence(lost=True, noticed=True), "preemption"),
        (Evidence(node_lost=True, noticed=True), "preemption"),
        (Evidence(node_lost=True), "infrastructure"),
        (Evidence(lost=True, hang=True), "hang"),
    ],
)  # fmt: skip
def test_evidence_is_classified(evidence: Evidence, found: str) -> None:
    assert classify(evidence)[0] == found


def test_a_crash_is_named_by_its_signal() -> None:
    assert classify(Evidence(lost=True, signal=11))[1] == "the process crashed: SIGSEGV"
    assert classify(Evidence(lost=True, signal=99))[1] == "the process crashed: signal 99"
