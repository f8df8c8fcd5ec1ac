"""A random history of faults over replicated brokers, determined by a seed, and the invariants of every history.

The faults: brokers killed (with and without loss of unsynced data, one or all), paused and resumed, disconnected from
each other (in one direction, too) and from the store; slow disks; duplicated requests that arrive much later; fast
leader changes; metadata changes that arrive late and out of order; lost responses of the store. A stand-in for the
controller ends sessions and elects leaders, only from the in-sync replicas.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from mansio.errors import MansioError
from mansio.metadata.metadata_store import Compare, Put, encode
from mansio.metadata.model import partition_document
from support.replicas import KEYS, TOPIC, Ack, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.replicas import Node

FAULTS_MS = 20_000
SESSION_S = 2.0
"""So long a broker trusts its session after its last word from the store; the store ends it `EXPIRY_MS` after."""
EXPIRY_MS = 3000

MENU = (
    *("kill", "power", "power of all", "pause", "cut", "cut", "cut one way", "store", "slow disk"),
    *("elect", "elect twice", "heal", "heal", "lost"),
)


class History:
    """One run: faults and writes for a while, then everything heals."""

    def __init__(self, seed: int, *, brokers: int = 3) -> None:
        self.cluster = Cluster(brokers, seed=seed, configs={"min.insync.replicas": "2"})
        self.simulation = self.cluster.simulation
        self.random = self.simulation.random
        self.driver = self.simulation.scheduler("driver")
        self.acks: list[Ack] = []
        self.seen: dict[int, bytes] = {}
        """What any reader saw at an offset."""
        self.highest: dict[int, int] = {}
        self.away: set[int] = set()
        """Brokers without a session, from when it ends to when they have another."""
        self.faults: dict[str, int] = {}
        self.over = False
        self.number = 0
        self.cluster.network.late_copies = 0.03

    def run(self) -> None:
        """Run the whole history; raises `AssertionError` when an invariant is violated."""
        self.cluster.run_for(1000)
        for call, every_ms in ((self._write, 25), (self._read, 60), (self._fault, 700), (self._control, 200)):
            self._repeat(call, every_ms)
        self.cluster.run_for(FAULTS_MS)
        self.over = True
        self._heal()
        self.cluster.run_for(EXPIRY_MS + 1000)
        self._heal()
        self.cluster.run_until(self._recovered, 60_000)
        self._check()

    def _repeat(self, call: Callable[[], None], every_ms: float) -> None:
        def again() -> None:
            if not self.over or call == self._control:
                call()
                self.driver.call_later(self.random.uniform(0.5, 1.5) * every_ms, again)

        again()

    @property
    def _running(self) -> list[Node]:
        return [
            node
            for node in self.cluster.network.nodes.values()
            if not node.scheduler.stopped and not node.scheduler.paused
        ]

    # Clients

    def _write(self) -> None:
        for node in self._running:
            if node.partition.is_leader and self.random.random() < 0.8:
                self.number += 1
                with suppress(MansioError):
                    self.acks.append(node.append(b"%d" % self.number))

    def _read(self) -> None:
        """Check at every leader that an offset always has the same record."""
        for node in self._running:
            if not node.partition.is_leader:
                continue
            for offset, value in enumerate(node.values(committed=True)):
                assert value is not None
                known = self.seen.setdefault(offset, value)
                assert known == value, f"offset {offset} was {known!r} and is {value!r}"

    # Faults

    def _fault(self) -> None:
        name = self.random.choice(MENU)
        self.faults[name] = self.faults.get(name, 0) + 1
        node = self.random.choice(list(self.cluster.network.nodes.values()))
        other = self.random.choice([one for one in self.cluster.node_ids if one != node.node_id])
        cut = self.cluster.network.cut
        if name in ("kill", "power"):
            self._kill(node, power=name == "power")
        elif name == "power of all":
            for one in list(self.cluster.network.nodes.values()):
                self._kill(one, power=True)
        elif name == "pause" and not node.scheduler.paused and not node.scheduler.stopped:
            node.scheduler.pause()
            self._session_will_end(node)
            self.driver.call_later(self.random.uniform(100, 8000), self._wake, node)
        elif name == "cut":
            cut |= {(node.node_id, other), (other, node.node_id)}
        elif name == "cut one way":
            cut.add((node.node_id, other))
        elif name == "store":
            node.store.store_client.unreachable = True
            self._session_will_end(node)
            self.driver.call_later(self.random.uniform(100, 8000), self._wake, node)
        elif name == "slow disk":
            slow = self.random.choice((1.0, 50.0, 800.0))
            node.background._latency_ms = lambda: self.random.uniform(0.5, 3) * slow
        elif name == "elect":
            self._change_leader()
        elif name == "elect twice":
            self._change_leader()
            self.driver.call_later(self.random.uniform(5, 400), self._change_leader)
        elif name == "lost":
            node.store.store_client.lost_response_count = self.random.randrange(3)
            node.store.store_client.lost_request_count = self.random.randrange(3)
        elif name == "heal":
            cut.clear()

    def _kill(self, node: Node, *, power: bool) -> None:
        if node.scheduler.stopped:
            return
        self.cluster.kill(node.node_id, power=power)
        self._session_will_end(node)
        self.driver.call_later(self.random.uniform(100, 8000), self._restart, node)

    def _change_leader(self) -> None:
        state = self.cluster.state()
        here = [one for one in state.isr if one not in self.away]
        if here and state.leader not in self.away and not self.over:
            self._elect(self.random.choice(here))

    def _session_will_end(self, node: Node) -> None:
        """Keep-alives fail from now on, unless the fault ends before the session does."""
        node.session_until_s = node.clock.monotonic() + SESSION_S
        epoch = node.broker_epoch
        self.driver.call_later(EXPIRY_MS, self._session_ends, node, epoch)

    def _session_ends(self, node: Node, epoch: int) -> None:
        if self.cluster.epochs.get(node.node_id) == epoch and node.session_until_s != float("inf"):
            self.cluster.end_session(node.node_id)
            self.away.add(node.node_id)

    def _wake(self, node: Node) -> None:
        """Resume the broker; it has to check the remaining time of its session itself."""
        if node.scheduler.stopped:
            return
        node.store.store_client.unreachable = False
        if node.scheduler.paused:
            node.scheduler.resume()
        self._keep_alive(node)

    def _keep_alive(self, node: Node) -> None:
        if self.cluster.epochs.get(node.node_id) == node.broker_epoch:
            node.session_until_s = float("inf")
        elif node.node_id in self.away:
            node.broker_epoch = self.cluster.register(node.node_id)
            node.session_until_s = float("inf")
            self.away.discard(node.node_id)
        self._tell_late(node.node_id)

    def _restart(self, node: Node) -> None:
        if self.cluster.network.nodes[node.node_id] is not node or not node.scheduler.stopped:
            return
        if node.node_id in self.cluster.epochs and not self.over:
            self.driver.call_later(200, self._restart, node)  # it never takes over a session
            return
        self.away.discard(node.node_id)
        self.cluster.restart(node.node_id)

    def _heal(self) -> None:
        self.cluster.network.cut.clear()
        self.cluster.network.late_copies = 0.0
        for node in list(self.cluster.network.nodes.values()):
            node.store.store_client.heal()
            node.store.release()
            node.background._latency_ms = lambda: self.random.uniform(0.5, 3)
            if node.scheduler.stopped:
                self._restart(node)
            else:
                self._wake(node)

    # The stand-in for the controller

    def _control(self) -> None:
        state = self.cluster.state()
        is_leader = self.cluster.epochs.get(state.leader) == state.leader_broker_epoch
        if not is_leader:
            here = [node for node in state.isr if node in self.cluster.epochs]
            if here:
                self._elect(self.random.choice(here))
        elif self.random.random() < 0.5:
            self._tell_late(*self.cluster.node_ids)

    def _elect(self, leader: int) -> None:
        state = self.cluster.state()
        members = tuple(node for node in state.isr if node in self.cluster.epochs)
        key = KEYS.partition(TOPIC, 0)
        new = state._replace(
            leader=leader,
            leader_epoch=state.leader_epoch + 1,
            isr=members,
            partition_epoch=state.partition_epoch + 1,
            leader_broker_epoch=self.cluster.epochs[leader],
        )
        done = self.cluster.store.transact(
            [Compare(key, mod_revision=state.mod_revision)],
            [Put(key, encode(partition_document(new), "elect"))],
        )
        assert done.succeeded
        self._tell_late(*self.cluster.node_ids)

    def _tell_late(self, *node_ids: int) -> None:
        """Deliver the current state some time later, so that changes arrive in any order."""
        state = self.cluster.state()
        for node_id in node_ids:
            node = self.cluster[node_id]
            if not node.scheduler.stopped:
                node.scheduler.call_later(
                    self.random.uniform(0, 300), node.replication.apply, node.partition, state
                )

    # What must be true

    def _recovered(self) -> bool:
        return set(self.cluster.state().isr) == set(self.cluster.node_ids) and self.cluster.settled()

    def _check(self) -> None:
        self.cluster.check_same()
        values = self.cluster[self.cluster.state().leader].values()
        for ack in self.acks:
            if ack.acknowledged:
                assert values[ack.offset : ack.offset + 1] == ack.values, (
                    f"{ack.values} at {ack.offset} was lost"
                )
        for offset, value in self.seen.items():
            assert values[offset] == value, f"what was read at {offset} is gone"
        assert len(values) == len(set(values)), "nothing is stored twice"

    @property
    def acknowledged(self) -> int:
        return sum(ack.acknowledged for ack in self.acks)
