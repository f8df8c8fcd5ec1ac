"""`conftest.py` of moto's SQS tests when they run against an endpoint: each of their mocks begins without queues.

The suite copies it beside the tests; it runs in their environment, not in this project's.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Self

import boto3
import moto
import moto.core
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ACCOUNT = "000000000000"


class OwnEndpoint(ContextDecorator):
    """Instead of a mock: requests go to `AWS_ENDPOINT_URL_SQS`, from which all queues are deleted before."""

    def __enter__(self) -> Self:
        sqs = boto3.client("sqs", region_name="us-east-1")
        for url in sqs.list_queues().get("QueueUrls", []):
            sqs.delete_queue(QueueUrl=url)
        return self

    def __exit__(self, *_: object) -> None:
        pass


def mock_aws(test: Callable[..., Any] | None = None) -> Any:
    """With and without parentheses, as a decorator and in a `with` statement."""
    return OwnEndpoint() if test is None else OwnEndpoint()(test)


# The test modules import both names after this.
moto.mock_aws = mock_aws
moto.core.DEFAULT_ACCOUNT_ID = ACCOUNT


@pytest.fixture
def account_id() -> str:
    return ACCOUNT
