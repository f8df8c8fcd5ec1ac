"""Flipped bits and cuts in the metadata file and its write-ahead log: refused by name, or answered as before."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import MetadataCorrupt, StorageError
from mansio.metadata.metadata_store import Delete, Entry, Event, Put, RevisionCompacted
from mansio.metadata.sqlite.format import read_revision_file, verify_store
from mansio.metadata.sqlite.store import SqliteStore
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

FLIPS = examples(250, 750, 750)
EVENTS_KEPT = 40
WAL_HEADER_BYTES = 32
FRAME_BYTES = 24 + 4096
NAME = "metadata.sqlite3"
SUFFIXES = ("", "-wal", ".revision")

State = tuple[int, list[Entry], list[Event]]
Files = dict[str, bytes]


class Inline:
    """A worker that does everything at once, on the caller's thread."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # the port hands every error to `done`
            done(None, error)
        else:
            done(result, None)

    def close(self) -> None: ...


class Settled:
    """A promise that is settled before anybody awaits it."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return False

    def set_result(self, value: Any) -> None:
        self.value = value

    def set_exception(self, error: BaseException) -> None:
        self.error = error

    def __await__(self) -> Any:
        yield from ()
        if self.error is not None:
            raise self.error
        return self.value


def run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def open_store(path: Path) -> SqliteStore:
    return SqliteStore.open(str(path), Inline(), Settled, events_kept=EVENTS_KEPT)  # type: ignore[arg-type]  # stand-ins


def state_of(store: SqliteStore) -> State:
    revision, entries = run(store.list(""))
    assert [run(store.get(entry.key)) for entry in entries] == entries
    events: list[Event] = []
    position = revision + 1
    while True:  # as far back as they are kept
        try:
            store._events("", position - 1)
        except RevisionCompacted:
            break
        position -= 1
        if position <= 1:
            break
    while position <= revision:
        found, position = store._events("", position)
        events += found
    return revision, entries, events


def change(store: SqliteStore, number: int) -> None:
    chance = random.Random(number)
    puts = [Put(f"/mansio/topics/{chance.randrange(60)}", chance.randbytes(300)) for _ in range(2)]
    operations = {put.key: put for put in puts}
    operations[f"/x/{number}"] = Put(f"/x/{number}", b"")
    run(store.transact([], [*operations.values(), Delete(f"/x/{number - 5}")]))


def files_of(path: Path) -> Files:
    return {
        suffix: other.read_bytes()
        for suffix in SUFFIXES
        if (other := path.with_name(path.name + suffix)).exists()
    }


def used_wal(wal: bytes) -> bytes:
    """The frames of a write-ahead log, without the room that is kept after them."""
    frames = -(-(len(wal.rstrip(b"\0")) - WAL_HEADER_BYTES) // FRAME_BYTES)
    return wal[: WAL_HEADER_BYTES + FRAME_BYTES * frames] if frames > 0 else b""


def put_down(directory: Path, files: Files) -> Path:
    for name in os.listdir(directory):
        os.unlink(directory / name)
    for suffix, data in files.items():
        (directory / (NAME + suffix)).write_bytes(data)
    return directory / NAME


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, State]:
    """A store that was closed, and what it holds."""
    path = tmp_path_factory.mktemp("closed") / NAME
    store = open_store(path)
    for number in range(60):
        change(store, number)
    state = state_of(store)
    run(store.close())
    return files_of(path), state


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Files, State]]:
    """A store as a kill would leave it after each of its last changes: most of it is in the write-ahead log."""
    path = tmp_path_factory.mktemp("killed") / NAME
    store = open_store(path)
    for number in range(30):
        change(store, number)
    run(store.close())
    store = open_store(path)
    moments = [(files_of(path), state_of(store))]
    for number in range(30, 34):
        change(store, number)
        moments.append((files_of(path), state_of(store)))
    run(store.close())
    return [({**files, "-wal": used_wal(files["-wal"])}, state) for files, state in moments]


def outcome(directory: Path, files: Files, state: State) -> str:
    """ "refused" or "same"; anything else fails."""
    path = put_down(directory, files)
    complaints = verify_store(str(path))
    assert files_of(path) == files, "a file that is judged stays as it is"
    assert set(os.listdir(directory)) == {NAME + suffix for suffix in files}
    try:
        store = open_store(path)
    except StorageError as error:
        refusal = error.message
    else:
        refusal = ""
    if refusal:
        assert files_of(path) == files, "a file that is refused stays as it is"
        assert "\n" not in refusal
        assert NAME in refusal
        assert complaints == [refusal]
        return "refused"
    assert not complaints
    found = state_of(store)
    assert found == state
    change(store, 999)  # and it can be written on
    assert state_of(store)[0] == state[0] + 1
    run(store.close())
    return "same"


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def flips(tmp_path: Path, files: Files, state: State, suffix: str, count: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    seen = {"refused": 0, "same": 0}
    size = 8 * len(files[suffix])
    for bit in chance.sample(range(size), min(count, size)):
        try:
            seen[outcome(tmp_path, {**files, suffix: flipped(files[suffix], bit)}, state)] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, file {suffix!r}, bit {bit}: {error}") from error
    return seen


@pytest.mark.full
def test_a_flipped_bit_of_a_closed_store(tmp_path: Path, closed: tuple[Files, State]) -> None:
    files, state = closed
    assert outcome(tmp_path, files, state) == "same"
    seen = flips(tmp_path, files, state, "", FLIPS, random.randrange(1 << 32))
    assert seen["refused"] > FLIPS / 5  # much of the file is free pages


@pytest.mark.full
def test_a_flipped_bit_in_the_witness_costs_nothing_but_the_warning(
    tmp_path: Path, closed: tuple[Files, State]
) -> None:
    assert flips(tmp_path, *closed, ".revision", 1000, 1) == {"refused": 0, "same": 8 * 20}


@pytest.mark.full
def test_a_flipped_bit_of_the_write_ahead_log(tmp_path: Path, killed: list[tuple[Files, State]]) -> None:
    files, state = killed[-1]
    assert len(files["-wal"]) > 4 * 4096
    assert outcome(tmp_path, files, state) == "same"
    seen = flips(tmp_path, files, state, "-wal", FLIPS // 3, random.randrange(1 << 32))
    assert seen["refused"] > FLIPS / 3 / 5  # pages in it are written more than once


def test_files_cut_short(
    tmp_path: Path, closed: tuple[Files, State], killed: list[tuple[Files, State]]
) -> None:
    chance = random.Random(5)
    for (files, state), suffix in ((closed, ""), (killed[-1], "-wal"), (killed[-1], "")):
        data = files[suffix]
        sizes = {0, 1, 512, 4096, len(data) - 4096, len(data) - 1}
        for size in sizes | {chance.randrange(len(data)) for _ in range(40)}:
            seen = outcome(tmp_path, {**files, suffix: data[:size]}, state)
            if not (suffix == "" and "-wal" in files):  # the write-ahead log may have all that was cut off
                assert seen == "refused", (suffix, size)
        without = {other: kept for other, kept in files.items() if other != suffix}
        assert outcome(tmp_path, without, state) == "refused", f"{suffix} is missing"


def test_zeroed_and_repeated_pages(tmp_path: Path, closed: tuple[Files, State]) -> None:
    files, state = closed
    pages = len(files[""]) // 4096
    for page in range(pages):
        for other in (bytes(4096), files[""][4096 * (page - 1) :][:4096] or files[""][-4096:]):
            data = files[""][: 4096 * page] + other + files[""][4096 * (page + 1) :]
            if data != files[""]:
                outcome(tmp_path, {**files, "": data}, state)


def test_an_older_copy_of_the_file_is_refused_and_so_is_a_lost_write_ahead_log(
    tmp_path: Path, killed: list[tuple[Files, State]]
) -> None:
    last, state = killed[-1]
    for earlier, _ in killed[:-1]:
        files = {"": earlier[""], "-wal": earlier["-wal"], ".revision": last[".revision"]}
        assert outcome(tmp_path, files, state) == "refused"


def test_a_tail_that_a_crash_tore_is_an_earlier_state_and_no_damage(
    tmp_path: Path, killed: list[tuple[Files, State]]
) -> None:
    """The commit was being written when it happened: its bytes are there in part, and no answer was sent of it."""
    for (before, state), (after, next_state) in itertools.pairwise(killed):
        begin, end = len(before["-wal"]), len(after["-wal"])
        assert end > begin
        for size in (begin + 1, begin + 24, (begin + end) // 2, end - 1):
            files = {**before, "-wal": after["-wal"][:size]}
            assert outcome(tmp_path, files, state) == "same"
        not_acknowledged = {**after, ".revision": before[".revision"]}
        assert outcome(tmp_path, not_acknowledged, next_state) == "same"


def test_rows_changed_by_another_hand_are_refused(tmp_path: Path, closed: tuple[Files, State]) -> None:
    """What SQLite itself finds in order: a row less, a row more, other bytes in a row, an old revision."""
    files, state = closed
    for statement in (
        "DELETE FROM entries WHERE key = '/x/59'",
        "DELETE FROM events WHERE revision = 60",
        "UPDATE entries SET value = x'00' WHERE key = '/x/59'",
        "UPDATE events SET value = NULL WHERE revision = 60 AND number = 0",
        "UPDATE store SET revision = revision - 1",
        "UPDATE store SET compacted = 1",
        "INSERT INTO entries SELECT '/y', value, create_revision, mod_revision, crc FROM entries LIMIT 1",
        "CREATE TABLE other (a)",
        "DELETE FROM store",
        "DROP TABLE events",
    ):
        path = put_down(tmp_path, files)
        database = sqlite3.connect(path)
        with database:
            database.execute(statement)
        database.close()
        assert outcome(tmp_path, files_of(path), state) == "refused", statement


def test_damage_that_comes_while_the_store_is_open_is_never_answered(
    tmp_path: Path, closed: tuple[Files, State]
) -> None:
    store = open_store(put_down(tmp_path, closed[0]))
    store._database.execute("UPDATE entries SET value = x'0102' WHERE key = '/x/59'")
    with pytest.raises(MetadataCorrupt, match=rf"{NAME} is damaged.*'/x/59'.*restore a backup"):
        run(store.get("/x/59"))
    with pytest.raises(MetadataCorrupt):
        run(store.list("/x/"))
    with pytest.raises(MetadataCorrupt):
        run(store.transact([], [Put("/x/59", b"new")]))
    with pytest.raises(StorageError, match="restart"):
        run(store.transact([], [Put("/other", b"new")]))
    assert run(store.get("/x/58")) is not None
    run(store.close())


OLD_TABLES = """
CREATE TABLE store (
    only INTEGER PRIMARY KEY CHECK (only = 1), format INTEGER NOT NULL,
    revision INTEGER NOT NULL, compacted INTEGER NOT NULL);
CREATE TABLE entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL,
    create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    revision INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
    create_revision INTEGER NOT NULL, PRIMARY KEY (revision, number)) WITHOUT ROWID;
"""


def test_a_file_without_checksums_is_taken_over_and_has_them_from_then_on(
    tmp_path: Path, closed: tuple[Files, State]
) -> None:
    revision, entries, events = closed[1]
    path = tmp_path / NAME
    database = sqlite3.connect(path)
    with database:
        database.executescript(OLD_TABLES)
        database.execute("INSERT INTO store VALUES (1, 1, ?, ?)", (revision, events[0].mod_revision - 1))
        database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", entries)
        rows = [(e.mod_revision, n, e.key, e.value, e.create_revision) for n, e in enumerate(events)]
        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
    database.close()
    for _ in range(2):
        store = open_store(path)
        assert state_of(store) == closed[1]
        run(store.close())
    assert not verify_store(str(path))
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE entries SET value = x'00' WHERE key = '/x/59'")
    database.close()
    (complaint,) = verify_store(str(path))
    assert "/x/59" in complaint


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    assert verify_store(str(tmp_path / NAME)) == [f"metadata {tmp_path / NAME} is missing"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("there", [False, True])
def test_a_witness_without_room_stops_nothing_and_gets_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, there: bool
) -> None:
    path = tmp_path / NAME
    store = open_store(path)
    change(store, 1)
    run(store.close())
    witness = tmp_path / (NAME + ".revision")
    if not there:
        witness.unlink()
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if bytes(data[:8]) == b"MANSIORV":
            raise OSError(code, os.strerror(code))
        return write(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        store = open_store(path)
        change(store, 2)
        change(store, 3)
        run(store.close())
        store = open_store(path)  # an old one, or none, is no reason to refuse
        change(store, 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "one for each opening"
    assert read_revision_file(str(path)) == (1 if there else -1)
    change(store, 5)
    assert read_revision_file(str(path)) == 5
    run(store.close())
    assert verify_store(str(path)) == []


def test_file_of_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / NAME)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE store (format INTEGER, revision INTEGER)")
        database.execute("INSERT INTO store VALUES (7, 0)")
    database.close()
    (line,) = verify_store(path)
    assert NAME in line
    assert "format 7" in line
