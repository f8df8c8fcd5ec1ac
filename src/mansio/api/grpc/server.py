"""gRPC listener: the service, reflection and health on the broker's event loop.

Bounds: `MESSAGE_BYTES_MAX` per message, `CALLS_MAX` calls, of them `STREAMS_PER_CONNECTION_MAX` on one connection,
`CONNECTIONS_MAX` connections, `METADATA_BYTES_MAX` of metadata.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.answers import serialized
from mansio.api.grpc.authentication import Authentication, by_certificate, by_log_in
from mansio.api.grpc.credentials import CertificateSource
from mansio.api.grpc.endings import end_call
from mansio.api.grpc.requests import parse
from mansio.api.grpc.service import MansioService
from mansio.api.required_rights import GRPC, check_rows
from mansio.config.security import is_protocol_authenticated
from mansio.errors import MansioError
from mansio.state.authentication.bearer_tokens import TOKEN_CHARACTERS_MAX
from mansio.state.authentication.certificate_names import MappingRules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.statistics import LoopHolds
    from mansio.net.tls.certificate_reloader import CertificateReloader

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 32 << 20
CALLS_MAX: Final = 1_000
STREAMS_PER_CONNECTION_MAX: Final = 100
CONNECTIONS_MAX: Final = 500
METADATA_BYTES_MAX: Final = TOKEN_CHARACTERS_MAX + (8 << 10)
"""The longest token, and what clients send beside it."""

STOP_S: Final = 2.0

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Mansio"]
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 2 * MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class GrpcServer:
    """One listening socket and its server. Every method runs on the broker's event loop."""

    def __init__(
        self,
        services: BrokerServices,
        clients: RoutedClients,
        host: str,
        port: int,
        certificates: CertificateReloader | None = None,
    ) -> None:
        """Port 0 selects a free port. `certificates`: of the listener, if its security protocol has TLS."""
        settings = services.settings
        self._interceptors: list[Authentication] = []
        if settings.grpc_security.is_authenticated:
            self._interceptors.append(Authentication(by_log_in(services.log_ins)))
        elif is_protocol_authenticated(settings.grpc_security, settings.ssl_client_auth):
            rules = MappingRules(settings.ssl_principal_mapping_rules)
            self._interceptors.append(Authentication(by_certificate(rules, services.log_ins)))
        self._certificates = certificates if settings.grpc_security.is_encrypted else None
        self._log_ins = settings.grpc_security.is_authenticated
        self._is_shared = settings.share_ports
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._host = host
        self._service = MansioService(services, clients)
        self._holds = services.statistics.holds
        self._server: Any = None

    async def start(self) -> tuple[str, int]:
        """Start to accept connections. Return the bound (host, port). Raises `OSError`."""
        check_rows("gRPC", GRPC, (method.name for method in SERVICE.methods))
        server = grpc.aio.server(
            interceptors=self._interceptors,
            options=(*OPTIONS, ("grpc.so_reuseport", int(self._is_shared))),
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        handlers = {
            method.name: _handler(method, getattr(self._service, method.name), self._holds)
            for method in SERVICE.methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
        probes = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(probes, server)
        for name in ("", SERVICE.full_name):
            await probes.set(name, health_pb2.HealthCheckResponse.SERVING)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            if self._certificates is None:
                port = server.add_insecure_port(self._address)
            else:
                credentials = CertificateSource(self._certificates, log_ins=self._log_ins).credentials()
                port = server.add_secure_port(self._address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}: {error}") from error
        await server.start()
        self._server = server
        return self._host, port

    async def stop(self) -> None:
        """Stop accepting calls, wait at most `STOP_S` for those in progress, and close all connections."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_S)


def _handler(method: Any, call: Callable[..., Any], holds: LoopHolds) -> Any:
    """Return the handler of a method, which parses its request and turns errors into statuses. The methods with streams
    of requests, and Publish, parse them themselves."""
    types = {"response_serializer": method.output_type._concrete_class.SerializeToString}
    if method.name in ("Fetch", "Receive"):
        types = {"response_serializer": serialized}
    if method.name == "Receive":

        async def receive(requests: Any, context: Any) -> None:
            try:
                await holds.measured(
                    partial(call, requests, context), "grpc", lambda: (method.name, context.peer())
                )
            except (MansioError, ValueError, OverflowError) as error:
                end_call(context, error)

        return grpc.stream_stream_rpc_method_handler(receive, **types)
    if method.client_streaming:

        async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in call(requests, context):
                    yield response
            except (MansioError, ValueError, OverflowError) as error:
                end_call(context, error)

        return grpc.stream_stream_rpc_method_handler(stream, **types)

    message = None if method.name == "Publish" else method.input_type._concrete_class

    if method.server_streaming:

        async def responses(data: bytes, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in call(parse(message, data), context):
                    yield response
            except (MansioError, ValueError, OverflowError) as error:
                end_call(context, error)

        return grpc.unary_stream_rpc_method_handler(responses, **types)

    async def parsed_call(data: bytes, context: Any) -> Any:
        return await call(data if message is None else parse(message, data), context)

    async def unary(data: bytes, context: Any) -> Any:
        try:
            return await holds.measured(
                partial(parsed_call, data, context), "grpc", lambda: (method.name, context.peer())
            )
        except (MansioError, ValueError, OverflowError, TimeoutError) as error:
            end_call(context, error)

    return grpc.unary_unary_rpc_method_handler(unary, **types)
