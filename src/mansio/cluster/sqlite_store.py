"""The metadata store of a single node: one SQLite file, written ahead and synced before every answer.

Owns the file. Every call runs on the `Background` worker given at construction, one after the other: a commit
waits for the disk (`synchronous=FULL`), and a slow disk must not stall the loop; the hop costs far less than
the sync. Give it a worker of its own, lest acknowledgements of records wait behind it.

Always true: a change and its event are written in the same SQLite transaction, so a watch cannot miss one. A
watch keeps only its position and reads the next events from the table, so a slow reader holds no memory here.
After a failed commit other than a full disk nothing is known about what reached the disk: the store refuses
every later change until it is opened again.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from mansio.cluster.metadata import Compacted, Compare, Delete, Entry, Event, Listing, Put, Transacted
from mansio.errors import InvalidRequest, StorageError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mansio.ports import Background, Promise

T = TypeVar("T")

FORMAT: Final = 1
EVENTS_KEPT: Final = 10_000
WATCH_BATCH_EVENTS_MAX: Final = 512
OPERATIONS_MAX: Final = 10_000

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS store (
    only INTEGER PRIMARY KEY CHECK (only = 1), format INTEGER NOT NULL,
    revision INTEGER NOT NULL, compacted INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL,
    create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    revision INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
    create_revision INTEGER NOT NULL, PRIMARY KEY (revision, number)) WITHOUT ROWID;
"""
_LAST_OF_BATCH: Final = (
    "SELECT revision FROM events WHERE revision >= ? AND key >= ? AND key < ?"
    " ORDER BY revision, number LIMIT 1 OFFSET ?"
)
_BATCH: Final = (
    "SELECT key, value, create_revision, revision FROM events"
    " WHERE revision >= ? AND key >= ? AND key < ? AND revision <= ? ORDER BY revision, number"
)


class SqliteStore:
    """`MetadataStore` on one file (`:memory:` for one that forgets). Make it with `open`."""

    def __init__(
        self,
        database: sqlite3.Connection,
        background: Background,
        promise: Callable[[], Promise[Any]],
        events_kept: int,
    ) -> None:
        self._database = database
        self._background = background
        self._promise = promise
        self._events_kept = events_kept
        self._waiting: set[Promise[None]] = set()
        self._failure: StorageError | None = None
        self._closed = False
        self._revision: int
        (self._revision,) = database.execute("SELECT revision FROM store").fetchone()

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
    ) -> SqliteStore:
        """Open or create the file. `promise` makes what calls await (`Scheduler.promise`).

        Raises `StorageError` when the file is damaged, of a newer version, or open elsewhere.
        """
        try:
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        except sqlite3.Error as error:
            raise StorageError(f"metadata {path}: {error}") from error
        try:
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
            database.execute("INSERT OR IGNORE INTO store VALUES (1, ?, 0, 0)", (FORMAT,))
            database.execute("COMMIT")
            (found,) = database.execute("SELECT format FROM store").fetchone()
        except sqlite3.Error as error:
            database.close()
            raise StorageError(f"metadata {path}: {error}") from error
        if found != FORMAT:
            database.close()
            raise StorageError(f"metadata {path} has format {found}; this version knows {FORMAT}")
        return cls(database, background, promise, events_kept)

    async def get(self, key: str) -> Entry | None:
        return await self._run(self._get, key)

    async def list(self, prefix: str) -> Listing:
        return await self._run(self._list, prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Transacted:
        if max(len(compares), len(operations)) > OPERATIONS_MAX:
            raise InvalidRequest(f"more than {OPERATIONS_MAX} conditions or operations in a transaction")
        if len({operation.key for operation in operations}) != len(operations):
            raise InvalidRequest("a key is named by two operations of a transaction")
        return await self._run(self._transact, tuple(compares), tuple(operations), then=self._transacted)

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
        """End all watches and close the file. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await self._run(self._database.close, even_closed=True)
        self._wake()

    def _transacted(self, done: Transacted) -> None:
        """Runs even when whoever asked has gone away: what happened, watches must see."""
        if done.revision > self._revision:
            self._revision = done.revision
            self._wake()

    def _wake(self) -> None:
        for waiting in tuple(self._waiting):
            if not waiting.done():
                waiting.set_result(None)

    async def _run(
        self,
        work: Callable[..., T],
        *arguments: Any,
        then: Callable[[T], None] | None = None,
        even_closed: bool = False,
    ) -> T:
        if self._closed and not even_closed:
            raise Unavailable("the metadata store is closed")
        promise: Promise[Any] = self._promise()

        def done(result: T | None, error: BaseException | None) -> None:
            if error is None and then is not None:
                then(cast("T", result))
            if promise.done():  # whoever asked has gone away
                return
            if error is None:
                promise.set_result(result)
            else:
                promise.set_exception(error)

        self._background.submit(lambda: work(*arguments), done)
        try:
            answer: T = await promise
        except sqlite3.Error as error:
            raise StorageError(f"metadata: {error}") from error
        return answer

    # On the worker

    def _get(self, key: str) -> Entry | None:
        row = self._database.execute(
            "SELECT key, value, create_revision, mod_revision FROM entries WHERE key = ?", (key,)
        ).fetchone()
        return Entry(*row) if row else None

    def _list(self, prefix: str) -> Listing:
        rows = self._database.execute(
            "SELECT key, value, create_revision, mod_revision FROM entries"
            " WHERE key >= ? AND key < ? ORDER BY key",
            (prefix, _after(prefix)),
        ).fetchall()
        return Listing(self._stored_revision(), [Entry(*row) for row in rows])

    def _stored_revision(self) -> int:
        revision: int
        (revision,) = self._database.execute("SELECT revision FROM store").fetchone()
        return revision

    def _transact(self, compares: tuple[Compare, ...], operations: tuple[Put | Delete, ...]) -> Transacted:
        if self._failure is not None:
            raise self._failure
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE")
            revision = self._stored_revision()
            if not all(self._holds(compare) for compare in compares):
                database.execute("ROLLBACK")
                return Transacted(False, revision)
            changed = 0
            for operation in operations:
                changed += self._carry_out(operation, revision + 1, changed)
            if not changed:
                database.execute("ROLLBACK")
                return Transacted(True, revision)
            compacted = self._forget_old_events(revision + 1)
            database.execute(
                "UPDATE store SET revision = ?, compacted = max(compacted, ?)", (revision + 1, compacted)
            )
            database.execute("COMMIT")
        except sqlite3.Error as error:
            self._failed(error)
            raise
        return Transacted(True, revision + 1)

    def _failed(self, error: sqlite3.Error) -> None:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
            self._failure = StorageError(f"metadata takes no more changes until a restart: {error}")
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _holds(self, compare: Compare) -> bool:
        row = self._database.execute(
            "SELECT mod_revision, create_revision FROM entries WHERE key = ?", (compare.key,)
        ).fetchone()
        modified, created = row or (0, 0)
        return compare.mod_revision in (None, modified) and compare.create_revision in (None, created)

    def _carry_out(self, operation: Put | Delete, revision: int, number: int) -> int:
        database = self._database
        if isinstance(operation, Put):
            (created,) = database.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE"
                " SET value = excluded.value, mod_revision = excluded.mod_revision RETURNING create_revision",
                (operation.key, operation.value, revision, revision),
            ).fetchone()
            value: bytes | None = operation.value
        else:
            if not database.execute("DELETE FROM entries WHERE key = ?", (operation.key,)).rowcount:
                return 0
            created, value = 0, None
        database.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)", (revision, number, operation.key, value, created)
        )
        return 1

    def _forget_old_events(self, revision: int) -> int:
        """Delete events that are too old, now and then; returns the last revision forgotten, or 0."""
        keep = self._events_kept
        if revision % max(1, keep // 4):
            return 0
        (count,) = self._database.execute("SELECT count(*) FROM events").fetchone()
        if count <= keep:
            return 0
        (last,) = self._database.execute(
            "SELECT revision FROM events ORDER BY revision, number LIMIT 1 OFFSET ?", (count - keep - 1,)
        ).fetchone()
        last = min(last, revision - 1)
        self._database.execute("DELETE FROM events WHERE revision <= ?", (last,))
        return int(last)

    def _events(self, prefix: str, position: int) -> tuple[Sequence[Event], int]:
        """The next events from revision `position` on, whole revisions only, and the position after them."""
        revision, compacted = self._database.execute("SELECT revision, compacted FROM store").fetchone()
        if position <= compacted:
            raise Compacted(f"changes up to revision {compacted} are not kept; asked for {position}")
        limits = (position, prefix, _after(prefix))
        last = self._database.execute(_LAST_OF_BATCH, (*limits, WATCH_BATCH_EVENTS_MAX - 1)).fetchone()
        end = last[0] if last else revision
        rows = self._database.execute(_BATCH, (*limits, end)).fetchall()
        return [Event(*row) for row in rows], end + 1


def _after(prefix: str) -> str:
    """The first text that sorts after everything that begins with `prefix` (keys are ASCII)."""
    return prefix + "\U0010ffff"
