"""What the metadata holds, as values: brokers, topics, partitions; and the documents they are kept as.

Always true: nothing here changes once made. A `Topic` is compared by identity: a change of anything about it or its
partitions makes a new one, so that whatever was derived from it (an encoded answer, say) can be kept with the object.

Two epochs: a broker's tells its sessions apart (the create revision of the session's key; 0 on a single node), a
leader epoch the leaderships of a partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from mansio.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

CREATING: Final = "creating"
LIVE: Final = "live"
DELETING: Final = "deleting"
NO_LEADER: Final = -1
FENCED: Final = "fenced"
ACTIVE: Final = "active"
DRAINING: Final = "draining"


class BrokerState(NamedTuple):
    """A broker that has a session. `rack` is None where none is told. `epoch` tells this session from any other."""

    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int = 0


class Registration(NamedTuple):
    """What a broker may do, also while it is away: `active` may lead, `draining` gives its leaderships away, `fenced`
    was given up by the controller and must register again."""

    state: str
    mod_revision: int


class ControllerState(NamedTuple):
    """Who decides for the cluster now. `epoch` is the create revision of the key: every write of the controller
    depends on it."""

    node_id: int
    epoch: int


class BrokerChange(NamedTuple):
    """What happened to a broker. `before` and `after` are its session (None: it has none), never with two different
    epochs: one session after another is told as two changes. Both are the same where only its registration changed."""

    node_id: int
    before: BrokerState | None
    after: BrokerState | None


class TopicCreator(NamedTuple):
    """Which session of which broker is creating or deleting a topic."""

    node_id: int
    epoch: int


class PartitionState(NamedTuple):
    """Who keeps a partition, who leads it (-1: nobody), who is in sync (nobody: all that was in sync is lost).

    `leader_broker_epoch` is the session the leader was chosen in: a broker that has another one since then does not
    lead, whatever `leader` says, until it is chosen anew. `mod_revision` is that of the partition's key.
    """

    replicas: tuple[int, ...]
    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    partition_epoch: int = 0
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    leader_broker_epoch: int = 0
    mod_revision: int = 0

    def led_by(self, node_id: int, broker_epoch: int) -> bool:
        """Whether this session of this broker is the leader."""
        return self.leader == node_id and self.leader_broker_epoch == broker_epoch


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Topic:
    """One topic. Identity is equality: see the module. `mod_revision` is that of the topic's own key."""

    name: str
    topic_id: UUID
    partitions: tuple[PartitionState, ...]
    replication_factor: int
    configs: Mapping[str, str]
    internal: bool
    state: str
    mod_revision: int
    created_by: TopicCreator | None = None
    """Of a topic that is not live: who is at it. None on a single node."""


class QuotaEntry(NamedTuple):
    """One key under `quotas/`: whom for, and rates by name; `broker.services.quotas` reads it."""

    document: Mapping[str, Any]
    mod_revision: int


class GroupConfigEntry(NamedTuple):
    """One key under `groupconfigs/`: the settings a group has of its own, by name; `config.group_config` reads
    them."""

    configs: Mapping[str, str]
    mod_revision: int


@dataclass(frozen=True, slots=True)
class TopicChange:
    """What happened to a topic: `before` is None when it became live, `after` when it stopped being."""

    before: Topic | None
    after: Topic | None


def topic_document(topic: Topic) -> dict[str, Any]:
    """The value of the key `topics/<name>`."""
    document: dict[str, Any] = {
        "uuid": str(topic.topic_id),
        "partitions": len(topic.partitions),
        "replication_factor": topic.replication_factor,
        "configs": dict(topic.configs),
        "internal": topic.internal,
        "state": topic.state,
    }
    return document if topic.created_by is None else {**document, "maker": topic.created_by}


def topic_of(
    name: str, document: Mapping[str, Any], known: Mapping[int, PartitionState], mod_revision: int
) -> Topic:
    """What such a value says, with the partitions `known` by their own keys. Raises `StorageError` for a topic that is
    live without all of them."""
    count = document["partitions"]
    missing = [index for index in range(count) if index not in known]
    if missing and document["state"] == LIVE:
        raise StorageError(f"metadata of topic {name}: partition {missing[0]} is missing")
    return Topic(
        name=name,
        topic_id=UUID(document["uuid"]),
        partitions=tuple(known[index] for index in range(count) if index in known),
        replication_factor=document["replication_factor"],
        configs=document["configs"],
        internal=document["internal"],
        state=document["state"],
        mod_revision=mod_revision,
        created_by=TopicCreator(*document["maker"]) if document.get("maker") else None,
    )


def partition_document(partition: PartitionState) -> dict[str, Any]:
    """The value of the key `parts/<topic-uuid>/<p>`."""
    document: dict[str, Any] = {
        "replicas": partition.replicas,
        "adding": partition.adding,
        "removing": partition.removing,
        "leader": partition.leader,
        "leader_epoch": partition.leader_epoch,
        "isr": partition.isr,
        "part_epoch": partition.partition_epoch,
    }
    if partition.leader_broker_epoch:
        document["leader_broker_epoch"] = partition.leader_broker_epoch
    return document


def partition_of(document: Mapping[str, Any], mod_revision: int) -> PartitionState:
    """What such a value says."""
    return PartitionState(
        replicas=tuple(document["replicas"]),
        leader=document["leader"],
        leader_epoch=document["leader_epoch"],
        isr=tuple(document["isr"]),
        partition_epoch=document["part_epoch"],
        adding=tuple(document["adding"]),
        removing=tuple(document["removing"]),
        leader_broker_epoch=document.get("leader_broker_epoch", 0),
        mod_revision=mod_revision,
    )
