"""Publishing over HTTP, gRPC and SQS while leaders die: what is confirmed is stored, and nothing is stored twice."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import grpc
import httpx
import pytest
from botocore.exceptions import BotoCoreError, ClientError

import mansio
from mansio.api.grpc import mansio_pb2 as pb
from support.cluster import cluster
from support.machine import scaled
from support.sqs import sqs_client
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PARTITIONS: Final = 6
TOPIC: Final = "published"
QUEUE: Final = "queued"
ROUNDS: Final = 2
RECORDS_AFTER_EACH_DEATH: Final = 40
REQUEST_TIMEOUT_S: Final = 20
PROGRESS_S_MAX: Final = 90


class Publisher(threading.Thread):
    """Publishes values that are all different, one after the other, and never one of them twice."""

    def __init__(self, name: str, publish: Callable[[str], bool]) -> None:
        """`publish`: whether a value was confirmed."""
        super().__init__(name=name)
        self._publish = publish
        self.is_ending = threading.Event()
        self.confirmed: list[str] = []
        self.unconfirmed: list[str] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for number in itertools.count():
                if self.is_ending.is_set():
                    return
                value = f"{self.name}-{number}"
                (self.confirmed if self._publish(value) else self.unconfirmed).append(value)
        except BaseException as error:  # noqa: BLE001  # checked by the test
            self.failure = error


@pytest.mark.full
@pytest.mark.row("A3", "C2")
@pytest.mark.timeout(300)
def test_leaders_that_die_under_publishing_lose_nothing_confirmed_and_double_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(
            cluster(tmp_path, http=True, sqs=True, grpc=True, num_partitions=PARTITIONS)
        )
        create_topic(one, TOPIC, PARTITIONS, min_insync_replicas="2")
        kept, *victims = one.brokers
        publishers = list(
            new_publishers(stack, one.brokers[kept].http_url, one.grpc_addresses[kept], one.sqs_urls[kept])
        )
        one.wait_in_sync(TOPIC, QUEUE)
        for publisher in publishers:
            publisher.start()
        try:
            for victim in victims * ROUNDS:
                wait_for_progress(publishers)
                one.kill(victim)
                wait_for_progress(publishers)
                one.start(victim)
                one.wait_in_sync(TOPIC, QUEUE)
        finally:
            for publisher in publishers:
                publisher.is_ending.set()
            for publisher in publishers:
                publisher.join(scaled(PROGRESS_S_MAX))
        assert [publisher.failure for publisher in publishers] == [None] * len(publishers)
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            read = Counter(
                (message.value or b"").decode()
                for topic in (TOPIC, QUEUE)
                for message in client.consume(topic, start="earliest", to_end=True)
            )
        for publisher in publishers:
            lost = [value for value in publisher.confirmed if value not in read]
            assert not lost, f"{publisher.name}: {len(lost)} of {len(publisher.confirmed)} lost: {lost[:5]}"
        doubled = [value for value, times in read.items() if times > 1]
        assert not doubled, f"stored more than once: {doubled[:5]}"


def wait_for_progress(publishers: list[Publisher]) -> None:
    """Wait until each publisher has more confirmations."""
    targets = [(each, len(each.confirmed) + RECORDS_AFTER_EACH_DEATH) for each in publishers]
    for publisher, target in targets:
        wait_until(
            lambda each=publisher, end=target: each.failure is not None or len(each.confirmed) >= end,
            PROGRESS_S_MAX,
            f"{publisher.name} publishes",
        )


def new_publishers(stack: ExitStack, http_url: str, grpc_address: str, sqs_url: str) -> Iterator[Publisher]:
    """Yield a publisher for each protocol; all ask one broker."""
    headers = {"Content-Type": "application/octet-stream"}
    http = stack.enter_context(httpx.Client(timeout=scaled(REQUEST_TIMEOUT_S), headers=headers))
    channel = stack.enter_context(grpc.insecure_channel(grpc_address))
    publish = channel.unary_unary(
        "/mansio.v1.Mansio/Publish", pb.PublishRequest.SerializeToString, pb.PublishResponse.FromString
    )
    sqs = sqs_client(sqs_url)
    queue_url = sqs.create_queue(QueueName=QUEUE)["QueueUrl"]

    def over_http(value: str) -> bool:
        response = http.post(f"{http_url}/v1/topics/{TOPIC}/records", content=value)
        assert response.status_code in (200, 201, 500, 503, 504), response.text
        return response.is_success

    def over_grpc(value: str) -> bool:
        request = pb.PublishRequest(topic=TOPIC, records=[pb.NewRecord(value=value.encode())])
        try:
            response = publish(request, timeout=scaled(REQUEST_TIMEOUT_S))
        except grpc.RpcError:
            return False
        return not any(each.HasField("error") for each in response.ranges)

    def over_sqs(value: str) -> bool:
        try:
            sqs.send_message(QueueUrl=queue_url, MessageBody=value)
        except (ClientError, BotoCoreError):
            return False
        return True

    for name, function in (("http", over_http), ("grpc", over_grpc), ("sqs", over_sqs)):
        yield Publisher(name, function)
