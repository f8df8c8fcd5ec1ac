"""Roles through real clients: what each may do and may not, `mansio acl`, and the audit of it in file and topic."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka as kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import mansio
import mansio.blocking
from mansio.config.topic_names import AUDIT_TOPIC
from mansio.errors import (
    AuthorizationFailed,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    InvalidTopic,
    TransactionalIdAuthorizationFailed,
)
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.authorization.roles import Role, acls_of_role
from support.machine import scaled
from support.paths import mansio_command
from support.present import present
from support.process import inherited
from support.sasl_broker import SaslBroker, sasl_broker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSWORD: Final = "a password that no line contains"
ROLES: Final = {
    "rita": (Role.READER, {ResourceType.TOPIC: ["orders"], ResourceType.GROUP: ["billing"]}),
    "wim": (Role.WRITER, {ResourceType.TOPIC: ["orders"], ResourceType.TRANSACTIONAL_ID: ["shop"]}),
    "olga": (Role.OPERATOR, {}),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    directory = tmp_path_factory.mktemp("roles")
    settings = {"authorizer": "acl", "super_users": "User:admin", "audit_log": str(directory / "audit.jsonl")}
    with sasl_broker(directory / "data", **settings) as started:
        for user in ("admin", *ROLES):
            started.set_user(user, PASSWORD)
        with client_of(started, "admin") as admin:
            admin.admin.create_topic("orders")
            for user, (role, names) in ROLES.items():
                admin.admin.acls.create(acls_of_role(role, f"User:{user}", names))
        yield started


def client_of(broker: SaslBroker, user: str) -> mansio.blocking.Client:
    return mansio.blocking.connect(broker.address, user=user, password=PASSWORD, client_id="role-test")


def options(broker: SaslBroker, user: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": user,
        "sasl.password": PASSWORD,
        "client.id": "librdkafka",
    }


def audited(broker: SaslBroker) -> list[dict[str, Any]]:
    path = Path(broker.broker.settings.audit_log)
    return [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def find(broker: SaslBroker, **wanted: Any) -> dict[str, Any]:
    """Wait for a line with these fields."""

    def found() -> dict[str, Any] | None:
        return next((line for line in audited(broker) if wanted.items() <= line.items()), None)

    return wait_until(found, what=f"a line with {wanted}")


def test_a_reader_has_its_group_and_no_other(broker: SaslBroker) -> None:
    consumer = kafka.Consumer({**options(broker, "rita"), "group.id": "billing"})
    try:
        consumer.commit(offsets=[kafka.TopicPartition("orders", 0, 0)], asynchronous=False)
        committed = consumer.committed([kafka.TopicPartition("orders", 0)], scaled(30))
        assert [each.offset for each in committed] == [0]
    finally:
        consumer.close()
    other = kafka.Consumer({**options(broker, "rita"), "group.id": "payroll"})
    try:
        other.subscribe(["orders"])
        refused = present(wait_until(lambda: other.poll(1), what="the refusal").error())
        assert refused.code() == kafka.KafkaError.GROUP_AUTHORIZATION_FAILED
    finally:
        other.close()
    line = find(broker, principal="User:rita", resource="payroll")
    assert (line["outcome"], line["protocol"], line["client_id"]) == ("refused", "kafka", "librdkafka")
    assert line["allow"].startswith("mansio acl add User:rita --operation ")
    assert line["allow"].endswith(" --group payroll")


def test_a_writer_has_its_transactional_id_and_no_other(broker: SaslBroker) -> None:
    with client_of(broker, "wim") as client:
        with client.transaction("shop") as transaction:
            transaction.publish("orders", b"1")
        with (
            pytest.raises(TransactionalIdAuthorizationFailed),
            client.transaction("other") as transaction,
        ):
            transaction.publish("orders", b"2")
        with pytest.raises(AuthorizationFailed):
            client.admin.delete_records(["orders"], before="end")
    assert (
        find(broker, principal="User:wim", resource="other")["operation"] == "DESCRIBE"
    )  # of the coordinator
    line = find(broker, principal="User:wim", api="DELETE_RECORDS")
    assert line["allow"] == "mansio acl add User:wim --operation DELETE --topic orders"


def test_an_operator_administers_and_reads_the_audit_and_no_records(broker: SaslBroker) -> None:
    with client_of(broker, "olga") as client:
        client.admin.quotas.set(user="rita", values={"producer_byte_rate": 1e6})
        assert {user.name for user in client.admin.users.list()} == {"admin", *ROLES}
        assert len(client.admin.acls.list()) == sum(
            len(acls_of_role(role, "User:x", names)) for role, names in ROLES.values()
        )
        with pytest.raises(GroupAuthorizationFailed):
            client.admin.reset_offsets("billing", ["orders"], to=0)
        checks = [(Operation.READ, ResourceType.TOPIC, name) for name in ("orders", AUDIT_TOPIC)]
        assert [each.is_allowed for each in client.admin.acls.check(checks)] == [False, True]
        line = find(broker, principal="User:olga", api="ALTER_CLIENT_QUOTAS")
        assert (line["outcome"], line["resource_type"], line["resource"]) == ("done", "quota", "user rita")
        records = client.consume(AUDIT_TOPIC, start="earliest", max_records=1)
        first = json.loads(next(iter(records)).value or b"")
        assert first == audited(broker)[0]
    for user in ("rita", "wim"):
        with client_of(broker, user) as client:
            with pytest.raises(ClusterAuthorizationFailed):
                client.admin.users.list()
            assert [each.is_allowed for each in client.admin.acls.check(checks[1:])] == [False]
            with pytest.raises(ClusterAuthorizationFailed):  # about others it may not ask
                client.admin.acls.check(checks, user="olga")


@pytest.mark.full
def test_the_command_explains_and_what_it_proposes_allows_the_operation(
    broker: SaslBroker, tmp_path: Path
) -> None:
    def run(*words: str, code: int = 0, user: str = "admin") -> str:
        done = subprocess.run(
            [*mansio_command(), "acl", *words, "-b", broker.address],
            env={**inherited(), "MANSIO_USER": user, "MANSIO_PASSWORD": PASSWORD, "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    refused = run("check", "carol", "READ", "topic:parcels", code=1)
    assert "no ACL allows it" in refused
    command = refused.rpartition("to allow it: ")[2].split()
    assert command[:3] == ["mansio", "acl", "add"]
    run(*command[2:])
    assert "ALLOW User:carol READ topic parcels" in run("check", "carol", "READ", "topic:parcels")
    run("add", "carol", "--operation", "READ", "--topic", "par", "--prefix", "--deny", "--host", "10.0.0.1")
    denied = run("check", "carol", "READ", "topic:parcels", "--host", "10.0.0.1", code=1)
    assert "DENY User:carol READ topic par... from 10.0.0.1" in denied
    assert "super user" in run("check", "-", "ALTER", "cluster")
    listed = json.loads(run("list", "--principal", "carol", "--topic", "parcels", "-o", "json"))
    assert [row["permission"] for row in listed] == ["ALLOW", "DENY"] or [
        row["permission"] for row in listed
    ] == ["DENY", "ALLOW"]
    assert "confirmation requires a terminal" in run("remove", "carol", "--all", code=2)
    assert "2 ACLs" not in run("remove", "carol", "--all", "--yes")
    assert "no ACLs" in run("list", "--principal", "carol")
    assert "no such ACLs" in run("remove", "carol", "--all", "--yes")
    for words, complaint in (
        (("add", "carol"), "either --role or --operation"),
        (("add", "carol", "--role", "boss"), "reader, writer, worker, operator"),
        (("add", "carol", "--role", "reader"), "needs a topic"),
        (("add", "carol", "--operation", "READ"), "give a resource"),
        (("add", "carol", "--operation", "WRITE", "--group", "g"), "a group has no operation WRITE"),
        (("add", "carol", "--role", "reader", "--topic", "sales.*"), "for a beginning write"),
        (("add", "carol", "--role", "reader", "--topic", "*", "--prefix"), "for a beginning write"),
        (("add", "carol", "--operation", "READ", "--topic", "t", "--host", "10.0.0.0/8"), "is no IP address"),
        (("add", "user:carol", "--operation", "READ", "--topic", "t"), "write User:NAME"),
        (("check", "Group:night", "READ", "topic:a"), "--member-of"),
        (("check", "carol", "FLY", "topic:a"), "is not an operation"),
        (("check", "carol", "READ", "queue:a"), "is not a resource"),
    ):
        assert complaint in run(*words, code=2), words
    assert "not allowed to ALTER the cluster" in run(
        *("add", "rita", "--operation", "ALL", "--topic", "*"), user="rita", code=1
    )


@pytest.mark.full
def test_no_line_has_a_secret_and_a_broker_that_stops_writes_what_it_has_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    settings = {"authorizer": "acl", "super_users": "User:admin", "audit_log": str(path)}
    with sasl_broker(tmp_path / "data", **settings) as broker:
        for user in ("admin", "rita"):
            broker.set_user(user, PASSWORD)
        with client_of(broker, "admin") as admin:
            admin.admin.users.create("new", "another secret")
            admin.admin.users.set_password("new", "a changed secret")
            admin.admin.create_topic("orders", config={"retention.ms": "123454321"})
            admin.admin.alter_topic_config("orders", {"retention.ms": "543212345"})
        with client_of(broker, "rita") as client:
            for _ in range(20):
                with pytest.raises(ClusterAuthorizationFailed):
                    client.admin.users.list()
        kafka_admin = AdminClient(options(broker, "admin"))
        kafka_admin.create_topics([NewTopic("more", 1)])["more"].result(scaled(30))
    text = path.read_text()
    for secret in (PASSWORD, "another secret", "a changed secret", "123454321", "543212345"):
        assert secret not in text
    lines = [json.loads(line) for line in text.splitlines()]
    done = [(line["api"], line["resource"]) for line in lines if line["outcome"] == "done"]
    assert done == [
        ("ALTER_USER_SCRAM_CREDENTIALS", "new"),
        ("SET_PASSWORD", "new"),
        ("CREATE_TOPICS", "orders"),
        ("INCREMENTAL_ALTER_CONFIGS", "orders"),
        ("CREATE_TOPICS", "more"),
    ]
    refused = [line for line in lines if line["outcome"] == "refused" and line["operation"] == "DESCRIBE"]
    assert [line["count"] for line in refused if line["resource_type"] == "cluster"] == [1, 19]
    with sasl_broker(tmp_path / "data", **settings) as broker, client_of(broker, "admin") as admin:
        (view,) = [
            each for each in admin.admin.describe_topics(include_internal=True) if each.name == AUDIT_TOPIC
        ]
        assert view.is_internal
        records = admin.consume(AUDIT_TOPIC, start="earliest", max_records=len(lines))
        assert [json.loads(record.value or b"") for record in records] == lines
        entry = admin.admin.describe_config(AUDIT_TOPIC)["retention.ms"]
        assert entry.value == str(30 * 24 * 3600 * 1000)
        with pytest.raises(InvalidTopic):  # no client forges a line
            admin.publish(AUDIT_TOPIC, b"{}")


@pytest.mark.full
def test_doctor_names_the_rights_that_a_pipeline_lacks(broker: SaslBroker, tmp_path: Path) -> None:
    def rights(user: str, job: str) -> list[dict[str, str]]:
        done = subprocess.run(
            [
                *mansio_command(),
                *("doctor", "-b", broker.address, "--data", str(tmp_path), "-o", "json"),
                *("--job", job, "--topic", "orders", "--to", "orders", "--name", "p"),
            ],
            env={**inherited(), "MANSIO_USER": user, "MANSIO_PASSWORD": PASSWORD, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=scaled(120),
            check=False,
        )
        return [check for check in json.loads(done.stdout) if check["name"] == "rights"]

    (read,) = rights("rita", "read")
    assert (read["status"], read["detail"]) == ("ok", "rita has what read needs: READ on topic orders")
    held, transactional = rights("admin", "run-to-topic"), rights("rita", "run-to-topic")
    assert [check["status"] for check in held] == ["ok"]
    assert [check["detail"].partition(": ")[2] for check in transactional] == [
        "mansio acl add User:rita --operation READ --group mansio.pipeline.p",
        "mansio acl add User:rita --operation WRITE --topic orders",
        "mansio acl add User:rita --operation WRITE --transactional-id mansio-spark: --prefix",
    ]
