"""Test broker: a complete broker in memory, on real sockets, with a clock to advance and faults to inject.

It runs on a thread and an event loop of its own, so that any client in this process or another one can use it. Disk and
metadata store are those of the simulator: nothing is written to a file, and nothing is left when it is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from mansio.broker.features.delays.delay_feature import DelayFeature
from mansio.config.addresses import Address
from mansio.config.listeners import format_listeners
from mansio.config.settings import DEV_SETTINGS, Settings
from mansio.errors import Unavailable
from mansio.host.asyncio_loop import new_event_loop
from mansio.host.clock import HostRandom
from mansio.host.host_ports import HostPorts
from mansio.host.platforms import require_posix
from mansio.net.security_settings import UNSECURED
from mansio.node.broker import Broker
from mansio.testing.broker_faults import BrokerFaults
from mansio.testing.disk import SimulatedDisk
from mansio.testing.metadata import InMemoryStore
from mansio.testing.scheduler import SimulatedBackground
from mansio.testing.virtual_time import IDLE_WAIT_S_MAX, VirtualTime

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    import mansio.blocking
    from mansio.api.asgi.server import HttpServer
    from mansio.api.grpc.server import GrpcServer
    from mansio.config.listeners import SecurityProtocol
    from mansio.metadata.metadata_store import BeforeCommit, MetadataStore

T = TypeVar("T")

START_S_MAX = 60.0
STOP_MARGIN_S = 10.0
TEST_SETTINGS = {
    "listeners": "127.0.0.1:0",
    "http_listener": "",
    "data_dir": "data",
    "connections_max_idle_ms": 0,  # an advanced clock must not close connections
    "retention_hold_disk_free_bytes_min": 0,
    "log_cleaner_backoff_ms": 300_000,  # as retention: an advance by days runs each round on its way
    "offsets_topic_num_partitions": 1,
    "share_coordinator_state_topic_num_partitions": 1,
}


class TestBroker:
    """A broker for tests, in this process and in memory.

    >>> with mansio.testing.TestBroker() as broker:
    ...     producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})

    Keywords are settings of the broker (`num_partitions=3`), see the page Configuration. Topics are created on first
    use and consumer groups start without delay, unless the settings say otherwise.
    """

    __test__ = False
    """Not a test class, although its name begins as one."""

    def __init__(self, **settings: Any) -> None:
        self._settings = Settings(**{**TEST_SETTINGS, **DEV_SETTINGS, **settings})
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host: MemoryHost | None = None
        self._broker: Broker | None = None
        self._http: HttpServer | None = None
        self._http_address: Address | None = None
        self._grpc: GrpcServer | None = None
        self._grpc_address: Address | None = None
        self._sqs: HttpServer | None = None
        self._sqs_address: Address | None = None
        self._client_ends: list[Callable[[], None]] = []
        self.clock: BrokerClock = BrokerClock(self)
        """The broker's clock."""
        self.faults: BrokerFaults = BrokerFaults(self._run_on_loop)
        """The broker's faults."""

    # Life

    def start(self) -> Self:
        """Start an empty broker; returns when clients can connect. No effect while it runs."""
        if self._thread is not None:
            return self
        require_posix("a broker")
        self._loop = new_event_loop()
        self._host = MemoryHost(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="mansio-test-broker", daemon=True)
        self._thread.start()
        try:
            self._call(self._start(self._settings), START_S_MAX)
        except BaseException:
            self._end_thread()
            raise
        atexit.register(self.close)
        return self

    def close(self) -> None:
        """Close the clients that `client` made, and stop the broker; its records are gone. No effect if it is not
        running."""
        if self._thread is None:
            return
        atexit.unregister(self.close)
        with ExitStack() as ends:
            ends.callback(self._end_thread)
            if self._broker is not None:  # else a restart failed
                ends.callback(lambda: self._call(self._stop(), self._stop_s_max))
            for end in self._client_ends:
                ends.callback(end)
            self._client_ends.clear()

    def restart(self) -> None:
        """Stop the broker, and start it again with the same records on the same ports. Clients reconnect."""
        listeners = format_listeners(self._running().listener_addresses)
        settings = replace(self._settings, listeners=listeners)
        self._call(self._stop(), self._stop_s_max)
        self._call(self._start(settings), START_S_MAX)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Use

    @property
    def bootstrap_servers(self) -> str:
        """Address of the broker for Kafka clients, as `host:port`, of its first listener."""
        return str(self._running().listener_address)

    @property
    def http_url(self) -> str:
        """Address of health probes and metrics, as `http://host:port`, `https` with TLS; the listener starts at the
        first use."""
        self._running()
        if self._http_address is None:
            self._http_address = self._call(self._start_http(), START_S_MAX)
        return f"{_scheme(self._settings.http_security)}://{self._http_address}"

    @property
    def registry_url(self) -> str:
        """Address of the schema registry, for its clients, as `http://host:port/registry`, `https` with TLS; the HTTP
        listener starts at the first use."""
        return f"{self.http_url}/registry"

    @property
    def sqs_url(self) -> str:
        """Address for programs written for Amazon SQS (`AWS_ENDPOINT_URL_SQS`), as `http://host:port`, `https` with
        TLS; the listener starts at the first use."""
        self._running()
        if self._sqs_address is None:
            self._sqs_address = self._call(self._start_sqs(), START_S_MAX)
        return f"{_scheme(self._settings.sqs_security)}://{self._sqs_address}"

    @property
    def grpc_address(self) -> str:
        """Address of the gRPC API (extra `grpc`), as `host:port`; the listener starts at the first use."""
        self._running()
        if self._grpc_address is None:
            self._grpc_address = self._call(self._start_grpc(), START_S_MAX)
        return str(self._grpc_address)

    def client(self, **options: Any) -> mansio.blocking.Client:
        """Connect a blocking client. It is closed when nothing refers to it or to what it made (consumers, `admin`),
        and otherwise by `close`. `options`: those of `mansio.blocking.connect`; TLS and user of the environment do not
        apply."""
        from mansio import blocking

        client = blocking.connect(self.bootstrap_servers, **{**UNSECURED, **options})
        self._client_ends.append(client._close_when_dropped())  # type: ignore[attr-defined]  # not in the stub
        return client

    # On the broker's thread

    def _running(self) -> Broker:
        if self._broker is None:
            raise Unavailable("the test broker is not running")
        return self._broker

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the broker's thread."""
        if self._broker is None:
            work.close()
            raise Unavailable("the test broker is not running")
        return self._call(work, IDLE_WAIT_S_MAX + STOP_MARGIN_S)

    @property
    def _stop_s_max(self) -> float:
        return self._settings.shutdown_drain_ms / 1000 + STOP_MARGIN_S

    async def _start(self, settings: Settings) -> None:
        assert self._host is not None
        host = self._host
        broker = Broker(settings, open_host=lambda _loop, _stack: host, intercept=self.faults._intercept)
        await broker.start()
        self.faults._attach(broker, host.disk, host.store)
        self._broker = broker

    async def _stop(self) -> None:
        broker, self._broker = self._broker, None
        assert broker is not None
        http, self._http, self._http_address = self._http, None, None
        sqs, self._sqs, self._sqs_address = self._sqs, None, None
        rpc, self._grpc, self._grpc_address = self._grpc, None, None
        for server in (http, sqs, rpc):
            if server is not None:
                await server.stop()
        await broker.stop()

    async def _start_http(self) -> Address:
        from mansio.api.asgi.server import HttpServer
        from mansio.api.http.app import assemble, authenticating, disk_monitor
        from mansio.api.http.broker_stats import RunningBroker
        from mansio.api.http.monitors import EventLoopMonitor
        from mansio.api.http.service_stats import ServiceStats
        from mansio.api.http.v1.operation import ApiContext
        from mansio.host.asyncio_loop import AsyncioScheduler
        from mansio.host.clock import HostClock

        broker = self._running()
        view = ServiceStats(settings=self._settings)
        view.attach(
            RunningBroker(
                broker.service,
                broker.server,
                broker.clients,
                broker.listener_address,
                lambda: broker.is_ready,
                certificates=broker.certificates,
            )
        )
        context = ApiContext(view.running, self._settings)
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        watch = EventLoopMonitor(scheduler, HostClock(), context.loop_holds)
        app = assemble(view, watch, disk_monitor(self._settings), context)
        self._http = HttpServer(
            authenticating(app, self._settings, view.running, broker.revocations),
            "127.0.0.1",
            0,
            broker.tls_context(self._settings.http_security),
            broker.handshakes,
            broker.throttle,
        )
        return Address(*await self._http.start())

    async def _start_grpc(self) -> Address:
        from mansio.api.grpc.server import GrpcServer

        broker = self._running()
        self._grpc = GrpcServer(broker.service, broker.clients, "127.0.0.1", 0, broker.certificates)
        return Address(*await self._grpc.start())

    async def _start_sqs(self) -> Address:
        from mansio.api.asgi.server import HttpServer
        from mansio.api.sqs.app import SqsEndpoint

        broker = self._running()
        endpoint = SqsEndpoint(broker.service, self._settings, broker.clients, broker.revocations)
        context = broker.tls_context(self._settings.sqs_security)
        self._sqs = HttpServer(endpoint.app, "127.0.0.1", 0, context, broker.handshakes, broker.throttle)
        return Address(*await self._sqs.start())

    async def _advance(self, duration_ms: float, *, include_sessions: bool) -> None:
        assert self._host is not None
        service = self._running().service
        delivery = service.partitions.feature(DelayFeature).delivery
        await self._host.time.advance(
            duration_ms, include_sessions=include_sessions, next_wake_ms=lambda: delivery.next_wake_ms
        )
        # Deadlines of producers are counted from the last check, which the listener makes in real time.
        service.produce.time_out_requests(service.clock.monotonic())

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = None
        self._loop = None


def _scheme(protocol: SecurityProtocol) -> str:
    return "https" if protocol.is_encrypted else "http"


class BrokerClock:
    """Clock of a test broker: real time, plus what a test adds."""

    def __init__(self, broker: TestBroker) -> None:
        self._broker = broker

    def time_ms(self) -> int:
        """Time of the broker's clock, in milliseconds since the epoch, as in the timestamps of records."""
        return self._broker._running().service.clock.wall_ms()

    def advance(
        self,
        by: timedelta | float = 0.0,
        *,
        days: float = 0.0,
        hours: float = 0.0,
        minutes: float = 0.0,
        seconds: float = 0.0,
        sessions: bool = False,
    ) -> None:
        """Advance the clock by the sum of the arguments; a number is in seconds.

        Everything that becomes due happens in the order of its time: delayed records are delivered, schedules fire,
        leases end, retries are offered again, retention deletes. Returns when the broker is idle. Members of groups
        keep their sessions, because their heartbeats come in real time; with `sessions` these end as well if they are
        due.

        Raises:
            ValueError: The sum is negative.
            Unavailable: The broker does not run.
        """
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        duration += by if isinstance(by, timedelta) else timedelta(seconds=by)
        if duration < timedelta():
            raise ValueError("a clock cannot be set back")
        duration_ms = duration / timedelta(milliseconds=1)
        self._broker._run_on_loop(self._broker._advance(duration_ms, include_sessions=sessions))


class MemoryHost:
    """Host of a test broker (`BrokerHost`): disk and metadata store in memory, background work on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.disk = SimulatedDisk(is_crash_simulated=False)
        self.time = VirtualTime(loop)
        self.disk.clock = self.time.clock
        self.store = InMemoryStore(self.time.clock, self.time.scheduler)
        self.ports = HostPorts(
            self.disk,
            self.time.clock,
            HostRandom(),
            self.time.scheduler,
            sync_thread=self._background(),
            file_thread=self._background(),
            compaction_thread=self._background(),
            verification_thread=self._background(),
            batch_thread=self._background(),
            request_thread=self._background(),
            password_thread=self._background(),
            session_clock=self.time.session_clock,
        )

    async def open_store(self, settings: Settings, before_commit: BeforeCommit) -> MetadataStore:  # noqa: ARG002  # there is one
        return self.store.store_client()

    async def close_scheduler(self) -> None:
        await self.time.scheduler.close()

    def _background(self) -> SimulatedBackground:
        return SimulatedBackground(self.time.scheduler, lambda: 0.0)
