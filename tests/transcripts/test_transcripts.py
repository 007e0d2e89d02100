"""Stories of a run, word for word: what happens, and exactly what is to be done about it.

Each ``*.txt`` beside this file holds stories. A story begins with ``# what it shows`` and a line of settings. A line
that begins with ``>`` is an event, seconds first; the lines below it are the phase, where it changed, and the commands
that it leads to. ``python tests/transcripts/test_transcripts.py`` writes the answers of today into the files: read the
difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ClusterError, CorruptSnapshot
from elastic.protocol import run_lifecycle as life
from elastic.protocol.machine import Machine
from elastic.protocol.run_state import Limits, RunState
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot

HERE = Path(__file__).parent


class Story:
    """One run, told in lines."""

    def __init__(self, settings: str) -> None:
        words = dict(word.split("=") for word in settings.split())
        low, high = (int(number) for number in words.get("workers", "1..2").split(".."))
        mesh = {"dp": -1, "tp": int(words["tp"])} if "tp" in words else {"dp": -1}
        limits = replace(
            Limits(mesh, low, high, replicas=int(words.get("replicas", "1"))),
            wait_for_workers_s=float(words.get("wait", "10")),
            hot_spares=int(words.get("spares", "0")),
            max_failures_without_progress=int(words.get("failures", "5")),
        )
        self.machine: Machine[RunState] = Machine("run", life.TABLE, RunState(limits, target=high))

    def tell(self, line: str) -> list[str]:
        """The answer to one event, as lines."""
        at, verb, *words = line.split()
        before = self.machine.state.phase
        commands = self.machine.handle(self._event(float(at), verb, words))
        after = self.machine.state.phase
        return ([f"  {after.upper()}"] if after != before else []) + [f"  {_say(command)}" for command in commands]

    def _event(self, at: float, verb: str, words: list[str]) -> Any:
        state = self.machine.state
        generation = state.generation
        text = " ".join(words[1:])
        if verb == "nodes":
            return life.ClusterSeen(at, {name: (int(n), name) for name, n in (word.split(":") for word in words)})
        if verb == "store":
            ready = words[1] == "ready"
            return life.StoreReady(at, words[0]) if ready else life.StoreLost(at, words[0], "the store is gone")
        if verb == "refuse":
            return life.NodeRefused(at, words[0], ClusterError(f"node {words[0]} has another torch"))
        if verb == "ready":
            return life.MemberReady(at, words[0])
        if verb == "unloadable":
            return life.EntryFailed(at, words[0], "ImportError: no module", "Traceback")
        if verb == "died":
            return life.MemberLost(at, words[0], f"{words[0]} died")
        if verb in ("formed", "entered", "first", "end"):
            kind = {"first": life.FirstStep, "end": life.AtEnd}.get(verb)
            if verb == "formed":
                return life.Formed(at, words[0], generation, 0.1)
            if verb == "entered":
                return life.Entered(at, words[0], generation, int(words[1]), 100)
            assert kind is not None
            return kind(at, words[0], generation, int(words[1]))
        if verb in ("interrupted", "finished", "error", "collateral", "unreadable"):
            rank = state.rank_of(words[0])
            assert rank is not None
            cause = "error" if verb == "collateral" else verb
            error = " ".join(words[2:])
            failure = CorruptSnapshot(error) if verb == "unreadable" else None
            departure = life.Departure(
                words[0], rank, cause, int(words[1]), at, error, collateral=verb == "collateral", failure=failure
            )
            return life.Departed(at, generation, departure)
        if verb == "committed":
            places = {int(rank): tuple(nodes.split("+")) for rank, nodes in (word.split(":") for word in words[2:])}
            return life.NodeCommitted(at, generation, NodeSnapshot(words[0], int(words[1]), places), state.round_open)
        if verb in ("abandoned", "unsealed"):
            return life.RoundAbandoned(at, generation, state.round_open, " ".join(words), verb == "unsealed")
        if verb == "disagree":
            return life.RoundAbandoned(at, generation, state.round_open, " ".join(words), refused=True)
        if verb == "remote":
            return life.RemoteCommitted(at, RemoteSnapshot(words[0], int(words[1])))
        if verb == "uploads":
            return life.UploadsIdle(at, text)
        if verb == "leaving":
            node, by, left, *member = words
            return life.NodeLeaving(at, node, by, "told", at + float(left), 2.0, 1.0, "".join(member))
        if verb == "staying":
            return life.NodeStaying(at, words[0], words[1])
        if verb == "late":
            return life.Late(at, float(words[0]))
        if verb == "resize":
            return life.ResizeAsked(at, int(words[0]))
        return {"due": life.SnapshotDue, "stop": life.StopAsked, "tick": life.Tick}[verb](at)


def _say(command: Any) -> str:
    """A command in a few words."""
    if isinstance(command, life.BeginGeneration):
        restore = f"{command.restore.tier} step {command.restore.step}" if command.restore else "nothing"
        hold = ", hold" if command.hold else ""
        return f"begin {command.generation}: {' '.join(command.ranks)} as {command.mesh}, restore {restore}{hold}"
    if isinstance(command, life.CloseIncident):
        incident = command.incident
        return (
            f"incident over: {incident.kind} ({incident.why}), {incident.rung} {incident.old_world_size} → "
            f"{incident.new_world_size}, {incident.steps_lost} steps lost, {incident.rto_s:g} s"
        )
    if isinstance(command, life.CloseNotice):
        plan = command.evacuation
        way = f"{plan.purpose} {plan.old_world_size} → {plan.new_world_size}"
        return f"notice over: {' '.join(plan.nodes)} by {plan.by}, {way}, out after {plan.out_at - plan.opened_at:g} s"
    if isinstance(command, life.EndRun):
        sure = ", for sure" if command.deterministic else ""
        return f"end: {command.status}{f' ({command.kind}{sure})' if command.kind else ''}: {command.reason}"
    texts = {
        life.StartStore: lambda c: f"start the store of {c.node}",
        life.StartMember: lambda c: f"start {c.member} on {c.node}",
        life.KillMember: lambda c: f"kill {c.member}: {c.why}",
        life.Interrupt: lambda c: f"interrupt {' '.join(c.members)}",
        life.Probe: lambda c: f"probe {' '.join(c.members)}",
        life.StartRound: lambda c: f"snapshot: {c.purpose}{' and leave' if c.stop else ''}",
        life.CancelRound: lambda c: f"give up the snapshot: {c.reason}",
        life.EndRoundBeyond: lambda c: f"no snapshot beyond step {c.step}",
        life.Quarantine: lambda c: f"quarantine step {c.snapshot.step}: {c.reason}",
        life.MakeDurable: lambda c: "make durable",
        life.Warn: lambda c: f"warn: {c.text}",
    }
    return texts[type(command)](command)


def stories(path: Path) -> Iterator[tuple[str, list[str]]]:
    for part in path.read_text().split("\n# ")[0 if path.read_text().startswith("# ") else 1 :]:
        title, *lines = part.removeprefix("# ").strip().splitlines()
        yield title, lines


def told(lines: list[str]) -> list[str]:
    """The story with the answers of today."""
    story, found = Story(lines[0]), [lines[0]]
    for line in lines[1:]:
        if line.startswith("> "):
            found += [line, *story.tell(line[2:])]
    return found


ALL = [(path.name, title, lines) for path in sorted(HERE.glob("*.txt")) for title, lines in stories(path)]


@pytest.mark.parametrize(("file", "title", "lines"), ALL, ids=[title for _, title, _ in ALL])
def test_the_story_is_told_word_for_word(file: str, title: str, lines: list[str]) -> None:
    assert told(lines) == [line for line in lines if line.strip()], f"{file}: {title}"


def test_there_are_stories() -> None:
    assert len(ALL) >= 20


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.txt")):
        path.write_text("\n\n".join("\n".join([f"# {title}", *told(lines)]) for title, lines in stories(path)) + "\n")
