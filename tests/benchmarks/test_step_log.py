"""What is counted from the step log, on logs that are small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.step_log import Record, StepLog, recovery, samples_of, trajectory


def step(attempt: float, number: int, at: float, ids: tuple[int, ...] = (), rank: int = 0) -> list[Record]:
    """A step of one second that ended at ``at``."""
    about = {"step": number, "attempt": attempt, "rank": rank, "world_size": 1}
    return [Record("took", at - 1, ids=ids, **about), Record("did", at, began=at - 1, **about)]


def test_steps_from_the_restored_one_on_are_lost_and_counted_once() -> None:
    log = [*step(1, 1, 2), *step(1, 2, 3), *step(1, 3, 4), *step(6, 2, 8), *step(6, 3, 9)]
    found = recovery(log, 5.0)
    assert found is not None
    assert (found.to_first_step_s, found.stall_s, found.steps_lost) == (3.0, 4.0, 2)
    kept = trajectory(log, 100)
    assert (sorted(kept.steps), kept.steps_redone, kept.time_in_steps_s) == ([1, 2, 3], 2, 3.0)
    assert [kept.steps[number].attempt for number in (1, 2, 3)] == [1, 6, 6]


def test_a_step_that_one_rank_finished_and_all_take_again_is_lost() -> None:
    log = [*step(1, 1, 2), *step(1, 1, 2, rank=1), *step(1, 2, 3, rank=1), *step(6, 2, 8)]
    found = recovery(log, 5.0)
    assert found is not None
    assert found.steps_lost == 1


def test_an_attempt_that_has_only_taken_a_batch_undoes_what_came_after_its_place() -> None:
    log = [*step(1, 1, 2), *step(1, 2, 3), step(6, 2, 8)[0]]
    assert recovery(log, 5.0) is None
    assert sorted(trajectory(log, 100).steps) == [1]


def test_nothing_after_the_end_counts() -> None:
    log = [*step(1, 1, 2), *step(1, 2, 3)]
    assert sorted(trajectory(log, 2.5).steps) == [1]


def test_samples_of_steps_that_were_undone_do_not_count_and_gaps_and_doubles_do() -> None:
    order = (7, 5, 3, 1, 2)
    log = [*step(1, 1, 2, (7, 5)), *step(1, 2, 3, (3, 1)), *step(6, 2, 8, (5, 1))]
    assert samples_of(log, trajectory(log, 100), order) == (1, 1)


def test_a_line_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    log = StepLog(path)
    assert log.read() == []
    line = json.dumps({"kind": "took", "at": 1.0, "step": 1, "attempt": 0.5, "rank": 0, "world_size": 2, "ids": [4]})
    path.write_text(f"{line}\n{line[:20]}")
    assert len(log.read()) == 1
    path.write_text(f"{line}\n{line}\n")
    assert [record.ids for record in log.read()] == [(4,), (4,)]
