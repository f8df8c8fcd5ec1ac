"""Listener that commits the offsets of a Spark query for a consumer group.

Spark stores the offsets of a query in its checkpoint. `ProgressListener` also commits them to the broker after each
complete micro-batch, for the group `mansio.pipeline.<name>`. `mansio group describe` and dashboards for consumer groups
then show the query and its lag. The commit's metadata sets a retention hold (`encode_hold_metadata`), which makes the
broker retain unread records, within the limits of the topic.

Invariants:
* A query resumes from its checkpoint, never from the committed offsets.
* The committed offsets are never above those of complete batches, so the broker retains all unread records.
* A run that starts commits the offsets of the checkpoint's last complete batch before it reads.
* Within a run the committed offsets never decrease. Spark delivers the events of earlier batches late, also after the
  offsets of the last batch were committed.
* Errors of a commit are logged and do not stop the query.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import StreamingQueryListener

from mansio.errors import MansioError
from mansio.logs import fields
from mansio.net.blocking import LoopThread
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.net.offsets import CommittedOffset, commit_offsets
from mansio.spark.source.offsets import FIRST_BATCH_START
from mansio.spark.spark_versions import parse_progress_offsets
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, pipeline_group_id
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )

logger = logging.getLogger(__name__)

CLIENT_ID = "mansio-spark-progress"
COMMIT_TIMEOUT_MS = 10_000
"""Timeout of a commit, during which Spark's event queue is blocked."""


class OffsetPublisher:
    """Commits the offsets of one pipeline, in a separate thread, which `close` ends. After `close`, `publish` does
    nothing: Spark may report the last batches of a query late.
    """

    def __init__(self, name: str, bootstrap_servers: str) -> None:
        """Connect. Raises `ConnectionLost` if no broker answers."""
        self.name = name
        self.group = pipeline_group_id(name)
        self._thread = LoopThread("mansio-spark-progress")
        self._lock = threading.Lock()
        self._is_open = True
        try:
            self._cluster = self._thread.run(_open(bootstrap_servers))
        except BaseException:
            self._thread.close()
            raise

    def publish(self, offsets: Mapping[TopicPartition, int], query_id: str = "") -> None:
        """Commit the next offsets that the pipeline will read. Raises the broker's error."""
        mark = encode_hold_metadata(query_id)
        marked = {partition: CommittedOffset(offset, mark) for partition, offset in offsets.items()}
        with self._lock:
            if self._is_open:
                self._thread.run(
                    commit_offsets(self._cluster, self.group, marked, retry_timeout_ms=COMMIT_TIMEOUT_MS)
                )

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._thread.run(self._cluster.close())
                self._thread.close()


class ProgressListener(StreamingQueryListener):
    """Commits the offsets of the query with this `queryName`. Register it with `spark.streams.addListener`."""

    def __init__(self, name: str, bootstrap_servers: str) -> None:
        self.name = name
        self._publisher = OffsetPublisher(name, bootstrap_servers)
        self._published: dict[TopicPartition, int] = {}
        self._lock = threading.Lock()
        """Held while offsets are committed: Spark's event thread and the thread of the run both commit."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: no batch is complete yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Commit the offsets after each micro-batch, also after one without new data."""
        if event.progress.name == self.name:
            self.publish(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: the offsets of complete batches are committed already."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing: the offsets of complete batches are committed already."""

    def publish(self, progress: StreamingQueryProgress) -> None:
        """Commit the offsets of a micro-batch."""
        self.publish_offsets([source.endOffset for source in progress.sources], str(progress.id))

    def publish_offsets(self, sources: Iterable[str | None], query_id: str) -> None:
        """Commit the end offsets of all sources of a complete micro-batch. A failure is logged, and the next batch
        commits again. If two sources read the same partition, as in a self-join, the lower offset is committed.
        """
        found: dict[TopicPartition, int] = {}
        for text in sources:
            for partition, offset in offsets_in(text).items():
                found[partition] = min(offset, found.get(partition, offset))
        with self._lock:
            newest = {place: max(offset, self._published.get(place, 0)) for place, offset in found.items()}
            try:
                self._publisher.publish(newest, query_id)
            except MansioError as error:
                logger.warning(
                    "pipeline_progress_not_published", extra=fields(pipeline=self.name, error=error.message)
                )
                return
            self._published |= newest

    def close(self) -> None:
        """Close the connection to the broker."""
        self._publisher.close()


def offsets_in(text: str | None) -> dict[TopicPartition, int]:
    """Parse the offsets that Mansio's source and Spark's Kafka source report, such as `{"topic": {"0": 5}}`. Empty for
    the text of another source.
    """
    found = parse_progress_offsets(text)
    if not isinstance(found, dict):
        return {}
    offsets = {}
    for topic, partitions in found.items():
        if topic == FIRST_BATCH_START:
            continue
        if not isinstance(partitions, dict):
            return {}
        for index, offset in partitions.items():
            if not (index.isdecimal() and type(offset) is int and offset >= 0):
                return {}
            offsets[TopicPartition(topic, int(index))] = offset
    return offsets


async def _open(bootstrap_servers: str) -> Cluster:
    cluster = Cluster(
        bootstrap_servers, options=ConnectionOptions(client_id=CLIENT_ID), auto_create_topics=False
    )
    try:
        await cluster.start()
    except BaseException:
        await cluster.close()
        raise
    return cluster
