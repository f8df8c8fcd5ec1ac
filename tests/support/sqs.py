"""Clients of the SQS-compatible endpoint: boto3, and the older Query protocol as plain HTTP."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
import httpx
from botocore.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 40

HTTP = httpx.Client(timeout=TIMEOUT_S)
"""Client for plain requests; `httpx.post` would read the certificates for each request."""


def sqs_client(
    url: str,
    *,
    key_id: str = "test",
    secret: str = "test",
    attempts: int = 1,
    authority: str | None = None,
) -> Any:
    """Return a boto3 client. `attempts`: number of attempts of a request. `authority`: file with the authority of the
    endpoint's certificate."""
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name="eu-central-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        verify=authority,
        config=Config(
            retries={"total_max_attempts": attempts, "mode": "standard"},
            connect_timeout=TIMEOUT_S,
            read_timeout=TIMEOUT_S,
            max_pool_connections=50,
        ),
    )


def message_counts(client: Any, queue: str) -> tuple[int, int, int]:
    """Return how many messages of a queue are visible, in flight, and delayed."""
    url = client.get_queue_url(QueueName=queue)["QueueUrl"]
    found = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    kinds = ("", "NotVisible", "Delayed")
    visible, in_flight, delayed = (int(found[f"ApproximateNumberOfMessages{kind}"]) for kind in kinds)
    return visible, in_flight, delayed


def query(url: str, action: str, parameters: Mapping[str, str] | None = None) -> httpx.Response:
    """Send a request of the Query protocol."""
    form = {"Action": action, "Version": "2012-11-05", **(parameters or {})}
    return HTTP.post(url, data=form)


def texts(response: httpx.Response, name: str) -> list[str]:
    """Return the texts of all elements with a name, wherever they are."""
    root = ElementTree.fromstring(response.content)
    return [each.text or "" for each in root.iter() if each.tag.rpartition("}")[2] == name]


def receive_all(client: Any, url: str, count: int, **options: Any) -> list[Any]:
    """Receive until there are `count` messages, or none for a second."""
    found: list[Any] = []
    while len(found) < count:
        answer = client.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=1,
            MessageSystemAttributeNames=["All"],
            MessageAttributeNames=["All"],
            **options,
        )
        if "Messages" not in answer:
            break
        found += answer["Messages"]
    return found


def poll_at_full_speed(url: str, key: tuple[str, str], duration_s: float) -> int:
    """Send and receive with four boto3 clients, whose requests of one second often have the same signature. Returns
    the number of requests."""
    queue = sqs_client(url, key_id=key[0], secret=key[1]).create_queue(QueueName="polled")["QueueUrl"]
    end = time.monotonic() + duration_s

    def poll(number: int) -> int:
        sqs: Any = sqs_client(url, key_id=key[0], secret=key[1])
        requests = 0
        while time.monotonic() < end or requests < 2:
            sqs.send_message(QueueUrl=queue, MessageBody=str(number))
            for each in sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", []):
                sqs.delete_message(QueueUrl=queue, ReceiptHandle=each["ReceiptHandle"])
                requests += 1
            requests += 2
        return requests

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(poll, range(4)))
