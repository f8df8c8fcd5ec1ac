"""Clients of Mansio that all connections of kombu in a process share: one thread, and one set of connections to the
brokers, for each cluster.

Invariants:
* A client is closed when the last connection of kombu that uses it is closed.
* A forked process does not use the client of its parent: calls raise `ConnectionLost`, and kombu connects again.
* Every call has a time limit.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mansio.client.client import connect
from mansio.client.producer.producer_options import ProducerOptions
from mansio.errors import ConnectionLost, MansioError, RequestTimedOut
from mansio.net.addresses import parse_addresses
from mansio.net.blocking import LoopThread, LoopUnavailable
from mansio.net.security_settings import SecuritySettings
from mansio.telemetry.switch import client_telemetry

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine

    from mansio.client.client import Client
    from mansio.client.producer.producer import Producer

T = TypeVar("T")

logger = logging.getLogger(__name__)

CALL_S_MAX: Final = 30.0
"""Time limit of a call without one of its own."""

CLOSE_S_MAX: Final = 5.0

PUBLISH_TIMEOUT_MS: Final = 10_000
"""Time after which a message that is not acknowledged fails."""

EVENT_BYTES_MAX: Final = 4 << 20
"""Size of the events that may wait while a broker does not answer; more are dropped."""

KNOWN_TOPICS_MAX: Final = 10_000

_FORKED: Final = "the connection belongs to the parent process"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client connects. `tls`: a context of the application, which replaces that of `security`; compared by
    identity, as two contexts cannot be compared. `tracing`: whether publishing a task is traced; the worker's part is
    left to the instrumentation of Celery, which knows the task."""

    bootstrap_servers: str
    connect_timeout_ms: float
    client_id: str = "celery"
    tls: ssl.SSLContext | None = None
    security: SecuritySettings = field(default_factory=SecuritySettings)
    tracing: bool | None = None


class ClientThread:
    """A client on a thread of its own, with the producers for tasks and for messages of exchanges."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._pid = os.getpid()
        self._thread = LoopThread("mansio-celery")
        self._calls: set[asyncio.Task[Any]] = set()
        self.user_count = 0
        self.known_queues: set[str] = set()
        """Queues whose topic and group are known to exist."""
        self.known_exchanges: set[str] = set()
        self._loop: asyncio.AbstractEventLoop
        self.client: Client
        self.is_traced = False
        """Whether publishing a task makes a span."""
        self.task_producer: Producer
        """Waits until a record is durable on all in-sync replicas."""
        self.exchange_producer: Producer
        """For messages that are worth nothing after a crash: control commands, replies, events."""
        self._dropped_count = 0

    def open(self) -> None:
        """Connect. Raises `ConnectionLost` if no broker answers in time, `AuthenticationFailed`, `ConfigError`."""
        try:
            self._thread.run(self._open())
        except BaseException:
            self._thread.close()
            raise
        atexit.register(self.close)  # before the thread's own function, which only ends the thread

    async def _open(self) -> None:
        options = self._options
        self._loop = asyncio.get_running_loop()
        self.client = connect(
            options.bootstrap_servers,
            client_id=options.client_id,
            connect_timeout_ms=options.connect_timeout_ms,
            tls=options.tls or options.security.tls,
            user=options.security.user,
            password=options.security.password,
            mechanism=options.security.mechanism,
            token=options.security.token_provider or options.security.token,
            token_endpoint=options.security.token_endpoint,
            token_scope=options.security.token_scope,
            api_key=options.security.api_key,
            certificate=options.security.certificate,
            key=options.security.key,
            tracing=False,
        )
        await self.client.__aenter__()
        server = parse_addresses(options.bootstrap_servers)[0]
        telemetry = client_telemetry(options.tracing, client_id=options.client_id, server=server)
        self.is_traced = telemetry is not None
        self.task_producer = self.client._new_producer(
            ProducerOptions(delivery_timeout_ms=PUBLISH_TIMEOUT_MS), telemetry
        )
        self.exchange_producer = self.client.producer(
            ProducerOptions(
                acks=1,
                delivery_timeout_ms=PUBLISH_TIMEOUT_MS,
                when_full="raise",
                buffer_bytes_max=EVENT_BYTES_MAX,
            )
        )

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process has opened the client, and is not a fork of the one that has."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_S_MAX) -> T:
        """Run a coroutine on the client's thread and wait for its result. Raises `RequestTimedOut` after `timeout_s`,
        and `ConnectionLost` if the client is closed."""
        if not self.is_of_this_process:
            work.close()
            raise ConnectionLost(_FORKED)
        try:
            return self._thread.run(_within(work, timeout_s))
        except (LoopUnavailable, CancelledError) as error:
            with contextlib.suppress(ValueError, RuntimeError):  # it is running
                work.close()
            raise ConnectionLost("the connection is closed") from error

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a coroutine on the client's thread without waiting. No effect if the client is closed."""
        if self.is_of_this_process:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._start, work)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the client's thread, without waiting. No effect if the client is closed."""
        if self.is_of_this_process:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def publish_event(self, topic: str, value: bytes, headers: list[tuple[str, bytes | str | None]]) -> None:
        """Publish a message of an exchange without waiting. One that cannot be sent is dropped, as others are by
        brokers that have no queue for it."""

        async def publish() -> None:
            try:
                await self.exchange_producer.publish(topic, value, headers=headers)
            except MansioError as error:
                self._dropped_count += 1
                if self._dropped_count & (self._dropped_count - 1) == 0:  # 1, 2, 4, 8, ...
                    logger.warning("%d events of Celery dropped: %s", self._dropped_count, error)

        self.start(publish)

    def close(self) -> None:
        """Send what waits, close the connections, end the thread. No effect in a fork of the process."""
        if not self.is_of_this_process:
            return
        atexit.unregister(self.close)
        try:
            self.run(self.client.close(), CLOSE_S_MAX)
        except MansioError as error:
            logger.warning("closed before everything was sent: %s", error)
        finally:
            self._thread.close()


async def _within(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise RequestTimedOut(f"no answer of the broker within {timeout_s:.0f} s") from None


class _ClientThreads:
    """The clients of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[ClientOptions, ClientThread] = {}

    def acquire(self, options: ClientOptions) -> ClientThread:
        with self._lock:
            found = self._open.get(options)
            if found is None:
                found = ClientThread(options)
                found.open()
                self._open[options] = found
            found.user_count += 1
            return found

    def release(self, options: ClientOptions, client: ClientThread) -> None:
        with self._lock:
            client.user_count -= 1
            if client.user_count:
                return
            if self._open.get(options) is client:
                del self._open[options]
        client.close()

    def forget(self) -> None:
        """Start empty, with a new lock: in a forked process the old one may be held by a thread that is gone."""
        self._lock = threading.Lock()
        self._open = {}


_threads = _ClientThreads()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.forget)


def acquire_client(options: ClientOptions) -> ClientThread:
    """Return the client of this process with these options; connect if there is none. Call `release_client` for each
    call. Raises `ConnectionLost`."""
    return _threads.acquire(options)


def release_client(options: ClientOptions, client: ClientThread) -> None:
    """Close the client if no other connection of kombu uses it."""
    _threads.release(options, client)
