"""``elastic snapshots`` on snapshots that the engine made: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_snapshots import RUN, SnapshotMaker
from typer.testing import CliRunner

from elastic.cli.main import build
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.local_blobs import LocalBlobs


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[SnapshotMaker]:
    made = SnapshotMaker(tmp_path / "arena")
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path / "store")


@pytest.fixture
def refs(maker: SnapshotMaker, store: LocalBlobs) -> list[SnapshotRef]:
    """Steps 0, 10, 20; each changes the bias alone and refers to the one before."""
    found = [maker.commit(store, 0, metrics={"loss": 3.0})]
    values = maker.values(0)
    for step, loss in ((10, 1.0), (20, 2.0)):
        values["linear.bias"] = maker.values(step)["linear.bias"]
        found.append(maker.commit(store, step, values, previous=found[-1], metrics={"loss": loss}, now_s=1e6 + step))
    return found


Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Run a sub-command with --json on the store; check its exit code and return its last line as an object."""

    def run(*arguments: str, exit_code: int = 0) -> Any:
        command = ["snapshots", *arguments, "--storage", str(tmp_path / "store"), "--json"]
        shown = CliRunner().invoke(build(), command)
        assert shown.exit_code == exit_code, shown.output
        return json.loads(shown.stdout.splitlines()[-1])

    return run


@pytest.fixture
def text(tmp_path: Path) -> Call:
    """The same without --json: what a person reads on both streams."""

    def run(*arguments: str, exit_code: int = 0) -> str:
        shown = CliRunner().invoke(build(), ["snapshots", *arguments, "--storage", str(tmp_path / "store")])
        assert shown.exit_code == exit_code, shown.output
        return shown.output

    return run


def damage(store: LocalBlobs, ref: SnapshotRef, ending: str) -> str:
    """Flip one bit of the first file of the attempt with this ending. Its key."""
    key = next(key for key in store.list(ref.prefix) if key.endswith(ending))
    body = bytearray(store.get(key))
    body[len(body) // 2] ^= 1
    store.put(key, body)
    return key


# ---- list


def test_list_tells_each_snapshot_with_its_cost_and_what_it_survives(refs: list[SnapshotRef], call: Call) -> None:
    found = call("list")
    assert (found["run"], found["damaged"]) == (RUN, [])
    assert [row["step"] for row in found["snapshots"]] == [20, 10, 0]
    newest, _, oldest = found["snapshots"]
    assert (newest["depth"], newest["new_bytes"], newest["bytes"]) == (2, 56, oldest["bytes"])
    assert oldest["new_bytes"] == oldest["bytes"] == 50 * 16 * 4 + 12 * 10 * 4 + 7 * 8 + 8 + 15
    assert {row["tier"] for row in found["snapshots"]} == {"durable"}
    assert {"process", "cluster"} <= set(newest["survives"])
    assert newest["age_s"] > 0
    assert not newest["pinned"]


def test_list_is_a_table_for_a_person(refs: list[SnapshotRef], text: Call) -> None:
    shown = text("list")
    assert refs[2].snapshot_id in shown
    assert "survives the loss of" in shown
    assert "56 B" in shown


def test_a_damaged_marker_and_a_damaged_manifest_are_listed_as_such(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call, text: Call
) -> None:
    store.put(f"{refs[0].snapshots}{refs[0].directory}/COMMITTED", b"{}")
    damage(store, refs[1], "manifest.json")
    found = call("list")
    assert [entry["directory"] for entry in found["damaged"]] == [refs[0].directory]
    assert [row["survives"] != [] for row in found["snapshots"]] == [True, False]
    assert "digest" in found["snapshots"][1]["problem"]
    assert "damaged" in text("list")


def test_without_a_cluster_there_is_no_node_tier_and_no_error(
    refs: list[SnapshotRef], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic.cli import snapshots_list
    from elastic.errors import ClusterError

    def no_cluster(address: str | None, run: str | None) -> Any:
        raise ClusterError("no cluster is running on this machine")

    monkeypatch.setattr(snapshots_list, "run_handle", no_cluster)
    assert len(call("list", "--address", "10.0.0.1:6379")["snapshots"]) == 3


def test_the_node_tier_of_a_live_run_is_listed_first(
    refs: list[SnapshotRef], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from elastic.cli import snapshots_list

    node = {"step": 25, "attempt": "g00001-000009", "at_s": 90.0, "nbytes": 4096, "copies": 2}
    handle = SimpleNamespace(status=lambda: {"snapshot_node": node, "wall_s": 100.0})
    monkeypatch.setattr(snapshots_list, "run_handle", lambda address, run: nullcontext(handle))
    first = call("list", "--address", "127.0.0.1:1")["snapshots"][0]
    assert (first["tier"], first["step"], first["bytes"]) == ("node", 25, 4096)
    assert first["survives"] == ["process", "node"]
    assert first["age_s"] == pytest.approx(10.0)


# ---- which run, which snapshot


def test_the_run_is_inferred_only_where_there_is_one(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call, tmp_path: Path
) -> None:
    store.put("other/run.json", b"{}")
    found = call("list", exit_code=2)
    assert f"it holds {RUN}, other" in found["error"]["text"]
    assert call("list", RUN)["run"] == call("list", "--run", RUN)["run"] == RUN
    assert call("list", "other")["snapshots"] == []
    assert "no run 'third'" in call("list", "third", exit_code=6)["error"]["text"]


def test_a_snapshot_is_named_by_step_by_id_and_as_the_latest(refs: list[SnapshotRef], call: Call) -> None:
    for name in ("20", "latest", refs[2].snapshot_id, refs[2].directory):
        assert call("show", name)["step"] == 20
    assert call("show")["step"] == 20
    assert call("show", "0")["step"] == 0
    found = call("show", "15", exit_code=2)
    assert found["error"]["text"] == f"STEP|ID = '15': run {RUN!r} has snapshots of step 20, 10, 0"
    common = refs[0].snapshot_id[:6]  # with a letter in it: digits alone are a step
    assert "say more of it" in call("show", common, exit_code=2)["error"]["text"]


def test_an_error_is_one_sentence_for_a_person(refs: list[SnapshotRef], text: Call) -> None:
    assert text("show", "15", exit_code=2).count("\n") == 1
    assert text("list", "--run", "a/b", exit_code=4).startswith("error: this name cannot be a file's")


def test_a_storage_that_is_not_said_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = CliRunner().invoke(build(), ["snapshots", "list"])
    assert shown.exit_code == 2
    assert "--storage" in shown.stderr


# ---- show


def test_show_tells_tensors_boxes_moment_mesh_versions_parents_and_files(refs: list[SnapshotRef], call: Call) -> None:
    found = call("show", "20")
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert (tensors["linear.weight"]["dtype"], tensors["linear.weight"]["shape"]) == ("float32", [12, 10])
    boxes = tensors["linear.weight"]["boxes"]
    assert sum(box["shape"][0] * box["shape"][1] for box in boxes) == 120
    assert {box["offset"][1] for box in boxes} == {0, 5}
    assert tensors["step"]["boxes"][0]["shape"] == []
    assert found["aliases"] == {"head.weight": "embedding.weight"}
    assert found["point"]["data_cursor"] == 160
    assert found["mesh"] == {"dp": 2, "tp": 2}
    assert found["versions"]["torch"] == "2"
    assert list(found["parents"]) == [refs[0].directory]
    assert {entry["kind"] for entry in found["files"]} == {"pack", "chunks", "objects", "tensors"}
    assert found["has"]["optimizer"]


def test_show_lists_all_tensors_when_asked(refs: list[SnapshotRef], text: Call) -> None:
    shown = text("show", "--tensors")
    assert "[0:12, 0:5]" in shown or "[0:6, 0:5]" in shown
    assert "head.weight is embedding.weight" in shown
    assert "dp2·tp2, 4 ranks" in shown


# ---- verify


def test_verify_is_silent_about_damage_only_where_it_did_not_look(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call, text: Call
) -> None:
    assert call("verify", "--all", "--deep")["ok"]
    key = damage(store, refs[0], ".pack")
    assert call("verify", "--all")["ok"]
    found = call("verify", "--all", "--deep", exit_code=5)
    assert found["exit_code"] == 5
    assert [report["ok"] for report in found["snapshots"]] == [False, False, False]
    (problem,) = found["snapshots"][2]["problems"]
    assert "tensor '" in problem
    assert "chunk [" in problem
    assert key.partition("/snapshots/")[2] in problem
    assert "DAMAGED" in text("verify", "--deep", exit_code=5)


def test_verify_reads_every_chunk_of_the_one_that_is_named(
    refs: list[SnapshotRef], call: Call, store: LocalBlobs
) -> None:
    (report,) = call("verify", refs[1].snapshot_id, "--deep")["snapshots"]
    manifest = SnapshotCatalog(store, RUN).manifest(refs[1])
    assert (report["chunks"], report["bytes"]) == (manifest.counts["chunks"], manifest.counts["bytes"])


@pytest.mark.parametrize("ending", [".parquet", "objects.json", "manifest.json"])
def test_a_damaged_table_is_found_without_reading_chunks(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call, ending: str
) -> None:
    damage(store, refs[2], ending)
    found = call("verify", "20", exit_code=5)
    assert found["snapshots"][0]["problems"]
    assert call("verify", "10")["ok"]


def test_a_damaged_marker_fails_the_check_of_all(refs: list[SnapshotRef], store: LocalBlobs, call: Call) -> None:
    store.put(f"{refs[0].snapshots}{refs[0].directory}/COMMITTED", b"not a marker")
    assert refs[0].directory in call("verify", "--all", exit_code=5)["damaged_markers"]
    assert "damaged" in call("verify", "0", exit_code=5)["error"]["text"]
    assert call("verify")["ok"]


# ---- diff


def test_diff_tells_what_changed_between_two_steps(refs: list[SnapshotRef], call: Call, text: Call) -> None:
    found = call("diff", "0", "20")
    assert [change["name"] for change in found["changed"]] == ["linear.bias"]
    assert (found["unchanged"], found["chunks_read"]) == (4, 1)
    assert (found["a"]["step"], found["b"]["step"]) == (0, 20)
    assert call("diff", "20", "latest")["same"]
    assert "linear.bias" in text("diff", "0", "latest")
    assert "no difference" in text("diff", "10", "10")


def test_diff_compares_with_another_run_of_the_storage(refs: list[SnapshotRef], store: LocalBlobs, call: Call) -> None:
    store.put("other/run.json", b"{}")
    error = call("diff", "0", "0", "--run", RUN, "--to-run", "other", exit_code=2)["error"]["text"]
    assert "run 'other' has no committed snapshot" in error
    assert not call("diff", "0", "20", "--run", RUN, "--to-run", RUN, "--names", "linear.b")["same"]
    assert call("diff", "0", "20", "--run", RUN, "--to-run", RUN, "--names", "embedding")["same"]


# ---- pin, unpin, gc


def test_a_pinned_snapshot_outlives_every_rule_until_it_is_unpinned(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call
) -> None:
    assert call("pin", "0")["pinned"]
    assert [row["pinned"] for row in call("list")["snapshots"]] == [False, False, True]
    found = call("gc", "--keep", "1", "--grace", "0")
    assert {entry["step"]: entry["reason"] for entry in found["keep"]} == {0: "pinned", 20: "keep_last(1)"}
    assert [entry["step"] for entry in found["drop"]] == [10]
    assert not call("unpin", "0")["pinned"]
    assert [entry["step"] for entry in call("gc", "--keep", "1", "--grace", "0")["drop"]] == [0]
    assert call("verify", "--all", "--deep")["ok"]


def test_a_dry_run_says_what_would_go_and_touches_nothing(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call, text: Call
) -> None:
    before = list(store.list(""))
    planned = call("gc", "--keep", "1", "--dry-run", "--grace", "0")
    assert planned["dry_run"]
    assert planned["delete"]
    assert list(store.list("")) == before
    shown = text("gc", "--keep", "1", "--dry-run")
    assert "would let go of step 10" in shown
    assert "keeps step 20" in shown
    done = call("gc", "--keep", "1", "--grace", "0")
    assert done["delete"] == planned["delete"]
    assert done["delete_bytes"] == planned["delete_bytes"] > 0
    assert not set(done["delete"]) & set(store.list(""))


def test_files_stay_for_the_grace_time_and_go_when_gc_runs_again(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call
) -> None:
    first = call("gc", "--keep", "1")
    assert first["delete"] == []
    assert first["delete_after_grace"]
    assert set(first["delete_after_grace"]) <= set(store.list(""))
    second = call("gc", "--keep", "1", "--grace", "0")
    assert set(first["delete_after_grace"]) <= set(second["delete"])
    assert call("verify", "--all", "--deep")["ok"]


def test_rules_add_up_and_no_rule_removes_the_last_good_snapshot(
    refs: list[SnapshotRef], store: LocalBlobs, call: Call
) -> None:
    found = call("gc", "--best", "loss", "--every-steps", "1000", "--dry-run")
    assert [entry["step"] for entry in found["keep"]] == [0, 10, 20]
    found = call("gc", "--best-largest", "loss:1", "--dry-run")
    assert {entry["step"]: entry["reason"] for entry in found["keep"]}[20] == "the newest"
    damage(store, refs[2], "manifest.json")
    found = call("gc", "--keep", "1", "--grace", "0")
    assert [entry["step"] for entry in found["keep"]] == [10, 20]
    assert found["blocked"]
    assert found["delete"] == []
    assert call("verify", "10", "--deep")["ok"]


def test_without_a_rule_nothing_is_let_go(refs: list[SnapshotRef], call: Call) -> None:
    assert call("gc", "--grace", "0")["drop"] == []


@pytest.mark.parametrize("flags", [("--keep", "0"), ("--grace", "-1"), ("--best", "loss:x"), ("--every-hours", "0")])
def test_a_rule_that_makes_no_sense_is_refused(refs: list[SnapshotRef], call: Call, flags: tuple[str, ...]) -> None:
    assert call("gc", *flags, exit_code=2)["error"]["type"] == "ConfigError"


def test_what_a_live_run_is_writing_stays_even_without_grace(
    refs: list[SnapshotRef], store: LocalBlobs, maker: SnapshotMaker, call: Call
) -> None:
    from elastic.journal import encode

    attempt, _ = maker.take(30, generation=2)
    maker.upload(store, 30, attempt, 1e6 + 30)
    in_flight = [key for key in store.list("") if f"/{attempt}/" in key]
    assert in_flight
    store.put(f"{RUN}/journal/c0000000001-000000.jsonl", encode([{"kind": "begun", "t": 1.0, "generation": 2}]))
    call("gc", "--keep", "1", "--grace", "0")
    assert set(in_flight) <= set(store.list(""))
    store.put(
        f"{RUN}/journal/c0000000001-000001.jsonl",
        encode([{"kind": "ended", "t": 2.0, "status": "failed", "reason": "it was stopped"}]),
    )
    call("gc", "--keep", "1", "--grace", "0")
    assert not set(in_flight) & set(store.list(""))


def test_looking_needs_neither_torch_nor_ray(refs: list[SnapshotRef], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom elastic.cli.main import build\n"
        "for words in (['list'], ['show'], ['verify', '--deep'], ['gc', '--dry-run']):\n"
        "    build()(['snapshots', *words, '--storage', sys.argv[1]], standalone_mode=False)\n"
        "assert not {'torch', 'ray'} & set(sys.modules), sorted({'torch', 'ray'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True, capture_output=True)
