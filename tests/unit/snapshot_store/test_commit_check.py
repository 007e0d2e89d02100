from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.errors import CommitRefused
from elastic.protocol.commit import commit_check
from elastic.protocol.shares import Agreement, PointInTime, ShareReport

POINT = PointInTime(3, 40, 320, 320, 5120, (("adamw", 40),), (("warmup", 40),))


def reports(n: int = 4) -> list[ShareReport]:
    return [ShareReport("g3-1", rank, POINT, 100, "xxh3_128:00", 0.01, {}) for rank in range(n)]


def test_shares_of_one_moment_may_be_committed() -> None:
    assert commit_check(reports(), 4) == POINT
    assert commit_check(reports()[::-1], 4) == POINT


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 41}, "step differs: ranks 0, 1, 3: 40; rank 2: 41"),
        ({"generation": 2}, "generation differs: ranks 0, 1, 3: 3; rank 2: 2"),
        ({"data_cursor": 328}, "data cursor differs"),
        ({"samples_seen": 1}, "samples seen differs"),
        ({"tokens_seen": 1}, "tokens seen differs"),
        ({"optimizer_steps": (("adamw", 39),)}, r"optimizer steps differs: .* rank 2: \(\('adamw', 39\),\)"),
        ({"scheduler_steps": ()}, "scheduler steps differs"),
    ],
)
def test_a_rank_at_another_moment_is_refused_by_name_and_value(change: dict[str, object], says: str) -> None:
    mixed = reports()
    mixed[2] = replace(mixed[2], point=replace(POINT, **change))
    with pytest.raises(CommitRefused, match=says):
        commit_check(mixed, 4)


def test_a_missing_a_double_a_foreign_and_an_older_share_are_refused() -> None:
    with pytest.raises(CommitRefused, match="ranks 1, 3 sent no share"):
        commit_check([reports()[0], reports()[2]], 4)
    with pytest.raises(CommitRefused, match="rank 1 sent"):
        commit_check([*reports(), reports()[1]], 4)
    with pytest.raises(CommitRefused, match="rank 4 sent"):
        commit_check(reports(5), 4)
    with pytest.raises(CommitRefused, match="attempt differs: ranks 0, 1, 2: 'g3-1'; rank 3: 'g3-0'"):
        commit_check([*reports(3), replace(reports()[3], attempt="g3-0")], 4)
    with pytest.raises(CommitRefused, match="sent no share"):
        commit_check([], 4)


def holding(*told: tuple[str, str, int]) -> tuple[Agreement, ...]:
    return tuple(Agreement(held_at, 0, holders, what) for held_at, what, holders in told)


def test_ranks_may_hold_different_tensors_where_they_say_so() -> None:
    both = ("", "model.norm float32[4] (aa)", 4)
    stages = [holding(both, (f"pp={rank // 2}", f"layers.{rank // 2} (bb)", 2)) for rank in range(4)]
    commit_check([replace(report, agreements=said) for report, said in zip(reports(), stages)], 4)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            [("", "a float32[4] (aa)", 2), ("", "a float32[6] (ab)", 2)],
            r"2 ranks of the mesh .* rank 0: a .*\[4\].*\[6\]",
        ),
        (
            [("pp=0", "a (aa)", 2), ("pp=1", "a (aa)", 1)],
            r"the 2 ranks at pp=0 do not hold the same .* rank 0: a \(aa\)",
        ),
        (
            [("pp=0", "layers.0 (aa)", 1), ("pp=1", "layers.0 (aa)", 1)],
            r"ranks at pp=0 and those at pp=1 hold different parts .* same names: layers\.0 \(aa\)",
        ),
    ],
)
def test_holders_that_planned_from_other_tensors_are_refused(said: list[tuple[str, str, int]], says: str) -> None:
    with pytest.raises(CommitRefused, match=says + r".*elastic\.declare"):
        commit_check([replace(report, agreements=holding(one)) for report, one in zip(reports(2), said)], 2)
