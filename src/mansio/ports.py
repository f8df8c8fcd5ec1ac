"""Ports: protocols for the operating system and other brokers, as the code of a broker uses them.

A component that needs a disk, a clock, a timer, a thread, random numbers or another broker receives an implementation
of the port in its constructor. `mansio.host` and `mansio.net.peer_connections` implement the ports for production,
`mansio.testing` for tests: a test can crash a disk between two writes, and a simulator runs the production code on
virtual time.

Invariant: `wire`, `state`, `storage` and the broker's partitions and coordinators do not import `os`, `time`, `random`
or `threading`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum
from random import uniform
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from mansio.backoff import grown_delay
from mansio.errors import RequestTimedOut
from mansio.tracebacks import copied, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    Buffer = bytes | bytearray | memoryview

T = TypeVar("T")

DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""`OSError.errno` of a disk or a quota that is full."""

DESCRIPTOR_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""`OSError.errno` of a call that found no free file descriptor, in this process or on this machine."""

TRANSIENT_ERRNOS: Final = DISK_FULL_ERRNOS | DESCRIPTOR_ERRNOS
"""`OSError.errno` of a call that had no effect and can succeed later."""

UNREADABLE_ERRNOS: Final = frozenset(
    code
    for name in ("EIO", "EBADMSG", "EILSEQ", "ENODATA", "EUCLEAN")
    if (code := getattr(errno, name, None)) is not None
)
"""`OSError.errno` of a read that the disk or its file system cannot do: a bad sector, a failed checksum."""


@runtime_checkable
class DiskFile(Protocol):
    """An open file. Positions and lengths are bytes. Every method may raise `OSError`, which must not be swallowed."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Return the current length of the file."""

    def write_at(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all `buffers`, one after the other, from `position`, with one system call, more only after a short
        write.

        Returns the number of bytes written, which is always all of them; otherwise it raises.
        """

    def read_at(self, length: int, position: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end of the file."""

    def read_uncached(self, length: int, position: int) -> bytes:
        """Read as `read_at` does, without adding pages to the page cache, where the platform supports this."""

    def map(self, length: int) -> memoryview:
        """Return the first `length` bytes as a read-only view that stays valid after `close`. `length` <= size, > 0."""

    def truncate(self, size: int) -> None:
        """Truncate or extend (with zeros) to `size`."""

    def sync(self) -> None:
        """Write the bytes and the length to stable storage: fdatasync, on macOS F_FULLFSYNC."""

    def fileno(self) -> int:
        """Return the descriptor, for sendfile; -1 if there is none (a simulated disk)."""

    def close(self) -> None: ...


class DiskLock(Protocol):
    """A held lock on a data directory."""

    def release(self) -> None: ...


class Disk(Protocol):
    """A file system. Paths are plain strings with `/` between the parts."""

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Open for reading and writing. Without `create` a missing file raises `FileNotFoundError`; a created file
        survives a crash only after `sync_directory` of its parent."""

    def open_readonly(self, path: str) -> DiskFile: ...

    def read_file(self, path: str) -> bytes: ...

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """Create a directory and its missing parents; no error if it exists. With `durable` each is synced to disk;
        otherwise the caller syncs the parents."""

    def exists(self, path: str) -> bool: ...

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing `target` atomically. Durable after `sync_directory` of the parent(s)."""

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def sync_all(self, path: str) -> bool:
        """Sync all files on the file system of `path` (syncfs). Returns False if the platform does not support this, or
        no descriptor is free for it; the caller then syncs each file. A write-back error is raised once per `path`, so
        each caller uses its own path."""

    def free_bytes(self, path: str) -> int: ...

    def modified_ms(self, path: str) -> int:
        """Time of the last modification of a file, in milliseconds since the epoch."""

    def lock(self, path: str) -> DiskLock:
        """Take the exclusive lock file at `path`, or raise `DataDirectoryLocked`."""


class FileJob(NamedTuple):
    """A job of a `FileWorker`: what the worker reads, and the open files that it is about."""

    job: bytes
    files: Sequence[DiskFile]


class FileWorker(Protocol):
    """Another process that does jobs, also on open files, one at a time."""

    async def run(self, prepare: Callable[[], FileJob], *, timeout_ms: float) -> bytes:
        """Call `prepare` when it is the turn of this job, and return the answer.

        Raises `Unavailable` if the process fails, `RequestTimedOut`, and the errors of `prepare`."""


class Clock(Protocol):
    """Clock. Wall time may jump; monotonic time never goes back and continues while the machine is suspended."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed time."""


class Random(Protocol):
    """Random numbers, for ids and jitter."""

    def bytes(self, length: int) -> bytes: ...

    def uniform(self, low: float, high: float) -> float: ...


class RequestClass(Enum):
    """Class of requests to other brokers. Each class has connections of its own to each broker, and a bound of its own
    for requests in flight, so that a request never waits for a place that one of another class has.

    A broker that executes a request may wait for requests of its own to brokers, but only for those of a lower rank.
    So brokers cannot wait for each other in a circle, however many requests are in flight. The ranks are: all classes
    for clients; then `COORDINATION`; then `REPLICATION`, `CATCH_UP`, `REPAIR` and `HAND_OVER`. One wait is within a
    rank, and therefore short: the end of a transaction and its verification wait up to `COMPLETION_WAIT_MS` for
    markers.
    """

    CLIENT_REQUESTS = "client requests"
    """Requests for clients with small responses."""
    CLIENT_READS = "client reads"
    """Reads for clients, which may be held until records arrive."""
    LEASES = "leases"
    """Reads of records that are leased or dead-lettered."""
    COORDINATION = "coordination"
    """Verification of transactions, markers, states of share partitions."""
    REPLICATION = "replication"
    """Fetches of followers: one request in flight."""
    CATCH_UP = "catch-up"
    """Fetches of followers whose log ends below the high watermark: one request in flight."""
    REPAIR = "repair"
    """Reads of intact copies of damaged batches: one request in flight."""
    HAND_OVER = "hand-over"
    """Confirmations of early hand-overs. The connections of this class are kept open (`PeerLinks`)."""

    @property
    def is_unordered(self) -> bool:
        """Whether requests of many callers are in flight on a connection, and responses may overtake."""
        return self not in (RequestClass.REPLICATION, RequestClass.CATCH_UP, RequestClass.REPAIR)


class Peers(Protocol):
    """Requests to other brokers by node id. A simulator delivers the same bytes without a network."""

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        """Send a whole request as `mansio.wire` encodes it, with its length first; returns the whole response without
        its length. The implementation replaces the correlation id.

        At least one request per broker can be in flight. Raises `BrokerUnreachable` when nothing was sent,
        `ConnectionLost` when the connection ended (the request may have been processed), `RequestTimedOut`.
        """


class ForwardedAnswer(NamedTuple):
    """Response to a forwarded request, without its length, and the time in ms for which the client has to pause."""

    response: bytes
    throttle_ms: int = 0


class ForwardedClient(NamedTuple):
    """The client for which a request is forwarded, as the broker found out to which it is connected."""

    address: str = ""
    user: str = ""
    """Name of the user; "" for one that is not authenticated."""
    listener: str = ""
    """Name of the listener to which the client is connected, "" for a protocol without named listeners."""
    credential_revision: int = 0
    """Revision of the credential with which it has authenticated; 0: it has not, or with a token or an API key."""
    groups: tuple[str, ...] = ()
    """Groups of the user."""
    credential_id: str = ""
    """Id of the API key, access key of SQS or delegation token with which it has authenticated, "" for none."""
    is_by_token: bool = False
    """Whether it has authenticated with a token of an identity provider."""


NO_CLIENT: Final = ForwardedClient()
"""For requests that a broker makes for itself."""


class ForwardingPeers(Peers, Protocol):
    """`Peers` that also carry requests for clients."""

    async def forward(
        self, node_id: int, request: bytes, *, client: ForwardedClient, is_own: bool, timeout_ms: float
    ) -> ForwardedAnswer:
        """Send a request, without its length, for the client whose id is in its header, and return the answer. The
        other broker runs it as if it came from `client` (KIP-590). `is_own`: whether it is a request of this
        broker, which clients may not send.

        A broker of version 0.1 gets the request itself, without the address. Raises the errors of `send`, and
        `ConnectionLost` if the other broker has not accepted the request.
        """


class LinkChange(Enum):
    """What happened to an authenticated connection from this broker to another one, of any class."""

    OPENED = "opened"
    CLOSED = "closed"
    """This broker closed it."""
    LOST = "lost"
    """The other broker, or the network, ended it."""


class ConnectOutcome(Enum):
    """How the host of a broker answered a connect."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """ECONNREFUSED: the host is up, and nothing listens at the broker's address."""
    UNKNOWN = "unknown"
    """Neither: no answer in time, a reset, an unreachable host, a name without an address."""


class PeerLinks(Protocol):
    """The connections from this broker to others, as evidence of which brokers are running."""

    def on_link_change(self, callback: Callable[[int, LinkChange], None]) -> None:
        """Call `callback` on the event loop with the node id of the other broker and what happened to a connection."""

    def is_open(self, node_id: int) -> bool:
        """Whether the connection of `RequestClass.HAND_OVER` is open."""

    async def open(self, node_id: int, *, timeout_ms: float) -> None:
        """Open the connection of `RequestClass.HAND_OVER`, unless it is open. Raises `ConnectionLost`."""

    async def try_connect(self, node_id: int, *, timeout_ms: float) -> ConnectOutcome:
        """Connect to the address of a broker, send nothing, and close the connection if it was accepted."""


class Timer(Protocol):
    """A scheduled callback. Cancelling it twice, or after it ran, has no effect."""

    def cancel(self) -> None: ...


class Promise(Protocol[T]):
    """A future (as `asyncio.Future`): await it or add a callback. It may be completed once; check `done` before."""

    def done(self) -> bool: ...

    def set_result(self, result: T, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def result(self) -> T: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...

    def __await__(self) -> Generator[Any, None, T]: ...


def complete(promise: Promise[T], result: T) -> None:
    """Complete a promise with `result`, unless it is done: its waiter was cancelled, or it has failed."""
    if not promise.done():
        promise.set_result(result)


def complete_with_error(promise: Promise[Any], error: BaseException) -> None:
    """Complete a promise with `error`, unless it is done. The promise stores the exception (`mansio.tracebacks`)."""
    if not promise.done():
        promise.set_exception(error)


class Timers(Protocol):
    """The timers of an event loop: all of it that some components use."""

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer: ...


class SliceTimes:
    """Clock of one event loop, in seconds, and the longest slice of each kind of work on it since the start
    (`mansio.host.item_turns`)."""

    __slots__ = ("longest_s", "now")

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.longest_s: dict[str, float] = {}

    def note(self, work: str, took_s: float) -> None:
        """Note the duration of a slice. `work`: one of a bounded set, it is the label of a metric."""
        if took_s > self.longest_s.get(work, 0.0):
            self.longest_s[work] = took_s


class Scheduler(Timers, Protocol):
    """The event loop of one broker. All methods except `call_from_thread` belong to that loop's thread."""

    @property
    def slices(self) -> SliceTimes: ...

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None: ...

    def call_after_pause(self, callback: Callable[..., object], *args: Any) -> None:
        """Call after a pause of about 1 ms, in which the loop is free: for the next turn of work in the background that
        has many. Between turns without pauses, a request would wait in each of its own turns, and the threads of the
        broker would wait for the interpreter."""

    def call_from_thread(self, callback: Callable[..., object], *args: Any) -> None: ...

    def promise(self) -> Promise[Any]: ...

    async def sleep(self, delay_ms: float) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Timer:
        """Run a coroutine as a task; an exception in it is logged with `name`."""


def complete_from(promise: Promise[Any], result: Any, error: BaseException | None) -> None:
    """Complete a promise with the outcome of work, as `Background.submit` passes it: with `error` unless it is None."""
    if error is None:
        complete(promise, result)
    else:
        complete_with_error(promise, copied(error))


async def result_within(scheduler: Scheduler, promise: Promise[T], timeout_ms: float, late: str) -> T:
    """Return the result of a promise of this caller alone. After `timeout_ms` the promise fails with `RequestTimedOut`,
    whose message is `late`."""
    timer = scheduler.call_later(timeout_ms, lambda: complete_with_error(promise, RequestTimedOut(late)))
    try:
        return await result_of(promise)
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter (KIP-580): delays between attempts.

    `first_ms` is multiplied by `factor` for each further failure, up to `longest_ms`; each delay varies by the fraction
    `jitter` of it, so that clients which failed together do not retry together. `uniform` is the source of random
    numbers: code that a simulator runs passes `Random.uniform` of its own port.
    """

    first_ms: float = 50
    longest_ms: float = 1_000
    factor: float = 2.0
    jitter: float = 0.2
    uniform: Callable[[float, float], float] = uniform

    def delay_ms(self, failures: int) -> float:
        """Delay in milliseconds after the `failures`-th consecutive failure (from 1)."""
        delay_ms = grown_delay(failures, self.first_ms, self.longest_ms, self.factor)
        return delay_ms * self.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else delay_ms

    def delay_seconds(self, failures: int) -> float:
        """`delay_ms` in seconds."""
        return self.delay_ms(failures) / 1000


class Background(Protocol):
    """A worker thread for blocking calls (fdatasync). Jobs run one at a time, in order."""

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Run `work()` on the thread, then `done(result, error)` on the event loop. An exception of `work` is passed to
        `done` as `error`, not raised."""

    def close(self) -> None:
        """Finish the submitted jobs, then end the thread."""
