"""Audit service: who did, or was refused, what, through which protocol, listener and broker.

Two places report to it: `Authorization` each refusal, and the request router each administrative change that succeeded.
The response to Metadata does not tell which topics were created automatically: `TopicAdminService` reports those. The
broker that decides or changes audits, with the identity of the client for which another broker forwards a request. What
brokers do for themselves is not audited.

A line is a JSON object. It goes to the file of the setting `audit_log`, or without one to the log of the process
(logger `mansio.audit`), and to the topic `__mansio_audit`.

Invariants:
* A line has names and addresses, never a credential, a record or the value of a setting.
* A client that is refused causes at most one line a minute for each principal, API, operation and resource, and a
  bounded number of them (`AuditMerger`). Each change has a line, or is counted in one.
* Nothing waits for the audit, and it refuses nothing: what is lost is counted.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.authorization import requester_of
from mansio.logs import fields
from mansio.state.audit.audit_merger import OTHER_RESOURCES, AuditMerger, EventKind
from mansio.state.authorization.acl_words import acl_text, adding_command, word_of
from mansio.state.authorization.acls import WILDCARD, Acl, Operation, PatternType, Permission, ResourceType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.audit.audit_queue import AuditQueue
    from mansio.ports import Clock, Scheduler, Timer
    from mansio.state.audit.audit_merger import AuditLine
    from mansio.state.authorization.authorizer import Authorizer

logger = logging.getLogger("mansio.audit")

REFUSED: Final = "refused"
DONE: Final = "done"
TEXT_CHARACTERS_MAX: Final = 249
"""Length to which names are truncated: that of the longest name of a topic."""

OTHER_PROTOCOLS: Final = frozenset({"http", "grpc", "sqs"})
"""Names of listeners that are those of their protocols."""

_WORDS: Final = {kind: word_of(kind) for kind in ResourceType}
_KINDS: Final = {word: kind for kind, word in _WORDS.items()}


class AuditService:
    """The audit of one broker. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorizer",
        "_clock",
        "_merger",
        "_node_id",
        "_queues",
        "_scheduler",
        "_timer",
        "_writes_log",
        "is_enabled",
        "line_count",
    )

    def __init__(
        self,
        authorizer: Authorizer | None,
        *,
        node_id: int,
        clock: Clock,
        scheduler: Scheduler,
        queues: Sequence[AuditQueue] = (),
        writes_log: bool = True,
    ) -> None:
        """Without an authorizer nothing is audited. `queues`: to the destinations of lines; `writes_log`: whether the
        log of the process is one."""
        self._authorizer = authorizer
        self._node_id = node_id
        self._clock = clock
        self._scheduler = scheduler
        self._queues = queues
        self._writes_log = writes_log
        self._merger = AuditMerger()
        self._timer: Timer | None = None
        self.is_enabled = authorizer is not None
        """Whether anything is audited."""
        self.line_count = 0
        """Number of lines that were made."""
        if self.is_enabled and writes_log and logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)  # whatever the level of other lines is

    @property
    def lost_count(self) -> int:
        """Number of events and lines that were lost."""
        return self._merger.lost_count + sum(queue.lost_count for queue in self._queues)

    def report_refusal(
        self,
        caller: Caller,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        event_count: int = 1,
    ) -> None:
        """Audit that a caller was refused an operation on a resource, or on `event_count` resources, whose name is
        `OTHER_RESOURCES` then."""
        if self.is_enabled:  # without an authorizer, keys and tokens are refused what they could create
            self._add(caller, REFUSED, operation.name, _WORDS[resource_type], name, event_count)

    def report_change(self, caller: Caller, resource_type: str, name: str, *, event_count: int = 1) -> None:
        """Audit that a caller has changed a resource through the API that it names, or `event_count` resources, whose
        name is `OTHER_RESOURCES` then."""
        if self.is_enabled and not caller.session.is_broker:
            self._add(caller, DONE, "", resource_type, name, event_count)

    def report_creation(self, caller: Caller, topic: str) -> None:
        """Audit that a topic was created automatically, because a caller has asked for it."""
        if self.is_enabled and not caller.session.is_broker:
            self._add(caller, DONE, Operation.CREATE.name, _WORDS[ResourceType.TOPIC], topic)

    def _add(
        self,
        caller: Caller,
        outcome: str,
        operation: str,
        resource_type: str,
        name: str,
        event_count: int = 1,
    ) -> None:
        if len(name) > TEXT_CHARACTERS_MAX:
            name = _truncated(name)
        kind = EventKind(
            caller.session.principal,
            caller.api,
            outcome,
            operation,
            resource_type,
            name,
        )
        line = self._merger.add(
            kind, caller, self._clock.wall_ms(), is_refusal=outcome == REFUSED, event_count=event_count
        )
        if line is not None:
            self._write(line)
            if self._timer is None:
                self._arm()

    def _arm(self) -> None:
        end_ms = self._merger.next_end_ms
        if end_ms is None:
            self._timer = None
            return
        delay_ms = max(end_ms - self._clock.wall_ms(), 1)
        self._timer = self._scheduler.call_later(delay_ms, self._end_windows)

    def _end_windows(self) -> None:
        for line in self._merger.end_windows(self._clock.wall_ms()):
            self._write(line)
        self._arm()

    def _write(self, line: AuditLine) -> None:
        self.line_count += 1
        known = self._fields(line)
        if self._writes_log:
            logger.info("audit", extra=fields(**known))
        text = json.dumps({"time": _time_text(line.last_ms), **known})
        for queue in self._queues:
            queue.put(text)

    def _fields(self, line: AuditLine) -> dict[str, Any]:
        kind = line.kind
        caller: Any = line.detail
        listener = caller.session.listener
        known: dict[str, Any] = {
            "outcome": kind.outcome,
            "principal": kind.principal,
            "protocol": listener if listener in OTHER_PROTOCOLS else "kafka",
            "api": kind.api or None,
            "operation": kind.operation or None,
            "resource_type": kind.resource_type or None,
            "resource": kind.resource,
            "address": caller.address,
            "client_id": _truncated(caller.client_id),
            "listener": listener or None,
            "broker": self._node_id,
            "count": line.event_count,
        }
        if line.event_count > 1:
            known["first_time"] = _time_text(line.first_ms)
        if kind.outcome == REFUSED and kind.resource != OTHER_RESOURCES:
            known |= self._remedy(kind, caller)
        return {name: value for name, value in known.items() if value is not None}

    def _remedy(self, kind: EventKind, caller: Caller) -> dict[str, str]:
        """Return the command that would allow what was refused, or the ACL that denies it."""
        assert self._authorizer is not None
        if len(kind.resource) > TEXT_CHARACTERS_MAX:
            return {}
        operation, resource_type = Operation[kind.operation], _KINDS[kind.resource_type]
        decision = self._authorizer.decide(requester_of(caller), operation, resource_type, kind.resource)
        if decision.is_allowed:
            return {}
        if decision.acl is not None:
            return {"denied_by": acl_text(decision.acl)}
        missing = Acl(
            resource_type,
            PatternType.LITERAL,
            kind.resource,
            kind.principal,
            WILDCARD,
            operation,
            Permission.ALLOW,
        )
        return {"allow": adding_command(missing)}

    async def close(self) -> None:
        """Write what is counted, and wait for a short time until all lines are stored."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for line in self._merger.end_all():
            self._write(line)
        for queue in self._queues:
            await queue.close()


def _truncated(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}..."


def _time_text(unix_ms: int) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(unix_ms // 1000))}.{unix_ms % 1000:03d}Z"
