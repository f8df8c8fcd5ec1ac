"""kill -9 while clients of SQS send to, receive from and delete from a standard and a FIFO queue.

The checker: nothing acknowledged is lost; a message of a FIFO group is not received before an earlier one of the group
was deleted; a message that is sent again until it is acknowledged is stored once, with one id; a message whose deletion
was acknowledged is not received again.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from support.machine import scaled
from support.paths import free_port
from support.process import served
from support.sqs import sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.process import ServedBroker

STANDARD = "jobs"
FIFO = "accounts.fifo"
GROUPS = 4
VISIBILITY_S = 2
BACKLOG_MAX = 60
"""Number of messages that wait in a queue, so that it is empty soon after the end."""

CONSUMERS = 3
RETRY_S = 0.1


class SqsLoad:
    """Producers and consumers, which go on while the broker dies."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.errors: list[str] = []
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.fifo_sent: dict[int, dict[int, str]] = defaultdict(dict)
        self.fifo_ids: dict[tuple[int, int], set[str]] = defaultdict(set)
        self.attempted: dict[int, set[int]] = defaultdict(set)
        self.deleted: dict[int, set[int]] = defaultdict(set)
        self.kills = 0
        self._seed = seed
        self._lock = threading.Lock()
        self._is_producing = threading.Event()
        self._is_ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._is_producing.set()
        works: list[Callable[[Any, random.Random], None]] = [self._send_standard, self._send_fifo]
        works += [self._consume_standard, self._consume_fifo] * CONSUMERS
        for number, work in enumerate(works):
            thread = threading.Thread(target=self._run, args=(work, number), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, work: Callable[[Any, random.Random], None], number: int) -> None:
        try:
            work(sqs_client(self.url), random.Random(self._seed * 100 + number))
        except Exception as error:  # noqa: BLE001 - it fails the test
            self.errors.append(f"{work.__name__}: {error!r}")

    def queue(self, name: str) -> str:
        return f"{self.url}/000000000000/{name}"

    def end(self) -> None:
        """Stop sending, and the consumers once everything that was acknowledged has arrived."""
        self._is_producing.clear()
        for thread in self._threads[:2]:
            thread.join(scaled(60))
        wait_until(lambda: self.errors or self.is_drained(), 60, "all messages arrive")
        self._is_ending.set()
        for thread in self._threads:
            thread.join(scaled(60))

    def is_drained(self) -> bool:
        """Whether every message that was acknowledged has arrived. A deletion whose answer a kill prevented may have
        had its effect, so what counts is that it was attempted."""
        with self._lock:
            return self.sent <= self.received and all(
                set(sent) <= self.attempted[group] for group, sent in self.fifo_sent.items()
            )

    @property
    def progress(self) -> int:
        with self._lock:
            return min(len(self.received), sum(map(len, self.deleted.values())))

    def _attempt(self, call: Callable[..., Any], **parameters: Any) -> Any:
        """Return the answer; None if the broker is down or has not answered."""
        try:
            return call(**parameters)
        except BotoCoreError:
            self._is_ending.wait(RETRY_S)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                raise
            self._is_ending.wait(RETRY_S)
        return None

    def _send_standard(self, sqs: Any, rng: random.Random) -> None:
        number = 0
        while self._is_producing.is_set():
            if len(self.sent) - len(self.received) > BACKLOG_MAX:
                self._is_ending.wait(RETRY_S)
                continue
            bodies = [f"{number + at}" for at in range(rng.randrange(1, 11))]
            number += len(bodies)
            entries = [
                {"Id": each, "MessageBody": each, "DelaySeconds": rng.choice((0, 0, 0, 1))} for each in bodies
            ]
            answer = self._attempt(sqs.send_message_batch, QueueUrl=self.queue(STANDARD), Entries=entries)
            if answer is not None:
                with self._lock:
                    self.sent.update(each["Id"] for each in answer.get("Successful", ()))

    def _send_fifo(self, sqs: Any, rng: random.Random) -> None:
        following = [0] * GROUPS
        while self._is_producing.is_set():
            if sum(following) - sum(map(len, self.attempted.values())) > BACKLOG_MAX:
                self._is_ending.wait(RETRY_S)
                continue
            entries = []
            for _ in range(rng.randrange(1, 11)):
                group = rng.randrange(GROUPS)
                text = f"{group}-{following[group]}"
                following[group] += 1
                entries.append(
                    {
                        "Id": text,
                        "MessageBody": text,
                        "MessageGroupId": f"{group}",
                        "MessageDeduplicationId": text,
                    }
                )
            waiting = entries
            while waiting:  # in the order of the first attempt, with the same ids
                answer = self._attempt(sqs.send_message_batch, QueueUrl=self.queue(FIFO), Entries=waiting)
                if answer is None:
                    continue
                done = {each["Id"]: each["MessageId"] for each in answer.get("Successful", ())}
                with self._lock:
                    for text, message_id in done.items():
                        group, number = map(int, text.split("-"))
                        self.fifo_sent[group][number] = message_id
                        self.fifo_ids[group, number].add(message_id)
                waiting = [each for each in waiting if each["Id"] not in done]

    def _receive(self, sqs: Any, name: str) -> list[Any]:
        answer = self._attempt(
            sqs.receive_message, QueueUrl=self.queue(name), MaxNumberOfMessages=10, WaitTimeSeconds=1
        )
        return [] if answer is None else answer.get("Messages", [])

    def _consume_standard(self, sqs: Any, rng: random.Random) -> None:
        while not self._is_ending.is_set():
            messages = self._receive(sqs, STANDARD)
            with self._lock:
                self.received.update(each["Body"] for each in messages)
            if messages:
                entries = [
                    {"Id": f"{at}", "ReceiptHandle": each["ReceiptHandle"]}
                    for at, each in enumerate(messages)
                ]
                self._attempt(sqs.delete_message_batch, QueueUrl=self.queue(STANDARD), Entries=entries)

    def _consume_fifo(self, sqs: Any, rng: random.Random) -> None:
        while not self._is_ending.is_set():
            messages = self._receive(sqs, FIFO)
            self._check_order(messages)
            for each in messages:
                group, number = map(int, each["Body"].split("-"))
                if rng.random() < 0.01:  # the group waits for the end of the lease
                    break
                with self._lock:
                    self.attempted[group].add(number)
                try:
                    done = self._attempt(
                        sqs.delete_message, QueueUrl=self.queue(FIFO), ReceiptHandle=each["ReceiptHandle"]
                    )
                except ClientError as error:
                    if "expired" not in str(error):
                        raise
                    break
                if done is None:
                    break
                with self._lock:
                    self.deleted[group].add(number)

    def _check_order(self, messages: list[Any]) -> None:
        with self._lock:
            answer: dict[int, list[int]] = defaultdict(list)
            for each in messages:
                group, number = map(int, each["Body"].split("-"))
                answer[group].append(number)
                self.fifo_ids[group, number].add(each["MessageId"])
                if number in self.deleted[group]:
                    self.errors.append(f"{each['Body']} was deleted and is received again")
            for group, numbers in answer.items():
                allowed = self.attempted[group]
                for at, number in enumerate(numbers):
                    missing = [one for one in range(number) if one not in allowed and one not in numbers[:at]]
                    if missing:
                        self.errors.append(f"group {group}: {number} is received before {missing[:5]}")


def kill_and_check(tmp_path: Path, kills: int, seed: int, progress: int) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with served(tmp_path / "data", arguments=["--sqs", f"127.0.0.1:{port}"], http=False) as broker:
        sqs = sqs_client(url)
        visibility = {"VisibilityTimeout": f"{VISIBILITY_S}"}
        sqs.create_queue(QueueName=STANDARD, Attributes=visibility)
        sqs.create_queue(QueueName=FIFO, Attributes={**visibility, "FifoQueue": "true"})
        load = SqsLoad(url, seed)
        load.start()
        for _ in range(kills):
            kill_once(broker, load, progress)
        load.end()
    assert load.errors == []
    assert load.is_drained()
    assert {each: len(ids) for each, ids in load.fifo_ids.items() if len(ids) != 1} == {}


def kill_once(broker: ServedBroker, load: SqsLoad, progress: int) -> None:
    begin = load.progress
    wait_until(lambda: load.errors or load.progress >= begin + progress, 60, "messages are deleted")
    broker.kill()
    broker.start()


@pytest.mark.row("A4", "L5")
@pytest.mark.full
def test_a_kill_loses_no_message_and_keeps_the_order_of_groups(tmp_path: Path) -> None:
    kill_and_check(tmp_path, kills=1, seed=1, progress=20)


@pytest.mark.full
@pytest.mark.row("A4")
def test_five_kills_lose_no_message_and_keep_the_order_of_groups(tmp_path: Path) -> None:
    kill_and_check(tmp_path, kills=5, seed=2, progress=40)
