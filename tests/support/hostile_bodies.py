"""Hostile bodies for every protocol: small requests from which a careless server builds millions of objects.

Each has a name and is sent by `send`, which returns the status or error of the answer, "closed" for none.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import grpc

from mansio.wire.api_versions import REQUEST_ITEMS_MAX
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.testing import TestBroker

BATCH: Final = "/v1/topics/hostile/records/batch"
ANSWER_S_MAX: Final = 120.0


class HostileBody(NamedTuple):
    """One kind of request. `make` returns the body; `is_refused`: whether an error is the only right answer."""

    name: str
    protocol: str
    target: str
    make: Callable[[], bytes]
    is_refused: bool = True


class Addresses(NamedTuple):
    """Listeners of a broker, as host:port."""

    kafka: str
    http: str
    sqs: str
    grpc: str

    @classmethod
    def of(cls, broker: TestBroker) -> Addresses:
        return cls(
            broker.bootstrap_servers,
            urlsplit(broker.http_url).netloc,
            urlsplit(broker.sqs_url).netloc,
            broker.grpc_address,
        )


def records(content: bytes) -> bytes:
    """Return a batch with this list of records."""
    return b'{"records":[' + content + b"]}"


def varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def field(number: int, content: bytes) -> bytes:
    """Return a field with bytes of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def kafka_request(key: int, version: int, body: bytes, *, is_flexible: bool) -> bytes:
    """Return a request with its header."""
    return struct.pack(">hhih", key, version, 7, 1) + b"c" + (b"\0" if is_flexible else b"") + body


def kafka_text(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def compact_text(text: bytes) -> bytes:
    return varint(len(text) + 1) + text


ITEMS: Final = REQUEST_ITEMS_MAX - 10
"""Items of a Kafka request that is not refused."""
METADATA, OFFSET_FETCH, CREATE_TOPICS, PRODUCE, FETCH, LIST_OFFSETS, DESCRIBE_CONFIGS = 3, 9, 19, 0, 1, 2, 32

HTTP: Final = (
    HostileBody("empty records", "http", BATCH, lambda: records(b"{}," * 5_500_000 + b"{}")),
    HostileBody("empty records in gzip", "gzip", BATCH, lambda: records(b"{}," * 10_900_000 + b"{}")),
    HostileBody("empty records in short gzip", "gzip", BATCH, lambda: records(b"{}," * 1_000_000 + b"{}")),
    HostileBody(
        "unknown members",
        "http",
        BATCH,
        lambda: b'{"records":[],' + b",".join(b'"%d":1' % each for each in range(1_000_000)) + b"}",
    ),
    HostileBody(
        "unknown members of a record",
        "http",
        BATCH,
        lambda: records(b"{" + b",".join(b'"%d":1' % each for each in range(1_000_000)) + b"}"),
    ),
    HostileBody(
        "unknown members up to a piece",
        "http",
        BATCH,
        lambda: records(b"{" + b",".join(b'"%d":1' % each for each in range(29_000)) + b"}"),
    ),
    HostileBody(
        "a list of lists", "http", BATCH, lambda: records(b'{"json":[' + b"[]," * 5_000_000 + b"1]}")
    ),
    HostileBody("nested lists", "http", BATCH, lambda: records(b'{"json":' + b"[" * 8_000_000)),
    HostileBody(
        "nested objects", "http", BATCH, lambda: records(b'{"json":' + b'{"a":' * 3_000_000 + b"1" + b"}" * 9)
    ),
    HostileBody("a long string", "http", BATCH, lambda: records(b'{"value":"' + b"x" * 15_000_000 + b'"}')),
    HostileBody("escapes", "http", BATCH, lambda: records(b'{"value":"' + b'\\"' * 8_000_000 + b'"}')),
    HostileBody(
        "a string without end", "http", BATCH, lambda: b'{"records":[{"value":"' + b"\\\\" * 8_000_000
    ),
    HostileBody("white space", "http", BATCH, lambda: records(b" " * 16_000_000)),
    HostileBody("a long key", "http", BATCH, lambda: records(b'{"' + b"k" * 15_000_000 + b'":1}')),
    HostileBody("digits", "http", BATCH, lambda: records(b'{"json":' + b"1" * 15_000_000 + b"}")),
    HostileBody(
        "empty receipts", "http", "/v1/groups/g/ack", lambda: b'{"receipts":[' + b'"",' * 4_000_000 + b'""]}'
    ),
    HostileBody(
        "settings of a topic",
        "http",
        "/v1/topics",
        lambda: b'{"name":"n","config":{' + b",".join(b'"%d":"1"' % each for each in range(900_000)) + b"}}",
    ),
    HostileBody("announced and not sent", "announced", BATCH, lambda: b""),
    HostileBody(
        "ten thousand records with lists",
        "http",
        BATCH,
        lambda: records(b",".join([b'{"json":[' + b"1," * 700 + b"1]}"] * 10_000)),
        is_refused=False,
    ),
    HostileBody(
        "ten thousand records with keys and headers",
        "http",
        BATCH,
        lambda: json.dumps(
            {
                "records": [
                    {"value": "v" * 100, "key": str(n), "headers": {"a": "b", "c": "d"}}
                    for n in range(10_000)
                ]
            }
        ).encode(),
        is_refused=False,
    ),
)
ENTRIES: Final = b'{"QueueUrl":"http://localhost/queue","Entries":['
SQS: Final = (
    HostileBody("empty entries", "sqs", "SendMessageBatch", lambda: ENTRIES + b"{}," * 5_000_000 + b"{}]}"),
    HostileBody(
        "entries up to a piece", "sqs", "DeleteMessageBatch", lambda: ENTRIES + b"{}," * 80_000 + b"{}]}"
    ),
    HostileBody(
        "unknown members",
        "sqs",
        "SendMessage",
        lambda: b"{" + b",".join(b'"%d":1' % each for each in range(1_000_000)) + b"}",
    ),
    HostileBody("nested lists", "sqs", "SendMessage", lambda: b'{"MessageBody":' + b"[" * 3_000_000),
    HostileBody(
        "a long string", "sqs", "SendMessage", lambda: b'{"MessageBody":"' + b"\\u0041" * 2_000_000 + b'"}'
    ),
    HostileBody(
        "a long string up to the limit",
        "sqs",
        "SendMessage",
        lambda: b'{"MessageBody":"' + b"\\u0041" * 690_000 + b'"}',
    ),
    HostileBody("parameters", "form", "", lambda: b"Action=SendMessageBatch" + b"&a=1" * 3_000_000),
    HostileBody("percent", "form", "", lambda: b"Action=SendMessage&MessageBody=" + b"%41" * 5_000_000),
    HostileBody(
        "percent up to the limit", "form", "", lambda: b"Action=SendMessage&MessageBody=" + b"%41" * 1_390_000
    ),
    HostileBody(
        "percent up to a piece", "form", "", lambda: b"Action=SendMessage&MessageBody=" + b"%41" * 87_000
    ),
    HostileBody("dots", "form", "", lambda: b"Action=SendMessage&" + b"a." * 100_000 + b"=1"),
)
GRPC: Final = (
    HostileBody("empty records", "grpc", "Publish", lambda: b"\x12\x00" * 1_000_000),
    HostileBody("many empty records", "grpc", "Publish", lambda: b"\x12\x00" * 16_000_000),
    HostileBody("empty records of a small request", "grpc", "Publish", lambda: b"\x12\x00" * 60_000),
    HostileBody("long tags", "grpc", "Publish", lambda: b"\x92\x80\x80\x00\x00" * 3_000_000),
    HostileBody("unknown fields", "grpc", "Publish", lambda: b"\x7a\x00" * 16_000_000),
    HostileBody("headers of a record", "grpc", "Publish", lambda: field(2, b"\x1a\x00" * 8_000_000)),
    HostileBody(
        "headers of a small request",
        "grpc",
        "Publish",
        lambda: field(1, b"t") + field(2, b"\x1a\x00" * 65_000),
    ),
    HostileBody("headers of many records", "grpc", "Publish", lambda: field(2, b"\x1a\x00" * 1_000) * 9_000),
    HostileBody(
        "unknown fields of records", "grpc", "Publish", lambda: field(2, b"\x7a\x00" * 1_500) * 9_999, False
    ),
    HostileBody("announced and not sent", "grpc", "Publish", lambda: b"\x12\xff\xff\xff\x7f"),
    HostileBody("receipts", "grpc", "Ack", lambda: b"\x12\x00" * 5_000_000),
    HostileBody("receipts of a small request", "grpc", "Ack", lambda: b"\x12\x00" * 65_000),
    HostileBody("retries", "grpc", "Retry", lambda: b"\x12\x00" * 5_000_000),
    HostileBody("topics", "grpc", "ResetGroupOffsets", lambda: b"\x12\x00" * 65_000 + b"\x18\x01"),
    HostileBody("packed numbers", "grpc", "ListTransactions", lambda: field(2, b"\x01" * 16_000_000)),
    HostileBody(
        "packed numbers of a small request", "grpc", "ListTransactions", lambda: field(2, b"\x01" * 130_000)
    ),
    HostileBody(
        "ten thousand records with keys and headers",
        "grpc",
        "Publish",
        lambda: (
            field(1, b"hostile")
            + field(2, field(1, b"v" * 100) + field(2, b"k") + field(3, field(1, b"a")) * 3) * 10_000
        ),
        is_refused=False,
    ),
)
KAFKA: Final = (
    HostileBody(
        "announced topics",
        "kafka",
        "",
        lambda: kafka_request(METADATA, 4, b"\x7f\xff\xff\xff", is_flexible=False),
    ),
    HostileBody(
        "empty topics",
        "kafka",
        "",
        lambda: kafka_request(
            METADATA, 4, struct.pack(">i", 7_000_000) + b"\0\0" * 7_000_000 + b"\0", is_flexible=False
        ),
    ),
    HostileBody(
        "topics of a metadata request",
        "kafka",
        "",
        lambda: kafka_request(
            METADATA,
            4,
            struct.pack(">i", ITEMS) + b"".join(kafka_text(b"%d" % each) for each in range(ITEMS)) + b"\0",
            is_flexible=False,
        ),
        is_refused=False,
    ),
    HostileBody(
        "unknown tagged fields",
        "kafka",
        "",
        lambda: kafka_request(
            METADATA,
            9,
            b"\x01\0\0\0"
            + varint(4_000_000)
            + b"".join(varint(9 + each % 9) + b"\0" for each in range(4_000_000)),
            is_flexible=True,
        ),
    ),
    HostileBody(
        "tagged fields of the header",
        "kafka",
        "",
        lambda: (
            struct.pack(">hhih", METADATA, 9, 7, 1)
            + b"c"
            + varint(4_000_000)
            + b"\x09\0" * 4_000_000
            + b"\x01\0\0\0\0"
        ),
    ),
    HostileBody(
        "partitions of an offset fetch",
        "kafka",
        "",
        lambda: kafka_request(
            OFFSET_FETCH,
            5,
            kafka_text(b"g")
            + struct.pack(">i", 1)
            + kafka_text(b"t")
            + struct.pack(">i", ITEMS)
            + b"\0\0\0\1" * ITEMS,
            is_flexible=False,
        ),
        is_refused=False,
    ),
    HostileBody(
        "partitions of a fetch",
        "kafka",
        "",
        lambda: kafka_request(
            FETCH,
            4,
            struct.pack(">iiiibi", -1, 100, 1, 1000, 0, 1)
            + kafka_text(b"t")
            + struct.pack(">i", 900_000)
            + struct.pack(">iqi", 1, 0, 1) * 900_000,
            is_flexible=False,
        ),
        is_refused=False,
    ),
    HostileBody(
        "topics of a produce",
        "kafka",
        "",
        lambda: kafka_request(
            PRODUCE,
            3,
            b"\xff\xff"
            + struct.pack(">hii", -1, 1000, 2_000_000)
            + (kafka_text(b"") + b"\0\0\0\0") * 2_000_000,
            is_flexible=False,
        ),
        is_refused=False,
    ),
    HostileBody(
        "partitions of a produce",
        "kafka",
        "",
        lambda: kafka_request(
            PRODUCE,
            3,
            b"\xff\xff"
            + struct.pack(">hii", -1, 1000, 1)
            + kafka_text(b"t")
            + struct.pack(">i", 1_000_000)
            + struct.pack(">ii", 0, 0) * 1_000_000,
            is_flexible=False,
        ),
        is_refused=False,
    ),
    HostileBody(
        "partitions of list offsets",
        "kafka",
        "",
        lambda: kafka_request(
            LIST_OFFSETS,
            1,
            struct.pack(">ii", -1, 1)
            + kafka_text(b"t")
            + struct.pack(">i", ITEMS)
            + struct.pack(">iq", 1, -1) * ITEMS,
            is_flexible=False,
        ),
        is_refused=False,
    ),
    HostileBody(
        "resources of describe configs",
        "kafka",
        "",
        lambda: kafka_request(
            DESCRIBE_CONFIGS,
            1,
            struct.pack(">i", ITEMS) + (b"\x02" + kafka_text(b"t") + b"\xff\xff\xff\xff") * ITEMS + b"\0",
            is_flexible=False,
        ),
        is_refused=False,
    ),
)
ALL: Final = HTTP + SQS + GRPC + KAFKA


def send(at: Addresses, hostile: HostileBody, body: bytes) -> str:
    """Send a body; return the status of the answer, "closed" if the connection was closed instead."""
    try:
        if hostile.protocol == "kafka":
            return send_kafka(at.kafka, body)
        if hostile.protocol == "grpc":
            return _send_grpc(at.grpc, hostile.target, body)
        return _send_http(at, hostile, body)
    except (ConnectionError, http.client.HTTPException):
        return "closed"


def _send_http(at: Addresses, hostile: HostileBody, body: bytes) -> str:
    headers = {"content-type": "application/json"}
    address, path = at.http, hostile.target
    if hostile.protocol == "gzip":
        body = gzip.compress(body)
        headers["content-encoding"] = "gzip"
    elif hostile.protocol == "announced":
        headers["content-length"] = str(200 << 20)
    elif hostile.protocol in ("sqs", "form"):
        address, path = at.sqs, "/"
        headers = {
            "content-type": "application/x-amz-json-1.0",
            "x-amz-target": f"AmazonSQS.{hostile.target}",
        }
        if hostile.protocol == "form":
            headers = {"content-type": "application/x-www-form-urlencoded", "authorization": "x"}
    connection = http.client.HTTPConnection(address, timeout=scaled(ANSWER_S_MAX))
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def _send_grpc(address: str, method: str, body: bytes) -> str:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        call = channel.unary_unary(f"/mansio.v1.Mansio/{method}")
        try:
            call(body, timeout=scaled(ANSWER_S_MAX))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def send_kafka(address: str, body: bytes) -> str:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(ANSWER_S_MAX)) as connection:
        connection.sendall(struct.pack(">i", len(body)) + body)
        head = connection.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return "closed"
        (left,) = struct.unpack(">i", head)
        while left and (part := connection.recv(min(left, 1 << 20))):
            left -= len(part)
    return "answered"
