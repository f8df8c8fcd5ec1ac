"""Messages of a queue as records of its topic, so that Kafka clients read them, too.

    value                  body, UTF-8
    key                    MessageGroupId
    sqs-attribute-NAME     DataType ":" content of a message attribute
    sqs-trace-header       AWSTraceHeader
    mansio-dedup-id        id for deduplication, of a FIFO queue (made of MessageDeduplicationId)
    sqs-deduplication-id   MessageDeduplicationId, of a FIFO queue

The message id is made of the topic and the offset in the response to the producer, so that a repeat gets the id of the
first message, a delayed message keeps its id, and records of Kafka clients have one. A dead letter has the id, body and
attributes of the message it is a copy of.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mansio.api.sqs.queues.queue_errors import InvalidMessageContents, InvalidParameterValue
from mansio.wire.batch.delay_headers import DELAYED_ID_HEADER, ORIGINAL_TIMESTAMP_HEADER
from mansio.wire.internal_records.dead_letter_headers import (
    KAFKA_HEADER_PREFIX,
    MANSIO_HEADER_PREFIX,
    parse_dead_letter_headers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.broker.coordinator.share.received_records import ReceivedRecord
    from mansio.wire.batch.record_batch import Header

ATTRIBUTE_PREFIX: Final = "sqs-attribute-"
TRACE_HEADER: Final = "sqs-trace-header"
DEDUPLICATION_ID_HEADER: Final = "sqs-deduplication-id"

ATTRIBUTES_MAX: Final = 10
_ATTRIBUTE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_DATA_TYPE: Final = re.compile(r"(String|Number|Binary)(\.[^:\x00-\x1f]{1,240})?")
_NUMBER: Final = re.compile(r"\s*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?\s*")
_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class MessageAttribute:
    """One attribute of a message. `content`: text as UTF-8, or bytes if `data_type` begins with Binary."""

    data_type: str
    content: bytes

    @property
    def is_binary(self) -> bool:
        return self.data_type.startswith("Binary")


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. `receipt_handle`: names this delivery. `dead_letter_source`: name of the queue from which a
    dead letter comes, "" if it is none."""

    message_id: str
    receipt_handle: str
    body: str
    receive_count: int
    sent_ms: int
    partition: int
    offset: int
    group_id: str | None = None
    deduplication_id: str | None = None
    trace_header: str | None = None
    dead_letter_source: str = ""
    attributes: Mapping[str, MessageAttribute] = field(default_factory=dict)


def message_id(topic_id: bytes, partition: int, offset: int) -> str:
    """Return the id of the message that was stored at an offset."""
    digest = hashlib.blake2b(b"%s/%d/%d" % (topic_id, partition, offset), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest, version=4))


def check_body(body: str) -> bytes:
    """Return the body as UTF-8. Raises `InvalidMessageContents`."""
    if _FORBIDDEN.search(body):
        raise InvalidMessageContents(
            "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to "
            "#xD7FF | #xE000 to #xFFFD | #x10000 to #x10FFFF"
        )
    return body.encode()


def check_attribute(name: str, data_type: str, content: str | bytes | None) -> MessageAttribute:
    """Return a message attribute of a request. Raises `InvalidParameterValue`."""
    if not _ATTRIBUTE_NAME.fullmatch(name) or ".." in name or name.startswith(".") or name.endswith("."):
        raise InvalidParameterValue(
            f"The message attribute name '{name[:256]}' is invalid. Attribute name can contain A-Z, a-z, 0-9, "
            "underscore (_), hyphen (-), and period (.) characters."
        )
    if name.lower().startswith(("aws.", "amazon.")):
        raise InvalidParameterValue(f"The message attribute name {name!r} is reserved for use by AWS.")
    match = _DATA_TYPE.fullmatch(data_type)
    if match is None or _FORBIDDEN.search(data_type):
        raise InvalidParameterValue(
            f"The message attribute '{name}' has an invalid message attribute type, the set of supported type prefixes "
            "is Binary, Number, and String."
        )
    is_binary = match.group(1) == "Binary"
    if not content or isinstance(content, bytes) is not is_binary:
        raise InvalidParameterValue(
            f"The message attribute '{name}' must contain a non-empty value of type '{data_type[:100]}'."
        )
    if isinstance(content, bytes):
        return MessageAttribute(data_type, content)
    if match.group(1) == "Number" and not _NUMBER.fullmatch(content):
        raise InvalidParameterValue(f"Can't cast the value of message (user) attribute '{name}' to a number.")
    return MessageAttribute(data_type, check_body(content))


def attributes_md5(attributes: Mapping[str, MessageAttribute]) -> str:
    """Return the MD5 digest of message attributes as SDKs check it ("Calculating the MD5 message digest for message
    attributes" in the developer guide)."""
    digest = hashlib.md5(usedforsecurity=False)
    for name in sorted(attributes):
        one = attributes[name]
        for part in (name.encode(), one.data_type.encode()):
            digest.update(_LENGTH.pack(len(part)) + part)
        digest.update(b"\x02" if one.is_binary else b"\x01")
        digest.update(_LENGTH.pack(len(one.content)) + one.content)
    return digest.hexdigest()


def size_bytes(body: bytes, attributes: Mapping[str, MessageAttribute]) -> int:
    """Return the size of a message that counts for its limit."""
    return len(body) + sum(
        len(name.encode()) + len(one.data_type) + len(one.content) for name, one in attributes.items()
    )


def record_headers(
    attributes: Mapping[str, MessageAttribute], trace_header: str | None, deduplication_id: str | None
) -> list[Header]:
    """Return the headers of the record of a message."""
    headers: list[Header] = [
        (ATTRIBUTE_PREFIX + name, one.data_type.encode() + b":" + one.content)
        for name, one in attributes.items()
    ]
    if trace_header is not None:
        headers.append((TRACE_HEADER, trace_header.encode()))
    if deduplication_id is not None:
        headers.append((DEDUPLICATION_ID_HEADER, deduplication_id.encode()))
    return headers


def message_of(record: ReceivedRecord, receipt_handle: str) -> Message:
    """Return the message that a record is. A value that is not UTF-8, of a Kafka client, is returned in Base64."""
    headers = dict(record.headers)
    topic_id, partition, offset, source = record.topic_id, record.partition, record.offset, ""
    letter = parse_dead_letter_headers(record.headers)
    if letter is not None:
        topic_id, partition, offset, source = letter.topic_id, letter.partition, letter.offset, letter.topic
        headers = dict(_without_dead_letter_headers(record.headers))
    if (delayed := headers.get(DELAYED_ID_HEADER)) is not None and delayed.isdigit():
        offset = int(delayed)
    sent_ms = record.timestamp_ms
    if (original := headers.get(ORIGINAL_TIMESTAMP_HEADER)) is not None and original.isdigit():
        sent_ms = int(original)
    return Message(
        message_id(topic_id, partition, offset),
        receipt_handle,
        _decode(record.value or b""),
        record.delivery_count,
        sent_ms,
        partition,
        offset,
        None if record.key is None else _decode(record.key),
        _optional(headers, DEDUPLICATION_ID_HEADER),
        _optional(headers, TRACE_HEADER),
        source,
        dict(_attributes(headers)),
    )


def _without_dead_letter_headers(headers: Sequence[Header]) -> Iterable[Header]:
    for name, content in headers:
        if not name.startswith((KAFKA_HEADER_PREFIX, MANSIO_HEADER_PREFIX)):
            yield name, content


def _attributes(headers: Mapping[str, bytes | None]) -> Iterable[tuple[str, MessageAttribute]]:
    for name, content in headers.items():
        if name.startswith(ATTRIBUTE_PREFIX) and content is not None:
            data_type, colon, value = content.partition(b":")
            if colon and _DATA_TYPE.fullmatch(_decode(data_type)):
                yield name.removeprefix(ATTRIBUTE_PREFIX), MessageAttribute(_decode(data_type), value)


def _optional(headers: Mapping[str, bytes | None], name: str) -> str | None:
    content = headers.get(name)
    return None if content is None else _decode(content)


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return base64.b64encode(content).decode()


def decode_binary(text: str, name: str) -> bytes:
    """Decode the Base64 of a binary attribute. Raises `InvalidParameterValue`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterValue(f"The message attribute '{name}' is not Base64.") from error
