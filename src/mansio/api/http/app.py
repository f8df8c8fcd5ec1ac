"""ASGI application of a broker: the routes of `health`, `metrics`, `v1` and `registry`, and common error handlers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from mansio.api.http import health, metrics
from mansio.api.http.authentication import CertificateAuthentication, LogInAuthentication
from mansio.api.http.errors import EXCEPTION_HANDLERS
from mansio.api.http.monitors import DiskMonitor, EventLoopMonitor
from mansio.api.http.registry import routes as registry
from mansio.api.http.service_stats import ServiceStats
from mansio.api.http.v1 import routes as v1
from mansio.api.http.v1.operation import ApiContext
from mansio.config.addresses import is_loopback_host
from mansio.config.security import has_certificate_users
from mansio.state.authentication.certificate_names import MappingRules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp

    from mansio.api.http.broker_stats import BrokerStats, RunningBroker
    from mansio.broker.services.log_ins import LogInService
    from mansio.config.addresses import Address
    from mansio.config.settings import Settings
    from mansio.state.authentication.revocation import RevocationLists


def build_app(broker: RunningBroker) -> Starlette:
    """Build the ASGI application of a running broker; it must run on the event loop of the broker."""
    service = broker.services
    view = ServiceStats(service.settings)
    view.attach(broker)
    context = ApiContext(view.running, service.settings)
    loop_monitor = EventLoopMonitor(service.scheduler, service.clock, context.loop_holds)
    return assemble(view, loop_monitor, disk_monitor(service.settings), context)


def authenticating(
    app: ASGIApp,
    settings: Settings,
    running: Callable[[], RunningBroker | None],
    revocations: Callable[[], RevocationLists | None] = lambda: None,
    *,
    address: Address | None = None,
) -> ASGIApp:
    """Return an application behind the authentication of the HTTP listener with these settings. `running`: returns the
    broker, None before it has started. `revocations`: returns the revocation lists of certificates. `address`: of the
    listener, by default that of the settings. Raises `ConfigError`."""

    def log_ins() -> LogInService | None:
        broker = running()
        return None if broker is None else broker.services.log_ins

    if settings.http_security.is_authenticated:
        return LogInAuthentication(app, log_ins)
    if has_certificate_users(settings.http_security, settings.ssl_client_auth):
        rules = MappingRules(settings.ssl_principal_mapping_rules)
        return CertificateAuthentication(app, rules, log_ins, revocations)
    address = address or settings.http_address
    if settings.authorizer != "none" and (address is None or is_loopback_host(address.host)):
        # Programs on this machine may log in, for the rights of their user.
        return LogInAuthentication(app, log_ins, is_required=False)
    return app


def disk_monitor(settings: Settings) -> DiskMonitor:
    """Create the disk monitor of a broker with these settings."""
    return DiskMonitor(settings.data_dir, settings.disk_free_warn_bytes)


def assemble(
    view: BrokerStats,
    loop_monitor: EventLoopMonitor,
    disk: DiskMonitor | None = None,
    context: ApiContext | None = None,
) -> Starlette:
    """Build the ASGI application for any `BrokerStats`, with the routes of `/v1` and `/registry` if there is a
    `context`. The monitors run as long as the application runs."""

    if disk is not None:
        view.on_disk_full_change(disk.request_query)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        loop_monitor.start()
        if disk is not None:
            disk.start()
        try:
            yield
        finally:
            loop_monitor.stop()
            if disk is not None:
                disk.stop()

    app = Starlette(
        routes=[
            *health.routes(view, loop_monitor, disk),
            *metrics.routes(view, loop_monitor, disk),
            *(v1.routes(context) if context is not None else ()),
            *(registry.routes(context) if context is not None else ()),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
