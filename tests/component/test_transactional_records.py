"""Transactional batches over a real connection: verified once, read when they are committed, and never when aborted."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.records import RecordsToDelete
from mansio.errors import (
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    InvalidTxnState,
    MansioError,
    NotEnoughReplicas,
    ProducerFenced,
)
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.end_marker import EndMarker
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_batch import build_batch
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TRANSACTIONAL_ID = "orders-1"
INVALID_RECORD = 87
INVALID_TXN_STATE = 48
OFFSET_OUT_OF_RANGE = 1
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53


class Verifier:
    """Answers as a coordinator would, and records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[tuple[str, int], ...], bool]] = []
        self.error: MansioError | None = None
        self.during: EndMarker | None = None
        self.markers: Any = None

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        adds: bool,
    ) -> list[MansioError | None]:
        assert (transactional_id, producer_epoch) == (TRANSACTIONAL_ID, 0)
        self.asked.append((producer_id, tuple(partitions), adds))
        if self.during is not None:
            await self.markers.write(self.during, partitions)
        return [self.error] * len(partitions)


class Bench:
    """A broker with a topic, a verifier and a connection."""

    def __init__(self, broker: mansio.Broker, peer: RawPeer) -> None:
        started = broker._broker
        assert started is not None
        self.loop, self.services, self.peer = started.server.loop, started.service, peer
        self.broker, self.address = broker, broker.address
        self.verifier = Verifier()
        self.verifier.markers = self.services.transaction_markers
        self.services.produce.verifier = self.verifier
        self._ids = count(1)

    def send(
        self,
        batch: bytes,
        *,
        topic: str = "t",
        version: int = 12,
        transactional_id: str | None = TRANSACTIONAL_ID,
    ) -> int:
        """Produce a batch; return the error code."""
        pieces = produce.encode_request(
            version, next(self._ids), "c", -1, 5000, [(topic, None, [(0, batch)])], transactional_id
        )
        self.peer.send(b"".join(map(bytes, pieces)))
        answer = self.peer.frame()
        assert answer is not None
        return produce.decode_response(version, answer).topics[0][2][0].error_code

    def end(self, producer_id: int, *, is_commit: bool) -> None:
        work = self.services.transaction_markers.write(EndMarker(producer_id, 0, is_commit, 1), [("t", 0)])
        assert asyncio.run_coroutine_threadsafe(work, self.loop).result(scaled(30)) == [None]

    def read(self, isolation_level: int) -> tuple[list[int], int, list[tuple[int, int]]]:
        """(base offsets of the visible batches, last stable offset, aborted transactions)."""
        self.request_fetch(isolation_level, max_wait_ms=0, min_bytes=0)
        return self.fetched(isolation_level)

    def request_fetch(self, isolation_level: int, *, max_wait_ms: int, min_bytes: int) -> None:
        wanted = fetch.FetchPartition(0, -1, 0, -1, -1, 1 << 20)
        self.peer.send(
            fetch.encode_request(
                11,
                next(self._ids),
                "c",
                [("t", None, [wanted])],
                max_wait_ms=max_wait_ms,
                min_bytes=min_bytes,
                max_bytes=1 << 20,
                isolation_level=isolation_level,
            )
        )

    def fetched(self, isolation_level: int) -> tuple[list[int], int, list[tuple[int, int]]]:
        answer = self.peer.frame()
        assert answer is not None
        part = fetch.decode_response(11, answer).topics[0][2][0]
        aborted = list(part.aborted_transactions or ())
        found = [
            header.base_offset
            for _, header, visible in visible_batches(
                memoryview(part.records), ("t", 0), 0, aborted, read_committed=bool(isolation_level)
            )
            if visible
        ]
        return found, part.last_stable_offset, aborted

    def latest(self, isolation_level: int) -> int:
        fields = {
            "replica_id": -1,
            "isolation_level": isolation_level,
            "topics": [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        }
        return self.peer.call(ApiKey.LIST_OFFSETS, 7, fields).topics[0].partitions[0].offset


@contextmanager
def bench(directory: Path) -> Iterator[Bench]:
    with mansio.Broker(directory) as broker, RawPeer(int(broker.address.rpartition(":")[2])) as peer:
        with mansio.blocking.connect(broker.address) as client:
            if "t" not in client.admin.list_topics():
                client.admin.create_topic("t", partitions=1)
                for topic, setting, value in (
                    ("delayed", "mansio.delay.enable", "true"),
                    ("unique", "mansio.dedup.ms", "60000"),
                    ("small", "compression.type", "gzip"),
                ):
                    client.admin.create_topic(topic, partitions=1, config={setting: value})
        yield Bench(broker, peer)


def batch(producer_id: int, sequence: int = 0, *, transactional: bool = True, **headers: str) -> bytes:
    pairs = [(name.replace("_", "-"), value.encode()) for name, value in headers.items()]
    return build_batch(
        [(1000, None, b"v", pairs)],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=transactional,
    )


def test_committed_readers_see_committed_records_only_also_after_a_restart(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        assert [one.send(batch(pid)) for pid in (1, 2, 3)] == [0, 0, 0]
        assert one.read(1) == ([], 0, [])
        assert one.read(0)[0] == [0, 1, 2]
        one.end(1, is_commit=False)
        one.end(2, is_commit=True)
        assert one.read(1) == ([1], 2, [(1, 0)])
        assert (one.latest(0), one.latest(1)) == (5, 2)
    with bench(tmp_path) as one:
        assert one.read(1) == ([1], 2, [(1, 0)])
        fields = {"topics": [{"name": "t", "partition_indexes": [0]}]}
        part = one.peer.call(ApiKey.DESCRIBE_PRODUCERS, 0, fields).topics[0].partitions[0]
        assert {p.producer_id: p.current_txn_start_offset for p in part.active_producers} == {
            1: -1,
            2: -1,
            3: 2,
        }
        assert {p.producer_id: p.coordinator_epoch for p in part.active_producers} == {1: 1, 2: 1, 3: -1}
        deletion = {
            "topics": [{"name": "t", "partitions": [{"partition_index": 0, "offset": 3}]}],
            "timeout_ms": 1000,
        }
        refused = one.peer.call(ApiKey.DELETE_RECORDS, 1, deletion)
        assert refused.topics[0].partitions[0].error_code == OFFSET_OUT_OF_RANGE
        one.end(3, is_commit=True)
        assert one.read(1) == ([1, 2], 6, [(1, 0)])


@pytest.mark.parametrize(("version", "adds"), [(11, False), (12, True)])
def test_the_first_batch_of_a_transaction_is_verified_and_no_other(
    tmp_path: Path, version: int, adds: bool
) -> None:
    with bench(tmp_path) as one:
        for sequence in range(3):
            assert one.send(batch(1, sequence), version=version) == 0
        assert one.send(batch(2, transactional=False), version=version, transactional_id=None) == 0
        assert one.verifier.asked == [(1, (("t", 0),), adds)]
        one.end(1, is_commit=True)
        assert one.send(batch(1, 3), version=version) == 0
        assert len(one.verifier.asked) == 2


def test_a_batch_that_the_coordinator_refuses_is_not_appended(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        one.verifier.error = InvalidTxnState("not in the transaction")
        assert one.send(batch(1)) == INVALID_TXN_STATE
        assert one.latest(0) == 0


@pytest.mark.parametrize(
    ("version", "error", "code"),
    [
        (11, ProducerFenced("newer"), InvalidProducerEpoch.kafka_code),
        (12, ProducerFenced("newer"), InvalidProducerEpoch.kafka_code),
        (11, ConcurrentTransactions("being completed"), NotEnoughReplicas.kafka_code),
        (12, ConcurrentTransactions("being completed"), ConcurrentTransactions.kafka_code),
        (11, CoordinatorNotAvailable("no leader"), NotEnoughReplicas.kafka_code),
        (12, CoordinatorLoadInProgress("loading"), NotEnoughReplicas.kafka_code),
    ],
)
def test_a_failed_verification_gives_the_error_that_producers_of_the_version_handle(
    tmp_path: Path, version: int, error: MansioError, code: int
) -> None:
    with bench(tmp_path) as one:
        one.verifier.error = error
        assert one.send(batch(1), version=version) == code
        assert one.latest(0) == 0


@pytest.mark.parametrize(("version", "marker_epoch"), [(11, 0), (11, 1), (12, 1)])
def test_a_transaction_that_ends_during_the_verification_is_not_opened_again(
    tmp_path: Path, version: int, marker_epoch: int
) -> None:
    with bench(tmp_path) as one:
        one.verifier.during = EndMarker(1, marker_epoch, False, 1)
        assert one.send(batch(1), version=version) == INVALID_TXN_STATE
        assert (one.latest(0), one.latest(1)) == (1, 1)


def test_the_end_of_the_previous_transaction_during_the_verification_does_not_end_the_next_one(
    tmp_path: Path,
) -> None:
    """In transaction version 2 the marker of a transaction has the epoch of the next one, whose first batch may be here
    before it."""
    with bench(tmp_path) as one:
        one.verifier.during = EndMarker(1, 0, True, 1)
        assert one.send(batch(1)) == 0
        assert (one.latest(0), one.latest(1)) == (2, 1)


def test_records_can_be_deleted_when_the_end_of_their_transaction_is_decided_and_not_yet_written(
    tmp_path: Path,
) -> None:
    with bench(tmp_path) as one:
        assert one.send(batch(1)) == 0
        deletion = one.services.records.delete_records(
            [RecordsToDelete("t", 0, 1)], timeout_ms=1_000, caller=ANONYMOUS
        )
        deleted = asyncio.run_coroutine_threadsafe(deletion, one.loop)
        one.end(1, is_commit=True)
        assert deleted.result(scaled(30)) == [1]


def test_what_does_not_belong_into_a_transaction_is_refused(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        assert one.send(batch(1), transactional_id=None) == TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        assert one.send(batch(1, mansio_delay_ms="60000"), topic="delayed") == INVALID_RECORD
        assert one.send(batch(1, mansio_dedup_id="a"), topic="unique") == INVALID_RECORD
        control = build_batch(
            [(1, b"\0\0\0\1", b"\0\0\0\0\0\0", ())],
            producer_id=1,
            producer_epoch=0,
            transactional=True,
            control=True,
        )
        assert one.send(control) == INVALID_RECORD
        assert one.send(batch(1)) == 0
        assert one.send(batch(1, 1, transactional=False)) == INVALID_TXN_STATE


def test_retention_keeps_what_readers_of_committed_records_could_not_read_yet(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        with mansio.blocking.connect(one.address) as client:
            client.admin.alter_topic_config("t", {"retention.ms": "1"})

        def start_after_check() -> int:
            async def check() -> int:
                partition = present(one.services.partitions.get("t", 0))
                one.services.retention.check_partition(partition)
                return int(partition.start_offset)

            return asyncio.run_coroutine_threadsafe(check(), one.loop).result(scaled(30))

        assert one.send(batch(7)) == 0
        assert start_after_check() == 0
        one.end(7, is_commit=True)
        wait_until(lambda: start_after_check() > 0, 10)


def test_a_waiting_reader_of_committed_records_is_answered_when_the_transaction_ends(tmp_path: Path) -> None:
    with bench(tmp_path) as one, RawPeer(int(one.address.rpartition(":")[2])) as reader:
        other = Bench(one.broker, reader)
        other.services.produce.verifier = one.verifier
        other.request_fetch(1, max_wait_ms=30_000, min_bytes=1)
        assert one.send(batch(1)) == 0
        assert one.read(0)[0] == [0]
        one.end(1, is_commit=True)
        began = time.monotonic()
        assert other.fetched(1)[0] == [0]
        assert time.monotonic() - began < 20, "the answer came at the end of the wait"


def test_a_batch_that_waits_for_its_verification_is_stored_in_the_codec_of_the_topic(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        assert one.send(batch(1), topic="small") == 0
        log = present(one.services.partitions.get("small", 0)).log
        (header,) = log.batch_headers(0)
        assert header.codec == Codec.GZIP
        assert (header.producer_id, header.is_transactional) == (1, True)
        assert one.verifier.asked == [(1, (("small", 0),), True)]
