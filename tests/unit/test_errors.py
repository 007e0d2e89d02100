"""The tree of errors: it is the one drawn at the top of the module, and every one of them crosses processes whole."""

from __future__ import annotations

import pickle
import re

import pytest

from elastic import errors
from elastic.errors import (
    CaptureError,
    ClusterError,
    CommitRefused,
    CommitUnknown,
    ConfigError,
    CorruptSnapshot,
    DeterministicFailure,
    ElasticError,
    InternalError,
    ModelMismatch,
    RestoreError,
    SnapshotError,
    StorageError,
    TopologyMismatch,
    TrainingFailed,
    VersionMismatch,
)

ONE_OF_EACH = [
    ElasticError("anything"),
    ConfigError("num_workers", (3, 2), "swap them"),
    TrainingFailed(2, 7, "ValueError: no", "Traceback …", "too many"),
    DeterministicFailure(0, -1, "KeyError: 'x'", ""),
    *(kind("what", "where", "cure") for kind in
      (SnapshotError, CaptureError, CommitRefused, CommitUnknown, StorageError, RestoreError, CorruptSnapshot,
       ModelMismatch, VersionMismatch, TopologyMismatch)),
    ClusterError("too few nodes", "add some"),
    InternalError("a key is missing", ("first", "second")),
]  # fmt: skip


def test_there_is_one_of_each() -> None:
    assert {type(error).__name__ for error in ONE_OF_EACH} == {*errors.__all__}


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_an_error_crosses_processes_with_its_fields_and_its_text(error: ElasticError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


def test_the_drawn_tree_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, int | None]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)\b.*?(?:exit (\d+))?$", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            drawn[match[2]] = (path[depth - 1] if depth else "Exception", int(match[3]) if match[3] else None)
    assert {name: parent for name, (parent, _) in drawn.items()} == {
        name: getattr(errors, name).__mro__[1].__name__ for name in errors.__all__
    }
    for name, (parent, code) in drawn.items():
        expected = code if code is not None else getattr(errors, parent).exit_code if parent != "Exception" else 1
        assert getattr(errors, name).exit_code == expected


def test_do_not_start_again_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in (ConfigError, TrainingFailed, DeterministicFailure, SnapshotError, RestoreError,
                                         ClusterError, InternalError)]  # fmt: skip
    assert codes == [2, 3, 93, 4, 5, 6, 70]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("keep", 0, "use a finite number above 0"), "keep = 0: use a finite number above 0"),
        (SnapshotError("no room", "node a", "lower keep"), "no room (node a); lower keep"),
        (SnapshotError("no room"), "no room"),
        (ClusterError("no such run"), "no such run"),
        (
            TrainingFailed(1, -1, "ValueError: no", "Traceback", "too many"),
            "the train function raised on rank 1 before its first step: ValueError: no (too many)\nTraceback",
        ),
    ],
)
def test_a_message_says_what_where_and_the_cure(error: ElasticError, text: str) -> None:
    assert str(error) == text


def test_an_internal_error_shows_the_end_of_its_story() -> None:
    text = str(InternalError("no key", tuple(f"event {number} {'x' * 300}" for number in range(20))))
    assert "event 19" in text
    assert "event 11 " not in text
    assert max(map(len, text.splitlines())) < 200
