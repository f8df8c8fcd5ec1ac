"""Faults of the simulator: one function each, which injects the fault into a simulated cluster.

Every fault is a function of the world that begins it now and, where it lasts, has it end by itself; it returns False
where it does not apply (a dead broker cannot be paused). `FAULTS` says how often each is drawn.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.brokers import SimulatedBroker
    from sim.world import World

DOWN_MS_MAX: Final = 7000
HOUR_MS: Final = 3_600_000


def _running(world: World) -> SimulatedBroker | None:
    found = [broker for broker in world.brokers() if broker.running and not broker.scheduler.paused]
    return world.random.choice(found) if found else None


def _ready(world: World) -> SimulatedBroker | None:
    found = [one for one in world.brokers() if one.ready and one.running and not one.scheduler.paused]
    return world.random.choice(found) if found else None


def _other(world: World, broker: SimulatedBroker) -> int:
    return world.random.choice([one for one in world.node_ids if one != broker.node_id])


def kill(world: World) -> bool:
    """SIGKILL: the process is gone, its files are as it left them; it comes back some time later."""
    broker = _running(world)
    if broker is None:
        return False
    broker.die()
    world.restart_later(broker)
    return True


def power(world: World) -> bool:
    """The machine goes down: of what was not synced any subset stays, writes are torn in sectors, and no process closes
    its connections."""
    broker = _running(world)
    if broker is None:
        return False
    world.lose_power(broker)
    world.restart_later(broker)
    return True


def power_all(world: World) -> bool:
    """The same to all machines at once."""
    running = [broker for broker in world.brokers() if broker.running]
    for broker in running:
        world.lose_power(broker)
        world.restart_later(broker, ms_max=1500)
    return bool(running)


def terminate(world: World) -> bool:
    """SIGTERM: a clean stop, with hand-over; it comes back."""
    broker = _ready(world)
    if broker is None or broker.stopping:
        return False
    broker.terminate()
    world.restart_later(broker, ms_max=5000)
    return True


def pause(world: World) -> bool:
    """SIGSTOP and SIGCONT: time goes on without it."""
    broker = _running(world)
    if broker is None:
        return False
    broker.pause()
    world.later(broker.resume, 50, 9000)
    return True


def hang(world: World) -> bool:
    """The main loop stands still while the keep-alive's thread goes on."""
    broker = _running(world)
    if broker is None:
        return False
    broker.hang()
    world.later(broker.resume, 50, 6000)
    return True


def jump(world: World) -> bool:
    """The wall clock of one broker is set, forward or back."""
    node_id = world.random.choice(world.node_ids)
    world.clocks[node_id].wall_offset_ms += world.random.choice(
        (-24 * HOUR_MS, -1000, 1000, HOUR_MS, 24 * HOUR_MS)
    )
    return True


def cut(world: World) -> bool:
    """Nothing passes between two brokers."""
    broker = world.random.choice(world.brokers())
    other = _other(world, broker)
    world.network.cut |= {(broker.node_id, other), (other, broker.node_id)}
    world.later(world.network.mend, 300, 8000)
    return True


def cut_one_way(world: World) -> bool:
    """Nothing passes from one broker to another; the other way it does."""
    broker = world.random.choice(world.brokers())
    world.network.cut.add((broker.node_id, _other(world, broker)))
    world.later(world.network.mend, 300, 8000)
    return True


def isolate(world: World) -> bool:
    """A broker reaches no other broker; clients and etcd reach it (a partial partition)."""
    world.network.isolate(world.random.choice(world.node_ids))
    world.later(world.network.mend, 1000, 9000)
    return True


def unseen(world: World) -> bool:
    """Clients do not reach a broker, or do not hear from it; brokers and etcd do."""
    node_id = world.random.choice(world.node_ids)
    both = world.random.random() < 0.5
    for client in world.producers + world.readers:
        world.network.cut |= {(node_id, client.name)} | ({(client.name, node_id)} if both else set())
    world.later(world.network.mend, 300, 6000)
    return True


def drop(world: World) -> bool:
    """Requests are lost, and their connections stay silent, for a while."""
    world.network.drop = world.random.choice((0.01, 0.05, 0.2))
    world.later(lambda: setattr(world.network, "drop", 0.0), 500, 4000)
    return True


def delay(world: World) -> bool:
    """The network is slow for a while."""
    world.network.slow = world.random.choice((10.0, 100.0, 500.0))
    world.later(lambda: setattr(world.network, "slow", 1.0), 500, 3000)
    return True


def reorder(world: World) -> bool:
    """Requests arrive seconds late, behind those that were sent after them on other connections, for a while."""
    world.network.late = world.random.choice((0.02, 0.1))
    world.later(lambda: setattr(world.network, "late", 0.0), 500, 5000)
    return True


def duplicate(world: World) -> bool:
    """Requests arrive a second time, up to seconds later, for a while."""
    world.network.duplicate = world.random.choice((0.05, 0.3))
    world.later(lambda: setattr(world.network, "duplicate", 0.0), 500, 5000)
    return True


def failed_sync(world: World) -> bool:
    """The next fdatasync or syncfs of a broker fails; what it was about is lost. The log is at its end then, and the
    broker is started again some time later."""
    broker = _ready(world)
    if broker is None:
        return False
    disk = broker.disk

    def fail(operation: str, path: str) -> int | None:
        if operation not in ("sync", "sync_all") or not path.startswith("data/topics"):
            return None
        disk.fail_when = None
        return errno.EIO

    disk.fail_when = fail
    world.later(lambda: broker.running and _start_again(world, broker), 3000, 8000)
    return True


def _start_again(world: World, broker: SimulatedBroker) -> None:
    broker.resume()
    broker.die()
    world.restart_later(broker, ms_max=500)


def lost_disk(world: World) -> bool:
    """The machine of a broker comes back with an empty disk: once in a history, and not where it has the last copy that
    is in sync, which only an operator can replace."""
    broker = _ready(world)
    if broker is None or "lost disk" in world.faults or world.is_last_in_sync(broker.node_id):
        return False
    world.lose_disk(broker)
    world.restart_later(broker)
    return True


def full_disk(world: World) -> bool:
    """A disk has no room, or next to none, for a while."""
    disk = world.random.choice(world.brokers()).disk
    used = disk.capacity_bytes - disk.free_bytes("/")
    disk.capacity_bytes = used + world.random.choice((0, 100, 3000))
    world.later(world.make_room, 500, 4000)
    return True


def slow_disk(world: World) -> bool:
    """Syncs of one broker take long for a while."""
    broker = world.random.choice(world.brokers())
    slow = world.random.choice((20.0, 200.0, 1500.0))
    broker.disk_ms = (0.5 * slow, 2.0 * slow)
    world.later(lambda: setattr(broker, "disk_ms", (0.3, 2.5)), 500, 5000)
    return True


def etcd_unreachable(world: World) -> bool:
    """One broker does not reach etcd; everything else it does."""
    node_id = world.random.choice(world.node_ids)
    world.reach_etcd(node_id, reach=False)
    world.later(lambda: world.reach_etcd(node_id, reach=True), 200, 8000)
    return True


def etcd_down(world: World) -> bool:
    """etcd has no majority; when it has one again, leases live for their whole time again: they end late."""
    world.etcd.lose_majority()
    world.later(world.etcd.elect, 300, 9000)
    return True


def etcd_leader(world: World) -> bool:
    """etcd changes its leader: a second without, answers lost, leases lengthened."""
    for broker in world.brokers():
        if broker.running and hasattr(broker, "etcd_client"):
            broker.etcd_client.lost_response_count = world.random.randrange(2)
    world.etcd.lose_majority()
    world.later(world.etcd.elect, 500, 1800)
    return True


def lease_early(world: World) -> bool:
    """A lease ends before its time, while its broker thinks that it lives."""
    leases = sorted(world.etcd._leases)
    if not leases:
        return False
    world.etcd.end_lease(world.random.choice(leases))
    return True


def leases_all(world: World) -> bool:
    """All leases end at once, as after a long stall of etcd."""
    world.etcd.end_all_leases()
    return True


def ambiguous(world: World) -> bool:
    """Of one broker's next transactions some happen unheard, some do not happen, some happen seconds later."""
    broker = _ready(world)
    if broker is None:
        return False
    broker.etcd_client.lost_response_count = world.random.randrange(3)
    broker.etcd_client.lost_request_count = world.random.randrange(3)
    broker.etcd_client.late_requests = world.random.randrange(3)
    return True


def stale(world: World) -> bool:
    """One broker hears no news of etcd for a while, though it reaches it."""
    broker = _ready(world)
    if broker is None:
        return False
    broker.etcd_client.watch_stalls = True
    world.later(lambda: world.hear_again(broker), 200, 5000)
    return True


def compact(world: World) -> bool:
    """etcd forgets its history: watches that fell behind have to list."""
    world.etcd.compact()
    return True


def move(world: World) -> bool:
    """An administrator moves leaderships: fast changes of leader without a dead broker."""
    return world.move_a_leader()


FAULTS: Final[dict[str, tuple[Callable[[World], bool], int]]] = {
    "kill": (kill, 4),
    "power loss": (power, 5),
    "power loss of all": (power_all, 1),
    "clean restart": (terminate, 3),
    "pause": (pause, 5),
    "hang": (hang, 2),
    "clock jump": (jump, 1),
    "cut": (cut, 3),
    "cut one way": (cut_one_way, 3),
    "isolated": (isolate, 3),
    "clients cut off": (unseen, 2),
    "drop": (drop, 2),
    "delay": (delay, 2),
    "reorder": (reorder, 3),
    "duplicate": (duplicate, 3),
    "failed sync": (failed_sync, 2),
    "lost disk": (lost_disk, 1),
    "full disk": (full_disk, 2),
    "slow disk": (slow_disk, 3),
    "etcd unreachable": (etcd_unreachable, 4),
    "etcd without majority": (etcd_down, 1),
    "etcd leader change": (etcd_leader, 2),
    "lease ends early": (lease_early, 2),
    "all leases end": (leases_all, 1),
    "ambiguous transactions": (ambiguous, 4),
    "news late": (stale, 3),
    "history compacted": (compact, 1),
    "leader moved": (move, 4),
}
"""Name, what does it, and its share."""
