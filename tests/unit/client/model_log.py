"""Stub broker with one partition that checks sequences as Kafka does (KIP-98), with injected faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.produce import PartitionResult, ProduceRequest
from mansio.wire.batch.record_batch import check_batch
from mansio.wire.batch.record_reader import read_records
from unit.net.stub_broker import HANG_UP, StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

OUT_OF_ORDER_SEQUENCE = 45
DUPLICATE_SEQUENCE = 46
REMEMBERED_BATCHES = 5


class ModelLog:
    """`values` is what was stored, in order. `fault(batch number)` returns what goes wrong: None, an error code,
    "lost before" (hang up, nothing stored) or "lost after" (stored, then hang up)."""

    def __init__(self, fault: Callable[[int], Any] = lambda number: None) -> None:
        self.values: list[bytes | None] = []
        self.records: list[Any] = []
        self.fault = fault
        self.batches = 0
        self.batch_bytes_max = 1 << 30
        self._sequences: dict[int, tuple[int, int, list[tuple[int, int]]]] = {}
        """producer id -> (epoch, next sequence, [(base sequence, base offset)] of the last batches)."""

    def append(self, batch: memoryview) -> tuple[PartitionResult, bool]:
        """(result, whether the connection is lost with it)."""
        self.batches += 1
        fault = self.fault(self.batches)
        if fault == "lost before":
            return PartitionResult(0), True
        if isinstance(fault, int):
            return PartitionResult(0, error_code=fault), False
        if len(batch) > self.batch_bytes_max:
            return PartitionResult(0, error_code=10), False
        return self._store(batch), fault == "lost after"

    def _store(self, batch: memoryview) -> PartitionResult:
        header = check_batch(batch)
        if header.producer_id >= 0:
            epoch, expected, recent = self._sequences.get(header.producer_id, (header.producer_epoch, 0, []))
            if header.producer_epoch > epoch:
                expected, recent = 0, []
            for base_sequence, base_offset in recent:
                if base_sequence == header.base_sequence:
                    return PartitionResult(0, base_offset=base_offset)
            if header.base_sequence != expected:
                return PartitionResult(0, error_code=OUT_OF_ORDER_SEQUENCE)
            recent = [*recent, (header.base_sequence, len(self.values))][-REMEMBERED_BATCHES:]
            self._sequences[header.producer_id] = (
                header.producer_epoch,
                expected + header.record_count,
                recent,
            )
        base = len(self.values)
        found = read_records(batch, output_bytes_max=1 << 24)
        self.records += found
        self.values += [record.value for record in found]
        return PartitionResult(0, base_offset=base)


def serve_log(broker: StubBroker, log: ModelLog) -> None:
    """Let the stub answer Produce (of partition 0) from the model, and InitProducerId."""

    def produce(request: ProduceRequest) -> Any:
        ((name, topic_id, partitions),) = request.topics
        ((_, batch),) = partitions
        assert batch is not None
        result, lost = log.append(batch)
        return HANG_UP if lost else [(name, topic_id, [result])]

    broker.produce = produce
    broker.answers[ApiKey.INIT_PRODUCER_ID] = lambda request: {
        "error_code": 0,
        "producer_id": 7,
        "producer_epoch": 0,
    }
