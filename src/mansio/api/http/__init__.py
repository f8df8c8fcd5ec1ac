"""HTTP protocol: one ASGI application on the broker's event loop."""
