"""Creation of groups: effective settings, assignors and the codec of the embedded consumer protocol.

Assignors are built in (`uniform`, `range`) or installed as entry points of the group `mansio.assignors`; an entry point
names a class (protocol: `state.assignors.Assignor`). The setting `group_consumer_assignors` lists the assignors that
are offered; the first one is the default.

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

ENTRY_POINTS: Final = "mansio.assignors"
CLASSIC_ASSIGNMENT_VERSION: Final = 0
"""Every client reads version 0, and the format is the same in all versions."""

_BUILT_IN: Final[dict[str, type[Any]]] = {"uniform": UniformAssignor, "range": RangeAssignor}


def load_assignors(names: Iterable[str]) -> Mapping[str, Assignor]:
    """Load the assignors with these names, in this order. Raises `ConfigError` (one line with name and reason)."""
    wanted = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not wanted:
        raise ConfigError("group_consumer_assignors: at least one assignor is required")
    return {name: _load(name) for name in wanted}


def _load(name: str) -> Assignor:
    assignor: Assignor
    if name in _BUILT_IN:
        assignor = _BUILT_IN[name]()
        return assignor
    from importlib.metadata import entry_points  # slow to import, and most brokers need no entry points

    found = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is None:
        known = ", ".join(sorted({*_BUILT_IN, *(each.name for each in entry_points(group=ENTRY_POINTS))}))
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

    def subscription(self, metadata: bytes) -> ClassicSubscription:
        """Decode a Subscription."""
        read = decode_subscription(metadata)
        return ClassicSubscription(read.topics, read.owned_partitions, read.rack_id)

    def assigned(self, assignment: bytes) -> Sequence[tuple[str, int]]:
        """Decode the partitions of an Assignment."""
        return decode_assignment(assignment).partitions

    def assignment(self, partitions: Sequence[tuple[str, int]]) -> bytes:
        """Encode an Assignment."""
        named = tuple(TopicPartition(*each) for each in partitions)
        return encode_assignment(Assignment(named), version=CLASSIC_ASSIGNMENT_VERSION)


class GroupFactory:
    """Creates the groups of a coordinator. Raises `ConfigError` for unknown assignors.

    `overrides`: the settings of a single group, by group id.
    """

    def __init__(self, settings: GroupSettings, overrides: Callable[[str], Mapping[str, str]]) -> None:
        self._settings = settings
        self._overrides = overrides
        self.assignors = load_assignors(settings.consumer_assignors)
        self._codec = ConsumerProtocolCodec()

    def classic_group(self, group_id: str) -> ClassicGroup:
        """An empty classic group."""
        return ClassicGroup(
            group_id,
            initial_delay_ms=self._settings.initial_rebalance_delay_ms,
            size_max=self._settings.members_max,
        )

    def consumer_group(self, group_id: str) -> ConsumerGroup:
        """An empty consumer group with its effective settings."""
        return ConsumerGroup(
            group_id,
            assignors=self.assignors,
            default_assignor=next(iter(self.assignors)),
            settings=self.consumer_settings(group_id),
            codec=self._codec,
        )

    def share_group(self, group_id: str) -> ShareGroup:
        """An empty share group with its effective settings."""
        return ShareGroup(group_id, settings=self.share_settings(group_id))

    def converted_from_classic(
        self, classic: ClassicGroup, topics: Topics, now_ms: float
    ) -> tuple[ConsumerGroup, Records, list[Response]]:
        """The consumer group that replaces a classic one with members; see `ConsumerGroup.from_classic`."""
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
        """Effective settings of a consumer group."""
        own, settings = self._overrides(group_id), self._settings
        return ConsumerGroupSettings(
            effective_int_value(CONSUMER_SESSION_TIMEOUT, own, settings.consumer_session_timeout_ms),
            effective_int_value(CONSUMER_HEARTBEAT_INTERVAL, own, settings.consumer_heartbeat_interval_ms),
            settings.members_max,
        )

    def share_settings(self, group_id: str) -> ConsumerGroupSettings:
        """Effective settings of a share group."""
        own, settings = self._overrides(group_id), self._settings
        return ConsumerGroupSettings(
            effective_int_value(SHARE_SESSION_TIMEOUT, own, settings.share_session_timeout_ms),
            effective_int_value(SHARE_HEARTBEAT_INTERVAL, own, settings.share_heartbeat_interval_ms),
            settings.share_members_max,
        )
