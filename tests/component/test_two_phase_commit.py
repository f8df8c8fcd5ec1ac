"""Two-phase commit over real connections (KIP-939, InitProducerId 6): a transaction waits for the decision of another
system, over the death of its producer and of the broker, and readers see what that system decided."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.batch.record_batch import build_batch
from support.raw_peer import RawPeer
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAME = "bank-1"
OK, INVALID_STATE, NOT_ALLOWED, FENCED = 0, 48, 53, 90
CONCURRENT = 51
Identity = tuple[int, int]


class Participant:
    """A producer as a client with two-phase commit has it, over one connection."""

    def __init__(self, address: str) -> None:
        self.peer = RawPeer(int(address.rpartition(":")[2]))
        self.call(ApiKey.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=[NAME])
        self.identity: Identity = (-1, -1)

    def call(self, api_key: ApiKey, version: int, **fields: Any) -> Any:
        return self.peer.call(api_key, version, fields)

    def start(self, *, keeps: bool = False, is_two_phase: bool = True) -> Any:
        """Initialize the producer, again while its predecessor's transaction is being aborted; return the response."""
        responses: list[Any] = []

        def attempt() -> bool:
            found = self.call(
                ApiKey.INIT_PRODUCER_ID,
                6,
                transactional_id=NAME,
                transaction_timeout_ms=1_000,
                enable2_pc=is_two_phase,
                keep_prepared_txn=keeps,
            )
            responses.append(found)
            return found.error_code != CONCURRENT

        wait_until(attempt, 30)
        found = responses[-1]
        self.identity = (found.producer_id, found.producer_epoch)
        return found

    def publish(self, topic: str, value: bytes, *, adds: bool = True) -> int:
        """Add the partition and produce one record to it; return the first error code that is not 0."""
        producer_id, epoch = self.identity
        if adds:
            response = self.call(
                ApiKey.ADD_PARTITIONS_TO_TXN,
                3,
                v3_and_below_transactional_id=NAME,
                v3_and_below_producer_id=producer_id,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=[{"name": topic, "partitions": [0]}],
            )
            (result,) = response.results_by_topic_v3_and_below[0].results_by_partition
            if result.partition_error_code:
                return int(result.partition_error_code)
        batch = build_batch(
            [(time.time_ns() // 1_000_000, None, value, ())],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=0,
            transactional=True,
        )
        pieces = produce.encode_request(12, 7, "c", -1, 5000, [(topic, None, [(0, batch)])], NAME)
        self.peer.send(b"".join(map(bytes, pieces)))
        answer = self.peer.frame()
        assert answer is not None
        return int(produce.decode_response(12, answer).topics[0][2][0].error_code)

    def commit_offset(self, group: str, topic: str, offset: int, *, adds: bool = True) -> int:
        """Add the group and commit an offset in the transaction; return the first error code that is not 0."""
        producer_id, epoch = self.identity
        named = {
            "transactional_id": NAME,
            "producer_id": producer_id,
            "producer_epoch": epoch,
            "group_id": group,
        }
        if adds:
            found = self.call(ApiKey.ADD_OFFSETS_TO_TXN, 3, **named)
            if found.error_code:
                return int(found.error_code)
        partition = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
        response = self.call(
            ApiKey.TXN_OFFSET_COMMIT, 3, topics=[{"name": topic, "partitions": [partition]}], **named
        )
        return int(response.topics[0].partitions[0].error_code)

    def committed_offset(self, group: str, topic: str) -> int:
        wanted = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}
        found = self.call(ApiKey.OFFSET_FETCH, 8, groups=[wanted])
        return int(found.groups[0].topics[0].partitions[0].committed_offset)

    def end(self, *, is_commit: bool) -> int:
        producer_id, epoch = self.identity
        named = {"transactional_id": NAME, "producer_id": producer_id, "producer_epoch": epoch}
        found = self.call(ApiKey.END_TXN, 5, committed=is_commit, **named)
        if found.error_code == OK:
            self.identity = (found.producer_id, found.producer_epoch)
        return int(found.error_code)


def open_broker(directory: Path, *, allows: bool = True) -> mansio.Broker:
    return mansio.Broker(
        directory,
        transaction_state_log_num_partitions=1,
        auto_create_topics_enable=True,
        transaction_two_phase_commit_enable=allows,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def join() -> Iterator[Callable[[mansio.Broker], Participant]]:
    """A function that connects a producer to a broker."""
    with ExitStack() as stack:

        def connect(broker: mansio.Broker) -> Participant:
            one = Participant(broker.address)
            stack.enter_context(one.peer)
            return one

        yield connect


def committed(broker: mansio.Broker, topic: str = "accounts") -> list[bytes | None]:
    with (
        mansio.blocking.connect(broker.address) as client,
        client.consume(topic, from_="earliest", to_end=True) as consumer,
    ):
        return [each.value for each in consumer]


@pytest.mark.row("P4")
@pytest.mark.parametrize("is_commit", [True, False])
def test_the_next_producer_ends_the_transaction_as_the_other_system_has_decided(
    directory: Path, join: Callable[[mansio.Broker], Participant], is_commit: bool
) -> None:
    with open_broker(directory) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("accounts", partitions=1)
        first = join(broker)
        found = first.start()
        assert (found.error_code, found.ongoing_txn_producer_id, found.ongoing_txn_producer_epoch) == (
            0,
            -1,
            -1,
        )
        prepared = first.identity
        assert first.publish("accounts", b"-5 EUR") == OK
        assert first.commit_offset("tellers", "accounts", 7) == OK
        assert first.committed_offset("tellers", "accounts") == -1
        first.peer.vanish()
        assert committed(broker) == []

    with open_broker(directory) as broker:
        second = join(broker)
        found = second.start(keeps=True)
        assert (found.ongoing_txn_producer_id, found.ongoing_txn_producer_epoch) == prepared
        assert second.identity == (prepared[0], prepared[1] + 1)
        assert committed(broker) == []
        assert second.publish("accounts", b"late") == INVALID_STATE
        assert second.publish("accounts", b"late", adds=False) == INVALID_STATE
        assert second.commit_offset("tellers", "accounts", 8) == INVALID_STATE
        assert second.commit_offset("tellers", "accounts", 8, adds=False) != OK
        zombie = join(broker)
        zombie.identity = prepared
        assert zombie.end(is_commit=not is_commit) == FENCED
        assert second.end(is_commit=is_commit) == OK
        expected = [b"-5 EUR"] if is_commit else []
        wait_until(lambda: second.publish("accounts", b"next") != CONCURRENT, 30)
        assert second.end(is_commit=True) == OK
        wait_until(lambda: committed(broker) == [*expected, b"next"], 30)
        offset = 7 if is_commit else -1
        wait_until(lambda: second.committed_offset("tellers", "accounts") == offset, 30)
        assert zombie.publish("accounts", b"very late", adds=False) != OK


@pytest.mark.row("P4")
def test_a_new_producer_or_an_operator_aborts_a_transaction_that_nobody_decides(
    directory: Path, join: Callable[[mansio.Broker], Participant]
) -> None:
    with open_broker(directory) as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("accounts", partitions=1)
        first = join(broker)
        first.start()
        assert first.publish("accounts", b"a") == OK
        second = join(broker)
        assert second.start().error_code == OK
        assert second.publish("accounts", b"b") == OK
        assert client.admin.transactions.describe(NAME).timeout_ms == 2**31 - 1
        client.admin.transactions.terminate(NAME)
        assert second.end(is_commit=True) == FENCED
        client.publish("accounts", b"c")
        wait_until(lambda: committed(broker) == [b"c"], 30)


@pytest.mark.row("P4")
def test_a_broker_that_does_not_allow_it_refuses_and_keeps_transactions_all_the_same(
    directory: Path, join: Callable[[mansio.Broker], Participant]
) -> None:
    with open_broker(directory, allows=False) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("accounts", partitions=1)
        one = join(broker)
        assert one.start().error_code == NOT_ALLOWED
        assert one.start(is_two_phase=False).error_code == OK
        prepared = one.identity
        assert one.publish("accounts", b"a") == OK
        found = one.start(keeps=True, is_two_phase=False)
        assert (found.ongoing_txn_producer_id, found.ongoing_txn_producer_epoch) == prepared
        assert one.end(is_commit=True) == OK
        wait_until(lambda: committed(broker) == [b"a"], 30)
