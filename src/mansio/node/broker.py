"""Broker on a real host: host ports, metadata store and Kafka listeners, and the order in which they start and stop.

Start: lock the data directory, open the metadata store (a file, or etcd), recover every log, load the groups, listen;
in a cluster, register under the advertised addresses. Stop: transfer leaderships, stop listening, respond to requests
in progress, end the session, flush all logs, close. If a step of the start fails, the steps before it are undone.

`process_host` creates the real implementations of `mansio.ports`; `broker_runtime` composes the other parts of a
broker.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from mansio.api.kafka.connections.limits import ServerLimits
from mansio.api.kafka.server.listener import KafkaServer
from mansio.api.routing.routed_clients import RoutedClients
from mansio.broker.maintenance.data_dir_format import claim_data_dir_format
from mansio.broker.maintenance.data_dir_mode import check_data_dir_mode, moved_error
from mansio.broker.services.acls import NO_ADMINISTRATOR, NO_ADMINISTRATOR_DETAIL
from mansio.config.addresses import WILDCARD_IPV4, Address
from mansio.config.listeners import format_listeners
from mansio.host import file_descriptors
from mansio.host.disk import HostDisk
from mansio.logs import fields
from mansio.metadata.image import MetadataImage
from mansio.metadata.single_node_import import read_mark
from mansio.net.connection_throttle import ConnectionThrottle
from mansio.net.tls.handshakes import HandshakeRunner
from mansio.node.broker_runtime import BrokerRuntime, FileLimits
from mansio.node.certificate_renewal import CertificateRenewal
from mansio.node.process_host import ProcessHost
from mansio.node.schema_preload import SchemaPreload
from mansio.node.security import BrokerSecurity, EarlyContext
from mansio.node.tokens import new_token_checker, open_signing_keys
from mansio.state.handshake_admission import WAITING_MAX, HandshakeAdmission

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from mansio.api.kafka.server.listener import Intercept
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.config.listeners import SecurityProtocol
    from mansio.config.settings import Settings
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.net.peer_connections import PeerConnectionClasses
    from mansio.net.signing_keys import SigningKeys
    from mansio.net.tls.certificate_reloader import CertificateReloader
    from mansio.node.cluster_member import ClusterMember
    from mansio.node.process_host import BrokerHost
    from mansio.node.protected_start import ProtectedStart
    from mansio.state.authentication.revocation import RevocationLists
    from mansio.state.connection_rates import ConnectionRates

logger = logging.getLogger(__name__)

IDLE_MS_UNLIMITED = 1 << 50
LOCK_FILE = "lock"
"""In the data directory: locked by the broker that uses it."""

TLS_WAITING_MIN = 64
"""Number of connections with TLS that may wait for their handshake even if fewer connections are allowed."""


class Broker:
    """A broker with its listeners. `start` and `stop` are called once each, on the same running event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        warm_up: bool = False,
        open_host: Callable[[asyncio.AbstractEventLoop, AsyncExitStack], BrokerHost] | None = None,
        intercept: Intercept | None = None,
        protected_start: ProtectedStart | None = None,
    ) -> None:
        """`warm_up`: compile the schemas of Kafka messages on a thread (`SchemaPreload`), so that first requests do not
        wait for it. `open_host`: opens the host of this broker and pushes what closes it, by default the operating
        system (`ProcessHost`). `intercept`: see `KafkaServer`. `protected_start`: makes the files that
        `settings` name, and the first user."""
        self.settings = settings
        self._open_host = open_host or ProcessHost
        self._intercept = intercept
        self._protected_start = protected_start
        self._schema_preload = warm_up
        self._stack = AsyncExitStack()
        self._cluster_member: ClusterMember | None = None
        self._peers: PeerConnectionClasses | None = None
        self._service: BrokerServices | None = None
        self._server: KafkaServer | None = None
        self._clients: RoutedClients | None = None
        self._security: BrokerSecurity | None = None
        self._token_keys: SigningKeys | None = None
        self._handshakes: HandshakeRunner | None = None
        self._throttle: ConnectionThrottle | None = None
        self.is_ready = False
        """Whether the broker accepts connections: true at the end of `start`, false from the beginning of `stop`."""

    @property
    def service(self) -> BrokerServices:
        """The broker's services. Available after `start`."""
        assert self._service is not None, "the broker has not been started"
        return self._service

    @property
    def server(self) -> KafkaServer:
        """The server of the Kafka listeners. Available after `start`."""
        assert self._server is not None, "the broker has not been started"
        return self._server

    @property
    def listener_addresses(self) -> dict[str, Address]:
        """Addresses of the Kafka listeners by name, in the order of the setting. Available after `start`."""
        return {
            name: address._replace(host=address.host or WILDCARD_IPV4)
            for name, address in self.server.addresses.items()
        }

    @property
    def listener_address(self) -> Address:
        """Address of the first Kafka listener. Available after `start`."""
        return next(iter(self.listener_addresses.values()))

    @property
    def listeners_text(self) -> str:
        """The Kafka listeners for people: `host:port` of the only one, otherwise `NAME://host:port,...`."""
        addresses = self.listener_addresses
        return format_listeners(addresses) if len(addresses) > 1 else str(self.listener_address)

    @property
    def clients(self) -> RoutedClients:
        """Clients of this broker itself, each of which acts for a caller. Available after `start`."""
        assert self._clients is not None, "the broker has not been started"
        return self._clients

    @property
    def has_certificates(self) -> bool:
        """Whether a listener has TLS."""
        return any(each.is_encrypted for each in self.settings.security_protocols)

    def tls_context(self, protocol: SecurityProtocol) -> Callable[[], ssl.SSLContext] | None:
        """Return what returns the TLS context for a new connection of a listener with this protocol, before the start
        of the broker, too; None if it has no TLS. Raises `ConfigError` if the files cannot be used."""
        if not protocol.is_encrypted:
            return None
        return EarlyContext(self.settings, lambda: self.certificates, log_ins=protocol.is_authenticated)

    @property
    def handshakes(self) -> HandshakeRunner:
        """Runner of the TLS handshakes of all listeners, before the start of the broker, too. Called on its event
        loop."""
        if self._handshakes is None:
            settings = self.settings
            budget = file_descriptors.descriptor_budget(settings.max_connections, settings.open_files_max)
            # All clients may connect again at once. One that waits holds one descriptor, and so does a connection with
            # TLS, of the two that the budget has for each connection.
            waiting_max = min(max(TLS_WAITING_MIN, budget.connections), WAITING_MAX)
            self._handshakes = HandshakeRunner(
                asyncio.get_running_loop(),
                admission=HandshakeAdmission(waiting_max=waiting_max),
                throttle=self.throttle,
            )
        return self._handshakes

    @property
    def throttle(self) -> ConnectionThrottle:
        """Throttle of new connections of all listeners, before the start of the broker, too. Called on its event
        loop."""
        if self._throttle is None:
            self._throttle = ConnectionThrottle(asyncio.get_running_loop(), self._connection_rates)
        return self._throttle

    def _connection_rates(self) -> ConnectionRates | None:
        return None if self._service is None else self._service.quotas.connection_rates

    @property
    def certificates(self) -> CertificateReloader | None:
        """Certificates of the listeners with TLS; None if there are none, and before the start."""
        return None if self._security is None else self._security.certificates

    def revocations(self) -> RevocationLists | None:
        """Return the revocation lists of certificates; None if there are none, and before the start."""
        return None if self.certificates is None else self.certificates.revocations

    def reload_certificates(self) -> None:
        """Read the certificates of the listeners again: new connections get the new ones. Files that cannot be used are
        logged, and the certificates before remain."""
        if self._security is not None:
            self._security.reload()

    def prepare_files(self) -> None:
        """Make the files of a protected start, for listeners with TLS that begin before the broker does. Raises
        `ConfigError`, `DataDirectoryLocked`, `MissingExtra`, `OSError`."""
        if self._protected_start is None:
            return
        disk = HostDisk()
        disk.make_directory(self.settings.data_dir)
        lock = disk.lock(f"{self.settings.data_dir}/{LOCK_FILE}")
        try:
            self._protected_start.prepare_files()
        finally:
            lock.release()

    async def start(self) -> None:
        """Start the broker; returns when clients can connect. Raises the error that prevented the start."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Transfer leaderships, drain connections, flush and close. A second call has no effect."""
        was_ready = self.is_ready
        if was_ready:
            logger.info("broker_stopping", extra=fields(drain_ms=self.settings.shutdown_drain_ms))
        self.is_ready = False
        if self._service is not None:
            self._service.quotas.stop()
        if self._cluster_member is not None:
            await self._cluster_member.transfer_leaderships(self.settings.shutdown_drain_ms)
        if self._throttle is not None:
            self._throttle.stop()
        if self._server is not None:
            await self._server.stop(self.settings.shutdown_drain_ms)
        await self._stack.aclose()
        if was_ready:
            logger.info("broker_stopped", extra=fields(node=self.settings.node_id))

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        loop = asyncio.get_running_loop()
        host = self._open_host(loop, stack)
        host_ports, disk, scheduler = host.ports, host.ports.disk, host.ports.scheduler
        disk.make_directory(settings.data_dir)
        stack.callback(disk.lock(f"{settings.data_dir}/{LOCK_FILE}").release)
        check_data_dir_mode(disk, settings.data_dir, clustered=settings.clustered)
        data_format = claim_data_dir_format(disk, settings.data_dir)
        if self._protected_start is not None:
            self._protected_start.prepare_files()
        self._security = BrokerSecurity(settings, host_ports)
        for name, reason in settings.without_effect().items():
            logger.warning("setting_without_effect", extra=fields(name=name, reason=reason))
        for each in settings.unprotected_listeners:
            logger.warning(
                "insecure_listen",
                extra=fields(
                    listener=each.name,
                    address=each.address,
                    reason="everybody who reaches this listener can read and change everything",
                    remedy=each.remedy,
                ),
            )
        store: MetadataStore
        if settings.clustered:
            from mansio.node import cluster_bootstrap  # needs gRPC, which a single node does not

            store, state, self._cluster_member, self._peers = await cluster_bootstrap.open_cluster(
                settings, host_ports, stack, self._security.dialler_context
            )
        else:
            store = await host.open_store(settings, data_format.before_metadata_commit)
            stack.push_async_callback(store.close)
            if (mark := await read_mark(store)) is not None:
                raise moved_error(settings.data_dir, mark.cluster_id)
            state = await MetadataImage.load(store, settings.cluster_id, host_ports.random)
        budget = file_descriptors.descriptor_budget(settings.max_connections, settings.open_files_max)
        limits = FileLimits(budget.active_files, budget.cached_files, budget.partitions)
        self._token_keys = open_signing_keys(settings, host_ports)
        runtime = BrokerRuntime(
            settings,
            host_ports,
            store,
            state,
            self._cluster_member,
            data_format.require_current,
            limits,
            self._security.secrets_keys,
            new_token_checker(settings, self._token_keys, host_ports.clock),
        )
        self._service = runtime.service
        await runtime.open(stack, host.close_scheduler)
        if runtime.service.acls.lacks_administrator():
            logger.warning(NO_ADMINISTRATOR, extra=fields(reason=NO_ADMINISTRATOR_DETAIL))
        if self._cluster_member is not None:
            stack.push_async_callback(self._cluster_member.leave)
        stack.push_async_callback(runtime.end_trace)  # in a cluster, as long as there is a session
        stack.push_async_callback(runtime.service.audit.close)  # after the last request
        await self._listen(runtime, loop, stack)
        if self._schema_preload:
            stack.callback(SchemaPreload(scheduler.call_from_thread).stop)
        if self._cluster_member is not None:
            await self._cluster_member.join(self.server.endpoints)
        self.is_ready = True
        logger.info("broker_ready", extra=fields(kafka=self.listeners_text, node=settings.node_id))
        runtime.start_background_work()

    async def _listen(
        self, runtime: BrokerRuntime, loop: asyncio.AbstractEventLoop, stack: AsyncExitStack
    ) -> None:
        service, listeners = runtime.service, self.settings.kafka_listeners
        assert self._security is not None
        if self._security.has_log_ins or self.settings.authorizer != "none":  # on an open HTTP listener
            await service.users.open_directory()
        if self._protected_start is not None:
            await self._protected_start.create_first_user(service.users)
        server = KafkaServer(
            service,
            _server_limits(runtime.settings),
            loop,
            self._intercept,
            self._security.listeners,
            self.handshakes,
            self.throttle,
        )
        runtime.broker_configs.on_change(lambda _, effective: server.use_limits(_server_limits(effective)))
        self._security.start()
        stack.callback(self._security.stop)
        if self._token_keys is not None:
            await self._token_keys.start()
            stack.callback(self._token_keys.stop)
        if self._protected_start is not None:
            ports = runtime.host_ports
            renewal = CertificateRenewal(
                self._protected_start.renew_certificates,
                self._security.reload,
                ports.scheduler,
                ports.file_thread,
            )
            renewal.start()
            stack.callback(renewal.stop)
        await server.listen(listeners)
        self._server = server
        self._clients = RoutedClients(server, self._peers)
        stack.push_async_callback(self._clients.close)
        for name, listener in server.listeners.items():
            endpoint = listener.endpoint
            if endpoint is None:
                known = fields(listener=name, remedy="add it to advertised_listeners")
                logger.warning("listener_is_not_advertised", extra=known)
            elif (address := Address(endpoint.host, endpoint.port)).is_wildcard:
                known = fields(listener=name, address=address, remedy="set advertised_listeners")
                logger.warning("advertised_listener_is_wildcard", extra=known)


def _server_limits(settings: Settings) -> ServerLimits:
    budget = file_descriptors.descriptor_budget(settings.max_connections, settings.open_files_max)
    return ServerLimits(
        socket_request_max_bytes=settings.socket_request_max_bytes,
        requests_max=settings.in_flight_requests_per_connection_max,
        backlog_bytes_max=settings.in_flight_bytes_per_connection_max,
        unsent_bytes_max=settings.in_flight_bytes_per_connection_max,
        queued_max_request_bytes=settings.queued_max_request_bytes,
        max_connections=budget.connections,
        max_connections_per_ip=settings.max_connections_per_ip,
        idle_ms_max=settings.connections_max_idle_ms or IDLE_MS_UNLIMITED,
    )
