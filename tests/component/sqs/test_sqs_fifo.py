"""FIFO queues of the SQS endpoint: order in message groups, deduplication."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from component.sqs.sqs_fixtures import bodies, delete, fifo_of, queue_of, receive, receive_none, sqs_client
from mansio.testing.broker import TestBroker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture(scope="module")
def sqs(broker: TestBroker) -> Any:
    return sqs_client(broker.sqs_url)


def send(sqs: Any, url: str, *messages: str, **more: Any) -> list[Any]:
    """Send messages `group:body`."""
    return [
        sqs.send_message(QueueUrl=url, MessageBody=each, MessageGroupId=each.partition(":")[0], **more)
        for each in messages
    ]


@pytest.mark.row("A4", "D8")
def test_messages_of_a_group_come_in_order_and_wait_for_those_in_flight(sqs: Any) -> None:
    url = fifo_of(sqs, "order", ContentBasedDeduplication="true")
    sent = send(sqs, url, "a:1", "a:2", "b:1", "a:3", "b:2")
    numbers = [each["SequenceNumber"] for each in sent]
    assert numbers == sorted(numbers)
    assert len(numbers[0]) == 20
    first = receive(sqs, url, MaxNumberOfMessages=1)
    assert bodies(first) == ["a:1"]
    others = receive(sqs, url)
    assert bodies(others) == ["b:1", "b:2"]  # of a no other one while a:1 is in flight
    assert receive_none(sqs, url)
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=first[0]["ReceiptHandle"], VisibilityTimeout=0)
    again = receive(sqs, url, MaxNumberOfMessages=2)
    assert bodies(again) == ["a:1", "a:2"]
    assert again[0]["Attributes"]["ApproximateReceiveCount"] == "2"
    assert again[1]["Attributes"]["MessageGroupId"] == "a"
    assert again[1]["Attributes"]["SequenceNumber"] == numbers[1]
    delete(sqs, url, again)
    assert bodies(receive(sqs, url)) == ["a:3"]
    delete(sqs, url, others)


@pytest.mark.row("A4", "P3")
def test_a_repeat_within_five_minutes_is_not_stored_and_gets_the_first_id(
    sqs: Any, broker: TestBroker
) -> None:
    url = fifo_of(sqs, "dedup")
    first = send(sqs, url, "a:1", MessageDeduplicationId="x")[0]
    again = send(sqs, url, "b:2", MessageDeduplicationId="x")[0]
    assert (again["MessageId"], again["SequenceNumber"]) == (first["MessageId"], first["SequenceNumber"])
    found = receive(sqs, url)
    assert bodies(found) == ["a:1"]
    assert found[0]["Attributes"]["MessageDeduplicationId"] == "x"
    delete(sqs, url, found)
    assert send(sqs, url, "a:3", MessageDeduplicationId="x")[0]["MessageId"] == first["MessageId"]
    assert receive_none(sqs, url)  # the window outlives the message
    broker.clock.advance(minutes=5, seconds=1)
    assert send(sqs, url, "a:4", MessageDeduplicationId="x")[0]["MessageId"] != first["MessageId"]
    assert bodies(receive(sqs, url)) == ["a:4"]


def test_deduplication_by_content_and_by_group(sqs: Any) -> None:
    url = fifo_of(
        sqs,
        "content",
        ContentBasedDeduplication="true",
        DeduplicationScope="messageGroup",
    )
    for group in ("a", "b"):
        for _ in range(2):
            sqs.send_message(QueueUrl=url, MessageBody="same", MessageGroupId=group)
    found = receive(sqs, url)
    assert [each["Attributes"]["MessageGroupId"] for each in found] == ["a", "b"]
    entries = [{"Id": str(n), "MessageBody": f"m{n % 2}", "MessageGroupId": "c"} for n in range(4)]
    result = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    ids = {each["Id"]: each["MessageId"] for each in result["Successful"]}
    assert ids["0"] == ids["2"]
    assert ids["1"] == ids["3"] != ids["0"]
    assert bodies(receive(sqs, url)) == ["m0", "m1"]


def test_deletion_after_the_timeout_is_refused(sqs: Any, broker: TestBroker) -> None:
    url = fifo_of(sqs, "late", ContentBasedDeduplication="true")
    send(sqs, url, "a:1")
    (message,) = receive(sqs, url)
    broker.clock.advance(seconds=31)
    (again,) = receive(sqs, url)
    with pytest.raises(ClientError, match="expired"):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    sqs.delete_message(QueueUrl=url, ReceiptHandle=again["ReceiptHandle"])
    assert receive_none(sqs, url)


def test_a_delay_of_0_of_a_message_is_that_of_the_queue(sqs: Any, broker: TestBroker) -> None:
    """Clients that always send DelaySeconds can use FIFO queues, and pass no message that is delayed."""
    url = fifo_of(sqs, "zero", ContentBasedDeduplication="true", DelaySeconds="60")
    send(sqs, url, "a:1")
    send(sqs, url, "a:2", DelaySeconds=0)
    entry = {"Id": "a", "MessageBody": "a:3", "MessageGroupId": "a", "DelaySeconds": 0}
    assert "Failed" not in sqs.send_message_batch(QueueUrl=url, Entries=[entry])
    assert receive_none(sqs, url)
    broker.clock.advance(seconds=61)
    assert bodies(receive(sqs, url)) == ["a:1", "a:2", "a:3"]


def test_delay_of_the_queue_keeps_the_order(sqs: Any, broker: TestBroker) -> None:
    url = fifo_of(sqs, "delay", ContentBasedDeduplication="true", DelaySeconds="60")
    send(sqs, url, "a:1", "a:2", "a:3")
    assert receive_none(sqs, url)
    broker.clock.advance(seconds=61)
    assert bodies(receive(sqs, url)) == ["a:1", "a:2", "a:3"]


@pytest.mark.row("A4", "D4")
def test_dead_letters_of_a_fifo_queue(sqs: Any) -> None:
    dead = fifo_of(sqs, "dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 1})
    url = fifo_of(
        sqs, "source", ContentBasedDeduplication="true", VisibilityTimeout="0", RedrivePolicy=policy
    )
    send(sqs, url, "a:bad", "a:next")
    found: list[Any] = []
    received: list[str] = []

    def died() -> bool:
        received.extend(bodies(receive(sqs, url, MaxNumberOfMessages=1, WaitTimeSeconds=0)))
        dead_letters = receive(sqs, dead, WaitTimeSeconds=0)
        if dead_letters:
            delete(sqs, dead, dead_letters)
        found.extend(dead_letters)
        return len(found) == 2

    wait_until(died)
    assert received == ["a:bad", "a:next"]
    assert bodies(found) == ["a:bad", "a:next"]
    assert found[0]["Attributes"]["MessageGroupId"] == "a"
    standard = queue_of(sqs, "standard")
    other = sqs.get_queue_attributes(QueueUrl=standard, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": other, "maxReceiveCount": 1})
    with pytest.raises(ClientError, match="same type"):
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("no-suffix", {"FifoQueue": "true"}),
        ("suffix.fifo", {}),
        ("suffix.fifo", {"FifoQueue": "false"}),
        ("x" * 76 + ".fifo", {"FifoQueue": "true"}),
        ("standard", {"ContentBasedDeduplication": "true"}),
    ],
)
def test_names_and_attributes_that_do_not_fit_are_refused(
    sqs: Any, name: str, attributes: dict[str, str]
) -> None:
    with pytest.raises(ClientError):
        sqs.create_queue(QueueName=name, Attributes=attributes)


def test_parameters_that_do_not_fit_the_queue_are_refused(sqs: Any) -> None:
    fifo, standard = fifo_of(sqs, "fits"), queue_of(sqs, "fits")
    for url, parameters in (
        (fifo, {}),
        (fifo, {"MessageGroupId": "a"}),
        (fifo, {"MessageGroupId": "a", "MessageDeduplicationId": "x", "DelaySeconds": 1}),
        (fifo, {"MessageGroupId": "a b", "MessageDeduplicationId": "x"}),
        (fifo, {"MessageGroupId": "a", "MessageDeduplicationId": "x" * 129}),
        (standard, {"MessageDeduplicationId": "x"}),
    ):
        with pytest.raises(ClientError):
            sqs.send_message(QueueUrl=url, MessageBody="m", **parameters)


@pytest.mark.row("A4", "D5")
def test_order_and_windows_survive_a_restart() -> None:
    with TestBroker() as broker:
        sqs = sqs_client(broker.sqs_url)
        url = fifo_of(sqs, "restart", VisibilityTimeout="600")
        first = send(sqs, url, "a:1", MessageDeduplicationId="1")[0]
        send(sqs, url, "a:2", MessageDeduplicationId="2")
        (message,) = receive(sqs, url, MaxNumberOfMessages=1)
        broker.restart()
        sqs = sqs_client(broker.sqs_url)
        url = sqs.get_queue_url(QueueName="restart.fifo")["QueueUrl"]
        assert send(sqs, url, "a:1", MessageDeduplicationId="1")[0]["MessageId"] == first["MessageId"]
        assert receive_none(sqs, url)
        broker.clock.advance(seconds=31)  # messages that may have been leased before are withheld
        assert receive_none(sqs, url)  # a:1 is in flight
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        assert bodies(receive(sqs, url)) == ["a:2"]
