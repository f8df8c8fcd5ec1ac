"""SQLite metadata store: kills, failed commits, damaged and foreign files."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from mansio.errors import StorageError
from mansio.metadata.metadata_store import Put
from mansio.metadata.sqlite.store import SqliteStore
from support.metadata import sqlite_store
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

WRITER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from support.metadata import sqlite_store
from mansio.metadata.metadata_store import Put

async def main():
    async with sqlite_store(sys.argv[1]) as store:
        listing = await store.list("/pair/")
        number = int(listing.entries[0].value) if listing.entries else 0
        while True:
            number += 1
            value = str(number).encode()
            await store.transact([], [Put("/pair/a", value), Put("/pair/b", value)])
            print(number, flush=True)

asyncio.run(main())
"""


def test_acknowledged_transactions_survive_kill_and_half_of_one_never_shows(tmp_path: Path) -> None:
    path = f"{tmp_path}/metadata.sqlite3"
    tests = str(ROOT / "tests")
    acknowledged = 0
    for wanted in (20, 45, 70):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, tests], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for line in writer.stdout:
            acknowledged = int(line)
            if acknowledged >= wanted:
                break
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        acknowledged = max([acknowledged, *map(int, rest.split("\n")[:-1])])

        async def check(least: int = acknowledged) -> None:
            async with sqlite_store(path) as store:
                listing = await store.list("/pair/")
                first, second = (int(entry.value) for entry in listing.entries)
                assert first == second == listing.revision
                assert least <= first <= least + 1
                events = await anext(store.watch("/pair/", 1))
                assert [int(event.value or b"") for event in events[::2]] == list(range(1, first + 1))

        asyncio.run(check())


def test_each_commit_is_synced_before_its_answer(tmp_path: Path) -> None:
    async def check() -> None:
        async with sqlite_store(f"{tmp_path}/metadata.sqlite3") as store:
            full = 2
            assert store._database.execute("PRAGMA synchronous").fetchone() == (full,)
            assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)

    asyncio.run(check())


class FailingCommit:
    """A connection whose next COMMIT fails as a disk does."""

    def __init__(self, database: sqlite3.Connection, code: int) -> None:
        self.database = database
        self.code = code
        self.close = database.close

    @property
    def in_transaction(self) -> bool:
        return self.database.in_transaction

    def execute(self, statement: str, parameters: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if statement == "COMMIT" and self.code:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode, self.code = self.code, 0
            raise error
        return self.database.execute(statement, parameters)


@pytest.mark.parametrize(
    ("code", "usable"), [(sqlite3.SQLITE_IOERR_FSYNC, False), (sqlite3.SQLITE_FULL, True)]
)
def test_failed_commit_is_reported_and_a_failed_sync_is_never_retried(
    tmp_path: Path, code: int, usable: bool
) -> None:
    async def check() -> None:
        async with sqlite_store(f"{tmp_path}/metadata.sqlite3") as store:
            await store.transact([], [Put("/a", b"1")])
            store._database = FailingCommit(store._database, code)  # type: ignore[assignment]  # a stand-in
            with pytest.raises(StorageError):
                await store.transact([], [Put("/a", b"2")])
            entry = await store.get("/a")
            assert entry is not None
            assert entry.value == b"1"
            if usable:
                assert (await store.transact([], [Put("/a", b"3")])).succeeded
            else:
                with pytest.raises(StorageError, match="restart"):
                    await store.transact([], [Put("/a", b"3")])

    asyncio.run(check())


def test_file_open_elsewhere_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        path = f"{tmp_path}/metadata.sqlite3"
        async with sqlite_store(path):
            with pytest.raises(StorageError, match="locked"):
                SqliteStore.open(path, None, None)  # type: ignore[arg-type]  # never gets so far

    asyncio.run(check())


def test_damaged_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite3"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(StorageError, match=r"metadata\.sqlite3"):
        SqliteStore.open(str(path), None, None)  # type: ignore[arg-type]  # never gets so far


def test_newer_format_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        path = f"{tmp_path}/metadata.sqlite3"
        async with sqlite_store(path):
            pass
        database = sqlite3.connect(path)
        with database:
            database.execute("UPDATE store SET format = 99")
        database.close()
        with pytest.raises(StorageError, match="format 99"):
            async with sqlite_store(path):
                pass

    asyncio.run(main())


def test_history_is_bounded(tmp_path: Path) -> None:
    async def check() -> None:
        async with sqlite_store(events_kept=20) as store:
            for number in range(200):
                await store.transact([], [Put("/a", str(number).encode())])
            (count,) = store._database.execute("SELECT count(*) FROM events").fetchone()
            assert 20 <= count <= 40

    asyncio.run(check())
