"""The SQS endpoint with TLS: boto3 verifies it, access keys are checked as without, and plaintext is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import botocore.exceptions
import httpx
import pytest

from support.certificates import Authority
from support.machine import scaled
from support.secured_broker import secured_broker
from support.sqs import sqs_client

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 30


def test_boto3_sends_and_receives_over_tls_with_an_access_key(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "own"), Authority(tmp_path / "stranger")
    keys = tmp_path / "keys"
    keys.write_text("AKID correct\n")
    settings = {"sqs_security_protocol": "SSL", "sqs_access_keys_file": str(keys)}
    with secured_broker(authority, authority.issue(), **settings) as broker:
        url = broker.sqs_url
        ca = str(authority.certificate)
        client = sqs_client(url, key_id="AKID", secret="correct", authority=ca)
        queue = client.create_queue(QueueName="orders")["QueueUrl"]
        assert queue.startswith("https://")
        client.send_message(QueueUrl=queue, MessageBody="hello")
        (message,) = client.receive_message(QueueUrl=queue, WaitTimeSeconds=10)["Messages"]
        assert message["Body"] == "hello"
        with pytest.raises(botocore.exceptions.ClientError, match="SignatureDoesNotMatch"):
            sqs_client(url, key_id="AKID", secret="wrong", authority=ca).list_queues()
        with pytest.raises(botocore.exceptions.SSLError):
            sqs_client(url, key_id="AKID", authority=str(stranger.certificate)).list_queues()
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"), timeout=scaled(TIMEOUT_S))
