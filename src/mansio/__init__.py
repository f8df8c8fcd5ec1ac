"""Mansio: a durable, distributed message queue in Python."""

from mansio.version import __version__

__all__ = ["__version__"]
