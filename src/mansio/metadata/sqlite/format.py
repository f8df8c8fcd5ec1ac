"""Format of the metadata file: tables, checksums, verification before anything is written, and the revision file.

SQLite detects damage to the structure of a file (pages, key order, lengths), but not to its content. It treats a
damaged write-ahead log like one that a crash left incomplete, and silently returns to an older state. Therefore every
row has a CRC-32C, the single row of the table `store` contains the number and the sum of these CRCs, and a file beside
the database (`RevisionFile`) contains the last durable revision.

Invariants:
* `verify` does not write to the database or its write-ahead log, so that a rejected file is unchanged.
* A file that `verify` accepts contains exactly the committed rows.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from crc32c import crc32c

from mansio.errors import MetadataCorrupt, StorageError
from mansio.host.disk import FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

CURRENT_FORMAT: Final = 2
FIRST_FORMAT: Final = 1
"""Format without checksums. `migrate` rewrites such a file when it is opened."""

TABLES: Final = {
    "store": """CREATE TABLE store (
    only INTEGER PRIMARY KEY CHECK (only = 1), format INTEGER NOT NULL,
    revision INTEGER NOT NULL, compacted INTEGER NOT NULL,
    entries INTEGER NOT NULL, entries_sum INTEGER NOT NULL,
    events INTEGER NOT NULL, events_sum INTEGER NOT NULL, crc INTEGER NOT NULL)""",
    "entries": """CREATE TABLE entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL,
    create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID""",
    "events": """CREATE TABLE events (
    revision INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
    create_revision INTEGER NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (revision, number)) WITHOUT ROWID""",
}
SELECT_STORE: Final = (
    "SELECT format, revision, compacted, entries, entries_sum, events, events_sum, crc FROM store"
)
UPDATE_STORE: Final = (
    "UPDATE store SET format = ?, revision = ?, compacted = ?,"
    " entries = ?, entries_sum = ?, events = ?, events_sum = ?, crc = ?"
)
SELECT_ENTRIES: Final = "SELECT key, value, create_revision, mod_revision, crc FROM entries"
SELECT_EVENTS: Final = "SELECT revision, number, key, value, create_revision, crc FROM events"

PAGE_BYTES_MIN: Final = 512
_MODE: Final = slice(18, 20)
_WAL_MODE: Final = b"\2\2"
REVISION_SUFFIX: Final = ".revision"
_REVISION = struct.Struct(">8sqI")
_REVISION_MAGIC: Final = b"MANSIORV"
_NUMBERS = struct.Struct(">qqqi")
_TOTALS = struct.Struct(">7q")
_TRANSIENT_CODES: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
CORRUPTION_REMEDY: Final = "restore a backup of the data directory, or start with an empty one"


class Totals(NamedTuple):
    """The single row of the table `store`: format, revision, numbers of entries and events, sums of their CRCs.

    Events up to `compacted_revision` were deleted.
    """

    format: int
    revision: int
    compacted_revision: int
    entry_count: int = 0
    entries_sum: int = 0
    event_count: int = 0
    events_sum: int = 0

    def row(self) -> tuple[int, ...]:
        """Return the values of all columns; the last one is the CRC of the others."""
        return (*self, crc32c(_TOTALS.pack(*self)))


def entry_crc(key: str, value: bytes, create_revision: int, mod_revision: int) -> int:
    """CRC-32C of a row of the table `entries`.

    Raises `TypeError`, `ValueError` or `struct.error` for values of a wrong type or range.
    """
    return _crc(create_revision, mod_revision, 0, key, value)


def event_crc(revision: int, number: int, key: str, value: bytes | None, create_revision: int) -> int:
    """CRC-32C of a row of the table `events`. `number` is the position of the event within its revision."""
    return _crc(create_revision, revision, 1 + number, key, value)


def _crc(first: int, second: int, third: int, key: str, value: bytes | None) -> int:
    if value is not None and not isinstance(value, bytes):
        raise TypeError("a value is bytes")  # an empty text has the same checksum as empty bytes
    name = key.encode()
    numbers = _NUMBERS.pack(first, second, third, len(name) if value is not None else -1 - len(name))
    return crc32c(b"".join((numbers, name, value or b"")))


def read_totals(database: sqlite3.Connection) -> Totals:
    """Read the row of the table `store`. Raises `MetadataCorrupt` if it does not match its checksum."""
    row = database.execute(SELECT_STORE).fetchone()
    with contextlib.suppress(struct.error, TypeError):
        if row is not None and crc32c(_TOTALS.pack(*row[:-1])) == row[-1]:
            return Totals(*row[:-1])
    raise MetadataCorrupt("the row with the totals does not match its checksum")


def verify_entry_row(row: tuple[Any, ...]) -> tuple[str, bytes, int, int]:
    """Check a row of `SELECT_ENTRIES`; returns it without its CRC. Raises `MetadataCorrupt` if the CRC is wrong."""
    with contextlib.suppress(struct.error, TypeError, AttributeError, UnicodeError):
        if entry_crc(*row[:-1]) == row[-1]:
            return row[0], row[1], row[2], row[3]
    raise MetadataCorrupt(f"the entry {row[0]!r:.120} does not match its checksum")


def verify_event_row(row: tuple[Any, ...]) -> tuple[int, int, str, bytes | None, int]:
    """Check a row of `SELECT_EVENTS`; returns it without its CRC. Raises `MetadataCorrupt` if the CRC is wrong."""
    with contextlib.suppress(struct.error, TypeError, AttributeError, UnicodeError):
        if event_crc(*row[:-1]) == row[-1]:
            return row[0], row[1], row[2], row[3], row[4]
    raise MetadataCorrupt(f"the change {row[0]!r:.40} does not match its checksum")


class UnknownFormat(StorageError):
    """Raised within this module for a file with an unknown or damaged format version."""


def to_storage_error(error: sqlite3.Error, path: str) -> StorageError:
    """Convert an error of SQLite into a `StorageError`; into `MetadataCorrupt` if the file is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _TRANSIENT_CODES:
        return StorageError(f"metadata {path}: {error}")
    return corrupt_error(path, str(error))


def corrupt_error(path: str, what: str) -> MetadataCorrupt:
    line = " ".join(what.split())  # SQLite quotes statements, which have several lines
    return MetadataCorrupt(f"metadata {path} is damaged: {line}; {CORRUPTION_REMEDY}")


class RevisionFile:
    """File beside the database that contains the last durable revision.

    It is overwritten after each commit and not flushed. After a crash of the process it is exact; after a power loss or
    on a full disk it may contain an older revision, never a newer one. So the database must have at least this
    revision. If the file is missing or damaged, the revision is unknown.
    """

    def __init__(self, path: str) -> None:
        self._path = path + REVISION_SUFFIX
        self._descriptor = -1
        self._is_behind = False

    def store(self, revision: int) -> None:
        """Store a durable revision. Raises `OSError`, except on a full disk.

        On a full disk the file keeps the old revision, or becomes invalid, until the next call.
        """
        try:
            self._write(_encode_revision(revision))
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            if not self._is_behind:
                logger.warning(
                    "disk full: last metadata revision not stored, retried with each change: %s: %s",
                    self._path,
                    error,
                )
            self._is_behind = True
        else:
            self._is_behind = False

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(self._path, flags, FILE_MODE)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        if os.write(self._descriptor, data) < len(data):  # the content does not match its checksum now
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _encode_revision(revision: int) -> bytes:
    body = _REVISION_MAGIC + struct.pack(">q", revision)
    return body + struct.pack(">I", crc32c(body))


def read_revision_file(path: str) -> int:
    """Return the revision in the revision file of the database at `path`; -1 if that file is missing or damaged."""
    try:
        with open(path + REVISION_SUFFIX, "rb") as file:
            data = file.read(_REVISION.size + 1)
    except FileNotFoundError:
        return -1
    if len(data) != _REVISION.size:
        return -1
    revision: int = _REVISION.unpack(data)[1]
    return revision if revision >= 0 and data == _encode_revision(revision) else -1


def verify(path: str) -> int | None:
    """Verify the metadata file at `path` and its write-ahead log, without writing. Returns its format number.

    The result is None if there is no file or an empty one. Reads the whole file. Raises `MetadataCorrupt` if it is
    damaged, `StorageError` if it cannot be read or was written by a newer version.
    """
    try:
        known = read_revision_file(path)
        size = _size(path)
        if size < PAGE_BYTES_MIN and (size > 0 or known > 0 or _size(path + "-wal") > 0):
            # SQLite would treat it as an empty file and discard the write-ahead log
            raise corrupt_error(path, f"it has only {size} bytes although it was written")
        if not size or (
            known <= 0 and _size(path + "-journal") > 0
        ):  # a crash while the first page was written
            return None
        with _open_copy(path) as database:
            return _check_database(database, known)
    except sqlite3.Error as error:
        raise to_storage_error(error, path) from error
    except UnicodeError as error:  # a text with invalid encoding
        raise corrupt_error(path, str(error)) from error
    except MetadataCorrupt as error:
        if error.message.startswith("metadata "):
            raise
        raise corrupt_error(path, error.message) from error
    except UnknownFormat as error:
        raise StorageError(f"metadata {path}: {error.message}") from error
    except OSError as error:
        raise StorageError(f"metadata {path}: {error}") from error


def create_empty_file(path: str) -> None:
    """Create the metadata file with the permissions of a broker's files; SQLite gives its write-ahead log the same."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))


def _size(path: str) -> int:
    """Size of a file in bytes; 0 if the file does not exist."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def verify_store(path: str) -> list[str]:
    """Problems of the metadata file at `path`, one line each; an empty list if it is valid. Changes nothing.

    No broker may have the file open.
    """
    if not os.path.exists(path) and read_revision_file(path) <= 0:
        return [f"metadata {path} is missing"]
    try:
        verify(path)
    except StorageError as error:
        return [error.message]
    return []


@contextlib.contextmanager
def _open_copy(path: str) -> Iterator[sqlite3.Connection]:
    """Open a copy of the database in memory, with its write-ahead log applied. Needs no disk space."""
    with open(path, "rb") as file:
        data = file.read()
    if _size(path + "-wal"):
        if data[_MODE] != _WAL_MODE:
            raise MetadataCorrupt("it has a write-ahead log although its first page excludes one")
        with open(path + "-wal", "rb") as file:
            data = apply_wal(data, file.read())
    if data[_MODE] == _WAL_MODE:
        data = data[: _MODE.start] + b"\1\1" + data[_MODE.stop :]
    database = sqlite3.connect(":memory:", isolation_level=None)
    try:
        database.deserialize(data)
        yield database
    finally:
        database.close()


def _check_database(database: sqlite3.Connection, known_revision: int) -> int | None:
    found = dict(database.execute("SELECT name, sql FROM sqlite_master").fetchall())
    if not found:  # a crash between the first page and the tables
        if known_revision > 0:
            raise MetadataCorrupt(f"it is empty, but revision {known_revision} was durable")
        return None
    for (problem,) in database.execute("PRAGMA quick_check(1)"):
        if problem != "ok":
            raise MetadataCorrupt(problem)
    row = database.execute("SELECT format, revision FROM store").fetchone()
    if row is None:
        raise MetadataCorrupt("it has no revision")
    file_format, revision = row
    if file_format == FIRST_FORMAT and "entries_sum" not in found.get("store", ""):
        return FIRST_FORMAT
    if file_format != CURRENT_FORMAT:
        raise UnknownFormat(f"it has format {file_format}; this version supports {CURRENT_FORMAT}")
    if found != TABLES:
        raise MetadataCorrupt("its tables are not those of this format")
    _check_rows(database)
    if revision < known_revision:
        raise MetadataCorrupt(f"it ends at revision {revision}, but {known_revision} was durable")
    return CURRENT_FORMAT


def _check_rows(database: sqlite3.Connection) -> None:
    totals = read_totals(database)
    sums = []
    for select, check in ((SELECT_ENTRIES, verify_entry_row), (SELECT_EVENTS, verify_event_row)):
        count = total = 0
        for row in database.execute(select):
            check(row)
            count += 1
            total += row[-1]
        sums += [count, total]
    if sums != list(totals[3:]):
        raise MetadataCorrupt(f"its {sums[0]} entries and {sums[2]} changes do not match the totals")


def create(database: sqlite3.Connection) -> None:
    """Create the tables of a new metadata file. The caller has begun a transaction."""
    for statement in TABLES.values():
        database.execute(statement)
    totals = Totals(CURRENT_FORMAT, 0, 0)
    database.execute("INSERT INTO store VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", totals.row())


def migrate(database: sqlite3.Connection) -> None:
    """Convert a metadata file from `FIRST_FORMAT` to the current format. The caller has begun a transaction."""
    entries = database.execute("SELECT key, value, create_revision, mod_revision FROM entries").fetchall()
    events = database.execute("SELECT revision, number, key, value, create_revision FROM events").fetchall()
    revision, compacted = database.execute("SELECT revision, compacted FROM store").fetchone()
    for table in TABLES:
        database.execute(f"DROP TABLE {table}")
    create(database)
    entry_rows = [(*row, entry_crc(*row)) for row in entries]
    event_rows = [(*row, event_crc(*row)) for row in events]
    database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", entry_rows)
    database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", event_rows)
    totals = Totals(
        CURRENT_FORMAT,
        revision,
        compacted,
        len(entry_rows),
        sum(row[-1] for row in entry_rows),
        len(event_rows),
        sum(row[-1] for row in event_rows),
    )
    database.execute(UPDATE_STORE, totals.row())


# ---------------------------------------------------------------------- write-ahead log

_WAL_HEADER = struct.Struct(">8I")  # magic, version, page size, sequence, salts, checksums
_WAL_FRAME = struct.Struct(">6I")  # page number, pages after a commit or 0, salts, checksums
_WAL_MAGIC: Final = 0x377F0682  # the last bit: words are big-endian in checksums
_WAL_VERSION: Final = 3_007_000
_WAL_MASK: Final = 0xFFFFFFFF


def apply_wal(database: bytes, wal: bytes) -> bytes:
    """Return the bytes of a database file after all complete commits of its write-ahead log are applied.

    SQLite does the same when it opens a file, but then it needs disk space and writes the result back. As in SQLite's
    recovery, commits are applied up to the first frame that is incomplete or invalid.

    Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
    """
    if len(wal) < _WAL_HEADER.size:
        return database
    magic, version, page_bytes, _, *rest = _WAL_HEADER.unpack_from(wal)
    salts, found = tuple(rest[:2]), tuple(rest[2:])
    order = ">" if magic & 1 else "<"
    sums = _wal_checksum(order, wal[:24], (0, 0))
    if magic | 1 != _WAL_MAGIC | 1 or version != _WAL_VERSION or sums != found:
        return database
    if page_bytes < 512 or page_bytes & (page_bytes - 1) or page_bytes > 65536:
        return database
    pages: dict[int, bytes] = {}
    committed: dict[int, bytes] = {}
    page_count = 0
    position = _WAL_HEADER.size
    while position + _WAL_FRAME.size + page_bytes <= len(wal):
        number, after_commit, first_salt, second_salt, *found_sums = _WAL_FRAME.unpack_from(wal, position)
        page = wal[position + _WAL_FRAME.size : position + _WAL_FRAME.size + page_bytes]
        sums = _wal_checksum(order, page, _wal_checksum(order, wal[position : position + 8], sums))
        if (first_salt, second_salt) != salts or not number or sums != tuple(found_sums):
            break
        pages[number] = page
        if after_commit:
            committed, page_count = dict(pages), after_commit
        position += _WAL_FRAME.size + page_bytes
    if not page_count:
        return database
    merged = bytearray(database.ljust(page_count * page_bytes, b"\0")[: page_count * page_bytes])
    for number, page in committed.items():
        if number <= page_count:
            merged[(number - 1) * page_bytes : number * page_bytes] = page
    return bytes(merged)


def _wal_checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Checksum of SQLite's write-ahead log over pairs of 32-bit words; `sums` is the checksum of the data before."""
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for left, right in zip(words, words, strict=True):
        first = (first + left + second) & _WAL_MASK
        second = (second + right + first) & _WAL_MASK
    return first, second
