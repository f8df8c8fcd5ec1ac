"""Client that produces single records with acks=all to one broker and sees every response, which client libraries hide
by retrying.

Always true: everything that was acknowledged is remembered, and `check` finds it where it was said to be, or fails.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from mansio.wire.apis import produce
from support.machine import scaled
from support.present import present
from support.raw_peer import CLIENT_ID, RawPeer, batch_of
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from support.cluster import Cluster

VERSION: Final = 9
READ_S_MAX: Final = 30.0
ANSWER_MS_MAX: Final = 15_000
"""For a record that nothing keeps from being acknowledged."""
OK = 0
NOT_LEADER_OR_FOLLOWER = 6
REQUEST_TIMED_OUT = 7
NOT_ENOUGH_REPLICAS = 19
NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
TOO_FEW = {NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND}
NOT_SURE_TO_LEAD = {NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT}
numbers = itertools.count()


class Answer(NamedTuple):
    value: bytes
    offset: int
    code: int
    reason: str


class Prober:
    """Sends records with acks=all straight to one broker, past the network under test, and keeps the answers."""

    def __init__(self, one: Cluster, topic: str) -> None:
        self.one = one
        self.topic = topic
        self.reported: list[Answer] = []

    def send(self, node_id: int, *, timeout_ms: int = 1500, size_bytes: int = 0) -> Answer:
        """One record of at least this size."""
        value = f"{node_id}/{next(numbers)}/".encode().ljust(size_bytes, b".")
        with RawPeer(self.one.brokers[node_id].kafka_port) as peer:
            peer.send(frame_of(self.topic, batch_of(value), timeout_ms))
            return self.note(value, peer.frame())

    def note(self, value: bytes, frame: bytes | None) -> Answer:
        """An answer to `frame_of` has come."""
        assert frame is not None, "the broker closed the connection"
        found = produce.decode_response(VERSION, frame).topics[0][2][0]
        answer = Answer(value, found.base_offset, found.error_code, found.error_message or "")
        self.reported.append(answer)
        return answer

    def until(self, node_id: int, codes: set[int], deadline_s: float = 30.0) -> float:
        """Send until a broker answers with one of these; how many seconds that took."""
        begin = time.monotonic()
        self.one.wait(
            lambda: self.send(node_id).code in codes,
            f"broker {node_id} answers with one of {codes}",
            deadline_s,
        )
        return time.monotonic() - begin

    def check(self) -> None:
        """Whatever was acknowledged is where the answer placed it, and nothing else was for the same place."""
        stored = dict(read_values(self.one, self.topic))
        for answer in self.reported:
            if answer.code == OK:
                assert stored.get(answer.offset) == answer.value, (answer, stored)
        assert len({answer.offset for answer in self.reported if answer.code == OK}) == sum(
            answer.code == OK for answer in self.reported
        )


def frame_of(topic: str, batch: bytes, timeout_ms: int) -> bytes:
    """A produce request with acks=all for partition 0."""
    topics = [(topic, None, [(0, batch)])]
    return b"".join(produce.encode_request(VERSION, 1, CLIENT_ID, -1, timeout_ms, topics))


def read_values(one: Cluster, topic: str) -> list[tuple[int, bytes]]:
    """Offsets and values of partition 0 from the beginning."""
    consumer = Consumer(
        {
            "bootstrap.servers": one.bootstrap_servers,
            "group.id": "reads",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **QUIET,
        }
    )
    place = TopicPartition(topic, 0, 0)
    end = consumer.get_watermark_offsets(place, timeout=scaled(30))[1]
    consumer.assign([place])
    found: list[tuple[int, bytes]] = []
    limit = time.monotonic() + READ_S_MAX
    while len(found) < end and time.monotonic() < limit:
        for message in consumer.consume(1000, 0.2):
            assert message.error() is None, message.error()
            found.append((present(message.offset()), present(message.value())))
    consumer.close()
    assert [offset for offset, _ in found] == list(range(end))
    return found
