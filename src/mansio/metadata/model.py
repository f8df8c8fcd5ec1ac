"""Metadata values: brokers, topics, partitions, and their JSON documents in the metadata store.

Invariant: values are immutable. A `Topic` is compared by identity: a change of the topic or of its partitions creates a
new object, so that derived data (an encoded response) can be cached with the object.

There are two epochs. The broker epoch identifies a session of a broker: it is the create revision of the session's key,
and 0 on a single node. The leader epoch identifies a leadership of a partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from mansio.config.listeners import DEFAULT_LISTENER, SecurityProtocol
from mansio.errors import StorageError
from mansio.metadata.feature_level import FIRST_RELEASE, LevelRange, decode_levels

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

TOPIC_CREATING: Final = "creating"
TOPIC_LIVE: Final = "live"
TOPIC_DELETING: Final = "deleting"
NO_LEADER: Final = -1
BROKER_FENCED: Final = "fenced"
BROKER_ACTIVE: Final = "active"
BROKER_DRAINING: Final = "draining"


class BrokerEndpoint(NamedTuple):
    """A broker as the clients of one listener see it: the address that it advertises there. `rack` is None if
    unknown."""

    node_id: int
    host: str
    port: int
    rack: str | None
    security_protocol: str = SecurityProtocol.PLAINTEXT


class InterBrokerListener(NamedTuple):
    """The listener through which a broker reaches the others."""

    name: str = DEFAULT_LISTENER
    security_protocol: str = SecurityProtocol.PLAINTEXT


class BrokerState(NamedTuple):
    """A broker with a session. `host` and `port`: its address for this broker, an empty host if there is none. `rack`
    is None if unknown. `epoch` identifies the session. `endpoints`: its addresses for clients, by name of the listener;
    not to be changed. `host_label`: see `broker_host_label`; empty if the broker is a host of its own."""

    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int = 0
    endpoints: Mapping[str, BrokerEndpoint] = MappingProxyType({})
    host_label: str = ""


class Registration(NamedTuple):
    """Registration of a broker, which exists also while the broker is offline.

    `state` is "active" (the broker may lead), "draining" (it transfers its leaderships before it stops) or "fenced"
    (the controller declared it dead, and it must register again). `mod_revision` is that of the registration's key.
    `levels`: the feature levels that the broker supports. `host_label` is that of the last session.
    """

    state: str
    mod_revision: int
    levels: LevelRange = FIRST_RELEASE
    host_label: str = ""


class ControllerState(NamedTuple):
    """The current controller. `epoch` is the create revision of its key; every write of the controller requires it."""

    node_id: int
    epoch: int


class BrokerChange(NamedTuple):
    """A change of a broker. `before` and `after` are its session before and after the change; None: no session.

    They are equal if only the registration changed. They never have different epochs: the replacement of one session by
    another is reported as two changes.
    """

    node_id: int
    before: BrokerState | None
    after: BrokerState | None


class TopicCreator(NamedTuple):
    """The session of the broker that is creating or deleting a topic."""

    node_id: int
    epoch: int


class PartitionState(NamedTuple):
    """Replicas, leader (-1: none) and in-sync replicas of a partition (empty: all in-sync replicas are lost).

    `adding` and `removing` are the replicas that a reassignment adds and removes. `partition_epoch` increases with each
    change. `leader_broker_epoch` is the broker epoch in which the leader was elected: a broker with a newer epoch does
    not lead the partition until it is elected again. `mod_revision` is that of the partition's key.
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

    def is_led_by(self, node_id: int, broker_epoch: int) -> bool:
        """Whether the broker `node_id` leads the partition in its session `broker_epoch`."""
        return self.leader == node_id and self.leader_broker_epoch == broker_epoch


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Topic:
    """One topic, compared by identity. `mod_revision` is that of the topic's own key."""

    name: str
    topic_id: UUID
    partitions: tuple[PartitionState, ...]
    replication_factor: int
    configs: Mapping[str, str]
    internal: bool
    state: str
    mod_revision: int
    created_by: TopicCreator | None = None
    """The session that is creating or deleting the topic; None for a live topic and on a single node."""


class QuotaEntry(NamedTuple):
    """The value of one key under `quotas/`: an entity and its rates by name. `broker.services.quotas` decodes it."""

    document: Mapping[str, Any]
    mod_revision: int


class ConfigOverrides(NamedTuple):
    """The value of one key under `groupconfigs/` or `brokerconfigs/`: the settings of a group or broker by name.

    `config.group_config` and `config.broker_config` decode the settings.
    """

    configs: Mapping[str, str]
    mod_revision: int


@dataclass(frozen=True, slots=True)
class TopicChange:
    """A change of a live topic. `before` is None if the topic became live, `after` is None if it is no longer live.

    `partitions`: the indexes of the partitions that differ, if nothing else does; None if anything may differ.
    """

    before: Topic | None
    after: Topic | None
    partitions: Collection[int] | None = None

    def changed_partitions(self) -> Collection[int]:
        """Return the indexes of the partitions of `after` that may differ from those of `before`."""
        if self.partitions is not None:
            return self.partitions
        return range(0 if self.after is None else len(self.after.partitions))


def default_host(node_id: int) -> str:
    """Return the host of a broker without a label. It has a space, so that a number as label is not taken for it."""
    return f"broker {node_id}"


def host_of(
    node_id: int, brokers: Mapping[int, BrokerState], registrations: Mapping[int, Registration]
) -> str:
    """Return the label of the host of a broker; without one, the broker is a host of its own."""
    known = brokers.get(node_id) or registrations.get(node_id)
    return (known.host_label if known is not None else "") or default_host(node_id)


def session_document(
    endpoints: Mapping[str, BrokerEndpoint],
    inter_broker_listener: str,
    rack: str | None,
    host_label: str = "",
) -> dict[str, Any]:
    """Return the value of a broker's session key, without the field `run`. `endpoints`: by name of the listener.

    Version 0.1 reads `host` and `port` only: the address of the inter-broker listener, for brokers and clients."""
    own = endpoints[inter_broker_listener]
    listeners = {
        name: {"host": each.host, "port": each.port, "security_protocol": str(each.security_protocol)}
        for name, each in endpoints.items()
    }
    document = {
        "host": own.host,
        "port": own.port,
        "rack": rack,
        "listeners": listeners,
        "inter_broker_listener": inter_broker_listener,
    }
    return {**document, "host_label": host_label} if host_label else document


def decode_session(
    node_id: int, document: Mapping[str, Any], epoch: int, inter_broker: InterBrokerListener
) -> BrokerState:
    """Decode the value of a broker's session key. `inter_broker`: the listener through which this broker reaches the
    others.

    A broker without that listener is reached through its own inter-broker listener, if that has the same security
    protocol: so a listener can be renamed in a rolling restart. A broker of version 0.1 has one listener, which has the
    name of `inter_broker`.
    """
    host, port, rack = document["host"], document["port"], document["rack"]
    listeners = document.get("listeners")
    if listeners is None:
        listeners = {inter_broker.name: {"host": host, "port": port}}
    endpoints = {
        name: BrokerEndpoint(
            node_id,
            each["host"],
            each["port"],
            rack,
            each.get("security_protocol", SecurityProtocol.PLAINTEXT),
        )
        for name, each in listeners.items()
    }
    label = document.get("host_label", "")
    found = endpoints.get(inter_broker.name, endpoints.get(document.get("inter_broker_listener", "")))
    if found is None or found.security_protocol != inter_broker.security_protocol:
        return BrokerState(node_id, "", -1, rack, epoch, endpoints, label)
    return BrokerState(node_id, found.host, found.port, rack, epoch, endpoints, label)


def registration_document(state: str, levels: LevelRange, host_label: str = "") -> dict[str, Any]:
    """Return the value of the key of a broker's registration. Version 0.1 reads and writes `state` only."""
    document = {"state": state, "levels": levels}
    return {**document, "host_label": host_label} if host_label else document


def decode_registration(document: Mapping[str, Any], mod_revision: int) -> Registration:
    """Decode the value of the key of a broker's registration."""
    return Registration(
        document["state"], mod_revision, decode_levels(document), document.get("host_label", "")
    )


def topic_document(topic: Topic) -> dict[str, Any]:
    """Return the value of the key `topics/<name>`."""
    document: dict[str, Any] = {
        "uuid": str(topic.topic_id),
        "partitions": len(topic.partitions),
        "replication_factor": topic.replication_factor,
        "configs": dict(topic.configs),
        "internal": topic.internal,
        "state": topic.state,
    }
    return document if topic.created_by is None else {**document, "maker": topic.created_by}


def decode_topic(
    name: str, document: Mapping[str, Any], known: Mapping[int, PartitionState], mod_revision: int
) -> Topic:
    """Decode the value of the key `topics/<name>`. `known` are its partitions by index, from their own keys.

    Raises `StorageError` if a partition of a live topic is missing.
    """
    count = document["partitions"]
    missing = [index for index in range(count) if index not in known]
    if missing and document["state"] == TOPIC_LIVE:
        raise missing_partition(name, missing[0])
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


def missing_partition(name: str, index: int) -> StorageError:
    """Return the error for a live topic without the key of one of its partitions."""
    return StorageError(f"metadata of topic {name}: partition {index} is missing")


def partition_document(partition: PartitionState) -> dict[str, Any]:
    """Return the value of the key `parts/<topic-uuid>/<p>`."""
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


def decode_partition(document: Mapping[str, Any], mod_revision: int) -> PartitionState:
    """Decode the value of the key `parts/<topic-uuid>/<p>`."""
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
