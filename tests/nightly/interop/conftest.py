"""Fixtures of the interop tests, for clients that need Java, Maven or a browser."""

from system.interop.conftest import pytest_configure, unique

__all__ = ["pytest_configure", "unique"]
