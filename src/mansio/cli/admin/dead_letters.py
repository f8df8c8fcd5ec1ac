"""Dead letters as the command line sees them: which topics have them, what each says of itself, which are meant."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import UnknownTopicOrPartition

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from mansio.client import Client
    from mansio.client.types import Message, TopicPartition

DLQ_ENABLE_CONFIG: Final = "errors.deadletterqueue.group.enable"
TOPIC_PREFIX: Final = "dlq."
"""What brokers put in front of a topic's name, where they are not told another."""

KAFKA_HEADER_PREFIX: Final = "__dlq.errors."
MANSIO_HEADER_PREFIX: Final = "mansio-dlq-"
REDRIVE_HEADER: Final = "mansio-redrive-id"

FILTER_HELP: Final = (
    "key=VALUE, group=NAME, topic=NAME (where the record was), reason=TEXT, consumer=ID, or header.NAME=VALUE"
)
FILTERS: Final = ("key", "group", "topic", "reason", "consumer")


class DeadLetter(NamedTuple):
    """One dead letter. `topic`, `partition`, `offset` are where the record was, and `topic_id` which topic that is;
    `has_value`: whether it carries the record."""

    message: Message
    group: str
    topic: str
    topic_id: bytes
    partition: int
    offset: int
    deliveries: int
    reason: str
    consumer: str
    dead_lettered_ms: int
    dead_letter_id: str
    has_value: bool


def parse_dead_letter(message: Message) -> DeadLetter | None:
    """What a record of a dead-letter topic says; None for one that no broker of Mansio has put there."""
    dead_letter_id = _text(message, f"{MANSIO_HEADER_PREFIX}id")
    try:
        uuid = dead_letter_id.rsplit("/", 4)[1]
        return DeadLetter(
            message,
            _text(message, f"{KAFKA_HEADER_PREFIX}group"),
            _text(message, f"{KAFKA_HEADER_PREFIX}topic"),
            base64.urlsafe_b64decode(uuid + "=="),
            int(_text(message, f"{KAFKA_HEADER_PREFIX}partition")),
            int(_text(message, f"{KAFKA_HEADER_PREFIX}offset")),
            int(_text(message, f"{KAFKA_HEADER_PREFIX}delivery.count")),
            _text(message, f"{MANSIO_HEADER_PREFIX}reason")
            or _text(message, f"{KAFKA_HEADER_PREFIX}message"),
            _text(message, f"{MANSIO_HEADER_PREFIX}consumer"),
            int(_text(message, f"{MANSIO_HEADER_PREFIX}first-ms")),
            dead_letter_id,
            message.header(f"{MANSIO_HEADER_PREFIX}value-omitted") is None,
        )
    except (ValueError, IndexError, binascii.Error):
        return None


def _text(message: Message, name: str) -> str:
    return (message.header(name) or b"").decode(errors="replace")


def original_headers(message: Message) -> list[tuple[str, bytes | None]]:
    """The headers that the record had: all but those that it got as a dead letter."""
    return [
        (name, value)
        for name, value in message.headers
        if not name.startswith((KAFKA_HEADER_PREFIX, MANSIO_HEADER_PREFIX)) and name != REDRIVE_HEADER
    ]


class Filter(NamedTuple):
    """Which letters are meant: those that have this value there."""

    name: str
    value: str

    def matches(self, dead_letter: DeadLetter) -> bool:
        if self.name.startswith("header."):
            return dead_letter.message.header(self.name.removeprefix("header.")) == self.value.encode()
        if self.name == "key":
            return dead_letter.message.key == self.value.encode()
        return bool(getattr(dead_letter, self.name) == self.value)


def parse_filter(text: str) -> Filter:
    """Read `NAME=VALUE`. Raises `ValueError`."""
    name, equals, value = text.partition("=")
    if not equals or (
        name not in FILTERS and not (name.startswith("header.") and len(name) > len("header."))
    ):
        raise ValueError(f"{text!r} is none of: {FILTER_HELP}")
    return Filter(name, value)


def parse_position(text: str) -> tuple[int, int]:
    """Read `PARTITION:OFFSET`. Raises `ValueError`."""
    partition, colon, offset = text.partition(":")
    if not colon or not (partition.isdecimal() and offset.isdecimal()):
        raise ValueError(f"{text!r} is not PARTITION:OFFSET of a dead letter, such as 0:42")
    return int(partition), int(offset)


async def list_dead_letter_topics(client: Client) -> list[str]:
    """All topics that take dead letters, by name."""
    return [name for name in await client.admin.list_topics() if await _is_dead_letter_topic(client, name)]


async def _is_dead_letter_topic(client: Client, name: str) -> bool:
    entry = (await client.admin.describe_config(name)).get(DLQ_ENABLE_CONFIG)
    return entry is not None and entry.value == "true"


async def resolve_dead_letter_topic(client: Client, name: str) -> str:
    """The dead-letter topic that is meant: it is named, or the topic whose records it has is.

    Raises `UnknownTopicOrPartition`.
    """
    known = await client.admin.list_topics()
    for candidate in (name, f"{TOPIC_PREFIX}{name}"):
        if candidate in known and await _is_dead_letter_topic(client, candidate):
            return candidate
    if name in known:
        raise UnknownTopicOrPartition(f"topic {name} has no dead letters; `mansio dlq list` shows which do")
    raise UnknownTopicOrPartition(f"there is no topic {name}")


async def read_dead_letters(
    client: Client,
    topic: str,
    *,
    partitions: Sequence[int] = (),
    filters: Sequence[Filter] = (),
    positions: Sequence[tuple[int, int]] = (),
    starts: dict[TopicPartition, int] | None = None,
) -> AsyncGenerator[DeadLetter, None]:
    """The letters there are now that fit all filters and lie in one of the places, if any are named."""
    from mansio.client.types import TopicPartition

    sources = [TopicPartition(topic, index) for index in partitions] or topic
    wanted = frozenset(positions)
    async with client.consume(sources, from_=starts or "earliest", to_end=True) as consumer:
        async for batch in consumer.batches():
            for message in batch:
                if wanted and (message.partition, message.offset) not in wanted:
                    continue
                dead_letter = parse_dead_letter(message)
                if dead_letter is not None and all(one.matches(dead_letter) for one in filters):
                    yield dead_letter
