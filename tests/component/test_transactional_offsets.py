"""Offsets committed in transactions on a real broker: raw requests over a socket, the log after restarts, and our
consumer, which waits for stable offsets."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Self

import pytest

import mansio
from mansio.client.consumer import consumer as consumer_module
from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import UnstableOffsetCommit
from mansio.net.offsets import fetch_offsets
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.end_marker import EndMarker, decode_end_marker, encode_end_marker
from mansio.wire.batch.record_batch import read_header
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer
from support.waiting import wait_until
from unit.broker.transactional_offsets_fixtures import Verifier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.wire.codec.messages import Struct

pytestmark = pytest.mark.row("P4")

GROUP, TOPIC, PRODUCER = "g", "t", 70_001
INVALID_PRODUCER_EPOCH, UNSTABLE, ILLEGAL_GENERATION = 47, 88, 22
COORDINATOR_EPOCH = 5


class TransactionalBroker:
    """A broker with topic t (2 partitions) whose transaction coordinator accepts every partition."""

    def __init__(self, path: Path) -> None:
        self.broker = mansio.Broker(path / "data")
        self.verifier = Verifier()

    def __enter__(self) -> Self:
        self.broker.__enter__()
        self.services.group_service.verifier = self.verifier
        self.peer = RawPeer(int(self.broker.address.rpartition(":")[2]))
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.socket.close()
        self.broker.__exit__(None, None, None)

    @property
    def services(self) -> Any:
        return present(self.broker._broker).service

    def call(self, work: Callable[[], Any]) -> Any:
        """Run a function on the event loop of the broker."""

        async def call() -> Any:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        loop = present(self.broker._broker).server.loop
        return asyncio.run_coroutine_threadsafe(call(), loop).result(scaled(30))

    @property
    def home(self) -> int:
        return int(self.services.group_coordinator.store.partition_for(GROUP))

    @property
    def log(self) -> Any:
        return self.services.partitions.get(OFFSETS_TOPIC, self.home)

    def end(self, epoch: int, *, is_commit: bool = True) -> None:
        """End the producer's transaction as the leader of the partition does."""
        marker = EndMarker(PRODUCER, epoch, is_commit, COORDINATOR_EPOCH)

        async def write() -> None:
            end_offset = self.log.append(encode_end_marker(marker, 0), internal=True).end_offset
            await self.log.commit_promise(end_offset)
            self.services.group_coordinator.offsets.apply_marker(self.home, marker)

        self.call(write)

    def commit(self, *offsets: int, version: int = 5, epoch: int = 0, **fields: Any) -> list[int]:
        """Commit offsets of the partitions 0, 1, ... in a transaction; the error codes."""
        partitions = [
            {"partition_index": index, "committed_offset": offset} for index, offset in enumerate(offsets)
        ]
        request = {
            "transactional_id": "tx",
            "group_id": GROUP,
            "producer_id": PRODUCER,
            "producer_epoch": epoch,
            "topics": [{"name": TOPIC, "partitions": partitions}],
        }
        if version >= 3:
            request |= {"generation_id": -1, "member_id": "", **fields}
        answer = self.peer.call(ApiKey.TXN_OFFSET_COMMIT, version, request)
        return [each.error_code for each in answer.topics[0].partitions]

    def fetch(self, *, require_stable: bool) -> list[tuple[int, int]]:
        """Error code and offset of both partitions."""
        group = {"group_id": GROUP, "topics": [{"name": TOPIC, "partition_indexes": [0, 1]}]}
        answer: Struct = self.peer.call(
            ApiKey.OFFSET_FETCH, 8, {"groups": [group], "require_stable": require_stable}
        )
        return [(each.error_code, each.committed_offset) for each in answer.groups[0].topics[0].partitions]

    def create_topic(self) -> None:
        self.peer.create_topic(TOPIC, partitions=2)
        found = self.peer.call(ApiKey.FIND_COORDINATOR, 4, {"key_type": 0, "coordinator_keys": [GROUP]})
        assert found.coordinators[0].error_code == 0


def test_a_transaction_over_the_wire_and_over_restarts(tmp_path: Path) -> None:
    with TransactionalBroker(tmp_path) as broker:
        broker.create_topic()
        assert broker.commit(3, 4) == [0, 0]
        assert broker.commit(5, 6) == [0, 0], "a second batch of the transaction is no repeat"
        assert broker.fetch(require_stable=True) == [(UNSTABLE, -1)] * 2
        assert broker.fetch(require_stable=False) == [(0, -1)] * 2
    with TransactionalBroker(tmp_path) as broker:
        assert broker.fetch(require_stable=True) == [(UNSTABLE, -1)] * 2
        broker.end(0)
        assert broker.fetch(require_stable=True) == [(0, 5), (0, 6)]
        assert broker.commit(9, version=0) == [0]
        broker.end(0, is_commit=False)
        assert broker.commit(7, version=3) == [0]
    with TransactionalBroker(tmp_path) as broker:
        assert broker.fetch(require_stable=True) == [(UNSTABLE, -1), (0, 6)]
        broker.end(0)
        assert broker.fetch(require_stable=True) == [(0, 7), (0, 6)]


def test_the_log_has_the_format_of_kafka(tmp_path: Path) -> None:
    with TransactionalBroker(tmp_path) as broker:
        broker.create_topic()
        assert broker.commit(3, 4, epoch=2) == [0, 0]
        broker.end(2)
        batches = broker.call(lambda: [bytes(each) for each in broker.log.log.batches(0)])
        data, marker = (read_header(each) for each in batches)
        assert (data.producer_id, data.producer_epoch, data.record_count) == (PRODUCER, 2, 2)
        assert (data.is_transactional, data.is_control, data.base_sequence) == (True, False, -1)
        assert (marker.is_transactional, marker.is_control, marker.base_sequence) == (True, True, -1)
        assert decode_end_marker(batches[1]) == EndMarker(PRODUCER, 2, True, COORDINATOR_EPOCH)


def test_a_fenced_producer_cannot_commit_offsets(tmp_path: Path) -> None:
    """The epoch in the log decides, also after a restart, whatever the transaction coordinator answered."""
    with TransactionalBroker(tmp_path) as broker:
        broker.create_topic()
        assert broker.commit(3, epoch=4) == [0]
        broker.end(5, is_commit=False)
    with TransactionalBroker(tmp_path) as broker:
        for version in range(6):
            assert broker.commit(9, epoch=4, version=version) == [INVALID_PRODUCER_EPOCH]
        assert broker.fetch(require_stable=True) == [(0, -1)] * 2
        assert broker.commit(4, epoch=5) == [0]


def test_a_fenced_member_cannot_commit_offsets(tmp_path: Path) -> None:
    with TransactionalBroker(tmp_path) as broker:
        broker.create_topic()
        assert broker.commit(3, generation_id=2, member_id="m") == [ILLEGAL_GENERATION]
        assert broker.fetch(require_stable=True) == [(0, -1)] * 2


def test_our_consumer_waits_for_stable_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TransactionalBroker(tmp_path) as broker, ThreadPoolExecutor(1) as pool:
        broker.create_topic()
        offsets = broker.services.group_coordinator.offsets
        fetch, answers = offsets.fetch_stable, []

        async def note_answer(*args: Any, **options: Any) -> Any:
            found = await fetch(*args, **options)
            answers.append((TOPIC, 0) in found.unstable)
            return found

        monkeypatch.setattr(offsets, "fetch_stable", note_answer)
        with mansio.blocking.connect(broker.broker.address) as client:
            for value in (b"0", b"1"):
                client.publish(TOPIC, value, partition=0)
            assert broker.commit(1) == [0]

            def first_value() -> bytes | None:
                with client.consume(TOPIC, group=GROUP, from_="earliest") as consumer:
                    return next(iter(consumer)).value

            found = pool.submit(first_value)
            wait_until(lambda: len(answers) >= 2, what="the consumer asks again")
            assert not found.done()
            broker.end(0)
            assert found.result(scaled(30)) == b"1"
        assert answers[:2] == [True, True]
        assert answers[-1] is False


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_consumer_gets_its_partitions_when_the_offsets_become_stable_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: Literal["consumer", "classic"]
) -> None:
    """Later than its requests are repeated."""
    failures = [UnstableOffsetCommit(), UnstableOffsetCommit()]

    async def fetch(*args: Any, **options: Any) -> Any:
        if failures and options["require_stable"]:
            raise failures.pop()
        return await fetch_offsets(*args, **options)

    monkeypatch.setattr(consumer_module, "fetch_offsets", fetch)
    with TransactionalBroker(tmp_path) as broker:
        broker.create_topic()
        with mansio.blocking.connect(broker.broker.address) as client:
            client.publish(TOPIC, b"0", partition=0)
            with client.consume(TOPIC, group=GROUP, from_="earliest", group_protocol=protocol) as consumer:
                assert next(iter(consumer)).value == b"0"
    assert not failures
