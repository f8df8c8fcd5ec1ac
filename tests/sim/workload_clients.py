"""Checks of a simulated cluster that no client can do: they compare disks, logs and etcd of all brokers.

`check_durable` is asked at every acknowledgement, `reasons` until it is all well again, `check_end` at the end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mansio.broker.partition.partition import Partition
from mansio.metadata.metadata_store import decode
from mansio.metadata.model import TOPIC_LIVE
from mansio.wire.batch.record_reader import read_records
from sim import moves
from sim.clients import TOPIC
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from uuid import UUID

    from sim.brokers import SimulatedBroker
    from sim.world import World


def partitions_of(broker: SimulatedBroker) -> Iterator[Partition]:
    """All that are open there; of one that was stopped those that were."""
    if broker.closed:
        yield from broker.closed
    elif hasattr(broker, "core"):  # it has come that far
        for topic in broker.core.state.topics.values():
            for kept in broker.core.partitions.partitions_or_errors(topic):
                if isinstance(kept, Partition):
                    yield kept


def unopened(broker: SimulatedBroker) -> bool:
    """Is there a partition that could not be opened?"""
    return any(
        not isinstance(kept, Partition)
        for topic in broker.core.state.topics.values()
        for kept in broker.core.partitions.partitions_or_errors(topic)
    )


def copies(
    world: World, topic_id: UUID, index: int, brokers: Iterable[SimulatedBroker] = ()
) -> list[Partition]:
    """Of one partition, on these brokers; on all as they are now by default."""
    found = []
    for broker in brokers or world.brokers():
        if broker.closed:
            found += [one for one in broker.closed if (one.topic_id, one.index) == (topic_id, index)]
        elif hasattr(broker, "core"):  # asked for at every acknowledgement: no look through all topics
            state = broker.core.state
            topic = state.topics_by_id.get(topic_id)
            if topic is not None and state.topics.get(topic.name) is topic and index < len(topic.partitions):
                kept = broker.core.partitions.partitions_or_errors(topic)[index]
                found += [kept] if isinstance(kept, Partition) else ()
    return found


def check_durable(world: World, leader: SimulatedBroker, partition: Partition, offset: int) -> None:
    """An acknowledged batch was, or is, on stable storage of every broker that is in sync, and of as many as
    min.insync.replicas says: of a topic that is there. Of one that is being deleted they may have let go already."""
    if leader.is_clustered and not _is_live(world, leader, partition):
        return
    epoch = partition.log.leader_epochs.epoch_for_offset(offset)
    having = {
        broker.node_id
        for broker in world.lives
        for one in copies(world, partition.topic_id, partition.index, (broker,))
        if one.log.start_offset > offset  # the offset of a repeat, whose first record was deleted
        or (one.log.durable_end_offset > offset and one.log.leader_epochs.epoch_for_offset(offset) == epoch)
    }
    needed = {leader.node_id, *_in_sync(world, leader, partition)}
    if not needed <= having or len(having) < partition.settings.min_insync_replicas:
        what = (
            f"{partition.name}/{offset}, which {sorted(needed)} must have durable and {sorted(having)} have"
        )
        world.checker.broken(f"{leader.name} acknowledges {what}")


def _is_live(world: World, leader: SimulatedBroker, partition: Partition) -> bool:
    """As etcd has it."""
    key = leader.core.state.keys.topic(partition.topic)
    entry = world.etcd._entries.get(key)
    document = {} if entry is None else _decoded(key, entry.value)
    known: bool = document.get("uuid") == str(partition.topic_id) and document["state"] == TOPIC_LIVE
    return known


def _in_sync(world: World, leader: SimulatedBroker, partition: Partition) -> list[int]:
    """What etcd has, as long as it has no newer leader."""
    if not leader.is_clustered:
        return []
    key = leader.core.state.keys.partition(partition.topic_id, partition.index)
    entry = world.etcd._entries.get(key)
    document = {} if entry is None else _decoded(key, entry.value)
    known: bool = document.get("leader_epoch") == partition.leader_epoch
    return document["isr"] if known else []


@lru_cache(maxsize=64)
def _decoded(key: str, value: bytes) -> dict[str, Any]:
    """Of many acknowledgements in a row."""
    return decode(key, value)


def reasons(world: World) -> Iterator[str]:
    """Why it is not all well yet."""
    brokers = world.brokers()
    for broker in brokers:
        if not (broker.ready and broker.running):
            yield f"{broker.name} is not ready"
        elif broker.is_clustered and broker.cluster_member.session is None:
            yield f"{broker.name} has no session"
    if not all(broker.ready for broker in brokers):
        return
    state = brokers[0].core.state
    for topic in state.topics.values() if not world.is_single_node else ():
        for index, one in enumerate(topic.partitions):
            if set(one.isr) != set(one.replicas) or one.leader not in one.isr:
                yield f"{topic.name}-{index}: leader {one.leader}, in sync {one.isr} of {one.replicas}"
    if state.unfinished_topics:
        yield f"topics half made or half deleted: {sorted(state.unfinished_topics)}"
    if not world.administrator.done:
        yield "the administrator is at work"
    is_at_rest = world.scene is None or not world.scene.has_schedules
    if is_at_rest:
        yield from unlike(world, TOPIC)  # the other topic goes on, because groups do
    for producer in world.producers:
        if producer.waits_since_ms:
            yield f"{producer.name} waits since {producer.waits_since_ms:.0f}: {producer.last_error}"
    for reader in world.readers:
        end = max(
            (one.end_offset for one in copies(world, state.topics[TOPIC].topic_id, reader.index)), default=0
        )
        if reader.position != end and is_at_rest:
            yield f"{reader.name} is at {reader.position} of {end}: {reader.last_error}"
    if world.mover is not None:
        yield from moves.reasons(world)
    if world.delivery is not None:
        yield from world.delivery.reasons()
    if world.scene is not None:
        yield from world.scene.reasons()
    clients: list[Any] = [*world.committers, *world.members]
    for client in clients:
        if client.good_at_ms < world.healed_ms:
            yield f"{client.name} got through last at {client.good_at_ms:.0f}: {client.last_error}"


def unlike(world: World, only: str | None = None) -> Iterator[str]:
    """Partitions whose copies are not all of one length, and committed."""
    for topic in world.brokers()[0].core.state.topics.values():
        for index in range(len(topic.partitions)) if only in (None, topic.name) else ():
            ends = {(one.end_offset, one.high_watermark) for one in copies(world, topic.topic_id, index)}
            if len(ends) != 1 or len({*next(iter(ends))}) != 1:
                yield f"{topic.name}-{index}: ends and high watermarks {sorted(ends)}"


def check_end(world: World) -> None:
    """Every copy is sound, like the others, and has what was promised; etcd keeps nothing of topics that are gone."""
    topics = world.brokers()[0].core.state.topics
    live = {str(topic.topic_id) for topic in topics.values()}
    kept = {
        entry.key.split("/")[4] for entry in world.etcd.list("/mansio/").entries if "/parts/" in entry.key
    }
    if kept != live and not world.is_single_node:
        world.checker.broken(f"etcd keeps partitions of {sorted(kept - live)}, which are no topics")
    for topic in topics.values():
        for index in range(len(topic.partitions)):
            logs = [partition.log for partition in copies(world, topic.topic_id, index)]
            if len(logs) != len(topic.partitions[index].replicas):
                world.checker.broken(f"{topic.name}-{index} has {len(logs)} copies")
            for log in logs:
                log.verify()
            if topic.internal:
                continue  # compacted by each broker for itself
            start = max(log.start_offset for log in logs)  # a deletion that nobody confirmed may be anywhere
            batches = [list(log.batches(start)) for log in logs]
            if any(one != batches[0] for one in batches):
                world.checker.broken(f"{topic.name}-{index} is not the same everywhere")
            if topic.name == TOPIC and world.scene is None:
                records = [read_records(batch, output_bytes_max=1 << 24) for batch in batches[0]]
                world.checker.finish(
                    index, [present(one.value).strip() for batch in records for one in batch]
                )
