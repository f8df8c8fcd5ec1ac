"""`mansio why` where clients are refused what they need, and for callers who may not know everything."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

import mansio.blocking
from mansio.errors import AuthorizationFailed
from mansio.state.authorization.acls import Operation, Permission, ResourceType
from support.authorization import acl
from support.sasl_broker import SaslBroker, sasl_broker
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio import Acl

pytestmark = pytest.mark.full

PASSWORD: Final = "correct horse"
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    with sasl_broker(tmp_path_factory.mktemp("why"), authorizer="acl", super_users="User:admin") as started:
        for user in ("admin", "alice"):
            started.set_user(user, PASSWORD)
        yield started


@contextmanager
def world(broker: SaslBroker, *acls: Acl) -> Iterator[mansio.blocking.Client]:
    """A client of the administrator, while alice has these rights."""
    with mansio.blocking.connect(broker.address, user="admin", password=PASSWORD) as admin:
        if acls:
            admin.admin.acls.create(acls)
        try:
            yield admin
        finally:
            admin.admin.acls.delete([mansio.AclFilter(principal="User:alice")])


def stage(admin: mansio.blocking.Client, name: str, topics: Sequence[str]) -> None:
    """A group without members that has read nothing of some topics with three records each."""
    for topic in topics:
        admin.admin.create_topic(topic, partitions=1)
        for number in range(3):
            admin.publish(topic, b"%d" % number)
    admin.admin.reset_offsets(name, list(topics), to=0)


def try_to_read(broker: SaslBroker, topic: str, group: str) -> None:
    with (
        mansio.blocking.connect(
            broker.address, user="alice", password=PASSWORD, client_id="courier"
        ) as client,
        pytest.raises(AuthorizationFailed),
        client.consume(topic, group=group) as consumer,
    ):
        consumer.poll(timeout_ms=10_000)


def explained(broker: SaslBroker, group: str, user: str = "admin") -> Any:
    shell = Shell(broker.address)
    shell.environment |= {"MANSIO_USER": user, "MANSIO_PASSWORD": PASSWORD}
    return shell.json("why", group, "--sample", "200ms")


@pytest.mark.row("T8")
@pytest.mark.parametrize("kind", ["group", "topic"])
def test_a_refused_right_is_named_with_the_acl_that_helps(broker: SaslBroker, kind: str) -> None:
    name = f"refused-{kind}"
    allowed = acl(TOPIC, name, Operation.READ) if kind == "group" else acl(GROUP, name, Operation.READ)
    with world(broker, allowed) as admin:
        stage(admin, name, [name])
        try_to_read(broker, name, name)
        found = explained(broker, name)
        first = found["findings"][0]
        assert (first["cause"], first["impact"], first["principal"]) == ("denied-acl", "blocks", "User:alice")
        assert first["client_id"] == "courier"
        assert first["command"] == f"mansio acl add User:alice --operation READ --{kind} {name}"
        assert (found["status"], found["lag"]) == ("blocked", 3)
        # What the command allows is no cause any more.
        admin.admin.acls.create([acl(ResourceType[kind.upper()], name, Operation.READ)])
        assert [each["cause"] for each in explained(broker, name)["findings"]] == ["no-member"]


def test_an_acl_that_denies_is_named(broker: SaslBroker) -> None:
    rights = [acl(TOPIC, "denied", Operation.READ), acl(GROUP, "denied", Operation.READ)]
    with world(broker, *rights, acl(GROUP, "denied", Operation.READ, Permission.DENY)) as admin:
        stage(admin, "denied", ["denied"])
        try_to_read(broker, "denied", "denied")
        first = explained(broker, "denied")["findings"][0]
        assert first["cause"] == "denied-acl"
        assert "DENY User:alice READ group denied" in first["text"]
        assert first["command"] == "mansio acl check alice READ group:denied"


def test_a_group_that_was_never_joined_is_explained_by_its_refusal(broker: SaslBroker) -> None:
    with world(broker, acl(TOPIC, "never", Operation.READ)) as admin:
        admin.admin.create_topic("never", partitions=1)
        try_to_read(broker, "never", "never")
        found = explained(broker, "never")
        assert (found["state"], found["findings"][0]["cause"]) == ("Dead", "denied-acl")


def test_topics_that_the_caller_may_not_describe_are_counted_and_not_named(broker: SaslBroker) -> None:
    shown, hidden = "shown-parcels", "secret-parcels"
    rights = [acl(GROUP, "partly", Operation.DESCRIBE), acl(TOPIC, shown, Operation.DESCRIBE)]
    with world(broker, *rights) as admin:
        stage(admin, "partly", [shown, hidden])
        of_alice, of_admin = explained(broker, "partly", "alice"), explained(broker, "partly")
        assert (of_alice["hidden_topics"], of_admin["hidden_topics"]) == (1, 0)
        assert of_alice["lag"] == of_admin["lag"] == 6
        assert of_alice["findings"][0]["cause"] == "no-member"
        assert of_alice["findings"][0]["command"] == f"mansio consume {shown} --group partly"
        assert hidden not in str(of_alice)
        with mansio.blocking.connect(broker.address, user="alice", password=PASSWORD) as client:
            assert hidden not in str(client.admin.explain_group("partly"))


def test_keys_and_transactional_ids_need_rights_of_their_own(broker: SaslBroker) -> None:
    rights = [acl(GROUP, "keyed", Operation.DESCRIBE), acl(TOPIC, "keyed", Operation.DESCRIBE)]
    with world(broker, *rights) as admin:
        admin.admin.create_topic("keyed", partitions=1)
        settings = {"share.auto.offset.reset": "earliest", "mansio.share.order": "key"}
        admin.admin.alter_group_config("keyed", settings)
        for number in range(3):
            admin.publish("keyed", b"%d" % number, key=b"confidential", partition=0)
        with admin.receive("keyed", group="keyed", prefetch=0, lease_ms=600_000) as receiver:
            wait_until(lambda: receiver.poll(timeout_ms=200, max_records=1), what="a record")

            def key_shown_to(user: str) -> Any:
                """The key, after the lease is old enough to count."""
                wait_until(
                    lambda: explained(broker, "keyed", user)["findings"], what="a record that holds others"
                )
                return explained(broker, "keyed", user)["findings"][0]["key"]

            assert key_shown_to("admin") == "confidential"
            assert key_shown_to("alice") is None
            admin.admin.acls.create([acl(TOPIC, "keyed", Operation.READ)])
            assert key_shown_to("alice") == "confidential"


def test_who_may_not_describe_the_group_learns_nothing(broker: SaslBroker) -> None:
    with world(broker, acl(TOPIC, "closed", Operation.READ)) as admin:
        stage(admin, "closed", ["closed"])
        shell = Shell(broker.address)
        shell.environment |= {"MANSIO_USER": "alice", "MANSIO_PASSWORD": PASSWORD}
        assert shell("why", "closed", code=1) == ""
        assert "not allowed to DESCRIBE the group closed" in shell.errors
