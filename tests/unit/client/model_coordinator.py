"""Stub broker with transactions, with injected faults: the broker's own state machine, and partitions that check
producer epochs and sequence numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError
from mansio.state.transactions import transaction as machine
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.produce import PartitionResult, ProduceRequest
from mansio.wire.batch.record_batch import check_batch
from mansio.wire.batch.record_reader import read_records
from unit.net.stub_broker import HANG_UP, TOPIC_ID, StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, OUT_OF_ORDER_SEQUENCE, INVALID_REQUEST = 47, 48, 45, 42
FIRST_PRODUCER_ID = 1_000
Fields = dict[str, Any]


class ModelCoordinator:
    """`fault(api key, number of its request)` is what goes wrong: None, an error code, "lost before" (hang up, nothing
    done) or "lost after" (done, then hang up). `version`: the feature `transaction.version`."""

    def __init__(self, version: int = 2, fault: Callable[[int, int], Any] = lambda key, number: None) -> None:
        self.version = version
        self.fault = fault
        self.known: machine.Transaction | None = None
        self.committed: list[bytes | None] = []
        self.offsets: dict[tuple[str, int], int] = {}
        self.decisions: list[bool] = []
        self._open: list[tuple[int, int, list[bytes | None]]] = []
        """(producer id, epoch, values) of batches without a marker."""
        self._open_offsets: dict[tuple[str, int], int] = {}
        self._sequences: dict[tuple[str, int, int, int], int] = {}
        self._counts: dict[int, int] = {}
        self._producer_ids = FIRST_PRODUCER_ID

    def serve(self, broker: StubBroker) -> None:
        versions = broker.api_versions
        broker.answers |= {
            ApiKey.API_VERSIONS: lambda request: versions(request) | {"finalized_features": self._features()},
            ApiKey.FIND_COORDINATOR: lambda request: {
                "coordinators": [
                    {"key": key, "node_id": 1, "host": "127.0.0.1", "port": broker.port, "error_code": 0}
                    for key in request.coordinator_keys
                ]
            },
            ApiKey.INIT_PRODUCER_ID: self._faulty(ApiKey.INIT_PRODUCER_ID, self._init, top_level),
            ApiKey.END_TXN: self._faulty(ApiKey.END_TXN, self._end, top_level),
            ApiKey.ADD_OFFSETS_TO_TXN: self._faulty(ApiKey.ADD_OFFSETS_TO_TXN, self._add_offsets, top_level),
            ApiKey.ADD_PARTITIONS_TO_TXN: self._faulty(
                ApiKey.ADD_PARTITIONS_TO_TXN, self._add_partitions, self._added
            ),
            ApiKey.TXN_OFFSET_COMMIT: self._faulty(
                ApiKey.TXN_OFFSET_COMMIT, self._commit_offsets, offset_results
            ),
            ApiKey.DESCRIBE_TRANSACTIONS: self._describe,
        }
        broker.produce = self._produce

    def restart_producer(self) -> None:
        """Another producer with the transactional id starts."""
        self._initialize(-1, -1)

    def time_out(self) -> None:
        """The coordinator aborts the open transaction."""
        assert self.known is not None
        self._decide(machine.time_out(self.known, now_ms=0))

    def _features(self) -> list[Fields]:
        return [
            {
                "name": "transaction.version",
                "max_version_level": self.version,
                "min_version_level": self.version,
            }
        ]

    def _faulty(
        self, key: int, work: Callable[[Any], Any], answer: Callable[[Any, int], Fields]
    ) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            number = self._counts[key] = self._counts.get(key, 0) + 1
            fault = self.fault(key, number)
            if fault == "lost before":
                return HANG_UP
            if isinstance(fault, int):
                return answer(request, fault)
            try:
                fields = work(request)
            except MansioError as error:
                fields = answer(request, error.kafka_code)
            return HANG_UP if fault == "lost after" else fields

        return call

    # -- requests --------

    def _initialize(self, producer_id: int, epoch: int) -> machine.Transaction:
        while True:
            self._producer_ids += 1
            changed = machine.initialize(
                self.known,
                timeout_ms=60_000,
                producer_id=producer_id,
                producer_epoch=epoch,
                new_producer_id=self._producer_ids,
                now_ms=0,
            )
            if not changed.is_prepared:
                self.known = changed
                return changed
            self._decide(changed)

    def _init(self, request: Any) -> Fields:
        known = self._initialize(request.producer_id, request.producer_epoch)
        return {"error_code": 0, "producer_id": known.producer_id, "producer_epoch": known.producer_epoch}

    def _add(self, request: Any, partitions: list[tuple[str, int]]) -> None:
        self.known = machine.add_partitions(
            self.known,
            request.producer_id,
            request.producer_epoch,
            partitions,
            client_version=self.version,
            now_ms=0,
        )

    def _add_partitions(self, request: Any) -> Fields:
        partitions = [
            (topic.name, index) for topic in request.v3_and_below_topics for index in topic.partitions
        ]
        self.known = machine.add_partitions(
            self.known,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            partitions,
            client_version=self.version,
            now_ms=0,
        )
        return self._added(request, 0)

    def _added(self, request: Any, code: int) -> Fields:
        return {
            "results_by_topic_v3_and_below": [
                {
                    "name": topic.name,
                    "results_by_partition": [
                        {"partition_index": index, "partition_error_code": code} for index in topic.partitions
                    ],
                }
                for topic in request.v3_and_below_topics
            ]
        }

    def _add_offsets(self, request: Any) -> Fields:
        self._add(request, [("__consumer_offsets", 0)])
        return {"error_code": 0}

    def _commit_offsets(self, request: Any) -> Fields:
        if self.version >= 2:
            self._add(request, [("__consumer_offsets", 0)])
        for topic in request.topics:
            for each in topic.partitions:
                self._open_offsets[topic.name, each.partition_index] = each.committed_offset
        return offset_results(request, 0)

    def _end(self, request: Any) -> Fields:
        self._producer_ids += 1
        before = self.known
        ended = machine.end(
            before,
            request.producer_id,
            request.producer_epoch,
            is_commit=request.committed,
            bumps_epoch=self.version >= 2,
            new_producer_id=self._producer_ids,
            now_ms=0,
        )
        if ended is not before:
            self._decide(ended)
        producer_id, epoch = ended.current_producer
        return {"error_code": 0, "producer_id": producer_id, "producer_epoch": epoch}

    def _decide(self, decided: machine.Transaction) -> None:
        is_commit = decided.is_commit
        self.decisions.append(is_commit)
        for _, _, values in self._open:
            if is_commit:
                self.committed += values
        if is_commit:
            self.offsets |= self._open_offsets
        self._open, self._open_offsets = [], {}
        self.known = machine.complete(decided, now_ms=0) if decided.is_prepared else decided

    def _describe(self, request: Any) -> Fields:
        assert self.known is not None
        return {
            "transaction_states": [
                {
                    "transactional_id": request.transactional_ids[0],
                    "transaction_state": self.known.state.title,
                    "producer_id": self.known.producer_id,
                    "producer_epoch": self.known.producer_epoch,
                }
            ]
        }

    def _produce(self, request: ProduceRequest) -> Any:
        number = self._counts[ApiKey.PRODUCE] = self._counts.get(ApiKey.PRODUCE, 0) + 1
        fault = self.fault(ApiKey.PRODUCE, number)
        if fault == "lost before":
            return HANG_UP
        results = []
        for name, topic_id, partitions in request.topics:
            found = []
            for index, batch in partitions:
                assert batch is not None
                assert request.transactional_id
                code = fault if isinstance(fault, int) else self._store("t", index, batch)
                found.append(PartitionResult(index, error_code=code, base_offset=0))
            assert name == "t" or topic_id == TOPIC_ID
            results.append((name, topic_id, found))
        return HANG_UP if fault == "lost after" else results

    def _store(self, topic: str, index: int, batch: memoryview) -> int:
        header = check_batch(batch)
        assert header.is_transactional
        known = self.known
        producer = header.producer_id, header.producer_epoch
        if known is None or (known.producer_id, known.producer_epoch) != producer:
            return INVALID_PRODUCER_EPOCH
        if self.version >= 2:
            self._add(header, [(topic, index)])
        elif known.state is not machine.TransactionState.ONGOING or (topic, index) not in known.partitions:
            return INVALID_TXN_STATE
        key = topic, index, header.producer_id, header.producer_epoch
        expected = self._sequences.get(key, 0)
        if header.base_sequence < expected:
            return 0  # stored before
        if header.base_sequence > expected:
            return OUT_OF_ORDER_SEQUENCE
        self._sequences[key] = expected + header.record_count
        values = [record.value for record in read_records(batch, output_bytes_max=1 << 20)]
        self._open.append((header.producer_id, header.producer_epoch, values))
        return 0


def top_level(request: Any, code: int) -> Fields:
    """A response that is only an error code."""
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


def offset_results(request: Any, code: int) -> Fields:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": each.partition_index, "error_code": code} for each in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }
