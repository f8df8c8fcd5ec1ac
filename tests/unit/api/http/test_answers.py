"""Answers in pieces are those of one call of the encoder, whatever is in the records."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from mansio.api import record_pieces
from mansio.api.grpc import answers as grpc_answers
from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.http.v1 import answers
from mansio.api.http.v1.values import encode_headers, encode_key, encode_value
from mansio.client.types import Message
from support.tiers import examples

if TYPE_CHECKING:
    from starlette.responses import Response

CONTENT = st.one_of(
    st.none(),
    st.binary(max_size=12),
    st.text(max_size=8).map(lambda text: text.encode(errors="ignore")),
    st.sampled_from([b"[1,2,[3],{}]", b'{"a":"b"}', "\U0001f600ä".encode(), b"1" * 40, b"x" * 20 + b"\xff"]),
)
HEADERS = st.lists(st.tuples(st.sampled_from(["", "a", "name", "ä" * 9, "b"]), CONTENT), max_size=9)
RECORDS = st.lists(st.tuples(CONTENT, CONTENT, HEADERS), max_size=7)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (record_pieces, answers, grpc_answers):
        monkeypatch.setattr(module, "PIECE_BYTES", 6)
    for module in (record_pieces, answers):
        monkeypatch.setattr(module, "PIECE_HEADERS", 3)
    monkeypatch.setattr(record_pieces, "PIECE_RECORDS", 2)
    monkeypatch.setattr(grpc_answers, "_COPIED_BYTES", 3)


def messages(contents: list[Any]) -> list[Message]:
    return [
        Message("t", 3, offset, 7, key, value, tuple(headers))
        for offset, (key, value, headers) in enumerate(contents)
    ]


def fields(message: Message) -> dict[str, Any]:
    return {"offset": message.offset}


async def body(response: Response) -> bytes:
    if not hasattr(response, "body_iterator"):
        return bytes(response.body)
    return b"".join([piece async for piece in response.body_iterator])


@pytest.mark.parametrize("as_", ["auto", "text", "json", "base64"])
@settings(max_examples=examples(30, 500), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=RECORDS)
def test_json_in_pieces_is_that_of_one_call(as_: Any, contents: list[Any]) -> None:
    records = messages(contents)
    found = asyncio.run(body(answers.records_answer(records, as_, fields, {"more": [1]})))
    values = [
        {
            **fields(each),
            **encode_key(each.key),
            **encode_value(each.value, as_),
            "headers": encode_headers(each.headers),
        }
        for each in records
    ]
    assert found == to_json({"records": values, "more": [1]})


@settings(max_examples=examples(50, 1_000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=RECORDS)
def test_protobuf_in_pieces_is_that_of_one_call(contents: list[Any]) -> None:
    records = messages(contents)
    more = {"next_offset": 9, "unreadable": [pb.UnreadableOffsets(first=1, last=2, reason="r")]}

    def delivery(message: Message) -> tuple[str, int]:
        return f"receipt {message.offset}", message.offset

    pieces = partial(grpc_answers._pieces, pb.FetchResponse, records, delivery, more)
    found = pb.FetchResponse.FromString(grpc_answers._encoded(pieces))
    assert found == grpc_answers._response(pb.FetchResponse, records, delivery, more)


@pytest.mark.parametrize("value", [b"[" + b"[]," * 700_000 + b"1]", b"[" + b"1," * 60_000 + b"1]"])
def test_json_with_more_than_a_parser_may_build_at_once_is_returned_in_base64(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for module in (record_pieces, answers):
        monkeypatch.setattr(module, "PIECE_BYTES", 96 << 10)
    found = b"".join(answers.record_pieces(messages([(None, value, [])])[0], "json", {"offset": 0}))
    assert b'"base64":"W' in found
