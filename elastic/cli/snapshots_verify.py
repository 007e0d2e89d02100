"""``elastic snapshots verify``: whether snapshots are whole, checked by a process that has nothing to do with the run.

The exit code is 0 if all are good and 5 if any is damaged; damage is named by tensor, chunk and file. A snapshot in
quarantine of which every byte was read and found good comes out of it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.cli.output import count, print_json, say, seconds
from elastic.cli.snapshots_find import WHICH, AsJson, Found, RunName, Storage, find
from elastic.cli.snapshots_resume import check_resume
from elastic.cli.snapshots_text import size
from elastic.errors import ConfigError, CorruptSnapshot

if TYPE_CHECKING:
    from elastic.snapshot.manifest import SnapshotRef
    from elastic.snapshot.verify import VerifyReport

SHOWN_PROBLEMS = 20
_RESUME = "Does it resume"


def verify_snapshots(
    which: Annotated[str | None, typer.Argument(metavar="STEP|ID", help=f"{WHICH} Default: latest.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every committed snapshot of the run.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every chunk, too; else files, sizes and coverage.")
    ] = False,
    storage: Storage = None,
    run: RunName = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="MODULE:FUNCTION",
            help="Take the next steps from it with this train function, on its own mesh and on another, and compare.",
            rich_help_panel=_RESUME,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="So many on each mesh.", rich_help_panel=_RESUME)] = 2,
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", help="The other mesh, as dp=2,tp=2; may be repeated.", rich_help_panel=_RESUME),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            help="loss=1e-6,outputs=1e-4,gradient_norm=1e-4,update=1e-3: beats the function's error_contract.",
            rich_help_panel=_RESUME,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="With the train function's config.", rich_help_panel=_RESUME)
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Into that config.", rich_help_panel=_RESUME),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write the whole report here, as JSON.", rich_help_panel=_RESUME)
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds for the steps on one mesh.", rich_help_panel=_RESUME)
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Marker, manifest, files, coverage; with --deep every byte, and what is good leaves quarantine. Exit code 5 if
    anything is damaged.

    With --resume also whether training goes on from it as it would have: the same state on two meshes, the same
    samples and generators, and loss, outputs, gradients and the next update within the error contract."""
    from elastic.snapshot.quarantine import release
    from elastic.snapshot.verify import verify

    if which and every:
        raise ConfigError("STEP|ID", which, "leave it out with --all")
    if resume and every:
        raise ConfigError("--resume", resume, "is for one snapshot; leave --all out")
    found = find(storage, run)
    if resume:
        (ref,) = chosen_one(found, which or "latest")
        check_resume(
            found,
            ref,
            resume,
            steps=steps,
            meshes=mesh or (),
            tolerances=tolerance or (),
            config=config,
            assignments=assignments or (),
            report=report,
            timeout_s=timeout_s,
            as_json=as_json,
        )
        return
    chosen = found.refs if every else chosen_one(found, which or "latest")
    damaged_markers = dict(found.catalog.quarantined)
    if not chosen and not damaged_markers:
        raise ConfigError("STEP|ID", which, f"run {found.run!r} has no committed snapshot")
    reports: list[VerifyReport] = []
    released: set[str] = set()
    for ref in chosen:
        reports.append(verify(found.store, found.run, ref, deep=deep))
        if ref.directory in found.catalog.failed and deep and reports[-1].ok:
            release(found.store, ref)
            released.add(ref.directory)
        if not as_json:
            for text in lines(reports[-1], *_quarantine(found, ref, released)):
                print(text, flush=True)
    ok = all(report.ok for report in reports) and not (every and damaged_markers)
    if as_json:
        print_json(
            {
                "run": found.run,
                "storage": found.store.url,
                "ok": ok,
                "deep": deep,
                "snapshots": [{**to_json(report), "released": report.ref.directory in released} for report in reports],
                "damaged_markers": damaged_markers,
                "exit_code": 0 if ok else CorruptSnapshot.exit_code,
            }
        )
    else:
        for directory, reason in damaged_markers.items():
            say(f"damaged: {directory}: {reason}")
    if not ok:
        raise typer.Exit(CorruptSnapshot.exit_code)


def chosen_one(found: Found, which: str) -> Sequence[SnapshotRef]:
    """The snapshot that ``which`` names. Raises CorruptSnapshot where only damaged markers are left."""
    if not found.refs and found.catalog.quarantined:
        directory, reason = next(iter(found.catalog.quarantined.items()))
        raise CorruptSnapshot(f"no marker of run {found.run!r} can be read: {reason}", directory)
    return [found.one(which)]


def to_json(report: VerifyReport) -> dict[str, Any]:
    """One report, JSON-able."""
    return {
        "step": report.ref.step,
        "id": report.ref.snapshot_id,
        "ok": report.ok,
        "problems": list(report.problems),
        "chunks": report.chunks,
        "bytes": report.nbytes,
        "seconds": report.seconds,
    }


def _quarantine(found: Found, ref: SnapshotRef, released: Container[str]) -> list[str]:
    """Where a snapshot stands that a run failed to restore."""
    if ref.directory in released:
        return ["  it is no longer in quarantine"]
    if ref.directory in found.catalog.failed:
        return [f"  in quarantine until --deep finds it whole: {found.catalog.failed[ref.directory]}"]
    return []


def lines(report: VerifyReport, *more: str) -> list[str]:
    """One report, in words."""
    name = f"step {report.ref.step:,} ({report.ref.snapshot_id})"
    read = f"{count(report.chunks, 'chunk')}, {size(report.nbytes)}" if report.deep else "files, sizes and coverage"
    if report.ok:
        return [f"{name}: good, {read} checked in {seconds(report.seconds)}", *more]
    text = [f"{name}: DAMAGED, {count(len(report.problems), 'problem')}", *more]
    text += [f"  {problem}" for problem in report.problems[:SHOWN_PROBLEMS]]
    if len(report.problems) > SHOWN_PROBLEMS:
        text.append(f"  and {len(report.problems) - SHOWN_PROBLEMS} more; see them with --json")
    return text
