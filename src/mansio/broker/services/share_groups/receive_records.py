"""Receive service: leases decoded records of a share group, for protocols whose clients have no share session.

Each call leases records to a new member. The result has the id of this member, which the client passes to
`ShareService.acknowledge`. A lease that is not acknowledged expires, as any other lease.

Invariants:
* The number of records in a result and their compressed and decompressed bytes are bounded.
* Every leased offset is in the result, is acknowledged as a gap, or is released, so that no offset that the client does
  not get stays leased.
* The leases of a cancelled call are released, and their deliveries are not counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
from mansio.broker.services.caller import ANONYMOUS
from mansio.broker.services.share_groups.share import (
    PARTITIONS_MAX,
    PartitionAcknowledgements,
    ReceiveOperation,
)
from mansio.errors import InvalidRecord, InvalidRequest, MansioError, NotLeaderOrFollower, Unavailable
from mansio.state.share_partition.types import GAP, RELEASE, AcknowledgementBatch
from mansio.tracebacks import copied, result_of, without_traceback
from mansio.wire.batch.record_batch import check_stored_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.caller import Caller
    from mansio.broker.services.fetch import FetchCounters
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.services.share_groups.share import ReceivedPartition, ShareService
    from mansio.broker.services.topics import TopicService
    from mansio.ports import Clock, Promise, Random, Scheduler
    from mansio.state.consumer_group.types import TopicPartition
    from mansio.wire.batch.record_reader import Record

RECORDS_MAX: Final = 10_000
"""Maximum number of records in one call."""

BYTES_MAX: Final = 8 << 20
"""Maximum bytes of stored batches in one call; a larger first batch is returned nevertheless."""

DECODED_BYTES_MAX: Final = 64 << 20
"""Maximum decompressed bytes in one call."""

MEMBER_ID_RANDOM_BYTES: Final = 16


class ReceiveService:
    """Leases decoded records of share groups. All methods run on the broker's event loop."""

    __slots__ = (
        "_clock",
        "_counters",
        "_partitions",
        "_quotas",
        "_random",
        "_receiving",
        "_scheduler",
        "_share_partition_manager",
        "_share_service",
        "_topics",
    )

    def __init__(
        self,
        *,
        share_service: ShareService,
        share_partition_manager: SharePartitionManager,
        topics: TopicService,
        partitions: PartitionSet,
        quotas: QuotaService,
        counters: FetchCounters,
        clock: Clock,
        scheduler: Scheduler,
        random: Random,
    ) -> None:
        self._share_service = share_service
        self._share_partition_manager = share_partition_manager
        self._topics = topics
        self._partitions = partitions
        self._quotas = quotas
        self._counters = counters
        self._clock = clock
        self._scheduler = scheduler
        self._random = random
        self._receiving: dict[str, Promise[ReceiveResult]] = {}
        """Calls in progress, by member id."""

    def new_member_id(self) -> str:
        """Return the id of a new member: random, so that a receipt that contains it cannot be guessed."""
        return self._random.bytes(MEMBER_ID_RANDOM_BYTES).hex()

    async def receive_records(
        self,
        group_id: str,
        topics: Collection[str],
        *,
        max_records: int,
        max_wait_ms: int,
        max_bytes: int = BYTES_MAX,
        lease_ms: int = -1,
        member_id: str = "",
        caller: Caller = ANONYMOUS,
    ) -> ReceiveResult:
        """Lease at most `max_records` records of the partitions of `topics` that this broker leads. While no records
        are available, wait for at most `max_wait_ms`, or until the deadline of `caller`. `lease_ms`: duration of the
        leases, -1 for the group's. `member_id`: a result of `new_member_id`, "" for a new one.

        Raises `InvalidGroupId`, `InvalidRequest`, `UnknownTopicOrPartition`, and `NotLeaderOrFollower` if this broker
        leads no partition of the topics. Errors of single partitions are in the result.
        """
        check_group_id(group_id)
        if max_records < 1 or max_bytes < 1:
            raise InvalidRequest("max_records and max_bytes must be at least 1")
        names = {self._topics.find(name).topic_id.bytes: name for name in topics}
        led = self._find_led(topics)
        member_id = member_id or self.new_member_id()
        if member_id in self._receiving:
            raise InvalidRequest(f"member {member_id} has a receive in progress")
        promise: Promise[ReceiveResult] = (
            self._scheduler.promise()
        )  # done: the caller does not wait for the result any more
        receive = ReceiveOperation(
            self._share_service,
            group_id,
            member_id,
            client_id=caller.client_id,
            partitions=lambda: led,
            is_connected=lambda: not promise.done(),
            is_active=lambda: not promise.done(),
            max_records=min(max_records, RECORDS_MAX),
            max_bytes=min(max_bytes, BYTES_MAX),
            max_wait_ms=int(caller.timeout_ms(max_wait_ms, self._clock.monotonic())),
            strict=True,
            lease_ms=lease_ms,
        )

        is_complete = is_returned = False

        async def run() -> None:
            nonlocal is_complete
            try:
                records: list[ReceivedRecord] = []
                while True:
                    received = await receive.run(())
                    result, gap_count = await self._decode_result(
                        group_id, member_id, names, received, receive, caller
                    )
                    records += result.records
                    # Offsets without a record are done now: others take their place, and a caller that waits waits on.
                    if not gap_count or result.errors or promise.done() or len(records) >= max_records:
                        break
                    receive.continue_with(max_records - len(records), waits=not records)
                result = replace(result, records=records)
                if promise.done():
                    await self._share_partition_manager.release_leases(group_id, member_id)
                else:
                    is_complete = True
                    promise.set_result(result)
            except MansioError as error:
                await self._share_partition_manager.release_leases(group_id, member_id)
                if not promise.done():
                    promise.set_exception(copied(error))
            finally:  # after an unexpected error, which the scheduler logs, the caller must not wait forever
                if not promise.done():
                    promise.set_exception(Unavailable("receive records: interrupted by an unexpected error"))

        self._receiving[member_id] = promise
        self._scheduler.spawn(run(), name="receive records")
        try:
            result = await result_of(promise)
            is_returned = True
            return result
        finally:  # a cancellation does not interrupt the storing of leases; they are released afterwards
            del self._receiving[member_id]
            receive.finish()
            if is_complete and not is_returned:
                self._scheduler.spawn(
                    self._share_partition_manager.release_leases(group_id, member_id), name="release leases"
                )

    async def wait_for_records(self, group_id: str, topics: Collection[str], *, max_wait_ms: int) -> bool:
        """Wait until records of the partitions that this broker leads may be available, for at most `max_wait_ms`;
        return whether they may. Leases none. Raises the errors of `receive_records`."""
        check_group_id(group_id)
        led = self._find_led(topics)
        is_over = False
        receive = ReceiveOperation(
            self._share_service,
            group_id,
            self.new_member_id(),
            client_id=None,
            partitions=lambda: led,
            is_connected=lambda: not is_over,
            is_active=lambda: not is_over,
            max_records=1,
            max_bytes=1,
            max_wait_ms=max_wait_ms,
            strict=True,
        )
        try:
            return await receive.wait_until_available()
        finally:
            is_over = True

    async def release(self, group_id: str, member_id: str) -> None:
        """Release all leases of a member on this broker; a call in progress ends without records. Returns when the
        releases are stored. The deliveries are not counted."""
        promise = self._receiving.get(member_id)
        if promise is not None and not promise.done():
            promise.set_result(ReceiveResult(member_id, (), 0, {}))
        await self._share_partition_manager.release_leases(group_id, member_id)

    def _find_led(self, topics: Collection[str]) -> list[TopicPartition]:
        """Return the partitions of the topics that this broker leads, beginning with a random one. Raises
        `UnknownTopicOrPartition`, and `NotLeaderOrFollower` if it leads none."""
        led: list[TopicPartition] = []
        for topic in map(self._topics.find, topics):
            for index in range(len(topic.partitions)):
                try:
                    self._partitions.find(topic.name, None, index).ensure_leader()
                except MansioError:
                    continue
                led.append((topic.topic_id.bytes, index))
        if not led:
            raise NotLeaderOrFollower(f"this broker leads no partition of {', '.join(sorted(topics))}")
        first = int(self._random.uniform(0, len(led))) % len(led)
        return [*led[first:], *led[:first]][:PARTITIONS_MAX]

    async def _decode_result(
        self,
        group_id: str,
        member_id: str,
        names: Mapping[bytes, str],
        received: Mapping[TopicPartition, ReceivedPartition],
        receive: ReceiveOperation,
        caller: Caller,
    ) -> tuple[ReceiveResult, int]:
        """Return the records in `received`, and the number of leased offsets without a record."""
        records: list[ReceivedRecord] = []
        leased_count = 0
        errors: dict[tuple[str, int], MansioError] = {}
        unused: list[PartitionAcknowledgements] = []
        size_bytes = 0
        decoded_bytes_left = DECODED_BYTES_MAX
        for (topic_id, index), part in received.items():
            topic = names[topic_id]
            size_bytes += part.size_bytes
            error = part.error
            by_offset: dict[int, Record] = {}
            if error is None:
                error, decoded_bytes_left = _decode_records(part, by_offset, decoded_bytes_left)
            if error is not None:
                errors[topic, index] = error
            missing: list[AcknowledgementBatch] = []
            kind = bytes([GAP if error is None else RELEASE])
            for first, last, delivery_count in part.acquired:
                leased_count += last - first + 1
                following = first
                for offset in range(first, last + 1):
                    record = by_offset.get(offset)
                    if record is None:
                        continue
                    if offset > following:
                        missing.append(AcknowledgementBatch(following, offset - 1, kind))
                    following = offset + 1
                    records.append(
                        ReceivedRecord(
                            topic,
                            topic_id,
                            index,
                            offset,
                            delivery_count,
                            record.timestamp_ms,
                            record.key,
                            record.value,
                            record.headers,
                        )
                    )
                if following <= last:
                    missing.append(AcknowledgementBatch(following, last, kind))
            if missing:
                unused.append(PartitionAcknowledgements(topic_id, index, missing))
        if unused:
            await self._share_service.acknowledge(group_id, member_id, unused)
        self._counters.count_fetch(size_bytes)
        quotas = self._quotas.active
        throttle_ms = 0 if quotas is None else quotas.record_fetch(caller.client_id, size_bytes)
        result = ReceiveResult(member_id, records, receive.lock_ms, errors, throttle_ms)
        return result, leased_count - len(records)


def _decode_records(
    part: ReceivedPartition, by_offset: dict[int, Record], bytes_left: int
) -> tuple[MansioError | None, int]:
    """Decode the batches of a partition into `by_offset`. Return the error that ended the decoding early, or None, and
    what remains of `bytes_left`, the bytes that may still be decompressed in this call."""
    try:
        for piece in part.slices:
            data = memoryview(piece.read())
            for position, header in iterate_batches(data):
                batch = data[position : position + header.size]
                check_stored_batch(batch)
                if header.is_control:
                    continue
                if bytes_left <= 0:
                    raise InvalidRecord(f"the records have more than {DECODED_BYTES_MAX} bytes decompressed")
                for record in read_records(batch, output_bytes_max=bytes_left):
                    by_offset[record.offset] = record
                    bytes_left -= len(record.key or b"") + len(record.value or b"")
    except MansioError as error:
        return without_traceback(error), bytes_left
    return None, bytes_left
