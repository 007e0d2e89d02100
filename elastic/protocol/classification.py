"""What kind of failure it was, from what is known of it. Pure.

    user             the train function raised, or ended its process by itself
    infrastructure   a process was killed or crashed, a node was lost, a device broke
    preemption       the same, where word had come that the node goes away
    hang             it did not go on, and was killed for that
    storage          files or a store that the train function or the run needs did not answer
    out of memory    of the process, its node or its device

The class decides which budget pays for the way back, whether the same again ends the run, whether the node is held
against, and whether the failure counts in the failure rate.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from policies.failure_budget import HANG, INFRASTRUCTURE, OUT_OF_MEMORY, PREEMPTION, STORAGE, USER

__all__ = [
    "COUNTED",
    "HANG",
    "INFRASTRUCTURE",
    "OUT_OF_MEMORY",
    "PREEMPTION",
    "REPEATS",
    "STORAGE",
    "USER",
    "Evidence",
    "classify",
]

REPEATS = (USER, OUT_OF_MEMORY)
"""Classes in which the same at the same step would come a third time as well."""
COUNTED = (INFRASTRUCTURE, HANG, STORAGE, OUT_OF_MEMORY)
"""Classes that are failures by the failure rate's account: not what users do, nor ends that were announced."""

_MEMORY_TYPES = ("builtins.MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
_STORAGE_MODULES = ("botocore", "aiobotocore", "boto3", "s3fs", "gcsfs", "adlfs", "fsspec")
_STORAGE_TYPES = ("elastic.errors.StorageError",)
_STORAGE_ERRNO = {5: "EIO", 28: "ENOSPC", 30: "EROFS", 116: "ESTALE", 122: "EDQUOT"}
_DEVICE_WORDS = (
    "uncorrectable ecc",
    "hardware stack error",
    "unspecified launch failure",
    "nvlink error",
    "gpu has fallen off the bus",
    "nccl error",
    "ncclsystemerror",
    "ncclremoteerror",
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one failure."""

    text: str = ""
    error_types: Collection[str] = ()
    """Qualified names of the exception's type, its bases, and those of what it came from."""
    errno: int | None = None
    lost: bool = False
    """The process is gone."""
    node_lost: bool = False
    hang: bool = False
    noticed: bool = False
    """Word had come that the node, or the process, goes away; or Ray says that it was preempted."""
    oom_killed: bool = False
    """By the kernel or by Ray's memory monitor."""
    exit_code: int | None = None
    signal: int | None = None


def classify(evidence: Evidence) -> tuple[str, str]:
    """(class, why), the surest sign first."""
    text = evidence.text.lower()
    if evidence.oom_killed:
        return OUT_OF_MEMORY, "killed because memory ran out"
    if evidence.noticed and (evidence.lost or evidence.node_lost):
        return PREEMPTION, "it had been announced"
    if evidence.hang:
        return HANG, "it did not go on"
    if evidence.node_lost:
        return INFRASTRUCTURE, "its node was lost"
    if evidence.lost:
        return _of_process(evidence)
    types = tuple(evidence.error_types)
    if any(name in _MEMORY_TYPES for name in types) or any(word in text for word in _MEMORY_WORDS):
        return OUT_OF_MEMORY, "an allocation failed"
    if any(name.partition(".")[0] in _STORAGE_MODULES or name in _STORAGE_TYPES for name in types):
        return STORAGE, "a store did not do what was asked"
    if evidence.errno in _STORAGE_ERRNO:
        return STORAGE, f"the file system said {_STORAGE_ERRNO[evidence.errno]}"
    if any(word in text for word in _DEVICE_WORDS):
        return INFRASTRUCTURE, "a device or its network failed"
    return USER, "the train function raised"


def _of_process(evidence: Evidence) -> tuple[str, str]:
    if evidence.exit_code:
        if evidence.exit_code == 128 + signal.SIGTERM:
            return PREEMPTION, "it was told to end, twice"
        return USER, f"the process ended itself with exit code {evidence.exit_code}"
    if evidence.exit_code == 0:
        return USER, "the process ended itself"
    if evidence.signal is not None:
        return INFRASTRUCTURE, f"the process crashed: {_signal_name(evidence.signal)}"
    return INFRASTRUCTURE, "the process was killed"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
