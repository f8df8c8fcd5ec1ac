"""Platforms: where a broker can run, and the error elsewhere (docs/reference/platforms.md).

A broker runs on Linux and macOS. Clients also run on Windows.
"""

from __future__ import annotations

import sys

from mansio.errors import UnsupportedPlatform


def require_posix(what: str) -> None:
    """Raise `UnsupportedPlatform` on Windows. `what`: what does not run there, such as "a broker"."""
    if sys.platform == "win32":
        raise UnsupportedPlatform(
            f"{what} does not run on Windows: run it in WSL (Windows Subsystem for Linux); clients run on Windows"
        )
