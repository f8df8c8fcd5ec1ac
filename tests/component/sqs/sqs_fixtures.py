"""Clients of the SQS endpoint: boto3, and the older Query protocol by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import boto3
import httpx
from botocore.config import Config

from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMESPACE = "{http://queue.amazonaws.com/doc/2012-11-05/}"


def sqs_client(url: str, **more: Any) -> Any:
    """A boto3 client; it checks the MD5 digests of what it receives."""
    options = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    config = Config(retries={"total_max_attempts": 1}, read_timeout=scaled(30))
    return boto3.client("sqs", endpoint_url=url, config=config, **{**options, **more})


def queue_of(sqs: Any, name: str, **attributes: str) -> str:
    """Create a queue; its URL."""
    return str(sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


def fifo_of(sqs: Any, name: str, **attributes: str) -> str:
    return queue_of(sqs, f"{name}.fifo", FifoQueue="true", **attributes)


def receive(sqs: Any, url: str, **more: Any) -> list[Any]:
    """Messages, as soon as there is one."""
    options = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": 10, "MessageSystemAttributeNames": ["All"]}
    return list(sqs.receive_message(QueueUrl=url, **{**options, **more}).get("Messages", []))


def receive_none(sqs: Any, url: str) -> bool:
    return not receive(sqs, url, WaitTimeSeconds=0)


def bodies(messages: list[Any]) -> list[str]:
    return [each["Body"] for each in messages]


def delete(sqs: Any, url: str, messages: list[Any]) -> None:
    entries = [{"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(messages)]
    assert "Failed" not in sqs.delete_message_batch(QueueUrl=url, Entries=entries)


def query(url: str, action: str, **parameters: str) -> tuple[int, ElementTree.Element]:
    """One request of the Query protocol; status and XML."""
    form: Mapping[str, str] = {"Action": action, "Version": "2012-11-05", **parameters}
    response = httpx.post(url, data=form, timeout=scaled(30))
    return response.status_code, ElementTree.fromstring(response.text)


def text_of(tree: ElementTree.Element, path: str) -> str:
    found = tree.find("/".join(NAMESPACE + part for part in path.split("/")))
    assert found is not None, ElementTree.tostring(tree)
    return found.text or ""
