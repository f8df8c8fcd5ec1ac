"""Transport of kombu: connects a worker or publisher, and gives the worker its messages.

A worker with the pools prefork, threads or solo waits on a file descriptor; publishers, and programs that use kombu
directly, call `drain_events`.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kombu.transport import base, virtual
from kombu.utils.compat import detect_environment

from mansio.celery.channel import Channel, close_readers
from mansio.celery.client_thread import ClientOptions, acquire_client, release_client
from mansio.celery.exchange_reader import ProcessQueues
from mansio.celery.inbox import Inbox
from mansio.celery.queue_reader import LeaseOptions
from mansio.config.security import SASL_MECHANISMS
from mansio.errors import ConfigError, ConnectionLost, MansioError, Unavailable
from mansio.net.contexts import resolve_security
from mansio.net.security_settings import parse_tls
from mansio.version import __version__

if TYPE_CHECKING:
    from mansio.celery.client_thread import ClientThread

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 9092
CONNECT_S_MAX: Final = 4.0
"""Time for connecting, if the application sets none (`broker_connection_timeout`)."""

DELIVERIES_PER_TURN_MAX: Final = 100
"""Messages that a worker gets in one turn of its event loop."""

EXTEND_S_MAX: Final = 12 * 60 * 60

WAIT_S_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """`broker_transport_options`; docs/how-to/from-celery.md describes them."""

    visibility_timeout: float | None = None
    extend_seconds_max: float = EXTEND_S_MAX
    partitions: int = -1
    replication_factor: int = -1
    topic_config: Mapping[str, str] | None = None
    group_config: Mapping[str, str] | None = None
    cancel_revoked: bool = True
    client_id: str = "celery"
    tls: bool | str | None = None
    mechanism: str | None = None
    certificate: str | None = None
    key: str | None = None
    tracing: bool | None = None

    @property
    def lease_options(self) -> LeaseOptions:
        """How long tasks are leased."""
        lease_ms = None if self.visibility_timeout is None else round(self.visibility_timeout * 1000)
        return LeaseOptions(lease_ms, self.extend_seconds_max * 1000)


class Transport(virtual.Transport):  # type: ignore[misc]  # kombu has no types
    """Transport of kombu over Mansio's client; one instance for each connection of kombu."""

    Channel = Channel
    default_port = DEFAULT_PORT
    driver_type = "mansio"
    driver_name = "mansio"

    connection_errors = (*base.Transport.connection_errors, Unavailable)
    channel_errors = (*base.Transport.channel_errors, MansioError)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()

    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.options = transport_options(client.transport_options)
        self.inbox = Inbox()
        self.process_queues = ProcessQueues()
        self.thread_or_none: ClientThread | None = None
        """The client; None before connecting and after closing."""
        self.client_options: ClientOptions | None = None
        """Of the client; None before connecting."""
        self.has_failed = False
        """Whether the connection ended with an error, after which Celery connects again."""
        self._hub: Any = None

    @property
    def thread(self) -> ClientThread:
        """The client. Raises `ConnectionLost` if it is closed."""
        if self.thread_or_none is None:
            raise ConnectionLost("the connection is closed")
        return self.thread_or_none

    def driver_version(self) -> str:
        """Version of Mansio."""
        return __version__

    # Connection

    def establish_connection(self) -> Any:
        """Connect. Raises `ConnectionLost` if no broker answers in time."""
        if detect_environment() != "default":
            raise ConfigError("mansio.celery needs threads: use the pool prefork, threads or solo")
        # kombu declares all queues and bindings again on a new connection. After a fork, these are the parent's.
        self.state.clear()
        self.channels.clear()
        self._avail_channels.clear()
        self.process_queues = ProcessQueues()
        self.has_failed = False
        self.client_options = client_options(self.client, self.options)
        self.thread_or_none = acquire_client(self.client_options)
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        """Close the channels, and the client if no other connection uses it."""
        self._leave_hub()
        try:
            super().close_connection(connection)
        finally:
            thread, self.thread_or_none = self.thread_or_none, None
            if thread is not None:
                close_readers(thread, self.process_queues.remove_all())
            if thread is not None and self.client_options is not None:
                release_client(self.client_options, thread)
            self.inbox.close()

    def _collect(self, connection: Any) -> None:
        """Close the connection after an error, as kombu does before it connects again: the tasks that run keep their
        leases."""
        self.has_failed = True
        self.close_connection(connection)

    def verify_connection(self, connection: Any) -> bool:
        """Whether the connection can be used: it is open and belongs to this process."""
        return self.thread_or_none is not None and self.thread_or_none.is_of_this_process

    # Messages

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Give the program one message; wait for it. Raises `socket.timeout` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self.inbox.clear()
            self.inbox.raise_error()
            if self._deliver_next():
                return
            left = WAIT_S_MAX if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no message")
            self.inbox.wait(min(left, WAIT_S_MAX))

    def _deliver_next(self) -> bool:
        return any(channel.deliver_next() for channel in list(self.channels))

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Give the worker's event loop the messages as they come."""
        self._leave_hub()
        self._hub = loop
        loop.add_reader(self.inbox.fileno(), self._on_readable)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Give the event loop no more messages."""
        self._leave_hub()

    def _leave_hub(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.remove_reader(self.inbox.fileno())

    def _on_readable(self) -> None:
        self.inbox.clear()
        self.inbox.raise_error()
        for _ in range(DELIVERIES_PER_TURN_MAX):
            if not self._deliver_next():
                return
        self.inbox.wake()


def transport_options(given: Mapping[str, Any]) -> TransportOptions:
    """Return the options of `broker_transport_options` that Mansio knows; kombu adds others. Raises `ConfigError`."""
    names = TransportOptions.__dataclass_fields__
    found = TransportOptions(**{name: given[name] for name in names if name in given})
    if found.visibility_timeout is not None and not 1 <= found.visibility_timeout <= EXTEND_S_MAX:
        raise ConfigError(
            f"visibility_timeout: not between 1 and {EXTEND_S_MAX} seconds: {found.visibility_timeout}"
        )
    if found.extend_seconds_max < 0:
        raise ConfigError(f"extend_seconds_max: negative: {found.extend_seconds_max}")
    for name in ("topic_config", "group_config"):
        if not isinstance(getattr(found, name), Mapping | None):
            raise ConfigError(f"{name}: not a mapping of settings")
    return found


def client_options(connection: Any, options: TransportOptions) -> ClientOptions:
    """How to connect, from a connection of kombu. Raises `ConfigError`."""
    host = connection.hostname or "127.0.0.1"
    address = f"[{host}]" if ":" in host else host
    bootstrap_servers = f"{address}:{connection.port or DEFAULT_PORT}"
    context = connection.ssl if isinstance(connection.ssl, ssl.SSLContext) else None
    given = {
        "tls": False if context is not None else options.tls,
        "user": connection.userid or None,
        "password": connection.password or None,
        "mechanism": options.mechanism or _mechanism(connection.login_method),
        "certificate": options.certificate,
        "key": options.key,
    }
    if context is None:
        given |= {name: value for name, value in _ssl_settings(connection.ssl).items() if value is not None}
    elif options.certificate or options.key:
        raise ConfigError("load certificate and key into the context that is given as broker_use_ssl")
    return ClientOptions(
        bootstrap_servers=bootstrap_servers,
        connect_timeout_ms=(connection.connect_timeout or CONNECT_S_MAX) * 1000,
        client_id=options.client_id,
        tracing=options.tracing,
        tls=context,
        security=resolve_security(bootstrap_servers, given),
    )


def _mechanism(login_method: Any) -> str | None:
    """Return the mechanism that an address or `broker_login_method` names; None for one of another broker."""
    return login_method if login_method in SASL_MECHANISMS else None


def _ssl_settings(given: Any) -> dict[str, Any]:
    """Return the settings in `broker_use_ssl` or in the query of an address: a flag, the name of a file with
    authorities, or a mapping with the keys of Celery."""
    if not given:
        return {}
    if isinstance(given, str):
        return {"tls": parse_tls(given)}
    keys = given if isinstance(given, Mapping) else {}
    authorities, certificate, key = (
        keys.get(name) or keys.get(f"ssl_{name}") for name in ("ca_certs", "certfile", "keyfile")
    )
    return {"tls": authorities or True, "certificate": certificate, "key": key}
