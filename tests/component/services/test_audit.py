"""The audit: who was refused or has changed what, in lines that no client can flood, and that outlive the broker."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.routing.caller import BROKER_SESSION, Caller, ClientSession
from mansio.broker.services.audit.audit_queue import LINES_MAX, AuditQueue
from mansio.broker.services.audit.audit_service import AuditService
from mansio.broker.services.authorization import REPORTED_MAX, Authorization
from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import ClusterAuthorizationFailed, StorageError, TopicAuthorizationFailed
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock
from mansio.state.audit.audit_merger import OTHER_RESOURCES
from mansio.state.authorization.acls import Operation, Permission, ResourceType
from mansio.state.authorization.authorizer import Authorizer
from support.authorization import acl
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.routing.caller import Caller as CallerType

ALICE: Caller = Caller(
    ClientSession("alice", listener="SASL_SSL"), client_id='a"\n', address="10.0.0.1", api="FETCH"
)


class Audit:
    """An audit whose only destination is a list."""

    def __init__(self, *acls: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self.failures = 0
        self.is_called_in_vain = False
        authorizer = Authorizer(["User:admin"])
        for each in acls:
            authorizer.add(each)
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        self.queue = AuditQueue("a list", self.deliver, scheduler)
        self.service = AuditService(
            authorizer,
            node_id=7,
            clock=HostClock(),
            scheduler=scheduler,
            queues=[self.queue],
            writes_log=False,
        )
        self.authorization = Authorization(authorizer, self.service.report_refusal)

    async def deliver(self, lines: Sequence[str]) -> None:
        self.is_called_in_vain |= not lines
        if self.failures:
            self.failures -= 1
            raise StorageError("the disk is full")
        self.lines += map(json.loads, lines)

    def refuse(self, caller: CallerType, name: str, operation: Operation = Operation.READ) -> None:
        with pytest.raises(TopicAuthorizationFailed):
            self.authorization.check(caller, operation, ResourceType.TOPIC, name)


def test_the_line_of_a_refusal_names_who_where_what_and_what_would_allow_it() -> None:
    async def work() -> None:
        audit = Audit(acl(ResourceType.TOPIC, "closed", Operation.READ, Permission.DENY))
        audit.refuse(ALICE, "orders of today")
        audit.refuse(ALICE, "closed")
        with pytest.raises(ClusterAuthorizationFailed):
            audit.authorization.check_cluster(Caller(ClientSession("bob", "http")), Operation.ALTER)
        await audit.service.close()
        first, closed, cluster = audit.lines
        assert first.pop("time").endswith("Z")
        assert first == {
            "outcome": "refused",
            "principal": "User:alice",
            "protocol": "kafka",
            "api": "FETCH",
            "operation": "READ",
            "resource_type": "topic",
            "resource": "orders of today",
            "address": "10.0.0.1",
            "client_id": 'a"\n',
            "listener": "SASL_SSL",
            "broker": 7,
            "count": 1,
            "allow": "mansio acl add User:alice --operation READ --topic 'orders of today'",
        }
        assert closed["denied_by"] == "DENY User:alice READ topic closed"
        assert "allow" not in closed
        assert (cluster["protocol"], cluster["principal"]) == ("http", "User:bob")
        assert cluster["allow"] == "mansio acl add User:bob --operation ALTER --cluster"

    asyncio.run(work())


def test_a_client_that_repeats_a_refused_request_is_one_line_and_one_with_the_count() -> None:
    async def work() -> None:
        audit = Audit()
        for _ in range(1_000):
            audit.refuse(ALICE, "orders")
        await asyncio.sleep(0)
        assert audit.service.line_count == 1
        await audit.service.close()
        assert [line["count"] for line in audit.lines] == [1, 999]
        assert audit.lines[1]["first_time"] <= audit.lines[1]["time"]
        assert audit.service.lost_count == 0

    asyncio.run(work())


def test_refused_names_are_audited_and_those_that_a_list_leaves_out_are_not() -> None:
    async def work() -> None:
        audit = Audit(acl(ResourceType.TOPIC, "a", Operation.READ))
        ask = Operation.READ, ResourceType.TOPIC, ["a", "b", "c"]
        assert audit.authorization.allowed_names(ALICE, *ask) == ["a"]
        assert audit.service.line_count == 0
        assert audit.authorization.allowed_of_named(ALICE, *ask) == ["a"]
        with pytest.raises(TopicAuthorizationFailed):
            audit.authorization.check_all(ALICE, *ask)
        audit.service.report_change(ALICE, "topic", "d")
        audit.service.report_change(Caller(BROKER_SESSION), "topic", "e")
        await audit.service.close()
        counts = {(line["resource"], line["outcome"]): line["count"] for line in audit.lines}
        assert counts == {("b", "refused"): 1, ("c", "refused"): 1, ("d", "done"): 1}

    asyncio.run(work())


def test_each_of_many_refused_names_of_a_request_is_counted() -> None:
    async def work() -> None:
        audit = Audit(acl(ResourceType.TOPIC, "a", Operation.READ))
        count = 2 * REPORTED_MAX + 7
        names = ["a", *(f"t{number}" for number in range(count))]
        for _ in range(2):
            found = audit.authorization.allowed_of_named(ALICE, Operation.READ, ResourceType.TOPIC, names)
            assert found == ["a"]
        assert audit.service.line_count < REPORTED_MAX
        await audit.service.close()
        counts = [line["count"] for line in audit.lines]
        assert sum(counts) + audit.service.lost_count == 2 * count
        assert all("allow" not in line for line in audit.lines if line["resource"] == OTHER_RESOURCES)

    asyncio.run(work())


def test_lines_wait_for_a_destination_that_fails_and_are_counted_when_they_are_lost() -> None:
    async def work() -> None:
        audit = Audit()
        audit.failures = 2
        for number in range(LINES_MAX + 5):
            audit.service.report_change(ALICE, "topic", str(number))
        assert audit.service.lost_count == 5
        await eventually(lambda: len(audit.lines) >= 1_000, 30)
        assert [line["resource"] for line in audit.lines[:1_000]] == list(map(str, range(1_000)))
        audit.failures = 1_000_000
        await audit.service.close()
        assert audit.queue.delivered_count == len(audit.lines)
        assert audit.service.lost_count == LINES_MAX + 5 - len(audit.lines)

    asyncio.run(work())


def test_lines_that_are_given_up_when_the_broker_stops_are_not_delivered_as_none() -> None:
    async def work() -> None:
        audit = Audit()
        audit.failures = 1_000_000
        audit.service.report_change(ALICE, "topic", "orders")
        await eventually(lambda: audit.failures < 1_000_000)
        await audit.service.close()
        await eventually(lambda: not audit.queue._works)
        assert audit.service.lost_count == 1
        assert not audit.is_called_in_vain

    asyncio.run(work())


def test_a_batch_of_lines_with_the_longest_names_fits_into_a_record_batch() -> None:
    async def work() -> None:
        sizes: list[int] = []
        audit = Audit()
        deliver = audit.deliver

        async def measured(lines: Sequence[str]) -> None:
            sizes.append(sum(map(len, lines)))
            await deliver(lines)

        queue = AuditQueue("a list", measured, AsyncioScheduler(asyncio.get_running_loop()))
        for _ in range(200):
            queue.put(
                json.dumps({"client_id": "\U0001f600" * 249, "resource": "\x00" * 249, "allow": "x" * 5_000})
            )
        await queue.close()
        assert queue.delivered_count == len(audit.lines) == 200
        assert max(sizes) <= 256 << 10

    asyncio.run(work())


def test_without_an_authorizer_nothing_is_audited() -> None:
    async def work() -> None:
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        service = AuditService(None, node_id=1, clock=HostClock(), scheduler=scheduler)
        service.report_change(ALICE, "topic", "orders")
        await service.close()
        assert service.line_count == 0

    asyncio.run(work())


def test_a_look_at_an_internal_topic_that_the_client_makes_by_itself_is_no_line() -> None:
    reported: list[str] = []
    authorization = Authorization(
        Authorizer(), lambda _caller, _operation, _kind, name, **_: reported.append(name)
    )
    for name in (OFFSETS_TOPIC, "orders"):
        authorization.refusal(ALICE, Operation.DESCRIBE, ResourceType.TOPIC, name)
    authorization.refusal(ALICE, Operation.READ, ResourceType.TOPIC, OFFSETS_TOPIC)
    assert reported == ["orders", OFFSETS_TOPIC]
