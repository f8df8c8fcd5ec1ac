"""Commands of a user with few rights, and of an administrator who deletes users, with access control lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

import mansio.blocking
from mansio.state.authorization.acls import AclFilter, Operation, ResourceType
from support.authorization import acl
from support.sasl_broker import SaslBroker, sasl_broker
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSWORD: Final = "correct horse"
OF_ALICE: Final = AclFilter(principal="User:alice")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    """A broker on which alice may see the topic orders, and nothing else."""
    directory = tmp_path_factory.mktemp("rights")
    with sasl_broker(directory, authorizer="acl", super_users="User:admin;User:root") as started:
        started.set_user("admin", PASSWORD)
        with client_of(started) as admin:
            admin.admin.create_topic("orders", config={"retention.ms": "3600000"})
        yield started


@pytest.fixture(autouse=True)
def users(broker: SaslBroker) -> None:
    for user in ("admin", "root", "alice"):
        broker.set_user(user, PASSWORD)
    with client_of(broker) as admin:
        admin.admin.acls.create([acl(ResourceType.TOPIC, "orders", Operation.DESCRIBE)])


def client_of(broker: SaslBroker) -> mansio.blocking.Client:
    return mansio.blocking.connect(broker.address, user="admin", password=PASSWORD)


def shell_of(broker: SaslBroker, user: str) -> Shell:
    shell = Shell(broker.address)
    shell.environment |= {"MANSIO_USER": user, "MANSIO_PASSWORD": PASSWORD}
    return shell


def test_a_topic_is_described_without_the_settings_and_schedules_that_the_user_may_not_see(
    broker: SaslBroker,
) -> None:
    shell = shell_of(broker, "alice")
    shown = shell("topic", "describe", "orders").splitlines()
    assert shown[1:3] == [
        "settings: not allowed (DESCRIBE_CONFIGS on topic orders)",
        "schedules: not allowed (READ on topic orders)",
    ]
    assert shown[3].startswith("PARTITION")
    described = shell.json("topic", "describe", "orders")
    assert [row["partition"] for row in described["partitions"]] == [0]
    assert (described["configs"], described["schedules"], described["schedules_failing"]) == (None,) * 3
    assert "not allowed" not in shell_of(broker, "admin")("topic", "describe", "orders")


def test_doctor_skips_the_health_that_the_user_may_not_see(broker: SaslBroker, tmp_path: Path) -> None:
    shell = shell_of(broker, "alice")
    checks = {check["name"]: check for check in shell.json("doctor", "--data", str(tmp_path))}
    assert checks["broker"]["status"] == "ok"
    assert [(checks[name]["status"], checks[name]["detail"]) for name in ("broker 1", "transactions")] == [
        ("note", "skipped: needs DESCRIBE on the cluster"),
        ("note", "skipped: User:alice is not allowed to READ the topic orders"),
    ]


def test_deleting_a_user_reports_that_its_acls_stay_or_removes_them(broker: SaslBroker) -> None:
    shell = shell_of(broker, "admin")
    shell("user", "delete", "alice")
    assert shell.errors == (
        "mansio: the ACLs of alice stay (1), and a later user of this name has them:"
        " mansio acl remove User:alice --all\n"
    )
    with client_of(broker) as admin:
        assert len(admin.admin.acls.list(OF_ALICE)) == 1
        broker.set_user("alice", PASSWORD)
        shell("user", "delete", "--with-acls", "alice")
        assert shell.errors == "mansio: alice: 1 ACL removed\n"
        assert admin.admin.acls.list(OF_ALICE) == []
        broker.set_user("alice", PASSWORD)
        shell("user", "delete", "alice")
        assert shell.errors == ""
        broker.set_user("alice", PASSWORD)
        admin.admin.acls.create([acl(ResourceType.TOPIC, "orders", Operation.DESCRIBE)])
    shell("user", "delete", "--with-acls", "nobody", "alice", code=1)
    assert shell.errors.endswith("mansio: alice: 1 ACL removed\n"), "one failure does not stop the others"


def test_deleting_oneself_or_a_super_user_needs_a_confirmation(broker: SaslBroker) -> None:
    shell = shell_of(broker, "admin")
    shell("user", "delete", "alice", "admin", "root", code=2)
    assert shell.errors.startswith(
        "mansio: admin (your own user, a super user), root (a super user) will be deleted\n"
    )
    assert "--yes" in shell.errors
    with client_of(broker) as admin:
        assert [user.name for user in admin.admin.users.list()] == ["admin", "alice", "root"]
        shell("user", "delete", "root", "--yes")
        assert [user.name for user in admin.admin.users.list()] == ["admin", "alice"]
    shell("user", "delete", "admin", "--yes")
    shell("user", "list", code=1)
