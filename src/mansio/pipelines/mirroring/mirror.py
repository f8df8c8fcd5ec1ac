"""Mirror job: copies topics from one cluster to another, continuously, with the offsets of their groups.

Records go to the partition of the same number, in order, with their keys, values, headers and timestamps. Each copy
gets one more header (`passed_clusters`). The job is what MirrorMaker 2 does (KIP-382), and exactly once.

Each round of records is one transaction of the target, which also holds the runs of the offset map and the position of
the mirror (`state_topic`). So the target alone decides what was copied: a mirror that was killed at any point, and is
started again on any machine, continues behind the last committed transaction.

Each pair of source and target topic has a transactional id of its own. A mirror first initializes the producers of its
topics, which aborts the open transactions of other mirrors of these topics and fences them, and reads the positions
then. So two mirrors of the same topics, with whatever names and options, copy nothing twice.

The job runs without Spark. The records of a partition must be written in order, and records, map and position in one
transaction, so Spark could parallelize neither; and a mirror waits most of the time, which a session of 1 GB need not.

Invariants:
* Only committed records of the source are copied, and only those that have not passed the target (`passed_clusters`).
* A position is written with the copies of all records before it, except those that are not copied, in one transaction.
* In memory are, of at most `CONCURRENT_PARTITIONS_MAX` partitions, two responses, `ROWS_PER_ROUND` records and their
  copies; and the offset maps.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mansio.errors import (
    DataLoss,
    InvalidProducerEpoch,
    InvalidRequest,
    MansioError,
    ProducerFenced,
    TopicRecreated,
    TransactionAbortable,
    UnknownTopicOrPartition,
    UnreadableRecords,
)
from mansio.logs import fields
from mansio.net.offsets import commit_offsets, list_offsets
from mansio.pipelines.mirroring.group_offsets import GroupOffsets
from mansio.pipelines.mirroring.offset_map import NO_OFFSET, Run, find_runs
from mansio.pipelines.mirroring.passed_clusters import add_cluster, has_passed
from mansio.pipelines.mirroring.state_topic import (
    STATE_TOPIC_CONFIG,
    MirroredPartition,
    PartitionState,
    load_states,
    position_record,
    removal_record,
    run_record,
    state_topic_name,
    to_rows,
)
from mansio.pipelines.mirroring.target_topics import batch_bytes_max, ensure_copy
from mansio.pipelines.pipeline_progress import (
    NO_BATCH,
    REPORT_INTERVAL_S,
    BatchProgress,
    PipelineProgress,
    commits_with_holds,
)
from mansio.spark.arrow.readable import ReadableRows, UnreadableRows
from mansio.spark.arrow.schema import HEADERS_TYPE, TIMESTAMP_TYPE
from mansio.spark.options import DEFAULT_SINK_BATCH_BYTES, SinkOptions
from mansio.spark.sink.sink_transaction import DirectTransaction
from mansio.spark.sink.task_sender import TaskSender
from mansio.spark.source.fetch import fetch_range
from mansio.spark.sync_client import ensure_topic, find_topic, sync_client
from mansio.telemetry.jobs import add_batch
from mansio.tracebacks import copied
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from mansio.net.metadata import TopicMetadata
    from mansio.pipelines.pipeline_metrics import PipelineMetrics
    from mansio.spark.sync_client import SyncClient

    Piece = tuple[pa.RecordBatch | None, int]
    """Some records of a partition, in order, and the offset after them and after all that is not visible."""

logger = logging.getLogger(__name__)

CONCURRENT_PARTITIONS_MAX: Final = 8
ROWS_PER_ROUND: Final = 16_384
"""Maximum number of records of one partition that are written in one transaction."""
ROUNDS_PER_TURN: Final = 16
"""Number of transactions after which the next partitions have their turn."""
FETCH_BYTES: Final = 1 << 20
RUNS_PER_ROUND_MAX: Final = 1_024
"""Maximum number of runs of one partition that one transaction adds to the offset map."""
TRANSACTION_TIMEOUT_MS: Final = 120_000
"""Time after which the target aborts the transaction of a killed mirror."""
REFRESH_INTERVAL_S: Final = 10.0
"""Time between two looks at partitions, settings and log start offsets of the source."""
RESTARTS_MAX: Final = 5
"""Number of failures, one after the other, that end the job although each could have been temporary."""
RESTART_PAUSE_S: Final = 1.0
STOP_CHECK_S: Final = 0.05
COMMIT_TIMEOUT_MS: Final = 10_000
SOURCE_COLUMNS: Final = ("key", "value", "offset", "timestamp", "headers")
COPY_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("partition", pa.int32()),
        ("timestamp", TIMESTAMP_TYPE),
        ("headers", HEADERS_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class MirrorJob:
    """Topics, clusters and options of a mirror.

    `name`: name of the pipeline. `topic_pattern`: name of a topic on the target, from `{topic}` and `{source}`, which
    is `source_name`, or the id of the source's cluster. `groups`: groups whose offsets are translated, every
    `groups_interval_s` and at the end; empty: all that have offsets in the topics. `stops_when_caught_up`: copy the
    records that exist now, then end. `trigger_s`: minimum interval between two batches. `starts_at_end`: a topic that
    was never mirrored begins with new records. `accept_loss`: continue if the source has deleted records that were not
    copied. `commits_on_source`: commit the position on the source, too, which holds records there back from deletion
    and shows the lag. `compression`: codec of the copies.
    """

    topics: tuple[str, ...]
    source_servers: str
    target_servers: str
    name: str = "mirror"
    topic_pattern: str = "{topic}"
    source_name: str | None = None
    translates_groups: bool = True
    groups: tuple[str, ...] = ()
    groups_interval_s: float = 10.0
    stops_when_caught_up: bool = False
    trigger_s: float = 1.0
    starts_at_end: bool = False
    accept_loss: bool = False
    commits_on_source: bool = True
    compression: str = "none"

    def target_topic(self, topic: str, source_cluster_id: str) -> str:
        """Return the name of a topic on the target. Raises `InvalidRequest` for a pattern without `{topic}`."""
        if "{topic}" not in self.topic_pattern:
            raise InvalidRequest(
                f"the pattern {self.topic_pattern!r} lacks {{topic}}: all topics would become one"
            )
        named = self.topic_pattern.replace("{source}", self.source_name or source_cluster_id)
        return named.replace("{topic}", topic)


@dataclass(frozen=True, slots=True)
class MirrorResult:
    """Result of a mirror that has ended. `skipped`: records that had passed the target. `group_offsets`: number of
    offsets that were committed for groups. `positions`: source offsets that are read next; `lag`: number of records
    behind them."""

    name: str
    batches: int
    records: int
    skipped: int
    group_offsets: int
    positions: Mapping[TopicPartition, int]
    lag: int


def mirror(
    job: MirrorJob,
    progress: Callable[[BatchProgress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> MirrorResult:
    """Mirror topics until `should_stop`, or until the target has what the source has now.

    Temporary errors of the brokers are repeated with a new transaction, `RESTARTS_MAX` times in a row.

    Raises:
        InvalidRequest: Source and target are one cluster, two topics would become one, or the target would not keep
        timestamps.
        UnknownTopicOrPartition: The source lacks a topic.
        DataLoss: The source has deleted records before they were copied.
        ProducerFenced: Another mirror of one of the topics was started.
        MansioError: Other errors of the brokers.
    """
    return run_mirror(job, progress, should_stop)


def run_mirror(
    job: MirrorJob,
    progress: Callable[[BatchProgress], None] | None,
    should_stop: Callable[[], bool],
    metrics: PipelineMetrics | None = None,
) -> MirrorResult:
    """`mirror`, with metrics."""
    run = _Run(job, progress, should_stop, metrics)
    failures, batches = 0, 0
    while True:
        session: _Session | None = None
        try:
            session = _Session(job, run)
            session.mirror()
            run.publish(session, has_ended=True)
            result, session = run.result(session), None
            return result
        except (ProducerFenced, InvalidProducerEpoch) as error:
            raise ProducerFenced(
                "another mirror of one of the topics was started, or this one stood still for longer than"
                f" {TRANSACTION_TIMEOUT_MS // 1000} s: this one ends, and can be started again"
            ) from error
        except MansioError as error:
            failures, batches = (failures + 1 if batches == run.batches else 1), run.batches
            is_temporary = error.retriable or isinstance(error, (TransactionAbortable, TopicRecreated))
            is_temporary |= job.accept_loss and isinstance(error, DataLoss)
            is_temporary &= not isinstance(error, UnknownTopicOrPartition)
            if not is_temporary or failures > RESTARTS_MAX or should_stop():
                if session is not None:
                    run.publish(session, error=error.message, has_ended=True)
                raise
            logger.warning("mirror_restarts", extra=fields(pipeline=job.name, error=error.message))
            if metrics is not None:
                metrics.observe_restart()
            run.pause(RESTART_PAUSE_S)
        finally:
            if session is not None:
                session.abort()


def translate_offsets(
    job: MirrorJob, offsets: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int | None]:
    """Return the offset of the target at which a reader continues that has read the source up to the given one, without
    it; for each partition of the source. None: nothing of the partition was mirrored. Raises the brokers' errors.
    """
    target = sync_client(job.target_servers)
    source_id = _cluster_id(sync_client(job.source_servers))
    view = find_topic(target, state_topic_name(source_id))
    topics = {place.topic: job.target_topic(place.topic, source_id) for place in offsets}
    states = load_states(target, view, topics.items())
    found: dict[TopicPartition, int | None] = {}
    for place, offset in offsets.items():
        state = states.get(MirroredPartition(place.topic, topics[place.topic], place.partition))
        found[place] = None if state is None else state.map.translate(offset)
    return found


def target_topics(job: MirrorJob, topics: Iterable[str]) -> dict[str, str]:
    """Return the name on the target of each topic. Raises the brokers' errors."""
    source_id = _cluster_id(sync_client(job.source_servers))
    return {topic: job.target_topic(topic, source_id) for topic in topics}


class _Run:
    """What remains when a mirror restarts after an error: counts, and the reports to the caller and to the source."""

    def __init__(
        self,
        job: MirrorJob,
        progress: Callable[[BatchProgress], None] | None,
        should_stop: Callable[[], bool],
        metrics: PipelineMetrics | None,
    ) -> None:
        self.should_stop = should_stop
        self.batches = self.records = self.skipped = self.group_offsets = 0
        self.ends: dict[TopicPartition, int] | None = None
        """The offsets at which a job ends that stops when it has caught up; None before they are known."""
        self._job, self._progress, self._metrics = job, progress, metrics
        self._last = PipelineProgress(NO_BATCH, int(time.time() * 1000))
        self._published_s = 0.0

    def pause(self, seconds: float) -> None:
        """Wait, but not after a request to stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.should_stop():
            time.sleep(min(left, STOP_CHECK_S))

    def observe_batch(self, session: _Session, records: int, seconds: float) -> None:
        """Report a batch: all transactions of one turn."""
        self.records += records
        lag, rate = session.lag(), records / seconds if seconds else 0.0
        at_ms = int(time.time() * 1000)
        self._last = PipelineProgress(
            self.batches, at_ms, records=records, seconds=seconds, input_per_s=rate, processed_per_s=rate
        )
        add_batch(self._job.name, self.batches, records, begun_s=at_ms / 1000 - seconds, seconds=seconds)
        if self._progress is not None:
            self._progress(BatchProgress(self.batches, records, seconds, sum(lag.values())))
        if self._metrics is not None:
            self._metrics.observe_batch(self._last, lag)
        self.batches += 1
        self.publish(session)

    def publish(self, session: _Session, error: str | None = None, *, has_ended: bool = False) -> None:
        """Commit the positions on the source, with the progress. A failure is logged."""
        if not self._job.commits_on_source:
            return
        last = replace(self._last, reported_ms=int(time.time() * 1000))
        try:
            session.commit_on_source(last.with_end(error) if has_ended else last)
        except MansioError as failure:
            logger.warning(
                "pipeline_progress_not_published",
                extra=fields(pipeline=self._job.name, error=failure.message),
            )
            if self._metrics is not None:
                self._metrics.observe_commit_failure()
        self._published_s = time.monotonic()

    def publish_running(self, session: _Session) -> None:
        """Commit the positions on the source again, if that was long ago."""
        if time.monotonic() - self._published_s >= REPORT_INTERVAL_S:
            self.publish(session)

    def result(self, session: _Session) -> MirrorResult:
        """Return the result of a job that has ended."""
        return MirrorResult(
            self._job.name,
            self.batches,
            self.records,
            self.skipped,
            self.group_offsets,
            session.positions(),
            sum(session.lag().values()),
        )


class _Copy:
    """One topic and its copy, with the producer that writes the copy."""

    def __init__(self, job: MirrorJob, target: SyncClient, source_id: str, topic: str) -> None:
        self.topic, self.target_topic = topic, job.target_topic(topic, source_id)
        self.view: TopicMetadata
        """The source's topic."""
        self.target_view: TopicMetadata
        self.appended: dict[TopicPartition, list[tuple[int, int]]] = {}
        """First offset and number of records of each batch of the open transaction."""
        self._job, self._client = job, target
        self._transaction = DirectTransaction(
            target, f"mansio-mirror:{source_id}:{topic}:{self.target_topic}", TRANSACTION_TIMEOUT_MS
        )
        self._sender: TaskSender | None = None

    @property
    def sender(self) -> TaskSender:
        """The producer, after the first `refresh`."""
        assert self._sender is not None, "refresh comes first"
        return self._sender

    def take_over(self) -> None:
        """Abort what another mirror of this pair has not committed, and fence it."""
        self._transaction.begin()

    def refresh(self, source: SyncClient, batch_bytes_max: int) -> None:
        """Bring the copy up to the partitions and settings of the topic. Not in a transaction."""
        self.view, self.target_view, limit = ensure_copy(source, self._client, self.topic, self.target_topic)
        options = SinkOptions(
            self._job.target_servers,
            compression=self._job.compression,
            batch_bytes=min(limit, batch_bytes_max),
        )
        self._sender = TaskSender(
            self._client, options, transaction=self._transaction, on_appended=self._on_appended
        )

    def places(self) -> list[MirroredPartition]:
        """All partitions of the topic."""
        return [MirroredPartition(self.topic, self.target_topic, one.index) for one in self.view.partitions]

    def abort(self) -> None:
        """Abort the open transaction, unless another mirror has done so."""
        if self._sender is None:
            self._transaction.abort()
        else:
            self._sender.abort()

    def _on_appended(self, place: TopicPartition, offset: int, count: int) -> None:
        if offset < 0:
            raise TransactionAbortable(
                f"the target recognized a repeated batch of topic {place.topic}, and did not return its offset"
            )
        self.appended.setdefault(place, []).append((offset, count))


class _Session:
    """A mirror from the moment at which it has taken over its topics, to its end or an error."""

    def __init__(self, job: MirrorJob, run: _Run) -> None:
        self._job, self._run = job, run
        self._source, self._target = sync_client(job.source_servers), sync_client(job.target_servers)
        self._source_id, self._target_id = _cluster_id(self._source), _cluster_id(self._target)
        if self._source_id == self._target_id:
            raise InvalidRequest(f"source and target are the same cluster, {self._source_id}")
        self._state_topic = state_topic_name(self._source_id)
        state_view = ensure_topic(self._target, self._state_topic, 1, STATE_TOPIC_CONFIG)
        self._batch_bytes_max = min(
            DEFAULT_SINK_BATCH_BYTES, batch_bytes_max(self._target, self._state_topic)
        )
        self._copies = [
            _Copy(job, self._target, self._source_id, topic) for topic in dict.fromkeys(job.topics)
        ]
        pairs = [(copy.topic, copy.target_topic) for copy in self._copies]
        for copy in self._copies:
            copy.take_over()
        self._states = load_states(self._target, state_view, pairs)
        self._removed: dict[MirroredPartition, list[int]] = {}
        """Where the runs began that were removed from a map, and not yet from the topic."""
        self._ends: dict[MirroredPartition, int] = {}
        self._groups = GroupOffsets(self._source, self._target, job.groups)
        self._refreshed_s = self._groups_s = 0.0

    def mirror(self) -> None:
        """Copy until the job ends."""
        self._refresh()
        self._list_ends()
        if self._run.ends is None:
            self._run.ends = {_source_place(place): end for place, end in self._ends.items()}
        while not self._run.should_stop():
            began = time.monotonic()
            records = self._turn()
            if records is not None:
                self._run.observe_batch(self, records, time.monotonic() - began)
            if self._job.stops_when_caught_up and self._has_caught_up():
                break
            self._run.publish_running(self)
            if time.monotonic() - self._groups_s >= self._job.groups_interval_s:
                self._translate_groups()
            if not self._job.stops_when_caught_up:
                self._run.pause(self._job.trigger_s - (time.monotonic() - began))
            if time.monotonic() - self._refreshed_s >= REFRESH_INTERVAL_S:
                self._refresh()
            self._list_ends()
        self._translate_groups()

    def abort(self) -> None:
        """Abort the open transactions."""
        for copy in self._copies:
            copy.abort()

    # -- what there is --------

    def _refresh(self) -> None:
        """Look at partitions, settings and log start offsets, and store the positions of new partitions."""
        for copy in self._copies:
            copy.refresh(self._source, self._batch_bytes_max)
            places = copy.places()
            starts = self._list(places, EARLIEST_TIMESTAMP)
            is_first = self._job.starts_at_end and not any(place in self._states for place in places)
            begin = self._list(places, LATEST_TIMESTAMP) if is_first else starts
            records = self._forget(copy, places)
            for place in places:
                state = self._states.get(place)
                if self._is_new(copy, place):
                    records += [removal_record(place, run.source) for run in (state.map if state else ())]
                    state = PartitionState(
                        begin[place], copy.view.topic_id.hex(), copy.target_view.topic_id.hex()
                    )
                    records.append(position_record(place, state, NO_OFFSET))
                    self._states[place] = state
                assert state is not None
                if state.next_offset < starts[place]:
                    self._lose_records(place, state, starts[place])
                self._removed.setdefault(place, []).extend(state.map.expire(starts[place]))
            if records:
                self._send_state(copy, records)
                copy.sender.commit()
        self._refreshed_s = time.monotonic()

    def _forget(self, copy: _Copy, places: Sequence[MirroredPartition]) -> list[tuple[bytes, bytes | None]]:
        """Forget partitions that the topic no longer has, because it was created again with fewer; returns the records
        that remove their states."""
        pair = copy.topic, copy.target_topic
        gone = [place for place in self._states if place[:2] == pair and place not in places]
        records: list[tuple[bytes, bytes | None]] = []
        for place in gone:
            records += [removal_record(place, run.source) for run in self._states.pop(place).map]
            records.append(removal_record(place))
        return records

    def _is_new(self, copy: _Copy, place: MirroredPartition) -> bool:
        """Whether nothing of this partition was mirrored: it is new, or one of the topics was created again."""
        ids = copy.view.topic_id.hex(), copy.target_view.topic_id.hex()
        state = self._states.get(place)
        return state is None or (state.source_id, state.target_id) != ids

    def _lose_records(self, place: MirroredPartition, state: PartitionState, start: int) -> None:
        loss = DataLoss(
            f"topic {place.source}, partition {place.partition}: the source has deleted offsets {state.next_offset} to"
            f" {start - 1} before they were mirrored. Continue without them with --accept-loss"
        )
        if not self._job.accept_loss:
            raise copied(loss)
        logger.warning("mirror_records_lost", extra=fields(pipeline=self._job.name, error=loss.message))
        state.next_offset = start

    def _list(self, places: Sequence[MirroredPartition], timestamp: int) -> dict[MirroredPartition, int]:
        wanted = {_source_place(place): timestamp for place in places}
        listed = self._source.run(list_offsets(self._source.cluster, wanted, isolation_level=READ_COMMITTED))
        return {place: listed[_source_place(place)].offset for place in places}

    def _list_ends(self) -> None:
        self._ends = self._list(list(self._states), LATEST_TIMESTAMP)

    def _has_caught_up(self) -> bool:
        ends = self._run.ends or {}
        return all(
            state.next_offset >= ends.get(_source_place(place), 0) for place, state in self._states.items()
        )

    def lag(self) -> dict[str, int]:
        """Return the number of records behind the positions, by topic."""
        found = dict.fromkeys((copy.topic for copy in self._copies), 0)
        for place, end in self._ends.items():
            found[place.source] += max(0, end - self._states[place].next_offset)
        return found

    def positions(self) -> dict[TopicPartition, int]:
        """Return the source offsets that are read next."""
        return {_source_place(place): state.next_offset for place, state in sorted(self._states.items())}

    # -- copying --------

    def _turn(self) -> int | None:
        """Copy some records of all partitions that are behind; returns their number, None if no partition is."""
        records: int | None = None
        for copy in self._copies:
            behind = [
                place for place in copy.places() if self._states[place].next_offset < self._ends.get(place, 0)
            ]
            for at in range(0, len(behind), CONCURRENT_PARTITIONS_MAX):
                if self._run.should_stop():
                    return records
                records = (records or 0) + self._copy(copy, behind[at : at + CONCURRENT_PARTITIONS_MAX])
        return records

    def _copy(self, copy: _Copy, places: Sequence[MirroredPartition]) -> int:
        """Copy records of several partitions, a piece of each in each transaction; returns their number."""
        records = 0
        streams = {place: self._read(copy, place) for place in places}
        try:
            for _ in range(ROUNDS_PER_TURN):
                pieces = {place: piece for place, stream in streams.items() if (piece := next(stream, None))}
                if not pieces or self._run.should_stop():
                    break
                records += self._write(copy, pieces)
        finally:
            for stream in streams.values():
                stream.close()
        return records

    def _read(self, copy: _Copy, place: MirroredPartition) -> Generator[Piece]:
        """Yield the records from the position to the end that is known."""
        start, end = self._states[place].next_offset, self._ends[place]
        pending: pa.RecordBatch | None = None
        responses = fetch_range(
            self._source,
            _source_place(place),
            start,
            end,
            fetch_bytes=FETCH_BYTES,
            topic_id=copy.view.topic_id,
        )
        readable = ReadableRows(place.source, place.partition, end, SOURCE_COLUMNS)
        for fetched in responses:
            for rows in readable.read(fetched.records, fetched.aborted, start):
                if isinstance(rows, UnreadableRows):
                    self._skip_unreadable(place, rows)
                    continue
                for at in range(0, rows.num_rows, ROWS_PER_ROUND):
                    if pending is not None:
                        yield pending, pending.column("offset")[-1].as_py() + 1
                    pending = rows.slice(at, ROWS_PER_ROUND)
        # What follows the last record are markers, aborted and unreadable records.
        yield pending, end

    def _skip_unreadable(self, place: MirroredPartition, rows: UnreadableRows) -> None:
        error = UnreadableRecords.at(place.source, place.partition, rows.first, rows.last, rows.reason)
        logger.warning(
            "mirror_records_unreadable", extra=fields(pipeline=self._job.name, error=error.message)
        )

    def _write(self, copy: _Copy, pieces: Mapping[MirroredPartition, Piece]) -> int:
        """Write one transaction; returns the number of copies in it."""
        copy.appended.clear()
        offsets: dict[MirroredPartition, pa.Array] = {}
        batches: list[pa.RecordBatch] = []
        skipped = 0
        for place, (rows, _) in pieces.items():
            if rows is None:
                continue
            passed = has_passed(rows.column("headers"), self._target_id)
            if passed.any():
                skipped += int(passed.sum())
                rows = rows.filter(pa.array(~passed))
            if rows.num_rows:
                offsets[place] = rows.column("offset")
                batches.append(self._as_copies(rows, place.partition))
        if batches:
            copy.sender.send(copy.target_topic, pa.concat_batches(batches))
        records: list[tuple[bytes, bytes | None]] = []
        new_runs: dict[MirroredPartition, list[Run]] = {}
        for place, (_, next_offset) in pieces.items():
            state = self._states[place]
            if place in offsets:
                appended = copy.appended[TopicPartition(copy.target_topic, place.partition)]
                new_runs[place] = find_runs(offsets[place].to_numpy(), appended, RUNS_PER_ROUND_MAX)
            runs = new_runs.get(place, [])
            origin = runs[0].target if runs and state.map.origin == NO_OFFSET else state.map.origin
            records += [removal_record(place, source) for source in self._removed.get(place, ())]
            records += [run_record(place, run) for run in runs]
            records.append(position_record(place, replace(state, next_offset=next_offset), origin))
        self._send_state(copy, records)
        copy.sender.commit()
        for place, (_, next_offset) in pieces.items():
            state = self._states[place]
            state.next_offset = next_offset
            for run in new_runs.get(place, ()):
                state.map.append(run)
            self._removed[place] = state.map.thin()
        self._run.skipped += skipped
        return sum(map(len, offsets.values()))

    def _as_copies(self, rows: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        columns = [
            rows.column("key"),
            rows.column("value"),
            pa.repeat(pa.scalar(partition, pa.int32()), rows.num_rows),
            rows.column("timestamp"),
            add_cluster(rows.column("headers"), self._source_id),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=COPY_SCHEMA)

    def _send_state(self, copy: _Copy, records: list[tuple[bytes, bytes | None]]) -> None:
        copy.sender.send(self._state_topic, to_rows(records))

    # -- groups, and the pipeline's own offsets --------

    def _translate_groups(self) -> None:
        self._groups_s = time.monotonic()
        if self._job.translates_groups:
            topics = {copy.topic: copy.target_topic for copy in self._copies}
            self._run.group_offsets += self._groups.synchronize(topics, self._states)

    def commit_on_source(self, progress: PipelineProgress) -> None:
        """Commit the positions for the pipeline's group. Raises the broker's error."""
        offsets = {place: offset for place, offset in self.positions().items() if offset != NO_OFFSET}
        commits = commits_with_holds(offsets, self._state_topic, progress)
        self._source.run(
            commit_offsets(
                self._source.cluster,
                pipeline_group_id(self._job.name),
                commits,
                retry_timeout_ms=COMMIT_TIMEOUT_MS,
            )
        )


def _source_place(place: MirroredPartition) -> TopicPartition:
    return TopicPartition(place.source, place.partition)


def _cluster_id(client: SyncClient) -> str:
    client.run(client.cluster.retry(lambda: client.cluster.refresh_metadata(())))
    found = client.cluster.cluster_id
    if not found:
        raise InvalidRequest("the brokers have no cluster id")
    return found
