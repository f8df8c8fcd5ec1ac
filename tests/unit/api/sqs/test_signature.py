"""Signatures of requests against botocore's, and what a signature has to cover."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.api.sqs.signature import (
    MissingAuthenticationToken,
    RequestExpired,
    SignatureDoesNotMatch,
    SignedRequest,
    check_head,
    check_signature,
    join_headers,
    sign,
)
from support.sqs_signing import signed_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

URL = "http://localhost:9324/"
KEY, SECRET = "MQAKEXAMPLE", "secret/+="

Pairs = list[tuple[str, str]]


def check(
    url: str,
    headers: Sequence[tuple[str, str]],
    body: bytes = b"{}",
    secret: str = SECRET,
    method: str = "POST",
) -> str:
    """Check a request as the endpoint does; its access key."""
    joined = join_headers((name.encode(), value.encode("latin-1")) for name, value in headers)
    parts = urlsplit(url)
    authorization = check_head(joined, parts.query, datetime.now(UTC))
    digest = hashlib.sha256(body).hexdigest()
    check_signature(SignedRequest(method, parts.path, parts.query, joined, digest), authorization, secret)
    return authorization.access_key


def changed(headers: Pairs, name: str, value: str | None) -> Pairs:
    """The headers with another value of one, or without it."""
    kept = [(each, text) for each, text in headers if each.lower() != name]
    return kept if value is None else [*kept, (name, value)]


PARTS = st.text(st.sampled_from("aZ09-_.~ /%+=&:*ü,\u20ac"), max_size=6)


@given(
    path=st.lists(PARTS, max_size=4),
    query=st.lists(st.tuples(PARTS, PARTS), max_size=4),
    body=st.binary(max_size=20),
    value=st.text(st.sampled_from("ab ,\t"), min_size=1, max_size=8),
)
def test_a_request_that_botocore_signed_is_accepted_and_another_body_is_not(
    path: list[str], query: list[tuple[str, str]], body: bytes, value: str
) -> None:
    url = "http://localhost:9324/" + "/".join(quote(part, safe="/-_.~") for part in path)
    if query:
        url += "?" + "&".join(
            f"{quote(name, safe='-_.~')}={quote(each, safe='-_.~')}" for name, each in query
        )
    headers = signed_headers(url, KEY, SECRET, body, more=[("x-other", value)])
    assert check(url, headers, body) == KEY
    for wrong in (
        lambda: check(url, headers, body + b"x"),
        lambda: check(url, headers, body, secret="other"),
        lambda: check(url, headers, body, method="GET"),
    ):
        with pytest.raises(SignatureDoesNotMatch):
            wrong()


def test_a_changed_query_or_path_is_refused() -> None:
    url = URL + "queue?Action=ListQueues"
    headers = signed_headers(url, KEY, SECRET)
    check(url, headers)
    for other in (URL + "queue?Action=PurgeQueue", URL + "other?Action=ListQueues", url + "&a=b"):
        with pytest.raises(SignatureDoesNotMatch):
            check(other, headers)


@pytest.mark.parametrize("name", ["x-amz-target", "x-amz-date", "host", "content-type", "x-other"])
def test_a_signed_header_cannot_be_changed_removed_or_repeated(name: str) -> None:
    headers = signed_headers(URL, KEY, SECRET, more=[("x-other", "a  b")])
    (value,) = (text for each, text in headers if each.lower() == name)
    assert check(URL, headers) == KEY
    for wrong in (
        changed(headers, name, value + "x"),
        changed(headers, name, None),
        [*headers, (name, "again")],
        [(name, "before"), *headers],
    ):
        with pytest.raises(SignatureDoesNotMatch):
            check(URL, wrong)


def test_a_header_that_decides_the_request_is_there_once_although_it_was_signed_twice() -> None:
    twice = [("x-amz-target", "AmazonSQS.ListQueues"), ("x-amz-target", "AmazonSQS.PurgeQueue")]
    headers = signed_headers(URL, KEY, SECRET, action="", more=twice)
    with pytest.raises(SignatureDoesNotMatch, match="more than once"):
        check(URL, headers)


@pytest.mark.parametrize("name", ["x-amz-target", "x-amz-security-token", "x-amz-content-sha256"])
def test_a_header_of_amazon_has_to_be_signed(name: str) -> None:
    headers = signed_headers(URL, KEY, SECRET, action="")
    check(URL, headers)
    with pytest.raises(SignatureDoesNotMatch, match="does not cover"):
        check(URL, [*headers, (name, "injected")])


def test_the_host_has_to_be_signed() -> None:
    headers = signed_headers(URL, KEY, SECRET)
    (value,) = (text for each, text in headers if each == "Authorization")
    with pytest.raises(SignatureDoesNotMatch, match="does not cover"):
        check(URL, changed(headers, "authorization", value.replace("host;", "")))


def test_a_stated_hash_has_to_be_that_of_the_body() -> None:
    right = hashlib.sha256(b"{}").hexdigest()
    check(URL, signed_headers(URL, KEY, SECRET, more=[("x-amz-content-sha256", right)]))
    for wrong in ("UNSIGNED-PAYLOAD", hashlib.sha256(b"").hexdigest()):
        with pytest.raises(SignatureDoesNotMatch):
            check(URL, signed_headers(URL, KEY, SECRET, more=[("x-amz-content-sha256", wrong)]))


def signed_by_hand(signed: list[str], **more: str) -> Pairs:
    """Headers whose signature is right for these names of signed headers."""
    sent = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": "localhost", "x-amz-date": sent, **{n.replace("_", "-"): v for n, v in more.items()}}
    digest = hashlib.sha256(b"{}").hexdigest()
    signature = sign(SignedRequest("POST", "/", "", headers, digest), SECRET, "us-east-1", signed, sent)
    scope = f"{KEY}/{sent[:8]}/us-east-1/sqs/aws4_request"
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
    return list(headers.items())


def test_a_stated_hash_of_another_body_is_refused_although_the_signature_is_that_of_the_body() -> None:
    signed = ["host", "x-amz-content-sha256", "x-amz-date"]
    right = hashlib.sha256(b"{}").hexdigest()
    assert check(URL, signed_by_hand(signed, x_amz_content_sha256=right)) == KEY
    with pytest.raises(SignatureDoesNotMatch):
        check(URL, signed_by_hand(signed, x_amz_content_sha256="UNSIGNED-PAYLOAD"))


@pytest.mark.parametrize(
    "signed",
    [
        ["x-amz-date", "host"],
        ["host", "host", "x-amz-date"],
        ["host", "x-absent", "x-amz-date"],
    ],
)
def test_signed_headers_are_those_of_the_request_sorted_each_once(signed: list[str]) -> None:
    assert check(URL, signed_by_hand(["host", "x-amz-date"])) == KEY
    with pytest.raises(SignatureDoesNotMatch, match="SignedHeaders"):
        check(URL, signed_by_hand(signed))


@pytest.mark.parametrize("age", [timedelta(minutes=16), -timedelta(minutes=16)])
def test_an_old_or_future_date_is_refused(age: timedelta) -> None:
    check(URL, signed_headers(URL, KEY, SECRET, age=age * 0.8))
    with pytest.raises(RequestExpired):
        check(URL, signed_headers(URL, KEY, SECRET, age=age))


def test_a_presigned_request_is_refused_with_and_without_a_header() -> None:
    query = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=key&X-Amz-Signature=00"
    with pytest.raises(MissingAuthenticationToken, match="Presigned"):
        check(f"{URL}?{query}", signed_headers(f"{URL}?{query}", KEY, SECRET))
    with pytest.raises(MissingAuthenticationToken, match="Presigned"):
        check(f"{URL}?{query}", [("host", "localhost")])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256"),
        ("/sqs/", "/s3/"),
        ("aws4_request", "aws4"),
        ("host;", "host;host;"),
        ("Signature=", "Signature=z"),
        (KEY, "k" * 129),
        (KEY, ""),
    ],
)
def test_another_scope_or_a_malformed_header_is_refused(old: str, new: str) -> None:
    headers = signed_headers(URL, KEY, SECRET)
    (value,) = (text for each, text in headers if each == "Authorization")
    with pytest.raises((MissingAuthenticationToken, SignatureDoesNotMatch)):
        check(URL, changed(headers, "authorization", value.replace(old, new)))


@pytest.mark.parametrize("date", ["", "20260101", "20261301T000000Z", "2026111T1T111Z", "²0260101T000000Z"])
def test_a_malformed_date_is_refused(date: str) -> None:
    headers = changed(signed_headers(URL, KEY, SECRET), "x-amz-date", date)
    with pytest.raises(SignatureDoesNotMatch):
        check(URL, headers)
