"""Metadata store of a single node: one SQLite file in WAL mode, flushed before every response.

All calls run one after the other on the `Background` worker that the constructor gets: a commit waits for the disk
(`synchronous=FULL`), which must not block the event loop. The worker should not be the one that flushes records, so
that acknowledgements do not wait for metadata.

Invariants:
* A change and its event are written in the same SQLite transaction, so a watch misses no event. A watch stores only its
  position and reads the next events from the table, so a slow reader takes no memory.
* After a failed commit the content of the disk is unknown, unless the disk was full: the store rejects every later
  change until it is opened again.
* A row is returned only if it matches its checksum. A damaged file is rejected when it is opened, and is not changed
  (see `format`).
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from mansio.errors import InvalidRequest, MetadataCorrupt, StorageError, Unavailable
from mansio.metadata.metadata_store import (
    Compare,
    Delete,
    Entry,
    Event,
    Listing,
    Put,
    RevisionCompacted,
    TransactionResult,
)
from mansio.metadata.sqlite.format import (
    FIRST_FORMAT,
    SELECT_ENTRIES,
    SELECT_EVENTS,
    UPDATE_STORE,
    RevisionFile,
    Totals,
    corrupt_error,
    create,
    create_empty_file,
    entry_crc,
    event_crc,
    migrate,
    read_totals,
    to_storage_error,
    verify,
    verify_entry_row,
    verify_event_row,
)
from mansio.ports import complete, complete_from
from mansio.tracebacks import copied, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mansio.metadata.metadata_store import BeforeCommit
    from mansio.ports import Background, Promise

T = TypeVar("T")

EVENTS_KEPT: Final = 10_000
WATCH_BATCH_EVENTS_MAX: Final = 512
OPERATIONS_MAX: Final = 10_000
WAL_PAGES: Final = 64
WAL_RESERVE_BYTES: Final = 512 * 1024
"""Preallocated size of the write-ahead log, which is reused from its beginning after `WAL_PAGES`. So a topic can be
deleted even if the disk is full."""

_LAST_OF_BATCH: Final = (
    "SELECT revision FROM events WHERE revision >= ? AND key >= ? AND key < ?"
    " ORDER BY revision, number LIMIT 1 OFFSET ?"
)
_BATCH: Final = (
    SELECT_EVENTS + " WHERE revision >= ? AND key >= ? AND key < ? AND revision <= ?"
    " ORDER BY revision, number"
)


class SqliteStore:
    """`MetadataStore` on one SQLite file; with the path `:memory:` it is not persistent. `open` creates it."""

    def __init__(
        self,
        path: str,
        database: sqlite3.Connection,
        revision_file: RevisionFile | None,
        background: Background,
        promise: Callable[[], Promise[Any]],
        events_kept: int,
        before_commit: BeforeCommit,
    ) -> None:
        self._path = path
        self._before_commit = before_commit
        self._database = database
        self._revision_file = revision_file
        self._background = background
        self._promise = promise
        self._events_kept = events_kept
        self._waiting: set[Promise[None]] = set()
        self._failure: StorageError | None = None
        self._closed = False
        self._revision = read_totals(database).revision

    @property
    def operations_max(self) -> int:
        return OPERATIONS_MAX

    @classmethod
    def open(
        cls,
        path: str,
        background: Background,
        promise: Callable[[], Promise[Any]],
        *,
        events_kept: int = EVENTS_KEPT,
        before_commit: BeforeCommit = lambda _: None,
    ) -> SqliteStore:
        """Open and verify the file, or create it; blocks. `promise` creates awaitables (`Scheduler.promise`).

        `events_kept` is the number of events that are kept for watches. `before_commit` is called on the worker with
        the operations of a transaction before it is committed; its `OSError` makes the transaction fail without effect.
        Raises `MetadataCorrupt` if the file is damaged, `StorageError` if it was written by a newer version or another
        process has it open.
        """
        in_memory = path == ":memory:"
        found = None if in_memory else verify(path)
        database: sqlite3.Connection | None = None
        revision_file: RevisionFile | None = None
        try:
            if found is None and not in_memory:
                create_empty_file(path)
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("PRAGMA fullfsync=1")  # macOS: fsync alone leaves the bytes in the drive's cache
            database.execute("PRAGMA checkpoint_fullfsync=1")
            database.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
            database.execute("BEGIN IMMEDIATE")
            if found is None:
                create(database)
            elif found == FIRST_FORMAT:
                migrate(database)
            database.execute("COMMIT")
            if not in_memory:
                _reserve_wal(database, path)
                revision_file = RevisionFile(path)
                revision_file.store(read_totals(database).revision)
            return cls(path, database, revision_file, background, promise, events_kept, before_commit)
        except (sqlite3.Error, OSError, MetadataCorrupt) as error:
            if revision_file is not None:
                revision_file.close()
            if database is not None:
                database.close()
            if isinstance(error, OSError):
                raise StorageError(f"metadata {path}: {error}") from error
            raise (to_storage_error(error, path) if isinstance(error, sqlite3.Error) else error) from error

    async def get(self, key: str) -> Entry | None:
        return await self._run(self._get, key)

    async def list(self, prefix: str) -> Listing:
        return await self._run(self._list, prefix)

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        if max(len(compares), len(operations)) > OPERATIONS_MAX:
            raise InvalidRequest(f"more than {OPERATIONS_MAX} conditions or operations in a transaction")
        if len({operation.key for operation in operations}) != len(operations):
            raise InvalidRequest("two operations of a transaction have the same key")
        if any(isinstance(operation, Put) and operation.lease for operation in operations):
            raise InvalidRequest("the metadata store of a single node has no leases")
        return await self._run(
            self._transact, tuple(compares), tuple(operations), then=self._on_transaction_done
        )

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        position = from_revision
        while not self._closed:
            if position > self._revision:
                waiting = self._promise()
                self._waiting.add(waiting)
                try:
                    await waiting
                finally:
                    self._waiting.discard(waiting)
                continue
            events, position = await self._run(self._events, prefix, position)
            if events:
                yield events

    async def close(self) -> None:
        """End all watches and close the file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._run(self._close, is_allowed_when_closed=True)
        self._wake()

    def _on_transaction_done(self, done: TransactionResult) -> None:
        """Wake the watches after a transaction. It runs even if the caller was cancelled."""
        if done.revision > self._revision:
            self._revision = done.revision
            self._wake()

    def _wake(self) -> None:
        for waiting in tuple(self._waiting):
            complete(waiting, None)

    async def _run(
        self,
        work: Callable[..., T],
        *arguments: Any,
        then: Callable[[T], None] | None = None,
        is_allowed_when_closed: bool = False,
    ) -> T:
        if self._closed and not is_allowed_when_closed:
            raise Unavailable("the metadata store is closed")
        promise: Promise[Any] = self._promise()

        def done(result: T | None, error: BaseException | None) -> None:
            if error is None and then is not None:
                then(cast("T", result))
            complete_from(promise, result, error)

        self._background.submit(lambda: work(*arguments), done)
        try:
            answer: T = await result_of(promise)
        except sqlite3.Error as error:
            raise to_storage_error(error, self._path) from error
        except MetadataCorrupt as error:
            raise corrupt_error(self._path, error.message) from error
        return answer

    # ------------------------------------------------------------------ on the worker

    def _close(self) -> None:
        self._database.close()
        if self._revision_file is not None:
            self._revision_file.close()

    def _get(self, key: str) -> Entry | None:
        row = self._database.execute(f"{SELECT_ENTRIES} WHERE key = ?", (key,)).fetchone()
        return Entry(*verify_entry_row(row)) if row else None

    def _list(self, prefix: str) -> Listing:
        rows = self._database.execute(
            f"{SELECT_ENTRIES} WHERE key >= ? AND key < ? ORDER BY key", (prefix, _prefix_end(prefix))
        ).fetchall()
        entries = [Entry(*verify_entry_row(row)) for row in rows]
        return Listing(read_totals(self._database).revision, entries)

    def _transact(
        self, compares: tuple[Compare, ...], operations: tuple[Put | Delete, ...]
    ) -> TransactionResult:
        if self._failure is not None:
            raise copied(self._failure)
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE")
            totals = read_totals(database)
            revision = totals.revision
            if not all(self._is_satisfied(compare) for compare in compares):
                database.execute("ROLLBACK")
                return TransactionResult(False, revision)
            after = totals._replace(revision=revision + 1)
            for operation in operations:
                after = self._execute(operation, after, after.event_count - totals.event_count)
            if after.event_count == totals.event_count:
                database.execute("ROLLBACK")
                return TransactionResult(True, revision)
            database.execute(UPDATE_STORE, self._compact_events(after).row())
            self._before_commit(operations)
            database.execute("COMMIT")
        except OSError as error:
            database.execute("ROLLBACK")
            raise StorageError(f"metadata {self._path}: {error}") from error
        except (sqlite3.Error, MetadataCorrupt) as error:
            self._handle_failure(error)
            raise
        self._store_revision(after.revision)
        return TransactionResult(True, after.revision)

    def _store_revision(self, revision: int) -> None:
        """Store a revision in the revision file, after its change became durable.

        Without this a later loss of the change could remain undetected. That is accepted while the disk is full,
        because the next change stores a newer revision. If the disk fails, the store rejects later changes.
        """
        try:
            if self._revision_file is not None:
                self._revision_file.store(revision)
        except OSError as error:
            self._failure = StorageError(
                f"metadata {self._path} takes no more changes until a restart: {error}"
            )

    def _handle_failure(self, error: sqlite3.Error | MetadataCorrupt) -> None:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
            self._failure = StorageError(
                f"metadata {self._path} takes no more changes until a restart: {error}"
            )
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _is_satisfied(self, compare: Compare) -> bool:
        entry = self._get(compare.key)
        modified, created = (entry.mod_revision, entry.create_revision) if entry else (0, 0)
        return compare.mod_revision in (None, modified) and compare.create_revision in (None, created)

    def _execute(self, operation: Put | Delete, totals: Totals, number: int) -> Totals:
        """Execute one operation and store its event. Returns the new totals.

        `number` is the position of the event within its revision. The deletion of a missing key has no effect.
        """
        database = self._database
        key, revision = operation.key, totals.revision
        before = self._get(key)
        count, total = totals.entry_count, totals.entries_sum
        if before is not None:
            count, total = count - 1, total - entry_crc(*before)
        if isinstance(operation, Put):
            created = before.create_revision if before is not None else revision
            value: bytes | None = operation.value
            crc = entry_crc(key, operation.value, created, revision)
            count, total = count + 1, total + crc
            row = (key, value, created, revision, crc)
            database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)
        else:
            if before is None:
                return totals
            created, value = 0, None
            database.execute("DELETE FROM entries WHERE key = ?", (key,))
        crc = event_crc(revision, number, key, value, created)
        event = (revision, number, key, value, created, crc)
        database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", event)
        return totals._replace(
            entry_count=count,
            entries_sum=total,
            event_count=totals.event_count + 1,
            events_sum=totals.events_sum + crc,
        )

    def _compact_events(self, totals: Totals) -> Totals:
        """Delete old events, once per `events_kept / 4` revisions. Returns the new totals."""
        keep = self._events_kept
        if totals.revision % max(1, keep // 4) or totals.event_count <= keep:
            return totals
        database = self._database
        (last,) = database.execute(
            "SELECT revision FROM events ORDER BY revision, number LIMIT 1 OFFSET ?",
            (totals.event_count - keep - 1,),
        ).fetchone()
        last = min(last, totals.revision - 1)
        count, total = database.execute(
            "SELECT count(*), coalesce(sum(crc), 0) FROM events WHERE revision <= ?", (last,)
        ).fetchone()
        database.execute("DELETE FROM events WHERE revision <= ?", (last,))
        return totals._replace(
            compacted_revision=max(totals.compacted_revision, last),
            event_count=totals.event_count - count,
            events_sum=totals.events_sum - total,
        )

    def _events(self, prefix: str, position: int) -> tuple[Sequence[Event], int]:
        """(events, next position): a batch of events from revision `position` on, with complete revisions only."""
        totals = read_totals(self._database)
        if position <= totals.compacted_revision:
            raise RevisionCompacted(
                f"changes up to revision {totals.compacted_revision} are not kept; asked for {position}"
            )
        limits = (position, prefix, _prefix_end(prefix))
        last = self._database.execute(_LAST_OF_BATCH, (*limits, WATCH_BATCH_EVENTS_MAX - 1)).fetchone()
        end = last[0] if last else totals.revision
        events = []
        for row in self._database.execute(_BATCH, (*limits, end)).fetchall():
            changed, _, key, value, created = verify_event_row(row)
            events.append(Event(key, value, created, changed))
        return events, end + 1


def _reserve_wal(database: sqlite3.Connection, path: str) -> None:
    """Restart the write-ahead log and preallocate it as far as the disk has space; a full disk is not an error."""
    database.execute("PRAGMA wal_checkpoint(RESTART)")
    with contextlib.suppress(OSError), open(path + "-wal", "ab", buffering=0) as file:
        file.write(bytes(max(0, WAL_RESERVE_BYTES - file.tell())))


def _prefix_end(prefix: str) -> str:
    """Exclusive end of the range of all keys with this prefix; keys are ASCII."""
    return prefix + "\U0010ffff"
