"""The story that ``elastic demo`` tells: train, lose a node or a rank in the middle, go on, grow back, end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic.cli.output import count, seconds
from elastic.cli.progress import PlainProgress
from elastic.errors import ClusterError

if TYPE_CHECKING:
    from actors.launch import RunHandle
    from actors.local_cluster import PrivateCluster
    from elastic.result import Result

POLL_S = 0.03
GROW_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Told:
    """What the story measured from outside, with its own clock."""

    killed: str = ""
    killed_at_step: int = -1
    kill_to_first_step_s: float | None = None
    grown_after_s: float | None = None
    """From the new node's (or the replacement's) start to the first generation of full size."""


class Story:
    """Watches a run that was launched and does to it what was asked for. ``kill``: node, rank or none."""

    def __init__(
        self, cluster: PrivateCluster, handle: RunHandle, display: PlainProgress, *, kill: str, at_step: int
    ) -> None:
        self._cluster, self._handle, self._display = cluster, handle, display
        self._kill, self._at_step = kill, at_step
        self.told = Told()

    def tell(self) -> Result:
        """From the first step to the result. Raises ClusterError if the controller is lost."""
        if self._kill != "none":
            before = self._until(lambda now: now["step"] >= self._at_step and now["phase"] == "running")
            if before is not None:
                self._lose(before)
        while (result := self._handle.poll(POLL_S)) is None:
            self._display.show(self._handle.status())
        return result

    def _lose(self, before: dict[str, Any]) -> None:
        """Kill, wait until the run goes on, bring back what was lost, wait until it is as large as before."""
        told, note = self.told, self._display.note
        node = sorted(before["members"].items())[-1][1]["node"]
        told.killed_at_step = before["step"]
        began = time.monotonic()
        if self._kill == "node":
            processes = self._cluster.kill_node(node)
            told.killed = f"node {node[:12]}"
            note(f"KILLED node {node[:12]} at step {before['step']}: SIGKILL to its {processes} processes, memory gone")
        else:
            pid = self._cluster.kill_rank(node)
            told.killed = f"rank process {pid}"
            note(f"KILLED a rank at step {before['step']}: SIGKILL to process {pid}")
        after = self._until(lambda now: len(now["incidents"]) > len(before["incidents"]))
        if after is None:
            return
        told.kill_to_first_step_s = time.monotonic() - began
        note(
            f"GOING ON with {count(after['world_size'], 'rank')}: first new step "
            f"{seconds(told.kill_to_first_step_s)} after the kill"
        )
        began = time.monotonic()
        if self._kill == "node":
            note("adding a node")
            note(f"node {self._cluster.add_node()[:12]} is up; its rank warms up beside the others")
        self._grow(before["world_size"], began)

    def _grow(self, wanted: int, began: float) -> None:
        full = self._until(
            lambda now: now["world_size"] >= wanted and now["phase"] == "running", timeout_s=GROW_TIMEOUT_S
        )
        if full is None:
            self._display.note("the run ended before it had grown back")
            return
        self.told.grown_after_s = time.monotonic() - began
        self._display.note(
            f"GREW BACK to {count(full['world_size'], 'rank')} at step {full['step']}, "
            f"{seconds(self.told.grown_after_s)} later"
        )

    def _until(self, seen: Any, timeout_s: float = 300.0) -> dict[str, Any] | None:
        """The first status that ``seen`` accepts; None if the run ends before. Raises ClusterError after the time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            now = self._handle.status()
            self._display.show(now)
            if now["result"] is not None:
                return None
            if seen(now):
                return now
            time.sleep(POLL_S)
        raise ClusterError(f"nothing came within {timeout_s:g} s", f"run it again; the run was at step {now['step']}")
