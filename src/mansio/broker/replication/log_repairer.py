"""Log repairer: replaces damaged batches of this broker's replicas by the same batches of another replica.

`StorageHealth` reports damage that a reader, a follower or the scrubber finds. The log repairer repairs one partition
after the other, on leaders and followers, and writes a copy of each damaged segment: intact batches come from the
segment, the others from an in-sync replica, the leader first, with a Fetch request that is marked as a read for repair.
If the active segment is damaged, a new segment is started first. The replica stays in the in-sync set and is not
truncated, because it still has all other records that it acknowledged.

While the first attempt is pending, readers of the damaged range wait as for a verification. If the attempt fails, they
get CORRUPT_MESSAGE, and the repair is retried until it succeeds: when the in-sync set changes, and otherwise after a
pause that grows up to a minute, or up to an hour if the attempt wrote a copy. A copy is written only if another replica
has the first damaged range, and if there is space.

Invariants:
* A batch of another replica is used only if its CRC matches, its offsets continue those of the batch before it, and its
  leader epoch is the one that this log has for its offset, because offset and leader epoch determine a batch.
* Segments in which compaction may have left gaps are not repaired: see `mansio.storage.repair`.
* Damaged records below the log start offset are omitted from the copy, because no replica has them any more.
* A failure is logged and counted once for each reason, until the partition is repaired.
* Memory is bounded: one response, and `PARTITIONS_MAX` partitions with `OFFSETS_MAX` offsets each. Further damage is
  found again by the next reader or scrub.

Uses ports only: the simulator runs this code.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.errors import CorruptMessage, MansioError, StorageError, Unavailable, error_for_code
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields
from mansio.ports import Backoff
from mansio.storage.repair import SegmentCopy
from mansio.tracebacks import copied, without_traceback
from mansio.wire.apis import fetch
from mansio.wire.apis.fetch import FetchPartition, decode_response, encode_request
from mansio.wire.batch.record_batch import read_stored_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.ports import Background, Clock, Disk, Peers, Promise, Scheduler, Timer
    from mansio.storage.checked_ranges import CheckedRange
    from mansio.storage.segment import Segment

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPAIR_CLIENT_ID: Final = "mansio-repair"
FETCH_BYTES_MAX: Final = 1 << 20
PARTITIONS_MAX: Final = 10_000
"""Maximum number of partitions whose damage is known."""

OFFSETS_MAX: Final = 64
"""Maximum number of known offsets of damaged batches of one partition."""

POLL_INTERVAL_MS: Final = 50
"""Interval of the check whether the repaired segment can be swapped in, or the source has verified the batches."""

SWAP_WAIT_MS_MAX: Final = 30_000
"""Maximum time for which a repair waits until its segment can be swapped in."""

SOURCE_WAIT_MS_MAX: Final = 2_000
"""Maximum time for which a repair waits until the source has verified the batches. Bounded, because two replicas may
wait for each other."""

RETRY_BACKOFF: Final = Backoff(1_000, 60_000, jitter=0)
"""Backoff after an attempt that wrote nothing and therefore took one small read from another replica only."""

RETRY_BACKOFF_AFTER_COPY: Final = Backoff(30_000, 3_600_000, jitter=0)
"""Backoff after an attempt that wrote a part of the copy."""

ISR_CHECK_INTERVAL_MS: Final = 60_000
"""Interval of the check whether the in-sync set has changed since a repair failed."""

LOGGED_REASONS_MAX: Final = 8
"""Maximum number of different reasons that are logged for one partition."""

FREE_BYTES_MIN: Final = 64 << 20
"""Disk space that must remain free for appends while a copy is written."""


class RepairCounts(NamedTuple):
    """Counts since the broker started: replaced offset ranges, size of the replaced batches, and failed repairs."""

    ranges: int = 0
    replaced_bytes: int = 0
    failures: int = 0


class _Failure(NamedTuple):
    """The last, failed attempt to repair one segment.

    `end_offset`: end offset of the segment. `offset`: the offset that could not be replaced. `attempts`: number of
    attempts. `due_s`: monotonic time in seconds of the next attempt. `sources`: the in-sync replicas at the attempt; if
    they change, the next attempt is due at once."""

    end_offset: int
    offset: int
    attempts: int
    due_s: float
    sources: tuple[int, ...]


class _Damage:
    """The known damage of one partition. `offsets`: offsets of damaged batches."""

    __slots__ = ("failures", "offsets", "reasons", "retry")

    def __init__(self) -> None:
        self.offsets: dict[int, None] = {}
        self.failures: dict[int, _Failure] = {}
        """The last attempts on segments that are not repaired, by base offset of the segment."""
        self.reasons: set[str] = set()
        """The logged reasons of failed repairs."""
        self.retry: Timer | None = None

    def has_failed_at(self, offset: int) -> bool:
        """Return whether the last attempt to repair the segment that contains an offset failed."""
        return any(base <= offset < failure.end_offset for base, failure in self.failures.items())

    def is_due(self, base_offset: int, now_s: float, sources: tuple[int, ...]) -> bool:
        """Return whether the next attempt to repair a segment is due. `sources`: the current in-sync replicas."""
        failure = self.failures.get(base_offset)
        return failure is None or now_s >= failure.due_s or failure.sources != sources


class LogRepairer:
    """Log repairer of one broker. All methods run on the broker's event loop."""

    def __init__(
        self,
        node_id: int,
        *,
        partitions: PartitionSet,
        sources: Callable[[Partition], Sequence[int]],
        peers: Peers,
        disk: Disk,
        clock: Clock,
        scheduler: Scheduler,
        background: Background,
        broker_epoch: Callable[[], int],
        request_timeout_ms: int = 5_000,
    ) -> None:
        """`sources(partition)` returns the other in-sync brokers in the order in which the repairer reads from them;
        `broker_epoch` returns the epoch of this broker's current session."""
        self._node_id = node_id
        self._partitions = partitions
        self._sources = sources
        self._peers = peers
        self._disk = disk
        self._clock = clock
        self._scheduler = scheduler
        self._background = background
        self._broker_epoch = broker_epoch
        self._request_timeout_ms = request_timeout_ms
        self._damaged: dict[tuple[str, int], _Damage] = {}
        self._due: dict[tuple[str, int], None] = {}
        self._is_job_running: Promise[None] | None = None
        self._stopped = False
        self.counts = RepairCounts()

    def start(self) -> None:
        """Repair all damage that was reported since the start of the broker, and from now on."""
        health = self._partitions.storage_health
        health.on_damage(self.add_damage)
        for (topic, index), found in tuple(health.damaged.items()):
            self.add_damage(topic, index, found.offset)

    async def stop(self) -> None:
        """End the repair in progress after its current step."""
        self._stopped = True
        for damage in self._damaged.values():
            if damage.retry is not None:
                damage.retry.cancel()
        while self._is_job_running is not None:
            await self._is_job_running

    def add_damage(self, topic: str, index: int, offset: int) -> None:
        """Repair a damaged batch that was found. `offset`: an offset of the batch, -1 if it is unknown."""
        key = (topic, index)
        damage = self._damaged.get(key)
        partition = self._partitions.get(topic, index)
        if self._stopped or partition is None or (damage is None and len(self._damaged) >= PARTITIONS_MAX):
            return
        if offset < 0 and not partition.log.damaged_segments():  # a scrub has to find it
            return
        if damage is None:
            damage = self._damaged[key] = _Damage()
        if offset >= 0 and offset not in damage.offsets and len(damage.offsets) < OFFSETS_MAX:
            damage.offsets[offset] = None
            if damage.retry is not None and not damage.has_failed_at(offset):
                damage.retry.cancel()
                damage.retry = None
        if damage.retry is not None or key in self._due:
            return
        if self._sources(partition):
            partition.log.repair_pending = True
        self._begin(key)

    def _begin(self, key: tuple[str, int]) -> None:
        self._due[key] = None
        if self._is_job_running is None:
            self._is_job_running = self._scheduler.promise()
            self._scheduler.spawn(self._run(), name="repair logs")

    async def _run(self) -> None:
        try:
            while self._due and not self._stopped:
                key = next(iter(self._due))
                try:
                    await self._repair(key)
                except Exception:  # a defect ends the repair of one partition, not that of the others
                    logger.exception("repair_defect", extra=fields(topic=key[0], partition=key[1]))
                    self._forget_damage(key)
        finally:
            busy, self._is_job_running = self._is_job_running, None
            assert busy is not None
            busy.set_result(None)

    def _forget_damage(self, key: tuple[str, int]) -> None:
        """Drop the known damage of a partition; the next reader finds the damage again."""
        self._due.pop(key, None)
        self._damaged.pop(key, None)
        partition = self._partitions.get(*key)
        if partition is not None:
            partition.log.repair_pending = False

    async def _repair(self, key: tuple[str, int]) -> None:
        damage, partition = self._damaged[key], self._partitions.get(*key)
        offsets = tuple(damage.offsets)
        if partition is not None:
            await self._attempt_repairs(partition, damage, offsets)
        del self._due[key]
        if partition is None or partition.closed or self._stopped:
            del self._damaged[key]
            return
        log, failed = partition.log, bool(damage.failures)
        found = [each for each in damage.offsets if each not in offsets and not damage.has_failed_at(each)]
        for offset in offsets:
            if not damage.has_failed_at(offset):
                damage.offsets.pop(offset, None)
        if found or (not failed and log.damaged_segments()):
            # More damage was found meanwhile; its readers wait for the next attempt.
            log.repair_pending = bool(self._sources(partition))
            self._begin(key)
        else:
            log.repair_pending = False
            if failed:
                self._schedule_retry(key, damage)
            else:
                del self._damaged[key]
                partition.storage_health.record_repair(*key)
        self._scheduler.call_soon(partition.waits.wake_all)

    async def _attempt_repairs(self, partition: Partition, damage: _Damage, offsets: Sequence[int]) -> None:
        """Repair the damaged segments whose next attempt is due; update the failures in `damage`."""
        log = partition.log
        before, failures = damage.failures, {}
        for segment in log.damaged_segments(offsets):
            if self._stopped or partition.closed:
                return
            base, sources = segment.base_offset, tuple(self._sources(partition))
            if not damage.is_due(base, self._clock.monotonic(), sources):
                failures[base] = before[base]
                continue
            last = before.get(base)
            first = log.first_damaged_offset(segment, offsets)
            if last is not None and log.start_offset <= last.offset < segment.end_offset:
                first = last.offset
            repair = _SegmentRepair(self, partition, segment, first)
            attempts, pause_ms = 1 if last is None else last.attempts + 1, math.inf
            error: Exception | None = None
            try:
                if log.is_sparse(segment):
                    error = StorageError(f"{segment.path} was compacted; no other replica can repair it")
                elif not sources:
                    error = Unavailable(f"{partition.name}: no other replica is in sync")
                else:
                    await repair.run()
            except Exception as failure:  # noqa: BLE001  # a defect ends this repair, not those of others
                backoff = RETRY_BACKOFF_AFTER_COPY if repair.has_written else RETRY_BACKOFF
                error, pause_ms = without_traceback(failure), backoff.delay_ms(attempts)
            if error is None:
                partition.on_repaired()
            else:
                due_s = self._clock.monotonic() + pause_ms / 1000
                failures[base] = _Failure(segment.end_offset, repair.next_offset, attempts, due_s, sources)
                if not self._stopped:
                    self._log_failure(partition, damage, error)
        damage.failures = failures

    def _log_failure(self, partition: Partition, damage: _Damage, error: Exception) -> None:
        """Log and count a failure, unless it was logged for the same reason."""
        reason = error.message if isinstance(error, MansioError) else repr(error)
        if reason in damage.reasons or len(damage.reasons) >= LOGGED_REASONS_MAX:
            return
        damage.reasons.add(reason)
        self.counts = self.counts._replace(failures=self.counts.failures + 1)
        logger.warning(
            "repair_failed",
            extra=fields(topic=partition.topic, partition=partition.index, reason=reason),
            exc_info=None if isinstance(error, MansioError) else error,
        )

    def _schedule_retry(self, key: tuple[str, int], damage: _Damage) -> None:
        due_s = min(failure.due_s for failure in damage.failures.values())
        pause_ms = min(max((due_s - self._clock.monotonic()) * 1000, 0), ISR_CHECK_INTERVAL_MS)
        damage.retry = self._scheduler.call_later(pause_ms, self._retry, key)

    def _retry(self, key: tuple[str, int]) -> None:
        damage, partition = self._damaged.get(key), self._partitions.get(*key)
        if damage is None or self._stopped:
            return
        damage.retry = None
        now_s, sources = self._clock.monotonic(), () if partition is None else tuple(self._sources(partition))
        present = () if partition is None else partition.log.damaged_segments(tuple(damage.offsets))
        bases = {segment.base_offset for segment in present}
        if bases != damage.failures.keys() or any(damage.is_due(base, now_s, sources) for base in bases):
            self._begin(key)
        else:
            self._schedule_retry(key, damage)

    # Used by the repair of a segment

    async def run_and_pause(self, work: Callable[[], T]) -> T:
        """Run blocking work, and then pause for as long as it took, so that it uses half of disk and processor time."""
        began = self._clock.monotonic()
        result = await self.run_blocking(work)
        await self._scheduler.sleep((self._clock.monotonic() - began) * 1000)
        if self._stopped:
            raise Unavailable("the broker is stopping")
        return result

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Run blocking work, also while the broker is stopping."""
        return await run_in_thread(self._scheduler, self._background, work)

    async def wait_poll_interval(self) -> None:
        """Wait for `POLL_INTERVAL_MS`."""
        await self._scheduler.sleep(POLL_INTERVAL_MS)
        if self._stopped:
            raise Unavailable("the broker is stopping")

    def new_copy(self, partition: Partition, segment: Segment) -> SegmentCopy:
        """Return a new, empty `SegmentCopy`, into which the batches of a repaired segment are written."""
        interval = partition.log.settings.index_interval_bytes
        return SegmentCopy(self._disk, segment, index_interval_bytes=interval)

    async def check_space(self, segment: Segment) -> None:
        """Raise `StorageError` if there is no space for a copy of a segment."""
        free_bytes = await self.run_and_pause(partial(self._disk.free_bytes, segment.directory))
        if free_bytes < segment.size + FREE_BYTES_MIN:
            raise StorageError(f"no space for a copy of {segment.path}: {segment.size} bytes")

    async def read(
        self, partition: Partition, offset: int, bytes_max: int = FETCH_BYTES_MAX
    ) -> tuple[int, bytes]:
        """Read intact batches from `offset` on, at least one, from the first in-sync replica that has them.

        Returns the broker id and the batches. Raises the error of the last replica."""
        failed: MansioError = Unavailable(f"{partition.name}: no other replica is in sync")
        for node_id in self._sources(partition):
            try:
                return node_id, await self._read_from(node_id, partition, offset, bytes_max)
            except MansioError as error:
                failed = type(error)(f"broker {node_id}: {error.message}")
        raise copied(failed)

    async def _read_from(self, node_id: int, partition: Partition, offset: int, bytes_max: int) -> bytes:
        """Read intact batches from `offset` on from one replica; wait while that broker verifies them."""
        wanted = FetchPartition(partition.index, partition.leader_epoch, offset, -1, -1, bytes_max)
        request = encode_request(
            fetch.REPLICA_FETCH_VERSION,
            0,
            REPAIR_CLIENT_ID,
            [(None, partition.topic_id.bytes, [wanted])],
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=bytes_max,
            replica_id=self._node_id,
            replica_epoch=self._broker_epoch(),
            is_repair_read=True,
        )
        for _ in range(SOURCE_WAIT_MS_MAX // POLL_INTERVAL_MS):
            frame = await self._peers.send(node_id, request, timeout_ms=self._request_timeout_ms)
            response = decode_response(fetch.REPLICA_FETCH_VERSION, frame)
            if response.error_code:
                raise error_for_code(response.error_code, "the read for repair was rejected")
            answer = response.topics[0][2][0] if response.topics and response.topics[0][2] else None
            if answer is None:
                raise Unavailable(f"{partition.name} is not in the response")
            if answer.error_code:
                raise error_for_code(answer.error_code, f"{partition.name} cannot be read at {offset}")
            if answer.records_bytes:
                return bytes(answer.records)
            await self.wait_poll_interval()  # the source verifies the batches first
        raise Unavailable(f"{partition.name} is not verified at {offset}")

    def report_replaced(
        self, partition: Partition, ranges: Sequence[tuple[int, int, int]], size_bytes: int
    ) -> None:
        """Count and log replaced ranges, each with first offset, end offset and source broker."""
        self.counts = self.counts._replace(
            ranges=self.counts.ranges + len(ranges), replaced_bytes=self.counts.replaced_bytes + size_bytes
        )
        for first, end, source in ranges:
            logger.warning(
                "damage_repaired",
                extra=fields(
                    topic=partition.topic,
                    partition=partition.index,
                    first_offset=first,
                    last_offset=end - 1,
                    source=source,
                ),
            )


class _SegmentRepair:
    """The repair of one segment.

    `next_offset`: the offset to be replaced next. `damaged_offset`: the first damaged offset of the segment.
    """

    def __init__(
        self, repairer: LogRepairer, partition: Partition, segment: Segment, damaged_offset: int
    ) -> None:
        self.next_offset = damaged_offset
        self._repairer = repairer
        self._partition = partition
        self._segment = segment
        self._generation = partition.log.generation
        self._copy = repairer.new_copy(partition, segment)
        self._ranges: list[tuple[int, int, int]] = []
        self._size_bytes = 0

    @property
    def has_written(self) -> bool:
        """Whether a part of the copy was written."""
        return self._copy.size > 0

    async def run(self) -> None:
        """Repair the segment. Raises `MansioError` if it is not repaired; then the log is unchanged."""
        repairer, partition, segment, log = (
            self._repairer,
            self._partition,
            self._segment,
            self._partition.log,
        )
        await repairer.read(partition, self.next_offset, 1)
        await repairer.check_space(segment)
        if log.is_active(segment):
            await partition.roll_when_possible()
            partition.request_flush()
        self._check_current()
        try:
            await self._write_copy()
            epochs, start_offset = log.leader_epochs.entries(), log.durable_start_offset
            while not await self._in_thread(partial(self._copy.verify, epochs, start_offset)):
                pass
            if not self._ranges and await self._in_thread(self._copy.is_name_missing):
                self._ranges.append((segment.base_offset, segment.end_offset, partition.broker_id))
            if self._ranges:
                await self._swap_copy()
        except Exception:
            await self._remove_copy()
            raise
        if self._ranges:
            repairer.report_replaced(partition, self._ranges, self._size_bytes)
            return
        await self._remove_copy()
        if segment.checked is not None:  # the segment is intact: let readers verify it again
            log.forget_checks(segment)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        result = await self._repairer.run_and_pause(work)
        self._check_current()
        return result

    def _check_current(self) -> None:
        log = self._partition.log
        if log.closed or log.generation != self._generation or not log.has_segment(self._segment):
            raise Unavailable(f"{self._segment.path} is not in the log any more")

    async def _write_copy(self) -> None:
        """Write the copy: the intact batches of the segment, and batches of another replica for the damaged ones."""
        log, segment = self._partition.log, self._segment
        position, offset, delimit = 0, segment.base_offset, False
        while offset < segment.end_offset:
            try:
                file = log.segment_file(segment)
                task = log.scrub_task(segment, position, offset, with_index=delimit)
                result = await self._in_thread(partial(self._copy.copy_intact, file, task, delimit=delimit))
            except StorageError:
                # The file is missing, or the disk does not return this part of it.
                await self._write_replacement_batches(offset, segment.end_offset)
                return
            for found in result.ranges:
                if found.damage and not await self._replace_range(found):
                    return
            position, offset = result.position, result.offset
            if delimit and not result.ranges and not result.done:  # no batch from here on
                await self._write_replacement_batches(offset, segment.end_offset)
                return
            delimit = bool(result.problem) and not delimit

    async def _replace_range(self, found: CheckedRange) -> bool:
        """Replace one damaged range. Returns False if the whole rest of the segment was replaced."""
        try:
            await self._write_replacement_batches(found.offset, found.end_offset)
        except CorruptMessage:
            # The batch that was taken for the next intact one does not follow those of the other replica.
            await self._write_replacement_batches(self.next_offset, self._segment.end_offset)
            return False
        return True

    async def _write_replacement_batches(self, offset: int, end_offset: int) -> None:
        """Write the batches of another replica from `offset` to `end_offset`, without those below the log start offset.

        Raises `CorruptMessage` if no batch of the other replica ends at `end_offset`."""
        partition, log = self._partition, self._partition.log
        lowest = offset
        if offset < (start_offset := log.start_offset):
            if min(end_offset, start_offset) > log.durable_start_offset:
                raise Unavailable(f"{partition.name}: its start, {start_offset}, is not on disk yet")
            offset = start_offset
        while offset < end_offset:
            self.next_offset = lowest
            source, records = await self._repairer.read(partition, offset)
            self._check_current()
            headers, _ = read_stored_batches(records)
            first, size = offset, 0
            for header in headers:
                base_offset = header.base_offset
                if not lowest <= base_offset <= offset <= header.last_offset < end_offset:
                    break
                if header.leader_epoch != (epoch := log.leader_epochs.epoch_for_offset(base_offset)):
                    raise StorageError(
                        f"broker {source} has leader epoch {header.leader_epoch} at {offset}, this log {epoch}"
                    )
                offset = lowest = header.last_offset + 1
                size += header.size
            self.next_offset = lowest
            if size:
                await self._in_thread(partial(self._copy.add, records[:size]))
                self._size_bytes += size
                last = self._ranges[-1] if self._ranges else None
                if last is not None and last[1:] == (first, source):
                    self._ranges[-1] = last[0], offset, source
                else:
                    self._ranges.append((first, offset, source))
            else:
                raise CorruptMessage(
                    f"broker {source} has no batch that begins at {offset} and ends below {end_offset}"
                )

    async def _swap_copy(self) -> None:
        repairer, log, segment, copy = self._repairer, self._partition.log, self._segment, self._copy
        waited_ms = 0
        while not log.begin_repair(segment):
            if waited_ms >= SWAP_WAIT_MS_MAX:
                raise Unavailable(f"{segment.path} is in use")
            waited_ms += POLL_INTERVAL_MS
            await repairer.wait_poll_interval()
            self._check_current()
        done = False
        try:
            await repairer.run_blocking(copy.swap)
            done = True
        finally:
            log.finish_repair(segment, copy.size, copy.index if done else None)

    async def _remove_copy(self) -> None:
        """Remove the files of the copy; if that fails, the next start removes them.

        The files of a log that was closed meanwhile are removed with the log or at the next start."""
        if self._partition.log.closed:
            return
        try:
            await self._repairer.run_blocking(self._copy.abandon)
        except MansioError as error:
            logger.info(
                "repair_file_not_removed", extra=fields(path=self._segment.path, reason=error.message)
            )
