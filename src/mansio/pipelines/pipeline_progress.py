"""Progress of a pipeline after its last micro-batch: rates, state, watermark, time of the commit, and how it ended.

A pipeline stores it in the metadata of its committed offsets, so that `mansio pipeline lag` shows it on any machine,
and exports it as metrics (`pipeline_metrics`). Needs neither Spark nor a broker.

Invariants:
* The encoded progress is small: numbers, and an error of at most `ERROR_CHARACTERS_MAX` characters.
* Unknown and invalid fields of a stored progress are ignored: other versions of Mansio may have written it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from mansio.net.offsets import CommittedOffset
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, parse_hold_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.wire.topic_partition import TopicPartition

ERROR_CHARACTERS_MAX: Final = 300
STOPPED: Final = "stopped"
FAILED: Final = "failed"
NO_BATCH: Final = -1
"""Batch id of a pipeline that ended before its first batch."""
REPORT_INTERVAL_S: Final = 15.0
"""A running pipeline stores its progress again if it has not done so for this time."""
SILENT_MS: Final = 60_000
"""A pipeline that has not ended and has not reported for this time was killed, or cannot reach the brokers."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One committed batch, as jobs report it to their caller. `lag`: records in the log that the job has not processed
    yet, None if unknown.
    """

    batch: int
    records: int
    seconds: float
    lag: int | None


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """Progress of a pipeline. Numbers are those of the last batch. `at_ms`: time at which its offsets were committed,
    in milliseconds since the epoch. `watermark_ms`: None if the query has no watermark. `late_rows`: number of
    rows that stateful operators have dropped since the pipeline's first batch, because they were older than the
    watermark. `ended`: `STOPPED` or `FAILED`; None while the pipeline runs, and after it was killed. `error`: why it
    failed. `reported_ms`: time at which the running pipeline stored this progress again; None if it has not.
    """

    batch: int
    at_ms: int
    records: int = 0
    seconds: float = 0.0
    input_per_s: float = 0.0
    processed_per_s: float = 0.0
    state_rows: int = 0
    state_bytes: int = 0
    late_rows: int = 0
    watermark_ms: int | None = None
    ended: str | None = None
    error: str | None = None
    reported_ms: int | None = None

    def silent_ms(self, now_ms: int) -> int | None:
        """Time since the last report, in milliseconds, of a pipeline that has not ended and should have reported since;
        None for any other.
        """
        passed_ms = now_ms - max(self.at_ms, self.reported_ms or 0)
        return passed_ms if self.ended is None and passed_ms > SILENT_MS else None

    def after(self, previous: PipelineProgress) -> PipelineProgress:
        """Return this progress with the late rows of `previous` added, which was stored before it. An older or repeated
        batch adds none.
        """
        if self.batch < previous.batch:
            return previous
        repeated = self.batch == previous.batch
        return replace(self, late_rows=previous.late_rows + (0 if repeated else self.late_rows))

    def with_end(self, error: str | None) -> PipelineProgress:
        """Return the progress of the same pipeline after it ended, with an error unless it was stopped. The time
        remains that of the last batch.
        """
        line = None if error is None else " ".join(error.split())[:ERROR_CHARACTERS_MAX]
        return replace(self, ended=STOPPED if error is None else FAILED, error=line)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, and the batch and the time."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = PipelineProgress(self.batch, self.at_ms)
        return {
            name: value
            for name, value in values.items()
            if name in ("batch", "at_ms") or value != getattr(defaults, name)
        }


_NUMBERS: Final = {
    "records": int,
    "seconds": float,
    "input_per_s": float,
    "processed_per_s": float,
    "state_rows": int,
    "state_bytes": int,
    "late_rows": int,
    "watermark_ms": int,
    "reported_ms": int,
}


def parse_progress(found: Mapping[str, Any] | None) -> PipelineProgress | None:
    """Decode the result of `PipelineProgress.to_json`; None if it has no batch and time."""
    if found is None or type(found.get("batch")) is not int or type(found.get("at_ms")) is not int:
        return None
    values: dict[str, Any] = {
        name: kind(found[name])
        for name, kind in _NUMBERS.items()
        if type(found.get(name)) in (int, float) and math.isfinite(found[name])
    }
    for name in ("ended", "error"):
        if isinstance(found.get(name), str):
            values[name] = found[name][:ERROR_CHARACTERS_MAX]
    return PipelineProgress(found["batch"], found["at_ms"], **values)


def newest_progress(metadata: Iterable[str]) -> PipelineProgress | None:
    """Return the newest progress in the metadata of a pipeline's committed offsets; None if there is none. Several
    partitions may have one, because the first partition changes when a pipeline gets another topic.
    """
    holds = map(parse_hold_metadata, metadata)
    found = [parse_progress(hold.progress) for hold in holds if hold is not None]
    return max((one for one in found if one is not None), key=lambda one: one.at_ms, default=None)


def progress_of_batch(event: Mapping[str, Any], at_ms: int) -> PipelineProgress:
    """Return the progress in an event of Spark's StreamingQueryListener, decoded from JSON, at the time `at_ms`."""
    operators: Iterable[Mapping[str, Any]] = event.get("stateOperators") or ()
    durations = event.get("durationMs") or {}
    return PipelineProgress(
        batch=int(event["batchId"]),
        at_ms=at_ms,
        records=int(event.get("numInputRows") or 0),
        seconds=float(durations.get("triggerExecution") or 0) / 1000,
        input_per_s=_rate(event.get("inputRowsPerSecond")),
        processed_per_s=_rate(event.get("processedRowsPerSecond")),
        state_rows=sum(int(one.get("numRowsTotal") or 0) for one in operators),
        state_bytes=sum(int(one.get("memoryUsedBytes") or 0) for one in operators),
        late_rows=sum(int(one.get("numRowsDroppedByWatermark") or 0) for one in operators),
        watermark_ms=_time_ms((event.get("eventTime") or {}).get("watermark")),
    )


def _rate(value: Any) -> float:
    """Return a rate, rounded; 0 for the text `NaN` or `Infinity`, which Spark writes for a batch without duration."""
    return round(float(value), 2) if type(value) in (int, float) and math.isfinite(value) else 0.0


def _time_ms(text: str | None) -> int | None:
    """Return a time as Spark writes it (2013-01-01T10:00:00.000Z); None for the epoch, with which a watermark
    begins.
    """
    if not text:
        return None
    return round(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000) or None


def commits_with_holds(
    offsets: Mapping[TopicPartition, int], query_id: str, progress: PipelineProgress | None
) -> dict[TopicPartition, CommittedOffset]:
    """Return the commits of a pipeline's offsets, each with a retention hold. The metadata of the first partition also
    contains the progress: in the others it would only be repeated.
    """
    hold = encode_hold_metadata(query_id)
    commits = {partition: CommittedOffset(offset, hold) for partition, offset in offsets.items()}
    if progress is not None and commits:
        first = min(commits)
        commits[first] = CommittedOffset(offsets[first], encode_hold_metadata(query_id, progress.to_json()))
    return commits
