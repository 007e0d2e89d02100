"""Configuration: checked where it is made, and every refusal names field, value and cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic.config import FailureConfig, RunConfig, ScalingConfig, SnapshotConfig, parse_interval
from elastic.errors import ConfigError
from elastic.retention import best, every_hours, keep_last


@pytest.mark.parametrize(
    ("make", "field", "value", "cure"),
    [
        (lambda: ScalingConfig(num_workers=0), "num_workers", 0, "at least one worker"),
        (lambda: ScalingConfig(num_workers=(4, 2)), "num_workers", (4, 2), "swap them"),
        (lambda: ScalingConfig(num_workers="two"), "num_workers", "two", "integer"),
        (lambda: ScalingConfig(num_workers=(1, 3), mesh={"dp": 2, "tp": 2}), "mesh", None, "leave one axis at -1"),
        (lambda: ScalingConfig(mesh={"model": 2}), "mesh", {"model": 2}, "unknown axis"),
        (lambda: ScalingConfig(num_workers=4, mesh=[{"dp": 4}, {"model": 2}]), "mesh", {"model": 2}, "unknown axis"),
        (lambda: ScalingConfig(num_workers=4, mesh=[{"dp": 2}, {"dp": 8}]), "mesh", None, "no world size from 4 to 4"),
        (lambda: ScalingConfig(num_workers=4, mesh={4: {"dp": 2}}), "mesh", {4: {"dp": 2}}, "is no mesh of 4 ranks"),
        (
            lambda: ScalingConfig(resources_per_worker={"CPU": 0}),
            "resources_per_worker['CPU']", 0, "finite number above 0",
        ),
        (lambda: ScalingConfig(workers=2), "workers", 2, "ScalingConfig has no such field; it has num_workers"),
        (lambda: SnapshotConfig(interval=-1), "interval", -1, "finite number above 0"),
        (lambda: SnapshotConfig(interval=float("nan")), "interval", None, "finite number above 0"),
        (lambda: SnapshotConfig(interval="soon"), "interval", "soon", "use auto, young, daly"),
        (lambda: SnapshotConfig(interval="1.5 steps"), "interval", "1.5 steps", "whole number of steps"),
        (lambda: SnapshotConfig(interval="0s"), "interval", 0.0, "finite number above 0"),
        (lambda: SnapshotConfig(mtbf_s=0), "mtbf_s", 0, "finite number above 0"),
        (lambda: SnapshotConfig(keep=0), "keep", 0, "finite number above 0"),
        (lambda: SnapshotConfig(keep="keep_last(0)"), "keep", "keep_last(0)", "finite number above 0"),
        (lambda: SnapshotConfig(keep="newest(3)"), "keep", "newest(3)", "use a number, or keep_last(3) |"),
        (lambda: SnapshotConfig(keep=2.5), "keep", 2.5, "integer"),
        (lambda: SnapshotConfig(upload_bytes_per_s=0), "upload_bytes_per_s", 0, "finite number above 0"),
        (lambda: SnapshotConfig(replicas=3), "replicas", 3, "0 or 1"),
        (lambda: SnapshotConfig(checksum="md5"), "checksum", "md5", "xxh3_128"),
        (lambda: SnapshotConfig(rng="none"), "rng", "none", "derived"),
        (lambda: FailureConfig(unwind_timeout_s=float("inf")), "unwind_timeout_s", float("inf"), "finite"),
        (lambda: FailureConfig(max_user_errors=0), "max_user_errors", 0, "above 0"),
        (lambda: FailureConfig(wait_for_workers_s=-1), "wait_for_workers_s", -1, "at least 0"),
        (lambda: RunConfig(name="a/b", storage_path="/x"), "name", "a/b", "use letters, digits"),
        (lambda: RunConfig(name="", storage_path="/x"), "name", "", "use letters, digits"),
        (lambda: RunConfig(name="a", storage_path=" "), "storage_path", " ", "name a directory or s3://"),
        (lambda: RunConfig(name="a"), "storage_path", None, "required"),
        (
            lambda: RunConfig(name="a", storage_path="/x", snapshots={"keep": 0}),
            "keep", 0, "finite number above 0",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(make: Callable[[], Any], field: str, value: Any, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    error = caught.value
    assert type(error) is ConfigError
    assert error.field.startswith(field)
    assert value is None or error.value == value
    assert cure in error.cure
    assert str(error) == f"{error.field} = {error.value!r}: {error.cure}"


def test_a_config_cannot_be_changed() -> None:
    config = ScalingConfig(num_workers=2)
    with pytest.raises(ValueError, match="frozen"):
        config.num_workers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("auto", ("auto", 0.0)), ("young", ("young", 0.0)), ("daly", ("daly", 0.0)), (30, ("seconds", 30.0)),
        ("45s", ("seconds", 45.0)), ("45", ("seconds", 45.0)), ("10m", ("seconds", 600.0)), ("2h", ("seconds", 7200.0)),
        ("1d", ("seconds", 86400.0)), ("500ms", ("seconds", 0.5)), ("1e3 s", ("seconds", 1000.0)),
        ("100 steps", ("steps", 100.0)), ("1 step", ("steps", 1.0)), (" 5steps ", ("steps", 5.0)),
    ],
)  # fmt: skip
def test_an_interval_is_a_policy_a_time_or_a_number_of_steps(text: Any, parsed: tuple[str, float]) -> None:
    assert parse_interval(text) == parsed


@pytest.mark.parametrize("text", ["1.2.3s", "e5", "..", ".", "-5s", "5 weeks", "steps", ""])
def test_what_only_looks_like_an_interval_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_interval(text)
    assert caught.value.field == "interval"
    assert "use auto, young, daly" in caught.value.cure


def test_a_number_of_workers_is_both_bounds() -> None:
    assert (ScalingConfig(num_workers=3).min_workers, ScalingConfig(num_workers=3).max_workers) == (3, 3)
    assert (ScalingConfig(num_workers=(2, 8)).min_workers, ScalingConfig(num_workers=(2, 8)).max_workers) == (2, 8)


def test_a_rank_takes_a_cpu_and_with_gpu_also_a_gpu() -> None:
    assert ScalingConfig().resources == {"CPU": 1}
    assert ScalingConfig(use_gpu=True).resources == {"CPU": 1, "GPU": 1}
    assert ScalingConfig(resources_per_worker={"CPU": 2}, use_gpu=True).resources == {"CPU": 2}


def test_what_is_kept_may_be_a_number_a_text_or_rules() -> None:
    assert SnapshotConfig(keep="4").keep == 4
    rules = keep_last(3) | every_hours(24) | best(2, "loss", largest=True)
    assert SnapshotConfig(keep=rules).keep == str(rules) == SnapshotConfig(keep=str(rules)).keep
