"""Recent refusals: which clients were refused to read in groups and topics in the last minutes.

The audit stores each refusal; this keeps the last ones in memory, for the answer to why a group does not go on. One
entry for each client, operation and resource, at most `REFUSALS_MAX` of them; the oldest gives way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.audit.audit_merger import OTHER_RESOURCES
from mansio.state.authorization.acls import Operation, ResourceType

if TYPE_CHECKING:
    from collections.abc import Collection

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import OnRefusal
    from mansio.ports import Clock

REFUSALS_MAX: Final = 1_000
"""Maximum number of refusals that are kept."""

REFUSAL_MS_MAX: Final = 5 * 60 * 1000
"""Age from which on a refusal is not recent."""

_KINDS: Final = frozenset({ResourceType.GROUP, ResourceType.TOPIC})

LOOK_UPS: Final = frozenset(
    {
        "FIND_COORDINATOR",
        "METADATA",
        "DESCRIBE_TOPIC_PARTITIONS",
        "LIST_OFFSETS",
        "OFFSET_FETCH",
        "CONSUMER_GROUP_HEARTBEAT",
        "SHARE_GROUP_HEARTBEAT",
    }
)
"""Names of the APIs with which a consumer looks up what it reads. Other descriptions are those of administrators."""


class Refusal(NamedTuple):
    """An operation on a resource that a client was refused, `times` times, the last time `ago_ms` ago."""

    caller: Caller
    operation: Operation
    resource_type: ResourceType
    name: str
    times: int
    ago_ms: int


class _Entry:
    """The last caller of one kind of refusal, their number, and the time of the last one in seconds."""

    __slots__ = ("caller", "count", "last")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.count = 0
        self.last = 0.0


class RecentRefusals:
    """The refusals of one broker."""

    def __init__(self, clock: Clock, forward: OnRefusal) -> None:
        """`forward`: called with each refusal, recent or not."""
        self._clock = clock
        self._forward = forward
        self._entries: dict[tuple[str, str, Operation, ResourceType, str], _Entry] = {}
        """By user, client id, operation and resource; the last one is last."""

    def report(
        self,
        caller: Caller,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        /,
        *,
        event_count: int = 1,
    ) -> None:
        """Remember a refusal; see `OnRefusal`."""
        self._forward(caller, operation, resource_type, name, event_count=event_count)
        if resource_type not in _KINDS or name == OTHER_RESOURCES:
            return
        if operation is not Operation.READ and not (
            operation is Operation.DESCRIBE and caller.api in LOOK_UPS
        ):
            return
        key = caller.session.user, caller.client_id, operation, resource_type, name
        entry = self._entries.pop(key, None) or _Entry(caller)
        entry.caller = caller
        entry.count += event_count
        entry.last = self._clock.monotonic()
        self._entries[key] = entry
        if len(self._entries) > REFUSALS_MAX:
            del self._entries[next(iter(self._entries))]

    def of(self, group: str, topics: Collection[str]) -> list[Refusal]:
        """Return the recent refusals to read in a group or one of these topics, the last one first."""
        now, found = self._clock.monotonic(), []
        for (_, _, operation, kind, name), entry in reversed(self._entries.items()):
            ago_ms = int((now - entry.last) * 1000)
            if ago_ms > REFUSAL_MS_MAX:
                break
            if name == group if kind is ResourceType.GROUP else name in topics:
                found.append(Refusal(entry.caller, operation, kind, name, entry.count, ago_ms))
        return found
