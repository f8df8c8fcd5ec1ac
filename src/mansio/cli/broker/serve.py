"""`mansio serve`: one broker in the foreground, with its HTTP listener and optionally its etcd member.

Invariants:
* The `ready` line is printed when all ports accept connections, not before.
* SIGTERM or SIGINT stops accepting, lets running requests finish for at most `shutdown_drain_ms`, closes all logs and
  exits with 0; a second signal exits immediately.
* The etcd member is healthy before the broker starts, and stops after it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from typing import TYPE_CHECKING

import typer

from mansio import logs
from mansio.cli.broker.config import (
    AdvertiseOption,
    ConfigOption,
    DataOption,
    DevOption,
    EtcdOption,
    GivenFlags,
    GrpcOption,
    HttpOption,
    JoinOption,
    KafkaOption,
    NodeIdOption,
    ProcessesOption,
    RackOption,
    RegistryOption,
    SecureOption,
    SetOption,
    SqsOption,
    SupervisedOption,
    settings_from_flags,
)
from mansio.cli.broker.service_manager import SystemdNotifier, has_terminal, send_heartbeats
from mansio.cli.support.common import print_error
from mansio.errors import ConfigError, DataDirectoryLocked
from mansio.version import __version__

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Iterator
    from typing import Any

    from starlette.applications import Starlette
    from starlette.types import ASGIApp

    from mansio.api.asgi.server import HttpServer
    from mansio.api.grpc.server import GrpcServer
    from mansio.api.http.service_stats import ServiceStats
    from mansio.config.addresses import Address
    from mansio.config.settings import Settings
    from mansio.logs import LineHandler
    from mansio.node.broker import Broker
    from mansio.node.etcd_member.member import EtcdMember
    from mansio.node.protected_start import ClientFiles, ProtectedStart

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""Time for closing the logs after the drain; then the process ends without closing them."""

FORCED_EXIT_CODE = 130
"""Exit code after a second signal. No acknowledged record is lost; the next start recovers the logs."""


def serve(
    data: DataOption = None,
    kafka: KafkaOption = None,
    http: HttpOption = None,
    registry: RegistryOption = None,
    sqs: SqsOption = None,
    grpc: GrpcOption = None,
    node_id: NodeIdOption = None,
    advertise: AdvertiseOption = None,
    rack: RackOption = None,
    etcd: EtcdOption = None,
    join: JoinOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    dev: DevOption = False,
    secure: SecureOption = False,
    processes: ProcessesOption = None,
    supervised: SupervisedOption = False,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    The broker runs alone, or as a member of a cluster with --etcd or --join. It prints one line with `ready` and its
    addresses when it accepts connections. Log lines go to standard error. With --processes several brokers use the
    cores of this machine.
    """
    import asyncio

    from mansio.config.settings import DEV_SETTINGS
    from mansio.host import file_descriptors
    from mansio.host.asyncio_loop import new_event_loop
    from mansio.host.extras import require_extra
    from mansio.host.platforms import require_posix
    from mansio.wire.api_versions import ApiKey
    from mansio.wire.codec import messages

    require_posix("mansio serve")

    named = {
        "data_dir": data,
        "listeners": kafka,
        "http_listener": http,
        "registry_listener": registry,
        "sqs_listener": sqs,
        "grpc_listener": grpc,
        "node_id": node_id,
        "advertised_listeners": advertise,
        "broker_rack": rack,
        "etcd_endpoints": etcd,
        "etcd_join": join,
    }
    if processes is not None:
        from mansio.cli.broker.serve_processes import serve_processes

        given = GivenFlags(named, config, set_ or [], is_dev=dev, is_secure=secure)
        raise typer.Exit(serve_processes(given, processes))
    settings = settings_from_flags(named, config, set_, dev=dev, secure=secure)
    if secure:
        require_extra("secure")
    if settings.grpc_address is not None:
        require_extra("grpc")
    lines = logs.set_up(settings.log_level, settings.log_format)
    if dev:
        used = {name: getattr(settings, name) for name in DEV_SETTINGS}
        logger.warning("dev_mode", extra=logs.fields(**used, reason="--dev is not for production"))
    file_descriptors.raise_file_limit()
    budget = file_descriptors.descriptor_budget(settings.max_connections, settings.open_files_max)
    file_descriptors.log_reductions(budget, settings.max_connections)
    # The schemas' own imports take a fifth of a second in one piece, which no first request should find on the loop.
    messages.merged_schema(ApiKey.METADATA, "request")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code = runner.run(_serve(settings, lines, is_protected=secure, is_supervised=supervised))
    raise typer.Exit(code)


async def _serve(
    settings: Settings, lines: LineHandler, *, is_protected: bool, is_supervised: bool = False
) -> int:
    """Start the broker, print its ready line, wait for a signal, and stop. Returns the exit code. `is_supervised`: the
    standard input is the control channel to a supervisor, with which the broker ends.

    The HTTP listener starts first, so that it answers health checks (as not ready) during a long recovery. Where other
    processes serve its port, too, it starts when the broker is ready: clients reach those that are.
    """
    import asyncio

    from mansio.api.http.broker_stats import RunningBroker
    from mansio.api.http.service_stats import ServiceStats
    from mansio.cli.broker.connection_lines import print_connection
    from mansio.node.broker import Broker

    stop = asyncio.Event()
    view = ServiceStats(settings=settings)
    protected_start = None
    if is_protected:
        from mansio.node.protected_start import ProtectedStart

        protected_start = ProtectedStart.of_broker(settings)
    broker = Broker(settings, warm_up=True, protected_start=protected_start)
    _handle_signals(broker, stop)
    manager = SystemdNotifier()
    heartbeats = asyncio.create_task(send_heartbeats(manager, lines), name="pulse")
    member = None
    servers: dict[str, HttpServer | GrpcServer] = {}
    addresses: dict[str, Address] = {}
    app = _http_app(broker, view)
    channel = await _open_control_channel(settings, app, stop) if is_supervised else None
    if not settings.share_ports:
        addresses |= await _start_http(settings, broker, view, app, servers)
    try:
        member = await _start_etcd_member(settings, stop)
        if not stop.is_set() and await _start_unless_stopped(broker, stop):
            _tune_interpreter()
            view.attach(
                RunningBroker(
                    broker.service,
                    broker.server,
                    broker.clients,
                    broker.listener_address,
                    lambda: broker.is_ready,
                    etcd_member=member,
                    certificates=broker.certificates,
                )
            )
            if settings.share_ports:
                addresses |= await _start_http(settings, broker, view, app, servers)
            addresses |= await _start_servers(settings, broker, view, servers)
            known = None if protected_start is None else _client_files(broker, protected_start)
            _print_ready(settings, broker, addresses)
            if protected_start is not None and known is not None:
                print_connection(*known, protected_start.new_password)
            manager.ready(f"kafka={broker.listeners_text}")
            await stop.wait()
    finally:
        manager.stopping()
        try:
            code = await _close(settings, broker, list(servers.values()))
        finally:
            if member is not None:
                await member.stop()
        heartbeats.cancel()
        if channel is not None:
            await channel.aclose()
        lines.write_suppressed(at_end=True)
        manager.close()
    return code


async def _start_etcd_member(settings: Settings, stop: asyncio.Event) -> EtcdMember | None:
    """Start this broker's etcd member and return it when it is healthy. None without `etcd_join`, or if `stop` is set
    first.
    """
    if not settings.etcd_join:
        return None
    from mansio.node.etcd_settings import create_own_member

    member = await create_own_member(settings)
    started = await _run_unless_stopped(member.start(settings.etcd_start_timeout_ms / 1000), stop)
    return member if started else None


async def _run_unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run `work` until it completes or `stop` is set; returns whether it completed. If `stop` is set first, `work` is
    cancelled and has to undo what it started.
    """
    import asyncio

    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return True
        return False
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))


def _http_app(broker: Broker, view: ServiceStats) -> Starlette:
    """Return the application of the HTTP listener, before its authentication."""
    import asyncio

    from mansio.api.http.app import assemble, disk_monitor
    from mansio.api.http.monitors import EventLoopMonitor
    from mansio.api.http.v1.operation import ApiContext
    from mansio.broker.services.health import Problem
    from mansio.host.asyncio_loop import AsyncioScheduler
    from mansio.host.clock import HostClock

    settings = broker.settings
    context = ApiContext(view.running, settings)
    watch = EventLoopMonitor(AsyncioScheduler(asyncio.get_running_loop()), HostClock(), context.loop_holds)
    disk = disk_monitor(settings)
    view.use_disk_warnings(lambda: [Problem(reason, detail) for reason, detail in disk.warnings()])
    return assemble(view, watch, disk, context)


async def _start_http(
    settings: Settings,
    broker: Broker,
    view: ServiceStats,
    app: ASGIApp,
    servers: dict[str, HttpServer | GrpcServer],
) -> dict[str, Address]:
    """Start the HTTP listener, if it is configured, and add it to `servers`. Return its address. Raises `ConfigError`
    if the address is not available."""
    from mansio.api.asgi.server import HttpServer
    from mansio.api.http.app import authenticating
    from mansio.config.addresses import Address

    if (address := settings.http_address) is None:
        return {}
    if settings.http_security.is_encrypted:
        with _errors_of_data_directory(settings.data_dir):
            broker.prepare_files()
    server = HttpServer(
        authenticating(app, settings, view.running, broker.revocations),
        *address,
        broker.tls_context(settings.http_security),
        broker.handshakes,
        broker.throttle,
        is_shared=settings.share_ports,
    )
    try:
        bound = await server.start()
    except OSError as error:
        raise ConfigError(_listen_error(error, *address, "--http")) from error
    servers["http"] = server
    return {"http": Address(*bound)}


async def _open_control_channel(
    settings: Settings, app: Starlette, stop: asyncio.Event
) -> contextlib.AsyncExitStack:
    """Answer the supervisor with the application, and set `stop` when the supervisor has ended, until the returned
    stack is closed."""
    from mansio.node.processes.control_channel import BrokerEnd

    stack = contextlib.AsyncExitStack()
    if settings.http_address is None:  # nothing else runs the monitors of the application
        await stack.enter_async_context(app.router.lifespan_context(app))
    channel = BrokerEnd(app, stop.set)
    channel.start()
    stack.callback(channel.stop)
    return stack


async def _start_servers(
    settings: Settings, broker: Broker, view: ServiceStats, servers: dict[str, HttpServer | GrpcServer]
) -> dict[str, Address]:
    """Start the listeners that are configured besides Kafka's and HTTP, and add them to `servers`. Return their
    addresses. Raises `ConfigError` if an address is not available."""
    from mansio.config.addresses import Address

    wanted: dict[str, tuple[Address, HttpServer | GrpcServer]] = {}
    if (address := settings.registry_address) is not None:
        from mansio.api.asgi.server import HttpServer
        from mansio.api.http.app import authenticating
        from mansio.api.http.registry.routes import root_app
        from mansio.api.http.v1.operation import ApiContext

        app = root_app(ApiContext(view.running, settings))
        wanted["registry"] = (
            address,
            HttpServer(
                authenticating(app, settings, view.running, broker.revocations, address=address),
                *address,
                broker.tls_context(settings.http_security),
                broker.handshakes,
                broker.throttle,
                is_shared=settings.share_ports,
            ),
        )
    if (address := settings.sqs_address) is not None:
        from mansio.api.asgi.server import HttpServer
        from mansio.api.sqs.app import SqsEndpoint

        endpoint = SqsEndpoint(broker.service, settings, broker.clients, broker.revocations)
        wanted["sqs"] = (
            address,
            HttpServer(
                endpoint.app,
                *address,
                broker.tls_context(settings.sqs_security),
                broker.handshakes,
                broker.throttle,
                is_shared=settings.share_ports,
            ),
        )
    if (address := settings.grpc_address) is not None:
        from mansio.api.grpc.server import GrpcServer

        wanted["grpc"] = address, GrpcServer(broker.service, broker.clients, *address, broker.certificates)
    found = {}
    for name, (address, server) in wanted.items():
        try:
            found[name] = Address(*await server.start())
        except OSError as error:
            raise ConfigError(_listen_error(error, *address, f"--{name}")) from error
        servers[name] = server
    return found


def _tune_interpreter() -> None:
    """Run the garbage collector rarely, and exclude the objects created during the start; let threads wait for the
    interpreter no longer than a turn of the event loop.

    Requests create no reference cycles. With the default thresholds the collector would traverse the many objects of
    the message schemas repeatedly, during requests. By default a thread that returns from a flush waits for 5 ms while
    the event loop is busy, and so does the event loop while another thread runs Python code.
    """
    import gc

    from mansio.host.item_turns import TURN_S

    sys.setswitchinterval(TURN_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _start_unless_stopped(broker: Broker, stop: asyncio.Event) -> bool:
    """Start the broker; returns whether it has started. In a cluster, where the start may take long, `stop`
    cancels it.
    """
    if not broker.settings.clustered:
        await _start(broker)
        return True
    return await _run_unless_stopped(_start(broker), stop)


async def _start(broker: Broker) -> None:
    from mansio.host.listening_sockets import ListenError

    with _errors_of_data_directory(broker.settings.data_dir):
        try:
            await broker.start()
        except ListenError as error:
            raise ConfigError(_listen_error(error, error.host, error.port, "--kafka")) from error


@contextlib.contextmanager
def _errors_of_data_directory(directory: str) -> Iterator[None]:
    """Raise `ConfigError` that names the flag if the data directory cannot be used."""
    try:
        yield
    except DataDirectoryLocked as error:
        raise ConfigError(f"data directory {directory} is in use by another broker: use --data") from error
    except OSError as error:
        if error.filename is not None and isinstance(error, NotADirectoryError | PermissionError):
            raise ConfigError(
                f"cannot use data directory {directory}: {error.strerror}; use --data"
            ) from error
        raise


def _listen_error(error: OSError, host: str, port: int, flag: str) -> str:
    """Return the error message for a port that cannot be bound: the reason or the process that uses it, and the flag
    for another port.
    """
    from mansio.config.addresses import Address
    from mansio.host.listening_sockets import ListenError
    from mansio.host.port_owner import port_in_use_message

    if error.errno == errno.EADDRINUSE:
        return f"{port_in_use_message(host, port)}: use {flag} for another port"
    reason = error.reason if isinstance(error, ListenError) else error.strerror or str(error)
    return f"cannot listen on {Address(host, port)}: {reason}; use {flag} for another address"


def _print_ready(settings: Settings, broker: Broker, addresses: dict[str, Address]) -> None:
    others = " ".join(f"{name}={address}" for name, address in {"http": "off", **addresses}.items())
    listeners = f"kafka={broker.listeners_text} {others}"
    print(f"mansio {__version__} ready {listeners} data={settings.data_dir} pid={os.getpid()}", flush=True)


def _client_files(broker: Broker, protected_start: ProtectedStart) -> tuple[ClientFiles, str] | None:
    """Write the files of clients; return them, and the address to which clients connect. None if the settings leave no
    listener on which users log in."""
    from mansio.config.addresses import Address
    from mansio.config.listeners import SecurityProtocol

    served = broker.server.listeners
    for listener in broker.settings.kafka_listeners.all:
        endpoint = served[listener.name].endpoint
        if endpoint is not None and listener.security_protocol is SecurityProtocol.SASL_SSL:
            address = Address(endpoint.host, endpoint.port)
            return protected_start.write_client_files(str(address)), str(address)
    return None


async def _close(settings: Settings, broker: Broker, servers: list[HttpServer | GrpcServer]) -> int:
    """Stop the broker and its other listeners concurrently. Returns the exit code: 1 if they did not stop in time."""
    import asyncio

    work = [asyncio.ensure_future(broker.stop())]
    work += [asyncio.ensure_future(server.stop()) for server in servers]
    _, late = await asyncio.wait(work, timeout=settings.shutdown_drain_ms / 1000 + CLOSE_TIMEOUT_S)
    if late:
        return print_error("did not stop in time; the next start recovers the logs that were not closed")
    for one in work:
        one.result()
    return 0


def _handle_signals(broker: Broker, stop: asyncio.Event) -> None:
    """Stop on SIGTERM and SIGINT, at once on the second one; read certificates again on SIGHUP, if there are any, but
    stop if the end of the terminal sends it."""
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    is_asked = (
        False  # `stop` may be set before the first signal: the end of a supervisor closes its channel, too
    )

    def on_signal() -> None:
        nonlocal is_asked
        if is_asked:
            os._exit(FORCED_EXIT_CODE)
        is_asked = True
        stop.set()

    had_terminal = has_terminal()

    def on_hangup() -> None:
        nonlocal is_asked
        if had_terminal and not has_terminal():
            is_asked = True
            stop.set()
        else:
            broker.reload_certificates()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if broker.has_certificates:  # otherwise SIGHUP ends the process
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
