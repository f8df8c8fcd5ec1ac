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

import json
import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import StreamingQueryListener

from mansio.errors import MansioError
from mansio.logs import fields
from mansio.net.blocking import LoopThread
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.net.contexts import resolve_security
from mansio.net.offsets import commit_offsets, fetch_offsets
from mansio.pipelines.pipeline_progress import (
    REPORT_INTERVAL_S,
    PipelineProgress,
    commits_with_holds,
    newest_progress,
    progress_of_batch,
)
from mansio.spark.source.offsets import RESERVED_KEYS
from mansio.spark.spark_versions import parse_progress_offsets
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
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

    from mansio.pipelines.pipeline_metrics import PipelineMetrics

logger = logging.getLogger(__name__)

PROGRESS_CLIENT_ID = "mansio-spark-progress"
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

    def publish(
        self,
        offsets: Mapping[TopicPartition, int],
        query_id: str = "",
        progress: PipelineProgress | None = None,
    ) -> None:
        """Commit the next offsets that the pipeline will read. Raises the broker's error."""
        marked = commits_with_holds(offsets, query_id, progress)
        with self._lock:
            if self._is_open:
                self._thread.run(
                    commit_offsets(self._cluster, self.group, marked, retry_timeout_ms=COMMIT_TIMEOUT_MS)
                )

    def stored_progress(self) -> PipelineProgress | None:
        """Return the progress in the metadata of the committed offsets. Raises the broker's error."""
        committed = self._thread.run(fetch_offsets(self._cluster, self.group))
        return newest_progress(offset.metadata for offset in committed.values())

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._thread.run(self._cluster.close())
                self._thread.close()


class ProgressListener(StreamingQueryListener):
    """Commits the offsets of the query with this `queryName`. Register it with `spark.streams.addListener`."""

    def __init__(self, name: str, bootstrap_servers: str, metrics: PipelineMetrics | None = None) -> None:
        """`metrics`: observes failed commits."""
        self.name = name
        self._publisher = OffsetPublisher(name, bootstrap_servers)
        self._metrics = metrics
        self._published: dict[TopicPartition, int] = {}
        self._last: tuple[dict[TopicPartition, int], str, PipelineProgress] | None = None
        """Offsets, query id and progress of the last commit."""
        self._committed_at = time.monotonic()
        """Time of the last commit, also of one that failed."""
        self._has_ended = False
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
        """Commit the offsets of a micro-batch, with its progress. An event without a batch, as of an idle query,
        keeps the progress of the last batch.
        """
        found = None
        if "addBatch" in progress.durationMs:
            found = progress_of_batch(json.loads(progress.json), int(time.time() * 1000))
        self.publish_offsets([source.endOffset for source in progress.sources], str(progress.id), found)

    def publish_completed(self, batch: int, sources: Iterable[str | None], query_id: str) -> None:
        """Commit the offsets of the last complete batch of an earlier run, with the progress that this run stored."""
        at_ms = int(time.time() * 1000)
        try:
            stored = self._publisher.stored_progress()
        except MansioError as error:
            logger.warning(
                "pipeline_progress_not_read", extra=fields(pipeline=self.name, error=error.message)
            )
            stored = None
        progress = stored if stored is not None and stored.batch == batch else PipelineProgress(batch, at_ms)
        self.publish_offsets(sources, query_id, replace(progress, ended=None, error=None, reported_ms=at_ms))

    def publish_running(self) -> None:
        """Commit the offsets of the last micro-batch again, with the time, if `REPORT_INTERVAL_S` has passed since the
        last commit: `mansio pipeline lag` then shows that the pipeline runs, though it waits for records or for a long
        batch. Does nothing before the first batch.
        """
        if self._last is not None and time.monotonic() - self._committed_at >= REPORT_INTERVAL_S:
            offsets, query_id, progress = self._last
            self._commit(offsets, query_id, replace(progress, reported_ms=int(time.time() * 1000)))

    def publish_end(self, error: str | None = None) -> None:
        """Commit the offsets of the last micro-batch again, with the progress that the pipeline has ended: stopped, or
        failed with an error. Later events of Spark are ignored. Does nothing before the first batch.
        """
        if self._last is not None:
            offsets, query_id, progress = self._last
            self._commit(offsets, query_id, progress.with_end(error))

    def publish_offsets(
        self, sources: Iterable[str | None], query_id: str, progress: PipelineProgress | None = None
    ) -> None:
        """Commit the end offsets of all sources of a complete micro-batch. A failure is logged, and the next batch
        commits again. If two sources read the same partition, as in a self-join, the lower offset is committed.
        """
        found: dict[TopicPartition, int] = {}
        for text in sources:
            for partition, offset in offsets_in(text).items():
                found[partition] = min(offset, found.get(partition, offset))
        self._commit(found, query_id, progress)

    def _commit(
        self, offsets: dict[TopicPartition, int], query_id: str, progress: PipelineProgress | None
    ) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._committed_at = time.monotonic()
            newest = {place: max(offset, self._published.get(place, 0)) for place, offset in offsets.items()}
            if self._last is not None:
                progress = self._last[2] if progress is None else progress.after(self._last[2])
            try:
                self._publisher.publish(newest, query_id, progress)
            except MansioError as error:
                logger.warning(
                    "pipeline_progress_not_published", extra=fields(pipeline=self.name, error=error.message)
                )
                if self._metrics is not None:
                    self._metrics.observe_commit_failure()
                return
            self._published |= newest
            if progress is not None:
                self._last = newest, query_id, progress
                self._has_ended = progress.ended is not None

    @property
    def committed(self) -> dict[TopicPartition, int]:
        """The offsets that this run has committed."""
        return dict(self._published)

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
        if topic in RESERVED_KEYS:
            continue
        if not isinstance(partitions, dict):
            return {}
        for index, offset in partitions.items():
            if not (index.isdecimal() and type(offset) is int and offset >= 0):
                return {}
            offsets[TopicPartition(topic, int(index))] = offset
    return offsets


async def _open(bootstrap_servers: str) -> Cluster:
    security = resolve_security(bootstrap_servers)
    options = ConnectionOptions(
        client_id=PROGRESS_CLIENT_ID, tls=security.tls_context(), sasl=security.credentials()
    )
    cluster = Cluster(bootstrap_servers, options=options, auto_create_topics=False)
    try:
        await cluster.start()
    except BaseException:
        await cluster.close()
        raise
    return cluster
