"""Creation of groups: effective settings, assignors and the codec of the embedded consumer protocol.

Assignors are built in (`uniform`, `range`) or installed as Python entry points of the group `mansio.assignors`; an
entry point names a class that implements `state.assignors.Assignor`. The setting `group_consumer_assignors` lists the
assignors that members can select; the first one is the default.

Invariants:
* Assignors are loaded once, when the broker starts.
* An entry point cannot replace a built-in assignor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.config.group_config import (
    CONSUMER_HEARTBEAT_INTERVAL,
    CONSUMER_SESSION_TIMEOUT,
    effective_int_value,
)
from mansio.config.share_group_config import SHARE_HEARTBEAT_INTERVAL, SHARE_SESSION_TIMEOUT
from mansio.errors import ConfigError
from mansio.state.assignors.range import RangeAssignor
from mansio.state.assignors.uniform import UniformAssignor
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.consumer_group.types import ClassicSubscription, ConsumerGroupSettings
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.consumer_protocol import (
    Assignment,
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.state.assignors import Assignor
    from mansio.state.classic_group.types import Response
    from mansio.state.consumer_group.types import Records, Topics

ENTRY_POINT_GROUP: Final = "mansio.assignors"
CLASSIC_ASSIGNMENT_VERSION: Final = 0
"""Version in which assignments for classic members are encoded. Every client reads version 0, and the format is the
same in all versions."""

_BUILT_IN: Final[dict[str, type[Any]]] = {"uniform": UniformAssignor, "range": RangeAssignor}


def load_assignors(names: Iterable[str]) -> Mapping[str, Assignor]:
    """Load the assignors with these names, in this order. Raises `ConfigError` if there is no name, or an assignor is
    unknown or cannot be loaded."""
    unique_names = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not unique_names:
        raise ConfigError("group_consumer_assignors: at least one assignor is required")
    return {name: _load_assignor(name) for name in unique_names}


def _load_assignor(name: str) -> Assignor:
    assignor: Assignor
    if name in _BUILT_IN:
        assignor = _BUILT_IN[name]()
        return assignor
    from importlib.metadata import entry_points  # slow to import, and most brokers need no entry points

    found = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
    if found is None:
        known = ", ".join(
            sorted({*_BUILT_IN, *(each.name for each in entry_points(group=ENTRY_POINT_GROUP))})
        )
        raise ConfigError(f"group_consumer_assignors: unknown assignor {name!r}; available: {known}")
    try:
        assignor = found.load()()
    except Exception as error:
        raise ConfigError(
            f"group_consumer_assignors: {name!r} cannot be loaded from {found.value}: {error}"
        ) from error
    if getattr(assignor, "name", None) != name or not callable(getattr(assignor, "assign", None)):
        raise ConfigError(f"group_consumer_assignors: {found.value} is not an assignor named {name!r}")
    return assignor


class ConsumerProtocolCodec:
    """`ClassicCodec` for Kafka's embedded "consumer" protocol. Malformed bytes raise `WireError`."""

    def decode_subscription(self, metadata: bytes) -> ClassicSubscription:
        """Decode the Subscription that a member sends when it joins."""
        read = decode_subscription(metadata)
        return ClassicSubscription(read.topics, read.owned_partitions, read.rack_id)

    def decode_assignment(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        """Decode an Assignment and return its partitions (topic name, index)."""
        return decode_assignment(assignment).partitions

    def encode_assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        """Encode partitions (topic name, index) as an Assignment."""
        named = tuple(TopicPartition(*each) for each in partitions)
        return encode_assignment(Assignment(named), version=CLASSIC_ASSIGNMENT_VERSION)


class GroupFactory:
    """Creates the groups of a coordinator. The constructor raises `ConfigError` for unknown assignors.

    `overrides` returns the settings of the group with this id that override the broker's settings.
    """

    def __init__(self, settings: GroupSettings, overrides: Callable[[str], Mapping[str, str]]) -> None:
        self._settings = settings
        self._overrides = overrides
        self.assignors = load_assignors(settings.consumer_assignors)
        self._codec = ConsumerProtocolCodec()

    def classic_group(self, group_id: str) -> ClassicGroup:
        """Create a classic group without members."""
        return ClassicGroup(
            group_id,
            initial_delay_ms=self._settings.initial_rebalance_delay_ms,
            size_max=self._settings.members_max,
        )

    def consumer_group(self, group_id: str) -> ConsumerGroup:
        """Create a consumer group without members, with the effective settings of this group id."""
        return ConsumerGroup(
            group_id,
            assignors=self.assignors,
            default_assignor=next(iter(self.assignors)),
            settings=self.consumer_settings(group_id),
            codec=self._codec,
        )

    def share_group(self, group_id: str) -> ShareGroup:
        """Create a share group without members, with the effective settings of this group id."""
        return ShareGroup(group_id, settings=self.share_settings(group_id))

    def converted_from_classic(
        self, classic: ClassicGroup, topics: Topics, now_ms: float
    ) -> tuple[ConsumerGroup, Records, list[Response]]:
        """Create the consumer group that replaces a classic group with members; see `ConsumerGroup.from_classic`."""
        return ConsumerGroup.from_classic(
            classic,
            assignors=self.assignors,
            default_assignor=next(iter(self.assignors)),
            settings=self.consumer_settings(classic.group_id),
            codec=self._codec,
            topics=topics,
            now_ms=now_ms,
        )

    def consumer_settings(self, group_id: str) -> ConsumerGroupSettings:
        """Return the effective settings of a consumer group."""
        own, settings = self._overrides(group_id), self._settings
        return ConsumerGroupSettings(
            effective_int_value(CONSUMER_SESSION_TIMEOUT, own, settings.consumer_session_timeout_ms),
            effective_int_value(CONSUMER_HEARTBEAT_INTERVAL, own, settings.consumer_heartbeat_interval_ms),
            settings.members_max,
        )

    def share_settings(self, group_id: str) -> ConsumerGroupSettings:
        """Return the effective settings of a share group."""
        own, settings = self._overrides(group_id), self._settings
        return ConsumerGroupSettings(
            effective_int_value(SHARE_SESSION_TIMEOUT, own, settings.share_session_timeout_ms),
            effective_int_value(SHARE_HEARTBEAT_INTERVAL, own, settings.share_heartbeat_interval_ms),
            settings.share_members_max,
        )
