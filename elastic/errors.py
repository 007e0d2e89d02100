"""Every error a user can meet, grouped by what the caller can do about it.

    ElasticError
    ├── ConfigError            fix the call, the flag or the file; nothing was started        exit 2
    ├── TrainingFailed         the user's code raised; the traceback is theirs                exit 3
    │   └── DeterministicFailure   the same error at the same step twice: do not start again  exit 93
    ├── SnapshotError          a snapshot was not taken; training can go on                   exit 4
    │   ├── CaptureError       something attached cannot be saved: its key and type
    │   ├── CommitRefused      the parts do not belong together, or the name is taken
    │   ├── CommitUnknown      the answer of the store was lost and could not be read back
    │   └── StorageError       the store does not answer, is full, or forbids it
    ├── RestoreError           the state asked for cannot be had as asked                     exit 5
    │   ├── CorruptSnapshot    a checksum or the coverage is wrong: tensor, chunk, file
    │   ├── ModelMismatch      the snapshot belongs to another model
    │   ├── VersionMismatch    it was made with other versions, and a strict restore was asked for
    │   └── TopologyMismatch   it holds state of each rank of another mesh, and no rule for this one
    ├── ClusterError           not enough nodes, unlike versions, the run is not there        exit 6
    └── InternalError          a bug of ours; carries the story that led to it                exit 70

Fields are arguments and the text is made in ``__str__``, so that every error crosses a process boundary whole.
A message says what, where, and the cure.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ClusterError",
    "CommitRefused",
    "CommitUnknown",
    "ConfigError",
    "CorruptSnapshot",
    "DeterministicFailure",
    "ElasticError",
    "InternalError",
    "ModelMismatch",
    "RestoreError",
    "SnapshotError",
    "StorageError",
    "TopologyMismatch",
    "TrainingFailed",
    "VersionMismatch",
]


class ElasticError(Exception):
    """Base of all errors of this package. ``exit_code`` is what the command line ends with."""

    exit_code = 1


class ConfigError(ElasticError):
    """A value the user gave cannot be used: names the field, the value and the cure."""

    exit_code = 2

    def __init__(self, field: str, value: object, cure: str) -> None:
        super().__init__(field, value, cure)
        self.field, self.value, self.cure = field, value, cure

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.cure}"


class TrainingFailed(ElasticError):
    """The train function raised. ``user_traceback`` is the text of its own traceback on the first failing rank."""

    exit_code = 3

    def __init__(self, rank: int, step: int, error: str, user_traceback: str, why_not_retried: str = "") -> None:
        super().__init__(rank, step, error, user_traceback, why_not_retried)
        self.rank, self.step, self.error = rank, step, error
        self.user_traceback, self.why_not_retried = user_traceback, why_not_retried

    def __str__(self) -> str:
        where = f"at step {self.step}" if self.step >= 0 else "before its first step"
        why = f" ({self.why_not_retried})" if self.why_not_retried else ""
        text = f"the train function raised on rank {self.rank} {where}: {self.error}{why}"
        return f"{text}\n{self.user_traceback}".rstrip()


class DeterministicFailure(TrainingFailed):
    """The same error at the same step twice: starting again would end the same way."""

    exit_code = 93


class SnapshotError(ElasticError):
    """A snapshot was not taken. Training can go on; what was committed before stays readable."""

    exit_code = 4

    def __init__(self, what: str, where: str = "", cure: str = "") -> None:
        super().__init__(what, where, cure)
        self.what, self.where, self.cure = what, where, cure

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        cure = f"; {self.cure}" if self.cure else ""
        return f"{self.what}{where}{cure}"


class CaptureError(SnapshotError):
    """Something attached cannot be saved: ``where`` is its key, ``what`` says its type."""


class CommitRefused(SnapshotError):
    """The parts of an attempt do not belong together, or its name is taken by another writer."""


class CommitUnknown(SnapshotError):
    """The store's answer to the commit was lost and could not be read back."""


class StorageError(SnapshotError):
    """The store does not answer, is full, does not exist or forbids the operation: ``where`` is the URL or key."""


class RestoreError(ElasticError):
    """The state asked for cannot be had as asked. Nothing live was changed in silence."""

    exit_code = 5

    def __init__(self, what: str, where: str = "", cure: str = "") -> None:
        super().__init__(what, where, cure)
        self.what, self.where, self.cure = what, where, cure

    __str__ = SnapshotError.__str__


class CorruptSnapshot(RestoreError):
    """A checksum, the coverage or a file of a snapshot is wrong: names tensor, chunk and file."""


class ModelMismatch(RestoreError):
    """The snapshot belongs to another model: names the tensors that differ."""


class VersionMismatch(RestoreError):
    """The snapshot was made with other versions than are here: names each with both."""


class TopologyMismatch(RestoreError):
    """State that differs from rank to rank was saved on another mesh, and no rule says what becomes of it here."""


class ClusterError(ElasticError):
    """The cluster cannot carry the run: too few nodes, unlike versions, or no such run."""

    exit_code = 6

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what, cure)
        self.what, self.cure = what, cure

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}" if self.cure else self.what


class InternalError(ElasticError):
    """A bug of ours. ``story`` is the list of events that led to it, oldest first; the text
    shows the last of them."""

    exit_code = 70

    def __init__(self, what: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(what, story)
        self.what, self.story = what, tuple(story)

    def __str__(self) -> str:
        lines = "".join(f"\n  {line[:160]}" for line in self.story[-8:])
        return f"{self.what} (a bug in ray-elastic; please report it with this story){lines}"
