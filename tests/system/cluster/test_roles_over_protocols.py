"""Roles that are made with the commands of the page about security, on a protected cluster of three brokers: what each
user may do, and what not, is the same through Kafka, HTTP, gRPC and SQS, whichever broker is asked."""

from __future__ import annotations

import base64
import json
import queue
import ssl
from typing import TYPE_CHECKING, Any, Final

import confluent_kafka as kafka
import grpc
import httpx
import pytest
from botocore.exceptions import ClientError
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from mansio import blocking
from mansio.api.grpc import mansio_pb2 as pb
from mansio.errors import GroupAuthorizationFailed
from support.documents import examples, lines_to_compare
from support.machine import scaled
from support.present import present
from support.sqs import sqs_client
from support.waiting import wait_until
from system.cluster.role_cluster import OPERATOR, PAGE, READER, TOPIC, WORKER, WRITER, role_cluster
from system.e2e.test_protected_start import ROLE_EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from system.cluster.role_cluster import RoleCluster

pytestmark = [pytest.mark.full, pytest.mark.row("A8"), pytest.mark.timeout(240)]

TIMEOUT_S: Final = 30
HIDDEN: Final = "payroll"
"""Neither a topic nor a group that one of the users but the operator may see."""
QUEUE: Final = "parcels"
UNSEEN: Final = "NonExistentQueue"
OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleCluster]:
    """The cluster, after all commands of "Roles"."""
    with role_cluster(tmp_path_factory.mktemp("roles")) as started:
        printed = {name: started.run_example(name) for name in ROLE_EXAMPLES}
        assert all(f"User:{user}" in printed["roles"] for user in (READER, WRITER, WORKER))
        for name, example in examples(PAGE).items():
            if name in ROLE_EXAMPLES and example.shown is not None:
                assert lines_to_compare(printed[name]) == lines_to_compare(example.shown)
        with started.cluster.client(1) as admin:
            admin.admin.create_topic(HIDDEN)
        yield started


# -- Kafka --------


def produced_code(room: RoleCluster, user: str) -> int | None:
    """The code with which a record is refused; None if it is stored."""
    errors: list[Any] = []
    producer = kafka.Producer(room.kafka(user))
    producer.produce(TOPIC, b"over Kafka", on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(scaled(TIMEOUT_S)) == 0
    (error,) = errors
    return None if error is None else int(error.code())


def consumed_code(room: RoleCluster, user: str, group: str) -> int | None:
    """The code with which a member of a group is refused; None if it gets a record."""
    settings = {**room.kafka(user), "group.id": group, "auto.offset.reset": "earliest"}
    consumer = kafka.Consumer({**settings, "enable.auto.commit": False})
    try:
        consumer.subscribe([TOPIC])
        message = wait_until(lambda: consumer.poll(1), scaled(TIMEOUT_S), "a record or a refusal")
        error = present(message).error()
        return None if error is None else int(error.code())
    finally:
        consumer.close()


def code_of(future: Any) -> int | None:
    """The code with which a request of an AdminClient, which has to live until then, is refused; None if it is done."""
    error = future.exception(scaled(TIMEOUT_S))
    return None if error is None else int(error.args[0].code())


def created_code(room: RoleCluster, user: str, topic: str) -> int | None:
    """The code with which a user is refused to create a topic."""
    admin = AdminClient(room.kafka(user))
    return code_of(admin.create_topics([NewTopic(topic, 1)])[topic])


def acl_code(room: RoleCluster, user: str) -> int | None:
    """The code with which a user is refused to add an ACL."""
    admin = AdminClient(room.kafka(user))
    topic = ResourceType.TOPIC, "news", ResourcePatternType.LITERAL
    added = AclBinding(*topic, "User:eve", "*", AclOperation.READ, AclPermissionType.ALLOW)
    return code_of(admin.create_acls([added])[added])


def test_kafka_clients_are_refused_with_the_code_of_what_they_lack(room: RoleCluster) -> None:
    topic, group, cluster = (
        kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        kafka.KafkaError.GROUP_AUTHORIZATION_FAILED,
        kafka.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
    users = (READER, WRITER, WORKER, OPERATOR)
    assert [produced_code(room, user) for user in users] == [topic, None, topic, topic]
    assert [consumed_code(room, READER, each) for each in ("billing", HIDDEN)] == [None, group]
    assert [consumed_code(room, user, READER) for user in (WRITER, OPERATOR)] == [group, group]
    assert [created_code(room, user, f"of-{user}") for user in users] == [topic, topic, topic, None]
    assert [acl_code(room, user) for user in users] == [cluster, cluster, cluster, None]


def test_share_consumers_have_their_group_and_no_other(room: RoleCluster) -> None:
    assert produced_code(room, WRITER) is None
    servers, tls = room.cluster.bootstrap_servers, room.ca

    def receive(user: str, group: str) -> int:
        with (
            blocking.connect(servers, tls=tls, user=user, password=room.password(user)) as client,
            client.receive(TOPIC, group=group) as receiver,
        ):
            messages = wait_until(lambda: receiver.poll(500), scaled(TIMEOUT_S), "a record")
            receiver.ack(present(messages))
            return len(present(messages))

    assert receive(WORKER, WORKER) > 0
    for user, group in ((WORKER, HIDDEN), (WRITER, WORKER), (OPERATOR, WORKER)):
        with pytest.raises(GroupAuthorizationFailed):
            receive(user, group)


# -- HTTP --------


def statuses(room: RoleCluster, user: str, address: str) -> dict[str, int]:
    """The status of each request of the table, and of one about a topic that the user may not see."""
    requests: dict[str, tuple[str, str, Any]] = {
        "read": ("GET", f"/topics/{TOPIC}/partitions/0/records?limit=1", None),
        "publish": ("POST", f"/topics/{TOPIC}/records", {"of": user}),
        "receive": ("POST", f"/groups/{WORKER}/receive", {"topics": [TOPIC]}),
        "create": ("POST", "/topics", {"name": f"http-{user}-{address.rpartition(':')[2]}"}),
        "hidden": ("GET", f"/topics/{HIDDEN}/partitions/0/records", None),
    }
    with httpx.Client(
        base_url=f"https://{address}/v1",
        verify=ssl.create_default_context(cafile=room.ca),
        auth=(user, room.password(user)),
        timeout=scaled(TIMEOUT_S),
        trust_env=False,
    ) as client:
        answers = {name: client.request(*words[:2], json=words[2]) for name, words in requests.items()}
        for answer in answers.values():
            if answer.is_error:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["title"].endswith("AuthorizationFailed"), answer.text
        if answers["receive"].is_success:
            receipts = [each["receipt"] for each in answers["receive"].json()["records"]]
            done = client.post(f"/groups/{WORKER}/ack", json={"receipts": receipts}) if receipts else None
            assert done is None or done.is_success
        return {name: answer.status_code for name, answer in answers.items()}


def test_http_answers_403_for_what_a_role_lacks_at_each_broker(room: RoleCluster) -> None:
    refused = dict.fromkeys(("read", "publish", "receive", "create", "hidden"), 403)
    for address in room.addresses("http"):
        assert statuses(room, READER, address) == {**refused, "read": 200}
        assert statuses(room, WRITER, address) == {**refused, "publish": 200}
        assert statuses(room, WORKER, address) == {**refused, "read": 200, "receive": 200}
        assert statuses(room, OPERATOR, address) == {**refused, "create": 201}


# -- gRPC --------


class GrpcClient:
    """Calls of a user to one broker; each returns its status."""

    def __init__(self, channel: grpc.Channel, user: str, password: str) -> None:
        basic = base64.b64encode(f"{user}:{password}".encode()).decode()
        self._channel = channel
        self._options = {
            "metadata": [("authorization", f"Basic {basic}")],
            "timeout": scaled(TIMEOUT_S),
        }

    def call(self, method: str, request: Any) -> grpc.StatusCode:
        ask = self._channel.unary_unary(f"/mansio.v1.Mansio/{method}", type(request).SerializeToString)
        try:
            ask(request, **self._options)
        except grpc.RpcError as error:
            return error.code()
        return OK

    def receive(self, group: str) -> grpc.StatusCode:
        """Receive a record, and acknowledge it by another call."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.ReceiveRequest(open=pb.ReceiveOpen(group=group, topics=[TOPIC]), credits=1))
        stream = self._channel.stream_stream(
            "/mansio.v1.Mansio/Receive",
            pb.ReceiveRequest.SerializeToString,
            pb.ReceiveResponse.FromString,
        )(iter(requests.get, None), **self._options)
        try:
            answer = next(answer for answer in stream if answer.records)
            receipts = [record.receipt for record in answer.records]
            return self.call("Ack", pb.AckRequest(group=group, receipts=receipts))
        except grpc.RpcError as error:
            return error.code()
        finally:
            requests.put(None)
            stream.cancel()


def grpc_codes(room: RoleCluster, user: str, address: str) -> dict[str, grpc.StatusCode]:
    with open(room.ca, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    with grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        client = GrpcClient(channel, user, room.password(user))
        publish = pb.PublishRequest(topic=TOPIC, records=[pb.NewRecord(value=b"over gRPC")])
        new = f"grpc-{user}-{address.rpartition(':')[2]}"
        return {
            "Fetch": client.call("Fetch", pb.FetchRequest(topic=TOPIC)),
            "Publish": client.call("Publish", publish),
            "Receive": client.receive(WORKER),
            "CreateTopic": client.call("CreateTopic", pb.CreateTopicRequest(name=new)),
            "hidden": client.call("Fetch", pb.FetchRequest(topic=HIDDEN)),
        }


def test_grpc_answers_permission_denied_for_what_a_role_lacks_at_each_broker(room: RoleCluster) -> None:
    refused = dict.fromkeys(("Fetch", "Publish", "Receive", "CreateTopic", "hidden"), DENIED)
    for address in room.addresses("grpc"):
        assert grpc_codes(room, READER, address) == {**refused, "Fetch": OK}
        assert grpc_codes(room, WRITER, address) == {**refused, "Publish": OK}
        assert grpc_codes(room, WORKER, address) == {**refused, "Fetch": OK, "Receive": OK}
        assert grpc_codes(room, OPERATOR, address) == {**refused, "CreateTopic": OK}


# -- SQS --------


def sqs_codes(client: Any, address: str, user: str) -> dict[str, str]:
    """The error of each action of the table, "" if it is done."""
    queue_url = f"https://{address}/000000000000/{QUEUE}"

    def receive() -> None:
        def received() -> list[Any]:
            answer = client.receive_message(QueueUrl=queue_url, WaitTimeSeconds=1)
            return list(answer.get("Messages", []))

        for message in present(wait_until(received, scaled(TIMEOUT_S), "a message")):
            client.delete_message(QueueUrl=queue_url, ReceiptHandle=message["ReceiptHandle"])

    actions: dict[str, Callable[[], object]] = {
        "send": lambda: client.send_message(QueueUrl=queue_url, MessageBody="over SQS"),
        "receive": receive,
        "create": lambda: client.create_queue(QueueName=f"sqs-{user}-{address.rpartition(':')[2]}"),
        "look up": lambda: client.get_queue_url(QueueName=QUEUE),
    }
    found = {}
    for name, action in actions.items():
        try:
            action()
            found[name] = ""
        except ClientError as error:
            answer: Any = error.response
            found[name] = answer["Error"]["Code"].rpartition(".")[2]
            expected = 400 if found[name] == UNSEEN else 403
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == expected, answer
    return found


def test_sqs_denies_what_a_role_lacks_and_hides_what_it_may_not_see_at_each_broker(room: RoleCluster) -> None:
    with room.cluster.client(1) as admin:
        key = admin.admin.users.create_sqs_key(READER)
    pairs = {READER: (key.key_id, present(key.secret))}
    for user in (WRITER, WORKER, OPERATOR):
        (row,) = json.loads((room.directory / f"{user}.sqs-key").read_text())
        pairs[user] = (row["access_key_id"], row["secret_access_key"])

    def client_of(user: str, address: str) -> Any:
        key_id, secret = pairs[user]
        return sqs_client(f"https://{address}", key_id=key_id, secret=secret, authority=room.ca)

    addresses = room.addresses("sqs")
    client_of(OPERATOR, addresses[0]).create_queue(QueueName=QUEUE)
    denied = dict.fromkeys(("send", "receive", "create"), "AccessDenied") | {"look up": ""}
    for address in addresses:
        operator = client_of(OPERATOR, address)
        wait_until(lambda one=operator: "QueueUrls" in one.list_queues(QueueNamePrefix=QUEUE))
        found = {
            user: sqs_codes(client_of(user, address), address, user)
            for user in (WRITER, WORKER, READER, OPERATOR)
        }
        assert found[WRITER] == {**denied, "send": ""}
        assert found[OPERATOR] == {**denied, "create": ""}
        assert found[READER] == {**dict.fromkeys(denied, UNSEEN), "create": "AccessDenied"}
        assert found[WORKER] == {**denied, "receive": ""}
