"""A user who logs in on an open HTTP listener has its rights; everybody else there has none."""

from __future__ import annotations

from typing import Final

import httpx
import pytest

from mansio.state.authorization.acls import CLUSTER_NAME, Acl, Operation, ResourceType
from mansio.testing.broker import TestBroker
from support.authorization import PEER, acl
from support.machine import scaled
from support.secured_broker import set_password

TIMEOUT_S: Final = 30


def add_acls(broker: TestBroker, acls: list[Acl]) -> None:
    work = broker._running().service.acls.create_each(acls, caller=PEER)
    assert not any(broker._call(work, scaled(TIMEOUT_S)))


@pytest.mark.full
def test_who_logs_in_on_an_open_listener_has_the_rights_of_the_user() -> None:
    with TestBroker(authorizer="acl", super_users="User:admin") as broker:
        for user in ("alice", "admin"):
            set_password(broker, user, "of " + user)
        add_acls(broker, [acl(ResourceType.GROUP, "billing", Operation.DESCRIBE_CONFIGS)])
        with httpx.Client(base_url=broker.http_url, timeout=scaled(TIMEOUT_S), trust_env=False) as client:

            def status(path: str, *auth: str) -> int:
                return client.get(path, auth=httpx.BasicAuth(*auth) if auth else None).status_code

            anonymous_may_describe = acl(ResourceType.CLUSTER, CLUSTER_NAME, Operation.DESCRIBE)._replace(
                principal="User:ANONYMOUS"
            )
            own, other = "/v1/groups/billing/config", "/v1/groups/payroll/config"
            assert [status(path) for path in (own, other)] == [403, 403]
            assert [status(path, "alice", "of alice") for path in (own, other)] == [200, 403]
            assert [status(path, "admin", "of admin") for path in (own, other)] == [200, 200]
            assert status(own, "alice", "wrong") == 401
            assert client.get("/health/ready").json() == {"ready": True}, "a probe learns no names"
            assert [status("/metrics"), status("/metrics", "admin", "of admin")] == [403, 200]
            add_acls(broker, [anonymous_may_describe])
            assert "disk" in client.get("/health/ready").json()
            assert status("/metrics") == 200
