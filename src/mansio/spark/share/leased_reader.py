"""Reader of a batch read of leased records (`mansio.spark.lease`): each action reads the same ranges."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader

from mansio.spark.share.leased_ranges import LeasedBatch, LeasedTask, plan_tasks
from mansio.spark.source.offsets import find_partitions
from mansio.spark.sync_client import sync_client
from mansio.spark.task_login import task_login, with_login, without_login

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition

    from mansio.spark.options import ShareOptions, SourceOptions


class LeasedReader(DataSourceReader):
    """Reader of the ranges in the option `leasedBatch`."""

    def __init__(self, options: SourceOptions, share: ShareOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._share = share
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        """Return the input of each task."""
        options = self._options
        client = sync_client(options.bootstrap_servers, options.security)
        tasks = plan_tasks(
            LeasedBatch.from_json(json.loads(self._share.leased_batch)),
            records_per_task=self._share.records_per_task,
            topic_ids=find_partitions(client, options, may_be_missing=True).topic_ids,
        )
        login = task_login(options.bootstrap_servers, options.security, creates_token=options.creates_token)
        return [replace(task, login=login) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task, as Arrow batches."""
        if not isinstance(partition, LeasedTask):  # Spark's own type, if there is nothing to read
            return iter(())
        from mansio.spark.share.leased_rows import read_leased  # only tasks need it

        options = self._options
        if partition.login is not None:
            options = replace(options, security=with_login(options.security, partition.login))
        return read_leased(options, self._columns, partition)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for tasks, without passwords."""
        options = replace(self._options, security=without_login(self._options.security))
        return {**self.__dict__, "_options": options}
