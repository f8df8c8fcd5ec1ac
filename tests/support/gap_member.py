"""Member of a group in a process of its own, which writes down when it was assigned partitions and received records.

    python -m support.gap_member KIND BOOTSTRAP GROUP TOPIC

It joins when it is sent a line, writes one `RECORD` per delivery and per partition that came or went to standard
output, and leaves its group when its standard input ends. Its clock is the machine's monotonic one, so that what
several processes write can be compared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RECORD = struct.Struct("<diq")
"""Seconds of the monotonic clock, partition, offset; or one of these instead of an offset:"""
GIVEN = -1
TAKEN = -2
LOST = -3
UP = -4

COMMIT_MS = 200
FETCH_WAIT_MS = 50
POLL_S = 0.03
MESSAGES_AT_ONCE = 100


def tell(partitions: Iterable[int], what: int) -> None:
    now = time.monotonic()
    os.write(1, b"".join(RECORD.pack(now, index, what) for index in partitions))


def delivered(records: Iterable[tuple[int, int]]) -> None:
    now = time.monotonic()
    os.write(1, b"".join(RECORD.pack(now, partition, offset) for partition, offset in records))


def confluent(bootstrap_servers: str, group: str, topic: str, leaving: threading.Event) -> None:
    from confluent_kafka import Consumer, KafkaException

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": COMMIT_MS,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
        }
    )

    def teller(what: int) -> Any:
        return lambda _, partitions: tell((one.partition for one in partitions), what)

    consumer.subscribe([topic], on_assign=teller(GIVEN), on_revoke=teller(TAKEN), on_lost=teller(LOST))
    while not leaving.is_set():
        messages = consumer.consume(MESSAGES_AT_ONCE, POLL_S)
        for message in messages:
            if message.error() is not None:
                raise KafkaException(message.error())
        delivered((present(one.partition()), present(one.offset())) for one in messages)
    consumer.close()


def ours(bootstrap_servers: str, group: str, topic: str, leaving: threading.Event) -> None:
    asyncio.run(_ours(bootstrap_servers, group, topic, leaving))


async def _ours(bootstrap_servers: str, group: str, topic: str, leaving: threading.Event) -> None:
    import mansio

    def teller(what: int) -> Any:
        return lambda partitions: tell((index for _, index in partitions), what)

    async with mansio.connect(bootstrap_servers) as client:
        consumer = client.consume(
            topic,
            group=group,
            auto_commit_interval_ms=COMMIT_MS,
            fetch_wait_ms_max=FETCH_WAIT_MS,
            on_assigned=teller(GIVEN),
            on_revoked=teller(TAKEN),
            on_lost=teller(LOST),
        )
        async with consumer:
            while not leaving.is_set():
                delivered((one.partition, one.offset) for one in await consumer.poll(POLL_S * 1000))


def load_confluent() -> None:
    import confluent_kafka  # noqa: F401  # to have it


def load_ours() -> None:
    """All that a member of ours loads when it needs it first."""
    import mansio.client
    from mansio.wire.api_versions import ApiKey
    from mansio.wire.codec.messages import merged_schema

    assert mansio.client
    for api in (
        ApiKey.METADATA,
        ApiKey.FIND_COORDINATOR,
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.LIST_OFFSETS,
        ApiKey.OFFSET_FETCH,
        ApiKey.OFFSET_COMMIT,
    ):
        merged_schema(api, "request")
        merged_schema(api, "response")


LOADERS = {"confluent-kafka": load_confluent, "mansio": load_ours}
KINDS: dict[str, Callable[..., None]] = {"confluent-kafka": confluent, "mansio": ours}


def main() -> None:
    kind, *where = sys.argv[1:]
    leaving = threading.Event()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {where[1]} %(message)s")
    LOADERS[kind]()
    tell([0], UP)
    sys.stdin.buffer.readline()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        leaving.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    KINDS[kind](*where, leaving)


if __name__ == "__main__":
    main()
