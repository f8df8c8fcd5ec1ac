"""Start of a broker that no client can administer, or that cannot write its audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from mansio.api.http.broker_stats import RunningBroker
from mansio.api.http.service_stats import ServiceStats
from mansio.errors import ConfigError
from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from support.authorization import PEER, acl
from support.sasl_broker import SaslBroker, sasl_broker

if TYPE_CHECKING:
    from pathlib import Path

WARNING: Final = "no_administrator"


def health_warnings(started: SaslBroker) -> list[str]:
    """Reasons of the warnings that the health checks and `mansio doctor` show."""
    broker = started.broker

    def read() -> list[str]:
        ServiceStats(broker.settings).attach(
            RunningBroker(
                broker.service, broker.server, broker.clients, broker.listener_address, lambda: True
            )
        )
        return [each.reason for each in broker.service.health.report(caller=PEER).warnings]

    found: list[str] = started.call(read)
    return found


def test_a_broker_warns_while_no_client_can_change_acls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sasl_broker(tmp_path, authorizer="acl") as broker:
        assert WARNING in caplog.messages
        assert WARNING in health_warnings(broker)
        altering = acl(ResourceType.CLUSTER, CLUSTER_NAME, Operation.ALTER)
        assert broker.run(broker.broker.service.acls.create_each([altering], caller=PEER)) == [None]
        assert WARNING not in health_warnings(broker)
    caplog.clear()
    with sasl_broker(tmp_path, authorizer="acl") as broker:
        assert WARNING not in caplog.messages
        assert WARNING not in health_warnings(broker)


@pytest.mark.parametrize(
    "settings",
    [
        {"authorizer": "none"},
        {"authorizer": "acl", "super_users": "User:admin"},
        {"authorizer": "acl", "allow_everyone_if_no_acl_found": True},
    ],
)
def test_a_broker_that_a_client_can_administer_does_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, object]
) -> None:
    with sasl_broker(tmp_path, **settings) as broker:
        assert WARNING not in caplog.messages
        assert WARNING not in health_warnings(broker)


@pytest.mark.parametrize(
    ("file", "reason"), [("absent/audit.jsonl", "No such file or directory"), ("data", "Is a directory")]
)
def test_a_broker_that_cannot_write_its_audit_does_not_start(tmp_path: Path, file: str, reason: str) -> None:
    path = tmp_path / file
    broker = SaslBroker(tmp_path / "data", authorizer="acl", super_users="User:admin", audit_log=str(path))
    try:
        with pytest.raises(ConfigError) as refused:
            broker.start()
        assert refused.value.message == f"audit_log: cannot write to {path}: {reason}"
    finally:
        broker.stop()


def test_a_broker_creates_its_audit_file_and_keeps_the_lines_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    settings = {"authorizer": "acl", "super_users": "User:admin", "audit_log": str(path)}
    with sasl_broker(tmp_path / "data", **settings):
        assert path.read_text() == ""
    path.write_text("{}\n")
    with sasl_broker(tmp_path / "data", **settings):
        assert path.read_text() == "{}\n"
