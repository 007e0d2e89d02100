"""Failure logs: what is read, and what is said about a line that cannot be."""

from __future__ import annotations

import pytest

from policies.domain import PolicyError
from policies.failure_log import read_failure_log


def read(text: str):
    return read_failure_log(text.splitlines(), "log.csv")


def test_a_plain_log_counts_gaps_between_its_failures():
    log = read("time\n100\n400\n1000\n")
    assert (log.duration_s, log.count(60), log.gaps_s(60)) == (900, 2, [300, 600])
    assert log.censored_s(60) == 0


def test_start_and_end_bound_the_record():
    log = read("time,class\n0,start\n100,node\n400,domain\n1000,end\n")
    assert (log.duration_s, log.count(60), log.gaps_s(60), log.censored_s(60)) == (1000, 2, [100, 300], 600)
    assert log.by_class(60) == {"process": 0, "node": 1, "domain": 1}


def test_dates_are_read_with_and_without_a_zone():
    log = read("time,node\n2026-01-01T00:00:00Z,a\n2026-01-01T01:00:00,b\n2026-01-01 02:00:00+00:00,a\n")
    assert log.times_s() == [0, 3600, 7200]
    assert log.by_node() == {"a": 2, "b": 1}


def test_a_storm_has_the_gravest_class_of_its_failures_and_counts_once():
    log = read("time,class\n0,start\n100,process\n130,domain\n150,process\n9000,process\n10000,end\n")
    assert log.count(60) == 2
    assert log.by_class(60) == {"process": 1, "node": 0, "domain": 1}


def test_planned_stops_and_user_errors_are_left_out():
    log = read("time,class,note\n0,start,\n50,planned,\n100,user,typo\n200,node,xid\n300,noticed,spot\n1000,end,\n")
    assert (len(log.failures), log.left_out) == (1, 3)


def test_a_duplicate_is_reported_with_its_line_and_counted_once():
    log = read("time,node\n100,a\n400,b\n400,b\n900,a\n")
    assert len(log.failures) == 3
    assert [finding.code for finding in log.findings] == ["W_LOG_DUPLICATE"]
    assert "line 4 repeats line 3" in log.findings[0].message


def test_a_long_silence_is_reported_with_its_lines():
    times = [*range(0, 2000, 100), 90_000, *range(90_100, 92_000, 100)]
    log = read("time\n" + "\n".join(str(time) for time in times))
    gap = [finding for finding in log.findings if finding.code == "W_LOG_GAP"]
    assert len(gap) == 1
    assert "between lines 21 and 22" in gap[0].message


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", "E_LOG_HEADER", "line 1"),
        ("when,node\n1,a\n", "E_LOG_HEADER", "line 1"),
        ("time,host\n1,a\n", "E_LOG_COLUMN", "line 1"),
        ("time,time\n1,2\n", "E_LOG_COLUMN", "line 1"),
        ("time,node\n1,a\n2\n", "E_LOG_ROW", "line 3"),
        ("time\n1\n5\n\n3\n", "E_LOG_ORDER", "line 5"),
        ("time,node\n1,a\n,b\n", "E_LOG_TIME", "line 3"),
        ("time\n1\nyesterday\n", "E_LOG_TIME", "line 3"),
        ("time\n1\nnan\n", "E_LOG_TIME", "line 3"),
        ("time\n-1\n5\n", "E_LOG_TIME", "line 2"),
        ("time\n1\n2026-01-01\n", "E_LOG_TIME", "line 3"),
        ("time,class\n1,node\n2,gremlin\n", "E_LOG_CLASS", "line 3"),
        ("time,class\n1,node\n2,start\n", "E_LOG_ORDER", "line 3"),
        ("time,class\n1,node\n2,end\n3,node\n", "E_LOG_ORDER", "line 4"),
        ("time\n", "E_LOG_EMPTY", "log.csv"),
        ("time\n5\n", "E_LOG_EMPTY", "log.csv"),
    ],
)
def test_an_impossible_line_is_named(text, code, line):
    with pytest.raises(PolicyError) as caught:
        read(text)
    assert caught.value.code == code
    assert line in caught.value.message
    assert "log.csv" in caught.value.message
