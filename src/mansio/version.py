"""The one place the version is written; the build and the wire both read it."""

__version__ = "0.1.0"
