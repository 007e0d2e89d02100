"""``elastic snapshots verify --resume``: whether a snapshot really resumes, tried with its own train function.

The exit code is 0 if it does within the contract, 5 if it does not, 3 if the train function raised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elastic.cli.output import print_json, say
from elastic.cli.run_settings import pairs_of, read_file, train_config
from elastic.cli.snapshots_find import Found
from elastic.cli.snapshots_text import columns
from elastic.errors import ConfigError, RestoreError

if TYPE_CHECKING:
    from elastic.mesh import Mesh
    from elastic.resume_check.compare import Check, ResumeReport
    from elastic.snapshot.manifest import SnapshotRef


def check_resume(
    found: Found,
    ref: SnapshotRef,
    target: str,
    *,
    steps: int,
    meshes: Sequence[str],
    tolerances: Sequence[str],
    config: Path | None,
    assignments: Sequence[str],
    report: Path | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Run the recovery check and tell its verdict."""
    from elastic.resume_check.check import recovery_check

    place, separator, name = target.rpartition(":")
    if place.endswith(".py"):
        target = f"{os.path.abspath(place)}{separator}{name}"
    if steps < 1:
        raise ConfigError("--steps", steps, "use 1 or more")
    result = recovery_check(
        found.store,
        found.run,
        ref,
        target,
        config=train_config(read_file(config) if config else {}, assignments),
        steps=steps,
        meshes=[_mesh(text) for text in meshes],
        tolerances={name: value for text in tolerances for name, value in pairs_of(text, "--tolerance", float).items()},
        timeout_s=timeout_s,
        say=say,
    )
    exit_code = 0 if result.ok else RestoreError.exit_code
    answer: dict[str, Any] = {**result.to_json(), "storage": found.store.url, "exit_code": exit_code}
    if report is not None:
        report.write_text(json.dumps(answer, indent=2, default=str) + "\n")
    if as_json:
        print_json(answer)
    else:
        for text in lines(result):
            print(text)
    if exit_code:
        raise typer.Exit(exit_code)


def _mesh(text: str) -> Mesh:
    from elastic.mesh import Mesh, check_template

    template = check_template(pairs_of(text, "--mesh", int))
    if -1 in template.values():
        raise ConfigError("--mesh", text, "name every size")
    return Mesh(tuple(template.items()))


def lines(report: ResumeReport) -> list[str]:
    """The report, in words; what failed last, so that it is seen."""
    rows = [(_word(check), check.what, check.where, _detail(check)) for check in report.checks]
    text = [f"snapshot of step {report.step:,} of run {report.run!r}, restored on {', '.join(report.meshes)}:"]
    text += [f"  {line}" for line in columns(("", "what", "where", ""), rows, left=(0, 1, 2, 3))]
    text += [f"  note: {note}" for note in report.notes]
    failed = [check for check in report.checks if check.ok is False]
    if failed:
        text += [f"  FAILED: {check.what} on {check.where}: {_detail(check)}" for check in failed]
        text.append("verdict: DOES NOT RESUME as it should")
    else:
        skipped = sum(check.ok is None for check in report.checks)
        text.append(f"verdict: resumes; {len(report.checks) - skipped} comparisons hold, {skipped} could not be made")
    return text


def _word(check: Check) -> str:
    return {True: "ok", False: "FAILED", None: "-"}[check.ok]


def _detail(check: Check) -> str:
    return check.detail if check.tolerance is None else f"{check.detail} (allowed {check.tolerance:g})"
