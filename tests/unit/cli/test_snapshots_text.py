"""How the snapshot commands say sizes, ages and rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli.snapshots_gc import retention_of
from elastic.cli.snapshots_text import age, columns, durable_survives, memory_survives, size
from elastic.errors import ConfigError
from elastic.storage.local_blobs import LocalBlobs
from elastic.storage.memory_blobs import MemoryBlobs
from elastic.storage.remote_blobs import RemoteBlobs


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1_048_000, "1023 KiB")),
        *((5 << 30, "5 GiB"), (10 * 2**40, "10 TiB"), (2**60, "1024 PiB")),
    ],
)
def test_a_size_has_the_unit_that_suits_it(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_an_age_has_one_unit() -> None:
    assert [age(s) for s in (-1.0, 3.4, 119.0, 121.0, 7300.0, 200_000.0)] == [
        "0 s",
        "3 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]


def test_columns_are_aligned_to_the_right_unless_named() -> None:
    assert columns(("a", "bb"), [("xyz", "1"), ("y", "22")], left=(0,)) == ["a    bb", "xyz   1", "y    22"]


def test_which_failures_a_place_survives_is_said_of_the_place(tmp_path: Path) -> None:
    assert durable_survives(RemoteBlobs("s3://bucket/x")) == ("process", "node", "cluster")
    assert durable_survives(LocalBlobs(tmp_path))[:2] == ("process", "cluster")
    assert durable_survives(MemoryBlobs()) == ()
    assert (memory_survives(1), memory_survives(2)) == (("process",), ("process", "node"))


def test_rules_are_joined_and_none_keeps_everything() -> None:
    found = retention_of(3, 100, 24.0, ["loss", "a:b:2"], ["accuracy:1"])
    assert str(found) == (
        "keep_last(3) | every_steps(100) | every_hours(24) | best(1, 'loss') | best(2, 'a:b') "
        "| best(1, 'accuracy', largest=True)"
    )
    assert str(retention_of(None, None, None, [], [])) == "everything"
    with pytest.raises(ConfigError, match="loss:x"):
        retention_of(None, None, None, ["loss:x"], [])
