"""Data types of a consumer group (KIP-848): requests, responses, topics, settings, states.

The state machine is in `group`. Topics are identified by the 16 bytes of their id, because a topic that was deleted and
created again under the same name is another topic. Names are used only where a client sends them.

Source: KIP-848.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.wire.topic_partition import TopicIdPartition


Records = list[tuple[bytes, bytes | None]]
"""Keys and values (None deletes the key) to append to `__consumer_offsets`, all in one batch and in this order."""

NO_PARTITIONS: Final[frozenset[TopicIdPartition]] = frozenset()

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""Special values of the member epoch in a heartbeat: the member joins, leaves, or leaves as a static member that will
return."""

NEVER_RESOLVED: Final = -1

CLASSIC_PROTOCOL_TYPE: Final = "consumer"
"""Protocol type of the classic members that can join a consumer group; their metadata contain a subscription."""

RECONCILING_HEARTBEAT_INTERVAL_MS: Final = 300
"""Heartbeat interval of a member that has to revoke partitions or waits for partitions of other members."""


class ConsumerGroupState(StrEnum):
    """States of a consumer group, with their names in ListGroups and ConsumerGroupDescribe."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class MemberState(IntEnum):
    """Reconciliation state of a member, with the numbers of Kafka's record."""

    STABLE = 0
    UNREVOKED = 1  # it has to revoke partitions and has not confirmed it yet
    UNRELEASED = 2  # other members still own some partitions of its target


class ConsumerGroupSettings(NamedTuple):
    """Effective settings of one consumer or share group. `size_max`: maximum number of members."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 500
    size_max: int = 1_000


class Topics(NamedTuple):
    """The existing topics, as an immutable view.

    `ids`: topic name -> topic id. `partitions`: topic id -> number of partitions. `matches`: regular expression ->
    matching topic names, at least for every expression of the group's members and of the request
    (`ConsumerGroup.subscribed_regexes`). Callers pass the same object as long as nothing has changed, because a group
    compares it by identity.
    """

    ids: Mapping[str, bytes]
    partitions: Mapping[bytes, int]
    matches: Mapping[str, tuple[str, ...]]


class Heartbeat(NamedTuple):
    """ConsumerGroupHeartbeat request. A field that is None (for the timeout -1) is unchanged.

    `member_id`: never empty; the caller generates it for a client without one (version 0). `topic_regex`: "" if the
    member ends its subscription by regular expression. `owned`: the partitions that the member owns.
    """

    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    topic_regex: str | None = None
    assignor: str | None = None
    owned: frozenset[TopicIdPartition] | None = None


class HeartbeatResponse(NamedTuple):
    """Response to a heartbeat. `assignment`: sorted partitions that the member may read from now on; None if
    unchanged."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    assignment: tuple[TopicIdPartition, ...] | None


class ClassicSubscription(NamedTuple):
    """Subscription of a classic member: topic names, owned partitions (topic name, index), and rack."""

    topics: tuple[str, ...]
    owned: tuple[tuple[str, int], ...]
    rack_id: str | None


class ClassicCodec(Protocol):
    """Codec of Kafka's embedded "consumer" protocol, which classic members use. Malformed bytes raise `WireError`."""

    def decode_subscription(self, metadata: bytes) -> ClassicSubscription:
        """Decode the Subscription that a member sends when it joins."""

    def decode_assignment(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        """Decode an Assignment and return its partitions (topic name, index); empty bytes contain none."""

    def encode_assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        """Encode partitions (topic name, index) as an Assignment."""


EMPTY, ASSIGNING, RECONCILING, STABLE, DEAD = ConsumerGroupState

TRANSITIONS: Final[dict[ConsumerGroupState, frozenset[ConsumerGroupState]]] = {
    EMPTY: frozenset({ASSIGNING, RECONCILING, STABLE, DEAD}),
    ASSIGNING: frozenset({RECONCILING, STABLE, EMPTY}),
    RECONCILING: frozenset({ASSIGNING, STABLE, EMPTY}),
    STABLE: frozenset({ASSIGNING, RECONCILING, EMPTY}),
    DEAD: frozenset({EMPTY}),  # only if the deletion could not be written
}
"""Possible next states of a group between two calls of its methods."""
