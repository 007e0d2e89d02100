"""What a user configures. Checked once, where it is made; an error names the field, the value and the cure.

Names follow Ray Train where it has one, so that its users change an import. Seconds end in ``_s``, bytes in ``_bytes``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from elastic.errors import ConfigError
from elastic.mesh import MeshRule, check_rule, largest
from elastic.retention import Retention, parse
from policies.failure_budget import BUDGETS, USER, Budget

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DURATION = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*(ms|s|m|h|d|steps?)?")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Names = Literal["error", "report", "ignore"]
"""What becomes of names that only one side has: the restore fails, they are listed in its report, or not even that."""

VERSIONS_GIVEN = ("model", "tokenizer", "code", "container", "dependencies", "data")
"""Versions that a user may name; those of code, container, dependencies and data are found out where none is named."""
VERSIONS_ACCEPTED = (*VERSIONS_GIVEN, "torch", "python", "elastic")

IntervalPolicy = Literal["auto", "young", "daly"]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            inner = first.get("ctx", {}).get("error")
            if isinstance(inner, ConfigError):
                raise ConfigError(inner.field, inner.value, inner.cure) from None
            field = ".".join(str(part) for part in first["loc"]) or type(self).__name__
            if first["type"] == "extra_forbidden":
                known = ", ".join(type(self).model_fields)
                cure = f"{type(self).__name__} has no such field; it has {known}"
            else:
                cure = first["msg"][:1].lower() + first["msg"][1:]
            raise ConfigError(field, first.get("input"), cure) from None


class _Invalid(ValueError, ConfigError):
    """A ConfigError that pydantic carries out of a validator."""

    def __init__(self, field: str, value: object, cure: str) -> None:
        ConfigError.__init__(self, field, value, cure)

    def __str__(self) -> str:
        return ConfigError.__str__(self)


def _positive(field: str, value: float, *, or_zero: bool = False) -> float:
    if not (value > 0 or (or_zero and value == 0)) or value == float("inf"):
        raise _Invalid(field, value, f"use a finite number {'of at least 0' if or_zero else 'above 0'}")
    return value


class ScalingConfig(_Config):
    """How many ranks, on what, in which mesh. ``num_workers`` is a number, or (min, max) for an elastic run."""

    num_workers: int | tuple[int, int] = 1
    resources_per_worker: Mapping[str, float] | None = None
    """Ray resources of one rank; ``{"CPU": 1}``, or with ``use_gpu`` also ``{"GPU": 1}``."""
    use_gpu: bool = False
    hot_spares: int = 0
    """Ranks beyond ``num_workers`` that have imported and warmed up and stand by: one takes a lost rank's place at
    once, and another is started for it. They hold resources and train nothing."""
    mesh: MeshRule = {"dp": -1}
    """Axis sizes, outermost first; -1 takes what the world size leaves. A list of meshes, or a mapping from world sizes
    to meshes, allows several: the largest that the ranks at hand can form is taken, of equally large ones the one that
    is listed first, and the ranks that are left stay spare."""

    @field_validator("mesh", mode="wrap")
    @classmethod
    def _check_mesh(cls, value: object, handler: object) -> MeshRule:
        try:
            return check_rule(value)
        except ConfigError as error:
            raise _Invalid(error.field, error.value, error.cure) from None

    @model_validator(mode="after")
    def _check(self) -> ScalingConfig:
        low, high = self.min_workers, self.max_workers
        if low < 1:
            raise _Invalid("num_workers", self.num_workers, "at least one worker is needed")
        if self.hot_spares < 0:
            raise _Invalid("hot_spares", self.hot_spares, "use 0, or how many warm ranks stand by")
        if low > high:
            raise _Invalid("num_workers", self.num_workers, f"the minimum {low} is above the maximum {high}; swap them")
        if largest(self.mesh, low, high) is None:
            raise _Invalid(
                "mesh",
                self.mesh,
                f"no world size from {low} to {high} can hold it; change num_workers or leave one axis at -1",
            )
        for name, amount in self.resources.items():
            _positive(f"resources_per_worker[{name!r}]", amount)
        return self

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def resources(self) -> dict[str, float]:
        """Ray resources of one rank, defaults filled in."""
        return dict(self.resources_per_worker or ({"CPU": 1, "GPU": 1} if self.use_gpu else {"CPU": 1}))


class SnapshotConfig(_Config):
    """When snapshots are taken, where they are kept and how they are checked."""

    interval: IntervalPolicy | float | str = "auto"
    """``auto`` (exact optimum from the measured stall and the failure rate), ``young``, ``daly``, seconds as a number
    or ``"45s"``, ``"10m"``, or a number of steps as ``"100 steps"``."""
    mtbf_s: float | None = None
    """Mean time between failures of the whole job, where it is known; otherwise a weak published prior is updated."""
    replicas: Literal[0, 1] = 1
    """Copies of each node's memory on a peer node."""
    remote_every: Literal["auto"] | int = "auto"
    """Every how many node snapshots one goes to durable storage; ``auto`` chooses it with the interval, and is 1 with
    an interval that is given. A slot is skipped while an upload is in flight."""
    max_uploads_in_flight: int = 1
    """Snapshots on their way to durable storage at once."""
    when_busy: Literal["skip", "coalesce", "block"] = "skip"
    """What becomes of a snapshot that is due for durable storage while as many as may be are on their way: ``skip``
    leaves it in node memory, ``coalesce`` sends the newest when one has arrived, ``block`` takes no snapshot before."""
    synchronous: bool = False
    """Training waits at each snapshot until it is durable, whole and checked; for short experiments."""
    keep: int | str = 3
    """Durable snapshots that are kept, others are removed after a newer one is committed: a number, or rules of
    ``elastic.retention`` with ``|`` between them, as ``"keep_last(3) | every_hours(24) | best(2, 'loss')"``."""
    weights_every: int | None = None
    """Every how many node snapshots the weights alone also go to durable storage, without optimizer state and the
    rest, as the run ``NAME.weights``: to evaluate, or to start others from. No run resumes from them."""
    keep_weights: int | str = 3
    """As ``keep``, for the weights alone."""
    upload_bytes_per_s: float | None = None
    """The most that each node sends to durable storage; None: as fast as it can."""
    checksum: Literal["xxh3_128", "blake3", "sha256"] = "xxh3_128"
    arena_directory: str = "/dev/shm"
    """Where node memory is mapped; a directory on a local disk also works, at the disk's speed."""
    rng: Literal["derived", "saved"] = "derived"
    """``derived`` seeds every generator from (seed, step, coordinate) at each boundary, so no rank's loss takes RNG
    state with it; ``saved`` keeps the generators' own states, each rank's for its place on the mesh."""
    rng_on_resize: Literal["refuse", "derive"] = "refuse"
    """What becomes of ``saved`` generators on another mesh: the restore is refused, or each rank's are seeded once,
    from (seed, step, coordinate), and go on from there."""

    @field_validator("interval")
    @classmethod
    def _check_interval(cls, value: float | str) -> float | str:
        if isinstance(value, str):
            parse_interval(value)
            return value
        return _positive("interval", value)

    @field_validator("keep", "keep_weights", mode="before")
    @classmethod
    def _check_keep(cls, value: Any, info: ValidationInfo) -> Any:
        """Kept as a text or a number, whatever it was given as: rules themselves cannot cross processes."""
        if isinstance(value, Retention):
            return str(value)
        if not isinstance(value, (int, str)):
            return value
        try:
            parse(value)
        except ConfigError as error:
            raise _Invalid(info.field_name or "keep", value, error.cure) from None
        return int(value) if isinstance(value, str) and value.strip().isdigit() else value

    @model_validator(mode="after")
    def _check(self) -> SnapshotConfig:
        for field in ("mtbf_s", "remote_every", "max_uploads_in_flight", "weights_every", "upload_bytes_per_s"):
            if (value := getattr(self, field)) is not None and value != "auto":
                _positive(field, value)
        return self


def parse_interval(value: float | str) -> tuple[str, float]:
    """(``auto``|``young``|``daly``, 0), (``seconds``, s) or (``steps``, n). Raises ConfigError for anything else."""
    if isinstance(value, str):
        if value in ("auto", "young", "daly"):
            return value, 0.0
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise _Invalid("interval", value, "use auto, young, daly, seconds, '45s', '10m', '2h' or '100 steps'")
        number, unit = float(match[1]), match[2] or "s"
        if unit.startswith("step"):
            if number != int(number) or number < 1:
                raise _Invalid("interval", value, "use a whole number of steps, 1 or more")
            return "steps", number
        return "seconds", _positive("interval", number * _UNIT_S[unit])
    return "seconds", float(value)


class FailureConfig(_Config):
    """What a run bears before it gives up. Failures of nodes and processes cost nothing while steps get committed."""

    max_failures_without_progress: int = 5
    """Failures in a row without a step committed in between that end the run."""
    max_user_errors: int = 3
    """Errors of the train function that end the run; the same error at the same step ends it at the second."""
    budgets: Mapping[str, tuple[int, float]] = {}
    """How many failures of each class are borne, and after how many seconds of committed training one more is:
    ``{"infrastructure": (50, 10.0)}``. Classes: infrastructure, preemption, hang, storage, out of memory; what is not
    named keeps its default. For the class ``user`` see ``max_user_errors``."""
    unwind_timeout_s: float = 10.0
    """How long a surviving rank may take to leave the train function before it is killed and treated as lost."""
    form_timeout_s: float = 120.0
    """How long ranks may take from the start of a generation to their first boundary, model building included."""
    wait_for_workers_s: float = 10.0
    """How long a start waits for the wanted number of ranks when a smaller mesh could start now."""
    wait_for_cluster_s: float = 600.0
    """How long the run may lack the ranks of its smallest mesh before it ends; it can be resumed."""
    probe_timeout_s: float = 1.0
    """How long a rank may leave a probe unanswered, once its peers report broken connections."""
    heartbeat_timeout_s: float = 5.0
    """How long a node may leave the controller's questions unanswered before the run goes on without it; also how long
    a rank's process may be stopped."""
    fence_timeout_s: float = 15.0
    """How long a node may go without a question of the controller before it kills its own ranks and leaves the run. It
    has to be longer than a killed controller takes to come back (1 to 3 s, more on a busy machine), or the nodes would
    leave for nothing; a node that was given up trains no longer than this."""
    hang_timeout_s: Literal["auto"] | float = "auto"
    """How long a rank may stand in one step. ``auto``: ten times the longest step so far and at least 30 s; a rank that
    still moves (other stacks, or work outside of a collective) has until ``first_step_timeout_s``. A number: exactly
    that. What takes longer for a reason stands in ``with run.phase(name):``."""
    first_step_timeout_s: float = 600.0
    """How long the first step of a generation may take, compilation included; with ``auto`` at most ten times the
    longest first step, once there was one."""
    loading_timeout_s: float | None = 600.0
    """How long a rank may wait for its next batch; None: for ever."""

    notice_s: float = 25.0
    """How long a process goes on to exist after SIGTERM, as far as is known; a drain of Ray brings its own deadline."""

    straggler_factor: float = 1.5
    """A rank that works so many times as long in each step as its peers, which wait for it, is told as slow."""
    straggler_window_s: float = 10.0
    """Of this length, and at least of ten steps, are the windows over which work is compared; a rank has to be slow in
    three in a row."""
    stragglers: Literal["report", "leave"] = "report"
    """What becomes of a rank that is slow: it is told, or its node is also left at a boundary, for ten minutes."""

    @model_validator(mode="after")
    def _check(self) -> FailureConfig:
        for field in type(self).model_fields:
            value = getattr(self, field)
            if isinstance(value, (int, float)):
                _positive(field, value, or_zero=field == "wait_for_workers_s")
        if self.straggler_factor <= 1:
            raise _Invalid("straggler_factor", self.straggler_factor, "use more than 1: ranks are never quite equal")
        if self.fence_timeout_s <= self.heartbeat_timeout_s:
            cure = f"use more than heartbeat_timeout_s = {self.heartbeat_timeout_s:g}: a node must not leave first"
            raise _Invalid("fence_timeout_s", self.fence_timeout_s, cure)
        known = ", ".join(name for name in BUDGETS if name != USER)
        for name, (burst, refill_s) in self.budgets.items():
            if name == USER:
                raise _Invalid(f"budgets[{name!r}]", (burst, refill_s), "use max_user_errors")
            if name not in BUDGETS:
                raise _Invalid(f"budgets[{name!r}]", (burst, refill_s), f"the classes are {known}")
            _positive(f"budgets[{name!r}]", burst, or_zero=True)
            _positive(f"budgets[{name!r}]", refill_s)
        return self

    @property
    def all_budgets(self) -> dict[str, Budget]:
        """For every class, defaults filled in."""
        given = {name: Budget(burst, refill_s) for name, (burst, refill_s) in self.budgets.items()}
        return {**BUDGETS, **given, USER: replace(BUDGETS[USER], burst=self.max_user_errors - 1)}


class RestoreConfig(_Config):
    """How a run takes up a snapshot that it finds when it is started. Recoveries within the run are always strict."""

    mode: Literal["strict", "training", "weights"] = "strict"
    """``strict``: the same trajectory, with everything that was saved, or an error. ``training``: weights, optimizer,
    scheduler, scaler and the count of steps; the data begin anew. ``weights``: a warm start with those alone."""
    accept_versions: tuple[str, ...] = ()
    """Versions that may differ although the restore is strict: ``("torch", "code")``; ``dependencies`` is also torch,
    python and elastic. The other modes report what differs and go on."""
    missing_weights: Names | None = None
    """For weights that the snapshot lacks: they keep what the program gave them. ``error`` in the modes ``strict`` and
    ``training``, ``report`` in ``weights``."""
    unexpected_weights: Names | None = None
    """For weights that the snapshot has and the model has not; defaults as before."""
    missing_optimizer: Names = "error"
    """For state of optimizers, schedulers, scalers and other objects that the snapshot lacks; ``training`` only."""
    unexpected_optimizer: Names = "error"
    """For such state that only the snapshot has."""

    @field_validator("accept_versions", mode="before")
    @classmethod
    def _check_accepted(cls, value: object) -> object:
        names = (value,) if isinstance(value, str) else value
        for name in names if isinstance(names, (list, tuple)) else ():
            if name not in VERSIONS_ACCEPTED:
                raise _Invalid("accept_versions", name, f"no version of that name; use {', '.join(VERSIONS_ACCEPTED)}")
        return names

    @model_validator(mode="after")
    def _check(self) -> RestoreConfig:
        for field in ("missing_weights", "unexpected_weights", "missing_optimizer", "unexpected_optimizer"):
            value = getattr(self, field)
            if self.mode == "strict" and value not in (None, "error"):
                raise _Invalid(field, value, "a strict restore takes everything or fails; use mode='training'")
        return self

    def weights(self, field: str) -> Names:
        """The choice for ``missing`` or ``unexpected`` weights, the mode's own where none was made."""
        given: Names | None = getattr(self, f"{field}_weights")
        return given or ("report" if self.mode == "weights" else "error")


class RunConfig(_Config):
    """The run's identity and where its durable state lies. The same name and storage again: it resumes."""

    name: str
    storage_path: str
    snapshots: SnapshotConfig = SnapshotConfig()
    failures: FailureConfig = FailureConfig()
    worker_runtime_env: Mapping[str, Any] | None = None
    """Ray's ``runtime_env`` for the run's own processes, where they need more than the cluster's: ``env_vars``, say."""
    seed: int = 0
    """Seeds the derived generators of every rank."""
    restore: RestoreConfig = RestoreConfig()
    """How the snapshot is taken up that the run begins with: a mode, or a RestoreConfig. With ``start_from`` it is for
    that snapshot; the run's own, when the same command is given again, are then taken up strictly."""
    start_from: str | None = None
    """A snapshot of another run to begin with, as long as this one has none: ``RUN``, ``STORAGE/RUN``, and ``@STEP`` or
    ``@ID`` behind it for another than the newest. With ``restore="weights"`` the steps count from 0."""
    versions: Mapping[str, str] = {}
    """What the snapshots are made with, as far as only you know: model, tokenizer, container, data, dependencies, code.
    A strict restore refuses other ones."""

    @field_validator("restore", mode="before")
    @classmethod
    def _check_restore(cls, value: object) -> object:
        return {"mode": value} if isinstance(value, str) else value

    @field_validator("start_from")
    @classmethod
    def _check_start(cls, value: str | None) -> str | None:
        if value is not None:
            parse_start(value)
        return value

    @field_validator("versions")
    @classmethod
    def _check_versions(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if name not in VERSIONS_GIVEN:
                raise _Invalid("versions", name, f"use {', '.join(VERSIONS_GIVEN)}")
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise _Invalid("name", value, "use letters, digits, '.', '_' and '-', beginning with a letter or digit")
        return value

    @field_validator("storage_path")
    @classmethod
    def _check_storage(cls, value: str) -> str:
        if not value.strip():
            raise _Invalid("storage_path", value, "name a directory or s3://BUCKET/PREFIX")
        return value


def parse_start(text: str) -> tuple[str, str, str]:
    """(storage or empty, run, snapshot or ``latest``) of ``[STORAGE/]RUN[@STEP|ID]``. Raises ConfigError."""
    place, _, which = text.partition("@") if "://" not in text else _after_scheme(text)
    storage, _, run = place.rstrip("/").rpartition("/")
    if not _NAME.fullmatch(run):
        raise _Invalid("start_from", text, "name a run, as RUN, STORAGE/RUN or s3://BUCKET/PREFIX/RUN, then @STEP")
    if storage and "://" not in storage:
        storage = os.path.abspath(os.path.expanduser(storage))
    elif place.startswith("/") and not storage:
        storage = "/"
    return storage, run, which or "latest"


def _after_scheme(text: str) -> tuple[str, str, str]:
    head, separator, which = text.rpartition("@")
    return (head, separator, which) if separator and "/" not in which else (text, "", "")
