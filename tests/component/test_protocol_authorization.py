"""Records over HTTP, gRPC and SQS need the rights of the Kafka protocol. A refusal is 403, PERMISSION_DENIED or
AccessDenied, per entry where the answer has entries, and changes nothing."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import grpc
import httpx
import pytest
from botocore.exceptions import ClientError

from mansio.api.grpc import mansio_pb2 as pb
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.record_rights import RecordRights
from support.sqs import sqs_client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
READ, WRITE, DESCRIBE, DELETE = Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.DELETE
ALTER_CONFIGS, CREATE = Operation.ALTER_CONFIGS, Operation.CREATE
TIMEOUT_S: Final = 30


class Room:
    """A broker with topic t and queues q and dead, whose clients may do what a test allows them."""

    def __init__(self, broker: TestBroker) -> None:
        self.broker = broker
        self.rights = RecordRights(broker)
        self.rights.allow_everything()
        broker.client().admin.create_topic("t", partitions=1)
        broker.client().publish("t", b"v")
        self.sqs = sqs_client(broker.sqs_url)
        self.url = self.sqs.create_queue(QueueName="q")["QueueUrl"]
        self.sqs.create_queue(QueueName="dead")
        self.rights.allow_nothing()

    def end(self, topic: str) -> int:
        partitions = self.broker._running().service.partitions.partitions_of(topic)
        return sum(each.end_offset for each in partitions)


@pytest.fixture
def room() -> Iterator[Room]:
    with TestBroker(authorizer="acl") as broker:
        yield Room(broker)


def http_post(room: Room, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{room.broker.http_url}/v1{path}", json=body, timeout=scaled(TIMEOUT_S))


@pytest.mark.full
def test_http_answers_403(room: Room) -> None:
    record = {"value": base64.b64encode(b"v").decode(), "encoding": "base64"}
    room.rights.allow(TOPIC, "t", DESCRIBE)
    room.rights.allow(TOPIC, "q", DESCRIBE)
    room.rights.allow(GROUP, "g", READ)
    refused = [
        http_post(room, "/topics/t/records", {"records": [record]}),
        http_post(room, "/topics/absent/records", {"records": [record]}),
        http_post(room, "/groups/g/receive", {"topics": ["t"]}),
        *(
            httpx.get(
                f"{room.broker.http_url}/v1/topics/{topic}/partitions/0/records", timeout=scaled(TIMEOUT_S)
            )
            for topic in ("t", "q")  # q is empty
        ),
    ]
    found = [(each.status_code, each.json().get("title")) for each in refused]
    assert found == [(403, "TopicAuthorizationFailed")] * 5, [each.text for each in refused]
    assert room.end("t") == 1


def grpc_code(room: Room, method: str, request: Any) -> Any:
    with grpc.insecure_channel(room.broker.grpc_address) as channel:
        call = channel.unary_unary(f"/mansio.v1.Mansio/{method}", type(request).SerializeToString)
        try:
            call(request, timeout=scaled(TIMEOUT_S))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.full
def test_grpc_answers_permission_denied(room: Room) -> None:
    room.rights.allow(TOPIC, "t", DESCRIBE)
    publish = pb.PublishRequest(topic="t", records=[pb.NewRecord(value=b"v")])
    assert grpc_code(room, "Publish", publish) is grpc.StatusCode.PERMISSION_DENIED
    room.rights.allow(TOPIC, "q", DESCRIBE)
    for topic in ("t", "q"):  # q is empty
        assert grpc_code(room, "Fetch", pb.FetchRequest(topic=topic)) is grpc.StatusCode.PERMISSION_DENIED
    acknowledge = pb.AckRequest(group="g", receipts=["A" * 64])
    assert grpc_code(room, "Ack", acknowledge) is grpc.StatusCode.PERMISSION_DENIED
    assert room.end("t") == 1
    room.rights.allow(TOPIC, "t", WRITE)
    assert grpc_code(room, "Publish", publish) is grpc.StatusCode.OK


def code_of(call: Callable[[], Any]) -> tuple[str, int]:
    with pytest.raises(ClientError) as caught:
        call()
    answer: Any = caught.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]


DENIED: Final = ("AccessDenied", 403)
UNSEEN: Final = ("AWS.SimpleQueueService.NonExistentQueue", 400)


def actions(room: Room) -> dict[str, Callable[[], Any]]:
    sqs, url = room.sqs, room.url
    policy = '{"deadLetterTargetArn": "arn:aws:sqs:us-east-1:000000000000:dead", "maxReceiveCount": 3}'
    return {
        "send": lambda: sqs.send_message(QueueUrl=url, MessageBody="m"),
        "receive": lambda: sqs.receive_message(QueueUrl=url),
        "delete": lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle="A" * 64),
        "purge": lambda: sqs.purge_queue(QueueUrl=url),
        "delete queue": lambda: sqs.delete_queue(QueueUrl=url),
        "set": lambda: sqs.set_queue_attributes(QueueUrl=url, Attributes={"DelaySeconds": "7"}),
        "redrive": lambda: sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy}),
        "counts": lambda: sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]),
    }


@pytest.mark.row("A8")
def test_sqs_hides_queues_and_denies_actions(room: Room) -> None:
    sqs, calls = room.sqs, actions(room)
    before = room.broker._running().service.topics.state.topics["q"]
    assert {name: code_of(call) for name, call in calls.items()} == dict.fromkeys(calls, UNSEEN)
    assert code_of(lambda: sqs.get_queue_url(QueueName="q")) == UNSEEN
    assert code_of(lambda: sqs.get_queue_url(QueueName="absent")) == UNSEEN
    assert sqs.list_queues().get("QueueUrls", []) == []
    room.rights.allow(TOPIC, "q", DESCRIBE)
    assert [each.rpartition("/")[2] for each in sqs.list_queues()["QueueUrls"]] == ["q"]
    assert {name: code_of(call) for name, call in calls.items()} == dict.fromkeys(calls, DENIED)
    assert code_of(lambda: sqs.create_queue(QueueName="q")) == DENIED
    assert code_of(lambda: sqs.create_queue(QueueName="new")) == DENIED
    assert room.end("q") == 0
    assert room.broker._running().service.topics.state.topics["q"] == before
    assert "new" not in room.broker._running().service.topics.state.topics


@pytest.mark.full
def test_sqs_actions_pass_with_their_rights_and_entries_are_denied_alone(room: Room) -> None:
    sqs, url, calls = room.sqs, room.url, actions(room)
    entries = [{"Id": str(number), "MessageBody": "m"} for number in range(2)]
    room.rights.allow(TOPIC, "q", WRITE)
    sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert code_of(calls["receive"]) == DENIED
    room.rights.allow(TOPIC, "q", READ)
    room.rights.allow(GROUP, "sqs.q", READ)
    (message,) = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"]
    handle = message["ReceiptHandle"]
    room.rights.remove(GROUP, "sqs.q", READ)
    delete = [{"Id": "a", "ReceiptHandle": handle}]
    assert code_of(lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle=handle)) == DENIED
    assert code_of(lambda: sqs.delete_message_batch(QueueUrl=url, Entries=delete)) == DENIED
    room.rights.allow(GROUP, "sqs.q", READ)
    room.rights.remove(TOPIC, "q", READ)
    (failed,) = sqs.delete_message_batch(QueueUrl=url, Entries=delete)["Failed"]
    assert (failed["Code"], failed["SenderFault"]) == ("AccessDeniedException", True)
    room.rights.allow(TOPIC, "q", READ, ALTER_CONFIGS)
    room.rights.allow(GROUP, "sqs.q", ALTER_CONFIGS)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=handle)
    calls["set"]()
    assert code_of(calls["redrive"]) == ("InvalidParameterValue", 400), "the target is unseen"
    room.rights.allow(TOPIC, "dead", DESCRIBE, ALTER_CONFIGS)
    assert code_of(calls["redrive"]) == DENIED
    room.rights.allow(TOPIC, "dead", WRITE)
    calls["redrive"]()
    room.rights.remove(TOPIC, "dead", WRITE, DESCRIBE)
    calls["set"]()  # the target was named before
    assert code_of(calls["purge"]) == DENIED
    room.rights.allow(TOPIC, "q", DELETE)
    calls["purge"]()
    assert code_of(calls["delete queue"]) == DENIED
    room.rights.allow(GROUP, "sqs.q", DELETE, DESCRIBE)
    calls["counts"]()
    calls["delete queue"]()
    assert code_of(calls["send"]) == UNSEEN
