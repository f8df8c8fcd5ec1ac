"""PostgreSQL: a table as a queue, read with FOR UPDATE SKIP LOCKED; every commit waits for the write-ahead log on disk.

Two variants. *Leased* survives the loss of a consumer without an open transaction, with the tables and statements of
PGMQ: reading hides a message for a time, acknowledging deletes it. *Bare* is the minimum: a column of bytes, read and
deleted in one transaction. A batch is one INSERT of many rows in both. The server refuses to run as root; started by
root it runs as the user nobody.
"""

from __future__ import annotations

import os
import pwd
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.peers.peer import TAKE_WAIT_S, Candidate, PeerUnavailableError, ServerLocation, find_program
from bench.peers.releases import of_debian
from bench.peers.server import Server, run_quietly

if TYPE_CHECKING:
    from collections.abc import Sequence

try:
    import psycopg
except ImportError:
    psycopg = None  # reported when it is measured

OWNER = "mansio"
POLL_S = 0.001
"""Polling interval of an empty table; PostgreSQL does not push rows."""


def serve(place: ServerLocation) -> Server:
    if psycopg is None:
        raise PeerUnavailableError("no Python package psycopg")
    initdb, postgres = find_program("initdb"), find_program("postgres")
    user = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
    if user is not None:
        os.chown(place.directory, user, user)
        if place.trace is not None:
            place.trace.touch()
            os.chown(place.trace, user, user)
    data = place.directory / "data"
    # fmt: off
    run_quietly(
        [initdb, "-D", data, "-U", OWNER, "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8"],
        user=user, cwd=place.directory,
    )
    server = Server(place)
    server.start([
        postgres, "-D", data, "-p", place.port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
        "-c", "synchronous_commit=on", "-c", "shared_buffers=256MB", "-c", "max_wal_size=4GB",
    ], user=user)
    # fmt: on
    server.wait_for_port()
    return server


@dataclass(frozen=True, slots=True)
class Statements:
    """SQL statements of one kind of queue; `{queue}` is its name."""

    create: str
    one: str
    many: str
    take: str
    acknowledge: str | None
    """Of the messages' ids; None: what is taken is gone when the transaction ends."""
    hold: str | None = None
    """Takes for as long as a transaction lasts, which deletes what is acknowledged: other than with `take`, each record
    can be given back."""


LEASED = Statements(
    create="CREATE TABLE {queue} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, reads int NOT NULL DEFAULT 0, "
    "enqueued timestamptz NOT NULL DEFAULT now(), visible timestamptz NOT NULL, value bytea); "
    "CREATE INDEX ON {queue} (visible)",
    one="INSERT INTO {queue} (visible, value) VALUES (clock_timestamp(), %b)",
    many="INSERT INTO {queue} (visible, value) SELECT clock_timestamp(), unnest(%b::bytea[])",
    take="WITH found AS (SELECT id FROM {queue} WHERE visible <= clock_timestamp() ORDER BY id LIMIT %s "
    "FOR UPDATE SKIP LOCKED) UPDATE {queue} taken SET visible = clock_timestamp() + interval '30 s', reads = reads + 1 "
    "FROM found WHERE taken.id = found.id RETURNING taken.id, taken.value",
    acknowledge="DELETE FROM {queue} WHERE id = ANY(%s)",
)
BARE = Statements(
    create="CREATE TABLE {queue} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value bytea NOT NULL)",
    one="INSERT INTO {queue} (value) VALUES (%b)",
    many="INSERT INTO {queue} (value) SELECT unnest(%b::bytea[])",
    take="DELETE FROM {queue} WHERE id = ANY(ARRAY("
    "SELECT id FROM {queue} ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING id, value",
    acknowledge=None,
    hold="SELECT id, value FROM {queue} ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED",
)


class Driver:
    def __init__(self, port: int, statements: Statements) -> None:
        self.port, self.statements = port, statements

    def connect(self) -> Any:
        where = f"host=127.0.0.1 port={self.port} user={OWNER} dbname=postgres"
        for _ in range(100):
            try:
                return psycopg.connect(where, autocommit=True, prepare_threshold=1)
            except psycopg.OperationalError:  # the port is open before the server is ready
                time.sleep(0.05)
        return psycopg.connect(where, autocommit=True, prepare_threshold=1)

    async def version(self) -> str:
        (version,) = self.connect().execute("SHOW server_version").fetchone()
        return f"{version.split()[0]}, psycopg {psycopg.__version__}"

    async def create(self, queue: str) -> None:
        self.connect().execute(self.statements.create.format(queue=queue))

    async def delete(self, queue: str) -> None:
        self.connect().execute(f"DROP TABLE {queue}")

    async def producer(self, queue: str) -> Producer:
        return Producer(self.connect(), self.statements, queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        return Consumer(self.connect(), self.statements, queue)

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        return Deliverer(self.connect(), self.statements, queue, count)


class Producer:
    def __init__(self, connection: Any, statements: Statements, queue: str) -> None:
        self.connection = connection
        self.one, self.many = statements.one.format(queue=queue), statements.many.format(queue=queue)

    async def publish(self, values: Sequence[bytes]) -> None:
        if len(values) == 1:
            self.connection.execute(self.one, (values[0],))
        else:
            self.connection.execute(self.many, (list(values),))

    async def close(self) -> None:
        self.connection.close()


class Consumer:
    """Acknowledgements are always confirmed: they are commits."""

    def __init__(self, connection: Any, statements: Statements, queue: str) -> None:
        self.connection = connection
        self.select = statements.take.format(queue=queue)
        self.acknowledge = statements.acknowledge and statements.acknowledge.format(queue=queue)

    async def take(self, count: int) -> list[bytes]:
        end = time.monotonic() + TAKE_WAIT_S
        while not (rows := self.taken(count)) and time.monotonic() < end:
            time.sleep(POLL_S)  # noqa: ASYNC251  # nothing else runs
        return [value for _, value in rows]

    def taken(self, count: int) -> list[tuple[int, bytes]]:
        if self.acknowledge is None:
            with self.connection.transaction():
                return self.connection.execute(self.select, (count,), binary=True).fetchall()
        rows = self.connection.execute(self.select, (count,), binary=True).fetchall()
        if rows:
            self.connection.execute(self.acknowledge, ([identity for identity, _ in rows],))
        return rows

    async def close(self) -> None:
        self.connection.close()


class Deliverer:
    """What ends the last batch and what takes the next travel together (libpq's pipeline): the DELETE and the lease of
    a leased queue, in one commit; of a bare one DELETE, COMMIT, BEGIN, and a SELECT whose locks are its lease."""

    def __init__(self, connection: Any, statements: Statements, queue: str, count: int) -> None:
        self.connection, self.count = connection, count
        self.holds = statements.hold is not None
        self.select = (statements.hold or statements.take).format(queue=queue)
        self.delete = (LEASED.acknowledge or "").format(queue=queue)
        self.unacknowledged: list[int] = []

    async def next(self) -> list[bytes]:
        end = time.monotonic() + TAKE_WAIT_S
        while not (rows := self._taken()) and time.monotonic() < end:
            time.sleep(POLL_S)  # noqa: ASYNC251  # nothing else runs
        return [value for _, value in rows]

    def _taken(self) -> list[tuple[int, bytes]]:
        connection = self.connection
        with connection.pipeline():
            self._acknowledge()
            if self.holds:
                connection.execute("BEGIN")
            found = connection.execute(self.select, (self.count,), binary=True)
        rows = found.fetchall()
        self.unacknowledged = [identity for identity, _ in rows]
        return rows

    def _acknowledge(self) -> None:
        if self.unacknowledged:
            self.connection.execute(self.delete, (self.unacknowledged,))
            self.unacknowledged = []
        if self.holds:
            self.connection.execute("COMMIT")  # only a warning if there is no transaction

    async def acknowledge(self) -> None:
        with self.connection.pipeline():
            self._acknowledge()

    async def close(self) -> None:
        self.connection.close()


def candidates() -> list[Candidate]:
    return [
        Candidate(
            name=f"postgresql-{name}",
            title=f"PostgreSQL SKIP LOCKED, {name}",
            durability="synchronous_commit=on: fdatasync of the log before every commit returns",
            is_synced=True,
            server="postgresql",
            serve=serve,
            driver=partial(Driver, statements=statements),
            confirmation="the answer to the COMMIT of the DELETE, in one round trip with the next SELECT",
            released=partial(of_debian, "postgresql-[0-9]*"),
        )
        for name, statements in (("leased", LEASED), ("bare", BARE))
    ]
