"""The one ASGI application of a broker: the routers, and the error mapping they share.

A router is a function `(...) -> list[Route]` in a file of its own; this file only puts them together.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from mansio.api.http import health, metrics
from mansio.api.http.disk_watch import DiskWatch
from mansio.api.http.errors import EXCEPTION_HANDLERS
from mansio.api.http.loop_watch import LoopWatch
from mansio.api.http.service_view import ServiceView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mansio.api.http.source import BrokerView
    from mansio.broker.service import Service
    from mansio.config import Settings


def build_app(service: Service) -> Starlette:
    """The application for a running broker's service. Runs on the broker's loop."""
    watch = LoopWatch(service.scheduler, service.clock)
    view = ServiceView(service.settings)
    view.attach(service)
    return assemble(view, watch, disk_watch(service.settings))


def disk_watch(settings: Settings) -> DiskWatch:
    """The watch over the disk of a broker with these settings."""
    return DiskWatch(settings.data_dir, settings.disk_free_warn_bytes)


def assemble(view: BrokerView, watch: LoopWatch, disk: DiskWatch | None = None) -> Starlette:
    """The application over any view of a broker. The watches run while the application lives."""

    if disk is not None:
        view.on_room_change(disk.look_soon)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        watch.start()
        if disk is not None:
            disk.start()
        try:
            yield
        finally:
            watch.stop()
            if disk is not None:
                disk.stop()

    return Starlette(
        routes=[*health.routes(view, watch, disk), *metrics.routes(view, watch, disk)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
