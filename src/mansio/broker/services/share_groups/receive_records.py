"""Receive service: leases decoded records of a share group, for protocols whose clients have no share session.

Each call leases records to a new member. The result has the id of this member, which the client passes to
`ShareService.acknowledge`. A lease that is not acknowledged expires, as any other lease.

A batch whose content cannot be read is intact: a client has stored it so. Its records are rejected with the reason,
which is also in the log and in the health of the broker, and the call continues behind it.

Invariants:
* The number of records in a result and their compressed and decompressed bytes are bounded. At least one batch is
  decompressed in each call, however large it is when decompressed (at most `DECOMPRESSED_BYTES_MAX`).
* Every leased offset is in the result, is acknowledged as a gap, is rejected, or is released, so that no offset that
  the client does not get stays leased.
* The deliveries of records that were not handed out are not counted: those that a call does not decompress any more,
  those at and behind damage, and the leases of a cancelled call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.coordinator.share.dead_letter_copies import REASON_UNREADABLE
from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
from mansio.broker.routing.caller import ANONYMOUS, BROKER_CALLER
from mansio.broker.services.share_groups.share import (
    PARTITIONS_MAX,
    PartitionAcknowledgements,
    ReceiveOperation,
)
from mansio.errors import (
    UNREADABLE_CONTENT,
    InvalidRecord,
    InvalidRequest,
    MansioError,
    NotLeaderOrFollower,
    Unavailable,
)
from mansio.host.run_in_thread import run_in_thread
from mansio.ports import complete_with_error
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.share_partition.types import GAP, REJECT, RELEASE, AcknowledgementBatch
from mansio.tracebacks import copied, result_of, without_traceback
from mansio.wire.batch.compression import (
    DECOMPRESSED_BYTES_MAX,
    GZIP_RATIO_MAX,
    Codec,
    estimate_decompressed_bytes,
)
from mansio.wire.batch.record_batch import CODEC_MASK, HEADER_BYTES, check_stored_batch, iterate_batches
from mansio.wire.batch.record_reader import Record, read_record_slices

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.fetch import FetchCounters
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.services.share_groups.share import ReceivedPartition, ShareService
    from mansio.broker.topics.topics import TopicService
    from mansio.ports import Clock, Promise, Random, Scheduler
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.topic_partition import TopicIdPartition

RECEIVED_RECORDS_MAX: Final = 10_000
"""Maximum number of records in one call."""

BYTES_MAX: Final = 8 << 20
"""Maximum bytes of stored batches in one call; a larger first batch is returned nevertheless."""

ANSWER_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of keys, values and headers in the result of one call. A larger record is rejected: no call can return
it."""

CALL_DECOMPRESSED_BYTES_MAX: Final = DECOMPRESSED_BYTES_MAX
"""Maximum decompressed bytes in one call, except those of its first batch. The records behind are released, for the
next call."""

INLINE_DECOMPRESSED_BYTES_MAX: Final = 128 << 10
"""Decompressed size of a partition's batches up to which they are decoded on the event loop, which takes less than
50 ms for the smallest records."""

MEMBER_ID_RANDOM_BYTES: Final = 16


class ReceiveService:
    """Leases decoded records of share groups. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
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
        authorization: Authorization,
    ) -> None:
        self._authorization = authorization
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
        """Lease at most `max_records` records of the partitions of `topics` that this broker leads, for a caller that
        needs READ for the group and the topics. While no records
        are available, wait for at most `max_wait_ms`, or until the deadline of `caller`. `lease_ms`: duration of the
        leases, -1 for the group's. `member_id`: a result of `new_member_id`, "" for a new one.

        Raises `GroupAuthorizationFailed`, `TopicAuthorizationFailed`, `InvalidGroupId`, `InvalidRequest`,
        `UnknownTopicOrPartition`, and `NotLeaderOrFollower` if this broker leads no partition of the topics. Errors of
        single partitions are in the result, also that of a topic for which the caller has lost its right meanwhile.
        """
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        self._authorization.check_all(caller, Operation.READ, ResourceType.TOPIC, topics)
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
            user=caller.session.user,
            client_id=caller.client_id,
            grants=self._authorization.grants(caller),
            partitions=lambda: led,
            is_connected=lambda: not promise.done(),
            is_active=lambda: not promise.done(),
            max_records=min(max_records, RECEIVED_RECORDS_MAX),
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
                decoder = _Decoder()
                while True:
                    received = await receive.run(())
                    result, gap_count = await self._decode_result(
                        group_id, member_id, names, received, receive, caller, decoder
                    )
                    records += result.records
                    # Offsets without a record are done now: others take their place, and a caller that waits waits on.
                    if not gap_count or result.errors or promise.done() or len(records) >= max_records:
                        break
                    if decoder.is_full:
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
                complete_with_error(promise, copied(error))
            finally:  # after an unexpected error, which the scheduler logs, the caller must not wait forever
                complete_with_error(
                    promise, Unavailable("receive records: interrupted by an unexpected error")
                )

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
        return whether they may. Leases none. Raises the errors of `receive_records`. One wait is for several callers,
        whose rights are asked for when they receive."""
        check_group_id(group_id)
        led = self._find_led(topics)
        is_over = False
        receive = ReceiveOperation(
            self._share_service,
            group_id,
            self.new_member_id(),
            user=ANONYMOUS.session.user,
            client_id=None,
            grants=None,
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

    def _find_led(self, topics: Collection[str]) -> list[TopicIdPartition]:
        """Return the partitions of the topics that this broker leads, beginning with a random one. Raises
        `UnknownTopicOrPartition`, and `NotLeaderOrFollower` if it leads none."""
        led: list[TopicIdPartition] = []
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

    def _report(self, topic_id: bytes, index: int, decoded: _Decoded) -> None:
        """Report what was rejected because it cannot be read, or not be returned."""
        for offset, error in decoded.unreadable:
            try:
                self._partitions.find(None, topic_id, index).report_damage(offset, error)
            except MansioError:  # closed meanwhile
                return

    async def _decode_result(
        self,
        group_id: str,
        member_id: str,
        names: Mapping[bytes, str],
        received: Mapping[TopicIdPartition, ReceivedPartition],
        receive: ReceiveOperation,
        caller: Caller,
        decoder: _Decoder,
    ) -> tuple[ReceiveResult, int]:
        """Return the records in `received`, and the number of leased offsets without a record."""
        records: list[ReceivedRecord] = []
        leased_count = 0
        errors: dict[tuple[str, int], MansioError] = {}
        unused: list[PartitionAcknowledgements] = []
        size_bytes = 0
        for (topic_id, index), part in received.items():
            topic = names[topic_id]
            size_bytes += part.size_bytes
            error = part.error
            if error is None:
                decoded = await self._decode(decoder, part)
                error = decoded.error
                leased_count += sum(last - first + 1 for first, last, _ in part.acquired)
                records += [
                    ReceivedRecord(topic, topic_id, index, record.offset, delivery_count, *record[1:])
                    for record, delivery_count in decoded.records
                ]
                if decoded.unused:
                    unused.append(PartitionAcknowledgements(topic_id, index, decoded.unused))
                self._report(topic_id, index, decoded)
            if error is not None:
                errors[topic, index] = error
        if unused:
            await self._share_service.acknowledge(group_id, member_id, unused, caller=BROKER_CALLER)
        self._counters.count_fetch(size_bytes)
        quotas = self._quotas.active
        throttle_ms = 0
        if quotas is not None:
            throttle_ms = quotas.record_fetch(caller.session.user, caller.client_id, size_bytes)
        result = ReceiveResult(member_id, records, receive.lock_ms, errors, throttle_ms)
        return result, leased_count - len(records)

    async def _decode(self, decoder: _Decoder, part: ReceivedPartition) -> _Decoded:
        """Decode the leased records of one partition, of large batches on a thread."""
        pieces: list[memoryview] = []
        error: MansioError | None = None
        try:
            pieces.extend(memoryview(piece.read()) for piece in part.slices)
        except MansioError as raised:
            error = without_traceback(raised)
        work = partial(decoder.decode, part, pieces, error)
        if _decompressed_bytes(pieces) <= INLINE_DECOMPRESSED_BYTES_MAX:
            return work()
        return await run_in_thread(self._scheduler, self._partitions.batch_processor.background, work)


def _decompressed_bytes(pieces: Sequence[memoryview]) -> int:
    """Upper bound of the decompressed size of batches."""
    total = 0
    try:
        for data in pieces:
            for position, header in iterate_batches(data):
                content = data[position + HEADER_BYTES : position + header.size]
                codec = header.attributes & CODEC_MASK  # which may be an unknown one
                if codec == Codec.GZIP:  # the size that the stream states may be too low
                    total += len(content) * GZIP_RATIO_MAX
                else:
                    total += estimate_decompressed_bytes(codec, content, DECOMPRESSED_BYTES_MAX)
    except MansioError:
        pass  # raised again where the batches are decoded
    return total


class _Decoded:
    """The records of one partition in the result of a call, with their delivery counts; the acknowledgements of the
    leased offsets that are not in the result, ascending; the error that ended the decoding early; and per unreadable
    batch its first offset and the error."""

    __slots__ = ("error", "records", "unreadable", "unused")

    def __init__(self) -> None:
        self.records: list[tuple[Record, int]] = []
        self.unused: list[AcknowledgementBatch] = []
        self.error: MansioError | None = None
        self.unreadable: list[tuple[int, MansioError]] = []


class _Decoder:
    """Decodes the leased records of one call, within its bounds. `is_full`: the bounds are reached, and the records
    behind were released."""

    __slots__ = (
        "_answer_bytes_left",
        "_bound_bytes",
        "_decompressed_bytes_left",
        "_is_empty",
        "_next_offset",
        "is_full",
    )

    def __init__(self) -> None:
        self._answer_bytes_left = ANSWER_BYTES_MAX
        self._decompressed_bytes_left = CALL_DECOMPRESSED_BYTES_MAX
        self._bound_bytes = 0  # upper bound of the size of all records that were decoded
        self._is_empty = True
        self._next_offset = 0  # base offset of the last batch that was read
        self.is_full = False

    def decode(
        self, part: ReceivedPartition, pieces: Sequence[memoryview], error: MansioError | None
    ) -> _Decoded:
        """Decode the leased records of one partition, which are in the batches of `pieces`; `error` ended the reading
        of further ones. May run on any thread."""
        decoded = _Decoded()
        found: dict[int, Record] = {}
        reasons: dict[int, str] = {}  # of the offsets that are rejected
        released_from = self._read(part, pieces, found, reasons, decoded)
        if error is not None and decoded.error is None and not self.is_full:
            decoded.error = without_traceback(error)
            released_from = self._next_offset
        may_exceed = self._bound_bytes > ANSWER_BYTES_MAX
        runs: list[tuple[int, int, bytes, str]] = []
        for first, last, delivery_count in part.acquired:
            for offset in range(first, last + 1):
                record = found.get(offset)
                kind, reason = GAP, ""
                if offset >= released_from:
                    kind = RELEASE
                elif (why := reasons.get(offset)) is not None:
                    kind, reason = REJECT, why
                elif record is not None:
                    size = _size_bytes(record) if may_exceed else 0
                    if size > ANSWER_BYTES_MAX:
                        kind = REJECT
                        reason = (
                            f"the record takes {size} bytes; a receive returns at most {ANSWER_BYTES_MAX}"
                        )
                        decoded.unreadable.append((offset, InvalidRecord(reason)))
                    elif size > self._answer_bytes_left:
                        self.is_full, released_from, kind = True, offset, RELEASE
                    else:
                        self._answer_bytes_left -= size
                        decoded.records.append((record, delivery_count))
                        continue
                if runs and runs[-1][1] + 1 == offset and runs[-1][2:] == (bytes([kind]), reason):
                    runs[-1] = (runs[-1][0], offset, *runs[-1][2:])
                else:
                    runs.append((offset, offset, bytes([kind]), reason))
        decoded.unused = [
            AcknowledgementBatch(first, last, kind, reason=reason, was_handed_out=kind[0] != RELEASE)
            for first, last, kind, reason in runs
        ]
        return decoded

    def _read(
        self,
        part: ReceivedPartition,
        pieces: Sequence[memoryview],
        found: dict[int, Record],
        reasons: dict[int, str],
        decoded: _Decoded,
    ) -> float:
        """Read the batches with leased records into `found`, and why the records of others are rejected into `reasons`.
        Return the offset from which on the records are released, infinite if there is none."""
        if self.is_full:
            return -1
        self._next_offset = 0
        try:
            for data in pieces:
                for position, header in iterate_batches(data):
                    self._next_offset = header.base_offset
                    batch = data[position : position + header.size]
                    leased = [
                        (max(first, header.base_offset), min(last, header.last_offset))
                        for first, last, _ in part.acquired
                        if first <= header.last_offset and last >= header.base_offset
                    ]
                    if not leased:
                        continue
                    try:
                        check_stored_batch(batch)
                        if header.is_control:
                            continue
                        if self._must_end_before(header, batch):
                            return self._next_offset
                        _find_records(batch, leased[0][0], leased[-1][1], found)
                    except UNREADABLE_CONTENT as error:
                        decoded.unreadable.append((header.base_offset, without_traceback(error)))
                        reason = f"{REASON_UNREADABLE}: {error}"
                        for first, last in leased:
                            unread = (offset for offset in range(first, last + 1) if offset not in found)
                            reasons.update(dict.fromkeys(unread, reason))
        except MansioError as error:
            decoded.error = without_traceback(error)
            return self._next_offset
        return math.inf

    def _must_end_before(self, header: BatchHeader, batch: memoryview) -> bool:
        """Count the decompressed size of a batch, and return whether it does not fit any more."""
        content = batch[HEADER_BYTES:]
        size = estimate_decompressed_bytes(header.codec, content, DECOMPRESSED_BYTES_MAX)
        if size > self._decompressed_bytes_left and not self._is_empty:
            self.is_full = True
            return True
        self._decompressed_bytes_left -= size
        # The size that a gzip stream states may be too low.
        self._bound_bytes += size if header.codec != Codec.GZIP else len(content) * GZIP_RATIO_MAX
        self._is_empty = False
        return False


def _find_records(batch: memoryview, first: int, last: int, found: dict[int, Record]) -> None:
    """Read the records of a batch with offsets from `first` to `last` into `found`; if an error is raised, those before
    the unreadable rest. The others take no memory: a batch may have millions of them."""
    new_record = tuple.__new__
    for rows in read_record_slices(batch, tuple, "", 0):
        for row in rows:
            if first <= row[2] <= last:
                found[row[2]] = new_record(Record, row[2:])
        if rows and rows[-1][2] >= last:
            return


def _size_bytes(record: Record) -> int:
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers)
