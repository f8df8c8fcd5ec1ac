"""Codec of the headers that the broker adds to the copy of a dead-lettered record in a dead-letter topic.

Invariant: the headers of the original record come first and unchanged, so the last header of a name is the broker's.

Source: KIP-1191 (the headers `__dlq.errors.*`). Extensions: the headers `mansio-dlq-*`.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

KAFKA_HEADER_PREFIX: Final = "__dlq.errors."
MANSIO_HEADER_PREFIX: Final = "mansio-dlq-"

TOPIC_HEADER: Final = f"{KAFKA_HEADER_PREFIX}topic"
PARTITION_HEADER: Final = f"{KAFKA_HEADER_PREFIX}partition"
OFFSET_HEADER: Final = f"{KAFKA_HEADER_PREFIX}offset"
GROUP_HEADER: Final = f"{KAFKA_HEADER_PREFIX}group"
DELIVERY_COUNT_HEADER: Final = f"{KAFKA_HEADER_PREFIX}delivery.count"
MESSAGE_HEADER: Final = f"{KAFKA_HEADER_PREFIX}message"
ID_HEADER: Final = f"{MANSIO_HEADER_PREFIX}id"
CONSUMER_HEADER: Final = f"{MANSIO_HEADER_PREFIX}consumer"
FIRST_MS_HEADER: Final = f"{MANSIO_HEADER_PREFIX}first-ms"
REASON_HEADER: Final = f"{MANSIO_HEADER_PREFIX}reason"
VALUE_OMITTED_HEADER: Final = f"{MANSIO_HEADER_PREFIX}value-omitted"

REJECTED_MESSAGE: Final = "Offset rejected by client."
DELIVERIES_EXCEEDED_MESSAGE: Final = "Offset delivery count exceeded the threshold."


class DeadLetterHeaders(NamedTuple):
    """The decoded headers of one dead letter. `topic`, `topic_id`, `partition`, `offset`: position of the original
    record. `message`: Kafka's text, rejected or too many attempts. `reason`: the reason that the consumer gave; empty
    if it gave none. `has_value`: whether the dead letter contains the value of the original record.
    """

    group: str
    topic: str
    topic_id: bytes
    partition: int
    offset: int
    deliveries: int
    message: str
    reason: str
    consumer: str
    dead_lettered_ms: int
    dead_letter_id: str
    has_value: bool


def parse_dead_letter_headers(headers: Iterable[tuple[str, bytes | None]]) -> DeadLetterHeaders | None:
    """Decode the headers of a record of a dead-letter topic; None if the record was not written by a Mansio broker."""
    last = dict(headers)

    def text(name: str) -> str:
        return (last.get(name) or b"").decode(errors="replace")

    try:
        dead_letter_id = text(ID_HEADER)
        return DeadLetterHeaders(
            text(GROUP_HEADER),
            text(TOPIC_HEADER),
            base64.urlsafe_b64decode(dead_letter_id.rsplit("/", 4)[1] + "=="),
            int(text(PARTITION_HEADER)),
            int(text(OFFSET_HEADER)),
            int(text(DELIVERY_COUNT_HEADER)),
            text(MESSAGE_HEADER),
            text(REASON_HEADER),
            text(CONSUMER_HEADER),
            int(text(FIRST_MS_HEADER)),
            dead_letter_id,
            last.get(VALUE_OMITTED_HEADER) is None,
        )
    except (ValueError, IndexError, binascii.Error):
        return None


def dead_letter_id(group: str, topic_id: bytes, partition: int, offset: int, deliveries: int) -> str:
    """Return the unique id of a dead letter, `group/topic id/partition/offset/delivery count`."""
    uuid = base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()
    return f"{group}/{uuid}/{partition}/{offset}/{deliveries}"
