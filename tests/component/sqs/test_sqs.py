"""Queues of the SQS-compatible endpoint, through boto3 over real connections."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError

from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.sqs import receive_all, sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.row("A4")


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture(scope="module")
def sqs(broker: TestBroker) -> Any:
    return sqs_client(broker.sqs_url)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return hashlib.sha256(request.node.name.encode()).hexdigest()[:12]


@pytest.fixture
def queue(sqs: Any, name: str) -> str:
    return str(sqs.create_queue(QueueName=name)["QueueUrl"])


@pytest.fixture
def fifo(sqs: Any, name: str) -> str:
    attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    return str(sqs.create_queue(QueueName=f"{name}.fifo", Attributes=attributes)["QueueUrl"])


def test_clients_that_create_a_queue_at_the_same_time_all_get_it(broker: TestBroker, name: str) -> None:
    clients = [sqs_client(broker.sqs_url) for _ in range(8)]
    ready = threading.Barrier(len(clients))

    def create(client: Any, queue_name: str) -> str:
        ready.wait(scaled(30))
        return str(client.create_queue(QueueName=queue_name)["QueueUrl"])

    with ThreadPoolExecutor(len(clients)) as pool:
        for number in range(3):
            urls = list(pool.map(create, clients, [f"{name}-{number}"] * len(clients)))
            assert len(set(urls)) == 1


def arn_of(sqs: Any, url: str) -> str:
    return str(sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"])


def counts(sqs: Any, url: str) -> tuple[int, int, int]:
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    names = ("", "NotVisible", "Delayed")
    visible, leased, delayed = (int(found[f"ApproximateNumberOfMessages{each}"]) for each in names)
    return visible, leased, delayed


def drain(sqs: Any, url: str, count: int) -> list[Any]:
    """Receive and delete messages until there are `count`, or none for a second."""
    found: list[Any] = []
    while len(found) < count and (some := receive_all(sqs, url, 1)):
        for each in some:
            sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
        found += some
    return found


def code_of(failed: pytest.ExceptionInfo[ClientError]) -> str:
    return str(failed.value.response["Error"]["Code"])


# Standard queues


def test_a_message_arrives_with_its_attributes_and_is_gone_once_it_is_deleted(sqs: Any, queue: str) -> None:
    attributes = {
        "Colour": {"DataType": "String", "StringValue": "grün"},
        "Weight": {"DataType": "Number.kg", "StringValue": "12.5"},
        "Picture": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
    }
    sent = sqs.send_message(
        QueueUrl=queue,
        MessageBody="höllo\n",
        MessageAttributes=attributes,
        MessageGroupId="tenant",
        MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5"}},
    )
    (message,) = receive_all(sqs, queue, 1)
    assert message["MessageId"] == sent["MessageId"]
    assert message["Body"] == "höllo\n"
    assert message["MD5OfBody"] == sent["MD5OfMessageBody"] == hashlib.md5("höllo\n".encode()).hexdigest()
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    system = message["Attributes"]
    assert system["ApproximateReceiveCount"] == "1"
    assert system["AWSTraceHeader"] == "Root=1-5"
    assert system["MessageGroupId"] == "tenant"
    assert abs(int(system["SentTimestamp"]) / 1000 - time.time()) < 60
    assert counts(sqs, queue) == (0, 1, 0)
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])  # a repeated request
    assert counts(sqs, queue) == (0, 0, 0)


def test_an_empty_message_attribute_selection_returns_none_and_a_prefix_some(sqs: Any, queue: str) -> None:
    value = {"DataType": "String", "StringValue": "x"}
    sqs.send_message(
        QueueUrl=queue, MessageBody="m", MessageAttributes={"a.b": value, "a.c": value, "d": value}
    )
    receive = {"QueueUrl": queue, "VisibilityTimeout": 0, "WaitTimeSeconds": 5}
    assert "MessageAttributes" not in sqs.receive_message(**receive)["Messages"][0]
    found = sqs.receive_message(**receive, MessageAttributeNames=["a.*"])["Messages"][0]
    assert set(found["MessageAttributes"]) == {"a.b", "a.c"}


def test_a_message_is_offered_again_after_its_visibility_timeout(sqs: Any, queue: str) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="m")
    (first,) = receive_all(sqs, queue, 1, VisibilityTimeout=1)
    (second,) = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=20, MessageSystemAttributeNames=["All"])[
        "Messages"
    ]
    assert second["MessageId"] == first["MessageId"]
    assert second["Attributes"]["ApproximateReceiveCount"] == "2"
    first_ms = first["Attributes"]["ApproximateFirstReceiveTimestamp"]
    assert second["Attributes"]["ApproximateFirstReceiveTimestamp"] == first_ms
    with pytest.raises(ClientError) as failed:
        sqs.change_message_visibility(
            QueueUrl=queue, ReceiptHandle=first["ReceiptHandle"], VisibilityTimeout=30
        )
    assert code_of(failed) == "AWS.SimpleQueueService.MessageNotInflight"


def test_a_visibility_timeout_of_0_offers_a_message_at_once(sqs: Any, queue: str) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="m")
    for count in (1, 2, 3):
        (message,) = receive_all(sqs, queue, 1, VisibilityTimeout=43_200)
        assert message["Attributes"]["ApproximateReceiveCount"] == str(count)
        sqs.change_message_visibility(
            QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
        )


def test_a_long_poll_ends_with_the_first_message(sqs: Any, queue: str) -> None:
    begun = time.monotonic()
    timer = threading.Timer(0.5, sqs.send_message, kwargs={"QueueUrl": queue, "MessageBody": "late"})
    timer.start()
    (message,) = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=20)["Messages"]
    assert message["Body"] == "late"
    assert time.monotonic() - begun < scaled(10)
    timer.join()


def test_a_delayed_message_keeps_its_id_and_is_counted_as_delayed(sqs: Any, queue: str) -> None:
    sent = sqs.send_message(QueueUrl=queue, MessageBody="m", DelaySeconds=2)
    assert counts(sqs, queue) == (0, 0, 1)
    assert "Messages" not in sqs.receive_message(QueueUrl=queue)
    (message,) = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=20)["Messages"]
    assert message["MessageId"] == sent["MessageId"]


def test_entries_of_a_batch_fail_alone(sqs: Any, queue: str) -> None:
    answer = sqs.send_message_batch(
        QueueUrl=queue,
        Entries=[
            {"Id": "good", "MessageBody": "1"},
            {"Id": "late", "MessageBody": "2", "DelaySeconds": 901},
            {"Id": "control", "MessageBody": "\x01"},
            {"Id": "also-good", "MessageBody": "3"},
        ],
    )
    assert [each["Id"] for each in answer["Successful"]] == ["good", "also-good"]
    assert {each["Id"]: each["Code"] for each in answer["Failed"]} == {
        "late": "InvalidParameterValue",
        "control": "InvalidMessageContents",
    }
    messages = receive_all(sqs, queue, 2)
    assert sorted(each["Body"] for each in messages) == ["1", "3"]
    entries = [{"Id": str(at), "ReceiptHandle": each["ReceiptHandle"]} for at, each in enumerate(messages)]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=queue,
        Entries=[{**each, "VisibilityTimeout": 100} for each in entries]
        + [{"Id": "bad", "ReceiptHandle": "x", "VisibilityTimeout": 1}],
    )
    assert [each["Code"] for each in changed["Failed"]] == ["ReceiptHandleIsInvalid"]
    deleted = sqs.delete_message_batch(
        QueueUrl=queue, Entries=[*entries, {"Id": "bad", "ReceiptHandle": "x"}]
    )
    assert len(deleted["Successful"]) == 2
    assert [each["Id"] for each in deleted["Failed"]] == ["bad"]
    assert counts(sqs, queue) == (0, 0, 0)


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([], "AWS.SimpleQueueService.EmptyBatchRequest"),
        ([("a", "m")] * 2, "AWS.SimpleQueueService.BatchEntryIdsNotDistinct"),
        ([("a b", "m")], "AWS.SimpleQueueService.InvalidBatchEntryId"),
        ([(str(at), "m") for at in range(11)], "AWS.SimpleQueueService.TooManyEntriesInBatchRequest"),
        ([(str(at), "m" * 600_000) for at in range(2)], "AWS.SimpleQueueService.BatchRequestTooLong"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused_as_a_whole(
    sqs: Any, queue: str, entries: list[tuple[str, str]], code: str
) -> None:
    with pytest.raises(ClientError) as failed:
        sqs.send_message_batch(QueueUrl=queue, Entries=[{"Id": i, "MessageBody": b} for i, b in entries])
    assert code_of(failed) == code
    assert counts(sqs, queue) == (0, 0, 0)


def test_the_largest_message_is_accepted_and_a_larger_one_is_not(sqs: Any, queue: str) -> None:
    sqs.send_message(QueueUrl=queue, MessageBody="ä" * (1 << 19))
    with pytest.raises(ClientError, match="shorter than 1048576 bytes") as failed:
        sqs.send_message(QueueUrl=queue, MessageBody="m" + "ä" * (1 << 19))
    assert code_of(failed) == "InvalidParameterValue"
    (message,) = receive_all(sqs, queue, 1)
    assert len(message["Body"]) == 1 << 19


def test_messages_older_than_the_retention_period_are_not_delivered() -> None:
    with TestBroker() as broker:
        sqs = sqs_client(broker.sqs_url)
        attributes = {"MessageRetentionPeriod": "60"}
        url = sqs.create_queue(QueueName="q", Attributes=attributes)["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="old")
        broker.clock.advance(61)
        sqs.send_message(QueueUrl=url, MessageBody="new")
        assert [each["Body"] for each in receive_all(sqs, url, 2)] == ["new"]


def test_purge_removes_messages_in_flight_and_delayed_ones(sqs: Any, queue: str) -> None:
    for delay in (0, 0, 900):
        sqs.send_message(QueueUrl=queue, MessageBody="m", DelaySeconds=delay)
    receive_all(sqs, queue, 1)
    sqs.purge_queue(QueueUrl=queue)
    assert counts(sqs, queue) == (0, 0, 0)
    sqs.send_message(QueueUrl=queue, MessageBody="after")
    assert [each["Body"] for each in receive_all(sqs, queue, 1)] == ["after"]


# FIFO queues


def test_a_group_is_received_in_order_and_blocked_while_a_message_is_in_flight(sqs: Any, fifo: str) -> None:
    for body in ("a1", "a2", "b1", "a3", "b2"):
        sqs.send_message(QueueUrl=fifo, MessageBody=body, MessageGroupId=body[0])
    first = sqs.receive_message(QueueUrl=fifo, MaxNumberOfMessages=1)["Messages"]
    assert [each["Body"] for each in first] == ["a1"]
    second = receive_all(sqs, fifo, 10)
    assert [each["Body"] for each in second] == ["b1", "b2"]
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first[0]["ReceiptHandle"])
    assert [each["Body"] for each in receive_all(sqs, fifo, 2)] == ["a2", "a3"]


def test_a_repeat_gets_the_id_of_the_first_message_and_is_not_stored(sqs: Any, fifo: str) -> None:
    def send(body: str, dedup_id: str) -> Any:
        return sqs.send_message(
            QueueUrl=fifo, MessageBody=body, MessageGroupId="g", MessageDeduplicationId=dedup_id
        )

    first, other, repeat = send("1", "x"), send("2", "y"), send("1 again", "x")
    assert repeat["MessageId"] == first["MessageId"] != other["MessageId"]
    assert repeat["SequenceNumber"] == first["SequenceNumber"] < other["SequenceNumber"]
    batch = sqs.send_message_batch(
        QueueUrl=fifo,
        Entries=[
            {"Id": i, "MessageBody": i, "MessageGroupId": "g", "MessageDeduplicationId": d}
            for i, d in (("new", "z"), ("repeat", "y"), ("repeat-of-new", "z"))
        ],
    )
    ids = {each["Id"]: each["MessageId"] for each in batch["Successful"]}
    assert ids["repeat"] == other["MessageId"]
    assert ids["repeat-of-new"] == ids["new"]
    messages = receive_all(sqs, fifo, 10)
    assert [each["Body"] for each in messages] == ["1", "2", "new"]
    assert [each["MessageId"] for each in messages] == [first["MessageId"], other["MessageId"], ids["new"]]
    assert messages[0]["Attributes"]["MessageDeduplicationId"] == "x"
    assert messages[0]["Attributes"]["SequenceNumber"] == first["SequenceNumber"]


def test_content_based_deduplication_compares_the_body_only(sqs: Any, fifo: str) -> None:
    value = {"DataType": "String", "StringValue": "x"}
    sqs.send_message(QueueUrl=fifo, MessageBody="same", MessageGroupId="a")
    sqs.send_message(QueueUrl=fifo, MessageBody="same", MessageGroupId="b", MessageAttributes={"k": value})
    assert counts(sqs, fifo) == (1, 0, 0)
    (message,) = receive_all(sqs, fifo, 2)
    assert message["Attributes"]["MessageDeduplicationId"] == hashlib.sha256(b"same").hexdigest()


def test_the_deduplication_scope_can_be_the_message_group(sqs: Any, name: str) -> None:
    attributes = {
        "FifoQueue": "true",
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }
    url = sqs.create_queue(QueueName=f"{name}.fifo", Attributes=attributes)["QueueUrl"]
    for group in ("a", "b", "a"):
        sqs.send_message(QueueUrl=url, MessageBody="m", MessageGroupId=group, MessageDeduplicationId="d")
    found = receive_all(sqs, url, 10)
    assert sorted(each["Attributes"]["MessageGroupId"] for each in found) == ["a", "b"]
    assert {each["Attributes"]["MessageDeduplicationId"] for each in found} == {"d"}


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ({}, "MissingParameter"),
        ({"MessageGroupId": "g"}, "InvalidParameterValue"),  # no deduplication id
        ({"MessageGroupId": "g", "MessageDeduplicationId": "d", "DelaySeconds": 1}, "InvalidParameterValue"),
        ({"MessageGroupId": "ü", "MessageDeduplicationId": "d"}, "InvalidParameterValue"),
        ({"MessageGroupId": "g", "MessageDeduplicationId": "d" * 129}, "InvalidParameterValue"),
    ],
)
def test_a_fifo_queue_refuses_what_is_not_a_message_of_one(
    sqs: Any, name: str, parameters: dict[str, Any], code: str
) -> None:
    url = sqs.create_queue(QueueName=f"{name}.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    with pytest.raises(ClientError) as failed:
        sqs.send_message(QueueUrl=url, MessageBody="m", **parameters)
    assert code_of(failed) == code


# Queues


def test_a_queue_is_created_once_and_a_different_one_is_refused(sqs: Any, name: str) -> None:
    attributes = {"VisibilityTimeout": "77", "MessageRetentionPeriod": "600"}
    url = sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    assert sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"] == url
    assert sqs.create_queue(QueueName=name)["QueueUrl"] == url
    with pytest.raises(ClientError) as failed:
        sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "78"})
    assert code_of(failed) == "QueueAlreadyExists"
    assert sqs.get_queue_url(QueueName=name)["QueueUrl"] == url
    sqs.delete_queue(QueueUrl=url)
    for call in (sqs.delete_queue, sqs.receive_message, sqs.get_queue_attributes):
        with pytest.raises(ClientError) as failed:
            call(QueueUrl=url)
        assert code_of(failed) == "AWS.SimpleQueueService.NonExistentQueue"
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.get_queue_url(QueueName=name)


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"VisibilityTimeout": "43201"}, "InvalidAttributeValue"),
        ({"DelaySeconds": "-1"}, "InvalidAttributeValue"),
        ({"MessageRetentionPeriod": "59"}, "InvalidAttributeValue"),
        ({"MaximumMessageSize": "1048577"}, "InvalidAttributeValue"),
        ({"NoSuch": "1"}, "InvalidAttributeName"),
        ({"RedrivePolicy": "{"}, "InvalidAttributeValue"),
        ({"KmsMasterKeyId": "alias/aws/sqs"}, "AWS.SimpleQueueService.UnsupportedOperation"),
    ],
)
def test_an_invalid_attribute_is_refused_and_creates_no_queue(
    sqs: Any, name: str, attributes: dict[str, str], code: str
) -> None:
    with pytest.raises(ClientError) as failed:
        sqs.create_queue(QueueName=name, Attributes=attributes)
    assert code_of(failed) == code
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.get_queue_url(QueueName=name)


def test_queues_are_listed_in_pages(sqs: Any, name: str) -> None:
    urls = [sqs.create_queue(QueueName=f"{name}-{at}")["QueueUrl"] for at in range(5)]
    pages = sqs.get_paginator("list_queues").paginate(QueueNamePrefix=name, PaginationConfig={"PageSize": 2})
    found = [page.get("QueueUrls", []) for page in pages]
    assert [len(page) for page in found] == [2, 2, 1]
    assert [url for page in found for url in page] == urls
    assert "NextToken" not in sqs.list_queues(QueueNamePrefix=name)
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix="no-such-queue")


def test_permissions_are_an_unsupported_operation_whose_error_names_access_control_lists(
    sqs: Any, queue: str
) -> None:
    with pytest.raises(ClientError) as added:
        sqs.add_permission(QueueUrl=queue, Label="l", AWSAccountIds=["1"], Actions=["*"])
    with pytest.raises(ClientError) as removed:
        sqs.remove_permission(QueueUrl=queue, Label="l")
    for failed in (added, removed):
        assert code_of(failed) == "AWS.SimpleQueueService.UnsupportedOperation"
        assert failed.value.response["Error"]["Message"] == (
            "Policies of queues are not supported: access control lists (mansio acl) give rights."
        )


# Dead letters


def redrive_to(sqs: Any, url: str, target: str, count: int) -> None:
    policy = {"deadLetterTargetArn": arn_of(sqs, target), "maxReceiveCount": str(count)}
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": json.dumps(policy)})


def fail(sqs: Any, url: str, count: int) -> list[Any]:
    """Receive a number of messages once, and make them visible at once."""
    found = receive_all(sqs, url, count)
    for each in reversed(found):
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=0)
    return found


def test_dead_letters_show_the_original_messages_and_move_back(sqs: Any, queue: str, name: str) -> None:
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    redrive_to(sqs, queue, dead, 2)
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [queue]
    value = {"k": {"DataType": "Number", "StringValue": "1"}}
    sent = {
        sqs.send_message(QueueUrl=queue, MessageBody=f"m{at}", MessageAttributes=value)["MessageId"]: f"m{at}"
        for at in range(5)
    }
    for _ in range(2):
        fail(sqs, queue, 5)
    wait_until(lambda: counts(sqs, dead)[0] == 5)
    found = receive_all(sqs, dead, 5, VisibilityTimeout=0)
    assert {each["MessageId"]: each["Body"] for each in found[:5]}.items() <= sent.items()
    for each in found:
        assert each["MessageAttributes"] == value
        assert each["Attributes"]["DeadLetterQueueSourceArn"] == arn_of(sqs, queue)
    assert counts(sqs, queue) == (0, 0, 0)
    source = arn_of(sqs, dead)
    sqs.start_message_move_task(SourceArn=source)

    def status() -> Any:
        return sqs.list_message_move_tasks(SourceArn=source)["Results"][0]

    wait_until(lambda: status()["Status"] == "COMPLETED")
    assert status()["ApproximateNumberOfMessagesMoved"] == 5
    assert counts(sqs, dead) == (0, 0, 0)
    back = receive_all(sqs, queue, 5)
    assert sorted(each["Body"] for each in back) == sorted(sent.values())
    assert all(each["MessageAttributes"] == value for each in back)


def test_records_that_die_out_of_order_keep_their_ids(sqs: Any, queue: str, name: str) -> None:
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    redrive_to(sqs, queue, dead, 1)
    sent = {}
    for at in range(6):
        sent[sqs.send_message(QueueUrl=queue, MessageBody=f"m{at}")["MessageId"]] = f"m{at}"
    received = receive_all(sqs, queue, 6)
    for each in (received[at] for at in (4, 1, 5, 0, 2, 3)):
        sqs.change_message_visibility(
            QueueUrl=queue, ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=0
        )
    wait_until(lambda: counts(sqs, dead)[0] == 6)
    found = {each["MessageId"]: each["Body"] for each in receive_all(sqs, dead, 6)}
    assert found == sent


def test_a_redrive_policy_has_to_fit_its_target(sqs: Any, queue: str, fifo: str, name: str) -> None:
    other = sqs.create_queue(QueueName=f"{name}-other")["QueueUrl"]

    def refused(source: str, target: str) -> str:
        with pytest.raises(ClientError) as failed:
            redrive_to(sqs, source, target, 3)
        return code_of(failed)

    assert refused(queue, fifo) == "InvalidParameterValue"
    assert refused(queue, queue) == "InvalidParameterValue"
    deny = json.dumps({"redrivePermission": "denyAll"})
    sqs.set_queue_attributes(QueueUrl=other, Attributes={"RedriveAllowPolicy": deny})
    assert refused(queue, other) == "InvalidParameterValue"
    allow = json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": [arn_of(sqs, queue)]})
    sqs.set_queue_attributes(QueueUrl=other, Attributes={"RedriveAllowPolicy": allow})
    redrive_to(sqs, queue, other, 1000)
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["RedrivePolicy"])["Attributes"]
    policy = json.loads(found["RedrivePolicy"])
    assert policy == {"deadLetterTargetArn": arn_of(sqs, other), "maxReceiveCount": 1000}
    assert refused(other, queue) == "InvalidParameterValue"
    sqs.set_queue_attributes(QueueUrl=queue, Attributes={"RedrivePolicy": ""})
    assert "queueUrls" in sqs.list_dead_letter_source_queues(QueueUrl=other)


def test_dead_letters_of_a_fifo_queue_move_back_in_order(sqs: Any, fifo: str, name: str) -> None:
    dead = sqs.create_queue(QueueName=f"{name}-dead.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    redrive_to(sqs, fifo, dead, 1)
    sent = [
        sqs.send_message(QueueUrl=fifo, MessageBody=f"m{at}", MessageGroupId="g")["MessageId"]
        for at in range(8)
    ]
    while failed := receive_all(sqs, fifo, 1):
        for each in failed:
            sqs.change_message_visibility(
                QueueUrl=fifo, ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=0
            )
    wait_until(lambda: counts(sqs, dead)[0] == 8)
    found = receive_all(sqs, dead, 8, VisibilityTimeout=30)
    assert [each["MessageId"] for each in found] == sent
    for each in reversed(found):
        sqs.change_message_visibility(QueueUrl=dead, ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=0)
    sqs.start_message_move_task(SourceArn=arn_of(sqs, dead), DestinationArn=arn_of(sqs, fifo))
    wait_until(lambda: counts(sqs, fifo)[0] == 8)
    back = drain(sqs, fifo, 8)
    assert [each["Body"] for each in back] == [f"m{at}" for at in range(8)]
    assert [each["Attributes"]["MessageGroupId"] for each in back] == ["g"] * 8


# Other clients


def test_the_environment_variable_alone_directs_a_program_to_the_broker(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, content in {
        "AWS_ENDPOINT_URL_SQS": broker.sqs_url,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(variable, content)
    queue = boto3.Session().resource("sqs").create_queue(QueueName="environment")
    queue.send_message(MessageBody="m")
    (message,) = queue.receive_messages(WaitTimeSeconds=5)
    assert message.body == "m"
    message.delete()
