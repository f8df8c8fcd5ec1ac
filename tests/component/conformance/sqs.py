"""SQS: boto3 with the endpoint. A topic of a scenario is a queue; one with keys is a FIFO queue."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from botocore.exceptions import ClientError

from component.conformance.protocol import (
    ATTEMPTS,
    DEDUPLICATION,
    INVALID,
    LEASE_LOST,
    LEASE_S,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    WAIT_S,
    Protocol,
    Received,
    Refused,
)
from support.machine import scaled
from support.sqs import sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES: Final = {
    "QueueDoesNotExist": UNKNOWN_TOPIC,
    "AWS.SimpleQueueService.NonExistentQueue": UNKNOWN_TOPIC,
    "InvalidParameterValue": INVALID,
    "InvalidParameterCombination": INVALID,
    "ReceiptHandleIsInvalid": LEASE_LOST,
    "MessageNotInflight": LEASE_LOST,
    "InvalidReceiptHandle": LEASE_LOST,
}


class Sqs(Protocol):
    name = "sqs"
    cannot: ClassVar = {
        "late_error": "SQS answers DeleteMessage without an error; a late one has no effect",
        "reject": "SQS dead-letters only after maxReceiveCount receives",
        "priority": "SQS has no priorities; a Kafka client sets them on the same topic",
        "transactions": "SQS has no transactions",
        "replay": "a received message is gone for SQS; Kafka clients, HTTP and gRPC read the topic of the queue",
    }

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self._sqs = sqs_client(broker.sqs_url)
        self._names: dict[str, str] = {}

    def _url(self, topic: str) -> str:
        return f"{self.broker.sqs_url}/000000000000/{self._names.get(topic, topic)}"

    def _call(self, call: Callable[..., Any], **parameters: Any) -> Any:
        try:
            return call(**parameters)
        except ClientError as error:
            code, text = error.response["Error"]["Code"], error.response["Error"]["Message"]
            if code == "InvalidParameterValue" and "must be shorter than" in text:
                raise Refused(TOO_LARGE) from error
            raise Refused(NAMES.get(code, f"{code}: {text}")) from error

    def group(self, topic: str) -> str:
        return f"sqs.{self._names[topic]}"

    def create(self, topic: str, *, by_key: bool = False, attempts: int = ATTEMPTS, **config: str) -> None:
        is_fifo = by_key or DEDUPLICATION in config
        suffix = ".fifo" if is_fifo else ""
        self._names[topic] = topic + suffix
        self._names[f"dlq.{topic}"] = f"dlq-{topic}{suffix}"
        attributes = {"FifoQueue": "true"} if is_fifo else {}
        dead = self._sqs.create_queue(QueueName=self._names[f"dlq.{topic}"], Attributes=attributes)
        policy = {"deadLetterTargetArn": self._arn(dead["QueueUrl"]), "maxReceiveCount": attempts}
        attributes |= {"VisibilityTimeout": str(LEASE_S), "RedrivePolicy": json.dumps(policy)}
        self._sqs.create_queue(QueueName=self._names[topic], Attributes=attributes)

    def _arn(self, url: str) -> str:
        answer = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        return str(answer["Attributes"]["QueueArn"])

    def publish(
        self,
        topic: str,
        value: str,
        *,
        key: str | None = None,
        delay_s: int | None = None,
        priority: str | None = None,
        dedup_id: str | None = None,
    ) -> None:
        assert priority is None, "not expressible"
        more: dict[str, Any] = {}
        if key is not None:
            more["MessageGroupId"] = key
        if delay_s is not None:
            more["DelaySeconds"] = delay_s
        if self._names.get(topic, topic).endswith(".fifo"):
            more["MessageDeduplicationId"] = dedup_id or value
        self._call(self._sqs.send_message, QueueUrl=self._url(topic), MessageBody=value, **more)

    def receive(self, topic: str, count: int) -> list[Received]:
        found: list[Received] = []
        while len(found) < count:
            found += self._receive(topic, count - len(found), WAIT_S)
        return found

    def _receive(self, topic: str, count: int, wait_s: int, **more: Any) -> list[Received]:
        answer = self._call(
            self._sqs.receive_message,
            QueueUrl=self._url(topic),
            MaxNumberOfMessages=count,
            WaitTimeSeconds=wait_s,
            MessageSystemAttributeNames=["All"],
            **more,
        )
        return [
            Received(
                each["Body"],
                each["Attributes"].get("MessageGroupId"),
                int(each["Attributes"]["ApproximateReceiveCount"]),
                each["ReceiptHandle"],
            )
            for each in answer.get("Messages", [])
        ]

    def take(self, topic: str, count: int, then: str) -> list[Received]:
        found = self.receive(topic, count)
        for record in found:
            if then == "accept":
                self.accept(topic, record)
            else:
                self.retry(topic, record, 0)
        return found

    def accept(self, topic: str, record: Received) -> None:
        self._call(self._sqs.delete_message, QueueUrl=self._url(topic), ReceiptHandle=record.handle)

    def retry(self, topic: str, record: Received, delay_s: int) -> None:
        self._call(
            self._sqs.change_message_visibility,
            QueueUrl=self._url(topic),
            ReceiptHandle=record.handle,
            VisibilityTimeout=delay_s,
        )

    def extend(self, topic: str, record: Received, lease_s: int) -> None:
        self.retry(topic, record, lease_s)

    def is_empty(self, topic: str) -> bool:
        return not self._receive(topic, 1, 0)

    def dead_letters(self, topic: str) -> list[str]:
        found: list[Received] = []
        end = time.monotonic() + scaled(WAIT_S)
        while not found and time.monotonic() < end:
            found = self._receive(f"dlq.{topic}", 10, 1, VisibilityTimeout=0)
        return [each.value for each in found]

    def redrive(self, topic: str) -> int:
        source = self._arn(self._url(f"dlq.{topic}"))
        self._sqs.start_message_move_task(SourceArn=source)

        def task() -> Any:
            return self._sqs.list_message_move_tasks(SourceArn=source)["Results"][0]

        wait_until(lambda: task()["Status"] == "COMPLETED", WAIT_S)
        return int(task()["ApproximateNumberOfMessagesMoved"])

    def close(self) -> None:
        self._sqs.close()
