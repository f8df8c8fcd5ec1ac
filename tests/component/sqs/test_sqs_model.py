"""Histories of a standard and a FIFO queue against a model, on virtual time of the broker.

The model knows, of each message, whether it is visible, in flight until a time, or deleted. Every receive has to be one
that the model allows; at the end, when all leases have ended, exactly the messages that the model has are received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings, strategies

from mansio.testing.broker import TestBroker
from support.sqs import sqs_client
from support.tiers import examples
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.row("A4")

GROUPS = ("a", "b")
VISIBILITY_S = 30
STEP_S = 11


@dataclass
class Sent:
    """A message. `until_s`: end of its visibility timeout."""

    message_id: str
    group: str
    until_s: float = 0
    receipt: str = ""
    is_deleted: bool = False


@dataclass
class Model:
    """The messages of a queue in the order of sending, and the deduplication ids that were used."""

    is_fifo: bool
    now_s: float = 0
    messages: dict[str, Sent] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)

    def check_receive(self, received: list[Any]) -> None:
        """Of a FIFO queue: no message passes an earlier one of its group, but those of the same answer. One that is
        given back does not wait for messages behind it that are in flight."""
        order = list(self.messages)
        answered: set[str] = set()
        for each in received:
            message = self.messages[each["MessageId"]]
            assert not message.is_deleted
            assert message.until_s <= self.now_s
            message.receipt = each["ReceiptHandle"]
            if self.is_fifo:
                for one in order[: order.index(each["MessageId"])]:
                    earlier = self.messages[one]
                    is_passed = earlier.group == message.group and not earlier.is_deleted
                    assert not is_passed or one in answered, "a message passed an earlier one"
            answered.add(each["MessageId"])
        for message_id in answered:
            self.messages[message_id].until_s = self.now_s + VISIBILITY_S


NUMBERS = strategies.integers(0, 9)
SEND = strategies.tuples(strategies.just("send"), strategies.sampled_from(GROUPS), strategies.integers(0, 30))
RECEIVE = strategies.tuples(strategies.just("receive"), strategies.integers(1, 10), NUMBERS)
CHANGE = strategies.tuples(strategies.sampled_from(("delete", "return", "extend")), NUMBERS, NUMBERS)
ADVANCE = strategies.tuples(strategies.just("advance"), strategies.integers(1, 4), NUMBERS)
OPERATIONS = strategies.lists(
    strategies.one_of(SEND, SEND, RECEIVE, RECEIVE, CHANGE, ADVANCE), min_size=10, max_size=30
)


class Worlds:
    """One broker for all examples, and the number of the last queue."""

    def __init__(self, broker: TestBroker) -> None:
        self.broker = broker
        self.sqs = sqs_client(broker.sqs_url)
        self.number = 0

    def new_queue(self, *, is_fifo: bool) -> str:
        self.number += 1
        attributes = {"VisibilityTimeout": f"{VISIBILITY_S}"}
        if is_fifo:
            attributes["FifoQueue"] = "true"
        name = f"q{self.number}{'.fifo' if is_fifo else ''}"
        return str(self.sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])

    def receive(self, url: str, most: int) -> list[Any]:
        return list(self.sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=most).get("Messages", ()))


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with TestBroker() as broker:
        yield Worlds(broker)


def run(worlds: Worlds, operations: list[tuple[Any, ...]], *, is_fifo: bool) -> None:
    sqs, url, model = worlds.sqs, worlds.new_queue(is_fifo=is_fifo), Model(is_fifo)
    for number, (kind, first, second) in enumerate(operations):
        held = [each for each in model.messages.values() if each.receipt]
        if kind == "send":
            ids = {"MessageGroupId": first}
            if is_fifo:
                ids["MessageDeduplicationId"] = f"{second}"
            sent = sqs.send_message(QueueUrl=url, MessageBody=f"{number}", **ids)
            known = model.known.setdefault(f"{second}" if is_fifo else f"{number}", sent["MessageId"])
            assert sent["MessageId"] == known
            model.messages.setdefault(known, Sent(known, first))
        elif kind == "receive":
            model.check_receive(worlds.receive(url, first))
        elif kind == "advance":
            worlds.broker.clock.advance(STEP_S * first)
            model.now_s += STEP_S * first
        elif held:
            change(sqs, url, model, held[first % len(held)], kind)
        assert not is_fifo or model.now_s < 300, "the deduplication window would end"
    worlds.broker.clock.advance(2 * VISIBILITY_S)
    model.now_s += 2 * VISIBILITY_S
    left = {each.message_id for each in model.messages.values() if not each.is_deleted}
    found: set[str] = set()

    def drain() -> bool:
        """Receive once. A receive that does not wait may return nothing although there are messages."""
        some = worlds.receive(url, 10)
        model.check_receive(some)
        for each in some:
            found.add(each["MessageId"])
            sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
            model.messages[each["MessageId"]].is_deleted = True
        return not some and len(found) >= len(left)

    wait_until(drain, what="all messages are received")
    assert found == left


def change(sqs: Any, url: str, model: Model, message: Sent, kind: str) -> None:
    """Delete, return or extend a message that was received; its lease may have ended."""
    is_leased = message.until_s > model.now_s and not message.is_deleted
    parameters = {"QueueUrl": url, "ReceiptHandle": message.receipt}
    try:
        if kind == "delete":
            sqs.delete_message(**parameters)
        else:
            timeout_s = 0 if kind == "return" else VISIBILITY_S
            sqs.change_message_visibility(**parameters, VisibilityTimeout=timeout_s)
            message.until_s = model.now_s + timeout_s
    except ClientError:
        assert not is_leased
        return
    if kind == "delete":
        assert is_leased or message.is_deleted or not model.is_fifo
        message.is_deleted = message.is_deleted or is_leased
    else:
        assert is_leased


@settings(max_examples=examples(6, 60))
@given(operations=OPERATIONS)
def test_a_standard_queue_behaves_as_its_model(worlds: Worlds, operations: list[tuple[Any, ...]]) -> None:
    run(worlds, operations, is_fifo=False)


@settings(max_examples=examples(6, 60))
@given(operations=OPERATIONS)
def test_a_fifo_queue_behaves_as_its_model(worlds: Worlds, operations: list[tuple[Any, ...]]) -> None:
    total, kept = 0, []
    for each in operations:
        total += STEP_S * each[1] if each[0] == "advance" else 0
        if total < 200 or each[0] != "advance":
            kept.append(each)
    run(worlds, kept, is_fifo=True)
