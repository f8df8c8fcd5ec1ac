"""Standard queues of the SQS endpoint, with boto3, the Query protocol and Kafka clients."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import boto3
import httpx
import pytest
from botocore.exceptions import ClientError

from component.sqs.sqs_fixtures import (
    bodies,
    delete,
    query,
    queue_of,
    receive,
    receive_none,
    sqs_client,
    text_of,
)
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture(scope="module")
def sqs(broker: TestBroker) -> Any:
    return sqs_client(broker.sqs_url)


def counts(sqs: Any, url: str) -> tuple[int, int, int]:
    """Messages to be received, in flight, and delayed."""
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    names = ("", "NotVisible", "Delayed")
    return tuple(int(found[f"ApproximateNumberOfMessages{name}"]) for name in names)  # type: ignore[return-value]


@pytest.mark.row("A4")
def test_a_program_needs_only_the_address_of_the_endpoint(broker: TestBroker) -> None:
    program = (
        "import boto3\n"
        "queue = boto3.resource('sqs').create_queue(QueueName='plain')\n"
        "queue.send_message(MessageBody='hello')\n"
        "(message,) = queue.receive_messages(WaitTimeSeconds=10)\n"
        "print(message.body)\n"
        "message.delete()\n"
    )
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL_SQS": broker.sqs_url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "eu-central-1",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=scaled(60)
    )
    assert done.stdout == "hello\n"


@pytest.mark.row("A4", "D1")
def test_message_is_sent_received_with_all_attributes_and_deleted(sqs: Any) -> None:
    url = queue_of(sqs, "attributes")
    attributes = {
        "text": {"DataType": "String", "StringValue": "grüße"},
        "number": {"DataType": "Number.int", "StringValue": "-1.5e3"},
        "binary": {"DataType": "Binary.png", "BinaryValue": bytes(range(256))},
    }
    trace = {
        "AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3fe1be46a994272793"}
    }
    sent = sqs.send_message(
        QueueUrl=url, MessageBody="body ✓", MessageAttributes=attributes, MessageSystemAttributes=trace
    )
    assert sent["MD5OfMessageBody"] == hashlib.md5("body ✓".encode()).hexdigest()
    assert counts(sqs, url) == (1, 0, 0)
    before_ms = time.time() * 1000
    (message,) = receive(sqs, url, MessageAttributeNames=["All"])
    assert message["MessageId"] == sent["MessageId"]
    assert message["Body"] == "body ✓"
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    system = message["Attributes"]
    assert system["ApproximateReceiveCount"] == "1"
    assert abs(int(system["SentTimestamp"]) - before_ms) < 60_000
    assert int(system["ApproximateFirstReceiveTimestamp"]) >= int(system["SentTimestamp"])
    assert system["AWSTraceHeader"] == trace["AWSTraceHeader"]["StringValue"]
    assert counts(sqs, url) == (0, 1, 0)
    assert receive_none(sqs, url)
    for _ in range(2):  # deleting again is no error
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    assert counts(sqs, url) == (0, 0, 0)


def test_chosen_attributes_are_returned(sqs: Any) -> None:
    url = queue_of(sqs, "chosen")
    names = ("app.one", "app.two", "other")
    attributes = {name: {"DataType": "String", "StringValue": "x"} for name in names}
    sqs.send_message(QueueUrl=url, MessageBody="b", MessageAttributes=attributes)

    def received(**more: Any) -> Any:
        (message,) = receive(sqs, url, VisibilityTimeout=0, **more)
        return message

    assert set(received(MessageAttributeNames=["app.*"])["MessageAttributes"]) == {"app.one", "app.two"}
    assert set(received(MessageAttributeNames=["ap.*"])["MessageAttributes"]) == {"app.one", "app.two"}
    assert set(received(MessageAttributeNames=["other", "none"])["MessageAttributes"]) == {"other"}
    assert "MessageAttributes" not in received()
    message = received(MessageSystemAttributeNames=["SentTimestamp"])
    assert set(message["Attributes"]) == {"SentTimestamp"}


@pytest.mark.row("A4", "D2")
def test_message_comes_again_after_its_visibility_timeout(sqs: Any, broker: TestBroker) -> None:
    url = queue_of(sqs, "timeout", VisibilityTimeout="43200")
    sqs.send_message(QueueUrl=url, MessageBody="m")
    (first,) = receive(sqs, url)
    broker.clock.advance(hours=11, minutes=59)
    assert receive_none(sqs, url)
    broker.clock.advance(minutes=2)
    (second,) = receive(sqs, url, VisibilityTimeout=600)
    assert second["Attributes"]["ApproximateReceiveCount"] == "2"
    assert second["MessageId"] == first["MessageId"]
    assert second["ReceiptHandle"] != first["ReceiptHandle"]
    with pytest.raises(ClientError, match="MessageNotInflight"):
        sqs.change_message_visibility(
            QueueUrl=url, ReceiptHandle=first["ReceiptHandle"], VisibilityTimeout=10
        )
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"])  # answers success, as SQS does
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=3600)
    broker.clock.advance(minutes=30)
    assert receive_none(sqs, url)
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=0)
    (third,) = receive(sqs, url)
    assert third["Attributes"]["ApproximateReceiveCount"] == "3"
    sqs.delete_message(QueueUrl=url, ReceiptHandle=third["ReceiptHandle"])


@pytest.mark.row("A4", "D6")
def test_delayed_messages_come_when_they_are_due(sqs: Any, broker: TestBroker) -> None:
    url = queue_of(sqs, "delays", DelaySeconds="60")
    by_queue = sqs.send_message(QueueUrl=url, MessageBody="queue")["MessageId"]
    sqs.send_message(QueueUrl=url, MessageBody="message", DelaySeconds=900)
    sqs.send_message(QueueUrl=url, MessageBody="now", DelaySeconds=0)
    assert counts(sqs, url) == (1, 0, 2)
    found = receive(sqs, url)
    assert bodies(found) == ["now"]
    delete(sqs, url, found)
    broker.clock.advance(seconds=61)
    (message,) = found = receive(sqs, url)
    assert (message["Body"], message["MessageId"]) == ("queue", by_queue)
    delete(sqs, url, found)
    broker.clock.advance(minutes=15)
    assert bodies(receive(sqs, url)) == ["message"]


@pytest.mark.row("A4", "D4")
def test_dead_letters_keep_their_message_and_are_moved_back(sqs: Any, broker: TestBroker) -> None:
    dead = queue_of(sqs, "dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "2"})
    url = queue_of(sqs, "source", RedrivePolicy=policy, VisibilityTimeout="0")
    attributes = {"a": {"DataType": "String", "StringValue": "x"}}
    sent = [
        sqs.send_message(QueueUrl=url, MessageBody=f"poison {n}", MessageAttributes=attributes)["MessageId"]
        for n in range(3)
    ]
    found: list[Any] = []

    def died() -> bool:
        receive(sqs, url, WaitTimeSeconds=0)
        found.extend(
            receive(sqs, dead, WaitTimeSeconds=0, MessageAttributeNames=["All"], VisibilityTimeout=600)
        )
        return len(found) == 3

    wait_until(died)
    assert sorted(each["MessageId"] for each in found) == sorted(sent)
    assert {each["Body"] for each in found} == {f"poison {n}" for n in range(3)}
    assert all(each["MessageAttributes"] == attributes for each in found)
    assert {each["Attributes"]["DeadLetterQueueSourceArn"].rpartition(":")[2] for each in found} == {"source"}
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [url]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "600"})
    entries = [
        {"Id": str(n), "ReceiptHandle": each["ReceiptHandle"], "VisibilityTimeout": 0}
        for n, each in enumerate(found)
    ]
    assert len(sqs.change_message_visibility_batch(QueueUrl=dead, Entries=entries)["Successful"]) == 3
    sqs.start_message_move_task(SourceArn=arn)

    def moved() -> bool:
        (task,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
        return bool(task["Status"] == "COMPLETED" and task["ApproximateNumberOfMessagesMoved"] == 3)

    wait_until(moved)
    back: list[Any] = []
    wait_until(lambda: back.extend(receive(sqs, url, MessageAttributeNames=["All"])) or len(back) == 3)
    assert {each["Body"] for each in back} == {f"poison {n}" for n in range(3)}
    assert all(each["MessageAttributes"] == attributes for each in back)
    assert receive_none(sqs, dead)


def test_redrive_policies_that_cannot_work_are_refused(sqs: Any) -> None:
    queue_of(sqs, "denies", RedriveAllowPolicy=json.dumps({"redrivePermission": "denyAll"}))
    base = "arn:aws:sqs:us-east-1:000000000000:"
    for target, count in (("missing", 3), ("denies", 3), ("denies", 0), ("denies", 1001), ("denies", "x")):
        policy = json.dumps({"deadLetterTargetArn": base + target, "maxReceiveCount": count})
        with pytest.raises(ClientError, match="RedrivePolicy"):
            queue_of(sqs, "wrong", RedrivePolicy=policy)
    with pytest.raises(ClientError, match="RedrivePolicy"):
        queue_of(sqs, "wrong", RedrivePolicy="{")


def test_a_dead_letter_queue_has_no_policy_and_can_be_made_again(sqs: Any) -> None:
    def policy(name: str) -> str:
        return json.dumps(
            {"deadLetterTargetArn": f"arn:aws:sqs:us-east-1:000000000000:{name}", "maxReceiveCount": 1}
        )

    dead = queue_of(sqs, "again-dead")
    url = queue_of(sqs, "again", RedrivePolicy=policy("again-dead"), VisibilityTimeout="0")
    with pytest.raises(ClientError, match="RedrivePolicy"):
        queue_of(sqs, "chain", RedrivePolicy=policy("again"))
    sqs.delete_queue(QueueUrl=dead)
    queue_of(sqs, "again-dead")
    sqs.send_message(QueueUrl=url, MessageBody="m")
    assert bodies(receive(sqs, url)) == ["m"]
    assert bodies(receive(sqs, dead)) == ["m"]


def test_the_largest_message_can_be_raised(sqs: Any) -> None:
    url = queue_of(sqs, "raised", MaximumMessageSize="1024")
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"MaximumMessageSize": "1048576"})
    sqs.send_message(QueueUrl=url, MessageBody="x" * 1_000_000)
    assert len(bodies(receive(sqs, url))[0]) == 1_000_000


def test_a_deletion_beside_a_change_of_the_timeout_deletes(broker: TestBroker, sqs: Any) -> None:
    url = queue_of(sqs, "beside")
    for _ in range(20):
        sqs.send_message(QueueUrl=url, MessageBody="m")
        (message,) = receive(sqs, url)
        named = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
        other = sqs_client(broker.sqs_url)

        def extend(client: Any = other, named: dict[str, Any] = named) -> None:
            with contextlib.suppress(ClientError):  # deleted before
                client.change_message_visibility(**named, VisibilityTimeout=30)

        extending = threading.Thread(target=extend)
        extending.start()
        sqs.delete_message(**named)
        extending.join(scaled(20))
        assert counts(sqs, url) == (0, 0, 0)


def test_tags_that_are_added_at_the_same_time_are_all_kept(broker: TestBroker, sqs: Any) -> None:
    url = queue_of(sqs, "tagged")
    clients = [sqs_client(broker.sqs_url) for _ in range(6)]
    threads = [
        threading.Thread(target=client.tag_queue, kwargs={"QueueUrl": url, "Tags": {f"t{number}": "x"}})
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(20))
    assert len(sqs.list_queue_tags(QueueUrl=url)["Tags"]) == 6


def test_batches_have_a_result_for_each_entry(sqs: Any) -> None:
    url = queue_of(sqs, "batches")
    entries = [
        {"Id": "a", "MessageBody": "a"},
        {"Id": "b", "MessageBody": "\x00"},
        {"Id": "c", "MessageBody": "c", "DelaySeconds": 901},
        {
            "Id": "d",
            "MessageBody": "d",
            "MessageAttributes": {"x": {"DataType": "Number", "StringValue": "one"}},
        },
        {"Id": "e", "MessageBody": "e"},
    ]
    sent = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert [each["Id"] for each in sent["Successful"]] == ["a", "e"]
    assert {each["Id"]: (each["Code"], each["SenderFault"]) for each in sent["Failed"]} == {
        "b": ("InvalidMessageContents", True),
        "c": ("InvalidParameterValue", True),
        "d": ("InvalidParameterValue", True),
    }
    found = receive(sqs, url)
    assert sorted(bodies(found)) == ["a", "e"]
    deleted = sqs.delete_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "1", "ReceiptHandle": found[0]["ReceiptHandle"]},
            {"Id": "2", "ReceiptHandle": "no handle"},
        ],
    )
    assert [each["Id"] for each in deleted["Successful"]] == ["1"]
    assert [(each["Id"], each["Code"]) for each in deleted["Failed"]] == [("2", "ReceiptHandleIsInvalid")]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "1", "ReceiptHandle": found[0]["ReceiptHandle"], "VisibilityTimeout": 1},
            {"Id": "2", "ReceiptHandle": found[1]["ReceiptHandle"], "VisibilityTimeout": 43_201},
            {"Id": "3", "ReceiptHandle": found[1]["ReceiptHandle"], "VisibilityTimeout": 0},
        ],
    )
    assert [each["Id"] for each in changed["Successful"]] == ["3"]
    assert {each["Id"]: each["Code"] for each in changed["Failed"]} == {
        "1": "MessageNotInflight",
        "2": "InvalidParameterValue",
    }


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([], "EmptyBatchRequest"),
        ([{"Id": str(n), "MessageBody": "x"} for n in range(11)], "TooManyEntriesInBatchRequest"),
        ([{"Id": "a", "MessageBody": "x"}] * 2, "BatchEntryIdsNotDistinct"),
        ([{"Id": "a b", "MessageBody": "x"}], "InvalidBatchEntryId"),
        ([{"Id": str(n), "MessageBody": "x" * 600_000} for n in range(2)], "BatchRequestTooLong"),
    ],
)
def test_batches_that_are_wrong_as_a_whole_are_refused(sqs: Any, entries: list[Any], code: str) -> None:
    url = queue_of(sqs, "whole")
    with pytest.raises(ClientError) as raised:
        sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert raised.value.response["Error"]["Code"].rpartition(".")[2] == code


def test_texts_of_errors_are_those_that_motos_tests_expect(sqs: Any) -> None:
    """Programs compare them. moto's authors have verified those of whole batches against SQS, the two others not."""
    url = queue_of(sqs, "texts")
    late = {"Id": "a", "MessageBody": "a", "DelaySeconds": 901}
    named = {"MessageAttributes": {"ö": {"DataType": "String", "StringValue": "x"}}}
    sent = sqs.send_message_batch(QueueUrl=url, Entries=[late, {"Id": "b", "MessageBody": "b", **named}])
    assert {each["Id"]: each["Message"] for each in sent["Failed"]} == {
        "a": "Value 901 for parameter DelaySeconds is invalid. Reason: DelaySeconds must be >= 0 and <= 900.",
        "b": "The message attribute name 'ö' is invalid. Attribute name can contain A-Z, a-z, 0-9, underscore (_), "
        "hyphen (-), and period (.) characters.",
    }
    for action, method in (
        ("SendMessageBatch", sqs.send_message_batch),
        ("DeleteMessageBatch", sqs.delete_message_batch),
        ("ChangeMessageVisibilityBatch", sqs.change_message_visibility_batch),
    ):
        with pytest.raises(ClientError, match=f"There should be at least one {action}RequestEntry in the"):
            method(QueueUrl=url, Entries=[])
    entries = [{"Id": id_, "MessageBody": "x"} for id_ in "abba"]
    with pytest.raises(ClientError, match="Id b repeated"):
        sqs.send_message_batch(QueueUrl=url, Entries=entries)


def test_changes_of_tags_without_tags_are_refused(sqs: Any) -> None:
    url = queue_of(sqs, "without-tags")
    with pytest.raises(ClientError, match="must contain the parameter Tags"):
        sqs.tag_queue(QueueUrl=url, Tags={})
    with pytest.raises(ClientError, match="Tag keys must be between 1 and 128 characters"):
        sqs.untag_queue(QueueUrl=url, TagKeys=[])
    with pytest.raises(ClientError, match="Too many tags added for queue without-tags"):
        sqs.tag_queue(QueueUrl=url, Tags={f"key{number}": "x" for number in range(51)})
    assert "Tags" not in sqs.list_queue_tags(QueueUrl=url)


def test_sizes_are_those_of_sqs(sqs: Any) -> None:
    url = queue_of(sqs, "sizes")
    largest = "x" * 1_048_576
    sqs.send_message(QueueUrl=url, MessageBody=largest)
    assert bodies(receive(sqs, url)) == [largest]
    with pytest.raises(ClientError, match="shorter than 1048576"):
        sqs.send_message(QueueUrl=url, MessageBody=largest + "x")
    small = queue_of(sqs, "small", MaximumMessageSize="1024")
    attribute = {"a": {"DataType": "String", "StringValue": "x" * 100}}
    with pytest.raises(ClientError, match="shorter than 1024"):
        sqs.send_message(QueueUrl=small, MessageBody="x" * 1000, MessageAttributes=attribute)


def test_queues_are_listed_described_tagged_purged_and_deleted(sqs: Any, broker: TestBroker) -> None:
    urls = [queue_of(sqs, f"list-{n}") for n in range(5)]
    assert sqs.list_queues(QueueNamePrefix="list-")["QueueUrls"] == urls
    page = sqs.list_queues(QueueNamePrefix="list-", MaxResults=3)
    rest = sqs.list_queues(QueueNamePrefix="list-", MaxResults=3, NextToken=page["NextToken"])
    assert page["QueueUrls"] + rest["QueueUrls"] == urls
    url = urls[0]
    assert sqs.get_queue_url(QueueName="list-0")["QueueUrl"] == url
    assert queue_of(sqs, "list-0", VisibilityTimeout="30") == url
    with pytest.raises(ClientError, match="different value for attribute VisibilityTimeout"):
        queue_of(sqs, "list-0", VisibilityTimeout="31")
    sqs.set_queue_attributes(
        QueueUrl=url, Attributes={"VisibilityTimeout": "31", "MessageRetentionPeriod": "60", "Policy": "{}"}
    )
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert (found["VisibilityTimeout"], found["MessageRetentionPeriod"], found["Policy"]) == (
        "31",
        "60",
        "{}",
    )
    sqs.tag_queue(QueueUrl=url, Tags={"team": "a", "env": "test"})
    sqs.untag_queue(QueueUrl=url, TagKeys=["env", "none"])
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "a"}
    for delay in (0, 300):
        sqs.send_message(QueueUrl=url, MessageBody="x", DelaySeconds=delay)
    sqs.purge_queue(QueueUrl=url)
    assert counts(sqs, url) == (0, 0, 0)
    assert receive_none(sqs, url)
    sqs.send_message(QueueUrl=url, MessageBody="after")
    assert bodies(receive(sqs, url)) == ["after"]
    sqs.delete_queue(QueueUrl=url)
    for call in (
        lambda: sqs.send_message(QueueUrl=url, MessageBody="x"),
        lambda: sqs.get_queue_url(QueueName="list-0"),
        lambda: sqs.delete_queue(QueueUrl=url),
    ):
        with pytest.raises(sqs.exceptions.QueueDoesNotExist):
            call()
    assert queue_of(sqs, "list-0") == url  # at once, with nothing of the former one
    assert receive_none(sqs, url)


def test_messages_older_than_the_retention_period_are_not_delivered(sqs: Any, broker: TestBroker) -> None:
    url = queue_of(sqs, "retention", MessageRetentionPeriod="60")
    sqs.send_message(QueueUrl=url, MessageBody="old")
    broker.clock.advance(seconds=59)
    sqs.send_message(QueueUrl=url, MessageBody="new")
    broker.clock.advance(seconds=2)
    assert bodies(receive(sqs, url)) == ["new"]


def test_long_poll_ends_with_the_first_message_and_a_lost_connection_receives_nothing(
    sqs: Any, broker: TestBroker
) -> None:
    url = queue_of(sqs, "poll", ReceiveMessageWaitTimeSeconds="20")
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(receive(sqs, url, WaitTimeSeconds=20)))
    waiting.start()
    sqs_client(broker.sqs_url).send_message(QueueUrl=url, MessageBody="m")
    waiting.join(scaled(15))
    assert bodies(found) == ["m"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            broker.sqs_url,
            json={"QueueUrl": url, "WaitTimeSeconds": 20},
            headers={
                "x-amz-target": "AmazonSQS.ReceiveMessage",
                "content-type": "application/x-amz-json-1.0",
            },
            timeout=0.3,
        )
    sqs.send_message(QueueUrl=url, MessageBody="next")
    (message,) = receive(sqs, url)
    assert (message["Body"], message["Attributes"]["ApproximateReceiveCount"]) == ("next", "1")


@pytest.mark.row("A4", "A1")
def test_kafka_clients_read_and_write_the_same_queue(sqs: Any, broker: TestBroker) -> None:
    url = queue_of(sqs, "shared")
    attributes = {"a": {"DataType": "String", "StringValue": "x"}}
    sqs.send_message(QueueUrl=url, MessageBody="from sqs", MessageAttributes=attributes, MessageGroupId="ann")
    with broker.client() as client:
        (record,) = client.consume("shared", to_end=True)
        assert (record.key, record.value) == (b"ann", b"from sqs")
        assert record.header("sqs-attribute-a") == b"String:x"
        client.publish("shared", b"from kafka", key=b"bob")
        client.publish("shared", b"\xff\x00")
    found = []
    wait_until(lambda: found.extend(receive(sqs, url)) or len(found) == 3)
    assert sorted(bodies(found)) == ["/wA=", "from kafka", "from sqs"]  # bytes that are no text in Base64
    groups = {each["Body"]: each["Attributes"].get("MessageGroupId") for each in found}
    assert groups == {"from sqs": "ann", "from kafka": "bob", "/wA=": None}
    assert len({each["MessageId"] for each in found}) == 3


@pytest.mark.row("A4")
def test_the_query_protocol_has_the_same_actions(broker: TestBroker, sqs: Any) -> None:
    status, tree = query(
        broker.sqs_url,
        "CreateQueue",
        **{
            "QueueName": "older",
            "Attribute.1.Name": "VisibilityTimeout",
            "Attribute.1.Value": "40",
            "Tag.1.Key": "k",
            "Tag.1.Value": "v",
        },
    )
    assert status == 200
    url = text_of(tree, "CreateQueueResult/QueueUrl")
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"k": "v"}
    _, tree = query(
        url,  # the address of the queue
        "SendMessage",
        **{
            "MessageBody": "<a & b>\r\n ✓",
            "MessageAttribute.1.Name": "n",
            "MessageAttribute.1.Value.DataType": "Binary",
            "MessageAttribute.1.Value.BinaryValue": "AAE=",
        },
    )
    sent_id = text_of(tree, "SendMessageResult/MessageId")
    _, tree = query(
        url,
        "SendMessageBatch",
        **{
            "SendMessageBatchRequestEntry.1.Id": "a",
            "SendMessageBatchRequestEntry.1.MessageBody": "second",
            "SendMessageBatchRequestEntry.2.Id": "b",
            "SendMessageBatchRequestEntry.2.MessageBody": "x",
            "SendMessageBatchRequestEntry.2.DelaySeconds": "1000",
        },
    )
    assert text_of(tree, "SendMessageBatchResult/SendMessageBatchResultEntry/Id") == "a"
    assert text_of(tree, "SendMessageBatchResult/BatchResultErrorEntry/Code") == "InvalidParameterValue"
    _, tree = query(
        url,
        "ReceiveMessage",
        **{"AttributeName.1": "All", "MessageAttributeName.1": "All", "WaitTimeSeconds": "5"},
    )
    assert text_of(tree, "ReceiveMessageResult/Message/MessageId") == sent_id
    assert text_of(tree, "ReceiveMessageResult/Message/Body") == "<a & b>\r\n ✓"
    assert text_of(tree, "ReceiveMessageResult/Message/MessageAttribute/Value/BinaryValue") == "AAE="
    handle = text_of(tree, "ReceiveMessageResult/Message/ReceiptHandle")
    status, _ = query(url, "DeleteMessage", ReceiptHandle=handle)
    assert status == 200
    _, tree = query(url, "GetQueueAttributes", **{"AttributeName.1": "VisibilityTimeout"})
    assert text_of(tree, "GetQueueAttributesResult/Attribute/Value") == "40"
    _, tree = query(broker.sqs_url, "ListQueues", QueueNamePrefix="older")
    assert text_of(tree, "ListQueuesResult/QueueUrl") == url
    status, tree = query(broker.sqs_url, "GetQueueUrl", QueueName="none")
    assert (status, text_of(tree, "Error/Code")) == (400, "AWS.SimpleQueueService.NonExistentQueue")
    status, tree = query(broker.sqs_url, "NoSuchAction")
    assert (status, text_of(tree, "Error/Code")) == (400, "InvalidAction")


def test_the_query_protocol_takes_one_attribute_without_a_number(broker: TestBroker) -> None:
    """As in the examples of the API reference, and from boto 2."""
    attribute = {"Attribute.Name": "VisibilityTimeout", "Attribute.Value": "41"}
    status, tree = query(broker.sqs_url, "CreateQueue", QueueName="unnumbered", **attribute)
    assert status == 200
    url = text_of(tree, "CreateQueueResult/QueueUrl")
    status, tree = query(url, "GetQueueAttributes", AttributeName="VisibilityTimeout")
    assert (status, text_of(tree, "GetQueueAttributesResult/Attribute/Value")) == (200, "41")
    status, _ = query(url, "SetQueueAttributes", **(attribute | {"Attribute.Value": "45"}))
    assert status == 200
    _, tree = query(url, "GetQueueAttributes", AttributeName="VisibilityTimeout")
    assert text_of(tree, "GetQueueAttributesResult/Attribute/Value") == "45"
    query(url, "SendMessage", MessageBody="hi")
    _, tree = query(url, "ReceiveMessage", AttributeName="SentTimestamp", WaitTimeSeconds="5")
    assert text_of(tree, "ReceiveMessageResult/Message/Attribute/Name") == "SentTimestamp"


@pytest.mark.row("A4")
def test_signatures_are_checked_when_keys_are_configured(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# access keys\nKEYID secret/with+signs\n")
    with TestBroker(sqs_access_keys_file=str(keys)) as broker:

        def client(key: str, secret: str) -> Any:
            return sqs_client(broker.sqs_url, aws_access_key_id=key, aws_secret_access_key=secret)

        right = client("KEYID", "secret/with+signs")
        url = queue_of(right, "signed")
        right.send_message(QueueUrl=url, MessageBody="m")
        for other, code in (
            (client("KEYID", "other"), "SignatureDoesNotMatch"),
            (client("OTHER", "secret/with+signs"), "SignatureDoesNotMatch"),
        ):
            with pytest.raises(ClientError) as raised:
                other.send_message(QueueUrl=url, MessageBody="m")
            assert raised.value.response["Error"]["Code"] == code
        status, tree = query(url, "DeleteQueue")
        assert (status, text_of(tree, "Error/Code")) == (403, "MissingAuthenticationToken")

        signed = []

        def capture(request: Any, **_: Any) -> None:
            signed.append((request.method, request.url, dict(request.headers), request.body))

        right.meta.events.register("before-send.sqs.*", capture)
        right.get_queue_url(QueueName="signed")
        method, address, headers, body = signed[0]
        headers = {
            name: value.decode() if isinstance(value, bytes) else value for name, value in headers.items()
        }
        assert httpx.request(method, address, headers=headers, content=body).status_code == 200
        changed = body.replace(b"signed", b"Signed")
        assert httpx.request(method, address, headers=headers, content=changed).status_code == 403
        broker.clock.advance(minutes=16)
        replayed = httpx.request(method, address, headers=headers, content=body)
        assert (replayed.status_code, replayed.headers["x-amzn-query-error"]) == (
            403,
            "RequestExpired;Sender",
        )


def test_pages_of_other_sites_are_refused(broker: TestBroker) -> None:
    for headers in ({"Host": "attacker.example"}, {"Origin": "https://attacker.example"}):
        response = httpx.post(broker.sqs_url, data={"Action": "ListQueues"}, headers=headers)
        assert response.status_code in (403, 421)
    assert httpx.get(f"{broker.sqs_url}/?Action=ListQueues").status_code == 403  # as an image sends it
    marked = {"X-Mansio-Request": "1"}
    assert httpx.get(f"{broker.sqs_url}/?Action=ListQueues", headers=marked).status_code == 200


def test_resource_api_of_boto3_works(broker: TestBroker) -> None:
    resource = boto3.resource(
        "sqs",
        endpoint_url=broker.sqs_url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    queue = resource.create_queue(QueueName="resource")
    queue.send_messages(Entries=[{"Id": str(n), "MessageBody": str(n)} for n in range(10)])
    found = []
    wait_until(lambda: found.extend(queue.receive_messages(MaxNumberOfMessages=10)) or len(found) == 10)
    assert sorted(each.body for each in found) == [str(n) for n in range(10)]
    assert queue.attributes["QueueArn"].endswith(":resource")
    assert datetime.fromtimestamp(int(queue.attributes["CreatedTimestamp"]), UTC) > datetime.now(
        UTC
    ) - timedelta(days=365)
