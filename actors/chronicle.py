"""What a run tells of itself: generations, incidents, snapshots, metrics; the status now and the result at the end."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from actors.journal_writer import JournalWriter
from elastic.errors import ClusterError, ConfigError, DeterministicFailure, ElasticError, SnapshotError, TrainingFailed
from elastic.metric_rows import MetricRows
from elastic.protocol import run_lifecycle as life
from elastic.protocol.fitness import cooling
from elastic.protocol.incident import Incident
from elastic.protocol.membership import WARM, smallest
from elastic.protocol.run_lifecycle import RunState
from elastic.protocol.snapshot_round import RoundState
from elastic.result import OWN_COLUMNS, GenerationReport, IncidentReport, Result, SnapshotReport, StragglerReport
from elastic.snapshot.manifest import SnapshotRef
from elastic.step_metrics import Row

MOST_SNAPSHOTS = 5_000
"""Whose reports are kept in memory; beyond that the older half is thinned. The journal has all of them."""
RECENT_STEPS = 20
BOUNDARY_S = 0.5
"""What a stop at a boundary takes beside its steps and its snapshot: messages and the journal."""
ORDINARY = ("a stop comes first", "the ranks reached their last step", "the generation ended", "a survivor was lost")
"""Reasons to give up a snapshot that something else tells better."""
_DECISIONS = (life.BeginGeneration, life.EndRun, life.KillMember)


class Chronicle:
    """One controller's account. Times are seconds since the controller began, unless named ``at``."""

    def __init__(self, run: str, storage: str) -> None:
        self.run, self.storage = run, storage
        self.result: Result | None = None
        self.step = 0
        self.step_s = 0.0
        self.samples = 0
        self.last_restore: dict[str, Any] | None = None
        self.entry_step = 0
        self._began_at: float | None = None
        self._first_step_at: float | None = None
        self._last_seen_at = 0.0
        self._rows = MetricRows()
        self._restored_step = 0
        self._generations: list[GenerationReport] = []
        self._incidents: list[IncidentReport] = []
        self._snapshots: list[SnapshotReport] = []
        self._committed = 0
        self._notices: list[dict[str, Any]] = []
        self._stragglers: dict[tuple[int, str, int], StragglerReport] = {}
        self._newest_durable: SnapshotRef | None = None
        self._alarms: deque[str] = deque(maxlen=20)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RECENT_STEPS)

    # --- what happens --------------------------------------------------------------------------------------------

    def decisions(
        self, event: Any, before: RunState, after: RunState, commands: Sequence[Any], journal: JournalWriter
    ) -> str:
        """Note what must be in the journal before it is acted on; a text for the log where there is any."""
        if isinstance(event, life.Entered):
            self.entry_step = event.step
        made = [command for command in commands if isinstance(command, _DECISIONS)]
        if isinstance(event, (life.ResizeAsked, life.StopAsked, life.NodeLeaving, life.NodeStaying)):
            journal.note("asked", what=type(event).__name__, workers=getattr(event, "workers", None))
            made.append(event)
        if after.phase == life.GATHERING and made:
            # Who is sent away between two generations was not lost: a successor must know that the last one is over.
            journal.note("between", decided=[type(command).__name__ for command in made])
        for command in made:
            if isinstance(command, life.BeginGeneration):
                journal.note(
                    "begun",
                    generation=command.generation,
                    world_size=command.mesh.world_size,
                    mesh=str(command.mesh),
                    ranks=list(command.ranks),
                    nodes=[after.members[name].node for name in command.ranks if name in after.members],
                    restore_step=command.restore.step if command.restore else None,
                    tier=command.restore.tier if command.restore else None,
                    reason=command.reason,
                )
        return ", ".join(type(command).__name__ for command in made)

    def began(self, command: life.BeginGeneration, nodes: tuple[str, ...], at: float) -> None:
        """A generation was begun."""
        self._began_at = at if self._began_at is None else self._began_at
        restore = command.restore
        if restore is not None:
            self.step = self._restored_step = restore.step
            # Steps that are done again do not count twice.
            self._rows.drop_after(restore.step)
        self._recent.clear()
        self._generations.append(
            GenerationReport(
                command.generation,
                command.mesh.world_size,
                str(command.mesh),
                nodes,
                command.reason,
                at - self._began_at,
                restore.step if restore else 0,
                restore.tier if restore else "",
            )
        )

    def restored(self, generation: int, report: Mapping[str, Any]) -> None:
        """Rank 0 has restored its state: how, and what was not as it was saved."""
        self.last_restore = dict(report)
        if self._generations and self._generations[-1].generation == generation:
            self._generations[-1] = replace(self._generations[-1], restored_how=str(report.get("text", "")))

    def measured(self, generation: int, samples: int, rows: Sequence[Row], at: float, rank: int = 0) -> None:
        """Rows of finished steps, from ``rank``. What an older generation tells late counts as far as its steps do."""
        if self._generations and generation < self._generations[-1].generation:
            for row in rows:
                if row[0] <= self._restored_step and not self._rows.get(row[0]):
                    self._rows.put(row[0], _as_told(row, rank))
            return
        for row in rows:
            self._rows.put(row[0], _as_told(row, rank))
        if rows:
            self.step, self.samples, self._last_seen_at = rows[-1][0], samples, at
            if self._first_step_at is None:
                self._first_step_at = at - sum(seconds for _, seconds, _ in rows)
            self._recent.append((at, self.step, samples))
            last = [seconds for _, seconds, _ in rows[-RECENT_STEPS:]]
            self.step_s = sum(last) / len(last)

    def incident(self, incident: Incident) -> IncidentReport:
        """An incident is over."""
        report = IncidentReport(
            kind=incident.kind,
            rung=incident.rung,
            why=incident.why,
            old_world_size=incident.old_world_size,
            new_world_size=incident.new_world_size,
            furthest_step=incident.furthest_step,
            restored_step=incident.restored_step,
            steps_lost=incident.steps_lost,
            rto_s=incident.rto_s,
            split=incident.split(),
            at_s=incident.opened_at - (self._began_at or 0.0),
            restored_from=self._generations[-1].restored_from if self._generations else "",
            not_live=incident.not_live,
            failure_class=incident.culprit.failure_class,
            rank=incident.culprit.rank,
            node=incident.culprit.node,
            traceback=incident.culprit.traceback,
            stacks=incident.stacks,
        )
        self._incidents.append(report)
        return report

    def committed(self, state: RoundState, seconds: float, at: float) -> SnapshotReport:
        """A snapshot was committed in node memory, so long after its round was opened."""
        stall = max((report.stall_s for report in state.reports.values()), default=0.0)
        drain = max((sum(report.drain_s.values()) for report in state.reports.values()), default=0.0)
        report = SnapshotReport(
            attempt=state.attempt,
            step=state.step,
            purpose=state.purpose,
            generation=state.generation,
            nbytes=sum(report.nbytes for report in state.reports.values()),
            stall_s=stall,
            drain_s=drain,
            copies=min((len(nodes) for nodes in state.places.values()), default=0),
            at_s=at - (self._began_at or at),
            parts_s=_longest(part for r in state.reports.values() for part in (r.stall_parts_s, r.drain_s)),
        )
        self._snapshots.append(report)
        self._committed += 1
        if len(self._snapshots) > MOST_SNAPSHOTS:
            del self._snapshots[: MOST_SNAPSHOTS // 2 : 2]
        return report

    def metrics_of(self, step: int) -> dict[str, float]:
        """What was reported in the step that ends at boundary ``step``, as far as it is a finite number."""
        row = self._rows.get(step)
        return {name: value for name, value in row.items() if name not in OWN_COLUMNS and math.isfinite(value)}

    def durable(self, ref: SnapshotRef, seconds: float, parts_s: Mapping[str, float], written_bytes: int) -> None:
        """A snapshot was committed in durable storage."""
        self._newest_durable = ref
        for index in range(len(self._snapshots) - 1, -1, -1):
            if self._snapshots[index].attempt == ref.attempt:
                known = self._snapshots[index]
                self._snapshots[index] = replace(
                    known,
                    remote=True,
                    upload_s=seconds,
                    written_bytes=written_bytes,
                    parts_s={**known.parts_s, **parts_s},
                )
                break

    def notice_over(self, story: dict[str, Any]) -> None:
        """Word that nodes go away has led to something."""
        self._notices.append(story)

    def straggler(self, report: StragglerReport) -> None:
        """A rank was slow for one window more; what was told of the windows before becomes part of it."""
        self._stragglers[report.generation, report.member, report.from_step] = report

    def boundary_takes_s(self) -> tuple[float, float]:
        """Seconds until a stop at the next boundary is committed in node memory, and of an upload, by the longest of
        the last ones."""
        snapshots = self._snapshots[-5:]
        copy = max((snapshot.stall_s + snapshot.drain_s for snapshot in snapshots), default=0.0)
        upload = max((snapshot.upload_s for snapshot in self._snapshots[-20:]), default=0.0)
        return BOUNDARY_S + 2 * self.step_s + copy, upload

    def abandoned(self, state: RoundState) -> None:
        """A snapshot attempt was given up. Only where that is not in the course of things should a person see it."""
        if not state.reason.startswith(ORDINARY):
            self.alarm(f"snapshot ({state.purpose}) given up: {state.reason}")

    def alarm(self, text: str) -> None:
        """Something a person should see; training goes on."""
        self._alarms.append(text)

    # --- what a predecessor knew ---------------------------------------------------------------------------------

    def adopted(self, state: RunState, step: int, entry_step: int, began_at: float) -> None:
        """A new controller goes on with ``state``; ranks had come as far as ``step`` at least. ``began_at``: when the
        first controller began, on this one's clock."""
        self.step, self.entry_step, self._began_at = step, entry_step, began_at
        restore = state.restoring
        self._restored_step = restore.step if restore else 0
        if state.generation:
            nodes = tuple(state.members[name].node for name in state.ranks if name in state.members)
            mesh = state.mesh
            tier = restore.tier if restore else ""
            self._generations.append(
                GenerationReport(
                    state.generation,
                    len(state.ranks),
                    str(mesh) if mesh else "",
                    nodes,
                    "adopted",
                    0.0,
                    self._restored_step,
                    tier,
                )
            )

    def remember(self, records: Iterable[Mapping[str, Any]], refs: Sequence[SnapshotRef], began_wall_s: float) -> None:
        """What the journal tells of the controllers before this one, in the order in which they wrote it; the first
        of them began at ``began_wall_s``."""
        generations: dict[int, GenerationReport] = {}
        incidents: list[IncidentReport] = []
        snapshots: dict[str, SnapshotReport] = {}
        durable: list[Mapping[str, Any]] = []
        rows = MetricRows()
        began_at = self._began_at or 0.0
        for record in records:
            kind = record["kind"]
            if kind == "begun":
                restored = record["restore_step"] or 0
                if record["generation"] not in generations:
                    rows.drop_after(restored)
                    generations[record["generation"]] = GenerationReport(
                        record["generation"],
                        record["world_size"],
                        record["mesh"],
                        tuple(record["nodes"]),
                        record["reason"],
                        record["t"] - began_wall_s,
                        restored,
                        record["tier"] or "",
                    )
            elif kind == "metrics":
                for row in record["rows"]:
                    if not rows:
                        self._first_step_at = began_at + record["t"] - began_wall_s - row[1]
                    rows.put(row[0], _as_told(row, record.get("rank", 0)))
            elif kind == "incident":
                incidents.append(IncidentReport(**record["incident"]))
            elif kind == "snapshot":
                snapshots[record["attempt"]] = SnapshotReport(**_told(record), at_s=record["t"] - began_wall_s)
            elif kind == "durable":
                durable.append(record)
            elif kind == "evacuation":
                self._notices.append(_told(record))
            elif kind == "straggler":
                self.straggler(StragglerReport(**_told(record)))
            elif kind in ("alarm", "abandoned") and not record["reason"].startswith(ORDINARY):
                self._alarms.appendleft(record["reason"])
        for record in durable:
            if (report := snapshots.get(record["attempt"])) is not None:
                snapshots[report.attempt] = replace(
                    report,
                    remote=True,
                    upload_s=record["seconds"],
                    written_bytes=record["written_bytes"],
                    parts_s={**report.parts_s, **record["parts_s"]},
                )
        kept = next((ref for ref in refs if any(ref.attempt == record["attempt"] for record in durable)), None)
        if self._newest_durable is None or (kept is not None and kept.step > self._newest_durable.step):
            self._newest_durable = kept
        own = {report.generation: report for report in self._generations if report.generation not in generations}
        self._generations = [*generations.values(), *own.values()]
        self._incidents = [*incidents, *self._incidents]
        told = {report.attempt for report in self._snapshots}
        earlier = [report for report in snapshots.values() if report.attempt not in told]
        self._committed += len(earlier)
        self._snapshots = [*earlier, *self._snapshots]
        if own:
            rows.drop_after(min(report.restored_step for report in own.values()))
        for step, row in self._rows:
            rows.put(step, row)
        self._rows = rows

    # --- what is told --------------------------------------------------------------------------------------------

    def status(self, state: RunState, cadence: Any, uploading: bool, journal_lag: str, at: float) -> dict[str, Any]:
        """The run now; JSON-able."""
        node = self._snapshots[-1] if self._snapshots else None
        row = self._rows.get(self.step)
        rate = 0.0
        if len(self._recent) > 1:
            (first_at, _, first), (last_at, _, last) = self._recent[0], self._recent[-1]
            rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        due = None
        if cadence is not None and state.phase == life.RUNNING:
            due = max(0.0, cadence.due_in(at, self.step, self.step_s))
        return {
            "run": self.run,
            "phase": state.phase,
            # As told, not as decided: between the two the decision is being written to the journal.
            "generation": self._generations[-1].generation if self._generations else 0,
            "began_at_step": self._restored_step,
            "world_size": len(state.ranks) if state.phase != life.GATHERING else 0,
            "mesh": str(state.mesh) if state.mesh else "",
            "restored": self.last_restore,
            "mesh_reason": self._generations[-1].reason if self._generations else "",
            "spares": sum(member.phase == WARM for member in state.members.values()),
            "target": state.target,
            "smallest": smallest(state.limits.mesh, state.limits.min_workers, state.limits.max_workers),
            "nodes": len(state.nodes),
            "members": {m.name: {"node": m.node, "phase": m.phase} for m in state.members.values()},
            "step": self.step,
            "step_s": self.step_s,
            "samples": self.samples,
            "samples_per_s": rate,
            "metrics": {k: v for k, v in row.items() if k not in OWN_COLUMNS},
            "snapshot_node": asdict(node) if node else None,
            "snapshot_remote_step": self._newest_durable.step if self._newest_durable else None,
            "snapshots": self._committed,
            "uploading": uploading,
            "next_snapshot_s": due,
            "interval": cadence.to_json() if cadence is not None else None,
            "incidents": [asdict(incident) for incident in self._incidents],
            "notices": list(self._notices),
            "stragglers": [{**asdict(report), "text": str(report)} for report in self._stragglers.values()],
            "node_list": node_list(state, at),
            "alarms": list(self._alarms),
            "journal_lag": journal_lag,
            "wall_s": at - self._began_at if self._began_at is not None else 0.0,
            "result": {"status": self.result.status, "reason": self.result.reason} if self.result else None,
        }

    def ended(self, command: life.EndRun, error: ElasticError | None, cadence: Any, at: float) -> None:
        """Make the result."""
        durable = self._newest_durable
        wall = self._last_seen_at - self._first_step_at if self._first_step_at is not None else 0.0
        rows = [row for _, row in self._rows]
        self.result = Result(
            run=self.run,
            status=command.status,
            reason=command.reason,
            step=max(self.step, durable.step if durable and command.status != "failed" else 0),
            storage=self.storage,
            snapshot=f"snapshots/{durable.directory}/{durable.attempt}" if durable else "",
            error=error or failure_of(command),
            metrics=tuple(rows),
            generations=tuple(self._generations),
            incidents=tuple(self._incidents),
            snapshots=tuple(self._snapshots),
            notices=tuple(self._notices),
            stragglers=tuple(self._stragglers.values()),
            interval_reasons=tuple(cadence.reasons) if cadence is not None else (),
            wall_s=wall,
            productive_s=min(wall, sum(row["step_s"] for row in rows)),
        )


def node_list(state: RunState, at: float) -> list[dict[str, Any]]:
    """What the run makes of each node; JSON-able."""
    cools = {node: state.deadlines[f"cool {node}"] - at for node in cooling(state)}
    failed = Counter(node for _, node in state.node_failures)
    return [
        {
            "node": node.name,
            "capacity": node.capacity,
            "domain": node.domain,
            "store": node.store,
            "members": sorted(member.name for member in state.members.values() if member.node == node.name),
            "leaving": [
                {"by": n.by, "why": n.why, "left_s": n.deadline - at if math.isfinite(n.deadline) else None}
                for n in state.notices
                if n.node == node.name
            ],
            "failures": failed[node.name],
            "left_alone_s": max(0.0, cools.get(node.name, 0.0)),
        }
        for node in state.nodes.values()
    ]


def _as_told(row: Row, rank: int) -> dict[str, float]:
    """A row as the result has it."""
    step, seconds, metrics = row
    return {"step": step, "step_s": seconds, **metrics, **({"filled_from": rank} if rank else {})}


def _longest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """For each part of a snapshot the longest that any rank took."""
    found: dict[str, float] = {}
    for times in parts:
        for name, seconds in times.items():
            found[name] = max(found.get(name, 0.0), seconds)
    return found


def failure_of(command: life.EndRun) -> ElasticError | None:
    """The error that a failed run ends with."""
    if command.status != "failed":
        return None
    departure = command.departure
    if command.kind == "user" and departure is not None:
        kind = DeterministicFailure if command.deterministic else TrainingFailed
        return kind(departure.rank, departure.step, departure.error, departure.traceback, command.reason)
    if departure is not None and departure.failure is not None:
        return departure.failure
    if command.kind == "snapshot":
        return SnapshotError(command.reason)
    if command.kind == "cluster":
        return ClusterError(command.reason, "add nodes or lower num_workers, and start the run again: it resumes")
    return ConfigError("train_loop", departure.error if departure is not None else "", command.reason)


def _told(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record of the journal says, without what every record has."""
    return {name: value for name, value in record.items() if name not in ("kind", "t", "controller")}
