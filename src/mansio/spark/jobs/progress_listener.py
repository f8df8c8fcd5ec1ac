"""Makes a Spark query visible as a consumer group: where it is, and so how far behind.

Spark keeps the offsets of a query in the query's checkpoint, where nobody else looks. Whoever adds a `ProgressListener`
to a session has them committed to the broker as well, after each micro-batch whose output is written, as offsets of the
group `mansio.pipeline.<name>`: `mansio group describe` and every dashboard for consumer groups then show the query and
its lag. The commit carries the mark that holds back deletion
(`mansio.wire.internal_records.encode_hold_metadata`), within the limits of the topic.

Always true: the checkpoint decides where a query goes on, these offsets never do; they say at most what is done, so a
record that they hold back is one that may still be needed; what goes wrong with them is logged and stops no query.
"""

from __future__ import annotations

import json
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
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, pipeline_group
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping

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
"""Spark's queue of events waits as long as a commit does."""


class OffsetPublisher:
    """Commits the offsets of one pipeline. A thread of its own talks to the brokers; `close()` ends it. Spark tells of
    a query's last batches when it finds the time, so what comes after that is not published, and no error."""

    def __init__(self, name: str, bootstrap_servers: str) -> None:
        """Connect. `ConnectionLost` when no broker answers."""
        self.name = name
        self.group = pipeline_group(name)
        self._thread = LoopThread("mansio-spark-progress")
        self._lock = threading.Lock()
        self._is_open = True
        try:
            self._cluster = self._thread.run(_open(bootstrap_servers))
        except BaseException:
            self._thread.close()
            raise

    def publish(self, offsets: Mapping[TopicPartition, int], query_id: str = "") -> None:
        """Commit the next offsets that the pipeline will read. Raises what the broker says."""
        mark = encode_hold_metadata(query_id)
        marked = {partition: CommittedOffset(offset, mark) for partition, offset in offsets.items()}
        with self._lock:
            if self._is_open:
                self._thread.run(
                    commit_offsets(self._cluster, self.group, marked, retry_timeout_ms=COMMIT_TIMEOUT_MS)
                )

    def close(self) -> None:
        """Close the connections and end the thread; again is harmless."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._thread.run(self._cluster.close())
                self._thread.close()


class ProgressListener(StreamingQueryListener):
    """Publishes the progress of the query called `name` (its `queryName`): `spark.streams.addListener(it)`."""

    def __init__(self, name: str, bootstrap_servers: str) -> None:
        self.name = name
        self._publisher = OffsetPublisher(name, bootstrap_servers)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is done yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A micro-batch is through, or the query looked and found nothing."""
        if event.progress.name == self.name:
            self.publish(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """What is done was published."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """What is done was published."""

    def publish(self, progress: StreamingQueryProgress) -> None:
        """Commit how far a micro-batch came. Raises nothing: a failure is logged, and the next one says it anew.

        Of a partition that two sources read, as in a join of a topic with itself, the one behind counts."""
        found: dict[TopicPartition, int] = {}
        for source in progress.sources:
            for partition, offset in offsets_in(source.endOffset).items():
                found[partition] = min(offset, found.get(partition, offset))
        try:
            self._publisher.publish(found, str(progress.id))
        except MansioError as error:
            logger.warning("progress not published", extra=fields(pipeline=self.name, error=error.message))

    def close(self) -> None:
        """Close the connection to the broker."""
        self._publisher.close()


def offsets_in(text: str | None) -> dict[TopicPartition, int]:
    """The offsets in a source's own JSON, `{"topic": {"0": 5}}`, as Mansio's source and Spark's Kafka source write
    them; nothing for the offsets of any other source."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return {}
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
