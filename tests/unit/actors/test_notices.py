"""What becomes of the word that nodes go away before the lifecycle hears it."""

from __future__ import annotations

from math import isinf
from typing import Any

from actors.notices import NoticeShell
from elastic.clock import wall
from elastic.protocol.run_events import NodeLeaving, NodeStaying


def shell() -> tuple[NoticeShell, list[Any]]:
    heard: list[Any] = []
    return NoticeShell(heard.append, lambda: (1.0, 2.0), lambda kind, **fields: None, notice_s=25.0), heard


def test_a_drain_is_told_once_and_its_end_too_and_another_drain_is_news_again() -> None:
    notices, heard = shell()
    until = wall() + 60
    for seen in ({"n1": until}, {"n1": until}, {}, {}, {"n1": 0.0}):
        notices.drains(seen)
    first, cancelled, again = heard
    assert isinstance(first, NodeLeaving)
    assert (first.node, first.by, round(first.deadline - first.at)) == ("n1", "drain", 60)
    assert isinstance(cancelled, NodeStaying)
    assert (cancelled.node, cancelled.by) == ("n1", "drain")
    assert isinstance(again, NodeLeaving)
    assert isinf(again.deadline)


def test_a_user_takes_back_every_word_but_rays() -> None:
    notices, heard = shell()
    notices.slow("n1", "rank 3 is slow there")
    notices.readmit("n1")
    assert [event.by for event in heard] == ["straggler", "exclude", "sigterm", "straggler"]
    assert all(isinstance(event, NodeStaying) for event in heard[1:])
