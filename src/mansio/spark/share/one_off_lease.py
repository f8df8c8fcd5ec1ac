"""`mansio.spark.lease`: records of a share group, leased once, for one-off work without a stream."""

from __future__ import annotations

import json
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame

from mansio.errors import InvalidRecordState
from mansio.net.range_leases import alter_range_leases, lease_ranges
from mansio.spark.options import SHARE_GROUP_OPTION, SourceOptions
from mansio.spark.share.failures import failures_of, send_failures
from mansio.spark.share.lease_renewal import LeaseRenewal
from mansio.spark.share.leased_ranges import LeasedBatch, first_ranges
from mansio.spark.source.offsets import find_partitions
from mansio.spark.sync_client import sync_client
from mansio.state.share_partition.types import RangeOperation
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import SparkSession

    from mansio.spark.options import ShareOptions
    from mansio.spark.share.failures import RecordFailure

DEFAULT_RECORDS_MAX: Final = 200_000


class LeasedRecords:
    """Records that one call of `lease` has leased."""

    def __init__(
        self,
        spark: SparkSession,
        options: SourceOptions,
        share: ShareOptions,
        batch: LeasedBatch,
        frame: DataFrame,
    ) -> None:
        self._spark = spark
        self._options = options
        self._share = share
        self._batch = batch
        self._is_acknowledged = False
        self._frame = frame

    @property
    def frame(self) -> DataFrame:
        """The records, with the columns of the source and `delivery_count` and `lease`. Each action reads the same
        ones."""
        return self._frame

    @property
    def records(self) -> int:
        """Number of leased records; offsets without a record count, too."""
        return self._batch.records

    def acknowledge(self, failed: DataFrame | Iterable[RecordFailure] = ()) -> int:
        """Release or reject the failed records, and accept the others; return how many were accepted. A lower number
        than that of the others means that their leases were lost.

        `failed`: a DataFrame with the column `error` of `mansio.spark.work.apply`, of which the rows with an error
        count, or `RecordFailure`s. Raises `InvalidRecordState` in a second call, `ConfigError` for a DataFrame without
        the necessary columns, and the errors of the connection, after which the call can be repeated."""
        if self._is_acknowledged:
            raise InvalidRecordState("the leased records are acknowledged already")
        failures = failures_of(failed) if isinstance(failed, DataFrame) else [*failed]
        if not self._batch.member:
            return 0
        client = sync_client(self._options.bootstrap_servers, self._options.security)
        send_failures(client, self._share.group, self._batch.member, failures)
        accepted = self._alter(RangeOperation.ACCEPT)
        self._is_acknowledged = True
        return accepted

    def _alter(self, operation: RangeOperation) -> int:
        """Accept all records of the batch that are leased, or, with KEEP, release them. Return the number."""
        client = sync_client(self._options.bootstrap_servers, self._options.security)
        is_release = operation == RangeOperation.KEEP
        ranges = {place: () if is_release else own for place, own in self._batch.ranges.items()}
        found = client.run(
            alter_range_leases(
                client.cluster,
                self._share.group,
                self._batch.member,
                ranges,
                operation,
                lease_ms=self._share.lease_ms,
                releases_others=True,
            )
        )
        return sum(each.size for one in found.values() for each in one.ranges)

    def release(self) -> None:
        """Release the records, whose delivery does not count as an attempt; other members can have them at once."""
        if not self._is_acknowledged and self._batch.member:
            self._is_acknowledged = True
            self._alter(RangeOperation.KEEP)


@contextmanager
def lease(
    spark: SparkSession,
    topic: str,
    group: str,
    options: Mapping[str, str],
    *,
    max_records: int = DEFAULT_RECORDS_MAX,
) -> Iterator[LeasedRecords]:
    """Lease records of a share group once, and keep the leases while the block runs.

    >>> with mansio.spark.lease(spark, "images", "resize", options, max_records=1_000) as leased:
    ...     done = mansio.spark.work.apply(leased.frame, resize, schema="small binary")
    ...     done.drop("value").write.parquet("resized")
    ...     leased.acknowledge(failed=spark.read.parquet("resized"))

    The failures are read from what was written, because Spark may evaluate `done` again, even if it is persisted, and
    other rows may fail then. `options`: options of a stream with `shareGroup`, `kafka.bootstrap.servers` among them,
    except the subscription.
    Leaving the block without `acknowledge` releases the records. What was written before `acknowledge` is written again
    if the program ends between both: at least once.

    Raises `ConfigError` for an invalid option or an unknown topic, and the errors of the connection."""
    chosen = {name: text for name, text in options.items() if name.lower() != "subscribe"}
    chosen |= {"subscribe": topic, SHARE_GROUP_OPTION: group}
    parsed = SourceOptions.parse(chosen, streaming=True)
    share = parsed.share
    assert share is not None, "the option shareGroup is set"
    client = sync_client(parsed.bootstrap_servers, parsed.security)
    found = find_partitions(client, parsed)
    member = f"spark-{uuid.uuid4().hex}"
    leases = client.run(
        lease_ranges(
            client.cluster,
            group,
            member,
            found.partitions,
            records_max=max_records,
            lease_ms=share.lease_ms,
        )
    )
    if leases.errors and not leases.ranges:
        raise next(iter(leases.errors.values()))
    batch = LeasedBatch()
    if leases.ranges:
        isolation = READ_COMMITTED if leases.is_committed_only else READ_UNCOMMITTED
        batch = LeasedBatch(member, first_ranges(leases.ranges), leases.order, isolation)
    text = json.dumps(batch.to_json())
    frame = spark.read.format("mansio").options(**chosen).option("leasedBatch", text).load()
    leased = LeasedRecords(spark, parsed, share, batch, frame)
    renewal = LeaseRenewal(parsed, share, batch.member, batch.ranges) if batch.member else None
    try:
        yield leased
    finally:
        if renewal is not None:
            renewal.stop()
        leased.release()
