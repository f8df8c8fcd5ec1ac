"""Each operation of HTTP, gRPC and SQS: a user without rights is refused, changes nothing and learns no name; the super
user is not refused. The operations come from the table `mansio.api.required_rights`."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import botocore.exceptions
import grpc
import httpx
import pytest

from component.authorization.visible_state import visible_state
from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.required_rights import GRPC, HTTP, SQS
from mansio.api.sqs.queues.queue_attributes import ACCOUNT
from mansio.broker.services.share_groups.leases import Receipt
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.secured_broker import set_password
from support.sqs import sqs_client

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.node.broker import Broker

PASSWORD: Final = "correct-horse"
TIMEOUT_S: Final = 30
TOPIC, GROUP, TRANSACTION = "t-secret", "g-secret", "x-secret"
NAMES: Final = (TOPIC, GROUP, TRANSACTION)
QUEUE: Final = "q-secret"
ARN: Final = f"arn:aws:sqs:eu-central-1:{ACCOUNT}:{QUEUE}"
SQS_REFUSALS: Final = frozenset(
    {"AccessDenied", "AWS.SimpleQueueService.NonExistentQueue", "ResourceNotFoundException"}
)
"""A queue that a user may not describe does not exist for it."""
UNSEEN: Final = "there is no "
"""Part of the answer about a topic or group that a user may not describe; both exist."""
REFUSED: Final = "AuthorizationFailed"


class Room:
    """A broker of all protocols with a topic, its users, and what a refused request must not change."""

    def __init__(self, broker: TestBroker) -> None:
        self.broker = broker
        for user in ("alice", "admin"):
            set_password(broker, user, PASSWORD)
        self.create()

    def create(self) -> None:
        """Create the topic again if a request has deleted it."""
        if TOPIC not in self.running.service.topics.state.topics:
            created = self.http("admin", "POST", "/topics", json={"name": TOPIC})
            assert created.status_code == 201, created.text
        published = self.http("admin", "POST", f"/topics/{TOPIC}/records", content=b"v")
        assert published.status_code == 200, published.text
        received = self.http("admin", "POST", f"/groups/{GROUP}/receive", json={"topics": [TOPIC]})
        assert received.status_code == 200, received.text
        topic = self.running.service.topics.state.topics[TOPIC]
        self.receipt = Receipt("ab" * 16, topic.topic_id.bytes, 0, 0, 1).encode()

    def create_queue(self) -> None:
        code, text = self.sqs("admin", "CreateQueue", {"QueueName": QUEUE})
        assert not code, text

    @property
    def running(self) -> Broker:
        return self.broker._running()

    def fingerprint(self) -> Any:
        async def read() -> Any:
            return visible_state(self.running.service)

        return self.broker._call(read(), scaled(TIMEOUT_S))

    def http(self, user: str, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.broker.http_url}/v1{path}",
            auth=(user, PASSWORD),
            headers={"X-Mansio-Request": "1"},
            timeout=scaled(TIMEOUT_S),
            trust_env=False,
            **more,
        )

    def grpc(self, user: str, method: str, request: Any) -> tuple[Any, str]:
        """Call a method; return its status and the text of all messages in the answer."""
        described = pb.DESCRIPTOR.services_by_name["Mansio"].methods_by_name[method]
        answer_type = getattr(pb, described.output_type.name)
        credential = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        more: dict[str, Any] = {
            "metadata": (("authorization", f"Basic {credential}"),),
            "timeout": scaled(TIMEOUT_S),
        }
        with grpc.insecure_channel(self.broker.grpc_address) as channel:
            path = f"/mansio.v1.Mansio/{method}"
            encode = type(request).SerializeToString
            try:
                if described.server_streaming and not described.client_streaming:
                    answers = channel.unary_stream(path, encode, answer_type.FromString)(request, **more)
                    return grpc.StatusCode.OK, "".join(map(str, answers))
                if not described.client_streaming:
                    answer = channel.unary_unary(path, encode, answer_type.FromString)(request, **more)
                    return grpc.StatusCode.OK, str(answer)
                call = channel.stream_stream(path, encode, answer_type.FromString)(iter([request]), **more)
                return grpc.StatusCode.OK, "".join(map(str, call))
            except grpc.RpcError as error:
                return error.code(), str(error.details())

    def sqs(self, user: str, action: str, parameters: dict[str, Any]) -> tuple[str, str]:
        """Call an action; return its error code, "" for none, and the text of the answer."""
        client = sqs_client(self.broker.sqs_url, key_id=user, secret=PASSWORD)
        name = "".join("_" + letter.lower() if letter.isupper() else letter for letter in action).lstrip("_")
        try:
            return "", str(getattr(client, name)(**parameters))
        except botocore.exceptions.ClientError as error:
            return error.response["Error"]["Code"], str(error)


def sampled(operations: Iterable[Any]) -> list[Any]:
    """Return parameters of which the normal tier runs each sixth."""
    return [
        each if number % 6 == 1 else pytest.param(each, marks=pytest.mark.full)
        for number, each in enumerate(operations)
    ]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice {PASSWORD}\nadmin {PASSWORD}\n")
    with TestBroker(
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        http_security_protocol="SASL_PLAINTEXT",
        grpc_security_protocol="SASL_PLAINTEXT",
        sqs_access_keys_file=str(keys),
        authorizer="acl",
        super_users="User:admin",
    ) as broker:
        yield Room(broker)


def http_body(method: str, path: str, receipt: str) -> dict[str, Any]:
    """Return the body of a valid request."""
    ids = {"ids": ["0:1"]}
    bodies: dict[tuple[str, str], dict[str, Any]] = {
        ("POST", "/topics"): {"name": f"{TOPIC}-2"},
        ("PATCH", "/topics/{topic}"): {"config": {"retention.ms": "1000000"}},
        ("POST", "/topics/{topic}/records/batch"): {"records": [{"value": "v"}]},
        ("POST", "/groups/{group}/receive"): {"topics": [TOPIC]},
        ("POST", "/groups/{group}/ack"): {"receipts": [receipt]},
        ("POST", "/groups/{group}/retry"): {"receipts": [receipt]},
        ("POST", "/groups/{group}/reject"): {"receipts": [receipt]},
        ("POST", "/groups/{group}/extend"): {"receipts": [receipt]},
        ("PATCH", "/groups/{group}/config"): {"config": {"share.record.lock.duration.ms": "20000"}},
        ("POST", "/groups/{group}/offsets/reset"): {"topics": [TOPIC], "to": "earliest"},
        ("POST", "/groups/{group}/dead-letters/redrive"): {"topic": TOPIC},
        ("POST", "/topics/{topic}/delayed/cancel"): ids,
        ("POST", "/topics/{topic}/delayed/reschedule"): {**ids, "delay_ms": 1000},
        ("POST", "/topics/{topic}/delayed/deliver-now"): ids,
        ("PUT", "/topics/{topic}/schedules/{name}"): {"every_ms": 3_600_000, "value": "v"},
        ("POST", "/topics/{topic}/partitions/{partition}/transactions/abort"): {"start_offset": 0},
    }
    return bodies.get((method, path), {})


HTTP_QUERIES: Final = {
    "/groups/{group}/leases": {"topic": TOPIC},
    "/topics/{topic}/events": {"from": "earliest"},
    "/topics/{topic}/search": {"key": "k"},
}


def http_request(room: Room, user: str, method: str, path: str) -> httpx.Response:
    names = {
        "topic": TOPIC,
        "group": GROUP,
        "partition": "0",
        "offset": "0",
        "name": "s",
        "transactional_id": TRANSACTION,
    }
    more: dict[str, Any] = {"params": HTTP_QUERIES.get(path, {})}
    if path == "/topics/{topic}/records":
        more["content"] = b"v"
    elif body := http_body(method, path, room.receipt):
        more["json"] = body
    return room.http(user, method, path.format(**names), **more)


STREAMED: Final = ("GET", "/topics/{topic}/events")
"""It does not end by itself once it is allowed."""


@pytest.mark.parametrize("operation", sampled(HTTP), ids=" ".join)
def test_http_operations_need_rights(room: Room, operation: tuple[str, str]) -> None:
    if operation == ("GET", "/cluster"):
        pytest.skip("it needs no right")
    room.create()
    before = room.fingerprint()
    refused = http_request(room, "alice", *operation)
    assert room.fingerprint() == before, "a refused request changed something"
    if refused.status_code == 200 and REFUSED not in refused.text:
        assert not any(name in refused.text for name in NAMES)
    elif refused.status_code != 200:
        assert refused.status_code == 403 or UNSEEN in refused.text, refused.text
    if operation != STREAMED:
        allowed = http_request(room, "admin", *operation)
        assert allowed.status_code not in (401, 403), allowed.text
        assert REFUSED not in allowed.text


def grpc_request(method: str, receipt: str) -> Any:
    requests: dict[str, Any] = {
        "Publish": pb.PublishRequest(topic=TOPIC, records=[pb.NewRecord(value=b"v")]),
        "PublishStream": pb.PublishRequest(topic=TOPIC, records=[pb.NewRecord(value=b"v")]),
        "Fetch": pb.FetchRequest(topic=TOPIC),
        "ListOffsets": pb.ListOffsetsRequest(topic=TOPIC),
        "Receive": pb.ReceiveRequest(open=pb.ReceiveOpen(group=GROUP, topics=[TOPIC]), credits=1),
        "Ack": pb.AckRequest(group=GROUP, receipts=[receipt]),
        "Retry": pb.RetryRequest(group=GROUP, records=[pb.Retry(receipt=receipt)]),
        "Reject": pb.RejectRequest(group=GROUP, records=[pb.Reject(receipt=receipt)]),
        "Extend": pb.ExtendRequest(group=GROUP, records=[pb.Extend(receipt=receipt)]),
        "Redrive": pb.RedriveRequest(group=GROUP, redrive_id="r", topic=TOPIC, partition=0),
        "ListTopics": pb.ListTopicsRequest(),
        "CreateTopic": pb.CreateTopicRequest(name=f"{TOPIC}-3"),
        "AlterTopic": pb.AlterTopicRequest(name=TOPIC, set={"retention.ms": "1000000"}),
        "ListGroups": pb.Empty(),
        "ResetGroupOffsets": pb.ResetGroupOffsetsRequest(group=GROUP, topics=[TOPIC], earliest=True),
        "AlterGroup": pb.AlterGroupRequest(group=GROUP, set={"share.record.lock.duration.ms": "20000"}),
        "ListDelayed": pb.ListDelayedRequest(topic=TOPIC),
        "TraceRecord": pb.TraceRecordRequest(topic=TOPIC),
        "FindRecords": pb.FindRecordsRequest(topic=TOPIC, key=b"k"),
        "ChangeDelayed": pb.ChangeDelayedRequest(topic=TOPIC, ids=[pb.DelayedId(id=1)], cancel=True),
        "CreateSchedule": pb.CreateScheduleRequest(topic=TOPIC, name="s", every_ms=3_600_000, value=b"v"),
        "ChangeSchedule": pb.ChangeScheduleRequest(topic=TOPIC, name="s", pause=True),
        "ListTransactions": pb.ListTransactionsRequest(),
        "DescribeProducers": pb.DescribeProducersRequest(topic=TOPIC, partition=0),
        "FindHangingTransactions": pb.FindHangingRequest(topic=TOPIC),
        "AbortTransaction": pb.AbortTransactionRequest(start_offset=0, topic=TOPIC, partition=0),
    }
    if method in requests:
        return requests[method]
    described = pb.DESCRIPTOR.services_by_name["Mansio"].methods_by_name[method].input_type.name
    if described == "TransactionalId":
        return pb.TransactionalId(transactional_id=TRANSACTION)
    return pb.GroupName(name=GROUP) if described == "GroupName" else pb.TopicName(name=TOPIC)


@pytest.mark.parametrize("method", sampled(GRPC))
def test_grpc_methods_need_rights(room: Room, method: str) -> None:
    room.create()
    request = grpc_request(method, room.receipt)
    before = room.fingerprint()
    status, text = room.grpc("alice", method, request)
    assert room.fingerprint() == before, "a refused request changed something"
    if status == grpc.StatusCode.OK and REFUSED not in text:
        assert not any(name in text for name in NAMES)
    elif status != grpc.StatusCode.OK:
        assert status == grpc.StatusCode.PERMISSION_DENIED or UNSEEN in text, text
    status, text = room.grpc("admin", method, request)
    assert status not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), text
    assert REFUSED not in text


def sqs_parameters(room: Room, action: str) -> dict[str, Any]:
    url = {"QueueUrl": f"{room.broker.sqs_url}/{ACCOUNT}/{QUEUE}"}
    task = base64.b64encode(b"{}").decode()
    entry = {"Id": "1", "ReceiptHandle": room.receipt}
    own: dict[str, dict[str, Any]] = {
        "AddPermission": {**url, "Label": "l", "AWSAccountIds": ["1" * 12], "Actions": ["*"]},
        "RemovePermission": {**url, "Label": "l"},
        "CancelMessageMoveTask": {"TaskHandle": task},
        "ChangeMessageVisibility": {**url, "ReceiptHandle": room.receipt, "VisibilityTimeout": 1},
        "ChangeMessageVisibilityBatch": {**url, "Entries": [{**entry, "VisibilityTimeout": 1}]},
        "CreateQueue": {"QueueName": f"{QUEUE}-2"},
        "DeleteMessage": {**url, "ReceiptHandle": room.receipt},
        "DeleteMessageBatch": {**url, "Entries": [entry]},
        "GetQueueAttributes": {**url, "AttributeNames": ["All"]},
        "GetQueueUrl": {"QueueName": QUEUE},
        "ListMessageMoveTasks": {"SourceArn": ARN},
        "ListQueues": {},
        "SendMessage": {**url, "MessageBody": "v"},
        "SendMessageBatch": {**url, "Entries": [{"Id": "1", "MessageBody": "v"}]},
        "SetQueueAttributes": {**url, "Attributes": {"VisibilityTimeout": "20"}},
        "StartMessageMoveTask": {"SourceArn": ARN},
        "TagQueue": {**url, "Tags": {"a": "b"}},
        "UntagQueue": {**url, "TagKeys": ["a"]},
    }
    return own.get(action, url)


@pytest.mark.parametrize("action", sampled(name for name, apis in SQS.items() if apis))
def test_sqs_actions_need_rights(room: Room, action: str) -> None:
    room.create_queue()
    parameters = sqs_parameters(room, action)
    before = room.fingerprint()
    code, text = room.sqs("alice", action, parameters)
    assert room.fingerprint() == before, "a refused request changed something"
    if code:
        assert code in SQS_REFUSALS, text
    elif "AccessDenied" not in text:
        assert QUEUE not in text
    code, text = room.sqs("admin", action, parameters)
    assert "AccessDenied" not in code + text
