"""Finds what no event tells of: nodes that are silent, and ranks that stand still.

One question a second to every store; its answer says that the node lives and which of its ranks stand for longer than
they may. Stacks are asked for only then, and saved before anybody is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from ray.exceptions import RayError

from actors.calls import answer, first_line, settled
from actors.node_watch import Stacks
from elastic.clock import now
from elastic.config import FailureConfig
from elastic.errors import SnapshotError
from elastic.journal import stacks_key
from elastic.progress import PhaseLimits
from elastic.protocol import run_lifecycle as life
from elastic.protocol.hangs import NodePulse, Suspicion, odd_one_out, still_moving, suspicion, train_stack
from elastic.protocol.run_lifecycle import RunState
from elastic.protocol.stragglers import RankWork
from elastic.storage.blob_store import BlobStore

log = logging.getLogger("elastic.heartbeats")

BEAT_S = 1.0
LOOKS_APART_S = 3.0
"""Between the two looks at stacks that tell a rank at work from one that stands."""
STACKS_TIMEOUT_S = 15.0
SAVE_TIMEOUT_S = 5.0
TRAINING = (life.FORMING, life.RUNNING, life.STOPPING)


def phase_limits(failures: FailureConfig) -> PhaseLimits:
    """What a rank is told of the limits of its phases. A capture may take as long as a restore."""
    return PhaseLimits(
        step_s=None if failures.hang_timeout_s == "auto" else failures.hang_timeout_s,
        first_step_s=failures.first_step_timeout_s,
        loading_s=inf if failures.loading_timeout_s is None else failures.loading_timeout_s,
        snapshot_s=failures.form_timeout_s,
    )


class Heartbeats:
    """``post`` takes lifecycle events, ``note`` journal records; ``stores`` are the stores that can be asked."""

    def __init__(
        self,
        run: str,
        failures: FailureConfig,
        *,
        state: Callable[[], RunState],
        post: Callable[[Any], None],
        note: Callable[..., None],
        blobs: BlobStore,
        stores: Callable[[], Mapping[str, Any]],
        own_stacks: Callable[[str], Any],
    ) -> None:
        self._run, self._failures = run, failures
        self._state, self._post, self._note, self._blobs = state, post, note, blobs
        self._stores, self._own_stacks = stores, own_stacks
        self._pulses: dict[str, tuple[int, NodePulse]] = {}
        self._addresses: dict[str, str] = {}
        self._placed: tuple[int, dict[str, tuple[str, ...]]] = (-1, {})
        self._last: tuple[int, int] | None = None
        """Step and generation of the last hang in which nobody stood out."""

    # --- nodes ---------------------------------------------------------------------------------------------------

    async def follow(self, node: str, store: Any) -> float:
        """Ask the store again and again; returns the seconds of its silence when that is too long, or it has died.

        Time in which this loop itself did not run does not count: a controller that was overloaded has heard nobody.
        """
        limit_s = self._failures.heartbeat_timeout_s
        beat_s = min(BEAT_S, limit_s / 4)
        try:
            while True:
                generation = self._state().generation
                asked = asyncio.ensure_future(answer(store.pulse.remote(generation, self._ranks_on(node))))
                silent_s = beat_s  # since the last answer, or the start
                while not (await asyncio.wait({asked}, timeout=beat_s))[0]:
                    silent_s += beat_s
                    if silent_s >= limit_s:
                        asked.cancel()
                        return silent_s
                try:
                    pulse = asked.result()
                    self._pulses[node], self._addresses[node] = (generation, pulse), pulse.address
                except RayError as error:
                    log.debug("node %s: %s", node, first_line(error))
                await asyncio.sleep(beat_s)
        finally:
            self._pulses.pop(node, None)

    def _ranks_on(self, node: str) -> tuple[str, ...]:
        """The ranks of the generation there; sorted out once a generation, since many nodes ask."""
        state = self._state()
        if self._placed[0] != state.generation:
            places: dict[str, list[str]] = {}
            for name in state.ranks:
                if name in state.members:
                    places.setdefault(state.members[name].node, []).append(name)
            self._placed = (state.generation, {place: tuple(names) for place, names in places.items()})
        return self._placed[1].get(node, ())

    def work(self) -> dict[str, RankWork]:
        """What each rank has worked by the last word of its node."""
        return {work.member: work for _, pulse in self._pulses.values() for work in pulse.work}

    def address(self, node: str) -> str:
        """Where the node is, as its store says; empty while that is unknown."""
        return self._addresses.get(node, "")

    # --- ranks ---------------------------------------------------------------------------------------------------

    async def judge(self) -> None:
        """Look for ranks that stand still, for as long as the run lives."""
        while True:
            await asyncio.sleep(BEAT_S)
            found = self._suspicion()
            if found is not None:
                await self._examine(found)

    def _suspicion(self) -> Suspicion | None:
        """From the last word of every node of the generation; None where one has not spoken of it yet."""
        state = self._state()
        if state.phase not in TRAINING:
            return None
        nodes = {state.members[name].node for name in state.ranks if name in state.members}
        heard = {node: self._pulses[node] for node in nodes if node in self._pulses}
        if len(heard) < len(nodes) or any(generation != state.generation for generation, _ in heard.values()):
            return None
        return suspicion([pulse for _, pulse in heard.values()], self._failures.heartbeat_timeout_s)

    async def _examine(self, found: Suspicion) -> None:
        """Save everybody's stacks, make sure that it still stands so, name the culprit."""
        generation = self._state().generation
        first = await self._all_stacks()
        learned = self._failures.hang_timeout_s == "auto"
        last = first
        if not found.culprit:
            if learned:
                await asyncio.sleep(LOOKS_APART_S)
                last = await self._all_stacks()
                if moving := self._moving(found, first, last):
                    log.info("no mark for long, but %s still work", ", ".join(moving))
                    return
            await asyncio.sleep(BEAT_S)
        again = self._suspicion()
        state = self._state()
        if again is None or state.generation != generation:
            return
        members, why = self._culprits(again, last)
        standing = {rank.member: rank for rank in again.standing}
        stood_s = min(rank.idle_s for rank in again.standing if rank.member in members or rank.over)
        key = await self._save(generation, last, why, members)
        phase = standing[members[0]].phase if members[0] in standing else ""
        self._note(
            "hang", generation=generation, members=list(members), phase=phase, why=why, stacks=key,
            stood_s=round(stood_s, 3),
            standing=[[rank.member, rank.phase, rank.step, round(rank.idle_s, 1)] for rank in again.standing],
        )  # fmt: skip
        log.warning("hang: %s; stacks in %s", why, key or "no file: the storage did not take them")
        self._post(life.RanksHung(now(), members, generation, why, stood_s, key))

    def _culprits(self, found: Suspicion, stacks: Mapping[str, Stacks]) -> tuple[tuple[str, ...], str]:
        state = self._state()
        culprit, why = found.culprit, found.why
        if not culprit:
            culprit, why = odd_one_out({member: train_stack(s.text) for member, s in stacks.items()})
        if culprit:
            return (culprit,), f"rank {state.rank_of(culprit)} hangs: {why}"
        rank = max(found.standing, key=lambda rank: (rank.silent_s, rank.idle_s))
        place = (rank.step, state.generation)
        if self._last is not None and self._last[0] == rank.step and self._last[1] != state.generation:
            self._last = None
            return tuple(r.member for r in found.standing), f"all ranks hang in the {rank.phase} after step {rank.step}"
        self._last = place
        why = f"all ranks stand in the {rank.phase} after step {rank.step}, and none stands out"
        return (rank.member,), f"rank {state.rank_of(rank.member)} is tried first: {why}"

    def _moving(self, found: Suspicion, before: Mapping[str, Stacks], after: Mapping[str, Stacks]) -> list[str]:
        """Members that still work, unless they have had as long as a first step may take."""
        if min(rank.idle_s for rank in found.standing) > self._failures.first_step_timeout_s:
            return []
        share = {
            member: (later.cpu_s - before[member].cpu_s) / LOOKS_APART_S
            for member, later in after.items()
            if member in before
        }
        return still_moving(
            {member: train_stack(s.text) for member, s in before.items()},
            {member: train_stack(s.text) for member, s in after.items()},
            share,
        )

    async def _all_stacks(self) -> dict[str, Stacks]:
        """Of the ranks of the generation, by member: from their stores, or where those cannot, from themselves."""
        state = self._state()
        asked = (store.stacks.remote(state.ranks) for store in self._stores().values())
        found: dict[str, Stacks] = {}
        for came in await settled(asked, STACKS_TIMEOUT_S):
            if not isinstance(came, BaseException):
                found |= {stacks.member: stacks for stacks in came}
        missing = [member for member in state.ranks if member in found and not found[member].text]
        texts = await asyncio.gather(*(self._own_stacks(member) for member in missing))
        for member, text in zip(missing, texts):
            found[member] = Stacks(member, text, found[member].cpu_s)
        return found

    async def _save(self, generation: int, stacks: Mapping[str, Stacks], why: str, members: tuple[str, ...]) -> str:
        """The key of the text, relative to the run; empty if the storage did not take it in time."""
        state = self._state()
        parts = [f"{why}\nkilled: {', '.join(members)}\n"]
        for rank, member in enumerate(state.ranks):
            text = stacks[member].text if member in stacks else ""
            parts.append(f"==== rank {rank}, member {member} ====\n{text or 'its stacks could not be had'}\n")
        key = stacks_key(generation, members[0])
        write = asyncio.get_running_loop().run_in_executor(
            None, self._blobs.put, f"{self._run}/{key}", "\n".join(parts).encode()
        )
        try:
            await asyncio.wait_for(asyncio.shield(write), SAVE_TIMEOUT_S)
        except (SnapshotError, OSError, asyncio.TimeoutError) as error:
            log.warning("the stacks could not be saved: %s", error)
            return ""
        return key
