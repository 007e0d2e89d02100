"""``elastic demo`` as a stranger runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import arenas, run, started

from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store


@pytest.mark.parametrize("kill", ["node", "rank"])
def test_the_demo_loses_what_it_is_told_to_and_proves_that_no_sample_was_lost(tmp_path: Path, kill: str) -> None:
    code, demo = run(
        tmp_path, "demo", "--kill", kill, "--steps", "160", "--storage", str(tmp_path / "s"), "--json", deadline_s=180
    )
    assert code == 0, demo.shown
    found = demo.answer
    assert (found["audit"]["repeated"], found["audit"]["skipped"]) == (0, 0)
    assert found["audit"]["samples"] == 160 * 16
    assert [incident["kind"] for incident in found["incidents"]] == [kill]
    assert found["incidents"][0]["rung"] in ("shrink", "replace")
    assert found["kill_to_first_step_s"] >= found["incidents"][0]["rto_s"] > 0
    assert found["loss"]["last"] < found["loss"]["first"]
    assert found["snapshots"]["node"] >= found["snapshots"]["remote"] > 0
    assert found["snapshots"]["stall_s_median"] > 0
    assert 0 < found["goodput"] <= 1
    assert Path(found["storage"]) == tmp_path / "s"
    assert demo.left() == []
    assert memory_of(tmp_path / "s") == []

    code, status = run(tmp_path, "status", "demo", "--storage", found["storage"], "--json")
    assert code == 0
    assert status.answer["durable"][0]["step"] == 160


def test_ctrl_c_in_the_middle_of_the_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path, "demo", "--storage", str(tmp_path / "s")) as demo:
        demo.shows("KILLED", 120)
        demo.interrupt()
        assert demo.ends(30) == 130
        assert demo.left() == []
    assert memory_of(tmp_path / "s") == []


def memory_of(storage: Path) -> list[str]:
    """Arenas of all nodes that held a snapshot of this demo; others of this machine may run one, too."""
    records = journal_records(open_store(str(storage)), "demo")
    places = [record["places"].values() for record in records if record["kind"] == "committed"]
    nodes = {node[:12] for held in places for holders in held for node in holders}
    assert nodes
    return [path for path in arenas("demo") if path.rpartition("-")[2] in nodes]
