"""Reads a dead-letter topic from its beginning to its end, as any client would: where each record in it comes from."""

from __future__ import annotations

import time
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from support.machine import scaled
from support.share_history import Place
from support.waiting import wait_until
from system.crash.kill_load import QUIET

ANSWER_S: Final = 15.0
NOT_LED_YET: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.NOT_LEADER_FOR_PARTITION)
"""What a broker of a cluster says of a topic that was made just now: it has not heard of it yet."""


def places_of_dead_letters(bootstrap_servers: str, topic: str, group: str) -> list[Place]:
    """The places in `topic` whose records are in its dead-letter topic, all put there by `group`."""
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": "judge", "enable.auto.commit": False}
    consumer = Consumer({**settings, "auto.offset.reset": "error", **QUIET})
    name = f"dlq.{topic}"
    try:
        found = consumer.list_topics(name, timeout=scaled(ANSWER_S)).topics[name].partitions
        wanted = [TopicPartition(name, index, 0) for index in sorted(found)]
        left = sum(_end(consumer, each) for each in wanted)
        consumer.assign(wanted)
        places: list[Place] = []
        end = time.monotonic() + scaled(ANSWER_S)
        while len(places) < left:
            assert time.monotonic() < end, f"{len(places)} of {left} dead letters were read"
            for one in consumer.consume(500, 0.1):
                assert one.error() is None, one.error()
                known: dict[str, Any] = dict(one.headers() or ())
                assert known["__dlq.errors.group"] == group.encode()
                assert known["__dlq.errors.topic"] == topic.encode()
                places.append(Place(int(known["__dlq.errors.partition"]), int(known["__dlq.errors.offset"])))
    finally:
        consumer.close()
    return places


def _end(consumer: Consumer, where: TopicPartition) -> int:
    """The offset after the last record, once a broker leads the partition."""

    def watermarks() -> tuple[int, int] | None:
        try:
            return consumer.get_watermark_offsets(where, timeout=scaled(ANSWER_S))
        except KafkaException as error:
            if error.args[0].code() not in NOT_LED_YET:
                raise
            return None

    return wait_until(watermarks, ANSWER_S, f"somebody leads {where}")[1]
