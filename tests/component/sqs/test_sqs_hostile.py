"""SQS endpoint and hostile requests: a typed error for each, in both protocols, and never a 5xx."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from component.sqs.sqs_fixtures import fifo_of, queue_of, sqs_client
from mansio.api.sqs.shapes import REQUESTS, Shape
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

JSON = "application/x-amz-json-1.0"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture(scope="module")
def urls(broker: TestBroker) -> list[str]:
    sqs = sqs_client(broker.sqs_url)
    return [queue_of(sqs, "standard"), fifo_of(sqs, "fifo")]


@pytest.fixture(scope="module")
def http(broker: TestBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.sqs_url, timeout=scaled(20)) as client:
        yield client


def call(http: httpx.Client, action: str, body: bytes) -> httpx.Response:
    headers = {"x-amz-target": f"AmazonSQS.{action}", "content-type": JSON}
    return http.post("/", content=body, headers=headers)


TEXT = st.text(max_size=20) | st.sampled_from(
    ["\x00", "x" * 5000, "All", "1", "-1", "2147483648", "{}", "[]"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def values(shape: Shape, urls: list[str], name: str = "") -> st.SearchStrategy[Any]:
    """Values that have a shape, mostly."""
    if name == "QueueUrl":
        right: st.SearchStrategy[Any] = st.sampled_from(urls)
    elif name in ("WaitTimeSeconds", "VisibilityTimeout", "DelaySeconds"):
        right = st.integers(-1, 1)
    elif shape.kind == "text":
        right = TEXT
    elif shape.kind == "integer":
        right = st.integers(-2, 12)
    elif shape.kind == "boolean":
        right = st.booleans()
    elif shape.kind == "list":
        assert shape.item is not None
        right = st.lists(values(shape.item, urls), max_size=12)
    elif shape.kind == "map":
        assert shape.item is not None
        right = st.dictionaries(TEXT, values(shape.item, urls), max_size=3)
    else:
        members = {each: values(one, urls, each) for each, one in (shape.members or {}).items()}
        required = {each: members[each] for each in shape.required}
        right = st.fixed_dictionaries(
            required, optional={each: one for each, one in members.items() if each not in required}
        )
    return st.one_of(right, right, right, right, right, right, right, right, right, ANY)


@settings(
    max_examples=examples(25, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_requests_made_from_the_shapes_get_a_result_or_a_typed_error(
    http: httpx.Client, urls: list[str], data: st.DataObject
) -> None:
    names = sorted(set(REQUESTS) - {"CreateQueue", "DeleteQueue"})
    action = data.draw(st.sampled_from(names))
    body = data.draw(values(REQUESTS[action], urls))
    response = call(http, action, json.dumps(body).encode())
    assert response.status_code < 500, (action, body, response.text)
    assert response.headers["content-type"] == JSON
    if response.status_code >= 400:
        assert response.json()["__type"].startswith("com.amazonaws.sqs#")
        assert response.headers["x-amzn-query-error"].endswith(";Sender")


@settings(
    max_examples=examples(25, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    action=st.sampled_from(sorted(set(REQUESTS) - {"CreateQueue", "DeleteQueue"})),
    form=st.dictionaries(
        st.from_regex(
            r"(MessageBody|MessageAttribute|SendMessageBatchRequestEntry|AttributeName|Attribute|ReceiptHandle|Tag)"
            r"(\.[0-9]{1,3})?(\.(Name|Value|Id|MessageBody|Key|Value\.DataType|Value\.StringValue))?",
            fullmatch=True,
        ),
        TEXT,
        max_size=6,
    ),
)
def test_forms_get_a_result_or_a_typed_error(
    http: httpx.Client, urls: list[str], action: str, form: dict[str, str]
) -> None:
    response = http.post(
        urls[0].replace("http://", "").partition("/")[2].join(("/", "")), data={"Action": action, **form}
    )
    assert response.status_code < 500, (action, form, response.text)
    assert response.headers["content-type"].startswith("text/xml")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"QueueUrl": 1}',
        b'{"QueueUrl": "http://[", "MessageBody": "x"}',
        b'{"QueueUrl": "https://sqs/123456789012/standard", "MessageBody": "x"}',
        b'{"QueueUrl": "/000000000000/none", "MessageBody": "x"}',
    ],
)
def test_bodies_that_are_no_request_are_refused(http: httpx.Client, urls: list[str], body: bytes) -> None:
    assert call(http, "SendMessage", body).status_code == 400


def test_unknown_actions_and_form_floods_are_refused(http: httpx.Client) -> None:
    assert call(http, "NoSuchAction", b"{}").status_code == 400
    assert http.post("/", content=b"{}", headers={"content-type": JSON}).status_code == 400
    flood = {"Action": "ListQueues", **{f"x{number}": "" for number in range(3000)}}
    assert http.post("/", data=flood).status_code == 400
    assert (
        http.post(
            "/", content=b"\xff", headers={"content-type": "application/x-www-form-urlencoded"}
        ).status_code
        == 400
    )


@pytest.mark.parametrize(
    ("action", "body"),
    [
        (
            "SendMessage",
            b'{"QueueUrl": "/standard", "MessageBody": "m", "MessageAttributes":'
            b' {"a": {"DataType": "String.\\ud800", "StringValue": "x"}}}',
        ),
        (
            "SetQueueAttributes",
            '{"QueueUrl": "/standard", "Attributes": {"RedrivePolicy": "{\\"maxReceiveCount\\": \\"²\\",'
            ' \\"deadLetterTargetArn\\": \\"arn:aws:sqs:us-east-1:000000000000:fifo.fifo\\"}"}}'.encode(),
        ),
    ],
)
def test_almost_right_texts_are_refused(
    http: httpx.Client, urls: list[str], action: str, body: bytes
) -> None:
    response = call(http, action, body)
    assert response.status_code == 400, response.text


def test_receipt_handles_of_other_queues_have_no_effect(broker: TestBroker) -> None:
    sqs = sqs_client(broker.sqs_url)
    one, other = queue_of(sqs, "one"), queue_of(sqs, "other")
    sqs.send_message(QueueUrl=one, MessageBody="m")
    (message,) = sqs.receive_message(QueueUrl=one, WaitTimeSeconds=10)["Messages"]
    for handle in (message["ReceiptHandle"], "A" * 64, "x", "A" * 1000):
        with pytest.raises(sqs.exceptions.ReceiptHandleIsInvalid):
            sqs.delete_message(QueueUrl=other, ReceiptHandle=handle)
    sqs.delete_message(QueueUrl=one, ReceiptHandle=message["ReceiptHandle"])
