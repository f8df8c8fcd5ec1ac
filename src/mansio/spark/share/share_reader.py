"""Reader of a streaming query with the option `shareGroup`: each batch has records that the query has leased.

Spark calls it on the driver: `latestOffset` leases records for a minute, `partitions`, which Spark calls when the
offset of the batch is in its log, extends the leases to `leaseDuration`, and the next `latestOffset`, which Spark calls
when the batch is complete, accepts what the query still has leased of it.

| the driver dies | then |
|---|---|
| after leases, before the offset is in Spark's log | the leases end after a minute; the records are delivered again |
| after the offset is in the log, before the batch is complete | the next run claims the leases and repeats the batch |
| after the batch is complete, before it is accepted | the next run accepts it |

Invariants:
* A batch reads the ranges of its offset, so a repeated batch reads the same records, apart from dead letters.
* Records are accepted only after Spark has committed their batch.
* Each batch has a member of its own in the group, so nothing that another batch has leased is accepted with it.
* With Trigger.AvailableNow and with `stopAtLatest` a query delivers no record twice, and none from the ends of the logs
  at its start on.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader

from mansio.errors import ConfigError, LeaseLost, MansioError
from mansio.net.range_leases import RangeLease, alter_range_leases, lease_ranges
from mansio.spark.options import ON_LEASE_LOST_FAIL
from mansio.spark.share.lease_renewal import LeaseRenewal
from mansio.spark.share.leased_ranges import (
    LeasedBatch,
    LeasedTask,
    first_ranges,
    missing_records,
    plan_tasks,
    without,
)
from mansio.spark.source.offsets import check_topic_ids, find_partitions, latest_offsets
from mansio.spark.spark_versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from mansio.spark.sync_client import SyncClient, close_sync_clients, sync_client
from mansio.spark.task_login import task_login, with_login, without_login
from mansio.state.share_partition.types import RangeOperation
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

    from mansio.net.range_leases import AlteredLeases
    from mansio.spark.options import ShareOptions, SourceOptions
    from mansio.wire.topic_partition import TopicPartition

PLANNING_LEASE_MS: Final = 60_000
"""Duration of leases until the offset of their batch is in Spark's log."""

IDLE_WAIT_MS: Final = 100
"""Time for which a request for records waits while there are none."""

LEASE_ROUNDS_MAX: Final = 3
"""How often a query that delivers no record twice asks for others in one batch."""

logger = logging.getLogger(__name__)


class ShareStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a streaming query that is a member of a share group."""

    def __init__(self, options: SourceOptions, share: ShareOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._share = share
        self._columns = tuple(columns)
        self._pending: dict[str, Any] | None = None
        """Offset that was leased and that Spark has not planned yet."""
        self._planned: dict[str, Any] | None = None
        """Offset of the last batch that this process has planned, and `_held` the leases that it has of it."""
        self._held: Mapping[TopicPartition, Sequence[RangeLease]] = {}
        self._accepted: dict[str, Any] | None = None
        self._renewal: LeaseRenewal | None = None
        self._topic_ids: dict[str, bytes] = {}
        self._target: dict[TopicPartition, int] | None = None
        """End offsets of a query that ends; `_seen` are the ranges that it has delivered."""
        self._seen: dict[TopicPartition, list[RangeLease]] = {}
        self._is_idle = False

    # -- planning --------

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch, which has no leases."""
        return LeasedBatch().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch, from the option `maxRecordsPerTrigger`."""
        return ReadMaxRows(self._share.records_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Store the current end offsets as the end of the query."""
        client = self._client()
        found = find_partitions(client, self._options)
        self._target = latest_offsets(client, found.partitions, READ_UNCOMMITTED)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Accept the batch that ended at `start`, lease records for the next one, and return its offset; `start` itself
        if there are no records. Raises `ConfigError` for the checkpoint of another source."""
        if not isinstance(limit, (ReadAllAvailable, ReadMaxRows)):
            raise ConfigError(
                f"a share group is read by rows, so the limit {type(limit).__name__} is not supported"
            )
        if self._options.stops_at_latest and self._target is None:
            self.prepareForTriggerAvailableNow()
        self._accept(start)
        if self._pending is not None:  # Spark has not run what it asked for before
            asked = LeasedBatch.from_json(self._pending)
            self._alter(asked.member, asked.ranges, RangeOperation.KEEP, lease_ms=PLANNING_LEASE_MS)
            return self._pending
        most = self._share.records_per_trigger
        if isinstance(limit, ReadMaxRows):
            most = min(most, limit.max_rows)
        batch = self._lease(most)
        self._is_idle = batch is None
        if batch is None:
            return start
        self._pending = batch.to_json()
        return self._pending

    def _lease(self, records_max: int) -> LeasedBatch | None:
        """Lease records for a batch; None if there are none. Raises the error of a partition if there are no records of
        others."""
        client = self._client()
        found = find_partitions(client, self._options)
        check_topic_ids(found, self._options)
        self._topic_ids = found.topic_ids
        member = f"spark-{uuid.uuid4().hex}"
        wait_ms = IDLE_WAIT_MS if self._is_idle and self._target is None else 0
        chosen: dict[TopicPartition, list[RangeLease]] = {}
        unwanted = 0
        for _ in range(LEASE_ROUNDS_MAX):
            leases = client.run(
                lease_ranges(
                    client.cluster,
                    self._share.group,
                    member,
                    found.partitions,
                    records_max=records_max,
                    lease_ms=PLANNING_LEASE_MS,
                    wait_ms=wait_ms,
                )
            )
            for place, ranges in leases.ranges.items():
                new = [*ranges] if self._target is None else self._undelivered(place, ranges)
                unwanted += missing_records(ranges, new)
                if new:
                    chosen[place] = new
            if chosen or not leases.ranges:
                break
        if not chosen:
            if unwanted:
                self._alter(member, {place: [] for place in found.partitions}, RangeOperation.KEEP)
            if leases.errors:
                raise next(iter(leases.errors.values()))
            return None
        for place, error in leases.errors.items():
            logger.warning("no records of %s-%d were leased: %s", *place, error)
        # Those beyond the limit are released with others when the batch is planned.
        isolation = READ_COMMITTED if leases.is_committed_only else READ_UNCOMMITTED
        batch = LeasedBatch(member, first_ranges(chosen), leases.order, isolation)
        if self._target is not None:
            for place, own in batch.ranges.items():
                self._seen[place] = sorted((*self._seen.get(place, ()), *own))
        return batch

    def _undelivered(self, place: TopicPartition, ranges: Sequence[RangeLease]) -> list[RangeLease]:
        """Return the parts of ranges that a query which ends has not delivered and that are below its end."""
        end = 0 if self._target is None else self._target.get(place, 0)
        return [
            each._replace(last=min(each.last, end - 1))
            for each in without(ranges, self._seen.get(place, ()))
            if each.first < end
        ]

    def _accept(self, offset: dict[str, Any]) -> None:
        """Accept what is still leased of a batch that Spark has committed. What has failed was released before."""
        batch = LeasedBatch.from_json(offset)
        if offset == self._pending:
            self._pending = None
        if not batch.member or offset == self._accepted:
            return
        if offset == self._planned:
            self._stop_renewal()
            self._held = {}
        self._alter(batch.member, batch.ranges, RangeOperation.ACCEPT, releases_others=True)
        self._accepted = offset

    def _alter(
        self,
        member: str,
        ranges: Mapping[TopicPartition, Sequence[RangeLease]],
        operation: RangeOperation,
        *,
        lease_ms: int = PLANNING_LEASE_MS,
        releases_others: bool = False,
    ) -> dict[TopicPartition, AlteredLeases]:
        client = self._client()
        return client.run(
            alter_range_leases(
                client.cluster,
                self._share.group,
                member,
                ranges,
                operation,
                lease_ms=lease_ms,
                releases_others=releases_others or not any(ranges.values()),
            )
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return None: the lag of the group is that which the brokers report."""
        return None

    # -- reading --------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Extend the leases of a batch, or claim them if another process has planned it before, and return the inputs
        of its tasks."""
        if start == end:  # Spark 4.1 asks so after a restart, before it knows whether the batch is complete
            return []
        batch = LeasedBatch.from_json(end)
        if not batch.member:
            return []
        is_planned = end == self._planned
        wanted = self._held if is_planned else batch.ranges
        operation = RangeOperation.KEEP if is_planned or end == self._pending else RangeOperation.CLAIM
        altered = self._alter(
            batch.member, wanted, operation, lease_ms=self._share.lease_ms, releases_others=True
        )
        held = {place: each.ranges for place, each in altered.items() if each.ranges}
        lost = {
            place: without(ranges, sorted((*altered[place].ranges, *altered[place].ended)))
            for place, ranges in wanted.items()
        }
        lost_records = sum(each.size for ranges in lost.values() for each in ranges)
        is_error = bool(lost_records) and self._share.on_lease_lost == ON_LEASE_LOST_FAIL
        if lost_records and not is_error:
            logger.warning(
                "the leases of %d records of a batch that runs again are lost: they are processed again, and other"
                " members may process them, too",
                lost_records,
            )
        self._planned, self._held = end, held
        self._stop_renewal()
        self._renewal = LeaseRenewal(self._options, self._share, batch.member, held)
        if not self._topic_ids:
            self._topic_ids = find_partitions(self._client(), self._options, may_be_missing=True).topic_ids
        read = {place: sorted((*held.get(place, ()), *lost[place])) for place in wanted}
        tasks = plan_tasks(
            replace(batch, ranges=read),
            records_per_task=self._share.records_per_task,
            topic_ids=self._topic_ids,
        )
        login = task_login(
            self._options.bootstrap_servers,
            self._options.security,
            creates_token=self._options.creates_token,
        )
        return [replace(task, login=login, lost=lost_records if is_error else 0) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task, as Arrow batches. Raises `LeaseLost` if leases of its batch are lost, unless
        `onLeaseLost` allows it: a batch that the sink has already is planned again, but not read."""
        if not isinstance(partition, LeasedTask):
            return iter(())
        if partition.lost:
            raise LeaseLost(
                f"the query has lost the leases of {partition.lost} records of a batch that it has to run again: other"
                f" members of share group {self._share.group} may have processed them. To process them again, set"
                " onLeaseLost to reprocess"
            )
        from mansio.spark.share.leased_rows import read_leased  # only tasks need it

        options = self._options
        if partition.login is not None:
            options = replace(options, security=with_login(options.security, partition.login))
        return read_leased(options, self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Accept a batch that Spark has committed, unless `latestOffset` has."""
        self._accept(end)

    def stop(self) -> None:
        """Release what is not in Spark's log, and close the connections; Spark calls this when the query has ended."""
        self._stop_renewal()
        if self._pending is not None and self._pending != self._planned:
            batch = LeasedBatch.from_json(self._pending)
            try:
                self._alter(batch.member, dict.fromkeys(batch.ranges, ()), RangeOperation.KEEP)
            except MansioError as error:
                logger.info("the leases of a batch that was not begun end by themselves: %s", error)
        close_sync_clients()

    def _stop_renewal(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.stop()

    def _client(self) -> SyncClient:
        return sync_client(self._options.bootstrap_servers, self._options.security)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for tasks, without passwords and leases."""
        options = replace(self._options, security=without_login(self._options.security))
        return {
            **self.__dict__,
            "_options": options,
            "_renewal": None,
            "_pending": None,
            "_planned": None,
            "_held": {},
            "_seen": {},
            "_target": None,
        }
