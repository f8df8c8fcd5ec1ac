"""Histories with early hand-overs: what refuses or resets connections between brokers, and the judge of every session
that ended early.

Always true: a session ends early only if its process is dead, lost its listener, or was refused to two brokers at the
same time; within the time of a lease, less than half of the brokers lose their sessions early; no controller key is
left to a broker without a session; and while a broker without a session is certain that it leads a partition, no other
one is. (A leader that is replaced while it has a session may learn that late, too; it was not that session's end.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mansio.metadata.metadata_store import decode
from sim.brokers import TTL_MS
from sim.faults import kill

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.brokers import SimulatedBroker
    from sim.world import World

FIRST_SEED: Final = 190_000
END_SEED: Final = 200_000
"""Seeds of histories with early hand-overs."""

RECENT_MS: Final = 0.9 * TTL_MS
"""Less than the time of a lease by any clock."""

EVIDENCE_MS_MAX: Final = 8000
"""How old what was seen of a broker may be when its session ends: the transaction can be seconds late."""


class EarlyEnds:
    """Judges the sessions that ended early."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.dead = self.living = 0
        """Sessions that ended early: of processes that were dead, and of others."""
        self._refused_ms: dict[tuple[int, int, int], float] = {}
        """Who was refused, by which broker in which epoch, and when."""
        self._unheard_ms: dict[tuple[int, int], float] = {}
        """Broker and epoch -> when it had no listener."""
        self._ended_ms: dict[int, float] = {}

    def look(self) -> None:
        """Note what holds now."""
        world = self._world
        for broker in world.brokers():
            if not broker.running:
                continue
            epoch = broker.epoch
            if not broker.listening:
                self._unheard_ms[broker.node_id, epoch] = world.simulation.now_ms
            for source in world.node_ids:
                if (source, broker.node_id) in world.network.refusing:
                    self._refused_ms[source, broker.node_id, epoch] = world.simulation.now_ms

    def ended(self, node_id: int, epoch: int) -> None:
        """etcd has deleted this session before its lease ended."""
        world = self._world
        self.look()
        now_ms = world.simulation.now_ms
        world.tell("session ended early", node_id, epoch)
        if any(one.node_id == node_id and one.running and one.epoch == epoch for one in world.lives):
            self.living += 1
            self._judge_living(node_id, epoch, now_ms - EVIDENCE_MS_MAX)
        else:
            self.dead += 1
        controller = world.etcd.get(
            next(one for one in world.lives if hasattr(one, "core")).core.state.keys.controller
        )
        if controller is not None and decode(controller.key, controller.value)["broker"] == node_id:
            world.checker.broken(f"broker {node_id} is the controller, and has no session")
        self._ended_ms[node_id] = now_ms
        recent = [one for one, at in self._ended_ms.items() if now_ms - at < RECENT_MS]
        if 2 * len(recent) >= len(world.node_ids):
            world.checker.broken(f"the sessions of {recent} ended early, of {len(world.node_ids)} brokers")

    def check_leaders(self) -> None:
        """Break the history if two brokers lead a partition, and both would lease its records or answer for groups."""
        world = self._world
        living = [one for one in world.brokers() if one.ready and one.running]
        ended = {one.node_id for one in living if self._has_no_session(one)}
        certain: dict[tuple[str, int], int] = {}
        for broker in living:
            if not ended or world.is_misled(broker.node_id):
                continue
            for one in broker.core.partitions:
                if not one.is_leader or one.closed or one.is_leadership_uncertain:
                    continue
                other = certain.setdefault((one.topic, one.index), broker.node_id)
                if other != broker.node_id and ended.intersection((other, broker.node_id)):
                    world.checker.broken(f"{one.name} is led by {other} and by {broker.node_id}")

    def _has_no_session(self, broker: SimulatedBroker) -> bool:
        entry = self._world.etcd._entries.get(broker.core.state.keys.session(broker.node_id))
        return entry is None or entry.create_revision != broker.cluster_member.broker_epoch()

    def _judge_living(self, node_id: int, epoch: int, oldest_ms: float) -> None:
        refused = sum(
            (target, session) == (node_id, epoch) and at >= oldest_ms
            for (_, target, session), at in self._refused_ms.items()
        )
        if refused < 2 and self._unheard_ms.get((node_id, epoch), -math.inf) < oldest_ms:
            self._world.checker.broken(f"the session of broker {node_id} ended early, and it answered")


def _two(world: World) -> tuple[int, int]:
    first, second = world.random.sample(world.node_ids, 2)
    return first, second


def _block(world: World, ways: list[tuple[int, int]], *, by_refusing: bool) -> bool:
    for source, target in ways:
        world.network.block(source, target, by_refusing=by_refusing)
    _look(world)
    world.later(lambda: _open(world), 300, 8000)
    return True


def _look(world: World) -> None:
    if world.early_ends is not None:
        world.early_ends.look()


def _open(world: World) -> None:
    _look(world)
    world.network.open_all()


def refuse(world: World) -> bool:
    """Something between two brokers refuses connects, one way or both."""
    one, other = _two(world)
    ways = [(one, other), (other, one)]
    return _block(world, ways[: world.random.choice((1, 2))], by_refusing=True)


def reset(world: World) -> bool:
    """Something between two brokers, or before one of them, resets connections after it has accepted them."""
    one, other = _two(world)
    if world.random.random() < 0.5:
        ways = [(node_id, one) for node_id in world.node_ids if node_id != one]
    else:
        ways = [(one, other), (other, one)]
    return _block(world, ways, by_refusing=False)


def refuse_all_of_one(world: World) -> bool:
    """Something before one broker refuses the connects of all others, or it is refused by all of them, too."""
    one = world.random.choice(world.node_ids)
    ways = [(node_id, one) for node_id in world.node_ids if node_id != one]
    if world.random.random() < 0.5:
        ways += [(target, source) for source, target in ways]
    return _block(world, ways, by_refusing=True)


def refuse_all_and_etcd(world: World) -> bool:
    """Something before one broker refuses the connects of all others, and it does not reach etcd either; clients reach
    it. Its session ends early, and it cannot learn that."""
    one = world.random.choice(world.node_ids)
    if one in world.no_etcd:
        return False
    mislead(world, one)
    world.later(lambda: world.reach_etcd(one, reach=True), 2000, 5000)
    world.later(lambda: _open(world), 300, 8000)
    return True


def mislead(world: World, node_id: int) -> None:
    """Refuse the connects of all others to a broker, and keep it from etcd."""
    for source in world.node_ids:
        if source != node_id:
            world.network.block(source, node_id, by_refusing=True)
    _look(world)
    world.reach_etcd(node_id, reach=False)


def refuse_each_other(world: World) -> bool:
    """Each broker is refused by all others, or by all but its neighbours: all accuse each other."""
    nodes = world.node_ids
    ring = {(nodes[at], nodes[(at + 1) % len(nodes)]) for at in range(len(nodes))}
    near = ring | {(target, source) for source, target in ring}
    if world.random.random() < 0.3:
        near = set()
    ways = [(one, other) for one in nodes for other in nodes if one != other and (one, other) not in near]
    return _block(world, ways, by_refusing=True)


def lose_listener(world: World) -> bool:
    """The listener of a broker ends with all of its connections; its process goes on, and listens again later."""
    ready = [
        one for one in world.brokers() if one.ready and one.running and not one.stopping and one.listening
    ]
    if not ready:
        return False
    broker = world.random.choice(ready)
    broker.lose_listener()
    _look(world)
    world.later(lambda: _listen(world, broker), 300, 8000)
    return True


def _listen(world: World, broker: SimulatedBroker) -> None:
    _look(world)
    broker.listen_again()


HAND_OVER_FAULTS: Final[dict[str, tuple[Callable[[World], bool], int]]] = {
    "refused": (refuse, 4),
    "reset": (reset, 3),
    "refused by all": (refuse_all_of_one, 4),
    "refused by all and without etcd": (refuse_all_and_etcd, 4),
    "mutual refusal": (refuse_each_other, 3),
    "listener lost": (lose_listener, 4),
    "kill": (kill, 10),
}
"""Added to the faults of other histories; name, what does it, and its share. Processes are killed more often."""
