"""How a consumer group reads and writes what its classic members send: Kafka's "consumer" embedded protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.consumer_group.types import ClassicSubscription
from mansio.wire.internal_records.consumer_protocol import (
    Assignment,
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Sequence

CLASSIC_ASSIGNMENT_VERSION = 0
"""Every client reads it, and all versions look the same."""


class ConsumerProtocolCodec:
    """`state.consumer_group.types.ClassicCodec` by `wire.internal_records.consumer_protocol`. Malformed bytes
    raise `WireError`."""

    def subscription(self, metadata: bytes) -> ClassicSubscription:
        """What a member wants and has."""
        read = decode_subscription(metadata)
        return ClassicSubscription(read.topics, read.owned, read.rack)

    def assigned(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        """The partitions of an Assignment."""
        return decode_assignment(assignment).partitions

    def assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        """The bytes of an Assignment."""
        named = tuple(TopicPartition(*each) for each in partitions)
        return encode_assignment(Assignment(named), version=CLASSIC_ASSIGNMENT_VERSION)
