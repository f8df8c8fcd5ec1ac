"""What touches the world, as protocols.

Everything in Mansio that needs a disk, a clock, a timer, a thread, chance or another broker gets it through one of
these, handed over at construction. `mansio.host.host` and `mansio.net.peer_connections` hold the real ones;
`mansio.testing` the simulated ones. That is how the tests crash a disk between two writes, and how a simulator can
run the shipped code on virtual time.

Always true: nothing here does anything; no module below `broker` imports `os`, `time`, `random` or `threading` itself.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from random import uniform
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    Buffer = bytes | bytearray | memoryview

T = TypeVar("T")

DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""`OSError.errno` of a disk or a quota that is full."""


@runtime_checkable
class DiskFile(Protocol):
    """An open file. Positions and lengths are bytes. Every method may raise `OSError`, which nobody may swallow."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Length of the file now."""

    def write_at(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all `buffers`, one after the other, from `position`: one system call, more only after a short write.

        Returns the number of bytes written, which is always all of them; otherwise it raises.
        """

    def read_at(self, length: int, position: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end of the file."""

    def map(self, length: int) -> memoryview:
        """The first `length` bytes as a read-only view that stays valid after `close`. `length` <= size, > 0."""

    def truncate(self, size: int) -> None:
        """Cut or extend (with zeros) to `size`."""

    def sync(self) -> None:
        """fdatasync: the bytes and the length are on stable storage when this returns (F_FULLFSYNC on macOS)."""

    def fileno(self) -> int:
        """The descriptor, for sendfile; -1 where there is none (a simulated disk)."""

    def close(self) -> None: ...


class DiskLock(Protocol):
    """A held lock on a data directory."""

    def release(self) -> None: ...


class Disk(Protocol):
    """A file system. Paths are plain strings with `/` between the parts."""

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Open for reading and writing. Without `create` a missing file raises `FileNotFoundError`; a file that is
        created survives a crash only after `sync_directory` of its parent."""

    def open_readonly(self, path: str) -> DiskFile: ...

    def read_file(self, path: str) -> bytes: ...

    def list_directory(self, path: str) -> list[str]:
        """The names in a directory, sorted."""

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """Create it and its missing parents; no error if it is there. Synced to disk (each new parent too); unless
        `durable`, the caller syncs the parents."""

    def exists(self, path: str) -> bool: ...

    def rename(self, source: str, target: str) -> None:
        """Atomic replace. Durable after `sync_directory` of the parent(s)."""

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def sync_all(self, path: str) -> bool:
        """Sync everything on the file system that holds `path` (syncfs). False where the system cannot:
        the caller then syncs file by file. An error of writing back is told once per `path`: two callers that must both
        hear of it use two paths."""

    def free_bytes(self, path: str) -> int: ...

    def modified_ms(self, path: str) -> int:
        """When a file was last written, in milliseconds since the epoch."""

    def lock(self, path: str) -> DiskLock:
        """Take the exclusive lock file at `path`, or raise `DataDirectoryLocked`."""


class Clock(Protocol):
    """Time. Wall time may jump; monotonic time never goes back and goes on while the machine is suspended."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""


class Random(Protocol):
    """Chance: ids and jitter."""

    def bytes(self, length: int) -> bytes: ...

    def uniform(self, low: float, high: float) -> float: ...


class Peers(Protocol):
    """The other brokers, to be asked by their node id. A simulator carries the same bytes without a network."""

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        """Ask a broker: a whole request as `mansio.wire` encodes it, its length first; the whole answer, without its
        length. The correlation id in it is the implementation's to choose.

        One request at a time and broker is what its caller may count on. Raises `ConnectionLost` when the broker cannot
        be reached or the connection ended (the request may have been carried out), `RequestTimedOut`.
        """


class Timer(Protocol):
    """Something that will happen; `cancel` makes it not happen. Cancelling twice, or too late, is harmless."""

    def cancel(self) -> None: ...


class Promise(Protocol[T]):
    """A value to come. `await` it, or add a callback; settle it once (checking `done` first)."""

    def done(self) -> bool: ...

    def set_result(self, result: T, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def result(self) -> T: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...

    def __await__(self) -> Generator[Any, None, T]: ...


class Scheduler(Protocol):
    """The loop everything of one broker runs on. All methods but `call_from_thread` belong to that loop's thread."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None: ...

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer: ...

    def call_from_thread(self, callback: Callable[..., object], *args: Any) -> None: ...

    def promise(self) -> Promise[Any]: ...

    async def sleep(self, delay_ms: float) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Timer:
        """Run a coroutine on its own; an exception in it is logged under `name`, never lost."""


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
        delay_ms = min(self.longest_ms, self.first_ms * self.factor ** min(failures - 1, 30))
        return delay_ms * self.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else delay_ms

    def delay_seconds(self, failures: int) -> float:
        """`delay_ms` in seconds."""
        return self.delay_ms(failures) / 1000


class Background(Protocol):
    """One worker off the loop, for calls that block (fdatasync). Jobs run one at a time, in order."""

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Run `work()` off the loop, then `done(result, error)` on the loop. Never raises what `work` raised."""

    def close(self) -> None:
        """Finish the jobs that were submitted, then end the worker."""
