"""Data types of a consumer group (KIP-848): requests, responses, topics, settings, states.

The rules are in `group`. Topics are identified by the 16 bytes of their id, because a topic that was deleted and
created again under the same name is another topic; names occur where a client sends them.

Source: KIP-848.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TopicPartition = tuple[bytes, int]
"""A partition: the 16 bytes of the topic id, and the partition index."""

Records = list[tuple[bytes, bytes | None]]
"""Keys and values (None deletes) to append to `__consumer_offsets`, all in one batch and in this order."""

NO_PARTITIONS: Final[frozenset[TopicPartition]] = frozenset()

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""Values of a heartbeat's epoch that are no epochs: join, leave, leave as a static member that will return."""

NEVER_RESOLVED: Final = -1

CLASSIC_PROTOCOL_TYPE: Final = "consumer"
"""The protocol type of the classic members that can join: their metadata contain the subscription."""

RECONCILING_HEARTBEAT_INTERVAL_MS: Final = 300
"""Heartbeat interval of a member that revokes partitions or waits for some."""


class ConsumerGroupState(StrEnum):
    """States, with the names in ListGroups and ConsumerGroupDescribe."""

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
    """Effective settings of one group. `size_max`: maximum number of members."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 500
    size_max: int = 1_000


class Topics(NamedTuple):
    """The existing topics.

    `ids`: name -> id; `partitions`: id -> number of partitions; `matches`: regular expression -> matching names, for
    every expression of the group's members and of the request (`ConsumerGroup.subscribed_regexes`). Pass the same
    object as long as nothing changed: a group compares by identity.
    """

    ids: Mapping[str, bytes]
    partitions: Mapping[bytes, int]
    matches: Mapping[str, tuple[str, ...]]


class Heartbeat(NamedTuple):
    """A ConsumerGroupHeartbeat request. None (and -1 for the timeout) means unchanged.

    `member_id` is never empty: for a client without one (version 0) the caller generates it. `topic_regex` is "" where
    the member ends its subscription by expression. `owned`: the partitions that the member owns.
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
    owned: frozenset[TopicPartition] | None = None


class HeartbeatResponse(NamedTuple):
    """Response to a heartbeat. `assignment`: sorted partitions the member may read from now on; None: unchanged."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    assignment: tuple[TopicPartition, ...] | None


class ClassicSubscription(NamedTuple):
    """Subscription of a classic member: topic names, owned partitions, rack."""

    topics: tuple[str, ...]
    owned: tuple[tuple[str, int], ...]
    rack_id: str | None


class ClassicCodec(Protocol):
    """Codec of Kafka's embedded "consumer" protocol, used by classic members. Malformed bytes raise `WireError`."""

    def subscription(self, metadata: bytes) -> ClassicSubscription:
        """Decode a Subscription."""

    def assigned(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        """Decode an Assignment; empty bytes mean no partitions."""

    def assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        """Encode an Assignment."""


EMPTY, ASSIGNING, RECONCILING, STABLE, DEAD = ConsumerGroupState

TRANSITIONS: Final[dict[ConsumerGroupState, frozenset[ConsumerGroupState]]] = {
    EMPTY: frozenset({ASSIGNING, RECONCILING, STABLE, DEAD}),
    ASSIGNING: frozenset({RECONCILING, STABLE, EMPTY}),
    RECONCILING: frozenset({ASSIGNING, STABLE, EMPTY}),
    STABLE: frozenset({ASSIGNING, RECONCILING, EMPTY}),
    DEAD: frozenset({EMPTY}),  # only if the deletion could not be written
}
"""Possible next states, observed between two calls."""
