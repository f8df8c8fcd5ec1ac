"""Fixtures of compaction tests: a complete run on one thread, and a model of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.storage.cleaner.compaction import CompactionSettings
from mansio.storage.compaction_run import (
    CompactionOutcome,
    CompactionRun,
    begin_compaction,
    plan_log_compaction,
)
from mansio.wire.batch.record_batch import check_stored_batch
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

EAGER = CompactionSettings(min_cleanable_dirty_ratio=0.0, delete_retention_ms=1000)
MAP_BYTES = 1 << 20


class Kept(NamedTuple):
    """One record as returned to a reader."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def start_compaction(
    log: Log,
    disk: Disk,
    *,
    now_ms: int,
    settings: CompactionSettings = EAGER,
    limit_offset: int | None = None,
    map_bytes_max: int = MAP_BYTES,
    is_last_of_producer: Callable[[BatchHeader], bool] | None = None,
    **more: Any,
) -> CompactionRun | None:
    """A run over everything that can be compacted; None if nothing is due. It writes the checkpoints that it needs."""
    limit = log.end_offset if limit_offset is None else limit_offset
    for _ in range(3):
        what = plan_log_compaction(log, settings, limit_offset=limit, now_ms=now_ms)
        if log.needs_maintenance:
            log.sync()
    if not what.is_due:
        return None
    return begin_compaction(
        disk,
        log,
        what,
        settings,
        now_ms=now_ms,
        map_bytes_max=map_bytes_max,
        is_last_of_producer=is_last_of_producer,
        **more,
    )


def one_piece(run: CompactionRun) -> bool:
    """Run the next piece of work; False if there is none."""
    work = run.next_job()
    if work is None:
        return False
    while work is not None:
        work = finish(run, work)
    return True


def finish(run: CompactionRun, work: Callable[[], object]) -> Callable[[], object] | None:
    """Run one piece of work and pass its result; returns the work that must follow immediately."""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # whatever it is, the run is told
        return run.finish_job(None, error)
    return run.finish_job(result, None)


def run_to_end(run: CompactionRun) -> CompactionOutcome:
    """All of it."""
    while run.outcome is None:
        assert one_piece(run)
    return run.outcome


def compact(log: Log, disk: Disk, **more: Any) -> CompactionRun | None:
    """One whole compaction, if one is due."""
    run = start_compaction(log, disk, **more)
    if run is not None:
        run_to_end(run)
    return run


def records_of(log: Log, from_offset: int = 0) -> list[Kept]:
    """Every record that a reader gets, in order; the batches are checked, too."""
    found: list[Kept] = []
    for batch in log.batches(max(from_offset, log.start_offset)):
        check_stored_batch(batch)
        found += [
            Kept(*record)
            for record in read_records(batch, output_bytes_max=1 << 24)
            if record.offset >= log.start_offset
        ]
    return found


class CompactedModel:
    """Model of a compacted log as a plain list: the newest record of each key, and tombstones until their delete
    horizon.
    """

    def __init__(self) -> None:
        self.records: dict[int, Kept] = {}
        self.horizons: dict[int, int] = {}

    def write(self, record: Kept) -> None:
        self.records[record.offset] = record

    def compact(self, end_offset: int, now_ms: int, delete_retention_ms: int) -> None:
        newest = {r.key: r.offset for r in self.records.values() if r.offset < end_offset}
        for offset, record in list(self.records.items()):
            if offset >= end_offset:
                continue
            gone = record.key is None or newest[record.key] > offset
            if not gone and record.value is None:
                gone = now_ms > self.horizons.setdefault(offset, now_ms + delete_retention_ms)
            if gone:
                del self.records[offset]

    def visible(self, start_offset: int) -> list[Kept]:
        return [record for offset, record in sorted(self.records.items()) if offset >= start_offset]
