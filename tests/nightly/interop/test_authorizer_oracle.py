"""Each request of the matrix of rights gets the same refusals from Mansio and from Apache Kafka with
StandardAuthorizer, in the same fields.

Nightly: needs a JDK and Maven.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pytest

from component.authorization.matrix import (
    ABSENT,
    ASKED,
    EXISTING,
    PASSWORD,
    REFUSALS,
    Room,
    credentials,
    is_for_brokers,
    versions_of,
)
from component.authorization.requests import error_codes, names_topics_by_id
from component.authorization.test_matrix import MansioRoom
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec.messages import Struct
from nightly.interop.java_client import QUICK_JVM, fetched
from support.machine import scaled
from support.paths import free_port
from support.raw_peer import RawPeer
from support.sasl_broker import log_in, sasl_broker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.state.authorization.acls import Acl

pytestmark = pytest.mark.timeout(900)

DEADLINE_S = 120.0
MANSIO_APIS_FROM: Final = 20_000
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=SASL_PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=SASL_PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=SASL_PLAINTEXT
sasl.mechanism.inter.broker.protocol=PLAIN
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
username="admin" password="{password}" user_admin="{password}" user_alice="{password}";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:admin;User:ANONYMOUS
log.dirs={directory}/data
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=100
group.share.enable=true
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""


class KafkaRoom(Room):
    """A broker of Apache Kafka, whose ACLs the super user changes."""

    def __init__(self, port: int) -> None:
        self._acls: set[Acl] = set()
        super().__init__(port, "PLAIN")
        versions = self.peers["admin"].call(ApiKey.API_VERSIONS, 2, {})
        self.supported = {
            each.api_key: range(each.min_version, each.max_version + 1) for each in versions.api_keys
        }

    def set_acls(self, acls: Iterable[Acl]) -> None:
        wanted, admin = set(acls), self.peers["admin"]
        if wanted == self._acls:
            return
        removed = [
            {
                "resource_type_filter": each.resource_type,
                "resource_name_filter": each.name,
                "pattern_type_filter": each.pattern_type,
                "principal_filter": each.principal,
                "host_filter": each.host,
                "operation": each.operation,
                "permission_type": each.permission,
            }
            for each in self._acls - wanted
        ]
        if removed:
            assert not error_codes(admin.call(ApiKey.DELETE_ACLS, 2, {"filters": removed}))
        added = [
            {
                "resource_type": each.resource_type,
                "resource_name": each.name,
                "resource_pattern_type": each.pattern_type,
                "principal": each.principal,
                "host": each.host,
                "operation": each.operation,
                "permission_type": each.permission,
            }
            for each in wanted - self._acls
        ]
        if added:
            assert not error_codes(admin.call(ApiKey.CREATE_ACLS, 2, {"creations": added}))
        self._acls = wanted
        everything = {
            "resource_type_filter": 1,
            "resource_name_filter": None,
            "pattern_type_filter": 1,
            "principal_filter": "User:alice",
            "host_filter": None,
            "operation": 1,
            "permission_type": 1,
        }

        def is_in_force() -> bool:
            found = admin.call(ApiKey.DESCRIBE_ACLS, 2, everything)
            return sum(len(each.acls) for each in found.resources) == len(wanted)

        wait_until(is_in_force, DEADLINE_S, "the ACLs are in force")


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaRoom]:
    jars, directory, port = fetched("kafka_broker"), tmp_path_factory.mktemp("kafka"), free_port()
    properties = directory / "server.properties"
    properties.write_text(
        PROPERTIES.format(port=port, controller_port=free_port(), directory=directory, password=PASSWORD)
    )
    run = ["java", *QUICK_JVM, "-cp", f"{jars}/*"]
    words = ["format", "-t", uuid4().hex[:22], "-c", str(properties)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": directory}
    subprocess.run([*run, "kafka.tools.StorageTool", *words], check=True, timeout=scaled(DEADLINE_S), **quiet)
    process = subprocess.Popen([*run, "kafka.Kafka", str(properties)], **quiet)

    def answers() -> bool:
        try:
            with RawPeer(port) as peer:
                return not log_in(peer, "PLAIN", "admin", PASSWORD).error_code
        except (OSError, AssertionError):
            assert process.poll() is None
            return False

    try:
        wait_until(answers, DEADLINE_S, "Kafka answers")
        room = KafkaRoom(port)
        yield room
        room.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def mansio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MansioRoom]:
    settings = {
        "authorizer": "acl",
        "super_users": "User:admin",
        "transaction_state_log_num_partitions": 1,
        "auto_create_topics_enable": False,
        "group_min_session_timeout_ms": 100,
    }
    with sasl_broker(tmp_path_factory.mktemp("oracle") / "data", **settings) as broker:
        made = MansioRoom(broker)
        yield made
        made.close()


DIFFERENCES: Final = {
    (ApiKey.OFFSET_DELETE, ABSENT, "all but READ TOPIC"),
    *((ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, each, "all but DESCRIBE TOPIC") for each in (ABSENT, EXISTING)),
    *((ApiKey.DELETE_SHARE_GROUP_OFFSETS, each, "all but READ TOPIC") for each in (ABSENT, EXISTING)),
}
"""API, resource and credential for which Mansio answers otherwise; docs/reference/compatibility.md says how."""


def refusals(room: Room, key: ApiKey, version: int, acls: list[Acl], resource: str) -> Any:
    """Return the codes of refusals in an answer; "closed" if there is none."""
    room.set_acls(acls)
    try:
        _, answer = room.ask("alice", key, version, room.named[resource])
    except AssertionError:
        return "closed"
    return error_codes(answer) & REFUSALS


@pytest.mark.parametrize(
    "key", [key for key in ASKED if key < MANSIO_APIS_FROM], ids=lambda key: key.name.lower()
)
def test_refusals_are_those_of_kafka(kafka: KafkaRoom, mansio: MansioRoom, key: ApiKey) -> None:
    if key not in kafka.supported:
        pytest.skip("this Kafka does not have it")
    found = []
    for version in versions_of(key):
        if version not in kafka.supported[key] or is_for_brokers(key, version):
            continue
        for resource in (ABSENT, EXISTING):
            if resource == ABSENT and names_topics_by_id(key, version):
                continue
            for credential in credentials(key, mansio.named[resource]):
                if credential.refused is None:
                    mansio.create()
                    kafka.create()
                ours = refusals(mansio, key, version, credential.acls, resource)
                theirs = refusals(kafka, key, version, credential.acls, resource)
                if (ours != theirs) is not ((key, resource, credential.name) in DIFFERENCES):
                    found.append(f"{version} {resource} {credential.name}: {ours}, Kafka {theirs}")
    assert not found, "\n".join(found)


OWN_VALUES: Final = frozenset({"cluster_id", "error_message", "port"})
"""Fields in which the two brokers have values of their own."""
OTHER_FIELDS: Final = {
    ApiKey.FETCH: "aborted transactions are null, here empty",
    ApiKey.OFFSET_FETCH: "the requested partitions follow, without offsets",
    ApiKey.CREATE_TOPICS: "settings are null, here empty",
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: "allow_replication_factor_change is that of the request, here true",
    ApiKey.LIST_PARTITION_REASSIGNMENTS: "no partition follows, here the requested ones, without replicas",
}
"""API -> how Mansio's refusal differs from Kafka's."""


def fields_of(answer: Any) -> Any:
    """Return a decoded answer as values that can be compared."""
    if isinstance(answer, Struct):
        return {name: fields_of(each) for name, each in vars(answer).items() if name not in OWN_VALUES}
    if hasattr(answer, "_asdict"):
        return {name: fields_of(each) for name, each in answer._asdict().items() if name not in OWN_VALUES}
    if isinstance(answer, (list, tuple)):
        return [fields_of(each) for each in answer]
    return bytes(answer) if isinstance(answer, memoryview) else answer


@pytest.mark.parametrize(
    "key", [key for key in ASKED if key < MANSIO_APIS_FROM], ids=lambda key: key.name.lower()
)
def test_a_refusal_has_the_fields_of_that_of_kafka(kafka: KafkaRoom, mansio: MansioRoom, key: ApiKey) -> None:
    if key not in kafka.supported:
        pytest.skip("this Kafka does not have it")
    mansio.create()
    kafka.create()
    differing = []
    for version in versions_of(key):
        if version not in kafka.supported[key] or is_for_brokers(key, version):
            continue
        if names_topics_by_id(key, version):  # each broker has its own ids
            continue
        answers = []
        for room in (mansio, kafka):
            room.set_acls([])
            _, answer = room.ask("alice", key, version, room.named[EXISTING])
            answers.append(fields_of(answer))
        ours, theirs = answers
        if ours != theirs:
            differing.append(f"{version}: {ours}, Kafka {theirs}")
    assert bool(differing) is (key in OTHER_FIELDS), "\n".join(differing)
