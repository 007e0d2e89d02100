"""Nodes, stores and members of a made-up cluster, and who strikes them: see ``made_up_run``."""

from __future__ import annotations

from support.made_up_world import NodeMachine, RankProcess, StoreProcess, World

from elastic.protocol import run_lifecycle as life


class Cluster(World):
    """Starts what it is asked to start, and loses it."""

    def _add_node(self, number: int) -> None:
        name = f"n{number}"
        self.nodes[name] = NodeMachine(name, self.random.randint(1, 2), f"d{number % 3}")

    def _view(self) -> None:
        if self.down:
            return  # who comes next looks for itself
        seen = self.living_nodes()
        if seen != self.seen:
            self.seen = seen
            self.post(life.ClusterSeen(self.now, dict(seen)))

    def living_nodes(self) -> dict[str, tuple[int, str]]:
        return {
            name: (0 if node.drains else node.capacity, node.domain) for name, node in self.nodes.items() if node.alive
        }

    def _store_started(self, name: str) -> None:
        node = self.nodes[name]
        if not node.alive or self.random.random() < self.trouble.starts_failed:
            self.post(life.StoreLost(self.now, name, "its store did not start"))
            return
        node.store = self.controller_stores[name] = StoreProcess(name)
        self.post(life.StoreReady(self.now, name))

    def _started(self, command: life.StartMember) -> None:
        self.starting.pop(command.member, None)
        node = self.nodes[command.node]
        if command.member not in self.machine.state.members:
            return
        carried = sum(r.alive and r.node is node for r in self.ranks.values())
        if not node.alive or carried >= node.capacity or self.random.random() < self.trouble.starts_failed:
            self.post(life.MemberLost(self.now, command.member, "it did not start"))
            return
        self.ranks[command.member] = self.controller_ranks[command.member] = RankProcess(command.member, node)
        self.post(life.MemberReady(self.now, command.member))

    def _kill_member(self, name: str) -> None:
        rank = self.controller_ranks.pop(name, None)
        if rank is not None:
            rank.heard = False
            self._die(rank)

    def _die(self, rank: RankProcess) -> None:
        if not rank.alive:
            return
        rank.alive = False
        rank.in_group = False
        self._poke(rank.generation)

    def kill_rank(self, name: str = "") -> None:
        living = [r for r in self.ranks.values() if r.alive and (not name or r.name == name)]
        if living:
            rank = self.random.choice(living)
            self._die(rank)
            self.soon(self.latency(), self._lost, rank)

    def _lost(self, rank: RankProcess) -> None:
        if rank.heard:
            rank.heard = False
            self.controller_ranks.pop(rank.name, None)
            self.post(life.MemberLost(self.now, rank.name, f"{rank.name} died"))

    def _probe(self, name: str) -> None:
        rank = self.controller_ranks.get(name)
        if rank is not None and not rank.alive:
            self._lost(rank)

    def kill_store(self) -> None:
        living = [n.store for n in self.nodes.values() if n.store is not None and n.store.alive]
        if living:
            self._store_dies(self.random.choice(living))

    def _store_dies(self, store: StoreProcess) -> None:
        store.alive = False
        self.soon(self.latency(), self._store_gone, store)

    def _store_gone(self, store: StoreProcess) -> None:
        if self.controller_stores.get(store.node) is store:
            del self.controller_stores[store.node]
        self.post(life.StoreLost(self.now, store.node, f"the store of {store.node} is gone"))

    def kill_node(self, name: str = "") -> None:
        living = [n for n in self.nodes.values() if n.alive and (not name or n.name == name)]
        if not living:
            return
        node = self.random.choice(living)
        node.alive = False
        if node.store is not None and node.store.alive:
            self._store_dies(node.store)
        for rank in self.ranks.values():
            if rank.node is node and rank.alive:
                self._die(rank)
                self.soon(self.latency(), self._lost, rank)
        self.later(self.latency() * 10, self._view)

    def notice(self) -> None:
        """Word that a node goes away, in one of three ways; it may come true, early or late, or be taken back."""
        living = [n for n in self.nodes.values() if n.alive]
        if not living:
            return
        node, by = self.random.choice(living), self.random.choice(("drain", "drain", "exclude", "sigterm"))
        notice_s = self.random.choice((1.0, 25.0, 120.0, float("inf"))) if by != "sigterm" else 25.0
        there = [r.name for r in self.ranks.values() if r.node is node and r.alive]
        member = self.random.choice(there) if there and by == "sigterm" else ""
        if by == "drain":
            node.drains = True
            self._view()
        needs_s = self.random.choice((0.1, 2.0, 30.0))
        self.post(life.NodeLeaving(self.now, node.name, by, "made up", self.now + notice_s, needs_s, 1.0, member))
        draw = self.random.random()
        if draw < 0.4 and notice_s < float("inf"):
            self.later(notice_s * self.random.choice((0.5, 1.0, 1.0)), self.kill_node, node.name)
        elif draw < 0.7 and by != "sigterm":
            self.later(self.random.random() * 20.0, self._taken_back, node, by)

    def _taken_back(self, node: NodeMachine, by: str) -> None:
        if by == "drain":
            node.drains = False
            self._view()
        self.post(life.NodeStaying(self.now, node.name, by))

    def join(self) -> None:
        self._add_node(len(self.nodes))
        self.later(self.latency(), self._view)

    def ask(self) -> None:
        if self.down:
            self.later(1.0, self.ask)
            return
        draw = self.random.random()
        if draw < 0.25:
            self.stop()
        elif draw < 0.9:
            self.post(life.ResizeAsked(self.now, self.random.randint(0, 5)))
        else:
            self.post(life.SnapshotDue(self.now))

    def stop(self) -> None:
        if self.down:
            self.later(1.0, self.stop)
            return
        self.stop_asked_at = self.now
        self.post(life.StopAsked(self.now))

    def _plan_trouble(self) -> None:
        trouble, span = self.trouble, 3.0 + self.step_s * self.until_step * 1.5
        acts = [self.kill_rank] * trouble.rank_kills + [self.kill_node] * trouble.node_kills
        acts += [self.kill_store] * trouble.store_kills + [self.join] * trouble.joins + [self.ask] * trouble.requests
        acts += [self.notice] * trouble.notices
        for act in acts:
            self.later(self.random.random() * span * self.random.choice((0.3, 1.0, 1.0, 4.0)), act)
        for _ in range(2):  # so that the world allows an end: nodes come in late
            self.later(60.0 + self.random.random() * 60.0, self.join)
