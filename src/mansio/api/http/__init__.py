"""HTTP protocol: one ASGI application on the broker's event loop."""

from mansio.api.http.app import build_app
from mansio.api.http.server import HttpServer

__all__ = ["HttpServer", "build_app"]
